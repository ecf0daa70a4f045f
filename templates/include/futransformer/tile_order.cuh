// The order in which persistent blocks walk the tiles of a GEMM.
#pragma once

#include <cutlass/cutlass.h>

namespace futransformer {

// Tiles in groups of `Raster` along M, walked M-fastest: the tiles in flight at one time form a block of Raster rows,
// so that they share tiles of X and of W in L2.
template <int TilesN, int Raster>
struct TileOrder {
  int tiles_m;

  struct Coordinate {
    int m, n;
  };
  CUTLASS_DEVICE int count() const { return tiles_m * TilesN; }
  CUTLASS_DEVICE Coordinate operator()(int index) const {
    unsigned const group = unsigned(index) / (Raster * TilesN);
    unsigned const within = unsigned(index) - group * (Raster * TilesN);
    unsigned const rows = min(unsigned(Raster), unsigned(tiles_m) - group * Raster);
    unsigned const n = within / rows;
    return {int(group * Raster + within - n * rows), int(n)};
  }
};

}  // namespace futransformer
