// A small emulator of thread blocks on the host, enough to run a kernel's own source without a GPU.
//
// Every CUDA thread is a fiber; one OS thread runs them, warp by warp in random order. Warp-wide instructions
// (ldmatrix, movmatrix, mma.sync m16n8k16, wgmma, shuffles) follow the fragment layouts of the PTX manual; mbarriers count
// arrivals and bytes; a TMA copy poisons its target at once and delivers at a random later time, in some blocks much later,
// so that reading too early and overwriting too early both show. Blocks run one after the other, in random order; those of a cluster by
// turns, each with its own contents of dynamic shared memory.
//
// Ends the process with a message on: a warp that diverges at a warp-wide instruction, a barrier that is arrived at too
// often, a misaligned access, copies that nobody waited for, and a block that makes no progress.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <random>
#include <vector>

#define CUTLASS_DEVICE inline
#define CUTLASS_PRAGMA_UNROLL
#define CUTLASS_PRAGMA_NO_UNROLL
#define CUTE_HOST_DEVICE inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // all fibers share an OS thread
#define threadIdx (emulator::current->index)
#define blockIdx (emulator::block->index)
#define gridDim (emulator::block->grid)

using std::max;
using std::min;

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint16_t to_bf16(float value) {  // round to nearest even
  uint32_t const bits = bits_of(value);
  return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float from_bf16(uint16_t bits) { return float_of(uint32_t(bits) << 16); }
inline uint16_t to_half(float value) {  // round to nearest even
  if (std::isnan(value)) return 0x7fff;
  int const exponent = std::max(std::ilogb(value), -14);  // below 2^-14 the steps stay those of 2^-14
  double const steps = std::nearbyint(std::ldexp(std::fmin(std::fabs(value), 65536.f), 10 - exponent));
  uint16_t const magnitude = std::fabs(value) >= 65536.f ? 0x7c00 : uint16_t((exponent + 14) * 1024 + int(steps));
  return magnitude | (std::signbit(value) ? 0x8000 : 0);
}
inline float from_half(uint16_t bits) {
  int const exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return fraction ? NAN : bits >> 15 ? -INFINITY : INFINITY;
  float const magnitude = std::ldexp(float(exponent ? fraction + 1024 : fraction), std::max(exponent, 1) - 25);
  return bits >> 15 ? -magnitude : magnitude;
}
inline uint8_t to_e4m3(float value) {  // round to nearest even, saturate
  if (std::isnan(value)) return 0x7f;
  float const magnitude = std::fmin(std::fabs(value), 448.f);
  int const exponent = std::max(std::ilogb(magnitude), -6);  // below 2^-6 the steps stay those of 2^-6
  int const steps = std::nearbyint(std::ldexp(magnitude, 3 - exponent));
  return (std::signbit(value) ? 0x80 : 0) + (exponent + 6) * 8 + steps;
}

// What a tensor map describes: a row-major BF16 matrix and the box that one copy takes of it. Three-dimensional maps see
// its columns in groups of box_columns, and take box_groups of them.
struct CUtensorMap {
  uint16_t const* base;
  long rows, columns;
  int box_rows, box_columns;
  int box_groups = 1;
};

namespace futransformer {
inline thread_local __align__(1024) char dynamic_shared[227 * 1024];  // of the block that runs
}

namespace emulator {

using futransformer::dynamic_shared;
constexpr int kSharedBytes = sizeof(dynamic_shared);

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

[[noreturn]] inline void fail(char const* what) {
  std::fprintf(stderr, "emulator: %s\n", what);
  std::exit(3);
}
inline void expect(bool condition, char const* what) {
  if (!condition) fail(what);
}

struct Fiber {
  Index index;
  ucontext_t context;
  static constexpr int kStackBytes = 1 << 17;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool done = false;
  unsigned cluster_rounds = 0;  // barriers of the cluster that it has waited for
  bool waited = false;          // for the kernel before
  std::vector<std::function<void()>> products;  // of wgmma, not yet waited for
  std::vector<size_t> batches;                  // of them: where each ends
};

// Where the lanes of a warp meet: each leaves its operands, the last computes everybody's results.
struct Meeting {
  int instruction = 0, arrived = 0;
  unsigned round = 0;
  uint64_t in[32][8], out[32][8];
};

struct Cluster;

struct Block {
  Index index, grid;
  Cluster* cluster;
  int rank;
  bool started = false;
  std::vector<char> shared;  // dynamic shared memory while another block of the cluster runs
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Meeting> warps;
  int alive = 0, at_barrier = 0;
  unsigned barrier_round = 0;
  std::vector<std::function<void()>> copies;  // in flight
  unsigned turns_a_copy = 3;                  // on the average
  int bulk_copies = 0, most_bulk_copies = 0;  // of them, and at any time
  int let_go = 0;                             // how often it has let the next kernel start
  struct {
    unsigned arrived = 0, round = 0;
  } named_barriers[16];
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  int alive = 0, at_barrier = 0;
  unsigned barrier_round = 0;
};

inline Fiber* current = nullptr;
inline Block* block = nullptr;
inline std::function<void()> kernel;
inline std::function<void(bool)> previous_kernel = [](bool) {};  // told whether it is done: once a thread waits for it
inline ucontext_t scheduler;
inline std::mt19937 random{1};

inline void yield() { swapcontext(&current->context, &scheduler); }

inline int lane() { return current->index.x % 32; }
inline Meeting& warp() { return block->warps[current->index.x / 32]; }

template <class Compute>
void meet(int instruction, Compute compute) {
  Meeting& meeting = warp();
  if (meeting.arrived == 0) meeting.instruction = instruction;
  expect(meeting.instruction == instruction, "a warp diverged at a warp-wide instruction");
  unsigned const round = meeting.round;
  if (++meeting.arrived == 32) {
    compute(meeting);
    meeting.arrived = 0;
    ++meeting.round;
  }
  while (meeting.round == round) yield();
}

enum Instruction { kSyncWarp, kMma, kByteMma, kLoadMatrix, kLoadMatrixTransposed, kMoveMatrix, kReduce, kBallot, kWgmma, kShuffle };

// ldmatrix.x4: lane 8 i + r brings the address of row r of matrix i; lane l receives two elements of each matrix, of
// row l / 4 (transposed: of column l / 4).
inline void load_matrices(void const* row, uint32_t (&out)[4], bool transposed) {
  expect(reinterpret_cast<uintptr_t>(row) % 16 == 0, "ldmatrix of a misaligned row");
  warp().in[lane()][0] = reinterpret_cast<uint64_t>(row);
  meet(transposed ? kLoadMatrixTransposed : kLoadMatrix, [transposed](Meeting& m) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        m.out[lane][matrix] = 0;
        for (int e = 0; e < 2; ++e) {
          int const major = lane / 4, minor = 2 * (lane % 4) + e;
          auto const* elements = reinterpret_cast<uint16_t const*>(m.in[8 * matrix + (transposed ? minor : major)][0]);
          m.out[lane][matrix] |= uint64_t(elements[transposed ? major : minor]) << 16 * e;
        }
      }
    }
  });
  for (int i = 0; i < 4; ++i) out[i] = uint32_t(warp().out[lane()][i]);
}

// movmatrix.trans of an 8x8 matrix: lane l holds elements 2 (l % 4) + {0, 1} of row l / 4.
inline uint32_t transpose_matrix(uint32_t source) {
  warp().in[lane()][0] = source;
  meet(kMoveMatrix, [](Meeting& m) {
    auto const element = [&m](int row, int column) {
      return m.in[4 * row + column / 2][0] >> 16 * (column % 2) & 0xffff;
    };
    for (int lane = 0; lane < 32; ++lane) {
      int const row = lane / 4, column = 2 * (lane % 4);
      m.out[lane][0] = element(column, row) | element(column + 1, row) << 16;
    }
  });
  return uint32_t(warp().out[lane()][0]);
}

// mma.sync.m16n8k16, BF16 to float32, with g = lane / 4 and t = lane % 4:
// a[i]: row g + 8 (i % 2), k 2 t + 8 (i / 2) + {0, 1};  b[i]: k 2 t + 8 i + {0, 1}, column g;
// c[i]: row g + 8 (i / 2), column 2 t + i % 2.
inline void multiply(float (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
  uint64_t* in = warp().in[lane()];
  for (int i = 0; i < 4; ++i) in[i] = a[i] | uint64_t(bits_of(c[i])) << 32;
  for (int i = 0; i < 2; ++i) in[4 + i] = b[i];
  meet(kMma, [](Meeting& m) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      int const g = lane / 4, t = lane % 4;
      for (int e = 0; e < 2; ++e) {
        for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + e] = from_bf16(m.in[lane][i] >> 16 * e);
        for (int i = 0; i < 2; ++i) b[2 * t + 8 * i + e][g] = from_bf16(m.in[lane][4 + i] >> 16 * e);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        int const row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        double sum = float_of(m.in[lane][i] >> 32);
        for (int k = 0; k < 16; ++k) sum += double(a[row][k]) * b[k][column];
        m.out[lane][i] = bits_of(float(sum));
      }
    }
  });
  for (int i = 0; i < 4; ++i) c[i] = float_of(uint32_t(warp().out[lane()][i]));
}

// mma.sync.m16n8k32, u8 times s8: a[i]: row g + 8 (i % 2), k 4 t + 16 (i / 2) + {0 .. 3}; b[i]: k 4 t + 16 i + {0 .. 3},
// column g; c[i] as above.
template <class Byte>
inline void multiply_bytes(uint32_t (&c)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
  uint64_t* in = warp().in[lane()];
  for (int i = 0; i < 4; ++i) in[i] = a[i] | uint64_t(c[i]) << 32;
  for (int i = 0; i < 2; ++i) in[4 + i] = b[i];
  meet(kByteMma, [](Meeting& m) {
    int a[16][32], b[32][8];
    for (int lane = 0; lane < 32; ++lane) {
      int const g = lane / 4, t = lane % 4;
      for (int e = 0; e < 4; ++e) {
        for (int i = 0; i < 4; ++i) a[g + 8 * (i % 2)][4 * t + 16 * (i / 2) + e] = uint8_t(m.in[lane][i] >> 8 * e);
        for (int i = 0; i < 2; ++i) b[4 * t + 16 * i + e][g] = Byte(m.in[lane][4 + i] >> 8 * e);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        int const row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        uint32_t sum = m.in[lane][i] >> 32;
        for (int k = 0; k < 32; ++k) sum += a[row][k] * b[k][column];
        m.out[lane][i] = sum;
      }
    }
  });
  for (int i = 0; i < 4; ++i) c[i] = uint32_t(warp().out[lane()][i]);
}

// An mbarrier: a phase ends when all arrivals and all announced bytes are in.
struct Barrier {
  int expected = 0, pending = 0;
  long bytes = 0;
  unsigned phase = 0;

  void arrive() {
    expect(pending > 0, "more arrivals at a barrier than it was initialised for");
    --pending;
    advance();
  }
  void deliver(long count) {
    bytes -= count;
    advance();
  }

 private:
  void advance() {
    if (pending == 0 && bytes == 0) {
      ++phase;
      pending = expected;
    }
  }
};

// One box by TMA, 128-byte swizzle, zeros outside of the matrix.
// The source is read at once, as it may be: what is written after a copy was asked for must not be counted on.
inline void copy_box(CUtensorMap const& map, Barrier* barrier, char* target, int column, int row) {
  expect(reinterpret_cast<uintptr_t>(target) % 1024 == 0, "a swizzled box must start at a multiple of 1024 bytes");
  int const bytes = map.box_rows * map.box_columns * 2;
  std::fill_n(reinterpret_cast<uint16_t*>(target), bytes / 2, 0x7fc1);  // NaN
  std::vector<char> box(bytes);
  for (int r = 0; r < map.box_rows; ++r) {
    for (int c = 0; c < map.box_columns; ++c) {
      bool const inside = row + r >= 0 && row + r < map.rows && column + c < map.columns;
      uint16_t const value = inside ? map.base[(long(row) + r) * map.columns + column + c] : 0;
      int const offset = (r * map.box_columns + c) * 2;
      std::memcpy(&box[offset ^ (offset >> 7 & 7) << 4], &value, 2);
    }
  }
  block->copies.push_back([=] {
    std::memcpy(target, box.data(), bytes);
    barrier->deliver(bytes);
  });
}

// A dense box of groups of columns: [box_groups][box_rows][box_columns], zeros outside of the matrix.
inline void copy_groups(CUtensorMap const& map, Barrier* barrier, char* target, int column, int row, int group) {
  expect(reinterpret_cast<uintptr_t>(target) % 128 == 0, "a box must start at a multiple of 128 bytes");
  int const elements = map.box_groups * map.box_rows * map.box_columns;
  std::fill_n(reinterpret_cast<uint16_t*>(target), elements, 0x7fc1);  // NaN
  block->copies.push_back([=] {
    for (int i = 0; i < elements; ++i) {
      long const c = column + long(group + i / map.box_columns / map.box_rows) * map.box_columns + i % map.box_columns;
      long const r = row + i / map.box_columns % map.box_rows;
      uint16_t const value = r < map.rows && c < map.columns ? map.base[r * map.columns + c] : 0;
      std::memcpy(target + 2 * i, &value, 2);
    }
    barrier->deliver(2 * elements);
  });
}

// A bulk copy of contiguous memory.
inline void copy_bytes(void* target, void const* source, int bytes, Barrier* barrier) {
  auto const misalignment = reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source) | unsigned(bytes);
  expect(misalignment % 16 == 0, "a misaligned bulk copy");
  std::fill_n(static_cast<uint16_t*>(target), bytes / 2, 0x7fc1);  // NaN
  Block* const owner = block;
  owner->most_bulk_copies = std::max(owner->most_bulk_copies, ++owner->bulk_copies);
  block->copies.push_back([=] {
    std::memcpy(target, source, bytes);
    barrier->deliver(bytes);
    --owner->bulk_copies;
  });
}

// Four floats into the shared memory of another block of the cluster, counted by its barrier.
inline void store_in_block(float4 const& value, float* target, Barrier* const& arrived, int rank) {
  auto& blocks = block->cluster->blocks;
  expect(rank >= 0 && rank < int(blocks.size()) && rank != block->rank, "no other block of the cluster");
  Block& other = *blocks[rank];
  expect(other.started, "a store into a block that has not started");
  expect(other.alive > 0, "a store into a block that has ended");
  auto const offset = [](void const* local) {
    long const bytes = static_cast<char const*>(local) - dynamic_shared;
    expect(bytes >= 0 && bytes < kSharedBytes && bytes % 8 == 0, "no aligned address of shared memory");
    return bytes;
  };
  long const to = offset(target), of_barrier = offset(&arrived);
  expect(to % 16 == 0, "a misaligned store of 16 bytes");
  other.copies.push_back([=] {  // while that block runs
    std::memcpy(dynamic_shared + to, &value, 16);
    (*reinterpret_cast<Barrier**>(dynamic_shared + of_barrier))->deliver(16);
  });
}

// Where another block of the cluster has what this one has at `local`. To read: it is a copy while this block runs.
inline char* in_block(char const* local, int rank) {
  auto& blocks = block->cluster->blocks;
  expect(rank >= 0 && rank < int(blocks.size()), "no block of the cluster");
  Block& other = *blocks[rank];
  expect(other.started && other.alive > 0, "shared memory of a block that has not started, or has ended");
  long const bytes = local - dynamic_shared;
  expect(bytes >= 0 && bytes < kSharedBytes, "no address of shared memory");
  return &other == block ? dynamic_shared + bytes : other.shared.data() + bytes;
}

// wgmma of BF16: 64 rows of A in the registers of four warps, B [columns, 16 k] in shared memory with the 64-byte swizzle.
// Each warp has sixteen rows to itself. Here too both operands are read until the product is waited for.
template <class Words, int Sums>
void multiply_rows(Words const& a, uint64_t b, float (&d)[Sums], bool adds) {
  expect(b % 512 < 64, "wgmma of a misaligned B");
  for (int i = 0; i < 2; ++i) warp().in[lane()][i] = a.word[2 * i] | uint64_t(a.word[2 * i + 1]) << 32;
  meet(kWgmma, [](Meeting& m) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int word = 0; word < 8; ++word) m.out[lane][word] = m.in[lane / 4 * 4 + word / 2][word % 2];
    }
  });
  for (int i = 0; i < Sums; ++i) {
    int const column = i / 4 * 8 + 2 * (lane() % 4) + i % 2, row_half = i / 2 % 2;
    float sum = adds ? d[i] : 0;
    for (int k = 0; k < 16; ++k) {
      uint64_t at = b + column * 64 + 2 * k;
      at ^= (at >> 7 & 3) << 4;
      // Two k a register of the lane that has them; registers of row g and g + 8 by turns.
      uint64_t const registers = warp().out[lane()][k % 8 / 2 * 2 + k / 8];
      sum += from_bf16(registers >> 32 * row_half >> 16 * (k % 2)) * from_bf16(*reinterpret_cast<uint16_t const*>(at));
    }
    d[i] = sum;
  }
}

inline void enter() {
  kernel();
  current->done = true;
  --block->alive;
  --block->cluster->alive;
  yield();
}

inline void prepare(Block& prepared, int threads) {
  prepared.warps = std::vector<Meeting>(threads / 32);
  prepared.shared = std::vector<char>(kSharedBytes);
  prepared.alive = threads;
  for (int thread = 0; thread < threads; ++thread) {
    auto fiber = std::make_unique<Fiber>();
    fiber->index.x = thread;
    getcontext(&fiber->context);
    fiber->context.uc_stack = {fiber->stack.get(), 0, Fiber::kStackBytes};
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, enter, 0);
    prepared.fibers.push_back(std::move(fiber));
  }
}

// Some turns of the warps and copies of a block; as far as it goes where it is alone.
inline void run_turns(Block& running, int threads, int turns) {
  block = &running;
  if (!running.started) {  // what others wrote before is lost
    std::fill(running.shared.begin(), running.shared.end(), 0x7f);
    running.started = true;
    if (random() % 4 == 0) running.turns_a_copy = 60;
  }
  std::memcpy(dynamic_shared, running.shared.data(), kSharedBytes);
  for (int turn = 0; running.alive > 0 && turn < turns; ++turn) {
    int const warp = random() % (threads / 32);
    for (int lane = 0; lane < 32; ++lane) {
      current = running.fibers[32 * warp + lane].get();
      if (!current->done) swapcontext(&scheduler, &current->context);
    }
    if (!running.copies.empty() && random() % running.turns_a_copy == 0) {
      std::swap(running.copies[random() % running.copies.size()], running.copies.back());
      auto const copy = running.copies.back();
      running.copies.pop_back();
      copy();
    }
  }
  std::memcpy(running.shared.data(), dynamic_shared, kSharedBytes);
  if (running.alive > 0) return;
  expect(running.copies.empty(), "a block ended before its copies arrived");
}

inline void run_cluster(Cluster& cluster, int threads) {
  int const blocks = cluster.blocks.size();
  cluster.alive = blocks * threads;
  previous_kernel(false);
  for (auto& member : cluster.blocks) prepare(*member, threads);
  for (int rounds = 0; cluster.alive > 0; ++rounds) {
    expect(rounds < 10'000 * blocks, "a block makes no progress");
    Block& next = *cluster.blocks[random() % blocks];
    if (next.alive > 0) run_turns(next, threads, 100);
  }
}

inline void launch(Index grid, int threads, std::function<void()> entry, int cluster_blocks = 1) {
  std::vector<Index> order;  // of the first blocks of the clusters
  for (unsigned i = 0; i < grid.x * grid.y * grid.z; i += cluster_blocks) {
    order.push_back({i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y});
  }
  std::shuffle(order.begin(), order.end(), random);
  kernel = std::move(entry);
  for (Index index : order) {
    Cluster cluster;
    for (int rank = 0; rank < cluster_blocks; ++rank, ++index.x) {
      auto member = std::make_unique<Block>();
      member->index = index;
      member->grid = grid;
      member->cluster = &cluster;
      member->rank = rank;
      cluster.blocks.push_back(std::move(member));
    }
    run_cluster(cluster, threads);
  }
}

}  // namespace emulator

inline void __syncwarp() {
  emulator::meet(emulator::kSyncWarp, [](emulator::Meeting&) {});
}

// Threads that have ended do not count, as on the device.
inline void __syncthreads() {
  auto* const block = emulator::block;
  unsigned const round = block->barrier_round;
  ++block->at_barrier;
  while (block->barrier_round == round) {
    if (block->at_barrier == block->alive) {
      block->at_barrier = 0;
      ++block->barrier_round;
    } else {
      emulator::yield();
    }
  }
}

template <class T>
T __shfl_xor_sync(uint32_t, T value, int distance) {
  static_assert(sizeof(T) == 4);
  std::memcpy(emulator::warp().in[emulator::lane()], &value, 4);
  emulator::meet(emulator::kShuffle + distance, [distance](emulator::Meeting& m) {
    for (int lane = 0; lane < 32; ++lane) m.out[lane][0] = m.in[lane ^ distance][0];
  });
  std::memcpy(&value, emulator::warp().out[emulator::lane()], 4);
  return value;
}

template <class T>
T __shfl_down_sync(uint32_t, T value, int distance) {
  static_assert(sizeof(T) == 4);
  std::memcpy(emulator::warp().in[emulator::lane()], &value, 4);
  emulator::meet(emulator::kShuffle + 64 + distance, [distance](emulator::Meeting& m) {
    for (int lane = 0; lane < 32; ++lane) m.out[lane][0] = m.in[lane + distance < 32 ? lane + distance : lane][0];
  });
  std::memcpy(&value, emulator::warp().out[emulator::lane()], 4);
  return value;
}

template <class T>
T __shfl_sync(uint32_t, T value, int source) {
  static_assert(sizeof(T) == 4);
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  emulator::warp().in[emulator::lane()][0] = bits | uint64_t(source) << 32;
  emulator::meet(emulator::kShuffle, [](emulator::Meeting& m) {
    for (int lane = 0; lane < 32; ++lane) m.out[lane][0] = uint32_t(m.in[m.in[lane][0] >> 32][0]);
  });
  std::memcpy(&value, emulator::warp().out[emulator::lane()], 4);
  return value;
}

template <class T>
T __reduce_max_sync(uint32_t, T value) {
  static_assert(sizeof(T) == 4);
  emulator::warp().in[emulator::lane()][0] = uint32_t(value);
  emulator::meet(emulator::kReduce, [](emulator::Meeting& m) {
    T most = T(uint32_t(m.in[0][0]));
    for (int lane = 1; lane < 32; ++lane) most = max(most, T(uint32_t(m.in[lane][0])));
    for (int lane = 0; lane < 32; ++lane) m.out[lane][0] = uint32_t(most);
  });
  return T(uint32_t(emulator::warp().out[emulator::lane()][0]));
}

inline uint32_t __ballot_sync(uint32_t, bool value) {
  emulator::warp().in[emulator::lane()][0] = value;
  emulator::meet(emulator::kBallot, [](emulator::Meeting& m) {
    uint32_t lanes = 0;
    for (int lane = 0; lane < 32; ++lane) lanes |= uint32_t(m.in[lane][0]) << lane;
    for (int lane = 0; lane < 32; ++lane) m.out[lane][0] = lanes;
  });
  return emulator::warp().out[emulator::lane()][0];
}

inline bool __any_sync(uint32_t mask, bool value) { return __reduce_max_sync(mask, int(value)); }

// Fibers take turns where they wait: nothing comes between the read and the write.
template <class T>
T atomicAdd(T* target, T value) {
  T const before = *target;
  *target += value;
  return before;
}
template <class T>
T atomicMax(T* target, T value) {
  T const before = *target;
  *target = max(before, value);
  return before;
}

template <class T>
T __ldg(T const* source) {
  return *source;
}
template <class T>
void __stcg(T* target, T const& value) {
  emulator::expect(reinterpret_cast<uintptr_t>(target) % sizeof(T) == 0, "a misaligned store");
  *target = value;
}
template <class T>
T __ldcg(T const* source) {
  return *source;
}
inline int __ffs(unsigned value) { return __builtin_ffs(int(value)); }
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; ++i) sum += int8_t(a >> 8 * i) * int8_t(b >> 8 * i);
  return sum;
}
inline long long clock64() { return 0; }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint64_t const bytes = uint64_t(high) << 32 | low;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return chosen;
}
inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
inline uint32_t __vimax3_u32(uint32_t a, uint32_t b, uint32_t c) { return max(max(a, b), c); }
inline uint32_t __vimin_s16x2_relu(uint32_t a, uint32_t b) {
  auto const half = [](uint32_t x, uint32_t y) { return uint16_t(max(min(int16_t(x), int16_t(y)), int16_t(0))); };
  return half(a, b) | uint32_t(half(a >> 16, b >> 16)) << 16;
}
inline uint32_t __float_as_uint(float value) { return bits_of(value); }
inline float __uint_as_float(uint32_t bits) { return float_of(bits); }
inline int __clz(int value) { return value ? __builtin_clz(value) : 32; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }

namespace cutlass {
inline int canonical_warp_idx_sync() { return threadIdx.x / 32; }
struct bfloat16_t {
  uint16_t storage;
};
struct float_e4m3_t {
  uint8_t storage;
};
namespace arch {
struct ClusterBarrier {
  emulator::Barrier* state;  // eight bytes, as on the device

  void init(int arrivals) {
    state = new emulator::Barrier;  // lives as long as the process: so do the tests
    state->expected = state->pending = arrivals;
  }
  void arrive() const { state->arrive(); }
  bool test_wait(uint32_t parity) const { return (state->phase & 1) != parity; }
};
struct ClusterTransactionBarrier : ClusterBarrier {
  void arrive_and_expect_tx(uint32_t bytes) const {
    state->bytes += bytes;
    state->arrive();
  }
};
struct NamedBarrier {
  static void sync(unsigned threads, unsigned id) {
    auto& barrier = emulator::block->named_barriers[id];
    unsigned const round = barrier.round;
    if (++barrier.arrived == threads) {
      barrier.arrived = 0;
      ++barrier.round;
    }
    while (barrier.round == round) emulator::yield();
  }
};
template <int>
void warpgroup_reg_alloc() {}
template <int>
void warpgroup_reg_dealloc() {}
inline void fence_barrier_init() {}
inline void fence_view_async_shared() {}
}  // namespace arch
}  // namespace cutlass

namespace cute {
using uint128_t = unsigned __int128;
namespace TMA {
enum class CacheHintSm90 : uint64_t { EVICT_FIRST, EVICT_NORMAL, EVICT_LAST };
}
inline void prefetch_tma_descriptor(CUtensorMap const*) {}
struct SM90_TMA_LOAD_2D {
  static void copy(void const* map, uint64_t* barrier, uint64_t, void* target, int column, int row) {
    emulator::copy_box(*static_cast<CUtensorMap const*>(map), *reinterpret_cast<emulator::Barrier**>(barrier),
                       static_cast<char*>(target), column, row);
  }
};
struct SM90_TMA_LOAD_3D {
  static void copy(void const* map, uint64_t* barrier, uint64_t, void* target, int column, int row, int group) {
    emulator::expect(emulator::current->waited, "x was asked for before the kernel that writes it was done");
    emulator::copy_groups(*static_cast<CUtensorMap const*>(map), *reinterpret_cast<emulator::Barrier**>(barrier),
                          static_cast<char*>(target), column, row, group);
  }
};
struct SM75_U32x4_LDSM_N {
  static void copy(uint128_t const& row, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
    uint32_t words[4];
    emulator::load_matrices(&row, words, false);
    a = words[0], b = words[1], c = words[2], d = words[3];
  }
};
struct SM75_U16x8_LDSM_T {
  static void copy(uint128_t const& row, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
    uint32_t words[4];
    emulator::load_matrices(&row, words, true);
    a = words[0], b = words[1], c = words[2], d = words[3];
  }
};
struct SM75_U32x1_MOVM_T {
  static void copy(uint32_t source, uint32_t& target) { target = emulator::transpose_matrix(source); }
};
struct SM80_16x8x16_F32BF16BF16F32_TN {
  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                  uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
    float c[4] = {c0, c1, c2, c3};
    emulator::multiply(c, {a0, a1, a2, a3}, {b0, b1});
    d0 = c[0], d1 = c[1], d2 = c[2], d3 = c[3];
  }
};
struct SM80_16x8x32_S32U8S8S32_TN {
  static void fma(uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                  uint32_t a3, uint32_t b0, uint32_t b1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t c[4] = {c0, c1, c2, c3};
    emulator::multiply_bytes<int8_t>(c, {a0, a1, a2, a3}, {b0, b1});
    d0 = c[0], d1 = c[1], d2 = c[2], d3 = c[3];
  }
};
struct SM80_16x8x32_S32U8U8S32_TN {
  static void fma(uint32_t& d0, uint32_t& d1, uint32_t& d2, uint32_t& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                  uint32_t a3, uint32_t b0, uint32_t b1, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
    uint32_t c[4] = {c0, c1, c2, c3};
    emulator::multiply_bytes<uint8_t>(c, {a0, a1, a2, a3}, {b0, b1});
    d0 = c[0], d1 = c[1], d2 = c[2], d3 = c[3];
  }
};
}  // namespace cute

namespace futransformer {

using bf16 = cutlass::bfloat16_t;
using e4m3 = cutlass::float_e4m3_t;
constexpr float kLargestE4m3 = 448.f;

inline uint32_t pack_bf16x2(float low, float high) { return to_bf16(low) | uint32_t(to_bf16(high)) << 16; }
inline float bf16_low(uint32_t packed) { return float_of(packed << 16); }
inline float bf16_high(uint32_t packed) { return float_of(packed & 0xffff0000u); }
inline uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16x2(bf16_low(a) - bf16_low(b), bf16_high(a) - bf16_high(b));
}
inline uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16x2(bf16_low(a) * bf16_low(b), bf16_high(a) * bf16_high(b));
}
inline float larger(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b); }
inline uint32_t larger_magnitude_bf16x2(uint32_t a, uint32_t b) {
  return pack_bf16x2(larger(std::fabs(bf16_low(a)), std::fabs(bf16_low(b))),
                     larger(std::fabs(bf16_high(a)), std::fabs(bf16_high(b))));
}
inline float2 unpack_halves(uint32_t packed) { return {from_half(packed), from_half(packed >> 16)}; }
inline uint32_t pack_halves(float low, float high) { return to_half(low) | uint32_t(to_half(high)) << 16; }
inline float reciprocal_approx(float x) {  // off by one unit at most, either way
  return float_of(bits_of(1 / x) + emulator::random() % 3 - 1);
}
inline uint4 pack_bf16x8(float const (&values)[8]) {
  return {pack_bf16x2(values[0], values[1]), pack_bf16x2(values[2], values[3]), pack_bf16x2(values[4], values[5]),
          pack_bf16x2(values[6], values[7])};
}
inline uint4 keep_bf16x8(float const (&values)[8]) { return pack_bf16x8(values); }
inline void unpack_bf16x8(uint4 const& word, float (&values)[8]) {
  uint32_t const pairs[4] = {word.x, word.y, word.z, word.w};
  for (int i = 0; i < 8; ++i) values[i] = i % 2 ? bf16_high(pairs[i / 2]) : bf16_low(pairs[i / 2]);
}
inline void load_bf16x8(bf16 const* source, float (&values)[8]) {
  emulator::expect(reinterpret_cast<uintptr_t>(source) % 16 == 0, "a misaligned load of 16 bytes");
  unpack_bf16x8(*reinterpret_cast<uint4 const*>(source), values);
}
inline void store_bf16x8(bf16* target, float const (&values)[8]) {
  emulator::expect(reinterpret_cast<uintptr_t>(target) % 16 == 0, "a misaligned store of 16 bytes");
  *reinterpret_cast<uint4*>(target) = pack_bf16x8(values);
}
inline uint32_t pack_e4m3x4(float a, float b, float c, float d) {
  return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | uint32_t(to_e4m3(d)) << 24;
}
inline void store_e4m3x8(e4m3* target, float const (&values)[8]) {
  emulator::expect(reinterpret_cast<uintptr_t>(target) % 8 == 0, "a misaligned store of 8 bytes");
  for (int i = 0; i < 8; ++i) target[i].storage = to_e4m3(values[i]);
}
inline void store_f32x8(float* target, float const (&values)[8]) {
  emulator::expect(reinterpret_cast<uintptr_t>(target) % 16 == 0, "misaligned stores of 16 bytes");
  std::copy(values, values + 8, target);
}
inline void unpack_f32x8(float4 const (&words)[2], float (&values)[8]) { std::copy(&words[0].x, &words[0].x + 8, values); }
inline float exp2_flush(float x) {
  float const power = std::exp2(x);
  return power < 0x1p-126f ? 0.f : power;
}
inline float tanh_approx(float x) { return std::tanh(x); }
inline int arrive(int* counter) { return (*counter)++; }
inline void arrive_at_cluster() {
  auto* const cluster = emulator::block->cluster;
  if (++cluster->at_barrier == cluster->alive) {
    cluster->at_barrier = 0;
    ++cluster->barrier_round;
  }
}
// Every thread waits once for each of its arrivals.
inline void wait_for_cluster() {
  auto* const cluster = emulator::block->cluster;
  unsigned const round = ++emulator::current->cluster_rounds;
  while (cluster->barrier_round < round) emulator::yield();
}
inline void sync_cluster() {
  arrive_at_cluster();
  wait_for_cluster();
}
template <class T>
T* in_block(T* variable, int rank) {
  return reinterpret_cast<T*>(emulator::in_block(reinterpret_cast<char const*>(variable), rank));
}
inline void store_in_block(float4 const& value, float* target,
                           cutlass::arch::ClusterTransactionBarrier const& arrived, int rank) {
  emulator::store_in_block(value, target, arrived.state, rank);
}
inline void wait_for_previous_kernel() {
  emulator::current->waited = true;
  emulator::previous_kernel(true);
}
inline void allow_next_kernel() { ++emulator::block->let_go; }
inline void fetch_bulk(void const* source, int bytes) {
  emulator::expect(bytes > 0 && bytes % 16 == 0 && uintptr_t(source) % 16 == 0, "a misaligned fetch");
  static_cast<void>(*static_cast<unsigned char const volatile*>(source));  // faults where it is nobody's memory
  static_cast<void>(static_cast<unsigned char const volatile*>(source)[bytes - 1]);
}
inline void load_bulk_once(void* target, void const* source, int bytes,
                           cutlass::arch::ClusterTransactionBarrier& full) {
  emulator::copy_bytes(target, source, bytes, full.state);
}
inline void wait(cutlass::arch::ClusterBarrier const& barrier, uint32_t parity) {
  while ((barrier.state->phase & 1) == parity) emulator::yield();
}
inline int thread_now() { return threadIdx.x; }

// What blocks leave for one another: seen at once. Who asks in vain lets others go on.
struct alignas(16) TaggedVector {
  uint64_t words[2];
};
using TaggedWord = uint64_t;
inline uint64_t tagged(uint32_t word, uint32_t tag) { return uint64_t(tag) << 32 | word; }
inline bool has_tag(uint64_t word, uint32_t tag) { return uint32_t(word >> 32) == tag; }
inline bool has_tag(TaggedVector const& vector, uint32_t tag) {
  return has_tag(vector.words[0], tag) && has_tag(vector.words[1], tag);
}
inline void send(TaggedVector* place, uint32_t first, uint32_t second, uint32_t tag) {
  *place = {tagged(first, tag), tagged(second, tag)};
}
inline void send(TaggedWord* place, uint32_t word, uint32_t tag) { *place = tagged(word, tag); }
template <class Word>
Word look(Word const* place) {
  emulator::yield();
  return *place;
}

inline uint64_t wgmma_descriptor(void const* b) { return reinterpret_cast<uint64_t>(b) >> 4; }
template <int Sums>
void begin_wgmma(float (&)[Sums]) {}
template <class Words, int Sums>
void multiply_wgmma(Words const& a, uint64_t b, float (&d)[Sums], bool adds) {
  emulator::current->products.push_back([=, &a, &d] { emulator::multiply_rows(a, b << 4, d, adds); });
}
inline void commit_wgmma() {
  emulator::current->batches.push_back(emulator::current->products.size());
}
template <int Pending, int Sums>
void wait_for_wgmma(float (&)[Sums]) {
  auto& products = emulator::current->products;
  auto& batches = emulator::current->batches;
  if (batches.size() <= Pending) return;
  size_t const done = batches[batches.size() - Pending - 1];
  for (size_t i = 0; i < done; ++i) products[i]();
  products.erase(products.begin(), products.begin() + done);
  batches.erase(batches.begin(), batches.end() - Pending);
  for (size_t& end : batches) end -= done;
}
template <int Lanes>
float sum_over_lanes(float value) {
  for (int distance = Lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

}  // namespace futransformer

namespace emulator {

// An argument of a kernel, of a file: it is written back in the end.
template <class T>
struct File {
  std::string path;
  long bytes;
  std::vector<uint4> words;  // 16-byte aligned, as on the device

  explicit File(std::string const& name) : path(name) {
    FILE* file = std::fopen(path.c_str(), "rb");
    expect(file, name.c_str());
    std::fseek(file, 0, SEEK_END);
    bytes = std::ftell(file);
    std::rewind(file);
    words.resize(bytes / 16 + 1);
    expect(long(std::fread(words.data(), 1, bytes, file)) == bytes, name.c_str());
    std::fclose(file);
  }
  ~File() {
    FILE* file = std::fopen(path.c_str(), "wb");
    std::fwrite(words.data(), 1, bytes, file);
    std::fclose(file);
  }
  operator T*() { return reinterpret_cast<T*>(words.data()); }
};

}  // namespace emulator
