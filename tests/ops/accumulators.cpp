// Which element of a 64 x N product each accumulator of wgmma is, as the prefill GEMM's epilogue takes it, against CuTe's
// own traits, for every width of a tile. Prints a line a width; the exit status is the number of widths that differ.
#include <cstdio>

#include <cute/tensor.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cutlass/numeric_types.h>

using namespace cute;
using Element = cutlass::bfloat16_t;

template <int N>
static int differs() {
  auto const mma = make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<N>, _64>>());
  auto const accumulators = partition_fragment_C(mma, Shape<_64, Int<N>>{});
  auto const place = typename decltype(mma)::AtomLayoutC_TV{};  // (thread, value) -> row + 64 column
  int mismatches = int(size(accumulators)) != N / 2;
  for (int thread = 0; thread < 128; ++thread) {
    int const lane = thread % 32;
    for (int index = 0; index < N / 2; ++index) {
      int const pair = index / 4, half = index / 2 % 2, e = index % 2;
      int const row = thread / 32 * 16 + lane / 4 + 8 * half;
      int const column = 8 * pair + 2 * (lane % 4) + e;
      mismatches += place(thread, int(accumulators.layout()(index))) != row + 64 * column;
    }
  }
  std::printf("64 x %d: %d mismatches\n", N, mismatches);
  return mismatches != 0;
}

int main() {
  return differs<32>() + differs<64>() + differs<96>() + differs<128>() + differs<160>() + differs<192>() +
         differs<224>() + differs<256>();
}
