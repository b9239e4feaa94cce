#include "training/report/recorded_run.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"
#include "training/config/resolved_config.h"
#include "training/files/run_folder.h"
#include "training/supervise/supervisor_log.h"
#include "training/watch/router_log.h"
#include "training/watch/run_history.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* metrics_file = "metrics.jsonl";
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// The fields that a report shows; all others are left out, since a long run has many lines.
bool is_shown(std::string_view field) {
    constexpr std::string_view names[] = {"seconds",
                                          "tokens",
                                          "passes",
                                          "loss",
                                          "grad_norm",
                                          "learning_rate",
                                          "tokens_per_second",
                                          "peak_fraction",
                                          "mfu",
                                          "compute_ms",
                                          "communication_ms",
                                          "data_wait_ms",
                                          "optimizer_ms",
                                          "val_loss",
                                          "val_tokens",
                                          "val_bits_per_byte",
                                          "hellaswag",
                                          "hellaswag_normalised",
                                          "router_load",
                                          "router_idle"};
    for (const std::string_view prefix : {"loss/", "exposed_ms/", "passes/", "task/", "core/"})
        if (field.starts_with(prefix)) return true;
    return std::ranges::find(names, field) != std::end(names);
}

/// Adds every value below `json` under its path.
void flatten(const Json& json, const std::string& path, std::map<std::string, Json>& values) {
    if (!json.is_object()) {
        values[path] = json;
        return;
    }
    for (const auto& [key, value] : json.items())
        flatten(value, path.empty() ? key : path + "." + key, values);
}

/// Whether the file's lock is held, through any file descriptor; nothing if it cannot be opened.
std::optional<bool> is_locked(const fs::path& file) {
    const int lock = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
    if (lock < 0) return {};
    const bool held = ::flock(lock, LOCK_SH | LOCK_NB) != 0;
    ::close(lock);
    return held;
}

/// Only the run's user can open its lock, so that nobody else can hold it. Others see by
/// metrics.jsonl whether it is being written (append_file.h).
bool is_active(const fs::path& folder) {
    const std::optional<bool> held = is_locked(folder / "lock");
    return held ? *held : is_locked(folder / metrics_file).value_or(false);
}

void require_run_folder(const fs::path& folder) {
    std::error_code code;
    if (!fs::exists(folder, code))
        throw Error("there is no folder ", folder.string(), "; name the folder of a run");
    if (!fs::is_directory(folder, code))
        throw Error(folder.string(), " is not a folder; name the folder of a run, which has a ",
                    metrics_file);
    if (fs::exists(folder / metrics_file, code)) return;
    if (fs::exists(folder / "model.safetensors", code))
        throw Error(folder.string(), " is a checkpoint or a model, which has no metrics; name the ",
                    "folder of its run");
    throw Error(folder.string(), " has no ", metrics_file,
                "; name the folder of a run that has trained at least one step");
}

}  // namespace

std::vector<double> MetricsTable::column(const std::string& name) const {
    const auto found = columns.find(name);
    return found == columns.end() ? std::vector<double>(rows(), nan) : found->second;
}

double MetricsTable::last(const std::string& name) const {
    const auto row = last_row(name);
    return row ? columns.at(name)[*row] : nan;
}

std::optional<size_t> MetricsTable::last_row(const std::string& name) const {
    if (const auto found = columns.find(name); found != columns.end())
        for (size_t i = rows(); i-- > 0;)
            if (std::isfinite(found->second[i])) return i;
    return {};
}

std::optional<size_t> MetricsTable::smallest_row(const std::string& name,
                                                 const std::string& like) const {
    std::optional<size_t> smallest;
    const std::vector<double> likes = column(like);
    const std::optional<size_t> last = last_row(name);
    const double wanted = last ? likes[*last] : nan;
    if (const auto found = columns.find(name); found != columns.end())
        for (size_t i = 0; i < rows(); ++i)
            if (std::isfinite(found->second[i]) && (std::isnan(wanted) || likes[i] == wanted) &&
                (!smallest || found->second[i] < found->second[*smallest]))
                smallest = i;
    return smallest;
}

void MetricsTable::add(double at, const Json& line) {
    while (!step.empty() && step.back() >= at) {
        step.pop_back();
        is_sample.pop_back();
        for (auto& [name, values] : columns) values.pop_back();
    }
    for (const auto& [name, value] : line.items())
        if (is_shown(name) && (value.is_number() || value.is_null())) {
            std::vector<double>& values = columns[name];
            values.resize(rows(), nan);
            values.push_back(value.is_number() ? value.get<double>() : nan);
        }
    step.push_back(at);
    is_sample.push_back(true);
    for (auto& [name, values] : columns) values.resize(rows(), nan);
}

void MetricsTable::thin(size_t most) {
    if (rows() <= most) return;
    const size_t intervals = std::max<size_t>(1, most / (2 * columns.size() + 4));
    const double scale = static_cast<double>(intervals) / (step.back() - step.front());
    const auto interval_of = [&](size_t row) {
        return std::min(intervals - 1, static_cast<size_t>((step[row] - step.front()) * scale));
    };
    std::vector<bool> kept(rows()), sampled(rows());
    for (size_t begin = 0, end; begin < rows(); begin = end) {
        for (end = begin; end < rows() && interval_of(end) == interval_of(begin);) ++end;
        kept[begin] = kept[end - 1] = true;
        std::optional<size_t> first, last;
        for (size_t row = begin; row < end; ++row)
            if (is_sample[row]) first = first.value_or(row), last = row;
        if (first) kept[*first] = kept[*last] = sampled[*first] = sampled[*last] = true;
        for (const auto& [name, values] : columns) {
            std::optional<size_t> low, high;
            for (size_t row = begin; row < end; ++row) {
                if (!std::isfinite(values[row])) continue;
                if (!low || values[row] < values[*low]) low = row;
                if (!high || values[row] > values[*high]) high = row;
            }
            if (low) kept[*low] = kept[*high] = true;
        }
    }
    const auto compact = [&](auto& values) {
        size_t n = 0;
        for (size_t row = 0; row < kept.size(); ++row)
            if (kept[row]) values[n++] = values[row];
        values.resize(n);
        values.shrink_to_fit();
    };
    is_sample = std::move(sampled);
    compact(is_sample);
    compact(step);
    for (auto& [name, values] : columns) compact(values);
}

RecordedRun::RecordedRun(fs::path folder, size_t most_rows)
    : folder_(std::move(folder)), most_rows_(most_rows) {
    require_run_folder(folder_);
    update();
    if (training_.rows() + evaluations_.rows() > 0) return;
    const fs::path file = folder_ / metrics_file;
    if (metrics_lines_.bad > 0)
        throw Error(file.string(), " has no line that a run wrote: line ", metrics_lines_.first_bad,
                    " is not a JSON object; name the folder of a run");
    throw Error(file.string(), " has no steps yet; wait until the run has logged its first one");
}

std::string RecordedRun::name() const {
    if (!name_.empty()) return name_;
    const fs::path path = fs::absolute(folder_).lexically_normal();
    const std::string name = (path.has_filename() ? path : path.parent_path()).filename().string();
    return name.empty() ? folder_.string() : name;
}

template <class Clear, class Take>
void RecordedRun::read_lines(const char* name, LinesFile& lines, const Clear& clear,
                             const Take& take) {
    const fs::path path = folder_ / name;
    struct stat now {};
    if (::stat(path.c_str(), &now) != 0) return;
    const MappedFile file(path);
    std::string_view text = file.text(), last;
    // A run that resumes puts another file in the place of this one. The other file may be longer,
    // and may even have the same inode.
    const bool is_same = now.st_dev == lines.device && now.st_ino == lines.inode &&
                         text.size() >= lines.read &&
                         text.substr(0, lines.read).ends_with(lines.last);
    if (lines.read > 0 && !is_same) lines = {.replaced = true};
    lines.device = now.st_dev, lines.inode = now.st_ino;
    text.remove_prefix(lines.read);
    for (size_t end; (end = text.find('\n')) != std::string_view::npos;
         text.remove_prefix(end + 1)) {
        lines.read += end + 1;
        ++lines.count;
        if (std::exchange(lines.replaced, false)) clear();
        last = text.substr(0, end + 1);
        const std::string_view line = text.substr(0, end);
        if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
        const Json json = try_parse_json(line);
        if (json.is_object() && json.contains("step") && json["step"].is_number_integer())
            take(json);
        else if (lines.bad++ == 0)
            lines.first_bad = lines.count;
    }
    lines.half = !text.empty();
    if (!last.empty()) lines.last = last;
}

void RecordedRun::take_metrics(const Json& line) {
    const double step = line["step"].get<double>();
    const auto add_to = [&](MetricsTable& table) {
        table.add(step, line);
        if (table.rows() >= 2 * most_rows_) table.thin(most_rows_);
    };
    if (line.contains("loss"))
        add_to(training_);
    else if (line.contains("val_loss"))
        add_to(evaluations_);
}

void RecordedRun::update() {
    read_lines(
        metrics_file, metrics_lines_, [&] { training_ = evaluations_ = {}; },
        [&](const Json& line) { take_metrics(line); });
    read_lines(
        history_file, history_lines_, [&] { history_.clear(); },
        [&](const Json& line) {
            if (line.value("event", Json()) == "start" && line.value("resumes", Json()) == false)
                history_.clear();
            history_.push_back(line);
        });
    read_lines(
        supervisor_events_file, supervisor_lines_, [&] { supervised_.clear(); },
        [&](const Json& line) { supervised_.push_back(line); });
    read_lines(
        routers_log_file, routers_lines_, [&] { routers_.clear(); },
        [&](const Json& line) { add_snapshot(routers_, line); });
    read_documents();
    active_ = is_active(folder_);
}

void RecordedRun::read_documents() {
    unreadable_.clear();
    const auto read = [&](const char* name) -> Json {
        const fs::path path = folder_ / name;
        if (!fs::exists(path)) return {};
        Json json = try_parse_json(MappedFile(path).text());
        if (json.is_object()) return json;
        unreadable_.push_back(
            concat(path.string(), " is not valid JSON, so that what it says is ", "missing here"));
        return {};
    };
    config_.clear();
    if (const Json config = read("config.json"); config.is_object()) flatten(config, "", config_);
    manifest_ = read(run_manifest);
    choices_ = read("choices.json");
    resolve_config();
}

/// Puts the values into the configuration that it leaves open: what was chosen for the machine, and
/// in runs of earlier versions what the model's family and tokenizer say.
void RecordedRun::resolve_config() {
    const Json automatic = "auto";
    for (const auto& [key, name, open] : {std::tuple{"batch.micro_batch", "micro_batch", Json(0)},
                                          {"memory.recompute", "recompute", automatic},
                                          {"precision.recompute", "recompute", automatic},
                                          {"parallel.zero", "zero", automatic},
                                          {"parallel.sums", "sums", automatic}})
        if (const auto found = config_.find(key); found != config_.end() && found->second == open &&
                                                  choices_.is_object() && choices_.contains(name)) {
            const Json& value = choices_[name];
            found->second =
                concat(value.is_string() ? value.get<std::string>() : to_text(value), " (chosen)");
        }
    const Json* start = last_start();
    const Json vocabulary = start ? start->value("vocabulary", Json()) : Json();
    if (!vocabulary.is_number_integer()) return;
    try {
        const Config config = load_config(folder_ / "config.json", {});
        const Config resolved =
            resolve(config, spec_of(config, vocabulary.get<int64_t>()), DType::fp32);
        for (const auto& [key, text] : config_values(resolved))
            if (const auto found = config_.find(key);
                key.starts_with("model.") && found != config_.end() &&
                (found->second == 0 || found->second == automatic))
                found->second = try_parse_json(text);
    } catch (const Error&) {
        // A configuration that this version does not read is shown as it is.
    }
}

const Json* RecordedRun::last_start() const {
    for (size_t i = history_.size(); i-- > 0;)
        if (history_[i].value("event", Json()) == "start") return &history_[i];
    return nullptr;
}

Json RecordedRun::setting(const std::string& key) const {
    const auto found = config_.find(key);
    return found == config_.end() ? Json() : found->second;
}

std::vector<std::string> RecordedRun::sources() const {
    std::vector<std::string> names;
    for (const auto& [name, values] : training_.columns)
        if (name.starts_with("loss/")) names.push_back(name.substr(5));
    return names;
}

std::vector<double> RecordedRun::tokens(const MetricsTable& table) const {
    std::vector<double> tokens = table.column("tokens");
    const Json per_step = setting("batch.tokens_per_step");
    if (!table.has("tokens") && per_step.is_number())
        for (size_t i = 0; i < tokens.size(); ++i)
            tokens[i] = table.step[i] * per_step.get<double>();
    return tokens;
}

int64_t RecordedRun::steps_planned() const {
    const auto number = [](const Json& value) {
        return value.is_number() ? value.get<double>() : 0;
    };
    const auto set = [&](const char* key) { return number(setting(key)); };
    if (const Json* start = last_start())
        if (const double steps = number(start->value("steps", Json())); steps > 0)
            return static_cast<int64_t>(steps);
    // Older versions record no steps.
    if (set("schedule.steps") > 0) return static_cast<int64_t>(set("schedule.steps"));
    if (set("schedule.tokens") > 0 && set("batch.tokens_per_step") > 0)
        return static_cast<int64_t>(
            std::ceil(set("schedule.tokens") / set("batch.tokens_per_step")));
    return 0;
}

std::vector<SourceUse> RecordedRun::passes_planned() const {
    const Json* start = last_start();
    return passes_of(start ? start->value("passes", Json()) : Json());
}

int64_t RecordedRun::last_step() const {
    double last = 0;
    for (const MetricsTable* table : {&training_, &evaluations_})
        if (table->rows() > 0) last = std::max(last, table->step.back());
    return static_cast<int64_t>(last);
}

std::vector<std::string> RecordedRun::notes() const {
    std::vector<std::string> notes;
    for (const auto& [name, lines] : {std::pair{metrics_file, &metrics_lines_},
                                      {history_file, &history_lines_},
                                      {supervisor_events_file, &supervisor_lines_},
                                      {routers_log_file, &routers_lines_}}) {
        const std::string file = (folder_ / name).string();
        if (lines->bad == 1)
            notes.push_back(concat("line ", lines->first_bad, " of ", file,
                                   " is not a line that a run wrote, and is left out"));
        if (lines->bad > 1)
            notes.push_back(concat(lines->bad, " lines of ", file,
                                   " are not lines that a run wrote, the first is line ",
                                   lines->first_bad, "; they are left out"));
        if (lines->half)
            notes.push_back(concat("the last line of ", file, " is half written and is left out",
                                   active_ ? "; the run is writing it" : ""));
    }
    for (const std::string& document : unreadable_) notes.push_back(document);
    if (config_.empty() && unreadable_.empty())
        notes.push_back(folder_.string() +
                        " has no config.json, so that its configuration is missing here");
    if (const std::string note = note_on_repetition(passes_planned()); !note.empty())
        notes.push_back(concat("in ", name(), " ", note));
    const std::vector<double> losses = training_.column("loss");
    for (size_t i = 0; i < losses.size(); ++i)
        if (!std::isfinite(losses[i])) {
            notes.push_back(concat("the loss of ", name(), " was not finite at step ",
                                   static_cast<int64_t>(training_.step[i])));
            break;
        }
    return notes;
}

}  // namespace train_gpt
