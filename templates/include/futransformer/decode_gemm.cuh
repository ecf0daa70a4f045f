// Decode GEMM: out = epilogue(x W^T) for at most BatchTile sequences. Bound by reading W once.
//
//   x       bf16 [m, K] row-major; with XAhead = 0 read through a tensor map of [K / 32, m, 32], boxes of
//           [StageK / 32, BatchTile, 32]: rows from m on arrive as zeros
//   weight  fragment order (packing.py): row tiles of 16 output columns, each contiguous over K, 512 bytes a warp load
//
// A cluster of `Cluster` blocks owns RowTiles row tiles, and each of its blocks an equal slice of K. A producer warp
// streams the slice through a ring of Stages stages of StageK k (decode_ring.cuh), so that memory is busy whatever the
// other warps do.
// WarpRows x WarpSplit consumer warps multiply straight out of the ring: a warp owns RowTiles / WarpRows row tiles and
// every WarpSplit-th step of a stage's k. Each block of a cluster finishes its share of the columns, or of the rows where
// the epilogue takes columns in units: every block adds the sums of its warps, and sends what others finish into their
// shared memory (decode_block.cuh). All sums are added in a fixed order. No result depends on timing, nor on what the other sequences of the
// batch hold.
//
// x comes in one of two ways. Every lane loads its own share from L2, XAhead stages ahead: a warp with all row tiles of
// the block to itself then needs each element once. Or, with XAhead = 0, x travels in the ring, beside the weights of
// the same k, so that any number of warps may share it.
//
// Every block of a stage of k reads the same lines of x, which few slices of L2 hold. With Rotate, clusters begin at
// different stages and walk around: where blocks come in waves, and many read x at the same time, that is faster. The
// order of a column's sums is then its block's, and still fixed.
//
// Weights are constants: the ring is filled with them before the kernel waits for its predecessor.
// The element type of the weights enters through WeightFragment alone; codes become BF16 operands in registers, exactly.
// Four-bit ones are units of K with their own scales (fragment.cuh), by which a unit's sums are multiplied in float32; of
// E4M3 the epilogue multiplies a row's complete sum.
#pragma once

#include <type_traits>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cutlass/arch/barrier.h>

#include "barrier.cuh"
#include "decode_block.cuh"
#include "decode_ring.cuh"
#include "dependent_launch.cuh"
#include "fragment.cuh"
#include "numeric.cuh"
#include "split_activations.cuh"
#include "unit_scales.cuh"

namespace futransformer {

template <class Element, int K, int BatchTile, int RowTiles, int WarpRows, int WarpSplit, int Cluster, int Stages,
          int StageK, int XAhead, NextAt Next, bool Rotate, int InFlight, int Fetched = 0>
struct DecodeGemm {
  using Weight = WeightFragment<Element>;
  using Ring = DecodeRing<Element, K, BatchTile, RowTiles, Cluster, Stages, StageK, Next, Rotate, InFlight, Fetched>;
  using Cursor = typename Ring::Cursor;
  using Barrier = typename Ring::Barrier;

  // A warp advances by whole units, and multiplies what one load of weights or of activations covers at a time.
  static constexpr int kLoadK = Weight::kMmas * kMmaK;
  static constexpr int kBlockK = kLoadK > kGroupK ? kLoadK : kGroupK;
  static constexpr int kBlockLoads = kBlockK / kLoadK;
  static constexpr int kBlockGroups = kBlockK / kGroupK;
  static constexpr int kStepK = Weight::kUnitK > kBlockK ? Weight::kUnitK : kBlockK;
  static constexpr int kStepBlocks = kStepK / kBlockK;
  static constexpr int kSteps = StageK / (WarpSplit * kStepK);  // of each warp in a stage
  static constexpr int kSliceK = Ring::kSliceK;
  static constexpr int kNumStages = Ring::kNumStages;
  static constexpr int kAhead = Ring::kAhead;
  static constexpr bool kSplit = Weight::kScaled && BatchTile <= kTileBatch;  // products of integers
  static constexpr bool kPaired = BatchTile == kSplitBatch;
  static constexpr int kBatchTiles = kSplit ? 1 : BatchTile / kTileBatch;
  static constexpr int kWarpTiles = RowTiles / WarpRows;

  static constexpr int kStepBytes = kStepK / Weight::kUnitK * Weight::kUnitBytes;
  static constexpr int kStepScales = kStepBytes - kStepK / kLoadK * kLanes * int(sizeof(typename Weight::Load));

  static constexpr bool kXInRing = XAhead == 0;
  static constexpr bool kXAlone = kXInRing && Ring::kBounded;  // a barrier of its own tells that x is there
  static constexpr int kXBytes = kXInRing ? int(sizeof(typename Ring::Box)) : 0;  // of a stage
  static constexpr int kRound = kXInRing ? 1 : XAhead;  // stages whose activations a lane holds at a time
  using X = std::conditional_t<kXInRing, CUtensorMap, bf16> const*;
  static constexpr bool kPrepareFirst = Cluster > 1 && !kXInRing;  // the epilogue, before any product

  static constexpr int kConsumers = WarpRows * WarpSplit;
  static constexpr int kThreads = (kConsumers + 1) * kLanes;
  using Frame = DecodeBlock<BatchTile, RowTiles, WarpSplit, kConsumers, kConsumers + 1, Cluster>;

  static_assert(K % (Cluster * kStepK) == 0, "a slice of K must be whole steps");
  static_assert(StageK % (WarpSplit * kStepK) == 0, "every warp takes whole steps of a stage");
  static_assert(RowTiles % WarpRows == 0, "row tiles must divide among warps");
  static_assert(BatchTile % kTileBatch == 0 || (kSplit && kPaired), "four sequences are for integers");

  template <int Bytes>
  struct Room {
    unsigned char bytes[Bytes];
  };
  struct Empty {};
  template <int Bytes>
  using Gap = std::conditional_t<Bytes == 0, Empty, Room<Bytes>>;
  struct StageWeights {
    typename Ring::Weights weight;
  };
  struct StageBoth : StageWeights, Gap<-int(sizeof(typename Ring::Weights)) & 127> {  // a box of x begins at a multiple of 128
    typename Ring::Box x;
  };
  using Stage = std::conditional_t<kXInRing, StageBoth, StageWeights>;

  // One object lives in dynamic shared memory: the ring, later overlaid by the partial sums, and what stays.
  struct OneBlock {
    union {
      Stage ring[Stages];
      typename Frame::Partial partial;
    };
    alignas(16) Barrier full[Stages];  // a stage's bytes have arrived
    Barrier empty[Stages];             // all lanes of the consumer warps have read it
  };
  struct OneBlockOfX : OneBlock {
    alignas(16) Barrier landed[Stages];  // a stage's x has arrived
  };
  using Shared = typename Frame::template Shared<std::conditional_t<kXAlone, OneBlockOfX, OneBlock>>;
  static constexpr int kSharedBytes = sizeof(Shared);

  using Activation = std::conditional_t<kPaired, SplitFragment, ActivationFragment>;
  using Sum = std::conditional_t<kPaired, SplitSumFragment, SumFragment>;
  using Sums = float[kWarpTiles][kBatchTiles][Sum::kSums];

  template <class Epilogue>
  CUTLASS_DEVICE static void run(X x, void const* weight, int m, Epilogue const& epilogue) {
    extern __shared__ __align__(128) char dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    int const warp = threadIdx.x / kLanes;
    int const lane = threadIdx.x % kLanes;
    Sums sums = {};
    auto const init = [&] {
      for (int slot = 0; slot < Stages; ++slot) {
        shared.full[slot].init(1);
        shared.empty[slot].init(kConsumers * kLanes);
        if constexpr (kXAlone) shared.landed[slot].init(1);
      }
    };
    auto const work = [&](auto const& prepare) {
      if (warp == kConsumers) {
        if (lane == 0) stream(shared, x, weight);
      } else {
        multiply(shared, x, m, warp, lane, sums, prepare);
      }
    };
    Frame::run(shared, m, epilogue, init, work, [&] { store_partial(shared.partial, warp, lane, sums); });
  }

 private:
  // One thread: the block's slice of its row tiles, and of x if it goes this way.
  CUTLASS_DEVICE static void stream(Shared& shared, X x, void const* weight) {
    if constexpr (kXInRing && !kXAlone) cute::prefetch_tma_descriptor(x);
    unsigned char const* const tiles = Ring::slice(weight);
    auto const load_weights = [&](int slot, int stage) {
      Ring::load_weights(shared.ring[slot].weight, shared.full[slot], stage, tiles, kXAlone ? 0 : kXBytes);
    };
    auto const load_x = [&](int slot, int stage) {
      if constexpr (kXAlone) {
        load_x_alone(shared, x, slot, stage);
      } else if constexpr (kXInRing) {
        Ring::load_x(shared.ring[slot].x, shared.full[slot], stage, x);
      }
    };
    Ring::stream(shared.full, shared.empty, tiles, load_weights, load_x, [&](int slot, int stage) {
      load_weights(slot, stage);
      load_x(slot, stage);
    });
  }

  // One thread: x of a stage, which its own barrier tells of.
  CUTLASS_DEVICE static void load_x_alone(Shared& shared, X x, int slot, int stage) {
    shared.landed[slot].arrive_and_expect_tx(kXBytes);
    Ring::load_x(shared.ring[slot].x, shared.landed[slot], stage, x);
  }

  using Block = Words[kBlockGroups][kBatchTiles];  // a lane's activations of one block
  using Operand = Block[kStepBlocks];              // of one step

  // `prepare` asks for what the epilogue needs. The lanes of a cluster do so while their first x is on its way: all blocks
  // run at once then, and nobody's products hide it later (8B at 32 sequences, qkv alone: 15.3 us, after the stages
  // filled ahead 15.6). Else once these are multiplied: their slots are being refilled then, so what it waits for delays
  // nobody.
  template <class Prepare>
  CUTLASS_DEVICE static void multiply(Shared& shared, X x, int m, int warp, int lane, Sums& sums,
                                      Prepare const& prepare) {
    int const first_tile = warp / WarpSplit * kWarpTiles;
    int const split = warp % WarpSplit;
    int const turned = Ring::first_stage();
    Operand operands[kRound][kSteps];  // stage s lies in operands[s % kRound]
    if constexpr (!kXInRing) {
      wait_for_previous_kernel();
      CUTLASS_PRAGMA_UNROLL
      for (int stage = 0; stage < kRound; ++stage) load_x(x, m, stage, turned, split, lane, operands[stage]);
    }
    if constexpr (kXAlone) {
      if (warp == 0 && lane == 0) {
        cute::prefetch_tma_descriptor(x);
        Ring::begin_x([&](int slot, int stage) { load_x_alone(shared, x, slot, stage); });
      }
      __syncwarp();
    }
    if constexpr (kPrepareFirst) prepare();
    Cursor cursor;
    int read = 0;  // slot of the stage before
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < kNumStages; first += kRound) {
      CUTLASS_PRAGMA_UNROLL
      for (int turn = 0; turn < kRound; ++turn, cursor.advance()) {
        int const stage = first + turn;
        if (kNumStages % kRound != 0 && stage >= kNumStages) break;
        wait(shared.full[cursor.slot], cursor.parity);
        if constexpr (kXAlone) wait(shared.landed[cursor.slot], cursor.parity);
        // Only now is the stage before given back: its products have been issued, so its loads have returned. Right
        // behind the loads, an arrival overtakes those that still queue, and the producer overwrites what they are
        // about to read. Every lane speaks for its own reads: nothing needs to order one lane's before another's arrival.
        // Nobody waits for the last stages.
        if (stage > 0) shared.empty[read].arrive();
        read = cursor.slot;
        // Step s of a stage belongs to split s % WarpSplit, so that the last, shorter stage is shared out evenly too.
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSteps; ++i) {
          int const step = i * WarpSplit + split;
          if (Ring::inside(Ring::place(stage, turned) * StageK + step * kStepK)) {
            multiply_step(shared.ring[cursor.slot], first_tile, step, lane, operands[turn][i], sums);
          }
        }
        if constexpr (!kXInRing) load_x(x, m, stage + kRound, turned, split, lane, operands[turn]);
      }
      if (!kPrepareFirst && first == (kAhead - 1) / kRound * kRound) prepare();
    }
  }

  // Lane (g, t) takes load t of row g: a warp's loads are 512 consecutive bytes. (Of four sequences: half as many.)
  CUTLASS_DEVICE static void read_x(Stage const& stage, int block, int lane, Block& x) {
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kBlockGroups; ++group) {
      CUTLASS_PRAGMA_UNROLL
      for (int batch = 0; batch < kBatchTiles; ++batch) {
        x[group][batch] = (&stage.x[block * kBlockGroups + group][batch * kTileBatch][0])[kPaired ? lane / 8 * 4 + lane % 4 : lane];
      }
    }
  }

  // All of a warp's steps of a stage, from global memory. Rows past the batch and stages past the end are zero, unread.
  CUTLASS_DEVICE static void load_x(bf16 const* x, int m, int stage, int turned, int split, int lane,
                                    Operand (&steps)[kSteps]) {
    bf16 const* const slice = x + Ring::rank() * kSliceK + Activation::k(lane);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      int const k = Ring::place(stage, turned) * StageK + (i * WarpSplit + split) * kStepK;
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kStepK / kGroupK; ++group) {
        CUTLASS_PRAGMA_UNROLL
        for (int batch = 0; batch < kBatchTiles; ++batch) {
          int const row = batch * kTileBatch + Activation::sequence(lane);
          Words words = {};
          if (stage < kNumStages && k < kSliceK && row < m) {
            words = *reinterpret_cast<Words const*>(slice + size_t(row) * K + k + group * kGroupK);
          }
          steps[i][group / kBlockGroups][group % kBlockGroups][batch] = words;
        }
      }
    }
  }

  // One step of a warp's row tiles. Where weights are scaled, a step is a unit, whose products meet in sums of their own.
  CUTLASS_DEVICE static void multiply_step(Stage const& stage, int first_tile, int step, int lane, Operand& x,
                                           Sums& sums) {
    if constexpr (kSplit) {
      if constexpr (kXInRing) {
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < kStepBlocks; ++block) read_x(stage, step * kStepBlocks + block, lane, x[block]);
      }
      using Integers = SplitActivations<BatchTile, kStepK / kGroupK>;
      Integers const integers(&x[0][0][0], lane);
      ByteSums start[Integers::kBytes] = {};
      if constexpr (!Weight::kZeroPoints) integers.lower(Weight::kZero, start);
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kWarpTiles; ++tile) {
        multiply_integers(stage.weight[first_tile + tile] + step * kStepBytes, lane, integers, start, sums[tile][0]);
      }
    } else if constexpr (Weight::kScaled) {
      constexpr int kPair = 2;  // tiles at a time: products that do not wait for one another, and few registers
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kWarpTiles; first += kPair) {
        if (kWarpTiles - first < kPair) {
          multiply_units<1>(stage, first_tile, first, step, lane, x, sums);
        } else {
          multiply_units<kPair>(stage, first_tile, first, step, lane, x, sums);
        }
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kStepBlocks; ++block) {
        if constexpr (kXInRing) read_x(stage, step * kStepBlocks + block, lane, x[block]);
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kWarpTiles; ++tile) {
          auto const* loads = reinterpret_cast<typename Weight::Load const*>(stage.weight[first_tile + tile]);
          multiply_block(loads + (step * kStepBlocks + block) * kBlockLoads * kLanes + lane, x[block],
                         [](uint32_t word, int) { return word; }, sums[tile]);
        }
      }
    }
  }

  template <class Integers>
  CUTLASS_DEVICE static void multiply_integers(unsigned char const* unit, int lane, Integers const& x,
                                               ByteSums const (&start)[Integers::kBytes], float (&sums)[Sum::kSums]) {
    UnitScales<Weight> const scales(unit, lane);
    ByteSums products[Integers::kBytes];
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kStepBlocks; ++block) {
      auto const packed = reinterpret_cast<typename Weight::Load const*>(unit)[block * kLanes + lane];
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kBlockGroups; ++group) {
        uint32_t const g = packed.word[2 * group], g8 = packed.word[2 * group + 1];
        Words const a = {{Weight::bytes(g, 0), Weight::bytes(g8, 0), Weight::bytes(g, 1), Weight::bytes(g8, 1)}};
        if (block == 0 && group == 0) {
          x.multiply(a, 0, start, products);
        } else {
          x.multiply(a, block * kBlockGroups + group, products, products);
        }
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Sum::kSums; ++i) {
      int const half = i / Integers::kColumns, column = i % Integers::kColumns;
      int32_t sum = Integers::joined(products, i);
      if constexpr (Weight::kZeroPoints) sum -= int32_t(half ? scales.zeros >> 8 : scales.zeros & 0xff) * x.sum[column];
      sums[i] += (half ? scales.scale.y : scales.scale.x) * x.scale[column] * float(sum);
    }
  }

  // A unit of `Tiles` row tiles.
  template <int Tiles>
  CUTLASS_DEVICE static void multiply_units(Stage const& stage, int first_tile, int first, int step, int lane,
                                            Operand& x, Sums& sums) {
    UnitScales<Weight> scales[Tiles];
    uint32_t middle[Tiles][2];
    float products[Tiles][kBatchTiles][SumFragment::kSums] = {};
    unsigned char const* units[Tiles];
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < Tiles; ++tile) {
      units[tile] = stage.weight[first_tile + first + tile] + step * kStepBytes;
      scales[tile] = UnitScales<Weight>(units[tile], lane);
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) middle[tile][half] = Weight::middle(scales[tile].zeros >> 8 * half & 0xff);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kStepBlocks; ++block) {
      if constexpr (kXInRing) read_x(stage, step * kStepBlocks + block, lane, x[block]);
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < Tiles; ++tile) {
        auto const* loads = reinterpret_cast<typename Weight::Load const*>(units[tile]);
        multiply_block(loads + block * kBlockLoads * kLanes + lane, x[block],
                       [&](uint32_t word, int half) { return subtract_bf16x2(word, middle[tile][half]); },
                       products[tile]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < Tiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int batch = 0; batch < kBatchTiles; ++batch) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < SumFragment::kSums; ++i) {
          sums[first + tile][batch][i] += (i < 2 ? scales[tile].scale.x : scales[tile].scale.y) * products[tile][batch][i];
        }
      }
    }
  }

  // A block of a row tile, from the lane's first load of it. `lower` makes an operand's words, of row g + 8 half, final.
  template <class Lower>
  CUTLASS_DEVICE static void multiply_block(typename Weight::Load const* loads, Block const& x, Lower const& lower,
                                            float (&sums)[kBatchTiles][Sum::kSums]) {
    typename Weight::Load packed[kBlockLoads];
    CUTLASS_PRAGMA_UNROLL
    for (int load = 0; load < kBlockLoads; ++load) packed[load] = loads[load * kLanes];
    CUTLASS_PRAGMA_UNROLL
    for (int mma = 0; mma < kBlockK / kMmaK; ++mma) {
      Words a = Weight::operand(packed[mma / Weight::kMmas], mma % Weight::kMmas);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) a.word[i] = lower(a.word[i], i % 2);
      CUTLASS_PRAGMA_UNROLL
      for (int batch = 0; batch < kBatchTiles; ++batch) {
        Words const& group = x[mma / 2][batch];
        float(&d)[Sum::kSums] = sums[batch];
        cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(
            d[0], d[1], d[2], d[3], a.word[0], a.word[1], a.word[2], a.word[3],
            ActivationFragment::operand(group, mma % 2, 0), ActivationFragment::operand(group, mma % 2, 1),
            d[0], d[1], d[2], d[3]);
      }
    }
  }

  CUTLASS_DEVICE static void store_partial(typename Frame::Partial& partial, int warp, int lane, Sums const& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kWarpTiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int batch = 0; batch < kBatchTiles; ++batch) {
        Frame::template store<Sum>(partial[warp % WarpSplit], warp / WarpSplit * kWarpTiles + tile, batch, lane,
                                    sums[tile][batch]);
      }
    }
  }
};

}  // namespace futransformer
