// Where prefill attention's finished output goes: BF16, or FP8 at a delayed scale.
//
// A lane of a quad holds two columns of each group of eight of its rows: 8 j + 2 (lane % 4) + {0, 1}. The quad transposes
// them, so that each lane stores sixteen bytes and the quad whole sectors.
#pragma once

#include <cstdint>

#include "epilogue_fp8.cuh"
#include "numeric.cuh"

namespace futransformer {

// Transpose the 4 x 4 matrix that a quad of lanes holds, one row of words each.
CUTLASS_DEVICE void transpose_over_quad(uint32_t (&words)[4]) {
  CUTLASS_PRAGMA_UNROLL
  for (int distance = 1; distance <= 2; distance *= 2) {
    bool const upper = threadIdx.x & distance;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      uint32_t& low = words[i];
      uint32_t& high = words[i + distance];
      uint32_t const received = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
      (upper ? low : high) = received;
    }
  }
}

template <int HeadDim>
struct AttentionOutput {
  bf16* out;  // [rows, heads, HeadDim]

  CUTLASS_DEVICE void prepare() const {}
  CUTLASS_DEVICE void conclude() const {}

  // A row of a head, x factor; `columns(i)` is the lane's i-th. All lanes of the warp; nothing is written where not
  // `stored`.
  template <class Columns>
  CUTLASS_DEVICE void store(int64_t head_of_row, bool stored, float factor, Columns const& columns) const {
    uint4* const target = reinterpret_cast<uint4*>(out + head_of_row * HeadDim) + threadIdx.x % 4;
    // Four groups of eight columns at a time: a lane has two columns of each, and wants all of one.
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < HeadDim / 32; ++group) {
      uint32_t words[4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        int const column = 2 * (4 * group + i);
        words[i] = pack_bf16x2(columns(column) * factor, columns(column + 1) * factor);
      }
      transpose_over_quad(words);
      if (stored) target[4 * group] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

template <int HeadDim>
struct AttentionFp8Output : Fp8Scale {
  e4m3* out;  // [rows, heads, HeadDim]

  CUTLASS_DEVICE AttentionFp8Output(e4m3* target, float const* of_codes, float* maximum, unsigned* count)
      : Fp8Scale(of_codes, maximum, count), out(target) {}

  // See AttentionOutput.
  template <class Columns>
  CUTLASS_DEVICE void store(int64_t head_of_row, bool stored, float factor, Columns const& columns) const {
    uint4* const target = reinterpret_cast<uint4*>(out + head_of_row * HeadDim) + threadIdx.x % 4;
    float const per_code = factor * per_scale;
    // Eight groups of eight columns at a time, a word of a lane's from each two: the lane wants all of a pair.
    CUTLASS_PRAGMA_UNROLL
    for (int pairs = 0; pairs < HeadDim / 64; ++pairs) {
      float scaled[16];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 16; ++i) scaled[i] = columns(16 * pairs + i) * per_code;
      if (stored) observe(scaled);
      uint32_t words[4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        words[i] = pack_e4m3x4(scaled[4 * i], scaled[4 * i + 1], scaled[4 * i + 2], scaled[4 * i + 3]);
      }
      transpose_over_quad(words);
      // Word t brings columns 2 t + {0, 1} of the pair's first group, and of its second.
      if (stored) {
        target[4 * pairs] = make_uint4(low_halves(words[0], words[1]), low_halves(words[2], words[3]),
                                       high_halves(words[0], words[1]), high_halves(words[2], words[3]));
      }
    }
  }

 private:
  CUTLASS_DEVICE static uint32_t low_halves(uint32_t first, uint32_t second) { return (first & 0xffffu) | second << 16; }
  CUTLASS_DEVICE static uint32_t high_halves(uint32_t first, uint32_t second) {
    return first >> 16 | (second & 0xffff0000u);
  }
};

}  // namespace futransformer
