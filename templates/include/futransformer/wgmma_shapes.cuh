// Every width of wgmma, not only those that CuTe selects from by default. Include it before CuTe.
//
// Without it CuTe multiplies a tile of 160 or 224 columns by five or seven instructions of 32: slower, and with two
// 64-row atoms a consumer its accumulators then stand in another order than the epilogue reads them.
#pragma once

#ifdef CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
#error "include wgmma_shapes.cuh before CuTe, and define its switch nowhere else"
#endif
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
