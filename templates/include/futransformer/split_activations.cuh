// Activations as integers, for up to four sequences: x of a sequence and 32 to 128 k becomes 256 high + low times a power
// of two, high and low s8, which are two columns of B of mma.sync.m16n8k32. Four-bit weights are its u8 A as they are: three
// integer operations make the operands of 32 k x 16 rows, of BF16 fourteen, and these run at half rate on Hopper.
//
// Column 2 s of B is the high part of sequence s, column 2 s + 1 the low part, so lane (g, t) makes its bytes itself, and
// has both parts' sums of sequence t. The largest x of a group lies in [2^13, 2^14) integers: what is larger than a 64th of it
// has its 8 significant bits exactly, and the rest is off by at most 2^-14 of it.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "fragment.cuh"
#include "numeric.cuh"

namespace futransformer {

constexpr int kSplitBatch = 4;  // sequences

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

// A float that shows an integer of less than 22 bits in its low bits: what MMAs add there, it is then more in float32.
constexpr float kInteger = 12582912.f;  // 1.5 * 2^23
constexpr uint32_t kIntegerBits = 0x4b400000;

// D = A B + D of m16n8k32.
struct ByteSums {
  uint32_t d[4] = {kIntegerBits, kIntegerBits, kIntegerBits, kIntegerBits};

  CUTLASS_DEVICE void multiply(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t const (&b)[2]) {
    cute::SM80_16x8x32_S32U8S8S32_TN::fma(d[0], d[1], d[2], d[3], a0, a1, a2, a3, b[0], b[1], d[0], d[1], d[2], d[3]);
  }

  // 256 high + low, of row g (half 0) or g + 8.
  CUTLASS_DEVICE float joined(int half) const {
    return __fmaf_rn(__uint_as_float(d[2 * half]) - kInteger, 256.f, __uint_as_float(d[2 * half + 1]) - kInteger);
  }
};

// A sequence's x of Groups x 32 k.
template <int Groups>
struct SplitActivations {
  uint32_t bytes[Groups][2];  // this lane's column: k 0, 4, 1, 5 and 2, 6, 3, 7 of its eight, as nibbles lie in a word
  float scale;                // of sequence t's integers
  float sum;                  // of sequence t's integers

  CUTLASS_DEVICE explicit SplitActivations(Words const* x, int lane) {
    uint32_t most = x[0].word[0];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < 4 * Groups; ++i) most = larger_magnitude_bf16x2(most, x[i / 4].word[i % 4]);
    float largest = larger(fabsf(bf16_low(most)), fabsf(bf16_high(most)));
    largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, 2));

    // The power of two below it, or 2^-113. What is not finite makes the scale NaN, and so the sums.
    uint32_t const power = max(__float_as_uint(largest) & 0x7f800000u, 14u << 23);
    float const unit = __uint_as_float((13u + 2 * 127u << 23) - power);
    scale = __shfl_sync(0xffffffffu, __fmaf_rn(largest, 0.f, __uint_as_float(power) * 0x1p-13f), lane % 4 * 8);

    // The low 16 bits of a value and kInteger are the integer; 128 more, and the upper byte is rounded to nearest.
    bool const high = lane / 4 % 2 == 0;
    float const base = high ? kInteger + 128 : kInteger;
    uint32_t const byte = high ? 0x51 : 0x40;
    ByteSums sums;
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
        uint32_t const even = __byte_perm(integer[2 * half], integer[2 * half + 4], byte);
        uint32_t const odd = __byte_perm(integer[2 * half + 1], integer[2 * half + 5], byte);
        bytes[group][half] = __byte_perm(even, odd, 0x5410);
      }
      constexpr uint32_t kOnes = 0x01010101;
      sums.multiply(kOnes, kOnes, kOnes, kOnes, bytes[group]);
    }
    sum = sums.joined(0);
  }
};

}  // namespace futransformer
