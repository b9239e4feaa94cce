#include "parallel/cores.h"

#include <regex>
#include <vector>

#include <nlohmann/json.hpp>

#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

TEST_CASE("ranks share the cores that they have in common, and keep those of their own",
          "[cores]") {
    const auto threads = [](const std::vector<std::string>& cores) {
        std::vector<int> all;
        for (size_t rank = 0; rank < cores.size(); ++rank)
            all.push_back(threads_of_rank(cores, rank));
        return all;
    };
    CHECK(threads({"1111"}) == std::vector<int>{4});
    CHECK(threads({"1111", "1111"}) == std::vector<int>{2, 2});
    CHECK(threads({"111111", "111111", "111111"}) == std::vector<int>{2, 2, 2});
    CHECK(threads({"1100", "0011"}) == std::vector<int>{2, 2});    // bound to cores
    CHECK(threads({"1111", "11"}) == std::vector<int>{3, 1});      // overlapping
    CHECK(threads({"1", "1", "1"}) == std::vector<int>{1, 1, 1});  // more ranks than cores
    CHECK(threads({"", "11"}) == std::vector<int>{1, 2});          // one does not know its cores
    // Together they start no more threads than there are cores, not counting ranks with a single
    // thread.
    for (int round = 0; round < 50; ++round) {
        std::vector<std::string> cores(static_cast<size_t>(random_int(1, 8)));
        std::string any(32, '0');
        for (std::string& of : cores)
            for (int core = 0; core < 32; ++core) {
                of += random_int(0, 1) ? '1' : '0';
                if (of.back() == '1') any[static_cast<size_t>(core)] = '1';
            }
        int sum = 0;
        for (const int n : threads(cores)) sum += n > 1 ? n : 0;
        CHECK(sum <= std::ranges::count(any, '1'));
    }
}

TEST_CASE("without OMP_NUM_THREADS ranks that are bound to no core share the machine's",
          "[cores]") {
    const char* program = std::getenv("TRAIN_GPT");
    const TemporaryDirectory directory;
    write(directory / "config.json", R"({
        "device": "cpu", "run_dir": "unused",
        "model": {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_ctx": 16, "vocab_size": 64},
        "data": {"train": "synthetic"},
        "batch": {"tokens_per_step": 64, "micro_batch": 1, "sequence_length": 16},
        "schedule": {"steps": 1}, "precision": {"dtype": "fp32"}})");
    const auto threads = [&](int ranks, const std::string& variable) {
        std::vector<std::string> command = ranks > 1 ? launch(ranks) : std::vector<std::string>{};
        for (const std::string& word :
             {std::string("env"), std::string("-u"), std::string("OMP_NUM_THREADS"),
              std::string("A=B"), std::string(program ? program : "build/train_gpt"),
              std::string("train"), directory / "config.json", std::string("--set"),
              concat("run_dir=", directory / concat("run-", ranks, variable))})
            command.push_back(word == "A=B" && !variable.empty() ? variable : word);
        // MPI's library leaves memory behind.
        const ProgramResult result = run_program(
            command, {{"ASAN_OPTIONS", "detect_leaks=0"}, {"TRAIN_GPT_SECRET", test_secret}});
        INFO(result.output);
        REQUIRE(result.exit_code == 0);
        std::smatch found;
        REQUIRE(std::regex_search(result.output, found, std::regex(", ([0-9]+) threads?, ")));
        return std::stoi(found[1]);
    };
    const int all = threads(1, "");
    CHECK(threads(2, "") == std::max(1, all / 2));
    CHECK(threads(2, "OMP_NUM_THREADS=3") == 3);
}
