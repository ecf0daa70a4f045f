// The decode GEMM's own source in the emulator, against double precision: ring, slices of K, warps that share row tiles
// and k, clusters that add one another's sums, short last stages, batches below the tile.
#include <sys/mman.h>
#include <unistd.h>

#include "fragment.cuh"

#include "decode_gemm.cuh"

// Stores scaled sums, and adds up what it stored: every call of the epilogue's protocol.
struct StoreScaled {
  static constexpr int kWidth = 8;
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

template <int N, int K, int BatchTile, int RowTiles, int WarpRows, int WarpSplit, int Cluster, int Stages, int StageK,
          int XAhead = 0, NextAt Next = NextAt::End, bool Rotate = false>
void check(int m) {
  using Gemm = futransformer::DecodeGemm<cutlass::bfloat16_t, K, BatchTile, RowTiles, WarpRows, WarpSplit, Cluster,
                                         Stages, StageK, XAhead, Next, Rotate>;
  constexpr int kBlocks = N / (16 * RowTiles) * Cluster;
  std::mt19937 random(m);
  std::normal_distribution<float> normal;
  struct alignas(16) Chunk {
    uint16_t element[8];
  };
  std::vector<Chunk> weight(N * K / 8);
  Guarded const x_memory(size_t(m) * K * 2);
  auto* const x = static_cast<Chunk*>(x_memory.last(size_t(m) * K * 2));
  std::vector<float> logical(N * K), scales(m), out(m * N, NAN), sums(m * kBlocks, NAN);
  for (int i = 0; i < N * K; ++i) {
    uint16_t const bits = to_bf16(normal(random));
    // Fragment order [N / 16, K / 16, lane, 8]: element e of lane 4 g + t, MMA j of a group of 32 k.
    int const e = i % 8, lane = i / 8 % 32, step = i / 256 % (K / 16), tile = i / 256 / (K / 16);
    int const row = 16 * tile + lane / 4 + 8 * (e / 2 % 2);
    int const k = step / 2 * 32 + lane % 4 * 8 + step % 2 * 4 + e / 4 * 2 + e % 2;
    weight[i / 8].element[i % 8] = bits;
    logical[row * K + k] = from_bf16(bits);
  }
  for (int i = 0; i < m * K; ++i) x[i / 8].element[i % 8] = to_bf16(normal(random));
  for (float& scale : scales) scale = normal(random);

  CUtensorMap const x_map{x[0].element, m, K, BatchTile, 32, StageK / 32};
  auto const source = static_cast<typename Gemm::X>(Gemm::kXInRing ? static_cast<void const*>(&x_map) : x);
  StoreScaled const epilogue{N, kBlocks, scales.data(), out.data(), sums.data()};
  // x is there once the kernel before is done. In the emulator a thread that reads it sooner faults.
  emulator::previous_kernel = [&](bool done) { x_memory.show(done); };
  auto const run = [&] {
    Gemm::run(source, weight.data(), m, epilogue);
    emulator::expect(emulator::block->let_go == 1, "a block must let the next kernel start, and once");
  };
  emulator::launch({kBlocks, 1, 1}, Gemm::kThreads, run, Cluster);

  double worst = 0;
  for (int row = 0; row < m; ++row) {
    for (int part = 0; part < kBlocks; ++part) {
      double total = 0, size = 0;
      for (int column = part * (N / kBlocks); column < (part + 1) * (N / kBlocks); ++column) {
        double exact = 0, magnitude = 0;
        for (int k = 0; k < K; ++k) {
          double const product = double(logical[column * K + k]) * from_bf16(x[(row * K + k) / 8].element[k % 8]);
          exact += product;
          magnitude += std::fabs(product);
        }
        // Float32 sums: every addition rounds to half a unit of 2^-23, K / 16 of them and the parts.
        double const allowed = magnitude * std::fabs(scales[row]) * (K / 16 + 20) * 0x1p-24;
        double const error = std::fabs(out[row * N + column] - exact * scales[row]);
        worst = std::max(worst, error <= allowed ? error / allowed : INFINITY);
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
  return failures;
}
