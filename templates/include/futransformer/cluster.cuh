// Blocks of a cluster: meeting, and writing to one another's shared memory.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/util.hpp>
#include <cutlass/arch/barrier.h>

namespace futransformer {

// Say that this block has started, and wait until all blocks of the cluster have. Relaxed: an arrival that releases what
// was written before is a fence over all memory, which waits for whatever else is on its way. Of what was written,
// barriers alone are meant to be seen, and fence_barrier_init() sees to that.
CUTLASS_DEVICE void arrive_at_cluster() { cute::cluster_arrive_relaxed(); }
CUTLASS_DEVICE void wait_for_cluster() { cute::cluster_wait(); }

// Store four floats into block `rank`'s shared memory, at the place that `target` has in this block's. The barrier
// `arrived` of that block counts the bytes: who has waited for it sees them, and no fence is needed.
CUTLASS_DEVICE void store_in_block(float4 const& value, float* target, cutlass::arch::ClusterTransactionBarrier& arrived,
                                   int rank) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
      :
      : "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(target), rank)), "f"(value.x), "f"(value.y), "f"(value.z),
        "f"(value.w), "r"(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&arrived), rank))
      : "memory");
}

}  // namespace futransformer
