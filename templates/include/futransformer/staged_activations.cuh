// Activations of one sequence as integers (split_activations.cuh), made once for all warps of a block.
//
// Of every 128 k shared memory has two columns of B, the high bytes and the low ones: 64 bytes of k 0 .. 63, sixteen for each
// lane t of four, and further on those of k 64 .. 127. Of every unit of K there is what an integer is worth, and the sum of
// the integers.
#pragma once

#include "fragment.cuh"
#include "numeric.cuh"
#include "split_activations.cuh"
#include "tagged.cuh"

namespace futransformer {

constexpr int kPartK = 128;  // k that a lane reads in two loads

// Room for `K` k in units of UnitK. A lane has AtOnce items of eight k on their way at the same time.
template <int K, int UnitK, int AtOnce>
struct StagedActivations {
  static constexpr int kParts = (K + kPartK - 1) / kPartK;

  struct Unit {
    float scale;
    int32_t sum;
  };
  uint4 words[kParts][2][2][4];
  Unit units[(K + UnitK - 1) / UnitK];

  // All of `Threads` threads: `width` k from element `first` on, as other blocks send them, with `tag`, or `plain` ones if there
  // are any.
  template <int Threads>
  CUTLASS_DEVICE void stage(TaggedVector const* sent, uint32_t tag, bf16 const* plain, int first, int width) {
    int const thread = thread_now(), items = width / 8;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int of_warp = thread / kLanes * kLanes; of_warp < items; of_warp += AtOnce * Threads) {
      uint4 eights[AtOnce];
      if (plain != nullptr) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < AtOnce; ++i) {
          int const item = of_warp + i * Threads + thread % kLanes;
          eights[i] = {0, 0, 0, 0};
          if (item < items) eights[i] = __ldcg(reinterpret_cast<uint4 const*>(plain + first + item * 8));
        }
      } else {
        TaggedVector found[2 * AtOnce];
        receive(tag, found, [&](int i) {
          int const item = of_warp + i / 2 * Threads + thread % kLanes;
          return item < items ? sent + (first + item * 8) / 4 + i % 2 : nullptr;
        });
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < AtOnce; ++i) {
          TaggedVector const *const low = &found[2 * i], *const high = low + 1;
          eights[i] = make_uint4(uint32_t(low->words[0]), uint32_t(low->words[1]), uint32_t(high->words[0]), uint32_t(high->words[1]));
        }
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = 0; i < AtOnce; ++i) {
        int const item = of_warp + i * Threads + thread % kLanes;
        if (of_warp + i * Threads >= items) break;
        put(item * 8, eights[0], item < items);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j + 1 < AtOnce; ++j) eights[j] = eights[j + 1];
      }
    }
  }

 private:
  // Eight k, by as many consecutive lanes as a unit takes; all lanes of the warp.
  CUTLASS_DEVICE void put(int k, uint4 const& eight, bool exists) {
    constexpr int kLanesOfUnit = UnitK / 8;
    uint32_t const zero = exists ? 0xffffffffu : 0;
    uint32_t const pairs[4] = {eight.x & zero, eight.y & zero, eight.z & zero, eight.w & zero};
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
      integer[i] = __float_as_uint(__fmaf_rn(i % 2 ? bf16_high(pairs[i / 2]) : bf16_low(pairs[i / 2]), unit, kInteger + 128));
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
    if (!exists) return;
    int const group = k / kGroupK % 4, t = k / 8 % 4;
    uint4(&part)[2][4] = words[k / kPartK][group / 2];
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      reinterpret_cast<uint32_t*>(&part[0][t])[2 * half + group % 2] = high[half];
      reinterpret_cast<uint32_t*>(&part[1][t])[2 * half + group % 2] = low[half];
    }
    if (k % UnitK == 0) units[k / UnitK] = {__fmaf_rn(largest, 0.f, __uint_as_float(power) * 0x1p-13f), sum};
  }

  // A byte each of k 2 half, 2 half + 4, 2 half + 1 and 2 half + 5 of a lane's eight.
  CUTLASS_DEVICE static uint32_t bytes(uint32_t const (&integer)[8], int half, uint32_t which) {
    uint32_t const even = __byte_perm(integer[2 * half], integer[2 * half + 4], 0x5410);
    uint32_t const odd = __byte_perm(integer[2 * half + 1], integer[2 * half + 5], 0x5410);
    return __byte_perm(even, odd, which);
  }
};

}  // namespace futransformer
