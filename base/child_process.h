// Processes that this program starts.
#pragma once
#include <string>
#include <vector>

#include <sys/types.h>

namespace train_gpt {

struct ChildProcess {
    /// The words of the command. An empty first word stands for this program, whatever its file is
    /// called; other programs are found through PATH.
    std::vector<std::string> command;
    std::vector<std::string> environment = {};  // "NAME=value", besides this process's variables
    std::vector<std::string> without = {};      // variables of this process that it does not get
    // What it reads and writes. The caller keeps and closes these descriptors, which should be
    // closed at exec. −1: /dev/null for the input, and this process's own for the others.
    int input = -1, output = -1, error = -1;
    // The signal that it gets if this process is killed; 0: none. A program that can handle
    // SIGINT, SIGTERM, SIGUSR1 and SIGHUP gets them only after its main() has unblocked them.
    int death_signal = 0;
    bool own_session = false;  // else it has a process group of its own
};

/// Starts a process that Ctrl-C on a terminal does not reach. Throws Error if there can be no more
/// processes. A process whose program cannot be run ends with exit code 127.
pid_t start_process(const ChildProcess& child);

/// An exit code, or minus the signal that ended the process, from waitpid()'s status.
int exit_code_of(int status);

/// A pipe whose ends are closed at exec.
struct Pipe {
    int reads = -1, writes = -1;
};
/// Throws Error if this process can open no more files.
Pipe open_pipe();

}  // namespace train_gpt
