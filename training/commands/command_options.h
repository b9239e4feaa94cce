// The options of each command: their names, their help, and the checks of single values.
#pragma once
#include <string>

#include "training/commands/command_line.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace train_gpt {

/// Options of `export` that are parsed after the whole command line is known.
struct ExportWords {
    std::string format = "huggingface", dtype, max_shard_size = "5GB";
    const CLI::Option* max_shard_size_option = nullptr;
};

/// Words of options that are parsed after the whole command line is known.
struct OptionWords {
    ExportWords exporting;
    std::string gpu_memory;  // plan --memory
    std::string shell;       // completion
};

/// Declares the command `verify` (verify_options.cpp).
void add_verify_command(CLI::App& app, VerifyOptions& options);
/// Declares the commands and their options, which set `line` and `words` when `app` parses.
void add_commands(CLI::App& app, CommandLine& line, OptionWords& words);

}  // namespace train_gpt
