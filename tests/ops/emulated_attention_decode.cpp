// The decode attention kernel's own source in the emulator, against a double-precision reference: ragged lengths in
// shuffled pages, NaN in every slot past an end, garbage in the block table, blocks and copies in random order.
#include "e4m3_operand.cuh"
#include "attention_decode_pages.cuh"

#include "attention_decode.cuh"

using futransformer::bf16;
using futransformer::e4m3;

struct Case {
  std::vector<int> lengths;
  int pages_per_split;
  int max_length;
  float query_scale = 1;
  bool values_of_one = false;
  int solo = -1;  // run this sequence alone
};

struct Random {
  std::mt19937 engine;
  std::normal_distribution<float> normal;
  float next(float scale, float offset = 0) { return normal(engine) * scale + offset; }
};

// How a page's elements are stored, and what they are worth.
template <class Element>
struct Stored;
template <>
struct Stored<bf16> {
  using Word = uint16_t;
  static constexpr Word kNan = 0x7fc0;
  static Word encode(float value, int) { return to_bf16(value); }
  static float decode(Word word, int) { return from_bf16(word); }
};
template <>
struct Stored<e4m3> {
  using Word = uint8_t;
  static constexpr Word kNan = 0xff;
  static constexpr float kScale[2] = {0.037f, 0.021f};  // of K, of V
  static Word encode(float value, int part) { return to_e4m3(value / kScale[part]); }
  static float decode(Word word, int part) {
    int const exponent = std::max(word >> 3 & 15, 1), mantissa = (word & 7) + (word >> 3 & 15 ? 8 : 0);
    return std::ldexp(word & 0x80 ? -mantissa : mantissa, exponent - 10) * kScale[part];
  }
};
constexpr float Stored<e4m3>::kScale[2];

template <class Element, int KvHeads, int Group, int HeadDim, int Stages>
struct Attention {
  using Kernel = futransformer::AttentionDecode<Element, KvHeads, Group, HeadDim, 64, Stages, false>;
  using Page = Stored<Element>;
  using Word = typename Page::Word;
  static constexpr int kRow = KvHeads * Group * HeadDim;

  Case problem;
  int sequences, columns = 0;
  std::vector<uint16_t> q, out;
  std::vector<Word> k, v;
  std::vector<int> table, arrivals;

  explicit Attention(Case const& given) : problem(given), sequences(given.lengths.size()) {
    Random random{std::mt19937(7), {}};
    int total = 2;
    for (int length : given.lengths) {
      columns = max(columns, (length + 63) / 64);
      total += (length + 63) / 64;
    }
    columns += 1;
    std::vector<int> pages(total);
    for (int i = 0; i < total; ++i) pages[i] = i;
    std::shuffle(pages.begin(), pages.end(), random.engine);
    k.assign(size_t(total) * KvHeads * 64 * HeadDim, Page::kNan);
    v.assign(k.size(), Page::kNan);
    table.assign(sequences * columns, INT_MAX);
    for (int sequence = 0; sequence < sequences; ++sequence) {
      for (int i = 0; i < kRow; ++i) q.push_back(to_bf16(random.next(given.query_scale)));
      for (int token = 0; token < given.lengths[sequence]; ++token) {
        if (token % 64 == 0) {
          table[sequence * columns + token / 64] = pages.back();
          pages.pop_back();
        }
        for (int head = 0; head < KvHeads; ++head) {
          size_t const at = place(sequence, head, token);
          for (int d = 0; d < HeadDim; ++d) {
            k[at + d] = Page::encode(random.next(1), 0);
            v[at + d] = Page::encode(given.values_of_one ? 1 : random.next(1, 0.5f), 1);
          }
        }
      }
    }
    if (given.solo >= 0) keep(given.solo);
  }

  size_t place(int sequence, int head, int token) const {
    return ((size_t(table[sequence * columns + token / 64]) * KvHeads + head) * 64 + token % 64) * HeadDim;
  }

  void keep(int sequence) {
    problem.lengths = {problem.lengths[sequence]};
    q = {q.begin() + sequence * kRow, q.begin() + (sequence + 1) * kRow};
    table = {table.begin() + sequence * columns, table.begin() + (sequence + 1) * columns};
    sequences = 1;
  }

  // What the kernel before writes, queries and every newest token's keys and values, is poison until it is done.
  void run() {
    int const pages = max((problem.max_length + 63) / 64, 1);
    unsigned const splits = (pages + problem.pages_per_split - 1) / problem.pages_per_split;
    size_t const heads = size_t(sequences) * KvHeads;
    std::vector<float4> partial_out(heads * splits * Group * HeadDim / 4, {NAN, NAN, NAN, NAN});
    std::vector<float2> partial_max_sum(heads * splits * Group, {NAN, NAN});
    arrivals.assign(heads, 0);
    out.assign(q.size(), 0x7fc5);
    // Codes come in rows of 128 bytes, which the emulator sees as 64 words of two.
    constexpr int kColumns = sizeof(Word) == 1 ? 64 : HeadDim;
    long const rows = long(k.size() * sizeof(Word) / 2 / kColumns);
    int const box_rows = 64 * HeadDim * sizeof(Word) / 2 / (sizeof(Word) == 1 ? 64 : HeadDim);
    auto const map = [&](std::vector<Word> const& pages) {
      return CUtensorMap{reinterpret_cast<uint16_t const*>(pages.data()), rows, kColumns, box_rows, 64};
    };
    CUtensorMap const k_map = map(k), v_map = map(v);
    typename Kernel::Arguments const args{reinterpret_cast<cutlass::bfloat16_t const*>(q.data()),
                                          &k_map,
                                          &v_map,
                                          reinterpret_cast<cutlass::bfloat16_t*>(out.data()),
                                          table.data(),
                                          columns,
                                          problem.lengths.data(),
                                          1 / std::sqrt(float(HeadDim)),
                                          problem.pages_per_split,
                                          &partial_out.data()->x,
                                          &partial_max_sum.data()->x,
                                          arrivals.data(),
                                          Stored<e4m3>::kScale};
    std::vector<uint16_t> const written_q = q;
    std::vector<Word> const written_k = k, written_v = v;
    bool there = true;
    emulator::previous_kernel = [&](bool done) {
      if (done == there) return;
      there = done;
      for (size_t i = 0; i < q.size(); ++i) q[i] = done ? written_q[i] : 0x7fc0;
      for (int sequence = 0; sequence < sequences; ++sequence) {
        for (int head = 0; problem.lengths[sequence] > 0 && head < KvHeads; ++head) {
          size_t const at = place(sequence, head, problem.lengths[sequence] - 1);
          for (size_t i = at; i < at + HeadDim; ++i) {
            k[i] = done ? written_k[i] : Page::kNan;
            v[i] = done ? written_v[i] : Page::kNan;
          }
        }
      }
    };
    emulator::launch({splits, KvHeads, unsigned(sequences)}, Kernel::kThreads, [&] {
      Kernel::run(args);
      emulator::expect(threadIdx.x > 0 || emulator::current->waited, "a block ended before the kernel before was done");
    });
  }

  // The largest error over what rounding may cost: P and the output, each half a unit of BF16's eighth bit, of values
  // whose size the mean of |v| under the weights bounds.
  double worst_error() const {
    double worst = 0;
    for (int sequence = 0; sequence < sequences; ++sequence) {
      int const length = problem.lengths[sequence];
      for (int head = 0; head < KvHeads * Group; ++head) {
        uint16_t const* query = &q[sequence * kRow + head * HeadDim];
        std::vector<double> scores(length), sum(HeadDim), size(HeadDim);
        double maximum = -INFINITY, weight_sum = 0;
        for (int token = 0; token < length; ++token) {
          size_t const at = place(sequence, head / Group, token);
          for (int d = 0; d < HeadDim; ++d) scores[token] += double(from_bf16(query[d])) * Page::decode(k[at + d], 0);
          scores[token] /= std::sqrt(double(HeadDim));
          maximum = std::max(maximum, scores[token]);
        }
        for (int token = 0; token < length; ++token) {
          size_t const at = place(sequence, head / Group, token);
          double const weight = std::exp(scores[token] - maximum);
          weight_sum += weight;
          for (int d = 0; d < HeadDim; ++d) {
            double const value = Page::decode(v[at + d], 1);
            sum[d] += weight * value;
            size[d] += weight * std::fabs(value);
          }
        }
        for (int d = 0; d < HeadDim; ++d) {
          double const actual = from_bf16(out[sequence * kRow + head * HeadDim + d]);
          double const exact = length ? sum[d] / weight_sum : 0;
          double const allowed = length ? 2 * 0x1.02p-9 * size[d] / weight_sum : 0;
          double const error = std::fabs(actual - exact);
          worst = std::max(worst, error == 0 ? 0 : error <= allowed ? error / allowed : INFINITY);
        }
      }
    }
    return worst;
  }
};

static int failures = 0;

template <class Element, int KvHeads, int Group, int HeadDim, int Stages>
std::vector<uint16_t> check(Case const& problem) {
  Attention<Element, KvHeads, Group, HeadDim, Stages> attention(problem);
  attention.run();
  double const worst = attention.worst_error();
  bool const counters_are_zero = *std::max_element(attention.arrivals.begin(), attention.arrivals.end()) == 0;
  bool const passed = worst <= 1 && counters_are_zero;
  std::printf("%s, kv_heads %d, group %d, head_dim %d, stages %d, pages_per_split %d: %.2f of the allowed error%s%s\n",
              sizeof(Element) == 1 ? "e4m3" : "bf16", KvHeads, Group, HeadDim, Stages, problem.pages_per_split, worst,
              counters_are_zero ? "" : ", counters not zero", passed ? "" : " FAILED");
  failures += !passed;
  return attention.out;
}

template <class Element>
void check_all() {
  check<Element, 3, 3, 64, 3>({{1, 63, 64, 65, 0, 200}, 2, 200});
  check<Element, 2, 4, 128, 3>({{449, 15, 16, 17, 33, 128}, 3, 449});
  check<Element, 1, 4, 128, 4>({{777, 500}, 100, 777});         // a ring that turns, one split
  check<Element, 1, 1, 128, 3>({{65, 300}, 1, 300, 100});       // scores of hundreds
  check<Element, 1, 8, 128, 3>({{130, 257}, 2, 257});
  check<Element, 1, 16, 64, 4>({{130, 257}, 2, 257});
  check<Element, 1, 12, 128, 3>({{130, 70}, 1, 130, 1, true});  // a second tile of heads that is half empty
  check<Element, 1, 7, 64, 4>({{500, 470}, 2, 100});            // longer than the grid was sized for
  Case together{{449, 15, 300, 64}, 2, 449};
  auto const all = check<Element, 2, 4, 64, 3>(together);
  for (int sequence = 0; sequence < 4; ++sequence) {
    Case alone = together;
    alone.solo = sequence;
    alone.max_length = together.lengths[sequence];
    auto const row = check<Element, 2, 4, 64, 3>(alone);
    if (!std::equal(row.begin(), row.end(), all.begin() + sequence * row.size())) {
      std::printf("sequence %d alone differs FAILED\n", sequence);
      ++failures;
    }
  }
}

int main() {
  check_all<bf16>();
  check_all<e4m3>();
  return failures;
}
