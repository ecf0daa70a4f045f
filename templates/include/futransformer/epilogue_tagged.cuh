// What qkv of a persistent kernel sends to attention of the same launch: Q and the newest token's K and V, in tagged words
// (tagged.cuh).
#pragma once

#include "epilogue.cuh"
#include "epilogue_kv_decode.cuh"
#include "tagged.cuh"

namespace futransformer {

// A token's K and V as the copy has them, for who attends to the page that they go to: words of K, words of V (each four
// bytes of a lane), scales of K, scales of V, with a minimum in the upper half.
template <class Format, int HeadDim>
struct TokenCodes {
  using Page = KvCopyPage<Format, HeadDim>;
  static constexpr int kGroups = HeadDim / 32, kWords = kGroups * 4;
  static constexpr int kScales = Format::template kGroups<HeadDim>;
  static constexpr int kCount = 2 * (kWords + kScales);

  CUTLASS_DEVICE static int word(int group, int t, bool is_value) { return (is_value ? kWords : 0) + group * 4 + t; }
  CUTLASS_DEVICE static int scale(int group, bool is_value) { return 2 * kWords + (is_value ? kScales : 0) + group; }

  // Put word `index` where it belongs in a page.
  CUTLASS_DEVICE static void put(char* page, int token, int index, uint32_t word) {
    if (index < kWords) {
      *reinterpret_cast<uint32_t*>(page + Page::key_word(token, index / 4, index % 4)) = word;
    } else if (index < 2 * kWords) {
      char* const target = page + Page::value_byte(token, (index - kWords) / 4, index % 4);
      CUTLASS_PRAGMA_UNROLL
      for (int byte = 0; byte < 4; ++byte) target[64 * byte] = char(word >> 8 * byte);
    } else {
      bool const is_value = index >= 2 * kWords + kScales;
      int const group = index - 2 * kWords - (is_value ? kScales : 0);
      auto* const target = reinterpret_cast<uint16_t*>(page + (is_value ? Page::kPartBytes : 0) + Page::scale(token, group));
      target[0] = uint16_t(word);
      if constexpr (Format::kMinimum) target[Page::kScaleBytes / 2] = uint16_t(word >> 16);
    }
  }
};

// Q, and the token's K and V as the copy has them, to who attends (CopyKvOfRow's Sent).
template <int QFeatures, int KVHeads, int HeadDim, class Format>
struct SentToAttention {
  using Codes = TokenCodes<Format, HeadDim>;
  static constexpr bool kAny = true;
  TaggedVector* q;    // [rows, QFeatures]
  TaggedWord* codes;  // [rows, KVHeads, Codes::kCount]
  uint32_t tag;

  // Features 0 .. 3 and 16 .. 19 from `feature` on.
  CUTLASS_DEVICE void query(int row, int feature, float const (&values)[8]) const {
    uint4 const words = pack_bf16x8(values);
    TaggedVector* const target = q + (size_t(row) * QFeatures + feature) / 4;
    send(target, words.x, words.y, tag);
    send(target + 4, words.z, words.w, tag);
  }
  CUTLASS_DEVICE void token(int row, int head, int group, int t, bool is_value, KvScale<Format::kMinimum> const& scale,
                            float const (&values)[8]) const {
    TaggedWord* const target = codes + (size_t(row) * KVHeads + head) * Codes::kCount;
    uint32_t word = scale.key_word(values);
    if (is_value) {
      word = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int byte = 0; byte < 4; ++byte) word |= uint32_t(scale.value_byte(values, byte)) << 8 * byte;
    }
    send(target + Codes::word(group, t, is_value), word, tag);
    if (t == 0 && (Format::kGroup != 0 || group == 0)) {
      send(target + Codes::scale(Format::kGroup == 0 ? 0 : group, is_value), scale.halves, tag);
    }
  }
};

}  // namespace futransformer
