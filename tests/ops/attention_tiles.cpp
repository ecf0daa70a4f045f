// Checks of the prefill attention's tiles on the host, against what TMA writes and what CuTe's wgmma traits read.
// Prints one line a mismatch kind; the exit status is the number of mismatching shapes.
#include <cstdio>

#include <futransformer/attention_code_tiles.cuh>
#include <futransformer/attention_tiles.cuh>

#include <cutlass/numeric_types.h>

using namespace cute;
using Element = cutlass::bfloat16_t;

// Where a 128-byte-swizzled box of 64 bf16 columns puts an element: 16-byte chunk c of row r at chunk c xor (r mod 8).
static int tma_offset(int row, int column) { return row * 64 + ((column / 8) ^ (row % 8)) * 8 + column % 8; }

// A layout's offset in elements, its swizzle applied to bytes as the hardware does.
template <class Layout, class... Coordinates>
static int layout_offset(Layout const& layout, Coordinates... at) {
  return Swizzle<3, 4, 3>{}(int(get_nonswizzle_portion(layout)(at...) * sizeof(Element))) / int(sizeof(Element));
}

template <int HeadDim, int TileN, int Stages>
static int mismatches() {
  constexpr int kTileM = 128, kPage = 64, kQStages = 2;
  using Tiles = futransformer::AttentionTiles<Element, HeadDim, kTileM, TileN, kQStages, Stages>;
  int loads = 0, accumulators = 0, operands = 0;

  for (int column = 0; column < HeadDim; ++column) {
    int const block = column / 64;
    for (int row = 0; row < kTileM; ++row) {
      for (int stage = 0; stage < kQStages; ++stage) {
        int const box = stage * kTileM * HeadDim + Tiles::box_offset(kTileM, block, 0);
        loads += box + tma_offset(row, column % 64) != layout_offset(typename Tiles::LayoutQ{}, row, column, stage);
      }
    }
    for (int stage = 0; stage < Stages; ++stage) {
      for (int token = 0; token < TileN; ++token) {
        int const box = stage * TileN * HeadDim + Tiles::box_offset(TileN, block, token / kPage * kPage);
        int const written = box + tma_offset(token % kPage, column % 64);
        loads += written != layout_offset(typename Tiles::LayoutK{}, token, column, stage);
        loads += written != layout_offset(typename Tiles::LayoutV{}, column, token, stage);
      }
    }
  }

  // Thread and value -> place in a 64-row matrix, column-major, as CuTe's traits have it.
  typename Tiles::MmaScores scores;
  typename Tiles::MmaOutput output;
  auto const place_c = typename decltype(scores)::AtomLayoutC_TV{};
  auto const place_a = typename decltype(output)::AtomLayoutA_TV{};
  auto accumulator = partition_fragment_C(scores, Shape<_64, Int<TileN>>{});
  auto const view = futransformer::rows_and_columns(accumulator).layout();
  auto const operand = make_layout(partition_shape_A(output, Shape<_64, Int<TileN>>{}));
  for (int thread = 0; thread < 128; ++thread) {
    int const first_row = thread / 32 * 16 + thread % 32 / 4;
    for (int row = 0; row < 2; ++row) {
      for (int column = 0; column < TileN / 4; ++column) {
        int const place = place_c(thread, int(view(row, column)));
        accumulators += place % 64 != first_row + 8 * row;
        accumulators += place / 64 != column / 2 * 8 + column % 2 + 2 * (thread % 4);
      }
    }
    for (int step = 0; step < TileN / 16; ++step) {
      for (int value = 0; value < 8; ++value) {
        int const index = int(operand(value, 0, step));
        operands += place_a(thread, value) + step * 16 * 64 != place_c(thread, index);
      }
    }
  }
  std::printf("head_dim %d, tile_n %d, stages %d: loads %d, accumulators %d, operands %d mismatches\n", HeadDim, TileN,
              Stages, loads, accumulators, operands);
  return loads || accumulators || operands;
}

// Codes of E4M3: where TMA puts them, where their operands are read, each of them once, and all banks at a time.
template <int HeadDim, int TileN>
static int code_mismatches() {
  using Codes = futransformer::CodeTiles<HeadDim, TileN>;
  using Tiles = futransformer::AttentionTiles<Element, HeadDim, 128, TileN, 2, 2>;
  int loads = 0, operands = 0, repeated = 0, conflicts = 0;
  for (int token = 0; token < TileN; ++token) {
    for (int column = 0; column < HeadDim; ++column) {
      int const code = token * HeadDim + column, row = code / 128;  // rows of 128 bytes
      int const arrives = row * 128 + ((code % 128 / 16) ^ (row % 8)) * 16 + code % 16;
      loads += Codes::codes_at(token, column / 16) + column % 16 != arrives;
      int const read = layout_offset(typename Tiles::LayoutK{}, token, column, 0);
      operands += Codes::operands_at(token, column / 8) / 2 + column % 8 != read;
      operands += read != layout_offset(typename Tiles::LayoutV{}, column, token, 0);
    }
  }
  bool seen[TileN][HeadDim / 16] = {};
  for (int unit = 0; unit < Codes::kUnits; ++unit) {
    for (int first = 0; first < 32; first += 8) {
      int banks[3] = {};  // 16 bytes of 128 that the eight lanes read, write, and write again
      for (int lane = first; lane < first + 8; ++lane) {
        int const token = Codes::token_of(unit, lane), step = Codes::step_of(unit, lane);
        repeated += seen[token][step];
        seen[token][step] = true;
        banks[0] |= 1 << Codes::codes_at(token, step) / 16 % 8;
        for (int half = 0; half < 2; ++half) banks[1 + half] |= 1 << Codes::operands_at(token, 2 * step + half) / 16 % 8;
      }
      for (int used : banks) conflicts += used != 0xff;
    }
  }
  std::printf("codes, head_dim %d, tile_n %d: loads %d, operands %d, repeated %d, conflicts %d\n", HeadDim, TileN, loads,
              operands, repeated, conflicts);
  return loads || operands || repeated || conflicts || Codes::kUnits * 32 != TileN * HeadDim / 16;
}

int main() {
  int const of_codes = code_mismatches<64, 128>() + code_mismatches<128, 128>() + code_mismatches<128, 64>();
  return of_codes + mismatches<64, 128, 2>() + mismatches<128, 128, 2>() + mismatches<64, 64, 3>() + mismatches<128, 64, 4>();
}
