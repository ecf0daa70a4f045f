// All layers of a decode step in one launch: a block a multiprocessor, whose weights never stop arriving.
//
//   x         bf16 [Hidden]: what the first layer reads, in the end what the head reads
//   residual  float32 [Hidden]: the stream, in place
//   layers    [num_layers] of Layer: packed weights and pages (docs/formats.md)
//
// A layer is five phases: qkv, attention, o, gate_up, down. Blocks share a projection by row tiles, whole K each, so that no
// sums travel between blocks; attention by pages, as attention_decode.cuh does. What a block has made others read as tagged
// words (tagged.cuh): a phase begins when its operands are there, and nothing else is waited for. A place is written again a
// layer later, when everything in between has been made of what was read there: for that every block must have a share of
// gate_up, or one that reads nothing could be a layer ahead.
//
// One thread streams what the block will read, layer after layer, through a ring in shared memory: row tiles two at a time,
// 1024 k a slot, then the pages of attention. It waits for nothing but room, so that what the memory could do while the
// other warps wait for one another is done: a ring is five microseconds of the block's share of memory. It has at most
// InFlight slots under way while others wait for activations, which what is asked for beyond what memory needs would delay.
//
// Sets of four warps take slots in turn and multiply straight out of them, each warp 256 k of both row tiles: what it needs of
// x it receives and makes integers of itself (staged_activations.cuh), for the first pair; where the slots of K do not divide
// among the sets, it takes what others have made for the next. Sums are added in a fixed order: the same inputs give the same
// bits.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "decode_layers_attention.cuh"
#include "decode_layers_projections.cuh"
#include "decode_layers_shared.cuh"
#include "decode_layers_stream.cuh"
#include "dependent_launch.cuh"
#include "fragment.cuh"

namespace futransformer {

// `T`: DecodeLayersTraits.
template <class T>
class DecodeLayers {
  using Qkv = typename T::Qkv;
  using O = typename T::O;
  using GateUp = typename T::GateUp;
  using Down = typename T::Down;
  using Cursor = typename T::Cursor;
  using Shared = typename T::Shared;
  using Arguments = typename T::Arguments;
  using Stream = DecodeLayersStream<T>;
  using Projections = DecodeLayersProjections<T>;
  using Attention = DecodeLayersAttention<T>;

 public:
  // The four projections are one piece of code: a layer's code is fetched anew by every multiprocessor, layer after layer,
  // and what does not fit the instruction caches takes longer to fetch than to run.
  CUTLASS_DEVICE static void run(Arguments const& args) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < T::Slots; ++slot) {
        shared.full[slot].init(1);
        shared.empty[slot].init(kSetWarps * kLanes);  // each lane gives back what it has read itself
      }
      cutlass::arch::fence_barrier_init();
      int const block = blockIdx.x;
      shared.shares[0] = {Qkv::first_tile(block), Qkv::first_tile(block + 1), Qkv::kK};
      shared.shares[1] = {O::first_tile(block), O::first_tile(block + 1), O::kK};
      shared.shares[2] = {GateUp::first_tile(block), GateUp::first_tile(block + 1), GateUp::kK};
      shared.shares[3] = {Down::first_tile(block), Down::first_tile(block + 1), Down::kK};
      shared.position = args.positions[0];
      shared.slot = args.slots[0] < 0 ? -1 : int(args.slots[0]);
      shared.work = Attention::work_of(args, block);
    }
    __syncthreads();
    allow_next_kernel();
    if (T::Clocked && threadIdx.x == 0) args.clocks[blockIdx.x].total = -clock64();  // no register is left to keep it
    if (threadIdx.x >= kLayerThreads) {
      cutlass::arch::warpgroup_reg_dealloc<kStreamRegisters>();
      if (threadIdx.x == kLayerThreads) Stream::run(shared, args);
      return;
    }
    cutlass::arch::warpgroup_reg_alloc<kLayerRegisters>();
    uint32_t tag = *args.epoch;
    Cursor cursor;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < args.num_layers * T::kProjections; ++step) {
      int const l = step / T::kProjections, projection = step % T::kProjections;
      if (projection == 1) Attention::run(shared, args, cursor, args.layers[l], ++tag);  // qkv reads what the layer before has sent
      Projections::run(shared, args, cursor, l, projection, tag);
    }
    // The last block has a share of every projection. In the end it has read h of all blocks, which therefore had begun.
    if (threadIdx.x == 0 && blockIdx.x == T::Blocks - 1) *args.epoch = tag;
    if (T::Clocked && threadIdx.x == 0) args.clocks[blockIdx.x].total += clock64();
  }
};

}  // namespace futransformer
