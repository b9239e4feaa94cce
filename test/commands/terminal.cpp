#include "test/commands/terminal.h"

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

namespace train_gpt {

bool skip_without_terminals() {
    static const bool missing = [] {
        const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
        if (terminal >= 0) {
            ::close(terminal);
            return false;
        }
        std::printf("skipped: what is shown on a terminal, since /dev/pts is not mounted here\n");
        std::fflush(stdout);
        return true;
    }();
    return missing;
}

TerminalProcess::TerminalProcess(const Arguments& arguments, int columns) {
    terminal_ = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    REQUIRE(terminal_ >= 0);
    REQUIRE(::grantpt(terminal_) == 0);
    REQUIRE(::unlockpt(terminal_) == 0);
    const std::string name = ::ptsname(terminal_), program = binary();
    resize(columns);
    std::vector<char*> argv{const_cast<char*>(program.c_str())};
    for (const std::string& argument : arguments)
        argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
        ::setsid();
        ::setenv("OMP_NUM_THREADS", "1", 1);
        const int end = ::open(name.c_str(), O_RDWR);  // the controlling terminal of the session
        for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(end, fd);
        ::execv(program.c_str(), argv.data());
        ::_exit(127);
    }
}

TerminalProcess::~TerminalProcess() {
    if (pid_ > 0) {
        ::kill(pid_, SIGKILL);
        finish();
    }
    ::close(terminal_);
}

void TerminalProcess::type(const std::string& keys) {
    REQUIRE(::write(terminal_, keys.data(), keys.size()) == static_cast<ssize_t>(keys.size()));
}

void TerminalProcess::resize(int columns) {
    winsize size{};
    size.ws_row = 24;
    size.ws_col = static_cast<unsigned short>(columns);
    REQUIRE(::ioctl(terminal_, TIOCSWINSZ, &size) == 0);
    while (read_more(0)) {
    }
}

bool TerminalProcess::read_more(int milliseconds) {
    pollfd ready{terminal_, POLLIN, 0};
    if (::poll(&ready, 1, milliseconds) == 0) return milliseconds > 0;
    char text[4096];
    const ssize_t n = ::read(terminal_, text, sizeof text);  // fails once nobody has it open
    for (ssize_t i = 0; i < n; ++i) {
        screen_ += text[i];
        if (screen_.ends_with("\r\n")) screen_.replace(screen_.size() - 2, 2, "\n");
    }
    return n > 0;
}

bool TerminalProcess::wait_until(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(10);
    while (!condition())
        if (std::chrono::steady_clock::now() > deadline || !read_more()) return condition();
    return true;
}

int TerminalProcess::finish() {
    while (read_more()) {
    }
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

Arguments drawn_lines(const std::string& screen) {
    static const std::string erase = "\033[K";
    Arguments lines(1);
    for (size_t i = 0; i < screen.size(); ++i) {
        if (screen.compare(i, erase.size(), erase) == 0)
            i += erase.size() - 1;
        else if (screen[i] == '\n')
            lines.back().clear();
        else if (screen[i] != '\r')
            lines.back() += screen[i];
        else if (!lines.back().empty())
            lines.emplace_back();
    }
    return lines;
}

}  // namespace train_gpt
