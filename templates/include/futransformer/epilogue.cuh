// What happens to a GEMM's sums before they reach memory: a chain of small operations on one row's columns.
//
// An operation sees eight consecutive output columns of one row at a time (kWidth columns of accumulators: sixteen
// where SwiGLU folds gate and up). Prefill and decode call the same chain; a row is a prompt token in one, a sequence
// in the other. The protocol, for a group of `Lanes` consecutive lanes that share a row:
//
//   Row row = chain.begin<Lanes>(r, valid);       all lanes of the warp call it; loads what the row needs
//   chain.apply(row, r, column, values);          any number of times, valid rows only
//   chain.end<Lanes>(row, r, part, valid);        all lanes of the warp call it; writes partial sums of column tile `part`
//
// `valid` is false for rows past the end of the problem: nothing is read or written for them.
// Sums are taken in a fixed order, so results do not depend on timing.
#pragma once

#include "numeric.cuh"

namespace futransformer {

struct NoRow {};

// Defaults for operations that keep nothing for a row.
struct StatelessOperation {
  using Row = NoRow;
  static constexpr bool kHalvesColumns = false;
  template <int Lanes>
  CUTLASS_DEVICE Row begin(int, bool) const {
    return {};
  }
  template <int Lanes>
  CUTLASS_DEVICE void end(Row const&, int, int, bool) const {}
};

// x rstd: RMSNorm's row scale, from the partial sums of squares of the row that the GEMM has read (K columns).
template <int K>
struct RowScale {
  float const* sumsq;  // [rows, parts]
  int parts;
  float eps;

  static constexpr bool kHalvesColumns = false;
  struct Row {
    float rstd;
  };

  template <int Lanes>
  CUTLASS_DEVICE Row begin(int row, bool valid) const {
    float sum = 0.f;
    if (valid) {
      for (int part = threadIdx.x % Lanes; part < parts; part += Lanes) {
        sum += sumsq[size_t(row) * parts + part];
      }
    }
    return {rsqrtf(sum_over_lanes<Lanes>(sum) * (1.f / K) + eps)};
  }
  CUTLASS_DEVICE void apply(Row const& state, int, int, float (&values)[8]) const { scale(state, values); }
  CUTLASS_DEVICE void apply(Row const& state, int, int, float (&values)[16]) const { scale(state, values); }
  template <int Lanes>
  CUTLASS_DEVICE void end(Row const&, int, int, bool) const {}

 private:
  template <int Width>
  CUTLASS_DEVICE void scale(Row const& state, float (&values)[Width]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; ++i) values[i] *= state.rstd;
  }
};

// Rotate Q and K. Their features stand in pair order, so columns 2i and 2i + 1 are one rotation pair.
template <int QFeatures, int KFeatures, int HeadDim>
struct Rope {
  float const* table;    // [positions, HeadDim / 2, (cos, sin)]
  int const* positions;  // [rows]

  static constexpr bool kHalvesColumns = false;
  struct Row {
    float const* angles;
  };

  template <int Lanes>
  CUTLASS_DEVICE Row begin(int row, bool valid) const {
    return {valid ? table + size_t(positions[row]) * HeadDim : table};
  }
  CUTLASS_DEVICE void apply(Row const& state, int, int column, float (&values)[8]) const {
    if (column >= QFeatures + KFeatures) return;
    float4 const* angles = reinterpret_cast<float4 const*>(state.angles + column % HeadDim);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      float4 const two = __ldg(angles + i);
      rotate(values[4 * i], values[4 * i + 1], two.x, two.y);
      rotate(values[4 * i + 2], values[4 * i + 3], two.z, two.w);
    }
  }
  template <int Lanes>
  CUTLASS_DEVICE void end(Row const&, int, int, bool) const {}

 private:
  CUTLASS_DEVICE static void rotate(float& first, float& second, float cosine, float sine) {
    float const rotated = first * cosine - second * sine;
    second = second * cosine + first * sine;
    first = rotated;
  }
};

// Q to its row; K and V straight into their slots of the paged cache.
template <int QFeatures, int KVHeads, int HeadDim, int PageSize>
struct ScatterKv {
  bf16* q;  // [rows, QFeatures]
  bf16* k_pages;  // [num_pages, KVHeads, PageSize, HeadDim]
  bf16* v_pages;
  long long const* slots;  // [rows]; negative: no K and V are written

  static constexpr bool kHalvesColumns = false;
  static constexpr int kKvFeatures = KVHeads * HeadDim;
  struct Row {
    long long slot;
  };

  template <int Lanes>
  CUTLASS_DEVICE Row begin(int row, bool valid) const {
    return {valid ? slots[row] : -1};
  }
  CUTLASS_DEVICE void apply(Row const& state, int row, int column, float (&values)[8]) const {
    if (column < QFeatures) {
      store_bf16x8(q + size_t(row) * QFeatures + column, values);
    } else if (state.slot >= 0) {
      bool const is_k = column < QFeatures + kKvFeatures;
      int const feature = column - QFeatures - (is_k ? 0 : kKvFeatures);
      long long const head_row = state.slot / PageSize * KVHeads + feature / HeadDim;
      long long const token = head_row * PageSize + state.slot % PageSize;
      store_bf16x8((is_k ? k_pages : v_pages) + token * HeadDim + feature % HeadDim, values);
    }
  }
  template <int Lanes>
  CUTLASS_DEVICE void end(Row const&, int, int, bool) const {}
};

// + residual; the same thread reads and later overwrites an element, so it may alias the output.
template <int Columns>
struct Residual : StatelessOperation {
  bf16 const* residual;  // [rows, Columns]

  CUTLASS_DEVICE explicit Residual(bf16 const* source) : residual(source) {}
  CUTLASS_DEVICE void apply(Row const&, int row, int column, float (&values)[8]) const {
    float added[8];
    load_bf16x8(residual + size_t(row) * Columns + column, added);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) values[i] += added[i];
  }
};

// silu(gate) * up. Accumulator columns alternate gate, up; `halved` receives eight output columns.
struct SwiGlu : StatelessOperation {
  static constexpr bool kHalvesColumns = true;

  CUTLASS_DEVICE void apply(Row const&, int, int, float const (&values)[16], float (&halved)[8]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      // The tanh form would save an instruction, but cancels for negative gates: tanh.approx is good to 2^-11 only.
      float const gate = values[2 * i];
      halved[i] = __fdividef(gate, 1.f + __expf(-gate)) * values[2 * i + 1];
    }
  }
};

template <int Columns>
struct Store : StatelessOperation {
  bf16* out;  // [rows, Columns]

  CUTLASS_DEVICE explicit Store(bf16* target) : out(target) {}
  CUTLASS_DEVICE void apply(Row const&, int row, int column, float (&values)[8]) const {
    store_bf16x8(out + size_t(row) * Columns + column, values);
  }
};

// BF16 store, and the sum of squares of what was stored: the next RMSNorm's statistics.
template <int Columns, int Parts>
struct StoreSumSquares {
  bf16* out;         // [rows, Columns]
  float* sumsq_out;  // [rows, Parts]

  static constexpr bool kHalvesColumns = false;
  struct Row {
    float sum;
  };

  template <int Lanes>
  CUTLASS_DEVICE Row begin(int, bool) const {
    return {0.f};
  }
  CUTLASS_DEVICE void apply(Row& state, int row, int column, float (&values)[8]) const {
    uint4 const word = pack_bf16x8(values);
    *reinterpret_cast<uint4*>(out + size_t(row) * Columns + column) = word;
    uint32_t const halves[4] = {word.x, word.y, word.z, word.w};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      state.sum = fmaf(bf16_low(halves[i]), bf16_low(halves[i]), state.sum);
      state.sum = fmaf(bf16_high(halves[i]), bf16_high(halves[i]), state.sum);
    }
  }
  template <int Lanes>
  CUTLASS_DEVICE void end(Row const& state, int row, int part, bool valid) const {
    float const sum = sum_over_lanes<Lanes>(state.sum);
    if (valid && threadIdx.x % Lanes == 0) sumsq_out[size_t(row) * Parts + part] = sum;
  }
};

template <int Columns>
struct StoreFloat : StatelessOperation {
  float* out;  // [rows, Columns]

  CUTLASS_DEVICE explicit StoreFloat(float* target) : out(target) {}
  CUTLASS_DEVICE void apply(Row const&, int row, int column, float (&values)[8]) const {
    float4* target = reinterpret_cast<float4*>(out + size_t(row) * Columns + column);
    target[0] = make_float4(values[0], values[1], values[2], values[3]);
    target[1] = make_float4(values[4], values[5], values[6], values[7]);
  }
};

template <class... Operations>
struct Chain;

template <>
struct Chain<> {
  using Row = NoRow;
  static constexpr int kWidth = 8;
  template <int Lanes>
  CUTLASS_DEVICE Row begin(int, bool) const {
    return {};
  }
  CUTLASS_DEVICE void apply(Row const&, int, int, float (&)[8]) const {}
  template <int Lanes>
  CUTLASS_DEVICE void end(Row const&, int, int, bool) const {}
};

template <class First, class... Rest>
struct Chain<First, Rest...> {
  First first;
  Chain<Rest...> rest;

  // Accumulator columns that become eight output columns.
  static constexpr int kWidth = (First::kHalvesColumns ? 2 : 1) * Chain<Rest...>::kWidth;
  static constexpr bool kHalvesColumns = kWidth == 16;

  struct Row {
    typename First::Row first;
    typename Chain<Rest...>::Row rest;
  };

  CUTLASS_DEVICE explicit Chain(First head, Rest... tail) : first(head), rest(tail...) {}

  template <int Lanes>
  CUTLASS_DEVICE Row begin(int row, bool valid) const {
    return {first.template begin<Lanes>(row, valid), rest.template begin<Lanes>(row, valid)};
  }
  template <int Width>
  CUTLASS_DEVICE void apply(Row& state, int row, int column, float (&values)[Width]) const {
    static_assert(Width == kWidth, "SwiGLU chains take sixteen accumulator columns, all others eight");
    if constexpr (First::kHalvesColumns) {
      float halved[8];
      first.apply(state.first, row, column, values, halved);
      rest.apply(state.rest, row, column, halved);
    } else {
      first.apply(state.first, row, column, values);
      rest.apply(state.rest, row, column, values);
    }
  }
  template <int Lanes>
  CUTLASS_DEVICE void end(Row const& state, int row, int part, bool valid) const {
    first.template end<Lanes>(state.first, row, part, valid);
    rest.template end<Lanes>(state.rest, row, part, valid);
  }
};

template <class... Operations>
CUTLASS_DEVICE Chain<Operations...> chain(Operations... operations) {
  return Chain<Operations...>(operations...);
}

}  // namespace futransformer
