// The options of `report`.
#pragma once
#include "training/commands/command_line.h"

namespace CLI {
class App;
}

namespace train_gpt {

void add_report_command(CLI::App& app, CommandLine& line);

}  // namespace train_gpt
