// Signals that end the program: SIGINT, SIGTERM, SIGUSR1 (which batch systems send before the time
// limit) and SIGHUP (the terminal was closed) unless it was started to ignore it.
#pragma once
#include <csignal>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

namespace train_gpt {

/// The exit code of a command that stopped early with everything saved, so that the same command
/// continues: 130 after Ctrl-C, otherwise 75 (EX_TEMPFAIL of sysexits.h: try again).
constexpr int stopped_early_code(bool by_ctrl_c) { return by_ctrl_c ? 130 : 75; }
/// The exit code of a process that a second signal ended before everything was saved.
constexpr int ended_at_once_code = 3;

/// The first line of main(). Until catch_interrupts(), such a signal ends the process with
/// stopped_early_code() and a line that there was nothing to save: at act_on_signals(), which says
/// that it is not one of several ranks, or as soon as there is a SignalEnd, if it comes earlier.
void end_at_signals();
void act_on_signals();

/// While the innermost object lives, a signal before catch_interrupts() does not end this process
/// alone: a thread calls `end` with the exit code and the line to print, which ends all ranks. A
/// second signal ends the process.
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
    bool has_ended_ = false;  // the thread's own until it has ended
    std::thread thread_;
};

/// From now on the first such signal is remembered (and answered on stderr); a second one ends the
/// process immediately with ended_at_once_code and a line that says what is lost. Writing to a
/// closed pipe becomes an error of that write only.
void catch_interrupts();
/// What that line says: the last step that is saved (0: none is) and the last one that is done.
void set_steps(int64_t saved, int64_t done);
/// The remembered signal's name ("SIGINT"), or null.
const char* interrupted();
/// Its number, or 0.
int interrupt_signal();

/// While an object lives, Ctrl-C (SIGINT) ends nothing: it is remembered, and interrupts a waiting
/// read.
class CtrlCWatch {
  public:
    CtrlCWatch();
    ~CtrlCWatch();
    CtrlCWatch(const CtrlCWatch&) = delete;
    CtrlCWatch& operator=(const CtrlCWatch&) = delete;

    bool pressed() const;

  private:
    struct sigaction before_ {};
};

}  // namespace train_gpt
