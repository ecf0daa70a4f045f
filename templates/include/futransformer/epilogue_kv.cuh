// The INT4 copy of K and V, behind the main pages: what prefill's qkv writes of each tile once the tile is done.
//
// A quad holds 32 columns of a row, eight a lane. Those of V are a group of 32 features. K stands in pair order, columns
// 2 i and 2 i + 1 being features i and i + HeadDim / 2, so that 64 columns are two groups: the even and the odd ones.
//
//   lane t of 64 columns of K     32 columns                        the next 32
//                              8 t  + {0, 2, 4, 6}  + {1, 3, 5, 7}    {0, 2, 4, 6}  {1, 3, 5, 7}
//   positions of group u          n = 0 .. 3                            n = 4 .. 7
//             of u + HeadDim / 64                 n = 0 .. 3                          n = 4 .. 7
#pragma once

#include "epilogue.cuh"
#include "kv_int4.cuh"

namespace futransformer {

template <int QFeatures, int KVHeads, int HeadDim, int PageSize, class Format>
struct CopyKv : KvSlots<QFeatures, KVHeads, HeadDim, PageSize> {
  using Slots = KvSlots<QFeatures, KVHeads, HeadDim, PageSize>;
  using typename Slots::Row;
  using Page = KvCopyPage<Format, HeadDim>;
  unsigned char* pages;  // [num_pages, KVHeads, Page::kBytes]

  static constexpr int kQueryColumns = 0, kKeyColumns = 0;  // the operation before says where they are
  static constexpr int kKept = 24;  // at 128 sums; with none, operands asked for ahead spill
  static constexpr int kUnit = Page::kUnit;

  CUTLASS_DEVICE CopyKv(unsigned char* copy, long long const* of_rows) : Slots(of_rows), pages(copy) {}

  template <class Column>
  CUTLASS_DEVICE void apply(Row const&, Nothing, int, Column, float (&)[8]) const {}

  // `column` is the first of a unit; `kept` the unit in BF16, as the main pages have it or would.
  template <Part kPart>
  CUTLASS_DEVICE void copy(Row const& state, PartColumn<kPart> column, uint4 const (&kept)[kUnit / 32]) const {
    constexpr bool kKeys = kPart == Part::kKey;
    constexpr int kGroups = kUnit / 32, kEven = kGroups / 2;  // groups of K's even columns
    int const of_part = column.index - QFeatures - (kKeys ? 0 : Slots::kKeyColumns), t = threadIdx.x % 4;
    unsigned char* const page = pages + size_t(state.slot / PageSize * KVHeads + of_part / HeadDim) * Page::kBytes;
    int const token = state.slot % PageSize, first = of_part % HeadDim / (kKeys ? 64 : 32);

    float values[kGroups][8];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      float eight[8];
      unpack_bf16x8(kept[i], eight);
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < 8; ++n) {
        float& value = kKeys ? values[i / 2 + n % 2 * kEven][i % 2 * 4 + n / 2] : values[i][n];
        value = eight[n];
      }
    }
    if constexpr (kKeys) rotate_keys<Format::kBlock>(values);

    using Scale = KvScale<Format::kMinimum>;
    constexpr int kScales = Format::kGroup == 0 ? 1 : kGroups;
    Scale scales[kScales];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kScales; ++i) {
      auto const& own = reinterpret_cast<float const(&)[kGroups / kScales][8]>(values[i]);
      scales[i] = Scale::of(own);
      if constexpr (kKeys) scales[i].refit(own, true);
    }
    if (state.slot < 0) return;  // no lane waits for another from here on
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroups; ++i) {
      int const group = kKeys ? first + i % kEven + i / kEven * (HeadDim / 64) : first + i;
      Scale const& scale = scales[i % kScales];
      if constexpr (kKeys) {
        scale.template store_key<Page>(page, values[i], token, group, t);
      } else {
        scale.template store_value<Page>(page, values[i], token, group, t);
      }
      if (i < kScales && t == i) scale.template store<Page>(page + (kKeys ? 0 : Page::kPartBytes), token, group);
    }
  }
};

}  // namespace futransformer
