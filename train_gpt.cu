// train_gpt: pretrains GPT language models. The commands, and the training loop from top to bottom.
// Compiles as CUDA and, where there is no nvcc, as plain C++.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>

#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "dataloader/loader.h"
#include "dataloader/manifest.h"
#include "dataloader/prepare.h"
#include "dataloader/verify.h"
#include "device/device.h"
#include "kernels/attention/engine.h"
#include "kernels/choices.h"
#include "kernels/head_loss.h"
#include "kernels/linear/linear.h"
#include "parallel/communicator.h"
#include "parallel/cores.h"
#include "parallel/together.h"
#include "parallel/watchdog.h"
#include "parallel/world.h"
#include "tokenizer/tokenizer.h"
#include "training/checkpoint.h"
#include "training/command_line.h"
#include "training/complete_run.h"
#include "training/config.h"
#include "training/config_help.h"
#include "training/evaluation.h"
#include "training/inference_session.h"
#include "training/interchange.h"
#include "training/interrupt.h"
#include "training/known_data.h"
#include "training/peak.h"
#include "training/plan.h"
#include "training/progress.h"
#include "training/prompts.h"
#include "training/run_evaluation.h"
#include "training/run_folder.h"
#include "training/sampling.h"
#include "training/schedule.h"
#include "training/selfcheck.h"
#include "training/shard_watch.h"
#include "training/step_accounting.h"
#include "training/step_pace.h"
#include "training/step_profile.h"
#include "training/trainer.h"
#include "training/verification.h"
#include "training/version.h"

namespace train_gpt {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Why the loop ended; the exit code follows from it.
enum class Ending { finished, stopped, interrupted, out_of_time, not_finite, damaged_data };

/// The exit code of a run that ended early with everything saved; the same on all ranks, which call it together.
int exit_code_of(Ending ending, const World& world) {
    if (ending == Ending::stopped) return 0;
    double ctrl_c[] = {interrupt_signal() == SIGINT ? 1.0 : 0.0};
    world.all_reduce_sum(ctrl_c);
    return stopped_early_code(ctrl_c[0] > 0);
}

void print_samples(Trainer& run, const Tokenizer& tokenizer, const Config& config, uint64_t first,
                   int count, Progress& progress) {
    const auto& s = config.sampling;
    const SamplingOptions options{.max_tokens = s.max_tokens,
                                  .temperature = s.temperature,
                                  .top_k = s.top_k,
                                  .top_p = s.top_p,
                                  .seed = s.seed};
    for (int i = 0; i < count; ++i) {
        const uint64_t number = first + static_cast<uint64_t>(i);
        progress.say("--- sample\n" + s.prompt +
                     sample_text(run.stream, run.generator, tokenizer, s.prompt, options, number));
    }
}

/// What the newest whole checkpoint of the run folder was computed with; nothing when the run is new.
Choices kept_choices(const std::filesystem::path& run_dir) {
    for (const auto& checkpoint : list_checkpoints(run_dir)) {
        try {
            verify_checkpoint(checkpoint, Verify::choices);
            return read_choices(checkpoint);
        } catch (const Error&) {
            // resume() says what is wrong with it, and goes back to the one before.
        }
    }
    return {};
}

/// Whether a model folder's tokenizer, where it has one, gives the ids the same bytes as the run's, where it has one.
bool same_tokens(const std::filesystem::path& folder, const Tokenizer* vocabulary) {
    const auto theirs = read_folder_tokenizer(folder);
    return !theirs || !vocabulary || vocabulary->has_tokens_of(*theirs);
}

/// Throws Error where the run cannot resume from a checkpoint since it is of another model; says what else has changed.
void compare_with(const std::filesystem::path& checkpoint, const Config& config,
                  const GPTShape& shape, const Tokenizer* vocabulary, Progress& progress) {
    require_same_model(checkpoint, read_model_shape(checkpoint), shape);
    if (!same_tokens(checkpoint, vocabulary))
        throw Error("the tokenizer ", config.tokenizer.path, " has other tokens than the one in ",
                    checkpoint.string(),
                    "; change tokenizer.path back, or start afresh with "
                    "another run_dir");
    for (const std::string& change : config_differences(checkpoint_config(checkpoint), config))
        progress.say("note: since this checkpoint " + change);
}

/// Restores the newest whole checkpoint of the run folder and returns its step; nothing when the run is new.
std::optional<int64_t> resume(const Config& config, const GPTShape& shape,
                              const Tokenizer* vocabulary, Trainer& run, const World& world,
                              Progress& progress) {
    const auto pulse = [&] { world.activity().pulse(); };
    const std::filesystem::path checkpoint = first_for_all(world, [&]() -> std::string {
        const auto found = recover_newest_checkpoint(
            config.run_dir, [&](const std::string& text) { progress.warn(text); }, pulse);
        if (!found) return "";
        compare_with(*found, config, shape, vocabulary, progress);
        return found->string();
    });
    if (checkpoint.empty()) return {};
    together(world, [&] {
        load_training_state(checkpoint, run.parameters, pulse);
        return "";
    });
    run.parameters.gather_all(run.stream);
    progress.say("resuming from " + checkpoint.string());
    return checkpoint_step(checkpoint);
}

/// The weights that a new run starts from: random, or those of model.init_from.
void start(const Config& config, const GPTShape& shape, const Tokenizer* vocabulary, Trainer& run,
           const World& world, Progress& progress) {
    run.parameters.initialize(config.seed);
    if (config.model.init_from.empty()) return;
    const auto source =
        find_whole_checkpoint(config.model.init_from, [&] { world.activity().pulse(); });
    StoredModel model = open_model_folder(source);
    require_same_model(source, model.shape, shape);
    model.read = [&, read = std::move(model.read)](const Parameter& p, int64_t first,
                                                   std::span<float> values) {
        world.activity().pulse();
        read(p, first, values);
    };
    load_weights(model, run.parameters);
    progress.say("starting from the weights of " + source.string());
    if (!same_tokens(source, vocabulary))
        progress.warn("the tokenizer " + config.tokenizer.path +
                      " has other tokens than the one of these weights");
}

/// AdamW's constants for the update behind `step` steps.
AdamWStep adamw_step(const Config& config, int64_t step, double rate) {
    const auto& o = config.optimizer;
    return {.learning_rate = static_cast<float>(rate),
            .beta1 = static_cast<float>(o.beta1),
            .beta2 = static_cast<float>(o.beta2),
            .epsilon = static_cast<float>(o.epsilon),
            .weight_decay = static_cast<float>(o.weight_decay),
            .step = step + 1};
}

/// Loss in a step, and tokens up to it, of each of several sources of training data.
MetricsLog::Fields metrics_of_sources(const Config& config, const TrainLoader& loader, int64_t step,
                                      const Optimizer::StepSums& sums) {
    MetricsLog::Fields fields;
    const auto& sources = config.data.train;
    if (sources.size() == 1) return fields;
    const std::vector<int64_t> before = loader.samples_before(step - 1),
                               behind = loader.samples_before(step);
    const int64_t T = config.sequence_length();
    for (size_t s = 0; s < sources.size(); ++s) {
        if (behind[s] > before[s])
            fields.emplace_back(
                "loss/" + sources[s].name,
                sums.loss_of_source[s] / static_cast<double>((behind[s] - before[s]) * T));
        fields.emplace_back("tokens/" + sources[s].name, behind[s] * T);
    }
    return fields;
}

/// A step's line in metrics.jsonl, with `more` fields.
void log_step(const StepReport& r, const MetricsLog::Fields& more, MetricsLog& metrics) {
    MetricsLog::Fields fields{{"loss", r.loss},
                              {"grad_norm", r.grad_norm},
                              {"learning_rate", r.learning_rate},
                              {"ms", 1e3 * r.seconds},
                              {"tokens_per_second", r.tokens_per_second},
                              {"flops_per_second", r.flops_per_second},
                              {"peak_fraction", r.flops_per_second / r.peak_flops_per_second}};
    for (const auto& [phase, name] : {std::pair{StepPhase::compute, "compute_ms"},
                                      {StepPhase::communication, "communication_ms"},
                                      {StepPhase::data, "data_wait_ms"},
                                      {StepPhase::optimizer, "optimizer_ms"}})
        fields.emplace_back(name, 1e3 * r.times[phase]);
    fields.insert(fields.end(), more.begin(), more.end());
    metrics.write(r.step, fields);
}

/// What a run takes from each of several sources of training data, a line each.
std::string describe_mixture(const Config& config, const TrainLoader& loader, int64_t steps) {
    const std::vector<int64_t> samples = loader.samples_before(steps);
    const double all =
        static_cast<double>(std::accumulate(samples.begin(), samples.end(), int64_t{0}));
    std::string text = "training data, as far as the schedule goes:";
    for (size_t s = 0; s < samples.size(); ++s) {
        const double taken = static_cast<double>(samples[s]);
        char line[96];
        std::snprintf(line, sizeof line, "\n  %5.1f %%, %.4g tokens, %.3g epochs of ",
                      100 * taken / all, taken * config.sequence_length(),
                      taken / static_cast<double>(loader.windows_per_epoch(static_cast<int>(s))));
        text += line + config.data.train[s].name;
    }
    return text;
}

/// For a run that goes on with other training or validation data.
std::string note_on_changed(const std::string& data) {
    return concat("note: ", data, " had other contents when this run was last started; ",
                  data == "data.train"
                      ? "it goes on as if they had always been these: windows that were seen may "
                        "come again, and others not in this epoch"
                      : "validation losses before and behind this step do not compare");
}

/// All shards that a run reads, each once.
std::vector<WatchedShard> shards_to_watch(const std::vector<TrainSource>& sources,
                                          const TokenShards* validation) {
    std::vector<WatchedShard> watched;
    std::set<std::filesystem::path> seen;
    const auto add = [&](const TokenShards& shards, bool trains) {
        for (int i = 0; i < shards.shard_count() && !shards.synthetic(); ++i)
            if (seen.insert(shards.shard_path(i)).second)
                watched.push_back({shards.shard_path(i), trains});
    };
    for (const TrainSource& source : sources) add(*source.shards, true);
    if (validation) add(*validation, false);
    return watched;
}

/// Reads at full speed what has not been verified yet: no step waits for it now.
void finish_verification(ShardWatch& watch, Progress& progress) {
    constexpr uint64_t worth_a_line = 1 << 30;
    if (const uint64_t left = watch.bytes_left(); left > worth_a_line)
        progress.say("verifying the rest of the data, " + format_bytes(left));
    watch.finish([] { return interrupted() != nullptr; });
}

/// Leaves the newest checkpoint that rests on verified data as the run's newest. What to say of it.
std::string end_on_damage(const ShardWatch::Damage& damage, const Config& config,
                          int64_t sound_step, const World& world) {
    const std::string moved = first_for_all(
        world, [&] { return std::to_string(set_aside_checkpoints(config.run_dir, sound_step)); });
    const auto checkpoints = list_checkpoints(config.run_dir);
    return concat(
        damage.message, "; checkpoints from before it was verified are not used",
        moved == "0" ? ""
                     : concat(" (", moved, moved == "1" ? " checkpoint is" : " checkpoints are",
                              " now called step-NNNNNNNN.suspect)"),
        ": with whole data the same command ",
        checkpoints.empty() ? "starts anew" : "resumes from " + checkpoints.front().string());
}

/// Before anything is planned.
void select_kernels(const Config& config) {
    const auto& k = config.kernels;
    select_cpu_gemm(k.gemm);
    select_attention(k.attention == "auto" && k.autotune == "off" ? "own" : k.attention);
}

/// What all ranks must have in common before they begin.
std::map<std::string, std::string> facts_of(const Config& config, const Device& device,
                                            const Tokenizer* tokenizer,
                                            const std::vector<TrainSource>& sources) {
    std::map<std::string, std::string> facts = config_values(config);
    facts["program"] = version();
    facts["device"] = device.is_cuda() ? "cuda" : "cpu";
    facts["tokenizer"] = tokenizer ? hash_text(tokenizer->to_json()) : "none";
    for (size_t s = 0; s < sources.size(); ++s)
        facts["training data" + (sources.size() > 1 ? " " + config.data.train[s].name : "")] =
            sources[s].shards->fingerprint();
    return facts;
}

/// For a resumed run whose earlier choices fit neither this machine nor its number of ranks; empty
/// where they do.
std::string note_on_choices(const Config& given, const Choices& kept, const Choices& chosen) {
    if (kept.micro_batch == 0) return "";
    const bool other_batch = given.batch.micro_batch == 0 && chosen.micro_batch != kept.micro_batch;
    const bool other_level =
        given.precision.recompute == "auto" && chosen.recompute != kept.recompute;
    if (!other_batch && !other_level) return "";
    return concat("note: the run had chosen batch.micro_batch=", kept.micro_batch,
                  " and precision.recompute=", kept.recompute, ", which cannot be had here; now ",
                  chosen.micro_batch, " and ", chosen.recompute,
                  ": the same batches, whose gradients are added in another order");
}

/// Trains as one of the world's ranks, with whom `group` exchanges. `given` is the configuration as
/// it is kept in the run's folder.
int train(const CommandLine& line, const Config& given, const Device& device, const World& world,
          Communicator& group) {
    Config config = given;  // batch.micro_batch = 0 will be replaced by what is chosen
    const bool first_rank = world.rank() == 0;
    const int ranks = world.size();
    Activity& activity = world.activity();
    select_kernels(config);
    // mpirun shows its ranks a terminal also where its own output goes to a file.
    const bool is_auto = config.log.progress == "auto";
    Progress progress(is_auto && ranks > 1 ? "lines" : config.log.progress, first_rank);

    // Data
    std::optional<Tokenizer> tokenizer;
    if (!config.tokenizer.path.empty()) tokenizer = Tokenizer::load(config.tokenizer.path);
    const Tokenizer* vocabulary = tokenizer ? &*tokenizer : nullptr;
    const GPTShape shape = shape_of(config, vocab_size_of(config));
    if (vocabulary && vocabulary->vocab_size() > shape.vocab_size)
        throw Error("the tokenizer ", config.tokenizer.path, " has ", vocabulary->vocab_size(),
                    " tokens, but model.vocab_size is ", shape.vocab_size,
                    "; set model.vocab_size=0 to take the tokenizer's");
    if (config.data.document_mask && !(vocabulary && vocabulary->end_of_text()))
        throw Error(line.config,
                    ": data.document_mask needs a tokenizer with an end-of-text token, ",
                    "which tells documents apart; set tokenizer.path to the one the data were made "
                    "with");
    std::vector<TrainSource> sources;
    for (const auto& [glob, weight, name] : config.data.train)
        sources.push_back(
            {std::make_shared<TokenShards>(glob, static_cast<uint32_t>(shape.vocab_size)), weight});
    std::shared_ptr<const TokenShards> validation;
    Evaluations evaluations{.validation = nullptr, .hellaswag = {}, .tokenizer = vocabulary};
    if (!config.data.val.empty()) {
        validation =
            std::make_shared<TokenShards>(config.data.val, static_cast<uint32_t>(shape.vocab_size));
        evaluations.validation = std::make_unique<ValidationWindows>(
            validation, config.sequence_length(), config.evaluation.max_tokens);
    }
    if (!config.evaluation.hellaswag.empty()) {
        if (!vocabulary || !evaluations.validation)
            throw Error(line.config,
                        ": evaluation.hellaswag needs tokenizer.path and data.val; set them too");
        evaluations.hellaswag.emplace(config.evaluation.hellaswag, *vocabulary, 0);
    }
    for (const auto& source : config.data.train) check_prepared(source.glob, vocabulary);
    check_prepared(config.data.val, vocabulary);
    const int T = config.sequence_length();
    int64_t windows = 0;
    for (const TrainSource& source : sources) windows += count_windows(*source.shards, T);
    const int64_t steps = total_steps(config, windows * T);
    require_same(world, facts_of(config, device, vocabulary, sources));

    const std::string complete = first_for_all(world, [&]() -> std::string {
        const auto done = find_complete_run(config, steps, [&] { world.activity().pulse(); });
        if (!done) return "";
        compare_with(done->checkpoint, config, shape, vocabulary, progress);
        return describe(*done, config, steps);
    });
    if (!complete.empty()) {
        progress.say(complete);
        if (line.profile > 0) progress.say("note: there is no profile, since no steps are left");
        return 0;
    }

    // Memory: all of it, now. What a machine decides by itself the first rank decides for all.
    const auto decided = [&](const std::function<std::string()>& decide) {
        return first_for_all(world, decide);
    };
    const DType dtype = decided([&] {
                            return name_of(resolve_dtype(config.precision.dtype, device));
                        }) == name_of(DType::bf16)
                            ? DType::bf16
                            : DType::fp32;
    const Choices kept =
        choices_from_json(decided([&] { return to_json(kept_choices(config.run_dir)); }));
    const uint64_t available =
        memory_available(device) / static_cast<uint64_t>(device.is_cuda() ? 1 : world.local_size());
    const Choices chosen = choices_from_json(decided([&] {
        return to_json(choose_by_memory(kept, available, config, shape, dtype, device, ranks));
    }));
    config.batch.micro_batch = chosen.micro_batch;
    const Recompute recompute = recompute_from(chosen.recompute);
    double peak = measure_peak_flops(device, dtype);
    activity.pulse();
    StepProfile profile(device, line.profile, peak);
    const Arena plan = plan_memory(config, shape, dtype, recompute, device, ranks);
    Arena arena = allocate(plan, config, shape, dtype, ranks);
    Trainer run(config, shape, dtype, recompute, arena, sharding_of(config, world.rank(), ranks));
    set_kernel_settings(run.stream, {.autotune = config.kernels.autotune == "on",
                                     .tf32 = config.precision.tf32 == "on"});
    set_kernel_choices(run.stream, kept.kernels);
    const auto choices = [&] {
        return Choices{chosen.micro_batch, chosen.recompute, kernel_choices(run.stream)};
    };
    if (first_rank && device.is_cuda()) run.warm_up();
    const Choices made = choices_from_json(decided([&] { return to_json(choices()); }));
    if (!first_rank && device.is_cuda()) {
        set_kernel_choices(run.stream, made.kernels);
        run.warm_up();
    }
    run.parameters.connect(group, &run.clock);

    // Weights
    const RunFolder folder(config.run_dir, world);
    const std::optional<int64_t> resumed = resume(given, shape, vocabulary, run, world, progress);
    if (!resumed) start(config, shape, vocabulary, run, world, progress);
    const int64_t first_step = resumed.value_or(0), left = std::max<int64_t>(0, steps - first_step);
    int64_t step = first_step;
    if (first_step > steps)
        progress.say(concat("the run in ", config.run_dir, " is at step ", first_step,
                            ", beyond the configuration's ", steps, ": nothing is trained"));
    if (line.profile > 0 && left < profile.steps_needed())
        progress.say(concat("note: there will be no profile, which takes ", profile.steps_needed(),
                            " steps; ", left, " are left"));
    if (first_rank && first_step < steps) {
        for (const std::string& data : folder.describe(given))
            if (resumed) progress.say(note_on_changed(data));
        if (const std::string note = note_on_choices(given, kept, chosen); resumed && !note.empty())
            progress.say(note);
        write_choices(config.run_dir, made);
    }
    ShardWatch watch(folder, shards_to_watch(sources, validation.get()), step, world);

    LoaderOptions loading = loader_options(config, step, world.rank(), ranks);
    if (vocabulary) loading.end_of_text = vocabulary->end_of_text();
    TrainLoader loader(sources, loading, [&](size_t) { return run.loader_memory; });
    const int of_step = loading.micro_batches_per_step, micro_batches = loader.micro_batches();
    const int most_micro_batches = (of_step + ranks - 1) / ranks;  // of any rank
    const double flops_per_step =
        shape.flops_per_token(T) * static_cast<double>(config.batch.tokens_per_step);
    const double least_seconds = flops_per_step / (peak * ranks);  // of a step
    catch_interrupts();
    progress.say(concat(
        "training ", run.parameters.logical_numel(), " parameters in ", name_of(dtype), " on ",
        ranks > 1 ? concat(ranks, " × ") : "", device_name(device), ", ", steps, " steps of ",
        config.batch.tokens_per_step, " tokens (", of_step, " micro-batch",
        of_step == 1 ? "" : "es", " of ", loading.B, " × ", T, "), ",
        format_bytes(plan.total_bytes()), ranks > 1 ? " each" : "", ", into ", config.run_dir));
    if (sources.size() > 1) progress.say(describe_mixture(config, loader, steps));
    if (left > 0 && least_seconds >= slow_step_seconds)
        progress.say(describe_slow_steps(flops_per_step, least_seconds, left));

    MetricsLog metrics(config.run_dir, resumed,
                       {.tokens_per_step = config.batch.tokens_per_step, .writes = first_rank});
    const auto start_time = Clock::now();
    const auto out_of_time = [&] {
        return config.schedule.max_minutes > 0 &&
               seconds_since(start_time) > 60 * config.schedule.max_minutes;
    };
    int64_t saved_step = first_step;  // what a new run starts with is no checkpoint's worth
    // Why the checkpoint of this step could not be written; empty when it is there.
    const auto save = [&]() -> std::string {
        if (saved_step == step) return "";
        activity.phase = "checkpoint";
        try {
            save_checkpoint(config.run_dir, {step, given, shape, run.parameters, vocabulary, made},
                            world);
        } catch (const Error& error) {
            return concat("step ", step, " of ", steps, " is not saved: ", error.what());
        }
        saved_step = step;
        try {
            watch.settle();  // damage that it finds ends the run in its turn
            if (first_rank)
                prune_checkpoints(config.run_dir, config.checkpoint.keep, watch.sound_step());
        } catch (const Error& error) {
            progress.warn(error.what());  // the next save tries again
        }
        return "";
    };
    const auto evaluate_now = [&] {
        activity.phase = "evaluation";
        return evaluate_and_log(evaluations, {run, step, world, progress, metrics});
    };
    // By an earlier start of this run
    const auto was_evaluated = [&] {
        return first_for_all(world, [&] {
                   return std::to_string(last_evaluation(config.run_dir, step).step);
               }) == std::to_string(step);
    };
    const auto due = [&](int64_t every) { return every > 0 && step % every == 0 && step < steps; };

    Ending ending = line.stop_at > 0 && step >= line.stop_at ? Ending::stopped : Ending::finished;
    std::string bad_parameter;
    StepAccounting accounting;
    StepPace pace;
    const int64_t targets = of_step * run.feed.targets();  // of each step
    auto mark = Clock::now();                              // the last step's end
    // Steps submitted whose outcome the host has not seen; a GPU computes one while the host submits the next.
    int64_t in_flight = 0;
    const int64_t in_flight_at_most = device.is_cuda() ? 1 : 0;
    const auto settle = [&](int64_t may_remain) {
        for (; in_flight > may_remain; --in_flight) {
            const StepOutcome outcome = run.outcomes.pop();
            const int64_t number = step - in_flight + 1;
            if (outcome.state.stop) {  // neither this update nor a later one was applied
                bad_parameter = run.optimizer.bad_parameter(outcome.state);
                ending = Ending::not_finite;
                step = number - 1;
                in_flight = 0;
                return;
            }
            if (outcome.sums.stop_requests > 0 && ending == Ending::finished)
                ending =
                    out_of_time() && !interrupted() ? Ending::out_of_time : Ending::interrupted;
            const double seconds = seconds_since(mark);
            mark = Clock::now();
            const StepTimes times = run.clock.pop();
            accounting.add(times);
            pace.add(seconds, times);
            const bool logged = number % config.log.every == 0 || number == 1 || number == steps;
            if (!logged && number != first_step + 1) continue;
            const StepPace::Mean mean = pace.take();
            // The measurement may have been disturbed: what a step reaches, the machine reaches.
            peak = std::max(peak, flops_per_step / mean.seconds / ranks);
            const StepReport report{
                .step = number,
                .steps = steps,
                .loss = outcome.sums.loss / static_cast<double>(targets),
                .grad_norm = outcome.state.norm,
                .learning_rate = learning_rate(config, number - 1, steps),
                .seconds = mean.seconds,
                .tokens_per_second = static_cast<double>(targets) / mean.seconds,
                .flops_per_second = flops_per_step / mean.seconds,
                .peak_flops_per_second = peak * ranks,
                .memory = plan.total_bytes(),
                .ranks = ranks,
                .times = mean.times,
                .seconds_left = static_cast<double>(steps - number) * pace.recent()};
            progress.report(report);
            if (logged)
                log_step(report, metrics_of_sources(config, loader, number, outcome.sums), metrics);
        }
    };
    // A signal may have ended the evaluation behind the checkpoint's step.
    if (resumed && ending == Ending::finished && evaluations.validation &&
        due(config.evaluation.every) && !was_evaluated()) {
        if (!evaluate_now()) ending = Ending::interrupted;
        mark = Clock::now();
    }
    if (!resumed && evaluations.validation && config.evaluation.every > 0) {
        activity.phase = "evaluation";
        if (const std::string note = note_on_validation(config.data.val); !note.empty())
            progress.say(note);
        // A forward pass is a third of a step's work.
        const double steps_of_it = static_cast<double>(evaluations.validation->target_tokens()) /
                                   static_cast<double>(3 * config.batch.tokens_per_step);
        evaluate_at_start(evaluations, {run, step, world, progress, metrics},
                          steps_of_it * least_seconds);
        mark = Clock::now();
    }
    try {
        while (step < steps && ending == Ending::finished) {
            if (profile.starts_before(step - first_step)) {
                settle(0);
                profile.start(run.stream);
            }
            activity.phase = "training";
            activity.step = step + 1;
            // A rank by itself stops at once; several agree on the step behind which they stop.
            if (ranks > 1 &&
                (interrupted() || watch.found_damage() || (first_rank && out_of_time())))
                run.request_stop();

            // One step: gradients of all micro-batches summed, then one update
            run.clock.begin(run.stream);
            int i = 0;
            const auto step_start = Clock::now();
            for (; i < micro_batches && !(ranks == 1 && interrupted()); ++i) {
                progress.show_step(step + 1, i, micro_batches, seconds_since(step_start),
                                   pace.recent() > 0 ? pace.recent() : least_seconds);
                const TokenBatch batch = run.next_batch(loader);
                const StepSubmission submission;
                run.micro_batch(batch, i == 0, i == micro_batches - 1);
                activity.pulse();
            }
            if (i < micro_batches) {  // nothing of this step has been applied: it comes again
                ending = Ending::interrupted;
                run.clock.drop();
                break;
            }
            for (; i < most_micro_batches; ++i) run.parameters.skip_micro_batch(run.stream);
            run.update(adamw_step(config, step, learning_rate(config, step, steps)),
                       1.0f / static_cast<float>(targets),
                       static_cast<float>(config.optimizer.grad_clip));
            run.clock.end(run.stream);
            ++step;
            ++in_flight;

            // What came of the steps so far
            const bool evaluating = evaluations.validation && due(config.evaluation.every);
            const bool sampling = vocabulary && due(config.sampling.every);
            const bool saving = due(config.checkpoint.every);
            const bool profiled = profile.ends_behind(step - first_step);
            const bool pausing =
                evaluating || sampling || saving || profiled || step == line.stop_at;
            settle(pausing ? 0 : in_flight_at_most);
            if (ending == Ending::not_finite) break;
            if (profiled) progress.say(profile.finish(run.stream));
            if (pausing) profile.pause(run.stream);
            if (evaluating && !evaluate_now()) {
                ending = Ending::interrupted;
                break;
            }
            if (sampling && first_rank)
                print_samples(run, *vocabulary, config, static_cast<uint64_t>(step), 1, progress);
            // Behind the rest of the step, so that what the log says up to a checkpoint is complete
            if (saving)
                if (const std::string trouble = save(); !trouble.empty())
                    progress.warn(
                        trouble +
                        "; training goes on and the next checkpoint is tried in its turn");
            if (pausing) {
                profile.go_on(run.stream);
                mark = Clock::now();
            }

            // Ends before the schedule's
            if (ending != Ending::finished) break;
            if (step == line.stop_at)
                ending = Ending::stopped;
            else if (ranks == 1 && watch.found_damage())
                ending = Ending::damaged_data;
            else if (ranks == 1 && out_of_time())
                ending = Ending::out_of_time;
        }
        settle(0);
    } catch (const std::exception&) {
        // Bad data, say. What was learnt up to here is not lost, if the device still answers and no other rank is needed.
        if (ranks > 1) throw;
        settle(0);
        if (step > first_step && !watch.found_damage())
            if (const std::string trouble = save(); !trouble.empty()) progress.warn(trouble);
        throw;
    }

    // Also where the time limit or a signal came in the last step: no later start verifies it.
    if (ending == Ending::finished || ending == Ending::stopped || step == steps)
        finish_verification(watch, progress);
    const std::optional<ShardWatch::Damage> damage = watch.settle();
    if (damage && damage->trained)
        throw SharedError(end_on_damage(*damage, config, watch.sound_step(), world));
    const std::string trouble = save();
    const bool nothing_trained = step == 0 && !resumed;
    const std::string saved =
        !trouble.empty()  ? trouble
        : nothing_trained ? "no step was finished, so there is nothing to save"
                          : concat("step ", step, " of ", steps, " is saved in ", config.run_dir);
    if (ending == Ending::not_finite)
        throw SharedError("the gradient of step ", step + 1, " is not finite (first in ",
                          bad_parameter, "), so its update was not applied; ", saved,
                          "; lower optimizer.learning_rate or start from an earlier checkpoint");
    if (damage) throw SharedError(damage->message, "; ", saved);
    if (!trouble.empty()) throw SharedError(trouble);
    if (const std::string summary = accounting.summary(world); !summary.empty())
        progress.say(summary);
    if (step < steps) {
        const std::string why =
            ending == Ending::interrupted
                ? concat(interrupted() ? interrupted() : "a signal to another rank", ": ")
            : ending == Ending::out_of_time ? "schedule.max_minutes is over: "
                                            : "";
        progress.say(concat(why, saved, "; the same command ",
                            ending == Ending::stopped ? "without --stop-at " : "",
                            nothing_trained ? "starts the run again" : "resumes from there"));
        return exit_code_of(ending, world);
    }
    if (watch.sound_step() < step) {  // a signal came while the rest of the data were verified
        progress.say(saved + "; the same command continues with the verification of its data");
        return exit_code_of(Ending::interrupted, world);
    }
    const bool evaluated = was_evaluated();
    if (evaluations.validation && !evaluated && !evaluate_now()) {
        progress.say(saved + "; the same command continues with its evaluation");
        return exit_code_of(Ending::interrupted, world);
    }
    if (evaluations.validation && evaluated && first_rank) {
        const LoggedEvaluation e = last_evaluation(config.run_dir, step);
        progress.say(describe_validation(e.step, e.nats_per_token, e.bits_per_byte));
    }
    if (vocabulary && first_rank)
        print_samples(run, *vocabulary, config, 0, config.sampling.samples, progress);
    progress.say(saved);
    return 0;
}

/// An error that the watchdog has printed.
class ReportedError : public Error {
  public:
    using Error::Error;
};

/// Does `work` as one of the ranks that a launcher started. What goes wrong on one rank ends all.
int run_as_rank(const std::function<int(const World&)>& work) {
    const World world = World::join();
    try {
        share_cores(world);
        return work(world);
    } catch (const SharedError& error) {
        if (world.rank() == 0) std::fprintf(stderr, "train_gpt: %s\n", error.what());
        return 1;
    } catch (const ReportedError&) {
        throw;
    } catch (const std::exception& error) {
        if (world.size() == 1) throw;
        std::fprintf(stderr, "train_gpt: rank %d (host %s): %s\n", world.rank(),
                     world.host().c_str(), message_of(error).c_str());
        world.abort(1);
    }
}

/// Does `work` on this rank's device with the group of all ranks, while a watchdog sees to it that no rank waits for one that
/// is gone.
int run_watched(const World& world, const std::string& wanted_device, double timeout_seconds,
                const std::function<int(const Device&, Communicator&)>& work) {
    const Device device = device_of_rank(world, wanted_device);
    const std::unique_ptr<Communicator> group = open_communicator(world, device, world.activity());
    Watchdog::Listener listener(world.rank(), world.size());
    const std::string invitation = world.broadcast(listener.invitation());
    Watchdog watchdog(std::move(listener), invitation, world.activity(),
                      {.rank = world.rank(),
                       .size = world.size(),
                       .host = world.host(),
                       .timeout_seconds = timeout_seconds,
                       .check = [&] { group->check(); },
                       .on_failure = [&](const char*) { group->abort(); }});
    try {
        return work(device, *group);
    } catch (const SharedError&
                 error) {  // printed here: where no exception passes them, ranks say goodbye
        if (world.rank() == 0) std::fprintf(stderr, "train_gpt: %s\n", error.what());
        return 1;
    } catch (const std::exception& error) {
        if (watchdog.report(message_of(error))) throw ReportedError(error.what());
        throw;
    }
}

int train(const CommandLine& line) {
    return run_as_rank([&](const World& world) {
        Config config;
        together(world, [&] {
            config = load_config(line.config, line.overrides);
            if (line.print_config) return "";
            if (config.run_dir.empty())
                throw Error(line.config,
                            ": run_dir is not set; name the folder that the run shall write to");
            if (config.data.train.empty())
                throw Error(line.config, ": data.train is not set; name token shards to train on");
            for (const auto& source : config.data.train) require_made(source.glob);
            for (const std::string& path :
                 {config.tokenizer.path, config.data.val, config.evaluation.hellaswag})
                require_made(path);
            return "";
        });
        if (line.print_config) {
            if (world.rank() == 0) std::fputs(printable(to_json(config)).c_str(), stdout);
            return 0;
        }
        return run_watched(world, config.device, config.parallel.timeout_seconds,
                           [&](const Device& device, Communicator& group) {
                               return train(line, config, device, world, group);
                           });
    });
}

int selfcheck(const CommandLine& line) {
    constexpr double timeout_seconds = 60;  // no measurement takes as long
    return run_as_rank([&](const World& world) {
        return run_watched(world, line.device, timeout_seconds,
                           [&](const Device& device, Communicator& group) {
                               return selfcheck(line.selfcheck, device, world, group);
                           });
    });
}

int sample(const CommandLine& line) {
    InferenceSession session(line.checkpoint, line.device, line.dtype,
                             InferenceSession::For::sampling);
    const Tokenizer& tokenizer = session.tokenizer();  // where there is none, nothing is printed
    // A terminal would obey control characters; a file or a program gets what the model wrote.
    const auto print = [is_terminal = ::isatty(STDOUT_FILENO) != 0](std::string_view text) {
        const std::string shown = is_terminal ? printable(text) : std::string(text);
        std::fwrite(shown.data(), 1, shown.size(), stdout);
        std::fflush(stdout);
    };
    uint64_t number = 0;  // each text has random numbers of its own
    const auto write = [&](const std::string& prompt, const std::function<bool()>& stop) {
        for (int i = 0; i < line.samples && !(stop && stop()); ++i) {
            if (i > 0) print("\n---\n");
            print(prompt);
            sample_text(session.stream(), session.generator(), tokenizer, prompt, line.sampling,
                        number++, print, stop);
        }
        print("\n");
    };
    if (!line.prompt_file.empty())
        write(read_prompt(line.prompt_file), {});
    else if (!line.prompt && ::isatty(STDIN_FILENO) && ::isatty(STDOUT_FILENO))
        ask_for_prompts([&](const std::string& prompt) {
            const CtrlCWatch ctrl_c;
            write(prompt, [&] { return ctrl_c.pressed(); });
        });
    else
        write(line.prompt.value_or(""), {});
    return 0;
}

int eval(const CommandLine& line) {
    InferenceSession session(line.checkpoint, line.device, line.dtype,
                             InferenceSession::For::evaluation);
    const std::string data = !line.data.empty() ? line.data : session.validation_data();
    require_made(line.data);
    require_made(line.hellaswag);
    if (data.empty() && line.hellaswag.empty())
        throw UsageError(
            "nothing to evaluate: the checkpoint names no validation data; give --data GLOB or "
            "--hellaswag FILE");
    std::optional<HellaSwag> hellaswag;
    if (!line.hellaswag.empty())
        hellaswag.emplace(line.hellaswag, session.tokenizer(), line.max_examples);
    if (!data.empty()) {
        std::shared_ptr<const TokenShards> shards;
        const ValidationWindows windows = [&] {
            try {
                check_prepared(data, session.tokenizer_or_null());
                shards = std::make_shared<TokenShards>(
                    data, static_cast<uint32_t>(session.shape().vocab_size));
                return ValidationWindows(shards, session.model().options().T, line.max_tokens);
            } catch (const Error& error) {
                if (!line.data.empty()) throw;
                throw Error(error.what(),
                            " (the data that the checkpoint names, looked for from this folder; "
                            "--data GLOB names others)");
            }
        }();
        std::vector<std::filesystem::path> read;
        for (int i = 0; i < windows.shards_read() && !shards->synthetic(); ++i)
            read.push_back(shards->shard_path(i));
        require_undamaged(recorded_shards(read));
        const ValidationResult v = evaluate(session.stream(), session.model(), windows,
                                            session.tokenizer_or_null(), session.batch());
        std::printf("validation loss %.6f nats/token", v.nats_per_token);
        if (std::isfinite(v.bits_per_byte)) std::printf(", %.6f bits/byte", v.bits_per_byte);
        std::printf(", perplexity %.4f (e to the nats/token)", std::exp(v.nats_per_token));
        std::printf(" over %lld tokens of %s\n", static_cast<long long>(v.tokens),
                    printable(data).c_str());
    }
    if (hellaswag) {
        const HellaSwagResult h =
            hellaswag->evaluate(session.stream(), session.model(), session.batch());
        std::printf("HellaSwag accuracy %.4f, length-normalised %.4f, over %lld examples\n",
                    h.accuracy, h.accuracy_normalised, static_cast<long long>(h.examples));
    }
    return 0;
}

int run(const CommandLine& line) {
    if (line.command == CommandLine::Command::none) {
        std::fputs(line.output.c_str(), stdout);
        return 0;
    }
    switch (line.command) {
        case CommandLine::Command::tokenize:
            require_made(line.prepare.tokenizer);
            catch_interrupts();
            return prepare(line.prepare, stdout, [] { return interrupted() != nullptr; })
                       ? 0
                       : stopped_early_code(interrupt_signal() == SIGINT);
        case CommandLine::Command::config:
            std::fputs((line.schema     ? config_schema()
                        : line.markdown ? config_reference()
                                        : config_help(line.key, columns_of_stdout()))
                           .c_str(),
                       stdout);
            return 0;
        case CommandLine::Command::import_:
            std::printf("%s\n", printable(import_model(line.importing)).c_str());
            return 0;
        case CommandLine::Command::verify:
            return verify(line.verified, stdout) ? 0 : 1;
        case CommandLine::Command::export_:
            std::printf("%s\n", printable(export_model(line.exporting)).c_str());
            return 0;
        default:
            break;
    }
    require_cpu_features();
    switch (line.command) {
        case CommandLine::Command::plan: {
            const Config config = load_config(line.config, line.overrides);
            select_kernels(config);
            const PlanReport report = plan_report(config, open_device(config.device), line.world);
            std::fputs(report.text.c_str(), stdout);
            std::fflush(stdout);
            if (!report.problem.empty()) throw Error(report.problem);
            return 0;
        }
        case CommandLine::Command::sample:
            return sample(line);
        case CommandLine::Command::eval:
            return eval(line);
        case CommandLine::Command::selfcheck:
            return selfcheck(line);
        default:
            return train(line);
    }
}

/// Whether a command is run for what it prints. Others do their work although nobody may read what they say of it.
bool prints_its_result(const CommandLine& line) {
    using enum CommandLine::Command;
    for (const auto command : {none, config, plan, sample, eval, selfcheck, verify})
        if (line.command == command) return true;
    return line.print_config;
}

int run(int argc, char** argv) {
    const CommandLine line = parse_command_line(argc, argv);
    const int code = run(line);
    if ((std::fflush(stdout) != 0 || std::ferror(stdout)) && prints_its_result(line))
        throw Error(
            "not all of the output could be written; see whether what it goes to is full or "
            "closed");
    return code;
}

}  // namespace
}  // namespace train_gpt

int main(int argc, char** argv) {
    train_gpt::limit_openmp_spinning(argv);
    // A file beyond `ulimit -f` is an error of write(), as a full disk is.
    std::signal(SIGXFSZ, SIG_IGN);
    try {
        return train_gpt::run(argc, argv);
    } catch (const train_gpt::ReportedError&) {
        return 1;
    } catch (const train_gpt::UsageError& error) {
        std::fprintf(stderr, "train_gpt: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "train_gpt: %s\n", train_gpt::message_of(error).c_str());
    }
    return 1;
}
