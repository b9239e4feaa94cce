// train_gpt: pretrains GPT language models. The commands, and the training loop from top to bottom.
// Compiles as CUDA and, where there is no nvcc, as plain C++.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <unistd.h>

#include "base/error.h"
#include "base/printable.h"
#include "dataloader/loader.h"
#include "dataloader/manifest.h"
#include "dataloader/prepare.h"
#include "dataloader/verify.h"
#include "device/device.h"
#include "device/memory.h"
#include "parallel/communicator.h"
#include "parallel/cores.h"
#include "parallel/together.h"
#include "parallel/watchdog.h"
#include "parallel/world.h"
#include "tokenizer/tokenizer.h"
#include "training/command_line.h"
#include "training/config.h"
#include "training/config_help.h"
#include "training/decisions.h"
#include "training/evaluation.h"
#include "training/inference_session.h"
#include "training/interchange.h"
#include "training/interrupt.h"
#include "training/known_data.h"
#include "training/peak.h"
#include "training/plan.h"
#include "training/progress.h"
#include "training/prompts.h"
#include "training/resume.h"
#include "training/run.h"
#include "training/run_data.h"
#include "training/run_folder.h"
#include "training/sampling.h"
#include "training/selfcheck.h"
#include "training/shard_watch.h"
#include "training/step_log.h"
#include "training/step_profile.h"
#include "training/trainer.h"
#include "training/verification.h"

namespace train_gpt {
namespace {

/// The training loop: steps up to the schedule's end, or to what ends the run before.
void train_steps(Run& run) {
    Trainer& trainer = run.trainer();
    TrainLoader& loader = run.loader();
    const int micro_batches = loader.micro_batches();
    while (run.goes_on()) {
        // One step: the gradients of this rank's micro-batches summed, then one update by all ranks
        run.begin_step();
        int i = 0;
        for (; i < micro_batches && run.begin_micro_batch(i); ++i) {
            const TokenBatch batch = trainer.next_batch(loader);
            const StepSubmission submission;
            trainer.micro_batch(batch, i == 0, i == micro_batches - 1);
            run.end_micro_batch();
        }
        if (i < micro_batches) {
            run.drop_step();
            break;
        }
        // A rank with fewer of them takes part in what the others exchange in their last one.
        for (; i < loader.most_micro_batches(); ++i)
            trainer.parameters.skip_micro_batch(trainer.stream);
        run.update();

        // What came of the steps so far; then what is due between two of them
        const Run::Pause pause = run.next_pause();
        const bool gradients_finite = run.settle(pause.any());
        if (!gradients_finite) break;
        if (pause.any()) {
            run.begin_pause(pause);
            if (pause.evaluates && !run.evaluate()) break;
            if (pause.samples) run.sample();
            // After the rest, so that what the log says up to a checkpoint is complete
            if (pause.saves) run.save();
            run.end_pause();
        }
        run.check_limits();
    }
    run.settle(true);
}

/// Trains as one of the world's ranks, with whom `group` exchanges. `given` is the configuration as
/// it is kept in the run's folder.
int train(const CommandLine& line, const Config& given, const Device& device, const World& world,
          Communicator& group) {
    const bool first_rank = world.rank() == 0;
    const int ranks = world.size();
    select_kernels(given);
    // mpirun shows its ranks a terminal also where its own output goes to a file.
    const bool by_lines = given.log.progress == "auto" && ranks > 1;
    Progress progress(by_lines ? "lines" : given.log.progress, first_rank);

    // Data: what the run reads, the same on all ranks, and whether anything is left to do
    const RunData data(given, line.config);
    const int64_t steps = data.steps();
    require_same(world, data.facts(given, device));
    const std::string complete = describe_if_complete(given, data, world, progress);
    if (!complete.empty()) {
        progress.say(complete);
        if (line.profile > 0) progress.say("note: there is no profile, since no steps are left");
        return 0;
    }

    // Memory: all of it, now
    const Decisions decided = decide(given, data.shape(), device, world);
    Config config = given;
    config.batch.micro_batch = decided.micro_batch;
    const double peak_flops = measure_peak_flops(device, decided.dtype);
    world.activity().pulse();
    StepProfile profile(device, line.profile, peak_flops);
    const Arena plan =
        plan_memory(config, data.shape(), decided.dtype, decided.recompute, device, ranks);
    Arena arena = allocate(plan, config, data.shape(), decided.dtype, ranks);
    Trainer trainer(config, data.shape(), decided.dtype, decided.recompute, arena,
                    sharding_of(config, world.rank(), ranks));
    const Choices choices = choose_kernels(trainer, config, decided, world);
    trainer.parameters.connect(group, &trainer.clock);

    // Weights: the newest checkpoint's with its optimizer, or those that a new run starts from
    const RunFolder folder(given.run_dir, world);
    const std::optional<int64_t> resumed = resume(given, data, trainer, world, progress);
    if (!resumed) initialize_weights(given, data, trainer, world, progress);
    const int64_t first_step = resumed.value_or(0), left = std::max<int64_t>(0, steps - first_step);
    if (first_step > steps)
        progress.say(concat("the run in ", given.run_dir, " is at step ", first_step,
                            ", beyond the configuration's ", steps, ": nothing is trained"));
    if (line.profile > 0 && left < profile.steps_needed())
        progress.say(concat("note: there will be no profile, which takes ", profile.steps_needed(),
                            " steps; ", left, " are left"));
    if (first_rank && left > 0)
        record_start(folder, {given, decided.kept, choices, resumed.has_value()}, progress);

    // Steps: their batches, what watches over the data, what is said of the run before and during
    // them
    ShardWatch watch(folder, data.shards(), first_step, world);
    LoaderOptions loading = loader_options(config, first_step, world.rank(), ranks);
    if (data.tokenizer()) loading.end_of_text = data.tokenizer()->end_of_text();
    TrainLoader loader(data.sources(), loading, [&](size_t) { return trainer.loader_memory; });
    const StepSize size = size_of_step(config, data.shape(), peak_flops, ranks);
    catch_interrupts();
    progress.say(describe_run(config, trainer, steps, plan.total_bytes(), ranks));
    if (data.sources().size() > 1) progress.say(describe_mixture(config, loader, steps));
    if (left > 0 && size.least_seconds() >= slow_step_seconds)
        progress.say(describe_slow_steps(size.flops, size.least_seconds(), left));
    MetricsLog metrics(given.run_dir, resumed,
                       {.tokens_per_step = config.batch.tokens_per_step, .writes = first_rank});
    StepLog log({.config = config,
                 .size = size,
                 .first_step = first_step,
                 .steps = steps,
                 .memory = plan.total_bytes()},
                loader, progress, metrics);
    Run run({given, data, choices, trainer, loader, watch, profile, log, metrics, progress, world},
            resumed, line.stop_at);
    run.evaluate_at_start();
    try {
        train_steps(run);
    } catch (const std::exception&) {
        run.rescue();
        throw;
    }
    return run.end();
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
            if (!line.print_config) require_run_inputs(config, line.config);
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
