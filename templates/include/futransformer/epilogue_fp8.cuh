// What a GEMM's epilogue chain (epilogue.cuh) does more where operands or results are FP8: sums are worth a scale, and
// results, K and V among them, are written at one.
#pragma once

#include "epilogue.cuh"

namespace futransformer {

// RowScale of sums that are worth `scale`: x's scale times the weight's. It costs nothing beside rstd.
template <int K>
struct ScaledRowScale : RowScale<K> {
  using typename RowScale<K>::Fetched;
  using typename RowScale<K>::Row;
  float const* scale;  // [1]
  mutable float factor = 1.f;

  CUTLASS_DEVICE ScaledRowScale(float const* sums, int count, float epsilon, float const* of_sums)
      : RowScale<K>(sums, count, epsilon), scale(of_sums) {}

  CUTLASS_DEVICE void prepare() const { factor = *scale; }
  template <int Lanes, int Loads = 1>
  CUTLASS_DEVICE Row begin(int row, bool valid, Fetched const& fetched) const {
    return {RowScale<K>::template begin<Lanes, Loads>(row, valid, fetched).rstd * factor};
  }
};

// The same with SwiGLU behind it, in units of the FP8 result's scale: what is multiplied into every gate and every up is
// one factor a row. silu(g) = g / 2 (1 + tanh(g / 2)) is one special-function instruction instead of two, 3 % of a tile of
// 4096 columns of K; tanh.approx is good to 2^-11, against E4M3's 2^-4.
template <int K>
struct ScaledSwiGlu : RowScale<K> {
  using typename RowScale<K>::Fetched;
  float const* scale;      // [1] what the sums are worth
  float const* out_scale;  // [1] what a code of the result is worth
  mutable float half = 1.f, per_out = 1.f;

  static constexpr bool kHalvesColumns = true;
  static constexpr int kKept = 2;
  struct Row {
    float gate, up;
  };

  CUTLASS_DEVICE ScaledSwiGlu(float const* sums, int count, float epsilon, float const* of_sums, float const* of_codes)
      : RowScale<K>(sums, count, epsilon), scale(of_sums), out_scale(of_codes) {}

  CUTLASS_DEVICE void prepare() const {
    half = 0.5f * *scale;
    per_out = 2.f / *out_scale;
  }
  template <int Lanes, int Loads = 1>
  CUTLASS_DEVICE Row begin(int row, bool valid, Fetched const& fetched) const {
    float const gate = RowScale<K>::template begin<Lanes, Loads>(row, valid, fetched).rstd * half;
    return {gate, gate * per_out};
  }
  CUTLASS_DEVICE void apply(Row const& state, Nothing, int, int, float const (&values)[16], float (&halved)[8]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      float const gate = values[2 * i] * state.gate;
      halved[i] = fmaf(gate, tanh_approx(gate), gate) * (values[2 * i + 1] * state.up);
    }
  }
};

// x a scale a column, of FP8 operands whose weight has one a row. `Width` columns of
// accumulators, 8 or 16, are eight of the output.
template <int Width>
struct ChannelScale : Operation {
  float const* scale;  // [accumulator columns]

  CUTLASS_DEVICE explicit ChannelScale(float const* of_columns) : scale(of_columns) {}
  CUTLASS_DEVICE void apply(Nothing, Nothing, int, int column, float (&values)[Width]) const {
    float4 const* const source = reinterpret_cast<float4 const*>(scale + column * (Width / 8));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width / 4; ++i) {
      float4 const four = __ldg(source + i);  // as operands, asked for ahead, they would spill
      values[4 * i] *= four.x;
      values[4 * i + 1] *= four.y;
      values[4 * i + 2] *= four.z;
      values[4 * i + 3] *= four.w;
    }
  }
};

// Residual, added to sums that are worth `scale`.
template <int Columns>
struct ScaledResidual : Residual<Columns> {
  using typename Residual<Columns>::Operands;
  float const* scale;  // [1]
  mutable float factor = 1.f;

  CUTLASS_DEVICE ScaledResidual(float const* of_sums, bf16 const* source) : Residual<Columns>(source), scale(of_sums) {}
  CUTLASS_DEVICE void prepare() const { factor = *scale; }
  CUTLASS_DEVICE void apply(Nothing, Operands const& operands, int, int, float (&values)[8]) const {
    float added[8];
    unpack_bf16x8(operands.added, added);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) values[i] = fmaf(values[i], factor, added[i]);
  }
};

// What values become FP8 by: a delayed scale, one that earlier calls have led to. Beside the codes go the largest
// magnitude, which later ones may be scaled by, and how many values lay beyond the largest code, at which they saturate.
// Maxima and counts do not depend on the order in which warps deliver them.
struct Fp8Scale : Operation {
  float const* scale;   // [1] what a code of 1 is worth
  float* amax;          // [1]
  unsigned* saturated;  // [1]
  static constexpr int kKept = 8;
  mutable float per_scale = 1.f;
  mutable float largest = 0.f;  // of this thread's values, in scales

  CUTLASS_DEVICE Fp8Scale(float const* of_codes, float* maximum, unsigned* count)
      : scale(of_codes), amax(maximum), saturated(count) {}

  CUTLASS_DEVICE void prepare() const { per_scale = 1.f / *scale; }
  // Values in scales, before they are rounded.
  template <int Count>
  CUTLASS_DEVICE void observe(float const (&scaled)[Count]) const {
    float most = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Count; ++i) most = fmaxf(most, fabsf(scaled[i]));
    largest = fmaxf(largest, most);
    if (most > kLargestE4m3) count(scaled);
  }
  CUTLASS_DEVICE void conclude() const {
    // Of floats that are not negative, the larger has the larger bits.
    unsigned const most = __reduce_max_sync(0xffffffffu, __float_as_uint(largest * *scale));
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<unsigned*>(amax), most);
  }

 private:
  template <int Count>
  CUTLASS_DEVICE void count(float const (&scaled)[Count]) const {
    unsigned beyond = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Count; ++i) beyond += fabsf(scaled[i]) > kLargestE4m3;
    atomicAdd(saturated, beyond);
  }
};

template <int Columns, bool InCodes = false>  // InCodes: the values come in scales already
struct StoreFp8 : Fp8Scale {
  e4m3* out;  // [rows, Columns]

  CUTLASS_DEVICE StoreFp8(e4m3* target, float const* of_codes, float* maximum, unsigned* count)
      : Fp8Scale(of_codes, maximum, count), out(target) {}

  template <class Row>
  CUTLASS_DEVICE void apply(Row const&, Nothing, int row, int column, float (&values)[8]) const {
    float scaled[8];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) scaled[i] = InCodes ? values[i] : values[i] * per_scale;
    store_e4m3x8(out + size_t(row) * Columns + column, scaled);
    observe(scaled);
  }
};

// ScatterKv into pages of E4M3. `kv_scale` [2]: what a code of K, and of V, is worth; beyond 448 of it they saturate. It
// is read where it is used: beside 192 sums a prefill tile has no register to keep it in.
template <int QFeatures, int KVHeads, int HeadDim, int PageSize, bool StoresQ = true>
struct ScatterKvFp8 : KvSlots<QFeatures, KVHeads, HeadDim, PageSize> {
  using Slots = KvSlots<QFeatures, KVHeads, HeadDim, PageSize>;
  using typename Slots::Row;
  using Slots::kKeyColumns;
  using Slots::offset;
  bf16* q;        // [rows, QFeatures]
  e4m3* k_pages;  // [num_pages, KVHeads, PageSize, HeadDim]
  e4m3* v_pages;
  float const* kv_scale;

  CUTLASS_DEVICE ScatterKvFp8(bf16* queries, e4m3* keys, e4m3* values, long long const* of_rows, float const* scales)
      : Slots(of_rows), q(queries), k_pages(keys), v_pages(values), kv_scale(scales) {}

  CUTLASS_DEVICE void apply(Row const& state, Nothing, int row, int column, float (&values)[8]) const {
    if (!StoresQ && column < QFeatures) return;
    if (column < QFeatures) return apply(state, {}, row, PartColumn<Part::kQuery>{column}, values);
    if (state.slot < 0) return;
    bool const is_k = column < QFeatures + kKeyColumns;
    e4m3* const pages = is_k ? k_pages : v_pages;
    store(pages + offset(state, column - QFeatures - (is_k ? 0 : kKeyColumns)), values, kv_scale + !is_k);
  }
  CUTLASS_DEVICE void apply(Row const&, Nothing, int row, PartColumn<Part::kQuery> column, float (&values)[8]) const {
    store_bf16x8(q + size_t(row) * QFeatures + column.index, values);
  }
  CUTLASS_DEVICE void apply(Row const& state, Nothing, int, PartColumn<Part::kKey> column, float (&values)[8]) const {
    if (state.slot >= 0) store(k_pages + offset(state, column.index - QFeatures), values, kv_scale);
  }
  CUTLASS_DEVICE void apply(Row const& state, Nothing, int, PartColumn<Part::kValue> column, float (&values)[8]) const {
    if (state.slot >= 0) store(v_pages + offset(state, column.index - QFeatures - kKeyColumns), values, kv_scale + 1);
  }

 private:
  CUTLASS_DEVICE static void store(e4m3* target, float const (&values)[8], float const* scale) {
    float const per_scale = __fdividef(1.f, __ldg(scale));
    float codes[8];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) codes[i] = values[i] * per_scale;
    store_e4m3x8(target, codes);
  }
};

}  // namespace futransformer
