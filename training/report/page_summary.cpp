#include "training/report/page_summary.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/error.h"
#include "base/formatted.h"
#include "training/report/comparison_notes.h"
#include "training/report/html_text.h"
#include "training/report/page_data.h"
#include "training/report/setting_text.h"
#include "training/report/thinning.h"
#include "training/watch/progress.h"

namespace train_gpt {

namespace {

std::string state_of(const RecordedRun& run) {
    for (size_t i = run.history().size(); i-- > 0;) {
        const Json& line = run.history()[i];
        const std::string event = field_text(line, "event");
        if (event == "end")
            return field_text(line, "reason") == "complete"
                       ? "complete"
                       : "stopped: " + html(shortened(field_text(line, "reason"), 1200));
        if (event == "start" && run.active()) return "running when this page was written";
        if (event == "start") return "ended without saying why (killed, or the machine failed)";
    }
    if (run.active()) return "running when this page was written";
    const int64_t planned = run.steps_planned();
    return planned > 0 && run.last_step() >= planned ? "complete" : "not complete";
}

std::string model_of(const RecordedRun& run) {
    const std::string family = text_of(run.setting("model.family"));
    if (family.empty()) return "";
    std::string text =
        concat(html(family), ", ", html(text_of(run.setting("model.n_layer"))), " layers of ",
               html(text_of(run.setting("model.n_embd"))), " channels");
    if (const Json* start = run.last_start())
        if (const double n = number_of(start->value("parameters", Json())); n > 0) {
            const double active = number_of(start->value("active_parameters", Json()));
            const std::string share =
                active > 0 ? concat(" (", rough_count(active), " for each token)") : "";
            text = concat(rough_count(n), " parameters", share, ": ", text);
        }
    return text;
}

std::string speed_of(const RecordedRun& run) {
    std::vector<double> rates;
    for (const double rate : run.training().column("tokens_per_second"))
        if (std::isfinite(rate)) rates.push_back(rate);
    if (rates.empty()) return "";
    const auto middle = rates.begin() + std::ssize(rates) / 2;
    std::ranges::nth_element(rates, middle);
    std::string text = count_text(std::round(*middle)) + " tokens/s";
    const double share = run.training().last("peak_fraction"), mfu = run.training().last("mfu");
    if (std::isfinite(mfu)) text += formatted(", %.0f %% of the datasheet’s rate", 100 * mfu);
    if (std::isfinite(share)) text += formatted(", %.0f %% of the measured limit", 100 * share);
    return text;
}

std::string time_of(const RecordedRun& run) {
    double seconds = 0;
    for (const MetricsTable* table : {&run.training(), &run.evaluations()})
        if (const double last = table->last("seconds"); last > seconds) seconds = last;
    return seconds >= 3600 ? format_duration(seconds) + " hours"
                           : formatted("%d min %02d s", static_cast<int>(seconds) / 60,
                                       static_cast<int>(seconds) % 60);
}

std::string tokens_seen(const RecordedRun& run) {
    double last = -1;
    for (const MetricsTable* table : {&run.training(), &run.evaluations()})
        for (const double tokens : run.tokens(*table))
            if (tokens > last) last = tokens;
    return last < 0 ? "" : rough_count(last);
}

/// "2.15 of 3", or of several sources "web 0.2 of 0.3, books 2.15 of 3"
std::string passes_of(const RecordedRun& run) {
    const MetricsTable& training = run.training();
    const std::vector<SourceUse> planned = run.passes_planned();
    std::string text;
    for (const SourceUse& source : planned) {
        const bool single = planned.size() == 1 && training.has("passes");
        const double last = training.last(single ? "passes" : "passes/" + source.name);
        if (!text.empty()) text += ", ";
        if (!single) text += html(source.name) + " ";
        text += (std::isfinite(last) ? formatted("%.3g of ", last) : "") +
                formatted("%.3g", source.passes);
    }
    return text;
}

/// The dtype; of runs of earlier versions as the configuration says.
std::string dtype_of_run(const RecordedRun& run) {
    const Json* start = run.last_start();
    const std::string dtype = start ? field_text(*start, "dtype") : "";
    return html(dtype.empty() ? setting_text("precision.dtype", run.setting("precision.dtype"))
                              : dtype);
}

/// "16,384 tokens a step, in sequences of 256"
std::string batch_of(const RecordedRun& run) {
    const double tokens = number_of(run.setting("batch.tokens_per_step"));
    double length = number_of(run.setting("batch.sequence_length"));
    if (length == 0) length = number_of(run.setting("model.n_ctx"));
    if (tokens <= 0) return "";
    return count_text(tokens) + " tokens a step" +
           (length > 0
                ? concat(": ", count_text(tokens / length), " sequences of ", count_text(length))
                : "");
}

/// "3, the last one at step 1,200"; empty for a run whose history has none.
std::string spikes_of(const RecordedRun& run) {
    int64_t number = 0, last = 0;
    for (const Json& line : run.history())
        if (field_text(line, "event") == "spike") ++number, last = line["step"].get<int64_t>();
    if (number == 0) return "";
    return concat(number, number == 1 ? ", at step " : ", the last one at step ",
                  count_text(static_cast<double>(last)));
}

/// "saw ranks fail once, took 2 hosts out and started the ranks again 3 times"; empty if a
/// supervisor did none of these.
std::string supervised(const RecordedRun& run) {
    int failures = 0, hosts = 0, restarts = 0;
    for (const Json& line : supervisor_events(run)) {
        const std::string event = field_text(line, "event");
        failures += event == "ranks_end", hosts += event == "host_out";
        restarts += event == "ranks_start";
    }
    const auto times = [](int n) { return n == 1 ? "once" : concat(n, " times"); };
    std::vector<std::string> did;
    if (failures > 0) did.push_back("saw ranks fail " + times(failures));
    if (hosts > 0) did.push_back(concat("took ", hosts, hosts == 1 ? " host out" : " hosts out"));
    if (restarts > 0) did.push_back("started the ranks again " + times(restarts));
    return listed(did);
}

/// "4; a supervisor saw ranks fail once": of a run that was started more than once.
std::string starts_of(const RecordedRun& run) {
    const auto starts = std::ranges::count_if(
        run.history(), [](const Json& line) { return field_text(line, "event") == "start"; });
    const std::string did = supervised(run);
    if (starts < 2 && did.empty()) return "";
    return concat(starts, did.empty() ? "" : "; a supervisor " + did, " (see Provenance)");
}

/// An evaluation and the step that it is of; empty if there is none.
std::string evaluation_of(const RecordedRun& run, const char* field, std::optional<size_t> row,
                          const char* unit) {
    if (!row || !run.evaluations().has(field)) return "";
    const double value = run.evaluations().column(field)[*row], at = run.evaluations().step[*row];
    if (!std::isfinite(value)) return "";
    return formatted("%.4f", value) + unit + " at step " + count_text(at) +
           (at == 0 && run.last_step() > 0 ? ", before training" : "");
}

/// The last accuracies of tasks, or CORE, each with its standard error.
std::string tasks_of(const RecordedRun& run) {
    const MetricsTable& evaluations = run.evaluations();
    constexpr std::string_view task = "task/", core = "core/", accuracy = "/accuracy",
                               error = "/stderr";
    const bool has_core = evaluations.has("core/v2");
    std::string text;
    for (const auto& [column, values] : evaluations.columns) {
        const bool shown = has_core ? column.starts_with(core) && !column.ends_with(error)
                                    : column.starts_with(task) && column.ends_with(accuracy);
        const double last = evaluations.last(column);
        if (!shown || !std::isfinite(last)) continue;
        const std::string name =
            has_core ? column : column.substr(0, column.size() - accuracy.size());
        const double band = evaluations.last(name + std::string(error));
        const std::string label =
            has_core ? "CORE with baselines " + name.substr(core.size()) : name.substr(task.size());
        text += (text.empty() ? "" : ", ") + html(label) + formatted(" %.4f", last) +
                (std::isfinite(band) ? formatted(" ± %.4f", band) : "");
    }
    return text;
}

std::vector<Fact> summary_of(const RecordedRun& run) {
    const int64_t step = run.last_step(), planned = run.steps_planned();
    const MetricsTable& training = run.training();
    const Curve mean = running_mean(training.step, training.column("loss"));
    const std::optional<size_t> last = run.evaluations().last_row("val_loss"),
                                best = run.evaluations().smallest_row("val_loss", "val_tokens");
    const double validation = run.evaluations().last("val_loss");
    const auto shown = [](double value) {
        return std::isfinite(value) ? formatted("%.4f", value) : "";
    };
    return {
        {"State", state_of(run)},
        {"Model", model_of(run)},
        {"Computed in", dtype_of_run(run)},
        {"Batch", batch_of(run)},
        {"Steps", count_text(static_cast<double>(step)) +
                      (planned > 0 ? " of " + count_text(static_cast<double>(planned)) : "")},
        {"Tokens seen", tokens_seen(run)},
        {"Passes over the training data", passes_of(run)},
        {"Time trained", time_of(run)},
        {"Speed", speed_of(run)},
        {"Starts", starts_of(run)},
        {"Spikes", spikes_of(run)},
        {"Training loss, recent mean",
         mean.size() > 0 ? shown(mean.y.back()) + " nats per token" : ""},
        {"Validation loss, last", evaluation_of(run, "val_loss", last, " nats per token")},
        {"The same, per byte of text", evaluation_of(run, "val_bits_per_byte", last, " bits")},
        {"Perplexity", std::isfinite(validation) && validation < 25
                           ? formatted("%.4g", std::exp(validation)) + ": as uncertain as among " +
                                 rough_count(std::round(std::exp(validation))) +
                                 " equally likely next tokens"
                           : ""},
        {"Validation loss, best", run.evaluations().rows() < 2
                                      ? ""
                                      : evaluation_of(run, "val_loss", best, " nats per token")},
        {"Tasks, last", tasks_of(run)}};
}

}  // namespace

std::string summary_html(const std::vector<RecordedRun>& runs) {
    std::vector<std::vector<Fact>> facts;
    for (const RecordedRun& run : runs) facts.push_back(summary_of(run));
    return table_of_facts(runs, facts);
}

std::string notes_html(const std::vector<RecordedRun>& runs) {
    std::vector<std::string> notes = notes_on_comparison(runs);
    for (const RecordedRun& run : runs)
        for (const std::string& note : run.notes()) notes.push_back(note);
    if (notes.empty()) return "";
    std::string text = "<ul class=\"notes\">";
    for (const std::string& note : notes) text += "<li>" + html(sentence(note)) + "</li>";
    return text + "</ul>\n";
}

}  // namespace train_gpt
