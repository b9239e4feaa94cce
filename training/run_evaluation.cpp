#include "training/run_evaluation.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "base/stopwatch.h"
#include "dataloader/manifest.h"
#include "training/evaluations/task_evaluation.h"
#include "training/evaluations/task_report.h"
#include "training/interrupt.h"

namespace train_gpt {

namespace {

constexpr double most_seconds_at_start = 30;

/// Follows one evaluation: shows its progress, and estimates how long all of it takes.
class Watch {
  public:
    Watch(const char* what, Progress& progress) : what_(what), progress_(progress) {}

    /// Estimated at the speed so far; 0 while it is too early for that.
    double seconds_of_all(double done) const {
        constexpr double enough_seconds = 2;
        const double seconds = since_start_.seconds();
        return done > 0 && seconds > enough_seconds ? seconds / done : 0;
    }
    void show(double done) {
        const double all = seconds_of_all(done);
        if (all == 0) return;
        progress_.show(concat(what_, ": ", static_cast<int>(100 * done), "%"),
                       all - since_start_.seconds());
    }

  private:
    const char* what_;
    Progress& progress_;
    Stopwatch since_start_;
};

/// The fields of an evaluation in metrics.jsonl.
MetricsLog::Fields fields_of(const ValidationResult& v) {
    MetricsLog::Fields fields{{"val_loss", v.nats_per_token}, {"val_tokens", v.tokens}};
    if (std::isfinite(v.bits_per_byte)) fields.emplace_back("val_bits_per_byte", v.bits_per_byte);
    return fields;
}

/// What is printed about an evaluation.
std::string text_of(int64_t step, const ValidationResult& v) {
    return concat(describe_validation(step, v.nats_per_token, v.bits_per_byte), " over ", v.tokens,
                  " tokens");
}

}  // namespace

std::string describe_validation(int64_t step, double nats_per_token, double bits_per_byte) {
    return concat("step ", step, ": validation loss ", nats_per_token, " nats/token",
                  std::isfinite(bits_per_byte) ? concat(", ", bits_per_byte, " bits/byte") : "");
}

std::string describe_best(const std::filesystem::path& run_dir, int64_t step) {
    const LoggedEvaluation best = best_evaluation(run_dir, step);
    if (best.step < 0 || best.step == step) return "";
    return "best: " + describe_validation(best.step, best.nats_per_token, best.bits_per_byte);
}

bool evaluate_and_log(const Evaluations& on, const EvaluationPlace& at) try {
    Trainer& run = at.run;
    const auto watch = [&](const char* what) {
        return [watch = Watch(what, at.progress)](double done) mutable {
            watch.show(done);
            return interrupted() != nullptr;
        };
    };
    const EvaluatedModel model{run.stream, run.model, run.evaluation_batch, at.mesh, run.scorer()};
    const ValidationResult v = evaluate(model, *on.validation, on.tokenizer, watch("evaluation"));
    MetricsLog::Fields fields = fields_of(v);
    std::string text = text_of(at.step, v);
    if (on.hellaswag) {
        const HellaSwagResult h = on.hellaswag->evaluate(model, watch("HellaSwag"));
        text += concat("; HellaSwag ", h.accuracy, ", length-normalised ", h.accuracy_normalised);
        fields.emplace_back("hellaswag", h.accuracy);
        fields.emplace_back("hellaswag_normalised", h.accuracy_normalised);
    }
    if (!on.tasks.empty()) {
        const std::vector<TaskResult> results =
            evaluate(model, on.tasks, *on.tokenizer, watch("tasks"));
        text += "; " + summary_of_tasks(results);
        for (const auto& [name, value] : metrics_of_tasks(results))
            fields.emplace_back(name, value);
    }
    at.progress.say(text);
    at.metrics.write(at.step, fields, MetricsRecord::Kind::evaluation);
    return true;
} catch (const EvaluationStopped&) {
    return false;
}

void evaluate_at_start(const Evaluations& on, const EvaluationPlace& at, double least_seconds) {
    const auto leave_out = [&](double seconds) {
        at.progress.say(concat("step ", at.step, ": no evaluation, which would take about ",
                               rough_duration(seconds)));
    };
    // All ranks use the longest of their estimates, so that they decide the same.
    double longest = 0;
    for (const std::string& seconds : at.mesh.world().all_gather(std::to_string(least_seconds)))
        longest = std::max(longest, std::stod(seconds));
    if (longest > most_seconds_at_start) return leave_out(longest);
    Watch watch("evaluation", at.progress);
    double seconds = 0;
    try {
        const ValidationResult v =
            evaluate({at.run.stream, at.run.model, at.run.evaluation_batch, at.mesh},
                     *on.validation, on.tokenizer, [&](double done) {
                         watch.show(done);
                         seconds = watch.seconds_of_all(done);
                         return interrupted() != nullptr || seconds > most_seconds_at_start;
                     });
        at.progress.say(text_of(at.step, v));
        at.metrics.write(at.step, fields_of(v), MetricsRecord::Kind::evaluation);
    } catch (const EvaluationStopped&) {
        if (!interrupted()) leave_out(std::max(seconds, most_seconds_at_start));
    }
}

std::string note_on_validation(const std::string& glob) {
    if (glob == "synthetic") return "";
    const auto manifest = find_data_manifest(std::filesystem::path(glob).parent_path());
    if (!manifest || manifest->val_split != "tail") return "";
    return "note: the validation data are the end of the text; where that differs from the rest, "
           "validation loss stays above training loss";
}

}  // namespace train_gpt
