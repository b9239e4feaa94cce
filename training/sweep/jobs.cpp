#include "training/sweep/jobs.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/child_process.h"
#include "base/error.h"

namespace train_gpt {

/// Where the parent of this process had ignored SIGCHLD, exit codes would be lost.
Jobs::Jobs() { std::signal(SIGCHLD, SIG_DFL); }

Jobs::~Jobs() {
    signal(SIGTERM);
    while (running() > 0) poll();
}

void Jobs::start(size_t job, const Command& command) {
    std::vector<std::string> words{""};
    words.insert(words.end(), command.arguments.begin(), command.arguments.end());
    const int output =
        ::open(command.output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (output < 0)
        throw Error("cannot write ", command.output.string(), ": ", std::strerror(errno));
    try {
        const pid_t pid = start_process({.command = words,
                                         .environment = command.environment,
                                         .output = output,
                                         .error = output,
                                         .death_signal = SIGTERM});
        processes_.push_back({.job = job, .slot = free_slot(), .pid = pid});
    } catch (const Error&) {
        ::close(output);
        throw;
    }
    ::close(output);
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
        const Ended ended{process->job, pid < 0 ? 1 : exit_code_of(status)};
        processes_.erase(process);
        return ended;
    }
    const timespec pause{0, 20'000'000};  // a signal ends it
    ::nanosleep(&pause, nullptr);
    return {};
}

}  // namespace train_gpt
