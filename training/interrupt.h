// Signals that end a run: SIGINT, SIGTERM, SIGUSR1 (which batch systems send before the time limit)
// and SIGHUP (the terminal was closed) unless the run was started to ignore it.
#pragma once
#include <csignal>

namespace train_gpt {

/// From now on the first such signal is remembered (and answered on stderr); a second one ends the
/// process immediately with the exit code 128 + its number. Writing to a closed pipe becomes an
/// error of that write only.
void catch_interrupts();
/// The remembered signal's name ("SIGINT"), or null.
const char* interrupted();
/// Its number, or 0.
int interrupt_signal();

/// The exit code of a command that stopped early with everything saved, so that the same command
/// continues: 130 after Ctrl-C, otherwise 75 (EX_TEMPFAIL of sysexits.h: try again).
constexpr int stopped_early_code(bool by_ctrl_c) { return by_ctrl_c ? 130 : 75; }

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
