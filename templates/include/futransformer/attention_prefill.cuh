// Prefill attention for sm_90a: O = softmax(scale Q K^T + causal mask) V, BF16 operands, float32 softmax and sums.
//
// Varlen, causal, grouped-query, over paged K and V (docs/architecture.md has the layouts). The grid is persistent: a
// block computes a share of a list of items (attention_schedule.cuh), an item being TileM queries of one head of one
// sequence. Warp 0 is the producer: it finds the items and keeps rings of Q, K and V full by TMA, a box of one page by
// 64 features (128 swizzled bytes) at a time, without a break from one item to the next. Warpgroups 1 and 2 own 64
// queries each. Keys are walked from the last visible tile to the first, so that masking is over after the first tiles.
//
// Three overlaps keep the tensor cores busy while the special-function units compute exponentials. Within a warpgroup,
// the scores of the next tile and the output of the last one are issued together, and the softmax of the one runs
// beside the multiplication of the other. From item to item this goes on: the first scores of the next item are issued
// with the last output of this one. Between the warpgroups, named barriers make them take turns at issuing, so that
// one's softmax falls into the other's multiplications.
//
// What must never reach a result:
// - keys past a query's own position, among them unused slots of the last page: scores are *replaced* by -inf.
// - V of unused slots: 0 x NaN is NaN, so the consumers overwrite the last page's tail with zeros in shared memory.
// - pages past the end: their entries of the block table are not read; a box outside the tensor arrives as zeros.
// - rows of Q past the sequence (another sequence's, or none): each row of the result depends on its own row of Q
//   alone, and those rows are not stored.
#pragma once

#include <cstddef>

#include <cute/tensor.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "attention_schedule.cuh"
#include "attention_tiles.cuh"
#include "barrier.cuh"
#include "numeric.cuh"
#include "softmax.cuh"

namespace futransformer {

// Transpose the 4 x 4 matrix that a quad of lanes holds, one row of words each.
CUTLASS_DEVICE void transpose_over_quad(uint32_t (&words)[4]) {
  CUTLASS_PRAGMA_UNROLL
  for (int distance = 1; distance <= 2; distance *= 2) {
    bool const upper = threadIdx.x & distance;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      uint32_t& low = words[i];
      uint32_t& high = words[i + distance];
      uint32_t const received = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
      (upper ? low : high) = received;
    }
  }
}

// `out` [tokens, Heads * HeadDim], `block_table` [sequences, block_table_stride], `cu_seqlens_q` [sequences + 1],
// `seqlens_k` [sequences], `tickets` [1], zero before and after.
template <class Element>
struct AttentionPrefillArguments {
  Element* out;
  int const* block_table;
  int block_table_stride;
  int const* cu_seqlens_q;
  int const* seqlens_k;
  int sequences;
  int* tickets;
  float softmax_scale;
};

// `Turns`: the consumers take turns at issuing. `RescaleThreshold`: see OnlineSoftmax.
template <class Element, int Heads, int KvHeads, int HeadDim, int PageSize, int TileM, int TileN, int Stages,
          bool Turns, int RescaleThreshold>
struct AttentionPrefill {
  static_assert(TileM == 128, "two consumer warpgroups of 64 queries");
  static_assert(TileN % PageSize == 0, "a tile of keys is a whole number of pages");
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kConsumerThreads = kConsumerWarpgroups * cutlass::NumThreadsPerWarpGroup;
  static constexpr int kConsumerWarps = kConsumerThreads / cutlass::NumThreadsPerWarp;
  static constexpr int kThreads = kConsumerThreads + cutlass::NumThreadsPerWarpGroup;
  // Registers a thread: the launch allocates 168 x 384; the producer's share goes to the consumers' accumulators.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  // The next item's Q arrives while this one's is read. A description of an item outlives its Q by one tile: the output
  // is stored after the next item's first scores were issued.
  static constexpr int kQStages = 2;
  static constexpr int kWorkSlots = 4;

  using Tiles = AttentionTiles<Element, HeadDim, TileM, TileN, kQStages, Stages>;
  static constexpr int kBoxColumns = Tiles::kBoxColumns;
  static constexpr int kColumnBlocks = Tiles::kColumnBlocks;
  static constexpr int kPagesPerTile = TileN / PageSize;
  static constexpr uint32_t kQBytes = TileM * HeadDim * sizeof(Element);
  static constexpr uint32_t kTileBytes = TileN * HeadDim * sizeof(Element);  // of K, and of V

  using PipelineState = cutlass::PipelineState<Stages>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using Items = WorkList<Heads, TileM>;

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
  // What the launch must provide: the storage without the padding behind its last barrier.
  static constexpr int kSharedBytes = int(offsetof(SharedStorage, barriers) + sizeof(Barriers));

  using Arguments = AttentionPrefillArguments<Element>;

  // The grid is (blocks, 1, 1), at most one block a multiprocessor.
  CUTLASS_DEVICE static void run(CUtensorMap const& map_q, CUtensorMap const& map_k, CUtensorMap const& map_v,
                                 Arguments const& arguments) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

    if (threadIdx.x == 0) {
      initialise(shared.barriers);
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();

    int const warpgroup = cutlass::canonical_warp_group_idx();
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (cutlass::canonical_warp_idx_sync() == 0) produce(shared, map_q, map_k, map_v, arguments);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(shared, arguments, warpgroup - 1);
    }
  }

 private:
  // Rows of the tensor maps of K and V at which the pages of one tile begin.
  struct PageRows {
    int row[kPagesPerTile];
  };

  CUTLASS_DEVICE static void initialise(Barriers& barriers) {
    for (int stage = 0; stage < kQStages; ++stage) {
      barriers.q_full[stage].init(1);
      barriers.q_empty[stage].init(kConsumerWarps);
    }
    for (int stage = 0; stage < Stages; ++stage) {
      barriers.k_full[stage].init(1);
      barriers.v_full[stage].init(1);
      barriers.k_empty[stage].init(kConsumerWarps);
      barriers.v_empty[stage].init(kConsumerWarps);
    }
  }

  CUTLASS_DEVICE static void load_box(CUtensorMap const& map, FullBarrier& full, Element* target, int column, int row) {
    uint64_t const hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), hint, target, column, row);
  }

  // A tile of K or V: kPagesPerTile pages, each kColumnBlocks boxes.
  CUTLASS_DEVICE static void load_tile(CUtensorMap const& map, FullBarrier& full, Element* target,
                                       PageRows const& pages) {
    full.arrive_and_expect_tx(kTileBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kColumnBlocks; ++block) {
      CUTLASS_PRAGMA_UNROLL
      for (int page = 0; page < kPagesPerTile; ++page) {
        Element* const box = target + Tiles::box_offset(TileN, block, page * PageSize);
        load_box(map, full, box, block * kBoxColumns, pages.row[page]);
      }
    }
  }

  CUTLASS_DEVICE static Work describe(Arguments const& arguments, typename Items::Item const& item) {
    int const begin = arguments.cu_seqlens_q[item.sequence];
    int const seqlen_q = arguments.cu_seqlens_q[item.sequence + 1] - begin;
    int const room = arguments.block_table_stride * PageSize;
    Work work;
    work.seqlen_k = arguments.seqlens_k[item.sequence];
    work.sees = item.first_query + 1 + work.seqlen_k - seqlen_q;
    work.tiles = max(1, (visible_keys(work.sees, min(work.seqlen_k, room)) + TileN - 1) / TileN);
    work.head = item.head;
    work.first_row = begin + item.first_query;
    work.rows = seqlen_q - item.first_query;
    work.lacks_pages = work.seqlen_k > room;
    return work;
  }

  // Of `keys` that exist, those that the item's last query sees; zero or less: none.
  CUTLASS_DEVICE static int visible_keys(int sees, int keys) { return min(keys, sees + TileM - 1); }

  // One warp; its first lane issues the copies.
  CUTLASS_DEVICE static void produce(SharedStorage& shared, CUtensorMap const& map_q, CUtensorMap const& map_k,
                                     CUtensorMap const& map_v, Arguments const& arguments) {
    bool const leads = threadIdx.x == 0;
    if (leads) {
      for (CUtensorMap const* map : {&map_q, &map_k, &map_v}) {
        cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(map));
      }
    }
    Barriers& barriers = shared.barriers;
    PipelineState k(0, 1, 0);  // a fresh ring is empty: its "previous" phase has passed
    PipelineState v(0, 1, 0);
    auto load_k = [&](PageRows const& pages) {
      wait(barriers.k_empty[k.index()], k.phase());
      if (leads) load_tile(map_k, barriers.k_full[k.index()], shared.k.data() + k.index() * TileN * HeadDim, pages);
      ++k;
    };
    auto load_v = [&](PageRows const& pages) {
      wait(barriers.v_empty[v.index()], v.phase());
      if (leads) load_tile(map_v, barriers.v_full[v.index()], shared.v.data() + v.index() * TileN * HeadDim, pages);
      ++v;
    };

    Tickets tickets(arguments.tickets);
    Items items(arguments.cu_seqlens_q, arguments.seqlens_k, arguments.sequences);
    typename Items::Item item;
    PageRows pages;  // of the tile whose K is on its way and whose V is not yet
    int count = 0;   // items so far
    CUTLASS_PRAGMA_NO_UNROLL
    for (; items.find(tickets.item(), item); tickets.next()) {
      tickets.ask();
      Work const work = describe(arguments, item);
      int const visible = visible_keys(work.sees, min(work.seqlen_k, arguments.block_table_stride * PageSize));
      int const stage = count % kQStages;
      wait(barriers.q_empty[stage], count / kQStages % 2 ^ 1);
      if (leads) {
        shared.work[count % kWorkSlots] = work;
        barriers.q_full[stage].arrive_and_expect_tx(kQBytes);
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < kColumnBlocks; ++block) {
          Element* const box = shared.q.data() + stage * TileM * HeadDim + Tiles::box_offset(TileM, block, 0);
          load_box(map_q, barriers.q_full[stage], box, work.head * HeadDim + block * kBoxColumns, work.first_row);
        }
      }
      int const* const table = arguments.block_table + int64_t(item.sequence) * arguments.block_table_stride;
      int const kv_head = item.head / (Heads / KvHeads);
      // In the order of use: the scores of a tile are computed before the output of the tile before it.
      CUTLASS_PRAGMA_NO_UNROLL
      for (int tile = work.tiles - 1; tile >= 0; --tile) {
        PageRows next;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPagesPerTile; ++i) {
          int const page = tile * kPagesPerTile + i;
          // A box that lies outside the tensor is filled with zeros.
          next.row[i] = page * PageSize < visible ? (table[page] * KvHeads + kv_head) * PageSize : -PageSize;
        }
        load_k(next);
        if (k.count() > 1) load_v(pages);
        pages = next;
      }
      ++count;
    }
    tickets.finish(items.size());
    if (count > 0) load_v(pages);
    // The end is an item without tiles, with an empty tile of K, for which the consumers need no case of their own.
    wait(barriers.q_empty[count % kQStages], count / kQStages % 2 ^ 1);
    wait(barriers.k_empty[k.index()], k.phase());
    if (leads) {
      shared.work[count % kWorkSlots].tiles = 0;
      barriers.q_full[count % kQStages].arrive();
      barriers.k_full[k.index()].arrive();
    }
  }

  // Issue one tile's wgmma, a group of its own: c = a b, or c += a b. Both stay in flight.
  template <class Mma, class A, class B, class C>
  CUTLASS_DEVICE static void issue(Mma& mma, cute::GMMA::ScaleOut accumulate, A const& a, B const& b, C& c) {
    using namespace cute;
    warpgroup_fence_operand(c);
    warpgroup_arrive();
    mma.accumulate_ = accumulate;
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < size<2>(a); ++step) {
      gemm(mma, a(_, _, step), b(_, _, step), c);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  }

  // A warp has finished reading a stage.
  CUTLASS_DEVICE static void release(EmptyBarrier const& empty) {
    if (threadIdx.x % cutlass::NumThreadsPerWarp == 0) empty.arrive();
  }

  // Named barriers of the consumers.
  enum NamedBarrierId { kTurn, kTurnOfSecond, kTailIsZero };

  CUTLASS_DEVICE static void wait_for_turn(int consumer) {
    if constexpr (Turns) cutlass::arch::NamedBarrier::sync(kConsumerThreads, kTurn + consumer);
  }
  CUTLASS_DEVICE static void pass_turn(int consumer) {
    if constexpr (Turns) cutlass::arch::NamedBarrier::arrive(kConsumerThreads, kTurn + (consumer ^ 1));
  }

  // Overwrite the rows of a stage of V from `first` on, by both consumers. Whole rows of 128 bytes, so the swizzle,
  // which permutes within a row, does not matter.
  CUTLASS_DEVICE static void zero_tail(Element* stage_of_v, int first) {
    constexpr int kWords = kBoxColumns * sizeof(Element) / sizeof(uint4);  // a row
    int const thread = threadIdx.x - cutlass::NumThreadsPerWarpGroup;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kColumnBlocks; ++block) {
      uint4* const words = reinterpret_cast<uint4*>(stage_of_v + Tiles::box_offset(TileN, block, 0));
      for (int i = first * kWords + thread; i < TileN * kWords; i += kConsumerThreads) words[i] = uint4{};
    }
    cutlass::arch::fence_view_async_shared();  // wgmma reads through the async proxy
    cutlass::arch::NamedBarrier::sync(kConsumerThreads, kTailIsZero);
  }

  // Divide a finished output by its sums and write it.
  template <class Tensor>
  CUTLASS_DEVICE static void store(Arguments const& arguments, Work const& work, int row_in_tile,
                                   float const (&sum)[2], Tensor const& output_by_row) {
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < 2; ++row) {
      float const factor = work.lacks_pages ? NAN : inverse_of_quad_sum(sum[row]);
      bool const stored = row_in_tile + 8 * row < work.rows;
      int64_t const offset = int64_t(work.first_row + row_in_tile + 8 * row) * (Heads * HeadDim) + work.head * HeadDim;
      uint4* const target = reinterpret_cast<uint4*>(arguments.out + offset) + threadIdx.x % 4;
      // Four groups of eight columns at a time: a lane has two columns of each, and wants all of one.
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < HeadDim / 32; ++group) {
        uint32_t words[4];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          int const column = 2 * (4 * group + i);
          words[i] = pack_bf16x2(output_by_row(row, column) * factor, output_by_row(row, column + 1) * factor);
        }
        transpose_over_quad(words);
        if (stored) target[4 * group] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  CUTLASS_DEVICE static void consume(SharedStorage& shared, Arguments const& arguments, int consumer) {
    using namespace cute;
    Barriers& barriers = shared.barriers;
    int const thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
    int const lane = thread % cutlass::NumThreadsPerWarp;
    // This thread's two rows of the tile, eight apart; of each, accumulator columns 8 j + 2 (lane % 4) + {0, 1}.
    int const first_row = consumer * 64 + thread / cutlass::NumThreadsPerWarp * 16 + lane / 4;

    typename Tiles::MmaScores mma_scores;
    typename Tiles::MmaOutput mma_output;
    auto slice_scores = mma_scores.get_slice(thread);
    auto slice_output = mma_output.get_slice(thread);
    auto const shared_q = make_tensor(make_smem_ptr(shared.q.data()), typename Tiles::LayoutQ{});
    auto const shared_k = make_tensor(make_smem_ptr(shared.k.data()), typename Tiles::LayoutK{});
    auto const shared_v = make_tensor(make_smem_ptr(shared.v.data()), typename Tiles::LayoutV{});
    auto const my_q = local_tile(shared_q, Shape<_64, Int<HeadDim>>{}, make_coord(consumer, 0, _));
    auto fragment_q = slice_scores.make_fragment_A(slice_scores.partition_A(my_q));
    auto fragment_k = slice_scores.make_fragment_B(slice_scores.partition_B(shared_k));
    auto fragment_v = slice_output.make_fragment_B(slice_output.partition_B(shared_v));

    auto scores = partition_fragment_C(mma_scores, Shape<_64, Int<TileN>>{});
    auto output = partition_fragment_C(mma_output, Shape<_64, Int<HeadDim>>{});
    auto scores_by_row = rows_and_columns(scores);
    auto output_by_row = rows_and_columns(output);
    auto probabilities = make_tensor<Element>(partition_shape_A(mma_output, Shape<_64, Int<TileN>>{}));
    OnlineSoftmax<RescaleThreshold> softmax(arguments.softmax_scale);
    float correction[2];

    PipelineState k;
    PipelineState v;
    int count = 0;  // the item whose scores are computed, and the tile of its keys
    int tiles;
    int tile;
    int sees;

    // Go to item `count`, and wait for its Q; false past the last one.
    auto enter_item = [&] {
      wait(barriers.q_full[count % kQStages], count / kQStages % 2);
      Work const& work = shared.work[count % kWorkSlots];
      sees = work.sees;
      tiles = work.tiles;
      tile = tiles - 1;
      return tiles > 0;
    };
    auto work_before = [&]() -> Work const& { return shared.work[(count + kWorkSlots - 1) % kWorkSlots]; };
    auto issue_scores = [&] {
      auto const item_q = fragment_q(_, _, _, count % kQStages);
      auto const tile_k = fragment_k(_, _, _, k.index());
      issue(mma_scores, GMMA::ScaleOut::Zero, item_q, tile_k, scores);
    };
    auto issue_output = [&] {
      wait(barriers.v_full[v.index()], v.phase());
      auto const tile_v = fragment_v(_, _, _, v.index());
      issue(mma_output, GMMA::ScaleOut::One, probabilities, tile_v, output);
    };
    // The scores have arrived: give back what they were computed from, and hide what the queries must not see.
    auto finish_scores = [&] {
      warpgroup_fence_operand(scores);
      release(barriers.k_empty[k.index()]);
      ++k;
      if (tile == 0) release(barriers.q_empty[count % kQStages]);
      // A tile needs no mask when the warpgroup's first query sees all of it. Replace, not add: an unused slot's score
      // may be NaN. Keys from the sequence's end on are hidden from all rows that are stored.
      if ((tile + 1) * TileN > sees + consumer * 64) {
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < 2; ++row) {
          int const hidden = sees + first_row + 8 * row - tile * TileN - 2 * (lane % 4);
          CUTLASS_PRAGMA_UNROLL
          for (int column = 0; column < size<1>(scores_by_row); ++column) {
            if (column / 2 * 8 + column % 2 >= hidden) scores_by_row(row, column) = -INFINITY;
          }
        }
      }
    };
    // The scores' accumulator and P's operand hold the same elements in the same order (AttentionTiles).
    auto round_probabilities = [&] {
      auto packed = recast<uint32_t>(probabilities);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(packed); ++i) packed(i) = pack_bf16x2(scores(2 * i), scores(2 * i + 1));
      warpgroup_fence_operand(probabilities);
    };
    // The item's first tile of V is the next in the ring; its tail past the sequence may hold NaN.
    auto begin_output = [&](Work const& work) {
      clear(output);
      if (work.seqlen_k < work.tiles * TileN) {
        wait(barriers.v_full[v.index()], v.phase());
        zero_tail(shared.v.data() + v.index() * TileN * HeadDim, max(0, work.seqlen_k - (work.tiles - 1) * TileN));
      }
    };
    // Go to the next tile, of this item or the next; false at the end.
    auto advance = [&] {
      if (tile > 0) {
        --tile;
        return true;
      }
      ++count;
      return enter_item();
    };
    auto wait_for_k = [&] { wait(barriers.k_full[k.index()], k.phase()); };

    if (!enter_item()) return;
    wait_for_k();
    issue_scores();
    warpgroup_wait<0>();
    finish_scores();
    softmax.update(scores_by_row, correction);
    wait_for_k();
    round_probabilities();
    begin_output(shared.work[0]);

    if (consumer == 1) pass_turn(consumer);
    CUTLASS_PRAGMA_NO_UNROLL
    while (advance()) {
      // Scores and probabilities of this tile; the output of the tile before.
      wait_for_turn(consumer);
      issue_scores();
      issue_output();
      pass_turn(consumer);

      warpgroup_wait<1>();
      finish_scores();
      bool const begins = tile == tiles - 1;
      float const finished_sum[2] = {softmax.sum[0], softmax.sum[1]};
      if (begins) softmax.reset();
      softmax.update(scores_by_row, correction);

      // Two things keep the exponentials beside the output's wgmma, for ptxas moves arithmetic freely past the wait for
      // it: that wait comes behind the loop that waits for the next K, and the vote on rescaling asks for the sums too,
      // so that all of them are finished before that loop.
      bool const corrects = correction[0] != 1.f || correction[1] != 1.f;
      bool const rescales = __any_sync(0xffffffffu, corrects || !(softmax.sum[0] + softmax.sum[1] >= 0.f));
      wait_for_k();
      warpgroup_wait<0>();
      warpgroup_fence_operand(output);
      warpgroup_fence_operand(probabilities);
      release(barriers.v_empty[v.index()]);
      ++v;
      round_probabilities();
      if (begins) {
        store(arguments, work_before(), first_row, finished_sum, output_by_row);
        begin_output(shared.work[count % kWorkSlots]);
      } else if (rescales) {
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < 2; ++row) {
          CUTLASS_PRAGMA_UNROLL
          for (int column = 0; column < size<1>(output_by_row); ++column) output_by_row(row, column) *= correction[row];
        }
      }
    }

    issue_output();
    warpgroup_wait<0>();
    warpgroup_fence_operand(output);
    store(arguments, work_before(), first_row, softmax.sum, output_by_row);
    if (consumer == 0) wait_for_turn(consumer);  // the second warpgroup's last turn: every barrier ends as it began
  }
};

}  // namespace futransformer
