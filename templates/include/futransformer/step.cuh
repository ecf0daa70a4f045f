// The two ends of a decode step, so that the host has no part in it. One block, a thread a row by turns.
//
// A row's length counts its tokens in the cache. -1 says that it has no sequence, or none any more: it writes no K and V
// (its slot is negative) and attends nothing (seqlens_k is 0) until the host gives it another.
#pragma once

#include <cutlass/cutlass.h>

#include "dependent_launch.cuh"

namespace futransformer {

// Before a chain opens: its kernels read lengths and slots ahead of their turn.
template <int PageSize, int Threads>
struct StepBegin {
  CUTLASS_DEVICE static void run(int* lengths, int const* block_table, int block_table_stride, int* positions,
                                 long long* slots, int* seqlens_k, int rows) {
    allow_next_kernel();
    wait_for_previous_kernel();
    for (int row = threadIdx.x; row < rows; row += Threads) {
      int const position = lengths[row];
      bool const going = position >= 0;
      int const entry = max(position, 0) / PageSize;
      // A page that the row has not got has a negative number, or no place in the table.
      int const page = going && entry < block_table_stride ? block_table[size_t(row) * block_table_stride + entry] : -1;
      if (going) lengths[row] = position + 1;
      seqlens_k[row] = position + 1;
      positions[row] = max(position, 0);
      slots[row] = page < 0 ? -1 : (long long)(page) * PageSize + position % PageSize;
    }
  }
};

// Behind the choice of tokens. Row i of step s has log[s % log_steps][i]: its token, or -1 where there is no sequence.
template <int Vocabulary, int Threads>
struct StepEnd {
  CUTLASS_DEVICE static void run(int const* tokens, int* lengths, int* left, unsigned const* ends, int* log, int log_steps,
                                 int* steps, int rows) {
    allow_next_kernel();
    wait_for_previous_kernel();
    int const step = *steps;
    __syncthreads();
    if (threadIdx.x == 0) *steps = step + 1;
    int* const noted = log + size_t(step % log_steps) * rows;
    for (int row = threadIdx.x; row < rows; row += Threads) {
      bool const going = lengths[row] >= 0;
      int const token = tokens[row];
      noted[row] = going ? token : -1;
      if (!going) continue;
      bool const known = token >= 0 && token < Vocabulary;
      bool const ends_here = known && (ends[token / 32] >> token % 32 & 1);
      int const more = left[row] - 1;
      left[row] = more;
      if (ends_here || more <= 0) lengths[row] = -1;
    }
  }
};

}  // namespace futransformer
