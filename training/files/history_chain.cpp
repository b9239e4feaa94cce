#include "training/files/history_chain.h"

#include <algorithm>
#include <ctime>
#include <map>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/sha256.h"
#include "training/files/checkpoint.h"
#include "training/files/run_folder.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// The "previous" of a line; empty if it has none, or is not a JSON object.
std::string previous_of(const Json& line) {
    const auto found = line.is_object() ? line.find("previous") : line.end();
    return line.is_object() && found != line.end() && found->is_string() ? found->get<std::string>()
                                                                         : std::string();
}

/// Reads lines one after the other, and finds the first one that does not follow.
class Reader {
  public:
    explicit Reader(std::string_view text) : text_(text) { chain_.head = sha256_of(""); }

    HistoryChain read() {
        for (size_t at = 0; at < text_.size();) {
            const size_t end = std::min(text_.find('\n', at), text_.size());
            // A torn line is neither JSON nor a part of the chain.
            if (end == text_.size() && !is_whole(text_.substr(at))) break;
            take(at, text_.substr(at, end - at));
            at = chain_.whole = std::min(end + 1, text_.size());
        }
        if (chain_.first == 0) chain_.head = sha256_of(text_.substr(0, chain_.whole));
        return std::move(chain_);
    }

  private:
    bool is_whole(std::string_view last) const {
        const Json json = try_parse_json(last);
        return json.is_object() && (chain_.first == 0 || !previous_of(json).empty());
    }

    void take(size_t at, std::string_view line) {
        ++number_;
        Json json = try_parse_json(line);
        const std::string previous = previous_of(json);
        std::string hash = sha256_of(line);
        if (!chain_.broken) {
            if (chain_.first > 0) {
                if (previous != chain_.head) break_off(previous);
            } else if (!previous.empty()) {
                chain_.first = number_;
                if (previous != sha256_of(text_.substr(0, at))) break_first(previous);
            }
        }
        numbers_.emplace(hash, number_);
        chain_.head = hash;
        if (!chain_.broken && json.is_object())
            chain_.lines.push_back({number_, std::move(hash), std::move(json)});
    }

    void break_first(const std::string& previous) {
        const bool began = previous == sha256_of("");
        chain_.broken = {number_,
                         number_ == 1 ? "does not begin the chain: lines before it were removed, "
                                        "or it was changed"
                         : began      ? "is the first of the chain, but lines were added before it"
                                 : "begins the chain, but the lines before it were changed, or "
                                   "lines of the chain were removed"};
    }

    void break_off(const std::string& previous) {
        std::string what;
        const auto known = numbers_.find(previous);
        if (previous.empty())
            what =
                "has no valid \"previous\", so the run did not write it: it was added or changed";
        else if (known != numbers_.end())
            what = concat("follows line ", known->second,
                          ": what is between them was added, or "
                          "lines were moved");
        else
            what = concat("does not follow line ", number_ - 1, ": line ", number_ - 1,
                          " was changed, or lines between them were removed or moved");
        chain_.broken = {number_, what};
    }

    std::string_view text_;
    HistoryChain chain_;
    int64_t number_ = 0;
    std::map<std::string, int64_t> numbers_;  // of lines, by hash
};

/// The manifests of a run's checkpoints, by the names of their folders.
Json manifests_in(const fs::path& run_dir) {
    Json manifests = Json::object();
    for (const fs::path& checkpoint : list_checkpoints(run_dir))
        manifests[checkpoint.filename().string()] = manifest_hash(checkpoint);
    return manifests;
}

/// Cuts off what follows the whole lines, and returns it.
std::string cut_torn_line(const fs::path& file, const HistoryChain& chain) {
    std::error_code code;
    if (fs::file_size(file, code) <= chain.whole || code) return "";
    std::string torn(MappedFile(file).text().substr(chain.whole));
    fs::resize_file(file, chain.whole, code);
    if (code) throw Error("cannot write ", file.string(), ": ", code.message());
    return torn;
}

}  // namespace

const HistoryLine* HistoryChain::line_of(const std::string& hash) const {
    const auto found = std::ranges::find(lines, hash, &HistoryLine::hash);
    return first > 0 && found != lines.end() && found->number >= first ? &*found : nullptr;
}

HistoryChain read_chain(std::string_view text) { return Reader(text).read(); }

HistoryChain read_history(const fs::path& run_dir) {
    const fs::path file = run_dir / history_file;
    return fs::exists(file) ? read_chain(MappedFile(file).text()) : read_chain("");
}

std::string describe_break(const fs::path& run_dir, const HistoryBreak& broken) {
    return concat("line ", broken.line, " of ", (run_dir / history_file).string(), " ",
                  broken.what);
}

HistoryWriter::HistoryWriter(const fs::path& run_dir)
    : found_(read_history(run_dir)), head_(found_.head), file_(run_dir / history_file) {
    const std::string torn = cut_torn_line(run_dir / history_file, found_);
    // The end that a whole last line lacks does not count for the line's hash.
    file_.end_line();
    const Json* last = found_.lines.empty() ? nullptr : &found_.lines.back().event;
    const Json step = last ? last->value("step", Json(0)) : Json(0);
    const int64_t at = step.is_number_integer() ? step.get<int64_t>() : 0;
    if (found_.first == 0 && found_.whole > 0) {
        const MappedFile file(run_dir / history_file);
        head_ = sha256_of(file.text());
        Json begins = history_event("chain", at);
        begins["lines"] = std::ranges::count(file.text(), '\n');
        if (Json manifests = manifests_in(run_dir); !manifests.empty())
            begins["checkpoints"] = std::move(manifests);
        append(std::move(begins));
    }
    if (torn.empty()) return;
    Json event = history_event("torn", at);
    event["bytes"] = torn.size();
    constexpr size_t most = 4096;
    event["text"] = torn.substr(0, most);
    append(std::move(event));
}

void HistoryWriter::append(Json event) {
    event.erase("previous");
    event["previous"] = head_;
    const std::string line = to_text(event);
    if (file_.append(line + '\n', "the history of the run has gaps")) head_ = sha256_of(line);
}

void append_to_history(const fs::path& run_dir, Json event) {
    if (!fs::is_directory(run_dir))
        throw Error("there is no folder ", run_dir.string(), "; name the folder of a run");
    const RunFolder folder(run_dir);
    HistoryWriter history(run_dir);
    int64_t step = 0;
    const HistoryChain found = history.take_found();
    for (const HistoryLine& line : found.lines)
        if (const Json at = line.event.value("step", Json()); at.is_number_integer())
            step = at.get<int64_t>();
    Json whole = history_event(event.at("event").get<std::string>().c_str(), step);
    whole.update(event);
    history.append(std::move(whole));
    sync_file(run_dir / history_file);
}

Json history_event(const char* name, int64_t step) {
    return {{"event", name}, {"step", step}, {"time", static_cast<int64_t>(std::time(nullptr))}};
}

std::string manifest_hash(const fs::path& checkpoint) {
    return sha256_of_file(checkpoint / "manifest.json");
}

}  // namespace train_gpt
