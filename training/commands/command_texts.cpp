#include "training/commands/command_texts.h"

#include <algorithm>
#include <sstream>

#include <CLI/CLI.hpp>

namespace train_gpt {

namespace {

/// The words of "TEXT:{documents,tail}".
std::vector<std::string> words_of(const std::string& type) {
    const size_t open = type.find('{'), close = type.find('}', open);
    if (open == type.npos || close == type.npos) return {};
    std::vector<std::string> words;
    std::istringstream list(type.substr(open + 1, close - open - 1));
    for (std::string word; std::getline(list, word, ',');) words.push_back(word);
    return words;
}

OptionText text_of(const CLI::Option& option) {
    OptionText text;
    for (const std::string& name : option.get_snames()) text.names.push_back("-" + name);
    for (const std::string& name : option.get_lnames()) text.names.push_back("--" + name);
    const std::string type = option.get_type_name();
    if (text.names.empty() || option.get_expected_max() > 0) {
        text.value = type.substr(0, type.find(':'));
        text.words = words_of(type);
        constexpr const char* files[] = {
            "TEXT", "PATH",     "FILE",   "FILE…",     "DIR",        "CONFIG",
            "RUN",  "GLOB|DIR", "SOURCE", "NAME|FILE", "CHECKPOINT", "RUN|CHECKPOINT|MODEL|DATA"};
        // The TEXT of an option is text, and that of an argument files of texts.
        text.is_file = text.words.empty() && (text.value != "TEXT" || text.names.empty()) &&
                       std::find(std::begin(files), std::end(files), text.value) != std::end(files);
        text.takes_keys = text.value.starts_with("KEY");
    }
    text.is_required = option.get_required();
    text.takes_many = option.get_expected_max() > 1;
    text.meaning = option.get_description();
    if (text.meaning.find("efault: ") == text.meaning.npos)
        text.fallback = option.get_default_str();
    return text;
}

std::vector<OptionText> options_of(const CLI::App& app) {
    std::vector<OptionText> options;
    for (const CLI::Option* option : app.get_options())
        if (!option->get_group().empty()) options.push_back(text_of(*option));  // not hidden
    return options;
}

}  // namespace

std::vector<OptionText> program_options(const CLI::App& app) { return options_of(app); }

std::vector<CommandText> command_texts(const CLI::App& app) {
    std::vector<CommandText> commands;
    for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
        // A command without a footer of its own has the program's.
        const std::string footer = command->get_footer();
        commands.push_back({command->get_name(), command->get_description(),
                            footer == app.get_footer() ? "" : footer, options_of(*command)});
    }
    return commands;
}

}  // namespace train_gpt
