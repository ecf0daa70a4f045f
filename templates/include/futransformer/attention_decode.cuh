// Decode attention: one query a sequence over paged K and V, the sequence split over blocks and combined in the kernel.
//
//   q, out       [B, KvHeads * Group, HeadDim] BF16
//   K, V pages   [num_pages, KvHeads, PageSize, HeadDim] BF16 or E4M3 (attention_decode_rows.cuh), or both of them
//                together in INT4 (attention_decode_int4.cuh)
//   block_table  [B, block_table_stride], the pages of a sequence in order
//   grid         (splits, KvHeads, B); split s of a sequence covers pages [s, s + 1) * pages_per_split
//
// A producer warp streams pages through a ring in shared memory. Four consumer warps each take sixteen of a page's
// tokens, with the tokens as the rows of both products (m16n8k16), so that K and V are read once, as operand A, for
// all the query heads that share them:
//
//   S  [16 tokens, 8 heads] = K  [16 tokens, 16 features] Q^T
//   O^T[16 features, 8 heads] += V^T[16 features, 16 tokens] P      V by ldmatrix.trans, P by movmatrix
//
// In the accumulators of both, a thread holds the heads 2 (lane % 4) + {0, 1} of a tile of eight: softmax statistics
// and rescaling need no exchange but the maximum over the tokens of a warp.
//
// Every warp keeps its own running maximum. Warps, then splits, are combined in index order, whichever finished
// first: the same inputs give the same bits. What a split computes depends on its own sequence and pages_per_split
// alone. Slots past the end of a sequence may hold anything, NaN included.
//
// The kernel before this one writes q and the newest token of each sequence. Lengths, block table and all earlier
// tokens are constants: their pages are fetched before the kernel waits for its predecessor.
#pragma once

#include <cmath>
#include <cstdint>

#include <cutlass/arch/barrier.h>

#include "attention_decode_int4.cuh"
#include "attention_decode_rows.cuh"
#include "attention_decode_warp.cuh"
#include "barrier.cuh"
#include "counter.cuh"
#include "dependent_launch.cuh"
#include "numeric.cuh"

namespace futransformer {

// Attention over one part of a sequence, unnormalised: sum = sum of 2^(s - max), out = sum of 2^(s - max) v, with the
// scores s in units of log 2.
struct PartialAttention {
  float max;
  float sum;
  float4 out;  // four neighbouring features
};

// Combine `parts` partial results in index order. Strides count elements from part to part.
CUTLASS_DEVICE PartialAttention combine(int parts, float2 const* max_sum, size_t max_sum_stride, float4 const* out,
                                        size_t out_stride) {
  PartialAttention total{-INFINITY, 0.f, {0.f, 0.f, 0.f, 0.f}};
  for (int part = 0; part < parts; ++part) total.max = fmaxf(total.max, max_sum[part * max_sum_stride].x);
  float const base = softmax_base(total.max);
#pragma unroll 4
  for (int part = 0; part < parts; ++part) {
    float2 const statistics = max_sum[part * max_sum_stride];
    float4 const values = out[part * out_stride];
    float const weight = exp2_flush(statistics.x - base);
    total.sum = fmaf(weight, statistics.y, total.sum);
    total.out.x = fmaf(weight, values.x, total.out.x);
    total.out.y = fmaf(weight, values.y, total.out.y);
    total.out.z = fmaf(weight, values.z, total.out.z);
    total.out.w = fmaf(weight, values.w, total.out.w);
  }
  return total;
}

template <class Element, int KvHeads, int Group, int HeadDim, int PageSize, int Stages, bool EarlyNext>
struct AttentionDecode {
  using Tokens = DecodeTokens<Element, Group, HeadDim, PageSize>;  // what a consumer warp does with a page
  using Page = typename Tokens::Page;
  using Fragments = typename Tokens::Fragments;
  static constexpr int kHeadTiles = Tokens::kHeadTiles;
  static constexpr int kSteps = Tokens::kSteps;
  static constexpr int kConsumers = PageSize / Tokens::kTokens;  // warps
  static constexpr int kThreads = 32 * (kConsumers + 1);

  static_assert(PageSize == 64, "four consumer warps of sixteen tokens");

  struct Arguments {
    bf16 const* q;
    typename Tokens::Source pages;
    bf16* out;
    int const* block_table;
    int block_table_stride;
    int const* seqlens_k;
    float softmax_scale;
    int pages_per_split;
    float* partial_out;      // [B, KvHeads, splits, Group, HeadDim]
    float* partial_max_sum;  // [B, KvHeads, splits, Group, 2]
    int* arrivals;           // [B, KvHeads], zero before and after
  };

  using Results = WarpResults<Tokens, kConsumers, Group, HeadDim>;

  // The ring stands first: the swizzle needs 1024-byte alignment, which the base of dynamic shared memory has.
  struct Shared {
    union {
      Page ring[Stages];
      Results warps;  // once the last page has been read
    };
    alignas(16) cutlass::arch::ClusterTransactionBarrier full[Stages];
    cutlass::arch::ClusterBarrier empty[Stages];
    alignas(16) int is_last;
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static_assert(sizeof(Results) <= sizeof(Page) * Stages, "the warps' results must fit in the ring");

  // One block's share: pages [first, last) of sequence `sequence`, key/value head `head`.
  struct Work {
    int sequence;
    int head;
    int split;
    int splits;  // of this sequence
    int length;
    int first;
    int last;

    CUTLASS_DEVICE size_t sequence_head() const { return size_t(sequence) * KvHeads + head; }
  };

  CUTLASS_DEVICE static void run(Arguments const& args) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);

    if (threadIdx.x == kThreads - 1) Tokens::prefetch(args.pages);
    if constexpr (EarlyNext) allow_next_kernel();

    Work work;
    work.split = blockIdx.x;
    work.head = blockIdx.y;
    work.sequence = blockIdx.z;
    work.length = args.seqlens_k[work.sequence];
    if (work.length <= 0 || work.length > static_cast<long long>(args.block_table_stride) * PageSize) {
      // Nothing to attend to, or more than the block table can name: that is NaN, never a wrong answer.
      wait_for_previous_kernel();
      if (work.split == 0) fill(args, work, work.length <= 0 ? 0.f : NAN);
      return;
    }
    int const pages = (work.length + PageSize - 1) / PageSize;
    // A sequence longer than the grid was sized for leaves its remaining pages to the last split.
    work.splits = min((pages + args.pages_per_split - 1) / args.pages_per_split, static_cast<int>(gridDim.x));
    if (work.split >= work.splits) {
      wait_for_previous_kernel();  // as every block must
      return;
    }
    work.first = work.split * args.pages_per_split;
    work.last = work.split == work.splits - 1 ? pages : work.first + args.pages_per_split;

    int const warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < Stages; ++stage) {
        shared.full[stage].init(1);
        shared.empty[stage].init(kConsumers);
      }
      cutlass::arch::fence_barrier_init();
    }
    __syncthreads();

    Fragments fragments;
    if (warp < kConsumers) {
      wait_for_previous_kernel();
      Tokens::begin(args.q, work, fragments);
      consume(args, work, shared, fragments);
    } else {
      if (threadIdx.x % 32 == 0) produce(args, work, shared);
      __syncwarp();
    }
    __syncthreads();  // the last page has been read
    if (warp < kConsumers) shared.warps.publish(threadIdx.x / 32, threadIdx.x % 32, fragments);
    __syncthreads();  // the warps' results lie in shared memory
    finish(args, work, shared);
  }

 private:
  // One thread: fetch the pages in order, at most Stages ahead of the consumers.
  CUTLASS_DEVICE static void produce(Arguments const& args, Work const& work, Shared& shared) {
    int const* table = args.block_table + size_t(work.sequence) * args.block_table_stride;
    int const newest = (work.length - 1) / PageSize;
    for (int page = work.first; page < work.last; ++page) {
      int const turn = (page - work.first) / Stages;
      int const stage = (page - work.first) % Stages;
      if (page == newest) wait_for_previous_kernel();
      // Fits: 2^31 rows of at least 68 bytes are more memory than there is.
      int const row = (table[page] * KvHeads + work.head) * PageSize;
      if (turn > 0) wait(shared.empty[stage], (turn - 1) & 1);
      auto& full = shared.full[stage];
      full.arrive_and_expect_tx(sizeof(Page));
      Tokens::load(args.pages, row, full, shared.ring[stage]);
    }
    if constexpr (!EarlyNext) allow_next_kernel();
  }

  // One warp: its sixteen tokens of every page.
  CUTLASS_DEVICE static void consume(Arguments const& args, Work const& work, Shared& shared, Fragments& fragments) {
    float const scale = Tokens::score_scale(args.pages, args.softmax_scale);  // to units of log 2
    int const first_token = threadIdx.x / 32 * Tokens::kTokens;
    for (int page = work.first; page < work.last; ++page) {
      int const turn = (page - work.first) / Stages;
      int const stage = (page - work.first) % Stages;
      wait(shared.full[stage], turn & 1);
      int const tokens = work.length - page * PageSize - first_token;  // of the warp's sixteen, those that exist
      if (tokens > 0) Tokens::attend(shared.ring[stage], first_token, tokens, scale, fragments);
      __syncwarp();
      if (threadIdx.x % 32 == 0) shared.empty[stage].arrive();
    }
    Tokens::end(fragments);
  }

  static constexpr int kQuads = HeadDim / 4;  // what a thread combines at a time: four features of one head

  // Combine the warps; then, where the sequence has several splits, let the last block to arrive combine those.
  CUTLASS_DEVICE static void finish(Arguments const& args, Work const& work, Shared& shared) {
    size_t const first_row = work.sequence_head() * gridDim.x * Group;  // of the sequence's partial results
    float4* partial_out = reinterpret_cast<float4*>(args.partial_out) + first_row * kQuads;
    float2* partial_max_sum = reinterpret_cast<float2*>(args.partial_max_sum) + first_row;

    for (int item = threadIdx.x; item < Group * kQuads; item += kThreads) {
      int const head = item / kQuads;
      int const quad = item % kQuads;
      Results const& warps = shared.warps;
      float4 const* out = reinterpret_cast<float4 const*>(&warps.out[0][head][4 * quad]);
      PartialAttention const total =
          combine(kConsumers, &warps.max_sum[0][head], Group, out, sizeof(warps.out[0]) / sizeof(float4));
      if (work.splits == 1) {
        store(args, work, item, total);
      } else {
        partial_out[size_t(work.split) * Group * kQuads + item] = total.out;
        if (quad == 0) partial_max_sum[size_t(work.split) * Group + head] = make_float2(total.max, total.sum);
      }
    }
    if (work.splits == 1) return;

    __syncthreads();  // this split's results are written
    if (threadIdx.x == 0) {
      int* arrivals = args.arrivals + work.sequence_head();
      shared.is_last = arrive(arrivals) == work.splits - 1;
      if (shared.is_last) *arrivals = 0;  // for the next launch
    }
    __syncthreads();
    if (!shared.is_last) return;
    for (int item = threadIdx.x; item < Group * kQuads; item += kThreads) {
      store(args, work, item,
            combine(work.splits, partial_max_sum + item / kQuads, Group, partial_out + item, Group * kQuads));
    }
  }

  CUTLASS_DEVICE static void store(Arguments const& args, Work const& work, int item, PartialAttention const& total) {
    float const inverse = Tokens::normalised(args.pages, total.sum);
    uint2* out = reinterpret_cast<uint2*>(args.out) + work.sequence_head() * Group * kQuads + item;
    *out = make_uint2(pack_bf16x2(total.out.x * inverse, total.out.y * inverse),
                      pack_bf16x2(total.out.z * inverse, total.out.w * inverse));
  }

  CUTLASS_DEVICE static void fill(Arguments const& args, Work const& work, float value) {
    uint2* out = reinterpret_cast<uint2*>(args.out) + work.sequence_head() * Group * kQuads;
    uint32_t const pair = pack_bf16x2(value, value);
    for (int item = threadIdx.x; item < Group * kQuads; item += kThreads) out[item] = make_uint2(pair, pair);
  }
};

}  // namespace futransformer
