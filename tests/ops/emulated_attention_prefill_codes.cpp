// The converters of prefill attention in the emulator: tiles of codes in, BF16 tiles out, in the order of the producer's
// requests, through rings that turn; every one of the 256 codes.
#include "e4m3_operand.cuh"

#include "attention_code_tiles.cuh"

namespace cutlass {
constexpr int NumThreadsPerWarp = 32;
}  // namespace cutlass

template <int Stages>
struct State {
  int at = 0, turn = 0;
  State() = default;
  State(int, int phase, int) : turn(phase) {}
  int index() const { return at; }
  uint32_t phase() const { return turn; }
  void operator++() {
    if (++at == Stages) at = 0, turn ^= 1;
  }
};

template <int HeadDim_, int TileN_>
struct Traits {
  using Element = cutlass::bfloat16_t;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  static constexpr int HeadDim = HeadDim_, TileN = TileN_, Stages = 2, kCodeStages = 2, kConverterWarps = 3;
  static constexpr int kTileElements = HeadDim * TileN;
  enum class CodeKind : int { kKeys, kValues, kEnd };
  struct Barriers {
    FullBarrier k_full[Stages], v_full[Stages];
    EmptyBarrier k_empty[Stages], v_empty[Stages];
  };
  struct Tiles {
    alignas(16) Element values[Stages * kTileElements];
    Element* data() { return values; }
  };
  struct Codes {
    alignas(16) uint8_t tiles[kCodeStages][kTileElements];
    FullBarrier full[kCodeStages];
    EmptyBarrier empty[kCodeStages];
    CodeKind kind[kCodeStages];
  };
  struct SharedStorage {
    Tiles k, v;
    Barriers barriers;
    Codes behind;
  };
  using PipelineState = State<Stages>;
  using CodeState = State<kCodeStages>;
  static Codes& codes(SharedStorage& shared) { return shared.behind; }
};

#include "attention_prefill_codes.cuh"

static int failures = 0;

static float value_of(uint8_t code) {
  int const exponent = std::max(code >> 3 & 15, 1), mantissa = (code & 7) + (code >> 3 & 15 ? 8 : 0);
  return std::ldexp(code & 0x80 ? -mantissa : mantissa, exponent - 10);
}

// Warp 0 asks for tiles as the producer does, K of a tile before V of the one before; warps 1 to 3 convert; warp 4
// takes what they fill, as the consumers do, and looks at every operand.
template <int HeadDim, int TileN>
void check(int tiles) {
  using T = Traits<HeadDim, TileN>;
  using Kind = typename T::CodeKind;
  auto const code_of = [](bool is_v, int tile, int token, int feature) {
    return uint8_t(token * 31 + feature * 7 + tile * 13 + is_v * 101);
  };
  emulator::launch({1, 1, 1}, 160, [&] {
    auto& shared = *reinterpret_cast<typename T::SharedStorage*>(futransformer::dynamic_shared);
    auto& barriers = shared.barriers;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < 2; ++stage) {
        shared.behind.full[stage].init(1), shared.behind.empty[stage].init(3 * 32);
        barriers.k_full[stage].init(3 * 32), barriers.v_full[stage].init(3 * 32);
        barriers.k_empty[stage].init(1), barriers.v_empty[stage].init(1);
      }
    }
    __syncthreads();
    if (warp == 0 && lane == 0) {
      State<2> codes(0, 1, 0);
      auto const ask = [&](Kind kind, int tile) {
        futransformer::wait(shared.behind.empty[codes.index()], codes.phase());
        shared.behind.kind[codes.index()] = kind;
        for (int i = 0; kind != Kind::kEnd && i < T::kTileElements; ++i) {
          int const token = i / HeadDim, feature = i % HeadDim, place = i ^ (i / 128 % 8) * 16;
          shared.behind.tiles[codes.index()][place] = code_of(kind == Kind::kValues, tile, token, feature);
        }
        shared.behind.full[codes.index()].arrive();
        ++codes;
      };
      for (int tile = 0; tile < tiles; ++tile) {
        ask(Kind::kKeys, tile);
        if (tile > 0) ask(Kind::kValues, tile - 1);
      }
      ask(Kind::kValues, tiles - 1);
      ask(Kind::kEnd, 0);
    } else if (warp >= 1 && warp <= 3) {
      futransformer::AttentionPrefillConverter<T>::run(shared, warp - 1);
    } else if (warp == 4 && lane == 0) {
      State<2> k, v;
      auto const take = [&](bool is_v, int tile) {
        State<2>& state = is_v ? v : k;
        futransformer::wait(is_v ? barriers.v_full[state.index()] : barriers.k_full[state.index()], state.phase());
        auto const* const operands = (is_v ? shared.v : shared.k).values + state.index() * T::kTileElements;
        for (int i = 0; tile < tiles && i < T::kTileElements; ++i) {
          int const token = i / HeadDim, feature = i % HeadDim;
          int const row = feature / 64 * TileN + token, chunk = feature % 64 / 8 ^ token % 8;
          float const actual = from_bf16(operands[row * 64 + chunk * 8 + feature % 8].storage);
          uint8_t const code = code_of(is_v, tile, token, feature);
          float const wanted = (code & 0x7f) == 0x7f ? (code & 0x80 ? -480 : 480) : value_of(code);
          if (actual * futransformer::kE4m3Operand != wanted && failures++ < 5) {
            std::printf("head_dim %d, tile %d, token %d, feature %d: code %d is %g\n", HeadDim, tile, token, feature,
                        code, actual * futransformer::kE4m3Operand);
          }
        }
        (is_v ? barriers.v_empty[state.index()] : barriers.k_empty[state.index()]).arrive();
        ++state;
      };
      for (int tile = 0; tile < tiles; ++tile) {
        take(false, tile);
        if (tile > 0) take(true, tile - 1);
      }
      take(true, tiles - 1);
      take(false, tiles);  // the empty tile behind the last
    }
  });
}

int main() {
  check<64, 128>(1);
  check<64, 64>(7);
  check<128, 128>(5);
  return failures;
}
