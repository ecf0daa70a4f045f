// The projections of the launch for all layers (decode_layers.cuh): x as integers, products out of the ring, their sums finished.
#pragma once

#include <cstdint>

#include "barrier.cuh"
#include "decode_block.cuh"
#include "decode_layers_shared.cuh"
#include "epilogue_tagged.cuh"
#include "fragment.cuh"
#include "numeric.cuh"
#include "split_activations.cuh"
#include "unit_scales.cuh"

namespace futransformer {

// `T`: DecodeLayersTraits.
template <class T>
class DecodeLayersProjections {
  using Weight = typename T::Weight;
  using Staged = typename T::Staged;
  using Cursor = typename T::Cursor;
  using Shared = typename T::Shared;
  using Arguments = typename T::Arguments;

 public:
  template <class Epilogues>
  CUTLASS_DEVICE static void run(Shared& shared, Arguments const& args, Cursor& cursor, Epilogues const& epilogues, int l,
                                 int projection, uint32_t tag) {
    Share const share = shared.shares[projection];
    if (share.first == share.last) return;
    Exchange const& exchange = args.exchange;
    TaggedVector const* const x = projection == 0   ? exchange.x_end
                                  : projection == 1 ? exchange.attended
                                  : projection == 2 ? exchange.x_middle
                                                    : exchange.h;
    bf16 const* const plain_x = projection == 0 && l == 0 ? args.x : nullptr;
    int const thread = thread_now(), warp = thread / kLanes, lane = thread % kLanes;

    // The first warp finishes: what it needs is on its way while the products are made.
    bool const finishes = warp == 0;
    float4 early[2] = {};  // operands of the lane's first columns

    int const set = warp / kSetWarps, part = warp % kSetWarps;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int window = 0; window < share.k; window += T::WindowK) {
      int const width = min(share.k - window, T::WindowK);
      if (window > 0) T::sync();  // the window before has been read
      shared.x.template stage<kLayerThreads>(x, tag, plain_x, window, width);
      if (window == 0) {
        // By the last warp, which has least of x.
        if (projection % 2 == 0 && warp == kLayerWarps - 1) {
          float const factor = epilogues.rstd(projection == 2, l, tag);
          if (lane == 0) shared.rstd = factor;
        }
        if (projection != 2 && finishes && lane < (share.last - share.first) * 2) {
          epilogues.load_early(projection == 0, share.first * kTileRows + lane * 8, early);
        }
      }
      T::sync();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int tile = share.first; tile < share.last; tile += kPairTiles) {
        float sums[kPairTiles][SplitSumFragment::kSums] = {};
        // T::Slots of the pair that are the set's.
        int const slots = (width + kSlotK - 1) / kSlotK;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int i = 0; i < slots; ++i, cursor.advance()) {
          if (cursor.set != set) continue;
          wait(shared.full[cursor.slot], cursor.parity);
          int const at = i * kSlotK + part * kWarpK;
          if (at < width) {
            multiply(shared, shared.ring[cursor.slot] + part * T::kPartBytes, lane, at, width - at, sums);
          }
          asm volatile("" ::: "memory");  // no read of the slot comes later
          __syncwarp();
          if (lane == 0) shared.empty[cursor.slot].arrive();
        }
        CUTLASS_PRAGMA_UNROLL
        for (int pair = 0; pair < kPairTiles; ++pair) {
          if (tile + pair >= share.last || SplitSumFragment::sequence(lane, 0) > 0) break;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < SplitSumFragment::kSums; ++i) {
            int const column = (tile + pair - share.first) * kTileRows + SplitSumFragment::column(lane, i);
            float& sum = shared.partial[warp][column];
            sum = window == 0 ? sums[pair][i] : sum + sums[pair][i];
          }
        }
      }
    }
    T::sync();
    if (!finishes) {
      // nothing to finish
    } else if (projection == 0) {
      auto const chain = epilogues.qkv(args.layers[l], shared.rstd, tag);
      finish(shared, share, lane, chain, [&](auto& operands) { copy(early, operands.rest.first.angles); });
    } else if (projection == 2) {
      finish(shared, share, lane, epilogues.gate_up(shared.rstd, tag), [](auto&) {});
    } else {
      auto const chain = epilogues.residual(projection == 3, l, tag);
      finish(shared, share, lane, chain, [&](auto& operands) { copy(early, operands.first.added); });
    }
    T::sync();  // who asks for others' results before this block's are on their way only holds them up
  }

 private:
  CUTLASS_DEVICE static void copy(float4 const (&from)[2], float4 (&to)[2]) {
    to[0] = from[0];
    to[1] = from[1];
  }

  // The block's columns: the sums of all warps, and what the chain makes of them; a lane a vector. `fill` puts in place what
  // has been loaded early, of the first vector.
  template <class Epilogue, class Fill>
  CUTLASS_DEVICE static void finish(Shared& shared, Share const& share, int lane, Epilogue const& epilogue,
                                    Fill const& fill) {
    constexpr int row = 0;
    constexpr int kWidth = Epilogue::kWidth;
    int const vectors = (share.last - share.first) * kTileRows / kWidth;
    auto const column = [&](int vector) { return (share.first * kTileRows / kWidth + vector) * 8; };
    auto state = epilogue.template begin<kLanes>(row, true);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int vector = lane; vector < vectors; vector += kLanes) {
      typename Epilogue::Operands operands = {};
      if (vector < kLanes) {
        fill(operands);
      } else {
        operands = epilogue.load(state, row, column(vector));
      }
      float values[kWidth];
      add_parts(shared.partial, vector * kWidth, values);
      epilogue.apply(state, operands, row, column(vector), values);
      if constexpr (Epilogue::kUnit > 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kWidth; i += 4) {
          *reinterpret_cast<float4*>(&shared.partial[0][vector * kWidth + i]) =
              make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
        }
      }
    }
    if constexpr (Epilogue::kUnit > 0) {
      __syncwarp();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int unit = 0; unit < (share.last - share.first) * kTileRows; unit += Epilogue::kUnit) {
        FinishedRow<Epilogue::kUnit, kLanes> const finished{shared.partial[0] + unit, row, true};
        epilogue.copy(state, column(unit / kWidth), finished);
      }
    }
    epilogue.template end<kLanes>(state, row, writer(share), true);
  }

  // The block's number among those that have a share of o, or of down.
  CUTLASS_DEVICE static int writer(Share const& share) { return T::O::kGroups < T::Blocks ? share.first : int(blockIdx.x); }

  // What a warp has of a slot: up to 256 k of two row tiles, of which `left` exist; `at` from the window's first. Of one row
  // tile the other's sums mean nothing.
  //
  // Codes in the upper halves of bytes count sixteen: they have products of their own, so that one operation makes an operand.
  CUTLASS_DEVICE static void multiply(Shared const& shared, unsigned char const* units, int lane, int at, int left,
                                      float (&sums)[kPairTiles][SplitSumFragment::kSums]) {
    constexpr uint32_t kLower = 0x0f0f0f0f, kUpper = 0xf0f0f0f0;
    constexpr int kUnits = kPartK / Weight::kUnitK, kUnitGroups = Weight::kUnitK / kGroupK;
    constexpr int kLoadGroups = Weight::kLoadGroups, kLoads = kUnitGroups / kLoadGroups;
    using Load = typename Weight::Load;
    int const column = lane / 4, t = lane % 4;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < kWarpK / kPartK; ++half) {
      if (half * kPartK >= left) break;
      uint32_t x[2][4];  // of 64 k: of two groups what lower codes are multiplied with, then upper ones
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        uint4 four = {0, 0, 0, 0};
        if (column < 2) four = shared.x.words[unsigned(at) / kPartK + half][i][column][t];
        x[i][0] = four.x;
        x[i][1] = four.y;
        x[i][2] = four.z;
        x[i][3] = four.w;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kUnits; ++i) {
        int const unit = half * kUnits + i;
        if (Weight::kUnitK < kPartK && unit * Weight::kUnitK >= left) break;
        typename Staged::Unit of_x = {0.f, 0};
        if (t == 0) of_x = shared.x.units[unsigned(at) / Weight::kUnitK + unit];
        ByteSums lower[kPairTiles] = {}, upper[kPairTiles] = {};
        CUTLASS_PRAGMA_UNROLL
        for (int load = 0; load < kLoads; ++load) {
          int const group = i * kUnitGroups + load * kLoadGroups;
          uint32_t const* const of_load = x[group / 2];
          CUTLASS_PRAGMA_UNROLL
          for (int tile = 0; tile < kPairTiles; ++tile) {
            unsigned char const* const codes = units + tile * T::kChunkBytes + unit * Weight::kUnitBytes;
            Load const packed = reinterpret_cast<Load const*>(codes)[load * kLanes + lane];
            uint32_t const* const word = packed.word;
            if constexpr (kLoadGroups == 2) {
              uint32_t const low[2] = {of_load[0], of_load[1]}, high[2] = {of_load[2], of_load[3]};
              lower[tile].template multiply<true>({{word[0] & kLower, word[1] & kLower, word[2] & kLower, word[3] & kLower}},
                                                  low, lower[tile]);
              upper[tile].template multiply<true>({{word[0] & kUpper, word[1] & kUpper, word[2] & kUpper, word[3] & kUpper}},
                                                  high, upper[tile]);
            } else {
              uint32_t const both[2] = {of_load[group % 2], of_load[2 + group % 2]};
              lower[tile].template multiply<true>({{Weight::bytes(word[0], 0), Weight::bytes(word[1], 0),
                                                    Weight::bytes(word[0], 1), Weight::bytes(word[1], 1)}},
                                                  both, lower[tile]);
            }
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kPairTiles; ++tile) {
          UnitScales<Weight> const scales(units + tile * T::kChunkBytes + unit * Weight::kUnitBytes, lane);
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < SplitSumFragment::kSums; ++j) {
            int const zero = Weight::kZeroPoints ? int(j ? scales.zeros >> 8 : scales.zeros & 0xff) : Weight::kZero;
            int32_t sum = int32_t(lower[tile].d[2 * j] * 256 + lower[tile].d[2 * j + 1]) - zero * of_x.sum;
            if constexpr (kLoadGroups == 2) {
              sum += int32_t(upper[tile].d[2 * j] * 16) + (int32_t(upper[tile].d[2 * j + 1]) >> 4);
            }
            sums[tile][j] += (j ? scales.scale.y : scales.scale.x) * of_x.scale * float(sum);
          }
        }
      }
    }
  }

  // values = the sums of Width neighbouring columns, added warp by warp.
  template <int Width>
  CUTLASS_DEVICE static void add_parts(float const (&partial)[kLayerWarps][T::kColumns + 4], int first,
                                       float (&values)[Width]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; ++i) values[i] = 0.f;
    constexpr int kUnrolled = 32 / Width;
#pragma unroll kUnrolled
    for (int warp = 0; warp < kLayerWarps; ++warp) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Width; i += 4) {
        float4 const four = *reinterpret_cast<float4 const*>(&partial[warp][first + i]);
        values[i] += four.x;
        values[i + 1] += four.y;
        values[i + 2] += four.z;
        values[i + 3] += four.w;
      }
    }
  }
};

}  // namespace futransformer
