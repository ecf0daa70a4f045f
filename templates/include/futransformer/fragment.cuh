// Tensor Core fragments of the decode kernels: weights are A, activations B, sums C of mma.sync.m16n8k16.
//
// A row tile is 16 rows of the weight (16 output columns); a batch tile is 8 sequences. The k order inside an MMA is
// free as long as A and B agree. Ours gives each lane eight *consecutive* k of every 32, so that both operands come in
// 16-byte loads: with t = lane % 4, MMA j (0 or 1) of a group of 32 k takes k = 8 t + 4 j + {0, 1, 2, 3} from lane t,
// where the hardware's own numbering of the same registers is k = 2 t + {0, 1, 8, 9}. One word of four-bit weights
// holds those same eight k of one row, so the order serves every element type.
//
// Everything here is integer arithmetic that also compiles for the host, where tests hold it against CuTe's traits.
#pragma once

#include <cstdint>

#include <cute/config.hpp>
#include <cutlass/numeric_types.h>

namespace futransformer {

constexpr int kLanes = 32;
constexpr int kTileRows = 16;    // rows of A: output columns
constexpr int kTileBatch = 8;    // columns of B: sequences
constexpr int kMmaK = 16;
constexpr int kGroupK = 32;      // k of two MMAs, eight a lane
constexpr int kLoadBytes = 16;   // what a lane loads at once, of weights and of activations

// 16 bytes: four registers of an operand.
struct alignas(kLoadBytes) Words {
  uint32_t word[4];
};

// One lane's share of a row tile. `kMmas` MMAs are fed by one 16-byte load of packed weights; `operand` makes the four
// A registers of MMA j of them: rows g, g + 8, g, g + 8 with g = lane / 4, two k each, the latter pair of k last.
template <class Element>
struct WeightFragment;

template <>
struct WeightFragment<cutlass::bfloat16_t> {
  static constexpr int kMmas = 1;

  CUTE_HOST_DEVICE static Words operand(Words const& packed, int) { return packed; }
};

// The activations of one sequence: lane (g, t) reads 16 bytes at k = 8 t of each group of 32 for sequence g.
struct ActivationFragment {
  CUTE_HOST_DEVICE static int sequence(int lane) { return lane / 4; }
  CUTE_HOST_DEVICE static int k(int lane) { return lane % 4 * 8; }

  // Register `i` (0 or 1) of the B operand of MMA j of a group.
  CUTE_HOST_DEVICE static uint32_t operand(Words const& x, int j, int i) { return x.word[2 * j + i]; }
};

// Where sum `i` (0 .. 3) of a lane belongs in the 16 x 8 tile.
struct SumFragment {
  static constexpr int kSums = 4;

  CUTE_HOST_DEVICE static int column(int lane, int i) { return lane / 4 + i / 2 * 8; }
  CUTE_HOST_DEVICE static int sequence(int lane, int i) { return lane % 4 * 2 + i % 2; }
};

}  // namespace futransformer
