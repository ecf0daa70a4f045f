// Activations as integers, for up to eight sequences: x of a sequence and 32 to 128 k becomes an integer of 15 bits times a
// power of two, in two bytes: 256 high + low, high s8 and low u8, which are B of mma.sync.m16n8k32. Four-bit weights are
// its u8 A as they are: three integer operations make the operands of 8 k x 16 rows a lane, of BF16 seven and four more,
// and integer ones run at half rate on Hopper.
//
// Of eight sequences a lane (g, t) makes both bytes of sequence g, for two MMAs. Of four, column 2 s of B is the high byte of
// sequence s and column 2 s + 1 the low one, both s8 (the high byte rounded), so that one MMA does. The sums of both are the
// same integers. The largest x of a group lies in [2^13, 2^14) integers: what is larger than a 64th of it has its 8
// significant bits exactly, and the rest is off by at most 2^-14 of it.
#pragma once

#include <type_traits>

#include <cute/arch/mma_sm80.hpp>

#include "fragment.cuh"
#include "numeric.cuh"

namespace futransformer {

constexpr int kSplitBatch = 4;  // sequences whose two bytes share an MMA

// Which x a lane reads of each 32 k.
struct SplitFragment {
  CUTE_HOST_DEVICE static int sequence(int lane) { return lane / 8; }
  CUTE_HOST_DEVICE static int k(int lane) { return lane % 4 * 8; }
};

// Where sum `i` (0, 1) of a lane belongs in the 16 x 4 tile.
struct SplitSumFragment {
  static constexpr int kSums = 2;

  CUTE_HOST_DEVICE static int column(int lane, int i) { return lane / 4 + i * 8; }
  CUTE_HOST_DEVICE static int sequence(int lane, int) { return lane % 4; }
};

// A float that shows an integer of less than 22 bits in its low bits.
constexpr float kInteger = 12582912.f;  // 1.5 * 2^23

// Sums of m16n8k32, of products with bytes that are signed or not.
struct ByteSums {
  uint32_t d[4];

  template <bool Signed>
  CUTLASS_DEVICE void multiply(Words const& a, uint32_t const (&b)[2], ByteSums const& c) {
    using Mma = std::conditional_t<Signed, cute::SM80_16x8x32_S32U8S8S32_TN, cute::SM80_16x8x32_S32U8U8S32_TN>;
    Mma::fma(d[0], d[1], d[2], d[3], a.word[0], a.word[1], a.word[2], a.word[3], b[0], b[1], c.d[0], c.d[1], c.d[2],
             c.d[3]);
  }
};

// The x of `Batch` sequences (4 or 8) and Groups x 32 k, as a lane holds them, and their products with a row tile.
template <int Batch, int Groups>
struct SplitActivations {
  static constexpr bool kPaired = Batch == kSplitBatch;  // both bytes of a sequence in neighbouring columns of one B
  static constexpr int kBytes = kPaired ? 1 : 2;
  static constexpr int kColumns = kPaired ? 1 : 2;  // sequences whose sums a lane has, of rows g and g + 8

  uint32_t bytes[kBytes][Groups][2];  // k 0, 4, 1, 5 and 2, 6, 3, 7 of a lane's eight, as nibbles lie in a word
  float scale[kColumns];              // of a sequence's integers
  int32_t sum[kColumns];              // of a sequence's integers

  CUTLASS_DEVICE SplitActivations(Words const* x, int lane) {
    uint32_t most = x[0].word[0];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < 4 * Groups; ++i) most = larger_magnitude_bf16x2(most, x[i / 4].word[i % 4]);
    float largest = larger(fabsf(bf16_low(most)), fabsf(bf16_high(most)));
    largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, 2));

    // The power of two below it, or 2^-113. What is not finite makes the scale NaN, and so the sums.
    uint32_t const power = max(__float_as_uint(largest) & 0x7f800000u, 14u << 23);
    float const unit = __uint_as_float((13u + 2 * 127u << 23) - power);
    float const own = __fmaf_rn(largest, 0.f, __uint_as_float(power) * 0x1p-13f);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kColumns; ++i) scale[i] = __shfl_sync(0xffffffffu, own, (lane % 4 * kColumns + i) * (32 / Batch));

    // The low 16 bits of a value and kInteger are the integer; 128 more, and the upper byte is rounded to nearest.
    bool const rounded = kPaired && lane / 4 % 2 == 0;
    float const base = rounded ? kInteger + 128 : kInteger;
    ByteSums ones[kBytes] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < Groups; ++group) {
      uint32_t integer[8];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) {
        uint32_t const pair = x[group].word[i / 2];
        integer[i] = __float_as_uint(__fmaf_rn(i % 2 ? bf16_high(pair) : bf16_low(pair), unit, base));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t const even = __byte_perm(integer[2 * half], integer[2 * half + 4], 0x5410);
        uint32_t const odd = __byte_perm(integer[2 * half + 1], integer[2 * half + 5], 0x5410);
        bytes[0][group][half] = __byte_perm(even, odd, kPaired && !rounded ? 0x6420 : 0x7531);
        if constexpr (!kPaired) bytes[1][group][half] = __byte_perm(even, odd, 0x6420);
      }
      constexpr uint32_t kOnes = 0x01010101;
      multiply({{kOnes, kOnes, kOnes, kOnes}}, group, ones, ones);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kColumns; ++i) sum[i] = joined(ones, i);
  }

  // products = a x + start, of 32 k.
  CUTLASS_DEVICE void multiply(Words const& a, int group, ByteSums const (&start)[kBytes],
                               ByteSums (&products)[kBytes]) const {
    products[0].template multiply<true>(a, bytes[0][group], start[0]);
    if constexpr (!kPaired) products[1].template multiply<false>(a, bytes[1][group], start[1]);
  }

  // 256 high + low of sum i, as SplitSumFragment or SumFragment count them.
  CUTLASS_DEVICE static int32_t joined(ByteSums const (&products)[kBytes], int i) {
    if constexpr (kPaired) return int32_t(products[0].d[2 * i] * 256 + products[0].d[2 * i + 1]);
    if constexpr (!kPaired) return int32_t(products[0].d[i] * 256 + products[1].d[i]);
  }

  // Where products start, for sums of code - zero.
  CUTLASS_DEVICE void lower(int32_t zero, ByteSums (&start)[kBytes]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      start[0].d[i] = 0;
      if (!kPaired || i % 2) start[kBytes - 1].d[i] = uint32_t(-zero * sum[i % kColumns]);
    }
  }
};

}  // namespace futransformer
