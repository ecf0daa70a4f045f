// The row kernels' own source in the emulator: argmax at every alignment with ties and NaN, gather with bad indices,
// and in FP8.
#include "epilogue.cuh"
#include "epilogue_fp8.cuh"
#include "candidate.cuh"

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

// Parts that are tied, have no number, or are -inf; the lowest index of the largest, wherever its part stands.
template <int Threads>
void check_argmax_parts(int parts) {
  using futransformer::Candidate;
  constexpr int kRows = 4;
  std::mt19937 random(parts);
  std::vector<Candidate> best(kRows * parts);
  for (int part = 0; part < parts; ++part) {
    int const index = 10 * (parts - 1 - part);  // the lowest index comes last
    best[part] = {float(int(random() % 3)), index};
    best[parts + part] = random() % 2 ? Candidate{-INFINITY, index} : Candidate::none();
    best[2 * parts + part] = Candidate::none();
    best[3 * parts + part] = {part == parts / 2 ? 9.f : -0.f, index};
  }
  std::vector<int> out(kRows, -1);
  emulator::launch({kRows, 1, 1}, Threads, [&] {
    futransformer::ArgmaxParts<Threads>::run(best.data(), parts, out.data());
    emulator::expect(emulator::current->waited, "argmax read before the kernel before was done");
  });
  for (int row = 0; row < kRows; ++row) {
    Candidate found = Candidate::none();
    for (int part = 0; part < parts; ++part) {
      Candidate const other = best[row * parts + part];
      if (other.value > found.value || (other.value == found.value && other.index < found.index)) found = other;
    }
    expect(out[row] == (found.index == INT_MAX ? 0 : found.index), "argmax of parts", parts, row);
  }
}

constexpr int kTableRows = 9;
static std::vector<int> const indices = {3, -1, 8, 9, 0, INT_MAX, INT_MIN, 3};

template <int Columns>
std::vector<uint4> random_table() {
  std::mt19937 random(Columns);
  std::normal_distribution<float> normal;
  std::vector<uint4> table(kTableRows * Columns / 8);
  auto* const elements = reinterpret_cast<uint16_t*>(table.data());
  for (int i = 0; i < kTableRows * Columns; ++i) elements[i] = to_bf16(normal(random));
  return table;
}

template <int Columns, int Threads>
void check_gather(bool with_residual) {
  int const rows = indices.size();
  std::vector<uint4> table = random_table<Columns>(), out(rows * Columns / 8);
  std::vector<float> sumsq(rows, -1);
  std::vector<float4> residual(rows * Columns / 4, {-1, -1, -1, -1});
  auto* const elements = reinterpret_cast<uint16_t*>(table.data());
  auto* const gathered = reinterpret_cast<uint16_t*>(out.data());
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

// A gain multiplies the row alone: the residual and the sum of squares are those of the table.
template <int Columns, int Threads>
void check_gather_gain() {
  int const rows = indices.size();
  std::vector<uint4> table = random_table<Columns>(), out(rows * Columns / 8);
  std::vector<float> sumsq(rows, -1);
  std::vector<float4> residual(rows * Columns / 4), gain(Columns / 4);
  std::mt19937 random(Columns);
  float* const factors = &gain[0].x;
  for (int column = 0; column < Columns; ++column) factors[column] = 0.5f + random() % 1000 / 999.f;
  auto* const elements = reinterpret_cast<cutlass::bfloat16_t*>(table.data());
  auto* const gathered = reinterpret_cast<cutlass::bfloat16_t*>(out.data());
  emulator::launch({unsigned(rows), 1, 1}, Threads, [&] {
    futransformer::GatherRows<Columns, Threads>::run(elements, kTableRows, indices.data(), gathered, sumsq.data(),
                                                     &residual[0].x, futransformer::Chain<>{}, factors);
  });
  for (int row = 0; row < rows; ++row) {
    bool const inside = indices[row] >= 0 && indices[row] < kTableRows;
    double sum = 0;
    for (int column = 0; column < Columns; ++column) {
      float const value = inside ? from_bf16(elements[indices[row] * Columns + column].storage) : NAN;
      uint16_t const bits = gathered[row * Columns + column].storage;
      sum += double(value) * value;
      bool const right = inside ? bits == to_bf16(value * factors[column]) : std::isnan(from_bf16(bits));
      expect(right, "gather times a gain", Columns, row);
      float const wide = (&residual[0].x)[row * Columns + column];
      expect(wide == value || (std::isnan(wide) && std::isnan(value)), "residual beside a gain", Columns, row);
    }
    expect(inside ? std::fabs(sumsq[row] - sum) <= 1e-6 * sum : std::isnan(sumsq[row]), "sum beside a gain", Columns, row);
  }
}

// FP8 codes beside the row: at a scale that some values pass, and one that none does. What calls before have left in
// the maximum and the count is raised, not replaced; a NaN changes neither.
template <int Columns, int Threads>
void check_gather_fp8(float scale, float earlier_amax) {
  int const rows = indices.size();
  std::vector<uint4> table = random_table<Columns>(), out(rows * Columns / 8), codes(rows * Columns / 16 + 1);
  std::vector<float> sumsq(rows, -1);
  auto* const elements = reinterpret_cast<cutlass::bfloat16_t*>(table.data());
  auto* const gathered = reinterpret_cast<cutlass::bfloat16_t*>(out.data());
  auto* const quantised = reinterpret_cast<cutlass::float_e4m3_t*>(codes.data());
  elements[3 * Columns].storage = 0x7fc0;  // NaN in a row that is asked for twice
  elements[8 * Columns + 1].storage = to_bf16(-2.5e3f * scale);
  float amax = earlier_amax;
  unsigned saturated = 7;
  emulator::launch({unsigned(rows), 1, 1}, Threads, [&] {
    futransformer::GatherRows<Columns, Threads>::run(
        elements, kTableRows, indices.data(), gathered, sumsq.data(), nullptr,
        futransformer::StoreFp8<Columns>(quantised, &scale, &amax, &saturated));
  });
  float most = earlier_amax;
  unsigned beyond = 7;
  for (int i = 0; i < rows * Columns; ++i) {
    float const value = from_bf16(gathered[i].storage), code = value * (1 / scale);
    if (code > 448 || code < -448) ++beyond;
    if (!std::isnan(value)) most = max(most, std::fabs(code) * scale);
    expect(quantised[i].storage == to_e4m3(code), "code", Columns, i / Columns);
  }
  expect(amax == most, "largest magnitude", Columns, 0);
  expect(saturated == beyond && beyond > 7, "values beyond the largest code", Columns, 0);
}

// Codes as they are defined: sign, four bits of exponent less 7, three of mantissa; 2^-9 steps below 2^-6.
void check_codes() {
  for (int code = 0; code < 256; ++code) {
    int const exponent = code >> 3 & 15, mantissa = code & 7;
    float const magnitude = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
    float const value = (code & 127) == 127 ? NAN : code & 128 ? -magnitude : magnitude;
    expect(to_e4m3(value) == (std::isnan(value) ? 127 : code), "E4M3", 0, code);
  }
  struct {
    float value;
    int code;
  } const rounded[] = {{448.1f, 126},   {1e9f, 126},      {-INFINITY, 254},  {1.0625f, 56},    {1.0626f, 57},
                       {1.1875f, 58},   {0x1p-10f, 0},    {0x1.8p-9f, 2},    {-0x1.1p-10f, 129}, {0x1.fp-7f, 8},
                       {15.6f, 88},     {0x1.ffp-7f, 8}};
  for (auto const& [value, code] : rounded) expect(to_e4m3(value) == code, "rounding to E4M3", 0, code);
}

int main() {
  check_codes();
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
  check_argmax_parts<64>(1);
  check_argmax_parts<64>(63);
  check_argmax_parts<512>(2004);
  for (bool const with_residual : {false, true}) {
    check_gather<8, 32>(with_residual);
    check_gather<576, 128>(with_residual);
    check_gather<4096, 128>(with_residual);
  }
  check_gather_gain<8, 32>();
  check_gather_gain<576, 128>();
  for (float const earlier_amax : {0.f, 1e9f}) {
    check_gather_fp8<8, 32>(0.003f, earlier_amax);
    check_gather_fp8<576, 128>(0.003f, earlier_amax);
    check_gather_fp8<4096, 128>(1.f / 64, earlier_amax);
  }
  return failures;
}
