// A page of K or V of one key/value head in shared memory, as operands of decode attention's products: BF16, or E4M3.
//
// `load` fetches a page; `keys` and `values` make operand A (m16n8k16) of kLoadSteps steps of sixteen features from a
// warp's sixteen tokens, in one ldmatrix whose rows the lanes name: row lane % 16 of K, `value_token` of V. Within a step the features of an operand may stand in any order, as long as
// the query's (K) and the result's (V) do: `query`, `kFeature` and `kOtherFeature` say which.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/numeric_types.h>

#include "e4m3_operand.cuh"
#include "numeric.cuh"

namespace futransformer {

template <class Element, int HeadDim, int PageSize>
struct DecodePages;

// Boxes of PageSize rows by 64 columns, 128-byte swizzle, of [rows, HeadDim].
template <int HeadDim, int PageSize>
struct DecodePages<bf16, HeadDim, PageSize> {
  static constexpr int kBytes = PageSize * HeadDim * 2;
  static constexpr int kBoxColumns = 64;
  static constexpr int kBoxBytes = PageSize * kBoxColumns * 2;
  static constexpr int kLoadSteps = 1;
  static constexpr int kFeature = 1;       // row g of O^T is feature kFeature g of its step,
  static constexpr int kOtherFeature = 8;  // row g + 8 this plus kOtherFeature
  static_assert(HeadDim % kBoxColumns == 0, "a head is a whole number of swizzled boxes");

  CUTLASS_DEVICE static void load(CUtensorMap const* pages, uint64_t* barrier, uint64_t hint, char* page, int row) {
    for (int box = 0; box < HeadDim / kBoxColumns; ++box) {
      cute::SM90_TMA_LOAD_2D::copy(pages, barrier, hint, page + box * kBoxBytes, box * kBoxColumns, row);
    }
  }

  // Operand B of S, or zero: of a step's features {0, 1} and {8, 9} from kQueryFeatures (lane % 4) on.
  static constexpr int kQueryFeatures = 2;
  CUTLASS_DEVICE static void query(bf16 const* features, bool present, uint32_t (&b)[2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t const* pair = reinterpret_cast<uint32_t const*>(features + 8 * half);
      b[half] = present ? *pair : 0;
    }
  }

  // Operand A of S in four 8x8 matrices: (tokens 0-7, 8-15) x (features 0-7, 8-15), tokens first.
  CUTLASS_DEVICE static void keys(char const* page, int token, int step, int lane, uint32_t (&k)[1][4]) {
    cute::SM75_U32x4_LDSM_N::copy(chunk_at(page, token, step, lane / 16), k[0][0], k[0][1], k[0][2], k[0][3]);
  }

  // Operand A of O^T: the same four matrices of V, transposed as they are loaded, features first. Words hold two tokens.
  CUTLASS_DEVICE static int value_token(int lane) { return lane % 8 + lane / 16 * 8; }
  CUTLASS_DEVICE static void values(char const* page, int token, int step, int lane, uint32_t const (&mask)[2],
                                    uint32_t (&v)[1][4]) {
    cute::SM75_U16x8_LDSM_T::copy(chunk_at(page, token, step, lane / 8 % 2), v[0][0], v[0][1], v[0][2], v[0][3]);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) v[0][i] &= mask[i / 2];
  }

 private:
  // Sixteen bytes: row `token`, features 16 * step + 8 * half and the next seven.
  CUTLASS_DEVICE static cute::uint128_t const& chunk_at(char const* page, int token, int step, int half) {
    char const* box = page + step / 4 * kBoxBytes;
    return *reinterpret_cast<cute::uint128_t const*>(box + token * 128 + (step % 4 * 32 ^ (half ^ token % 8) * 16));
  }
};

// One box a page, of [rows * HeadDim / 128, 128 codes], 128-byte swizzle: with 64 features, two tokens a row.
//
// A word of ldmatrix holds two pairs of codes, and the codes of a step's features 2 j and 2 j + 1 stand together. Of K a
// lane receives features 4 (lane % 4) + {0 .. 3} of a token: {0, 2} become its first two of the operand, {1, 3} its
// last two. Of V, transposed in units of two codes, it receives features 2 (lane / 4) + {0, 1} of two tokens: rows
// lane / 4 and lane / 4 + 8 of the operand.
template <int HeadDim, int PageSize>
struct DecodePages<e4m3, HeadDim, PageSize> {
  static constexpr int kBytes = PageSize * HeadDim;
  static constexpr int kLoadSteps = 2;
  static constexpr int kFeature = 2;
  static constexpr int kOtherFeature = 1;
  static_assert(128 % HeadDim == 0, "a row of 128 codes is a whole number of tokens");

  CUTLASS_DEVICE static void load(CUtensorMap const* pages, uint64_t* barrier, uint64_t hint, char* page, int row) {
    cute::SM90_TMA_LOAD_2D::copy(pages, barrier, hint, page, 0, row / (128 / HeadDim));
  }

  static constexpr int kQueryFeatures = 4;
  CUTLASS_DEVICE static void query(bf16 const* features, bool present, uint32_t (&b)[2]) {
    uint2 four = {0, 0};
    if (present) four = *reinterpret_cast<uint2 const*>(features);
    b[0] = (four.x & 0xffffu) | four.y << 16;
    b[1] = four.x >> 16 | (four.y & 0xffff0000u);
  }

  CUTLASS_DEVICE static void keys(char const* page, int token, int load, int lane, uint32_t (&k)[2][4]) {
    uint32_t codes[4];
    cute::SM75_U32x4_LDSM_N::copy(chunk_at(page, token, load, lane), codes[0], codes[1], codes[2], codes[3]);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      k[i / 2][i % 2] = lower_e4m3_operands(codes[i]);
      k[i / 2][i % 2 + 2] = upper_e4m3_operands(codes[i]);
    }
  }

  CUTLASS_DEVICE static int value_token(int lane) { return lane % 16; }
  CUTLASS_DEVICE static void values(char const* page, int token, int load, int lane, uint32_t const (&mask)[2],
                                    uint32_t (&v)[2][4]) {
    uint32_t codes[4];
    cute::SM75_U16x8_LDSM_T::copy(chunk_at(page, token, load, lane), codes[0], codes[1], codes[2], codes[3]);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t const present = codes[i] & mask[i % 2];
      v[i / 2][i % 2 * 2] = lower_e4m3_operands(present);
      v[i / 2][i % 2 * 2 + 1] = upper_e4m3_operands(present);
    }
  }

 private:
  // A lane's row of four matrices: (tokens 0-7, 8-15) x (step 2 load, 2 load + 1), tokens first, sixteen codes a row.
  CUTLASS_DEVICE static cute::uint128_t const& chunk_at(char const* page, int token, int load, int lane) {
    int const offset = token * HeadDim + (2 * load + lane / 16) * 16;
    return *reinterpret_cast<cute::uint128_t const*>(page + (offset ^ (offset / 128 % 8) * 16));
  }
};

}  // namespace futransformer
