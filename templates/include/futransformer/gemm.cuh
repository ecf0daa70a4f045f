// Prefill GEMM for sm_90a: out = epilogue(X W^T), X [m, K] and W [N, K], both K-major, float32 accumulation.
//
// Persistent and warp-specialised. Warpgroup 0 is the producer: one thread keeps a ring of `Stages` tiles of X and W in
// flight by TMA. The others are consumers: they multiply from shared memory (wgmma) and apply the epilogue from their
// registers, in one of two schedules:
//
//   cooperative   the consumers share a tile, each multiplying its rows of it: the largest tiles, the fewest bytes
//   pingpong      each of the two consumers has tiles of its own, and one multiplies while the other ends its tile
//
// A cluster of two blocks shares tiles by multicast: stacked along M they have one W tile, side by side along N one X
// tile. Or it splits K: both blocks compute the same tile, each over half of K, and swap halves of their sums through
// distributed shared memory, so that a projection with few tiles fills the card.
//
// K columns past K are zero-filled by TMA, and so are rows past m, as far as they are loaded: where a tile has fewer rows,
// the box of X ends with their last group of eight (the swizzle's period), for TMA takes as long over a row of zeros as
// over any other. Behind it shared memory holds what an earlier stage or kernel left, NaN included. A row of products
// depends on no other, and rows past m and columns past N are never stored. Every sum has a fixed order, so results do
// not depend on timing.
#pragma once

#include "wgmma_shapes.cuh"

#include "dependent_launch.cuh"

#include <cute/tensor.hpp>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "barrier.cuh"
#include "tile_epilogue.cuh"
#include "tile_order.cuh"

namespace futransformer {

enum class Schedule { kCooperative, kPingpong };

template <int M, int N, int K>
struct GemmTile {
  static constexpr int kM = M, kN = N, kK = K;
};

template <int M, int N, int Splits>
struct GemmCluster {
  static constexpr int kM = M, kN = N, kSplits = Splits;
};

// `Promoted`: FP8 wgmma adds to about 14 bits; a stage's products alone are left to it, and stages are added in float32.
template <class Element, int N, int K, class Tile, class Cluster, int Stages, int Raster, Schedule kSchedule,
          bool Promoted = false>
struct Gemm {
  static constexpr bool kPingpong = kSchedule == Schedule::kPingpong;
  static constexpr int kConsumers = kPingpong || Tile::kM > 64 ? 2 : 1;
  static constexpr int kConsumerThreads = kConsumers * cutlass::NumThreadsPerWarpGroup;
  static constexpr int kThreads = cutlass::NumThreadsPerWarpGroup + kConsumerThreads;
  static constexpr int kAtoms = Tile::kM / 64 / (kPingpong ? 1 : kConsumers);  // wgmma rows of 64 that a consumer holds
  static constexpr int kAccumulators = kAtoms * Tile::kN / 2;                  // a thread
  static_assert(kAtoms * 64 * (kPingpong ? 1 : kConsumers) == Tile::kM, "whole wgmma rows for every consumer");

  // Registers a thread: the launch of 384 threads allocates 168 each; the producer's share goes to the accumulators.
  static constexpr bool kReallocate = kConsumers == 2;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = kReallocate || kAccumulators > 64 ? 240 : 128;

  static constexpr int kBlocks = Cluster::kM * Cluster::kN * Cluster::kSplits;  // of a cluster
  static constexpr int kSharing = Cluster::kM * Cluster::kN;                    // blocks that multicast to each other
  static_assert(kBlocks <= 2, "a cluster is a pair: along M, along N, or splitting K");
  static constexpr int kTilesN = (N + Tile::kN - 1) / Tile::kN;
  static constexpr int kClusterTilesN = (kTilesN + Cluster::kN - 1) / Cluster::kN;
  static constexpr int kTilesK = (K + Tile::kK * Cluster::kSplits - 1) / (Tile::kK * Cluster::kSplits);  // a block's
  using Order = TileOrder<kClusterTilesN, Raster>;

  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  using Position = cutlass::PipelineState<Stages>;
  using Swizzled = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using LayoutX = decltype(cute::tile_to_shape(
      Swizzled{}, cute::Shape<cute::Int<Tile::kM>, cute::Int<Tile::kK>, cute::Int<Stages>>{}));
  using LayoutW = decltype(cute::tile_to_shape(
      Swizzled{}, cute::Shape<cute::Int<Tile::kN>, cute::Int<Tile::kK>, cute::Int<Stages>>{}));
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, cute::Int<Tile::kN>, cute::Int<Tile::kK>>>()));

  // Shared memory, from its first byte: the ring of X, the ring of W, the sums that the peer sends, the barriers.
  static constexpr int kStageX = Tile::kM * Tile::kK * sizeof(Element);
  static constexpr int kStageW = Tile::kN * Tile::kK * sizeof(Element);
  static constexpr int kExchangeBytes = Cluster::kSplits == 2 ? kConsumerThreads * kAccumulators / 2 * 4 : 0;
  static constexpr int kBarriers = 2 * Stages + (Cluster::kSplits == 2 ? 2 : 0);
  static constexpr int kSharedBytes = Stages * (kStageX + kStageW) + kExchangeBytes + kBarriers * 8;

  struct Shared {
    Element *x, *w;
    float4* exchange;       // [kAccumulators / 8, kConsumerThreads]
    Full* full;             // [Stages] a stage's bytes have arrived
    Empty* empty;           // [Stages] all consumers of all sharing blocks are done with it
    Full* exchange_full;    // the peer's sums have arrived
    Empty* exchange_empty;  // the peer has read what it was sent
  };

  template <class Epilogue>
  CUTLASS_DEVICE static void run(CUtensorMap const& map_x, CUtensorMap const& map_w, int m, Epilogue const& epilogue) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    Shared shared;
    shared.x = reinterpret_cast<Element*>(bytes);
    shared.w = reinterpret_cast<Element*>(bytes + Stages * kStageX);
    shared.exchange = reinterpret_cast<float4*>(bytes + Stages * (kStageX + kStageW));
    shared.full = reinterpret_cast<Full*>(bytes + Stages * (kStageX + kStageW) + kExchangeBytes);
    shared.empty = reinterpret_cast<Empty*>(shared.full + Stages);
    shared.exchange_full = reinterpret_cast<Full*>(shared.empty + Stages);
    shared.exchange_empty = reinterpret_cast<Empty*>(shared.exchange_full + 1);

    allow_next_kernel();
    if (threadIdx.x == 0) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&map_w));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&map_x));
      for (int stage = 0; stage < Stages; ++stage) {
        shared.full[stage].init(1);
        shared.empty[stage].init(kSharing * (kPingpong ? 1 : kConsumers) * cutlass::NumWarpsPerWarpGroup);
      }
      if constexpr (Cluster::kSplits == 2) {
        shared.exchange_full->init(1);
        shared.exchange_empty->init(kConsumers * cutlass::NumWarpsPerWarpGroup);
      }
      cutlass::arch::fence_barrier_init();
    }
    synchronise();

    Order const order{(m + Tile::kM * Cluster::kM - 1) / (Tile::kM * Cluster::kM)};
    int const warpgroup = cutlass::canonical_warp_group_idx();
    if (warpgroup == 0) {
      if constexpr (kReallocate) cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (threadIdx.x < 32 && cute::elect_one_sync()) produce(shared, map_x, map_w, m, order);
    } else {
      if constexpr (kReallocate) cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      wait_for_previous_kernel();
      epilogue.prepare();
      consume(shared, warpgroup - 1, m, order, epilogue);
      epilogue.conclude();
    }
    if constexpr (kBlocks > 1) synchronise();  // no block ends while its peer may still signal it
  }

 private:
  // This block's cluster among all, and its place in the cluster; clusters lie along x.
  CUTLASS_DEVICE static int cluster() { return blockIdx.x / Cluster::kM; }
  CUTLASS_DEVICE static int clusters() { return gridDim.x / Cluster::kM; }
  CUTLASS_DEVICE static int rank_m() { return Cluster::kM > 1 ? blockIdx.x % Cluster::kM : 0; }
  CUTLASS_DEVICE static int rank_n() { return Cluster::kN > 1 ? blockIdx.y : 0; }
  CUTLASS_DEVICE static int rank_k() { return Cluster::kSplits > 1 ? blockIdx.z : 0; }

  CUTLASS_DEVICE static void synchronise() {
    if constexpr (kBlocks > 1) {
      __syncwarp();
      cute::cluster_arrive();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }
  }

  CUTLASS_DEVICE static void produce(Shared const& shared, CUtensorMap const& map_x, CUtensorMap const& map_w, int m,
                                     Order const& order) {
    using namespace cute;
    constexpr uint16_t kBoth = 0b11;
    constexpr int kRowsX = Tile::kM / Cluster::kN;  // of its own share of a tile, that a block loads for both
    constexpr int kRowsW = Tile::kN / Cluster::kM;
    int const box = min(kRowsX, (m + 7) / 8 * 8);  // rows of map_x's
    int const stage_bytes = Cluster::kN * box * Tile::kK * int(sizeof(Element)) + kStageW;
    uint64_t const hint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);

    auto const load_x = [&](int stage, int tile_m, int k) {
      uint64_t* barrier = reinterpret_cast<uint64_t*>(shared.full + stage);
      Element* target = shared.x + (stage * Tile::kM + rank_n() * kRowsX) * Tile::kK;
      int const row = (tile_m * Cluster::kM + rank_m()) * Tile::kM + rank_n() * kRowsX;
      int const column = (rank_k() * kTilesK + k) * Tile::kK;
      if constexpr (Cluster::kN > 1) {
        SM90_TMA_LOAD_MULTICAST_2D::copy(&map_x, barrier, kBoth, hint, target, column, row);
      } else {
        SM90_TMA_LOAD_2D::copy(&map_x, barrier, hint, target, column, row);
      }
    };
    auto const load_w = [&](int stage, int tile_n, int k) {
      uint64_t* barrier = reinterpret_cast<uint64_t*>(shared.full + stage);
      Element* target = shared.w + (stage * Tile::kN + rank_m() * kRowsW) * Tile::kK;
      int const row = (tile_n * Cluster::kN + rank_n()) * Tile::kN + rank_m() * kRowsW;
      int const column = (rank_k() * kTilesK + k) * Tile::kK;
      if constexpr (Cluster::kM > 1) {
        SM90_TMA_LOAD_MULTICAST_2D::copy(&map_w, barrier, kBoth, hint, target, column, row);
      } else {
        SM90_TMA_LOAD_2D::copy(&map_w, barrier, hint, target, column, row);
      }
    };

    // The first stages are free, and weights do not come from the previous kernel: they are asked for before the wait.
    constexpr int kFirst = Stages < kTilesK ? Stages : kTilesK;
    auto at = order(cluster());
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k = 0; k < kFirst; ++k) {
      shared.full[k].arrive_and_expect_tx(stage_bytes);
      load_w(k, at.n, k);
    }
    wait_for_previous_kernel();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k = 0; k < kFirst; ++k) load_x(k, at.m, k);

    Position position;
    position.advance(kFirst);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tile = cluster(), k = kFirst; tile < order.count(); tile += clusters(), k = 0) {
      at = order(tile);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; k < kTilesK; ++k, ++position) {
        int const stage = position.index();
        wait(shared.empty[stage], position.phase() ^ 1);
        shared.full[stage].arrive_and_expect_tx(stage_bytes);
        load_x(stage, at.m, k);
        load_w(stage, at.n, k);
      }
    }
  }

  template <class Epilogue>
  CUTLASS_DEVICE static void consume(Shared const& shared, int consumer, int m, Order const& order,
                                     Epilogue const& epilogue) {
    using namespace cute;
    int const thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
    int const part = kPingpong ? 0 : consumer;  // of the tile's rows

    Mma mma;
    auto slice = mma.get_slice(thread);
    auto const shared_x = make_tensor(make_smem_ptr(shared.x), LayoutX{});
    auto const shared_w = make_tensor(make_smem_ptr(shared.w), LayoutW{});
    auto const my_x = local_tile(shared_x, Shape<Int<64 * kAtoms>, Int<Tile::kK>>{}, make_coord(part, 0));
    auto fragment_x = slice.make_fragment_A(slice.partition_A(my_x));
    auto fragment_w = slice.make_fragment_B(slice.partition_B(shared_w));
    auto accumulators = partition_fragment_C(mma, Shape<Int<64 * kAtoms>, Int<Tile::kN>>{});
    static_assert(decltype(size(accumulators))::value == kAccumulators);
    static_assert(decltype(size<2>(accumulators))::value == 1, "the epilogue takes a tile's width from one instruction");

    Position position;  // the stage to multiply next
    auto const multiply_into = [&](auto& sums) {
      int const stage = position.index();
      wait(shared.full[stage], position.phase());
      ++position;
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < size<2>(fragment_x); ++step) {
        gemm(mma, fragment_x(_, _, step, stage), fragment_w(_, _, step, stage), sums);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
    };
    auto const multiply = [&] { multiply_into(accumulators); };
    // Give back the stage that was multiplied `age` stages before the next one.
    auto const release = [&](int age) {
      int const stage = position.index() >= age ? position.index() - age : position.index() - age + Stages;
      if constexpr (kSharing > 1) {
        shared.empty[stage].arrive(thread % 32, thread % 32 < kSharing);  // lane i tells block i
      } else if (thread % 32 == 0) {
        shared.empty[stage].arrive();
      }
    };

    // Pingpong: a consumer multiplies only when the other has taken all stages of its tile from the ring. A wait for a
    // stage's parity would otherwise be satisfied by the stage's previous round. The turns passed on and taken balance.
    auto const take_turn = [&] { cutlass::arch::NamedBarrier::sync(kConsumerThreads, consumer); };
    auto const pass_turn = [&] { cutlass::arch::NamedBarrier::arrive(kConsumerThreads, 1 - consumer); };
    int const first = cluster() + (kPingpong ? consumer * clusters() : 0);
    int const stride = kPingpong ? 2 * clusters() : clusters();
    if constexpr (kPingpong) {
      if (consumer == 1) {
        pass_turn();
        position.advance(kTilesK);
      }
    }

    uint32_t exchange_parity = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int tile = first; tile < order.count(); tile += stride) {
      auto const at = order(tile);
      int const tile_n = at.n * Cluster::kN + rank_n();
      int const row = (at.m * Cluster::kM + rank_m()) * Tile::kM + part * kAtoms * 64 + row_of_thread();
      Ending<Epilogue> ending(epilogue, row, tile_n, m);
      if constexpr (kPingpong) {
        take_turn();
      } else {
        ending.fetch();
      }

      // Two stages are under way before the rows' values are waited for, and one in the steady state.
      constexpr int kHead = kPingpong || Promoted ? 1 : kTilesK < 2 ? kTilesK : 2;
      constexpr int kLast = kPingpong ? 0 : kTilesK - kHead < kAskStages ? kTilesK - kHead : kAskStages;
      mma.accumulate_ = GMMA::ScaleOut::Zero;
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < kHead; ++k) multiply();
      if constexpr (kHead == 2) {
        warpgroup_wait<1>();
        release(2);
      }
      if constexpr (!kPingpong) ending.begin();
      auto const advance = [&](int stages) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int k = 0; k < stages; ++k) {
          if constexpr (Promoted) {
            auto partial = make_fragment_like(accumulators);
            mma.accumulate_ = GMMA::ScaleOut::Zero;
            multiply_into(partial);
            warpgroup_wait<0>();
            warpgroup_fence_operand(partial);
            release(1);
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kAccumulators; ++i) accumulators(i) += partial(i);
          } else {
            multiply();
            warpgroup_wait<1>();
            warpgroup_fence_operand(accumulators);
            release(2);
          }
        }
      };
      if constexpr (Promoted) {
        warpgroup_wait<0>();
        warpgroup_fence_operand(accumulators);
        release(1);
      }
      advance(kTilesK - kHead - kLast);
      if constexpr (kPingpong) {
        if (tile + clusters() < order.count()) pass_turn();
        ending.fetch();
        ending.begin();
      }
      ending.ask();
      if constexpr (kLast > 0) advance(kLast);
      if constexpr (!Promoted) {
        warpgroup_wait<0>();
        warpgroup_fence_operand(accumulators);
        release(1);
      }
      if constexpr (Cluster::kSplits == 2) exchange(shared, accumulators, consumer, exchange_parity);
      ending.finish(accumulators);
      if constexpr (kPingpong) position.advance(kTilesK);  // the other consumer's
      if constexpr (Cluster::kSplits == 2) {
        __syncwarp();  // all that was received has been used
        if (thread % 32 == 0) shared.exchange_empty->arrive(1 - rank_k());
        exchange_parity ^= 1;
      }
    }
  }

  // A thread of a wgmma accumulator holds two rows, eight apart; of which the block keeps the rank_k-th where K is split.
  static constexpr int kHalves = Cluster::kSplits == 2 ? 1 : 2;
  CUTLASS_DEVICE static int row_of_thread() {
    int const thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
    return thread / 32 * 16 + thread % 32 / 4 + 8 * rank_k();
  }

  // A cooperative tile fetches its rows' values while its first products are under way and asks for operands
  // kAskStages before its last; a pingpong tile does both when its last are: its end is hidden, and holding the values
  // all along would cost registers.
  static constexpr int kAskStages = 3;  // 3 k clocks of both consumers' products: more than a miss of L2 under load
  template <class Epilogue>
  using Ending = TileEpilogue<Epilogue, kAtoms, kHalves, Tile::kN, N, N % (Tile::kN * Cluster::kN) != 0,
                              kConsumerRegisters - kAccumulators * (Promoted ? 2 : 1) - 48 - Epilogue::kKept>;

  // Two blocks have multiplied half of K each. Block 0 keeps the first row of each thread's two, block 1 the second:
  // each sends the sums of the other's, and adds what it receives to its own, which become the half 0 of the fragment.
  template <class Accumulators>
  CUTLASS_DEVICE static void exchange(Shared const& shared, Accumulators& accumulators, int consumer, uint32_t parity) {
    using namespace cute;
    int const thread = consumer * cutlass::NumThreadsPerWarpGroup + threadIdx.x % cutlass::NumThreadsPerWarpGroup;
    bool const second = rank_k() == 1;
    uint32_t const theirs = set_block_rank(cast_smem_ptr_to_uint(shared.exchange + thread), 1 - rank_k());
    uint32_t const their_barrier = set_block_rank(cast_smem_ptr_to_uint(shared.exchange_full), 1 - rank_k());
    if (thread == 0) shared.exchange_full->arrive_and_expect_tx(kExchangeBytes);
    wait(*shared.exchange_empty, parity ^ 1);
    // Sums 8 i to 8 i + 7: two of the first row, two of the second, and so again.
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccumulators / 8; ++i) {
      float sent[4];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) {
        int const first_row = 8 * i + j / 2 * 4 + j % 2, second_row = first_row + 2;
        sent[j] = second ? accumulators(first_row) : accumulators(second_row);
        accumulators(first_row) = second ? accumulators(second_row) : accumulators(first_row);
      }
      store_shared_remote_f32x4(sent, theirs + i * kConsumerThreads * sizeof(float4), their_barrier);
    }
    wait(*shared.exchange_full, parity);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kAccumulators / 8; ++i) {
      float4 const received = shared.exchange[i * kConsumerThreads + thread];
      accumulators(8 * i) += received.x;
      accumulators(8 * i + 1) += received.y;
      accumulators(8 * i + 4) += received.z;
      accumulators(8 * i + 5) += received.w;
    }
  }

  // 16 bytes to another block, counted by its barrier; CuTe has this for 4 bytes only (store_shared_remote).
  CUTLASS_DEVICE static void store_shared_remote_f32x4(float const (&values)[4], uint32_t target, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :
                 : "r"(target), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(barrier)
                 : "memory");
  }
};

}  // namespace futransformer
