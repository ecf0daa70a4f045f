// The consumers of prefill attention: two warpgroups of 64 queries each, wgmma and softmax.
#pragma once

#include <cmath>
#include <cstdint>

#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>

#include "attention_prefill_output.cuh"
#include "attention_prefill_shared.cuh"
#include "barrier.cuh"
#include "e4m3_operand.cuh"
#include "numeric.cuh"
#include "softmax.cuh"

namespace futransformer {

// `T`: AttentionPrefillTraits.
template <class T>
class AttentionPrefillConsumer {
  using Element = typename T::Element;
  using Tiles = typename T::Tiles;
  using PipelineState = typename T::PipelineState;
  using EmptyBarrier = typename T::EmptyBarrier;
  using Work = typename T::Work;
  using Barriers = typename T::Barriers;
  using SharedStorage = typename T::SharedStorage;
  using Arguments = typename T::Arguments;

 public:
  // `consumer`: 0 or 1, the half of the item's queries that this warpgroup owns.
  CUTLASS_DEVICE static void run(SharedStorage& shared, Arguments const& arguments, int consumer) {
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
    auto const my_q = local_tile(shared_q, Shape<_64, Int<T::HeadDim>>{}, make_coord(consumer, 0, _));
    auto fragment_q = slice_scores.make_fragment_A(slice_scores.partition_A(my_q));
    auto fragment_k = slice_scores.make_fragment_B(slice_scores.partition_B(shared_k));
    auto fragment_v = slice_output.make_fragment_B(slice_output.partition_B(shared_v));

    auto scores = partition_fragment_C(mma_scores, Shape<_64, Int<T::TileN>>{});
    auto output = partition_fragment_C(mma_output, Shape<_64, Int<T::HeadDim>>{});
    auto scores_by_row = rows_and_columns(scores);
    auto output_by_row = rows_and_columns(output);
    auto probabilities = make_tensor<Element>(partition_shape_A(mma_output, Shape<_64, Int<T::TileN>>{}));
    OnlineSoftmax softmax(arguments.softmax_scale * worth(arguments, 0));
    float correction[2];

    PipelineState k;
    PipelineState v;
    int count = 0;  // the item whose scores are computed, and the tile of its keys
    int tiles;
    int tile;
    int sees;

    // Go to item `count`, and wait for its Q; false past the last one.
    auto enter_item = [&] {
      wait(barriers.q_full[count % T::kQStages], count / T::kQStages % 2);
      Work const& work = shared.work[count % T::kWorkSlots];
      sees = work.sees;
      tiles = work.tiles;
      tile = tiles - 1;
      return tiles > 0;
    };
    auto work_before = [&]() -> Work const& { return shared.work[(count + T::kWorkSlots - 1) % T::kWorkSlots]; };
    auto issue_scores = [&] {
      auto const item_q = fragment_q(_, _, _, count % T::kQStages);
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
      if (tile == 0) release(barriers.q_empty[count % T::kQStages]);
      // A tile needs no mask when the warpgroup's first query sees all of it. Replace, not add: an unused slot's score
      // may be NaN. Keys from the sequence's end on are hidden from all rows that are stored.
      if ((tile + 1) * T::TileN > sees + consumer * 64) {
        CUTLASS_PRAGMA_UNROLL
        for (int row = 0; row < 2; ++row) {
          int const hidden = sees + first_row + 8 * row - tile * T::TileN - 2 * (lane % 4);
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
      if (work.seqlen_k < work.tiles * T::TileN) {
        wait(barriers.v_full[v.index()], v.phase());
        int const first = max(0, work.seqlen_k - (work.tiles - 1) * T::TileN);
        zero_tail(shared.v.data() + v.index() * T::kTileElements, first);
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
      // so that all of them are finished before that loop. Where no maximum of the warp has grown, every factor is 1.
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
        begin_output(shared.work[count % T::kWorkSlots]);
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

 private:
  // What an operand of 1 of K (0) or V (1) is worth.
  CUTLASS_DEVICE static float worth(Arguments const& arguments, int part) {
    if constexpr (T::kCodes) return arguments.kv_scale[part] * kE4m3Operand;
    return 1.f;
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
    if (T::speaks()) empty.arrive();
  }

  // Named barriers of the consumers.
  enum NamedBarrierId { kTurn, kTurnOfSecond, kTailIsZero };

  CUTLASS_DEVICE static void wait_for_turn(int consumer) {
    cutlass::arch::NamedBarrier::sync(T::kConsumerThreads, kTurn + consumer);
  }
  CUTLASS_DEVICE static void pass_turn(int consumer) {
    cutlass::arch::NamedBarrier::arrive(T::kConsumerThreads, kTurn + (consumer ^ 1));
  }

  // Overwrite the rows of a stage of V from `first` on, by both consumers. Whole rows of 128 bytes, so the swizzle,
  // which permutes within a row, does not matter.
  CUTLASS_DEVICE static void zero_tail(Element* stage_of_v, int first) {
    constexpr int kWords = T::kBoxColumns * sizeof(Element) / sizeof(uint4);  // a row
    int const thread = threadIdx.x - cutlass::NumThreadsPerWarpGroup;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < T::kColumnBlocks; ++block) {
      uint4* const words = reinterpret_cast<uint4*>(stage_of_v + Tiles::box_offset(T::TileN, block, 0));
      for (int i = first * kWords + thread; i < T::TileN * kWords; i += T::kConsumerThreads) words[i] = uint4{};
    }
    cutlass::arch::fence_view_async_shared();  // wgmma reads through the async proxy
    cutlass::arch::NamedBarrier::sync(T::kConsumerThreads, kTailIsZero);
  }

  // Divide a finished output by its sums and write it.
  template <class Tensor>
  CUTLASS_DEVICE static void store(Arguments const& arguments, Work const& work, int row_in_tile,
                                   float const (&sum)[2], Tensor const& output_by_row) {
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < 2; ++row) {
      float const factor = work.lacks_pages ? NAN : inverse_of_quad_sum(sum[row]) * worth(arguments, 1);
      bool const stored = row_in_tile + 8 * row < work.rows;
      int64_t const head_of_row = int64_t(work.first_row + row_in_tile + 8 * row) * T::Heads + work.head;
      arguments.out.store(head_of_row, stored, factor, [&](int column) { return output_by_row(row, column); });
    }
  }
};

}  // namespace futransformer
