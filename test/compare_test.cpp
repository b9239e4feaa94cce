// build/compare as a user runs it, and how it judges results. COMPARE, set by the Makefile, names
// the program; the default is build/compare.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <string>

#include <sys/wait.h>

#include "test/catch.h"
#include "test/compare/measure.h"
#include "test/kernels/test_device.h"
#include "test/random.h"
#include "test/text.h"

namespace train_gpt::compare {

namespace {

struct Outcome {
    int code = 0;
    std::string text;  // stdout and stderr
};

Outcome compare_with(const std::string& arguments, const std::string& environment = "") {
    const char* named = std::getenv("COMPARE");
    const std::string program = named ? named : "build/compare";
    if (!std::filesystem::exists(program))
        FAIL("there is no program " << program << "; build it with make compare");
    const std::string command = environment + " '" + program + "' " + arguments + " 2>&1";
    std::FILE* const pipe = ::popen(command.c_str(), "r");
    REQUIRE(pipe != nullptr);
    Outcome outcome;
    char buffer[4096];
    while (const size_t n = std::fread(buffer, 1, sizeof buffer, pipe))
        outcome.text.append(buffer, n);
    const int status = ::pclose(pipe);
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return outcome;
}

std::string check_succeeds(const Outcome& outcome) {
    INFO(outcome.text);
    REQUIRE(outcome.code == 0);
    return outcome.text;
}

void check_refused(const std::string& arguments, std::initializer_list<std::string> parts) {
    const Outcome outcome = compare_with(arguments);
    CAPTURE(arguments, outcome.text);
    CHECK(outcome.code == 2);
    CHECK(outcome.text.starts_with("compare: "));
    CHECK(std::count(outcome.text.begin(), outcome.text.end(), '\n') == 1);
    for (const std::string& part : parts) CHECK(contains(outcome.text, part));
}

size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
    return n;
}

}  // namespace

TEST_CASE("a difference is the largest, the mean and the relative L2 error", "[compare]") {
    const Difference d = difference({1, -2, 7}, {1, -2, 4});
    CHECK(d.max == 3);
    CHECK(d.mean == 1);
    CHECK(d.relative == Approx(3 / std::sqrt(21.0)));
    CHECK(difference({1, -2, 7}, {1, -2, 4}, {0, 0, 12}).relative == 0.25);
    const Difference of_zero = difference({0, 0.25}, {0, 0});
    CHECK(of_zero.relative == 0.25);
    CHECK(difference({0, 0}, {0, 0}).relative == 0);
}

TEST_CASE("a NaN shows in every part of a difference, wherever it is", "[compare]") {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (size_t at : {0u, 1u, 2u}) {
        for (bool ours : {true, false}) {
            Values a{1, 2, 3}, b{1, 5, 2};
            (ours ? a : b)[at] = nan;
            const Difference d = difference(a, b);
            CAPTURE(at, ours);
            CHECK(std::isnan(d.max));
            CHECK(std::isnan(d.mean));
            CHECK(std::isnan(d.relative));
        }
    }
}

TEST_CASE(
    "the bound of an error follows from the dtype's rounding, and grows with the root of a sum's "
    "length",
    "[compare]") {
    const Accuracy rounded{.roundings = 1, .terms = 0}, sum{.roundings = 0, .terms = 10000 - 16};
    CHECK(rounded.bound(DType::bf16) == Approx(0x1p-8));
    CHECK(rounded.bound(DType::fp32) == Approx(2 * std::sqrt(17.0) * 0x1p-24));
    CHECK(sum.bound(DType::bf16) == Approx(200 * 0x1p-24));
    CHECK(sum.bound(DType::fp32) == sum.bound(DType::bf16));
}

TEST_CASE("compare finds every kernel of every device within its bounds at a small odd shape",
          "[compare][cuda]") {
    const std::string text = check_succeeds(
        compare_with("--repeat 0 --shape B=2,T=19,C=27,H=3,D=17,V=71,M=13,N=23,K=37 --seed " +
                     std::to_string(random_int(0, 1000))));
    const bool gpu = test_devices().size() > 1;
    for (const Operation& operation : operations()) {
        CAPTURE(operation.name);
        const size_t first = text.find("### " + operation.name + ":");
        REQUIRE(first != std::string::npos);
        const std::string section = text.substr(first, text.find("### ", first + 1) - first);
        for (const char* dtype : {"fp32", "bf16"}) {
            const std::string row = std::string("\n| ") + dtype + "  | ";
            CHECK(contains(section, row + "CPU") ==
                  (dtype == std::string("fp32") || !operation.fp32_only));
            CHECK(contains(section, row + "CUDA") == (gpu && contains(section, row + "CPU")));
        }
    }
}

TEST_CASE("matrix products are correct if oneDNN is limited to AVX2", "[compare]") {
    // Enough rows for packing, and weight rows that are whole pages apart.
    const std::string odd = std::to_string(random_int(1, 80));
    for (const std::string& extents : {"M=1031,N=1024,K=" + odd, "M=1024,K=1024,N=" + odd}) {
        CAPTURE(extents);
        const std::string text = check_succeeds(compare_with(
            "linear_forward_residual linear_backward_input linear_backward_weight --dtype fp32 "
            "--device cpu --repeat 0 --seed " +
                std::to_string(random_int(0, 1 << 30)) + " --shape " + extents,
            "DNNL_MAX_CPU_ISA=AVX2"));
        CHECK(contains(text, "own GEMM"));
    }
}

TEST_CASE("compare --list shows every kernel with its letters, and --help explains itself",
          "[compare]") {
    const std::string list = check_succeeds(compare_with("--list"));
    for (const Operation& operation : operations()) {
        CHECK(contains(list, "| " + operation.name + " "));
        CHECK(contains(list, "| " + operation.computes + " "));
    }
    CHECK(contains(list, "| B=2 T=256 H=4 Q=1 D=64"));
    const std::string help = check_succeeds(compare_with("--help"));
    for (const char* option : {"--shape", "--dtype", "--device", "--all", "--list", "--repeat",
                               "--seed", "--no-reference"})
        CHECK(contains(help, option));
}

TEST_CASE("compare refuses invalid arguments, and names the nearest valid ones", "[compare]") {
    check_refused("linear_foward", {"\"linear_foward\"", "\"linear_forward\""});
    check_refused("layernorm", {"\"layernorm_forward\""});
    check_refused("gelu", {"\"gelu_forward\""});
    check_refused("fastest", {"\"fastest\"; --list shows all"});
    check_refused("gelu_forward --shape K=3", {"K", "M N"});
    check_refused("gelu_forward --shape M=8,N=", {"\"N=\""});
    check_refused("gelu_forward --shape M=0", {"\"M=0\""});
    check_refused("gelu_forward --shape M=8x", {"\"M=8x\""});
    check_refused("layernorm_forward --shape C=2", {"layernorm_forward", "C >= 8"});
    check_refused("--dtype fp16", {"fp16", "--help"});
    check_refused("--all --shape M=2", {"--help"});
    check_refused("--repeat -1", {"--repeat", "--help"});
}

TEST_CASE("compare measures times, and prints the rate that is nearer to its limit", "[compare]") {
    const std::string small =
        check_succeeds(compare_with("gelu_forward linear_forward --device cpu --dtype fp32 "
                                    "--repeat 3 --shape M=300,N=300,K=300"));
    CHECK(contains(small, "; reaches "));
    CHECK(count(small, " GB/s | ") == 1);
    CHECK(contains(small, " TFLOP/s | "));
    CHECK(contains(small, " % |"));

    const std::string row =
        "| layernorm_forward            | fp32  | CPU            | M=1024 C=768             | ";
    CHECK(count(check_succeeds(
                    compare_with("layernorm_forward --all --device cpu --dtype fp32 --repeat 1")),
                row) == 1);
}

TEST_CASE("compare without a reference compares implementations with the first", "[compare]") {
    const std::string text = check_succeeds(
        compare_with("linear_forward --device cpu --dtype fp32 --repeat 0 --no-reference"));
    CHECK_FALSE(contains(text, "float64  "));
#ifdef TRAIN_GPT_ONEDNN
    CHECK(contains(text, "| fp32  | CPU, own GEMM  | out      | CPU, oneDNN   | "));
#else
    CHECK(contains(text, "| fp32  | CPU, own GEMM  | out      | CPU, own GEMM | "));
#endif
}

}  // namespace train_gpt::compare
