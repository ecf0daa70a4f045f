// Where prefill attention's output goes, in the emulator: a warp's eight rows as wgmma leaves them, of which the last
// three belong to nobody and hold what must not be noticed.
#include "epilogue.cuh"
#include "epilogue_fp8.cuh"
#include "attention_prefill_output.cuh"

constexpr int kRows = 8, kStored = 5;
constexpr float kScale = 0.003f, kEarlierAmax = 0.25f;
static int failures = 0;

static void expect(bool condition, char const* what, int head_dim, int place) {
  if (condition) return;
  std::printf("%s, head_dim %d, place %d FAILED\n", what, head_dim, place);
  ++failures;
}

// Factors bring a row's values to about 1; some of a row are beyond 448 scales (1.344), and one is not a number.
template <int HeadDim>
struct Rows {
  float sums[kRows][HeadDim], factors[kRows];

  Rows() {
    std::mt19937 random(HeadDim);
    std::normal_distribution<float> normal;
    for (int row = 0; row < kRows; ++row) {
      factors[row] = 1.f / (1 << row);
      for (float& sum : sums[row]) sum = normal(random) / factors[row] * (row < kStored ? 1 : 1e6f);
    }
    sums[2][HeadDim / 2 + 3] = NAN;
    factors[3] = NAN;  // a sequence without pages
    sums[kStored][0] = NAN;
  }
  float value(int row, int column) const { return sums[row][column] * factors[row]; }
};

template <int HeadDim, class Output>
void store(Rows<HeadDim> const& rows, Output const& output) {
  emulator::launch({1, 1, 1}, 32, [&] {
    Output const own = output;
    own.prepare();
    int const row = threadIdx.x / 4;
    own.store(row, row < kStored, rows.factors[row], [&](int i) {
      return rows.sums[row][i / 2 * 8 + 2 * (threadIdx.x % 4) + i % 2];
    });
    own.conclude();
  });
}

template <int HeadDim>
void check() {
  Rows<HeadDim> const rows;
  std::vector<uint4> memory(kRows * HeadDim / 8, {~0u, ~0u, ~0u, ~0u});
  auto* const out = reinterpret_cast<cutlass::bfloat16_t*>(memory.data());
  store(rows, futransformer::AttentionOutput<HeadDim>{out});
  for (int i = 0; i < kRows * HeadDim; ++i) {
    int const row = i / HeadDim;
    uint16_t const want = row < kStored ? to_bf16(rows.value(row, i % HeadDim)) : 0xffff;
    expect(out[i].storage == want, "BF16", HeadDim, i);
  }

  std::vector<uint4> bytes(kRows * HeadDim / 16, {~0u, ~0u, ~0u, ~0u});
  auto* const codes = reinterpret_cast<cutlass::float_e4m3_t*>(bytes.data());
  float const scale = kScale;
  float amax = kEarlierAmax, most = kEarlierAmax;
  unsigned saturated = 1, beyond = 1;
  store(rows, futransformer::AttentionFp8Output<HeadDim>(codes, &scale, &amax, &saturated));
  for (int i = 0; i < kRows * HeadDim; ++i) {
    int const row = i / HeadDim;
    float const code = rows.sums[row][i % HeadDim] * (rows.factors[row] * (1.f / scale));
    expect(codes[i].storage == (row < kStored ? to_e4m3(code) : 0xff), "FP8", HeadDim, i);
    if (row >= kStored || std::isnan(code)) continue;
    most = max(most, std::fabs(code) * scale);
    if (std::fabs(code) > 448) ++beyond;
  }
  expect(amax == most && most > kEarlierAmax, "largest magnitude", HeadDim, 0);
  expect(saturated == beyond && beyond > 1, "values beyond the largest code", HeadDim, 0);
}

int main() {
  check<64>();
  check<128>();
  return failures;
}
