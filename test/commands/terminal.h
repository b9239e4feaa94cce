// The program on a terminal: a pseudo-terminal of variable size, on which the test types.
#pragma once
#include <functional>
#include <string>

#include <sys/types.h>

#include "test/commands/program.h"

namespace train_gpt {

/// Whether a test cannot use pseudo-terminals, which may be missing in a container; prints that
/// once. Such a test begins with
///     if (skip_without_terminals()) return;
bool skip_without_terminals();

class TerminalProcess {
  public:
    TerminalProcess(const Arguments& arguments, int columns);
    ~TerminalProcess();  // kills it
    TerminalProcess(const TerminalProcess&) = delete;
    TerminalProcess& operator=(const TerminalProcess&) = delete;

    /// Everything that the terminal has received so far, with "\r\n" as "\n".
    const std::string& screen() const { return screen_; }
    void type(const std::string& keys);
    /// Changes the width, and reads everything printed so far.
    void resize(int columns);

    /// Reads until the condition holds; false if the process ended without it, or after two
    /// minutes.
    bool wait_until(const std::function<bool()>& condition);
    /// Reads to the end; the exit code, or minus the signal that ended it.
    int finish();

  private:
    /// Waits a little for output. False at the end of the output, and for 0 milliseconds also if
    /// there is none now.
    bool read_more(int milliseconds = 100);

    int terminal_ = -1;
    pid_t pid_ = -1;
    std::string screen_;
};

/// The lines of a screen that were drawn over each other, in their order, without the sequences
/// that erase. Messages between them, such as one about a spike of the loss, end with a new line
/// and are left out.
Arguments drawn_lines(const std::string& screen);

}  // namespace train_gpt
