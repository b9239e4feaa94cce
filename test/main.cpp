// The test runner: Catch2's own, with a fresh seed for random inputs and a closing line that counts
// the test cases.
#define CATCH_CONFIG_RUNNER
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include <unistd.h>

#include "kernels/device.h"
#include "test/catch.h"
#include "test/random.h"

namespace train_gpt {

namespace {

uint64_t& test_seed() {
    static uint64_t seed = [] {
        const char* wanted = std::getenv("TEST_SEED");
        return wanted ? std::strtoull(wanted, nullptr, 10) : std::random_device{}();
    }();
    return seed;
}

#if CATCH_VERSION_MAJOR >= 3
using Listener = Catch::EventListenerBase;
#else
using Listener = Catch::TestEventListenerBase;
#endif

/// Counts the test cases of the run, for the closing line.
struct Counter : Listener {
    using Listener::Listener;
    static Catch::Counts& counts() {
        static Catch::Counts counts;
        return counts;
    }
    void testRunEnded(const Catch::TestRunStats& stats) override {
        counts() = stats.totals.testCases;
    }
};
CATCH_REGISTER_LISTENER(Counter)

}  // namespace

std::mt19937_64& test_rng() {
    static std::mt19937_64 rng(test_seed());
    return rng;
}

int64_t random_int(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(test_rng());
}

std::vector<float> random_normal(size_t n, float stddev) {
    std::normal_distribution<float> normal(0.0f, stddev);
    std::vector<float> values(n);
    for (float& value : values) value = normal(test_rng());
    return values;
}

TemporaryDirectory::TemporaryDirectory() {
    path_ = (std::filesystem::temp_directory_path() / ("train_gpt-test-" + std::string(6, 'X')))
                .string();
    if (!::mkdtemp(path_.data())) std::abort();
}

TemporaryDirectory::~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

}  // namespace train_gpt

int main(int argc, char** argv) {
    train_gpt::limit_openmp_spinning(argv);
    std::printf("TEST_SEED=%llu repeats this run's random inputs\n",
                static_cast<unsigned long long>(train_gpt::test_seed()));
    std::fflush(stdout);
    const int status = Catch::Session().run(argc, argv);
    const Catch::Counts& counts = train_gpt::Counter::counts();
    std::printf("%llu passed, %llu failed\n",
                static_cast<unsigned long long>(counts.passed + counts.failedButOk),
                static_cast<unsigned long long>(counts.failed));
    return status;
}
