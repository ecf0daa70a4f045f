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
#include "tagged_access.cuh"

namespace futransformer {

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
