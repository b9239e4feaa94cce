// The commands and options as text, and what is made from them: scripts that complete a command in
// a shell, and the manual page.
#pragma once
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace train_gpt {

/// With what the program exits.
inline constexpr const char* exit_codes =
    "0 done; 1 failed; 2 wrong usage; 3 a second signal ended it at once, and what was not saved "
    "is lost; 75 stopped early (SIGTERM, SIGUSR1, SIGHUP, schedule.max_minutes) with everything "
    "saved: run the same command again; 130 the same after Ctrl-C";

struct OptionText {
    std::vector<std::string> names;  // "--out", "-h"; empty: an argument of the command
    std::string value;               // what follows the name, such as FILE; empty: nothing
    std::vector<std::string> words;  // the values, if there are only a few
    std::string meaning, fallback;   // `fallback`: the default; empty: none, or `meaning` says it
    bool is_file = false;            // whether values are paths
    bool takes_keys = false;         // whether values are KEY=VALUE
    bool is_required = false, takes_many = false;  // of its words: at least one, and several
};
struct CommandText {
    std::string name, meaning;
    std::string more;  // what the help says after the options
    std::vector<OptionText> options;
};

/// The commands of the program, as CLI11 knows them.
std::vector<CommandText> command_texts(const CLI::App& app);

/// The options of the program itself, such as --version.
std::vector<OptionText> program_options(const CLI::App& app);

/// A script that completes commands, options, keys of the configuration and their words. shell:
/// "bash", "zsh" or "fish".
std::string completion_script(const CLI::App& app, const std::string& shell);

/// The manual page train_gpt(1), for man and groff.
std::string manual_page(const CLI::App& app);

}  // namespace train_gpt
