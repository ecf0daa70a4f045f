// The sampling kernel's own source in the emulator, on rows from a file: int32 vocabulary, rows, stride of logits in
// floats, their misalignment, whether tokens have been seen; then what SamplingRows has, each [rows], the words of seen
// tokens, and logits. Prints the tokens, and the words afterwards.
#include <fstream>
#include <type_traits>

#include "candidate.cuh"
#include "sampling_numbers.cuh"

#include "sampling.cuh"

static std::ifstream file;

template <class T>
std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  file.read(reinterpret_cast<char*>(values.data()), count * sizeof(T));
  emulator::expect(bool(file), "the file is too short");
  return values;
}

template <int Vocabulary, int Blocks, int Threads>
void run(int rows, int stride, int misalignment, bool with_seen) {
  using Kernel = futransformer::Sample<Vocabulary, Blocks, Threads>;
  auto const temperature = read<float>(rows);
  auto const top_k = read<int>(rows);
  auto const top_p = read<float>(rows), min_p = read<float>(rows), penalty = read<float>(rows);
  auto const seed = read<long long>(rows);
  auto const position = read<int>(rows);
  auto seen = read<unsigned>(with_seen ? rows * Kernel::kWords : 0);
  auto const values = read<float>(size_t(rows) * stride);
  std::vector<float4> memory(values.size() / 4 + 2, {INFINITY, INFINITY, INFINITY, INFINITY});
  float* const logits = &memory[0].x + misalignment;
  std::copy(values.begin(), values.end(), logits);
  std::vector<int> out(rows, -1);
  futransformer::SamplingRows const settings{temperature.data(), top_k.data(), top_p.data(), min_p.data(),
                                             penalty.data(), seed.data(), position.data(),
                                             with_seen ? seen.data() : nullptr};
  emulator::launch({unsigned(Blocks), unsigned(rows), 1}, Threads, [&] {
    Kernel::run(logits, stride, settings, out.data());
    emulator::expect(emulator::current->waited, "sampling read before the kernel before was done");
  }, Blocks);
  for (int const token : out) std::printf("%d ", token);
  for (unsigned const word : seen) std::printf("%u ", word);
  std::printf("\n");
}

int main(int, char** argv) {
  file.open(argv[1], std::ios::binary);
  auto const header = read<int>(5);
  if (header[0] == 1003) run<1003, 2, 256>(header[1], header[2], header[3], header[4]);
  if (header[0] == 37) run<37, 8, 256>(header[1], header[2], header[3], header[4]);
  if (header[0] == 4096) run<4096, 4, 512>(header[1], header[2], header[3], header[4]);
}
