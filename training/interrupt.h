// Signals that end a run: SIGINT, SIGTERM and SIGUSR1 (what batch systems send before the time limit).
#pragma once

namespace train_gpt {

/// From now on the first such signal is remembered (and answered on stderr), and a second one ends the process at once
/// with the exit code 128 + its number.
void catch_interrupts();
/// The remembered signal's name ("SIGINT"), or null.
const char* interrupted();

}  // namespace train_gpt
