// Programmatic dependent launch: a kernel starts while the one before it in the stream ends.
//
// Both calls do nothing in a kernel that was launched without the attribute.
#pragma once

#ifndef CUTLASS_ENABLE_GDC_FOR_SM90
#define CUTLASS_ENABLE_GDC_FOR_SM90  // else CUTLASS leaves both instructions out
#endif

#include <cutlass/arch/grid_dependency_control.h>

namespace futransformer {

// The next kernel may be launched: it waits for this one by itself. All blocks have to say so, or to end.
CUTLASS_DEVICE void launch_dependents() { cutlass::arch::launch_dependent_grids(); }

// From here on, what the kernels before this one wrote can be read, and what they read can be overwritten. Each thread
// that does either has to wait; and some thread of every kernel must, for the kernel after it relies on all of them.
CUTLASS_DEVICE void wait_for_previous_kernel() {
  cutlass::arch::wait_on_dependent_grids();
  asm volatile("" ::: "memory");  // CUTLASS's wait does not tell the compiler that memory has changed
}

}  // namespace futransformer
