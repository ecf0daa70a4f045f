// The decode attention kernel's own source in the emulator, against a double-precision reference: ragged lengths in
// shuffled pages, NaN in every slot past an end, garbage in the block table, blocks and copies in random order.
#include "attention_decode.cuh"

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
  uint16_t bf16(float scale, float offset = 0) { return to_bf16(normal(engine) * scale + offset); }
};

template <int KvHeads, int Group, int HeadDim, int Stages>
struct Attention {
  using Kernel = futransformer::AttentionDecode<KvHeads, Group, HeadDim, 64, Stages, false>;
  static constexpr int kRow = KvHeads * Group * HeadDim;

  Case problem;
  int sequences, columns = 0;
  std::vector<uint16_t> q, k, v, out;
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
    k.assign(size_t(total) * KvHeads * 64 * HeadDim, 0x7fc0);
    v.assign(k.size(), 0xffc0);
    table.assign(sequences * columns, INT_MAX);
    for (int sequence = 0; sequence < sequences; ++sequence) {
      for (int i = 0; i < kRow; ++i) q.push_back(random.bf16(given.query_scale));
      for (int token = 0; token < given.lengths[sequence]; ++token) {
        if (token % 64 == 0) {
          table[sequence * columns + token / 64] = pages.back();
          pages.pop_back();
        }
        for (int head = 0; head < KvHeads; ++head) {
          size_t const at = place(sequence, head, token);
          for (int d = 0; d < HeadDim; ++d) {
            k[at + d] = random.bf16(1);
            v[at + d] = given.values_of_one ? to_bf16(1) : random.bf16(1, 0.5f);
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
    long const rows = long(k.size() / HeadDim);
    CUtensorMap const k_map{k.data(), rows, HeadDim, 64, 64}, v_map{v.data(), rows, HeadDim, 64, 64};
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
                                          arrivals.data()};
    std::vector<uint16_t> const written_q = q, written_k = k, written_v = v;
    bool there = true;
    emulator::previous_kernel = [&](bool done) {
      if (done == there) return;
      there = done;
      for (size_t i = 0; i < q.size(); ++i) q[i] = done ? written_q[i] : 0x7fc0;
      for (int sequence = 0; sequence < sequences; ++sequence) {
        for (int head = 0; problem.lengths[sequence] > 0 && head < KvHeads; ++head) {
          size_t const at = place(sequence, head, problem.lengths[sequence] - 1);
          for (size_t i = at; i < at + HeadDim; ++i) {
            k[i] = done ? written_k[i] : 0x7fc0;
            v[i] = done ? written_v[i] : 0x7fc0;
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
          for (int d = 0; d < HeadDim; ++d) scores[token] += double(from_bf16(query[d])) * from_bf16(k[at + d]);
          scores[token] /= std::sqrt(double(HeadDim));
          maximum = std::max(maximum, scores[token]);
        }
        for (int token = 0; token < length; ++token) {
          size_t const at = place(sequence, head / Group, token);
          double const weight = std::exp(scores[token] - maximum);
          weight_sum += weight;
          for (int d = 0; d < HeadDim; ++d) {
            sum[d] += weight * from_bf16(v[at + d]);
            size[d] += weight * std::fabs(from_bf16(v[at + d]));
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

template <int KvHeads, int Group, int HeadDim, int Stages>
std::vector<uint16_t> check(Case const& problem) {
  Attention<KvHeads, Group, HeadDim, Stages> attention(problem);
  attention.run();
  double const worst = attention.worst_error();
  bool const counters_are_zero = *std::max_element(attention.arrivals.begin(), attention.arrivals.end()) == 0;
  bool const passed = worst <= 1 && counters_are_zero;
  std::printf("kv_heads %d, group %d, head_dim %d, stages %d, pages_per_split %d: %.2f of the allowed error%s%s\n",
              KvHeads, Group, HeadDim, Stages, problem.pages_per_split, worst,
              counters_are_zero ? "" : ", counters not zero", passed ? "" : " FAILED");
  failures += !passed;
  return attention.out;
}

int main() {
  check<3, 3, 64, 3>({{1, 63, 64, 65, 0, 200}, 2, 200});
  check<2, 4, 128, 3>({{449, 15, 16, 17, 33, 128}, 3, 449});
  check<1, 4, 128, 2>({{777, 500}, 100, 777});              // a ring that turns, one split
  check<1, 1, 128, 3>({{65, 300}, 1, 300, 100});            // scores of hundreds
  check<1, 8, 128, 3>({{130, 257}, 2, 257});
  check<1, 16, 64, 2>({{130, 257}, 2, 257});
  check<1, 12, 128, 3>({{130, 70}, 1, 130, 1, true});       // a second tile of heads that is half empty
  check<1, 7, 64, 4>({{500, 470}, 2, 100});                 // longer than the grid was sized for
  Case together{{449, 15, 300, 64}, 2, 449};
  auto const all = check<2, 4, 64, 3>(together);
  for (int sequence = 0; sequence < 4; ++sequence) {
    Case alone = together;
    alone.solo = sequence;
    alone.max_length = together.lengths[sequence];
    auto const row = check<2, 4, 64, 3>(alone);
    if (!std::equal(row.begin(), row.end(), all.begin() + sequence * row.size())) {
      std::printf("sequence %d alone differs FAILED\n", sequence);
      ++failures;
    }
  }
  return failures;
}
