// train_gpt: pretrains GPT language models. The commands, and the training loop from top to bottom.
// Compiles as CUDA and, where there is no nvcc, as plain C++.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>

#include "dataloader/loader.h"
#include "dataloader/prepare.h"
#include "kernels/attention_engine.h"
#include "kernels/choices.h"
#include "kernels/device.h"
#include "kernels/error.h"
#include "kernels/head_loss.h"
#include "kernels/linear.h"
#include "parallel/world.h"
#include "tokenizer/tokenizer.h"
#include "training/checkpoint.h"
#include "training/command_line.h"
#include "training/config.h"
#include "training/evaluation.h"
#include "training/inference_session.h"
#include "training/interrupt.h"
#include "training/peak.h"
#include "training/plan.h"
#include "training/progress.h"
#include "training/run_folder.h"
#include "training/sampling.h"
#include "training/schedule.h"
#include "training/step_profile.h"
#include "training/trainer.h"

namespace train_gpt {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Why the loop ended; the exit code follows from it.
enum class Ending { finished, stopped, interrupted, out_of_time, not_finite };

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

/// Validation loss, and HellaSwag where the configuration names it: printed and logged.
void evaluate_and_log(Trainer& run, const ValidationWindows& windows, const Tokenizer* tokenizer,
                      const HellaSwag* hellaswag, int64_t step, Progress& progress,
                      MetricsLog& metrics) {
    const ValidationResult v =
        evaluate(run.stream, run.model, windows, tokenizer, run.evaluation_batch);
    MetricsLog::Fields fields{
        {"step", step}, {"val_loss", v.nats_per_token}, {"val_tokens", v.tokens}};
    std::string text = concat("step ", step, ": validation loss ", v.nats_per_token, " nats/token");
    if (std::isfinite(v.bits_per_byte)) {
        text += concat(", ", v.bits_per_byte, " bits/byte");
        fields.emplace_back("val_bits_per_byte", v.bits_per_byte);
    }
    text += concat(" over ", v.tokens, " tokens");
    if (hellaswag) {
        const HellaSwagResult h = hellaswag->evaluate(run.stream, run.model, run.evaluation_batch);
        text += concat("; HellaSwag ", h.accuracy, ", length-normalised ", h.accuracy_normalised);
        fields.emplace_back("hellaswag", h.accuracy);
        fields.emplace_back("hellaswag_normalised", h.accuracy_normalised);
    }
    progress.say(text);
    metrics.write(fields);
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

/// Restores the newest whole checkpoint of the run folder and returns its step; nothing when the run is new.
std::optional<int64_t> resume(const Config& config, const GPTShape& shape, Trainer& run,
                              Progress& progress) {
    const auto checkpoint = recover_newest_checkpoint(
        config.run_dir, [&](const std::string& text) { progress.warn(text); });
    if (!checkpoint) return {};
    require_same_model(*checkpoint, read_model_shape(*checkpoint), shape);
    for (const std::string& change : config_differences(checkpoint_config(*checkpoint), config))
        progress.say("note: since this checkpoint " + change);
    load_training_state(*checkpoint, run.parameters);
    progress.say("resuming from " + checkpoint->string());
    return checkpoint_step(*checkpoint);
}

/// The weights that a new run starts from: random, or those of model.init_from.
void start(const Config& config, const GPTShape& shape, Trainer& run, Progress& progress) {
    run.parameters.initialize(config.seed);
    if (config.model.init_from.empty()) return;
    const auto source = find_checkpoint(config.model.init_from);
    if (std::filesystem::exists(source / "manifest.json")) verify_checkpoint(source, Verify::model);
    require_same_model(source, read_model_shape(source), shape);
    load_weights(source, run.parameters);
    progress.say("starting from the weights of " + source.string());
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

/// A step's line on the terminal and in metrics.jsonl.
void report_and_log(const StepReport& r, double data_wait_seconds, Progress& progress,
                    MetricsLog& metrics) {
    progress.report(r);
    metrics.write({{"step", r.step},
                   {"loss", r.loss},
                   {"grad_norm", r.grad_norm},
                   {"learning_rate", r.learning_rate},
                   {"ms", 1e3 * r.seconds},
                   {"tokens_per_second", r.tokens_per_second},
                   {"flops_per_second", r.flops_per_second},
                   {"peak_fraction", r.flops_per_second / r.peak_flops_per_second},
                   {"data_wait_ms", 1e3 * data_wait_seconds}});
}

/// Before anything is planned.
void select_kernels(const Config& config) {
    const auto& k = config.kernels;
    select_cpu_gemm(k.gemm);
    select_attention(k.attention == "auto" && k.autotune == "off" ? "own" : k.attention);
}

int train(const CommandLine& line) {
    const Config config = load_config(line.config, line.overrides);
    if (line.print_config) {
        std::fputs(to_json(config).c_str(), stdout);
        return 0;
    }
    join_world();
    if (config.run_dir.empty())
        throw Error(line.config,
                    ": run_dir is not set; name the folder that the run shall write to");
    if (config.data.train.empty())
        throw Error(line.config, ": data.train is not set; name token shards to train on");
    const Device device = open_device(config.device);
    select_kernels(config);
    const DType dtype = resolve_dtype(config.precision.dtype, device);
    Progress progress(config.log.progress);

    // Data
    std::optional<Tokenizer> tokenizer;
    if (!config.tokenizer.path.empty()) tokenizer = Tokenizer::load(config.tokenizer.path);
    const Tokenizer* vocabulary = tokenizer ? &*tokenizer : nullptr;
    const GPTShape shape = shape_of(config, vocab_size_of(config));
    if (vocabulary && vocabulary->vocab_size() > shape.vocab_size)
        throw Error("the tokenizer ", config.tokenizer.path, " has ", vocabulary->vocab_size(),
                    " tokens, but model.vocab_size is ", shape.vocab_size,
                    "; set model.vocab_size=0 to take the tokenizer's");
    const auto shards =
        std::make_shared<TokenShards>(config.data.train, static_cast<uint32_t>(shape.vocab_size));
    std::unique_ptr<ValidationWindows> validation;
    if (!config.data.val.empty())
        validation = std::make_unique<ValidationWindows>(
            std::make_shared<TokenShards>(config.data.val, static_cast<uint32_t>(shape.vocab_size)),
            config.sequence_length(), config.evaluation.max_tokens);
    std::optional<HellaSwag> hellaswag;
    if (!config.evaluation.hellaswag.empty()) {
        if (!vocabulary || !validation)
            throw Error(line.config,
                        ": evaluation.hellaswag needs tokenizer.path and data.val; set them too");
        hellaswag.emplace(config.evaluation.hellaswag, *vocabulary, 0);
    }
    const int T = config.sequence_length();
    const int64_t steps = total_steps(config, count_windows(*shards, T) * T);

    // Memory: all of it, now
    const Choices kept = kept_choices(config.run_dir);
    const Recompute recompute = config.precision.recompute == "auto" && !kept.recompute.empty()
                                    ? recompute_from(kept.recompute)
                                    : resolve_recompute(config, shape, dtype, device);
    const double peak = measure_peak_flops(device, dtype);
    StepProfile profile(device, line.profile, peak);
    const Arena plan = plan_memory(config, shape, dtype, recompute, device);
    Arena arena = allocate(plan, config, shape, dtype);
    Trainer run(config, shape, dtype, recompute, arena);
    set_kernel_settings(run.stream, {.autotune = config.kernels.autotune == "on",
                                     .tf32 = config.precision.tf32 == "on"});
    set_kernel_choices(run.stream, kept.kernels);

    // Weights
    RunFolder folder(config.run_dir);
    const std::optional<int64_t> resumed = resume(config, shape, run, progress);
    if (!resumed) start(config, shape, run, progress);
    const int64_t first_step = resumed.value_or(0);
    int64_t step = first_step;
    folder.describe(config);
    if (device.is_cuda()) run.warm_up();
    const auto choices = [&] { return Choices{name_of(recompute), kernel_choices(run.stream)}; };
    write_choices(config.run_dir, choices());
    MetricsLog metrics(config.run_dir, step);

    LoaderOptions loading = loader_options(config, step);
    if (vocabulary) loading.end_of_text = vocabulary->end_of_text();
    TrainLoader loader(shards, loading, [&](size_t) { return run.loader_memory; });
    const int micro_batches = loading.micro_batches_per_step;
    const double flops_per_step =
        shape.flops_per_token(T) * static_cast<double>(config.batch.tokens_per_step);
    catch_interrupts();
    progress.say(concat("training ", run.parameters.logical_numel(), " parameters in ",
                        name_of(dtype), " on ", device_name(device), ", ", steps, " steps of ",
                        config.batch.tokens_per_step, " tokens (", micro_batches, " micro-batch",
                        micro_batches == 1 ? "" : "es", "), ", format_bytes(plan.total_bytes()),
                        ", into ", config.run_dir));

    const auto start_time = Clock::now();
    double waited = 0;
    int64_t saved_step = resumed.value_or(-1);
    // Why the checkpoint of this step could not be written; empty when it is there.
    const auto save = [&]() -> std::string {
        if (saved_step == step) return "";
        try {
            save_checkpoint(config.run_dir, step, config, shape, run.parameters, vocabulary, choices());
        } catch (const Error& error) {
            return concat("step ", step, " of ", steps, " is not saved: ", error.what());
        }
        prune_checkpoints(config.run_dir, config.checkpoint.keep);
        saved_step = step;
        return "";
    };
    const auto evaluate_now = [&] {
        evaluate_and_log(run, *validation, vocabulary, hellaswag ? &*hellaswag : nullptr, step,
                         progress, metrics);
    };
    const auto due = [&](int64_t every) { return every > 0 && step % every == 0 && step < steps; };

    Ending ending = line.stop_at > 0 && step >= line.stop_at ? Ending::stopped : Ending::finished;
    std::string bad_parameter;
    const int64_t targets = micro_batches * run.feed.targets();  // of each step
    auto mark = Clock::now();  // the last step's end
    // Steps submitted whose outcome the host has not seen; a GPU computes one while the host submits the next.
    int64_t in_flight = 0;
    const int64_t in_flight_at_most = device.is_cuda() ? 1 : 0;
    const auto settle = [&](int64_t may_remain) {
        for (; in_flight > may_remain; --in_flight) {
            const StepOutcome outcome = run.outcomes.pop();
            const int64_t of_step = step - in_flight + 1;
            if (outcome.state.stop) {  // neither this update nor a later one was applied
                bad_parameter = run.optimizer.bad_parameter(outcome.state);
                ending = Ending::not_finite;
                step = of_step - 1;
                in_flight = 0;
                return;
            }
            const double seconds = seconds_since(mark);
            mark = Clock::now();
            if (of_step % config.log.every != 0 && of_step != steps) continue;
            report_and_log({.step = of_step,
                            .steps = steps,
                            .loss = outcome.loss_sum / static_cast<double>(targets),
                            .grad_norm = outcome.state.norm,
                            .learning_rate = learning_rate(config, of_step - 1, steps),
                            .seconds = seconds,
                            .tokens_per_second = static_cast<double>(targets) / seconds,
                            .flops_per_second = flops_per_step / seconds,
                            .peak_flops_per_second = peak,
                            .memory = plan.total_bytes()},
                           loader.wait_seconds() - waited, progress, metrics);
            waited = loader.wait_seconds();
        }
    };
    try {
        while (step < steps && ending == Ending::finished) {
            if (profile.starts_before(step - first_step)) {
                settle(0);
                profile.start(run.stream);
            }

            // One step: gradients of all micro-batches summed, then one update
            int i = 0;
            for (; i < micro_batches && !interrupted(); ++i) {
                const TokenBatch batch = run.feed.next(run.stream, loader);
                run.parameters.begin_micro_batch(i == 0, i == micro_batches - 1);
                run.model.forward(run.stream, batch);
                run.model.backward(run.stream, batch);
                accumulate_loss(run.stream, run.loss_sum, run.model.losses(), run.feed.targets(),
                                i > 0);
            }
            if (i < micro_batches) {  // nothing of this step has been applied: it comes again
                ending = Ending::interrupted;
                break;
            }
            run.optimizer.update(run.stream,
                                 adamw_step(config, step, learning_rate(config, step, steps)),
                                 1.0f / static_cast<float>(targets),
                                 static_cast<float>(config.optimizer.grad_clip));
            run.outcomes.push(run.stream, run.optimizer.state_on_device(), run.loss_sum);
            ++step;
            ++in_flight;

            // What came of the steps so far
            const bool evaluating = validation && due(config.evaluation.every);
            const bool sampling = vocabulary && due(config.sampling.every);
            const bool saving = due(config.checkpoint.every);
            const bool profiled = profile.ends_behind(step - first_step);
            const bool pausing = evaluating || sampling || saving || profiled || step == line.stop_at;
            settle(pausing ? 0 : in_flight_at_most);
            if (ending == Ending::not_finite) break;
            if (profiled) progress.say(profile.finish(run.stream));
            if (evaluating) evaluate_now();
            if (sampling)
                print_samples(run, *vocabulary, config, static_cast<uint64_t>(step), 1, progress);
            // Behind the rest of the step, so that what the log says up to a checkpoint is complete
            if (saving)
                if (const std::string trouble = save(); !trouble.empty())
                    progress.warn(
                        trouble +
                        "; training goes on and the next checkpoint is tried in its turn");
            if (pausing) mark = Clock::now();

            // Ends before the schedule's
            if (step == line.stop_at)
                ending = Ending::stopped;
            else if (config.schedule.max_minutes > 0 &&
                     seconds_since(start_time) > 60 * config.schedule.max_minutes)
                ending = Ending::out_of_time;
        }
        settle(0);
    } catch (const std::exception&) {
        // Bad data, say. What was learnt up to here is not lost, if the device still answers.
        settle(0);
        if (step > first_step)
            if (const std::string trouble = save(); !trouble.empty()) progress.warn(trouble);
        throw;
    }

    const std::string trouble = save();
    const std::string saved =
        trouble.empty() ? concat("step ", step, " of ", steps, " is saved in ", config.run_dir)
                        : trouble;
    if (ending == Ending::not_finite)
        throw Error("the gradient of step ", step + 1, " is not finite (first in ",
                    bad_parameter, "), so its update was not applied; ", saved,
                    "; lower optimizer.learning_rate or start from an earlier checkpoint");
    if (!trouble.empty()) throw Error(trouble);
    if (step < steps) {
        const std::string why = ending == Ending::interrupted   ? concat(interrupted(), ": ")
                                : ending == Ending::out_of_time ? "schedule.max_minutes is over: "
                                                                : "";
        progress.say(concat(why, saved, "; the same command ",
                            ending == Ending::stopped ? "without --stop-at " : "",
                            "goes on from there"));
        return 0;
    }
    if (validation && metrics.last_evaluation() < steps) evaluate_now();
    if (vocabulary) print_samples(run, *vocabulary, config, 0, config.sampling.samples, progress);
    progress.say(saved);
    return 0;
}

int sample(const CommandLine& line) {
    InferenceSession session(line.checkpoint, line.device, line.dtype,
                             InferenceSession::For::sampling);
    const auto print = [](std::string_view text) {
        std::fwrite(text.data(), 1, text.size(), stdout);
        std::fflush(stdout);
    };
    for (int i = 0; i < line.samples; ++i) {
        if (i > 0) print("\n---\n");
        print(line.prompt);
        sample_text(session.stream(), session.generator(), session.tokenizer(), line.prompt,
                    line.sampling, static_cast<uint64_t>(i), print);
    }
    print("\n");
    return 0;
}

int eval(const CommandLine& line) {
    InferenceSession session(line.checkpoint, line.device, line.dtype,
                             InferenceSession::For::evaluation);
    const std::string data = !line.data.empty() ? line.data : session.validation_data();
    if (data.empty() && line.hellaswag.empty())
        throw UsageError(
            "nothing to evaluate: the checkpoint names no validation data; give --data GLOB or "
            "--hellaswag FILE");
    if (!data.empty()) {
        const ValidationWindows windows(
            std::make_shared<TokenShards>(data, static_cast<uint32_t>(session.shape().vocab_size)),
            session.model().options().T, line.max_tokens);
        const ValidationResult v = evaluate(session.stream(), session.model(), windows,
                                            session.tokenizer_or_null(), session.batch());
        std::printf("validation loss %.6f nats/token", v.nats_per_token);
        if (std::isfinite(v.bits_per_byte)) std::printf(", %.6f bits/byte", v.bits_per_byte);
        std::printf(" over %lld tokens of %s\n", static_cast<long long>(v.tokens), data.c_str());
    }
    if (!line.hellaswag.empty()) {
        const HellaSwag hellaswag(line.hellaswag, session.tokenizer(), line.max_examples);
        const HellaSwagResult h =
            hellaswag.evaluate(session.stream(), session.model(), session.batch());
        std::printf("HellaSwag accuracy %.4f, length-normalised %.4f, over %lld examples\n",
                    h.accuracy, h.accuracy_normalised, static_cast<long long>(h.examples));
    }
    return 0;
}

int run(int argc, char** argv) {
    const CommandLine line = parse_command_line(argc, argv);
    if (line.command == CommandLine::Command::none) {
        std::fputs(line.output.c_str(), stdout);
        return 0;
    }
    switch (line.command) {
        case CommandLine::Command::tokenize:
            prepare(line.prepare, stdout);
            return 0;
        case CommandLine::Command::config:
            std::fputs((line.schema ? config_schema() : config_reference()).c_str(), stdout);
            return 0;
        default:
            break;
    }
    require_cpu_features();
    switch (line.command) {
        case CommandLine::Command::plan: {
            const Config config = load_config(line.config, line.overrides);
            select_kernels(config);
            std::fputs(plan_report(config, open_device(config.device), line.world).c_str(), stdout);
            return 0;
        }
        case CommandLine::Command::sample:
            return sample(line);
        case CommandLine::Command::eval:
            return eval(line);
        default:
            return train(line);
    }
}

}  // namespace
}  // namespace train_gpt

int main(int argc, char** argv) {
    train_gpt::limit_openmp_spinning(argv);
    // A file beyond `ulimit -f` is an error of write(), as a full disk is.
    std::signal(SIGXFSZ, SIG_IGN);
    try {
        return train_gpt::run(argc, argv);
    } catch (const train_gpt::UsageError& error) {
        std::fprintf(stderr, "train_gpt: %s\n", error.what());
        return 2;
    } catch (const std::bad_alloc&) {
        std::fprintf(
            stderr,
            "train_gpt: out of memory; use a smaller model or batch, or close other programs\n");
    } catch (const std::exception& error) {
        std::fprintf(stderr, "train_gpt: %s\n", error.what());
    }
    return 1;
}
