// Runs of this program as child processes, several at a time.
#pragma once
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

namespace train_gpt {

class Jobs {
  public:
    struct Command {
        std::vector<std::string> arguments;    // after the program's name
        std::filesystem::path output;          // stdout and stderr are appended to it
        std::vector<std::string> environment;  // "NAME=value", besides this process's variables
    };
    struct Ended {
        size_t job;  // as given to start()
        int code;    // the exit code, or minus the signal that ended the process
    };

    Jobs();
    /// Asks the processes that are left to end, and waits for them.
    ~Jobs();
    Jobs(const Jobs&) = delete;
    Jobs& operator=(const Jobs&) = delete;

    /// Starts a process, with a process group of its own: Ctrl-C on a terminal reaches only this
    /// process. A process whose parent is killed gets SIGTERM. Throws Error if it cannot be
    /// started.
    void start(size_t job, const Command& command);
    size_t running() const { return processes_.size(); }
    /// The smallest number from 0 that no running process has.
    size_t free_slot() const;
    /// Sends a signal to all processes.
    void signal(int number) const;
    /// The next process that has ended, if one has. Waits up to about 20 ms for it.
    std::optional<Ended> poll();

  private:
    struct Process {
        size_t job, slot;
        pid_t pid;
    };
    std::vector<Process> processes_;
};

}  // namespace train_gpt
