// The operands and sums of the decode GEMM's wgmma against CuTe's traits and swizzle: for every element of A that a lane
// has, B's element of the same k lies where the hardware looks for it, and every sum is of its row and sequence. Prints a
// line a number of sequences; the exit status is the number of those that differ.
#include <cstdio>

#include <cute/tensor.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cutlass/numeric_types.h>
#include <futransformer/fragment.cuh>

using namespace futransformer;
using Element = cutlass::bfloat16_t;

template <int N>
static int differs() {
  using Instruction =
      decltype(cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<N>, cute::_16>>());
  // CuTe numbers elements column-major: A [64 rows, 16 k], C [64 rows, N sequences].
  typename cute::MMA_Traits<Instruction>::ALayout const a_layout;
  typename cute::MMA_Traits<Instruction>::CLayout const c_layout;
  auto const b_layout = cute::as_position_independent_swizzle_layout(
      cute::tile_to_shape(cute::GMMA::Layout_K_SW64_Atom<Element>{}, cute::Shape<cute::Int<N>, cute::Int<kGroupK>>{}));
  int mismatches = 0;
  for (int thread = 0; thread < 128; ++thread) {
    int const lane = thread % kLanes, first_row = thread / kLanes * kTileRows;
    for (int i = 0; i < 8; ++i) {  // element i % 2 of register i / 2
      int const at = a_layout(thread, i), row = at % 64, column = at / 64;
      mismatches += row != first_row + lane / 4 + i / 2 % 2 * 8;
      for (int mma = 0; mma < 2; ++mma) {
        // Of a lane's 16 bytes of x, the word and half that B's element is: as ActivationFragment has it.
        int const word = 2 * mma + i / 4, half = i % 2;
        for (int sequence = 0; sequence < N; ++sequence) {
          int const load = sequence / kTileBatch * kLanes + SwizzledFragment::load(sequence % kTileBatch, word);
          int const place = load * kLoadBytes / 2 + lane % 4 * 2 + half;
          mismatches += place != int(b_layout(sequence, mma * kMmaK + column));
        }
      }
    }
    for (int i = 0; i < N / 2; ++i) {
      int const sequence = i / SumFragment::kSums * kTileBatch + SumFragment::sequence(lane, i % SumFragment::kSums);
      int const row = first_row + SumFragment::column(lane, i % SumFragment::kSums);
      mismatches += int(c_layout(thread, i)) != row + 64 * sequence;
    }
  }
  std::printf("%d sequences: %d mismatches\n", N, mismatches);
  return mismatches != 0;
}

int main() { return differs<8>() + differs<16>() + differs<32>() + differs<64>(); }
