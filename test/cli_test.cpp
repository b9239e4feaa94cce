// The program as a user drives it: its commands, what they print and where, their exit codes, and what they leave behind.
// TRAIN_GPT_BINARY (or TRAIN_GPT, as the Makefile sets it) names the program; without it, build/train_gpt.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"
#include "training/safetensors.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

using Arguments = std::vector<std::string>;
using Json = nlohmann::json;

std::string binary() {
    for (const char* name : {"TRAIN_GPT_BINARY", "TRAIN_GPT"})
        if (const char* path = std::getenv(name)) return path;
    return "build/train_gpt";
}

/// What a process starts with besides its arguments.
struct Surroundings {
    Arguments environment = {};  // "NAME=value"
    rlim_t file_bytes =
        RLIM_INFINITY;  // the largest file it may write: to it, the disk is full there
    bool bound_by_permissions = false;  // also when the tests run as root
};

struct Outcome {
    int code = 0;  // exit code, or minus the signal that ended it
    std::string out, err;
};

class Process {
  public:
    explicit Process(const Arguments& arguments, const Surroundings& surroundings = {}) {
        const std::string program = binary();
        if (!fs::exists(program)) FAIL("there is no program " << program << "; build it with make");
        std::vector<char*> argv{const_cast<char*>(program.c_str())};
        for (const std::string& argument : arguments)
            argv.push_back(const_cast<char*>(argument.c_str()));
        argv.push_back(nullptr);
        Arguments environment = surroundings.environment;
        environment.push_back("OMP_NUM_THREADS=1");
        for (char** variable = environ; *variable; ++variable) environment.push_back(*variable);
        std::vector<char*> envp;
        std::set<std::string> names;
        for (const std::string& variable : environment)
            if (names.insert(variable.substr(0, variable.find('='))).second)
                envp.push_back(const_cast<char*>(variable.c_str()));
        envp.push_back(nullptr);
        const int out = ::open(out_path().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        const int err = ::open(err_path().c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        pid_ = ::fork();
        REQUIRE(pid_ >= 0);
        if (pid_ == 0) {
            ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
            ::dup2(out, STDOUT_FILENO);
            ::dup2(err, STDERR_FILENO);
            const rlimit limit{surroundings.file_bytes, RLIM_INFINITY};
            ::setrlimit(RLIMIT_FSIZE, &limit);
            if (surroundings.bound_by_permissions)
                for (unsigned long capability :
                     {1ul, 2ul})  // CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
                    if (::geteuid() == 0 && ::prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0)
                        ::_exit(99);
            ::execve(program.c_str(), argv.data(), envp.data());
            ::_exit(127);
        }
        ::close(out);
        ::close(err);
    }
    ~Process() {
        if (!over_) {
            ::kill(pid_, SIGKILL);
            finish();
        }
    }
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;

    pid_t pid() const { return pid_; }
    std::string out() const { return read(out_path()); }
    /// Without the note that there is no GPU.
    std::string err() const {
        std::string text = read(err_path());
        if (text.starts_with("train_gpt: running on the CPU, since "))
            text.erase(0, text.find('\n') + 1);
        return text;
    }
    void signal(int number) { ::kill(pid_, number); }

    /// Waits until the condition holds; false when the process ended without it, or after two minutes.
    bool wait_until(const std::function<bool()>& condition) {
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
        while (!condition()) {
            int status = 0;
            if (!over_ && ::waitpid(pid_, &status, WNOHANG) == pid_) {
                over_ = true;
                status_ = status;
            }
            if (over_ || std::chrono::steady_clock::now() > deadline) return condition();
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        return true;
    }
    bool wait_for_step(int64_t step) {
        return wait_until([&] { return contains(out(), "step " + std::to_string(step) + "/"); });
    }

    Outcome finish() {
        if (!over_) {
            ::waitpid(pid_, &status_, 0);
            over_ = true;
        }
        return {WIFEXITED(status_) ? WEXITSTATUS(status_) : -WTERMSIG(status_), out(), err()};
    }

  private:
    std::string out_path() const { return output_ / "out"; }
    std::string err_path() const { return output_ / "err"; }

    TemporaryDirectory output_;
    pid_t pid_ = -1;
    int status_ = 0;
    bool over_ = false;
};

Outcome train_gpt_with(const Arguments& arguments, const Surroundings& surroundings = {}) {
    Process process(arguments, surroundings);
    return process.finish();
}

/// Checks a failure: the exit code, nothing but one line on stderr, and what that line names.
void check_refused(const Outcome& outcome, int code, const Arguments& parts) {
    CAPTURE(outcome.out, outcome.err);
    CHECK(outcome.code == code);
    CHECK(outcome.err.starts_with("train_gpt: "));
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
    CHECK(outcome.err.ends_with("\n"));
    for (const std::string& part : parts) {
        CAPTURE(part);
        CHECK(contains(outcome.err, part));
    }
}

Outcome check_succeeds(const Outcome& outcome) {
    INFO("stdout: " << outcome.out << "\nstderr: " << outcome.err);
    REQUIRE(outcome.code == 0);
    return outcome;
}

/// A text of a few invented words, tokenized, and a configuration that trains a tiny model on it. Made once.
class Workplace {
  public:
    static const Workplace& get() {
        static const Workplace workplace;
        return workplace;
    }

    std::string data(const std::string& name) const { return directory_ / ("data/" + name); }
    std::string text() const { return directory_ / "text.txt"; }
    std::string config() const { return directory_ / "config.json"; }

    Arguments train(const std::string& run_dir, const Arguments& more = {}) const {
        Arguments arguments{"train", config(), "--set", "run_dir=" + run_dir};
        arguments.insert(arguments.end(), more.begin(), more.end());
        return arguments;
    }

  private:
    Workplace() {
        std::vector<std::string> words;
        for (int i = 0; i < 60; ++i) {
            std::string& word = words.emplace_back();
            for (int64_t n = random_int(2, 7); n > 0; --n)
                word += static_cast<char>('a' + random_int(0, 25));
        }
        std::string text;
        while (text.size() < 40000) {
            for (int64_t n = random_int(3, 9); n > 0; --n)
                text += words[static_cast<size_t>(random_int(0, 59) * random_int(0, 59) / 59)] +
                        (n > 1 ? " " : ".\n");
        }
        write(this->text(), text);
        check_succeeds(train_gpt_with(
            {"tokenize", this->text(), "--train-vocab", "300", "--out", directory_ / "data"}));
        const Json config = {
            {"run_dir", directory_ / "unused"},
            {"model", {{"n_layer", 2}, {"n_head", 2}, {"n_embd", 32}, {"n_ctx", 48}}},
            {"tokenizer", {{"path", data("tokenizer.json")}}},
            {"data", {{"train", data("train_*.bin")}, {"val", data("val_*.bin")}}},
            {"batch", {{"tokens_per_step", 256}, {"micro_batch", 4}, {"sequence_length", 32}}},
            {"optimizer", {{"learning_rate", 0.003}}},
            {"schedule", {{"steps", 12}, {"warmup_steps", 3}}},
            {"precision", {{"dtype", "fp32"}}},
            {"checkpoint", {{"every", 0}, {"keep", 0}}},
            {"evaluation", {{"every", 5}}},
            {"sampling", {{"every", 4}, {"prompt", "a"}, {"max_tokens", 10}, {"samples", 1}}}};
        write(this->config(), config.dump(4));
    }

    TemporaryDirectory directory_;
};

std::string step_folder(int64_t step) {
    char name[32];
    std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
    return name;
}

/// The names of a folder's entries.
std::set<std::string> names_in(const fs::path& folder) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
        names.insert(entry.path().filename().string());
    return names;
}

/// The steps of a run's checkpoints; anything that only begins like one is a failure.
std::vector<int64_t> checkpoints_in(const fs::path& run_dir) {
    std::vector<int64_t> steps;
    for (const std::string& name : names_in(run_dir)) {
        if (!name.starts_with("step-")) continue;
        CAPTURE(name);
        CHECK(name.size() == 13);
        steps.push_back(std::stoll(name.substr(5)));
    }
    return steps;
}

/// metrics.jsonl without what depends on the clock. Every line must be a JSON object, and of every kind of line there is
/// one for a step, in order.
std::vector<Json> metrics_of(const fs::path& run_dir) {
    const std::string text = read(run_dir / "metrics.jsonl");
    CHECK((text.empty() || text.back() == '\n'));
    std::vector<Json> lines;
    std::map<bool, int64_t> last;
    size_t begin = 0;
    for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
        Json line = Json::parse(text.substr(begin, end - begin), nullptr, false);
        CAPTURE(text.substr(begin, end - begin));
        REQUIRE(line.is_object());
        const int64_t step = line.at("step");
        int64_t& before = last[line.contains("val_loss")];
        CHECK(step > before);
        before = step;
        for (const char* key : {"ms", "tokens_per_second", "flops_per_second", "peak_fraction",
                                "compute_ms", "communication_ms", "data_wait_ms", "optimizer_ms"}) {
            if (line.contains("loss")) CHECK(line.at(key).is_number());
            line.erase(key);
        }
        lines.push_back(line);
    }
    return lines;
}

const char* const optimizer_file = "optimizer-00000-of-00001.safetensors";

/// Two runs have the same weights, optimizer state and metrics at a step, bit for bit.
void check_same_state(const fs::path& a, const fs::path& b, int64_t step) {
    for (const std::string& name :
         {std::string("model.safetensors"), std::string(optimizer_file)}) {
        const std::string bytes = read(a / step_folder(step) / name);
        CAPTURE(a.string(), b.string(), step, name);
        REQUIRE_FALSE(bytes.empty());
        CHECK((bytes == read(b / step_folder(step) / name)));
    }
    CHECK(metrics_of(a) == metrics_of(b));
}

void check_finite_weights(const fs::path& checkpoint) {
    const SafetensorsFile file(checkpoint / "model.safetensors");
    for (const TensorInfo& info : file.tensors()) {
        std::vector<float> values(static_cast<size_t>(info.numel()));
        file.read_floats(info, values.data());
        CHECK(std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); }));
    }
}

/// A finished run of the workplace's configuration, made once; its checkpoints are of steps 4, 8 and 12.
const std::string& finished_run() {
    static const TemporaryDirectory directory;
    static const std::string run = [] {
        std::string path = directory / "run";
        check_succeeds(
            train_gpt_with(Workplace::get().train(path, {"--set", "checkpoint.every=4"})));
        return path;
    }();
    return run;
}

/// The number behind `label` in a text.
double number_after(const std::string& text, const std::string& label) {
    const size_t at = text.find(label);
    CAPTURE(text, label);
    REQUIRE(at != std::string::npos);
    return std::strtod(text.c_str() + at + label.size(), nullptr);
}

Arguments operator+(Arguments a, const Arguments& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// A run that does not end by itself.
const Arguments endless{"--set", "schedule.steps=1000000"};

// A run whose every step takes about a second.
const Arguments slow{"--set", "model.n_layer=4",
                     "--set", "model.n_embd=256",
                     "--set", "model.n_head=4",
                     "--set", "model.n_ctx=128",
                     "--set", "batch.sequence_length=128",
                     "--set", "batch.micro_batch=32",
                     "--set", "batch.tokens_per_step=4096"};

}  // namespace

// ---- The command line -------------------------------------------------------------------------------------------------

TEST_CASE("every command explains itself, and the version names build, libraries and devices",
          "[cli][cuda]") {
    const std::map<std::string, std::string> options{
        {"tokenize", "--train-vocab"}, {"train", "--stop-at"},    {"plan", "--world"},
        {"sample", "--top-p"},         {"eval", "--hellaswag"},   {"config", "--schema"},
        {"selfcheck", "--tolerance"},  {"import", "--tokenizer"}, {"export", "--max-shard-size"}};
    for (const auto& [command, option] : options) {
        const Outcome help = check_succeeds(train_gpt_with({command, "--help"}));
        CHECK(contains(help.out, option));
        CHECK(help.err.empty());
        CHECK(contains(check_succeeds(train_gpt_with({"--help"})).out, command));
    }
    CHECK(contains(check_succeeds(train_gpt_with({})).out, "Usage"));
    const std::string version = check_succeeds(train_gpt_with({"--version"})).out;
    CHECK(version.starts_with("train_gpt "));
    for (const char* name : {"CPU", "oneDNN", "CUDA", "MPI", "zlib", "libzstd"})
        CHECK(contains(version, concat("\n", name, " ")));
    CHECK(contains(check_succeeds(train_gpt_with({"train", "--help"})).out, "train_gpt train "));
}

TEST_CASE("a command line that cannot be understood ends with exit code 2 and one line", "[cli]") {
    for (const Arguments& more : {Arguments{}, {Workplace::get().config()}, {"--set", "seed=1"}}) {
        Arguments mistyped{"trian"};
        mistyped.insert(mistyped.end(), more.begin(), more.end());
        check_refused(train_gpt_with(mistyped), 2,
                      {"there is no command \"trian\"", "tokenize, train, "});
    }
    check_refused(train_gpt_with({"--verbose"}), 2, {"--verbose"});
    check_refused(train_gpt_with({"train"}), 2, {"config", "train_gpt train --help"});
    check_refused(train_gpt_with({"train", "a.json", "--stop"}), 2, {"--stop"});
    check_refused(train_gpt_with({"train", "a.json", "b.json"}), 2, {"b.json"});
    check_refused(train_gpt_with({"train", "a.json", "--stop-at", "0"}), 2, {"--stop-at", "0"});
    check_refused(train_gpt_with({"train", "a.json", "--stop-at", "soon"}), 2,
                  {"--stop-at", "soon"});
    check_refused(train_gpt_with({"train", Workplace::get().config(), "--set", "seed"}), 2,
                  {"seed", "key=value"});
    check_refused(train_gpt_with({"plan", "a.json", "--world", "-1"}), 2, {"--world"});
    check_refused(train_gpt_with({"sample"}), 2, {"checkpoint"});
    check_refused(train_gpt_with({"sample", "x", "--device", "tpu"}), 2, {"--device", "tpu"});
    for (const char* number : {"nan", "inf", "warm", "-1", "1e9", ""})
        check_refused(train_gpt_with({"sample", "x", "--temperature", number}), 2,
                      {"--temperature"});
    for (const char* number : {"nan", "0", "1.1", "all"})
        check_refused(train_gpt_with({"sample", "x", "--top-p", number}), 2, {"--top-p"});
    for (const char* number : {"-1", "1.5", "x", "18446744073709551616000"})
        check_refused(train_gpt_with({"sample", "x", "--seed", number}), 2, {"--seed"});
    check_refused(train_gpt_with({"tokenize", "a.txt"}), 2, {"--out"});
    check_refused(train_gpt_with({"tokenize", "a.txt", "--out", "x"}), 2,
                  {"--train-vocab", "--tokenizer"});
    check_refused(train_gpt_with({"tokenize", "a.txt", "--out", "x", "--train-vocab", "-300"}), 2,
                  {"--train-vocab"});
    check_refused(train_gpt_with({"tokenize", "a.txt", "--out", "x", "--train-vocab", "300",
                                  "--val-split", "middle"}),
                  2, {"--val-split", "middle"});
    check_refused(train_gpt_with({"tokenize", "-", "--out", "x", "--train-vocab", "300"}), 2,
                  {"--train-vocab", "standard input"});
    check_refused(train_gpt_with({"tokenize", "a.txt", "--out", "x", "--train-vocab", "300",
                                  "--threads", "-1"}),
                  2, {"--threads"});
    for (const auto& [option, value] : {std::pair{"--train-vocab", "256"},
                                        {"--train-vocab", "4194305"},
                                        {"--val-fraction", "0.7"},
                                        {"--val-fraction", "nan"},
                                        {"--shard-tokens", "1"}}) {
        Arguments tokenize{"tokenize", "a.txt", "--out", "x", option, value};
        if (std::string(option) != "--train-vocab")
            tokenize.insert(tokenize.end(), {"--train-vocab", "300"});
        check_refused(train_gpt_with(tokenize), 2, {option, value});
    }
    for (const char* command : {"import", "export"})
        check_refused(train_gpt_with({command, "test/fixtures/gpt2-tiny", "--out", ""}), 2,
                      {"--out"});
    check_refused(train_gpt_with({"eval", "test/fixtures/gpt2-tiny"}), 2, {"--data"});
    check_refused(train_gpt_with({"selfcheck", "--device", "tpu"}), 2, {"--device", "tpu"});
    for (const char* percent : {"nan", "-1", "some"})
        check_refused(train_gpt_with({"selfcheck", "--tolerance", percent}), 2, {"--tolerance"});
    check_refused(train_gpt_with({"selfcheck", "--max-bytes", "65535"}), 2,
                  {"--max-bytes", "65536"});
}

TEST_CASE("configurations are refused with the key, the value and the nearest valid key", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const auto refused = [&](const Arguments& overrides, const Arguments& parts) {
        Arguments arguments = w.train(directory / "run");
        for (const std::string& text : overrides) arguments = arguments + Arguments{"--set", text};
        check_refused(train_gpt_with(arguments), 1, parts);
        CHECK_FALSE(fs::exists(directory / "run"));
    };
    refused({"model.n_layers=2"}, {"model.n_layers", "\"model.n_layer\""});
    refused({"model.n_layer=two"}, {"model.n_layer = two", "whole number"});
    refused({"optimizer.learning_rate=NaN"}, {"optimizer.learning_rate", "NaN"});
    refused({"optimizer.learning_rate=-1"}, {"optimizer.learning_rate", "greater than 0"});
    refused({"model.n_embd=33"}, {"model.n_embd = 33", "model.n_head = 2"});
    refused({"batch.micro_batch=0"}, {"batch.micro_batch = 0"});
    refused({"batch.tokens_per_step=255"}, {"batch.tokens_per_step = 255"});
    refused({"run_dir="}, {"run_dir"});
    refused({"data.train="}, {"data.train"});
    refused({"model.vocab_size=280"}, {"model.vocab_size", "280"});
    refused({"tokenizer.path="}, {"tokenizer.path"});
    refused({"evaluation.hellaswag=x.jsonl", "data.val="}, {"evaluation.hellaswag", "data.val"});
    refused({"schedule.epochs=2"}, {"schedule.steps", "schedule.epochs"});
    if (!contains(check_succeeds(train_gpt_with({"--version"})).out, "GPU 0"))
        refused({"device=cuda"}, {"device \"cuda\" cannot be used"});
}

TEST_CASE("the printed configuration reads back equal", "[cli]") {
    const TemporaryDirectory directory;
    const Arguments overrides{
        "--set", "seed=18446744073709551615",      "--set",         "optimizer.learning_rate=0.1",
        "--set", "sampling.prompt=\"quoted\" = é", "--print-config"};
    const std::string printed =
        check_succeeds(train_gpt_with(Workplace::get().train(directory / "run", overrides))).out;
    write(directory / "printed.json", printed);
    CHECK(check_succeeds(train_gpt_with({"train", directory / "printed.json", "--print-config"}))
              .out == printed);
    CHECK(Json::parse(printed)["seed"].get<uint64_t>() == 18446744073709551615u);
    CHECK_FALSE(fs::exists(directory / "run"));
}

// ---- Bad input --------------------------------------------------------------------------------------------------------

TEST_CASE("missing, unreadable and misplaced files are named in one line", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run", empty = directory / "empty",
                      none = directory / "none";
    write(empty, "");
    check_refused(train_gpt_with({"train", none}), 1, {none, "No such file"});
    check_refused(train_gpt_with({"train", directory.path()}), 1, {directory.path(), "directory"});
    check_refused(train_gpt_with({"train", empty}), 1, {empty, "empty"});
    check_refused(train_gpt_with(w.train(run, {"--set", "data.train=" + none})), 1, {none});
    check_refused(train_gpt_with(w.train(run, {"--set", "data.train=" + directory.path()})), 1,
                  {directory.path()});
    check_refused(train_gpt_with(w.train(run, {"--set", "data.val=" + empty})), 1,
                  {empty, "shard"});
    check_refused(train_gpt_with(w.train(run, {"--set", "data.train=" + w.text()})), 1,
                  {w.text(), "shard"});
    check_refused(train_gpt_with(w.train(run, {"--set", "tokenizer.path=" + none})), 1, {none});
    check_refused(train_gpt_with(w.train(run, {"--set", "tokenizer.path=" + w.text()})), 1,
                  {w.text()});
    check_refused(train_gpt_with(w.train(run, {"--set", "evaluation.hellaswag=" + none})), 1,
                  {none});
    check_refused(train_gpt_with(w.train(run, {"--set", "model.init_from=" + none})), 1, {none});
    check_refused(train_gpt_with(w.train(empty)), 1, {empty});
    check_refused(train_gpt_with({"sample", none}), 1, {none});
    check_refused(train_gpt_with({"sample", directory.path()}), 1,
                  {directory.path(), "checkpoint"});
    check_refused(train_gpt_with({"sample", w.text()}), 1, {w.text(), "is a file"});
    check_refused(train_gpt_with({"eval", finished_run(), "--data", none}), 1, {none});
    check_refused(train_gpt_with({"eval", finished_run(), "--hellaswag", empty}), 1, {empty});
    check_refused(train_gpt_with({"tokenize", none, "--train-vocab", "300", "--out", run}), 1,
                  {none});
    check_refused(
        train_gpt_with({"tokenize", directory.path(), "--train-vocab", "300", "--out", run}), 1,
        {directory.path(), "holds no text"});
    check_refused(train_gpt_with({"tokenize", w.text(), "--train-vocab", "300", "--out", w.text()}),
                  1, {w.text()});

    const std::string tokenizer = read(w.data("tokenizer.json"));
    write(directory / "tokenizer.json", tokenizer.substr(0, tokenizer.size() / 2));
    check_refused(
        train_gpt_with(w.train(run, {"--set", "tokenizer.path=" + (directory / "tokenizer.json")})),
        1, {directory / "tokenizer.json"});

    fs::create_directory(directory / "shut");
    fs::permissions(directory / "shut", fs::perms::none);
    for (const char* name : {"shut/*.bin", "shut/a.bin"}) {
        const Outcome shut =
            train_gpt_with(w.train(run, {"--set", "data.train=" + (directory / name)}),
                           {.bound_by_permissions = true});
        if (shut.code != 99) check_refused(shut, 1, {name, "permissions"});
    }
    fs::permissions(directory / "shut", fs::perms::owner_all);
    check_refused(
        train_gpt_with(w.train(run, {"--set", "data.train=" + (directory / "[x]/*.bin")})), 1,
        {"[x]/*.bin", "write [[]"});
    fs::create_directory(directory / "gone");
    fs::copy_file(w.data("val_000000.bin"), directory / "gone/val.bin");
    check_succeeds(train_gpt_with(
        w.train(run, {"--stop-at", "1", "--set", "data.val=" + (directory / "gone/*.bin")})));
    fs::remove_all(directory / "gone");
    check_refused(train_gpt_with({"eval", run}), 1, {"gone/*.bin", "--data GLOB"});
    const std::string locked = directory / "locked.json";
    fs::copy_file(w.config(), locked);
    fs::permissions(locked, fs::perms::none);
    const Outcome unreadable = train_gpt_with({"plan", locked}, {.bound_by_permissions = true});
    if (unreadable.code != 99) check_refused(unreadable, 1, {locked, "Permission denied"});
    fs::create_directory(directory / "read-only");
    fs::permissions(directory / "read-only", fs::perms::owner_read | fs::perms::owner_exec);
    const Outcome unwritable =
        train_gpt_with(w.train(directory / "read-only/run"), {.bound_by_permissions = true});
    if (unwritable.code != 99)
        check_refused(unwritable, 1, {directory / "read-only/run", "Permission denied"});
    fs::permissions(directory / "read-only", fs::perms::owner_read);
    const Outcome unsearchable =
        train_gpt_with(w.train(directory / "read-only"), {.bound_by_permissions = true});
    if (unsearchable.code != 99)
        check_refused(unsearchable, 1, {directory / "read-only", "Permission denied"});
    fs::permissions(directory / "read-only", fs::perms::owner_all);
}

TEST_CASE(
    "a token id beyond the vocabulary stops the run, names file and byte, and keeps what was "
    "learnt",
    "[cli]") {
    const TemporaryDirectory directory;
    std::string shard = read(Workplace::get().data("train_000000.bin"));
    // Within the first epoch every window of 32 tokens comes once: one of these four stops a run of one epoch.
    const size_t tokens = (shard.size() - 1024) / 2 / 32 * 32;
    std::set<std::string> bytes;
    for (size_t quarter = 1; quarter <= 4; ++quarter) {
        const size_t at = 1024 + 2 * (tokens * quarter / 4 - 16);
        shard[at] = shard[at + 1] = '\x77';
        bytes.insert("byte " + std::to_string(at));
    }
    write(directory / "train.bin", shard);
    const Outcome outcome = train_gpt_with(Workplace::get().train(
        directory / "run",
        {"--set", "data.train=" + (directory / "train.bin"), "--set", "schedule.steps=500"}));
    check_refused(outcome, 1, {directory / "train.bin", "30583"});
    CHECK(std::any_of(bytes.begin(), bytes.end(),
                      [&](const auto& byte) { return contains(outcome.err, byte); }));
    int64_t done = 0;
    while (contains(outcome.out, "step " + std::to_string(done + 1) + "/")) ++done;
    CHECK(checkpoints_in(directory / "run") ==
          (done > 0 ? std::vector<int64_t>{done} : std::vector<int64_t>{}));
}

TEST_CASE(
    "a model that cannot fit is refused with the plan of its memory, and nothing is left behind",
    "[cli][cuda]") {
    const TemporaryDirectory directory;
    for (const char* embd : {"12288", "262144"}) {
        const Outcome outcome = train_gpt_with(Workplace::get().train(
            directory / "run", {"--set", "model.n_layer=500", "--set", "model.n_head=2048", "--set",
                                std::string("model.n_embd=") + embd}));
        CAPTURE(outcome.err);
        CHECK(outcome.code == 1);
        for (const char* part :
             {"memory", "parameters", "gradients", "moments", "activations", "total"})
            CHECK(contains(outcome.err, part));
        CHECK_FALSE(fs::exists(directory / "run"));
    }
}

TEST_CASE("a launcher with several ranks is refused", "[cli]") {
    const TemporaryDirectory directory;
    for (const char* variable :
         {"OMPI_COMM_WORLD_SIZE=2", "PMI_SIZE=8", "SLURM_STEP_NUM_TASKS=3"}) {
        const std::string name = std::string(variable).substr(0, std::string(variable).find('='));
        const Surroundings launched{// MPI's library leaves memory behind
                                    .environment = {variable, "ASAN_OPTIONS=detect_leaks=0"}};
        check_refused(train_gpt_with(Workplace::get().train(directory / "run"), launched), 1,
                      {name, "rank"});
    }
    CHECK_FALSE(fs::exists(directory / "run"));
}

// ---- Plan -------------------------------------------------------------------------------------------------------------

TEST_CASE("the plan is what the run takes", "[cli][cuda]") {
    const TemporaryDirectory directory;
    for (const char* level : {"none", "elementwise", "block"}) {
        const Arguments overrides{"--set", std::string("precision.recompute=") + level,
                                  "--set", "schedule.steps=1",
                                  "--set", "schedule.warmup_steps=0"};
        const std::string plan =
            check_succeeds(train_gpt_with(Arguments{"plan", Workplace::get().config()} + overrides))
                .out;
        const std::string run =
            check_succeeds(train_gpt_with(Workplace::get().train(directory / level, overrides)))
                .out;
        const std::string label = std::string("precision.recompute = ") + level + ": ";
        const size_t at = plan.find(label);
        CAPTURE(plan, run);
        REQUIRE(at != std::string::npos);
        const std::string total =
            plan.substr(at + label.size(), plan.find(" of ", at) - at - label.size());
        CHECK(contains(total, "MiB"));
        CHECK(contains(run, ", " + total + ", into "));
    }
    const std::string two =
        check_succeeds(train_gpt_with({"plan", Workplace::get().config(), "--world", "2"})).out;
    CHECK(contains(two, "2 ranks"));
    CHECK(contains(two, "1 to 1 each"));
    CHECK(contains(two, "ZeRO-1: "));
    check_refused(train_gpt_with({"plan", Workplace::get().config(), "--world", "3"}), 1,
                  {"3", "batch.tokens_per_step"});
}

// ---- Training and resuming --------------------------------------------------------------------------------------------

TEST_CASE(
    "a run ends with a checkpoint, an evaluation and samples, and its folder says what it was",
    "[cli][cuda]") {
    const fs::path run = finished_run();
    CHECK(checkpoints_in(run) == std::vector<int64_t>{4, 8, 12});
    const auto metrics = metrics_of(run);
    REQUIRE(metrics.size() == 12 + 3);  // evaluated behind steps 5, 10 and 12
    CHECK(metrics.back()["step"].get<int>() == 12);
    CHECK(metrics.back()["val_loss"].get<double>() < metrics[0]["loss"].get<double>());
    CHECK(Json::parse(read(run / "config.json"))["run_dir"].get<std::string>() == run.string());
    const Json manifest = Json::parse(read(run / "manifest.json"));
    const Json data = Json::parse(read(Workplace::get().data("data.json")));
    CHECK(manifest["train"][0]["xxh3"].dump() == data["files"][0]["hash"].dump());
    for (const char* key : {"program", "host", "seed"}) CHECK(manifest.contains(key));

    // The same command again finds nothing left to do.
    const auto before = read(run / "metrics.jsonl");
    const Outcome again = check_succeeds(
        train_gpt_with(Workplace::get().train(run, {"--set", "checkpoint.every=4"})));
    CHECK_FALSE(contains(again.out, "step 12/12"));
    CHECK(contains(again.out, "resuming from"));
    CHECK(number_after(again.out, "step 12: validation loss ") ==
          Approx(metrics.back()["val_loss"].get<double>()).epsilon(1e-5));
    CHECK(read(run / "metrics.jsonl") == before);
}

namespace {

/// All weights of a run's checkpoint, by name: dimensions and values.
std::map<std::string, std::pair<size_t, std::vector<float>>> weights_of(const fs::path& run,
                                                                        int64_t step) {
    const SafetensorsFile file(run / step_folder(step) / "model.safetensors");
    std::map<std::string, std::pair<size_t, std::vector<float>>> weights;
    for (const TensorInfo& info : file.tensors()) {
        auto& [dimensions, values] = weights[info.name];
        dimensions = info.shape.size();
        values.resize(static_cast<size_t>(info.numel()));
        file.read_floats(info, values.data());
    }
    return weights;
}

}  // namespace

TEST_CASE("the updates of a run are AdamW's, with the configuration's numbers at every step",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const auto start = weights_of(finished_run(), 12);
    const auto run = [&](const std::string& name, const Arguments& more) {
        const Arguments from_start{"--set", "model.init_from=" + finished_run(),
                                   "--set", "checkpoint.every=1",
                                   "--set", "evaluation.every=0"};
        check_succeeds(train_gpt_with(w.train(directory / name, from_start + more)));
        return fs::path(directory / name);
    };

    // Warm-up to the peak behind 4 steps, then down to nothing at the last
    const double peak = 0.02, decay = 2.5;
    const fs::path whole = run(
        "whole", {"--set", "schedule.decay=linear", "--set", "schedule.warmup_steps=4", "--set",
                  "schedule.final_fraction=0", "--set", concat("optimizer.learning_rate=", peak),
                  "--set", concat("optimizer.weight_decay=", decay), "--set", "optimizer.beta1=0",
                  "--set", "optimizer.beta2=0.999", "--set", "optimizer.epsilon=1e-30"});
    std::vector<double> rates;
    for (const Json& line : metrics_of(whole))
        if (line.contains("loss")) rates.push_back(line.at("learning_rate").get<double>());
    REQUIRE(rates.size() == 12);
    for (int step = 1; step <= 12; ++step)
        CHECK(rates[static_cast<size_t>(step - 1)] ==
              Approx(peak * (step <= 4 ? step / 4.0 : (12 - step) / 8.0)).margin(1e-9));

    // How far each weight went beyond its decay (of matrices alone), in learning rates. Without a mean of gradients g that
    // is 1 at first, and g2 / sqrt((g1^2 + g2^2) / 2) in the second step.
    const auto moves = [&](const auto& before, int64_t step) {
        std::vector<double> all;
        const double rate = rates[static_cast<size_t>(step - 1)];
        for (const auto& [name, now] : weights_of(whole, step)) {
            const auto& [dimensions, values] = before.at(name);
            for (size_t i = 0; i < values.size(); ++i) {
                const double kept = values[i] * (dimensions > 1 ? 1 - rate * decay : 1);
                all.push_back(std::abs(now.second[i] - kept) / rate);
            }
        }
        return all;
    };
    const auto first = moves(start, 1), second = moves(weights_of(whole, 1), 2);
    size_t moved = 0;
    for (const double move : first) {
        if (move > 0.5) ++moved;
        if (move > 1e-3 && std::abs(move - 1) > 1e-3) FAIL_CHECK("moved by " << move << " rates");
    }
    CHECK(moved > first.size() / 2);  // others have no gradient
    const double farthest = *std::max_element(second.begin(), second.end());
    CHECK(farthest < 1.42);
    CHECK(farthest > 1.2);

    // With a large epsilon the update is the clipped gradient's multiple.
    const fs::path clipped = run(
        "clipped", {"--set", "schedule.warmup_steps=0", "--set", "schedule.decay=constant", "--set",
                    "optimizer.learning_rate=1", "--set", "optimizer.weight_decay=0", "--set",
                    "optimizer.epsilon=1", "--set", "optimizer.grad_clip=0.001", "--stop-at", "1"});
    CHECK(metrics_of(clipped).front().at("grad_norm").get<double>() > 0.01);
    double square = 0;
    for (const auto& [name, now] : weights_of(clipped, 1))
        for (size_t i = 0; i < now.second.size(); ++i)
            square += std::pow(now.second[i] - start.at(name).second[i], 2);
    CHECK(std::sqrt(square) == Approx(0.001).epsilon(0.01));
}

TEST_CASE("a run shows each step and its samples as it goes", "[cli]") {
    const TemporaryDirectory directory;
    const Arguments options{"--set", "schedule.steps=5",    "--set", "sampling.every=2",
                            "--set", "sampling.samples=3",  "--set", "sampling.top_k=1",
                            "--set", "sampling.prompt=abc", "--set", "evaluation.every=0"};
    const auto show = [&](const std::string& progress) {
        return check_succeeds(train_gpt_with(Workplace::get().train(
                                  directory / progress,
                                  options + Arguments{"--set", "log.progress=" + progress})))
            .out;
    };
    const auto count = [](const std::string& text, const std::string& pattern) {
        const std::regex regex(pattern);
        return std::distance(std::sregex_iterator(text.begin(), text.end(), regex), {});
    };
    const std::string step =
        R"(step [1-5]/5 \| loss \d\.\d{4} \| norm \d+\.\d{3} \| lr \d\.\d\de-\d\d \| [\d.]+ ms \| \d+ tok/s)"
        R"( \| [\d.]+ TFLOP/s \(\d+% of peak\) \| [\d.]+ \w+ \| ETA \d+:\d\d)";
    const std::string lines = show("lines"), line = show("line");
    CHECK(count(lines, step + "\n") == 5);
    CHECK_FALSE(contains(lines, "\r"));
    CHECK(count(line, step) == 5);
    CHECK(count(line, "\r[^\n]*" + step) > 0);
    // One behind steps 2 and 4, three at the end; the likeliest token each time leaves no choice.
    CHECK(count(lines, "--- sample\nabc") == 5);
    std::string last = lines.substr(lines.rfind("--- sample"));
    last = last.substr(0, last.rfind("step 5 of 5"));
    CHECK(contains(lines, last + last + last));
}

TEST_CASE("a run is as long as its steps, tokens or passes over the data say", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const auto steps = [&](const std::string& name, const std::string& length) {
        check_succeeds(train_gpt_with(
            w.train(directory / name, {"--set", "schedule.steps=0", "--set", length})));
        return checkpoints_in(directory / name).back();
    };
    CHECK(steps("tokens", "schedule.tokens=1025") == 5);  // of 256
    const Json data = Json::parse(read(w.data("data.json")));
    int64_t windows = 0;
    for (const Json& file : data["files"])
        if (file["split"] == "train") windows += (file["tokens"].get<int64_t>() - 1) / 32;
    CHECK(steps("passes", "schedule.epochs=2") == (2 * windows + 7) / 8);
}

TEST_CASE("k steps, a stop and the rest equal all steps at once, bit for bit", "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    for (const char* dtype : {"fp32", "bf16"}) {
        const TemporaryDirectory directory;
        const Surroundings two_threads{
            .environment = {"OMP_NUM_THREADS=2", "OMP_WAIT_POLICY=passive"}};
        const Arguments options{"--set", std::string("precision.dtype=") + dtype, "--set",
                                "precision.recompute=elementwise"};
        check_succeeds(train_gpt_with(w.train(directory / "whole", options), two_threads));
        const std::string stop = std::to_string(random_int(1, 11));
        CAPTURE(dtype, stop);
        const auto stopped = check_succeeds(train_gpt_with(
            w.train(directory / "parts", options + Arguments{"--stop-at", stop}), two_threads));
        CHECK(contains(stopped.out, "without --stop-at"));
        CHECK(checkpoints_in(directory / "parts") == std::vector<int64_t>{std::stoll(stop)});
        // A stop that is already behind is a stop.
        check_succeeds(train_gpt_with(
            w.train(directory / "parts", options + Arguments{"--stop-at", stop}), two_threads));
        CHECK(checkpoints_in(directory / "parts").size() == 1);
        check_succeeds(train_gpt_with(w.train(directory / "parts", options), two_threads));
        check_same_state(directory / "whole", directory / "parts", 12);
    }
}

TEST_CASE("a run on masked documents of two sources reports each, and goes on as it was",
          "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    // Every third line ends a document; the second source has capitals only.
    std::string small, capital;
    int lines = 0;
    for (const char c : read(w.text())) {
        small += c;
        capital += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
        if (c != '\n' || ++lines % 3 != 0) continue;
        small += "<|endoftext|>\n";
        capital += "<|endoftext|>\n";
    }
    const auto tokenize = [&](const std::string& name, const std::string& text) {
        write(directory / name, text);
        check_succeeds(
            train_gpt_with({"tokenize", directory / name, "--tokenizer", w.data("tokenizer.json"),
                            "--out", directory / (name + "-data")}));
        return directory / (name + "-data/train_*.bin");
    };
    const Json sources = {{{"glob", tokenize("small", small)}, {"weight", 3}, {"name", "small"}},
                          {{"glob", tokenize("capital", capital)}, {"name", "capital"}}};
    const Arguments options{"--set", "data.train=" + sources.dump(),
                            "--set", "data.document_mask=true",
                            "--set", "data.val=" + (directory / "small-data/val_*.bin")};
    const auto whole = check_succeeds(train_gpt_with(w.train(directory / "whole", options)));
    CHECK(contains(whole.out, "epochs of capital"));
    double tokens_before[2] = {};
    int steps = 0;
    for (const Json& line : metrics_of(directory / "whole")) {
        if (!line.contains("loss")) continue;
        ++steps;
        double loss = 0, tokens = 0;
        int i = 0;
        for (const std::string name : {"small", "capital"}) {
            const double seen = line.at("tokens/" + name).get<double>() - tokens_before[i];
            tokens_before[i++] += seen;
            tokens += seen;
            if (seen > 0) loss += seen * line.at("loss/" + name).get<double>();
        }
        CHECK(tokens == 256);
        CHECK(loss / tokens == Approx(line.at("loss").get<double>()).epsilon(1e-5));
    }
    CHECK(steps == 12);
    CHECK(tokens_before[0] / (12 * 256) == Approx(0.75).margin(0.15));

    check_succeeds(
        train_gpt_with(w.train(directory / "parts", options + Arguments{"--stop-at", "5"})));
    check_succeeds(train_gpt_with(w.train(directory / "parts", options)));
    check_same_state(directory / "whole", directory / "parts", 12);

    // A masked model is evaluated as masked.
    const auto eval = check_succeeds(train_gpt_with({"eval", directory / "whole"}));
    CHECK(number_after(eval.out, "validation loss ") ==
          Approx(number_after(whole.out, "step 12: validation loss ")).epsilon(1e-5));
    check_succeeds(train_gpt_with(
        w.train(directory / "plain", options + Arguments{"--set", "data.document_mask=false"})));
    const auto losses = [&](const std::string& run) {
        std::vector<double> all;
        for (const Json& line : metrics_of(directory / run))
            if (line.contains("loss")) all.push_back(line["loss"].get<double>());
        return all;
    };
    CHECK(losses("plain") != losses("whole"));

    check_refused(train_gpt_with(w.train(directory / "none",
                                         options + Arguments{"--set", "tokenizer.path=", "--set",
                                                             "model.vocab_size=300"})),
                  1, {"data.document_mask", "tokenizer.path"});
}

TEST_CASE(
    "SIGINT, SIGTERM, SIGUSR1 and SIGHUP end behind a checkpoint from which the same command goes "
    "on",
    "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    std::signal(SIGHUP, SIG_DFL);  // where the tests themselves ignore it, the program would
    for (const auto& [number, name] : {std::pair{SIGINT, "SIGINT"},
                                       {SIGTERM, "SIGTERM"},
                                       {SIGUSR1, "SIGUSR1"},
                                       {SIGHUP, "SIGHUP"}}) {
        const TemporaryDirectory directory;
        const std::string run = directory / "run";
        int64_t done = 0;
        {
            Process process(w.train(run, endless));
            REQUIRE(process.wait_for_step(3));
            process.signal(number);
            const Outcome outcome = check_succeeds(process.finish());
            CAPTURE(outcome.out);
            CHECK(contains(outcome.out, std::string(name) + ": step "));
            CHECK(contains(outcome.out, "the same command goes on"));
            REQUIRE(checkpoints_in(run).size() == 1);
            done = checkpoints_in(run)[0];
            CHECK(done >= 3);
        }
        const std::string stop = std::to_string(done + 4);
        check_succeeds(train_gpt_with(w.train(run, endless + Arguments{"--stop-at", stop})));
        check_succeeds(
            train_gpt_with(w.train(directory / "whole", endless + Arguments{"--stop-at", stop})));
        check_same_state(directory / "whole", run, done + 4);
    }
}

TEST_CASE("a signal during an evaluation ends it behind a checkpoint", "[cli][cuda]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const Arguments options{"--set", "data.val=synthetic", "--set", "evaluation.every=2"};
    {
        Process process(w.train(run, options));
        REQUIRE(process.wait_for_step(2));  // behind which it is evaluated, for long
        process.signal(SIGTERM);
        const Outcome outcome = check_succeeds(process.finish());
        CHECK(contains(outcome.out, "SIGTERM: step 2 of 12 is saved"));
    }
    CHECK(checkpoints_in(run) == std::vector<int64_t>{2});
    for (const Json& line : metrics_of(run)) CHECK_FALSE(line.contains("val_loss"));
    // It comes when the run goes on, once.
    const Arguments shorter =
        options + Arguments{"--set", "evaluation.max_tokens=200", "--stop-at", "3"};
    for (int i = 0; i < 2; ++i) check_succeeds(train_gpt_with(w.train(run, shorter)));
    check_succeeds(train_gpt_with(w.train(directory / "whole", shorter)));
    CHECK(metrics_of(run) == metrics_of(directory / "whole"));
    CHECK(metrics_of(run).size() == 4);
    // So it is with the last one, for which the run goes on.
    {
        Process process(w.train(run, options + Arguments{"--set", "evaluation.every=0"}));
        REQUIRE(process.wait_for_step(12));
        process.signal(SIGTERM);
        CHECK(contains(check_succeeds(process.finish()).out, "goes on with its evaluation"));
    }
    check_succeeds(train_gpt_with(w.train(run)));
    CHECK(metrics_of(run).back().contains("val_loss"));
}

TEST_CASE("a run goes on when whoever reads its output goes away", "[cli]") {
    const TemporaryDirectory directory;
    std::string command = binary();
    for (const std::string& argument : Workplace::get().train(directory / "run"))
        command += " '" + argument + "'";
    run_program({"sh", "-c", command + " | head -n 1"});
    CHECK(checkpoints_in(directory / "run") == std::vector<int64_t>{12});
}

TEST_CASE("one run at a time writes into a folder, and a second signal ends it at once", "[cli]") {
    const TemporaryDirectory directory;
    const Arguments arguments = Workplace::get().train(directory / "run", slow);
    Process process(arguments);
    REQUIRE(process.wait_until([&] { return contains(process.out(), "training "); }));
    check_refused(train_gpt_with(arguments), 1, {"another run", directory / "run"});
    process.signal(SIGINT);
    REQUIRE(process.wait_until([&] { return contains(process.err(), "second signal"); }));
    process.signal(SIGTERM);
    CHECK(process.finish().code == 128 + SIGTERM);
    // Nothing was saved, and the lock went with the process.
    CHECK(checkpoints_in(directory / "run").empty());
    check_succeeds(train_gpt_with(Workplace::get().train(directory / "run", {"--stop-at", "1"})));
}

TEST_CASE("a killed run goes on from its newest checkpoint as if nothing had been", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const Arguments options =
        endless + Arguments{"--set", "checkpoint.every=7", "--set", "checkpoint.keep=2"};
    Process process(w.train(run, options));
    REQUIRE(process.wait_for_step(random_int(15, 40)));
    process.signal(SIGKILL);
    CHECK(process.finish().code == -SIGKILL);
    {
        // What a kill in mid-write leaves.
        std::ofstream(run + "/metrics.jsonl", std::ios::app) << R"({"step": 9999999, "lo)";
        fs::create_directory(run + "/step-99999999.tmp");
    }
    int64_t newest = 0;
    for (const std::string& name : names_in(run))
        if (name.starts_with("step-") && !name.ends_with(".tmp"))
            newest = std::max<int64_t>(newest, std::stoll(name.substr(5)));
    REQUIRE(newest >= 14);
    const Arguments stop{"--stop-at", std::to_string(newest + 9)};
    const Outcome outcome = check_succeeds(train_gpt_with(w.train(run, options + stop)));
    CHECK(contains(outcome.out, "resuming from " + run + "/" + step_folder(newest)));
    CHECK(checkpoints_in(run) == std::vector<int64_t>{newest + 7, newest + 9});
    check_succeeds(train_gpt_with(w.train(directory / "whole", options + stop)));
    check_same_state(directory / "whole", run, newest + 9);
}

TEST_CASE("tokenize ends tidily at SIGINT and SIGTERM, and the same command goes on", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    std::string lines;
    for (int i = 0; i < 600; ++i)
        lines += Json{{"body", read(w.text()).substr(static_cast<size_t>(i))}}.dump() + "\n";
    write(directory / "a.jsonl", lines + "no JSON\n");
    const Arguments options{"--field",        "body", "--tokenizer", w.data("tokenizer.json"),
                            "--val-fraction", "0.2",  "--skip-bad",  "--out"};
    const auto tokenize = [&](const std::string& out) {
        return Arguments{"tokenize", directory / "a.jsonl"} + options + Arguments{out};
    };
    const Outcome whole = check_succeeds(train_gpt_with(tokenize(directory / "whole")));
    CHECK(contains(whole.out, "1 line that is no valid JSON, first line 601 of"));
    for (const auto& [number, code] : {std::pair{SIGINT, 130}, {SIGTERM, 143}}) {
        const std::string out = directory / std::to_string(number);
        Process process(tokenize(out));
        REQUIRE(process.wait_until([&] { return contains(process.out(), "tokenizer: "); }));
        process.signal(number);
        const Outcome stopped = process.finish();
        INFO(stopped.out << stopped.err);
        CHECK(stopped.code == code);
        CHECK(contains(stopped.out, "the same command goes on from there"));
        CHECK_FALSE(fs::exists(out + "/data.json"));
        CHECK(contains(check_succeeds(train_gpt_with(tokenize(out))).out, "going on behind"));
        for (const char* name : {"/train_000000.bin", "/val_000000.bin", "/data.json"})
            CHECK((read(out + name) == read(directory / "whole" + name)));
    }
}

TEST_CASE("a run ends behind a checkpoint when its time is over", "[cli]") {
    const TemporaryDirectory directory;
    const Outcome outcome = check_succeeds(train_gpt_with(Workplace::get().train(
        directory / "run", endless + Arguments{"--set", "schedule.max_minutes=0.001"})));
    CHECK(contains(outcome.out, "schedule.max_minutes"));
    CHECK(contains(outcome.out, "the same command goes on"));
    CHECK(checkpoints_in(directory / "run").size() == 1);
}

TEST_CASE(
    "a run with init_from starts at step 1 with the weights of a checkpoint and a fresh optimizer",
    "[cli]") {
    const TemporaryDirectory directory;
    const Arguments options{"--set",     "model.init_from=" + finished_run(),
                            "--set",     "optimizer.learning_rate=1e-30",
                            "--stop-at", "1"};
    const Outcome outcome =
        check_succeeds(train_gpt_with(Workplace::get().train(directory / "run", options)));
    CHECK(contains(outcome.out,
                   "starting from the weights of " + finished_run() + "/" + step_folder(12)));
    CHECK(contains(outcome.out, "step 1/12"));
    CHECK((read(directory / "run" + "/" + step_folder(1) + "/model.safetensors") ==
           read(finished_run() + "/" + step_folder(12) + "/model.safetensors")));
    check_refused(train_gpt_with(Workplace::get().train(
                      directory / "other", options + Arguments{"--set", "model.n_layer=3"})),
                  1, {"n_layer = 2", "3"});
}

TEST_CASE("another vocabulary than the data's or the checkpoint's is refused", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    // As many tokens, but others.
    const size_t vocabulary = Json::parse(read(w.data("data.json")))["vocab_size"].get<size_t>();
    std::string text = read(w.text());
    std::ranges::reverse(text);
    write(directory / "text", text);
    check_succeeds(train_gpt_with({"tokenize", directory / "text", "--train-vocab",
                                   std::to_string(vocabulary), "--out", directory / "data"}));
    const Arguments theirs{"--set", "tokenizer.path=" + (directory / "data/tokenizer.json")};
    const Arguments all_theirs =
        theirs + Arguments{"--set", "data.train=" + (directory / "data/train_*.bin"), "--set",
                           "data.val=" + (directory / "data/val_*.bin")};
    check_refused(train_gpt_with(w.train(directory / "run", theirs)), 1,
                  {"made with another tokenizer", w.data("tokenizer.json")});
    check_refused(train_gpt_with({"eval", finished_run(), "--data", directory / "data/val_*.bin"}),
                  1, {"made with another tokenizer"});

    fs::copy(finished_run(), directory / "run", fs::copy_options::recursive);
    check_refused(train_gpt_with(w.train(directory / "run", all_theirs)), 1,
                  {"has other tokens", "tokenizer.path"});
    const Outcome started = check_succeeds(train_gpt_with(w.train(
        directory / "other",
        all_theirs + Arguments{"--set", "model.init_from=" + finished_run(), "--stop-at", "1"})));
    CHECK(contains(started.out + started.err, "has other tokens than the one of these weights"));
}

TEST_CASE("a run beyond the configuration's end, and a profile that cannot come, are told",
          "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    fs::copy(finished_run(), run, fs::copy_options::recursive);
    const std::string config = read(run + "/config.json"), manifest = read(run + "/manifest.json");
    const Outcome outcome = check_succeeds(
        train_gpt_with(w.train(run, {"--set", "schedule.steps=10", "--set",
                                     "optimizer.learning_rate=0.5", "--profile", "3"})));
    CHECK(contains(outcome.out, "is at step 12, beyond the configuration's 10"));
    CHECK(contains(outcome.out, "no profile, which takes 5 steps; 0 are left"));
    CHECK(read(run + "/config.json") == config);
    CHECK(read(run + "/manifest.json") == manifest);
    CHECK(metrics_of(run) == metrics_of(finished_run()));
}

TEST_CASE("a profile is of steps, not of what comes between them", "[cli][cuda]") {
    const TemporaryDirectory directory;
    const auto calls_of = [&](const std::string& run, const Arguments& more) {
        Arguments options{"--profile", "4"};
        options.insert(options.end(), more.begin(), more.end());
        const std::string out =
            check_succeeds(train_gpt_with(Workplace::get().train(directory / run, options))).out;
        std::map<std::string, std::string> calls;
        const std::regex row("\n  ([a-z_]+(?: [a-z_]+)*) +([0-9.]+) +[0-9.]+ +[0-9.]+% ");
        for (std::sregex_iterator at(out.begin(), out.end(), row), end; at != end; ++at)
            calls[(*at)[1]] = (*at)[2];
        return calls;
    };
    const auto alone = calls_of(
        "alone", {"--set", "evaluation.every=0", "--set", "sampling.every=0", "--stop-at", "7"});
    CHECK(alone.at("head_loss") == "2.0");  // micro-batches of a step
    CHECK(alone == calls_of("between", {"--set", "evaluation.every=1", "--set", "sampling.every=2",
                                        "--set", "checkpoint.every=3", "--stop-at", "7"}));
}

TEST_CASE("results that cannot be written are an error", "[cli]") {
    for (const std::string& command :
         Arguments{"config", "--version", "plan " + Workplace::get().config(),
                   "eval " + finished_run(), "train configs/quickstart.json --print-config"}) {
        CAPTURE(command);
        const ProgramResult result =
            run_program({"sh", "-c", "'" + binary() + "' " + command + " > /dev/full"});
        CHECK(result.exit_code == 1);
        CHECK(contains(result.output, "could be written"));
    }
}

TEST_CASE("a run that goes on with other data says so", "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "2"})));
    const Outcome same = check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "4"})));
    CHECK_FALSE(contains(same.out, "had other contents"));
    const Outcome other = check_succeeds(train_gpt_with(
        w.train(run, {"--stop-at", "6", "--set", "data.train=" + w.data("*_*.bin")})));
    CHECK(contains(other.out, "data.train had other contents"));
    CHECK_FALSE(contains(other.out, "data.val had other contents"));
}

TEST_CASE(
    "another model in the configuration of a resumed run is refused and other changes are told",
    "[cli]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    fs::copy(finished_run(), run, fs::copy_options::recursive);
    const auto train = [&](const Arguments& more) {
        return train_gpt_with(Workplace::get().train(run, more));
    };
    check_refused(train({"--set", "model.n_layer=3"}), 1, {"n_layer = 2", "3"});
    check_refused(train({"--set", "model.n_ctx=64"}), 1, {"n_ctx = 48", "64"});
    check_refused(train({"--set", "model.vocab_size=400"}), 1, {"vocab_size", "400"});
    const Outcome longer =
        check_succeeds(train({"--set", "schedule.steps=13", "--set", "batch.micro_batch=8"}));
    CHECK(contains(longer.out, "schedule.steps changed from 12 to 13"));
    CHECK(contains(longer.out, "batch.micro_batch changed from 4 to 8"));
    CHECK(contains(longer.out, "step 13/13"));
}

TEST_CASE(
    "a learning rate that blows up stops the run with the step, the tensor and the last good "
    "weights",
    "[cli][cuda]") {
    const TemporaryDirectory directory;
    for (const char* dtype : {"fp32", "bf16"}) {
        const fs::path run = directory / dtype;
        const Arguments options{"--set", "optimizer.learning_rate=1e30", "--set",
                                std::string("precision.dtype=") + dtype};
        const Outcome outcome = train_gpt_with(Workplace::get().train(run, options));
        check_refused(outcome, 1, {"not finite", "first in ", "optimizer.learning_rate"});
        const auto steps = checkpoints_in(run);
        REQUIRE(steps.size() == 1);
        CHECK(contains(outcome.err, "step " + std::to_string(steps[0] + 1) + " "));
        CHECK(contains(outcome.err, "step " + std::to_string(steps[0]) + " of 12 is saved"));
        check_finite_weights(run / step_folder(steps[0]));
        CHECK(static_cast<int64_t>(metrics_of(run).size()) >= steps[0]);
    }
    // Weights beyond what fp32 holds are no last good weights: nothing is saved, and an older checkpoint stays.
    fs::copy(finished_run(), directory / "older", fs::copy_options::recursive);
    const Outcome outcome = train_gpt_with(Workplace::get().train(
        directory / "older",
        {"--set", "optimizer.learning_rate=1e37", "--set", "optimizer.weight_decay=1e6", "--set",
         "schedule.steps=20", "--set", "schedule.decay=constant", "--set", "checkpoint.every=1",
         "--set", "checkpoint.keep=1"}));
    CAPTURE(outcome.out, outcome.err);
    CHECK(outcome.code == 1);
    CHECK(contains(outcome.err, "not saved"));
    CHECK(checkpoints_in(directory / "older") == std::vector<int64_t>{4, 8, 12});
}

// ---- Damaged checkpoints and full disks -------------------------------------------------------------------------------

TEST_CASE(
    "a damaged newest checkpoint gives way to the one before, and no damage ends a run in silence",
    "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    check_succeeds(train_gpt_with(w.train(directory / "whole", {"--stop-at", "9"})));
    check_succeeds(train_gpt_with(
        w.train(directory / "base", {"--set", "checkpoint.every=4", "--stop-at", "8"})));

    int number = 0;
    const auto check_mended = [&](const std::function<void(const fs::path&)>& damage,
                                  bool may_be_harmless) {
        const std::string run = directory / ("run-" + std::to_string(number++));
        fs::copy(directory / "base", run, fs::copy_options::recursive);
        damage(fs::path(run) / step_folder(8));
        const Outcome outcome = check_succeeds(train_gpt_with(w.train(run, {"--stop-at", "9"})));
        CAPTURE(outcome.out, outcome.err);
        const bool fell_back = contains(outcome.out, "resuming from " + run + "/" + step_folder(4));
        if (!may_be_harmless) CHECK(fell_back);
        if (fell_back) {
            CHECK(outcome.err.starts_with("warning: "));
            CHECK(contains(outcome.err, step_folder(8)));
            // What was damaged stays for who wants to look at it, out of the way.
            CHECK(fs::exists(run + "/" + step_folder(8) + ".damaged"));
            fs::remove_all(run + "/" + step_folder(8) + ".damaged");
        }
        check_same_state(directory / "whole", run, 9);
    };
    const auto names = names_in(directory / ("base/" + step_folder(8)));
    CHECK(names == std::set<std::string>{"choices.json", "config.json", "manifest.json",
                                         "model.safetensors", optimizer_file, "tokenizer.json",
                                         "tokenizer_config.json", "train_gpt.json"});
    for (const std::string& name : names) {
        CAPTURE(name);
        check_mended(
            [&](const fs::path& checkpoint) {
                std::string bytes = read(checkpoint / name);
                bytes[static_cast<size_t>(random_int(0, static_cast<int64_t>(bytes.size()) - 1))] ^=
                    static_cast<char>(1 << random_int(0, 7));
                write(checkpoint / name, bytes);
            },
            name == "manifest.json");
    }
    for (const char* name : {"manifest.json", optimizer_file}) {
        CAPTURE(name);
        check_mended(
            [&](const fs::path& checkpoint) {
                fs::resize_file(
                    checkpoint / name,
                    static_cast<uintmax_t>(
                        random_int(0, static_cast<int64_t>(fs::file_size(checkpoint / name)) - 2)));
            },
            false);
        check_mended([&](const fs::path& checkpoint) { fs::remove(checkpoint / name); }, false);
    }

    SECTION("when none is whole, the run does not start from scratch over them") {
        const std::string run = directory / "all";
        fs::copy(directory / "base", run, fs::copy_options::recursive);
        fs::remove(run + "/" + step_folder(8) + "/model.safetensors");
        fs::resize_file(run + "/" + step_folder(4) + "/tokenizer.json", 10);
        const auto before = names_in(run);
        const std::string metrics = read(run + "/metrics.jsonl");
        const Outcome outcome = train_gpt_with(w.train(run));
        CAPTURE(outcome.out, outcome.err);
        CHECK(outcome.code == 1);
        CHECK(contains(outcome.err, "train_gpt: none of the 2 checkpoints in " + run));
        CHECK(names_in(run) == before);
        CHECK(read(run + "/metrics.jsonl") == metrics);
    }
    SECTION("sampling from a damaged checkpoint is refused") {
        std::string bytes = read(directory / ("base/" + step_folder(8) + "/model.safetensors"));
        bytes.back() ^= 1;
        write(directory / ("base/" + step_folder(8) + "/model.safetensors"), bytes);
        check_refused(train_gpt_with({"sample", directory / "base"}), 1,
                      {"model.safetensors", "damaged"});
        check_succeeds(train_gpt_with({"sample", directory / ("base/" + step_folder(4))}));
    }
}

TEST_CASE(
    "a full disk is told, older checkpoints stay whole, and the next one is tried in its turn",
    "[cli]") {
    const Workplace& w = Workplace::get();
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    const Arguments options{"--set", "checkpoint.every=4", "--set", "checkpoint.keep=1"};
    check_succeeds(train_gpt_with(w.train(run, options + Arguments{"--stop-at", "4"})));
    const uintmax_t optimizer_bytes =
        fs::file_size(run + "/" + step_folder(4) + "/" + optimizer_file);
    const Surroundings full{.file_bytes = static_cast<rlim_t>(optimizer_bytes - 1)};

    const Outcome outcome = train_gpt_with(w.train(run, options), full);
    CAPTURE(outcome.out, outcome.err);
    CHECK(outcome.code == 1);
    CHECK(contains(outcome.err, "warning: step 8 of 12 is not saved"));
    CHECK(contains(outcome.err, "train_gpt: step 12 of 12 is not saved: cannot write"));
    CHECK(checkpoints_in(run) == std::vector<int64_t>{4});
    check_succeeds(train_gpt_with(w.train(run, options)));
    check_succeeds(train_gpt_with(w.train(directory / "whole", options)));
    check_same_state(directory / "whole", run, 12);

    SECTION("room that comes back is used") {
        Process process(w.train(directory / "later", options + endless), full);
        REQUIRE(process.wait_until([&] { return contains(process.err(), "is not saved"); }));
        const rlimit unlimited{RLIM_INFINITY, RLIM_INFINITY};
        REQUIRE(::prlimit(process.pid(), RLIMIT_FSIZE, &unlimited, nullptr) == 0);
        REQUIRE(process.wait_until([&] {
            const auto names = names_in(directory / "later");
            return std::any_of(names.begin(), names.end(), [](const auto& name) {
                return name.size() == 13 && name.starts_with("step-");
            });
        }));
        process.signal(SIGTERM);
        check_succeeds(process.finish());
    }
    SECTION("a metrics file without room does not end the run and keeps whole lines") {
        const fs::path finished = finished_run();
        uintmax_t smallest = 0;
        for (const char* name : {"config.json", "manifest.json", "choices.json"})
            smallest = std::max(smallest, fs::file_size(finished / name));
        const Outcome crowded = train_gpt_with(w.train(directory / "crowded"),
                                               {.file_bytes = static_cast<rlim_t>(smallest + 100)});
        CHECK(contains(crowded.err, "metrics.jsonl"));
        CHECK(crowded.code == 1);  // the last checkpoint does not fit either
        const std::string text = read(directory / "crowded/metrics.jsonl");
        CHECK_FALSE(text.empty());
        metrics_of(directory / "crowded");
    }
}

// ---- Sampling and evaluation ------------------------------------------------------------------------------------------

TEST_CASE("samples follow prompt, temperature, top-k, top-p and seed", "[cli][cuda]") {
    const auto sample = [&](const Arguments& more) {
        return check_succeeds(
                   train_gpt_with(Arguments{"sample", finished_run(), "--max-tokens", "40"} + more))
            .out;
    };
    const Arguments prompt{"--prompt", "hello there"};
    const std::string greedy = sample(prompt + Arguments{"--temperature", "0"});
    CHECK(greedy.starts_with("hello there"));
    CHECK(greedy.size() > std::string("hello there\n").size());
    CHECK(sample(prompt + Arguments{"--temperature", "0", "--seed", "7"}) == greedy);
    CHECK(sample(prompt + Arguments{"--top-k", "1", "--seed", "8"}) == greedy);
    CHECK(sample(prompt + Arguments{"--top-p", "1e-9", "--seed", "9"}) == greedy);

    const std::string warm = sample(prompt + Arguments{"--temperature", "1.5", "--seed", "3"});
    CHECK(sample(prompt + Arguments{"--temperature", "1.5", "--seed", "3"}) == warm);
    CHECK(sample(prompt + Arguments{"--temperature", "1.5", "--seed", "4"}) != warm);
    const std::string two =
        sample(prompt + Arguments{"--temperature", "1.5", "--seed", "3", "--samples", "2"});
    CHECK(two.starts_with(warm.substr(0, warm.size() - 1) + "\n---\nhello there"));

    CHECK(sample({}).size() > 1);
    CHECK(sample({"--prompt", ""}) == sample({}));
    std::string long_prompt;
    for (int i = 0; i < 500; ++i) long_prompt += "word ";  // many times n_ctx
    CHECK(sample({"--prompt", long_prompt}).starts_with(long_prompt));
    const std::string bytes = "\xff\xfe \xc3( \xe2\x82";
    CHECK(sample({"--prompt", bytes}).starts_with(bytes));
    CHECK(sample(prompt + Arguments{"--dtype", "bf16", "--temperature", "0"})
              .starts_with("hello there"));
}

TEST_CASE("a model with more rows than its tokenizer has tokens writes text", "[cli]") {
    const TemporaryDirectory directory;
    const Outcome outcome = check_succeeds(train_gpt_with(Workplace::get().train(
        directory / "run", {"--set", "model.vocab_size=3000", "--set", "schedule.steps=3", "--set",
                            "sampling.samples=3", "--set", "sampling.temperature=3"})));
    CHECK(contains(outcome.out, "--- sample\na"));
    check_succeeds(train_gpt_with({"sample", directory / "run", "--temperature", "3"}));
}

TEST_CASE("eval gives the last validation loss of the run, also from a plain Hugging Face folder",
          "[cli][cuda]") {
    const auto metrics = metrics_of(finished_run());
    const double expected = metrics.back()["val_loss"], bits = metrics.back()["val_bits_per_byte"];
    const std::string out = check_succeeds(train_gpt_with({"eval", finished_run()})).out;
    CHECK(number_after(out, "validation loss ") == Approx(expected).epsilon(1e-5));
    CHECK(number_after(out, "nats/token, ") == Approx(bits).epsilon(1e-5));
    CHECK(number_after(out, " over ") == metrics.back()["val_tokens"].get<double>());

    const TemporaryDirectory directory;
    const fs::path plain = directory / "plain";
    fs::copy(fs::path(finished_run()) / step_folder(12), plain, fs::copy_options::recursive);
    for (const char* name : {"manifest.json", "train_gpt.json", optimizer_file})
        fs::remove(plain / name);
    const std::string windows = check_succeeds(train_gpt_with({"eval", plain, "--data",
                                                               Workplace::get().data("val_*.bin")}))
                                    .out;
    CHECK(number_after(windows, "validation loss ") ==
          Approx(expected).epsilon(0.05));  // windows of n_ctx, not of 32
    CHECK(number_after(windows, " over ") == metrics.back()["val_tokens"].get<double>());
    CHECK(contains(check_succeeds(train_gpt_with({"eval", "test/fixtures/gpt2-tiny", "--data",
                                                  "synthetic", "--max-tokens", "100"}))
                       .out,
                   " over 100 tokens"));
    check_refused(train_gpt_with({"sample", "test/fixtures/gpt2-tiny"}), 1, {"tokenizer"});
}

TEST_CASE("HellaSwag accuracy is reported by eval and by a run that names the file",
          "[cli][cuda]") {
    const TemporaryDirectory directory;
    std::string jsonl;
    for (int i = 0; i < 5; ++i)
        jsonl += Json{{"ctx", "a man"},
                      {"endings", {"one", "two words", "three", "four"}},
                      {"label", i % 4}}
                     .dump() +
                 "\n";
    write(directory / "h.jsonl", jsonl);
    const std::string out =
        check_succeeds(train_gpt_with({"eval", finished_run(), "--hellaswag", directory / "h.jsonl",
                                       "--max-examples", "4"}))
            .out;
    CHECK(number_after(out, "HellaSwag accuracy ") ==
          0.25);  // the same four endings, each the right one once
    CHECK(contains(out, "over 4 examples"));
    check_succeeds(train_gpt_with(Workplace::get().train(
        directory / "run", {"--set", "evaluation.hellaswag=" + (directory / "h.jsonl"), "--set",
                            "schedule.steps=3"})));
    CHECK(metrics_of(directory / "run").back().contains("hellaswag_normalised"));

    write(directory / "bad.jsonl", jsonl + "{\"ctx\": \"a\"}\n");
    const Outcome bad =
        train_gpt_with({"eval", finished_run(), "--hellaswag", directory / "bad.jsonl"});
    check_refused(bad, 1, {"bad.jsonl", "line 6"});
    CHECK(bad.out.empty());
    // A run finds out before it trains.
    const Outcome refused = train_gpt_with(Workplace::get().train(
        directory / "other", {"--set", "evaluation.hellaswag=" + (directory / "bad.jsonl")}));
    check_refused(refused, 1, {"line 6"});
    CHECK_FALSE(contains(refused.out, "step 1/"));
}

// ---- Import and export ------------------------------------------------------------------------------------------------

TEST_CASE("an exported model evaluates, samples, trains on and comes back as the run left it",
          "[cli]") {
    const TemporaryDirectory directory;
    const std::string val = Workplace::get().data("val_*.bin");
    const auto loss_of = [&](const std::string& path) {
        const std::string out =
            check_succeeds(train_gpt_with({"eval", path, "--data", val, "--dtype", "fp32"})).out;
        return out.substr(0, out.find(','));
    };
    const std::string shards = directory / "shards", back = directory / "back",
                      file = directory / "model.bin", from_file = directory / "from-file";
    const std::string said = check_succeeds(train_gpt_with({"export", finished_run(), "--out",
                                                            shards, "--max-shard-size", "20KB"}))
                                 .out;
    CHECK(contains(said, "in fp32"));
    CHECK(contains(said, step_folder(12)));
    CHECK(names_in(shards).contains("model.safetensors.index.json"));
    check_succeeds(train_gpt_with({"import", shards, "--out", back}));
    check_succeeds(train_gpt_with({"export", back, "--out", file, "--format", "llm.c"}));
    check_succeeds(train_gpt_with({"import", file, "--out", from_file, "--tokenizer",
                                   Workplace::get().data("tokenizer.json")}));
    const std::string weights =
        read(fs::path(finished_run()) / step_folder(12) / "model.safetensors");
    CHECK((read(back + "/model.safetensors") == weights));
    CHECK((read(from_file + "/model.safetensors") == weights));
    CHECK(read(back + "/config.json") == read(from_file + "/config.json"));
    const std::string loss = loss_of(shards);
    CHECK(loss_of(back) == loss);
    CHECK(loss_of(from_file) == loss);

    const auto sampled = [](const std::string& path) {
        return check_succeeds(train_gpt_with({"sample", path, "--temperature", "0"})).out;
    };
    CHECK(sampled(shards) == sampled(finished_run()));
    check_succeeds(train_gpt_with(
        Workplace::get().train(directory / "run", {"--set", "model.init_from=" + shards})));
    check_succeeds(
        train_gpt_with({"export", shards, "--out", directory / "half", "--dtype", "fp16"}));
    CHECK(number_after(loss_of(directory / "half"), "loss ") ==
          Approx(number_after(loss, "loss ")).epsilon(0.01));
}

TEST_CASE("import and export say what they cannot do", "[cli]") {
    const TemporaryDirectory directory;
    const std::string fixture = "test/fixtures/gpt2-tiny", out = directory / "out";
    check_refused(train_gpt_with({"import", fixture}), 2, {"--out"});
    check_refused(train_gpt_with({"export", fixture, "--out", out, "--dtype", "fp8"}), 2,
                  {"--dtype", "fp8"});
    check_refused(train_gpt_with({"export", fixture, "--out", out, "--format", "onnx"}), 2,
                  {"--format", "onnx"});
    for (const char* size : {"0", "-5", "5x", "", "GB"})
        check_refused(train_gpt_with({"export", fixture, "--out", out, "--max-shard-size", size}),
                      2, {"--max-shard-size"});
    check_refused(
        train_gpt_with({"export", fixture, "--out", out, "--format", "llm.c", "--dtype", "fp16"}),
        2, {"fp16"});
    check_refused(train_gpt_with({"export", fixture, "--out", out, "--format", "llm.c",
                                  "--max-shard-size", "1GB"}),
                  2, {"--max-shard-size"});
    check_refused(train_gpt_with({"import", directory / "none", "--out", out}), 1, {"none"});
    check_refused(train_gpt_with({"import", directory.path(), "--out", out}), 1,
                  {directory.path()});
    check_refused(train_gpt_with({"import", fixture + "/model.safetensors", "--out", out}), 1,
                  {"folder"});
    check_refused(train_gpt_with({"import", "README.md", "--out", out}), 1, {"README.md", "llm.c"});
    check_refused(train_gpt_with({"import", fixture, "--out", out, "--tokenizer", "README.md"}), 1,
                  {"README.md"});
    write(directory / "pytorch_model.bin", "x");
    check_refused(train_gpt_with({"import", directory.path(), "--out", out}), 1,
                  {"pytorch_model.bin"});
    CHECK_FALSE(fs::exists(out));
    check_refused(train_gpt_with({"export", fixture, "--out", directory.path()}), 1, {"not empty"});
    check_refused(train_gpt_with({"export", fixture, "--out", out}, {.file_bytes = 5000}), 1,
                  {"model.safetensors"});
    CHECK(names_in(directory.path()) == std::set<std::string>{"pytorch_model.bin"});
}

// ---- Selfcheck --------------------------------------------------------------------------------------------------------

TEST_CASE("selfcheck of one rank prints what its device reaches and finds nothing wrong", "[cli]") {
    const Outcome outcome =
        check_succeeds(train_gpt_with({"selfcheck", "--device", "cpu", "--tolerance", "0"}));
    for (const char* part :
         {"rank", "bf16 TFLOP/s", "fp32 TFLOP/s", "memory GB/s", "1 thread", "nothing to compare"})
        CHECK(contains(outcome.out, part));
    CHECK_FALSE(contains(outcome.out, "GPU GB/s"));
    CHECK_FALSE(contains(outcome.out, "collectives"));
}

TEST_CASE("selfcheck of two ranks compares them and measures collectives by size", "[cli]") {
    if (skip_without_mpirun()) return;
    const Arguments command{binary(),      "selfcheck", "--device",   "cpu",
                            "--max-bytes", "300000",    "--tolerance"};
    const ProgramResult alike = run_ranks(2, command + Arguments{"1000"});
    INFO(alike.output);
    CHECK(alike.exit_code == 0);
    for (const char* part :
         {"\n   0  ", "\n   1  ", "median", "over 2 ranks", "64 KiB", "256 KiB", "within 1000%"})
        CHECK(contains(alike.output, part));
    CHECK_FALSE(contains(alike.output, "1 MiB"));

    // No two measurements are equal.
    const ProgramResult different = run_ranks(2, command + Arguments{"0"});
    INFO(different.output);
    CHECK(different.exit_code > 0);
    CHECK(contains(different.output, "\nrank 0 ("));
    CHECK(contains(different.output, "\nrank 1 ("));
    CHECK(contains(different.output, "train_gpt: 2 of 2 ranks are more than 0% off"));
}

TEST_CASE("selfcheck of two GPUs measures their copies and NCCL too", "[cli][cuda]") {
    if (!contains(check_succeeds(train_gpt_with({"--version"})).out, "GPU 1") ||
        skip_without_mpirun())
        return;
    const ProgramResult result = run_ranks(2, {binary(), "selfcheck", "--device", "cuda",
                                               "--max-bytes", "65536", "--tolerance", "1000"});
    INFO(result.output);
    CHECK(result.exit_code == 0);
    for (const char* part :
         {"to GPU GB/s", "from GPU GB/s", "over 2 ranks", "64 KiB", "within 1000%"})
        CHECK(contains(result.output, part));
}
