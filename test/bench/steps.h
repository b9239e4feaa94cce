// Training steps of this program and of PyTorch, each in a child process.
#pragma once
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/tensor.h"
#include "test/bench/limits.h"
#include "test/bench/machine.h"

namespace train_gpt::bench {

using nlohmann::json;

// --- Training steps of both programs -------------------------------------------------------------

/// A child process, which the destructor ends. Its stderr goes to a file that error messages quote;
/// so does its stdout, unless stdin and stdout are pipes for commands and answers.
class Child {
  public:
    Child(const std::vector<std::string>& command, const std::string& log, bool talk) : log_(log) {
        int in[2], out[2];
        if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0)
            throw Error("cannot make a pipe: ", std::strerror(errno));
        std::vector<char*> arguments;
        for (const std::string& word : command)
            arguments.push_back(const_cast<char*>(word.c_str()));
        arguments.push_back(nullptr);
        pid_ = ::fork();
        if (pid_ < 0) throw Error("cannot start ", command[0], ": ", std::strerror(errno));
        if (pid_ == 0) {
            ::setpgid(0, 0);
            const int err = ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
            const int nothing = ::open("/dev/null", O_RDONLY);
            ::dup2(talk ? in[0] : nothing, 0);
            ::dup2(talk ? out[1] : err, 1);
            ::dup2(err, 2);
            ::execvp(arguments[0], arguments.data());
            ::_exit(127);
        }
        ::setpgid(pid_, pid_);
        ::close(in[0]);
        ::close(out[1]);
        to_ = in[1];
        from_ = out[0];
    }
    ~Child() {
        signal(SIGKILL);
        if (!reaped_) ::waitpid(pid_, nullptr, 0);
        ::close(to_);
        ::close(from_);
    }
    Child(const Child&) = delete;
    Child& operator=(const Child&) = delete;

    /// Sends a signal to the child and all processes that it started.
    void signal(int number) { ::kill(-pid_, number); }

    void send(const std::string& line) {
        const std::string text = line + "\n";
        if (::write(to_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
            fail("stopped listening");
    }
    /// The next line on the child's stdout that begins with '{', parsed.
    json receive(double limit) {
        const double end = monotonic_seconds() + limit;
        for (;;) {
            const size_t newline = pending_.find('\n');
            if (newline != std::string::npos) {
                const std::string line = pending_.substr(0, newline);
                pending_.erase(0, newline + 1);
                if (!line.empty() && line[0] == '{') return json::parse(line);
                continue;
            }
            pollfd wait{from_, POLLIN, 0};
            if (monotonic_seconds() > end || ::poll(&wait, 1, 1000) < 0) fail("did not answer");
            if (!(wait.revents & (POLLIN | POLLHUP))) continue;
            char buffer[4096];
            const ssize_t n = ::read(from_, buffer, sizeof buffer);
            if (n <= 0) fail("ended early");
            pending_.append(buffer, static_cast<size_t>(n));
        }
    }
    bool running() {
        if (!reaped_ && ::waitpid(pid_, nullptr, WNOHANG) == pid_) reaped_ = true;
        return !reaped_;
    }
    /// Processor time of all its threads so far, in clock ticks.
    int64_t ticks() const {
        std::ifstream file(concat("/proc/", pid_, "/stat"));
        std::string text;
        std::getline(file, text);
        // The second field is the name in parentheses, which may hold spaces; user and system time
        // are the 14th and 15th.
        std::istringstream fields(text.substr(std::min(text.rfind(')') + 1, text.size())));
        std::string skipped;
        for (int i = 3; i < 14; ++i) fields >> skipped;
        int64_t user = 0, system = 0;
        fields >> user >> system;
        return user + system;
    }
    uint64_t peak_rss() const {
        std::ifstream status(concat("/proc/", pid_, "/status"));
        for (std::string line; std::getline(status, line);)
            if (line.rfind("VmHWM:", 0) == 0)
                return std::strtoull(line.c_str() + 6, nullptr, 10) * 1024;
        return 0;
    }
    [[noreturn]] void fail(const std::string& what) const {
        std::ifstream log(log_);
        std::string last, line;
        while (std::getline(log, line))
            if (!line.empty()) last = line;
        throw Error("the program being measured ", what, last.empty() ? "" : ": " + last, " (see ",
                    log_, ")");
    }

  private:
    std::string log_, pending_;
    pid_t pid_ = -1;
    int to_ = -1, from_ = -1;
    bool reaped_ = false;
};

/// train_gpt as a user runs it, on synthetic data; stopped (SIGSTOP) between rounds.
class OurRun {
  public:
    OurRun(const std::string& program, const std::string& folder, const Model& m, DType dtype,
           const std::vector<std::string>& more = {})
        : metrics_(folder + "/run/metrics.jsonl") {
        std::filesystem::remove_all(folder);
        make_directory(folder);
        json config = {
            {"run_dir", folder + "/run"},
            {"device", "cpu"},
            {"model",
             {{"family", m.family},
              {"n_layer", m.n_layer},
              {"n_head", m.n_head},
              {"n_kv_head", m.n_kv_head},
              {"n_embd", m.n_embd},
              {"n_ff", m.n_ff},
              {"tied_head", m.tied ? "on" : "off"},
              {"n_ctx", m.T},
              {"vocab_size", m.vocab}}},
            {"data", {{"train", "synthetic"}}},
            {"batch",
             {{"tokens_per_step", m.tokens()}, {"micro_batch", m.B}, {"sequence_length", m.T}}},
            {"optimizer", {{"learning_rate", 3e-4}}},
            {"schedule", {{"steps", 1000000}, {"decay", "constant"}}},
            {"precision", {{"dtype", name_of(dtype)}}},
            {"checkpoint", {{"every", 0}}},
            {"evaluation", {{"every", 0}}},
            {"log", {{"progress", "lines"}}}};
        if (m.n_expert > 0) {
            config["router"] = {{"balance", "none"}};
            config["model"].update({{"n_expert", m.n_expert},
                                    {"n_expert_per_token", m.n_expert_per_token},
                                    {"n_ff_expert", m.n_ff}});
            config["model"].erase("n_ff");
        }
        write_file(folder + "/config.json", config.dump(2));
        std::vector<std::string> command{program, "train", folder + "/config.json"};
        command.insert(command.end(), more.begin(), more.end());
        child_ = std::make_unique<Child>(command, folder + "/log", false);
        steps(3);  // warm-up
    }

    /// Milliseconds of n whole steps; the step during which the process was stopped does not count.
    std::vector<double> steps(int n) {
        std::vector<double> all = read_metrics();
        const auto first = static_cast<std::ptrdiff_t>(all.size()) + 1;
        child_->signal(SIGCONT);
        const double end = monotonic_seconds() + 120 + 60 * n;
        for (uintmax_t seen = 0; std::ssize(all) < first + n;) {
            ::usleep(5000);
            if (!child_->running()) child_->fail("ended early");
            if (monotonic_seconds() > end) child_->fail("takes too long");
            std::error_code missing;
            const uintmax_t size = std::filesystem::file_size(metrics_, missing);
            if (missing || size == seen) continue;
            seen = size;
            all = read_metrics();
        }
        child_->signal(SIGSTOP);
        return {all.begin() + first, all.begin() + first + n};
    }
    uint64_t peak_rss() const { return child_->peak_rss(); }
    int64_t ticks() const { return child_->ticks(); }

  private:
    std::vector<double> read_metrics() {
        std::ifstream file(metrics_);
        std::vector<double> ms;
        for (std::string line; std::getline(file, line) && !file.eof();) {
            const json entry = json::parse(line, nullptr, false);
            if (entry.is_object() && entry.contains("ms")) ms.push_back(entry["ms"].get<double>());
        }
        return ms;
    }
    std::string metrics_;
    std::unique_ptr<Child> child_;
};

/// How PyTorch runs a step. experts: for mixtures, how transformers computes them.
struct PeerKind {
    std::string dtype, family, experts;
    bool compiled;

    std::string label() const {
        return (dtype == "fp32" ? "" : dtype + ", ") +
               (experts.empty() ? "" : family + " with " + experts + ", ") +
               (compiled ? "compiled" : "eager");
    }
};

/// PyTorch through scripts/bench_pytorch.py, which waits between rounds.
class PeerRun {
  public:
    PeerRun(const std::string& python, const std::string& folder, const Model& m,
            const PeerKind& kind, int threads)
        : label_(kind.label()) {
        std::vector<std::string> command{python, "scripts/bench_pytorch.py", "--server", "--dtype",
                                         kind.dtype};
        if (kind.compiled) command.emplace_back("--compile");
        const auto option = [&](const char* name, int64_t value) {
            command.emplace_back(name);
            command.push_back(std::to_string(value));
        };
        option("--n-layer", m.n_layer);
        option("--n-embd", m.n_embd);
        option("--n-head", m.n_head);
        if (m.is_llama()) {
            option("--n-kv-head", m.n_kv_head);
            option("--n-ff", m.n_ff);
            command.insert(command.end(), {"--family", kind.family});
            if (m.tied) command.emplace_back("--tied");
        }
        if (m.n_expert > 0) {
            option("--n-expert", m.n_expert);
            option("--n-expert-per-token", m.n_expert_per_token);
            command.insert(command.end(), {"--experts", kind.experts});
        }
        option("--vocab", m.padded_vocab);
        option("--batch", m.B);
        option("--sequence", m.T);
        option("--threads", threads);
        make_directory(folder);
        child_ = std::make_unique<Child>(command, folder + "/log", true);
        version_ = child_->receive(600)["torch"].get<std::string>();
    }
    std::vector<double> steps(int n) {
        child_->send(concat("go ", n));
        const json answer = child_->receive(120 + 60 * n);
        peak_rss_ = answer["peak_rss"].get<uint64_t>();
        return answer["ms"].get<std::vector<double>>();
    }
    uint64_t peak_rss() const { return peak_rss_; }
    int64_t ticks() const { return child_->ticks(); }
    const std::string& label() const { return label_; }
    const std::string& version() const { return version_; }

  private:
    std::string label_, version_;
    std::unique_ptr<Child> child_;
    uint64_t peak_rss_ = 0;
};

/// Times of steps. The times of quiet rounds are kept apart.
struct Rounds {
    std::vector<double> good, all;
    int good_rounds = 0, rounds = 0;

    template <class Run>
    void add(Canary& canary, Run& run, int steps) {
        const bool before = canary.wait_for_quiet(5);
        const OthersShare others(run.ticks());
        const std::vector<double> ms = run.steps(steps);
        const double share = others(run.ticks());
        ++rounds;
        all.insert(all.end(), ms.begin(), ms.end());
        if (!before || share > 0.05 || !canary.quiet()) return;
        ++good_rounds;
        good.insert(good.end(), ms.begin(), ms.end());
    }
    double ms() const { return median(good.empty() ? all : good); }
    std::string quality() const { return concat(good_rounds, "/", rounds); }
};

}  // namespace train_gpt::bench
