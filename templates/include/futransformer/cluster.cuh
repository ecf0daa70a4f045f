// Blocks of a cluster: meeting, and reaching one another's shared memory.
#pragma once

#include <cutlass/cutlass.h>

namespace futransformer {

// A barrier of all threads of a cluster, in two halves: what they wrote to shared memory before they arrive is visible
// to those that have waited. A thread waits once for each of its arrivals.
CUTLASS_DEVICE void arrive_at_cluster() { __cluster_barrier_arrive(); }
CUTLASS_DEVICE void wait_for_cluster() { __cluster_barrier_wait(); }

// The same place of shared memory in block `rank` of the cluster.
template <class T>
CUTLASS_DEVICE T* in_block(T* local, int rank) {
  return static_cast<T*>(__cluster_map_shared_rank(local, rank));
}

}  // namespace futransformer
