// The decode attention kernel's own source in the emulator, against a double-precision reference: ragged lengths in
// shuffled pages, NaN in every slot past an end, garbage in the block table, blocks and copies in random order.
#include "e4m3_operand.cuh"
#include "attention_decode_pages.cuh"

#include "fragment.cuh"

#include "attention_decode_warp.cuh"

#include "attention_decode_rows.cuh"

#include "kv_int4.cuh"

#include "attention_decode_int4.cuh"

#include "attention_decode.cuh"

using futransformer::bf16;
using futransformer::e4m3;
using futransformer::KvFormat;

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

// An element of a page: how it is stored, and what it is worth.
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

// Part 0 of a cache is K, part 1 V; a head's page is one of num_pages * KvHeads. All of it is NaN until it is written.
// `rounding` is what a value of V, under a weight of 1, adds to the error that rounding may cost.
template <class Element, int HeadDim>
struct Cache {
  using Each = Stored<Element>;
  using Word = typename Each::Word;
  static constexpr long kFirst = 0;  // page of a head
  std::vector<Word> words[2];
  CUtensorMap maps[2];

  explicit Cache(int head_pages) {
    for (auto& part : words) part.assign(size_t(head_pages) * 64 * HeadDim, Each::kNan);
  }
  size_t place(long head_page, int token) const { return (head_page * 64 + token) * HeadDim; }
  void write(int part, long head_page, int token, std::vector<float> const& values) {
    size_t const at = place(head_page, token);
    for (int d = 0; d < HeadDim; ++d) words[part][at + d] = Each::encode(values[d], part);
  }
  double worth(int part, long head_page, int token, int d) const {
    return Each::decode(words[part][place(head_page, token) + d], part);
  }
  // P and the output, each half a unit of BF16's eighth bit.
  double rounding(long head_page, int token, int d) const {
    return 2 * 0x1.02p-9 * std::fabs(worth(1, head_page, token, d));
  }
  void poison(long head_page, int token) {
    for (auto& part : words) std::fill_n(part.begin() + place(head_page, token), HeadDim, Each::kNan);
  }
  void copy_token(Cache const& from, long head_page, int token) {
    for (int part = 0; part < 2; ++part) {
      size_t const at = place(head_page, token);
      std::copy_n(from.words[part].begin() + at, HeadDim, words[part].begin() + at);
    }
  }
  template <class Source>
  Source source() {
    // Codes come in rows of 128 bytes, which the emulator sees as 64 words of two.
    constexpr int kColumns = sizeof(Word) == 1 ? 64 : HeadDim;
    for (int part = 0; part < 2; ++part) {
      long const rows = long(words[part].size() * sizeof(Word) / 2 / kColumns);
      int const box_rows = 64 * HeadDim * sizeof(Word) / 2 / kColumns;
      maps[part] = {reinterpret_cast<uint16_t const*>(words[part].data()), rows, kColumns, box_rows, 64};
    }
    return {&maps[0], &maps[1], Stored<e4m3>::kScale};
  }
};

// The INT4 copy, written as futransformer/kv_packing.py has it.
template <int Shared, bool Minimum, int HeadDim>
struct Cache<KvFormat<Shared, Minimum, 0>, HeadDim> {
  static constexpr int GroupFeatures = Shared == 0 ? HeadDim : Shared;
  static constexpr int kGroups = HeadDim / GroupFeatures, kCodes = 32 * HeadDim, kScales = 128 * kGroups;
  static constexpr int kPart = kCodes + kScales * (Minimum ? 2 : 1), kPage = 2 * kPart;
  static constexpr long kFirst = (1l << 31) / kPage + 1;  // offsets in bytes need 64 bits
  std::vector<unsigned char> bytes;

  explicit Cache(int head_pages) : bytes(size_t(head_pages) * kPage) {
    std::mt19937 random(5);
    for (auto& byte : bytes) byte = random();
    for (int page = 0; page < head_pages; ++page) {
      for (int token = 0; token < 64; ++token) poison(kFirst + page, token);
    }
  }
  unsigned char* part_of(int part, long head_page) { return &bytes[(head_page - kFirst) * kPage + part * kPart]; }
  unsigned char const* part_of(int part, long head_page) const {
    return &bytes[(head_page - kFirst) * kPage + part * kPart];
  }
  static int nibble(int part, int token, int d) {
    int const row = token % 16;
    int lane, load, word, place;
    if (part == 0) {
      int const position = d % 32 / 16 * 4 + d % 4;
      lane = row / 2 * 4 + d % 16 / 4, load = d / 64, word = d / 32 % 2 * 2 + row % 2;
      place = position / 2 + position % 2 * 4;
    } else {
      lane = d % 16 / 2 * 4 + row / 4, load = d / 64, word = d / 16 % 4, place = row % 4 * 2 + d % 2;
    }
    return (((token / 16 * (HeadDim / 64) + load) * 32 + lane) * 4 + word) * 8 + place;
  }
  static _Float16* half_at(unsigned char* part, int minimum, int token, int group) {
    return reinterpret_cast<_Float16*>(part + kCodes + minimum * kScales) + group * 64 + token;
  }
  static float half_of(unsigned char const* part, int minimum, int token, int group) {
    return float(*half_at(const_cast<unsigned char*>(part), minimum, token, group));
  }
  void write(int part, long head_page, int token, std::vector<float> const& values) {
    unsigned char* const bytes = part_of(part, head_page);
    for (int group = 0; group < kGroups; ++group) {
      auto const first = values.begin() + group * GroupFeatures, last = first + GroupFeatures;
      float const high = *std::max_element(first, last), low = *std::min_element(first, last);
      float const minimum = Minimum ? float(_Float16(low)) : 0;
      float const scale = _Float16(Minimum ? (high - low) / 15 : (high >= -low ? high : low) / -8);
      *half_at(bytes, 0, token, group) = scale;
      if (Minimum) *half_at(bytes, 1, token, group) = minimum;
      for (int d = group * GroupFeatures; d < (group + 1) * GroupFeatures; ++d) {
        float const code = std::nearbyint(scale == 0 ? 0 : (values[d] - minimum) / scale) + (Minimum ? 0 : 8);
        int const stored = std::min(std::max(code, 0.f), 15.f), at = nibble(part, token, d);
        bytes[at / 2] = at % 2 ? (bytes[at / 2] & 15) | stored << 4 : (bytes[at / 2] & 240) | stored;
      }
    }
  }
  double worth(int part, long head_page, int token, int d) const {
    unsigned char const* const bytes = part_of(part, head_page);
    int const at = nibble(part, token, d), code = bytes[at / 2] >> at % 2 * 4 & 15, group = d / GroupFeatures;
    double const scale = half_of(bytes, 0, token, group);
    return Minimum ? scale * code + half_of(bytes, 1, token, group) : scale * (code - 8);
  }
  // P times the scale is rounded where P, of one token 1, need not be; and 8 P times the scale is taken off again.
  double rounding(long head_page, int token, int d) const {
    unsigned char const* const values = part_of(1, head_page);
    double const minimum = Minimum ? half_of(values, 1, token, d / GroupFeatures) : 0;
    double const worth_of = worth(1, head_page, token, d), scale = half_of(values, 0, token, d / GroupFeatures);
    return 0x1.02p-8 * (std::fabs(worth_of - minimum) + std::fabs(worth_of)) + 0x1p-20 * std::fabs(8 * scale);
  }
  void poison(long head_page, int token) {
    for (int part = 0; part < 2; ++part) {
      for (int group = 0; group < kGroups; ++group) {
        for (int which = 0; which < (Minimum ? 2 : 1); ++which) {
          *half_at(part_of(part, head_page), which, token, group) = token % 2 ? NAN : INFINITY;
        }
      }
    }
  }
  void copy_token(Cache const& from, long head_page, int token) {
    for (int part = 0; part < 2; ++part) {
      unsigned char* const to = part_of(part, head_page);
      unsigned char const* const source = from.part_of(part, head_page);
      for (int at = 0; at < kPart; ++at) {
        if (at >= kCodes ? (at - kCodes) / 2 % 64 == token : owner(part, at) == token) to[at] = source[at];
      }
    }
  }
  // The token whose codes are in a byte.
  static int owner(int part, int at) {
    int const word = at / 4, lane = word / 4 % 32, tile = word / 128 / (HeadDim / 64);
    return tile * 16 + (part == 0 ? lane / 4 * 2 + word % 2 : lane % 4 * 4 + at % 4);
  }
  template <class Source>
  Source source() {
    return {bytes.data() - size_t(kFirst) * kPage};
  }
};

template <class Element, int KvHeads, int Group, int HeadDim, int Stages>
struct Attention {
  using Kernel = futransformer::AttentionDecode<Element, KvHeads, Group, HeadDim, 64, Stages, false>;
  using Pages = Cache<Element, HeadDim>;
  static constexpr int kRow = KvHeads * Group * HeadDim;
  static constexpr int kFirst = (Pages::kFirst + KvHeads - 1) / KvHeads;  // page

  Case problem;
  int sequences, columns = 0;
  std::vector<uint16_t> q, out;
  std::unique_ptr<Pages> cache;
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
    for (int i = 0; i < total; ++i) pages[i] = kFirst + i;
    std::shuffle(pages.begin(), pages.end(), random.engine);
    cache = std::make_unique<Pages>((total + 1) * KvHeads);
    table.assign(sequences * columns, INT_MAX);
    for (int sequence = 0; sequence < sequences; ++sequence) {
      for (int i = 0; i < kRow; ++i) q.push_back(to_bf16(random.next(given.query_scale)));
      for (int token = 0; token < given.lengths[sequence]; ++token) {
        if (token % 64 == 0) {
          table[sequence * columns + token / 64] = pages.back();
          pages.pop_back();
        }
        for (int head = 0; head < KvHeads; ++head) {
          std::vector<float> k(HeadDim), v(HeadDim);
          for (int d = 0; d < HeadDim; ++d) {
            k[d] = random.next(1);
            v[d] = given.values_of_one ? 1 : random.next(1, 0.5f);
          }
          cache->write(0, place(sequence, head, token), token % 64, k);
          cache->write(1, place(sequence, head, token), token % 64, v);
        }
      }
    }
    if (given.solo >= 0) keep(given.solo);
  }

  long place(int sequence, int head, int token) const {
    return long(table[sequence * columns + token / 64]) * KvHeads + head;
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
    typename Kernel::Arguments const args{reinterpret_cast<cutlass::bfloat16_t const*>(q.data()),
                                          cache->template source<typename Kernel::Tokens::Source>(),
                                          reinterpret_cast<cutlass::bfloat16_t*>(out.data()),
                                          table.data(),
                                          columns,
                                          problem.lengths.data(),
                                          1 / std::sqrt(float(HeadDim)),
                                          problem.pages_per_split,
                                          &partial_out.data()->x,
                                          &partial_max_sum.data()->x,
                                          arrivals.data()};
    std::vector<uint16_t> const written_q = q;
    Pages const written = *cache;
    bool there = true;
    emulator::previous_kernel = [&](bool done) {
      if (done == there) return;
      there = done;
      for (size_t i = 0; i < q.size(); ++i) q[i] = done ? written_q[i] : 0x7fc0;
      for (int sequence = 0; sequence < sequences; ++sequence) {
        for (int head = 0; problem.lengths[sequence] > 0 && head < KvHeads; ++head) {
          int const newest = problem.lengths[sequence] - 1;
          long const at = place(sequence, head, newest);
          done ? cache->copy_token(written, at, newest % 64) : cache->poison(at, newest % 64);
        }
      }
    };
    emulator::launch({splits, KvHeads, unsigned(sequences)}, Kernel::kThreads, [&] {
      Kernel::run(args);
      emulator::expect(threadIdx.x > 0 || emulator::current->waited, "a block ended before the kernel before was done");
    });
  }

  // The largest error over what rounding may cost.
  double worst_error() const {
    double worst = 0;
    for (int sequence = 0; sequence < sequences; ++sequence) {
      int const length = problem.lengths[sequence];
      for (int head = 0; head < KvHeads * Group; ++head) {
        uint16_t const* query = &q[sequence * kRow + head * HeadDim];
        std::vector<double> scores(length), sum(HeadDim), rounding(HeadDim);
        double maximum = -INFINITY, weight_sum = 0;
        for (int token = 0; token < length; ++token) {
          long const at = place(sequence, head / Group, token);
          for (int d = 0; d < HeadDim; ++d) scores[token] += from_bf16(query[d]) * cache->worth(0, at, token % 64, d);
          scores[token] /= std::sqrt(double(HeadDim));
          maximum = std::max(maximum, scores[token]);
        }
        for (int token = 0; token < length; ++token) {
          long const at = place(sequence, head / Group, token);
          double const weight = std::exp(scores[token] - maximum);
          weight_sum += weight;
          for (int d = 0; d < HeadDim; ++d) {
            sum[d] += weight * cache->worth(1, at, token % 64, d);
            rounding[d] += weight * cache->rounding(at, token % 64, d);
          }
        }
        for (int d = 0; d < HeadDim; ++d) {
          double const actual = from_bf16(out[sequence * kRow + head * HeadDim + d]);
          double const exact = length ? sum[d] / weight_sum : 0;
          double const allowed = length ? rounding[d] / weight_sum : 0;
          double const error = std::fabs(actual - exact);
          worst = std::max(worst, error == 0 ? 0 : error <= allowed ? error / allowed : INFINITY);
        }
      }
    }
    return worst;
  }
};

static int failures = 0;

// What pages hold.
struct Bf16 {
  static constexpr char const* kName = "bf16";
  using Element = bf16;
};
struct E4m3 {
  static constexpr char const* kName = "e4m3";
  using Element = e4m3;
};
template <int Shared, bool Minimum>
struct Int4 {
  static constexpr char const* kNames[4] = {"int4-head", "int4-head-min", "int4-g32", "int4-g32-min"};
  static constexpr char const* kName = kNames[(Shared ? 2 : 0) + (Minimum ? 1 : 0)];
  using Element = KvFormat<Shared, Minimum, 0>;
};

template <class Form, int KvHeads, int Group, int HeadDim, int Stages>
std::vector<uint16_t> check(Case const& problem) {
  Attention<typename Form::Element, KvHeads, Group, HeadDim, Stages> attention(problem);
  attention.run();
  double const worst = attention.worst_error();
  bool const counters_are_zero = *std::max_element(attention.arrivals.begin(), attention.arrivals.end()) == 0;
  bool const passed = worst <= 1 && counters_are_zero;
  std::printf("%s, kv_heads %d, group %d, head_dim %d, stages %d, pages_per_split %d: %.2f of the allowed error%s%s\n",
              Form::kName, KvHeads, Group, HeadDim, Stages, problem.pages_per_split, worst,
              counters_are_zero ? "" : ", counters not zero", passed ? "" : " FAILED");
  failures += !passed;
  return attention.out;
}

template <class Form>
void check_some() {
  constexpr int kMore = std::is_same_v<Form, Bf16> || std::is_same_v<Form, E4m3> ? 0 : 5;  // stages, of smaller pages
  check<Form, 3, 3, 64, 3>({{1, 63, 64, 65, 0, 200}, 2, 200});
  check<Form, 2, 4, 128, 3>({{449, 15, 16, 17, 33, 128}, 3, 449});
  check<Form, 1, 1, 128, 3>({{65, 300}, 1, 300, 100});               // scores of hundreds
  check<Form, 1, 16, 64, 4 + kMore>({{130, 257}, 2, 257});
  check<Form, 1, 12, 128, 3 + kMore>({{130, 70}, 1, 130, 1, true});  // a second tile of heads that is half empty
}

template <class Form>
void check_all() {
  check_some<Form>();
  check<Form, 1, 4, 128, 4>({{777, 500}, 100, 777});  // a ring that turns, one split
  check<Form, 1, 8, 128, 3>({{130, 257}, 2, 257});
  check<Form, 1, 7, 64, 4>({{500, 470}, 2, 100});     // longer than the grid was sized for
  Case together{{449, 15, 300, 64}, 2, 449};
  auto const all = check<Form, 2, 4, 64, 3>(together);
  for (int sequence = 0; sequence < 4; ++sequence) {
    Case alone = together;
    alone.solo = sequence;
    alone.max_length = together.lengths[sequence];
    auto const row = check<Form, 2, 4, 64, 3>(alone);
    if (!std::equal(row.begin(), row.end(), all.begin() + sequence * row.size())) {
      std::printf("sequence %d alone differs FAILED\n", sequence);
      ++failures;
    }
  }
}

int main() {
  check_all<Bf16>();
  check_all<E4m3>();
  check_all<Int4<32, false>>();
  check_some<Int4<32, true>>();
  check_some<Int4<0, false>>();
  check_some<Int4<0, true>>();
  return failures;
}
