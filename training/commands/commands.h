// The commands that need more than one call, except `train`. Each command has a file. Each function
// takes the command line and returns the exit code.
#pragma once
#include "training/commands/command_line.h"

namespace train_gpt::commands {

/// Turns texts into token shards.
int tokenize(const CommandLine& line);

/// Prints the configuration's keys as help, as a JSON Schema or as Markdown; or a configuration.
int config(const CommandLine& line);

/// Prints what a run will need. Then throws Error if the run cannot start here.
int plan(const CommandLine& line);

/// Prints texts that a trained model generates.
int sample(const CommandLine& line);

/// Writes a page about what a trained model computes of a text.
int look(const CommandLine& line);

/// Prints the validation loss of a trained model, or its scores on tasks.
int eval(const CommandLine& line);

/// Writes a page about runs, or compares two.
int report(const CommandLine& line);

/// Trains every combination of some keys' values, and says which is best.
int sweep(const CommandLine& line);

/// Runs `train` on several hosts, and again without the hosts that are lost.
int supervise(const CommandLine& line);

/// Measures the ranks of a cluster and compares them.
int selfcheck(const CommandLine& line);

}  // namespace train_gpt::commands
