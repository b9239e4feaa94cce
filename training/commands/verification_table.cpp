#include "training/commands/verification_table.h"

#include <algorithm>
#include <system_error>

#include "base/error.h"
#include "base/formatted.h"
#include "base/printable.h"
#include "base/terminal_text.h"
#include "base/text_table.h"
#include "dataloader/shard.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr FileState all_states[] = {FileState::good, FileState::damaged, FileState::missing,
                                    FileState::no_hash};

std::string name_of_file(const RecordedFile& file, bool whole_path) {
    return printable_line(whole_path ? file.path.string() : file.path.filename().string());
}

}  // namespace

void VerificationTable::say(const std::string& lines) {
    if (out_) std::fputs(text_for_terminal(printable(lines), columns_of(out_)).c_str(), out_);
}

void VerificationTable::section(const std::string& title, const std::vector<RecordedFile>& files,
                                bool whole_paths) {
    say(printable_line(title) + "\n");
    size_t width = 0;
    for (const RecordedFile& file : files)
        width = std::max(width, width_of(name_of_file(file, whole_paths)));
    for (const RecordedFile& file : files)
        row(file, padded(name_of_file(file, whole_paths), width));
}

void VerificationTable::trouble(const std::string& title, const std::string& what) {
    say(printable_line(title) + "\n  damaged: " + printable_line(what) + "\n");
    if (first_trouble_.empty()) first_trouble_ = what;
    ++count(FileState::damaged);
}

void VerificationTable::row(const RecordedFile& file, const std::string& name) {
    const std::string beginning = "  " + name + "  ";
    if (out_) {
        std::fputs(beginning.c_str(), out_);
        std::fflush(out_);
    }
    std::error_code code;
    const uintmax_t bytes = fs::file_size(file.path, code);
    std::string reason;
    FileState state = FileState::damaged;
    try {
        state = verify_file(file);
        // Without a hash, at least the length in a shard's header can be checked.
        if (state == FileState::no_hash && file.path.extension() == ".bin")
            require_shard(file.path);
    } catch (const Error& error) {
        state = FileState::damaged;
        reason = concat(": ", error.what());
    }
    ++count(state);
    if (out_) {
        const std::string end = formatted("%15s  ", code ? "" : with_separators(bytes).c_str()) +
                                name_of(state) + printable_line(reason);
        // The beginning is printed already. A line that is broken after it has lost its spaces.
        const std::string shown = text_for_terminal(beginning + end, columns_of(out_));
        const auto from = std::ranges::mismatch(beginning, shown);
        const bool is_same =
            std::all_of(from.in1, beginning.end(), [](char c) { return c == ' '; });
        std::fprintf(out_, "%s\n",
                     is_same ? std::string(from.in2, shown.end()).c_str() : end.c_str());
    }
    if (state == FileState::good || state == FileState::no_hash) return;
    const std::string recorded =
        file.manifest.empty() ? std::string() : " in " + file.manifest.string();
    const std::string what =
        concat(file.path.string(),
               state == FileState::missing ? " is missing"
               : file.bytes && !code && bytes != *file.bytes
                   ? concat(" has ", bytes, " bytes instead of ", *file.bytes, recorded)
               : reason.empty() ? " differs from its hash" + recorded
                                : " is damaged" + reason);
    if (first_trouble_.empty()) first_trouble_ = what;
    bad_files_.push_back({{"path", file.path.string()}, {"state", name_of(state)}, {"what", what}});
}

Json VerificationTable::counts() const {
    Json counts = Json::object();
    for (const FileState state : all_states)
        if (const int n = counts_[static_cast<size_t>(state)]; n > 0) counts[name_of(state)] = n;
    return counts;
}

bool VerificationTable::close() {
    const bool bad = !first_trouble_.empty();
    std::string text;
    const Json all = counts();
    for (const auto& [name, n] : all.items())
        text += concat(text.empty() ? "" : ", ", n.get<int>(), " ", name);
    if (text.empty()) text = "there is nothing to verify";
    if (bad)
        text += "; copy these files again, or make them again";
    else if (count(FileState::no_hash) > 0)
        text += "; without a recorded hash there is nothing to compare with";
    say(text + "\n");
    return !bad;
}

}  // namespace train_gpt
