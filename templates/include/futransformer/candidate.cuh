// The best of several values: the largest, at the lowest index among equals. NaN is larger than nothing.
#pragma once

#include <climits>

#include <cutlass/cutlass.h>

namespace futransformer {

struct alignas(8) Candidate {
  float value;
  int index;

  // Loses to every number, -inf included.
  CUTLASS_DEVICE static Candidate none() { return {-INFINITY, INT_MAX}; }

  // Total among numbers, so the order of comparison does not matter.
  CUTLASS_DEVICE void consider(float other_value, int other_index) {
    if (other_value > value || (other_value == value && other_index < index)) {
      value = other_value;
      index = other_index;
    }
  }

  // Each of `Lanes` consecutive lanes gets the best of all.
  template <int Lanes>
  CUTLASS_DEVICE void reduce_over_lanes() {
    CUTLASS_PRAGMA_UNROLL
    for (int distance = Lanes / 2; distance > 0; distance /= 2) {
      float const other_value = __shfl_xor_sync(0xffffffffu, value, distance);
      int const other_index = __shfl_xor_sync(0xffffffffu, index, distance);
      consider(other_value, other_index);
    }
  }

  // Every thread of a block of `Warps` warps brings one; the first gets the index of the best, of no number 0.
  template <int Warps>
  CUTLASS_DEVICE int reduce_over_block() {
    static_assert(Warps <= 32, "one warp reduces what the warps found");
    __shared__ Candidate warp_best[Warps];
    reduce_over_lanes<32>();
    if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = *this;
    __syncthreads();
    if (threadIdx.x < 32) {
      *this = threadIdx.x < Warps ? warp_best[threadIdx.x] : none();
      reduce_over_lanes<32>();
    }
    return index == INT_MAX ? 0 : index;
  }
};

}  // namespace futransformer
