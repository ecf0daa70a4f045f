// Tiles of E4M3 codes in prefill attention: how they lie in shared memory, and how a warp turns them into BF16 tiles.
//
// A tile is [TileN tokens][HeadDim], seen as rows of 128 bytes (with 64 features, two tokens), 128-byte swizzle. A unit
// is eight tokens by 64 features, of which a lane has sixteen codes. The eight lanes that access shared memory together
// read 128 bytes of all banks and write 128 of all banks: with 64 features four steps of two neighbouring tokens, with
// 128 of two tokens whose numbers differ in bits 0 and 2, for the first keeps the writes apart and the second the reads.
#pragma once

#include <cute/config.hpp>

namespace futransformer {

template <int HeadDim, int TileN>
struct CodeTiles {
  static constexpr int kBlocks = HeadDim / 64;
  static constexpr int kUnits = TileN / 8 * kBlocks;

  CUTE_HOST_DEVICE static constexpr int token_of(int unit, int lane) {
    return unit / kBlocks * 8 + (HeadDim == 64 ? lane / 4 : lane / 8 ^ lane / 4 % 2 * 5);
  }
  // The step of sixteen features.
  CUTE_HOST_DEVICE static constexpr int step_of(int unit, int lane) { return unit % kBlocks * 4 + lane % 4; }

  // Where the sixteen codes of a step of a token stand, in bytes.
  CUTE_HOST_DEVICE static constexpr int codes_at(int token, int step) {
    int const offset = token * HeadDim + step * 16;
    return offset ^ (offset / 128 % 8) * 16;
  }
  // Where operands 8 chunk + {0 .. 7} of a token stand in the BF16 tile (attention_tiles.cuh), in bytes.
  CUTE_HOST_DEVICE static constexpr int operands_at(int token, int chunk) {
    return (chunk / 8 * TileN + token) * 128 + (chunk % 8 ^ token % 8) * 16;
  }
};

}  // namespace futransformer
