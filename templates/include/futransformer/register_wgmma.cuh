// wgmma with A in registers: 64 rows of four warps, BF16, and B in shared memory, 32 k a row with the 64-byte swizzle.
#pragma once

#include <cstdint>
#include <utility>

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/util.hpp>

#include "fragment.cuh"

namespace futransformer {

// The instruction for a number of columns of B.
template <int N>
struct RegisterWgmma;
#define FUTRANSFORMER_REGISTER_WGMMA(N)                                                                       \
  template <>                                                                                                 \
  struct RegisterWgmma<N>                                                                                     \
      : cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_RS<cute::GMMA::Major::K, cute::GMMA::Major::K> {};
FUTRANSFORMER_REGISTER_WGMMA(8)
FUTRANSFORMER_REGISTER_WGMMA(16)
FUTRANSFORMER_REGISTER_WGMMA(32)
FUTRANSFORMER_REGISTER_WGMMA(64)
#undef FUTRANSFORMER_REGISTER_WGMMA

// Of B [rows, 32 k] at a multiple of 512 bytes; its second 16 k are two further (a descriptor counts 16 bytes).
CUTLASS_DEVICE uint64_t wgmma_descriptor(void const* b) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(b) >> 4;
  descriptor.bitfield.leading_byte_offset_ = 1;     // unused
  descriptor.bitfield.stride_byte_offset_ = 512 >> 4;  // from eight rows to the next
  descriptor.bitfield.layout_type_ = static_cast<uint8_t>(cute::SM90::GMMA::LayoutType::B64);
  return descriptor;
}

template <int Sums, int... I>
CUTLASS_DEVICE void multiply_wgmma(Words const& a, uint64_t b, float (&d)[Sums], bool adds,
                                   std::integer_sequence<int, I...>) {
  RegisterWgmma<2 * Sums>::fma(a.word[0], a.word[1], a.word[2], a.word[3], b, d[I]...,
                               adds ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// d = a b, or += where it `adds`.
template <int Sums>
CUTLASS_DEVICE void multiply_wgmma(Words const& a, uint64_t b, float (&d)[Sums], bool adds) {
  multiply_wgmma(a, b, d, adds, std::make_integer_sequence<int, Sums>{});
}

// Before the first of products that may add to `d`, and behind the last of a batch.
template <int Sums>
CUTLASS_DEVICE void begin_wgmma(float (&d)[Sums]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Sums; ++i) cute::warpgroup_fence_operand(d[i]);
  cute::warpgroup_arrive();
}
CUTLASS_DEVICE void commit_wgmma() { cute::warpgroup_commit_batch(); }

// Until no more than `Pending` batches are under way.
template <int Pending, int Sums>
CUTLASS_DEVICE void wait_for_wgmma(float (&d)[Sums]) {
  cute::warpgroup_wait<Pending>();
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Sums; ++i) cute::warpgroup_fence_operand(d[i]);
}

}  // namespace futransformer
