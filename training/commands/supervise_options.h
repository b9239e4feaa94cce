// The options of `supervise`.
#pragma once
#include "training/commands/command_line.h"

namespace CLI {
class App;
}

namespace train_gpt {

/// Declares the command. What follows "--" is not among its options (parse_command_line.cpp).
void add_supervise_command(CLI::App& app, CommandLine& line);

}  // namespace train_gpt
