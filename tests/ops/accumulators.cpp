// Which element of its consumer's rows each accumulator of wgmma is, as the prefill GEMM's epilogue takes it, against
// CuTe's own partition, for every width of a tile and one or two atoms of 64 rows. Prints a line a shape; the exit
// status is the number of shapes that differ.
#include <futransformer/wgmma_shapes.cuh>

#include <cstdio>

#include <cute/tensor.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cutlass/numeric_types.h>

using namespace cute;
using Element = cutlass::bfloat16_t;

template <int Atoms, int N>
static int differs() {
  auto const mma = make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<N>, _64>>());
  auto const places = make_identity_tensor(Shape<Int<64 * Atoms>, Int<N>>{});  // of an element: (row, column)
  int mismatches = 0;
  for (int thread = 0; thread < 128; ++thread) {
    auto const mine = mma.get_slice(thread).partition_C(places);
    int const lane = thread % 32;
    for (int index = 0; index < Atoms * N / 2; ++index) {
      int const atom = index / (N / 2), pair = index % (N / 2) / 4, half = index / 2 % 2, e = index % 2;
      int const row = 64 * atom + thread / 32 * 16 + lane / 4 + 8 * half;
      int const column = 8 * pair + 2 * (lane % 4) + e;
      mismatches += int(get<0>(mine(index))) != row || int(get<1>(mine(index))) != column;
    }
  }
  std::printf("%d x %d: %d mismatches\n", 64 * Atoms, N, mismatches);
  return mismatches != 0;
}

template <int... N>
static int widths_that_differ() {
  return (0 + ... + (differs<1, N>() + differs<2, N>()));
}

int main() { return widths_that_differ<32, 64, 96, 128, 160, 192, 224, 256>(); }
