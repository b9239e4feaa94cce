// The commands besides `train` that are more than one call, a file each. Each takes the command
// line and gives the exit code.
#pragma once
#include "training/command_line.h"

namespace train_gpt::commands {

/// Texts into token shards.
int tokenize(const CommandLine& line);

/// The configuration's keys: as help, as a JSON Schema, or as Markdown.
int config(const CommandLine& line);

/// What a run will take. Throws Error, after it has printed that, where the run cannot start here.
int plan(const CommandLine& line);

/// Texts that a trained model writes.
int sample(const CommandLine& line);

/// Validation loss and HellaSwag of a trained model.
int eval(const CommandLine& line);

/// The ranks of a cluster measured beside each other.
int selfcheck(const CommandLine& line);

}  // namespace train_gpt::commands
