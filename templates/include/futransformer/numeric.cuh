// Conversions and 16-byte global accesses that the kernels share.
#pragma once

#include <cstdint>

#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>

namespace futransformer {

using bf16 = cutlass::bfloat16_t;
using e4m3 = cutlass::float_e4m3_t;
constexpr float kLargestE4m3 = 448.f;

// threadIdx.x, of which the compiler does not know that it is always the same: what is computed from it in a loop stays in the
// loop, where it would else be computed ahead for all phases of a kernel, and spilled.
CUTLASS_DEVICE int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Two floats to packed BF16, round to nearest even; `low` lands in the lower half.
CUTLASS_DEVICE uint32_t pack_bf16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

CUTLASS_DEVICE float bf16_low(uint32_t packed) { return __uint_as_float(packed << 16); }
CUTLASS_DEVICE float bf16_high(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

// a - b of two BF16 pairs, each rounded to nearest even.
CUTLASS_DEVICE uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
  uint32_t difference;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}

// a b of two BF16 pairs, each rounded to nearest even.
CUTLASS_DEVICE uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// The larger magnitude of two BF16 pairs, in either half, with a sign that means nothing. NaN stays NaN.
CUTLASS_DEVICE uint32_t larger_magnitude_bf16x2(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// The larger of two floats. NaN stays NaN.
CUTLASS_DEVICE float larger(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// The two float16 values of a word.
CUTLASS_DEVICE float2 unpack_halves(uint32_t packed) {
  float2 values;
  asm("{.reg .f16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;}"
      : "=f"(values.x), "=f"(values.y)
      : "r"(packed));
  return values;
}

// Two floats to packed float16, round to nearest even; `low` lands in the lower half.
CUTLASS_DEVICE uint32_t pack_halves(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// 1 / x of a normal x, off by a unit in the last place at most.
CUTLASS_DEVICE float reciprocal_approx(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// Eight BF16 values, one 16-byte access.
CUTLASS_DEVICE void unpack_bf16x8(uint4 const& word, float (&values)[8]) {
  uint32_t const halves[4] = {word.x, word.y, word.z, word.w};
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = bf16_low(halves[i]);
    values[2 * i + 1] = bf16_high(halves[i]);
  }
}

CUTLASS_DEVICE uint4 pack_bf16x8(float const (&values)[8]) {
  return make_uint4(pack_bf16x2(values[0], values[1]), pack_bf16x2(values[2], values[3]),
                    pack_bf16x2(values[4], values[5]), pack_bf16x2(values[6], values[7]));
}

// One instruction, said so: where only one branch of several stores, nvcc makes four of 4 bytes of a plain assignment.
CUTLASS_DEVICE void store_bf16x8(bf16* target, float const (&values)[8]) {
  __stcg(reinterpret_cast<uint4*>(target), pack_bf16x8(values));
}

// The same to keep, here and now: volatile, because nvcc would put it off to where the words are used, and hold eight floats
// until then; and not the words of a store, which stand in four registers in a row.
CUTLASS_DEVICE uint4 keep_bf16x8(float const (&values)[8]) {
  uint32_t words[4];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4; ++i) {
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(values[2 * i + 1]), "f"(values[2 * i]));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Four floats to packed E4M3, round to nearest even; beyond the largest code they saturate, NaN stays NaN.
CUTLASS_DEVICE uint32_t pack_e4m3x4(float a, float b, float c, float d) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return uint32_t(high) << 16 | low;
}

// Eight E4M3 values, one 8-byte access.
CUTLASS_DEVICE void store_e4m3x8(e4m3* target, float const (&values)[8]) {
  __stcg(reinterpret_cast<uint2*>(target), make_uint2(pack_e4m3x4(values[0], values[1], values[2], values[3]),
                                                     pack_e4m3x4(values[4], values[5], values[6], values[7])));
}

// Eight floats, two 16-byte accesses.
CUTLASS_DEVICE void unpack_f32x8(float4 const (&words)[2], float (&values)[8]) {
  float const unpacked[8] = {words[0].x, words[0].y, words[0].z, words[0].w,
                             words[1].x, words[1].y, words[1].z, words[1].w};
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 8; ++i) values[i] = unpacked[i];
}

CUTLASS_DEVICE void store_f32x8(float* target, float const (&values)[8]) {
  float4* const fours = reinterpret_cast<float4*>(target);
  fours[0] = make_float4(values[0], values[1], values[2], values[3]);
  fours[1] = make_float4(values[4], values[5], values[6], values[7]);
}

// 2^x in one special-function instruction; results below 2^-126 are zero, 2^-inf included.
CUTLASS_DEVICE float exp2_flush(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// tanh in one special-function instruction, to about 2^-11.
CUTLASS_DEVICE float tanh_approx(float x) {
  float result;
  asm("tanh.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Sum over the aligned group of `Lanes` consecutive lanes, the same bits in every lane and on every run.
template <int Lanes>
CUTLASS_DEVICE float sum_over_lanes(float value) {
  CUTLASS_PRAGMA_UNROLL
  for (int distance = Lanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

}  // namespace futransformer
