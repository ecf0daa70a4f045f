// The thread that streams weights and pages through the ring of the launch for all layers (decode_layers.cuh).
#pragma once

#include <cutlass/arch/barrier.h>

#include "barrier.cuh"
#include "bulk_copy.cuh"
#include "decode_layers_shared.cuh"

namespace futransformer {

// `T`: DecodeLayersTraits.
template <class T>
class DecodeLayersStream {
  using Weight = typename T::Weight;
  using Tokens = typename T::Tokens;
  using Page = typename T::Page;
  using Barrier = typename T::Barrier;
  using Cursor = typename T::Cursor;
  using Work = typename T::Work;
  using Shared = typename T::Shared;
  using Arguments = typename T::Arguments;

  // The slot that is filled next, and those on their way to it.
  struct Ring {
    Cursor cursor, arriving;
    int under_way = 0;

    // Wait for room in the next slot, and until few enough are under way: twice as many while most of the ring is empty, for
    // then the other warps wait for memory, else for one another.
    CUTLASS_DEVICE void next(Shared& shared, Arguments const& args) {
      if constexpr (T::Clocked) {
        args.clocks[blockIdx.x].copying -= clocks_without_copies(shared, [&] { return shared.empty[cursor.slot].test_wait(cursor.parity ^ 1); });
      }
      wait(shared.empty[cursor.slot], cursor.parity ^ 1);
      Cursor const later = cursor.ahead(T::Slots / 2 + 1);
      bool const empty = shared.empty[later.slot].test_wait(later.parity ^ 1);
      int const most = empty ? T::kMostInFlight : T::InFlight;
      CUTLASS_PRAGMA_NO_UNROLL
      for (; under_way >= most; --under_way, arriving.advance()) wait(shared.full[arriving.slot], arriving.parity);
    }
    // Ask until `done`; the clocks since all copies were seen to have arrived.
    template <class Done>
    CUTLASS_DEVICE long long clocks_without_copies(Shared const& shared, Done const& done) {
      long long arrived = 0;
      CUTLASS_PRAGMA_NO_UNROLL
      while (!done()) {
        if (arrived == 0 && none_under_way(shared)) arrived = clock64();
      }
      return arrived == 0 ? 0 : clock64() - arrived;
    }
    CUTLASS_DEVICE bool none_under_way(Shared const& shared) {
      for (; under_way > 0; --under_way, arriving.advance()) {
        if (!shared.full[arriving.slot].test_wait(arriving.parity)) return false;
      }
      return true;
    }
    CUTLASS_DEVICE void advance() {
      cursor.advance();
      ++under_way;
    }
  };

 public:
  CUTLASS_DEVICE static void run(Shared& shared, Arguments const& args) {
    Ring ring;
    if constexpr (T::Clocked) args.clocks[blockIdx.x].copying = -clock64();  // no register is left to keep it
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 0; step < args.num_layers * T::kProjections; ++step) {
      int const projection = step % T::kProjections;
      Layer const& layer = args.layers[step / T::kProjections];
      unsigned char const* const weight = (&layer.qkv)[projection];
      if (projection == 1) stream_pages(shared, ring, args, layer);
      Share const share = shared.shares[projection];
      int const tile_bytes = share.k / Weight::kUnitK * Weight::kUnitBytes;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int window = 0; window < share.k; window += T::WindowK) {
        int const stop = min(share.k, window + T::WindowK);
        CUTLASS_PRAGMA_NO_UNROLL
        for (int tile = share.first; tile < share.last; tile += kPairTiles) {
          CUTLASS_PRAGMA_NO_UNROLL
          for (int k = window; k < stop; k += kSlotK) {
            int const bytes = min(share.k - k, kSlotK) / Weight::kUnitK * Weight::kUnitBytes;
            int const tiles = share.last - tile < kPairTiles ? 1 : kPairTiles;
            unsigned char const* const source =
                weight + size_t(tile) * tile_bytes + k / Weight::kUnitK * Weight::kUnitBytes;
            ring.next(shared, args);
            Barrier& full = shared.full[ring.cursor.slot];
            unsigned char* const slot = shared.ring[ring.cursor.slot];
            full.arrive_and_expect_tx(tiles * bytes);
            CUTLASS_PRAGMA_NO_UNROLL
            for (int i = 0; i < tiles; ++i) load_bulk_once(slot + i * T::kChunkBytes, source + i * tile_bytes, bytes, full);
            ring.advance();
          }
        }
      }
    }
    if constexpr (T::Clocked) {
      while (!ring.none_under_way(shared)) {
      }
      args.clocks[blockIdx.x].copying += clock64();
    }
  }

 private:
  CUTLASS_DEVICE static void stream_pages(Shared& shared, Ring& ring, Arguments const& args, Layer const& layer) {
    Work const& work = shared.work;
    int const newest = work.newest(), last = work.last;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int page = work.first; page < last; ++page) {
      if (page == newest) break;  // of this launch's own token: what attends to it fetches it
      int const row = (args.block_table[page] * T::KvHeads + work.head) * T::PageSize;
      ring.next(shared, args);
      Barrier& full = shared.full[ring.cursor.slot];
      full.arrive_and_expect_tx(sizeof(Page));
      Tokens::load({layer.kv_copy}, row, full, *reinterpret_cast<Page*>(shared.ring[ring.cursor.slot]));
      ring.advance();
    }
  }
};

}  // namespace futransformer
