#include <CLI/CLI.hpp>

#include "training/commands/command_options.h"
#include "training/commands/shared_options.h"

namespace train_gpt {

void add_verify_command(CLI::App& app, VerifyOptions& options) {
    CLI::App* verify = app.add_subcommand(
        "verify",
        "Compare data, checkpoints or exported models with the hashes recorded when they were "
        "written, and a run with its history; of a checkpoint, print what it was made from");
    verify
        ->add_option(
            "what", options.what,
            "A run's folder (its history, and by that its configuration, checkpoints, tokenizer "
            "and data), a checkpoint, an exported model, a folder made by `tokenize`, its "
            "data.json, or token shards (a quoted pattern)")
        ->required()
        ->transform(path())
        ->type_name("RUN|CHECKPOINT|MODEL|DATA");
    verify->add_flag("--json", options.json,
                     "Print one JSON object: whether everything holds, what is broken first, and "
                     "what the checkpoint was made from");
    verify->add_flag("--without-data", options.without_data,
                     "Of a run, do not read the tokenizer and the token shards");
    verify
        ->add_option("--head", options.head,
                     "Of a run: a hash that verify has printed before; a line of the history must "
                     "still have it")
        ->type_name("SHA256");
    verify
        ->add_option("--binary", options.binary,
                     "Of a run: a program, which must be the one that trained the newest steps")
        ->transform(path())
        ->type_name("FILE");
    verify
        ->add_option("--run", options.run,
                     "Of an exported model: the folder of the run that it must be from")
        ->transform(path())
        ->type_name("RUN");
}

}  // namespace train_gpt
