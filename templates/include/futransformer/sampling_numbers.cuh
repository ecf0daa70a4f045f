// Probabilities and noise of sampling, specified to the bit: what futransformer/sampling.py computes, by the same
// operations in the same order, each rounded by itself (the intrinsics keep the compiler from fusing them).
#pragma once

#include <cstdint>

#include <cutlass/cutlass.h>

namespace futransformer {

constexpr int kStepBits = 18;                     // log2 of a probability is counted in steps of 2^-18
constexpr uint32_t kOutOfReach = (1u << 24) - 1;  // steps from which no noise lifts a token
constexpr int kMassBits = 30;                     // the likeliest token's mass is 2^30
constexpr float kLog2E = 1.44269504088896341f;
constexpr uint32_t kRootHalf = 0x3f3504f3;  // the bits of sqrt(1/2)

// How far log2 of a token's probability lies below the likeliest's, rounded down to whole steps; `factor` is log2(e) / T.
CUTLASS_DEVICE uint32_t steps_below(float logit, float largest, float factor) {
  float const steps = __fmul_rn(__fmul_rn(__fsub_rn(logit, largest), factor), -float(1 << kStepBits));
  if (logit == largest) return 0;
  return steps < float(kOutOfReach) ? uint32_t(steps) : kOutOfReach;  // NaN is out of reach
}

// The token's probability in units of 2^-30 of the likeliest's, rounded down.
CUTLASS_DEVICE uint32_t mass_of(uint32_t steps) {
  uint32_t const halvings = (steps + (1u << kStepBits) - 1) >> kStepBits;
  float const fraction = __fmul_rn(float((halvings << kStepBits) - steps), 1.f / (1 << kStepBits));
  constexpr float kExp2[] = {1.f,           0.693151295f,  0.240164444f,
                             0.0557999127f, 0.00901702885f, 0.00186713075f};  // 2^fraction = 1 + fraction (..)
  float power = kExp2[5];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 4; i >= 0; --i) power = __fadd_rn(__fmul_rn(power, fraction), kExp2[i]);
  return halvings < 32 ? uint32_t(__fmul_rn(power, float(1 << kMassBits))) >> halvings : 0;
}

// log2(1 + fraction), of sqrt(1/2) - 1 .. sqrt(2) - 1.
CUTLASS_DEVICE float log2_of_one_plus(float fraction) {
  constexpr float kLog2[] = {1.4426949f,  -0.721352458f, 0.480931163f, -0.360263467f,
                             0.28686887f, -0.248322859f, 0.235709682f, -0.149733156f};
  float power = kLog2[7];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 6; i >= 0; --i) power = __fadd_rn(__fmul_rn(power, fraction), kLog2[i]);
  return __fmul_rn(power, fraction);
}

// log2 of a positive normal number.
CUTLASS_DEVICE float log2_of(float value) {
  uint32_t const bits = __float_as_uint(value);
  int const exponent = int(bits - kRootHalf) >> 23;
  float const mantissa = __uint_as_float(bits - (uint32_t(exponent) << 23));
  return __fadd_rn(log2_of_one_plus(__fsub_rn(mantissa, 1.f)), float(exponent));
}

// -log2(-log2 u), u = n / 2^32 of an odd n. Near 1 it is taken as 1 less (2^32 - n), which would be rounded away.
CUTLASS_DEVICE float gumbel_of(uint32_t random) {
  uint32_t const n = random | 1;
  float const log2_u = n > 0xb504f333u ? log2_of_one_plus(__fmul_rn(float(0u - n), -0x1p-32f))
                                       : log2_of(__fmul_rn(float(n), 0x1p-32f));
  return -log2_of(-log2_u);
}

// No less than that, by half at least: -log2(1 - m / 2^32) is more than 1.44 m / 2^32.
CUTLASS_DEVICE float most_gumbel(uint32_t random) { return float(__clz(int(0u - (random | 1))) + 1); }

// Philox4x32-10: the 32 bits of four tokens, by counting.
CUTLASS_DEVICE void philox(uint32_t quad, uint32_t position, uint64_t seed, uint32_t (&random)[4]) {
  uint32_t a = quad, b = position, c = 0, d = 0, low_key = uint32_t(seed), high_key = uint32_t(seed >> 32);
  CUTLASS_PRAGMA_UNROLL
  for (int round = 0; round < 10; ++round) {
    uint64_t const first = uint64_t(a) * 0xd2511f53u, second = uint64_t(c) * 0xcd9e8d57u;
    a = uint32_t(second >> 32) ^ b ^ low_key, b = uint32_t(second);
    c = uint32_t(first >> 32) ^ d ^ high_key, d = uint32_t(first);
    low_key += 0x9e3779b9u, high_key += 0xbb67ae85u;
  }
  random[0] = a, random[1] = b, random[2] = c, random[3] = d;
}

}  // namespace futransformer
