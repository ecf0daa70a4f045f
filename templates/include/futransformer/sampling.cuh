// Sampling: a row's next token by repetition penalty, temperature, top-k, top-p, min-p and a seeded draw.
//
// A cluster has a row; each block keeps a slice of its tokens in shared memory, and reads logits once. Nothing is sorted:
// top-k and top-p keep what lies at most so many steps below the likeliest, and that number is found eight bits at a
// time, by counting tokens and adding masses in 256 bins. These are integers, so that sums have no order: every run, and
// the reference (futransformer/sampling.py, where the steps are defined), finds the same token.
#pragma once

#include <cmath>
#include <cstdint>

#include "candidate.cuh"
#include "cluster_memory.cuh"
#include "dependent_launch.cuh"
#include "sampling_numbers.cuh"

namespace futransformer {

// What is asked of each row; `seen`, if not null, has a bit for every token: the penalised, to which the chosen is added.
struct SamplingRows {
  float const* temperature;
  int const* top_k;
  float const* top_p;
  float const* min_p;
  float const* repetition_penalty;
  long long const* seed;
  int const* position;
  unsigned* seen;
};

template <int Vocabulary, int Blocks, int Threads>
struct Sample {
  static constexpr int kThreads = Threads;
  static constexpr int kWarps = Threads / 32;
  static constexpr int kQuads = (Vocabulary + 3) / 4;                    // tokens come in fours, as random bits do
  static constexpr int kBlockQuads = (kQuads + Blocks - 1) / Blocks;
  static constexpr int kWords = (Vocabulary + 31) / 32;                  // of `seen`, a row
  static constexpr int kDigitBits = 8, kBins = 1 << kDigitBits;
  static constexpr int kDigits = 3;                                      // of 24 bits of steps
  static_assert(Threads % 32 == 0 && Threads >= kBins && Blocks <= 8, "a thread a bin, a lane a block");

  // How many tokens lie in each bin, and their masses in two halves, so that no sum of a block passes 32 bits.
  struct Histogram {
    uint32_t count[kBins], low[kBins], high[kBins];
  };
  struct Sums {
    uint64_t mass;
    uint32_t count;

    CUTLASS_DEVICE void operator+=(Sums const& other) { mass += other.mass, count += other.count; }
    CUTLASS_DEVICE void operator-=(Sums const& other) { mass -= other.mass, count -= other.count; }
  };
  // The bin in which a bound is met (of all digits, the steps); what lies before it, and up to its end.
  struct Found {
    uint32_t bin;
    Sums before, through;
  };
  struct Shared {
    uint4 tokens[kBlockQuads];  // logits, then steps
    Histogram whole, of_k[kDigits - 1], of_p[kDigits - 1];
    Candidate warp_best[kWarps], largest, chosen;
    Sums warp_sums[kWarps];
    Found found;
  };
  static constexpr int kSharedBytes = (sizeof(Shared) + 15) / 16 * 16;
  static_assert(4 * kBlockQuads <= 1 << 16, "the halves of a slice's masses fit 32 bits each");

  CUTLASS_DEVICE static void run(float const* logits, int logits_stride, SamplingRows const& rows, int* out) {
    extern __shared__ __align__(1024) char dynamic_shared[];
    allow_next_kernel();
    wait_for_previous_kernel();
    int const row = blockIdx.y;
    Sample block{*reinterpret_cast<Shared*>(dynamic_shared), int(blockIdx.x)};
    unsigned* const seen = rows.seen ? rows.seen + size_t(row) * kWords : nullptr;
    block.clear_histograms();
    block.load(logits + size_t(row) * logits_stride, seen, rows.repetition_penalty[row]);
    Candidate const largest = block.best_of_cluster(block.shared.largest);

    float const temperature = rows.temperature[row];
    Candidate chosen = largest;
    if (temperature != 0.f && largest.value > -INFINITY) {  // the same for all blocks
      uint32_t const most = block.bound(largest.value, __fdiv_rn(kLog2E, temperature), rows.top_k[row], rows.top_p[row]);
      block.draw(largest.index, most, rows.min_p[row], rows.position[row], rows.seed[row]);
      chosen = block.best_of_cluster(block.shared.chosen);
    }
    if (block.rank == 0 && threadIdx.x == 0) {
      int const token = chosen.index == INT_MAX ? 0 : chosen.index;
      out[row] = token;
      if (seen) seen[token / 32] |= 1u << token % 32;
    }
    sync_cluster();  // no block ends while another reads its shared memory
  }

  Shared& shared;
  int rank;

  CUTLASS_DEVICE void clear_histograms() {
    uint32_t* const words = shared.whole.count;
    for (int i = threadIdx.x; i < int((2 * kDigits - 1) * sizeof(Histogram) / 4); i += Threads) words[i] = 0;
  }

  // Quads of this block by turns of its threads: each comes back to those that it has written itself.
  template <class Visit>
  CUTLASS_DEVICE void for_quads(Visit visit) {
    int const quads = min(kBlockQuads, kQuads - rank * kBlockQuads);
    for (int i = threadIdx.x; i < quads; i += Threads) visit(rank * kBlockQuads + i, shared.tokens[i]);
  }

  // Keep the slice's logits, penalised; each block's best in shared.largest. Beyond the vocabulary there is NaN. Loads are
  // asked for some at a time: one of a thread's after the other would take their latency as often.
  CUTLASS_DEVICE void load(float const* logits, unsigned const* seen, float penalty) {
    constexpr int kAtOnce = 4;
    int const first = rank * kBlockQuads, quads = min(kBlockQuads, kQuads - first);
    Candidate best = Candidate::none();
    for (int begin = threadIdx.x; begin < quads; begin += kAtOnce * Threads) {
      float4 fours[kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) fours[i] = logits_of(logits, first + min(begin + i * Threads, quads - 1));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        int const mine = begin + i * Threads, token = 4 * (first + mine);
        if (mine >= quads) break;
        float values[4] = {fours[i].x, fours[i].y, fours[i].z, fours[i].w};
        uint32_t const penalised = seen ? seen[token / 32] >> token % 32 : 0;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) {
          float const value = values[j];
          if (penalised >> j & 1) values[j] = value > 0 ? __fdiv_rn(value, penalty) : __fmul_rn(value, penalty);
          best.consider(values[j], token + j);
        }
        shared.tokens[mine] = make_uint4(__float_as_uint(values[0]), __float_as_uint(values[1]),
                                         __float_as_uint(values[2]), __float_as_uint(values[3]));
      }
    }
    best_of_block(best, shared.largest);
  }

  CUTLASS_DEVICE static float4 logits_of(float const* logits, int quad) {
    int const token = 4 * quad;
    if (reinterpret_cast<uintptr_t>(logits) % 16 == 0 && token + 3 < Vocabulary) {
      return *reinterpret_cast<float4 const*>(logits + token);
    }
    auto const one = [&](int i) { return token + i < Vocabulary ? logits[token + i] : NAN; };
    return {one(0), one(1), one(2), one(3)};
  }

  CUTLASS_DEVICE void best_of_block(Candidate best, Candidate& of_block) {
    best.reduce_over_lanes<32>();
    if (threadIdx.x % 32 == 0) shared.warp_best[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    best = threadIdx.x < kWarps ? shared.warp_best[threadIdx.x] : Candidate::none();
    best.reduce_over_lanes<32>();
    if (threadIdx.x == 0) of_block = best;
  }

  // The best of what best_of_block has left in every block, for all threads.
  CUTLASS_DEVICE Candidate best_of_cluster(Candidate const& of_block) {
    sync_cluster();
    int const other = threadIdx.x % 32;
    Candidate best = other < Blocks ? *in_block(&of_block, other) : Candidate::none();
    best.reduce_over_lanes<32>();
    return best;
  }

  // Turn logits into steps below the largest; the most steps that top-k, and then top-p, leave in.
  CUTLASS_DEVICE uint32_t bound(float largest, float factor, int top_k, float top_p) {
    bool const by_count = top_k >= 1 && top_k < Vocabulary, by_mass = top_p < 1.f;
    for_quads([&](int quad, uint4& kept) {
      uint32_t* const each = &kept.x;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        each[i] = steps_below(__uint_as_float(each[i]), largest, factor);
        if ((by_count || by_mass) && 4 * quad + i < Vocabulary) {
          add(shared.whole, each[i] >> (kDigits - 1) * kDigitBits, each[i], by_count, by_mass);
        }
      }
    });
    if (!by_count && !by_mass) return kOutOfReach - 1;
    Sums const whole = of_cluster(shared.whole, by_count, by_mass);
    Found found{kOutOfReach};
    double enough = 0;
    auto const enough_tokens = [&](Sums const& sums) { return sums.count >= uint32_t(top_k); };
    auto const enough_mass = [&](Sums const& sums) { return double(sums.mass) >= enough; };
    if (by_count) found = descend(whole, shared.of_k, true, by_mass, enough_tokens);
    if (by_mass) {
      uint64_t const held = by_count ? found.through.mass : total(whole).mass;
      enough = double(held) * double(top_p);
      found = descend(whole, shared.of_p, false, true, enough_mass);
    }
    return min(found.bin, kOutOfReach - 1);
  }

  CUTLASS_DEVICE static void add(Histogram& bins, uint32_t bin, uint32_t steps, bool count, bool weigh) {
    if (count) atomicAdd(&bins.count[bin], 1u);
    if (!weigh) return;
    uint32_t const mass = mass_of(steps), low = mass % (1 << 15), high = mass >> 15;
    if (low) atomicAdd(&bins.low[bin], low);
    if (high) atomicAdd(&bins.high[bin], high);
  }

  // What all blocks have in this thread's bin.
  CUTLASS_DEVICE Sums of_cluster(Histogram const& bins, bool count, bool weigh) {
    sync_cluster();
    Sums sums{};
    if (threadIdx.x >= kBins) return sums;
    CUTLASS_PRAGMA_UNROLL
    for (int other = 0; other < Blocks; ++other) {
      Histogram const& theirs = *in_block(&bins, other);
      if (count) sums.count += theirs.count[threadIdx.x];
      if (weigh) sums.mass += theirs.low[threadIdx.x] + (uint64_t(theirs.high[threadIdx.x]) << 15);
    }
    return sums;
  }

  // The steps at which a bound is met: digit by digit, of what shares the digits before.
  template <class Reached>
  CUTLASS_DEVICE Found descend(Sums const& whole, Histogram (&of_digits)[kDigits - 1], bool count, bool weigh,
                               Reached reached) {
    Found found = find(whole, Sums{}, reached);
    uint32_t digits = found.bin;
    CUTLASS_PRAGMA_UNROLL
    for (int digit = 1; digit < kDigits; ++digit) {
      int const shift = (kDigits - 1 - digit) * kDigitBits;
      for_quads([&](int quad, uint4 const& kept) {
        uint32_t const* const each = &kept.x;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          if (each[i] >> shift >> kDigitBits != digits || 4 * quad + i >= Vocabulary) continue;
          add(of_digits[digit - 1], each[i] >> shift & (kBins - 1), each[i], count, weigh);
        }
      });
      found = find(of_cluster(of_digits[digit - 1], count, weigh), found.before, reached);
      digits = digits << kDigitBits | found.bin;
    }
    found.bin = digits;
    return found;
  }

  // The first bin up to whose end a bound is reached; `own` are the sums of this thread's bin, `before` those of all bins.
  template <class Reached>
  CUTLASS_DEVICE Found find(Sums const& own, Sums before, Reached reached) {
    Sums through = sums_of_warp(own);
    if (threadIdx.x % 32 == 31) shared.warp_sums[threadIdx.x / 32] = through;
    __syncthreads();
    for (int warp = 0; warp < int(threadIdx.x / 32); ++warp) before += shared.warp_sums[warp];
    through += before;
    before = through;
    before -= own;
    if (reached(through) && (threadIdx.x == 0 || !reached(before))) shared.found = {threadIdx.x, before, through};
    __syncthreads();
    return shared.found;
  }

  // The sums of all bins.
  CUTLASS_DEVICE Sums total(Sums const& own) {
    Sums const of_warp = sums_of_warp(own);
    if (threadIdx.x % 32 == 31) shared.warp_sums[threadIdx.x / 32] = of_warp;
    __syncthreads();
    Sums all{};
    for (int warp = 0; warp < kWarps; ++warp) all += shared.warp_sums[warp];
    __syncthreads();
    return all;
  }

  // The sums of this lane's bin and those of the lanes before it.
  CUTLASS_DEVICE static Sums sums_of_warp(Sums sums) {
    int const lane = threadIdx.x % 32;
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      int const source = max(lane - distance, 0);
      Sums other;
      other.count = __shfl_sync(0xffffffffu, sums.count, source);
      other.mass = __shfl_sync(0xffffffffu, uint32_t(sums.mass), source);
      other.mass |= uint64_t(__shfl_sync(0xffffffffu, uint32_t(sums.mass >> 32), source)) << 32;
      if (lane >= distance) sums += other;
    }
    return sums;
  }

  // The largest of log2 p + noise among what is left; each block's in shared.chosen. The likeliest token is always left:
  // what cannot pass its sum is not worth two logarithms, and that is nearly everything.
  CUTLASS_DEVICE void draw(int likeliest, uint32_t most, float min_p, int position, long long seed) {
    float to_pass = -INFINITY;
    uint32_t const least_mass = uint32_t(ceil(double(min_p) * (1 << kMassBits)));
    Candidate best = Candidate::none();
    for_quads([&](int quad, uint4 const& kept) {
      uint32_t const* const each = &kept.x;
      if (min(min(kept.x, kept.y), min(kept.z, kept.w)) > most) return;
      uint32_t random[4];
      if (to_pass == -INFINITY) {
        philox(likeliest / 4, position, seed, random);
        uint32_t const pair[2] = {likeliest % 2 ? random[1] : random[0], likeliest % 2 ? random[3] : random[2]};
        to_pass = gumbel_of(likeliest % 4 < 2 ? pair[0] : pair[1]);
      }
      philox(quad, position, seed, random);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        float const log2_p = __fmul_rn(float(each[i]), -1.f / (1 << kStepBits));
        if (each[i] > most || log2_p + most_gumbel(random[i]) < to_pass) continue;
        if (mass_of(each[i]) < least_mass) continue;
        best.consider(__fadd_rn(log2_p, gumbel_of(random[i])), 4 * quad + i);
      }
    });
    best_of_block(best, shared.chosen);
  }
};

}  // namespace futransformer
