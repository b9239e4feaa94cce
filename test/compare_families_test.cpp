// scripts/compare_families.py, with a stand-in for the program.
#include <cstdio>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

/// Steps take what $ROOM/FAMILY says, and a run reaches what $ROOM/FAMILY-RATE-SEED says.
constexpr const char* families_program = R"sh(#!/bin/bash
family=llama rate=- seed=-
for argument; do
    case $argument in
        model.family=*) family=${argument#*=} ;;
        schedule.steps=*) steps=${argument#*=} ;;
        optimizer.learning_rate=*) rate=${argument#*=} ;;
        seed=*) seed=${argument#*=} ;;
        run_dir=*) run_dir=${argument#*=} ;;
    esac
done
echo "$family $steps $rate $seed" >> "$ROOM/calls"
mkdir -p "$run_dir"
for i in {1..9}; do
    echo "{\"step\": $i, \"ms\": $(cat "$ROOM/$family")}"
done > "$run_dir/metrics.jsonl"
[ "$rate" = - ] ||
    echo "{\"val_bits_per_byte\": $(cat "$ROOM/$family-$rate-$seed")}" >> "$run_dir/metrics.jsonl"
)sh";

std::string digits(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", value);
    return text;
}

}  // namespace

TEST_CASE("families are compared after the same time, each with its best learning rate",
          "[scripts]") {
    if (skip_without_python()) return;
    const TemporaryDirectory room;
    write(room / "program", families_program);
    fs::permissions(room / "program", fs::perms::owner_all);
    const auto compare = [&](const std::string& seconds) {
        return run_program({"python3", "scripts/compare_families.py", "--program", room / "program",
                            "--folder", room / "runs", "--data", room / "data", "--seconds",
                            seconds, "--seeds", "5", "6", "--rates", "0.001", "0.002", "0.003"},
                           {{"ROOM", room.path()}});
    };
    const ProgramResult unprepared = compare("10");
    CHECK(unprepared.exit_code == 1);
    CHECK(contains(unprepared.output, "make quickstart"));
    fs::create_directory(room / "data");
    write(room / "data/tokenizer.json", "{}");

    std::string expected_calls = "llama 40 - -\ngpt2 40 - -\nllama 40 - -\ngpt2 40 - -\n";
    std::vector<std::string> expected_rows;
    for (const std::string family : {"llama", "gpt2"}) {
        const int64_t ms = random_int(10, 49), steps = 10000 / ms;
        write(room / family, std::to_string(ms));
        const int64_t best = random_int(1, 3);
        for (int64_t rate = 1; rate <= 3; ++rate) {
            const double bits = rate == best ? 1.25 : 1.5;
            write(concat(room / family, "-0.00", rate, "-1337"), std::to_string(bits));
            expected_calls += concat(family, " ", steps, " 0.00", rate, " 1337\n");
        }
        double sum = 0;
        std::string of_seeds;
        for (const int seed : {5, 6}) {
            const auto bits = static_cast<double>(random_int(500, 999)) / 500;
            sum += bits;
            of_seeds += digits(bits) + " | ";
            write(concat(room / family, "-0.00", best, "-", seed), std::to_string(bits));
            expected_calls += concat(family, " ", steps, " 0.00", best, " ", seed, "\n");
        }
        expected_rows.push_back(concat("| ", family == "llama" ? "Llama" : "GPT-2", " | ", steps,
                                       " | ", ms, " | 0 to 0 | 0.00", best, " | ", of_seeds,
                                       digits(sum / 2), " |\n"));
    }
    const ProgramResult first = compare("10");
    INFO(first.output);
    CHECK(first.exit_code == 0);
    CHECK(read(room / "calls") == expected_calls);
    for (const std::string& row : expected_rows) CHECK(contains(first.output, row));

    // What has been measured is not measured again.
    const ProgramResult again = compare("10");
    CHECK(again.exit_code == 0);
    CHECK(read(room / "calls") == expected_calls);
    CHECK(first.output.ends_with(again.output));

    const ProgramResult short_of_time = compare("1");
    CHECK(short_of_time.exit_code == 1);
    CHECK(contains(short_of_time.output, "raise --seconds"));
}
