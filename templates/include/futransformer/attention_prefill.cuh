// Prefill attention for sm_90a: O = softmax(scale Q K^T + causal mask) V, BF16 operands, float32 softmax and sums. O is
// BF16, or FP8 at a delayed scale; K and V are BF16, or E4M3 codes that become BF16 in shared memory.
//
// Varlen, causal, grouped-query, over paged K and V (docs/architecture.md has the layouts). The grid is persistent: a
// block computes a share of a list of items (attention_schedule.cuh), an item being TileM queries of one head of one
// sequence. Warp 0 is the producer: it finds the items and keeps rings of Q, K and V full by TMA, a box of one page by
// 64 features (128 swizzled bytes) at a time, without a break from one item to the next. Where pages hold E4M3, warps 1 to 3
// convert what arrives (attention_prefill_codes.cuh). Warpgroups 1 and 2 own 64
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

#include <cstdint>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "attention_prefill_codes.cuh"
#include "attention_prefill_consumer.cuh"
#include "attention_prefill_producer.cuh"
#include "attention_prefill_shared.cuh"
#include "dependent_launch.cuh"

namespace futransformer {

// `T`: AttentionPrefillTraits.
template <class T>
class AttentionPrefill {
  using Barriers = typename T::Barriers;
  using SharedStorage = typename T::SharedStorage;
  using Arguments = typename T::Arguments;
  using Producer = AttentionPrefillProducer<T>;
  using Consumer = AttentionPrefillConsumer<T>;

 public:
  // The grid is (blocks, 1, 1), at most one block a multiprocessor.
  CUTLASS_DEVICE static void run(CUtensorMap const& map_q, CUtensorMap const& map_k, CUtensorMap const& map_v,
                                 Arguments const& arguments) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

    allow_next_kernel();
    if (threadIdx.x == 0) {
      initialise(shared.barriers);
      if constexpr (T::kCodes) initialise(T::codes(shared));
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_kernel();

    int const warpgroup = cutlass::canonical_warp_group_idx();
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
      if (cutlass::canonical_warp_idx_sync() == 0) {
        Producer::run(shared, map_q, map_k, map_v, arguments);
      } else if constexpr (T::kCodes) {
        AttentionPrefillConverter<T>::run(shared, cutlass::canonical_warp_idx_sync() - 1);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
      arguments.out.prepare();
      Consumer::run(shared, arguments, warpgroup - 1);
      arguments.out.conclude();
    }
  }

 private:
  static constexpr int kFillers = T::kCodes ? T::kConverterWarps * T::kVoices : 1;  // that say when a tile of K or V is there

  CUTLASS_DEVICE static void initialise(typename T::Codes& codes) {
    for (int stage = 0; stage < T::kCodeStages; ++stage) {
      codes.full[stage].init(1);
      codes.empty[stage].init(T::kConverterWarps * T::kVoices);
    }
  }
  CUTLASS_DEVICE static void initialise(Barriers& barriers) {
    for (int stage = 0; stage < T::kQStages; ++stage) {
      barriers.q_full[stage].init(1);
      barriers.q_empty[stage].init(T::kConsumerWarps * T::kVoices);
    }
    for (int stage = 0; stage < T::Stages; ++stage) {
      barriers.k_full[stage].init(kFillers);
      barriers.v_full[stage].init(kFillers);
      barriers.k_empty[stage].init(T::kConsumerWarps * T::kVoices);
      barriers.v_empty[stage].init(T::kConsumerWarps * T::kVoices);
    }
  }
};

}  // namespace futransformer
