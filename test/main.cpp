// The test runner: Catch2's own, with a fresh seed for random inputs and a closing line that counts
// the test cases.
#define CATCH_CONFIG_RUNNER
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "device/process.h"
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

/// Counts the test cases, for the closing line, and keeps where those that failed did so first.
struct Counter : Listener {
    using Listener::Listener;
    static inline unsigned long long passed = 0, failed = 0;
    static inline bool in_test = false;
    static inline int progress = -1;  // a file that gets a byte for each test case
    static inline std::string name, failure;
    static inline std::vector<std::string> failures;

    void testCaseStarting(const Catch::TestCaseInfo& info) override {
        in_test = true;
        name = info.name;
        failure.clear();
        // From the seed and the name, so that a case alone repeats what it did among others.
        std::vector<uint32_t> words(name.begin(), name.end());
        words.push_back(static_cast<uint32_t>(test_seed()));
        words.push_back(static_cast<uint32_t>(test_seed() >> 32));
        std::seed_seq sequence(words.begin(), words.end());
        test_rng().seed(sequence);
    }
#if CATCH_VERSION_MAJOR >= 3
    void assertionEnded(const Catch::AssertionStats& stats) override { keep(stats); }
#else
    bool assertionEnded(const Catch::AssertionStats& stats) override {
        keep(stats);
        return false;
    }
#endif
    void testCaseEnded(const Catch::TestCaseStats& stats) override {
        in_test = false;
        const Catch::Counts& counts = stats.totals.testCases;
        passed += counts.passed + counts.failedButOk;
        if (progress >= 0 && ::write(progress, ".", 1) != 1) progress = -1;
        failed += counts.failed;
        if (counts.failed) failures.push_back(description());
    }

    /// The test case that is running, and its first assertion that failed.
    static std::string description() { return name + (failure.empty() ? "" : ": " + failure); }

  private:
    static void keep(const Catch::AssertionStats& stats) {
        const Catch::AssertionResult& result = stats.assertionResult;
        if (result.isOk() || !failure.empty()) return;
        const auto& line = result.getSourceInfo();
        failure = std::string(line.file) + ":" + std::to_string(line.line) + ": " +
                  std::string(result.hasExpandedExpression() ? result.getExpandedExpression()
                                                             : result.getMessage());
        std::replace(failure.begin(), failure.end(), '\n', ' ');
        if (failure.size() > 300) failure = failure.substr(0, 300) + "…";
    }
};
CATCH_REGISTER_LISTENER(Counter)

pid_t runner = 0;

/// Prints what failed and the closing line, once, and not in processes that tests fork. A case that
/// is still running has failed.
void close_run() {
    static bool closed = false;
    if (closed || ::getpid() != runner) return;
    closed = true;
    if (Counter::in_test) Counter::failures.push_back(Counter::description());
    for (const std::string& failure : Counter::failures)
        std::printf("failed: %s (TEST_SEED=%llu)\n", failure.c_str(),
                    static_cast<unsigned long long>(test_seed()));
    std::printf("%llu passed, %llu failed\n", Counter::passed, Counter::failed + Counter::in_test);
    std::fflush(stdout);
}

/// scripts/run-tests.sh names the file. Processes that tests start do not count.
void open_progress() {
    if (const char* file = std::getenv("TEST_PROGRESS"))
        Counter::progress = ::open(file, O_WRONLY | O_APPEND | O_CLOEXEC);
    ::unsetenv("TEST_PROGRESS");
}

/// Prints the closing line however the program ends, also by an assert or an exit(). Catch2 has
/// already reported a signal before it arrives here.
void close_run_in_any_case() {
    runner = ::getpid();
    std::atexit(close_run);
    for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL})
        std::signal(signal, [](int number) {
            close_run();
            std::signal(number, SIG_DFL);
            ::raise(number);
        });
}

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
    train_gpt::close_run_in_any_case();
    train_gpt::open_progress();
    const int status = Catch::Session().run(argc, argv);
    train_gpt::close_run();
    return status;
}
