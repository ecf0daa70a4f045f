// All layers of a decode step in one launch: a block a multiprocessor, whose weights never stop arriving.
//
//   x         bf16 [m, Hidden], m <= Batch: what the first layer reads, in the end what the head reads
//   residual  float32 [m, Hidden]: the stream, in place
//   layers    [num_layers] of Layer: packed weights and pages (docs/formats.md)
//
// A layer is five phases: qkv, attention, o, gate_up, down. Blocks share a projection by row tiles, whole K each, so that no
// sums travel between blocks; attention by pages, as attention_decode.cuh does. What a block has made others read as tagged
// words (tagged.cuh): a phase begins when its operands are there, and nothing else is waited for. A place is written again a
// layer later, when everything in between has been made of what was read there: for that every block must have a share of
// gate_up, or one that reads nothing could be a layer ahead. Rows are of different sequences: a newest token is put into its own
// row's page alone.
//
// One warp streams what the block will read, layer after layer, through a ring in shared memory: row tiles two at a time,
// 1024 k a slot, then the pages of attention. It waits for nothing but room, so that what the memory could do while the
// other warps wait for one another is done: a ring is five microseconds of the block's share of memory. It has at most
// InFlight slots under way: what is asked for beyond what memory needs only delays activations.
//
// Two sets of four warps take slots in turn and multiply straight out of them, each warp 256 k of both row tiles. Activations
// become integers once for all of them (staged_activations.cuh). Sums are added in a fixed order: the same inputs give the
// same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include <cutlass/arch/barrier.h>

#include "attention_decode.cuh"
#include "barrier.cuh"
#include "bulk_copy.cuh"
#include "decode_block.cuh"
#include "dependent_launch.cuh"
#include "epilogue_tagged.cuh"
#include "fragment.cuh"
#include "numeric.cuh"
#include "staged_activations.cuh"
#include "tagged.cuh"
#include "unit_scales.cuh"

namespace futransformer {

// One layer's constants, in global memory.
struct Layer {
  unsigned char const* qkv;
  unsigned char const* o;
  unsigned char const* gate_up;
  unsigned char const* down;
  bf16* k_pages;
  bf16* v_pages;
  unsigned char* kv_copy;
};

constexpr int kPairTiles = 2;              // row tiles that are multiplied at a time
constexpr int kSets = 2;                    // of warps, which take slots in turn
constexpr int kSetWarps = 4;                // with the one that streams nine warps, of 168 registers
constexpr int kWarpK = 256;                 // k that a warp has of a slot
constexpr int kSlotK = kSetWarps * kWarpK;  // k of a slot
constexpr int kLayerWarps = kSets * kSetWarps;
constexpr int kLayerThreads = kLayerWarps * kLanes;  // that multiply

// A projection [N, K], shared by `Blocks` blocks in groups of GroupTiles row tiles.
template <int N, int K, int GroupTiles, int Blocks>
struct LayerProjection {
  static constexpr int kK = K;
  static constexpr int kGroups = N / (kTileRows * GroupTiles);
  static constexpr int kMostTiles = (kGroups + Blocks - 1) / Blocks * GroupTiles;
  static_assert(N % (kTileRows * GroupTiles) == 0, "row tiles must divide into groups");

  CUTLASS_DEVICE static int first_tile(int block) { return kGroups * block / Blocks * GroupTiles; }
};

// A block's share of one: row tiles [first, last), all of K.
struct Share {
  int first, last, k;
};

// Where blocks leave for one another what a layer makes; [m, ...] each.
struct Exchange {
  TaggedVector* q;            // [m, QFeatures]
  TaggedWord* codes;          // [m, KvHeads, TokenCodes::kCount]
  TaggedVector* partial;      // [m, KvHeads, splits, Group, HeadDim] float32
  TaggedVector* max_sum;      // [m, KvHeads, splits, Group]
  TaggedVector* attended;     // [m, QFeatures]
  TaggedVector* x_middle;     // [m, Hidden]
  TaggedWord* sumsq_middle;   // [m, writers of o]
  TaggedVector* h;            // [m, Intermediate]
  TaggedVector* x_end;        // [m, Hidden]
  TaggedWord* sumsq_end;      // [m, writers of down]
};

template <class Element, class Qkv, class O, class GateUp, class Down, class Format, int KvHeads, int Group, int HeadDim,
          int PageSize, int Batch, int Blocks, int Slots, int InFlight, int WindowK, int AtOnce>
struct DecodeLayers {
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  using Tokens = DecodeTokens<Format, Group, HeadDim, PageSize>;
  using Page = typename Tokens::Page;
  using Fragments = typename Tokens::Fragments;
  using Codes = TokenCodes<Format, HeadDim>;
  using Weight = WeightFragment<Element>;

  static constexpr int kThreads = kLayerThreads + kLanes;
  static constexpr int kPageWarps = PageSize / Tokens::kTokens;  // of a set
  static constexpr int kAttending = kSets * kPageWarps;
  static constexpr int kQuads = HeadDim / 4;
  static constexpr int kHeadQuads = Group * kQuads;
  static constexpr int kMostSplits = Blocks / KvHeads > 1 ? Blocks / KvHeads : 1;

  static constexpr int most(int a, int b) { return a > b ? a : b; }
  static constexpr int most(int a, int b, int c, int d) { return most(most(a, b), most(c, d)); }
  static constexpr int kPartBytes = kWarpK / Weight::kUnitK * Weight::kUnitBytes;
  static constexpr int kChunkBytes = kSetWarps * kPartBytes;  // of a row tile in a slot
  static constexpr int kSlotBytes = most(kPairTiles * kChunkBytes, sizeof(Page));
  static constexpr int kColumns = kTileRows * most(Qkv::kMostTiles, O::kMostTiles, GateUp::kMostTiles, Down::kMostTiles);
  static constexpr int kMostK = most(Qkv::kK, O::kK, GateUp::kK, Down::kK);
  static constexpr int kWindow = kMostK < WindowK ? kMostK : WindowK;
  static constexpr int kProjections = 4;
  using Staged = StagedActivations<Batch, kWindow, Weight::kUnitK, AtOnce>;
  static_assert(WindowK % kSlotK == 0, "a window is whole slots");
  static_assert(kPageWarps == kSetWarps, "a set attends to a page");

  using Results = WarpResults<Tokens, kAttending, Group, HeadDim>;
  // What a block combines of a sequence and head: its share of the quads of features, of every split.
  struct Splits {
    float4 out[kHeadQuads + kMostSplits];
    float2 max_sum[kMostSplits][Group];
  };
  struct Attended {
    Page newest;
    alignas(16) bf16 q[Group * HeadDim];
    union {
      Results warps;
      Splits splits;
    };
  };

  // A block's share of attention: pages [first, last) of a sequence and key/value head, `split` of so many; of no split nothing.
  // Of a length that is none, or more than the block table can name, split 0 of one has no pages.
  struct Work {
    int sequence, head, split, splits, length, first, last;
    CUTLASS_DEVICE int sequence_head() const { return sequence * KvHeads + head; }
    CUTLASS_DEVICE int newest() const { return (length - 1) / PageSize; }
  };

  struct Shared {
    alignas(128) unsigned char ring[Slots][kSlotBytes];
    union {
      Staged x;
      Attended attention;
    };
    alignas(16) float partial[kLayerWarps][Batch][kColumns + 4];
    float rstd[Batch];
    Share shares[kProjections];
    Work work;
    alignas(16) Barrier full[Slots];
    Barrier empty[Slots];
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  struct Arguments {
    Layer const* layers;
    int num_layers;
    int m;
    bf16 const* x;
    int const* block_table;
    int block_table_stride;
    int const* seqlens_k;
    float softmax_scale;
    int splits;  // most of a sequence, at most kMostSplits
    int pages_per_split;
    Exchange exchange;
    uint32_t* epoch;  // a launch's tags are its epoch + 1 .. num_layers
  };

  // The slot at hand, the parity of how often the ring has been passed, and whose turn it is.
  struct Cursor {
    int slot = 0;
    uint32_t parity = 0;
    int set = 0;
    CUTLASS_DEVICE Cursor ahead(int slots) const {
      Cursor later = {slot + slots, parity, (set + slots) % kSets};
      if (later.slot >= Slots) {
        later.slot -= Slots;
        later.parity ^= 1;
      }
      return later;
    }
    CUTLASS_DEVICE void advance() { *this = ahead(1); }
  };

  // `epilogues` makes the chains: qkv(layer, rstd, tag), residual(is_down, l, tag), gate_up(rstd, tag).
  //
  // The four projections are one piece of code: a layer's code is fetched anew by every multiprocessor, layer after layer,
  // and what does not fit the instruction caches takes longer to fetch than to run.
  template <class Epilogues>
  CUTLASS_DEVICE static void run(Arguments const& args, Epilogues const& epilogues) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < Slots; ++slot) {
        shared.full[slot].init(1);
        shared.empty[slot].init(kSetWarps);
      }
      cutlass::arch::fence_barrier_init();
      int const block = blockIdx.x;
      shared.shares[0] = {Qkv::first_tile(block), Qkv::first_tile(block + 1), Qkv::kK};
      shared.shares[1] = {O::first_tile(block), O::first_tile(block + 1), O::kK};
      shared.shares[2] = {GateUp::first_tile(block), GateUp::first_tile(block + 1), GateUp::kK};
      shared.shares[3] = {Down::first_tile(block), Down::first_tile(block + 1), Down::kK};
      shared.work = work_of(args, block);
    }
    __syncthreads();
    allow_next_kernel();
    if (threadIdx.x / kLanes == kLayerWarps) {
      if (threadIdx.x % kLanes == 0) stream(shared, args);
      return;
    }
    wait_for_previous_kernel();
    uint32_t tag = *args.epoch;
    Cursor cursor;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < args.num_layers * kProjections; ++step) {
      int const l = step / kProjections, projection = step % kProjections;
      if (projection == 1) attend(shared, args, cursor, args.layers[l], ++tag);  // qkv reads what the layer before has sent
      project(shared, args, cursor, epilogues, l, projection, tag);
    }
    // The last block has a share of every projection. In the end it has read h of all blocks, which therefore had begun.
    if (threadIdx.x == 0 && blockIdx.x == Blocks - 1) *args.epoch = tag;
  }

 private:
  CUTLASS_DEVICE static void sync() { cutlass::arch::NamedBarrier::sync(kLayerThreads, 1); }

  // The streaming thread

  struct Stream {
    Cursor cursor;
    int issued = 0;

    // Wait for room in the next slot, and until few enough are under way.
    CUTLASS_DEVICE void next(Shared& shared) {
      wait(shared.empty[cursor.slot], cursor.parity ^ 1);
      if (InFlight < Slots && issued >= InFlight) {
        int const earlier = cursor.slot - InFlight;
        wait(shared.full[earlier < 0 ? earlier + Slots : earlier], earlier < 0 ? cursor.parity ^ 1 : cursor.parity);
      }
    }
    CUTLASS_DEVICE void advance() {
      cursor.advance();
      ++issued;
    }
  };

  CUTLASS_DEVICE static void stream(Shared& shared, Arguments const& args) {
    Stream ring;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < args.num_layers * kProjections; ++step) {
      int const projection = step % kProjections;
      Layer const& layer = args.layers[step / kProjections];
      unsigned char const* const weight = (&layer.qkv)[projection];
      if (projection == 1) stream_pages(shared, ring, args, layer);
      Share const share = shared.shares[projection];
      int const tile_bytes = share.k / Weight::kUnitK * Weight::kUnitBytes;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int window = 0; window < share.k; window += WindowK) {
        int const stop = min(share.k, window + WindowK);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int tile = share.first; tile < share.last; tile += kPairTiles) {
          CUTLASS_PRAGMA_NO_UNROLL
          for (int k = window; k < stop; k += kSlotK) {
            int const bytes = min(share.k - k, kSlotK) / Weight::kUnitK * Weight::kUnitBytes;
            int const tiles = share.last - tile < kPairTiles ? 1 : kPairTiles;
            unsigned char const* const source =
                weight + size_t(tile) * tile_bytes + k / Weight::kUnitK * Weight::kUnitBytes;
            ring.next(shared);
            Barrier& full = shared.full[ring.cursor.slot];
            unsigned char* const slot = shared.ring[ring.cursor.slot];
            full.arrive_and_expect_tx(tiles * bytes);
            CUTLASS_PRAGMA_NO_UNROLL
            for (int i = 0; i < tiles; ++i) load_bulk_once(slot + i * kChunkBytes, source + i * tile_bytes, bytes, full);
            ring.advance();
          }
        }
      }
    }
  }

  CUTLASS_DEVICE static void stream_pages(Shared& shared, Stream& ring, Arguments const& args, Layer const& layer) {
    Work const& work = shared.work;
    int const* const table = args.block_table + size_t(work.sequence) * args.block_table_stride;
    int const newest = work.newest(), last = work.last;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int page = work.first; page < last; ++page) {
      if (page == newest) break;  // of this launch's own token: what attends to it fetches it
      int const row = (table[page] * KvHeads + work.head) * PageSize;
      ring.next(shared);
      Barrier& full = shared.full[ring.cursor.slot];
      full.arrive_and_expect_tx(sizeof(Page));
      Tokens::load({layer.kv_copy}, row, full, *reinterpret_cast<Page*>(shared.ring[ring.cursor.slot]));
      ring.advance();
    }
  }

  // Projections

  template <class Epilogues>
  CUTLASS_DEVICE static void project(Shared& shared, Arguments const& args, Cursor& cursor, Epilogues const& epilogues, int l,
                                     int projection, uint32_t tag) {
    Share const share = shared.shares[projection];
    if (share.first == share.last) return;
    Exchange const& exchange = args.exchange;
    TaggedVector const* const x = projection == 0   ? exchange.x_end
                                  : projection == 1 ? exchange.attended
                                  : projection == 2 ? exchange.x_middle
                                                    : exchange.h;
    bf16 const* const plain_x = projection == 0 && l == 0 ? args.x : nullptr;
    int const thread = thread_now(), warp = thread / kLanes, lane = thread % kLanes;

    // Warp r finishes row r: what it needs is on its way while the products are made.
    int const row = warp;
    bool const is_row = row < args.m;
    float4 early[2] = {};  // operands of the lane's first columns

    int const set = warp / kSetWarps, part = warp % kSetWarps;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int window = 0; window < share.k; window += WindowK) {
      int const width = min(share.k - window, WindowK);
      if (window > 0) sync();  // the window before has been read
      shared.x.template stage<kLayerThreads>(x, tag, plain_x, args.m, share.k, window, width);
      if (window == 0) {
        // By the last warps, which have least of x.
        if (projection % 2 == 0 && warp >= kLayerWarps - args.m) {
          int const of = kLayerWarps - 1 - warp;
          float const factor = epilogues.rstd(projection == 2, l, tag, of);
          if (lane == 0) shared.rstd[of] = factor;
        }
        if (projection != 2 && is_row && lane < (share.last - share.first) * 2) {
          epilogues.load_early(projection == 0, row, share.first * kTileRows + lane * 8, early);
        }
      }
      sync();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int tile = share.first; tile < share.last; tile += kPairTiles) {
        float sums[kPairTiles][SplitSumFragment::kSums] = {};
        // Slots of the pair that are the set's.
        int const slots = (width + kSlotK - 1) / kSlotK;
        CUTLASS_PRAGMA_NO_UNROLL
        for (int i = 0; i < slots; ++i, cursor.advance()) {
          if (cursor.set != set) continue;
          wait(shared.full[cursor.slot], cursor.parity);
          int const at = i * kSlotK + part * kWarpK;
          if (at < width) {
            multiply(shared, shared.ring[cursor.slot] + part * kPartBytes, lane, Batch == 1 ? 1 : args.m, at, width - at, sums);
          }
          asm volatile("" ::: "memory");  // no read of the slot comes later
          __syncwarp();
          if (lane == 0) shared.empty[cursor.slot].arrive();
        }
        int const sequence = SplitSumFragment::sequence(lane, 0);
        CUTLASS_PRAGMA_UNROLL
        for (int pair = 0; pair < kPairTiles; ++pair) {
          if (tile + pair >= share.last || sequence >= Batch) break;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < SplitSumFragment::kSums; ++i) {
            int const column = (tile + pair - share.first) * kTileRows + SplitSumFragment::column(lane, i);
            float& sum = shared.partial[warp][sequence][column];
            sum = window == 0 ? sums[pair][i] : sum + sums[pair][i];
          }
        }
      }
    }
    sync();
    if (!is_row) {
      // nothing to finish
    } else if (projection == 0) {
      auto const chain = epilogues.qkv(args.layers[l], shared.rstd[row], tag);
      finish(shared, share, row, lane, chain, [&](auto& operands) { copy(early, operands.rest.first.angles); });
    } else if (projection == 2) {
      finish(shared, share, row, lane, epilogues.gate_up(shared.rstd[row], tag), [](auto&) {});
    } else {
      auto const chain = epilogues.residual(projection == 3, l, tag);
      finish(shared, share, row, lane, chain, [&](auto& operands) { copy(early, operands.first.added); });
    }
    sync();  // who asks for others' results before this block's are on their way only holds them up
  }

  CUTLASS_DEVICE static void copy(float4 const (&from)[2], float4 (&to)[2]) {
    to[0] = from[0];
    to[1] = from[1];
  }

  // A row's share of columns: the sums of all warps, and what the chain makes of them; a lane a vector. `fill` puts in place
  // what has been loaded early, of the first vector.
  template <class Epilogue, class Fill>
  CUTLASS_DEVICE static void finish(Shared& shared, Share const& share, int row, int lane, Epilogue const& epilogue,
                                    Fill const& fill) {
    constexpr int kWidth = Epilogue::kWidth;
    int const vectors = (share.last - share.first) * kTileRows / kWidth;
    auto const column = [&](int vector) { return (share.first * kTileRows / kWidth + vector) * 8; };
    auto state = epilogue.template begin<kLanes>(row, true);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int vector = lane; vector < vectors; vector += kLanes) {
      typename Epilogue::Operands operands = {};
      if (vector < kLanes) {
        fill(operands);
      } else {
        operands = epilogue.load(state, row, column(vector));
      }
      float values[kWidth];
      add_parts(shared.partial, row, vector * kWidth, values);
      epilogue.apply(state, operands, row, column(vector), values);
      if constexpr (Epilogue::kUnit > 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kWidth; i += 4) {
          *reinterpret_cast<float4*>(&shared.partial[0][row][vector * kWidth + i]) =
              make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
        }
      }
    }
    if constexpr (Epilogue::kUnit > 0) {
      __syncwarp();
      CUTLASS_PRAGMA_NO_UNROLL
      for (int unit = 0; unit < (share.last - share.first) * kTileRows; unit += Epilogue::kUnit) {
        FinishedRow<Epilogue::kUnit, kLanes> const finished{shared.partial[0][row] + unit, row, true};
        epilogue.copy(state, column(unit / kWidth), finished);
      }
    }
    epilogue.template end<kLanes>(state, row, writer(share), true);
  }

  // The block's number among those that have a share of o, or of down.
  CUTLASS_DEVICE static int writer(Share const& share) { return O::kGroups < Blocks ? share.first : int(blockIdx.x); }

  // What a warp has of a slot: up to 256 k of two row tiles, of which `left` exist; `at` from the window's first. Of one row
  // tile the other's sums mean nothing.
  //
  // Codes in the upper halves of bytes count sixteen: they have products of their own, so that one operation makes an operand.
  CUTLASS_DEVICE static void multiply(Shared const& shared, unsigned char const* units, int lane, int m, int at, int left,
                                      float (&sums)[kPairTiles][SplitSumFragment::kSums]) {
    constexpr uint32_t kLower = 0x0f0f0f0f, kUpper = 0xf0f0f0f0;
    constexpr int kUnits = kPartK / Weight::kUnitK, kUnitGroups = Weight::kUnitK / kGroupK;
    constexpr int kLoadGroups = Weight::kLoadGroups, kLoads = kUnitGroups / kLoadGroups;
    using Load = typename Weight::Load;
    int const column = lane / 4, t = lane % 4;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < kWarpK / kPartK; ++half) {
      if (half * kPartK >= left) break;
      uint32_t x[2][4];  // of 64 k: of two groups what lower codes are multiplied with, then upper ones
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        uint4 four = {0, 0, 0, 0};
        if (column < 2 * m) four = shared.x.words[unsigned(at) / kPartK + half][i][column][t];
        x[i][0] = four.x;
        x[i][1] = four.y;
        x[i][2] = four.z;
        x[i][3] = four.w;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kUnits; ++i) {
        int const unit = half * kUnits + i;
        if (Weight::kUnitK < kPartK && unit * Weight::kUnitK >= left) break;
        typename Staged::Unit of_x = {0.f, 0};
        if (t < m) of_x = shared.x.units[unsigned(at) / Weight::kUnitK + unit][t];
        ByteSums lower[kPairTiles] = {}, upper[kPairTiles] = {};
        CUTLASS_PRAGMA_UNROLL
        for (int load = 0; load < kLoads; ++load) {
          int const group = i * kUnitGroups + load * kLoadGroups;
          uint32_t const* const of_load = x[group / 2];
          CUTLASS_PRAGMA_UNROLL
          for (int tile = 0; tile < kPairTiles; ++tile) {
            unsigned char const* const codes = units + tile * kChunkBytes + unit * Weight::kUnitBytes;
            Load const packed = reinterpret_cast<Load const*>(codes)[load * kLanes + lane];
            uint32_t const* const word = packed.word;
            if constexpr (kLoadGroups == 2) {
              uint32_t const low[2] = {of_load[0], of_load[1]}, high[2] = {of_load[2], of_load[3]};
              lower[tile].template multiply<true>({{word[0] & kLower, word[1] & kLower, word[2] & kLower, word[3] & kLower}},
                                                  low, lower[tile]);
              upper[tile].template multiply<true>({{word[0] & kUpper, word[1] & kUpper, word[2] & kUpper, word[3] & kUpper}},
                                                  high, upper[tile]);
            } else {
              uint32_t const both[2] = {of_load[group % 2], of_load[2 + group % 2]};
              lower[tile].template multiply<true>({{Weight::bytes(word[0], 0), Weight::bytes(word[1], 0),
                                                    Weight::bytes(word[0], 1), Weight::bytes(word[1], 1)}},
                                                  both, lower[tile]);
            }
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int tile = 0; tile < kPairTiles; ++tile) {
          UnitScales<Weight> const scales(units + tile * kChunkBytes + unit * Weight::kUnitBytes, lane);
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < SplitSumFragment::kSums; ++j) {
            int const zero = Weight::kZeroPoints ? int(j ? scales.zeros >> 8 : scales.zeros & 0xff) : Weight::kZero;
            int32_t sum = int32_t(lower[tile].d[2 * j] * 256 + lower[tile].d[2 * j + 1]) - zero * of_x.sum;
            if constexpr (kLoadGroups == 2) {
              sum += int32_t(upper[tile].d[2 * j] * 16) + (int32_t(upper[tile].d[2 * j + 1]) >> 4);
            }
            sums[tile][j] += (j ? scales.scale.y : scales.scale.x) * of_x.scale * float(sum);
          }
        }
      }
    }
  }

  // values = the sums of Width neighbouring columns, added warp by warp.
  template <int Width>
  CUTLASS_DEVICE static void add_parts(float const (&partial)[kLayerWarps][Batch][kColumns + 4], int row, int first,
                                       float (&values)[Width]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width; ++i) values[i] = 0.f;
    constexpr int kUnrolled = 32 / Width;
#pragma unroll kUnrolled
    for (int warp = 0; warp < kLayerWarps; ++warp) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Width; i += 4) {
        float4 const four = *reinterpret_cast<float4 const*>(&partial[warp][row][first + i]);
        values[i] += four.x;
        values[i + 1] += four.y;
        values[i + 2] += four.z;
        values[i + 3] += four.w;
      }
    }
  }

  // Attention

  // Blocks from the last on, which have least of qkv.
  CUTLASS_DEVICE static Work work_of(Arguments const& args, int block) {
    Work work = {};
    int const share = Blocks - 1 - block;
    if (share >= args.m * KvHeads * args.splits) return work;
    work.split = share % args.splits;
    work.head = share / args.splits % KvHeads;
    work.sequence = share / args.splits / KvHeads;
    work.length = args.seqlens_k[work.sequence];
    bool const served = work.length > 0 && work.length <= static_cast<long long>(args.block_table_stride) * PageSize;
    int const pages = served ? (work.length + PageSize - 1) / PageSize : 0;
    work.splits = served ? min((pages + args.pages_per_split - 1) / args.pages_per_split, args.splits) : 1;
    if (work.split >= work.splits) return {};
    work.first = served ? work.split * args.pages_per_split : 0;
    work.last = work.split == work.splits - 1 ? pages : work.first + args.pages_per_split;
    return work;
  }

  CUTLASS_DEVICE static void attend(Shared& shared, Arguments const& args, Cursor& cursor, Layer const& layer, uint32_t tag) {
    Work const& work = shared.work;
    if (work.splits == 0) return;
    int const thread = thread_now();
    if (work.last == 0) {
      uint32_t const value = work.length <= 0 ? 0 : 0x7fff7fff;  // zeros, or no numbers
      for (int item = thread; item < kHeadQuads; item += kLayerThreads) {
        send(args.exchange.attended + work.sequence_head() * kHeadQuads + item, value, value, tag);
      }
      return;
    }
    attend_to_pages(shared, args, cursor, layer, tag);
    if (work.splits > 1) {
      sync();  // what stands in shared memory has been read
      combine_splits(shared, args, layer, tag);
    }
    sync();
  }

  CUTLASS_DEVICE static void attend_to_pages(Shared& shared, Arguments const& args, Cursor& cursor, Layer const& layer,
                                             uint32_t tag) {
    Work const& work = shared.work;
    int const thread = thread_now(), warp = thread / kLanes, lane = thread % kLanes;
    Attended& attention = shared.attention;
    int const last = work.last, newest = work.newest();
    bool const has_newest = last - 1 == newest;
    if (has_newest) {
      int const page = args.block_table[size_t(work.sequence) * args.block_table_stride + newest];
      uint4 const* const source =
          reinterpret_cast<uint4 const*>(layer.kv_copy + (size_t(page) * KvHeads + work.head) * sizeof(Page));
      uint4* const target = reinterpret_cast<uint4*>(&attention.newest);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = thread; i < int(sizeof(Page) / sizeof(uint4)); i += kLayerThreads) target[i] = __ldcg(source + i);
      sync();
    }
    // q, and the newest token.
    constexpr int kVectors = Group * HeadDim / 4;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int of_warp = warp * kLanes; of_warp < kVectors; of_warp += kLayerThreads) {
      int const item = of_warp + lane;
      TaggedVector found[1];
      receive(tag, found, [&](int) {
        return item < kVectors ? args.exchange.q + work.sequence_head() * kVectors + item : nullptr;
      });
      if (item < kVectors) {
        *reinterpret_cast<uint2*>(attention.q + 4 * item) = make_uint2(uint32_t(found[0].words[0]), uint32_t(found[0].words[1]));
      }
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int of_warp = (kLayerWarps - 1 - warp) * kLanes; has_newest && of_warp < Codes::kCount; of_warp += kLayerThreads) {
      int const item = of_warp + lane;
      TaggedWord found[1];
      receive(tag, found, [&](int) {
        return item < Codes::kCount ? args.exchange.codes + work.sequence_head() * Codes::kCount + item : nullptr;
      });
      if (item < Codes::kCount) {
        Codes::put(reinterpret_cast<char*>(&attention.newest), (work.length - 1) % PageSize, item, uint32_t(found[0]));
      }
    }
    sync();
    {
      Fragments fragments;
      Tokens::begin(attention.q - work.sequence_head() * Group * HeadDim, work, fragments);
      float const scale = Tokens::score_scale({layer.kv_copy}, args.softmax_scale);
      int const first_token = warp % kSetWarps * Tokens::kTokens;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int page = work.first; page < last; ++page) {
        bool const in_ring = page != newest;
        if (cursor.set == warp / kSetWarps) {
          if (in_ring) wait(shared.full[cursor.slot], cursor.parity);
          void const* const stored = in_ring ? static_cast<void const*>(shared.ring[cursor.slot]) : &attention.newest;
          int const tokens = work.length - page * PageSize - first_token;
          if (tokens > 0) Tokens::attend(*static_cast<Page const*>(stored), first_token, tokens, scale, fragments);
          asm volatile("" ::: "memory");  // no read of the slot comes later
          __syncwarp();
          if (in_ring && lane == 0) shared.empty[cursor.slot].arrive();
        }
        if (in_ring) cursor.advance();
      }
      Tokens::end(fragments);
      attention.warps.publish(warp, lane, fragments);
    }
    sync();

    int const first_row = (work.sequence_head() * args.splits + work.split) * Group;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int item = thread; item < kHeadQuads; item += kLayerThreads) {
      int const head = item / kQuads, quad = item % kQuads;
      float4 const* const out = reinterpret_cast<float4 const*>(&attention.warps.out[0][head][4 * quad]);
      PartialAttention const total = combine(kAttending, &attention.warps.max_sum[0][head], Group, out,
                                             sizeof(attention.warps.out[0]) / sizeof(float4));
      if (work.splits == 1) {
        store(args, layer, work, item, total, tag);
      } else {
        TaggedVector* const target = args.exchange.partial + (size_t(first_row) * kQuads + item) * 2;
        send(target, __float_as_uint(total.out.x), __float_as_uint(total.out.y), tag);
        send(target + 1, __float_as_uint(total.out.z), __float_as_uint(total.out.w), tag);
        if (quad == 0) send(args.exchange.max_sum + first_row + head, __float_as_uint(total.max), __float_as_uint(total.sum), tag);
      }
    }
  }

  // A block that has a split of a sequence and head combines its share of the features, of all splits in order.
  CUTLASS_DEVICE static void combine_splits(Shared& shared, Arguments const& args, Layer const& layer, uint32_t tag) {
    Work const& work = shared.work;
    int const share = (kHeadQuads + work.splits - 1) / work.splits, first = work.split * share;
    int const quads = min(kHeadQuads - first, share);  // none or fewer of the last ones
    if (quads <= 0) return;
    Splits& splits = shared.attention.splits;
    size_t const first_row = work.sequence_head() * args.splits * Group;
    int const items = quads * work.splits, thread = thread_now();
    for (int of_warp = thread / kLanes * kLanes; of_warp < items; of_warp += kLayerThreads) {
      int const item = of_warp + thread % kLanes, split = item / quads, quad = first + item % quads;
      TaggedVector found[2];
      receive(tag, found, [&](int i) {
        return item < items ? args.exchange.partial + ((first_row + split * Group) * kQuads + quad) * 2 + i : nullptr;
      });
      if (item < items) {
        splits.out[item] = make_float4(__uint_as_float(uint32_t(found[0].words[0])), __uint_as_float(uint32_t(found[0].words[1])),
                                       __uint_as_float(uint32_t(found[1].words[0])), __uint_as_float(uint32_t(found[1].words[1])));
      }
    }
    int const statistics = work.splits * Group;
    for (int of_warp = (kLayerWarps - 1 - thread / kLanes) * kLanes; of_warp < statistics; of_warp += kLayerThreads) {
      int const item = of_warp + thread % kLanes;
      TaggedVector found[1];
      receive(tag, found, [&](int) { return item < statistics ? args.exchange.max_sum + first_row + item : nullptr; });
      if (item < statistics) {
        splits.max_sum[item / Group][item % Group] =
            make_float2(__uint_as_float(uint32_t(found[0].words[0])), __uint_as_float(uint32_t(found[0].words[1])));
      }
    }
    sync();
    for (int item = thread; item < quads; item += kLayerThreads) {
      store(args, layer, work, first + item,
            combine(work.splits, &splits.max_sum[0][(first + item) / kQuads], Group, splits.out + item, quads), tag);
    }
  }

  CUTLASS_DEVICE static void store(Arguments const& args, Layer const& layer, Work const& work, int item,
                                   PartialAttention const& total, uint32_t tag) {
    float const inverse = Tokens::normalised({layer.kv_copy}, total.sum);
    send(args.exchange.attended + work.sequence_head() * kHeadQuads + item,
         pack_bf16x2(total.out.x * inverse, total.out.y * inverse), pack_bf16x2(total.out.z * inverse, total.out.w * inverse), tag);
  }
};

}  // namespace futransformer
