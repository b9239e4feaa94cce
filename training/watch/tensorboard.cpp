#include "training/watch/tensorboard.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "training/config/config.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"
#include "training/watch/event_file.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

// TensorBoard reads every file with "tfevents" in its name.
constexpr std::string_view prefix = "events.out.tfevents.", suffix = ".train_gpt";
constexpr const char *config_tag = "config", *set_aside = "events.old";

double wall_time() {
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// The number in the name of an event file: the second at which it was made, or a later one.
int64_t number_of(const fs::path& file) {
    return std::strtoll(file.filename().c_str() + prefix.size(), nullptr, 10);
}

/// This program's event files in a folder, the oldest first. There is one, or two if a start was
/// killed just when it had written the second.
std::vector<fs::path> event_files(const fs::path& folder) {
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(folder)) {
        const std::string name = entry.path().filename();
        if (name.starts_with(prefix) && name.ends_with(suffix)) files.push_back(entry.path());
    }
    std::ranges::sort(files, {}, number_of);
    return files;
}

fs::path next_file(const fs::path& folder, const std::vector<fs::path>& files) {
    const int64_t after = files.empty() ? 0 : number_of(files.back()) + 1;
    return folder / concat(prefix, std::max(static_cast<int64_t>(wall_time()), after), suffix);
}

/// Where TensorBoard shows the fields of metrics.jsonl; nowhere: not at all. A list's numbers are
/// below this tag.
std::string tag_of(const std::string& field) {
    static const std::map<std::string, std::string> tags{
        {"loss", "train/loss"},
        {"grad_norm", "train/grad_norm"},
        {"learning_rate", "train/learning_rate"},
        {"matrix_learning_rate", "train/matrix_learning_rate"},
        {"ms", "speed/ms_per_step"},
        {"tokens_per_second", "speed/tokens_per_second"},
        {"flops_per_second", "speed/flops_per_second"},
        {"peak_fraction", "speed/peak_fraction"},
        {"mfu", "speed/mfu"},
        {"val_loss", "validation/loss"},
        {"val_bits_per_byte", "validation/bits_per_byte"},
        {"hellaswag", "hellaswag/accuracy"},
        {"hellaswag_normalised", "hellaswag/accuracy_normalised"},
        {"passes", "train/passes"},
        {"router_load", "router/load"},
        {"router_idle", "router/idle"},
        {"router_load/layers", "router/load"},
        {"router_idle/layers", "router/idle"},
        {"router_entropy/layers", "router/entropy"},
        {"router_bias_range/layers", "router/bias_range"},
        {"router_dropped/layers", "router/dropped"},
        {"tokens", ""},
        {"seconds", ""},
        {"val_tokens", ""}};
    if (const auto found = tags.find(field); found != tags.end()) return found->second;
    if (field.starts_with("bytes_sent/") || field.starts_with("exposed_ms/"))
        return "communication/" + field;
    if (field.starts_with("task/") || field.starts_with("core/")) return field;
    return (field.find('/') == std::string::npos ? "other/" : "sources/") + field;
}

/// As Markdown that shows the text as it is.
std::string as_code(const std::string& text) {
    std::string code = "    ";
    for (const char c : text) {
        code += c;
        if (c == '\n') code += "    ";
    }
    return code;
}

std::string config_text(const std::string& config) {
    return text_value(config_tag, as_code(config));
}

std::string hparams_of(const std::string& config) {
    std::map<std::string, Json> hparams;
    for (const auto& [key, value] : config_values(parse_config(config, "config.json")))
        hparams[key] = try_parse_json(value);
    return hparams_value(hparams);
}

double seconds_of(const MetricsRecord& record) {
    for (const auto& [name, value] : record.fields)
        if (name == "seconds" && std::holds_alternative<double>(value))
            return std::get<double>(value);
    return 0;
}

}  // namespace

/// The events of a run: first the events of an earlier start that are kept, then what is missing.
struct TensorBoardSink::Events {
    struct Event {
        int64_t step = 0;
        std::string_view bytes;  // in `before` or `added`
    };
    std::vector<Event> all;
    MappedFile before;  // the earlier start's file
    std::deque<std::string> added;
    bool same = true;  // as in the earlier start's file
    std::string hparams, config;
    int64_t last_text = -1;                                     // its step
    std::set<std::pair<int64_t, MetricsRecord::Kind>> missing;  // records of metrics.jsonl

    void keep(std::string_view bytes, int64_t last_step) {
        const ParsedEvent event = parse_event(bytes);
        if (event.values.empty()) return;  // the version
        const std::string_view first = event.values[0].tag;
        bool wanted = event.step <= last_step;
        if (first == hparams_tag)
            hparams = event.values[0].bytes;
        else if (first == config_tag && wanted)
            config = event.values[0].bytes;
        else if (first.starts_with("train/"))
            wanted = missing.erase({event.step, MetricsRecord::Kind::training_step}) > 0;
        else if (first.starts_with("validation/"))
            wanted = missing.erase({event.step, MetricsRecord::Kind::evaluation}) > 0;
        else if (wanted)
            last_text = event.step;
        if (wanted)
            all.push_back({event.step, bytes});
        else
            same = false;
    }
    void add(int64_t step, double time, const std::vector<std::string>& values) {
        all.push_back({step, added.emplace_back(event_of(time, step, values))});
        same = false;
    }
    /// A tag's steps must increase, so another event of the same step goes.
    void replace(const char* tag, int64_t step) {
        std::erase_if(all, [&](const Event& event) {
            const ParsedEvent parsed = parse_event(event.bytes);
            return parsed.step == step && parsed.values[0].tag == tag;
        });
    }
    void write(const fs::path& path) {
        std::ranges::stable_sort(all, {}, &Event::step);
        AtomicFile file(path);
        file.write(record_of(version_event(wall_time())));
        for (const Event& event : all) file.write(record_of(event.bytes));
        file.commit();
    }
};

TensorBoardSink::TensorBoardSink(const fs::path& run_dir, std::optional<int64_t> resume_step,
                                 Options options)
    : options_(std::move(options)) {
    try {
        open(run_dir, resume_step);
    } catch (const std::exception& error) {
        file_.reset();
        std::fprintf(stderr,
                     "warning: there will be no file for TensorBoard: %s; training continues "
                     "without it\n",
                     message_of(error).c_str());
    }
}

/// The events that the file has when this start of the run begins, and in `same` whether the last
/// of `files` already has exactly these.
TensorBoardSink::Events TensorBoardSink::events_at_start(const fs::path& run_dir,
                                                         const std::vector<fs::path>& files,
                                                         std::optional<int64_t> resume_step) const {
    Events events;
    double seconds = 0;  // of the last record
    read_metrics(run_dir, [&](const MetricsRecord& record) {
        events.missing.emplace_hint(events.missing.end(), record.step, record.kind);
        seconds = seconds_of(record);
    });
    if (resume_step && !files.empty()) {
        events.before = MappedFile(files.back());
        const EventFileContents contents = events_in(events.before.text());
        events.same = contents.whole;
        for (const std::string_view event : contents.events) events.keep(event, *resume_step);
    } else {
        events.same = false;
    }
    if (!events.missing.empty())
        read_metrics(run_dir, [&](const MetricsRecord& record) {
            if (events.missing.contains({record.step, record.kind}))
                events.add(record.step, wall_time() - seconds + seconds_of(record),
                           values_of(record));
        });

    // TensorBoard shows the first hyperparameters that it finds.
    if (const std::string hparams = hparams_of(options_.config); hparams != events.hparams) {
        events.replace(hparams_tag, 0);
        events.add(0, wall_time(), {hparams});
        std::ranges::rotate(events.all, events.all.end() - 1);
    }
    if (const std::string config = config_text(options_.config); config != events.config) {
        events.replace(config_tag, resume_step.value_or(0));
        events.add(resume_step.value_or(0), wall_time(), {config});
    }
    return events;
}

void TensorBoardSink::open(const fs::path& run_dir, std::optional<int64_t> resume_step) {
    const std::vector<fs::path> files = event_files(run_dir);
    if (!resume_step && !files.empty()) {
        const fs::path old = run_dir / set_aside;
        if (!fs::exists(old) || fs::file_size(files.back()) > fs::file_size(old))
            fs::rename(files.back(), old);
    }
    Events events = events_at_start(run_dir, files, resume_step);
    last_text_ = events.last_text;
    const fs::path file = events.same ? files.back() : next_file(run_dir, files);
    if (!events.same) {
        const fs::path unfinished = run_dir / "events.new";
        events.write(unfinished);
        fs::rename(unfinished, file);
    }
    file_ = std::make_unique<AppendFile>(file);
    for (const fs::path& other : files)
        if (other != file) fs::remove(other);
}

std::vector<std::string> TensorBoardSink::values_of(const MetricsRecord& record) const {
    std::vector<std::string> values;
    const auto add = [&](const std::string& tag, double value) {
        values.push_back(scalar_value(tag, static_cast<float>(value)));
    };
    constexpr std::string_view ms = "_ms";
    double all_parts = 0;
    std::vector<std::pair<std::string, double>> parts;  // of a step, in ms
    for (const auto& [name, value] : record.fields) {
        if (std::holds_alternative<std::string>(value)) continue;
        if (const auto* list = std::get_if<std::vector<double>>(&value)) {
            for (size_t i = 0; i < list->size(); ++i)
                if (std::isfinite((*list)[i])) add(concat(tag_of(name), "/", i), (*list)[i]);
            continue;
        }
        const double number = std::holds_alternative<double>(value)
                                  ? std::get<double>(value)
                                  : static_cast<double>(std::get<int64_t>(value));
        if (name.ends_with(ms)) {
            parts.emplace_back(name.substr(0, name.size() - ms.size()), number);
            all_parts += number;
        } else if (const std::string tag = tag_of(name); !tag.empty()) {
            add(tag, number);
        }
    }
    for (const auto& [part, number] : parts) add("time/" + part + "_share", number / all_parts);
    if (record.kind == MetricsRecord::Kind::training_step && options_.memory > 0)
        add("memory/GiB_per_rank", static_cast<double>(options_.memory) / (1 << 30));
    return values;
}

void TensorBoardSink::write(const MetricsRecord& record) {
    if (file_) file_->append(record_of(event_of(wall_time(), record.step, values_of(record))));
}

void TensorBoardSink::write_text(int64_t step, const std::string& name, const std::string& text) {
    if (!file_ || step <= last_text_) return;
    last_text_ = step;
    file_->append(record_of(event_of(wall_time(), step, {text_value(name, as_code(text))})));
}

}  // namespace train_gpt
