// Decode GEMM: out = epilogue(x W^T) for at most BatchTile sequences. Bound by reading W once.
//
//   x       bf16 [m, K] row-major; with XAhead = 0 read through a tensor map of [K / 32, m, 32], boxes of
//           [StageK / 32, BatchTile, 32]: rows from m on arrive as zeros
//   weight  fragment order (packing.py): row tiles of 16 output columns, each contiguous over K, 512 bytes a warp load
//
// A cluster of `Cluster` blocks owns RowTiles row tiles, and each of its blocks an equal slice of K. A producer warp
// streams the slice through a ring of Stages stages of StageK k, so that memory is busy whatever the other warps do.
// WarpRows x WarpSplit consumer warps multiply straight out of the ring: a warp owns RowTiles / WarpRows row tiles and
// every WarpSplit-th step of a stage's k. Each block of a cluster finishes its share of the columns, or of the rows where
// the epilogue takes columns in units: every block adds the sums of its warps, and sends what others finish into their
// shared memory. All sums are added in a fixed order. No result depends on timing, nor on what the other sequences of the
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
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cutlass/arch/barrier.h>

#include "barrier.cuh"
#include "bulk_copy.cuh"
#include "cluster.cuh"
#include "dependent_launch.cuh"
#include "fragment.cuh"
#include "numeric.cuh"
#include "split_activations.cuh"

namespace futransformer {

// When the next kernel may start: with this one, when a ring of stages is left to load, or with the last load.
enum class NextAt { Start, Lead, End };

// A row's `Columns` columns in shared memory, as the chain has left them for an operation that takes units of them, and
// its `Lanes` lanes.
template <int Columns, int Lanes>
struct FinishedRow {
  static constexpr int kColumns = Columns, kLanes = Lanes;
  float const* values;  // of any row, where this one is not valid
  int row;
  bool valid;
};

template <class Element, int K, int BatchTile, int RowTiles, int WarpRows, int WarpSplit, int Cluster, int Stages,
          int StageK, int XAhead, NextAt Next, bool Rotate>
struct DecodeGemm {
  using Weight = WeightFragment<Element>;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;

  // A warp advances by whole units, and multiplies what one load of weights or of activations covers at a time.
  static constexpr int kLoadK = Weight::kMmas * kMmaK;
  static constexpr int kBlockK = kLoadK > kGroupK ? kLoadK : kGroupK;
  static constexpr int kBlockLoads = kBlockK / kLoadK;
  static constexpr int kBlockGroups = kBlockK / kGroupK;
  static constexpr int kStepK = Weight::kUnitK > kBlockK ? Weight::kUnitK : kBlockK;
  static constexpr int kStepBlocks = kStepK / kBlockK;
  static constexpr int kSteps = StageK / (WarpSplit * kStepK);  // of each warp in a stage
  static constexpr int kSliceK = K / Cluster;
  static constexpr int kNumStages = (kSliceK + StageK - 1) / StageK;
  static constexpr int kAhead = Stages < kNumStages ? Stages : kNumStages;  // stages that fit before any is read
  static constexpr bool kSplit = Weight::kScaled && BatchTile <= kTileBatch;  // products of integers
  static constexpr bool kPaired = BatchTile == kSplitBatch;
  static constexpr int kBatchTiles = kSplit ? 1 : BatchTile / kTileBatch;
  static constexpr int kWarpTiles = RowTiles / WarpRows;

  static constexpr int kSliceBytes = kSliceK / Weight::kUnitK * Weight::kUnitBytes;  // of one row tile
  static constexpr int kRowTileBytes = Cluster * kSliceBytes;
  static constexpr int kChunkBytes = StageK / Weight::kUnitK * Weight::kUnitBytes;  // a stage's share of one row tile
  static constexpr int kStepBytes = kStepK / Weight::kUnitK * Weight::kUnitBytes;
  static constexpr int kStepScales = kStepBytes - kStepK / kLoadK * kLanes * int(sizeof(typename Weight::Load));
  static constexpr int kStageGroups = StageK / kGroupK;
  static constexpr int kGroupLoads = kGroupK * int(sizeof(bf16)) / kLoadBytes;  // of one row of x

  static constexpr bool kXInRing = XAhead == 0;
  static constexpr int kXBytes = kXInRing ? kStageGroups * BatchTile * kGroupLoads * kLoadBytes : 0;  // of a stage
  static constexpr int kRound = kXInRing ? 1 : XAhead;  // stages whose activations a lane holds at a time
  using X = std::conditional_t<kXInRing, CUtensorMap, bf16> const*;
  static constexpr bool kPrepareFirst = Cluster > 1 && !kXInRing;  // the epilogue, before any product

  // Partial sums [WarpSplit][BatchTile][kSumStride] float. Four floats of padding spread a warp's stores over all banks.
  static constexpr int kColumns = RowTiles * kTileRows;
  static constexpr int kOwnColumns = kColumns / Cluster;  // that this block finishes
  static constexpr int kSumStride = kColumns + 4;

  static constexpr int kConsumers = WarpRows * WarpSplit;
  static constexpr int kThreads = (kConsumers + 1) * kLanes;

  static_assert(K % (Cluster * kStepK) == 0, "a slice of K must be whole steps");
  static_assert(StageK % (WarpSplit * kStepK) == 0, "every warp takes whole steps of a stage");
  static_assert(RowTiles % WarpRows == 0 && RowTiles % Cluster == 0, "row tiles must divide among warps and blocks");
  static_assert(BatchTile % kTileBatch == 0 || (kSplit && kPaired), "four sequences are for integers");
  static_assert(kConsumers * kLanes >= BatchTile, "the epilogue needs a lane a row");

  // What each block of a cluster finishes: some columns of all rows, or all columns of every kStride-th row.
  template <bool ByRows>
  struct Share {
    static constexpr int kRows = ByRows ? BatchTile / Cluster : BatchTile;
    static constexpr int kStride = ByRows ? Cluster : 1;
    static constexpr int kWidth = ByRows ? kColumns : kOwnColumns;
    static_assert(kRows * kWidth == BatchTile * kOwnColumns, "rows must divide among the blocks");

    // In the epilogue a group of lanes, a power of two, shares a row.
    static constexpr int kRowLanes = [] {
      int lanes = kLanes;
      while (lanes * kRows > kConsumers * kLanes) lanes /= 2;
      return lanes;
    }();

    // Loads that a lane has under way when it adds up a row's partial sums: a hundred sums a row arrive after one wait.
    static constexpr int kRowLoads = kRowLanes >= 32 ? 1 : kRowLanes <= 4 ? 8 : 32 / kRowLanes;

    // Of m rows, this block's.
    CUTLASS_DEVICE static int rows(int m) { return ByRows ? (m - rank() + Cluster - 1) / Cluster : m; }
    CUTLASS_DEVICE static int row(int own) { return ByRows ? own * Cluster + rank() : own; }
    // Its first column, of those that the cluster multiplies.
    CUTLASS_DEVICE static int first_column() { return ByRows ? 0 : rank() * kOwnColumns; }
    CUTLASS_DEVICE static int block() { return ByRows ? int(blockIdx.x) / Cluster : int(blockIdx.x); }
    using Inbox = float[Cluster > 1 ? Cluster - 1 : 1][kRows][kWidth];  // what arrives from the other blocks
  };

  template <int Bytes>
  struct Room {
    unsigned char bytes[Bytes];
  };
  struct Empty {};
  template <int Bytes>
  using Gap = std::conditional_t<Bytes == 0, Empty, Room<Bytes>>;
  struct StageWeights {
    unsigned char weight[RowTiles][kChunkBytes];
  };
  struct StageBoth : StageWeights, Gap<-(RowTiles * kChunkBytes) & 127> {  // a box of x begins at a multiple of 128
    Words x[kStageGroups][BatchTile][kGroupLoads];
  };
  using Stage = std::conditional_t<kXInRing, StageBoth, StageWeights>;

  // One object lives in dynamic shared memory: the ring, later overlaid by the partial sums, and what stays.
  struct OneBlock {
    union {
      Stage ring[Stages];
      float partial[WarpSplit][BatchTile][kSumStride];
    };
    alignas(16) Barrier full[Stages];  // a stage's bytes have arrived
    Barrier empty[Stages];             // all lanes of the consumer warps have read it
  };
  // What the other blocks send, by rank (one's own left out). It may come while the ring is still being read.
  struct OneOfCluster : OneBlock {
    alignas(16) float inbox[Cluster > 1 ? Cluster - 1 : 1][BatchTile][kOwnColumns];  // or whole rows of BatchTile / Cluster
    alignas(16) Barrier arrived;  // the others' sums are all there
  };
  using Shared = std::conditional_t<Cluster == 1, OneBlock, OneOfCluster>;
  static constexpr int kSharedBytes = sizeof(Shared);

  // The stage at hand: its place in the ring, and the parity of how often the ring has been passed.
  struct Cursor {
    int slot = 0;
    uint32_t parity = 0;

    CUTLASS_DEVICE void advance() {
      if (++slot == Stages) {
        slot = 0;
        parity ^= 1;
      }
    }
  };

  using Activation = std::conditional_t<kPaired, SplitFragment, ActivationFragment>;
  using Sum = std::conditional_t<kPaired, SplitSumFragment, SumFragment>;
  using Sums = float[kWarpTiles][kBatchTiles][Sum::kSums];

  template <class Epilogue>
  CUTLASS_DEVICE static void run(X x, void const* weight, int m, Epilogue const& epilogue) {
    extern __shared__ __align__(128) char dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    int const warp = threadIdx.x / kLanes;
    int const lane = threadIdx.x % kLanes;
    bool const is_producer = warp == kConsumers;
    using Own = Share<(Epilogue::kUnit > 0)>;
    constexpr int kRowLanes = Own::kRowLanes;

    if (threadIdx.x == 0) {
      for (int slot = 0; slot < Stages; ++slot) {
        shared.full[slot].init(1);
        shared.empty[slot].init(kConsumers * kLanes);
      }
      if constexpr (Cluster > 1) {
        shared.arrived.init(1);
        shared.arrived.arrive_and_expect_tx((Cluster - 1) * Own::rows(m) * Own::kWidth * int(sizeof(float)));
      }
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if constexpr (Cluster > 1) arrive_at_cluster();  // this block has started: it may be sent sums

    // In the epilogue a group of lanes shares a row, and walks over its vectors of columns.
    constexpr int kWidth = Epilogue::kWidth;
    constexpr int kVectors = Own::kWidth / kWidth;
    static_assert(Own::kWidth % kWidth == 0, "a block finishes whole vectors");
    int const row = Own::row(threadIdx.x / kRowLanes);
    int vector = threadIdx.x % kRowLanes;
    bool const is_row = row < m;
    auto const column = [](int vector) { return (Own::block() * kVectors + vector) * 8; };
    typename Epilogue::Row state = {};
    typename Epilogue::Operands operands = {};

    Sums sums = {};
    if (is_producer) {
      if (lane == 0) stream(shared, x, static_cast<unsigned char const*>(weight));
    } else {
      multiply(shared, x, m, warp, lane, sums, [&] {
        wait_for_previous_kernel();
        state = epilogue.template begin<kRowLanes, Own::kRowLoads>(row, is_row);
        if (is_row && vector < kVectors) operands = epilogue.load(state, row, column(vector));
      });
    }

    __syncthreads();  // the ring has been read to its end: its memory is free
    if (!is_producer) store_partial(shared.partial[warp % WarpSplit], warp / WarpSplit, lane, sums);
    __syncthreads();
    if constexpr (Cluster > 1) {
      wait_for_cluster();
      if constexpr (Own::kStride > 1) {
        send_rows<kWidth>(shared, m);
      } else {
        if (is_row) send<kWidth>(shared, row, vector);
      }
      wait(shared.arrived, 0);
    }

    while (is_row && vector < kVectors) {
      float values[kWidth];
      add_partials(shared, row, Own::first_column() + vector * kWidth, values);
      if constexpr (Cluster > 1) {
        auto const& inbox = reinterpret_cast<typename Own::Inbox const&>(shared.inbox);
        CUTLASS_PRAGMA_UNROLL
        for (int other = 0; other < Cluster - 1; ++other) add(inbox[other][row / Own::kStride] + vector * kWidth, values);
      }
      epilogue.apply(state, operands, row, column(vector), values);
      if constexpr (Epilogue::kUnit > 0) keep(shared.partial[0][row] + vector * kWidth, values);
      vector += kRowLanes;
      if (vector < kVectors) operands = epilogue.load(state, row, column(vector));
    }
    if constexpr (Epilogue::kUnit > 0) {
      __syncwarp();
      float const* const finished = shared.partial[0][is_row ? row : 0];
      if (!is_producer) epilogue.copy(state, column(0), FinishedRow<kColumns, kRowLanes>{finished, row, is_row});
    }
    epilogue.template end<kRowLanes>(state, row, blockIdx.x, is_row);
  }

 private:
  CUTLASS_DEVICE static int rank() { return Cluster == 1 ? 0 : int(blockIdx.x) % Cluster; }

  // The k stage that comes first, and where the walk's `stage` lies on K.
  CUTLASS_DEVICE static int first_stage() { return Rotate ? int(blockIdx.x) / Cluster % kNumStages : 0; }
  CUTLASS_DEVICE static int place(int stage, int turned) {
    int const at = stage + turned;
    return Rotate && at >= kNumStages ? at - kNumStages : at;
  }

  // One thread: the block's slice of its row tiles, and of x if it goes this way, at most Stages ahead of the consumers.
  CUTLASS_DEVICE static void stream(Shared& shared, X x, unsigned char const* weight) {
    if constexpr (kXInRing) cute::prefetch_tma_descriptor(x);
    if constexpr (Next == NextAt::Start) allow_next_kernel();
    unsigned char const* tiles =
        weight + size_t(blockIdx.x) / Cluster * RowTiles * kRowTileBytes + rank() * kSliceBytes;
    int const turned = first_stage();
    // Nothing is unrolled: code that runs once is fetched once, and slowly.
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = 0; stage < kAhead; ++stage) load_weights(shared, stage, place(stage, turned), tiles);
    wait_for_previous_kernel();
    if constexpr (kXInRing) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int stage = 0; stage < kAhead; ++stage) load_x(shared, stage, place(stage, turned), x);
    }
    constexpr int kLead = kNumStages - Stages > kAhead ? kNumStages - Stages : kAhead;
    Cursor cursor;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = kAhead; stage < kNumStages; ++stage, cursor.advance()) {
      if (Next == NextAt::Lead && stage == kLead) allow_next_kernel();
      wait(shared.empty[cursor.slot], cursor.parity);
      load_weights(shared, cursor.slot, place(stage, turned), tiles);
      if constexpr (kXInRing) load_x(shared, cursor.slot, place(stage, turned), x);
    }
    if constexpr (Next == NextAt::End || (Next == NextAt::Lead && kLead >= kNumStages)) allow_next_kernel();
  }

  CUTLASS_DEVICE static void load_weights(Shared& shared, int slot, int stage, unsigned char const* tiles) {
    int const begin = stage * kChunkBytes;
    int const bytes = kSliceBytes - begin < kChunkBytes ? kSliceBytes - begin : kChunkBytes;
    shared.full[slot].arrive_and_expect_tx(RowTiles * bytes + kXBytes);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tile = 0; tile < RowTiles; ++tile) {
      load_bulk_once(shared.ring[slot].weight[tile], tiles + size_t(tile) * kRowTileBytes + begin, bytes,
                     shared.full[slot]);
    }
  }

  CUTLASS_DEVICE static void load_x(Shared& shared, int slot, int stage, CUtensorMap const* x) {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);  // every block reads it
    cute::SM90_TMA_LOAD_3D::copy(x, reinterpret_cast<uint64_t*>(&shared.full[slot]), kHint, shared.ring[slot].x, 0, 0,
                                 rank() * (kSliceK / kGroupK) + stage * kStageGroups);
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
    int const turned = first_stage();
    Operand operands[kRound][kSteps];  // stage s lies in operands[s % kRound]
    if constexpr (!kXInRing) {
      wait_for_previous_kernel();
      CUTLASS_PRAGMA_UNROLL
      for (int stage = 0; stage < kRound; ++stage) load_x(x, m, stage, turned, split, lane, operands[stage]);
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
          if (inside(place(stage, turned) * StageK + step * kStepK)) {
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
    bf16 const* const slice = x + rank() * kSliceK + Activation::k(lane);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      int const k = place(stage, turned) * StageK + (i * WarpSplit + split) * kStepK;
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

  // What a lane's codes of a unit are worth, in rows g and g + 8.
  struct Scales {
    float2 scale;
    uint32_t zeros;  // a byte each
  };
  CUTLASS_DEVICE static Scales read_scales(unsigned char const* unit, int lane) {
    Scales scales = {unpack_halves(*reinterpret_cast<uint32_t const*>(unit + Weight::kScales + lane / 4 * 4)), 0};
    if constexpr (Weight::kZeroPoints) {
      scales.zeros = *reinterpret_cast<uint16_t const*>(unit + Weight::kZeros + lane / 4 * 2);
    }
    return scales;
  }

  template <class Integers>
  CUTLASS_DEVICE static void multiply_integers(unsigned char const* unit, int lane, Integers const& x,
                                               ByteSums const (&start)[Integers::kBytes], float (&sums)[Sum::kSums]) {
    Scales const scales = read_scales(unit, lane);
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
    Scales scales[Tiles];
    uint32_t middle[Tiles][2];
    float products[Tiles][kBatchTiles][SumFragment::kSums] = {};
    unsigned char const* units[Tiles];
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < Tiles; ++tile) {
      units[tile] = stage.weight[first_tile + first + tile] + step * kStepBytes;
      scales[tile] = read_scales(units[tile], lane);
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

  CUTLASS_DEVICE static void store_partial(float (&partial)[BatchTile][kSumStride], int warp_row, int lane,
                                           Sums const& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kWarpTiles; ++tile) {
      int const first = (warp_row * kWarpTiles + tile) * kTileRows;
      CUTLASS_PRAGMA_UNROLL
      for (int batch = 0; batch < kBatchTiles; ++batch) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Sum::kSums; ++i) {
          partial[batch * kTileBatch + Sum::sequence(lane, i)][first + Sum::column(lane, i)] =
              sums[tile][batch][i];
        }
      }
    }
  }

  // values = this block's sums of columns first .. first + Width - 1 of a row, added split by split.
  template <int Width>
  CUTLASS_DEVICE static void add_partials(Shared const& shared, int row, int first, float (&values)[Width]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; ++i) values[i] = 0.f;
    // 32 floats at once: the loads of all partial sums together would cost the registers of the whole kernel.
    constexpr int kUnrolled = 32 / Width;
#pragma unroll kUnrolled
    for (int split = 0; split < WarpSplit; ++split) add(shared.partial[split][row] + first, values);
  }

  // values += Width neighbouring sums in shared memory.
  template <int Width>
  CUTLASS_DEVICE static void add(float const* sums, float (&values)[Width]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width / 4; ++i) {
      float4 const four = reinterpret_cast<float4 const*>(sums)[i];
      values[4 * i] += four.x;
      values[4 * i + 1] += four.y;
      values[4 * i + 2] += four.z;
      values[4 * i + 3] += four.w;
    }
  }

  // A lane's share of what a row has in the columns that other blocks finish: summed here, it travels once, and nobody
  // waits for loads from another multiprocessor.
  template <int Width>
  CUTLASS_DEVICE static void send(Shared& shared, int row, int first) {
    constexpr int kVectors = kOwnColumns / Width, kRowLanes = Share<false>::kRowLanes;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int vector = first; vector < (Cluster - 1) * kVectors; vector += kRowLanes) {
      int const other = vector / kVectors;
      int const to = other + (other >= rank());
      int const column = vector % kVectors * Width;
      float values[Width];
      add_partials(shared, row, to * kOwnColumns + column, values);
      send_vector(shared, to, shared.inbox[rank() - (rank() > to)][row] + column, values);
    }
  }

  // Where a block finishes all columns of some rows: one lane after another, of the other blocks' rows.
  template <int Width>
  CUTLASS_DEVICE static void send_rows(Shared& shared, int m) {
    constexpr int kVectors = kColumns / Width;
    auto& inbox = reinterpret_cast<typename Share<true>::Inbox&>(shared.inbox);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int item = threadIdx.x; item < m * kVectors; item += kThreads) {
      int const row = item / kVectors, column = item % kVectors * Width, to = row % Cluster;
      if (to == rank()) continue;
      float values[Width];
      add_partials(shared, row, column, values);
      send_vector(shared, to, inbox[rank() - (rank() > to)][row / Cluster] + column, values);
    }
  }

  // Sums to block `to`, where `inbox` is in its shared memory.
  template <int Width>
  CUTLASS_DEVICE static void send_vector(Shared& shared, int to, float* inbox, float const (&values)[Width]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; i += 4) {
      float4 const four = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
      store_in_block(four, inbox + i, shared.arrived, to);
    }
  }

  // Where the lane has just read its sums, which nobody else reads.
  template <int Width>
  CUTLASS_DEVICE static void keep(float* place, float const (&values)[Width]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; i += 4) {
      *reinterpret_cast<float4*>(place + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    }
  }

  // Whether a step at this k of the slice exists: the last stage may be short.
  CUTLASS_DEVICE static bool inside(int k) { return kSliceK % StageK == 0 || k < kSliceK; }
};

}  // namespace futransformer
