#include "training/watch/metrics.h"

#include <cmath>
#include <limits>
#include <string_view>
#include <utility>

#include "base/json_text.h"
#include "training/watch/step_lines.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* metrics_name = "metrics.jsonl";

/// What lines of metrics.jsonl say together.
struct KeptMetrics {
    double seconds = 0;  // of the last line
    LoggedEvaluation last, best;

    void add(const Json& json) {
        const auto number = [&](const char* key, double otherwise) {
            return json.contains(key) && json[key].is_number() ? json[key].get<double>()
                                                               : otherwise;
        };
        seconds = number("seconds", seconds);
        if (!json.contains("val_loss")) return;
        // Losses on other validation data cannot be compared.
        if (const double tokens = number("val_tokens", val_tokens_); tokens != val_tokens_) {
            best = {};
            val_tokens_ = tokens;
        }
        last = {json["step"].get<int64_t>(), number("val_loss", std::nan("")),
                number("val_bits_per_byte", std::nan(""))};
        const bool is_better = !(best.nats_per_token <= last.nats_per_token);
        if (is_better && !std::isnan(last.nats_per_token)) best = last;
    }

  private:
    double val_tokens_ = -1;
};

KeptMetrics read_up_to(const fs::path& run_dir, int64_t step) {
    KeptMetrics kept;
    for_each_step_line(run_dir / metrics_name, step,
                       [&](std::string_view, const Json& json) { kept.add(json); });
    return kept;
}

}  // namespace

LoggedEvaluation last_evaluation(const fs::path& run_dir, int64_t step) {
    return read_up_to(run_dir, step).last;
}

LoggedEvaluation best_evaluation(const fs::path& run_dir, int64_t step) {
    return read_up_to(run_dir, step).best;
}

namespace {

/// Drops from the file, or moves, what a start of the run does not keep. Returns the "seconds" of
/// the last line that is kept.
double prepare_file(const fs::path& run_dir, std::optional<int64_t> resume_step) {
    KeptMetrics kept;
    keep_step_lines(run_dir / metrics_name, resume_step,
                    [&](std::string_view, const Json& json) { kept.add(json); });
    return kept.seconds;
}

}  // namespace

JsonLinesSink::JsonLinesSink(const fs::path& run_dir, std::optional<int64_t> resume_step)
    : kept_seconds_(prepare_file(run_dir, resume_step)), file_(run_dir / metrics_name) {}

namespace {

/// Whole numbers of a list are written as such: "3" rather than "3.0".
Json list_of(const std::vector<double>& values) {
    Json list = Json::array();
    for (const double value : values)
        if (const auto whole = static_cast<int64_t>(value); std::abs(value) < 1e9 && whole == value)
            list.push_back(whole);
        else
            list.push_back(value);
    return list;
}

double number_in(const Json& value) {
    return value.is_number() ? value.get<double>() : std::nan("");
}

}  // namespace

void JsonLinesSink::write(const MetricsRecord& record) {
    Json json{{"step", record.step}};
    for (const auto& [name, value] : record.fields)
        if (const auto* list = std::get_if<std::vector<double>>(&value))
            json[name] = list_of(*list);
        else
            std::visit([&, &key = name](const auto& v) { json[key] = v; }, value);
    file_.append(to_text(json) + '\n');
}

void read_metrics(const fs::path& run_dir, const std::function<void(const MetricsRecord&)>& take) {
    constexpr int64_t all = std::numeric_limits<int64_t>::max();
    for_each_step_line(run_dir / metrics_name, all, [&](std::string_view, const Json& json) {
        MetricsRecord record;
        for (const auto& [key, value] : json.items()) {
            if (key == "step")
                record.step = value.get<int64_t>();
            else if (value.is_number_integer())
                record.fields.emplace_back(key, value.get<int64_t>());
            else if (value.is_number() || value.is_null())
                record.fields.emplace_back(key, number_in(value));
            else if (value.is_string())
                record.fields.emplace_back(key, value.get<std::string>());
            else if (value.is_array()) {
                std::vector<double> list;
                for (const Json& element : value) list.push_back(number_in(element));
                record.fields.emplace_back(key, std::move(list));
            }
            if (key == "val_loss") record.kind = MetricsRecord::Kind::evaluation;
        }
        take(record);
    });
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
