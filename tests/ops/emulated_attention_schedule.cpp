// The schedule of prefill attention in the emulator: every tile of queries of every head once, longest first, and the
// counter of tickets as it was. Prints what is wrong; the exit status is the number of wrong cases.
#include <algorithm>
#include <set>
#include <tuple>

inline int __popc(uint32_t value) { return __builtin_popcount(value); }

#include "attention_schedule.cuh"

constexpr int kHeads = 6, kTileM = 128;
using List = futransformer::WorkList<kHeads, kTileM>;

static int failures = 0;

static void expect(bool condition, char const* what, size_t sequences, int blocks) {
  if (condition) return;
  ++failures;
  std::printf("%s: %zu sequences, %d blocks\n", what, sequences, blocks);
}

struct Lengths {
  int queries, keys;
};

static void check(std::vector<Lengths> const& sequences, int blocks) {
  std::vector<int> offsets = {0}, keys;
  std::set<std::tuple<int, int, int>> expected;
  for (auto const& [q, k] : sequences) {
    for (int first = 0; first < q; first += kTileM) {
      for (int head = 0; head < kHeads; ++head) expected.insert({int(keys.size()), head, first});
    }
    offsets.push_back(offsets.back() + q);
    keys.push_back(k);
  }
  std::set<std::tuple<int, int, int>> found;
  std::vector<int> levels(expected.size(), INT_MAX);
  bool once = true;
  int counter = 0;
  emulator::launch({unsigned(blocks), 1, 1}, 32, [&] {
    List list(offsets.data(), keys.data(), int(sequences.size()));
    List::Item item;
    futransformer::Tickets tickets(&counter);
    for (; list.find(tickets.item(), item); tickets.next()) {
      tickets.ask();
      if (threadIdx.x != 0) continue;
      once = once && found.insert({item.sequence, item.head, item.first_query}).second;
      auto const [q, k] = sequences[item.sequence];
      int const tiles = (q + kTileM - 1) / kTileM;
      if (size_t(tickets.item()) < levels.size()) {
        levels[tickets.item()] = (k + kTileM - 1) / kTileM - tiles + item.first_query / kTileM;
      }
    }
    tickets.finish(list.size());
  });
  expect(once, "an item twice", sequences.size(), blocks);
  expect(found == expected, "an item missing, or one too many", sequences.size(), blocks);
  expect(std::is_sorted(levels.rbegin(), levels.rend()), "not the longest first", sequences.size(), blocks);
  expect(counter == 0, "the counter is not put back", sequences.size(), blocks);
}

int main() {
  for (int blocks : {1, 2, 7, 132}) {
    check({}, blocks);
    check({{0, 0}, {0, 500}}, blocks);
    check({{1, 1}}, blocks);
    check({{2048, 2048}, {2048, 2048}, {2048, 2048}, {2048, 2048}}, blocks);
    check({{8192, 8192}}, blocks);
    check({{129, 257}, {1, 100'000}, {0, 3}, {128, 128}, {3, 2048}}, blocks);
    check({{5, 2}, {200, 0}, {300, 130}, {1, 1}}, blocks);  // queries that see no key
    check(std::vector<Lengths>(33, {130, 130}), blocks);
    check(std::vector<Lengths>(32, {1, 1}), blocks);
  }
  std::mt19937 random(5);
  for (int i = 0; i < 60; ++i) {
    std::vector<Lengths> sequences(random() % 80);
    for (auto& [q, k] : sequences) {
      q = random() % 4 == 0 ? 0 : random() % 700;
      k = random() % 5 == 0 ? random() % 200 : q + random() % 1500 * (random() % 2);
    }
    check(sequences, 1 + random() % 140);
  }
  return failures;
}
