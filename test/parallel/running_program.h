// What a test program does with the program that it runs when a signal ends the test program.
#pragma once

namespace train_gpt {

/// Ends the program for which run_program() waits. Ctrl-C at a terminal does not reach it.
void end_running_program();

}  // namespace train_gpt
