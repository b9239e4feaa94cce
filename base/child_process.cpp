#include "base/child_process.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
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
std::vector<std::string> variables_of(const ChildProcess& child) {
    std::vector<std::string> variables;
    std::set<std::string> names;
    const auto add = [&](const std::string& variable) {
        if (names.insert(variable.substr(0, variable.find('='))).second)
            variables.push_back(variable);
    };
    for (const std::string& variable : child.environment) add(variable);
    names.insert(child.without.begin(), child.without.end());
    for (char** variable = environ; *variable; ++variable) add(*variable);
    return variables;
}

}  // namespace

pid_t start_process(const ChildProcess& child) {
    // Everything that allocates is done before fork().
    std::vector<std::string> arguments = child.command;
    const bool is_this_program = arguments.at(0).empty();
    if (is_this_program) arguments[0] = "train_gpt";
    const std::string program = is_this_program ? "/proc/self/exe" : arguments[0];
    std::vector<std::string> variables = variables_of(child);
    const std::vector<char*> argv = pointers_to(arguments), envp = pointers_to(variables);
    const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    // A signal for the new process waits until its main() has handlers, and unblocks it.
    sigset_t all, before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    const pid_t parent = ::getpid(), pid = ::fork();
    if (pid == 0) {
        if (child.own_session)
            ::setsid();
        else
            ::setpgid(0, 0);
        if (child.death_signal != 0) {
            ::prctl(PR_SET_PDEATHSIG, child.death_signal);
            if (::getppid() != parent) ::_exit(1);
        }
        sigset_t waiting;
        ::sigemptyset(&waiting);
        if (is_this_program)
            for (const int number : {SIGINT, SIGTERM, SIGUSR1, SIGHUP})
                ::sigaddset(&waiting, number);
        ::pthread_sigmask(SIG_SETMASK, &waiting, nullptr);
        ::dup2(child.input >= 0 ? child.input : nothing, STDIN_FILENO);
        if (child.output >= 0) ::dup2(child.output, STDOUT_FILENO);
        if (child.error >= 0) ::dup2(child.error, STDERR_FILENO);
        ::execvpe(program.c_str(), argv.data(), envp.data());
        ::_exit(127);
    }
    const int code = errno;
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    ::close(nothing);
    if (pid < 0) throw Error("cannot start a process: ", std::strerror(code));
    return pid;
}

int exit_code_of(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status); }

Pipe open_pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw Error("cannot make a pipe: ", std::strerror(errno));
    return {ends[0], ends[1]};
}

}  // namespace train_gpt
