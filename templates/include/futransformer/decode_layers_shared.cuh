// What the parts of the launch for all layers (decode_layers.cuh) share: sizes, shared memory, arguments, the walk of the ring.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>

#include "attention_decode.cuh"
#include "epilogue_kv_decode.cuh"
#include "epilogue_tagged.cuh"
#include "fragment.cuh"
#include "numeric.cuh"
#include "staged_activations.cuh"
#include "tagged.cuh"

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

constexpr int kPairTiles = 2;  // row tiles that are multiplied at a time
constexpr int kSets = 4;       // of warps, which take slots in turn
constexpr int kSetWarps = 4;
constexpr int kPageSets = 2;  // of the sets, which take pages in turn: there is no room for more results
constexpr int kWarpK = kPieceK;             // k that a warp has of a slot
constexpr int kSlotK = kSetWarps * kWarpK;  // k of a slot
constexpr int kLayerWarps = kSets * kSetWarps;
constexpr int kLayerThreads = kLayerWarps * kLanes;  // that multiply
// One thread streams. It is launched with 127 others, which end at once, because registers change hands by warpgroups: of 96
// that a launch of so many threads has at most, attention would spill.
constexpr int kStreamThreads = 128;
constexpr int kLayerRegisters = 112, kStreamRegisters = 32;

// A projection [N, K], shared by `Blocks` blocks in groups of GroupTiles row tiles.
template <int N, int K, int GroupTiles, int Blocks>
struct LayerProjection {
  static constexpr int kN = N, kK = K;
  static constexpr int kGroups = N / (kTileRows * GroupTiles);
  static constexpr int kMostTiles = (kGroups + Blocks - 1) / Blocks * GroupTiles;
  static_assert(N % (kTileRows * GroupTiles) == 0, "row tiles must divide into groups");

  CUTLASS_DEVICE static int first_tile(int block) { return kGroups * block / Blocks * GroupTiles; }
};

// A block's share of one: row tiles [first, last), all of K.
struct Share {
  int first, last, k;

  CUTLASS_DEVICE int pairs() const { return (last - first) * (kTileRows / 2); }  // of columns
  CUTLASS_DEVICE int column(int pair) const { return first * kTileRows + 2 * pair; }
};

// Where blocks leave for one another what a layer makes.
struct Exchange {
  TaggedVector* q;         // [QFeatures]
  TaggedWord* codes;       // [KvHeads, TokenCodes::kCount]
  TaggedVector* partial;   // [KvHeads, splits, Group, HeadDim] float32
  TaggedVector* max_sum;   // [KvHeads, splits, Group]
  TaggedVector* attended;  // [QFeatures]
  TaggedVector* x_middle;  // [Hidden]
  TaggedVector* h;         // [Intermediate]
  TaggedVector* x_end;     // [Hidden]
};

// Of a build for profiling: clocks of its multiprocessor that a block took, and those of them with a bulk copy under way.
struct BlockClocks {
  long long total, copying;
};

// One kernel's sizes, and its shared memory; the parameter `T` of its parts.
template <class Element, class Qkv_, class O_, class GateUp_, class Down_, class Format, int KvHeads_, int Group_, int HeadDim_,
          int PageSize_, int Blocks_, int Slots_, int InFlight_, int WindowK_, bool Clocked_>
struct DecodeLayersTraits {
  using Qkv = Qkv_;
  using O = O_;
  using GateUp = GateUp_;
  using Down = Down_;
  static constexpr int KvHeads = KvHeads_;
  static constexpr int Group = Group_;
  static constexpr int HeadDim = HeadDim_;
  static constexpr int PageSize = PageSize_;
  static constexpr int Blocks = Blocks_;
  static constexpr int Slots = Slots_;
  static constexpr int InFlight = InFlight_;
  // Copies may arrive in another order than they were asked for: were a slot of each set not at rest, a set could take what a
  // slot held two passes before for what it waits for.
  static constexpr int kMostInFlight = 2 * InFlight < Slots - kSets ? 2 * InFlight : Slots - kSets;
  static constexpr int WindowK = WindowK_;
  static constexpr bool Clocked = Clocked_;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  using Tokens = DecodeTokens<Format, Group, HeadDim, PageSize>;
  using Page = typename Tokens::Page;
  using Fragments = typename Tokens::Fragments;
  using Codes = TokenCodes<Format, HeadDim>;
  static constexpr int kHidden = O::kN, kQueries = KvHeads * Group * HeadDim, kKeys = KvHeads * HeadDim;
  static constexpr int kWriters = O::kGroups < Blocks ? O::kGroups : Blocks;  // of o, and of down
  using Copy = CopyKvOfRow<kQueries, KvHeads, HeadDim, PageSize, Format, SentToAttention<kQueries, KvHeads, HeadDim, Format>>;
  using Weight = WeightFragment<Element>;

  static constexpr int kThreads = kLayerThreads + kStreamThreads;
  static constexpr int kPageWarps = PageSize / Tokens::kTokens;  // of a set
  static constexpr int kAttending = kPageSets * kPageWarps;
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
  // No part of a slot.
  static constexpr bool kWhole = Qkv::kK % kSlotK == 0 && O::kK % kSlotK == 0 && Down::kK % kSlotK == 0;
  // Whether a set may have other slots of a block's second pair of row tiles than of its first, in any window.
  template <class P>
  static constexpr bool kUneven = P::kMostTiles > kPairTiles && (P::kK % (kSets * kSlotK) != 0 ||
                                                                 (P::kK > WindowK && WindowK % (kSets * kSlotK) != 0));
  static constexpr bool kAnyUneven = kUneven<Qkv> || kUneven<O> || kUneven<GateUp> || kUneven<Down>;
  using Staged = StagedActivations<kWindow, Weight::kUnitK, kWhole>;
  static_assert(WindowK % kSlotK == 0, "a window is whole slots");
  static_assert(kPageWarps == kSetWarps, "a set attends to a page");

  using Results = WarpResults<Tokens, kAttending, Group, HeadDim>;
  // What a block combines of a head: its share of the quads of features, of every split.
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

  // A block's share of attention: pages [first, last) of a key/value head, `split` of so many; of no split nothing.
  // Of a length that is none, or more than the block table can name, split 0 of one has no pages.
  struct Work {
    int head, split, splits, length, first, last;
    CUTLASS_DEVICE int sequence_head() const { return head; }
    CUTLASS_DEVICE int newest() const { return (length - 1) / PageSize; }
  };

  struct Shared {
    alignas(128) unsigned char ring[Slots][kSlotBytes];
    union {
      Staged x;
      Attended attention;
    };
    alignas(16) float partial[kLayerWarps][kColumns + 4];
    alignas(16) float squares[kLayerWarps];  // of the x that each warp has read
    int position, slot;  // of the newest token
    Share shares[kProjections];
    Work work;
    alignas(16) Barrier full[Slots];
    Barrier empty[Slots];
  };
  static constexpr int kSharedBytes = sizeof(Shared);

  struct Arguments {
    Layer const* layers;
    int num_layers;
    bf16* x;
    float* residual;
    float rms_norm_eps;
    float const* rope_table;
    int const* positions;
    long long const* slots;
    float* sumsq_out;
    int const* block_table;
    int block_table_stride;  // pages that it names
    int const* seqlens_k;
    float softmax_scale;
    int splits;  // at most kMostSplits
    int pages_per_split;
    Exchange exchange;
    uint32_t* epoch;  // a launch's tags are its epoch + 1 .. num_layers
    BlockClocks* clocks;  // [blocks]; null unless Clocked
  };

  // The slot at hand, the parity of how often the ring has been passed, and whose turn it is.
  struct Cursor {
    int slot = 0;
    uint32_t parity = 0;
    int set = 0;
    // At most a ring further.
    CUTLASS_DEVICE Cursor ahead(int slots) const {
      Cursor later = {slot + slots, parity, (set + slots) % kSets};
      if (later.slot >= Slots) {
        later.slot -= Slots;
        later.parity ^= 1;
      }
      return later;
    }
    CUTLASS_DEVICE void advance() { *this = ahead(1); }
    // Any number of slots further.
    CUTLASS_DEVICE Cursor after(int slots) const {
      Cursor later = past(slots);
      later.set = (set + slots) % kSets;
      return later;
    }
    // The same of pages, which do not change whose turn the next slot of weights is.
    CUTLASS_DEVICE void skip_page() {
      if (++slot == Slots) {
        slot = 0;
        parity ^= 1;
      }
    }
    CUTLASS_DEVICE Cursor past(int pages) const {
      unsigned const passed = unsigned(slot + pages) / Slots;
      return {slot + pages - int(passed) * Slots, parity ^ (passed & 1), set};
    }
    // Slots until it is that set's turn.
    CUTLASS_DEVICE int until(int its_turn) const { return (its_turn - set + kSets) % kSets; }
  };

  // Of the warps that multiply.
  CUTLASS_DEVICE static void sync() { cutlass::arch::NamedBarrier::sync(kLayerThreads, 1); }
};

}  // namespace futransformer
