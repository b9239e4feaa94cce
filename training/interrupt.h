// Signals that end the program: SIGINT, SIGTERM, SIGUSR1 (batch systems send it before the time
// limit) and SIGHUP (the terminal was closed). SIGHUP ends nothing if the program was started to
// ignore it.
#pragma once
#include <csignal>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace train_gpt {

/// The exit code of a command that stopped early with everything saved, so that the same command
/// continues: 130 after Ctrl-C, otherwise 75 (EX_TEMPFAIL of sysexits.h: try again).
constexpr int stopped_early_code(bool by_ctrl_c) { return by_ctrl_c ? 130 : 75; }
/// The exit code of a process that a second signal ended before everything was saved.
constexpr int ended_at_once_code = 3;

/// main() calls it first. From then until catch_interrupts(), a signal ends the process with
/// stopped_early_code() and a line that says that there was nothing to save. At first nobody knows
/// whether this process is one of several ranks. A signal that comes this early waits, until
/// act_on_signals() says that the process is alone, or until there is a SignalEnd.
void end_at_signals();
void act_on_signals();

/// From now on this process ends by itself, with an exit code that is known. A signal changes
/// nothing any more and prints nothing: mpirun sends a signal to all ranks as soon as one rank has
/// ended with an error. A second signal ends the process.
void end_by_itself();

/// For one of several ranks. While a SignalEnd lives, a signal before catch_interrupts() does not
/// end this process alone: a thread calls `end`, which ends all ranks. `end` gets the exit code and
/// the line to print. A second signal ends the process. The innermost SignalEnd counts.
class SignalEnd {
  public:
    using End = std::function<void(int code, const std::string& line)>;
    explicit SignalEnd(End end);
    ~SignalEnd();
    SignalEnd(const SignalEnd&) = delete;
    SignalEnd& operator=(const SignalEnd&) = delete;

  private:
    const End end_;
    int wake_, before_;
    bool has_ended_ = false;  // only the thread uses it until the thread has ended
    std::thread thread_;
};

/// From now on the first signal is remembered, and a line about it is printed on stderr. A second
/// signal ends the process immediately with ended_at_once_code and a line that says what is lost.
/// Writing to a closed pipe no longer ends the process: only the write fails.
void catch_interrupts();
/// Sets what the line about losses says: the last step that is saved (0: none is saved), and the
/// last step that is done.
void set_steps(int64_t saved, int64_t done);
/// The remembered signal's name ("SIGINT"); null if there was no signal.
const char* interrupted();
/// The remembered signal's number; 0 if there was no signal.
int interrupt_signal();

/// While an object exists, these signals do not end the process. The object remembers that a signal
/// came, and the signal interrupts a read that waits. There is one object at a time.
class SignalWatch {
  public:
    explicit SignalWatch(std::initializer_list<int> signals);
    ~SignalWatch();
    SignalWatch(const SignalWatch&) = delete;
    SignalWatch& operator=(const SignalWatch&) = delete;

    bool came() const;

  private:
    std::vector<std::pair<int, struct sigaction>> before_;
};

}  // namespace train_gpt
