#include "test/parallel/failing_job.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <regex>
#include <thread>
#include <utility>

#include <nlohmann/json.hpp>

#include "test/file_difference.h"
#include "training/files/checkpoint.h"

namespace train_gpt::failing_job {

Arguments operator+(Arguments a, const Arguments& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string binary() {
    for (const char* name : {"TRAIN_GPT_BINARY", "TRAIN_GPT"})
        if (const char* path = std::getenv(name)) return fs::absolute(path);
    return fs::absolute("build/train_gpt");
}

Arguments train(const fs::path& run, const Arguments& more) {
    static const TemporaryDirectory directory;
    static const std::string path = [] {
        const SortedJson config = {
            {"device", "cpu"},
            {"model",
             {{"n_layer", 2}, {"n_head", 2}, {"n_embd", 32}, {"n_ctx", 32}, {"vocab_size", 256}}},
            {"data", {{"train", "synthetic"}, {"val", "synthetic"}}},
            {"batch", {{"tokens_per_step", 512}, {"micro_batch", 4}, {"sequence_length", 32}}},
            {"optimizer", {{"learning_rate", 0.003}}},
            {"schedule", {{"steps", 1000000}, {"warmup_steps", 3}}},
            {"precision", {{"dtype", "fp32"}}},
            {"checkpoint", {{"every", 4}, {"keep", 2}}},
            {"evaluation", {{"every", 0}, {"max_tokens", 1024}}},
            {"parallel", {{"timeout_seconds", timeout}}},
            {"log", {{"every", 1}, {"progress", "lines"}}}};
        std::string path = directory / "config.json";
        write(path, config.dump(4));
        return path;
    }();
    return Arguments{binary(), "train", path, "--set", "run_dir=" + run.string()} + more;
}

Arguments train_with_one_different(const fs::path& run, int rank, const Arguments& its_arguments) {
    std::string its;
    for (const std::string& argument : its_arguments) its += " '" + argument + "'";
    return Arguments{"sh", "-c",
                     concat("if [ \"${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$TRAIN_GPT_RANK}}\" = ",
                            rank, " ]; then exec \"$@\"", its, "; fi; exec \"$@\""),
                     "sh"} +
           train(run);
}

std::string read_of_process(const fs::path& file) {
    try {
        return read(file);
    } catch (const std::ios_base::failure&) {
        return "";
    }
}

std::vector<Process> processes_of(const fs::path& run) {
    std::vector<Process> found;
    const std::string named = "run_dir=" + run.string() + '\0';
    for (const auto& entry : fs::directory_iterator("/proc")) {
        const std::string name = entry.path().filename();
        if (name.find_first_not_of("0123456789") != std::string::npos) continue;
        const std::string arguments = read_of_process(entry.path() / "cmdline");
        if (arguments.find(named) == std::string::npos) continue;
        const std::string environment = '\0' + read_of_process(entry.path() / "environ");
        Process process{static_cast<pid_t>(std::stol(name)), -1};
        for (const std::string variable :
             {"OMPI_COMM_WORLD_RANK=", "PMI_RANK=", "TRAIN_GPT_RANK=", "RANK=", "SLURM_PROCID="}) {
            const size_t at = environment.find('\0' + variable);
            if (at != std::string::npos)
                process.rank = std::atoi(&environment[at + 1 + variable.size()]);
        }
        found.push_back(process);
    }
    return found;
}

int64_t last_step(const fs::path& run) {
    const std::string text = read(run / "metrics.jsonl");
    const size_t end = text.rfind('\n');
    if (end == std::string::npos || end == 0) return 0;
    const size_t begin = text.rfind('\n', end - 1) + 1;  // npos + 1 is 0
    const SortedJson line = SortedJson::parse(text.substr(begin, end - begin), nullptr, false);
    return line.is_object() ? line.value("step", int64_t{0}) : 0;
}

FailingJob::FailingJob(int ranks, const fs::path& run, const Arguments& more,
                       const Environment& environment, Launcher launcher)
    : FailingJob(run, launch(ranks, launcher) + train(run, more), environment) {}

FailingJob::FailingJob(fs::path run, const Arguments& command, Environment environment)
    : run_(std::move(run)) {
    environment.insert(surroundings.begin(), surroundings.end());
    // The destructor removes what MPI leaves when it is killed.
    for (const char* variable : {"TMPDIR", "OMPI_MCA_btl_vader_backing_directory"})
        environment.emplace(variable, scratch_.path());
    result_ = std::async(std::launch::async, [=] { return run_program(command, environment); });
}

FailingJob::~FailingJob() {
    if (!result_.valid()) return;
    for (const Process& process : processes_of(run_)) ::kill(process.pid, SIGKILL);
    result_.get();
}

bool FailingJob::wait_until(const std::function<bool()>& condition) {
    while (!condition())
        if (result_.wait_for(std::chrono::microseconds(500)) == std::future_status::ready)
            return condition();
    return true;
}

bool FailingJob::wait_for_step(int64_t step) {
    const bool waited = wait_until([&] { return last_step(run_) >= step; });
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    return waited;
}

bool FailingJob::wait_for_checkpoint() {
    return wait_until([&] { return !list_checkpoints(run_).empty(); });
}

bool FailingJob::signal(int rank, int number) {
    event_ = Clock::now();
    for (const Process& process : processes_of(run_))
        if (process.rank == rank) return ::kill(process.pid, number) == 0;
    return false;
}

ProgramResult FailingJob::finish() {
    ProgramResult result = result_.get();
    result.seconds = seconds_since_mark();
    return result;
}

size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
    return n;
}

void check_gone(const fs::path& run, const std::function<bool(const Process&)>& counts) {
    const auto start = Clock::now();
    const auto left = [&] {
        const std::vector<Process> processes = processes_of(run);
        return std::count_if(processes.begin(), processes.end(), counts);
    };
    while (left() > 0 && seconds_since(start) < timeout + grace)
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(left() == 0);
}

void check_failed(FailingJob& job, const fs::path& run, const std::string& expression) {
    const ProgramResult result = job.finish();
    INFO(result.output);
    CHECK(result.exit_code > 0);
    CHECK(result.seconds < timeout + grace);
    CAPTURE(expression);
    CHECK(std::regex_search(result.output, std::regex("(^|\n)train_gpt: " + expression)));
    check_gone(run);
}

std::string named(int rank, const std::string& place) {
    return concat("rank ", rank, " \\(", place, place.empty() ? "" : ", ", "host [^)]+\\)");
}

void check_hung(FailingJob& job, const fs::path& run, int rank, Launcher launcher,
                const std::string& place) {
    if (launcher != Launcher::mpirun) {
        check_gone(run, [&](const Process& p) { return p.rank >= 0 && p.rank != rank; });
        CHECK(job.seconds_since_mark() < timeout + grace);
        REQUIRE(job.signal(rank, SIGKILL));
    }
    check_failed(job, run, named(rank, place) + " is hung: " + last_words);
}

std::string without_signal_notes(std::string output) {
    const std::string note = "\nsaving, then ending; a second signal ends immediately\n";
    for (size_t at; (at = output.find(note)) != std::string::npos;) output.erase(at, note.size());
    return output;
}

void check_saved(FailingJob& job, const fs::path& run, const std::string& reason, int code) {
    const ProgramResult result = job.finish();
    INFO(result.output);
    CHECK(result.exit_code == code);
    const std::string output = without_signal_notes(result.output);
    CHECK(std::regex_search(
        output, std::regex("(^|\n)[^\n]*" + reason +
                           "[^\n]*: step [0-9]+ of [^\n]*the same command resumes from there")));
    CHECK(count(result.output, "train_gpt: ") == 0);
    check_gone(run);
}

std::string check_succeeds(const Arguments& command) {
    const ProgramResult result = run_program(command, surroundings);
    INFO(result.output);
    REQUIRE(result.exit_code == 0);
    return result.output;
}

int64_t newest_whole_checkpoint(const fs::path& run) {
    const std::vector<fs::path> checkpoints = list_checkpoints(run);
    REQUIRE(!checkpoints.empty());
    for (const fs::path& checkpoint : checkpoints) {
        CAPTURE(checkpoint.string());
        CHECK(error_of([&] { verify_checkpoint(checkpoint, Verify::everything); }) == "");
    }
    return checkpoint_step(checkpoints.front());
}

void check_resumes(int ranks, const fs::path& run) {
    const int64_t newest = newest_whole_checkpoint(run);
    const Arguments stop{"--stop-at", std::to_string(newest + 3)};
    CHECK(contains(check_succeeds(launch(ranks) + train(run, stop)),
                   "resuming from " + list_checkpoints(run).front().string()));
    REQUIRE(newest_whole_checkpoint(run) == newest + 3);

    const TemporaryDirectory other;
    const fs::path whole = other / "run";
    check_succeeds(launch(ranks) + train(whole, stop));
    REQUIRE(newest_whole_checkpoint(whole) == newest + 3);
    size_t compared = 0;
    for (const auto& entry : fs::directory_iterator(list_checkpoints(whole).front())) {
        if (entry.path().extension() != ".safetensors") continue;
        CAPTURE(entry.path().string());
        CHECK(file_difference(entry.path(),
                              list_checkpoints(run).front() / entry.path().filename()) == "");
        ++compared;
    }
    // the model, the grids, and each rank's part of the optimizer's state
    CHECK(compared == 2 + static_cast<size_t>(ranks));
}

}  // namespace train_gpt::failing_job
