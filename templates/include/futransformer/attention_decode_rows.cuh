// Decode attention over pages of BF16 or E4M3: what a consumer warp does with its sixteen tokens.
//
//   K, V pages  [num_pages, KvHeads, PageSize, HeadDim], read through tensor maps of the same memory
//               (attention_decode_pages.cuh); a code of E4M3 is worth kv_scale[0] (K) or kv_scale[1] (V)
//
// V becomes an operand by ldmatrix.trans.
#pragma once

#include <cmath>
#include <cstdint>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cutlass/arch/barrier.h>

#include "attention_decode_pages.cuh"
#include "attention_decode_warp.cuh"
#include "numeric.cuh"

namespace futransformer {

template <class Element, int Group, int HeadDim, int PageSize>
struct DecodeTokens : DecodeWarp<Group, HeadDim> {
  using Warp = DecodeWarp<Group, HeadDim>;
  using typename Warp::Fragments;
  using Warp::kHeadTiles;
  using Warp::kSteps;

  using Pages = DecodePages<Element, HeadDim, PageSize>;
  static constexpr int kLoads = kSteps / Pages::kLoadSteps;
  static constexpr bool kCodes = sizeof(Element) == 1;
  static constexpr int kFeature = Pages::kFeature;
  static constexpr int kOtherFeature = Pages::kOtherFeature;

  struct Source {
    CUtensorMap const* k_pages;
    CUtensorMap const* v_pages;
    float const* kv_scale = nullptr;  // [2], of E4M3 pages
  };

  struct Page {
    char k[Pages::kBytes];
    char v[Pages::kBytes];
  };

  CUTLASS_DEVICE static void prefetch(Source const& pages) {
    cute::prefetch_tma_descriptor(pages.k_pages);
    cute::prefetch_tma_descriptor(pages.v_pages);
  }

  // Fetch a page of one key/value head, whose first row is `row`.
  CUTLASS_DEVICE static void load(Source const& pages, int row, cutlass::arch::ClusterTransactionBarrier& full,
                                  Page& target) {
    constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);  // each page is read once
    uint64_t* barrier = reinterpret_cast<uint64_t*>(&full);
    Pages::load(pages.k_pages, barrier, kHint, target.k, row);
    Pages::load(pages.v_pages, barrier, kHint, target.v, row);
  }

  // Load the group's queries: operand B of S, four features a step of head lane / 4 of each tile. Absent heads are zero.
  template <class Work>
  CUTLASS_DEVICE static void begin(bf16 const* q, Work const& work, Fragments& fragments) {
    int const lane = threadIdx.x % 32;
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      int const head = 8 * tile + lane / 4;
      bf16 const* features = q + (work.sequence_head() * Group + head) * HeadDim + Pages::kQueryFeatures * (lane % 4);
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        Pages::query(features + 16 * step, head < Group, fragments.q[tile][step]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int column = 0; column < 2; ++column) {
        fragments.max[tile][column] = -INFINITY;
        fragments.sum[tile][column] = 0.f;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps * 4; ++i) fragments.out[tile][i / 4][i % 4] = 0.f;
    }
  }

  // What scores are multiplied by, to units of log 2.
  CUTLASS_DEVICE static float score_scale(Source pages, float softmax_scale) {
    float scale = softmax_scale * 1.44269504088896341f;
    if constexpr (kCodes) scale *= pages.kv_scale[0] * kE4m3Operand;
    return scale;
  }

  // What the output is multiplied by at the end.
  CUTLASS_DEVICE static float normalised(Source pages, float sum) {
    float inverse = 1.f / sum;
    if constexpr (kCodes) inverse *= pages.kv_scale[1] * kE4m3Operand;
    return inverse;
  }

  CUTLASS_DEVICE static void end(Fragments&) {}

  // The first `tokens` (at least one) of a warp's sixteen tokens of a page.
  CUTLASS_DEVICE static void attend(Page const& page, int first_token, int tokens, float scale, Fragments& fragments) {
    int const lane = threadIdx.x % 32;

    int const k_token = first_token + lane % 16;
    float scores[kHeadTiles][4] = {};
    CUTLASS_PRAGMA_UNROLL
    for (int load = 0; load < kLoads; ++load) {
      uint32_t k[Pages::kLoadSteps][4];
      Pages::keys(page.k, k_token, load, lane, k);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Pages::kLoadSteps; ++i) {
        int const step = load * Pages::kLoadSteps + i;
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kHeadTiles; ++tile) Warp::multiply(scores[tile], k[i], fragments.q[tile][step]);
      }
    }

    uint32_t p[kHeadTiles][2];
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kHeadTiles; ++tile) softmax(scores[tile], tokens, scale, tile, fragments, p[tile]);

    int const v_token = first_token + Pages::value_token(lane);
    // P is zero past the end, but V may be NaN there, and 0 * NaN is NaN: the words (two tokens each) are masked too.
    uint32_t const mask[2] = {mask_of(tokens - 2 * (lane % 4)), mask_of(tokens - 2 * (lane % 4) - 8)};
    CUTLASS_PRAGMA_UNROLL
    for (int load = 0; load < kLoads; ++load) {
      uint32_t v[Pages::kLoadSteps][4];
      Pages::values(page.v, v_token, load, lane, mask, v);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Pages::kLoadSteps; ++i) {
        int const step = load * Pages::kLoadSteps + i;
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kHeadTiles; ++tile) Warp::multiply(fragments.out[tile][step], v[i], p[tile]);
      }
    }
  }

 private:
  // Two tokens of which the first `count` exist.
  CUTLASS_DEVICE static uint32_t mask_of(int count) {
    return count >= 2 ? 0xffffffffu : count == 1 ? 0x0000ffffu : 0u;
  }

  // Scores of a tile of eight heads to operand B of O^T; the running maximum, sum and output of these heads move on.
  // scores: tokens lane / 4 and lane / 4 + 8, heads 2 (lane % 4) + {0, 1}.
  CUTLASS_DEVICE static void softmax(float const (&scores)[4], int tokens, float scale, int tile, Fragments& fragments,
                                     uint32_t (&p)[2]) {
    int const token = threadIdx.x % 32 / 4;
    float weights[2][2];  // [token, head]
    CUTLASS_PRAGMA_UNROLL
    for (int column = 0; column < 2; ++column) {
      float const low = token < tokens ? scores[column] * scale : -INFINITY;
      float const high = token + 8 < tokens ? scores[2 + column] * scale : -INFINITY;
      float max = fmaxf(low, high);
      CUTLASS_PRAGMA_UNROLL
      for (int distance = 4; distance < 32; distance *= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, distance));
      }
      max = fmaxf(max, fragments.max[tile][column]);
      float const base = softmax_base(max);
      float const rescale = exp2_flush(fragments.max[tile][column] - base);
      weights[0][column] = exp2_flush(low - base);
      weights[1][column] = exp2_flush(high - base);
      fragments.max[tile][column] = max;
      fragments.sum[tile][column] = fragments.sum[tile][column] * rescale + (weights[0][column] + weights[1][column]);
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        fragments.out[tile][step][column] *= rescale;
        fragments.out[tile][step][2 + column] *= rescale;
      }
    }
    // From rows of tokens to rows of heads: each 8x8 matrix is transposed within the warp.
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      cute::SM75_U32x1_MOVM_T::copy(pack_bf16x2(weights[half][0], weights[half][1]), p[half]);
    }
  }
};

}  // namespace futransformer
