// What a lane's codes of a unit are worth.
#pragma once

#include <cstdint>

#include "fragment.cuh"
#include "numeric.cuh"

namespace futransformer {

// Of the rows g and g + 8 of a unit in shared memory.
template <class Weight>
struct UnitScales {
  float2 scale;
  uint32_t zeros = 0;  // a byte each

  CUTLASS_DEVICE UnitScales() {}
  CUTLASS_DEVICE UnitScales(unsigned char const* unit, int lane)
      : scale(unpack_halves(*reinterpret_cast<uint32_t const*>(unit + Weight::kScales + lane / 4 * 4))) {
    if constexpr (Weight::kZeroPoints) {
      zeros = *reinterpret_cast<uint16_t const*>(unit + Weight::kZeros + lane / 4 * 2);
    }
  }
};

}  // namespace futransformer
