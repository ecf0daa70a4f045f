// The decode GEMM's own source in the emulator, against double precision: ring, slices of K, warps that share row tiles
// and k, clusters that add one another's sums, short last stages, batches below the tile, warpgroups. Integers of four-bit weights
// must come out exactly.
#include <sys/mman.h>
#include <unistd.h>

#include "fragment.cuh"

#include "unit_scales.cuh"

#include "split_activations.cuh"

#include "decode_ring.cuh"

#include "decode_block.cuh"

#include "decode_gemm.cuh"

#include "decode_gemm_wgmma.cuh"

// Stores scaled sums, and adds up what it stored: every call of the epilogue's protocol.
struct StoreScaled {
  static constexpr int kWidth = 8, kUnit = 0;
  struct Row {
    float scale;
    float sum;
  };

  int columns, parts;
  float const* scales;  // [rows]
  float* out;           // [rows, columns]
  float* sums;          // [rows, parts]

  template <int Lanes, int>
  Row begin(int row, bool valid) const {
    emulator::expect(emulator::current->waited, "the epilogue began before the kernel before was done");
    return {valid ? scales[row] : NAN, 0.f};
  }
  using Operands = float;
  float load(Row const& state, int, int) const { return state.scale; }
  void apply(Row& state, float scale, int row, int column, float (&values)[8]) const {
    for (int i = 0; i < 8; ++i) {
      float& target = out[row * columns + column + i];
      emulator::expect(std::isnan(target), "a result was written twice");
      target = values[i] * scale;
      state.sum += target;
    }
  }
  template <int Lanes>
  void end(Row const& state, int row, int part, bool valid) const {
    float const sum = futransformer::sum_over_lanes<Lanes>(state.sum);
    if (valid && threadIdx.x % Lanes == 0) sums[row * parts + part] = sum;
  }
};

using futransformer::NextAt;
static int failures = 0;

// Memory behind which a read faults.
struct Guarded {
  size_t const page = sysconf(_SC_PAGESIZE), room;
  char* const memory;

  explicit Guarded(size_t bytes)
      : room((bytes + page - 1) / page * page),
        memory(static_cast<char*>(mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    mprotect(memory + room, page, PROT_NONE);
  }
  ~Guarded() { munmap(memory, room + page); }
  void* last(size_t bytes) const { return memory + room - bytes; }
  void show(bool readable) const { mprotect(memory, room, readable ? PROT_READ | PROT_WRITE : PROT_NONE); }
};

// Bytes at multiples of 16, as on the device.
struct Bytes {
  struct alignas(16) Chunk {
    unsigned char byte[16];
  };
  std::vector<Chunk> chunks;

  explicit Bytes(size_t bytes) : chunks(bytes / 16) {}
  unsigned char& operator[](size_t i) { return chunks[i / 16].byte[i % 16]; }
  void store(size_t i, uint16_t value) { std::memcpy(&(*this)[i], &value, 2); }
};

// A packed weight of random elements and x to go with it; `logical` [N, K] becomes what the weight stands for. Sums
// of kExact elements are exact in float32, in any order.
template <class Element>
struct Random;

template <>
struct Random<cutlass::bfloat16_t> {
  static constexpr bool kExact = false;
  std::normal_distribution<float> normal;

  float x(std::mt19937& random) { return normal(random); }
  Bytes weight(int n, int k, std::mt19937& random, std::vector<float>& logical) {
    Bytes packed(size_t(n) * k * 2);
    for (int i = 0; i < n * k; ++i) {
      uint16_t const bits = to_bf16(normal(random));
      // Fragment order [N / 16, K / 16, lane, 8]: element e of lane 4 g + t, MMA j of a group of 32 k.
      int const e = i % 8, lane = i / 8 % 32, step = i / 256 % (k / 16), tile = i / 256 / (k / 16);
      int const row = 16 * tile + lane / 4 + 8 * (e / 2 % 2);
      packed.store(2 * i, bits);
      logical[row * k + step / 2 * 32 + lane % 4 * 8 + step % 2 * 4 + e / 4 * 2 + e % 2] = from_bf16(bits);
    }
    return packed;
  }
};

// Codes as the operands that are made of them, worth 2^-120 of theirs; sums are not exact.
template <>
struct Random<cutlass::float_e4m3_t> {
  static constexpr bool kExact = false;
  std::normal_distribution<float> normal;

  float x(std::mt19937& random) { return normal(random); }
  Bytes weight(int n, int k, std::mt19937& random, std::vector<float>& logical) {
    Bytes packed(size_t(n) * k);
    for (int i = 0; i < n * k / 2; ++i) {
      // Half e of word 2 j + half of lane 4 g + t, MMA j of a group of 32 k: codes of k e and k 2 + e of its four.
      int const e = i % 2, half = i / 2 % 2, j = i / 4 % 2, lane = i / 8 % 32, group = i / 256 % (k / 32);
      int const row = i / 256 / (k / 32) * 16 + lane / 4 + 8 * half, first_k = 32 * group + 8 * (lane % 4) + 4 * j + e;
      unsigned code[2];
      for (int pair = 0; pair < 2; ++pair) {
        code[pair] = random() % 127 | random() % 2 << 7;
        int const exponent = code[pair] >> 3 & 15, mantissa = code[pair] & 7;
        float const size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
        logical[row * k + first_k + 2 * pair] = std::ldexp(code[pair] & 128 ? -size : size, -120);
      }
      packed.store(2 * i, (code[0] & 0x80) << 8 | (code[0] & 0x7f) << 4 | (code[1] & 0x80) << 4 | (code[1] & 0x70) << 8 |
                              (code[1] & 0x0f));
    }
    return packed;
  }
};

template <int GroupK, bool ZeroPoints>
struct Random<futransformer::Int4<GroupK, ZeroPoints>> {
  static constexpr bool kExact = true;

  float x(std::mt19937& random) { return int(random() % 17) - 8; }
  Bytes weight(int n, int k, std::mt19937& random, std::vector<float>& logical) {
    constexpr int kCodes = 8 * GroupK, kUnit = kCodes + 32 + 16 * ZeroPoints;
    Bytes packed(size_t(n) * k / (16 * GroupK) * kUnit);
    for (int row = 0; row < n; ++row) {
      for (int unit = 0; unit < k / GroupK; ++unit) {
        size_t const base = (size_t(row / 16) * (k / GroupK) + unit) * kUnit;
        int const exponent = random() % 4, g = row % 8, half = row / 8 % 2, zero = ZeroPoints ? random() % 16 : 8;
        bool const negative = random() % 2;
        packed.store(base + kCodes + 4 * g + 2 * half, negative << 15 | (0x3c00 - exponent * 0x400));  // +-2^-exponent
        if (ZeroPoints) packed[base + kCodes + 32 + 2 * g + half] = zero;
        for (int i = 0; i < GroupK; ++i) {
          // Nibble e / 2 + 4 (e % 2) of the word of row g + 8 half, lane t and 32 k; words of 64 k lie side by side.
          int const code = random() % 16, e = i % 8, t = i / 8 % 4, nibble = e / 2 + e % 2 * 4;
          int const lane_bytes = GroupK % 64 ? 8 : 16, group = GroupK % 64 ? 0 : i / 32 % 2;
          size_t const word = base + i / 64 * 512 + (4 * g + t) * lane_bytes + group * 8 + half * 4;
          packed[word + nibble / 2] |= code << nibble % 2 * 4;
          logical[row * k + unit * GroupK + i] = std::ldexp(float(negative ? zero - code : code - zero), -exponent);
        }
      }
    }
    return packed;
  }
};

template <class Gemm, class Element, int N, int K, int BatchTile, int RowTiles, int WarpRows, int WarpSplit, int Cluster,
          int Stages, int StageK, int InFlight>
void compare(int m) {
  constexpr int kBlocks = N / (16 * RowTiles) * Cluster;
  std::mt19937 random(m);
  std::normal_distribution<float> normal;
  Random<Element> elements;
  std::vector<float> logical(N * K), scales(m), out(m * N, NAN), sums(m * kBlocks, NAN);
  Bytes const weight = elements.weight(N, K, random, logical);
  Guarded const x_memory(size_t(m) * K * 2);
  auto* const x = static_cast<uint16_t*>(x_memory.last(size_t(m) * K * 2));
  for (int i = 0; i < m * K; ++i) x[i] = to_bf16(elements.x(random));
  for (float& scale : scales) scale = elements.kExact ? 1.f : normal(random);

  CUtensorMap const x_map{x, m, K, BatchTile, 32, StageK / 32};
  constexpr bool kThroughMap = std::is_same_v<typename Gemm::X, CUtensorMap const*>;
  auto const source = static_cast<typename Gemm::X>(kThroughMap ? static_cast<void const*>(&x_map) : x);
  StoreScaled const epilogue{N, kBlocks, scales.data(), out.data(), sums.data()};
  // x is there once the kernel before is done. In the emulator a thread that reads it sooner faults.
  emulator::previous_kernel = [&](bool done) { x_memory.show(done); };
  auto const run = [&] {
    Gemm::run(source, weight.chunks.data(), m, epilogue);
    emulator::expect(emulator::block->let_go == 1, "a block must let the next kernel start, and once");
    emulator::expect(emulator::block->most_bulk_copies <= InFlight * RowTiles, "more stages were under way than may be");
  };
  emulator::launch({kBlocks, 1, 1}, Gemm::kThreads, run, Cluster);

  double worst = 0;
  for (int row = 0; row < m; ++row) {
    for (int part = 0; part < kBlocks; ++part) {
      double total = 0, size = 0;
      for (int column = part * (N / kBlocks); column < (part + 1) * (N / kBlocks); ++column) {
        double exact = 0, magnitude = 0;
        for (int k = 0; k < K; ++k) {
          double const product = double(logical[column * K + k]) * from_bf16(x[row * K + k]);
          exact += product;
          magnitude += std::fabs(product);
        }
        // Float32 sums: every addition rounds to half a unit of 2^-23, K / 16 of them and the parts.
        double const allowed = magnitude * std::fabs(scales[row]) * (K / 16 + 20) * 0x1p-24;
        double const error = std::fabs(out[row * N + column] - exact * scales[row]);
        if (elements.kExact) {
          worst = error == 0 ? worst : INFINITY;
        } else {
          worst = std::max(worst, error <= allowed ? error / allowed : INFINITY);
        }
        total += out[row * N + column];
        size += std::fabs(out[row * N + column]);
      }
      if (!(std::fabs(sums[row * kBlocks + part] - total) <= size * 0x1p-20)) worst = INFINITY;
    }
  }
  bool const passed = worst <= 1;
  std::printf("N %d, K %d, batch %d of %d, row tiles %d, warps %dx%d, cluster %d, stages %d x %d: %.2f of the allowed "
              "error%s\n",
              N, K, m, BatchTile, RowTiles, WarpRows, WarpSplit, Cluster, Stages, StageK, worst,
              passed ? "" : " FAILED");
  failures += !passed;
}

template <class Element, int N, int K, int BatchTile, int RowTiles, int WarpRows, int WarpSplit, int Cluster,
          int Stages, int StageK, int XAhead = 0, NextAt Next = NextAt::End, bool Rotate = false, int InFlight = Stages,
          int Fetched = 0>
void check_of(int m) {
  using Gemm = futransformer::DecodeGemm<Element, K, BatchTile, RowTiles, WarpRows, WarpSplit, Cluster, Stages, StageK,
                                         XAhead, Next, Rotate, InFlight, Fetched>;
  compare<Gemm, Element, N, K, BatchTile, RowTiles, WarpRows, WarpSplit, Cluster, Stages, StageK, InFlight>(m);
}
template <int GroupK, bool ZeroPoints, int N, int K, int BatchTile, int RowTiles, int GroupRows, int GroupSplit,
          int Cluster, int Stages, int StageK, NextAt Next = NextAt::Start, bool Rotate = false, int InFlight = Stages,
          int Fetched = 0>
void check_wgmma(int m) {
  using Element = futransformer::Int4<GroupK, ZeroPoints>;
  using Gemm = futransformer::DecodeGemmWgmma<Element, K, BatchTile, RowTiles, GroupRows, GroupSplit, Cluster, Stages,
                                              StageK, Next, Rotate, InFlight, Fetched>;
  compare<Gemm, Element, N, K, BatchTile, RowTiles, GroupRows, GroupSplit, Cluster, Stages, StageK, InFlight>(m);
}
template <auto... Tiling>
void check(int m) {
  check_of<cutlass::bfloat16_t, Tiling...>(m);
}
template <auto... Tiling>
void check_e4m3(int m) {
  check_of<cutlass::float_e4m3_t, Tiling...>(m);
}
template <int GroupK, bool ZeroPoints, auto... Tiling>
void check_int4(int m) {
  check_of<futransformer::Int4<GroupK, ZeroPoints>, Tiling...>(m);
}

int main() {
  check<64, 576, 8, 1, 1, 8, 1, 2, 512, 2>(3);   // a last stage that only some warps share
  check<64, 512, 8, 2, 1, 4, 1, 3, 128>(8);      // one warp row, a ring that turns
  check<112, 256, 16, 7, 7, 1, 1, 3, 32>(9);     // warps that own a tile each; lanes that own no row
  check<96, 448, 32, 6, 3, 2, 1, 2, 64>(32);     // two tiles a warp, two splits
  check<128, 1536, 16, 4, 2, 2, 4, 3, 128>(16);  // a cluster of four
  check<128, 704, 32, 4, 2, 2, 2, 4, 64>(17);    // a cluster of two whose slices end in short stages
  check<128, 512, 64, 8, 4, 1, 4, 5, 32>(64);    // more stages than a slice has
  check<64, 256, 8, 2, 1, 1, 2, 2, 64>(1);
  check<64, 4096, 8, 2, 1, 4, 1, 3, 128, 4, NextAt::Lead>(8);   // a ring that is passed many times, x four stages ahead
  check<64, 2112, 8, 2, 1, 8, 1, 5, 256, 4, NextAt::Start>(5);  // the last round of stages and the last stage both short
  check<64, 2048, 8, 4, 2, 4, 2, 3, 128, 2, NextAt::Lead>(7);   // warps that share row tiles, a cluster, x by lanes
  check<128, 1408, 32, 4, 1, 4, 2, 5, 128, 3>(29);              // 32 sequences, x by lanes, a round that ends early
  check<192, 1408, 32, 6, 1, 4, 2, 4, 128, 2, NextAt::Lead>(32);   // six row tiles as they are planned
  check<128, 2048, 16, 4, 1, 4, 4, 4, 128, 2, NextAt::Start>(11);  // a cluster of four whose slices fit the ring
  check<64, 256, 8, 1, 1, 8, 1, 2, 512, 2>(6);                  // one stage, less than lanes ask for ahead
  check<256, 704, 32, 4, 2, 2, 2, 4, 64, 0, NextAt::Lead, true>(17);  // walks of k from different stages, with a short one
  check<128, 1472, 8, 1, 1, 4, 1, 3, 128, 4, NextAt::Lead, true>(5);  // the same with x by lanes
  check<256, 192, 64, 4, 2, 2, 2, 3, 64, 0, NextAt::Lead, true>(50);  // walks of two stages, one short
  check<160, 448, 16, 5, 5, 1, 1, 3, 128, 0, NextAt::Lead, true>(13);  // a ring that holds all but one, short, stage
  check<128, 192, 8, 2, 1, 8, 1, 2, 256, 4, NextAt::Lead, true>(8);  // a single short stage, which some warps sit out
  check<128, 576, 8, 2, 1, 8, 1, 3, 256, 4, NextAt::Lead, true>(2);  // walks of fewer stages than lanes ask for ahead
  check<128, 1408, 32, 4, 1, 4, 2, 3, 128, 2, NextAt::Lead, true>(31);  // a cluster that walks, x by lanes
  check<192, 256, 32, 6, 1, 4, 2, 2, 128, 2, NextAt::Lead>(19);  // a cluster whose slices are one stage
  check<128, 2560, 32, 4, 1, 4, 4, 4, 128, 2>(20);               // a ring that turns by a single stage
  check<128, 512, 16, 8, 1, 2, 8, 2, 64, 1>(16);                 // a cluster of eight, each finishing a tile

  check_e4m3<64, 4096, 8, 4, 1, 8, 1, 4, 256, 4, NextAt::Lead, true>(8);  // as they are planned
  check_e4m3<64, 1536, 8, 1, 1, 8, 1, 2, 1024, 1, NextAt::Start>(3);     // a last stage that only some warps share
  check_e4m3<112, 1024, 16, 7, 7, 1, 1, 3, 256, 0, NextAt::Lead, true>(13);  // x in the ring
  check_e4m3<192, 1408, 32, 6, 1, 4, 2, 5, 128, 2, NextAt::Lead>(32);        // a cluster, x by lanes
  check_e4m3<128, 704, 64, 4, 2, 2, 2, 3, 128>(50);  // a cluster whose slices end in short stages
  check_e4m3<224, 512, 32, 14, 7, 1, 1, 3, 128>(29);

  check_int4<128, false, 64, 4096, 8, 2, 1, 8, 1, 3, 1024, 2, NextAt::Start>(5);  // a unit a warp and stage, x by lanes
  check_int4<128, true, 64, 1536, 8, 2, 1, 4, 1, 2, 1024, 1, NextAt::Lead>(8);    // two, and zero points
  check_int4<64, false, 64, 576, 8, 1, 1, 8, 1, 2, 1024, 2>(3);                   // K that 128 does not divide
  check_int4<32, true, 64, 608, 8, 2, 1, 4, 1, 3, 256, 2>(7);                     // half loads, a short stage
  check_int4<128, false, 224, 1024, 16, 7, 7, 1, 1, 3, 256, 0, NextAt::Lead, true>(13);  // x in the ring
  check_int4<64, true, 96, 704, 32, 3, 3, 2, 1, 3, 128>(29);  // a box of x behind an odd number of units
  check_int4<128, false, 128, 2048, 32, 4, 1, 4, 2, 3, 512, 1, NextAt::Start>(32);  // a cluster, x by lanes
  check_int4<32, false, 64, 704, 16, 4, 2, 2, 2, 3, 64>(9);                         // half loads, x in the ring
  check_int4<128, true, 128, 1024, 64, 8, 4, 1, 4, 2, 128>(64);                     // all at once

  check_int4<128, false, 64, 4096, 4, 2, 1, 8, 1, 3, 1024, 2, NextAt::Start>(1);  // x as integers, one sequence
  check_int4<128, true, 112, 1536, 4, 7, 1, 4, 1, 2, 512, 1, NextAt::Lead>(4);
  check_int4<64, true, 64, 704, 4, 4, 2, 4, 1, 2, 256, 1>(3);
  check_int4<32, false, 64, 704, 4, 4, 1, 4, 2, 2, 128, 2>(2);
  check_int4<64, false, 96, 704, 4, 3, 1, 2, 1, 3, 128>(3);                       // in the ring
  check_int4<128, true, 112, 1536, 8, 7, 7, 1, 1, 3, 256>(7);

  // As they are planned with one stage under way, or two: rings that turn, one that holds a slice, a short last stage.
  check_int4<128, false, 112, 4096, 8, 7, 1, 4, 1, 3, 512, 2, NextAt::Start, false, 1>(8);
  check_int4<128, false, 128, 7168, 4, 8, 1, 4, 4, 3, 512, 2, NextAt::Start, false, 2>(4);
  check_int4<128, false, 128, 4096, 8, 8, 1, 4, 4, 2, 512, 2, NextAt::Start, false, 1>(5);
  check_int4<128, true, 64, 6400, 16, 4, 1, 8, 2, 3, 1024, 1, NextAt::Start, false, 1>(16);

  // The same where x comes by the ring, and has barriers of its own.
  check_int4<128, false, 112, 4096, 16, 7, 7, 1, 1, 5, 256, 0, NextAt::Start, false, 1>(13);
  check_int4<128, false, 128, 7168, 32, 4, 2, 4, 2, 3, 512, 0, NextAt::Start, false, 2>(32);
  check_int4<64, true, 64, 1536, 8, 4, 2, 2, 2, 3, 256, 0, NextAt::Lead, true, 1>(7);  // walks of k, integers
  check_int4<128, true, 192, 4096, 16, 12, 6, 1, 4, 3, 256, 0, NextAt::Start, false, 2, 9>(16);  // fetched to the end
  check_int4<32, false, 64, 608, 16, 4, 2, 1, 1, 3, 128, 0, NextAt::End, false, 1, 2>(9);  // a short last stage

  check_wgmma<128, false, 224, 2048, 32, 14, 2, 1, 1, 3, 256, NextAt::Start, false, 1>(32);
  check_wgmma<64, true, 256, 1024, 64, 8, 2, 1, 1, 3, 256, NextAt::Lead, true, 2, 1>(33);
  check_wgmma<128, false, 224, 1024, 32, 14, 2, 1, 1, 3, 256>(32);  // as it is planned; some rows twice
  check_wgmma<128, true, 96, 1024, 64, 6, 2, 1, 2, 3, 256>(50);     // in a cluster, and zero points
  check_wgmma<64, true, 256, 1024, 64, 8, 2, 1, 1, 3, 256, NextAt::Lead, true>(33);  // a ring that turns, walks of k
  check_wgmma<32, true, 128, 512, 8, 8, 1, 1, 1, 3, 128>(8);       // half loads, one warpgroup
  check_wgmma<32, false, 64, 512, 16, 4, 1, 2, 1, 2, 128>(13);     // two that share k
  return failures;
}
