// The converters of prefill attention over E4M3 pages: three warps of the producer's warpgroup that turn tiles of codes,
// as they arrive by TMA, into the BF16 tiles of K and V that wgmma reads.
//
// Tiles come in the order in which the producer asks for them, and say what they are. Operands are the codes' values
// times 1 / kE4m3Operand (e4m3_operand.cuh): the consumers' scales make up for it.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>

#include "attention_code_tiles.cuh"
#include "attention_prefill_shared.cuh"
#include "barrier.cuh"
#include "e4m3_operand.cuh"

namespace futransformer {

// `T`: AttentionPrefillTraits.
template <class T>
class AttentionPrefillConverter {
  using Barriers = typename T::Barriers;
  using Codes = typename T::Codes;
  using CodeKind = typename T::CodeKind;
  using SharedStorage = typename T::SharedStorage;
  using PipelineState = typename T::PipelineState;

 public:
  // `warp`: 0 .. kConverterWarps - 1.
  CUTLASS_DEVICE static void run(SharedStorage& shared, int warp) {
    Barriers& barriers = shared.barriers;
    Codes& codes = T::codes(shared);
    PipelineState k(0, 1, 0);  // a fresh ring is empty: its "previous" phase has passed
    PipelineState v(0, 1, 0);
    typename T::CodeState read;
    auto fill = [&](bool with_codes, PipelineState& stage, auto& full, auto& empty, typename T::Element* tiles) {
      wait(empty[stage.index()], stage.phase());
      if (with_codes) convert(codes.tiles[read.index()], tiles + stage.index() * T::kTileElements, warp);
      full[stage.index()].arrive();
      codes.empty[read.index()].arrive();
      ++stage;
    };
    CUTLASS_PRAGMA_NO_UNROLL
    for (bool more = true; more; ++read) {
      wait(codes.full[read.index()], read.phase());
      CodeKind const kind = codes.kind[read.index()];
      more = kind != CodeKind::kEnd;
      if (kind == CodeKind::kValues) {
        fill(true, v, barriers.v_full, barriers.v_empty, shared.v.data());
      } else {
        fill(more, k, barriers.k_full, barriers.k_empty, shared.k.data());
      }
    }
  }

 private:
  CUTLASS_DEVICE static void convert(uint8_t const* codes, typename T::Element* tile, int warp) {
    using Tile = CodeTiles<T::HeadDim, T::TileN>;
    char* const target = reinterpret_cast<char*>(tile);
    for (int unit = warp; unit < Tile::kUnits; unit += T::kConverterWarps) {
      int const lane = threadIdx.x % cutlass::NumThreadsPerWarp;
      int const token = Tile::token_of(unit, lane), step = Tile::step_of(unit, lane);
      uint4 const read = *reinterpret_cast<uint4 const*>(codes + Tile::codes_at(token, step));
      *reinterpret_cast<uint4*>(target + Tile::operands_at(token, 2 * step)) = operands(read.x, read.y);
      *reinterpret_cast<uint4*>(target + Tile::operands_at(token, 2 * step + 1)) = operands(read.z, read.w);
    }
    cutlass::arch::fence_view_async_shared();  // wgmma reads through the async proxy
  }

  // Eight codes to operands, in order.
  CUTLASS_DEVICE static uint4 operands(uint32_t first, uint32_t second) {
    uint32_t const words[4] = {spread_low(first), spread_high(first), spread_low(second), spread_high(second)};
    return make_uint4(upper_e4m3_operands(words[0]), upper_e4m3_operands(words[1]), upper_e4m3_operands(words[2]),
                      upper_e4m3_operands(words[3]));
  }
  // Codes 0, 1 (2, 3) of a word, to the upper bytes of two halves.
  CUTLASS_DEVICE static uint32_t spread_low(uint32_t word) { return __byte_perm(word, 0, 0x1404); }
  CUTLASS_DEVICE static uint32_t spread_high(uint32_t word) { return __byte_perm(word, 0, 0x3424); }
};

}  // namespace futransformer
