// What becomes of a projection's sums in the launch for all layers (decode_layers.cuh): the warps' are added, in order, and sent.
//
// A lane has two neighbouring columns, which belong together: two features that are rotated as a pair, a gate and its up, two
// elements of the stream. Everybody waits meanwhile, and code that is met once a layer takes some six clocks an instruction:
// the fewer columns a lane, the fewer of them.
#pragma once

#include <cstdint>

#include "decode_block.cuh"
#include "decode_layers_shared.cuh"
#include "epilogue.cuh"
#include "epilogue_tagged.cuh"
#include "fragment.cuh"
#include "numeric.cuh"
#include "tagged.cuh"

namespace futransformer {

// `T`: DecodeLayersTraits.
template <class T>
class DecodeLayersResults {
  using Shared = typename T::Shared;
  using Arguments = typename T::Arguments;
  using Copy = typename T::Copy;

 public:
  // What the lane's first pair needs beside its sums, of the stream or of the rotation: on its way while products are made.
  CUTLASS_DEVICE static float2 load_early(Shared const& shared, Arguments const& args, int projection, int warp, int lane) {
    Share const share = shared.shares[projection];
    int const pair = projection == 0 ? warp * (Copy::kUnit / 2) + lane : lane;
    if (projection == 2 || pair >= share.pairs()) return {0.f, 0.f};
    return projection == 0 ? angles(shared, args, share.column(pair)) : stream(args, share.column(pair));
  }

  // By all warps.
  CUTLASS_DEVICE static void finish(Shared& shared, Arguments const& args, int l, int projection, uint32_t tag, float2 early) {
    int const thread = thread_now(), warp = thread / kLanes, lane = thread % kLanes;
    if (projection == 0) {
      finish_qkv(shared, args, args.layers[l], tag + 1, warp, lane, early);
    } else if (projection == 2) {
      finish_gate_up(shared, args, tag, warp, lane);
    } else if (warp == 0) {
      finish_residual(shared, args, projection == 3, l, tag, lane, early);
    }
  }

 private:
  // RMSNorm's scale, of x as it was read: rounded to BF16.
  CUTLASS_DEVICE static float rstd(Shared const& shared, Arguments const& args) {
    float sum = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int warp = 0; warp < kLayerWarps; ++warp) sum += shared.squares[warp];
    return rsqrtf(fmaf(sum, 1.f / T::kHidden, args.rms_norm_eps));
  }
  // Rotated, K and V to their pages; then a warp makes of a unit of columns what attention reads.
  CUTLASS_DEVICE static void finish_qkv(Shared& shared, Arguments const& args, Layer const& layer, uint32_t tag, int warp,
                                        int lane, float2 early) {
    constexpr int kUnitPairs = Copy::kUnit / 2;
    Share const share = shared.shares[0];
    int const slot = shared.slot;
    float const factor = rstd(shared, args);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = warp * kUnitPairs; first < share.pairs(); first += kLayerWarps * kUnitPairs) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int pair = first + lane; pair < first + kUnitPairs; pair += kLanes) {
        int const column = share.column(pair);
        float2 const angle = pair == warp * kUnitPairs + lane ? early : angles(shared, args, column);
        float2 values = sums(shared, pair);
        values.x *= factor;
        values.y *= factor;
        if (column < T::kQueries + T::kKeys) values = rotated(values, angle);
        if (column >= T::kQueries && slot >= 0) {
          bool const is_key = column < T::kQueries + T::kKeys;
          int const feature = column - T::kQueries - (is_key ? 0 : T::kKeys), head = feature / T::HeadDim;
          int const place = (slot / T::PageSize * T::KvHeads + head) * T::PageSize + slot % T::PageSize;
          bf16* const target = (is_key ? layer.k_pages : layer.v_pages) + size_t(place) * T::HeadDim + feature % T::HeadDim;
          *reinterpret_cast<uint32_t*>(target) = pack_bf16x2(values.x, values.y);
        }
        *reinterpret_cast<float2*>(&shared.partial[0][2 * pair]) = values;
      }
      __syncwarp();
      Copy const copy(layer.kv_copy, nullptr, {args.exchange.q, args.exchange.codes, tag});
      FinishedRow<Copy::kUnit, kLanes> const finished{shared.partial[0] + 2 * first, 0, true};
      copy.copy({slot}, share.column(first), finished);
    }
  }

  CUTLASS_DEVICE static void finish_gate_up(Shared& shared, Arguments const& args, uint32_t tag, int warp, int lane) {
    Share const share = shared.shares[2];
    TaggedWord* const sent = reinterpret_cast<TaggedWord*>(args.exchange.h);
    float const factor = rstd(shared, args);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = warp * kLanes; first < share.pairs(); first += kLayerThreads) {
      int const pair = first + lane;
      float2 values = {0.f, 0.f};
      if (pair < share.pairs()) values = sums(shared, pair);
      float const h = SwiGlu::of(values.x * factor, values.y * factor);
      float const next = __shfl_down_sync(0xffffffffu, h, 1);
      if (lane % 2 == 0 && pair < share.pairs()) send(sent + share.column(pair) / 4, pack_bf16x2(h, next), tag);
    }
  }

  // In the end the stream's sum of squares, one part for all of the block's columns.
  CUTLASS_DEVICE static void finish_residual(Shared& shared, Arguments const& args, bool is_down, int l, uint32_t tag, int lane,
                                             float2 early) {
    Share const share = shared.shares[is_down ? 3 : 1];
    TaggedWord* const sent = reinterpret_cast<TaggedWord*>(is_down ? args.exchange.x_end : args.exchange.x_middle);
    bool const is_last = is_down && l == args.num_layers - 1;
    float squares = 0.f;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int pair = lane; pair < share.pairs(); pair += kLanes) {
      int const column = share.column(pair);
      float2 const before = pair == lane ? early : stream(args, column);
      float2 values = sums(shared, pair);
      values.x += before.x;
      values.y += before.y;
      uint32_t const word = pack_bf16x2(values.x, values.y);
      send(sent + column / 2, word, tag);
      *reinterpret_cast<float2*>(args.residual + column) = values;
      if (is_last) *reinterpret_cast<uint32_t*>(args.x + column) = word;
      squares = fmaf(values.x, values.x, squares);
      squares = fmaf(values.y, values.y, squares);
    }
    if (!is_last) return;
    squares = sum_over_lanes<kLanes>(squares);
    if (lane == 0) args.sumsq_out[T::kWriters < T::Blocks ? share.first : int(blockIdx.x)] = squares;
  }

  // A pair of columns, added warp by warp.
  CUTLASS_DEVICE static float2 sums(Shared const& shared, int pair) {
    float2 sum = {0.f, 0.f};
    CUTLASS_PRAGMA_UNROLL
    for (int warp = 0; warp < kLayerWarps; ++warp) {
      float2 const two = *reinterpret_cast<float2 const*>(&shared.partial[warp][2 * pair]);
      sum.x += two.x;
      sum.y += two.y;
    }
    return sum;
  }

  CUTLASS_DEVICE static float2 stream(Arguments const& args, int column) {
    return *reinterpret_cast<float2 const*>(args.residual + column);
  }
  // Cosine and sine, of Q or K.
  CUTLASS_DEVICE static float2 angles(Shared const& shared, Arguments const& args, int column) {
    if (column >= T::kQueries + T::kKeys) return {0.f, 0.f};
    return *reinterpret_cast<float2 const*>(args.rope_table + size_t(shared.position) * T::HeadDim + column % T::HeadDim);
  }
  CUTLASS_DEVICE static float2 rotated(float2 pair, float2 angle) {
    return {pair.x * angle.x - pair.y * angle.y, pair.y * angle.x + pair.x * angle.y};
  }
};

}  // namespace futransformer
