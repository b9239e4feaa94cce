#include "training/commands/look_options.h"

#include <CLI/CLI.hpp>

#include "training/commands/shared_options.h"

namespace train_gpt {

void add_look_command(CLI::App& app, CommandLine& line) {
    CLI::App* look = app.add_subcommand(
        "look",
        "Write a page about what a model computes of a text: each token's loss and what was "
        "expected, attention of each head, the residual stream, the choices of routers");
    add_checkpoint(look, line);
    add_prompt(look, line, "Text to look at; at most its first 128 tokens");
    look->add_option("--out", line.page, "File to write")
        ->transform(path())
        ->capture_default_str()
        ->type_name("FILE");
}

}  // namespace train_gpt
