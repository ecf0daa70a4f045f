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

// Probabilities are taken relative to a reference of each row, 2^(scale s - reference), which follows the row's maximum
// only when that has grown by more than `Threshold` powers of two: until then they are at most 2^Threshold, which
// neither their BF16 rounding, being relative, nor the float32 sums notice. What was summed before is then left alone.
template <int Threshold>
struct OnlineSoftmax {
  static constexpr int kRows = 2;

  float scale_log2;  // softmax_scale log2(e): exp(scale s) = 2^(scale_log2 s)
  float reference[kRows] = {-INFINITY, -INFINITY};  // a score
  float sum[kRows] = {0.f, 0.f};

  CUTLASS_DEVICE explicit OnlineSoftmax(float softmax_scale) : scale_log2(softmax_scale * float(M_LOG2E)) {}

  // Begin other rows.
  CUTLASS_DEVICE void reset() {
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      reference[row] = -INFINITY;
      sum[row] = 0.f;
    }
  }

  // Turn a tile of scores (rows, columns) into probabilities relative to the reference; `correction` is the factor by
  // which everything summed before this tile shrinks, exactly 1 where the reference stays. While a row has seen nothing
  // but -inf its probabilities are zero, where -inf - -inf would give NaN.
  template <class Tensor>
  CUTLASS_DEVICE void update(Tensor& scores, float (&correction)[kRows]) {
    using namespace cute;
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float highest = scores(row, 0);
      CUTLASS_PRAGMA_UNROLL
      for (int column = 1; column < size<1>(scores); ++column) highest = fmaxf(highest, scores(row, column));
      highest = max_over_quad(highest);
      bool const follows = (highest - reference[row]) * scale_log2 > float(Threshold);
      float const chosen = follows ? highest : reference[row];
      float const base = chosen == -INFINITY ? 0.f : chosen;
      correction[row] = follows ? exp2_flush((reference[row] - base) * scale_log2) : 1.f;
      reference[row] = chosen;

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
