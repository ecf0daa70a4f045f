// What happens to a GEMM's sums before they reach memory: a chain of small operations on one row's columns.
//
// An operation sees eight consecutive output columns of one row at a time (kWidth columns of accumulators: sixteen
// where SwiGLU folds gate and up). Prefill and decode call the same chain; a row is a prompt token in one, a sequence
// in the other. The protocol, for a group of `Lanes` consecutive lanes that share a row:
//
//   chain.prepare();                               once a thread, before all else: what holds for every row
//   fetched = chain.fetch<Lanes>(r, valid);         asks for what begin() would have to wait for
//   Row row = chain.begin<Lanes>(r, valid, fetched);  all lanes of the warp call it; what the row needs
//   operands = chain.load(row, r, column);         any number of times, valid rows only: what these columns need
//   chain.apply(row, operands, r, column, values);
//   chain.end<Lanes>(row, r, part, valid);         all lanes of the warp call it; writes partial sums of tile `part`
//   chain.conclude();                              once, behind all else; all lanes of the warp call it
//
// Where an operation takes K and V in units of columns (kUnit), a caller gives them to chain.copy(row, column, kept) as well,
// all lanes of the warp, behind apply() of them: prefill in BF16, as a quad holds them, decode in shared memory.
//
// Asking apart from using lets a caller do something else in between; one that has no use for that calls
// chain.begin<Lanes>(r, valid), which does both. `valid` is false for rows past the end of the problem: nothing is read
// or written for them. Sums are taken in a fixed order, so results do not depend on timing. Only the RoPE table and the scales
// of an FP8 cache are read through the non-coherent cache: all else may come from a kernel that was still running when
// this one started.
#pragma once

#include "numeric.cuh"

namespace futransformer {

struct Nothing {};

// Defaults for an operation that keeps nothing for a row and reads nothing for a column.
struct Operation {
  using Fetched = Nothing;
  using Row = Nothing;
  using Operands = Nothing;
  static constexpr bool kHalvesColumns = false;
  static constexpr int kOperands = 0;  // registers that Operands take
  static constexpr int kKept = 0;      // registers that it takes beside, all along
  static constexpr int kPeriod = 1;    // columns after which a row's operands repeat
  static constexpr int kQueryColumns = 0, kKeyColumns = 0;  // where columns are Q's, then K's, then V's: see PartColumn
  static constexpr int kUnit = 0;                           // columns of K and V that copy() takes together

  CUTLASS_DEVICE void prepare() const {}
  CUTLASS_DEVICE void conclude() const {}
  template <int Lanes>
  CUTLASS_DEVICE Nothing fetch(int, bool) const {
    return {};
  }
  template <int Lanes, int Loads = 1>
  CUTLASS_DEVICE Nothing begin(int, bool, Nothing) const {
    return {};
  }
  template <class Row>
  CUTLASS_DEVICE Nothing load(Row const&, int, int) const {
    return {};
  }
  template <int Lanes, class Row>
  CUTLASS_DEVICE void end(Row const&, int, int, bool) const {}
  template <class Row, class Column, class Kept>
  CUTLASS_DEVICE void copy(Row const&, Column, Kept const&) const {}
};

// x rstd: RMSNorm's row scale, from the partial sums of squares of the row that the GEMM has read (K columns).
template <int K>
struct RowScale : Operation {
  float const* sumsq;  // [rows, parts]
  int parts;
  float eps;

  struct Fetched {
    float4 sums;  // the lane's first four
  };
  struct Row {
    float rstd;
  };

  CUTLASS_DEVICE RowScale(float const* sums, int count, float epsilon) : sumsq(sums), parts(count), eps(epsilon) {}

  template <int Lanes>
  CUTLASS_DEVICE Fetched fetch(int row, bool valid) const {
    int const part = 4 * (threadIdx.x % Lanes);
    return {valid && in_fours() && part < parts ? four(row, part) : float4{0.f, 0.f, 0.f, 0.f}};
  }
  // `Loads` of the rest are under way at once: one beside a prefill tile's 192 accumulators.
  template <int Lanes, int Loads = 1>
  CUTLASS_DEVICE Row begin(int row, bool valid, Fetched const& fetched) const {
    int const lane = threadIdx.x % Lanes;
    float sum = 0.f;
    if (valid) {
      if (in_fours()) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int first = 4 * (lane + Lanes); first < parts; first += 4 * Lanes * Loads) {
          float4 fours[Loads];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < Loads; ++i) {
            int const part = first + 4 * Lanes * i;
            fours[i] = {0.f, 0.f, 0.f, 0.f};
            if (part < parts) fours[i] = four(row, part);
          }
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < Loads; ++i) sum += sum_of(fours[i]);
        }
        sum += sum_of(fetched.sums);
      } else {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int part = lane; part < parts; part += Lanes) sum += sumsq[size_t(row) * parts + part];
      }
    }
    return {rsqrtf(sum_over_lanes<Lanes>(sum) * (1.f / K) + eps)};
  }
  template <int Width>
  CUTLASS_DEVICE void apply(Row const& state, Nothing, int, int, float (&values)[Width]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; ++i) values[i] *= state.rstd;
  }

 private:
  // Where every row is aligned: a quarter of the loads, and of the waits for them.
  CUTLASS_DEVICE bool in_fours() const { return parts % 4 == 0; }
  CUTLASS_DEVICE float4 four(int row, int part) const {
    return *reinterpret_cast<float4 const*>(sumsq + size_t(row) * parts + part);
  }
  CUTLASS_DEVICE static float sum_of(float4 const& sums) { return (sums.x + sums.y) + (sums.z + sums.w); }
};

// A column that is known to be Q's, K's or V's. A caller that knows it of a whole tile spares the tests of every step,
// which keep the instructions of one from overlapping those of another. Of an `int`, an operation asks.
enum class Part { kQuery, kKey, kValue };
template <Part kPart>
struct PartColumn {
  int index;
  CUTLASS_DEVICE operator int() const { return index; }
};

// Rotate Q and K. Their features stand in pair order, so columns 2i and 2i + 1 are one rotation pair.
template <int QFeatures, int KFeatures, int HeadDim>
struct Rope : Operation {
  float const* table;    // [positions, HeadDim / 2, (cos, sin)]
  int const* positions;  // [rows]

  static constexpr int kOperands = 8, kPeriod = HeadDim;
  struct Row {
    int position;
  };
  struct Operands {
    float4 angles[2];  // (cos, sin) of four pairs
  };

  CUTLASS_DEVICE Rope(float const* angles, int const* of_rows) : table(angles), positions(of_rows) {}

  template <int Lanes, int Loads = 1>
  CUTLASS_DEVICE Row begin(int row, bool valid, Nothing) const {
    return {valid ? positions[row] : 0};
  }
  CUTLASS_DEVICE Operands load(Row const& state, int, int column) const {
    Operands operands = {};
    if (column < QFeatures + KFeatures) {
      float const* const of_position = table + size_t(state.position) * HeadDim;
      float4 const* angles = reinterpret_cast<float4 const*>(of_position + column % HeadDim);
      operands.angles[0] = __ldg(angles);
      operands.angles[1] = __ldg(angles + 1);
    }
    return operands;
  }
  CUTLASS_DEVICE void apply(Row const&, Operands const& operands, int, int column, float (&values)[8]) const {
    if (column < QFeatures + KFeatures) rotate(operands, values);
  }
  template <Part kPart>
  CUTLASS_DEVICE void apply(Row const&, Operands const& operands, int, PartColumn<kPart>, float (&values)[8]) const {
    if constexpr (kPart != Part::kValue) rotate(operands, values);
  }

 private:
  CUTLASS_DEVICE static void rotate(Operands const& operands, float (&values)[8]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      float4 const two = operands.angles[i];
      rotate(values[4 * i], values[4 * i + 1], two.x, two.y);
      rotate(values[4 * i + 2], values[4 * i + 3], two.z, two.w);
    }
  }
  CUTLASS_DEVICE static void rotate(float& first, float& second, float cosine, float sine) {
    float const rotated = first * cosine - second * sine;
    second = second * cosine + first * sine;
    first = rotated;
  }
};

// Where K and V of a row go: straight into their slots of the paged cache.
template <int QFeatures, int KVHeads, int HeadDim, int PageSize>
struct KvSlots : Operation {
  long long const* slots;  // [rows]; negative: no K and V are written

  static constexpr int kQueryColumns = QFeatures, kKeyColumns = KVHeads * HeadDim;
  struct Fetched {
    long long slot;
  };
  struct Row {
    int slot;  // a cache of 2^31 tokens would be terabytes a layer
  };

  CUTLASS_DEVICE explicit KvSlots(long long const* of_rows) : slots(of_rows) {}

  template <int Lanes>
  CUTLASS_DEVICE Fetched fetch(int row, bool valid) const {
    return {valid ? slots[row] : -1};
  }
  template <int Lanes, int Loads = 1>
  CUTLASS_DEVICE Row begin(int, bool, Fetched const& fetched) const {
    return {fetched.slot < 0 ? -1 : int(fetched.slot)};
  }

 protected:
  // Of a row's `column` of K or V in the pages: a head's slots of a page stand together.
  CUTLASS_DEVICE static size_t offset(Row const& state, int column) {
    int const page_head = state.slot / PageSize * KVHeads + column / HeadDim;
    return (size_t(page_head) * PageSize + state.slot % PageSize) * HeadDim + column % HeadDim;
  }
};

// Q to its row, unless another operation stores it; K and V to their slots.
template <int QFeatures, int KVHeads, int HeadDim, int PageSize, bool StoresQ = true>
struct ScatterKv : KvSlots<QFeatures, KVHeads, HeadDim, PageSize> {
  using Slots = KvSlots<QFeatures, KVHeads, HeadDim, PageSize>;
  using typename Slots::Row;
  using Slots::kKeyColumns;
  using Slots::offset;
  bf16* q;        // [rows, QFeatures]
  bf16* k_pages;  // [num_pages, KVHeads, PageSize, HeadDim]
  bf16* v_pages;

  CUTLASS_DEVICE ScatterKv(bf16* queries, bf16* keys, bf16* values, long long const* of_rows)
      : Slots(of_rows), q(queries), k_pages(keys), v_pages(values) {}

  CUTLASS_DEVICE void apply(Row const& state, Nothing, int row, int column, float (&values)[8]) const {
    if (!StoresQ && column < QFeatures) return;
    bf16* target = q + size_t(row) * QFeatures + column;
    if (column >= QFeatures) {
      if (state.slot < 0) return;
      bool const is_k = column < QFeatures + kKeyColumns;
      target = (is_k ? k_pages : v_pages) + offset(state, column - QFeatures - (is_k ? 0 : kKeyColumns));
    }
    store_bf16x8(target, values);  // one: where two branches store, nvcc makes one of them four of 4 bytes
  }
  CUTLASS_DEVICE void apply(Row const&, Nothing, int row, PartColumn<Part::kQuery> column, float (&values)[8]) const {
    store_bf16x8(q + size_t(row) * QFeatures + column.index, values);
  }
  CUTLASS_DEVICE void apply(Row const& state, Nothing, int, PartColumn<Part::kKey> column, float (&values)[8]) const {
    if (state.slot >= 0) store_bf16x8(k_pages + offset(state, column.index - QFeatures), values);
  }
  CUTLASS_DEVICE void apply(Row const& state, Nothing, int, PartColumn<Part::kValue> column, float (&values)[8]) const {
    if (state.slot >= 0) store_bf16x8(v_pages + offset(state, column.index - QFeatures - kKeyColumns), values);
  }
};

// + residual; the same thread reads and later overwrites an element, so it may alias the output.
template <int Columns>
struct Residual : Operation {
  bf16 const* residual;  // [rows, Columns]

  static constexpr int kOperands = 4, kPeriod = Columns;
  struct Operands {
    uint4 added;
  };

  CUTLASS_DEVICE explicit Residual(bf16 const* source) : residual(source) {}
  CUTLASS_DEVICE Operands load(Nothing, int row, int column) const {
    return {*reinterpret_cast<uint4 const*>(residual + size_t(row) * Columns + column)};
  }
  CUTLASS_DEVICE void apply(Nothing, Operands const& operands, int, int, float (&values)[8]) const {
    float added[8];
    unpack_bf16x8(operands.added, added);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) values[i] += added[i];
  }
};

// silu(gate) * up. Accumulator columns alternate gate, up; `halved` receives eight output columns.
struct SwiGlu : Operation {
  static constexpr bool kHalvesColumns = true;

  CUTLASS_DEVICE void apply(Nothing, Nothing, int, int, float const (&values)[16], float (&halved)[8]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      halved[i] = of(values[2 * i], values[2 * i + 1]);
    }
  }
  // The tanh form would save an instruction, but cancels for negative gates: tanh.approx is good to 2^-11 only.
  CUTLASS_DEVICE static float of(float gate, float up) { return __fdividef(gate, 1.f + __expf(-gate)) * up; }
};

template <int Columns>
struct Store : Operation {
  bf16* out;  // [rows, Columns]

  CUTLASS_DEVICE explicit Store(bf16* target) : out(target) {}
  CUTLASS_DEVICE void apply(Nothing, Nothing, int row, int column, float (&values)[8]) const {
    store_bf16x8(out + size_t(row) * Columns + column, values);
  }
};

// Partial sums of squares of a row: the next RMSNorm's statistics.
template <int Parts>
struct SumSquares : Operation {
  float* sumsq_out;  // [rows, Parts]

  struct Row {
    float sum;
  };

  CUTLASS_DEVICE explicit SumSquares(float* sums) : sumsq_out(sums) {}

  template <int Lanes, int Loads = 1>
  CUTLASS_DEVICE Row begin(int, bool, Nothing) const {
    return {0.f};
  }
  CUTLASS_DEVICE static void add(Row& state, float const (&values)[8]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) state.sum = fmaf(values[i], values[i], state.sum);
  }
  template <int Lanes>
  CUTLASS_DEVICE void end(Row const& state, int row, int part, bool valid) const {
    float const sum = sum_over_lanes<Lanes>(state.sum);
    if (valid && threadIdx.x % Lanes == 0) sumsq_out[size_t(row) * Parts + part] = sum;
  }
};

// BF16 store, and the sum of squares of what was rounded for it: unpacking the rounded values again would take a fifth of
// the chain's instructions, and is no more accurate.
template <int Columns, int Parts>
struct StoreSumSquares : SumSquares<Parts> {
  using typename SumSquares<Parts>::Row;
  bf16* out;  // [rows, Columns]

  CUTLASS_DEVICE StoreSumSquares(bf16* target, float* sums) : SumSquares<Parts>(sums), out(target) {}
  CUTLASS_DEVICE void apply(Row& state, Nothing, int row, int column, float (&values)[8]) const {
    *reinterpret_cast<uint4*>(out + size_t(row) * Columns + column) = pack_bf16x8(values);
    this->add(state, values);
  }
};

// A residual stream in float32, in place: no addition is rounded. `out` is what the next GEMM reads of it, in BF16; the
// sum of squares is that of the stream itself.
template <int Columns, int Parts>
struct ResidualFloat : SumSquares<Parts> {
  using typename SumSquares<Parts>::Row;
  float* residual;  // [rows, Columns]
  bf16* out;        // [rows, Columns]

  static constexpr int kOperands = 8, kPeriod = Columns;
  struct Operands {
    float4 added[2];
  };

  CUTLASS_DEVICE ResidualFloat(float* stream, bf16* target, float* sums)
      : SumSquares<Parts>(sums), residual(stream), out(target) {}
  CUTLASS_DEVICE Operands load(Row const&, int row, int column) const {
    float4 const* const stream = reinterpret_cast<float4 const*>(residual + size_t(row) * Columns + column);
    return {{stream[0], stream[1]}};
  }
  CUTLASS_DEVICE void apply(Row& state, Operands const& operands, int row, int column, float (&values)[8]) const {
    float stream[8];
    unpack_f32x8(operands.added, stream);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) values[i] += stream[i];
    size_t const first = size_t(row) * Columns + column;
    store_f32x8(residual + first, values);
    store_bf16x8(out + first, values);
    this->add(state, values);
  }
};

// The same where the next weight has codes of its own, which cannot hold the norm's gain: `out` is the stream times it.
template <int Columns, int Parts>
struct ResidualFloatGain : SumSquares<Parts> {
  using typename SumSquares<Parts>::Row;
  float* residual;    // [rows, Columns]
  bf16* out;          // [rows, Columns]
  float const* gain;  // [Columns]

  static constexpr int kOperands = 16, kPeriod = Columns;
  struct Operands {
    float4 added[2];
    float4 gain[2];
  };

  CUTLASS_DEVICE ResidualFloatGain(float* stream, bf16* target, float* sums, float const* factors)
      : SumSquares<Parts>(sums), residual(stream), out(target), gain(factors) {}
  CUTLASS_DEVICE Operands load(Row const&, int row, int column) const {
    float4 const* const stream = reinterpret_cast<float4 const*>(residual + size_t(row) * Columns + column);
    float4 const* const factors = reinterpret_cast<float4 const*>(gain + column);
    return {{stream[0], stream[1]}, {factors[0], factors[1]}};
  }
  CUTLASS_DEVICE void apply(Row& state, Operands const& operands, int row, int column, float (&values)[8]) const {
    float stream[8], factors[8];
    unpack_f32x8(operands.added, stream);
    unpack_f32x8(operands.gain, factors);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) values[i] += stream[i];
    size_t const first = size_t(row) * Columns + column;
    store_f32x8(residual + first, values);
    this->add(state, values);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) values[i] *= factors[i];
    store_bf16x8(out + first, values);
  }
};

template <int Columns>
struct StoreFloat : Operation {
  float* out;  // [rows, Columns]

  CUTLASS_DEVICE explicit StoreFloat(float* target) : out(target) {}
  CUTLASS_DEVICE void apply(Nothing, Nothing, int row, int column, float (&values)[8]) const {
    store_f32x8(out + size_t(row) * Columns + column, values);
  }
};

template <class... Operations>
struct Chain;

template <>
struct Chain<> : Operation {
  static constexpr int kWidth = 8;
  CUTLASS_DEVICE void apply(Nothing, Nothing, int, int, float (&)[8]) const {}
};

template <class First, class... Rest>
struct Chain<First, Rest...> {
  First first;
  Chain<Rest...> rest;

  // Accumulator columns that become eight output columns.
  static constexpr int kWidth = (First::kHalvesColumns ? 2 : 1) * Chain<Rest...>::kWidth;

  static constexpr int kOperands = First::kOperands + Chain<Rest...>::kOperands;
  static constexpr int kKept = First::kKept + Chain<Rest...>::kKept;
  static constexpr int kPeriod = First::kPeriod > Chain<Rest...>::kPeriod ? First::kPeriod : Chain<Rest...>::kPeriod;
  static_assert(kPeriod % First::kPeriod == 0 && kPeriod % Chain<Rest...>::kPeriod == 0);
  static constexpr int kQueryColumns = First::kQueryColumns + Chain<Rest...>::kQueryColumns;
  static constexpr int kKeyColumns = First::kKeyColumns + Chain<Rest...>::kKeyColumns;
  static constexpr int kUnit = First::kUnit + Chain<Rest...>::kUnit;

  struct Fetched {
    typename First::Fetched first;
    typename Chain<Rest...>::Fetched rest;
  };
  struct Row {
    typename First::Row first;
    typename Chain<Rest...>::Row rest;
  };
  struct Operands {
    typename First::Operands first;
    typename Chain<Rest...>::Operands rest;
  };

  CUTLASS_DEVICE explicit Chain(First head, Rest... tail) : first(head), rest(tail...) {}

  CUTLASS_DEVICE void prepare() const {
    first.prepare();
    rest.prepare();
  }
  CUTLASS_DEVICE void conclude() const {
    first.conclude();
    rest.conclude();
  }
  template <int Lanes>
  CUTLASS_DEVICE Fetched fetch(int row, bool valid) const {
    return {first.template fetch<Lanes>(row, valid), rest.template fetch<Lanes>(row, valid)};
  }
  template <int Lanes, int Loads = 1>
  CUTLASS_DEVICE Row begin(int row, bool valid, Fetched const& fetched) const {
    // The rest first: RowScale waits for its loads, and theirs can be on their way by then.
    auto const state = rest.template begin<Lanes, Loads>(row, valid, fetched.rest);
    return {first.template begin<Lanes, Loads>(row, valid, fetched.first), state};
  }
  template <int Lanes, int Loads = 1>
  CUTLASS_DEVICE Row begin(int row, bool valid) const {
    return begin<Lanes, Loads>(row, valid, fetch<Lanes>(row, valid));
  }
  CUTLASS_DEVICE Operands load(Row const& state, int row, int column) const {
    return {first.load(state.first, row, column), rest.load(state.rest, row, column)};
  }
  template <class Column, int Width>
  CUTLASS_DEVICE void apply(Row& state, Operands const& operands, int row, Column column,
                            float (&values)[Width]) const {
    static_assert(Width == kWidth, "SwiGLU chains take sixteen accumulator columns, all others eight");
    if constexpr (First::kHalvesColumns) {
      float halved[8];
      first.apply(state.first, operands.first, row, column, values, halved);
      rest.apply(state.rest, operands.rest, row, column, halved);
    } else {
      first.apply(state.first, operands.first, row, column, values);
      rest.apply(state.rest, operands.rest, row, column, values);
    }
  }
  template <int Lanes>
  CUTLASS_DEVICE void end(Row const& state, int row, int part, bool valid) const {
    first.template end<Lanes>(state.first, row, part, valid);
    rest.template end<Lanes>(state.rest, row, part, valid);
  }
  template <class Column, class Kept>
  CUTLASS_DEVICE void copy(Row const& state, Column column, Kept const& kept) const {
    first.copy(state.first, column, kept);
    rest.copy(state.rest, column, kept);
  }
};

template <class... Operations>
CUTLASS_DEVICE Chain<Operations...> chain(Operations... operations) {
  return Chain<Operations...>(operations...);
}

}  // namespace futransformer
