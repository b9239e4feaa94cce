// scripts/first_hour.sh: with stand-ins for the programs and for NVIDIA's tools, and on a simulated
// GPU with the programs themselves.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "test/catch.h"
#include "test/kernels/test_device.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

/// Answers as $ROOM says. A micro-batch of up to $NONE fits without recomputation, and of up to
/// $BLOCK with it.
constexpr const char* first_hour_program = R"sh(#!/bin/bash
echo "$*" >> "$ROOM/calls"
batch= level= run_dir= device= dtype=
for argument; do
    case $argument in
        batch.micro_batch=*) batch=${argument#*=} ;;
        memory.recompute=*) level=${argument#*=} ;;
        precision.dtype=*) dtype=${argument#*=} ;;
        device=*) device=${argument#*=} ;;
        run_dir=*) run_dir=${argument#*=} ;;
    esac
done
case "$*" in
    --version)
        [ ! -e "$ROOM/libraries" ] ||
            [[ :$LD_LIBRARY_PATH: == *:$(cat "$ROOM/libraries"):* ]] || exit 127
        cat "$ROOM/version" ;;
    selfcheck*) echo 'rank  host' ;;
    tokenize*) mkdir -p "${@: -1}" && echo '{}' > "${@: -1}/data.json" ;;
    plan*)
        level=none fits=
        [ $batch -le $NONE ] || level=block
        [ $batch -le $BLOCK ] || fits=': DOES NOT FIT'
        choices="batch.micro_batch = $batch, memory.recompute = $level"
        echo "$choices: 1 MiB of 2 MiB available here$fits"
        [ -z "$fits" ] ;;
    *--profile*) printf 'profile of 10 steps\n  head_loss  1.0\n  step   9.5\n' ;;
    train\ configs/quickstart.json\ *schedule.steps=300*)
        mkdir -p "$run_dir" && cp "$ROOM/losses-$device-$dtype" "$run_dir/metrics.jsonl" ;;
    train*)
        mkdir -p "$run_dir"
        line=$(cat "$ROOM/step-$(basename "$2" .json)-$batch-$level")
        for i in {1..80}; do echo "$line"; done > "$run_dir/metrics.jsonl"
        exec sleep 100 ;;
esac
)sh";

/// A Python with PyTorch, in which batches above $PEER do not fit.
constexpr const char* python_script = R"sh(#!/bin/bash
case "$*" in
    *'import torch'*) echo 2.99 ;;
    *"find_spec('nvidia')"*) cat "$ROOM/libraries" ;;
    *bench_pytorch.py*)
        [[ $* =~ --n-layer\ ([0-9]+).*--batch\ ([0-9]+).*--dtype\ ([a-z]+).*--sdpa\ ([a-z]+) ]]
        [ "${BASH_REMATCH[2]}" -le "$PEER" ] || { echo 'CUDA out of memory' >&2; exit 1; }
        echo '{"ready": true, "torch": "2.99"}'
        peer=peer-${BASH_REMATCH[1]}-${BASH_REMATCH[3]}-${BASH_REMATCH[4]}
        echo "{\"ms\": [1, $(cat "$ROOM/$peer"), 1e9]}" ;;
    *) exit 1 ;;
esac
)sh";

constexpr const char* sanitizer_script = R"sh(#!/bin/bash
while [[ $1 == --* ]]; do shift $([[ $1 == --version ]] && echo 1 || echo 2); done
"$@"; code=$?
echo "========= ERROR SUMMARY: $(cat "$ROOM/errors") errors"
[ "$(cat "$ROOM/errors")" = 0 ] && exit $code
exit 1
)sh";

/// A folder with stand-ins, and the script's results.
class FirstHour {
  public:
    FirstHour() {
        for (const char* name : {"bin", "programs"}) fs::create_directories(room_ / name);
        tool("programs/train_gpt", first_hour_program);
        tool("programs/test",
             "#!/bin/sh\necho \"test $*\" >> \"$ROOM/calls\"\ncat \"$ROOM/tests\"\n");
        tool("programs/compare",
             "#!/bin/sh\necho compare >> \"$ROOM/calls\"\ncat \"$ROOM/kernels\"\n");
        tool("bin/python-with-torch", python_script);
        tool("bin/compute-sanitizer", sanitizer_script);
        tool("bin/nvidia-smi",
             "#!/bin/sh\ncase $1 in *memory.total) echo 81559 ;; *) echo 'Test GPU, 580.1' ;; "
             "esac\n");
        tool("bin/ncu", "#!/bin/sh\ncat \"$ROOM/ncu\"\n");
        tool("bin/nsys", "#!/bin/sh\n[ $1 != stats ] || cat \"$ROOM/nsys\"\n");
        set("version",
            "train_gpt abc123\nCUDA    13.0\nGPU 0   Test GPU, sm_90\n"
            "MPI     not in this build\n");
        set("tests", "41 passed, 0 failed\n");
        set("errors", "0");
        set("kernels", "- CUDA: Test GPU; reaches 2000.0 GB/s, 700.000 TFLOP/s in bf16\n");
    }
    void set(const std::string& name, const std::string& text) const { write(room_ / name, text); }
    void tool(const std::string& name, const std::string& script) const {
        write(room_ / name, script);
        fs::permissions(room_ / name, fs::perms::owner_all);
    }

    ProgramResult run(const std::vector<std::string>& arguments) const {
        std::vector<std::string> command{"bash",       "scripts/first_hour.sh",
                                         "--programs", room_ / "programs",
                                         "--folder",   room_ / "out"};
        command.insert(command.end(), arguments.begin(), arguments.end());
        return run_program(command, {{"PATH", (room_ / "bin") + ":" + std::getenv("PATH")},
                                     {"PYTHON", room_ / "bin/python-with-torch"},
                                     {"GPUSIM", ""},
                                     {"ROOM", room_.path()},
                                     {"NONE", std::to_string(none)},
                                     {"BLOCK", std::to_string(block)},
                                     {"PEER", std::to_string(peer)}});
    }
    std::string report() const { return read(room_ / "out/report.md"); }
    bool exists(const std::string& name) const { return fs::exists(room_ / name); }
    /// Calls of the stand-ins since the last call of this function.
    std::string calls() const {
        const std::string text = read(room_ / "calls");
        fs::remove(room_ / "calls");
        return text;
    }

    int none = 40, block = 48, peer = 12;

  private:
    TemporaryDirectory room_;
};

/// The line of the output that begins with a verdict and names the target.
std::string verdict_on(const std::string& target, const std::string& output) {
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);)
        if (contains(line, target))
            for (const char* verdict : {"not met", "met", "not measured"})
                if (line.starts_with(verdict)) return verdict;
    return "missing";
}

std::string verdict(bool met) { return met ? "met" : "not met"; }

double random_real(double low, double high) {
    return low + (high - low) * static_cast<double>(random_int(0, 1000000)) / 1e6;
}

}  // namespace

TEST_CASE("the first hour takes the fastest micro-batch and recompute level, and judges it",
          "[scripts]") {
    if (skip_without_python()) return;
    FirstHour hour;
    // Milliseconds per sequence of each candidate; the largest without recomputation is not always
    // the fastest.
    std::map<std::string, double> fastest;
    std::map<std::string, std::string> settings;
    for (const auto& [model, layers, low] :
         {std::tuple{"124m", 12, 1.6}, std::tuple{"1558m", 48, 17.0}}) {
        double best = 1e9;
        for (const auto& [batch, level] : {std::pair{40, "none"}, {32, "none"}, {48, "block"}}) {
            const double ms = random_real(low, 1.2 * low);
            if (ms < best) {
                best = ms;
                settings[model] = concat(batch, " (recompute ", level, ", attention cudnn) | ");
            }
            hour.set(concat("step-gpt2-", model, "-", batch, "-", level),
                     nlohmann::json{
                         {"step", 1}, {"ms", ms * batch}, {"mfu", 9.4 / ms}, {"attention", "cudnn"}}
                         .dump());
        }
        fastest[model] = best;
        for (const char* dtype : {"masters", "autocast"})
            for (const char* sdpa : {"cudnn", "flash"}) {
                const double ms = random_real(1.05 * low, 1.5 * low);
                double& least = fastest.try_emplace(concat(model, " peer"), 1e9).first->second;
                least = std::min(least, ms);
                hour.set(concat("peer-", layers, "-", dtype, "-", sdpa),
                         std::to_string(ms * hour.peer));
            }
    }
    const ProgramResult run = hour.run(
        {"--only", "124M", "--only", "1558M", "--only", "124M-pytorch", "--only", "1558M-pytorch"});
    INFO(run.output);
    INFO(hour.report());
    CHECK(run.exit_code == 0);
    CHECK(verdict_on("124M: at least 580,000 tokens/s", run.output) ==
          verdict(1024e3 / fastest["124m"] >= 580e3));
    CHECK(verdict_on("1558M: at least 56 % MFU", run.output) ==
          verdict(9.4 / fastest["1558m"] >= 0.56));
    CHECK(verdict_on("124M: at least 1.15 ×", run.output) ==
          verdict(fastest["124m peer"] / fastest["124m"] >= 1.15));
    CHECK(verdict_on("1558M: at least 1.1 ×", run.output) ==
          verdict(fastest["1558m peer"] / fastest["1558m"] >= 1.1));
    CHECK(contains(hour.report(), "| 124M | " + settings["124m"]));
    CHECK(contains(hour.report(), "| 1558M | " + settings["1558m"]));
    // Each candidate is tried once, and the fastest measured once, and once while it is traced;
    // PyTorch's parts repeat nothing.
    const auto trained = [&] {
        const std::string calls = hour.calls();
        const std::regex train("(^|\n)train ");
        return std::distance(std::sregex_iterator(calls.begin(), calls.end(), train),
                             std::sregex_iterator());
    };
    CHECK(trained() == 2 * (3 + 2));
    CHECK(hour.run({"--only", "124M", "--again"}).exit_code == 0);
    CHECK(trained() == 3 + 2);
}

TEST_CASE("the first hour judges kernels by their rows", "[scripts]") {
    if (skip_without_python()) return;
    const FirstHour hour;
    const double bandwidth = random_real(1000, 4000);
    std::string table = concat("- CUDA: Test GPU; reaches ", bandwidth, " GB/s, 7 TFLOP/s\n");
    const auto row = [&](const std::string& kernel, const std::string& implementation, double ms,
                         double percent) {
        table += concat("| ", kernel, " | bf16 | ", implementation, " | M=1 | ", ms,
                        " | 1.0 GB/s | ", percent, " % | out | float64 |\n");
    };
    std::map<std::string, bool> met;
    std::vector<std::string> shown;
    for (const auto& [kernel, limit] : std::map<std::string, double>{{"layernorm_forward", 85},
                                                                     {"norm_partials", 85},
                                                                     {"adamw", 85},
                                                                     {"layernorm_backward", 70}}) {
        const double percent = limit + random_real(-9, 9);
        row(kernel, "CUDA", 1, percent);
        met[concat(kernel, ": at least")] = percent >= limit;
    }
    for (const auto& [kernel, limit] :
         {std::pair{"attention_forward", 65}, std::pair{"attention_backward", 45}}) {
        const double own = random_real(1, 2);
        const int share = limit + static_cast<int>(random_int(1, 9) * (random_int(0, 1) ? 1 : -1));
        shown.push_back(concat("% of cuDNN's speed: ", share, " %"));
        row(kernel, "CUDA, own", own, 30);
        row(kernel, "CUDA, cuDNN", own * share / 100, 50);
        met[concat("own ", kernel)] = share > limit;
    }
    hour.set("kernels", table);
    // The head's softmax moves so many bytes in a microsecond.
    const double share = random_real(0.7, 0.9);
    hour.set("ncu",
             concat("==PROF== connected\n\"ID\",\"Kernel "
                    "Name\",\"dram__bytes_read.sum\",\"dram__bytes_write.sum\",\"gpu__time_"
                    "duration.sum\"\n\"\",\"\",\"byte\",\"byte\",\"ns\"\n\"0\",\"void "
                    "loss_in_shared_memory<bf16>(int)\",\"",
                    600 * share * bandwidth, "\",\"", 400 * share * bandwidth, "\",\"1,000\"\n"));
    met["the head's softmax"] = share >= 0.8;
    hour.set("nsys", "Time (%),Instances,Med (ns),Name\n33.3,7,1234.0,kernel_of_nsys\n");
    const ProgramResult run =
        hour.run({"--only", "kernels", "--only", "ncu", "--only", "nsys", "--only", "profile"});
    INFO(run.output);
    INFO(hour.report());
    CHECK(run.exit_code == 0);
    for (const auto& [target, is] : met) {
        CAPTURE(target);
        CHECK(verdict_on(target, run.output) == verdict(is));
    }
    for (const std::string& text : shown) CHECK(contains(run.output, text));
    CHECK(contains(hour.report(), "| 33.3 | 7 | 1234.0 | `kernel_of_nsys` |"));
    CHECK(contains(hour.report(), "  head_loss  1.0"));
}

TEST_CASE("the first hour compares losses, counts tests and finds the sanitizer's errors",
          "[scripts]") {
    if (skip_without_python()) return;
    const FirstHour hour;
    const double off = random_real(0, 0.04),
                 early = 1e-4 * static_cast<double>(random_int(0, 1) ? random_int(1, 9)
                                                                     : random_int(11, 20));
    for (const char* run : {"cpu-fp32", "cuda-fp32", "cuda-bf16"}) {
        const bool differs = std::string(run) == "cuda-fp32";
        std::string lines;
        for (int step = 1; step <= 12; ++step)  // only ten steps are compared
            lines += nlohmann::json{{"step", step},
                                    {"loss", 8.0 - step +
                                                 (differs ? step == 10  ? -early
                                                            : step > 10 ? 0.5
                                                                        : 0.0
                                                          : 0.0)}}
                         .dump() +
                     "\n";
        hour.set(concat("losses-", run),
                 lines +
                     nlohmann::json{{"step", 12}, {"val_loss", 3 - (differs ? off : 0)}}.dump() +
                     "\n");
    }
    const int64_t errors = random_int(0, 1);
    hour.set("errors", std::to_string(errors));
    const int64_t failed = random_int(0, 1);
    hour.set("tests", concat("failed: one: x.cpp:7: 1 == 2 (TEST_SEED=3)\n41 passed, ", failed,
                             " failed\n"));
    const ProgramResult run =
        hour.run({"--only", "losses", "--only", "tests", "--only", "memcheck"});
    INFO(run.output);
    INFO(hour.report());
    CHECK(run.exit_code == (errors + failed > 0 ? 1 : 0));
    CHECK(verdict_on("validation loss, GPU, fp32", run.output) == verdict(off <= 0.02));
    CHECK(verdict_on("validation loss, GPU, bf16", run.output) == "met");
    CHECK(verdict_on("losses of ten steps", run.output) == verdict(early <= 1e-3));
    char measured[32];
    std::snprintf(measured, sizeof measured, "of the CPU's: %.1e", early);
    CHECK(contains(run.output, measured));
    CHECK(verdict_on("tests of kernels and models pass", run.output) == verdict(failed == 0));
    CHECK(verdict_on("tests of whole runs pass", run.output) == "not measured");
    CHECK(verdict_on("compute-sanitizer", run.output) == verdict(errors + failed == 0));
    CHECK(contains(hour.report(), "failed: one: x.cpp:7"));
}

TEST_CASE("the first hour repeats what is unfinished and nothing else", "[scripts]") {
    if (skip_without_python()) return;
    const FirstHour hour;
    hour.tool("programs/compare", "#!/bin/sh\nsleep 100\n");
    hour.set("tests", "1 passed, 1 failed\n");
    // The kernels' limit is 6 minutes · 0.015, the others' less.
    const std::vector<std::string> parts{"--only", "selfcheck", "--only",   "tests",
                                         "--only", "kernels",   "--limits", "0.015"};
    const ProgramResult first = hour.run(parts);
    INFO(first.output);
    CHECK(first.exit_code == 1);
    CHECK(contains(hour.report(), "timed out: stopped at its limit of 0.09 minutes"));
    CHECK(contains(hour.report(), "failed: 1 tests failed"));
    CHECK(contains(hour.calls(), "selfcheck --device"));

    // Other programs begin anew, and the earlier results are kept.
    hour.tool("programs/compare", "#!/bin/sh\necho compare >> \"$ROOM/calls\"\n");
    const ProgramResult second = hour.run(parts);
    INFO(second.output);
    CHECK(hour.exists("out/earlier-1/report.md"));
    const std::string calls = hour.calls();
    CHECK(contains(calls, "selfcheck --device"));
    CHECK(contains(calls, "compare"));

    hour.set("tests", "2 passed, 0 failed\n");
    const ProgramResult third = hour.run(parts);
    INFO(third.output);
    CHECK(third.exit_code == 0);
    const std::string last = hour.calls();
    CHECK(contains(last, "test [cuda]"));
    CHECK_FALSE(contains(last, "selfcheck --device"));
    CHECK_FALSE(contains(last, "compare"));
    CHECK_FALSE(hour.exists("out/earlier-2"));
}

TEST_CASE("the first hour ends before a part that does not fit, and says what is left",
          "[scripts]") {
    if (skip_without_python()) return;
    const FirstHour hour;
    const ProgramResult run =
        hour.run({"--minutes", "3", "--only", "selfcheck", "--only", "kernels"});
    INFO(run.output);
    CHECK(run.exit_code == 75);
    CHECK(contains(run.output, "left for want of time: kernels"));
    const std::string calls = hour.calls();
    CHECK(contains(calls, "selfcheck --device"));
    CHECK_FALSE(contains(calls, "compare"));
    CHECK(contains(hour.run({"--list"}).output, "done"));
}

TEST_CASE("the first hour begins with CUDA's libraries from Python's packages alone", "[scripts]") {
    if (skip_without_python()) return;
    const FirstHour hour;
    hour.set("libraries", "/wheels/nvidia/cu13/lib");
    const ProgramResult run = hour.run({"--only", "selfcheck"});
    INFO(run.output);
    CHECK(run.exit_code == 0);
    CHECK(contains(hour.report(), "train_gpt abc123"));
}

TEST_CASE("a part that keeps what it measured uses the rest of a call's time, and continues",
          "[scripts]") {
    if (skip_without_python()) return;
    const FirstHour hour;
    // Of a limit of 24 seconds, at least 6 at a time
    const std::vector<std::string> parts{"--only", "1558M", "--limits", "0.05"};
    const auto with = [&](const std::string& minutes) {
        std::vector<std::string> all = parts;
        all.insert(all.end(), {"--minutes", minutes});
        return hour.run(all);
    };
    hour.tool("programs/train_gpt", std::string("#!/bin/bash\n[ $1 != train ] || sleep 100\n") +
                                        std::string(first_hour_program).substr(12));
    const ProgramResult cut = with("0.3");
    INFO(cut.output);
    CHECK(cut.exit_code == 75);
    CHECK(contains(hour.report(), "at the end of this call's time"));
    CHECK(contains(hour.run({"--list"}).output, "time is up"));
    const ProgramResult too_short = with("0.1");
    INFO(too_short.output);
    CHECK(too_short.exit_code == 75);
    CHECK(contains(too_short.output, "left for want of time: 1558M"));
    CHECK_FALSE(contains(too_short.output, "== "));
}

TEST_CASE("without a GPU the first hour is one sentence", "[scripts]") {
    if (skip_without_python()) return;
    const FirstHour hour;
    hour.set("version", "train_gpt abc123\nCUDA    not in this build\n");
    const ProgramResult run = hour.run({});
    CHECK(run.exit_code == 1);
    CHECK(std::regex_match(run.output, std::regex("error: there is no GPU to measure: .*\n")));
    CHECK(hour.run({"--only", "nothing"}).exit_code == 2);
}

namespace {

/// Runs the script with the programs that were built, on the simulated GPU that this process uses.
/// Returns the report; skips, with an empty one, if there is no such GPU.
std::string report_on_simulator(const std::vector<std::string>& arguments,
                                const Environment& more = {}) {
    const TemporaryDirectory folder;
    const fs::path programs = fs::path(this_program()).parent_path();
    std::string libraries;
    std::istringstream path(std::getenv("LD_LIBRARY_PATH") ? std::getenv("LD_LIBRARY_PATH") : "");
    for (std::string entry; libraries.empty() && std::getline(path, entry, ':');)
        if (fs::exists(entry + "/libcudart.so.13")) libraries = entry;
    const DeviceUnderTest last(test_devices().back());
    if (skip_without_python() || !test_device().is_cuda() || !device_is_simulated() ||
        libraries.empty() || !fs::exists(programs / "compare"))
        return "";
    std::vector<std::string> command{
        "bash", "scripts/first_hour.sh", "--programs", programs, "--folder", folder.path()};
    command.insert(command.end(), arguments.begin(), arguments.end());
    Environment environment{{"GPUSIM", libraries}, {"GPUSIM_DEVICES", "1"}, {"PYTHON", ""}};
    for (const auto& [name, value] : more) environment[name] = value;
    const ProgramResult run = run_program(command, environment);
    INFO(run.output);
    CHECK(run.exit_code == 0);
    return read(folder / "report.md");
}

}  // namespace

TEST_CASE("the first hour's most important parts run on a simulated GPU", "[scripts][cuda]") {
    const std::string report = report_on_simulator(
        {"--only", "124M", "--only", "kernels", "--only", "losses", "--only", "tests"});
    if (report.empty()) return;
    INFO(report);
    CHECK(contains(report, "The GPU is simulated"));
    CHECK(contains(report, "| gelu_forward "));
    CHECK(std::regex_search(report, std::regex("\\| 124M \\| [24] \\(recompute none, attention ")));
    CHECK(std::regex_search(report, std::regex("\\| validation loss, GPU, fp32.* \\| met \\|")));
    CHECK(std::regex_search(report, std::regex("\\| tests of kernels.* \\| met \\|")));
    CHECK(std::regex_search(report, std::regex("\\| 124M: at least 580.* \\| not measured \\|")));
}

TEST_CASE("the first hour's parts run on two simulated GPUs", "[.][long][scripts][cuda]") {
    if (skip_without_gpus(2)) return;
    const std::string report = report_on_simulator({}, {{"GPUSIM_DEVICES", "2"}});
    if (report.empty()) return;
    INFO(report);
    CHECK(contains(report, "collectives over 2 ranks"));
    CHECK(occurrences(report, "\ndone; ") >= 9);
    CHECK(occurrences(report, "\nfailed: ") + occurrences(report, "\ntimed out: ") == 0);
}
