// Waiting on shared-memory barriers.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>

namespace futransformer {

#ifdef FUTRANSFORMER_BOUNDED_WAITS
// Of a wait a tenth of a second. Once one has given up nobody waits any more: a kernel of thousands of waits ends as well.
__device__ bool volatile patience_is_lost;
struct Patience {
  long long since = clock64();

  CUTLASS_DEVICE bool left() const {
    if (!patience_is_lost && clock64() - since < 200'000'000) return true;
    patience_is_lost = true;
    return false;
  }
};
#endif

// Wait until `barrier` has completed its phase of this parity.
//
// A kernel whose barriers do not add up hangs, and takes the device with it. For development, with
// FUTRANSFORMER_BOUNDED_WAITS defined, a wait gives up after a while: such a kernel ends, with wrong results. (It does
// not trap: with a trap in the loop, ptxas refuses the registers beyond the launch's and serialises wgmma.)
CUTLASS_DEVICE void wait(cutlass::arch::ClusterBarrier const& barrier, uint32_t parity) {
#ifdef FUTRANSFORMER_BOUNDED_WAITS
  for (Patience patience; !barrier.test_wait(parity) && patience.left();) {
  }
#else
  barrier.wait(parity);
#endif
  asm volatile("" ::: "memory");  // CUTLASS's wait does not tell the compiler that memory has changed
}

}  // namespace futransformer
