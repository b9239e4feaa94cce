#include "training/commands/command_options.h"

#include <cstdint>
#include <string>

#include <CLI/CLI.hpp>

#include "training/commands/look_options.h"
#include "training/commands/plan_options.h"
#include "training/commands/report_options.h"
#include "training/commands/shared_options.h"
#include "training/commands/supervise_options.h"
#include "training/config/from_depth.h"

namespace train_gpt {

namespace {

// An upper bound for counts that reads well in messages.
constexpr int64_t most = int64_t{1} << 53;

void add_tokenize_command(CLI::App& app, CommandLine& line) {
    CLI::App* tokenize =
        app.add_subcommand("tokenize", "Turn texts into token shards, and train a vocabulary");
    tokenize
        ->add_option("texts", line.prepare.texts,
                     "Files, folders, quoted patterns, or - for standard input. .jsonl and "
                     ".ndjson: JSON Lines; .json: JSON Lines or one array; .parquet: Parquet; "
                     "others: plain text; each but Parquet also with .gz or .zst")
        ->required()
        ->transform(path())
        ->type_name("TEXT");
    tokenize
        ->add_option("--field", line.prepare.field,
                     "Field of JSON Lines, or column of Parquet, that has the text (default: "
                     "text). If given, standard input and files with unknown extensions are read "
                     "as JSON Lines")
        ->type_name("NAME");
    auto* vocab =
        tokenize
            ->add_option(
                "--train-vocab", line.prepare.train_vocab,
                "Train a byte-level BPE vocabulary of at most this many tokens on the text")
            ->type_name("N");
    tokenize
        ->add_option(
            "--tokenizer", line.prepare.tokenizer,
            "Use this vocabulary: tokenizer.json, *.tiktoken, or a folder with either, or with "
            "vocab.json and merges.txt")
        ->transform(path())
        ->type_name("PATH")
        ->excludes(vocab);
    tokenize
        ->add_option("--begin-token", line.prepare.begin_token,
                     "Special token before each document, or none. Default: as the "
                     "vocabulary's files say")
        ->type_name("TEXT");
    tokenize
        ->add_option("--end-token", line.prepare.end_token,
                     "Special token after each document. Default: as the vocabulary's files "
                     "say, else <|endoftext|> or <|end_of_text|>")
        ->type_name("TEXT");
    tokenize
        ->add_option("--out", line.prepare.out,
                     "Folder for tokenizer.json, train_*.bin, val_*.bin and data.json")
        ->required()
        ->transform(path())
        ->type_name("DIR");
    tokenize
        ->add_option("--val-fraction", line.prepare.val_fraction,
                     "Share of the text to keep for validation: 0 to 0.5, or 1")
        ->capture_default_str()
        ->type_name("F");
    tokenize
        ->add_option("--val-split", line.prepare.val_split,
                     "What to keep for validation. documents: those that a hash selects; tail: "
                     "the end of the text. Default: tail for a single document of plain text, "
                     "else documents")
        ->check(CLI::IsMember({"documents", "tail"}));
    tokenize->add_option("--shard-tokens", line.prepare.shard_tokens, "Tokens per shard")
        ->capture_default_str()
        ->type_name("N");
    tokenize->add_flag("--skip-bad", line.prepare.skip_bad,
                       "Leave out, and count, files that are not text, bad lines of JSON Lines "
                       "and rows of Parquet, and the rest of damaged files");
    tokenize->add_option("--threads", line.prepare.threads, "Encoding threads; 0: all")
        ->check(CLI::Range(0, 4096))
        ->capture_default_str()
        ->type_name("N");
}

void add_train_command(CLI::App& app, CommandLine& line) {
    CLI::App* train = app.add_subcommand("train", "Train a model, or resume a run from its folder");
    add_config(train, line);
    train
        ->add_option("--stop-at", line.stop_at,
                     "Save a checkpoint and end after this step; the schedule stays the same")
        ->type_name("STEP")
        ->check(CLI::Range(int64_t{1}, most));
    add_choices(train, line.choices);
    auto* profile =
        train
            ->add_option("--profile", line.profile,
                         "Profile this many steps, after two warm-up steps: print where time goes")
            ->type_name("STEPS")
            ->check(CLI::Range(int64_t{1}, int64_t{10000}));
    train
        ->add_option("--trace", line.trace,
                     "Trace this many steps, after two warm-up steps: write when each rank did "
                     "what, for https://ui.perfetto.dev, into the run's folder")
        ->type_name("STEPS")
        ->check(CLI::Range(int64_t{1}, int64_t{1000}));
    train->add_flag("--quiet", line.quiet, "Print warnings and errors only")->excludes(profile);
    train->add_flag("--print-config", line.print_config,
                    "Print the resolved configuration and exit");
}

void add_sweep_command(CLI::App& app, CommandLine& line) {
    CLI::App* sweep = app.add_subcommand(
        "sweep",
        "Train every combination of some keys' values, in folders of their own in run_dir");
    add_config(sweep, line);
    sweep
        ->add_option("--vary", line.sweep.vary,
                     "Values of a key: --vary optimizer.learning_rate=1e-3,2e-3,4e-3 (may be given "
                     "several times: every combination is trained)")
        ->type_name("KEY=VALUE,VALUE,…")
        ->expected(1)
        ->take_all()
        ->allow_extra_args(false);
    sweep
        ->add_option("--seeds", line.sweep.seeds,
                     "Runs of each combination, with the seeds from `seed` on")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str()
        ->type_name("N");
    sweep
        ->add_option("--jobs", line.sweep.jobs,
                     "Runs that train at the same time; they share the cores")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str()
        ->type_name("N");
    sweep->add_flag("--halve", line.sweep.halve,
                    "After a quarter and after half of the steps, stop the half of the "
                    "combinations whose training loss is worse");
    sweep->add_flag("--json", line.sweep.json, "Print the result as JSON");
}

void add_sample_command(CLI::App& app, CommandLine& line) {
    CLI::App* sample = app.add_subcommand("sample", "Generate text with a trained model");
    add_checkpoint(sample, line);
    add_prompt(sample, line,
               "Text to continue; empty: start a document. Without this option: on a terminal, "
               "asks for prompts; elsewhere empty");
    sample->add_option("--max-tokens", line.sampling.max_tokens, "Most tokens to generate")
        ->check(CLI::Range(1, 1 << 24))
        ->capture_default_str();
    sample
        ->add_option("--temperature", line.sampling.temperature,
                     "Divides the logits; 0: always the likeliest token")
        ->check(from_to(0, 1000))
        ->capture_default_str();
    sample
        ->add_option("--top-k", line.sampling.top_k,
                     "Draw only from the k likeliest tokens; 0: from all")
        ->check(CLI::Range(0, 1 << 24))
        ->capture_default_str();
    sample
        ->add_option("--top-p", line.sampling.top_p,
                     "Draw only from the likeliest tokens with this total probability")
        ->check(from_to(1e-9, 1))
        ->capture_default_str();
    sample->add_option("--seed", line.sampling.seed, "Seed of the random numbers")
        ->check(from_to(0, 0x1p64))
        ->capture_default_str();
    sample->add_option("--samples", line.samples, "Number of texts")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
}

void add_eval_command(CLI::App& app, CommandLine& line) {
    CLI::App* eval = app.add_subcommand(
        "eval", "Print a model's validation loss, and its scores on tasks and HellaSwag");
    add_checkpoint(eval, line);
    eval->add_option("--data", line.data,
                     "Token shards, or a folder made by `tokenize`, whose validation shards are "
                     "taken; default without --tasks: data.val of the run that wrote the "
                     "checkpoint")
        ->transform(path())
        ->type_name("GLOB|DIR");
    eval->add_option("--max-tokens", line.max_tokens, "Most tokens to evaluate; 0: all")
        ->check(CLI::Range(int64_t{0}, most))
        ->capture_default_str();
    eval->add_option("--tasks", line.evaluation.tasks,
                     "Tasks, which are files of questions and answers in JSON Lines "
                     "(docs/evaluations.md), or globs")
        ->transform(path())
        ->type_name("FILE…");
    eval->add_option("--items", line.evaluation.items,
                     "Write what the model decided on each item of the tasks to a file, as "
                     "JSON Lines")
        ->transform(path())
        ->type_name("FILE");
    eval->add_option("--hellaswag", line.hellaswag, "HellaSwag's published JSONL file")
        ->transform(path())
        ->type_name("FILE");
    eval->add_option("--max-examples", line.max_examples,
                     "Most items of each task, and most HellaSwag examples; 0: all")
        ->check(CLI::Range(int64_t{0}, most))
        ->capture_default_str();
    eval->add_flag("--json", line.evaluation.json, "Print one JSON object");
}

void add_import_command(CLI::App& app, CommandLine& line) {
    CLI::App* import = app.add_subcommand(
        "import",
        "Make a model folder from a Hugging Face model (GPT-2, Llama, Qwen 2 and 3, Mistral, "
        "Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss) or an llm.c model file");
    import
        ->add_option("source", line.importing.source,
                     "Folder with config.json and model.safetensors (fp32, bf16 or fp16; one file "
                     "or several), or an llm.c model file (*.bin)")
        ->required()
        ->transform(path())
        ->type_name("SOURCE");
    add_out(import, line.importing.out);
    import
        ->add_option("--tokenizer", line.importing.tokenizer,
                     "The model's tokenizer, as for `tokenize`; default: the one in SOURCE")
        ->transform(path())
        ->type_name("PATH");
    Upcycling& upcycling = line.importing.upcycling;
    CLI::Option* upcycle =
        import
            ->add_option("--upcycle", upcycling.n_expert,
                         "Make a mixture of so many experts, each a copy of its layer's MLP, of a "
                         "model without experts; its loss stays the same")
            ->check(CLI::Range(2, most_experts))
            ->type_name("N");
    import
        ->add_option("--experts-per-token", upcycling.n_expert_per_token,
                     "Experts that each token goes to")
        ->check(CLI::Range(1, most_experts_per_token))
        ->needs(upcycle)
        ->capture_default_str()
        ->type_name("K");
    import
        ->add_flag("--zero-router", upcycling.zero_router,
                   "Begin with routers of 0, which send all tokens to the first experts, instead "
                   "of random ones")
        ->needs(upcycle);
}

void add_export_command(CLI::App& app, CommandLine& line, ExportWords& words) {
    CLI::App* export_ =
        app.add_subcommand("export", "Write a model for Hugging Face's tools or llm.c");
    add_checkpoint_argument(export_, line.exporting.checkpoint);
    add_out(export_, line.exporting.out)
        ->description("Folder to write (new or empty); for llm.c a new file");
    export_
        ->add_option("--format", words.format,
                     "huggingface (config.json, model.safetensors, tokenizer) or llm.c")
        ->check(CLI::IsMember({"huggingface", "llm.c"}))
        ->capture_default_str();
    export_
        ->add_option("--dtype", words.dtype,
                     "fp32, bf16 or fp16; default: the dtype of the checkpoint's weights")
        ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
    words.max_shard_size_option =
        export_
            ->add_option("--max-shard-size", words.max_shard_size,
                         "Split the weights into files of at most this size, such as 500MB or "
                         "2GiB; a larger tensor gets its own file")
            ->type_name("BYTES")
            ->capture_default_str();
}

void add_selfcheck_command(CLI::App& app, CommandLine& line) {
    CLI::App* selfcheck =
        app.add_subcommand("selfcheck",
                           "Measure each rank's device and the links between ranks, also under "
                           "mpirun or srun; exits with 1 if a rank is slow in two measurements");
    add_device(selfcheck, line);
    selfcheck
        ->add_option("--tolerance", line.selfcheck.tolerance,
                     "How far a rank may be below the median of all ranks")
        ->check(from_to(0, 100))
        ->capture_default_str()
        ->type_name("PERCENT");
    selfcheck
        ->add_option("--save", line.selfcheck.save,
                     "Write what was measured as a cluster for plan --cluster FILE")
        ->transform(path())
        ->type_name("FILE");
    selfcheck
        ->add_option("--max-bytes", line.selfcheck.max_bytes,
                     "Size of the largest buffer to copy or communicate")
        ->check(CLI::Range(int64_t{1} << 16, int64_t{1} << 40))
        ->capture_default_str()
        ->type_name("BYTES");
    selfcheck
        ->add_option(
            "--tensor", line.selfcheck.mesh.tensor,
            "Measure the collectives along the axes of a mesh with this parallel.tensor too")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str()
        ->type_name("RANKS");
    selfcheck
        ->add_option("--context", line.selfcheck.mesh.context,
                     "The same with this parallel.context")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str()
        ->type_name("RANKS");
    selfcheck
        ->add_option("--pipeline", line.selfcheck.mesh.pipeline,
                     "The same with this parallel.pipeline")
        ->check(CLI::Range(1, 4096))
        ->capture_default_str()
        ->type_name("RANKS");
    selfcheck
        ->add_option("--shard-ranks", line.selfcheck.mesh.shard_ranks,
                     "The same with this parallel.shard_ranks")
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str()
        ->type_name("RANKS");
}

void add_replay_command(CLI::App& app, CommandLine& line) {
    CLI::App* replay = app.add_subcommand(
        "replay",
        "Run steps of a run again, in a folder of their own, on any ranks, and name the first "
        "difference to what the run recorded; exits with 1 if there is one");
    replay->add_option("run", line.replay.run, "The folder of the run, which stays as it is")
        ->required()
        ->transform(path())
        ->type_name("RUN");
    replay
        ->add_option("--to", line.replay.to,
                     "The last step; the first one follows the newest checkpoint before it")
        ->required()
        ->type_name("STEP")
        ->check(CLI::Range(int64_t{1}, most));
    replay
        ->add_option("--into", line.replay.into,
                     "The folder to write. Default: replay-STEP, in the run's folder")
        ->transform(path())
        ->type_name("DIR");
    add_choices(replay, line.choices);
    add_overrides(replay, line.replay.overrides);
}

void add_config_command(CLI::App& app, CommandLine& line) {
    CLI::App* config =
        app.add_subcommand("config", "Explain all configuration keys, a section or one key");
    auto* key =
        config->add_option("key", line.key, "A key, such as optimizer.learning_rate, or a section")
            ->type_name("KEY");
    auto* markdown = config
                         ->add_flag("--markdown", line.markdown,
                                    "Print a page in Markdown instead (docs/keys.md)")
                         ->excludes(key);
    auto* schema = config
                       ->add_flag("--schema", line.schema,
                                  "Print the JSON Schema instead (configs/schema.json)")
                       ->excludes(key)
                       ->excludes(markdown);
    config
        ->add_option("--depth", line.depth,
                     "Print a configuration for a model of so many layers instead, by published "
                     "rules; stderr says by which")
        ->check(CLI::Range(1, most_depth))
        ->type_name("LAYERS")
        ->excludes(key)
        ->excludes(markdown)
        ->excludes(schema);
}

void add_completion_command(CLI::App& app, std::string& shell) {
    app.add_subcommand("completion",
                       "Print a script that completes commands, options and keys in a shell")
        ->add_option("shell", shell,
                     "bash: source <(train_gpt completion bash); fish: train_gpt completion fish | "
                     "source; zsh: write it to a file _train_gpt in a folder of $fpath")
        ->required()
        ->check(CLI::IsMember({"bash", "zsh", "fish"}))
        ->type_name("SHELL");
}

}  // namespace

void add_commands(CLI::App& app, CommandLine& line, OptionWords& words) {
    add_tokenize_command(app, line);
    add_train_command(app, line);
    add_sweep_command(app, line);
    add_supervise_command(app, line);
    add_plan_command(app, line, words.gpu_memory);
    add_sample_command(app, line);
    add_look_command(app, line);
    add_eval_command(app, line);
    add_import_command(app, line);
    add_export_command(app, line, words.exporting);
    add_selfcheck_command(app, line);
    add_verify_command(app, line.verifying);
    add_report_command(app, line);
    add_replay_command(app, line);
    add_config_command(app, line);
    add_completion_command(app, words.shell);
}

}  // namespace train_gpt
