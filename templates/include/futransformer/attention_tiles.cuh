// Tiles of prefill attention: how they lie in shared memory, and which wgmma reads them.
//
// Shared memory holds [column block][row][64 features], as TMA boxes of 64 columns (128 bytes, swizzled) arrive. Q and
// K are read K-major. V is the B operand of P V, [features, keys] with the features contiguous: MN-major, which wgmma
// reads without a transposition.
//
// The scores' accumulator and the A operand of P V hold the same elements in the same order: of each row the columns
// 8 j + 2 (lane % 4) + {0, 1}, as (2 columns, 2 rows, j) here and as (2 keys, 2 rows, 2 groups of 8 keys, step) there.
#pragma once

#include <cute/tensor.hpp>

#include <cute/atom/mma_traits_sm90_gmma.hpp>

namespace futransformer {

template <class Element, int HeadDim, int TileM, int TileN, int QStages, int Stages>
struct AttentionTiles {
  static constexpr int kBoxColumns = 64;
  static constexpr int kColumnBlocks = HeadDim / kBoxColumns;

  // Where a box of a tile of `rows` rows begins, in elements.
  CUTE_HOST_DEVICE static constexpr int box_offset(int rows, int column_block, int row) {
    return (column_block * rows + row) * kBoxColumns;
  }

  using LayoutQ = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<Element>{},
      cute::Shape<cute::Int<TileM>, cute::Int<HeadDim>, cute::Int<QStages>>{}));
  using LayoutK = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW128_Atom<Element>{},
      cute::Shape<cute::Int<TileN>, cute::Int<HeadDim>, cute::Int<Stages>>{}));
  using LayoutV = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_MN_SW128_Atom<Element>{},
      cute::Shape<cute::Int<HeadDim>, cute::Int<TileN>, cute::Int<Stages>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));

  // One warpgroup: 64 queries. S = Q K^T from shared memory; O += P V with P in registers.
  using MmaScores = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, cute::Int<TileN>, cute::Int<HeadDim>>>()));
  using MmaOutput = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<HeadDim>, cute::Int<TileN>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
};

// View an accumulator ((2 columns, 2 rows, columns / 8), 1, 1) as (2 rows, columns / 4) of one thread.
template <class Tensor>
CUTE_HOST_DEVICE auto rows_and_columns(Tensor& accumulator) {
  using namespace cute;
  auto const layout = get<0>(accumulator.layout());
  return make_tensor(accumulator.data(), make_layout(get<1>(layout), make_layout(get<0>(layout), get<2>(layout))));
}

}  // namespace futransformer
