#include "training/sweep/jobs.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <set>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"

namespace train_gpt {

namespace {

/// Pointers to texts, and a null pointer at the end.
std::vector<char*> pointers_to(std::vector<std::string>& texts) {
    std::vector<char*> pointers;
    for (std::string& text : texts) pointers.push_back(text.data());
    pointers.push_back(nullptr);
    return pointers;
}

/// This process's variables, with others in place of those of the same names.
std::vector<std::string> variables_with(const std::vector<std::string>& others) {
    std::vector<std::string> variables;
    std::set<std::string> names;
    const auto add = [&](const std::string& variable) {
        if (names.insert(variable.substr(0, variable.find('='))).second)
            variables.push_back(variable);
    };
    for (const std::string& variable : others) add(variable);
    for (char** variable = environ; *variable; ++variable) add(*variable);
    return variables;
}

}  // namespace

/// Where the parent of this process had ignored SIGCHLD, exit codes would be lost.
Jobs::Jobs() { std::signal(SIGCHLD, SIG_DFL); }

Jobs::~Jobs() {
    signal(SIGTERM);
    while (running() > 0) poll();
}

void Jobs::start(size_t job, const Command& command) {
    // Everything that allocates is done before fork().
    std::vector<std::string> arguments{"train_gpt"};
    arguments.insert(arguments.end(), command.arguments.begin(), command.arguments.end());
    std::vector<std::string> variables = variables_with(command.environment);
    const std::vector<char*> argv = pointers_to(arguments), envp = pointers_to(variables);
    const int output =
        ::open(command.output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (output < 0)
        throw Error("cannot write ", command.output.string(), ": ", std::strerror(errno));
    const int input = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    // A signal for the new process waits until its main() has handlers, and unblocks it.
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    const pid_t parent = ::getpid(), pid = ::fork();
    if (pid == 0) {
        ::setpgid(0, 0);
        ::prctl(PR_SET_PDEATHSIG, SIGTERM);
        if (::getppid() != parent) ::_exit(1);
        sigset_t ending;
        ::sigemptyset(&ending);
        for (const int number : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) ::sigaddset(&ending, number);
        ::pthread_sigmask(SIG_SETMASK, &ending, nullptr);
        ::dup2(input, STDIN_FILENO);
        ::dup2(output, STDOUT_FILENO);
        ::dup2(output, STDERR_FILENO);
        ::execve("/proc/self/exe", argv.data(), envp.data());
        ::_exit(127);
    }
    const int code = errno;
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::close(output);
    ::close(input);
    if (pid < 0) throw Error("cannot start a process: ", std::strerror(code));
    processes_.push_back({.job = job, .slot = free_slot(), .pid = pid});
}

size_t Jobs::free_slot() const {
    size_t slot = 0;
    while (std::ranges::any_of(processes_, [&](const Process& p) { return p.slot == slot; }))
        ++slot;
    return slot;
}

void Jobs::signal(int number) const {
    for (const Process& process : processes_) ::kill(process.pid, number);
}

std::optional<Jobs::Ended> Jobs::poll() {
    for (auto process = processes_.begin(); process != processes_.end(); ++process) {
        int status = 0;
        const pid_t pid = ::waitpid(process->pid, &status, WNOHANG);
        if (pid == 0 || (pid < 0 && errno == EINTR)) continue;
        // Another part of this process may have taken the exit code (ECHILD).
        const Ended ended{process->job, pid < 0             ? 1
                                        : WIFEXITED(status) ? WEXITSTATUS(status)
                                                            : -WTERMSIG(status)};
        processes_.erase(process);
        return ended;
    }
    const timespec pause{0, 20'000'000};  // a signal ends it
    ::nanosleep(&pause, nullptr);
    return {};
}

}  // namespace train_gpt
