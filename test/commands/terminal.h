// The program on a terminal: a pseudo-terminal of a size that can be changed, whose keys the test presses.
#pragma once
#include <functional>
#include <string>

#include <sys/types.h>

#include "test/commands/program.h"

namespace train_gpt {

/// Whether a test must do without pseudo-terminals, which a container may lack; says so, once. It begins with
///     if (skip_without_terminals()) return;
bool skip_without_terminals();

class TerminalProcess {
  public:
    TerminalProcess(const Arguments& arguments, int columns);
    ~TerminalProcess();  // kills it
    TerminalProcess(const TerminalProcess&) = delete;
    TerminalProcess& operator=(const TerminalProcess&) = delete;

    /// Everything that the terminal was sent so far, "\r\n" as "\n".
    const std::string& screen() const { return screen_; }
    void type(const std::string& keys);
    /// And reads what was printed before.
    void resize(int columns);

    /// Reads until the condition holds; false when the process ended without it, or after two minutes.
    bool wait_until(const std::function<bool()>& condition);
    /// Reads to the end; the exit code, or minus the signal that ended it.
    int finish();

  private:
    /// Waits a little for what the program prints; false at its end, or where it shall not wait and nothing is there.
    bool read_more(int milliseconds = 100);

    int terminal_ = -1;
    pid_t pid_ = -1;
    std::string screen_;
};

/// The lines of a screen as they were drawn one over the other, without the sequences that erase.
Arguments drawn_lines(const std::string& screen);

}  // namespace train_gpt
