#include "training/commands/shared_options.h"

#include <cstdlib>

#include <CLI/CLI.hpp>

#include "base/error.h"
#include "base/path.h"

namespace train_gpt {

CLI::Validator from_to(double low, double high) {
    return CLI::Validator(
        [=](const std::string& text) -> std::string {
            char* end = nullptr;
            const double value = std::strtod(text.c_str(), &end);
            if (end != text.c_str() && *end == '\0' && value >= low && value <= high) return "";
            return concat("\"", text, "\" is not a number from ", low, " to ", high);
        },
        "");
}

CLI::Validator path() {
    return CLI::Validator(
        [](std::string& text) -> std::string {
            try {
                text = expand_home(text);
                return "";
            } catch (const Error& error) {
                return error.what();
            }
        },
        "");
}

void add_overrides(CLI::App* app, std::vector<std::string>& overrides) {
    app->add_option(
           "--set", overrides,
           "Override a key: --set optimizer.learning_rate=3e-4 (may be given several times)")
        ->type_name("KEY=VALUE")
        ->expected(1)
        ->take_all()
        ->allow_extra_args(false);
}

void add_choices(CLI::App* app, std::string& choices) {
    app->add_option(
           "--choices", choices,
           "Take the choices (micro-batch, recompute level, ZeRO's stage, sums, kernels) of "
           "this run or checkpoint")
        ->transform(path())
        ->type_name("RUN");
}

void add_config(CLI::App* app, CommandLine& line) {
    app->add_option("config", line.config,
                    "JSON configuration, or the name of a preset, such as gpt2-124m")
        ->required()
        ->transform(path())
        ->type_name("CONFIG");
    app->add_option("--data", line.data,
                    "A folder made by `tokenize`: stands for data.train, data.val and "
                    "tokenizer.path (--set overrides them)")
        ->transform(path())
        ->type_name("DIR");
    add_overrides(app, line.overrides);
}

void add_device(CLI::App* app, CommandLine& line) {
    app->add_option("--device", line.device, "auto, cpu or cuda")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
        ->capture_default_str();
}

CLI::Option* add_out(CLI::App* app, std::string& out) {
    return app->add_option("--out", out, "Folder to write (new or empty)")
        ->required()
        ->transform(path())
        ->type_name("DIR");
}

void add_checkpoint_argument(CLI::App* app, std::string& checkpoint) {
    app->add_option("checkpoint", checkpoint,
                    "A checkpoint, a run's folder (its newest checkpoint), or the folder of a "
                    "Hugging Face model")
        ->required()
        ->transform(path())
        ->type_name("CHECKPOINT");
}

void add_checkpoint(CLI::App* app, CommandLine& line) {
    add_checkpoint_argument(app, line.checkpoint);
    add_device(app, line);
    app->add_option("--dtype", line.dtype,
                    "auto (as in the files; fp32 where they hold fp16 or several), bf16 or fp32")
        ->check(CLI::IsMember({"auto", "bf16", "fp32"}))
        ->capture_default_str();
}

void add_prompt(CLI::App* app, CommandLine& line, const std::string& description) {
    auto* prompt = app->add_option("--prompt", line.prompt, description);
    app->add_option("--prompt-file", line.prompt_file,
                    "File with that text, without the line break at its end; -: standard input")
        ->transform(path())
        ->type_name("FILE")
        ->excludes(prompt);
}

}  // namespace train_gpt
