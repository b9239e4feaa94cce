// Understanding a command line.
#pragma once
#include "training/commands/command_line.h"

namespace train_gpt {

/// Throws UsageError for a command line that cannot be understood.
CommandLine parse_command_line(int argc, char** argv);

}  // namespace train_gpt
