// The manual page train_gpt(1): roff with the macros of man(7).
#include <CLI/CLI.hpp>

#include "base/error.h"
#include "base/version.h"
#include "training/commands/command_texts.h"
#include "training/config/config_help.h"

namespace train_gpt {

namespace {

/// A text as roff has it: no character is taken as a request, and hyphens of options stay hyphens.
/// Words in Markdown's backticks become bold.
std::string roff(const std::string& text, bool is_name = false) {
    std::string out;
    bool bold = false;
    for (const char c : text) {
        if (c == '\\')
            out += "\\e";
        else if (c == '-' && is_name)
            out += "\\-";
        else if (c == '`')
            out += (bold = !bold) ? "\\fB" : "\\fR";
        else if (c == '\n')
            out += ' ';
        else
            out += c;
    }
    return out.starts_with('.') || out.starts_with('\'') ? "\\&" + out : out;
}

std::string bold(const std::string& name) { return "\\fB" + roff(name, true) + "\\fR"; }

std::string italic(const std::string& value) { return "\\fI" + roff(value, true) + "\\fR"; }

/// An argument, or an option that a command needs, as the synopsis has it: " --out DIR", " TEXT…",
/// " [KEY]"; empty for other options.
std::string in_synopsis(const OptionText& option) {
    if (option.names.empty()) {
        const std::string value = italic(option.value + (option.takes_many ? "…" : ""));
        return " " + (option.is_required ? value : "[" + value + "]");
    }
    if (!option.is_required) return "";
    return " " + bold(option.names.front()) + " " + italic(option.value);
}

std::string described(const OptionText& option) {
    std::string head;
    for (const std::string& name : option.names) head += (head.empty() ? "" : ", ") + bold(name);
    std::string value = option.value;
    if (!option.words.empty()) {
        value.clear();
        for (const std::string& word : option.words) value += (value.empty() ? "" : "|") + word;
    }
    if (!value.empty()) head += concat(head.empty() ? "" : " ", italic(value));
    const std::string fallback =
        option.fallback.empty() ? "" : ". Default: " + roff(option.fallback, true);
    return concat(".TP\n", head, "\n", roff(option.meaning), fallback, "\n");
}

}  // namespace

std::string manual_page(const CLI::App& app) {
    const std::vector<CommandText> commands = command_texts(app);
    std::string text =
        concat(".TH TRAIN_GPT 1 \"\" \"train_gpt ", roff(version()), "\" \"User Commands\"\n",
               ".SH NAME\ntrain_gpt \\- pretrain language models\n.SH SYNOPSIS\n");
    for (const CommandText& command : commands) {
        text += concat(".B train_gpt ", command.name, "\n");
        std::string arguments;
        for (const OptionText& option : command.options) arguments += in_synopsis(option);
        // The command reads the words after -- itself.
        if (command.name == "supervise") arguments = " \\-\\- train \\fICONFIG\\fR";
        text += concat("[\\fIoptions\\fR]", arguments, "\n.br\n");
    }
    text += concat(".SH DESCRIPTION\n", roff(app.get_description()), "\n.SH OPTIONS\n");
    for (const OptionText& option : program_options(app)) text += described(option);
    text += ".SH COMMANDS\n";
    for (const CommandText& command : commands) {
        text += concat(".SS ", command.name, "\n", roff(command.meaning), "\n");
        for (const OptionText& option : command.options) text += described(option);
        if (!command.more.empty()) text += concat(".PP\n", roff(command.more), "\n");
    }
    text +=
        ".SH CONFIGURATION\nKeys of the JSON file, which \\fB\\-\\-set\\fR "
        "\\fIKEY\\fR=\\fIVALUE\\fR "
        "overrides, with their defaults.\n";
    for (const KeyDescription& key : describe_keys())
        text += concat(".TP\n", bold(key.path), " = ", roff(key.fallback, true), "\n",
                       roff(key.meaning + " (" + key.rule + ")"), "\n");
    text += concat(".SH EXIT STATUS\n", roff(exit_codes), "\n");
    return text;
}

}  // namespace train_gpt
