// The row kernels at the two ends of a model: gather rows of a table with their sums of squares, and argmax of logits, or of
// the best of their parts.
// One block a row; every reduction runs in a fixed order.
#pragma once

#include <cstdint>

#include "candidate.cuh"
#include "dependent_launch.cuh"
#include "epilogue.cuh"
#include "numeric.cuh"

namespace futransformer {

// out[i] = table[indices[i]], sumsq_out[i] = its sum of squares; and of the same row, as far as they are given, residual[i]
// in float32, and what `Quantise` (epilogue_fp8.cuh: StoreFp8) stores. With a `gain` out[i], and it alone, is the row times
// that. Columns % 8 == 0, rows 16-byte aligned.
template <int Columns, int Threads>
struct GatherRows {
  static constexpr int kVectors = Columns / 8;

  template <class Quantise = Chain<>>
  CUTLASS_DEVICE static void run(bf16 const* table, int table_rows, int const* indices, bf16* out, float* sumsq_out,
                                 float* residual = nullptr, Quantise const& quantise = {},
                                 float const* gain = nullptr) {
    allow_next_kernel();
    wait_for_previous_kernel();
    quantise.prepare();
    size_t const row = blockIdx.x;
    int const index = indices[row];
    bool const inside = index >= 0 && index < table_rows;
    // An index outside the table gives a row of NaN: visible in every later result, never a wrong answer.
    uint32_t const nan = pack_bf16x2(NAN, NAN);
    uint4 const* source = reinterpret_cast<uint4 const*>(table + size_t(inside ? index : 0) * Columns);
    uint4* target = reinterpret_cast<uint4*>(out + row * Columns);

    float sum = 0.f;
    for (int vector = threadIdx.x; vector < kVectors; vector += Threads) {
      uint4 const word = inside ? source[vector] : make_uint4(nan, nan, nan, nan);
      if (!gain) target[vector] = word;
      float values[8];
      unpack_bf16x8(word, values);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) sum = fmaf(values[i], values[i], sum);
      if (residual) store_f32x8(residual + row * Columns + 8 * vector, values);
      quantise.apply(Nothing{}, Nothing{}, int(row), 8 * vector, values);
      if (gain) {
        float4 const* const of_columns = reinterpret_cast<float4 const*>(gain) + 2 * vector;
        float4 const factors[2] = {of_columns[0], of_columns[1]};
        float each[8];
        unpack_f32x8(factors, each);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 8; ++i) values[i] *= each[i];
        store_bf16x8(out + row * Columns + 8 * vector, values);
      }
    }
    quantise.conclude();

    __shared__ float warp_sums[Threads / 32];
    sum = sum_over_lanes<32>(sum);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      float total = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int warp = 0; warp < Threads / 32; ++warp) total += warp_sums[warp];
      sumsq_out[row] = total;
    }
  }
};

// out[i] = the lowest index of the largest of logits[i, :Columns]; a NaN is larger than nothing, a row of NaN gives 0.
template <int Columns, int Threads>
struct Argmax {
  CUTLASS_DEVICE static void run(float const* logits, int logits_stride, int* out) {
    allow_next_kernel();
    wait_for_previous_kernel();
    float const* row = logits + size_t(blockIdx.x) * logits_stride;
    Candidate best = Candidate::none();

    // Four at a time from the first 16-byte boundary on; the ends singly.
    int const misaligned = reinterpret_cast<uintptr_t>(row) / sizeof(float) % 4;
    int const head = min((4 - misaligned) % 4, Columns);
    int const vectors = (Columns - head) / 4;
    if (threadIdx.x < head) best.consider(row[threadIdx.x], threadIdx.x);
    float4 const* body = reinterpret_cast<float4 const*>(row + head);
#pragma unroll 8
    for (int vector = threadIdx.x; vector < vectors; vector += Threads) {
      float4 const values = body[vector];
      int const index = head + 4 * vector;
      best.consider(values.x, index);
      best.consider(values.y, index + 1);
      best.consider(values.z, index + 2);
      best.consider(values.w, index + 3);
    }
    int const tail = head + 4 * vectors + threadIdx.x;
    if (tail < Columns) best.consider(row[tail], tail);

    int const index = best.reduce_over_block<Threads / 32>();
    if (threadIdx.x == 0) out[blockIdx.x] = index;
  }
};

// The same of what others have found: out[i] = the index of the best of best[i, :parts].
template <int Threads>
struct ArgmaxParts {
  CUTLASS_DEVICE static void run(Candidate const* best, int parts, int* out) {
    allow_next_kernel();
    wait_for_previous_kernel();
    Candidate const* const row = best + size_t(blockIdx.x) * parts;
    Candidate found = Candidate::none();
#pragma unroll 4
    for (int part = threadIdx.x; part < parts; part += Threads) {
      Candidate const other = row[part];
      found.consider(other.value, other.index);
    }
    int const index = found.reduce_over_block<Threads / 32>();
    if (threadIdx.x == 0) out[blockIdx.x] = index;
  }
};

}  // namespace futransformer
