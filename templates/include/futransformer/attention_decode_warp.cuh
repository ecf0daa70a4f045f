// What the consumer warps of decode attention have in common, whatever a page holds: sixteen tokens of a page times the
// query heads of a group, in tiles of eight.
#pragma once

#include <cmath>
#include <cstdint>

#include <cute/arch/mma_sm80.hpp>
#include <cutlass/cutlass.h>

namespace futransformer {

// What to subtract from scores whose maximum is `max`: -inf - -inf would be NaN where nothing but -inf was seen.
CUTLASS_DEVICE float softmax_base(float max) { return max == -INFINITY ? 0.f : max; }

// What a warp does, by what the pages hold.
template <class Element, int Group, int HeadDim, int PageSize>
struct DecodeTokens;

template <int Group, int HeadDim>
struct DecodeWarp {
  static constexpr int kTokens = 16;                  // of a page: M of S, K of O^T
  static constexpr int kHeadTiles = (Group + 7) / 8;  // N of both products
  static constexpr int kSteps = HeadDim / 16;         // K of S, M of O^T

  // A thread's part of what its warp computes.
  struct Fragments {
    uint32_t q[kHeadTiles][kSteps][2];
    float out[kHeadTiles][kSteps][4];
    float max[kHeadTiles][2];
    float sum[kHeadTiles][2];  // over this thread's tokens
  };

  CUTLASS_DEVICE static void multiply(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1],
                                              c[2], c[3]);
  }
};

// What the warps of a block leave for each other. The four floats of padding spread a fragment's four heads over all banks.
template <class Tokens, int Warps, int Group, int HeadDim>
struct WarpResults {
  float out[Warps][Group][HeadDim + 4];
  float2 max_sum[Warps][Group];

  // Lay a warp's result out.
  CUTLASS_DEVICE void publish(int warp, int lane, typename Tokens::Fragments const& fragments) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < Tokens::kHeadTiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int column = 0; column < 2; ++column) {
        float sum = fragments.sum[tile][column];
        CUTLASS_PRAGMA_UNROLL
        for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        int const head = 8 * tile + 2 * (lane % 4) + column;
        if (head < Group) {
          if (lane < 4) max_sum[warp][head] = make_float2(fragments.max[tile][column], sum);
          CUTLASS_PRAGMA_UNROLL
          for (int step = 0; step < Tokens::kSteps; ++step) {
            float* features = &out[warp][head][16 * step + Tokens::kFeature * (lane / 4)];
            features[0] = fragments.out[tile][step][column];
            features[Tokens::kOtherFeature] = fragments.out[tile][step][2 + column];
          }
        }
      }
    }
  }
};

}  // namespace futransformer
