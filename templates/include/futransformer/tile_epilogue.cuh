// The end of a tile: the sums that a thread of wgmma holds, handed to the epilogue chain.
//
// A thread of an accumulator holds columns 8 j + 2 (lane % 4) + {0, 1} of its rows, eight apart in a wgmma row of 64.
// W's rows were permuted so that 8 (16 for SwiGLU) consecutive sums of a thread are eight consecutive output columns,
// and a quad's are 32: a group.
//
// Nothing else hides the end of a cooperative tile, so what the chain reads from memory is asked for ahead: fetch() and
// begin() take what it keeps for a row, ask() as many operands as registers have room for, and finish() asks for the
// rest while it consumes them. Operands that repeat along a row (RoPE's angles, with every head) are asked for once.
//
// A chain that copies K and V takes whole units of columns once their sums are done with. They stay behind as BF16, in
// half the registers, and a loop takes them from the first place and moves the others up: unrolled, it would be 60 to 130
// KB of instructions. Beside 192 sums such a chain has to save registers: it fetches a row at a time, asks for the second
// operands behind the first columns, and leaves out what is not there column by column (a branch around a whole row needs
// values for it where the row is not, before its sums are gone).
#pragma once

#include <type_traits>

#include <cutlass/cutlass.h>

#include "epilogue.cuh"

namespace futransformer {

// `Atoms` wgmma rows of 64 a consumer, of each of which a thread has `Halves` rows; tiles of `Width` columns (of
// accumulators), the last of which may pass `Columns` where `Ragged`; `Registers` that are free for operands.
template <class Epilogue, int Atoms, int Halves, int Width, int Columns, bool Ragged, int Registers>
class TileEpilogue {
  using Operands = typename Epilogue::Operands;
  static constexpr int kWidth = Epilogue::kWidth;
  static constexpr int kGroupWidth = 4 * kWidth;  // accumulator columns of a group
  static constexpr int kGroups = Width / kGroupWidth;
  static constexpr int kLines = Atoms * Halves;  // rows of a thread
  static constexpr int kPeriod = (Epilogue::kPeriod + 31) / 32;  // groups after which operands repeat
  static_assert(Epilogue::kPeriod == 1 || Epilogue::kPeriod % 32 == 0, "operands repeat with whole groups");
  static constexpr int kDistinct = kPeriod < kGroups ? kPeriod : kGroups;
  static constexpr int kSteps = kLines * kDistinct;
  static constexpr int kRoom = Epilogue::kOperands > 0 ? Registers / Epilogue::kOperands : kSteps;
  static constexpr int kAhead = kRoom < 1 ? 1 : kRoom < kSteps ? kRoom : kSteps;
  static constexpr int kKeys = Epilogue::kQueryColumns, kValues = kKeys + Epilogue::kKeyColumns;  // their first columns
  static constexpr bool kCopies = Epilogue::kUnit > 0, kSaves = kCopies && Registers <= 0;
  static constexpr int kUnitGroups = kCopies ? Epilogue::kUnit / 32 : 1;
  static_assert(kGroups % kUnitGroups == 0, "a tile has whole units of K and V");

  Epilogue const& epilogue_;
  int const row_, tile_, rows_;  // this thread's first row, the tile's index along N, the problem's rows
  typename Epilogue::Fetched fetched_[kLines];
  typename Epilogue::Row lines_[kLines];
  Operands ahead_[kAhead];
  uint4 kept_[kLines][kCopies ? kGroups : 1];  // of K and V that are copied, in BF16

 public:
  CUTLASS_DEVICE TileEpilogue(Epilogue const& epilogue, int row, int tile, int rows)
      : epilogue_(epilogue), row_(row), tile_(tile), rows_(rows) {}

  CUTLASS_DEVICE void fetch() {
    CUTLASS_PRAGMA_UNROLL
    for (int line = 0; line < kLines && !kSaves; ++line) fetch(line);
  }

  // After fetch(). All lanes of the warp.
  CUTLASS_DEVICE void begin() {
    CUTLASS_PRAGMA_UNROLL
    for (int line = 0; line < kLines; ++line) {
      if constexpr (kSaves) fetch(line);
      lines_[line] = epilogue_.template begin<4>(row_at(line), row_at(line) < rows_, fetched_[line]);
    }
  }

  CUTLASS_DEVICE void ask() {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kAhead; ++step) ask(step);
  }

  // All lanes of the warp. `accumulators` [Atoms][Width / 8][2 rows][2 columns]; of one row alone where Halves is 1.
  template <class Accumulators>
  CUTLASS_DEVICE void finish(Accumulators const& accumulators) {
    int const first = first_column(0), end = first_column(kGroups);
    if constexpr (kCopies) {
      if (end > kKeys) {
        walk<int>(accumulators);
        copy();
      } else {
        walk<PartColumn<Part::kQuery>>(accumulators);
      }
      return;
    }
    // A path each where registers are left: beside 192 sums three paths would spill.
    if constexpr (Epilogue::kQueryColumns > 0 && Registers > 0) {
      if (end <= kKeys) return walk<PartColumn<Part::kQuery>>(accumulators);
      if (first >= kKeys && end <= kValues) return walk<PartColumn<Part::kKey>>(accumulators);
      if (first >= kValues) return walk<PartColumn<Part::kValue>>(accumulators);
    }
    walk<int>(accumulators);
  }

 private:
  CUTLASS_DEVICE void fetch(int line) {
    fetched_[line] = epilogue_.template fetch<4>(row_at(line), row_at(line) < rows_);
  }

  template <class Column, class Accumulators>
  CUTLASS_DEVICE void walk(Accumulators const& accumulators) {
    constexpr bool kKeeps = kCopies && !std::is_same_v<Column, PartColumn<Part::kQuery>>;
    CUTLASS_PRAGMA_UNROLL
    for (int line = 0; line < kLines; ++line) {
      if (kCopies || row_at(line) < rows_) {  // then so are the lines before it
        CUTLASS_PRAGMA_UNROLL
        for (int distinct = 0; distinct < kDistinct; ++distinct) {
          int const step = line * kDistinct + distinct;
          bool const early = !kSaves || step > 0, more = step + kAhead < kSteps;
          Operands const operands = ahead_[step % kAhead];
          if (early && more) ask(step + kAhead);
          CUTLASS_PRAGMA_UNROLL
          for (int group = distinct; group < kGroups; group += kDistinct) {
            if (kCopies || inside(group)) apply<Column, kKeeps>(accumulators, operands, line, group);
            if (!early && more && group == distinct) ask(step + kAhead);
          }
        }
      }
      epilogue_.template end<4>(lines_[line], row_at(line), tile_, row_at(line) < rows_ && inside(0));
    }
  }

  CUTLASS_DEVICE void copy() {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int group = 0; group < kGroups; group += kUnitGroups) {
      int const column = first_column(group);
      if (column >= kKeys && column < kValues) {
        copy(PartColumn<Part::kKey>{column});
      } else if (column >= kValues && inside(group)) {
        copy(PartColumn<Part::kValue>{column});
      }
      CUTLASS_PRAGMA_UNROLL
      for (int line = 0; line < kLines; ++line) {
        CUTLASS_PRAGMA_UNROLL
        for (int next = kUnitGroups; next < kGroups; ++next) kept_[line][next - kUnitGroups] = kept_[line][next];
      }
    }
  }

  // The unit in the first place, of all rows.
  template <class Column>
  CUTLASS_DEVICE void copy(Column column) const {
    CUTLASS_PRAGMA_UNROLL
    for (int line = 0; line < kLines; ++line) {
      uint4 unit[kUnitGroups];
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kUnitGroups; ++group) unit[group] = kept_[line][group];
      epilogue_.copy(lines_[line], column, unit);
    }
  }

  CUTLASS_DEVICE int row_at(int line) const { return row_ + line / Halves * 64 + line % Halves * 8; }
  CUTLASS_DEVICE int first_column(int group) const { return tile_ * Width + group * kGroupWidth; }
  CUTLASS_DEVICE int column_at(int group) const {
    return first_column(group) * 8 / kWidth + 8 * (threadIdx.x % 4);
  }
  CUTLASS_DEVICE bool inside(int group) const { return !Ragged || first_column(group) < Columns; }

  CUTLASS_DEVICE void ask(int step) {
    int const line = step / kDistinct, group = step % kDistinct;
    if (row_at(line) < rows_ && inside(group)) {
      ahead_[step % kAhead] = epilogue_.load(lines_[line], row_at(line), column_at(group));
    }
  }

  template <class Column, bool kKeeps, class Accumulators>
  CUTLASS_DEVICE void apply(Accumulators const& accumulators, Operands const& operands, int line, int group) {
    float values[kWidth];
    CUTLASS_PRAGMA_UNROLL
    for (int pair = 0; pair < kWidth / 2; ++pair) {
      int const index = line / Halves * Width / 2 + (group * kWidth / 2 + pair) * 4 + line % Halves * 2;
      values[2 * pair] = accumulators(index);
      values[2 * pair + 1] = accumulators(index + 1);
    }
    if (!kCopies || (row_at(line) < rows_ && inside(group))) {
      epilogue_.apply(lines_[line], operands, row_at(line), Column{column_at(group)}, values);
    }
    if constexpr (kKeeps) kept_[line][group] = keep_bf16x8(values);
  }
};

}  // namespace futransformer
