// Prefill attention for sm_90a: O = softmax(scale Q K^T + causal mask) V, BF16 operands, float32 softmax and sums.
//
// Varlen, causal, grouped-query, over paged K and V (docs/architecture.md has the layouts). One block computes TileM
// queries of one head of one sequence. Warpgroup 0 is the producer: one thread keeps a ring of `Stages` tiles of K and
// one of V in flight by TMA, a box of one page by 64 features (128 swizzled bytes) at a time. Warpgroups 1 and 2 own 64
// queries each. Keys are walked from the last visible tile to the first, so that masking is over after the first tiles.
//
// Two overlaps keep the tensor cores busy while the special-function units compute exponentials. Within a warpgroup,
// the scores of the next tile and the output of the last one are issued together, and the softmax of the one runs
// beside the multiplication of the other. Between the warpgroups, named barriers make them take turns at issuing, so
// that one's softmax falls into the other's multiplications.
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
// `seqlens_k` [sequences].
template <class Element>
struct AttentionPrefillArguments {
  Element* out;
  int const* block_table;
  int block_table_stride;
  int const* cu_seqlens_q;
  int const* seqlens_k;
  float softmax_scale;
};

template <class Element, int Heads, int KvHeads, int HeadDim, int PageSize, int TileM, int TileN, int Stages>
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

  using Tiles = AttentionTiles<Element, HeadDim, TileM, TileN, Stages>;
  static constexpr int kBoxColumns = Tiles::kBoxColumns;
  static constexpr int kColumnBlocks = Tiles::kColumnBlocks;
  static constexpr int kPagesPerTile = TileN / PageSize;
  static constexpr uint32_t kQBytes = TileM * HeadDim * sizeof(Element);
  static constexpr uint32_t kTileBytes = TileN * HeadDim * sizeof(Element);  // of K, and of V

  using PipelineState = cutlass::PipelineState<Stages>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  struct Barriers {
    FullBarrier q_full;
    FullBarrier k_full[Stages];
    FullBarrier v_full[Stages];
    EmptyBarrier k_empty[Stages];
    EmptyBarrier v_empty[Stages];
  };
  struct alignas(1024) SharedStorage {
    cute::array_aligned<Element, cute::cosize_v<typename Tiles::LayoutQ>, 1024> q;
    cute::array_aligned<Element, cute::cosize_v<typename Tiles::LayoutK>, 1024> k;
    cute::array_aligned<Element, cute::cosize_v<typename Tiles::LayoutV>, 1024> v;
    Barriers barriers;
  };
  // What the launch must provide: the storage without the padding behind its last barrier.
  static constexpr int kSharedBytes = int(offsetof(SharedStorage, barriers) + sizeof(Barriers));

  using Arguments = AttentionPrefillArguments<Element>;

  // The grid is (heads, sequences, query tiles of the longest sequence). Blocks start roughly in that order, tiles
  // slowest and the last, longest ones first; the heads of a group run side by side and share K and V in L2.
  CUTLASS_DEVICE static void run(CUtensorMap const& map_q, CUtensorMap const& map_k, CUtensorMap const& map_v,
                                 Arguments const& arguments) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

    Work const work(arguments);
    if (work.first_query >= work.seqlen_q) return;

    if (threadIdx.x == 0) {
      initialise(shared.barriers);
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();

    int const warpgroup = cutlass::canonical_warp_group_idx();
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (threadIdx.x == 0) produce(shared, map_q, map_k, map_v, arguments, work);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(shared, arguments, work, warpgroup - 1);
    }
  }

 private:
  // What one block computes, in tokens of its sequence.
  struct Work {
    int head;
    int sequence;
    int first_query;
    int first_row;  // row of Q and of the output that holds first_query
    int seqlen_q;
    int seqlen_k;
    int shift;    // query i sees the keys up to i + shift
    int visible;  // keys that the tile's last query sees; zero or less: none
    int tiles;    // of keys; at least one, so that queries that see no key need no path of their own
    bool lacks_pages;  // the sequence is longer than its row of the block table: its output is NaN

    CUTLASS_DEVICE explicit Work(Arguments const& arguments)
        : head(blockIdx.x), sequence(blockIdx.y), first_query((gridDim.z - 1 - blockIdx.z) * TileM) {
      int const begin = arguments.cu_seqlens_q[sequence];
      first_row = begin + first_query;
      seqlen_q = arguments.cu_seqlens_q[sequence + 1] - begin;
      seqlen_k = arguments.seqlens_k[sequence];
      shift = seqlen_k - seqlen_q;
      int const room = arguments.block_table_stride * PageSize;
      lacks_pages = seqlen_k > room;
      visible = min(min(seqlen_k, room), first_query + TileM + shift);
      tiles = max(1, (visible + TileN - 1) / TileN);
    }
  };

  // Rows of the tensor maps of K and V at which the pages of one tile begin.
  struct PageRows {
    int row[kPagesPerTile];
  };

  CUTLASS_DEVICE static void initialise(Barriers& barriers) {
    barriers.q_full.init(1);
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

  CUTLASS_DEVICE static PageRows page_rows(Arguments const& arguments, Work const& work, int tile) {
    int const* const table = arguments.block_table + int64_t(work.sequence) * arguments.block_table_stride;
    int const kv_head = work.head / (Heads / KvHeads);
    PageRows pages;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPagesPerTile; ++i) {
      int const page = tile * kPagesPerTile + i;
      // A box that lies outside the tensor is filled with zeros.
      pages.row[i] = page * PageSize < work.visible ? (table[page] * KvHeads + kv_head) * PageSize : -PageSize;
    }
    return pages;
  }

  CUTLASS_DEVICE static void produce(SharedStorage& shared, CUtensorMap const& map_q, CUtensorMap const& map_k,
                                     CUtensorMap const& map_v, Arguments const& arguments, Work const& work) {
    for (CUtensorMap const* map : {&map_q, &map_k, &map_v}) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(map));
    }
    Barriers& barriers = shared.barriers;
    barriers.q_full.arrive_and_expect_tx(kQBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kColumnBlocks; ++block) {
      Element* const box = shared.q.data() + Tiles::box_offset(TileM, block, 0);
      load_box(map_q, barriers.q_full, box, work.head * HeadDim + block * kBoxColumns, work.first_row);
    }

    PipelineState k(0, 1, 0);  // a fresh ring is empty: its "previous" phase has passed
    PipelineState v(0, 1, 0);
    auto load_k = [&](PageRows const& pages) {
      wait(barriers.k_empty[k.index()], k.phase());
      load_tile(map_k, barriers.k_full[k.index()], shared.k.data() + k.index() * TileN * HeadDim, pages);
      ++k;
    };
    auto load_v = [&](PageRows const& pages) {
      wait(barriers.v_empty[v.index()], v.phase());
      load_tile(map_v, barriers.v_full[v.index()], shared.v.data() + v.index() * TileN * HeadDim, pages);
      ++v;
    };
    // In the order of use: the scores of a tile are computed before the output of the tile before it.
    PageRows pages = page_rows(arguments, work, work.tiles - 1);
    load_k(pages);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tile = work.tiles - 2; tile >= 0; --tile) {
      PageRows const next = page_rows(arguments, work, tile);
      load_k(next);
      load_v(pages);
      pages = next;
    }
    load_v(pages);
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
    cutlass::arch::NamedBarrier::sync(kConsumerThreads, kTurn + consumer);
  }
  CUTLASS_DEVICE static void pass_turn(int consumer) {
    cutlass::arch::NamedBarrier::arrive(kConsumerThreads, kTurn + (consumer ^ 1));
  }

  // Overwrite V's rows from `first` on in the first stage, for both consumers. Whole rows of 128 bytes, so the swizzle,
  // which permutes within a row, does not matter.
  CUTLASS_DEVICE static void zero_tail_of_v(SharedStorage& shared, int first) {
    constexpr int kWords = kBoxColumns * sizeof(Element) / sizeof(uint4);  // a row
    int const thread = threadIdx.x - cutlass::NumThreadsPerWarpGroup;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kColumnBlocks; ++block) {
      uint4* const words = reinterpret_cast<uint4*>(shared.v.data() + Tiles::box_offset(TileN, block, 0));
      for (int i = first * kWords + thread; i < TileN * kWords; i += kConsumerThreads) words[i] = uint4{};
    }
    cutlass::arch::fence_view_async_shared();  // wgmma reads through the async proxy
    cutlass::arch::NamedBarrier::sync(kConsumerThreads, kTailIsZero);
  }

  CUTLASS_DEVICE static void consume(SharedStorage& shared, Arguments const& arguments, Work const& work,
                                     int consumer) {
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
    auto const my_q = local_tile(shared_q, Shape<_64, Int<HeadDim>>{}, make_coord(consumer, 0));
    auto fragment_q = slice_scores.make_fragment_A(slice_scores.partition_A(my_q));
    auto fragment_k = slice_scores.make_fragment_B(slice_scores.partition_B(shared_k));
    auto fragment_v = slice_output.make_fragment_B(slice_output.partition_B(shared_v));

    auto scores = partition_fragment_C(mma_scores, Shape<_64, Int<TileN>>{});
    auto output = partition_fragment_C(mma_output, Shape<_64, Int<HeadDim>>{});
    auto scores_by_row = rows_and_columns(scores);
    auto output_by_row = rows_and_columns(output);
    auto probabilities = make_tensor<Element>(partition_shape_A(mma_output, Shape<_64, Int<TileN>>{}));
    // The scores' accumulator and P's operand hold the same elements in the same order (AttentionTiles).
    auto round_probabilities = [&] {
      auto packed = recast<uint32_t>(probabilities);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(packed); ++i) packed(i) = pack_bf16x2(scores(2 * i), scores(2 * i + 1));
      warpgroup_fence_operand(probabilities);
    };

    // Replace, not add: an unused slot's score may be NaN. Keys from the sequence's end on are hidden from all rows
    // that are stored, since the keys that query i sees, up to i + shift, come before seqlen_k.
    auto hide_future = [&](int tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < 2; ++row) {
        int const query = work.first_query + first_row + 8 * row;
        int const hidden = query + work.shift + 1 - tile * TileN - 2 * (lane % 4);
        CUTLASS_PRAGMA_UNROLL
        for (int column = 0; column < size<1>(scores_by_row); ++column) {
          if (column / 2 * 8 + column % 2 >= hidden) scores_by_row(row, column) = -INFINITY;
        }
      }
    };

    OnlineSoftmax softmax(arguments.softmax_scale);
    float correction[2];
    PipelineState k;
    PipelineState v;
    int tile = work.tiles - 1;

    wait(barriers.q_full, 0);
    wait(barriers.k_full[k.index()], k.phase());
    {
      auto const tile_k = fragment_k(_, _, _, k.index());
      issue(mma_scores, GMMA::ScaleOut::Zero, fragment_q, tile_k, scores);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(scores);
    release(barriers.k_empty[k.index()]);
    ++k;
    hide_future(tile);
    softmax.template update<true>(scores_by_row, correction);
    round_probabilities();
    clear(output);
    if (work.seqlen_k < work.tiles * TileN) {
      wait(barriers.v_full[v.index()], v.phase());
      zero_tail_of_v(shared, max(0, work.seqlen_k - tile * TileN));
    }

    // Scores and probabilities of `tile`; the output of the tile after it.
    auto step = [&](auto masked) {
      wait(barriers.k_full[k.index()], k.phase());
      wait_for_turn(consumer);
      auto const tile_k = fragment_k(_, _, _, k.index());
      issue(mma_scores, GMMA::ScaleOut::Zero, fragment_q, tile_k, scores);
      wait(barriers.v_full[v.index()], v.phase());
      auto const tile_v = fragment_v(_, _, _, v.index());
      issue(mma_output, GMMA::ScaleOut::One, probabilities, tile_v, output);
      if (consumer == 0 || tile > 0) pass_turn(consumer);  // the second warpgroup's last turn has no successor

      warpgroup_wait<1>();
      warpgroup_fence_operand(scores);
      release(barriers.k_empty[k.index()]);
      ++k;
      if constexpr (decltype(masked)::value) hide_future(tile);
      softmax.template update<decltype(masked)::value>(scores_by_row, correction);

      warpgroup_wait<0>();
      warpgroup_fence_operand(output);
      warpgroup_fence_operand(probabilities);
      release(barriers.v_empty[v.index()]);
      ++v;
      round_probabilities();
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < 2; ++row) {
        CUTLASS_PRAGMA_UNROLL
        for (int column = 0; column < size<1>(output_by_row); ++column) output_by_row(row, column) *= correction[row];
      }
    };
    if (consumer == 1 && work.tiles > 1) pass_turn(consumer);
    // A tile needs no mask when the warpgroup's first query sees all of it.
    int const seen_by_all = work.first_query + consumer * 64 + work.shift + 1;
    CUTLASS_PRAGMA_NO_UNROLL
    for (--tile; tile >= 0 && (tile + 1) * TileN > seen_by_all; --tile) step(true_type{});
    CUTLASS_PRAGMA_NO_UNROLL
    for (; tile >= 0; --tile) step(false_type{});

    wait(barriers.v_full[v.index()], v.phase());
    {
      auto const tile_v = fragment_v(_, _, _, v.index());
      issue(mma_output, GMMA::ScaleOut::One, probabilities, tile_v, output);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(output);

    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < 2; ++row) {
      float const factor = work.lacks_pages ? NAN : softmax.inverse_sum(row);
      int const row_in_tile = first_row + 8 * row;
      int64_t const offset = int64_t(work.first_row + row_in_tile) * (Heads * HeadDim) + work.head * HeadDim;
      bool const stored = work.first_query + row_in_tile < work.seqlen_q;
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
        if (stored) {
          Element* const target = arguments.out + offset + 32 * group + 8 * (lane % 4);
          *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }
};

}  // namespace futransformer
