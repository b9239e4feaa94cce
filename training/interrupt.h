// Signals that end a run: SIGINT, SIGTERM, SIGUSR1 (what batch systems send before the time limit) and SIGHUP (a terminal that is
// closed), unless the run was started to ignore that.
#pragma once
#include <csignal>

namespace train_gpt {

/// From now on the first such signal is remembered (and answered on stderr), and a second one ends the process at once
/// with the exit code 128 + its number. Writing to a closed pipe is an error of that write alone.
void catch_interrupts();
/// The remembered signal's name ("SIGINT"), or null.
const char* interrupted();
/// Its number, or 0.
int interrupt_signal();

/// Exit code of a command that stopped early with everything saved, so that the same command continues: 130 after Ctrl-C, else
/// 75 (sysexits.h's EX_TEMPFAIL: try again).
constexpr int stopped_early_code(bool by_ctrl_c) { return by_ctrl_c ? 130 : 75; }

/// While one lives Ctrl-C (SIGINT) ends nothing: it is remembered, and interrupts a read that waits.
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
