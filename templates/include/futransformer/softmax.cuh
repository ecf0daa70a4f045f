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

struct OnlineSoftmax {
  static constexpr int kRows = 2;

  float scale_log2;  // softmax_scale log2(e): exp(scale s) = 2^(scale_log2 s)
  float maximum[kRows] = {-INFINITY, -INFINITY};
  float sum[kRows] = {0.f, 0.f};

  CUTLASS_DEVICE explicit OnlineSoftmax(float softmax_scale) : scale_log2(softmax_scale * float(M_LOG2E)) {}

  // Turn a tile of scores (rows, columns) into probabilities relative to the running maximum; `correction` is the
  // factor by which everything summed before this tile shrinks. With MayHideRows a row's scores may all be -inf so far:
  // its probabilities are then zero, where -inf - -inf would give NaN.
  template <bool MayHideRows, class Tensor>
  CUTLASS_DEVICE void update(Tensor& scores, float (&correction)[kRows]) {
    using namespace cute;
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float highest = maximum[row];
      CUTLASS_PRAGMA_UNROLL
      for (int column = 0; column < size<1>(scores); ++column) highest = fmaxf(highest, scores(row, column));
      highest = max_over_quad(highest);
      float const scaled = MayHideRows && highest == -INFINITY ? 0.f : highest * scale_log2;
      correction[row] = exp2_flush(maximum[row] * scale_log2 - scaled);
      maximum[row] = highest;

      float partial = sum[row] * correction[row];
      CUTLASS_PRAGMA_UNROLL
      for (int column = 0; column < size<1>(scores); ++column) {
        scores(row, column) = exp2_flush(fmaf(scores(row, column), scale_log2, -scaled));
        partial += scores(row, column);
      }
      sum[row] = partial;
    }
  }

  // What the finished output of a row is multiplied by; zero for a row that saw no key.
  CUTLASS_DEVICE float inverse_sum(int row) const {
    float const total = sum_over_lanes<4>(sum[row]);
    return total > 0.f ? 1.f / total : 0.f;
  }
};

}  // namespace futransformer
