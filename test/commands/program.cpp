#include "test/commands/program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <map>
#include <regex>
#include <thread>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "training/files/checkpoint.h"
#include "training/files/safetensors.h"

namespace train_gpt::inline program {

std::string binary() {
    for (const char* name : {"TRAIN_GPT_BINARY", "TRAIN_GPT"})
        if (const char* path = std::getenv(name)) return path;
    return "build/train_gpt";
}

Process::Process(const Arguments& arguments, const Surroundings& surroundings) {
    const std::string& program = surroundings.program;
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
        ::signal(SIGHUP, SIG_DFL);  // which nohup makes the tests ignore
        const rlimit limit{surroundings.file_bytes, RLIM_INFINITY};
        ::setrlimit(RLIMIT_FSIZE, &limit);
        if (surroundings.bound_by_permissions)
            for (unsigned long capability : {1ul, 2ul})  // CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
                if (::geteuid() == 0 && ::prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0)
                    ::_exit(99);
        ::execve(program.c_str(), argv.data(), envp.data());
        ::_exit(127);
    }
    ::close(out);
    ::close(err);
}

Process::~Process() {
    if (!over_) {
        ::kill(pid_, SIGKILL);
        finish();
    }
}

std::string Process::err() const {
    std::string text = read(err_path());
    if (text.starts_with("train_gpt: running on the CPU, since "))
        text.erase(0, text.find('\n') + 1);
    return text;
}

void Process::signal(int number) { ::kill(pid_, number); }

bool Process::wait_until(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(10);
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

bool Process::wait_for_step(int64_t step) {
    return wait_until([&] { return contains(out(), "step " + std::to_string(step) + "/"); });
}

Outcome Process::finish() {
    if (!over_) {
        ::waitpid(pid_, &status_, 0);
        over_ = true;
    }
    return {WIFEXITED(status_) ? WEXITSTATUS(status_) : -WTERMSIG(status_), out(), err()};
}

Outcome train_gpt_with(const Arguments& arguments, const Surroundings& surroundings) {
    Process process(arguments, surroundings);
    return process.finish();
}

void check_refused(const Outcome& outcome, int code, const Arguments& parts) {
    CAPTURE(outcome.out, outcome.err);
    CHECK(outcome.code == code);
    // A disk that other work on this machine slows down is no part of the refusal.
    static const std::regex slow("warning: the checkpoint of step [0-9]+ was due before [^\n]*\n");
    const std::string err = std::regex_replace(outcome.err, slow, "");
    CHECK(err.starts_with("train_gpt: "));
    CHECK(std::ranges::count(err, '\n') == 1);
    CHECK(err.ends_with("\n"));
    for (const std::string& part : parts) {
        CAPTURE(part);
        CHECK(contains(err, part));
    }
}

Outcome check_succeeds(const Outcome& outcome) {
    INFO("stdout: " << outcome.out << "\nstderr: " << outcome.err);
    REQUIRE(outcome.code == 0);
    return outcome;
}

Outcome check_stopped(const Outcome& outcome, int code) {
    INFO("stdout: " << outcome.out << "\nstderr: " << outcome.err);
    REQUIRE(outcome.code == code);
    return outcome;
}

const Workplace& Workplace::get() {
    static const Workplace workplace;
    return workplace;
}

Arguments Workplace::train(const std::string& run_dir, const Arguments& more) const {
    Arguments arguments{"train", config(), "--set", "run_dir=" + run_dir};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
}

Workplace::Workplace() {
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
    const SortedJson config = {
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
        {"kernels", {{"autotune", "off"}}},  // two runs may choose differently
        {"sampling", {{"every", 4}, {"prompt", "a"}, {"max_tokens", 10}, {"samples", 1}}}};
    write(this->config(), config.dump(4));
}

std::string step_folder(int64_t step) {
    char name[32];
    std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
    return name;
}

std::set<std::string> names_in(const fs::path& folder) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
        names.insert(entry.path().filename().string());
    return names;
}

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

std::vector<SortedJson> metrics_of(const fs::path& run_dir) {
    const std::string text = read(run_dir / "metrics.jsonl");
    CHECK((text.empty() || text.back() == '\n'));
    std::vector<SortedJson> lines;
    std::map<bool, int64_t> last;
    double seconds = 0;
    size_t begin = 0;
    for (size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
        SortedJson line = SortedJson::parse(text.substr(begin, end - begin), nullptr, false);
        CAPTURE(text.substr(begin, end - begin));
        REQUIRE(line.is_object());
        const int64_t step = line.at("step");
        int64_t& before = last.try_emplace(line.contains("val_loss"), -1).first->second;
        CHECK(step > before);
        before = step;
        CHECK(line.at("seconds").get<double>() >= seconds);
        seconds = line.at("seconds");
        line.erase("seconds");
        line.erase("mfu");  // only where the device's peak is known
        for (const char* key : {"ms", "tokens_per_second", "flops_per_second", "peak_fraction",
                                "compute_ms", "communication_ms", "data_wait_ms", "optimizer_ms"}) {
            if (line.contains("loss")) CHECK(line.at(key).is_number());
            line.erase(key);
        }
        lines.push_back(line);
    }
    return lines;
}

void check_same_state(const fs::path& a, const fs::path& b, int64_t step) {
    for (const std::string& name :
         {std::string("model.safetensors"), std::string(optimizer_file)}) {
        CAPTURE(a.string(), b.string(), step, name);
        REQUIRE(fs::file_size(a / step_folder(step) / name) > 0);
        CHECK(file_difference(a / step_folder(step) / name, b / step_folder(step) / name) == "");
    }
    const std::vector<SortedJson> ours = metrics_of(a), theirs = metrics_of(b);
    CHECK(ours.size() == theirs.size());
    for (size_t i = 0; i < std::min(ours.size(), theirs.size()); ++i) REQUIRE(ours[i] == theirs[i]);
}

void check_finite_weights(const fs::path& checkpoint) {
    const SafetensorsFile file(checkpoint / "model.safetensors");
    for (const TensorInfo& info : file.tensors()) {
        std::vector<float> values(static_cast<size_t>(info.numel()));
        file.read_floats(info, values.data());
        CHECK(std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); }));
    }
}

void replace_in_checkpoint(const fs::path& checkpoint, const std::string& name,
                           const std::string& bytes) {
    write(checkpoint / name, bytes);
    SortedJson manifest = SortedJson::parse(read(checkpoint / "manifest.json"));
    manifest.at("files").at(name) = {{"bytes", bytes.size()},
                                     {"xxh3", hash_file(checkpoint / name)}};
    write(checkpoint / "manifest.json", manifest.dump(2));
}

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

}  // namespace train_gpt::inline program
