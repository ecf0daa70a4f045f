// Prefill GEMM for sm_90a: out = epilogue(X W^T), X [m, K] and W [N, K], both K-major BF16, float32 accumulation.
//
// Persistent and warp-specialised. Warpgroup 0 is the producer: one thread keeps a ring of `Stages` tiles of X and W in
// flight by TMA. Warpgroups 1 and 2 each multiply 64 rows of the 128-row tile by the whole tile width (wgmma, both
// operands from shared memory) and apply the epilogue from their registers. Two blocks stacked along M may form a
// cluster; each then loads half of the W tile and multicasts it to both.
//
// Rows past m and K columns past K are zero-filled by TMA; rows past m and columns past N are never stored.
#pragma once

#include <cute/tensor.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "epilogue.cuh"

namespace futransformer {

// Tiles in groups of kGroupM along M, walked M-fastest: neighbouring blocks share W tiles and stay in L2.
template <int TilesN>
struct TileScheduler {
  static constexpr int kGroupM = 8;
  int tiles_m;

  struct Coordinate {
    int m, n;
  };
  CUTLASS_DEVICE int count() const { return tiles_m * TilesN; }
  CUTLASS_DEVICE Coordinate operator()(int index) const {
    int const group = index / (kGroupM * TilesN);
    int const within = index - group * (kGroupM * TilesN);
    int const rows = min(kGroupM, tiles_m - group * kGroupM);
    int const n = within / rows;
    return {group * kGroupM + within - n * rows, n};
  }
};

template <class Element, int N, int K, int TileM, int TileN, int TileK, int ClusterM, int Stages>
struct Gemm {
  static_assert(TileM == 128, "two consumer warpgroups of 64 rows");
  static constexpr int kConsumerWarpgroups = 2;
  static constexpr int kThreads = (kConsumerWarpgroups + 1) * cutlass::NumThreadsPerWarpGroup;
  // Registers a thread: the launch allocates 168 x 384; the producer's share goes to the consumers' accumulators.
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr int kTilesN = (N + TileN - 1) / TileN;
  static constexpr int kTilesK = (K + TileK - 1) / TileK;

  using ClusterShape = cute::Shape<cute::Int<ClusterM>, cute::_1, cute::_1>;
  using Pipeline = cutlass::PipelineTmaAsync<Stages>;
  using PipelineState = cutlass::PipelineState<Stages>;
  using Swizzled = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using LayoutX = decltype(cute::tile_to_shape(
      Swizzled{}, cute::Shape<cute::Int<TileM>, cute::Int<TileK>, cute::Int<Stages>>{}));
  using LayoutW = decltype(cute::tile_to_shape(
      Swizzled{}, cute::Shape<cute::Int<TileN>, cute::Int<TileK>, cute::Int<Stages>>{}));
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<TileN>, cute::Int<TileK>>>()));

  struct alignas(1024) SharedStorage {
    cute::array_aligned<Element, cute::cosize_v<LayoutX>, 1024> x;
    cute::array_aligned<Element, cute::cosize_v<LayoutW>, 1024> w;
    typename Pipeline::SharedStorage pipeline;
  };
  // What the launch must provide: the storage without the padding behind its last barrier.
  static constexpr int kSharedBytes =
      int(offsetof(SharedStorage, pipeline) + sizeof(typename Pipeline::SharedStorage));
  static constexpr uint32_t kStageBytes = (TileM + TileN) * TileK * sizeof(Element);

  template <class Epilogue>
  CUTLASS_DEVICE static void run(CUtensorMap const& map_x, CUtensorMap const& map_w, int m, Epilogue const& epilogue) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

    int const warpgroup = cutlass::canonical_warp_group_idx();
    bool const is_producer = warpgroup == 0;

    typename Pipeline::Params params;
    params.transaction_bytes = kStageBytes;
    params.role = is_producer ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
    params.is_leader = is_producer && threadIdx.x == 0;
    params.num_consumers = kConsumerWarpgroups * cutlass::NumThreadsPerWarpGroup;
    Pipeline pipeline(shared.pipeline, params, ClusterShape{});
    if constexpr (ClusterM > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }

    TileScheduler<kTilesN> const tiles{(m + TileM * ClusterM - 1) / (TileM * ClusterM)};
    if (is_producer) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (threadIdx.x == 0) produce(shared, pipeline, map_x, map_w, tiles);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(shared, pipeline, warpgroup - 1, m, tiles, epilogue);
    }
  }

 private:
  CUTLASS_DEVICE static int first_tile() { return blockIdx.x / ClusterM; }
  CUTLASS_DEVICE static int tile_step() { return gridDim.x / ClusterM; }
  CUTLASS_DEVICE static int rank() { return ClusterM > 1 ? int(cute::block_rank_in_cluster()) : 0; }

  template <class Tiles>
  CUTLASS_DEVICE static void produce(SharedStorage& shared, Pipeline& pipeline, CUtensorMap const& map_x,
                                     CUtensorMap const& map_w, Tiles const& tiles) {
    using namespace cute;
    constexpr int kShareN = TileN / ClusterM;  // rows of W that this block loads for the whole cluster
    constexpr uint16_t kAllBlocks = (1 << ClusterM) - 1;
    uint64_t const hint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&map_x));
    prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&map_w));

    PipelineState state = cutlass::make_producer_start_state<Pipeline>();
    for (int tile = first_tile(); tile < tiles.count(); tile += tile_step()) {
      auto const at = tiles(tile);
      int const row_x = (at.m * ClusterM + rank()) * TileM;
      int const row_w = at.n * TileN + rank() * kShareN;
      for (int k = 0; k < kTilesK; ++k, ++state) {
        pipeline.producer_acquire(state);  // the slot is free; expect kStageBytes
        uint64_t* barrier = pipeline.producer_get_barrier(state);
        Element* x = shared.x.data() + state.index() * TileM * TileK;
        Element* w = shared.w.data() + state.index() * TileN * TileK + rank() * kShareN * TileK;
        SM90_TMA_LOAD_2D::copy(&map_x, barrier, hint, x, k * TileK, row_x);
        if constexpr (ClusterM > 1) {
          SM90_TMA_LOAD_MULTICAST_2D::copy(&map_w, barrier, kAllBlocks, hint, w, k * TileK, row_w);
        } else {
          SM90_TMA_LOAD_2D::copy(&map_w, barrier, hint, w, k * TileK, row_w);
        }
      }
    }
    pipeline.producer_tail(state);  // the peer's last releases must find this block alive
  }

  template <class Tiles, class Epilogue>
  CUTLASS_DEVICE static void consume(SharedStorage& shared, Pipeline& pipeline, int consumer, int m, Tiles const& tiles,
                                     Epilogue const& epilogue) {
    using namespace cute;
    int const thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
    // A thread of a wgmma accumulator holds columns 8 j + 2 (lane % 4) + {0, 1} of two rows, eight apart.
    int const lane = thread % 32;
    int const row_in_tile = consumer * 64 + thread / 32 * 16 + lane / 4;

    Mma mma;
    auto slice = mma.get_slice(thread);
    auto const shared_x = make_tensor(make_smem_ptr(shared.x.data()), LayoutX{});
    auto const shared_w = make_tensor(make_smem_ptr(shared.w.data()), LayoutW{});
    auto const my_x = local_tile(shared_x, Shape<_64, Int<TileK>>{}, make_coord(consumer, 0));
    auto fragment_x = slice.make_fragment_A(slice.partition_A(my_x));
    auto fragment_w = slice.make_fragment_B(slice.partition_B(shared_w));
    auto accumulators = partition_fragment_C(mma, Shape<_64, Int<TileN>>{});

    PipelineState state;     // the stage to multiply
    PipelineState released;  // the stage to give back: one behind, while its wgmma is in flight
    for (int tile = first_tile(); tile < tiles.count(); tile += tile_step()) {
      auto const at = tiles(tile);
      int const row = (at.m * ClusterM + rank()) * TileM + row_in_tile;
      typename Epilogue::Row rows[2] = {epilogue.template begin<4>(row, row < m),
                                        epilogue.template begin<4>(row + 8, row + 8 < m)};

      mma.accumulate_ = GMMA::ScaleOut::Zero;
      for (int k = 0; k < kTilesK; ++k, ++state) {
        pipeline.consumer_wait(state);
        warpgroup_fence_operand(accumulators);
        warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int step = 0; step < size<2>(fragment_x); ++step) {
          gemm(mma, fragment_x(_, _, step, state.index()), fragment_w(_, _, step, state.index()), accumulators);
          mma.accumulate_ = GMMA::ScaleOut::One;
        }
        warpgroup_commit_batch();
        warpgroup_wait<1>();
        warpgroup_fence_operand(accumulators);
        if (k > 0) {
          pipeline.consumer_release(released);
          ++released;
        }
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(accumulators);
      pipeline.consumer_release(released);
      ++released;

      store(epilogue, rows, accumulators, row, at.n, m);
    }
  }

  // Hand the accumulators to the epilogue. W's rows were permuted so that 8 (16 for SwiGLU) consecutive accumulators of
  // a thread are eight consecutive output columns.
  template <class Epilogue, class Accumulators>
  CUTLASS_DEVICE static void store(Epilogue const& epilogue, typename Epilogue::Row (&rows)[2],
                                   Accumulators const& accumulators, int row, int tile_n, int m) {
    constexpr int kWidth = Epilogue::kWidth;
    constexpr int kGroup = 4 * kWidth;  // accumulator columns that a quad turns into 32 output columns
    int const quad_lane = threadIdx.x % 4;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const this_row = row + 8 * half;
      bool const valid = this_row < m;
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < TileN / kGroup; ++group) {
        int const first_column = tile_n * TileN + group * kGroup;  // of the accumulators
        if (!valid || (N % TileN != 0 && first_column >= N)) continue;
        float values[kWidth];
        CUTLASS_PRAGMA_UNROLL
        for (int pair = 0; pair < kWidth / 2; ++pair) {
          int const index = (group * kWidth / 2 + pair) * 4 + 2 * half;
          values[2 * pair] = accumulators(index);
          values[2 * pair + 1] = accumulators(index + 1);
        }
        epilogue.apply(rows[half], this_row, first_column * 8 / kWidth + 8 * quad_lane, values);
      }
      epilogue.template end<4>(rows[half], this_row, tile_n, valid);
    }
  }
};

}  // namespace futransformer
