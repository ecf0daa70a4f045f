// Activations of one sequence as integers (split_activations.cuh), in shared memory. A warp makes what it multiplies with itself
// of the first pair of row tiles: no other warp waits for it.
//
// Of every 128 k there are two columns of B, the high bytes and the low ones: 64 bytes of k 0 .. 63, sixteen for each lane t of
// four, and further on those of k 64 .. 127. Of every unit of K there is what an integer is worth, and the sum of the integers.
#pragma once

#include "fragment.cuh"
#include "numeric.cuh"
#include "split_activations.cuh"
#include "tagged.cuh"

namespace futransformer {

constexpr int kPartK = 128;    // k that a lane reads in two loads
constexpr int kPieceK = 256;  // that a warp makes at a time, eight a lane

// Room for `K` k in units of UnitK. Whole: there is no part of a piece.
template <int K, int UnitK, bool Whole>
struct StagedActivations {
  static constexpr int kParts = (K + kPartK - 1) / kPartK;

  struct Unit {
    float scale;
    int32_t sum;
  };
  uint4 words[kParts][2][2][4];
  Unit units[(K + UnitK - 1) / UnitK];

  // A warp: ask for the piece at `k` of the `width` k that other blocks send from `sent` on.
  CUTLASS_DEVICE static void ask(TaggedVector const* sent, int k, int width, TaggedVector (&found)[2]) {
    futransformer::ask(found, [&](int i) { return place(sent, k, width, i); });
  }

  // A warp: make integers of the piece, which has been asked for and is sent with `tag`, or of `plain` k if there are any. Their
  // squares are added to the lane's.
  CUTLASS_DEVICE void stage(TaggedVector const* sent, uint32_t tag, bf16 const* plain, int k, int width,
                            TaggedVector (&found)[2], float& squares) {
    bool const exists = of_lane(k, width) >= 0;
    uint4 eight = {0, 0, 0, 0};
    if (plain != nullptr) {
      if (exists) eight = __ldcg(reinterpret_cast<uint4 const*>(plain + of_lane(k, width)));
    } else {
      await(tag, found, [&](int i) { return place(sent, k, width, i); });
      eight = make_uint4(uint32_t(found[0].words[0]), uint32_t(found[0].words[1]), uint32_t(found[1].words[0]),
                         uint32_t(found[1].words[1]));
    }
    put(k, eight, exists, squares);
  }

 private:
  // The first of the lane's eight k, or -1: there are none.
  CUTLASS_DEVICE static int of_lane(int k, int width) {
    int const own = k + thread_now() % kLanes * 8;
    return Whole || own < width ? own : -1;
  }
  CUTLASS_DEVICE static TaggedVector const* place(TaggedVector const* sent, int k, int width, int i) {
    int const own = of_lane(k, width);
    return own < 0 ? nullptr : sent + own / 4 + i;
  }

  // A piece, of which the lane has eight k, as many consecutive lanes a unit. What does not exist is zero.
  CUTLASS_DEVICE void put(unsigned piece, uint4 const& eight, bool exists, float& squares) {
    constexpr int kLanesOfUnit = UnitK / 8;
    unsigned const lane = thread_now() % kLanes;
    uint32_t const pairs[4] = {eight.x, eight.y, eight.z, eight.w};
    uint32_t most = pairs[0];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < 4; ++i) most = larger_magnitude_bf16x2(most, pairs[i]);
    float largest = larger(fabsf(bf16_low(most)), fabsf(bf16_high(most)));
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < kLanesOfUnit; distance *= 2) {
      largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    // As SplitActivations has it, with 128 more: the upper byte is then the rounded one, and the lower less 128 the rest.
    uint32_t const power = max(__float_as_uint(largest) & 0x7f800000u, 14u << 23);
    float const unit = __uint_as_float((13u + 2 * 127u << 23) - power);
    uint32_t integer[8];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      float const value = i % 2 ? bf16_high(pairs[i / 2]) : bf16_low(pairs[i / 2]);
      integer[i] = __float_as_uint(__fmaf_rn(value, unit, kInteger + 128));
      squares = __fmaf_rn(value, value, squares);
    }
    uint32_t high[2], low[2];
    int32_t highs = 0, sum = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      high[half] = bytes(integer, half, 0x7531);
      low[half] = bytes(integer, half, 0x6420) ^ 0x80808080u;
      highs = __dp4a(int(high[half]), 0x01010101, highs);
      sum = __dp4a(int(low[half]), 0x01010101, sum);
    }
    sum += highs * 256;
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < kLanesOfUnit; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (!Whole && !exists) return;
    // Lane 4 i + t has group i of 32 k.
    uint4(&part)[2][4] = words[piece / kPartK + lane / 16][lane / 8 % 2];
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      reinterpret_cast<uint32_t*>(&part[0][lane % 4])[2 * half + lane / 4 % 2] = high[half];
      reinterpret_cast<uint32_t*>(&part[1][lane % 4])[2 * half + lane / 4 % 2] = low[half];
    }
    if (lane % kLanesOfUnit == 0) {
      units[piece / UnitK + lane / kLanesOfUnit] = {__fmaf_rn(largest, 0.f, __uint_as_float(power) * 0x1p-13f), sum};
    }
  }

  // A byte each of k 2 half, 2 half + 4, 2 half + 1 and 2 half + 5 of a lane's eight.
  CUTLASS_DEVICE static uint32_t bytes(uint32_t const (&integer)[8], int half, uint32_t which) {
    uint32_t const even = __byte_perm(integer[2 * half], integer[2 * half + 4], 0x5410);
    uint32_t const odd = __byte_perm(integer[2 * half + 1], integer[2 * half + 5], 0x5410);
    return __byte_perm(even, odd, which);
  }
};

}  // namespace futransformer
