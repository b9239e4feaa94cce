#include "training/commands/parse_command_line.h"

#include <algorithm>
#include <utility>

#include <CLI/CLI.hpp>

#include "base/error.h"
#include "training/commands/command_options.h"
#include "training/commands/command_texts.h"
#include "training/commands/misplaced_keys.h"
#include "training/commands/version_report.h"

namespace train_gpt {

namespace {

using Command = CommandLine::Command;

/// Parses a size such as 20000, 500MB or 2GiB.
uint64_t bytes_from(const std::string& text, const char* option) {
    constexpr std::pair<const char*, int64_t> units[] = {
        {"", 1},          {"KB", 1000},     {"MB", 1000 * 1000}, {"GB", 1000 * 1000 * 1000},
        {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}};
    constexpr int64_t most = int64_t{1} << 53;
    const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
    const int64_t count = digits > 0 && digits < 17 ? std::stoll(text.substr(0, digits)) : 0;
    for (const auto& [name, bytes] : units)
        if (text.substr(digits) == name && count > 0 && count <= most / bytes)
            return static_cast<uint64_t>(count * bytes);
    throw UsageError(option, ": \"", text, "\" is not a size such as 500MB or 2GiB");
}

/// Sets the options from their words. Throws UsageError for options that exclude each other.
void resolve(const ExportWords& words, ExportOptions& options) {
    for (const StoredTypeNames& names : stored_type_names)
        if (words.dtype == names.word) options.dtype = names.type;
    options.max_file_bytes = bytes_from(words.max_shard_size, "--max-shard-size");
    if (words.format == "llm.c") {
        options.format = ExportOptions::Format::llmc;
        if (words.max_shard_size_option->count() > 0)
            throw UsageError("--max-shard-size cuts Hugging Face's folders; llm.c's are one file");
        if (options.dtype == StoredType::fp16)
            throw UsageError(
                "llm.c's model files hold fp32 or bf16, not fp16; choose another --dtype");
    }
}

/// Throws UsageError for options of a report that exclude each other.
void require_comparable(const ReportOptions& report) {
    if (!report.tolerance && !report.gap) return;
    const char* option = report.tolerance ? "--tolerance" : "--gap";
    if (report.tolerance && report.gap)
        throw UsageError(
            "--tolerance compares each step, and --gap means over many; give one of them");
    if (report.runs.size() != 2)
        throw UsageError(option, " compares two runs, and ", report.runs.size(),
                         report.runs.size() == 1 ? " is" : " are", " named: train_gpt report A B ",
                         option, report.tolerance ? " 0" : " 0.01");
    if (!report.out.empty() || !report.picture.empty())
        throw UsageError("with ", option,
                         " no page is written, so --out and --picture have no use; leave them "
                         "out, or give them in a command of their own");
}

constexpr std::pair<const char*, Command> named_commands[] = {
    {"tokenize", Command::tokenize},   {"train", Command::train},
    {"sweep", Command::sweep},         {"supervise", Command::supervise},
    {"plan", Command::plan},           {"sample", Command::sample},
    {"look", Command::look},           {"eval", Command::eval},
    {"import", Command::import_},      {"export", Command::export_},
    {"selfcheck", Command::selfcheck}, {"verify", Command::verify},
    {"report", Command::report},       {"replay", Command::replay},
    {"config", Command::config},
};

}  // namespace

CommandLine parse_command_line(int argc, char** argv) {
    CommandLine line;
    // What follows "--" is a command of its own.
    if (argc > 1 && std::string(argv[1]) == "supervise") {
        char** const end = std::find(argv, argv + argc, std::string("--"));
        if (end != argv + argc) line.supervise.command.assign(end + 1, argv + argc);
        argc = static_cast<int>(end - argv);
    }
    CLI::App app(
        "Pretrains language models (GPT-2, Llama, Qwen, Mistral, mixtures of experts): one "
        "executable "
        "from raw text to a trained model.",
        "train_gpt");
    app.footer(concat("Each command has its own help: train_gpt train --help\n\nExit codes: ",
                      exit_codes));
    app.require_subcommand(0, 1);
    bool version_wanted = false;
    app.add_flag("--version", version_wanted,
                 "Print version, build, and the libraries and devices found");
    bool manual_wanted = false;
    app.add_flag("--man", manual_wanted, "Print the manual page: train_gpt --man | man -l -");

    OptionWords words;
    add_commands(app, line, words);

    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp& help) {
        const auto chosen = app.get_subcommands();
        line.output = chosen.empty() ? app.help() : chosen.front()->help(app.get_name());
        line.is_help = true;
        return line;
    } catch (const CLI::ParseError& error) {
        const auto chosen = app.get_subcommands();
        if (chosen.empty() && argc > 1 && argv[1][0] != '-') {
            std::string names;
            for (const auto& [name, command] : named_commands)
                names += concat(names.empty() ? "" : ", ", name);
            throw UsageError("there is no command \"", argv[1], "\"; the commands are ", names);
        }
        for (const CLI::App* command : chosen)
            if (command->get_name() == "train" || command->get_name() == "plan" ||
                command->get_name() == "sweep" || command->get_name() == "replay")
                refuse_keys(argc, argv);
        throw UsageError(error.what(), "; see train_gpt ",
                         chosen.empty() ? "" : chosen.front()->get_name() + " ", "--help");
    }
    if (version_wanted) {
        line.output = version_report();
    } else if (manual_wanted) {
        line.output = manual_page(app);
    } else if (!words.shell.empty()) {
        line.output = completion_script(app, words.shell);
    } else if (app.get_subcommands().empty()) {
        line.output = app.help();
        line.is_help = true;
    }
    for (const CLI::App* chosen : app.get_subcommands())
        for (const auto& [name, command] : named_commands)
            if (!version_wanted && chosen->get_name() == name) line.command = command;
    if (line.command == Command::tokenize && line.prepare.train_vocab == 0 &&
        line.prepare.tokenizer.empty())
        throw UsageError(
            "tokenize needs a vocabulary: give --train-vocab N to train one on the text, or "
            "--tokenizer PATH");
    resolve(words.exporting, line.exporting);
    if (!words.gpu_memory.empty()) line.gpu_bytes = bytes_from(words.gpu_memory, "--memory");
    require_comparable(line.report);
    return line;
}

}  // namespace train_gpt
