// The end of decode's head: logits, if anyone asks for them, and the best of each block's columns.
#pragma once

#include "candidate.cuh"
#include "epilogue.cuh"

namespace futransformer {

// Columns from `Vocabulary` on are padding: they are stored, and never chosen. `Parts` blocks share a row.
template <int Columns, int Parts, int Vocabulary>
struct StoreLogits : Operation {
  float* out;       // [rows, Columns], or null
  Candidate* best;  // [rows, Parts]

  using Row = Candidate;

  CUTLASS_DEVICE StoreLogits(float* target, Candidate* found) : out(target), best(found) {}

  template <int Lanes, int Loads = 1>
  CUTLASS_DEVICE Candidate begin(int, bool, Nothing) const {
    return Candidate::none();
  }
  CUTLASS_DEVICE void apply(Candidate& state, Nothing, int row, int column, float (&values)[8]) const {
    if (out) store_f32x8(out + size_t(row) * Columns + column, values);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (Vocabulary == Columns || column + i < Vocabulary) state.consider(values[i], column + i);
    }
  }
  template <int Lanes>
  CUTLASS_DEVICE void end(Candidate state, int row, int part, bool valid) const {
    state.template reduce_over_lanes<Lanes>();
    if (valid && threadIdx.x % Lanes == 0) best[size_t(row) * Parts + part] = state;
  }
};

}  // namespace futransformer
