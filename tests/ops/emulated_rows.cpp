// The row kernels' own source in the emulator: argmax at every alignment with ties and NaN, gather with bad indices.
#include "epilogue.cuh"
#include "rows.cuh"

static int failures = 0;

static void expect(bool condition, char const* what, int columns, int row) {
  if (condition) return;
  std::printf("%s, %d columns, row %d FAILED\n", what, columns, row);
  ++failures;
}

template <int Columns, int Threads>
void check_argmax(int padding, int misalignment) {
  constexpr int kRows = 6;
  std::mt19937 random(Columns + misalignment);
  int const stride = Columns + padding;
  std::vector<float4> memory(kRows * stride / 4 + 2, {INFINITY, INFINITY, INFINITY, INFINITY});
  float* const logits = &memory[0].x + misalignment;
  for (int column = 0; column < Columns; ++column) {
    bool const last = column == Columns - 1;
    float const number = int(random() % 7) - 3;  // many ties
    float const values[kRows] = {number, NAN,  last ? -INFINITY : NAN, random() % 2 ? NAN : number, -INFINITY,
                                 last ? 9 : number};
    for (int row = 0; row < kRows; ++row) logits[row * stride + column] = values[row];
  }
  std::vector<int> out(kRows, -1);
  emulator::launch({kRows, 1, 1}, Threads, [&] {
    futransformer::Argmax<Columns, Threads>::run(logits, stride, out.data());
    emulator::expect(emulator::current->waited, "argmax read before the kernel before was done");
  });
  for (int row = 0; row < kRows; ++row) {
    int best = -1;
    for (int column = 0; column < Columns; ++column) {
      float const value = logits[row * stride + column];
      if (!std::isnan(value) && (best < 0 || value > logits[row * stride + best])) best = column;
    }
    expect(out[row] == max(best, 0), "argmax", Columns, row);
  }
}

template <int Columns, int Threads>
void check_gather(bool with_residual) {
  constexpr int kTableRows = 9;
  std::vector<int> const indices = {3, -1, 8, 9, 0, INT_MAX, INT_MIN, 3};
  int const rows = indices.size();
  std::mt19937 random(Columns);
  std::normal_distribution<float> normal;
  std::vector<uint4> table(kTableRows * Columns / 8), out(rows * Columns / 8);
  std::vector<float> sumsq(rows, -1);
  std::vector<float4> residual(rows * Columns / 4, {-1, -1, -1, -1});
  auto* const elements = reinterpret_cast<uint16_t*>(table.data());
  auto* const gathered = reinterpret_cast<uint16_t*>(out.data());
  for (int i = 0; i < kTableRows * Columns; ++i) elements[i] = to_bf16(normal(random));
  emulator::launch({unsigned(rows), 1, 1}, Threads, [&] {
    futransformer::GatherRows<Columns, Threads>::run(reinterpret_cast<cutlass::bfloat16_t*>(elements), kTableRows,
                                                     indices.data(), reinterpret_cast<cutlass::bfloat16_t*>(gathered),
                                                     sumsq.data(), with_residual ? &residual[0].x : nullptr);
    emulator::expect(emulator::current->waited, "gather read before the kernel before was done");
  });
  for (int row = 0; row < rows; ++row) {
    bool const inside = indices[row] >= 0 && indices[row] < kTableRows;
    double sum = 0;
    for (int column = 0; column < Columns; ++column) {
      uint16_t const bits = gathered[row * Columns + column];
      sum += double(from_bf16(bits)) * from_bf16(bits);
      bool const right = inside ? bits == elements[indices[row] * Columns + column] : std::isnan(from_bf16(bits));
      expect(right, "gather", Columns, row);
      float const wide = (&residual[0].x)[row * Columns + column], want = with_residual ? from_bf16(bits) : -1;
      expect(wide == want || (std::isnan(wide) && std::isnan(want)), "residual", Columns, row);
    }
    expect(inside ? std::fabs(sumsq[row] - sum) <= 1e-6 * sum : std::isnan(sumsq[row]), "sum of squares", Columns, row);
  }
  expect(bits_of(sumsq.front()) == bits_of(sumsq.back()), "the same row twice", Columns, 0);
}

int main() {
  for (int misalignment = 0; misalignment < 4; ++misalignment) {
    for (int padding = 0; padding < 3; ++padding) {
      check_argmax<1, 64>(padding, misalignment);
      check_argmax<2, 64>(padding, misalignment);
      check_argmax<3, 32>(padding, misalignment);
      check_argmax<7, 64>(padding, misalignment);
      check_argmax<1003, 128>(padding, misalignment);
    }
  }
  check_argmax<4099, 1024>(1, 2);
  for (bool const with_residual : {false, true}) {
    check_gather<8, 32>(with_residual);
    check_gather<576, 128>(with_residual);
    check_gather<4096, 128>(with_residual);
  }
  return failures;
}
