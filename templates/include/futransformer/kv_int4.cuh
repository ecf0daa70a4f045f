// Four-bit K and V: from values to codes, scales and their places in a page, by quads of lanes.
//
// The format is generator/kv_format.py's, a page's bytes are futransformer/kv_packing.py's, and every rounding is that of
// futransformer/quantize/kv_int4.py: not one bit may differ. A quad holds groups of 32 features of one token, eight a lane.
// Lane t of it has
//
//   of K   features 16 (n / 4) + 4 t + n % 4, n = 0 .. 7: its word; what RoPE's pair order leaves in prefill's lanes
//   of V   features 8 t + n: its four bytes
//
// Only K is rotated here: V's rotation is in its weight. All lanes of a warp take part, whatever they hold. What is not
// finite makes its group's scale NaN, and what float16 cannot scale makes it infinite, with codes that are worth zero
// times it: attention's scores or sums are then NaN, as those of the main pages are or nearly.
#pragma once

#include "numeric.cuh"

namespace futransformer {

// `Group` features share a scale: 32, or a head (0). `Block` features of K are mixed: 0, 32, 64 or 128.
template <int Group, bool Minimum, int Block>
struct KvFormat {
  static constexpr int kGroup = Group, kBlock = Block;
  static constexpr bool kMinimum = Minimum;
  template <int HeadDim>
  static constexpr int kGroups = Group == 0 ? 1 : HeadDim / Group;  // of a head
};

// One page of one key/value head, as bytes: codes of K, scales float16 [groups, 64], minima likewise; then V.
template <class Format, int HeadDim>
struct KvCopyPage {
  static constexpr int kTokens = 64;
  static constexpr int kCodeBytes = kTokens * HeadDim / 2;
  static constexpr int kScaleBytes = kTokens * Format::template kGroups<HeadDim> * 2;  // minima take as many
  static constexpr int kPartBytes = kCodeBytes + kScaleBytes * (Format::kMinimum ? 2 : 1);
  static constexpr int kBytes = 2 * kPartBytes;
  // Columns of qkv that are finished together: a head, where a group or a block spans one.
  static constexpr int kUnit = Format::kGroup == 32 && Format::kBlock <= 32 ? 64 : HeadDim;

  // The word of K of lane `t` of a group of 32.
  CUTLASS_DEVICE static int key_word(int token, int group, int t) {
    return operand(token, group / 2, token % 16 / 2 * 4 + t) + (group % 2 * 2 + token % 2) * 4;
  }
  // The first byte of V of lane `t` of a group of 32; the next three are 64 bytes apart.
  CUTLASS_DEVICE static int value_byte(int token, int group, int t) {
    int const step = group * 2 + t / 2;
    return kPartBytes + operand(token, step / 4, t % 2 * 16 + token % 16 / 4) + step % 4 * 4 + token % 4;
  }
  // The scale of a group (of Format's), from the start of K or of V; a minimum is kScaleBytes behind it.
  CUTLASS_DEVICE static int scale(int token, int group) { return kCodeBytes + (group * kTokens + token) * 2; }

 private:
  CUTLASS_DEVICE static int operand(int token, int load, int lane) {
    return ((token / 16 * (HeadDim / 64) + load) * 32 + lane) * 16;
  }
};

// 1 / x rounded to nearest, of an x that is a half, finite and not zero, or an integer up to 8192: one step from an
// estimate that is off by a unit.
CUTLASS_DEVICE float reciprocal_of_few_bits(float x) {
  float const estimate = reciprocal_approx(x);
  return __fmaf_rn(__fmaf_rn(-x, estimate, 1.f), estimate, estimate);
}

// x / 15 rounded to nearest.
CUTLASS_DEVICE float fifteenth(float x) {
  constexpr float kFifteenth = 1.f / 15.f;
  float const estimate = __fmul_rn(x, kFifteenth);
  return __fmaf_rn(__fmaf_rn(-15.f, estimate, x), kFifteenth, estimate);
}

// Mix K's features in blocks of `Block`: butterflies over the bits of a feature's index, the lowest first, and one
// factor. `Groups` consecutive groups, whole blocks of them; positions as of K.
template <int Block, int Groups>
CUTLASS_DEVICE void rotate_keys(float (&values)[Groups][8]) {
  if constexpr (Block > 0) {
    static_assert(Block % 32 == 0 && Groups * 32 % Block == 0, "whole blocks of whole groups");
    auto const butterfly = [](float& a, float& b) {
      float const sum = __fadd_rn(a, b);
      b = __fsub_rn(a, b);
      a = sum;
    };
    // Between lanes: the one whose bit is set takes the difference.
    auto const between_lanes = [](float& mine, int distance, float sign) {
      mine = __fmaf_rn(sign, mine, __shfl_xor_sync(0xffffffffu, mine, distance));
    };
    float const low_sign = threadIdx.x & 1 ? -1.f : 1.f, high_sign = threadIdx.x & 2 ? -1.f : 1.f;
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < Groups; ++group) {
      float(&mine)[8] = values[group];
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < 8; n += 2) butterfly(mine[n], mine[n + 1]);
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < 8; n += n % 2 ? 3 : 1) butterfly(mine[n], mine[n + 2]);
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < 8; ++n) between_lanes(mine[n], 1, low_sign);
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < 8; ++n) between_lanes(mine[n], 2, high_sign);
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < 4; ++n) butterfly(mine[n], mine[n + 4]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < Block / 32; distance *= 2) {
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < Groups; ++group) {
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < 8 && group / distance % 2 == 0; ++n) butterfly(values[group][n], values[group + distance][n]);
      }
    }
    constexpr float kFactor = Block == 32 ? 0.176776695296636881f : Block == 64 ? 0.125f : 0.0883883476483184406f;
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < Groups; ++group) {
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < 8; ++n) values[group][n] = __fmul_rn(values[group][n], kFactor);
    }
  }
}

// What the codes of a group are worth, and how values become codes.
template <bool Minimum>
struct KvScale {
  uint32_t halves;   // float16: the scale, and above it the minimum
  float reciprocal;  // of the scale that makes the codes; zero where it is zero, or not finite
  float minimum;

  // Of a quad's `Groups` groups together.
  template <int Groups>
  CUTLASS_DEVICE static KvScale of(float const (&values)[Groups][8]) {
    KvScale scale;
    if constexpr (Minimum) {
      float high = values[0][0], depth = -values[0][0];  // the largest value, and minus the least
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < Groups * 8; ++i) {
        high = larger(high, values[i / 8][i % 8]);
        depth = larger(depth, -values[i / 8][i % 8]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int distance = 1; distance < 4; distance *= 2) {
        high = larger(high, __shfl_xor_sync(0xffffffffu, high, distance));
        depth = larger(depth, __shfl_xor_sync(0xffffffffu, depth, distance));
      }
      scale.halves = pack_halves(fifteenth(__fadd_rn(high, depth)), -depth);
    } else {
      scale.halves = pack_halves(__fmul_rn(largest(values), -0.125f), 0.f);
    }
    float2 const rounded = unpack_halves(scale.halves);
    scale.reciprocal = usable(scale.halves) ? reciprocal_of_few_bits(rounded.x) : 0.f;
    scale.minimum = rounded.y;
    return scale;
  }

  // Of K, if it is `wanted`: store the scale that suits the codes best, sum x q / sum q q (least squares), in the place of
  // that which makes them. One with a minimum stays as it is. All lanes that exchange values take part.
  template <int Groups>
  CUTLASS_DEVICE void refit(float const (&values)[Groups][8], bool wanted) {
    if constexpr (!Minimum) {
      float products = 0.f, squares = 0.f;  // squares are integers, exact in any order
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Groups * 8; ++i) {
        float const value = values[i / 8][i % 8];
        float const nearest = __fsub_rn(__uint_as_float(integer(value)), kUnits + 8.f);
        float const code = fminf(fmaxf(nearest, -8.f), 7.f);
        products = __fadd_rn(products, __fmul_rn(value, code));
        squares = __fmaf_rn(code, code, squares);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int distance = 1; distance < 4; distance *= 2) {
        products = __fadd_rn(products, __shfl_xor_sync(0xffffffffu, products, distance));
        squares = __fadd_rn(squares, __shfl_xor_sync(0xffffffffu, squares, distance));
      }
      uint32_t const better = pack_halves(__fmul_rn(products, reciprocal_of_few_bits(squares)), 0.f);
      if (wanted && usable(halves) && usable(better)) halves = better;
    }
  }

  // A lane's word of K: nibble i is position 2 i, nibble i + 4 position 2 i + 1.
  CUTLASS_DEVICE uint32_t key_word(float const (&values)[8]) const {
    uint32_t word = pair(values, 3);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 2; i >= 0; --i) word = word * 16 + pair(values, i);
    return word;
  }

  // One of a lane's four bytes of V: features 8 t + 2 byte and the next.
  CUTLASS_DEVICE uint8_t value_byte(float const (&values)[8], int byte) const {
    uint32_t const codes = pair(values, byte);
    return uint8_t(codes >> 12 | codes);
  }

  // A lane's codes of a group of 32: a word of K, or four bytes of V.
  template <class Page>
  CUTLASS_DEVICE void store_key(unsigned char* page, float const (&values)[8], int token, int group, int t) const {
    __stcg(reinterpret_cast<uint32_t*>(page + Page::key_word(token, group, t)), key_word(values));
  }
  template <class Page>
  CUTLASS_DEVICE void store_value(unsigned char* page, float const (&values)[8], int token, int group, int t) const {
    unsigned char* const target = page + Page::value_byte(token, group, t);
    CUTLASS_PRAGMA_UNROLL
    for (int byte = 0; byte < 4; ++byte) target[64 * byte] = value_byte(values, byte);
  }

  // By one lane.
  template <class Page>
  CUTLASS_DEVICE void store(unsigned char* part, int token, int group) const {
    auto* const target = reinterpret_cast<uint16_t*>(part + Page::scale(token, group));
    target[0] = uint16_t(halves);
    if constexpr (Minimum) target[Page::kScaleBytes / 2] = uint16_t(halves >> 16);
  }

 private:
  static constexpr float kUnits = 12582912.f;  // 1.5 x 2^23, 0x4b400000: floats there are integers

  // Whether a scale is neither zero nor infinite nor NaN.
  CUTLASS_DEVICE static bool usable(uint32_t halves) { return (halves & 0x7fff) - 1u < 0x7bffu; }

  // The value of the largest magnitude; of two the positive one. Read as integers, floats that are positive order by
  // magnitude, and so do negative ones above them if there is no sign. NaN is the largest.
  template <int Groups>
  CUTLASS_DEVICE static float largest(float const (&values)[Groups][8]) {
    auto const bits = [&values](int i) { return __float_as_uint(values[i / 8][i % 8]); };
    int high = bits(0);  // the largest positive one, if there is any
    uint32_t low = bits(0);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 1; i < Groups * 8; i += 2) {
      int const next = i + 1 < Groups * 8 ? i + 1 : i;
      high = __vimax3_s32(high, bits(i), bits(next));
      low = __vimax3_u32(low, bits(i), bits(next));
    }
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < 4; distance *= 2) {
      high = max(high, __shfl_xor_sync(0xffffffffu, high, distance));
      low = max(low, __shfl_xor_sync(0xffffffffu, low, distance));
    }
    return __uint_as_float(high >= int(low & 0x7fffffffu) ? uint32_t(high) : low);
  }

  // Two stored codes, 0 .. 15, in the halves of a word: of values 2 i and 2 i + 1.
  CUTLASS_DEVICE uint32_t pair(float const (&values)[8], int i) const {
    uint32_t const both = __byte_perm(integer(values[2 * i]), integer(values[2 * i + 1]), 0x5410);
    return Minimum ? both : __vimin_s16x2_relu(both, 0x000f000fu);
  }

  // A code, 0 .. 15, in the lower half; of a signed scale it may still lie a little outside of that.
  CUTLASS_DEVICE uint32_t integer(float value) const {
    if constexpr (Minimum) {
      // beside a minimum far from zero, which is rounded too, far outside
      float const scaled = __fmul_rn(__fsub_rn(value, minimum), reciprocal);
      return __float_as_uint(__fadd_rn(fminf(fmaxf(scaled, 0.f), 15.f), kUnits));
    } else {
      return __float_as_uint(__fadd_rn(__fmul_rn(value, reciprocal), kUnits + 8.f));
    }
  }
};

}  // namespace futransformer
