// E4M3 codes as BF16 operands: by bit moves, with the scale of the difference in exponents left to whoever multiplies.
//
// E4M3 is s eeee mmm, BF16 s eeeeeeee mmmmmmm: moved to where BF16 has them, exponent and mantissa are the code's value
// times 2^(7 - 127), below 2^-6 as well, where both count in steps. It takes 3.5 instructions for two codes, exactly.
// The code that is not a number becomes 480.
#pragma once

#include <cstdint>

#include <cutlass/cutlass.h>

namespace futransformer {

constexpr float kE4m3Operand = 0x1p120f;  // what an operand of 1 is worth, in codes

// The upper codes of the two halves of `word`.
CUTLASS_DEVICE uint32_t upper_e4m3_operands(uint32_t word) {
  return (word & 0x80008000u) | (word & 0x7f007f00u) >> 4;
}

// The lower ones.
CUTLASS_DEVICE uint32_t lower_e4m3_operands(uint32_t word) { return upper_e4m3_operands(word << 8); }

}  // namespace futransformer
