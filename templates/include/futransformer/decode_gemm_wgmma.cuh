// Decode GEMM of scaled weights by wgmma: out = epilogue(x W^T) for at most BatchTile sequences.
//
// As DecodeGemm (decode_gemm.cuh) with x in the ring, but for who multiplies: warpgroups. Weights become operands in
// registers, 64 rows at a time, and the Tensor Cores read x from shared memory, once for 64 rows where warps read it for
// each 16 or 32. GroupRows x GroupSplit warpgroups multiply out of the ring: one owns an equal share of the row tiles, and
// every GroupSplit-th unit of a stage's k. Where row tiles are no multiple of four times GroupRows, the last warps repeat
// the last one, and what they get is dropped.
//
// wgmma's A has mma.sync's order of k: a lane's are those of its word of codes. B's 16 bytes of a row are therefore words
// of four of x's 16 bytes: kConverters warps transpose the words of each row and 32 k, in place, as x comes.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>

#include "barrier.cuh"
#include "decode_block.cuh"
#include "decode_ring.cuh"
#include "fragment.cuh"
#include "numeric.cuh"
#include "register_wgmma.cuh"
#include "unit_scales.cuh"

namespace futransformer {

template <class Element, int K, int BatchTile, int RowTiles, int GroupRows, int GroupSplit, int Cluster, int Stages,
          int StageK, NextAt Next, bool Rotate, int InFlight = Stages, int Fetched = 0>
struct DecodeGemmWgmma {
  using Weight = WeightFragment<Element>;
  using Ring = DecodeRing<Element, K, BatchTile, RowTiles, Cluster, Stages, StageK, Next, Rotate, InFlight, Fetched>;
  using Cursor = typename Ring::Cursor;
  using Barrier = typename Ring::Barrier;
  using WarpBarrier = cutlass::arch::ClusterBarrier;
  using X = CUtensorMap const*;

  static constexpr int kGroupWarps = 4;
  static constexpr int kLoadK = Weight::kMmas * kMmaK;
  static constexpr int kUnitLoads = Weight::kUnitK / kLoadK;
  static constexpr int kSteps = StageK / (GroupSplit * Weight::kUnitK);  // of each warpgroup in a stage, a unit each
  static constexpr int kTiles = (RowTiles + kGroupWarps * GroupRows - 1) / (kGroupWarps * GroupRows);  // of 64 rows
  static constexpr int kNumStages = Ring::kNumStages;
  static constexpr int kBatchTiles = BatchTile / kTileBatch;
  static constexpr int kSums = SumFragment::kSums;
  static constexpr int kGroupBytes = BatchTile * kGroupK * int(sizeof(bf16));  // of x, 32 k
  static constexpr int kMmaBytes = kMmaK * int(sizeof(bf16));                // and of one row, 16

  static constexpr int kConsumers = GroupRows * GroupSplit * kGroupWarps;
  static constexpr int kConverters = 3;  // they and the producer are a warpgroup
  static constexpr int kThreads = (kConsumers + kGroupWarps) * kLanes;
  using Frame = DecodeBlock<BatchTile, RowTiles, GroupSplit, kConsumers, kConsumers + kGroupWarps, Cluster>;

  static_assert(Weight::kScaled, "weights are units with scales");
  static_assert(K % (Cluster * StageK) == 0, "a slice of K must be whole stages");
  static_assert(StageK % (GroupSplit * Weight::kUnitK) == 0, "every warpgroup takes whole units of a stage");
  static_assert(kUnitLoads == 2 || kSteps * kTiles % 2 == 0, "operands alternate between two sets of registers");

  // x first: a box's eight rows of 32 k begin at a multiple of 512 bytes, to which the swizzle refers.
  struct OneBlock {
    union {
      struct {
        typename Ring::Box x[Stages];
        typename Ring::Weights weight[Stages];
      } ring;
      typename Frame::Partial partial;
    };
    alignas(16) Barrier full[Stages];  // a stage's weights have arrived
    Barrier landed[Stages];            // its x has
    WarpBarrier ready[Stages];         // and is an operand
    WarpBarrier empty[Stages];         // all lanes of the warps that multiply have read it
  };
  using Shared = typename Frame::template Shared<OneBlock>;
  static constexpr int kSharedBytes = sizeof(Shared);

  using Products = float[kBatchTiles * kSums];  // of 64 rows, a lane's
  using Sums = float[kTiles][kBatchTiles][kSums];

  template <class Epilogue>
  CUTLASS_DEVICE static void run(X x, void const* weight, int m, Epilogue const& epilogue) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    int const warp = cutlass::canonical_warp_idx_sync();
    int const lane = threadIdx.x % kLanes;
    Sums sums = {};
    auto const init = [&] {
      for (int slot = 0; slot < Stages; ++slot) {
        shared.full[slot].init(1);
        shared.landed[slot].init(1);
        shared.ready[slot].init(kConverters);
        shared.empty[slot].init(kConsumers * kLanes);
      }
    };
    auto const work = [&](auto const& prepare) {
      if (warp < kConsumers) {
        multiply(shared, warp, lane, sums, prepare);
      } else if (warp < kConsumers + kConverters) {
        convert(shared, x, warp - kConsumers, lane);
      } else if (lane == 0) {
        stream(shared, x, weight);
      }
    };
    Frame::run(shared, m, epilogue, init, work, [&] { store_partial(shared.partial, warp, lane, sums); });
  }

 private:
  // One thread. Of a slot that is free again x comes first: it has the longer way.
  CUTLASS_DEVICE static void stream(Shared& shared, X x, void const* weight) {
    cute::prefetch_tma_descriptor(x);
    unsigned char const* const tiles = Ring::slice(weight);
    auto const load_weights = [&](int slot, int stage) {
      Ring::load_weights(shared.ring.weight[slot], shared.full[slot], stage, tiles, 0);
    };
    auto const load_x = [&](int slot, int stage) { DecodeGemmWgmma::load_x(shared, x, slot, stage); };
    Ring::stream(shared.full, shared.empty, tiles, load_weights, load_x, [&](int slot, int stage) {
      load_x(slot, stage);
      load_weights(slot, stage);
    });
  }

  // One thread: x of a stage.
  CUTLASS_DEVICE static void load_x(Shared& shared, X x, int slot, int stage) {
    shared.landed[slot].arrive_and_expect_tx(sizeof(typename Ring::Box));
    Ring::load_x(shared.ring.x[slot], shared.landed[slot], stage, x);
  }

  // A warp transposes the words of eight rows and 32 k at a time: word c of a row's t-th 16 bytes becomes word t of its
  // c-th, at the place that the 64-byte swizzle gives it. No two lanes meet in a bank.
  CUTLASS_DEVICE static void convert(Shared& shared, X x, int warp, int lane) {
    constexpr int kBlocks = Ring::kStageGroups * kBatchTiles;  // of eight rows, consecutive in shared memory
    constexpr int kAtOnce = 4;
    int const row = lane / 4, t = lane % 4;
    if constexpr (Ring::kBounded) {
      if (warp == 0 && lane == 0) Ring::begin_x([&](int slot, int stage) { load_x(shared, x, slot, stage); });
      __syncwarp();
    }
    Cursor cursor;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = 0; stage < kNumStages; ++stage, cursor.advance()) {
      wait(shared.landed[cursor.slot], cursor.parity);
      Words* const blocks = &shared.ring.x[cursor.slot][0][0][0];
      CUTLASS_PRAGMA_NO_UNROLL
      for (int first = warp; first < kBlocks; first += kAtOnce * kConverters) {
        Words words[kAtOnce];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          int const block = first + i * kConverters;
          if (block < kBlocks) words[i] = blocks[block * kLanes + lane];
        }
        __syncwarp();
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          int const block = first + i * kConverters;
          if (block >= kBlocks) break;
          CUTLASS_PRAGMA_UNROLL
          for (int c = 0; c < 4; ++c) {
            blocks[block * kLanes + SwizzledFragment::load(row, c)].word[t] = words[i].word[c];
          }
        }
      }
      cutlass::arch::fence_view_async_shared();  // wgmma reads through the async proxy
      __syncwarp();
      if (lane == 0) shared.ready[cursor.slot].arrive();
    }
  }

  // The products of 64 rows and a unit meet in `products`, and are added to `sums` before the next ones begin. Operands of
  // a load are made while the Tensor Cores work on the load before, in the other set of registers.
  template <class Prepare>
  CUTLASS_DEVICE static void multiply(Shared& shared, int warp, int lane, Sums& sums, Prepare const& prepare) {
    int const group = warp / kGroupWarps;
    int const split = group % GroupSplit;
    Products products = {};
    Words operands[2][Weight::kMmas];
    float2 worth = {0.f, 0.f};  // of the products, in the rows g and g + 8

    Cursor cursor;
    int read = 0;  // slot of the stage before
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = 0; stage < kNumStages; ++stage, cursor.advance()) {
      wait(shared.full[cursor.slot], cursor.parity);
      uint64_t const x = wgmma_descriptor(&shared.ring.x[cursor.slot]);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        int const step = i * GroupSplit + split;
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kTiles; ++tile) {
          int const own = row_tile(warp, tile);
          bool const repeats = GroupRows * kTiles * kGroupWarps != RowTiles && own >= RowTiles;
          unsigned char const* unit =
              shared.ring.weight[cursor.slot][repeats ? RowTiles - 1 : own] + step * Weight::kUnitBytes;
          typename Weight::Load packed[kUnitLoads];
          CUTLASS_PRAGMA_UNROLL
          for (int load = 0; load < kUnitLoads; ++load) {
            packed[load] = reinterpret_cast<typename Weight::Load const*>(unit)[load * kLanes + lane];
          }
          UnitScales<Weight> const scales(unit, lane);
          CUTLASS_PRAGMA_UNROLL
          for (int load = 0; load < kUnitLoads; ++load) {
            auto& operand = operands[((i * kTiles + tile) * kUnitLoads + load) % 2];
            make_operands(packed[load], scales, operand);
            if (load == 0) {
              wait_for_wgmma<0>(products);
              add_products(products, worth, sums[(tile + kTiles - 1) % kTiles]);
              worth = scales.scale;
              if (i == 0 && tile == 0) {
                // Of the stage before everything has been used: the products waited for it. Each lane gives back what it
                // has read itself.
                if (stage > 0) shared.empty[read].arrive();
                read = cursor.slot;
                wait(shared.ready[cursor.slot], cursor.parity);
              }
            }
            begin_wgmma(products);
            int const first_group = (step * Weight::kUnitK + load * kLoadK) / kGroupK;
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < Weight::kMmas; ++j) {
              uint64_t const b = x + ((first_group + j / 2) * kGroupBytes + j % 2 * kMmaBytes) / kLoadBytes;
              multiply_wgmma(operand[j], b, products, load > 0 || j > 0);
            }
            commit_wgmma();
            if (load == kUnitLoads - 1 && kUnitLoads > 1) wait_for_wgmma<1>(products);
          }
        }
      }
      if (stage == Ring::kAhead - 1) prepare();
    }
    wait_for_wgmma<0>(products);
    add_products(products, worth, sums[kTiles - 1]);
  }

  CUTLASS_DEVICE static int row_tile(int warp, int tile) {
    return (warp / kGroupWarps / GroupSplit * kTiles + tile) * kGroupWarps + warp % kGroupWarps;
  }

  CUTLASS_DEVICE static void make_operands(typename Weight::Load const& packed, UnitScales<Weight> const& scales,
                                           Words (&operands)[Weight::kMmas]) {
    uint32_t const middle[2] = {Weight::middle(scales.zeros & 0xff), Weight::middle(scales.zeros >> 8)};
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Weight::kMmas; ++j) {
      operands[j] = Weight::operand(packed, j);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) operands[j].word[i] = subtract_bf16x2(operands[j].word[i], middle[i % 2]);
    }
  }

  CUTLASS_DEVICE static void add_products(Products const& products, float2 worth, float (&sums)[kBatchTiles][kSums]) {
    CUTLASS_PRAGMA_UNROLL
    for (int batch = 0; batch < kBatchTiles; ++batch) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums; ++i) sums[batch][i] += (i < 2 ? worth.x : worth.y) * products[batch * kSums + i];
    }
  }

  CUTLASS_DEVICE static void store_partial(typename Frame::Partial& partial, int warp, int lane, Sums const& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      int const own = row_tile(warp, tile);
      if (own >= RowTiles) break;
      CUTLASS_PRAGMA_UNROLL
      for (int batch = 0; batch < kBatchTiles; ++batch) {
        Frame::template store<SumFragment>(partial[warp / kGroupWarps % GroupSplit], own, batch, lane, sums[tile][batch]);
      }
    }
  }
};

}  // namespace futransformer
