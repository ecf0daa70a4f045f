// Epilogue operations of a persistent kernel, whose results other blocks of the same launch read: tagged words
// (tagged.cuh) in place of plain ones. Rows of tagged BF16 take four bytes a column.
#pragma once

#include "epilogue.cuh"
#include "epilogue_kv_decode.cuh"
#include "tagged.cuh"

namespace futransformer {

// Eight BF16 columns of a row, from a multiple of eight on.
CUTLASS_DEVICE void send_bf16x8(TaggedVector* rows, size_t element, float const (&values)[8], uint32_t tag) {
  uint4 const words = pack_bf16x8(values);
  send(rows + element / 4, words.x, words.y, tag);
  send(rows + element / 4 + 1, words.z, words.w, tag);
}

// RMSNorm's row scale, from partial sums of squares [Parts] of a row of K columns that other blocks send; a whole warp.
template <int K, int Parts>
CUTLASS_DEVICE float receive_rstd(TaggedWord const* sums, uint32_t tag, float eps) {
  constexpr int kLanes = 32, kWords = (Parts + kLanes - 1) / kLanes;
  int const lane = thread_now() % kLanes;
  auto const place = [&](int i) { return lane + i * kLanes < Parts ? sums + lane + i * kLanes : nullptr; };
  TaggedWord found[kWords];
  receive(tag, found, place);
  float sum = 0.f;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kWords; ++i) sum += place(i) == nullptr ? 0.f : __uint_as_float(uint32_t(found[i]));
  return rsqrtf(sum_over_lanes<kLanes>(sum) * (1.f / K) + eps);
}

// x rstd, of a known one.
struct KnownRowScale : Operation {
  float rstd;

  CUTLASS_DEVICE explicit KnownRowScale(float factor) : rstd(factor) {}
  template <int Width>
  CUTLASS_DEVICE void apply(Nothing, Nothing, int, int, float (&values)[Width]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; ++i) values[i] *= rstd;
  }
};

// BF16 rows.
template <int Columns>
struct TaggedStore : Operation {
  TaggedVector* out;
  uint32_t tag;

  CUTLASS_DEVICE TaggedStore(TaggedVector* target, uint32_t as) : out(target), tag(as) {}
  CUTLASS_DEVICE void apply(Nothing, Nothing, int row, int column, float (&values)[8]) const {
    send_bf16x8(out, size_t(row) * Columns + column, values, tag);
  }
};

// ResidualFloat whose BF16 copy and sums of squares others read; its own, plain, where the last layer leaves both.
template <int Columns, int Parts>
struct TaggedResidual : ResidualFloat<Columns, Parts> {
  using Plain = ResidualFloat<Columns, Parts>;
  using typename Plain::Operands;
  using typename Plain::Row;
  TaggedVector* sent;      // [rows, Columns]
  TaggedWord* sumsq_sent;  // [rows, Parts]
  uint32_t tag;

  // `plain` may be null.
  CUTLASS_DEVICE TaggedResidual(float* stream, TaggedVector* target, TaggedWord* sums, uint32_t as, bf16* plain, float* plain_sums)
      : Plain(stream, plain, plain_sums), sent(target), sumsq_sent(sums), tag(as) {}
  CUTLASS_DEVICE void apply(Row& state, Operands const& operands, int row, int column, float (&values)[8]) const {
    float stream[8];
    unpack_f32x8(operands.added, stream);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) values[i] += stream[i];
    size_t const first = size_t(row) * Columns + column;
    send_bf16x8(sent, first, values, tag);
    store_f32x8(this->residual + first, values);
    if (this->out != nullptr) store_bf16x8(this->out + first, values);
    this->add(state, values);
  }
  template <int Lanes>
  CUTLASS_DEVICE void end(Row const& state, int row, int part, bool valid) const {
    float const sum = sum_over_lanes<Lanes>(state.sum);
    if (!valid || threadIdx.x % Lanes != 0) return;
    send(sumsq_sent + size_t(row) * Parts + part, __float_as_uint(sum), tag);
    if (this->out != nullptr) this->sumsq_out[size_t(row) * Parts + part] = sum;
  }
};

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
