// What shells and man get: completion scripts and the manual page.
#include <algorithm>
#include <sstream>

#include "test/commands/program.h"
#include "training/config/config_help.h"

using namespace train_gpt;

namespace {

std::string script_for(const std::string& shell) {
    return check_succeeds(train_gpt_with({"completion", shell})).out;
}

/// Whether a program is installed, which `what` needs; says so if it is not.
bool is_installed(const std::string& program, const std::string& what) {
    if (run_program({"sh", "-c", concat("command -v ", program)}).exit_code == 0) return true;
    WARN("skipped: " << what << ", since there is no " << program);
    return false;
}

/// What bash offers for the last of these words, one a line.
std::string bash_offers(const std::string& script, const Arguments& words) {
    std::string quoted;
    for (const std::string& word : words) quoted += concat(" '", word, "'");
    const ProgramResult result =
        run_program({"bash", "-c",
                     concat("set -u; source '", script, "'; COMP_WORDS=(train_gpt", quoted,
                            "); COMP_CWORD=", words.size(),
                            "; _train_gpt train_gpt; printf '%s\\n' \"${COMPREPLY[@]:-}\"")});
    CAPTURE(quoted, result.output);
    CHECK(result.exit_code == 0);
    return "\n" + result.output;
}

/// The words that a key may have, from its rule: one of "auto", "cpu" or "cuda".
std::vector<std::string> words_of(const KeyDescription& key) {
    std::vector<std::string> words;
    if (!key.rule.starts_with("one of")) return words;
    std::istringstream parts(key.rule);
    std::string between;
    for (std::string word; std::getline(parts, between, '"') && std::getline(parts, word, '"');)
        words.push_back(word);
    return words;
}

/// The names of a command's options, as its help lists them.
std::vector<std::string> options_of(const std::string& command) {
    const std::string help = check_succeeds(train_gpt_with({command, "--help"})).out;
    std::vector<std::string> options;
    for (size_t at = 0; (at = help.find("\n  ", at)) != help.npos; ++at) {
        const size_t name = help.find_first_not_of(' ', at + 1),
                     end = help.find_first_of(" \n", name);
        std::string option = help.substr(name, end - name);
        if (option.starts_with("-h,")) option = option.substr(3);
        if (option.starts_with("--")) options.push_back(option);
    }
    CHECK(options.size() > 1);
    return options;
}

const Arguments commands{"tokenize",  "train",  "sweep",  "supervise", "plan",
                         "sample",    "look",   "eval",   "import",    "export",
                         "selfcheck", "verify", "report", "replay",    "config"};

}  // namespace

TEST_CASE("bash completes commands, options, keys, their words and presets", "[cli]") {
    const TemporaryDirectory directory;
    const std::string script = directory / "completion";
    write(script, script_for("bash"));
    const auto offers = [&](const Arguments& words) { return bash_offers(script, words); };
    for (const std::string& command : commands) {
        CAPTURE(command);
        CHECK(contains(offers({command.substr(0, 2)}), "\n" + command + "\n"));
        const std::vector<std::string> options = options_of(command);
        const std::string& option =
            options[static_cast<size_t>(random_int(0, std::ssize(options) - 1))];
        CAPTURE(option);
        CHECK(contains(offers({command, "x", option.substr(0, option.size() - 1)}),
                       "\n" + option + "\n"));
    }
    CHECK(offers({"sa"}) == "\nsample\n");
    CHECK(offers({"tokenize", "--val-split", "t"}) == "\ntail\n");
    CHECK(offers({"tokenize", "--val-split", "=", "t"}) == "\ntail\n");
    CHECK(offers({"train", "gpt2-15"}) == "\ngpt2-1558m\n");
    CHECK(offers({"completion", "b"}) == "\nbash\n");
    CHECK(offers({"train", "c", "--out", "n"}) == "\n\n");  // names of files, which bash knows
    CHECK(offers({"train", "--data", "gpt2-15"}) == "\n\n");
    CHECK(offers({"sweep", "--seeds", "gpt2-15"}) == "\n\n");
    CHECK(offers({"plan", "--cluster", "h100"}) == "\nh100-dgx\n");
    CHECK(offers({"plan", "--gpu", "rtx50"}) == "\nrtx5090\n");
    for (const std::string option : {"--help", "--man", "--version"})
        CHECK(contains(offers({"--"}), "\n" + option + "\n"));

    const std::vector<KeyDescription> keys = describe_keys();
    const KeyDescription& key = keys[static_cast<size_t>(random_int(0, std::ssize(keys) - 1))];
    CAPTURE(key.path);
    const std::string begun = key.path.substr(0, key.path.size() - 1);
    CHECK(contains(offers({"train", "c", "--set", begun}), "\n" + key.path + "=\n"));
    CHECK(contains(offers({"config", begun}), "\n" + key.path + "\n"));
    for (const std::string& word : words_of(key)) {
        CHECK(contains(offers({"train", "c", "--set", key.path, "="}), "\n" + word + "\n"));
        CHECK(contains(offers({"sweep", "c", "--vary", key.path, "=", word}), "\n" + word + "\n"));
    }
    CHECK(offers({"train", "c", "--set", "optimizer.name", "=", "m"}) == "\nmuon\n");
    CHECK(offers({"train", "c", "--set", "model.tied_head", "=", "of"}) == "\noff\n");
}

TEST_CASE("scripts for zsh and fish name every command, option and key", "[cli]") {
    const TemporaryDirectory directory;
    for (const std::string shell : {"zsh", "fish"}) {
        CAPTURE(shell);
        const std::string script = script_for(shell);
        for (const std::string& command : commands) {
            CAPTURE(command);
            const std::string case_of = shell == "zsh"
                                            ? "\n    " + command + ") _arguments"
                                            : "'__fish_seen_subcommand_from " + command + "'";
            CHECK(contains(script, case_of));
            for (const std::string& option : options_of(command)) {
                CAPTURE(option);
                CHECK(contains(script,
                               shell == "zsh" ? "'*" + option : " -l " + option.substr(2) + " "));
            }
        }
        for (const std::string option : {"--help", "--man", "--version"})
            CHECK(contains(
                script, shell == "zsh" ? "        '" + option + ":" : " -l " + option.substr(2)));
        for (const KeyDescription& key : describe_keys())
            CHECK(contains(script, concat(" ", key.path, "=")));
        if (!is_installed(shell, "what " + shell + " says of its script")) continue;
        write(directory / shell, script);
        const ProgramResult checked = run_program({shell, "-n", directory / shell});
        CAPTURE(checked.output);
        CHECK(checked.exit_code == 0);
        CHECK(checked.output.empty());
        if (shell != "fish") continue;
        const ProgramResult offers =
            run_program({"fish", "-c",
                         concat("source ", directory / "fish",
                                "; complete -C 'train_gpt train c --set optimizer.name=m'")});
        CHECK(contains(offers.output, "optimizer.name=muon"));
    }
}

TEST_CASE("the manual page has every command, option and key, and roff has nothing to say about it",
          "[cli]") {
    const std::string page = check_succeeds(train_gpt_with({"--man"})).out;
    CHECK(page.starts_with(".TH TRAIN_GPT 1 "));
    const auto plain = [](std::string text) {
        for (size_t at = 0; (at = text.find("\\-", at)) != text.npos;) text.erase(at, 1);
        return text;
    };
    const std::string text = plain(page);
    for (const std::string& command : commands) {
        CHECK(contains(text, "\n.SS " + command + "\n"));
        for (const std::string& option : options_of(command)) {
            CAPTURE(command, option);
            CHECK(contains(text, "\\fB" + option + "\\fR"));
        }
    }
    for (const KeyDescription& key : describe_keys()) {
        CAPTURE(key.path);
        CHECK(contains(text, "\\fB" + key.path + "\\fR = "));
    }
    for (const std::string option : {"--help", "--man", "--version"})
        CHECK(contains(text, "\\fB" + option + "\\fR\n"));
    CHECK(contains(text, ".B train_gpt supervise\n[\\fIoptions\\fR] -- train \\fICONFIG\\fR\n"));
    for (const std::string line :
         {"tokenize\n[\\fIoptions\\fR] \\fITEXT…\\fR \\fB--out\\fR \\fIDIR\\fR\n",
          "report\n[\\fIoptions\\fR] \\fIRUN…\\fR\n",
          "replay\n[\\fIoptions\\fR] \\fIRUN\\fR \\fB--to\\fR \\fISTEP\\fR\n",
          "config\n[\\fIoptions\\fR] [\\fIKEY\\fR]\n"})
        CHECK(contains(text, ".B train_gpt " + line));
    CHECK(contains(text, "\nFile to write. Default: look.html\n"));
    CHECK(contains(text, "\nEncoding threads; 0: all. Default: 0\n"));
    CHECK_FALSE(contains(text, "--on-host"));  // for the program alone
    CHECK_FALSE(contains(page, "`"));
    if (!is_installed("groff", "what roff says of the manual page")) return;
    const TemporaryDirectory directory;
    write(directory / "train_gpt.1", page);
    const ProgramResult checked = run_program(
        {"groff", "-man", "-ww", "-Tutf8", "-K", "utf8", "-z", directory / "train_gpt.1"});
    CHECK(checked.output == "");
}

TEST_CASE("a shell that is not known is refused", "[cli]") {
    check_refused(train_gpt_with({"completion", "csh"}), 2, {"csh", "train_gpt completion --help"});
    check_refused(train_gpt_with({"completion"}), 2, {"shell"});
}
