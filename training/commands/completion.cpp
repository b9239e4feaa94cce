// Scripts that complete commands in bash, zsh and fish.
#include <algorithm>

#include "base/error.h"
#include "training/commands/command_texts.h"
#include "training/config/config_keys.h"
#include "training/config/presets.h"
#include "training/plan/cluster.h"
#include "training/plan/datasheet.h"

namespace train_gpt {

namespace {

std::string joined(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
    return text;
}

/// A text in single quotes. `escaped` is what stands for a single quote.
std::string quoted(const std::string& text, const std::string& escaped) {
    std::string out = "'";
    for (const char c : text) out += c == '\'' ? escaped : std::string(1, c);
    return out + "'";
}
std::string in_posix_quotes(const std::string& text) { return quoted(text, "'\\''"); }

/// The words that a key may have; empty: any value.
std::vector<std::string> words_of(const ConfigKey& key) {
    std::vector<std::string> words;
    for (const std::string_view word : key.rule.words()) words.emplace_back(word);
    Config defaults;
    if (words.empty() && takes_switch(key, key.field(defaults))) words = {"on", "off"};
    return words;
}

/// "key=" for each key, and "key=word" for those with words.
std::vector<std::string> settings() {
    std::vector<std::string> all;
    for (const ConfigKey& key : config_keys()) {
        const std::vector<std::string> words = words_of(key);
        for (const std::string& word : words) all.push_back(concat(key.path, "=", word));
        if (words.empty()) all.push_back(concat(key.path, "="));
    }
    return all;
}

std::vector<std::string> key_names() {
    std::vector<std::string> names;
    for (const std::string_view section : config_sections()) names.emplace_back(section);
    for (const ConfigKey& key : config_keys()) names.emplace_back(key.path);
    return names;
}

/// What an argument can be, apart from the names of files.
std::vector<std::string> words_of(const OptionText& option) {
    if (!option.words.empty()) return option.words;
    if (option.value == "CONFIG") return preset_names();
    if (option.value == "KEY") return key_names();
    if (option.value == "GPU") return gpu_keys();
    if (option.value == "NAME|FILE") {
        std::vector<std::string> clusters = cluster_names();
        clusters.push_back("this");
        return clusters;
    }
    return {};
}

/// A command's words that need no option in front.
std::vector<std::string> argument_words(const CommandText& command) {
    std::vector<std::string> words;
    for (const OptionText& option : command.options)
        if (option.names.empty()) {
            const std::vector<std::string> more = words_of(option);
            words.insert(words.end(), more.begin(), more.end());
        }
    return words;
}

std::string for_bash(const std::vector<CommandText>& commands,
                     const std::vector<OptionText>& of_program) {
    std::string names, options, arguments, values, keys, words;
    for (const OptionText& option : of_program)
        names += (names.empty() ? "" : " ") + joined(option.names);
    for (const CommandText& command : commands) {
        names += " " + command.name;
        std::string own, others;
        for (const OptionText& option : command.options) {
            for (const std::string& name : option.names) {
                own += (own.empty() ? "" : " ") + name;
                if (option.takes_keys)
                    values += concat("        ", command.name, ":", name,
                                     ") words=$keys; compopt -o nospace ;;\n");
                else if (!words_of(option).empty())
                    values += concat("        ", command.name, ":", name, ") words='",
                                     joined(words_of(option)), "' ;;\n");
                else if (!option.value.empty())
                    others += concat(others.empty() ? "" : " | ", command.name, ":", name);
            }
        }
        // After these come names of files, which bash knows, or numbers and texts.
        if (!others.empty()) values += concat("        ", others, ") ;;\n");
        options += concat("        ", command.name, ") words='", own, "' ;;\n");
        if (const auto own_words = argument_words(command); !own_words.empty())
            arguments += concat("        ", command.name, ") words='", joined(own_words), "' ;;\n");
    }
    for (const ConfigKey& key : config_keys()) {
        keys += concat(keys.empty() ? "" : " ", key.path, "=");
        if (const auto of = words_of(key); !of.empty())
            words += concat("        ", key.path, ") words='", joined(of), "' ;;\n");
    }
    return concat(R"(# Completes train_gpt in bash: source <(train_gpt completion bash)
_train_gpt() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} words= key= keys=
    local command=${COMP_WORDS[1]}
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W ')",
                  names, R"(' -- "$word"))
        return
    fi
    # bash takes "key=value" as three words.
    if [ "$word" = = ]; then
        key=$before word=
    elif [ "$before" = = ]; then
        key=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    case $key in --*) before=$key key= ;; esac
    keys=')",
                  keys, R"('
    if [ -n "$key" ]; then
        case $key in
)",
                  words, R"(        esac
    else
        case $command:$before in
)",
                  values, R"(        *) case $word in
        -*) case $command in
)",
                  options, R"(        esac ;;
        *) case $command in
)",
                  arguments, R"(        esac ;;
        esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o bashdefault -o default -F _train_gpt train_gpt
)");
}

std::string for_zsh(const std::vector<CommandText>& commands,
                    const std::vector<OptionText>& of_program) {
    // A description ends at a bracket, and a part of a specification at a colon.
    const auto described = [](const std::string& text) {
        std::string out;
        for (const char c : text)
            out += (c == '[' || c == ']' || c == ':' || c == '\\' ? "\\" : "") + std::string(1, c);
        return out;
    };
    std::string names, options, cases;
    for (const OptionText& option : of_program)
        for (const std::string& name : option.names)
            options += "        " + in_posix_quotes(name + ":" + described(option.meaning)) + "\n";
    for (const CommandText& command : commands) {
        names +=
            "        " + in_posix_quotes(command.name + ":" + described(command.meaning)) + "\n";
        cases += concat("    ", command.name, ") _arguments");
        for (const OptionText& option : command.options) {
            const std::vector<std::string> words = words_of(option);
            std::string action = option.takes_keys          ? "_train_gpt_settings"
                                 : option.value == "CONFIG" ? "_train_gpt_configs"
                                 : option.is_file && !words.empty()
                                     ? concat("{compadd ", joined(words), "; _files}")
                                 : !words.empty() ? concat("(", joined(words), ")")
                                 : option.is_file ? "_files"
                                                  : " ";
            const std::string value = concat(":", described(option.value), ":", action);
            if (option.names.empty()) cases += " \\\n        " + in_posix_quotes("*" + value);
            for (const std::string& name : option.names)
                cases += " \\\n        " +
                         in_posix_quotes(concat("*", name, option.value.empty() ? "" : "=", "[",
                                                described(option.meaning), "]",
                                                option.value.empty() ? "" : value));
        }
        cases += " ;;\n";
    }
    return concat(R"(#compdef train_gpt
# Completes train_gpt in zsh. Put it into a folder of $fpath as _train_gpt:
#   train_gpt completion zsh > ~/.zsh/completions/_train_gpt
_train_gpt_settings() {
    local -a settings=( )",
                  joined(settings()), R"()
    compadd -S '' -a settings
}
_train_gpt_configs() {
    local -a presets=( )",
                  joined(preset_names()), R"()
    compadd -a presets
    _files
}
_train_gpt() {
    local -a commands=(
)",
                  names, R"(    )
    local -a options=(
)",
                  options, R"(    )
    if (( CURRENT == 2 )); then
        _describe -t commands command commands
        _describe -o option options
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
)",
                  cases, R"(    esac
}
if [ "$funcstack[1]" = _train_gpt ]; then
    _train_gpt "$@"
else
    compdef _train_gpt train_gpt
fi
)");
}

std::string for_fish(const std::vector<CommandText>& commands,
                     const std::vector<OptionText>& of_program) {
    const auto in_quotes = [](const std::string& text) {
        std::string doubled;
        for (const char c : text) doubled += (c == '\\' ? "\\" : "") + std::string(1, c);
        return quoted(doubled, "\\'");
    };
    std::string text =
        "# Completes train_gpt in fish: train_gpt completion fish | source\n"
        "set -l settings " +
        joined(settings()) + "\n";
    const auto named = [](const OptionText& option) {
        std::string names;
        for (const std::string& name : option.names)
            names += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
        return names;
    };
    for (const OptionText& option : of_program)
        text += concat("complete -c train_gpt -n __fish_use_subcommand", named(option), " -d ",
                       in_quotes(option.meaning), "\n");
    for (const CommandText& command : commands)
        text += concat("complete -c train_gpt -n __fish_use_subcommand -f -a ", command.name,
                       " -d ", in_quotes(command.meaning), "\n");
    for (const CommandText& command : commands) {
        const std::string of =
            concat("complete -c train_gpt -n '__fish_seen_subcommand_from ", command.name, "'");
        for (const OptionText& option : command.options) {
            const std::vector<std::string> words = words_of(option);
            if (option.names.empty() && words.empty()) continue;
            text += of + named(option);
            if (option.takes_keys)
                text += " -x -a \"$settings\"";
            else if (!words.empty())
                text += concat(option.names.empty() ? ""
                               : option.is_file     ? " -r -F"
                                                    : " -x",
                               " -a ", in_quotes(joined(words)));
            else if (!option.value.empty())
                text += option.is_file ? " -r -F" : " -x";
            text += " -d " + in_quotes(option.meaning) + "\n";
        }
    }
    return text;
}

}  // namespace

std::string completion_script(const CLI::App& app, const std::string& shell) {
    const std::vector<CommandText> commands = command_texts(app);
    const std::vector<OptionText> options = program_options(app);
    return shell == "bash"  ? for_bash(commands, options)
           : shell == "zsh" ? for_zsh(commands, options)
                            : for_fish(commands, options);
}

}  // namespace train_gpt
