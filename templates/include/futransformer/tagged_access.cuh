// A word and its tag in one access, to and from L2, where multiprocessors meet (tagged.cuh).
#pragma once

#include <cstdint>

#include <cutlass/cutlass.h>

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

}  // namespace futransformer
