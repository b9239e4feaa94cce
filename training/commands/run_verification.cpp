#include "training/commands/run_verification.h"

#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/sha256.h"
#include "tokenizer/tokenizer.h"
#include "training/files/checkpoint.h"
#include "training/files/history_chain.h"
#include "training/files/history_check.h"
#include "training/files/made_from.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// Calls `check`, which returns what is wrong; an exception is something wrong, too.
template <class Check>
void expect(VerificationTable& table, const fs::path& title, const Check& check) {
    std::string trouble;
    try {
        trouble = check();
    } catch (const Error& error) {
        trouble = error.what();
    }
    if (!trouble.empty()) table.trouble(title.string(), trouble);
}

/// The chain itself, and --head.
void verify_history(const fs::path& run_dir, const HistoryChain& history,
                    const std::string& wanted_head, VerificationTable& table) {
    const fs::path file = run_dir / history_file;
    const size_t bytes = fs::exists(file) ? static_cast<size_t>(fs::file_size(file)) : 0;
    expect(table, file, [&]() -> std::string {
        if (history.broken) return describe_break(run_dir, *history.broken);
        if (const auto broken = broken_start(history)) return describe_break(run_dir, *broken);
        if (!wanted_head.empty() && !history.line_of(wanted_head))
            return concat(file.string(), " has no line with the hash ", wanted_head,
                          ": lines were changed or removed");
        return "";
    });
    if (!table.first_trouble().empty()) return;
    if (history.first == 0)
        table.say(concat(file.string(), fs::exists(file) ? " has no chain" : " is not there",
                         ": an older version wrote the run's history\n"));
    else
        table.say(concat(file.string(), "\n  ", history.lines.back().number,
                         " lines, chained from line ", history.first, "; the hash of the last is ",
                         history.head, "\n"));
    if (bytes > history.whole)
        table.say(
            "  the last line is written only in part; a run that resumes cuts it off and says "
            "so\n");
}

/// The string below two keys of an event; empty if there is none.
std::string text_below(const Json& event, const char* outer, const char* inner) {
    const Json of = event.value(outer, Json());
    const Json value = of.is_object() ? of.value(inner, Json()) : Json();
    return value.is_string() ? value.get<std::string>() : "";
}

std::string tokenizer_trouble(const fs::path& run_dir, const HistoryLine& start) {
    const Json hash = start.event.value("tokenizer_sha256", Json());
    const Json configuration = start.event.value("configuration", Json::object());
    const std::string given = text_below(configuration, "tokenizer", "path");
    if (!hash.is_string() || given.empty()) return "";
    fs::path path = given;
    if (!fs::exists(path)) path = fs::path(start.event.value("working_directory", "")) / given;
    const std::string recorded = hash.get<std::string>();
    if (sha256_of(Tokenizer::load(path.string()).to_json()) == recorded) return "";
    return concat(path.string(), " is not the tokenizer that line ", start.number, " of ",
                  (run_dir / history_file).string(), " records");
}

/// --binary, or a note if the program lies where it was and is another one.
void verify_binary(const fs::path& run_dir, const HistoryLine& start, const std::string& wanted,
                   VerificationTable& table) {
    const std::string hash = text_below(start.event, "binary", "sha256"),
                      path = text_below(start.event, "binary", "path"),
                      line =
                          concat("line ", start.number, " of ", (run_dir / history_file).string());
    if (!wanted.empty()) {
        expect(table, wanted, [&] {
            return sha256_of_file(wanted) == hash
                       ? ""
                       : concat(wanted, " is not the program that ", line, " records");
        });
        return;
    }
    std::error_code code;
    if (path.empty() || !fs::is_regular_file(path, code)) return;
    if (sha256_of_file(path) != hash)
        table.say(concat("note: ", path, " is no longer the program that ", line, " records\n"));
}

/// The checkpoint's files by its manifest, and the manifest by the history.
void verify_files(const fs::path& checkpoint, const HistoryChain& history,
                  VerificationTable& table) {
    try {
        const std::vector<RecordedFile> files = recorded_files(checkpoint);
        table.section(checkpoint.string(), files);
    } catch (const Error& error) {
        table.trouble(checkpoint.string(), error.what());
        return;
    }
    expect(table, checkpoint / "manifest.json",
           [&] { return checkpoint_trouble(checkpoint, history); });
}

/// Prints what a checkpoint was made from, and returns it; null if its files do not say.
Json say_made_from(const fs::path& checkpoint, const HistoryChain& history,
                   VerificationTable& table) {
    Json made;
    expect(table, checkpoint, [&] {
        made = made_from(checkpoint, history);
        table.say(describe_made_from(made));
        return "";
    });
    return made;
}

}  // namespace

bool is_run_folder(const fs::path& folder) {
    return fs::exists(folder / history_file) || !list_checkpoints(folder).empty();
}

Json verify_run(const fs::path& run_dir, const VerifyOptions& options, VerificationTable& table) {
    const HistoryChain history = read_history(run_dir);
    verify_history(run_dir, history, options.head, table);
    Json found = {{"history",
                   {{"lines", history.lines.empty() ? 0 : history.lines.back().number},
                    {"chained_from", history.first},
                    {"head", history.head}}}};
    const HistoryLine* start = history.first > 0 ? last_start(history) : nullptr;
    if (start) {
        expect(table, run_dir, [&] { return run_files_trouble(run_dir, history); });
        verify_binary(run_dir, *start, options.binary, table);
    } else if (!options.binary.empty()) {
        table.trouble(options.binary,
                      concat("the history of ", run_dir.string(), " records no program"));
    }
    const std::vector<fs::path> checkpoints = list_checkpoints(run_dir);
    for (const fs::path& checkpoint : checkpoints) verify_files(checkpoint, history, table);
    if (start && !options.without_data) {
        expect(table, run_dir, [&] { return tokenizer_trouble(run_dir, *start); });
        if (const auto files = data_files_of(run_dir, history); !files.empty())
            table.section("data", files, true);
    }
    // What a broken history says is not to be believed.
    if (!checkpoints.empty() && table.first_trouble().empty())
        found["made_from"] = say_made_from(checkpoints.front(), history, table);
    return found;
}

Json verify_one_checkpoint(const fs::path& checkpoint, VerificationTable& table) {
    const std::vector<RecordedFile> files = recorded_files(checkpoint);
    fs::path whole = fs::absolute(checkpoint).lexically_normal();
    if (!whole.has_filename()) whole = whole.parent_path();
    const fs::path run_dir = whole.parent_path();
    if (!fs::exists(run_dir / history_file)) {
        table.section(checkpoint.string(), files);
        return Json::object();
    }
    const HistoryChain history = read_history(run_dir);
    verify_history(run_dir, history, "", table);
    verify_files(whole, history, table);
    if (!table.first_trouble().empty()) return Json::object();
    return {{"made_from", say_made_from(whole, history, table)}};
}

}  // namespace train_gpt
