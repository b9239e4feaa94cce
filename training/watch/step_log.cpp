#include "training/watch/step_log.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "model/families/family.h"
#include "training/plan/datasheet.h"
#include "training/watch/router_figures.h"

namespace train_gpt {

StepSize size_of_step(const RunStart& start) {
    const Config& config = start.config;
    const Trainer& trainer = start.trainer;
    const int T = config.sequence_length();
    return {.targets = config.micro_batches_per_step() * config.batch.micro_batch * T,
            .flops = start.data.spec().flops_per_token(T) *
                     static_cast<double>(config.batch.tokens_per_step),
            .ranks = start.ranks(),
            .peak_flops = start.peak_flops,
            .datasheet_flops = datasheet_flops(trainer.stream.device, trainer.parameters.dtype())};
}

namespace {

/// Elements of all gradients of a step's micro-batches. Steps count from 0.
double elements_of_step(const RunStart& start, int64_t step) {
    const double part = static_cast<double>(start.schedule.tokens_of(step)) /
                        static_cast<double>(start.config.batch.tokens_per_step);
    return static_cast<double>(registry_of(start.data.spec()).numel()) *
           static_cast<double>(start.trainer.optimizer.contributions()) * part;
}

/// The micro-batches of this rank in a step, as TrainLoader gives them out. Steps count from 0.
int64_t micro_batches_of_rank(const RunStart& start, int64_t step) {
    const int64_t all = start.micro_batches_of(step), ranks = start.mesh.size(Axis::data),
                  place = start.mesh.at(Axis::data);
    return (place + 1) * all / ranks - place * all / ranks;
}

}  // namespace

StepLog::StepLog(const RunStart& start, Progress& progress, MetricsLog& metrics)
    : start_(start),
      size_(size_of_step(start)),
      progress_(progress),
      metrics_(metrics),
      peak_flops_(size_.peak_flops) {}

double StepLog::expected_seconds() const {
    return pace_.recent() > 0 ? pace_.recent() : size_.least_seconds();
}

void StepLog::add(int64_t number, const StepOutcome& outcome, StepClock& clock) {
    const double seconds = since_last_step_.seconds();
    restart_time();
    StepTimes times = clock.pop();
    times.add(std::exchange(lost_, {}));
    accounting_.add(times);
    pace_.add(seconds, times);
    const Schedule& schedule = start_.schedule;
    slow_ranks_.add(times, micro_batches_of_rank(start_, number - 1));
    if (slow_ranks_.is_due())
        for (const std::string& line :
             slow_ranks_.take(number, start_.mesh.world(), start_.mesh.at(Axis::pipeline)))
            progress_.warn(line);
    const bool logged =
        number % start_.config.log.every == 0 || number == 1 || number == schedule.steps();
    if (!logged && number != schedule.start().step + 1) return;
    const StepReport report = report_of(number, outcome);
    progress_.report(report);
    if (logged) write(report, outcome);
}

void StepLog::repeat(int64_t number, const StepTimes& lost) {
    lost_.add(lost);
    ++repeated_;
    if (std::exchange(has_repeated_, true)) return;
    progress_.say(concat("note: gradients of step ", number,
                         " are larger than the grids of parallel.sums=exact allow, so the step is "
                         "computed again; metrics.jsonl counts such steps as repeated_steps"));
}

StepReport StepLog::report_of(int64_t number, const StepOutcome& outcome) {
    const StepPace::Mean mean = pace_.take();
    const Schedule& schedule = start_.schedule;
    const auto targets = static_cast<double>(schedule.tokens_of(number - 1));
    const double flops = size_.flops * (targets / static_cast<double>(size_.targets));
    // The measured peak may be too low if something disturbed the measurement: a rate that a step
    // reaches is certainly possible, unless the host saw the step's end late and the next one's
    // soon after it.
    const double reached = flops / mean.seconds / size_.ranks;
    if (size_.datasheet_flops == 0 || reached < size_.datasheet_flops)
        peak_flops_ = std::max(peak_flops_, reached);
    return {.step = number,
            .steps = schedule.steps(),
            .loss = outcome.sums.loss / targets,
            .grad_norm = outcome.state.norm,
            .learning_rate = schedule.learning_rate(number - 1),
            .seconds = mean.seconds,
            .tokens_per_second = targets / mean.seconds,
            .flops_per_second = flops / mean.seconds,
            .peak_flops_per_second = peak_flops_ * size_.ranks,
            .datasheet_flops_per_second = size_.datasheet_flops * size_.ranks,
            .memory = start_.plan.total_bytes(),
            .ranks = size_.ranks,
            .times = mean.times,
            // As long for each token as recent steps
            .seconds_left = static_cast<double>(schedule.tokens_before(schedule.steps()) -
                                                schedule.tokens_before(number)) /
                            targets * pace_.recent()};
}

/// Writes a step's line to metrics.jsonl.
void StepLog::write(const StepReport& r, const StepOutcome& outcome) {
    MetricsLog::Fields fields{{"loss", r.loss},
                              {"grad_norm", r.grad_norm},
                              {"learning_rate", r.learning_rate},
                              {"ms", 1e3 * r.seconds},
                              {"tokens_per_second", r.tokens_per_second},
                              {"flops_per_second", r.flops_per_second},
                              {"peak_fraction", r.flops_per_second / r.peak_flops_per_second}};
    if (start_.config.optimizer.name == OptimizerName::muon)
        fields.emplace_back("matrix_learning_rate",
                            matrix_learning_rate(start_.config, r.learning_rate));
    if (r.datasheet_flops_per_second > 0)
        fields.emplace_back("mfu", r.flops_per_second / r.datasheet_flops_per_second);
    if (const std::string engines = start_.attention.engines(); !engines.empty())
        fields.emplace_back("attention", engines);
    for (const auto& [phase, name] : {std::pair{StepPhase::compute, "compute_ms"},
                                      {StepPhase::communication, "communication_ms"},
                                      {StepPhase::data, "data_wait_ms"},
                                      {StepPhase::optimizer, "optimizer_ms"}})
        fields.emplace_back(name, 1e3 * r.times[phase]);
    for (const auto& [group, seconds] : r.times.exposed)
        fields.emplace_back("exposed_ms/" + group, 1e3 * seconds);
    if (const double share = bubble_share(r.times); share > 0) fields.emplace_back("bubble", share);
    for (const auto& [group, bytes] : sent_) fields.emplace_back("bytes_sent/" + group, bytes);
    if (outcome.state.spikes > 0) fields.emplace_back("spikes", outcome.state.spikes);
    if (start_.trainer.fp8) fields.emplace_back("fp8_saturated", outcome.fp8.saturated);
    if (start_.config.parallel.sums == GradientSums::exact) {
        fields.emplace_back("repeated_steps", std::exchange(repeated_, 0));
        fields.emplace_back("rounded_to_zero", static_cast<double>(outcome.state.lost) /
                                                   elements_of_step(start_, r.step - 1));
    }
    const DecoderSpec& spec = start_.data.spec();
    for (const MetricsLog::Fields& more :
         {fields_of_data(r.step, outcome.sums),
          router_fields(outcome.routers, expert_layers(spec), spec.n_layer)})
        fields.insert(fields.end(), more.begin(), more.end());
    metrics_.write(r.step, fields);
}

/// The passes over the training data up to a step; of several sources for each, with its loss in
/// this step and its tokens up to it.
MetricsLog::Fields StepLog::fields_of_data(int64_t number, const StepSums& sums) const {
    MetricsLog::Fields fields;
    const Schedule& schedule = start_.schedule;
    const auto use_before = [&](int64_t step) {
        return start_.data.use().after(schedule.start().order, schedule.tokens_before(step));
    };
    const std::vector<SourceUse> after = use_before(number);
    const auto add_passes = [&](const SourceUse& source, const std::string& name) {
        if (!std::isnan(source.passes)) fields.emplace_back(name, source.passes);
    };
    if (after.size() == 1) {
        add_passes(after[0], "passes");
        return fields;
    }
    const std::vector<SourceUse> before = use_before(number - 1);
    for (size_t s = 0; s < after.size(); ++s) {
        const auto& [name, tokens, passes] = after[s];
        if (tokens > before[s].tokens)
            fields.emplace_back("loss/" + name, sums.loss_of_source[s] /
                                                    static_cast<double>(tokens - before[s].tokens));
        fields.emplace_back("tokens/" + name, tokens);
        add_passes(after[s], "passes/" + name);
    }
    return fields;
}

}  // namespace train_gpt
