// Options that several commands have, and checks of single values.
#pragma once
#include <string>
#include <vector>

#include "training/commands/command_line.h"

namespace CLI {
class App;
class Option;
class Validator;
}  // namespace CLI

namespace train_gpt {

/// Checks numbers. CLI11's own check accepts NaN, and negative numbers for unsigned types.
CLI::Validator from_to(double low, double high);
/// Expands "~" in the path of an option, which the shell does not do after "=" or in quotes.
CLI::Validator path();

/// CONFIG, --data and --set, of `train`, `sweep` and `plan`.
void add_config(CLI::App* app, CommandLine& line);
void add_overrides(CLI::App* app, std::vector<std::string>& overrides);
void add_choices(CLI::App* app, std::string& choices);
void add_device(CLI::App* app, CommandLine& line);
/// --out: a new folder.
CLI::Option* add_out(CLI::App* app, std::string& out);
void add_checkpoint_argument(CLI::App* app, std::string& checkpoint);
/// The checkpoint's argument, --device and --dtype.
void add_checkpoint(CLI::App* app, CommandLine& line);
/// --prompt, with its description, and --prompt-file, of `sample` and `look`.
void add_prompt(CLI::App* app, CommandLine& line, const std::string& description);

}  // namespace train_gpt
