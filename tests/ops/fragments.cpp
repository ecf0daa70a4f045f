// A decode warp on the host: the kernel's own fragment arithmetic around an MMA that CuTe's traits define.
//
// usage: fragments WEIGHT_TYPE N K M WEIGHT X OUT. WEIGHT_TYPE is bf16, e4m3, or int4 with the length of a packed group and
// a z for zero points (int4-64z); WEIGHT is in that type's fragment order, X bf16 [M, K] with M a multiple of 8. OUT
// becomes float32 [M, N] = X W^T.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cute/tensor.hpp>

#include <cute/atom/mma_traits_sm80.hpp>
#include <cutlass/half.h>
#include <futransformer/e4m3_operand.cuh>
#include <futransformer/fragment.cuh>

using namespace futransformer;
using Traits = cute::MMA_Traits<cute::SM80_16x8x16_F32BF16BF16F32_TN>;

static std::vector<Words> read(char const* path) {
  FILE* file = std::fopen(path, "rb");
  if (!file || std::fseek(file, 0, SEEK_END)) std::exit(2);
  size_t const bytes = std::ftell(file);
  std::rewind(file);
  std::vector<Words> words(bytes / sizeof(Words));
  if (bytes % sizeof(Words) || std::fread(words.data(), 1, bytes, file) != bytes) std::exit(2);
  std::fclose(file);
  return words;
}

static float bf16_value(uint32_t packed, int i) {
  uint32_t const bits = i ? packed & 0xffff0000u : packed << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// What a unit's sums are worth, and what its operands are lowered by, in one of 16 rows.
template <class Weight>
static void row_values(char const* unit, int row, float& scale, float& lowered) {
  scale = 1, lowered = 0;
  if constexpr (Weight::kScaled) {
    int const g = row % 8, half = row / 8;
    cutlass::half_t value;
    std::memcpy(&value, unit + Weight::kScales + 4 * g + 2 * half, sizeof value);
    uint8_t zero = 0;
    if (Weight::kZeroPoints) std::memcpy(&zero, unit + Weight::kZeros + 2 * g + half, 1);
    scale = float(value), lowered = bf16_value(Weight::middle(zero), 0);
  }
}

template <class Weight>
static std::vector<float> multiply(int n, int k, int m, std::vector<Words> const& packed, std::vector<Words> const& x) {
  std::vector<float> out(size_t(m) * n);
  using Load = typename Weight::Load;
  constexpr int kMmas = Weight::kUnitK / kMmaK;  // of a unit

  // CuTe numbers a tile's elements column-major: A [16 rows, 16 k], B [8 sequences, 16 k], C [16 rows, 8 sequences].
  typename Traits::ALayout const a_layout;
  typename Traits::BLayout const b_layout;
  typename Traits::CLayout const c_layout;

  for (int tile = 0; tile < n / kTileRows; ++tile) {
    for (int batch = 0; batch < m / kTileBatch; ++batch) {
      float c[kTileRows * kTileBatch] = {};
      for (int step = 0; step < k / kMmaK; ++step) {
        float a[kTileRows * kMmaK], b[kTileBatch * kMmaK];
        int const group = step / 2, mma = step % 2, unit = step / kMmas;
        char const* const bytes = reinterpret_cast<char const*>(packed.data()) +
                                  (size_t(tile) * (k / Weight::kUnitK) + unit) * Weight::kUnitBytes;
        for (int lane = 0; lane < kLanes; ++lane) {
          Load load;
          std::memcpy(&load, bytes + (step % kMmas / Weight::kMmas * kLanes + lane) * sizeof(Load), sizeof load);
          Words const operand = Weight::operand(load, step % Weight::kMmas);
          for (int i = 0; i < 8; ++i) a[a_layout(lane, i)] = bf16_value(operand.word[i / 2], i % 2);

          int const row = batch * kTileBatch + ActivationFragment::sequence(lane);
          int const column = group * kGroupK + ActivationFragment::k(lane);
          Words const& words = x[(size_t(row) * k + column) / 8];
          for (int i = 0; i < 4; ++i) {
            b[b_layout(lane, i)] = bf16_value(ActivationFragment::operand(words, mma, i / 2), i % 2);
          }
        }
        for (int row = 0; row < kTileRows; ++row) {
          float scale, lowered;
          row_values<Weight>(bytes, row, scale, lowered);
          for (int col = 0; col < kTileBatch; ++col) {
            for (int i = 0; i < kMmaK; ++i) {
              c[row + col * kTileRows] += scale * (a[row + i * kTileRows] - lowered) * b[col + i * kTileBatch];
            }
          }
        }
      }
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < SumFragment::kSums; ++i) {
          int const row = batch * kTileBatch + SumFragment::sequence(lane, i);
          out[size_t(row) * n + tile * kTileRows + SumFragment::column(lane, i)] = c[c_layout(lane, i)];
        }
      }
    }
  }
  return out;
}

int main(int, char** argv) {
  std::string const type = argv[1];
  int const n = std::atoi(argv[2]), k = std::atoi(argv[3]), m = std::atoi(argv[4]);
  std::vector<Words> const weight = read(argv[5]), x = read(argv[6]);
  std::vector<float> out;
  if (type == "bf16") out = multiply<WeightFragment<cutlass::bfloat16_t>>(n, k, m, weight, x);
  if (type == "int4-32") out = multiply<WeightFragment<Int4<32, false>>>(n, k, m, weight, x);
  if (type == "int4-64z") out = multiply<WeightFragment<Int4<64, true>>>(n, k, m, weight, x);
  if (type == "int4-128") out = multiply<WeightFragment<Int4<128, false>>>(n, k, m, weight, x);
  if (type == "int4-128z") out = multiply<WeightFragment<Int4<128, true>>>(n, k, m, weight, x);
  if (type == "e4m3") {
    out = multiply<WeightFragment<cutlass::float_e4m3_t>>(n, k, m, weight, x);
    float const* const scales = reinterpret_cast<float const*>(weight.data()) + size_t(n) * k / 4;
    for (size_t i = 0; i < out.size(); ++i) out[i] = out[i] * kE4m3Operand * scales[i % n];
  }
  FILE* file = std::fopen(argv[7], "wb");
  return file && std::fwrite(out.data(), sizeof(float), out.size(), file) == out.size() && !std::fclose(file) ? 0 : 2;
}
