// A block of a decode GEMM: its barriers, those who multiply, and how their sums become results.
//
// Consumers warps of the block's Warps multiply; their sums come in Splits parts, which overlay the ring. All sums are added
// in a fixed order: part by part in each block, then block by block of the cluster, of which each finishes its share.
#pragma once

#include <type_traits>

#include <cutlass/arch/barrier.h>

#include "barrier.cuh"
#include "cluster.cuh"
#include "dependent_launch.cuh"
#include "fragment.cuh"

namespace futransformer {

// A row's `Columns` columns in shared memory, as the chain has left them for an operation that takes units of them, and
// its `Lanes` lanes.
template <int Columns, int Lanes>
struct FinishedRow {
  static constexpr int kColumns = Columns, kLanes = Lanes;
  float const* values;
  int row;
  bool valid;
};

template <int BatchTile, int RowTiles, int Splits, int Consumers, int Warps, int Cluster>
struct DecodeBlock {
  using Barrier = cutlass::arch::ClusterTransactionBarrier;

  // Partial sums, overlaying the ring. Four floats of padding spread a warp's stores over all banks.
  static constexpr int kColumns = RowTiles * kTileRows;
  static constexpr int kOwnColumns = kColumns / Cluster;  // that this block finishes
  static constexpr int kSumStride = kColumns + 4;
  using Partial = float[Splits][BatchTile][kSumStride];

  static_assert(RowTiles % Cluster == 0, "row tiles must divide among blocks");
  static_assert(Consumers * kLanes >= BatchTile, "the epilogue needs a lane a row");

  // A block's shared memory, and behind it what the other blocks send, by rank (one's own left out). It may come while the
  // ring is still being read.
  template <class Block>
  struct WithInbox : Block {
    alignas(16) float inbox[Cluster > 1 ? Cluster - 1 : 1][BatchTile][kOwnColumns];  // or whole rows of BatchTile / Cluster
    alignas(16) Barrier arrived;  // the others' sums are all there
  };
  template <class Block>
  using Shared = std::conditional_t<Cluster == 1, Block, WithInbox<Block>>;

  // What each block of a cluster finishes: some columns of all rows, or all columns of every kStride-th row.
  template <bool ByRows>
  struct Share {
    static constexpr int kRows = ByRows ? BatchTile / Cluster : BatchTile;
    static constexpr int kStride = ByRows ? Cluster : 1;
    static constexpr int kWidth = ByRows ? kColumns : kOwnColumns;
    static_assert(kRows * kWidth == BatchTile * kOwnColumns, "rows must divide among the blocks");

    // In the epilogue a group of lanes, a power of two, shares a row.
    static constexpr int kRowLanes = [] {
      int lanes = kLanes;
      while (lanes * kRows > Consumers * kLanes) lanes /= 2;
      return lanes;
    }();

    // Loads that a lane has under way when it adds up a row's partial sums: a hundred sums a row arrive after one wait.
    static constexpr int kRowLoads = kRowLanes >= 32 ? 1 : kRowLanes <= 4 ? 8 : 32 / kRowLanes;

    // Of m rows, this block's.
    CUTLASS_DEVICE static int rows(int m) { return ByRows ? (m - rank() + Cluster - 1) / Cluster : m; }
    CUTLASS_DEVICE static int row(int own) { return ByRows ? own * Cluster + rank() : own; }
    // Its first column, of those that the cluster multiplies.
    CUTLASS_DEVICE static int first_column() { return ByRows ? 0 : rank() * kOwnColumns; }
    CUTLASS_DEVICE static int block() { return ByRows ? int(blockIdx.x) / Cluster : int(blockIdx.x); }
    using Inbox = float[Cluster > 1 ? Cluster - 1 : 1][kRows][kWidth];  // what arrives from the other blocks
  };

  // A block's life. `init` makes its barriers, in one thread; `multiply` is given a function that asks for what the epilogue
  // needs, which threads that multiply call once; `store` leaves what these have in shared.partial.
  template <class Epilogue, class Shared, class Init, class Multiply, class Store>
  CUTLASS_DEVICE static void run(Shared& shared, int m, Epilogue const& epilogue, Init const& init,
                                 Multiply const& multiply, Store const& store) {
    using Own = Share<(Epilogue::kUnit > 0)>;
    constexpr int kRowLanes = Own::kRowLanes;
    bool const is_consumer = int(threadIdx.x) / kLanes < Consumers;

    if (threadIdx.x == 0) {
      init();
      if constexpr (Cluster > 1) {
        shared.arrived.init(1);
        shared.arrived.arrive_and_expect_tx((Cluster - 1) * Own::rows(m) * Own::kWidth * int(sizeof(float)));
      }
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    if constexpr (Cluster > 1) arrive_at_cluster();  // this block has started: it may be sent sums

    // In the epilogue a group of lanes shares a row, and walks over its vectors of columns.
    constexpr int kWidth = Epilogue::kWidth;
    constexpr int kVectors = Own::kWidth / kWidth;
    static_assert(Own::kWidth % kWidth == 0, "a block finishes whole vectors");
    int const row = Own::row(threadIdx.x / kRowLanes);
    int vector = threadIdx.x % kRowLanes;
    bool const is_row = row < m;
    auto const column = [](int vector) { return (Own::block() * kVectors + vector) * 8; };
    typename Epilogue::Row state = {};
    typename Epilogue::Operands operands = {};

    multiply([&] {
      wait_for_previous_kernel();
      state = epilogue.template begin<kRowLanes, Own::kRowLoads>(row, is_row);
      if (is_row && vector < kVectors) operands = epilogue.load(state, row, column(vector));
    });

    __syncthreads();  // the ring has been read to its end: its memory is free
    if (is_consumer) store();
    __syncthreads();
    if constexpr (Cluster > 1) {
      wait_for_cluster();
      if constexpr (Own::kStride > 1) {
        send_rows<kWidth>(shared, m);
      } else {
        if (is_row) send<kWidth>(shared, row, vector);
      }
      wait(shared.arrived, 0);
    }

    while (is_row && vector < kVectors) {
      float values[kWidth];
      add_partials(shared.partial, row, Own::first_column() + vector * kWidth, values);
      if constexpr (Cluster > 1) {
        auto const& inbox = reinterpret_cast<typename Own::Inbox const&>(shared.inbox);
        CUTLASS_PRAGMA_UNROLL
        for (int other = 0; other < Cluster - 1; ++other) add(inbox[other][row / Own::kStride] + vector * kWidth, values);
      }
      epilogue.apply(state, operands, row, column(vector), values);
      if constexpr (Epilogue::kUnit > 0) keep(shared.partial[0][row] + vector * kWidth, values);
      vector += kRowLanes;
      if (vector < kVectors) operands = epilogue.load(state, row, column(vector));
    }
    if constexpr (Epilogue::kUnit > 0) {
      __syncwarp();
      static_assert(Own::kRows * kRowLanes % kLanes == 0, "warps have rows, or none");
      if (int(threadIdx.x) / kRowLanes < Own::kRows) {
        epilogue.copy(state, column(0), FinishedRow<kColumns, kRowLanes>{shared.partial[0][row], row, is_row});
      }
    }
    epilogue.template end<kRowLanes>(state, row, blockIdx.x, is_row);
  }

  // A lane's sums of a row tile and eight sequences.
  template <class Sum>
  CUTLASS_DEVICE static void store(float (&partial)[BatchTile][kSumStride], int row_tile, int batch, int lane,
                                   float const (&sums)[Sum::kSums]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Sum::kSums; ++i) {
      partial[batch * kTileBatch + Sum::sequence(lane, i)][row_tile * kTileRows + Sum::column(lane, i)] = sums[i];
    }
  }

 private:
  CUTLASS_DEVICE static int rank() { return Cluster == 1 ? 0 : int(blockIdx.x) % Cluster; }

  // values = this block's sums of columns first .. first + Width - 1 of a row, added split by split.
  template <int Width>
  CUTLASS_DEVICE static void add_partials(Partial const& partial, int row, int first, float (&values)[Width]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; ++i) values[i] = 0.f;
    // 32 floats at once: the loads of all partial sums together would cost the registers of the whole kernel.
    constexpr int kUnrolled = 32 / Width;
#pragma unroll kUnrolled
    for (int split = 0; split < Splits; ++split) add(partial[split][row] + first, values);
  }

  // values += Width neighbouring sums in shared memory.
  template <int Width>
  CUTLASS_DEVICE static void add(float const* sums, float (&values)[Width]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width / 4; ++i) {
      float4 const four = reinterpret_cast<float4 const*>(sums)[i];
      values[4 * i] += four.x;
      values[4 * i + 1] += four.y;
      values[4 * i + 2] += four.z;
      values[4 * i + 3] += four.w;
    }
  }

  // A lane's share of what a row has in the columns that other blocks finish: summed here, it travels once, and nobody
  // waits for loads from another multiprocessor.
  template <int Width, class Shared>
  CUTLASS_DEVICE static void send(Shared& shared, int row, int first) {
    constexpr int kVectors = kOwnColumns / Width, kRowLanes = Share<false>::kRowLanes;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int vector = first; vector < (Cluster - 1) * kVectors; vector += kRowLanes) {
      int const other = vector / kVectors;
      int const to = other + (other >= rank());
      int const column = vector % kVectors * Width;
      float values[Width];
      add_partials(shared.partial, row, to * kOwnColumns + column, values);
      send_vector(shared, to, shared.inbox[rank() - (rank() > to)][row] + column, values);
    }
  }

  // Where a block finishes all columns of some rows: one lane after another, of the other blocks' rows.
  template <int Width, class Shared>
  CUTLASS_DEVICE static void send_rows(Shared& shared, int m) {
    constexpr int kVectors = kColumns / Width;
    auto& sums = reinterpret_cast<typename Share<true>::Inbox&>(shared.inbox);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int item = threadIdx.x; item < m * kVectors; item += Warps * kLanes) {
      int const row = item / kVectors, column = item % kVectors * Width, to = row % Cluster;
      if (to == rank()) continue;
      float values[Width];
      add_partials(shared.partial, row, column, values);
      send_vector(shared, to, sums[rank() - (rank() > to)][row / Cluster] + column, values);
    }
  }

  // Sums to block `to`, where `inbox` is in its shared memory.
  template <int Width, class Shared>
  CUTLASS_DEVICE static void send_vector(Shared& shared, int to, float* inbox, float const (&values)[Width]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; i += 4) {
      float4 const four = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
      store_in_block(four, inbox + i, shared.arrived, to);
    }
  }

  // Where the lane has just read its sums, which nobody else reads.
  template <int Width>
  CUTLASS_DEVICE static void keep(float* place, float const (&values)[Width]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; i += 4) {
      *reinterpret_cast<float4*>(place + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    }
  }
};

}  // namespace futransformer
