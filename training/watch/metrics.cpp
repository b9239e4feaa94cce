#include "training/watch/metrics.h"

#include <limits>
#include <sstream>

#include "base/file.h"
#include "base/json_text.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* file_name = "metrics.jsonl";

/// The contents of metrics.jsonl up to a step.
struct KeptMetrics {
    std::string lines;
    double seconds = 0;  // of the last line
    LoggedEvaluation last, best;
};

KeptMetrics metrics_up_to(std::string_view text, int64_t last_step) {
    KeptMetrics kept;
    double val_tokens = -1;
    for (size_t end; (end = text.find('\n')) != std::string_view::npos;
         text.remove_prefix(end + 1)) {
        const std::string_view line = text.substr(0, end);
        const Json json = try_parse_json(line);
        if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer())
            continue;
        const int64_t step = json["step"].get<int64_t>();
        if (step > last_step) continue;
        kept.lines.append(line).push_back('\n');
        const auto number = [&](const char* key, double otherwise) {
            return json.contains(key) && json[key].is_number() ? json[key].get<double>()
                                                               : otherwise;
        };
        kept.seconds = number("seconds", kept.seconds);
        if (!json.contains("val_loss")) continue;
        // Losses on other validation data cannot be compared.
        if (const double tokens = number("val_tokens", val_tokens); tokens != val_tokens) {
            kept.best = {};
            val_tokens = tokens;
        }
        kept.last = {step, number("val_loss", std::nan("")),
                     number("val_bits_per_byte", std::nan(""))};
        const bool is_better = !(kept.best.nats_per_token <= kept.last.nats_per_token);
        if (is_better && !std::isnan(kept.last.nats_per_token)) kept.best = kept.last;
    }
    return kept;
}

}  // namespace

namespace {

KeptMetrics read_up_to(const fs::path& run_dir, int64_t step) {
    const fs::path path = run_dir / file_name;
    return fs::exists(path) ? metrics_up_to(MappedFile(path).text(), step) : KeptMetrics{};
}

}  // namespace

LoggedEvaluation last_evaluation(const fs::path& run_dir, int64_t step) {
    return read_up_to(run_dir, step).last;
}

LoggedEvaluation best_evaluation(const fs::path& run_dir, int64_t step) {
    return read_up_to(run_dir, step).best;
}

namespace {

/// Drops from the file, or moves, what a start of the run does not keep. Returns the "seconds" of the
/// last line that is kept.
double prepare_file(const fs::path& run_dir, std::optional<int64_t> resume_step) {
    const fs::path path = run_dir / file_name, old = run_dir / "metrics.old.jsonl";
    if (!fs::exists(path)) return 0;
    KeptMetrics kept;
    {
        const MappedFile file(path);
        if (resume_step)
            kept = metrics_up_to(file.text(), *resume_step);
        else if (file.text().size() > (fs::exists(old) ? fs::file_size(old) : 0))
            write_file(old, file.text());
    }
    write_file(path, kept.lines);
    return kept.seconds;
}

}  // namespace

JsonLinesSink::JsonLinesSink(const fs::path& run_dir, std::optional<int64_t> resume_step)
    : kept_seconds_(prepare_file(run_dir, resume_step)), file_(run_dir / file_name) {}

void JsonLinesSink::write(const MetricsRecord& record) {
    Json json{{"step", record.step}};
    for (const auto& [name, value] : record.fields)
        std::visit([&, &key = name](const auto& v) { json[key] = v; }, value);
    file_.append(to_text(json) + '\n');
}

std::vector<MetricsRecord> read_metrics(const fs::path& run_dir) {
    std::vector<MetricsRecord> records;
    const fs::path path = run_dir / file_name;
    if (!fs::exists(path)) return records;
    std::istringstream lines(
        metrics_up_to(MappedFile(path).text(), std::numeric_limits<int64_t>::max()).lines);
    for (std::string line; std::getline(lines, line);) {
        MetricsRecord& record = records.emplace_back();
        const Json json = try_parse_json(line);
        for (const auto& [key, value] : json.items()) {
            if (key == "step")
                record.step = value.get<int64_t>();
            else if (value.is_number_integer())
                record.fields.emplace_back(key, value.get<int64_t>());
            else if (value.is_number() || value.is_null())
                record.fields.emplace_back(key,
                                           value.is_null() ? std::nan("") : value.get<double>());
            else if (value.is_string())
                record.fields.emplace_back(key, value.get<std::string>());
            if (key == "val_loss") record.kind = MetricsRecord::Kind::evaluation;
        }
    }
    return records;
}

MetricsLog::MetricsLog(const fs::path& run_dir, std::optional<int64_t> resume_step,
                       const Options& options)
    : tokens_(options.tokens) {
    if (!options.writes) return;
    auto file = std::make_unique<JsonLinesSink>(run_dir, resume_step);
    seconds_before_ = file->kept_seconds();
    sinks_.push_back(std::move(file));
}

void MetricsLog::write(int64_t step, const Fields& fields, MetricsRecord::Kind kind) {
    if (sinks_.empty()) return;
    MetricsRecord record{.kind = kind, .step = step, .fields = fields};
    record.fields.emplace_back("tokens", tokens_.before(step));
    record.fields.emplace_back("seconds", seconds_before_ + since_start_.seconds());
    for (const auto& sink : sinks_) sink->write(record);
}

void MetricsLog::write_text(int64_t step, const std::string& name, const std::string& text) {
    for (const auto& sink : sinks_) sink->write_text(step, name, text);
}

}  // namespace train_gpt
