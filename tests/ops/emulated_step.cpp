// The two ends of a step in the emulator: lengths at page boundaries, rows of no sequence, pages that are missing; and
// tokens that end, at the last that may be given, of no vocabulary, and behind the end. More rows than threads.
#include "step.cuh"

static int failures = 0;

static void expect(long long found, long long want, char const* what, int row) {
  if (found == want) return;
  std::printf("%s of row %d is %lld, not %lld FAILED\n", what, row, found, want);
  ++failures;
}

void check_begin() {
  constexpr int kWidth = 3;
  int const cases[] = {0, 1, 62, 63, 64, 127, 128, 191, 192, 4000, -1};
  std::vector<int> lengths, table, positions(300, -7), seqlens_k(300, -7);
  std::vector<long long> slots(300, -7);
  for (int row = 0; row < 300; ++row) {
    lengths.push_back(cases[row % std::size(cases)]);
    for (int entry = 0; entry < kWidth; ++entry) table.push_back(entry == 2 && row % 2 ? -1 : (1 << 30) + 7 * row + entry);
  }
  std::vector<int> const before = lengths;
  emulator::launch({1, 1, 1}, 64, [&] {
    futransformer::StepBegin<64, 64>::run(lengths.data(), table.data(), kWidth, positions.data(), slots.data(),
                                          seqlens_k.data(), 300);
    emulator::expect(emulator::current->waited, "a step began before the kernel before was done");
  });
  for (int row = 0; row < 300; ++row) {
    int const length = before[row];
    int const page = length < 0 || length >= 64 * kWidth ? -1 : table[kWidth * row + length / 64];
    expect(lengths[row], length < 0 ? -1 : length + 1, "length", row);
    expect(seqlens_k[row], length + 1, "seqlens_k", row);
    expect(positions[row], length < 0 ? 0 : length, "position", row);
    expect(slots[row], page < 0 ? -1 : 64ll * page + length % 64, "slot", row);
  }
}

void check_end() {
  constexpr int kVocabulary = 70, kLog = 3;
  std::vector<unsigned> const ends = {1u << 31, 0, 1u << 5 | 1u << 7};  // tokens 31, 69, and one beyond the vocabulary
  int const tokens_of[] = {30, 31, 69, 0, 71, -1, 32};
  std::vector<int> tokens, lengths, left, log(kLog * 300, -7);
  for (int row = 0; row < 300; ++row) {
    tokens.push_back(tokens_of[row % 7]);
    lengths.push_back(row % 5 ? row : -1);
    left.push_back(1 + row % 3);
  }
  int steps = 4;
  std::vector<int> const before = lengths;
  emulator::launch({1, 1, 1}, 64, [&] {
    futransformer::StepEnd<kVocabulary, 64>::run(tokens.data(), lengths.data(), left.data(), ends.data(), log.data(), kLog,
                                                 &steps, 300);
    emulator::expect(emulator::current->waited, "a step ended before the kernel before was done");
  });
  expect(steps, 5, "steps", 0);
  for (int row = 0; row < 300; ++row) {
    bool const going = before[row] >= 0, ended = tokens[row] == 31 || tokens[row] == 69 || row % 3 == 0;
    expect(lengths[row], going && !ended ? before[row] : -1, "length", row);
    expect(left[row], 1 + row % 3 - going, "left", row);
    expect(log[300 + row], going ? tokens[row] : -1, "note", row);
    expect(log[row], -7, "an earlier note", row);
    expect(log[600 + row], -7, "a later note", row);
  }
}

int main() {
  check_begin();
  check_end();
  return failures;
}
