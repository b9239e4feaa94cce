// Signals that end a run: SIGINT, SIGTERM, SIGUSR1 (what batch systems send before the time limit) and SIGHUP (a terminal that is
// closed), unless the run was started to ignore that.
#pragma once

namespace train_gpt {

/// From now on the first such signal is remembered (and answered on stderr), and a second one ends the process at once
/// with the exit code 128 + its number. Writing to a closed pipe is an error of that write alone.
void catch_interrupts();
/// The remembered signal's name ("SIGINT"), or null.
const char* interrupted();
/// Its number, or 0.
int interrupt_signal();

}  // namespace train_gpt
