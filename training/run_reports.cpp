#include "training/run_reports.h"

#include <memory>
#include <string>

#include "base/error.h"
#include "base/formatted.h"
#include "model/families/family.h"
#include "training/config/config_text.h"
#include "training/plan/plan.h"
#include "training/sampling.h"
#include "training/watch/tensorboard.h"

namespace train_gpt {

namespace {

/// "training N parameters in bf16 on …"
std::string describe_training(const RunStart& start) {
    const Config& config = start.config;
    const int64_t micro_batches = config.micro_batches_per_step();
    const int ranks = start.ranks();
    // Earlier steps may have had other sizes.
    const std::string steps = start.schedule.start().tokens.parts().size() > 1 && start.resumes
                                  ? concat(start.steps_left(), " more steps of ")
                                  : concat(start.schedule.steps(), " steps of ");
    const int64_t first = start.schedule.tokens_of(start.first_step());
    const std::string from =
        first < config.batch.tokens_per_step ? concat(first, " to ") : std::string();
    const DecoderSpec& spec = start.data.spec();
    const int64_t parameters = registry_of(spec).numel(), idle = spec.idle_parameters();
    return concat("training ", parameters, " parameters ",
                  idle > 0 ? concat("(", parameters - idle, " for each token) ") : "", "in ",
                  name_of(start.trainer.parameters.dtype()), " on ",
                  ranks > 1 ? concat(ranks, " × ") : "", device_name(start.trainer.stream.device),
                  ", ", steps, from, config.batch.tokens_per_step, " tokens (", micro_batches,
                  " micro-batch", micro_batches == 1 ? "" : "es", " of ", config.batch.micro_batch,
                  " × ", config.sequence_length(), "), ", format_bytes(start.plan.total_bytes()),
                  ranks > 1 ? " each" : "", ", into ", config.run_dir);
}

/// Which stage of ZeRO the run uses, if it chose.
std::string describe_stage(const RunStart& start) {
    return concat("parallel.zero: stage ", start.config.parallel.zero.value(), ", ",
                  start.link > 0 ? concat("chosen for ", formatted("%.2f", start.link / 1e9),
                                          " GB/s along the data axis")
                  : start.kept.zero == start.config.parallel.zero
                      ? "as the kept choices say"
                      : "since no other rank has a part of the state");
}

/// Why gradients are not added exactly, in a new run that may choose; empty if they are.
std::string note_on_sums(const RunStart& start) {
    if (!start.given.parallel.sums.is_auto() || start.resumes ||
        start.config.parallel.sums == GradientSums::exact)
        return "";
    const std::optional<GradientSums> sums = start.config.parallel.sums;
    return concat("parallel.sums: ", start.config.parallel.sums.word(),
                  start.kept.sums == sums ? ", as the choices say that are taken"
                  : start.config.parallel.reserved_sms > 0
                      ? ", since products depend on the number of ranks with parallel.reserved_sms"
                      : ", since a step may have more micro-batches than exact sums allow",
                  "; the last bits depend on the number of ranks");
}

std::string describe_fp8(const RunStart& start) {
    const DType dtype = start.trainer.parameters.dtype();
    return described(fp8_products(RunShape(start.config, start.data.spec(), dtype, Recompute::none,
                                           start.ranks())),
                     fp8_options(start.config), dtype);
}

}  // namespace

std::string note_on_bits(bool deterministic, const AttentionUse& attention) {
    if (deterministic) return "";
    return attention.same_bits
               ? "kernels.deterministic is off, which changes nothing here: all kernels that run "
                 "give the same bits every time"
               : "kernels.deterministic is off: bits differ from run to run";
}

void announce(const RunStart& start, Progress& progress) {
    progress.say(describe_training(start));
    if (const std::string note =
            note_on_vocabulary(start.given, start.data.spec(), start.data.tokenizer());
        !start.resumes && !note.empty())
        progress.say("note: " + note);
    if (!start.given.parallel.zero) progress.say(describe_stage(start));
    if (const std::string note = note_on_sums(start); !note.empty()) progress.say(note);
    if (start.trainer.fp8) progress.say(describe_fp8(start));
    if (start.trainer.stream.device.is_cuda())
        progress.say("attention: " + start.attention.explained());
    if (const std::string note = note_on_bits(start.config.kernels.deterministic, start.attention);
        !note.empty())
        progress.say(note);
    if (const std::string use = describe_use(start.planned_use()); !use.empty()) progress.say(use);
    const StepSize size = size_of_step(start);
    if (start.steps_left() > 0 && size.least_seconds() >= slow_step_seconds)
        progress.say(describe_slow_steps(size.flops, size.least_seconds(), start.steps_left()));
}

RunReports::RunReports(const RunStart& start, Progress& to)
    : progress(to),
      metrics(start.given.run_dir, start.resume_step(),
              {.tokens = start.schedule.start().tokens, .writes = start.on_first_rank()}),
      log(start, progress, metrics),
      fingerprints(start.given.run_dir, start.resume_step(), start.given.log.fingerprint_every > 0,
                   start.on_first_rank()),
      routers(start.given.run_dir, start.resume_step(),
              {.layers = expert_layers(start.data.spec()),
               .n_layer = start.data.spec().n_layer,
               .steps = start.schedule.steps(),
               .writes = start.on_first_rank()}),
      collapses(expert_layers(start.data.spec()), start.data.spec().experts.n_expert_per_token,
                start.config),
      history(start.given.run_dir, start.on_first_rank()),
      page(start.given.run_dir, start.on_first_rank(), progress) {
    if (start.on_first_rank() && start.given.log.tensorboard)
        metrics.add(std::make_unique<TensorBoardSink>(
            start.given.run_dir, start.resume_step(),
            TensorBoardSink::Options{.config = to_json(start.recorded()),
                                     .memory = start.plan.total_bytes()}));
    if (start.on_first_rank()) metrics.add(std::make_unique<HistorySink>(history));
    const World& world = start.mesh.world();
    if (const std::string trouble = history.start(start, world.all_gather(world.host()));
        !trouble.empty())
        progress.warn(trouble);
}

void RunReports::add(int64_t number, const StepOutcome& outcome, StepClock& clock) {
    routers.add(number, outcome.routers);
    if (const std::string line = collapses.add(number, outcome.routers); !line.empty())
        progress.warn(line);
    log.add(number, outcome, clock);
}

void RunReports::spike(int64_t number, const std::string& text) {
    progress.warn(text);
    history.spike(number, text);
}

void print_samples(const RunStart& start, RunReports& reports, int64_t step,
                   const SampleNumbers& numbers) {
    Trainer& trainer = start.trainer;
    const auto& s = start.given.sampling;
    SamplingOptions options{.max_tokens = s.max_tokens,
                            .temperature = s.temperature,
                            .top_k = s.top_k,
                            .top_p = s.top_p,
                            .seed = s.seed,
                            .ends = ends_of_text(start.tokens)};
    if (!trainer.parameters.holds_whole_model())
        options.agree = [&](int32_t token) {
            return std::stoi(start.mesh.world().broadcast(std::to_string(token)));
        };
    std::string all;
    for (int i = 0; i < numbers.count; ++i) {
        const uint64_t number = numbers.first + static_cast<uint64_t>(i);
        const std::string text =
            sample_text({trainer.stream, trainer.generator(), *start.data.tokenizer()}, s.prompt,
                        options, number);
        reports.progress.show_text("--- sample\n" + s.prompt + text);
        reports.history.sample(step, s.prompt, text);
        all += (i > 0 ? "\n--- sample\n" : "") + s.prompt + text;
    }
    if (numbers.count > 0) reports.metrics.write_text(step, "samples", all);
}

}  // namespace train_gpt
