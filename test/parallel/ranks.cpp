#include "test/parallel/ranks.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "device/cuda.h"
#include "parallel/net/socket.h"
#include "test/catch.h"
#include "test/kernels/test_device.h"
#include "test/random.h"

namespace train_gpt {

namespace {

using Clock = std::chrono::steady_clock;

/// The process group of the program that run_program() started last; 0: it has ended.
std::atomic<pid_t> running = 0;

/// While it lives, Ctrl-C or SIGTERM ends the running program with this process. Catch2's own
/// handler would print what failed, and a second signal during that could wait for a lock for ever.
class EndsRunningProgram {
  public:
    EndsRunningProgram() {
        static pid_t owner;  // a fork of this process does not end its parent's program
        owner = ::getpid();
        struct sigaction ends {};
        ends.sa_handler = [](int number) {
            if (const pid_t group = running; group > 0 && ::getpid() == owner)
                ::kill(-group, SIGTERM);
            std::signal(number, SIG_DFL);
            ::raise(number);  // ends this process when the handler returns
        };
        sigemptyset(&ends.sa_mask);
        for (const int signal : signals) sigaddset(&ends.sa_mask, signal);
        for (size_t i = 0; i < signals.size(); ++i) ::sigaction(signals[i], &ends, &before_[i]);
    }
    ~EndsRunningProgram() {
        for (size_t i = 0; i < signals.size(); ++i) ::sigaction(signals[i], &before_[i], nullptr);
    }
    EndsRunningProgram(const EndsRunningProgram&) = delete;
    EndsRunningProgram& operator=(const EndsRunningProgram&) = delete;

  private:
    static constexpr std::array<int, 2> signals{SIGINT, SIGTERM};
    std::array<struct sigaction, 2> before_;
};

std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> all;
    for (std::string& text : texts) all.push_back(text.data());
    all.push_back(nullptr);
    return all;
}

std::vector<std::string> merged(const Environment& added) {
    std::vector<std::string> all;
    for (char** entry = ::environ; *entry; ++entry) {
        const std::string text = *entry;
        if (!added.contains(text.substr(0, text.find('=')))) all.push_back(text);
    }
    for (const auto& [name, value] : added) all.push_back(concat(name, "=", value));
    return all;
}

bool is_open_mpi() {
    static const bool is =
        run_program({"mpirun", "--version"}).output.find("Open MPI") != std::string::npos;
    return is;
}

constexpr const char* started_as_ranks = "TEST_CASE_ON_RANKS";

bool say(const std::string& line) {
    std::printf("%s\n", line.c_str());
    return std::fflush(stdout) == 0;
}

}  // namespace

std::string this_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

const std::string& mpirun_obstacle() {
    static const std::string obstacle = []() -> std::string {
#ifdef TRAIN_GPT_MPI
        if (run_program({"sh", "-c", "command -v mpirun"}).exit_code == 0) return "";
        return "there is no mpirun";
#else
        return "this build has no MPI";
#endif
    }();
    return obstacle;
}

bool skip_without_mpirun() {
    if (mpirun_obstacle().empty()) return false;
    static const bool said =
        say(concat("skipped: cases that need mpirun, since ", mpirun_obstacle()));
    return said;
}

bool has_python() {
    static const bool has = run_program({"python3", "--version"}).exit_code == 0;
    return has;
}

bool skip_without_python() {
    if (has_python()) return false;
    static const bool said = say("skipped: tests of Python scripts, since there is no python3");
    return said;
}

bool skip_outside_ranks() {
    if (std::getenv(started_as_ranks)) return false;
    static const bool said =
        say("skipped: hidden cases that are parts of others, which start them as ranks");
    return said;
}

ScopedEnvironment::ScopedEnvironment(const Environment& variables) {
    for (const auto& [name, value] : variables) {
        if (const char* before = std::getenv(name.c_str()))
            before_[name] = before;
        else
            unset_.push_back(name);
        ::setenv(name.c_str(), value.c_str(), 1);
    }
}

ScopedEnvironment::~ScopedEnvironment() {
    for (const auto& [name, value] : before_) ::setenv(name.c_str(), value.c_str(), 1);
    for (const auto& name : unset_) ::unsetenv(name.c_str());
}

ProgramResult run_program(const std::vector<std::string>& command, const Environment& environment) {
    constexpr double deadline_seconds = 1800;
    const EndsRunningProgram ends_with_this;
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw Error("a test cannot make a pipe");
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, ends[1], STDERR_FILENO);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawnattr_t attributes;  // its own process group, so that all of it can be ended
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    std::vector<std::string> arguments = command, variables = merged(environment);
    const Clock::time_point start = Clock::now();
    const auto seconds = [&] {
        return std::chrono::duration<double>(Clock::now() - start).count();
    };
    pid_t child = -1;
    const int failure = ::posix_spawnp(&child, command[0].c_str(), &files, &attributes,
                                       pointers(arguments).data(), pointers(variables).data());
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    ::close(ends[1]);
    if (failure != 0) {
        ::close(ends[0]);
        return {127, command[0] + " cannot be started", 0};
    }
    running = child;

    ProgramResult result;
    bool is_late = false;
    for (;;) {
        // mpirun ends its ranks when it is asked to end; whatever does not end within 5 s is
        // killed.
        const double limit = deadline_seconds + (is_late ? 5 : 0);
        pollfd waiting{ends[0], POLLIN, 0};
        const int ready =
            ::poll(&waiting, 1, std::max(0, static_cast<int>(1e3 * (limit - seconds())) + 1));
        if (ready < 0 && errno == EINTR) continue;
        if (ready == 0) {
            ::kill(-child, is_late ? SIGKILL : SIGTERM);
            if (is_late) break;
            is_late = true;
            continue;
        }
        char text[4096];
        const ssize_t n = ::read(ends[0], text, sizeof text);
        if (n <= 0) break;
        result.output.append(text, static_cast<size_t>(n));
    }
    ::close(ends[0]);
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    running = 0;
    result.seconds = seconds();
    result.exit_code = is_late               ? -1
                       : WIFSIGNALED(status) ? 128 + WTERMSIG(status)
                                             : WEXITSTATUS(status);
    return result;
}

bool skip_without_gpus([[maybe_unused]] size_t n) {
#ifdef TRAIN_GPT_CUDA
    return test_devices().size() == 1 || cuda::identities().size() < n;
#else
    return true;
#endif
}

std::vector<std::string> mpirun(int n) {
    std::vector<std::string> all{"mpirun", "-np", std::to_string(n)};
    if (is_open_mpi()) {
        all.insert(all.end(), {"--oversubscribe", "--bind-to", "none"});
        if (::geteuid() == 0) all.emplace_back("--allow-run-as-root");
    }
    return all;
}

const char* name_of(Launcher launcher) {
    switch (launcher) {
        case Launcher::mpirun:
            return "mpirun";
        case Launcher::torchrun:
            return "torchrun";
        case Launcher::slurm:
            return "slurm";
        case Launcher::own:
            break;
    }
    return "own";
}

std::vector<Launcher> launchers() {
    std::vector<Launcher> all{Launcher::torchrun, Launcher::slurm, Launcher::own};
    if (mpirun_obstacle().empty()) all.push_back(Launcher::mpirun);
    return all;
}

Launcher usual_launcher() { return mpirun_obstacle().empty() ? Launcher::mpirun : Launcher::own; }

int free_port() {
    // The largest that `supervise --port` takes; a system also gives out higher ones.
    constexpr int largest = 60000;
    for (;;)
        if (const int port = net::port_of(net::listen_on(0)); port <= largest) return port;
}

std::vector<std::string> launch(int n, Launcher launcher) {
    if (launcher == Launcher::mpirun) return mpirun(n);
    // Ends with the exit code of the lowest rank that fails.
    static const std::string script = R"(how=$0 n=$1 port=$2; shift 2
ranks=()
for ((r = 0; r < n; r++)); do
    case $how in
        own) place=(TRAIN_GPT_RANK=$r TRAIN_GPT_WORLD=$n TRAIN_GPT_ADDRESS=127.0.0.1:$port) ;;
        torchrun) place=(RANK=$r WORLD_SIZE=$n LOCAL_RANK=$r LOCAL_WORLD_SIZE=$n
            MASTER_ADDR=localhost MASTER_PORT=$port
            TORCHELASTIC_RUN_ID=test TORCHELASTIC_USE_AGENT_STORE=True) ;;
        slurm) place=(SLURM_PROCID=$r SLURM_NTASKS=$n SLURM_STEP_NUM_TASKS=$n SLURM_LOCALID=$r
            SLURM_JOB_ID=$port SLURM_STEP_ID=0 SLURM_JOB_NODELIST=localhost) ;;
    esac
    env "${place[@]}" "$@" &
    ranks+=($!)
done
trap 'kill -USR1 "${ranks[@]}" 2> /dev/null; signalled=1' USR1
trap 'kill -TERM "${ranks[@]}" 2> /dev/null; signalled=1' TERM
code=0
for rank in "${ranks[@]}"; do
    signalled=1
    while [ "$signalled" ]; do
        signalled=
        wait "$rank"
        its=$?
    done
    [ $code != 0 ] || code=$its
done
exit $code
)";
    return {
        "bash", "-c", script, name_of(launcher), std::to_string(n), std::to_string(free_port())};
}

ProgramResult run_ranks(int n, const std::vector<std::string>& command, Environment environment,
                        Launcher launcher) {
    std::vector<std::string> all = launch(n, launcher);
    all.insert(all.end(), command.begin(), command.end());
    environment.emplace(started_as_ranks, "1");
    environment.emplace("OMP_NUM_THREADS", "1");
    environment.emplace("TEST_SEED", std::to_string(test_rng()() >> 1));
    environment.emplace("ASAN_OPTIONS", "detect_leaks=0");  // MPI's library leaks memory
    environment.emplace("TRAIN_GPT_SECRET", test_secret);
    return run_program(all, environment);
}

ProgramResult run_case_on_ranks(int n, const std::string& test_case, Environment environment,
                                Launcher launcher) {
    return run_ranks(n, {this_program(), test_case}, std::move(environment), launcher);
}

void check_case_on_ranks(int n, const std::string& test_case, const Environment& environment) {
    const ProgramResult result = run_case_on_ranks(n, test_case, environment);
    INFO(result.output);
    CHECK(result.exit_code == 0);
}

}  // namespace train_gpt
