// Waiting on shared-memory barriers.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>

namespace futransformer {

// Wait until `barrier` has completed its phase of this parity.
//
// A kernel whose barriers do not add up hangs, and takes the device with it. For development, with
// FUTRANSFORMER_BOUNDED_WAITS defined, a wait gives up after a while: such a kernel ends, with wrong results. (It does
// not trap: with a trap in the loop, ptxas refuses the registers beyond the launch's and serialises wgmma.)
CUTLASS_DEVICE void wait(cutlass::arch::ClusterBarrier const& barrier, uint32_t parity) {
#ifdef FUTRANSFORMER_BOUNDED_WAITS
  for (int attempts = 1 << 16; attempts > 0 && !barrier.try_wait(parity); --attempts) {
  }
#else
  barrier.wait(parity);
#endif
  asm volatile("" ::: "memory");  // CUTLASS's wait does not tell the compiler that memory has changed
}

}  // namespace futransformer
