// Words that one block writes and others of the same launch read, with no fence and no counter between: each travels with a
// tag, and who reads asks until the tag is the one that it waits for.
//
// A word and its tag are one 64-bit access, so that either both have arrived or neither has; nothing else need be in order.
// Tags differ from one use of a place to the next. A vector is two words with their tags, 16 bytes; all go to L2, where
// multiprocessors meet.
#pragma once

#include <cstdint>

#include <cutlass/cutlass.h>

#include "barrier.cuh"
#include "numeric.cuh"

namespace futransformer {

struct alignas(16) TaggedVector {
  uint64_t words[2];
};
using TaggedWord = uint64_t;

CUTLASS_DEVICE uint64_t tagged(uint32_t word, uint32_t tag) { return uint64_t(tag) << 32 | word; }
CUTLASS_DEVICE bool has_tag(uint64_t word, uint32_t tag) { return uint32_t(word >> 32) == tag; }
CUTLASS_DEVICE bool has_tag(TaggedVector const& vector, uint32_t tag) {
  return has_tag(vector.words[0], tag) && has_tag(vector.words[1], tag);
}

CUTLASS_DEVICE void send(TaggedVector* place, uint32_t first, uint32_t second, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};"
               :
               : "l"(place), "l"(tagged(first, tag)), "l"(tagged(second, tag))
               : "memory");
}
CUTLASS_DEVICE void send(TaggedWord* place, uint32_t word, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" : : "l"(place), "l"(tagged(word, tag)) : "memory");
}

CUTLASS_DEVICE TaggedVector look(TaggedVector const* place) {
  TaggedVector found;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(found.words[0]), "=l"(found.words[1])
               : "l"(place)
               : "memory");
  return found;
}
CUTLASS_DEVICE TaggedWord look(TaggedWord const* place) {
  TaggedWord found;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(found) : "l"(place) : "memory");
  return found;
}

// All lanes of a warp: `Count` places each, `place(i)` or null. Ask for all of them once.
template <class Word, int Count, class Place>
CUTLASS_DEVICE void ask(Word (&found)[Count], Place const& place) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Count; ++i) {
    Word const* const at = place(i);
    found[i] = at != nullptr ? look(at) : Word{};
  }
}

// Wait for what has been asked for: in the end `found[i]` is there.
//
// While something is missing one lane asks for it alone: all together, and all blocks, would ask for terabytes a second.
//
// With FUTRANSFORMER_BOUNDED_WAITS (barrier.cuh) it gives up after a while.
template <class Word, int Count, class Place>
CUTLASS_DEVICE void await(uint32_t tag, Word (&found)[Count], Place const& place) {
#ifdef FUTRANSFORMER_BOUNDED_WAITS
  Patience const patience;
  bool gives_up = false;
#endif
  while (true) {
    Word const* missing = nullptr;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Count; ++i) {
      Word const* const at = place(i);
      if (at != nullptr && !has_tag(found[i], tag)) missing = at;
    }
    unsigned const lanes = __ballot_sync(0xffffffffu, missing != nullptr);
    if (lanes == 0) return;
    if (int(thread_now() % 32) == __ffs(lanes) - 1) {
      while (!has_tag(look(missing), tag)) {
#ifdef FUTRANSFORMER_BOUNDED_WAITS
        gives_up = !patience.left();
        if (gives_up) break;
#endif
      }
    }
    __syncwarp();
#ifdef FUTRANSFORMER_BOUNDED_WAITS
    if (__any_sync(0xffffffffu, gives_up)) return;
#endif
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Count; ++i) {
      Word const* const at = place(i);
      if (at != nullptr && !has_tag(found[i], tag)) found[i] = look(at);
    }
  }
}

// Both.
template <class Word, int Count, class Place>
CUTLASS_DEVICE void receive(uint32_t tag, Word (&found)[Count], Place const& place) {
  ask(found, place);
  await(tag, found, place);
}

}  // namespace futransformer
