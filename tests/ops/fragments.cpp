// A decode warp on the host: the kernel's own fragment arithmetic around an MMA that CuTe's traits define.
//
// usage: fragments N K M WEIGHT X OUT. WEIGHT is bf16 in fragment order, X bf16 [M, K] with M a multiple of 8; OUT becomes
// float32 [M, N] = X W^T.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cute/tensor.hpp>

#include <cute/atom/mma_traits_sm80.hpp>
#include <futransformer/fragment.cuh>

using namespace futransformer;
using Traits = cute::MMA_Traits<cute::SM80_16x8x16_F32BF16BF16F32_TN>;
using Weight = WeightFragment<cutlass::bfloat16_t>;

static std::vector<Words> read(char const* path, size_t bytes) {
  std::vector<Words> words(bytes / sizeof(Words));
  FILE* file = std::fopen(path, "rb");
  if (!file || std::fread(words.data(), 1, bytes, file) != bytes) std::exit(2);
  std::fclose(file);
  return words;
}

static float bf16_value(uint32_t packed, int i) {
  uint32_t const bits = i ? packed & 0xffff0000u : packed << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

int main(int, char** argv) {
  int const n = std::atoi(argv[1]), k = std::atoi(argv[2]), m = std::atoi(argv[3]);
  std::vector<Words> const weight = read(argv[4], size_t(n) * k * 2);
  std::vector<Words> const x = read(argv[5], size_t(m) * k * 2);
  std::vector<float> out(size_t(m) * n);

  // CuTe numbers a tile's elements column-major: A [16 rows, 16 k], B [8 sequences, 16 k], C [16 rows, 8 sequences].
  typename Traits::ALayout const a_layout;
  typename Traits::BLayout const b_layout;
  typename Traits::CLayout const c_layout;

  for (int tile = 0; tile < n / kTileRows; ++tile) {
    for (int batch = 0; batch < m / kTileBatch; ++batch) {
      float c[kTileRows * kTileBatch] = {};
      for (int step = 0; step < k / kMmaK; ++step) {
        float a[kTileRows * kMmaK], b[kTileBatch * kMmaK];
        int const group = step / 2, mma = step % 2;
        for (int lane = 0; lane < kLanes; ++lane) {
          size_t const load = size_t(tile) * (k / kMmaK) + step;
          Words const operand = Weight::operand(weight[load * kLanes + lane], 0);
          for (int i = 0; i < 8; ++i) a[a_layout(lane, i)] = bf16_value(operand.word[i / 2], i % 2);

          int const row = batch * kTileBatch + ActivationFragment::sequence(lane);
          int const column = group * kGroupK + ActivationFragment::k(lane);
          Words const& words = x[(size_t(row) * k + column) / 8];
          for (int i = 0; i < 4; ++i) {
            b[b_layout(lane, i)] = bf16_value(ActivationFragment::operand(words, mma, i / 2), i % 2);
          }
        }
        for (int row = 0; row < kTileRows; ++row) {
          for (int col = 0; col < kTileBatch; ++col) {
            for (int i = 0; i < kMmaK; ++i) c[row + col * kTileRows] += a[row + i * kTileRows] * b[col + i * kTileBatch];
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
  FILE* file = std::fopen(argv[6], "wb");
  return file && std::fwrite(out.data(), sizeof(float), out.size(), file) == out.size() && !std::fclose(file) ? 0 : 2;
}
