// Reading one another's shared memory within a cluster.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/cutlass.h>

namespace futransformer {

// Wait until all threads of the cluster's blocks are here; what they wrote before, shared memory too, is visible to all.
CUTLASS_DEVICE void sync_cluster() {
  asm volatile("" ::: "memory");  // CuTe's barrier does not tell the compiler that memory is read and has changed
  cute::cluster_sync();
  asm volatile("" ::: "memory");
}

// The same variable of block `rank`, this one or another that has started and not ended, through its shared memory.
template <class T>
CUTLASS_DEVICE T* in_block(T* variable, int rank) {
  T* theirs;
  asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(variable), "r"(rank));
  return theirs;
}

}  // namespace futransformer
