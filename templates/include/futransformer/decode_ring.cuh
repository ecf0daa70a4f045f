// What a decode GEMM's weights, and x where it travels with them, pass on their way: a ring of stages in shared memory.
//
// Blocks of a cluster have an equal slice of K of RowTiles row tiles each. One thread asks for a slice's stages of StageK k,
// at most Stages ahead of those who multiply, and with at most InFlight of them under way: what is asked for beyond what
// memory needs to be busy only delays what others wait for, the activations of the kernel before above all. Fetched stages
// behind the first fill are asked into L2 while the kernel before is not done: memory works on, and they are not in the way
// of what comes from L2. With Rotate, clusters begin at different stages and walk around.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>

#include "barrier.cuh"
#include "bulk_copy.cuh"
#include "dependent_launch.cuh"
#include "fragment.cuh"
#include "numeric.cuh"

namespace futransformer {

// When the next kernel may start: with this one, when a ring of stages is left to load, or with the last load.
enum class NextAt { Start, Lead, End };

template <class Element, int K, int BatchTile, int RowTiles, int Cluster, int Stages, int StageK, NextAt Next, bool Rotate,
          int InFlight = Stages, int Fetched = 0>
struct DecodeRing {
  using Weight = WeightFragment<Element>;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;

  static constexpr int kSliceK = K / Cluster;
  static constexpr int kNumStages = (kSliceK + StageK - 1) / StageK;
  static constexpr int kAhead = Stages < kNumStages ? Stages : kNumStages;  // stages that fit before any is read
  static_assert(0 < InFlight && InFlight <= Stages, "at least a stage is under way, at most as many as the ring holds");
  static constexpr bool kBounded = InFlight < Stages;
  static constexpr int kFetched = kAhead + Fetched < kNumStages ? kAhead + Fetched : kNumStages;

  static constexpr int kSliceBytes = kSliceK / Weight::kUnitK * Weight::kUnitBytes;  // of one row tile
  static constexpr int kRowTileBytes = Cluster * kSliceBytes;
  static constexpr int kChunkBytes = StageK / Weight::kUnitK * Weight::kUnitBytes;  // a stage's share of one row tile

  static constexpr int kStageGroups = StageK / kGroupK;
  static constexpr int kGroupLoads = kGroupK * int(sizeof(bf16)) / kLoadBytes;  // of one row of x
  using Weights = unsigned char[RowTiles][kChunkBytes];       // of a stage
  using Box = Words[kStageGroups][BatchTile][kGroupLoads];  // of x

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

  CUTLASS_DEVICE static int rank() { return Cluster == 1 ? 0 : int(blockIdx.x) % Cluster; }

  // The k stage that comes first, and where the walk's `stage` lies on K.
  CUTLASS_DEVICE static int first_stage() { return Rotate ? int(blockIdx.x) / Cluster % kNumStages : 0; }
  CUTLASS_DEVICE static int place(int stage, int turned) {
    int const at = stage + turned;
    return Rotate && at >= kNumStages ? at - kNumStages : at;
  }

  // Whether a step at this k of the slice exists: the last stage may be short.
  CUTLASS_DEVICE static bool inside(int k) { return kSliceK % StageK == 0 || k < kSliceK; }

  // One thread. Each of the three loads a stage into a slot: its weights, its x, and both where others have read the slot.
  // With a bound `full` is of the weights alone, which are told of by it when x has not been asked for yet; x of the first
  // fill is then asked for by another thread (begin_x), for this one may wait for weights when x is there to be read.
  template <class EmptyBarrier, class LoadWeights, class LoadX, class Refill>
  CUTLASS_DEVICE static void stream(Barrier const (&full)[Stages], EmptyBarrier const (&empty)[Stages],
                                    unsigned char const* tiles, LoadWeights const& load_weights, LoadX const& load_x,
                                    Refill const& refill) {
    if constexpr (Next == NextAt::Start) allow_next_kernel();
    int const turned = first_stage();
    Cursor arriving;  // what must be there before `stage` is asked for
    auto const await_earlier = [&](int stage) {
      if (!kBounded || stage < InFlight) return;
      wait(full[arriving.slot], arriving.parity);
      arriving.advance();
    };
    // Nothing is unrolled: code that runs once is fetched once, and slowly.
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = 0; stage < kAhead; ++stage) {
      await_earlier(stage);
      load_weights(stage, place(stage, turned));
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = kAhead; stage < kFetched; ++stage) fetch_weights(place(stage, turned), tiles);
    wait_for_previous_kernel();
    if constexpr (!kBounded) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int stage = 0; stage < kAhead; ++stage) load_x(stage, place(stage, turned));
    }
    constexpr int kLead = kNumStages - Stages > kAhead ? kNumStages - Stages : kAhead;
    Cursor cursor;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = kAhead; stage < kNumStages; ++stage, cursor.advance()) {
      if (Next == NextAt::Lead && stage == kLead) allow_next_kernel();
      wait(empty[cursor.slot], cursor.parity);
      if constexpr (kBounded) {
        load_x(cursor.slot, place(stage, turned));
        await_earlier(stage);
        load_weights(cursor.slot, place(stage, turned));
      } else {
        refill(cursor.slot, place(stage, turned));
      }
    }
    if constexpr (Next == NextAt::End || (Next == NextAt::Lead && kLead >= kNumStages)) allow_next_kernel();
  }

  // One thread, of those that do not stream: x of the first fill, as soon as the kernel before is done.
  template <class LoadX>
  CUTLASS_DEVICE static void begin_x(LoadX const& load_x) {
    int const turned = first_stage();
    wait_for_previous_kernel();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = 0; stage < kAhead; ++stage) load_x(stage, place(stage, turned));
  }

  // This block's slice of its row tiles.
  CUTLASS_DEVICE static unsigned char const* slice(void const* weight) {
    return static_cast<unsigned char const*>(weight) + size_t(blockIdx.x) / Cluster * RowTiles * kRowTileBytes +
           rank() * kSliceBytes;
  }

  // `full` then waits for as many bytes more as the caller says.
  CUTLASS_DEVICE static void load_weights(Weights& weights, Barrier& full, int stage, unsigned char const* tiles,
                                          int more_bytes) {
    int const begin = stage * kChunkBytes;
    int const bytes = kSliceBytes - begin < kChunkBytes ? kSliceBytes - begin : kChunkBytes;
    full.arrive_and_expect_tx(RowTiles * bytes + more_bytes);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tile = 0; tile < RowTiles; ++tile) {
      load_bulk_once(weights[tile], tiles + size_t(tile) * kRowTileBytes + begin, bytes, full);
    }
  }

  CUTLASS_DEVICE static void fetch_weights(int stage, unsigned char const* tiles) {
    int const begin = stage * kChunkBytes;
    int const bytes = kSliceBytes - begin < kChunkBytes ? kSliceBytes - begin : kChunkBytes;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tile = 0; tile < RowTiles; ++tile) fetch_bulk(tiles + size_t(tile) * kRowTileBytes + begin, bytes);
  }

  CUTLASS_DEVICE static void load_x(Box& box, Barrier& full, int stage, CUtensorMap const* x) {
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);  // every block reads it
    cute::SM90_TMA_LOAD_3D::copy(x, reinterpret_cast<uint64_t*>(&full), kHint, box, 0, 0,
                                 rank() * (kSliceK / kGroupK) + stage * kStageGroups);
  }
};

}  // namespace futransformer
