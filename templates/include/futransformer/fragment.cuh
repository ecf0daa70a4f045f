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

// (word & mask) | bits in one instruction: left to itself nvcc makes two, one a constant.
CUTE_HOST_DEVICE uint32_t and_or(uint32_t word, uint32_t mask, uint32_t bits) {
#ifdef __CUDA_ARCH__
  asm("lop3.b32 %0, %0, %1, %2, 0xEA;" : "+r"(word) : "r"(mask), "r"(bits));
  return word;
#else
  return (word & mask) | bits;
#endif
}

// One lane's share of a row tile. A lane's `Load` of packed weights feeds `kMmas` MMAs; `operand` makes the four A
// registers of MMA j of them: rows g, g + 8, g, g + 8 with g = lane / 4, two k each, the latter pair of k last. Along K a
// row tile is a sequence of units of kUnitK, contiguous, each a warp's loads and, where kScaled, what they are worth.
template <class Element>
struct WeightFragment;

template <>
struct WeightFragment<cutlass::bfloat16_t> {
  using Load = Words;
  static constexpr int kMmas = 1;
  static constexpr int kUnitK = kMmaK;
  static constexpr int kUnitBytes = kLanes * kLoadBytes;
  static constexpr bool kScaled = false;

  CUTE_HOST_DEVICE static Words operand(Load const& packed, int) { return packed; }
};

// E4M3 codes, of which scales lie behind the weight and are the epilogue's business. A 32-bit word holds a lane's four k of a
// row and an MMA, so that five operations make both of its operands: in its half e, where BF16 has a value's sign (15) and
// E4M3's exponent and mantissa (10 .. 4), stands the code of k e; in the other bits that of k 2 + e, sign in 11, its next
// three bits in 14 .. 12, its last four in 3 .. 0, which are there once a byte's nibbles change places. Operands are
// worth kE4m3Operand codes (e4m3_operand.cuh). (Codes as bytes, in their order, take seven.)
template <>
struct WeightFragment<cutlass::float_e4m3_t> {
  using Load = Words;
  static constexpr int kMmas = 2;
  static constexpr int kUnitK = kGroupK;
  static constexpr int kUnitBytes = kLanes * kLoadBytes;
  static constexpr bool kScaled = false;

  CUTE_HOST_DEVICE static Words operand(Load const& packed, int j) {
    uint32_t const g = packed.word[2 * j], g8 = packed.word[2 * j + 1];
    return {{first(g), first(g8), second(g), second(g8)}};
  }

 private:
  CUTE_HOST_DEVICE static uint32_t first(uint32_t word) { return word & 0x87f087f0; }
  CUTE_HOST_DEVICE static uint32_t second(uint32_t word) {
    return and_or(word >> 4, 0x07000700, word << 4 & 0x80f080f0);
  }
};

// Four-bit codes. A unit is GroupK of K of 16 rows, with a float16 scale for each of the rows, and a byte of zero point if
// there are any, as (row g, row g + 8) for g = 0 .. 7; a weight is scale (code - zero point), of symmetric ones scale
// (code - 8). A 32-bit word holds a lane's eight k of a row and 32 k: nibble i its k 2 i, nibble i + 4 its k 2 i + 1.
template <int GroupK, bool ZeroPoints>
struct Int4;

template <int GroupK, bool ZeroPoints>
struct WeightFragment<Int4<GroupK, ZeroPoints>> {
  // Rows g and g + 8 of 32 k, or of twice as many.
  static constexpr int kLoadGroups = GroupK % (2 * kGroupK) == 0 ? 2 : 1;
  struct alignas(8 * kLoadGroups) Load {
    uint32_t word[2 * kLoadGroups];
  };
  static constexpr int kMmas = 2 * kLoadGroups;
  static constexpr int kUnitK = GroupK;
  static constexpr int kScales = kTileRows * GroupK / 2;   // their place in a unit: behind the codes
  static constexpr int kZeros = kScales + 2 * kTileRows;   // of zero points
  static constexpr int kUnitBytes = kZeros + (ZeroPoints ? kTileRows : 0);
  static constexpr bool kScaled = true;
  static constexpr bool kZeroPoints = ZeroPoints;
  static constexpr int kZero = 8;  // of symmetric codes

  static constexpr uint32_t kBiased = 0x43004300;  // a pair of 128, whose last four bits are worth 8, 4, 2 and 1
  static constexpr uint32_t kMiddle = 0x43084308;  // of 128 + 8

  // 128 + code, in BF16.
  CUTE_HOST_DEVICE static Words operand(Load const& packed, int j) {
    uint32_t const g = packed.word[j / 2 * 2], g8 = packed.word[j / 2 * 2 + 1];
    int const first = j % 2 * 2;
    return {{pair(g, first), pair(g8, first), pair(g, first + 1), pair(g8, first + 1)}};
  }

  // The codes themselves as bytes: word `half` of 32 k's row has the k of SplitActivations::bytes.
  CUTE_HOST_DEVICE static uint32_t bytes(uint32_t word, int half) { return word >> 4 * half & 0x0f0f0f0f; }

  // What `operand` must be lowered by in the rows g and g + 8, from a lane's two zero points.
  CUTE_HOST_DEVICE static uint32_t middle(uint32_t zero) { return ZeroPoints ? kBiased + zero * 0x00010001 : kMiddle; }

 private:
  CUTE_HOST_DEVICE static uint32_t pair(uint32_t word, int i) { return and_or(word >> 4 * i, 0x000f000f, kBiased); }
};

// The activations of one sequence: lane (g, t) reads 16 bytes at k = 8 t of each group of 32 for sequence g.
struct ActivationFragment {
  CUTE_HOST_DEVICE static int sequence(int lane) { return lane / 4; }
  CUTE_HOST_DEVICE static int k(int lane) { return lane % 4 * 8; }

  // Register `i` (0 or 1) of the B operand of MMA j of a group.
  CUTE_HOST_DEVICE static uint32_t operand(Words const& x, int j, int i) { return x.word[2 * j + i]; }
};

// The same as wgmma reads them from shared memory, of eight sequences and a group: word t of load `load(sequence, word)` is
// `word` of what lane (sequence, t) has read, at the place of the 64-byte swizzle.
struct SwizzledFragment {
  CUTE_HOST_DEVICE static int load(int sequence, int word) { return sequence * 4 + (word ^ sequence / 2); }
};

// Where sum `i` (0 .. 3) of a lane belongs in the 16 x 8 tile.
struct SumFragment {
  static constexpr int kSums = 4;

  CUTE_HOST_DEVICE static int column(int lane, int i) { return lane / 4 + i / 2 * 8; }
  CUTE_HOST_DEVICE static int sequence(int lane, int i) { return lane % 4 * 2 + i % 2; }
};

}  // namespace futransformer
