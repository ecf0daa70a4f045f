// Blocks of a cluster: meeting, and reading one another's shared memory.
#pragma once

#include <cutlass/cutlass.h>

namespace futransformer {

// A barrier of all threads of a cluster of `Blocks`; what they wrote to shared memory before is visible behind it.
template <int Blocks>
CUTLASS_DEVICE void sync_cluster() {
  if constexpr (Blocks == 1) {
    __syncthreads();
  } else {
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
  }
}

// The same place of shared memory in block `rank` of the cluster.
template <int Blocks, class T>
CUTLASS_DEVICE T const* in_block(T const* local, int rank) {
  if constexpr (Blocks == 1) return local;
  return static_cast<T const*>(__cluster_map_shared_rank(local, rank));
}

}  // namespace futransformer
