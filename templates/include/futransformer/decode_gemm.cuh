// Decode GEMM: out = epilogue(x W^T) for at most BatchTile sequences. Bound by reading W once.
//
//   x       bf16 [m, K] row-major; rows from m on are never read
//   weight  fragment order (packing.py): row tiles of 16 output columns, each contiguous over K, 512 bytes a warp load
//
// A block owns RowTiles row tiles. A producer warp streams them by bulk copies through a ring of Stages stages of StageK
// k each; that keeps the memory busy whatever the other warps do. `Warps` consumer warps split the k of every stage,
// multiply straight out of the ring (16 bytes a lane, no conversion in shared memory), and read the activations they
// need from L2: each x element is read by one warp of the block only, so staging it would save nothing. Their partial
// sums meet in shared memory and are added in warp order, and the epilogue runs once on the complete sums. No result
// depends on timing, nor on what the other sequences of the batch hold.
//
// The element type of the weights enters through WeightFragment alone.
#pragma once

#include <cute/arch/mma_sm80.hpp>
#include <cutlass/arch/barrier.h>

#include "barrier.cuh"
#include "bulk_copy.cuh"
#include "fragment.cuh"
#include "numeric.cuh"

namespace futransformer {

template <class Element, int K, int BatchTile, int RowTiles, int Warps, int Stages, int StageK>
struct DecodeGemm {
  using Weight = WeightFragment<Element>;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;

  // A warp advances by whole loads of weights and whole loads of activations.
  static constexpr int kLoadK = Weight::kMmas * kMmaK;
  static constexpr int kStepK = kLoadK > kGroupK ? kLoadK : kGroupK;
  static constexpr int kStepLoads = kStepK / kLoadK;
  static constexpr int kStepGroups = kStepK / kGroupK;
  static constexpr int kSteps = StageK / (Warps * kStepK);  // of each warp in a stage
  static constexpr int kNumStages = (K + StageK - 1) / StageK;
  static constexpr int kBatchTiles = BatchTile / kTileBatch;

  static constexpr int kWarpLoadBytes = kLanes * kLoadBytes;
  static constexpr int kRowTileBytes = K / kLoadK * kWarpLoadBytes;
  static constexpr int kChunkBytes = StageK / kLoadK * kWarpLoadBytes;  // a stage's share of one row tile
  static constexpr int kRingBytes = Stages * RowTiles * kChunkBytes;

  // Partial sums [Warps][BatchTile][kSumStride] float. Four floats of padding spread a warp's stores over all banks.
  static constexpr int kColumns = RowTiles * kTileRows;
  static constexpr int kSumStride = kColumns + 4;
  static constexpr int kPartialBytes = Warps * BatchTile * kSumStride * int(sizeof(float));

  static constexpr int kOverlaidBytes = kRingBytes > kPartialBytes ? kRingBytes : kPartialBytes;
  static constexpr int kSharedBytes = kOverlaidBytes + 2 * Stages * int(sizeof(Barrier));

  static constexpr int kThreads = (Warps + 1) * kLanes;

  // In the epilogue a group of lanes shares a row.
  static constexpr int kRowLanes = Warps * kLanes / BatchTile < kLanes ? Warps * kLanes / BatchTile : kLanes;

  static_assert(K % kStepK == 0, "K must be whole steps");
  static_assert(StageK % (Warps * kStepK) == 0, "every warp takes whole steps of a stage");
  static_assert(BatchTile % kTileBatch == 0 && Warps * kLanes >= BatchTile, "a lane in the epilogue for every row");

  // One object lives in dynamic shared memory: the ring, later overlaid by the partial sums, then the barriers.
  struct alignas(128) Shared {
    union {
      unsigned char ring[Stages][RowTiles][kChunkBytes];
      float partial[Warps][BatchTile][kSumStride];
    };
    Barrier full[Stages];   // a stage's bytes have arrived
    Barrier empty[Stages];  // all consumer warps have read it
  };

  // The stage at hand: its place in the ring, and the parity of how often the ring has been passed.
  struct Cursor {
    int slot = 0;
    uint32_t parity = 0;

    CUTLASS_DEVICE void advance() {
      if (++slot == Stages) {
        slot = 0;
        parity ^= 1;
      }
    }
  };

  using Sums = float[RowTiles][kBatchTiles][SumFragment::kSums];

  template <class Epilogue>
  CUTLASS_DEVICE static void run(bf16 const* x, void const* weight, int m, Epilogue const& epilogue) {
    extern __shared__ __align__(128) char dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    int const warp = threadIdx.x / kLanes;
    int const lane = threadIdx.x % kLanes;
    bool const is_producer = warp == Warps;

    if (threadIdx.x == 0) {
      for (int slot = 0; slot < Stages; ++slot) {
        shared.full[slot].init(1);
        shared.empty[slot].init(Warps);
      }
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();

    // The row's state is fetched here, while the first weights are on their way. The producer's lanes own no row.
    int const row = threadIdx.x / kRowLanes;
    bool const is_row = row < m;
    Sums sums = {};
    auto const* tiles = static_cast<unsigned char const*>(weight) + size_t(blockIdx.x) * RowTiles * kRowTileBytes;
    if (is_producer && lane == 0) stream_weights(shared, tiles);
    auto state = epilogue.template begin<kRowLanes>(row, is_row);
    if (!is_producer) multiply(shared, x, m, warp, lane, sums);

    __syncthreads();  // the ring has been read to its end: its memory is free
    if (!is_producer) store_partial(shared.partial[warp], lane, sums);
    __syncthreads();

    constexpr int kWidth = Epilogue::kWidth;
    constexpr int kVectors = kColumns / kWidth;
    for (int vector = threadIdx.x % kRowLanes; is_row && vector < kVectors; vector += kRowLanes) {
      float values[kWidth];
      add_partials(shared, row, vector * kWidth, values);
      epilogue.apply(state, row, (int(blockIdx.x) * kVectors + vector) * 8, values);
    }
    epilogue.template end<kRowLanes>(state, row, blockIdx.x, is_row);
  }

 private:
  CUTLASS_DEVICE static void stream_weights(Shared& shared, unsigned char const* tiles) {
    Cursor cursor;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = 0; stage < kNumStages; ++stage, cursor.advance()) {
      if (stage >= Stages) wait(shared.empty[cursor.slot], cursor.parity ^ 1);
      int const begin = stage * kChunkBytes;
      int const bytes = kRowTileBytes - begin < kChunkBytes ? kRowTileBytes - begin : kChunkBytes;
      shared.full[cursor.slot].arrive_and_expect_tx(RowTiles * bytes);
      for (int tile = 0; tile < RowTiles; ++tile) {
        load_bulk_once(shared.ring[cursor.slot][tile], tiles + size_t(tile) * kRowTileBytes + begin, bytes,
                       shared.full[cursor.slot]);
      }
    }
  }

  CUTLASS_DEVICE static void multiply(Shared& shared, bf16 const* x, int m, int warp, int lane, Sums& sums) {
    // Step s of a stage belongs to warp s % Warps, so that the last, shorter stage is shared out evenly too.
    int const warp_k = warp * kStepK;
    bf16 const* lane_x = x + size_t(ActivationFragment::sequence(lane)) * K + warp_k + ActivationFragment::k(lane);
    Cursor cursor;
    int read = 0;  // slot of the stage before
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage_k = 0; stage_k < K; stage_k += StageK, cursor.advance()) {
      // Activations first: their way from L2 is hidden behind the wait for the weights.
      Words operand[kSteps][kStepGroups][kBatchTiles];
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        int const k = stage_k + step * Warps * kStepK;
        CUTLASS_PRAGMA_UNROLL
        for (int group = 0; group < kStepGroups; ++group) {
          CUTLASS_PRAGMA_UNROLL
          for (int tile = 0; tile < kBatchTiles; ++tile) {
            bool const present = inside(k + warp_k) && tile * kTileBatch + ActivationFragment::sequence(lane) < m;
            operand[step][group][tile] = load_or_zero(lane_x + k + group * kGroupK + tile * kTileBatch * K, present);
          }
        }
      }
      wait(shared.full[cursor.slot], cursor.parity);
      // Only now is the stage before given back: its products have been issued, so its loads have returned. Right behind
      // the loads, an arrival overtakes those that still queue behind other warps' global loads, and the producer
      // overwrites what they are about to read. Nobody waits for the last stages.
      if (stage_k > 0 && lane == 0) shared.empty[read].arrive();
      read = cursor.slot;
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        int const warp_step = step * Warps + warp;
        if (inside(stage_k + warp_step * kStepK)) {
          multiply_step(shared.ring[cursor.slot], warp_step, lane, operand[step], sums);
        }
      }
    }
  }

  CUTLASS_DEVICE static void multiply_step(unsigned char const (&stage)[RowTiles][kChunkBytes], int warp_step, int lane,
                                           Words const (&x)[kStepGroups][kBatchTiles], Sums& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < RowTiles; ++tile) {
      Words packed[kStepLoads];
      CUTLASS_PRAGMA_UNROLL
      for (int load = 0; load < kStepLoads; ++load) {
        packed[load] = reinterpret_cast<Words const*>(stage[tile])[(warp_step * kStepLoads + load) * kLanes + lane];
      }
      CUTLASS_PRAGMA_UNROLL
      for (int mma = 0; mma < kStepK / kMmaK; ++mma) {
        Words const a = Weight::operand(packed[mma / Weight::kMmas], mma % Weight::kMmas);
        CUTLASS_PRAGMA_UNROLL
        for (int batch = 0; batch < kBatchTiles; ++batch) {
          Words const& group = x[mma / 2][batch];
          float(&d)[SumFragment::kSums] = sums[tile][batch];
          cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(
              d[0], d[1], d[2], d[3], a.word[0], a.word[1], a.word[2], a.word[3],
              ActivationFragment::operand(group, mma % 2, 0), ActivationFragment::operand(group, mma % 2, 1),
              d[0], d[1], d[2], d[3]);
        }
      }
    }
  }

  CUTLASS_DEVICE static void store_partial(float (&partial)[BatchTile][kSumStride], int lane, Sums const& sums) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < RowTiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int batch = 0; batch < kBatchTiles; ++batch) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < SumFragment::kSums; ++i) {
          partial[batch * kTileBatch + SumFragment::sequence(lane, i)]
                 [tile * kTileRows + SumFragment::column(lane, i)] = sums[tile][batch][i];
        }
      }
    }
  }

  // values = the complete sums of columns first .. first + Width - 1 of a row, added in warp order.
  template <int Width>
  CUTLASS_DEVICE static void add_partials(Shared const& shared, int row, int first, float (&values)[Width]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; ++i) values[i] = 0.f;
    // Not unrolled to the end: the loads of all warps at once would cost the registers of the whole kernel.
#pragma unroll 2
    for (int warp = 0; warp < Warps; ++warp) {
      float4 const* source = reinterpret_cast<float4 const*>(&shared.partial[warp][row][first]);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Width / 4; ++i) {
        float4 const four = source[i];
        values[4 * i] += four.x;
        values[4 * i + 1] += four.y;
        values[4 * i + 2] += four.z;
        values[4 * i + 3] += four.w;
      }
    }
  }

  // Whether a warp's step at this k exists: the last stage may be short.
  CUTLASS_DEVICE static bool inside(int k) { return K % StageK == 0 || k < K; }

  CUTLASS_DEVICE static Words load_or_zero(bf16 const* source, bool present) {
    Words words = {};
    if (present) words = *reinterpret_cast<Words const*>(source);
    return words;
  }
};

}  // namespace futransformer
