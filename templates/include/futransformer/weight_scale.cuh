// The scales of a decode weight in E4M3, as the first operation of an epilogue's chain (epilogue.cuh).
#pragma once

#include "e4m3_operand.cuh"
#include "epilogue.cuh"

namespace futransformer {

// x a scale a column, of sums of codes that became BF16 operands by bit moves (e4m3_operand.cuh): float32, in the order of
// the packed rows, behind the weight's `codes` bytes. `Width` columns of sums, 8 or 16, are eight of the output. They are
// asked for ahead, since they come from memory; and the two factors stay apart, for their product may be too large.
template <int Width>
struct WeightScale : Operation {
  float const* scale;  // [accumulator columns]

  static constexpr int kOperands = Width;
  struct Operands {
    float4 scale[Width / 4];
  };

  CUTLASS_DEVICE WeightScale(void const* weight, size_t codes)
      : scale(reinterpret_cast<float const*>(static_cast<unsigned char const*>(weight) + codes)) {}
  template <class Row>
  CUTLASS_DEVICE Operands load(Row const&, int, int column) const {
    float4 const* const source = reinterpret_cast<float4 const*>(scale + column * (Width / 8));
    Operands operands;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width / 4; ++i) operands.scale[i] = __ldg(source + i);
    return operands;
  }
  CUTLASS_DEVICE void apply(Nothing, Operands const& operands, int, int, float (&values)[Width]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Width / 4; ++i) {
      float4 const four = operands.scale[i];
      values[4 * i] = values[4 * i] * kE4m3Operand * four.x;
      values[4 * i + 1] = values[4 * i + 1] * kE4m3Operand * four.y;
      values[4 * i + 2] = values[4 * i + 2] * kE4m3Operand * four.z;
      values[4 * i + 3] = values[4 * i + 3] * kE4m3Operand * four.w;
    }
  }
};

}  // namespace futransformer
