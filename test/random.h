// Fresh random inputs for tests. The seed is new in every run and printed at the start; TEST_SEED
// sets it, to repeat a run, or one of its test cases alone.
#pragma once
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace train_gpt {

/// The generator that all tests draw from.
std::mt19937_64& test_rng();

/// A uniform integer in [low, high].
int64_t random_int(int64_t low, int64_t high);

/// n independent normal values.
std::vector<float> random_normal(size_t n, float stddev = 1.0f);

/// A new empty folder, removed by the destructor.
class TemporaryDirectory {
  public:
    TemporaryDirectory();
    ~TemporaryDirectory();
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
    const std::string& path() const { return path_; }
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }

  private:
    std::string path_;
};

}  // namespace train_gpt
