// Counters in global memory by which blocks find out who is last.
#pragma once

#include <cutlass/cutlass.h>

namespace futransformer {

// Adds one and returns the value before. Whatever a block wrote before its thread arrives (behind a __syncthreads) is
// visible to the blocks whose threads arrive later.
CUTLASS_DEVICE int arrive(int* counter) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

}  // namespace futransformer
