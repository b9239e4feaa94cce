// The options of `plan`.
#pragma once
#include <string>

#include "training/commands/command_line.h"

namespace CLI {
class App;
}

namespace train_gpt {

/// Declares the command. memory: the words of --memory (parse_command_line.cpp).
void add_plan_command(CLI::App& app, CommandLine& line, std::string& memory);

}  // namespace train_gpt
