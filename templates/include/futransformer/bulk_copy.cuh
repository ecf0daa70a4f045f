// Bulk copies: contiguous global memory to shared memory in one instruction, counted by a transaction barrier.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/util.hpp>
#include <cutlass/arch/barrier.h>

namespace futransformer {

// Start copying `bytes` (a multiple of 16; both addresses too) of data that is read once: L2 evicts it first, and keeps
// what is read again. The caller has announced the bytes to `full`.
CUTLASS_DEVICE void load_bulk_once(void* target, void const* source, int bytes,
                                   cutlass::arch::ClusterTransactionBarrier& full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
      :
      : "r"(cute::cast_smem_ptr_to_uint(target)), "l"(source), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(&full)),
        "l"(uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST))
      : "memory");
}

// Ask for the same to be brought into L2: nobody is told when it is there.
CUTLASS_DEVICE void fetch_bulk(void const* source, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(source), "r"(bytes) : "memory");
}

}  // namespace futransformer
