// What the producer and the consumers of prefill attention share: sizes, items' descriptions, rings and barriers.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "attention_schedule.cuh"
#include "attention_tiles.cuh"
#include "numeric.cuh"

namespace futransformer {

// `out` takes [tokens, Heads * HeadDim] (attention_prefill_output.cuh), `block_table` [sequences, block_table_stride],
// `cu_seqlens_q` [sequences + 1], `seqlens_k` [sequences], `tickets` [1], zero before and after. `kv_scale` [2]: what a
// code of K, and of V, is worth where pages hold E4M3.
template <class Output>
struct AttentionPrefillArguments {
  Output out;
  int const* block_table;
  int block_table_stride;
  int const* cu_seqlens_q;
  int const* seqlens_k;
  int sequences;
  int* tickets;
  float softmax_scale;
  float const* kv_scale = nullptr;
};

// One kernel's sizes, and its shared memory; the parameter `T` of producer and consumers. `KvElement`: of the pages;
// `Stages`: of K, and of V.
template <class KvElement_, int Heads_, int KvHeads_, int HeadDim_, int PageSize_, int TileM_, int TileN_, int Stages_,
          class Output>
struct AttentionPrefillTraits {
  using Element = bf16;  // of what is multiplied
  using KvElement = KvElement_;
  static constexpr bool kCodes = sizeof(KvElement) == 1;
  static constexpr int Heads = Heads_;
  static constexpr int KvHeads = KvHeads_;
  static constexpr int HeadDim = HeadDim_;
  static constexpr int PageSize = PageSize_;
  static constexpr int TileM = TileM_;
  static constexpr int TileN = TileN_;
  static constexpr int Stages = Stages_;
  static_assert(TileM == 128, "two consumer warpgroups of 64 queries");
  static_assert(TileN % PageSize == 0, "a tile of keys is a whole number of pages");
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kConsumerThreads = kConsumerWarpgroups * cutlass::NumThreadsPerWarpGroup;
  static constexpr int kConsumerWarps = kConsumerThreads / cutlass::NumThreadsPerWarp;
  static constexpr int kThreads = kConsumerThreads + cutlass::NumThreadsPerWarpGroup;
  // Registers a thread: the launch allocates 168 x 384; the producer's share goes to the consumers' accumulators. Of 40
  // the one that asks for tiles of codes would spill.
  static constexpr int kProducerRegisters = kCodes ? 56 : 40;
  static constexpr int kConsumerRegisters = kCodes ? 224 : 232;
  static constexpr int kConverterWarps = 3;  // beside the producer, of E4M3 pages

  // The next item's Q arrives while this one's is read. A description of an item outlives its Q by one tile: the output
  // is stored after the next item's first scores were issued.
  static constexpr int kQStages = 2;
  static constexpr int kWorkSlots = 4;

  using Tiles = AttentionTiles<Element, HeadDim, TileM, TileN, kQStages, Stages>;
  static constexpr int kBoxColumns = Tiles::kBoxColumns;
  static constexpr int kColumnBlocks = Tiles::kColumnBlocks;
  static constexpr int kPagesPerTile = TileN / PageSize;
  static constexpr uint32_t kQBytes = TileM * HeadDim * sizeof(Element);
  static constexpr int kTileElements = TileN * HeadDim;  // of K, and of V
  static constexpr uint32_t kTileBytes = kTileElements * sizeof(KvElement);  // on their way from memory

  using PipelineState = cutlass::PipelineState<Stages>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using Items = WorkList<Heads, TileM>;
  using Arguments = AttentionPrefillArguments<Output>;

  // An item as the consumers see it.
  struct alignas(16) Work {
    int tiles;  // of keys, at least one: queries that see no key need no path of their own; zero: no more items
    int sees;   // keys that the tile's first query sees; each query sees one more than the one before
    int seqlen_k;
    int head;
    int first_row;  // of Q and of the output
    int rows;       // of the output that belong to the sequence: those from TileM on are other items'
    int lacks_pages;  // the sequence is longer than its row of the block table: its output is NaN
  };

  struct Barriers {
    FullBarrier q_full[kQStages];
    FullBarrier k_full[Stages];
    FullBarrier v_full[Stages];
    EmptyBarrier q_empty[kQStages];
    EmptyBarrier k_empty[Stages];
    EmptyBarrier v_empty[Stages];
  };
  struct alignas(1024) SharedStorage {
    cute::array_aligned<Element, cute::cosize_v<typename Tiles::LayoutQ>, 1024> q;
    cute::array_aligned<Element, cute::cosize_v<typename Tiles::LayoutK>, 1024> k;
    cute::array_aligned<Element, cute::cosize_v<typename Tiles::LayoutV>, 1024> v;
    Work work[kWorkSlots];
    Barriers barriers;
  };

  // Who speaks for a warp that has written or read a stage: one lane where stages are filled by bulk copies alone, each lane
  // for itself where threads write them. racecheck does not carry a warp's own order on to the lane that speaks.
  static constexpr int kVoices = kCodes ? cutlass::NumThreadsPerWarp : 1;
  CUTLASS_DEVICE static bool speaks() { return kCodes || threadIdx.x % cutlass::NumThreadsPerWarp == 0; }

  // Tiles of E4M3 pages, on their way to becoming BF16. They stand behind the rest.
  static constexpr int kCodeStages = 2;
  enum class CodeKind : int { kKeys, kValues, kEnd };
  struct Codes {
    uint8_t tiles[kCodeStages][kTileElements];
    FullBarrier full[kCodeStages];
    EmptyBarrier empty[kCodeStages];
    CodeKind kind[kCodeStages];  // what a stage holds
  };
  using CodeState = cutlass::PipelineState<kCodeStages>;
  CUTLASS_DEVICE static Codes& codes(SharedStorage& shared) { return reinterpret_cast<Codes&>(*(&shared + 1)); }

  // What the launch must provide: the storage without the padding behind its last barrier.
  static constexpr int kSharedBytes =
      kCodes ? int(sizeof(SharedStorage) + sizeof(Codes)) : int(offsetof(SharedStorage, barriers) + sizeof(Barriers));
};

}  // namespace futransformer
