// Online softmax over the rows of a wgmma accumulator.
//
// A thread holds two rows of its warpgroup's 64, eight apart, and of each row the columns 8 j + 2 (lane % 4) + {0, 1};
// the four lanes of a quad hold a whole row between them. The running maximum is agreed on by the quad at every tile;
// the running sum stays each lane's own until the end, when one exchange completes it.
#pragma once

#include <cmath>

#include <cute/tensor.hpp>

#include "numeric.cuh"

namespace futransformer {

CUTLASS_DEVICE float max_over_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
}

// Probabilities are taken relative to the highest score so far, so that the largest is exactly 1 and rounds to BF16
// without error: a row that attends to few keys owes its accuracy to that (docs/notebook/attention_prefill.md).
struct OnlineSoftmax {
  static constexpr int kRows = 2;

  float scale_log2;  // softmax_scale log2(e): exp(scale s) = 2^(scale_log2 s)
  float max[kRows] = {-INFINITY, -INFINITY};
  float sum[kRows] = {0.f, 0.f};

  CUTLASS_DEVICE explicit OnlineSoftmax(float softmax_scale) : scale_log2(softmax_scale * float(M_LOG2E)) {}

  // Begin other rows.
  CUTLASS_DEVICE void reset() {
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      max[row] = -INFINITY;
      sum[row] = 0.f;
    }
  }

  // Turn a tile of scores (rows, columns) into probabilities; `correction` is the factor by which everything summed
  // before this tile shrinks, exactly 1 where the maximum stays. While a row has seen nothing but -inf its
  // probabilities are zero, where -inf - -inf would give NaN.
  template <class Tensor>
  CUTLASS_DEVICE void update(Tensor& scores, float (&correction)[kRows]) {
    using namespace cute;
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float highest = scores(row, 0);
      CUTLASS_PRAGMA_UNROLL
      for (int column = 1; column < size<1>(scores); ++column) highest = fmaxf(highest, scores(row, column));
      highest = fmaxf(max[row], max_over_quad(highest));
      float const base = highest == -INFINITY ? 0.f : highest;
      correction[row] = exp2_flush((max[row] - base) * scale_log2);
      max[row] = highest;

      float const scaled = base * scale_log2;
      float partial = sum[row] * correction[row];
      CUTLASS_PRAGMA_UNROLL
      for (int column = 0; column < size<1>(scores); ++column) {
        scores(row, column) = exp2_flush(fmaf(scores(row, column), scale_log2, -scaled));
        partial += scores(row, column);
      }
      sum[row] = partial;
    }
  }
};

// What the finished output of a row is multiplied by, from each lane's sum; zero for a row that saw no key.
CUTLASS_DEVICE float inverse_of_quad_sum(float sum) {
  float const total = sum_over_lanes<4>(sum);
  return total > 0.f ? __fdividef(1.f, total) : 0.f;
}

}  // namespace futransformer
