// Attention of the launch for all layers (decode_layers.cuh): a block's pages, and its share of what splits combine.
#pragma once

#include <cstdint>

#include "attention_decode.cuh"
#include "barrier.cuh"
#include "decode_layers_shared.cuh"
#include "epilogue_tagged.cuh"
#include "fragment.cuh"
#include "numeric.cuh"
#include "tagged.cuh"

namespace futransformer {

// `T`: DecodeLayersTraits.
template <class T>
class DecodeLayersAttention {
  using Tokens = typename T::Tokens;
  using Page = typename T::Page;
  using Fragments = typename T::Fragments;
  using Codes = typename T::Codes;
  using Attended = typename T::Attended;
  using Splits = typename T::Splits;
  using Cursor = typename T::Cursor;
  using Work = typename T::Work;
  using Shared = typename T::Shared;
  using Arguments = typename T::Arguments;

 public:
  // Blocks from the last on, which have least of qkv.
  CUTLASS_DEVICE static Work work_of(Arguments const& args, int block) {
    Work work = {};
    int const share = T::Blocks - 1 - block;
    if (share >= T::KvHeads * args.splits) return work;
    work.split = share % args.splits;
    work.head = share / args.splits;
    work.length = args.seqlens_k[0];
    bool const served = work.length > 0 && work.length <= static_cast<long long>(args.block_table_stride) * T::PageSize;
    int const pages = served ? (work.length + T::PageSize - 1) / T::PageSize : 0;
    work.splits = served ? min((pages + args.pages_per_split - 1) / args.pages_per_split, args.splits) : 1;
    if (work.split >= work.splits) return {};
    work.first = served ? work.split * args.pages_per_split : 0;
    work.last = work.split == work.splits - 1 ? pages : work.first + args.pages_per_split;
    return work;
  }

  CUTLASS_DEVICE static void run(Shared& shared, Arguments const& args, Cursor& cursor, Layer const& layer, uint32_t tag) {
    Work const& work = shared.work;
    if (work.splits == 0) return;
    int const thread = thread_now();
    if (work.last == 0) {
      uint32_t const value = work.length <= 0 ? 0 : 0x7fff7fff;  // zeros, or no numbers
      for (int item = thread; item < T::kHeadQuads; item += kLayerThreads) {
        send(args.exchange.attended + work.head * T::kHeadQuads + item, value, value, tag);
      }
      return;
    }
    attend_to_pages(shared, args, cursor, layer, tag);
    if (work.splits > 1) {
      T::sync();  // what stands in shared memory has been read
      combine_splits(shared, args, layer, tag);
    }
    T::sync();
  }

 private:
  CUTLASS_DEVICE static void attend_to_pages(Shared& shared, Arguments const& args, Cursor& cursor, Layer const& layer,
                                             uint32_t tag) {
    Work const& work = shared.work;
    int const thread = thread_now(), warp = thread / kLanes, lane = thread % kLanes;
    Attended& attention = shared.attention;
    int const last = work.last, newest = work.newest();
    bool const has_newest = last - 1 == newest;
    if (has_newest) {
      int const page = args.block_table[newest];
      uint4 const* const source =
          reinterpret_cast<uint4 const*>(layer.kv_copy + (size_t(page) * T::KvHeads + work.head) * sizeof(Page));
      uint4* const target = reinterpret_cast<uint4*>(&attention.newest);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int i = thread; i < int(sizeof(Page) / sizeof(uint4)); i += kLayerThreads) target[i] = __ldcg(source + i);
      T::sync();
    }
    // q, and the newest token.
    constexpr int kVectors = T::Group * T::HeadDim / 4;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int of_warp = warp * kLanes; of_warp < kVectors; of_warp += kLayerThreads) {
      int const item = of_warp + lane;
      TaggedVector found[1];
      receive(tag, found, [&](int) {
        return item < kVectors ? args.exchange.q + work.head * kVectors + item : nullptr;
      });
      if (item < kVectors) {
        *reinterpret_cast<uint2*>(attention.q + 4 * item) = make_uint2(uint32_t(found[0].words[0]), uint32_t(found[0].words[1]));
      }
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int of_warp = (kLayerWarps - 1 - warp) * kLanes; has_newest && of_warp < Codes::kCount; of_warp += kLayerThreads) {
      int const item = of_warp + lane;
      TaggedWord found[1];
      receive(tag, found, [&](int) {
        return item < Codes::kCount ? args.exchange.codes + work.head * Codes::kCount + item : nullptr;
      });
      if (item < Codes::kCount) {
        Codes::put(reinterpret_cast<char*>(&attention.newest), (work.length - 1) % T::PageSize, item, uint32_t(found[0]));
      }
    }
    T::sync();
    if (warp < T::kAttending) {
      Fragments fragments;
      Tokens::begin(attention.q - work.head * T::Group * T::HeadDim, work, fragments);
      float const scale = Tokens::score_scale({layer.kv_copy}, args.softmax_scale);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int page = work.first; page < last; ++page) {
        bool const in_ring = page != newest;
        int const attending = thread_now() / kLanes, first_token = attending % kSetWarps * Tokens::kTokens;
        if ((page - work.first) % kPageSets == attending / kSetWarps) {
          if (in_ring) wait(shared.full[cursor.slot], cursor.parity);
          void const* const stored = in_ring ? static_cast<void const*>(shared.ring[cursor.slot]) : &attention.newest;
          int const tokens = work.length - page * T::PageSize - first_token;
          if (tokens > 0) Tokens::attend(*static_cast<Page const*>(stored), first_token, tokens, scale, fragments);
          asm volatile("" ::: "memory");  // no read of the slot comes later
          if (in_ring) shared.empty[cursor.slot].arrive();
        }
        if (in_ring) cursor.skip_page();
      }
      Tokens::end(fragments);
      attention.warps.publish(thread_now() / kLanes, thread_now() % kLanes, fragments);
    } else {
      cursor = cursor.past(last - work.first - has_newest);
    }
    T::sync();

    int const first_row = (work.head * args.splits + work.split) * T::Group;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int item = thread; item < T::kHeadQuads; item += kLayerThreads) {
      int const head = item / T::kQuads, quad = item % T::kQuads;
      float4 const* const out = reinterpret_cast<float4 const*>(&attention.warps.out[0][head][4 * quad]);
      PartialAttention const total = combine(T::kAttending, &attention.warps.max_sum[0][head], T::Group, out,
                                             sizeof(attention.warps.out[0]) / sizeof(float4));
      if (work.splits == 1) {
        store(args, layer, work, item, total, tag);
      } else {
        TaggedVector* const target = args.exchange.partial + (size_t(first_row) * T::kQuads + item) * 2;
        send(target, __float_as_uint(total.out.x), __float_as_uint(total.out.y), tag);
        send(target + 1, __float_as_uint(total.out.z), __float_as_uint(total.out.w), tag);
        if (quad == 0) send(args.exchange.max_sum + first_row + head, __float_as_uint(total.max), __float_as_uint(total.sum), tag);
      }
    }
  }

  // A block that has a split of a sequence and head combines its share of the features, of all splits in order.
  CUTLASS_DEVICE static void combine_splits(Shared& shared, Arguments const& args, Layer const& layer, uint32_t tag) {
    Work const& work = shared.work;
    int const share = (T::kHeadQuads + work.splits - 1) / work.splits, first = work.split * share;
    int const quads = min(T::kHeadQuads - first, share);  // none or fewer of the last ones
    if (quads <= 0) return;
    Splits& splits = shared.attention.splits;
    size_t const first_row = work.head * args.splits * T::Group;
    int const items = quads * work.splits, thread = thread_now();
    for (int of_warp = thread / kLanes * kLanes; of_warp < items; of_warp += kLayerThreads) {
      int const item = of_warp + thread % kLanes, split = item / quads, quad = first + item % quads;
      TaggedVector found[2];
      receive(tag, found, [&](int i) {
        return item < items ? args.exchange.partial + ((first_row + split * T::Group) * T::kQuads + quad) * 2 + i : nullptr;
      });
      if (item < items) {
        splits.out[item] = make_float4(__uint_as_float(uint32_t(found[0].words[0])), __uint_as_float(uint32_t(found[0].words[1])),
                                       __uint_as_float(uint32_t(found[1].words[0])), __uint_as_float(uint32_t(found[1].words[1])));
      }
    }
    int const statistics = work.splits * T::Group;
    for (int of_warp = (kLayerWarps - 1 - thread / kLanes) * kLanes; of_warp < statistics; of_warp += kLayerThreads) {
      int const item = of_warp + thread % kLanes;
      TaggedVector found[1];
      receive(tag, found, [&](int) { return item < statistics ? args.exchange.max_sum + first_row + item : nullptr; });
      if (item < statistics) {
        splits.max_sum[item / T::Group][item % T::Group] =
            make_float2(__uint_as_float(uint32_t(found[0].words[0])), __uint_as_float(uint32_t(found[0].words[1])));
      }
    }
    T::sync();
    for (int item = thread; item < quads; item += kLayerThreads) {
      store(args, layer, work, first + item,
            combine(work.splits, &splits.max_sum[0][(first + item) / T::kQuads], T::Group, splits.out + item, quads), tag);
    }
  }

  CUTLASS_DEVICE static void store(Arguments const& args, Layer const& layer, Work const& work, int item,
                                   PartialAttention const& total, uint32_t tag) {
    float const inverse = Tokens::normalised({layer.kv_copy}, total.sum);
    send(args.exchange.attended + work.head * T::kHeadQuads + item,
         pack_bf16x2(total.out.x * inverse, total.out.y * inverse), pack_bf16x2(total.out.z * inverse, total.out.w * inverse), tag);
  }
};

}  // namespace futransformer
