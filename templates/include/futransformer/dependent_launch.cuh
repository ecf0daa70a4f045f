// Programmatic dependent launch: a kernel starts while the one before it in its stream still runs.
//
// A kernel launched so may, before it waits, read only what no kernel of its chain writes (weights, tables, the keys
// of earlier tokens), and may write nothing that others see. Every block waits before it ends, so a kernel that has
// completed implies that all kernels before it have: what lies behind the wait need not ask who last read or wrote a
// buffer. Launched the ordinary way, a kernel finds its predecessors complete and both calls do nothing.
#pragma once

#ifndef CUTLASS_ENABLE_GDC_FOR_SM90
#define CUTLASS_ENABLE_GDC_FOR_SM90
#endif
#include <cutlass/arch/grid_dependency_control.h>

namespace futransformer {

#ifdef __CUDA_ARCH__
static_assert(cutlass::arch::IsGdcGloballyEnabled, "without its instructions a dependent launch is a race");
#endif

// Wait until all kernels before this one have completed and what they wrote is visible to the calling thread.
CUTLASS_DEVICE void wait_for_previous_kernel() {
  cutlass::arch::wait_on_dependent_grids();
  asm volatile("" ::: "memory");  // CUTLASS's wait does not tell the compiler that memory has changed
}

// Let the next kernel start once every block of this one has come here (or ended).
CUTLASS_DEVICE void allow_next_kernel() { cutlass::arch::launch_dependent_grids(); }

}  // namespace futransformer
