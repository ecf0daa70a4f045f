// The INT4 copy of K and V, behind the main pages, and Q rotated: what decode's qkv makes of a row's finished columns.
//
// A row's lanes leave in shared memory what the chain has made of its columns; here quads of them take it back by groups
// of 32 features, of which a lane has the eight that kv_int4.cuh asks for. Q is stored in the natural order of features,
// rotated as the copy's K is: attention multiplies the two as they stand.
//
// Columns of Q and K are in pair order: 2 i and 2 i + 1 of a head are features i and i + HeadDim / 2. So the even columns
// of 64 are one group, and the odd ones another.
#pragma once

#include "epilogue.cuh"
#include "kv_int4.cuh"

namespace futransformer {

// Whether others of the same launch are sent Q, which is then not stored, K and V as well.
struct NothingSent {
  static constexpr bool kAny = false;
};

template <int QFeatures, int KVHeads, int HeadDim, int PageSize, class Format, class Sent = NothingSent>
struct CopyKvOfRow : KvSlots<QFeatures, KVHeads, HeadDim, PageSize> {
  using Slots = KvSlots<QFeatures, KVHeads, HeadDim, PageSize>;
  using typename Slots::Row;
  using Page = KvCopyPage<Format, HeadDim>;
  using Scale = KvScale<Format::kMinimum>;
  unsigned char* pages;  // [num_pages, KVHeads, Page::kBytes]
  bf16* q;               // [rows, QFeatures]
  Sent sent;

  static constexpr int kQueryColumns = 0, kKeyColumns = 0;  // the operation before says where they are
  static constexpr int kUnit = Page::kUnit;
  static constexpr int kGroups = Format::kGroup == 0 ? HeadDim / 32 : Format::kBlock > 32 ? Format::kBlock / 32 : 1;  // of a quad

  CUTLASS_DEVICE CopyKvOfRow(unsigned char* copy, long long const* of_rows, bf16* queries)
      : Slots(of_rows), pages(copy), q(queries), sent{} {}
  CUTLASS_DEVICE CopyKvOfRow(unsigned char* copy, long long const* of_rows, Sent const& to)
      : Slots(of_rows), pages(copy), q(nullptr), sent(to) {}

  CUTLASS_DEVICE void apply(Row const&, Nothing, int, int, float (&)[8]) const {}

  // `first_column` is that of the finished ones. All lanes of the warp: lanes may have other rows, and other columns.
  template <class Finished>
  CUTLASS_DEVICE void copy(Row const& state, int first_column, Finished const& finished) const {
    constexpr int kItems = Finished::kColumns / 32 / kGroups, kQuads = Finished::kLanes / 4;
    static_assert(Finished::kColumns % kUnit == 0, "a block finishes whole units");
    static_assert(kQuads > 0, "a quad needs four lanes of a row");
    int const quad = threadIdx.x % Finished::kLanes / 4;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < kItems; first += kQuads) {
      int const item = first + quad < kItems ? first + quad : kItems - 1;
      copy_groups(state, first_column, item, finished.values, finished.row, finished.valid && first + quad < kItems);
    }
  }

 private:
  CUTLASS_DEVICE void copy_groups(Row const& state, int first_column, int item, float const* finished, int row,
                                  bool valid) const {
    constexpr int kOfUnit = kUnit / 32, kEven = kOfUnit / 2;  // groups, and those of even columns
    int const unit = item * kGroups / kOfUnit, first = item * kGroups % kOfUnit, t = threadIdx.x % 4;
    int const column = first_column + unit * kUnit;
    bool const is_query = column < QFeatures, is_value = column >= QFeatures + Slots::kKeyColumns;
    finished += unit * kUnit;

    float plain[kGroups][8], values[kGroups][8];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      int const group = first + i;
      float const* const pairs = finished + group % kEven * 64 + group / kEven + 8 * t;
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < 8; ++n) values[i][n] = is_value ? finished[group * 32 + 8 * t + n] : pairs[n / 4 * 32 + n % 4 * 2];
      unpack_bf16x8(pack_bf16x8(values[i]), plain[i]);  // as the main pages have them, or would
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < 8; ++n) values[i][n] = is_query ? values[i][n] : plain[i][n];
    }
    rotate_keys<Format::kBlock>(values);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < 8; ++n) values[i][n] = is_value ? plain[i][n] : values[i][n];
    }
    // Lanes that exchange values must do the same: those of Q make scales as well.
    constexpr int kScales = Format::kGroup == 0 ? 1 : kGroups;
    Scale scales[kScales];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kScales; ++i) {
      auto const& own = reinterpret_cast<float const(&)[kGroups / kScales][8]>(values[i]);
      scales[i] = Scale::of(own);
      scales[i].refit(own, !is_value);
    }
    if (!valid) return;

    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      int const of_head = column % HeadDim / (is_value ? 32 : 64), group = first + i;
      int const natural = is_value ? of_head + group : of_head + group % kEven + group / kEven * (HeadDim / 64);
      if constexpr (Sent::kAny) {
        if (is_query) {
          sent.query(row, column / HeadDim * HeadDim + natural * 32 + 4 * t, values[i]);
        } else {
          sent.token(row, (column - QFeatures) / HeadDim % KVHeads, natural, t, is_value, scales[i % kScales], values[i]);
        }
      }
      if (is_query) {
        bf16* const target = q + size_t(row) * QFeatures + column / HeadDim * HeadDim + natural * 32 + 4 * t;
        if constexpr (!Sent::kAny) store_query(target, values[i]);
      } else if (state.slot >= 0) {
        int const head = (column - QFeatures) / HeadDim % KVHeads, token = state.slot % PageSize;
        unsigned char* const page = pages + (size_t(state.slot / PageSize) * KVHeads + head) * Page::kBytes;
        store_codes(page, scales[i % kScales], values[i], token, natural, t, is_value);
      }
    }
  }

  // Features 0 .. 3 and 16 .. 19 behind `target`.
  CUTLASS_DEVICE static void store_query(bf16* target, float const (&values)[8]) {
    uint4 const words = pack_bf16x8(values);
    __stcg(reinterpret_cast<uint2*>(target), make_uint2(words.x, words.y));
    __stcg(reinterpret_cast<uint2*>(target + 16), make_uint2(words.z, words.w));
  }

  CUTLASS_DEVICE static void store_codes(unsigned char* page, Scale const& scale, float const (&values)[8], int token,
                                         int group, int t, bool is_value) {
    if (is_value) {
      scale.template store_value<Page>(page, values, token, group, t);
    } else {
      scale.template store_key<Page>(page, values, token, group, t);
    }
    bool const stores_scale = Format::kGroup != 0 || group == 0;
    if (t == 0 && stores_scale) {
      scale.template store<Page>(page + (is_value ? Page::kPartBytes : 0), token, Format::kGroup == 0 ? 0 : group);
    }
  }
};

}  // namespace futransformer
