#include "training/report/page_data.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <span>

#include "base/error.h"
#include "base/json_text.h"
#include "training/report/html_text.h"
#include "training/report/router_picture.h"

namespace train_gpt {

namespace {

std::string json_number(double value) {
    if (!std::isfinite(value)) return "null";  // JSON has no other word for it
    char text[32];
    std::snprintf(text, sizeof text, "%.7g", value);
    return text;
}

std::string array_of(std::span<const double> values) {
    std::string text = "[";
    for (const double value : values) text += (text.size() > 1 ? "," : "") + json_number(value);
    return text + "]";
}

/// Steps are whole numbers, whose differences are shorter than they are.
std::string array_of_differences(std::vector<double> values) {
    for (size_t i = values.size(); i-- > 1;) values[i] -= values[i - 1];
    return array_of(values);
}

/// The tokens per second at the measured rate of matrix products. Each start measures it again;
/// this is the median over the steps. 0 if it is unknown.
double limit_of(const MetricsTable& training) {
    const std::vector<double> rate = training.column("tokens_per_second"),
                              share = training.column("peak_fraction");
    std::vector<double> limits;
    for (size_t i = 0; i < rate.size(); ++i)
        if (share[i] > 0 && std::isfinite(rate[i] / share[i])) limits.push_back(rate[i] / share[i]);
    if (limits.empty()) return 0;
    const auto middle = limits.begin() + std::ssize(limits) / 2;
    std::ranges::nth_element(limits, middle);
    return *middle;
}

/// The tokens up to a step, at the steps where their number in a step changes.
Curve tokens_of(const RecordedRun& run) {
    const std::vector<double> tokens = run.tokens(run.training());
    Curve curve{{0.0}, {0.0}};
    for (size_t i = 0; i < tokens.size(); ++i) {
        const double x = run.training().step[i];
        if (!std::isfinite(tokens[i]) || x <= curve.x.back()) continue;
        const size_t n = curve.size();
        const auto rise = [&](double step, double y, size_t from) {
            return (y - curve.y[from]) / (step - curve.x[from]);
        };
        if (n > 1 && rise(x, tokens[i], n - 1) == rise(curve.x[n - 1], curve.y[n - 1], n - 2)) {
            curve.x.pop_back();
            curve.y.pop_back();
        }
        curve.add(x, tokens[i]);
    }
    return curve.size() > 1 ? curve : Curve{};
}

constexpr std::array<std::pair<const char*, const char*>, 4> phases{
    {{"compute", "compute_ms"},
     {"communication", "communication_ms"},
     {"data wait", "data_wait_ms"},
     {"optimizer", "optimizer_ms"}}};

/// Each phase's share of the time of the steps within an interval, for at most `most` intervals.
/// "groups" has the share of waiting for each group of ranks, which is a part of communication's
/// share.
std::string shares_of(const MetricsTable& training, size_t most) {
    if (!training.has("compute_ms")) return "null";
    const size_t n = training.rows(), intervals = std::min(n, most);
    std::vector<double> edges{0}, whole;  // of each interval
    const auto end_of = [&](size_t i) { return (i + 1) * n / intervals; };
    const auto sums_of = [&](const std::string& column) {
        const std::vector<double> values = training.column(column);
        std::vector<double> sums(intervals);
        for (size_t i = 0; i < intervals; ++i)
            for (size_t row = i * n / intervals; row < end_of(i); ++row)
                if (std::isfinite(values[row])) sums[i] += values[row];
        return sums;
    };
    for (size_t i = 0; i < intervals; ++i) edges.push_back(training.step[end_of(i) - 1]);
    whole.resize(intervals);
    for (const auto& [name, column] : phases) {
        const std::vector<double> sums = sums_of(column);
        for (size_t i = 0; i < intervals; ++i) whole[i] += sums[i];
    }
    const auto shares = [&](const std::string& column) {
        std::vector<double> parts = sums_of(column);
        for (size_t i = 0; i < intervals; ++i) {
            const double share = std::round(1e4 * (parts[i] / whole[i])) / 1e4;
            parts[i] = std::isfinite(share) ? share : 0;
        }
        return array_of(parts);
    };
    std::string text = "{\"x\":" + array_of(edges), groups;
    for (const auto& [name, column] : phases)
        text += "," + json_string(name) + ":" + shares(column);
    constexpr std::string_view exposed = "exposed_ms/";
    for (const auto& [column, values] : training.columns)
        if (column.starts_with(exposed))
            groups += concat(groups.empty() ? "" : ",", json_string(column.substr(exposed.size())),
                             ":", shares(column));
    return text + ",\"groups\":{" + groups + "}}";
}

/// Bytes by purpose, as the last start recorded them.
std::string memory_of(const RecordedRun& run) {
    const Json* start = run.last_start();
    std::string text;
    if (start && start->contains("memory") && (*start)["memory"].is_object())
        for (const auto& [purpose, bytes] : (*start)["memory"].items())
            if (bytes.is_number())
                text += concat(text.empty() ? "" : ",", "[", json_string(purpose), ",",
                               bytes.get<uint64_t>(), "]");
    return "[" + text + "]";
}

std::string marks_json(const RecordedRun& run) {
    std::string text;
    for (const RunMark& mark : marks_of(run))
        text += concat(text.empty() ? "" : ",", "[", mark.step, ",", json_string(mark.text), "]");
    return "[" + text + "]";
}

std::string run_json(const RecordedRun& run, int pixels, size_t runs) {
    constexpr size_t letters_per_pixel = 150;
    std::string curves, usual;
    for (const auto& [name, values] : run.training().columns)
        if (name == "loss" || name.starts_with("loss/"))
            usual += concat(usual.empty() ? "" : ",", json_string(name), ":",
                            json_number(usual_loss(run.training(), name)));
    for (const auto& [name, curve] : curves_of(run, pixels))
        curves +=
            concat(curves.empty() ? "" : ",", json_string(name),
                   ":{\"x\":", array_of_differences(curve.x), ",\"y\":", array_of(curve.y), "}");
    const Json clip = run.setting("optimizer.grad_clip");
    const Json words = run.last_start() ? run.last_start()->value("vocabulary", Json()) : Json();
    return concat(
        "{\"name\":", json_string(run.name()),
        ",\"clip\":", json_number(clip.is_number() ? clip.get<double>() : 0),
        ",\"limit\":", json_number(limit_of(run.training())),
        ",\"vocabulary\":", json_number(words.is_number() ? words.get<double>() : 0),
        ",\"curves\":{", curves, "},\"usual\":{", usual,
        "},\"shares\":", shares_of(run.training(), static_cast<size_t>(std::max(1, pixels / 4))),
        ",\"memory\":", memory_of(run), ",\"marks\":", marks_json(run), ",\"routers\":",
        routers_json(run.routers(), letters_per_pixel * static_cast<size_t>(pixels) / runs), "}");
}

/// The scores of tasks, and the bands of one standard error around them.
std::vector<std::pair<std::string, Curve>> task_curves(const MetricsTable& evaluations,
                                                       int pixels) {
    std::vector<std::pair<std::string, Curve>> curves;
    constexpr std::string_view accuracy = "/accuracy", error = "/stderr";
    for (const auto& [column, values] : evaluations.columns) {
        const bool is_task = column.starts_with("task/") && column.ends_with(accuracy);
        const bool is_core = column.starts_with("core/") && !column.ends_with(error);
        if (!is_task && !is_core) continue;
        const std::string name =
            is_task ? column.substr(0, column.size() - accuracy.size()) : column;
        const std::vector<double> errors = evaluations.column(name + std::string(error));
        for (const auto& [part, sign] :
             {std::pair{"", 0.0}, std::pair{"/low", -1.0}, std::pair{"/high", 1.0}}) {
            std::vector<double> shifted = values;
            for (size_t i = 0; i < shifted.size() && sign != 0; ++i) shifted[i] += sign * errors[i];
            curves.emplace_back(name + part, thinned(evaluations.step, shifted, pixels));
        }
    }
    return curves;
}

}  // namespace

double usual_loss(const MetricsTable& table, const std::string& column) {
    if (table.rows() == 0) return std::numeric_limits<double>::quiet_NaN();
    const std::vector<double> all = table.column(column);
    const double first = table.step.front(), from = first + 0.03 * (table.step.back() - first);
    std::vector<double> values;
    for (size_t i = 0; i < all.size(); ++i)
        if (table.is_sample[i] && table.step[i] >= from && std::isfinite(all[i]))
            values.push_back(all[i]);
    if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
    const auto usual = values.begin() + (std::ssize(values) - 1) * 98 / 100;
    std::ranges::nth_element(values, usual);
    return *usual;
}

std::vector<std::pair<std::string, Curve>> curves_of(const RecordedRun& run, int pixels) {
    std::vector<std::pair<std::string, Curve>> curves;
    const auto add = [&](const std::string& name, Curve curve) {
        if (curve.size() > 0) curves.emplace_back(name, std::move(curve));
    };
    const int coarse = std::max(1, pixels / 3);  // enough for curves that are smooth
    const MetricsTable& training = run.training();
    const auto add_with_mean = [&](const std::string& name, const std::string& mean_name) {
        const std::vector<double> values = training.column(name);
        const Curve mean = running_mean(training.step, values);
        add(name, thinned(training.step, values, pixels));
        add(mean_name, thinned(mean.x, mean.y, coarse));
    };
    add_with_mean("loss", "loss_mean");
    for (const std::string& source : run.sources())
        add_with_mean("loss/" + source, "loss_mean/" + source);
    for (const std::string name : {"grad_norm", "tokens_per_second", "router_load", "router_idle"})
        add_with_mean(name, name + "_mean");
    add("learning_rate", thinned(training.step, training.column("learning_rate"), coarse));
    Curve seconds{{0.0}, {0.0}};
    const std::vector<double> trained = training.column("seconds");
    for (size_t i = 0; i < trained.size(); ++i)
        if (training.step[i] > 0) seconds.add(training.step[i], trained[i]);
    add("seconds", thinned(seconds.x, seconds.y, coarse));
    const Curve tokens = tokens_of(run);
    add("tokens", thinned(tokens.x, tokens.y, coarse));
    const MetricsTable& evaluations = run.evaluations();
    for (const auto& [name, curve] : task_curves(evaluations, pixels)) add(name, curve);
    for (const char* name : {"val_loss", "val_bits_per_byte", "hellaswag", "hellaswag_normalised"})
        if (evaluations.has(name))
            add(name, thinned(evaluations.step, evaluations.column(name), pixels));
    return curves;
}

namespace {

/// Marks of one step become one, and so do many marks that are less than a hundredth of their range
/// apart. It has the step of the first, and the texts of the first few.
std::vector<RunMark> joined(const std::vector<RunMark>& marks) {
    constexpr size_t many = 100, most_texts = 6;
    std::vector<RunMark> all;
    const int64_t range = marks.empty() ? 0 : marks.back().step - marks.front().step;
    const int64_t near = marks.size() > many ? range / static_cast<int64_t>(many) : 0;
    for (size_t i = 0, end; i < marks.size(); i = end) {
        RunMark& mark = all.emplace_back(marks[i]);
        for (end = i + 1; end < marks.size() && marks[end].step <= mark.step + near; ++end)
            if (end - i < most_texts) mark.text += ", " + marks[end].text;
        if (end - i > most_texts)
            mark.text +=
                concat(" and ", end - i - most_texts, " more up to step ", marks[end - 1].step);
    }
    return all;
}

}  // namespace

std::vector<Json> supervisor_events(const RecordedRun& run) {
    std::vector<Json> events;
    const auto time_of = [](const Json& line) { return number_of(line.value("time", Json())); };
    for (const Json& line : run.supervised())
        if (!run.history().empty() && line.value("text", Json()).is_string() &&
            line.value("kind", Json()) != "done" && line.value("start", Json()) != 1 &&
            time_of(line) >= time_of(run.history().front()))
            events.push_back(line);
    return events;
}

std::vector<RunMark> marks_of(const RecordedRun& run) {
    std::vector<RunMark> marks;
    const auto add = [&](int64_t step, const std::string& text) { marks.push_back({step, text}); };
    bool ended = true;
    for (const Json& line : run.history()) {
        const Json event = line.value("event", Json());
        const int64_t step = line["step"].get<int64_t>();
        if (event == "start" && line.value("resumes", Json()) == true)
            add(step, ended ? "resumed" : "resumed after an end that was not recorded");
        const Json reason = line.value("reason", Json());
        if (event == "end" && reason.is_string() && reason != "complete")
            add(step, "stopped (" + shortened(reason.get<std::string>(), 200) + ")");
        if (event == "start" || event == "end") ended = event == "end";
        if (event == "spike") add(step, "spike");
    }
    for (const Json& line : supervisor_events(run))
        add(line["step"].get<int64_t>(),
            "supervisor: " + shortened(line["text"].get<std::string>(), 200));
    std::ranges::stable_sort(marks, {}, &RunMark::step);
    return joined(marks);
}

std::string page_data(const std::vector<RecordedRun>& runs, int pixels) {
    std::string text;
    for (const RecordedRun& run : runs)
        text += (text.empty() ? "" : ",\n") + run_json(run, pixels, runs.size());
    std::string stamp;
    for (const RecordedRun& run : runs)
        stamp += concat(run.lines_read(), run.active() ? " running " : " ");
    return script_safe(concat("{\"stamp\":\"", stamp, "\",\"runs\":[", text, "]}"));
}

}  // namespace train_gpt
