// The projections of the launch for all layers (decode_layers.cuh): x as integers, products out of the ring, and their sums.
#pragma once

#include <cstdint>

#include "barrier.cuh"
#include "decode_layers_results.cuh"
#include "decode_layers_shared.cuh"
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
  using Results = DecodeLayersResults<T>;

 public:
  CUTLASS_DEVICE static void run(Shared& shared, Arguments const& args, Cursor& cursor, int l, int projection, uint32_t tag) {
    Share const share = shared.shares[projection];
    if (share.first == share.last) return;
    Exchange const& exchange = args.exchange;
    TaggedVector const* const x = projection == 0   ? exchange.x_end
                                  : projection == 1 ? exchange.attended
                                  : projection == 2 ? exchange.x_middle
                                                    : exchange.h;
    int const thread = thread_now(), warp = thread / kLanes, lane = thread % kLanes;
    int const set = warp / kSetWarps, part = warp % kSetWarps;
    float2 const early = Results::load_early(shared, args, projection, warp, lane);
    float squares = 0.f;  // of x, the lane's
    CUTLASS_PRAGMA_NO_UNROLL
    for (int window = 0; window < share.k; window += T::WindowK) {
      int const width = min(share.k - window, T::WindowK), slots = (width + kSlotK - 1) / kSlotK;
      if (window > 0) T::sync();  // the window before has been read
      // A warp makes the x of the slots that its set has of the first pair of row tiles.
      int staged = cursor.until(set);  // the first of them whose x is not there yet
      TaggedVector const* const sent = x + window / 4;
      TaggedVector found[2] = {};
      auto const ask = [&] {
        if (staged < slots) Staged::ask(sent, staged * kSlotK + part * kWarpK, width, found);
      };
      auto const make = [&] {
        bf16 const* const plain = projection == 0 && l == 0 ? args.x + window : nullptr;
        shared.x.stage(sent, tag, plain, staged * kSlotK + part * kWarpK, width, found, squares);
        staged += kSets;
        ask();  // for the next, while this one is multiplied
        __syncwarp();
      };
      ask();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int tile = share.first; tile < share.last; tile += kPairTiles) {
        // Where sets have other slots of the second pair, others have made their x.
        if (T::kAnyUneven && slots % kSets != 0 && tile == share.first + kPairTiles) T::sync();
        float sums[kPairTiles][SplitSumFragment::kSums] = {};
        int i = cursor.until(set);  // of the pair's slots the set's
        Cursor own = cursor.ahead(i);
        CUTLASS_PRAGMA_NO_UNROLL
        for (; i < slots; i += kSets, own = own.ahead(kSets)) {
          while (staged <= i) make();
          wait(shared.full[own.slot], own.parity);
          int const at = i * kSlotK + part * kWarpK;
          if (T::kWhole || at < width) {
            multiply(shared, shared.ring[own.slot] + part * T::kPartBytes, lane, at, width - at, sums);
          }
          // Always so. But asked of the sums, it keeps the slot from being given back before what was read of it is there.
          bool const read = (__float_as_uint(sums[0][0]) & __float_as_uint(sums[0][1]) & __float_as_uint(sums[1][0]) &
                             __float_as_uint(sums[1][1])) != 0xffffffff;
          if (read) shared.empty[own.slot].arrive();
        }
        cursor = cursor.after(slots);
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
    squares = sum_over_lanes<kLanes>(squares);
    if (lane == 0) shared.squares[warp] = squares;
    T::sync();
    Results::finish(shared, args, l, projection, tag, early);
    T::sync();  // who asks for others' results before this block's are on their way only holds them up
  }

 private:
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
      if (!T::kWhole && half * kPartK >= left) break;
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
        if (!T::kWhole && Weight::kUnitK < kPartK && unit * Weight::kUnitK >= left) break;
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
};

}  // namespace futransformer
