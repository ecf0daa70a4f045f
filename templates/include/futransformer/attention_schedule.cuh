// Which queries a block of prefill attention computes, and in what order.
//
// An item is one tile of queries of one head. Its level is the distance from the sequence's first key to its last
// visible one, in tiles of queries: what it costs. All blocks share one list of items: levels from the highest down; of
// a level, the sequences in order; of a sequence, the heads in order, so that heads which read the same K and V run
// side by side. Block b begins with item b; each item after those goes to the block that asks first, so that the blocks
// end together (handed out in fixed rounds, 4 x 2048 tokens of 32 heads would take 136 tiles of keys instead of 132).
// The list itself is not stored anywhere: a warp finds each item from the sequences' lengths.
#pragma once

#include <climits>

#include <cutlass/cutlass.h>

namespace futransformer {

// Walks the list forwards. All members are called by a whole warp, whose lanes share out the sequences.
template <int Heads, int TileM>
class WorkList {
 public:
  struct Item {
    int head;
    int sequence;
    int first_query;
  };

  CUTLASS_DEVICE WorkList(int const* cu_seqlens_q, int const* seqlens_k, int sequences)
      : cu_seqlens_q_(cu_seqlens_q), seqlens_k_(seqlens_k), sequences_(sequences) {}

  // The number of items, once `find` has returned false.
  CUTLASS_DEVICE int size() const { return end_; }

  // Find item `index`, not before the last one asked for; false past the end.
  CUTLASS_DEVICE bool find(int index, Item& item) {
    while (index >= end_) {
      if (!next_level()) return false;
    }
    item.head = (index - begin_) % Heads;
    item.sequence = sequence_of((index - begin_) / Heads);
    Levels const levels = levels_of(item.sequence);
    item.first_query = (level_ - levels.lowest) * TileM;
    return true;
  }

 private:
  static constexpr unsigned kWarp = 0xffffffffu;

  // A sequence's tiles have the levels lowest .. highest; without queries, highest < lowest.
  struct Levels {
    int lowest;
    int highest;

    CUTLASS_DEVICE bool contain(int level) const { return lowest <= level && level <= highest; }
  };

  CUTLASS_DEVICE Levels levels_of(int sequence) const {
    if (sequence >= sequences_) return {0, -1};
    int const queries = cu_seqlens_q_[sequence + 1] - cu_seqlens_q_[sequence];
    int const highest = (seqlens_k_[sequence] + TileM - 1) / TileM;
    return {highest - (queries + TileM - 1) / TileM + 1, highest};
  }

  // Go to the next level down that holds any item.
  CUTLASS_DEVICE bool next_level() {
    int next = INT_MIN;
    for (int sequence = lane(); sequence < sequences_; sequence += 32) {
      Levels const levels = levels_of(sequence);
      int const candidate = min(levels.highest, level_ - 1);
      if (candidate >= levels.lowest) next = max(next, candidate);
    }
    next = __reduce_max_sync(kWarp, next);
    if (next == INT_MIN) return false;
    level_ = next;
    int tiles = 0;
    for (int first = 0; first < sequences_; first += 32) tiles += __popc(members(first));
    begin_ = end_;
    end_ += tiles * Heads;
    return true;
  }

  // Which of the 32 sequences from `first` on have a tile of this level, one bit each.
  CUTLASS_DEVICE unsigned members(int first) const {
    return __ballot_sync(kWarp, levels_of(first + lane()).contain(level_));
  }

  // The sequence that holds the level's tile number `rank`.
  CUTLASS_DEVICE int sequence_of(int rank) const {
    int first = 0;
    unsigned mask = members(first);
    while (rank >= __popc(mask)) {
      rank -= __popc(mask);
      first += 32;
      mask = members(first);
    }
    unsigned const before = mask & ((1u << lane()) - 1);
    bool const is_it = (mask >> lane() & 1) && __popc(before) == rank;
    return first + __ffs(__ballot_sync(kWarp, is_it)) - 1;
  }

  CUTLASS_DEVICE static int lane() { return threadIdx.x % 32; }

  int const* cu_seqlens_q_;
  int const* seqlens_k_;
  int sequences_;
  int level_ = INT_MAX;
  int begin_ = 0;  // items of this level
  int end_ = 0;
};

// Hands out items. `counter` is zero before and after the launch. All members are called by a whole warp, one a block.
class Tickets {
 public:
  CUTLASS_DEVICE explicit Tickets(int* counter) : counter_(counter) {}

  // The item to compute now, or one past the end of the list.
  CUTLASS_DEVICE int item() const { return item_; }

  // Ask for the next item when this one is begun, and go to it when it is needed: the answer takes a while.
  CUTLASS_DEVICE void ask() {
    if (threadIdx.x % 32 == 0) ticket_ = atomicAdd(counter_, 1);
  }
  CUTLASS_DEVICE void next() { item_ = gridDim.x + __shfl_sync(0xffffffffu, ticket_, 0); }

  // Every item begun has asked once: the last of `items` tickets puts the counter back, when all have asked.
  CUTLASS_DEVICE void finish(int items) {
    if (threadIdx.x % 32 == 0 && ticket_ == items - 1) *counter_ = 0;
  }

 private:
  int* counter_;
  int item_ = blockIdx.x;
  int ticket_ = -1;  // the first lane's
};

}  // namespace futransformer
