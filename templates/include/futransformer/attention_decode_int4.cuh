// Decode attention over the INT4 copy of the KV cache: what a consumer warp does with its sixteen tokens of a page.
//
//   kv_copy  [num_pages, KvHeads] of KvCopyPage (kv_int4.cuh): K, then V, each codes, float16 scales [groups,
//            PageSize], and minima likewise. One bulk copy brings both. How K was rotated is nothing to what reads it:
//            q was too.
//
// A code is never converted. The lowest eight bits of a BF16, alone, are a number in steps of 2^-133, subnormal or the
// least normal: four of them are code x 2^-133, the next four code x 2^-129, exactly, by one AND. What they are
// multiplied with is lifted by 2^64, so that products lie within float32's range (of q, what is below 2^63 is served;
// beyond, a row is NaN). The factor of 16 between the two lies in q, and in every other row of O^T.
//
// Codes stand for code - 8. Of K that is a constant for each query and group: sums begin at -8 x the sum of q. Of V a
// product takes it away, whose operand A is -8. So sums are at most some 16 P x scale where their result may be
// nothing, and an output is off by up to 2^-20 of the largest value that its groups' scales allow, beside the rounding
// of P. With a minimum codes are 0 .. 15: scores get minimum x the sum of q, outputs the sum of P x minimum, both in
// float32.
//
// K's scale multiplies the sums of its group, V's scale the P of its group, rounded to BF16 once. Rows g and g + 8 of
// K's operand are tokens 2 g and 2 g + 1 of the warp's sixteen, so that a word holds the scales of both, and P,
// transposed, has the order of tokens in which V's bytes stand.
//
// Of slots past the end of a sequence only the scales can be no numbers: they alone are masked.
#pragma once

#include <cmath>
#include <cstdint>

#include <cute/arch/copy_sm75.hpp>
#include <cutlass/arch/barrier.h>

#include "attention_decode_warp.cuh"
#include "bulk_copy.cuh"
#include "fragment.cuh"
#include "kv_int4.cuh"
#include "numeric.cuh"

namespace futransformer {

template <int Shared, bool Minimum, int Block, int Group, int HeadDim, int PageSize>
struct DecodeTokens<KvFormat<Shared, Minimum, Block>, Group, HeadDim, PageSize> : DecodeWarp<Group, HeadDim> {
  using Format = KvFormat<Shared, Minimum, Block>;
  using Layout = KvCopyPage<Format, HeadDim>;
  using Warp = DecodeWarp<Group, HeadDim>;
  using Warp::kHeadTiles;
  using Warp::kSteps;
  using Warp::kTokens;

  static constexpr int kGroups = Format::template kGroups<HeadDim>;
  static constexpr int kGroupSteps = kSteps / kGroups;
  static constexpr int kLoads = HeadDim / 64;  // of sixteen bytes a lane: 64 features
  // What a group's sums of K begin at, the same for all tokens, stands in the four registers of an accumulator, or is
  // added behind them, from two, where there are no more: two tiles of 128 features would spill.
  static constexpr bool kBeginsThere = !Minimum && kHeadTiles * HeadDim <= 128;
  static constexpr int kFeature = 2;       // rows g and g + 8 of O^T are features 2 g
  static constexpr int kOtherFeature = 1;  // and 2 g + 1 of their step
  static_assert(PageSize == Layout::kTokens && HeadDim % 64 == 0, "whole loads of codes");

  struct alignas(16) Page {
    char k[Layout::kPartBytes];
    char v[Layout::kPartBytes];
  };
  static_assert(sizeof(Page) == Layout::kBytes, "a page is one copy");

  struct Source {
    unsigned char const* kv_copy;
  };

  struct Fragments : Warp::Fragments {
    // max: what is subtracted from scores, less kLift: their maximum or up to kSlack below it.
    float begin[kHeadTiles][kGroups][kBeginsThere ? 4 : 2];  // -8 x the sum of q of a group, with Minimum the sum
    float minima[kHeadTiles][Minimum ? kGroups : 1][2];      // the sum of P x minimum over this thread's tokens
    uint32_t minus_eight[4];                                 // operand A: of all tokens
  };

  CUTLASS_DEVICE static void prefetch(Source const&) {}

  // Fetch a page of one key/value head, whose first row is `row`.
  CUTLASS_DEVICE static void load(Source const& pages, int row, cutlass::arch::ClusterTransactionBarrier& full,
                                  Page& target) {
    load_bulk_once(&target, pages.kv_copy + size_t(row / PageSize) * sizeof(Page), sizeof(Page), full);
  }

  // Load the group's queries: operand B of S, lifted. Absent heads are zero.
  template <class Work>
  CUTLASS_DEVICE static void begin(bf16 const* q, Work const& work, Fragments& fragments) {
    int const lane = threadIdx.x % 32;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      // Shuffled, lest ptxas take it for a constant and make its four registers anew for every product.
      fragments.minus_eight[i] = __shfl_sync(0xffffffffu, i % 2 ? times_sixteen(kMinusEight) : kMinusEight, 0);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      int const head = 8 * tile + lane / 4;
      bf16 const* features = q + (work.sequence_head() * Group + head) * HeadDim + 4 * (lane % 4);
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        uint2 four = {0, 0};
        if (head < Group) four = *reinterpret_cast<uint2 const*>(features + 16 * step);
        fragments.q[tile][step][0] = multiply_bf16x2(four.x, kLifts);
        fragments.q[tile][step][1] = multiply_bf16x2(four.y, kLiftsOfUpper);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kGroups; ++group) {
        float sums[4] = {};
        uint32_t const code = Minimum ? 0x00010001u : kMinusEight;
        uint32_t const operand[4] = {code, code, times_sixteen(code), times_sixteen(code)};
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kGroupSteps; ++i) {
          Warp::multiply(sums, operand, fragments.q[tile][group * kGroupSteps + i]);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < (kBeginsThere ? 4 : 2); ++i) fragments.begin[tile][group][i] = sums[i];
      }
      CUTLASS_PRAGMA_UNROLL
      for (int column = 0; column < 2; ++column) {
        fragments.max[tile][column] = kUnseen;
        fragments.sum[tile][column] = 0.f;
        CUTLASS_PRAGMA_UNROLL
        for (int group = 0; Minimum && group < kGroups; ++group) fragments.minima[tile][group][column] = 0.f;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps * 4; ++i) fragments.out[tile][i / 4][i % 4] = 0.f;
    }
  }

  // What scores are multiplied by, to units of log 2.
  CUTLASS_DEVICE static float score_scale(Source, float softmax_scale) {
    return softmax_scale * (1.44269504088896341f * kWorth);
  }

  CUTLASS_DEVICE static float normalised(Source, float sum) { return 1.f / sum; }

  // The first `tokens` (at least one) of a warp's sixteen tokens of a page.
  CUTLASS_DEVICE static void attend(Page const& page, int first_token, int tokens, float scale, Fragments& fragments) {
    if (tokens >= kTokens) {
      attend_some<true>(page, first_token, tokens, scale, fragments);
    } else {
      attend_some<false>(page, first_token, tokens, scale, fragments);
    }
  }

  // From what this file counts in to plain sums.
  CUTLASS_DEVICE static void end(Fragments& fragments) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int column = 0; column < 2; ++column) {
        float& max = fragments.max[tile][column];
        max = max == kUnseen ? -INFINITY : max + kLift;
        fragments.sum[tile][column] *= 1 / kLifted;
        CUTLASS_PRAGMA_UNROLL
        for (int step = 0; step < kSteps; ++step) {
          fragments.out[tile][step][column] *= kWorth;
          fragments.out[tile][step][2 + column] *= kWorth / 16;
        }
        CUTLASS_PRAGMA_UNROLL
        for (int group = 0; Minimum && group < kGroups; ++group) {
          float minima = fragments.minima[tile][group][column] * (1 / kLifted);
          CUTLASS_PRAGMA_UNROLL
          for (int distance = 4; distance < 32; distance *= 2) {
            minima += __shfl_xor_sync(0xffffffffu, minima, distance);
          }
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kGroupSteps; ++i) {
            fragments.out[tile][group * kGroupSteps + i][column] += minima;
            fragments.out[tile][group * kGroupSteps + i][2 + column] += minima;
          }
        }
      }
    }
  }

 private:
  static constexpr float kLift = 64;  // in units of log 2
  static constexpr float kLifted = 0x1p64f;
  static constexpr uint32_t kLifts = 0x5f805f80;         // a pair of 2^64
  static constexpr uint32_t kLiftsOfUpper = 0x5d805d80;  // of 2^60, for codes that count 16
  static constexpr float kWorth = 0x1p69f;               // of a product: 1 / (2^64 2^-133)
  static constexpr uint32_t kMinusEight = 0x80088008;    // a pair of codes
  static constexpr float kUnseen = -0x1p100f;            // the maximum of no scores but -inf
  static constexpr float kSlack = 8;                     // of a maximum, in units of log 2

  // An operand of codes at bits 0 to 3 to one at bits 4 to 7, of the same sign.
  CUTLASS_DEVICE static constexpr uint32_t times_sixteen(uint32_t codes) {
    return (codes & 0x80008000u) | (codes & 0x000f000fu) << 4;
  }

  CUTLASS_DEVICE static Words words(char const* part, int first_token, int load) {
    int const index = (first_token / kTokens * kLoads + load) * 32 + threadIdx.x % 32;
    return reinterpret_cast<Words const*>(part)[index];
  }

  // The scales of the tokens 2 g and 2 g + 1 of the warp's sixteen, or their minima; of those that do not exist, zero.
  template <bool Whole>
  CUTLASS_DEVICE static float2 scales(char const* part, int first_token, int tokens, int group, bool minima = false) {
    int const token = threadIdx.x % 32 / 4 * 2;
    char const* halves = part + Layout::scale(first_token + token, group) + (minima ? Layout::kScaleBytes : 0);
    float2 values = unpack_halves(*reinterpret_cast<uint32_t const*>(halves));
    if (!Whole && token >= tokens) values.x = 0.f;
    if (!Whole && token + 1 >= tokens) values.y = 0.f;
    return values;
  }

  // Whole: all sixteen tokens exist.
  template <bool Whole>
  CUTLASS_DEVICE static void attend_some(Page const& page, int first_token, int tokens, float scale,
                                         Fragments& fragments) {
    float scores[kHeadTiles][4];  // of tokens 2 g, 2 g, 2 g + 1, 2 g + 1; heads 2 t + {0, 1}
    score<Whole>(page.k, first_token, tokens, fragments, scores);
    float weights[kHeadTiles][4];
    softmax(scores, scale, fragments, weights);
    accumulate<Whole>(page.v, first_token, tokens, weights, fragments);
  }

  template <bool Whole>
  CUTLASS_DEVICE static void score(char const* keys, int first_token, int tokens, Fragments const& fragments,
                                   float (&scores)[kHeadTiles][4]) {
    Words codes[kLoads];
    CUTLASS_PRAGMA_UNROLL
    for (int load = 0; load < kLoads; ++load) codes[load] = words(keys, first_token, load);
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      float sums[kHeadTiles][4];
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) sums[tile][i] = kBeginsThere ? fragments.begin[tile][group][i] : 0.f;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kGroupSteps; ++i) {
        int const step = group * kGroupSteps + i;
        uint32_t const* word = codes[step / 4].word + step / 2 % 2 * 2;
        uint32_t const low = word[0] >> step % 2 * 8, high = word[1] >> step % 2 * 8;
        uint32_t const k[4] = {low & 0x000f000fu, high & 0x000f000fu, low & 0x00f000f0u, high & 0x00f000f0u};
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kHeadTiles; ++tile) Warp::multiply(sums[tile], k, fragments.q[tile][step]);
      }
      float2 const worth = scales<true>(keys, first_token, tokens, group);
      float2 const added = Minimum ? scales<true>(keys, first_token, tokens, group, true) : worth;
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          float& score = scores[tile][i];
          float const of_token = i < 2 ? worth.x : worth.y;
          score = group == 0 ? of_token * sums[tile][i] : fmaf(of_token, sums[tile][i], score);
          if constexpr (!kBeginsThere) {
            score = fmaf(i < 2 ? added.x : added.y, fragments.begin[tile][group][i % 2], score);
          }
        }
      }
    }
    int const token = threadIdx.x % 32 / 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; !Whole && i < 4; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        if (token + i / 2 >= tokens) scores[tile][i] = -INFINITY;
      }
    }
  }

  // Scores to weights 2^(score - maximum), lifted. Where a score exceeds the maximum by little the maximum stays:
  // float32 and BF16 have room above 1, and to move it costs more than all else here.
  CUTLASS_DEVICE static void softmax(float const (&scores)[kHeadTiles][4], float scale, Fragments& fragments,
                                     float (&weights)[kHeadTiles][4]) {
    float exponents[kHeadTiles][4];
    bool above = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kHeadTiles * 4; ++i) {
      float& exponent = exponents[i / 4][i % 4];
      exponent = fmaf(scores[i / 4][i % 4], scale, -fragments.max[i / 4][i % 2]);
      above |= exponent > kLift + kSlack;
    }
    if (__any_sync(0xffffffffu, above)) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kHeadTiles * 2; ++i) raise(scores[i / 2], scale, i / 2, i % 2, fragments);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kHeadTiles * 4; ++i) {
        exponents[i / 4][i % 4] = fmaf(scores[i / 4][i % 4], scale, -fragments.max[i / 4][i % 2]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) weights[tile][i] = exp2_flush(exponents[tile][i]);
      CUTLASS_PRAGMA_UNROLL
      for (int column = 0; column < 2; ++column) {
        fragments.sum[tile][column] += weights[tile][column] + weights[tile][2 + column];
      }
    }
  }

  // The maximum of one column of heads becomes that of all its scores, and what was summed up follows.
  CUTLASS_DEVICE static void raise(float const (&scores)[4], float scale, int tile, int column, Fragments& fragments) {
    float max = fmaxf(scores[column], scores[2 + column]);
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 4; distance < 32; distance *= 2) {
      max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, distance));
    }
    float const before = fragments.max[tile][column];
    float const now = fmaxf(before, fmaf(max, scale, -kLift));
    float const rescale = exp2_flush(before - now);
    fragments.max[tile][column] = now;
    fragments.sum[tile][column] *= rescale;
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      fragments.out[tile][step][column] *= rescale;
      fragments.out[tile][step][2 + column] *= rescale;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; Minimum && group < kGroups; ++group) fragments.minima[tile][group][column] *= rescale;
  }

  template <bool Whole>
  CUTLASS_DEVICE static void accumulate(char const* values, int first_token, int tokens,
                                        float const (&weights)[kHeadTiles][4], Fragments& fragments) {
    Words codes[kLoads];
    CUTLASS_PRAGMA_UNROLL
    for (int load = 0; load < kLoads; ++load) codes[load] = words(values, first_token, load);
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      float2 const worth = scales<Whole>(values, first_token, tokens, group);
      float2 minimum{0.f, 0.f};
      if constexpr (Minimum) minimum = scales<Whole>(values, first_token, tokens, group, true);
      uint32_t p[kHeadTiles][2];
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kHeadTiles; ++tile) {
        float const(&w)[4] = weights[tile];
        // From rows of tokens to rows of heads: each 8x8 matrix is transposed within the warp.
        cute::SM75_U32x1_MOVM_T::copy(pack_bf16x2(w[0] * worth.x, w[1] * worth.x), p[tile][0]);
        cute::SM75_U32x1_MOVM_T::copy(pack_bf16x2(w[2] * worth.y, w[3] * worth.y), p[tile][1]);
        CUTLASS_PRAGMA_UNROLL
        for (int column = 0; Minimum && column < 2; ++column) {
          float& sum = fragments.minima[tile][group][column];
          sum = fmaf(w[column], minimum.x, fmaf(w[2 + column], minimum.y, sum));
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kGroupSteps; ++i) {
        int const step = group * kGroupSteps + i;
        uint32_t const even = codes[step / 4].word[step % 4], odd = even >> 8;  // tokens 4 t + {0, 2}, {1, 3}
        uint32_t const v[4] = {even & 0x000f000fu, even & 0x00f000f0u, odd & 0x000f000fu, odd & 0x00f000f0u};
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kHeadTiles; ++tile) {
          Warp::multiply(fragments.out[tile][step], v, p[tile]);
          if constexpr (!Minimum) Warp::multiply(fragments.out[tile][step], fragments.minus_eight, p[tile]);
        }
      }
    }
  }
};

}  // namespace futransformer
