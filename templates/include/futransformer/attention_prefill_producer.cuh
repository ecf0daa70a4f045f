// The producer of prefill attention: one warp that finds the items and keeps the rings of Q, K and V full by TMA.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm90_tma.hpp>

#include "attention_prefill_shared.cuh"
#include "barrier.cuh"

namespace futransformer {

// `T`: AttentionPrefillTraits.
template <class T>
class AttentionPrefillProducer {
  using Element = typename T::Element;
  using Tiles = typename T::Tiles;
  using PipelineState = typename T::PipelineState;
  using FullBarrier = typename T::FullBarrier;
  using Items = typename T::Items;
  using Work = typename T::Work;
  using Barriers = typename T::Barriers;
  using SharedStorage = typename T::SharedStorage;
  using Arguments = typename T::Arguments;

 public:
  // One warp; its first lane issues the copies.
  CUTLASS_DEVICE static void run(SharedStorage& shared, CUtensorMap const& map_q, CUtensorMap const& map_k,
                                 CUtensorMap const& map_v, Arguments const& arguments) {
    bool const leads = threadIdx.x == 0;
    if (leads) {
      for (CUtensorMap const* map : {&map_q, &map_k, &map_v}) {
        cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(map));
      }
    }
    Barriers& barriers = shared.barriers;
    PipelineState k(0, 1, 0);  // a fresh ring is empty: its "previous" phase has passed
    PipelineState v(0, 1, 0);
    typename T::CodeState codes(0, 1, 0);
    auto load_codes = [&](CUtensorMap const& map, typename T::CodeKind kind, PageRows const& pages) {
      wait(T::codes(shared).empty[codes.index()], codes.phase());
      if (leads) load_tile_of_codes(map, T::codes(shared), codes.index(), kind, pages);
      ++codes;
    };
    auto load_k = [&](PageRows const& pages) {
      if constexpr (T::kCodes) {
        load_codes(map_k, T::CodeKind::kKeys, pages);
      } else {
        wait(barriers.k_empty[k.index()], k.phase());
        if (leads) load_tile(map_k, barriers.k_full[k.index()], shared.k.data() + k.index() * T::kTileElements, pages);
      }
      ++k;
    };
    auto load_v = [&](PageRows const& pages) {
      if constexpr (T::kCodes) {
        load_codes(map_v, T::CodeKind::kValues, pages);
      } else {
        wait(barriers.v_empty[v.index()], v.phase());
        if (leads) load_tile(map_v, barriers.v_full[v.index()], shared.v.data() + v.index() * T::kTileElements, pages);
      }
      ++v;
    };

    Tickets tickets(arguments.tickets);
    Items items(arguments.cu_seqlens_q, arguments.seqlens_k, arguments.sequences);
    typename Items::Item item;
    PageRows pages;  // of the tile whose K is on its way and whose V is not yet
    int count = 0;   // items so far
    CUTLASS_PRAGMA_NO_UNROLL
    for (; items.find(tickets.item(), item); tickets.next()) {
      tickets.ask();
      Work const work = describe(arguments, item);
      int const visible = visible_keys(work.sees, min(work.seqlen_k, arguments.block_table_stride * T::PageSize));
      int const stage = count % T::kQStages;
      wait(barriers.q_empty[stage], count / T::kQStages % 2 ^ 1);
      if (leads) {
        shared.work[count % T::kWorkSlots] = work;
        barriers.q_full[stage].arrive_and_expect_tx(T::kQBytes);
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < T::kColumnBlocks; ++block) {
          Element* const box = shared.q.data() + stage * T::TileM * T::HeadDim + Tiles::box_offset(T::TileM, block, 0);
          load_box(map_q, barriers.q_full[stage], box, work.head * T::HeadDim + block * T::kBoxColumns, work.first_row);
        }
      }
      int const* const table = arguments.block_table + int64_t(item.sequence) * arguments.block_table_stride;
      int const kv_head = item.head / (T::Heads / T::KvHeads);
      // In the order of use: the scores of a tile are computed before the output of the tile before it.
      CUTLASS_PRAGMA_NO_UNROLL
      for (int tile = work.tiles - 1; tile >= 0; --tile) {
        PageRows next;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < T::kPagesPerTile; ++i) {
          int const page = tile * T::kPagesPerTile + i;
          // A box that lies outside the tensor is filled with zeros.
          int const box = page * T::PageSize < visible ? table[page] * T::KvHeads + kv_head : -1;
          next.row[i] = box * T::PageSize;
        }
        load_k(next);
        if (k.count() > 1) load_v(pages);
        pages = next;
      }
      ++count;
    }
    tickets.finish(items.size());
    if (count > 0) load_v(pages);
    // The end is an item without tiles, with an empty tile of K, for which the consumers need no case of their own.
    wait(barriers.q_empty[count % T::kQStages], count / T::kQStages % 2 ^ 1);
    if constexpr (T::kCodes) {
      wait(T::codes(shared).empty[codes.index()], codes.phase());
    } else {
      wait(barriers.k_empty[k.index()], k.phase());
    }
    if (leads) {
      shared.work[count % T::kWorkSlots].tiles = 0;
      barriers.q_full[count % T::kQStages].arrive();
      if constexpr (T::kCodes) {
        T::codes(shared).kind[codes.index()] = T::CodeKind::kEnd;
        T::codes(shared).full[codes.index()].arrive();
      } else {
        barriers.k_full[k.index()].arrive();
      }
    }
  }

 private:
  // Rows of the tensor maps of K and V at which the pages of one tile begin.
  struct PageRows {
    int row[T::kPagesPerTile];
  };

  CUTLASS_DEVICE static void load_box(CUtensorMap const& map, FullBarrier& full, void* target, int column, int row) {
    uint64_t const hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    cute::SM90_TMA_LOAD_2D::copy(&map, reinterpret_cast<uint64_t*>(&full), hint, target, column, row);
  }

  // A tile of K or V: kPagesPerTile pages, each kColumnBlocks boxes.
  CUTLASS_DEVICE static void load_tile(CUtensorMap const& map, FullBarrier& full, Element* target,
                                       PageRows const& pages) {
    full.arrive_and_expect_tx(T::kTileBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < T::kColumnBlocks; ++block) {
      CUTLASS_PRAGMA_UNROLL
      for (int page = 0; page < T::kPagesPerTile; ++page) {
        Element* const box = target + Tiles::box_offset(T::TileN, block, page * T::PageSize);
        load_box(map, full, box, block * T::kBoxColumns, pages.row[page]);
      }
    }
  }

  // The same of codes: a page is one box of 128 columns.
  CUTLASS_DEVICE static void load_tile_of_codes(CUtensorMap const& map, typename T::Codes& codes, int stage,
                                                typename T::CodeKind kind, PageRows const& pages) {
    constexpr int kTokens = 128 / T::HeadDim;  // of a row
    codes.kind[stage] = kind;
    codes.full[stage].arrive_and_expect_tx(T::kTileBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int page = 0; page < T::kPagesPerTile; ++page) {
      uint8_t* const box = codes.tiles[stage] + page * T::PageSize * T::HeadDim;
      load_box(map, codes.full[stage], box, 0, pages.row[page] / kTokens);
    }
  }

  CUTLASS_DEVICE static Work describe(Arguments const& arguments, typename Items::Item const& item) {
    int const begin = arguments.cu_seqlens_q[item.sequence];
    int const seqlen_q = arguments.cu_seqlens_q[item.sequence + 1] - begin;
    int const room = arguments.block_table_stride * T::PageSize;
    Work work;
    work.seqlen_k = arguments.seqlens_k[item.sequence];
    work.sees = item.first_query + 1 + work.seqlen_k - seqlen_q;
    work.tiles = max(1, (visible_keys(work.sees, min(work.seqlen_k, room)) + T::TileN - 1) / T::TileN);
    work.head = item.head;
    work.first_row = begin + item.first_query;
    work.rows = seqlen_q - item.first_query;
    work.lacks_pages = work.seqlen_k > room;
    return work;
  }

  // Of `keys` that exist, those that the item's last query sees; zero or less: none.
  CUTLASS_DEVICE static int visible_keys(int sees, int keys) { return min(keys, sees + T::TileM - 1); }
};

}  // namespace futransformer
