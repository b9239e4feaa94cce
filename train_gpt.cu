// train_gpt: pretrains language models. The commands, and the training loop from top to bottom.
// Compiles as CUDA and, if there is no nvcc, as plain C++.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <sys/syscall.h>
#include <unistd.h>

#include "base/error.h"
#include "base/printable.h"
#include "base/terminal_text.h"
#include "dataloader/loader.h"
#include "device/device.h"
#include "device/memory.h"
#include "device/process.h"
#include "device/processor.h"
#include "device/stream.h"
#include "device/trace.h"
#include "kernels/attention/engine.h"
#include "parallel/mesh.h"
#include "parallel/net/socket.h"
#include "parallel/together.h"
#include "parallel/world.h"
#include "training/commands/command_line.h"
#include "training/commands/commands.h"
#include "training/commands/parse_command_line.h"
#include "training/commands/verification.h"
#include "training/config/config.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"
#include "training/decisions.h"
#include "training/files/interchange.h"
#include "training/files/run_folder.h"
#include "training/interrupt.h"
#include "training/plan/memory_advice.h"
#include "training/plan/memory_plan.h"
#include "training/plan/peak.h"
#include "training/plan/resolved_here.h"
#include "training/rank_process.h"
#include "training/replay.h"
#include "training/resume.h"
#include "training/run.h"
#include "training/run_data.h"
#include "training/run_reports.h"
#include "training/run_start.h"
#include "training/schedule.h"
#include "training/trainer.h"
#include "training/watch/progress.h"
#include "training/watch/shard_watch.h"
#include "training/watch/step_profile.h"
#include "training/watch/step_trace.h"

namespace train_gpt {
namespace {

/// Shows actions that belong to the same micro-batch and follow each other as one span.
class MicroBatchSpan {
  public:
    void show(int micro_batch) {
        if (span_ && micro_batch == micro_batch_) return;
        end();
        span_.emplace(TraceTrack::host, "micro-batch", micro_batch_ = micro_batch);
    }
    void end() { span_.reset(); }

  private:
    std::optional<TraceSpan> span_;
    int micro_batch_ = 0;
};

/// The training loop: runs steps until the schedule ends or something ends the run earlier.
void train_steps(Run& run) {
    Trainer& trainer = run.trainer();
    TrainLoader& loader = run.loader();
    while (run.has_next_step()) {
        // One step: sum the gradients of this rank's micro-batches, then update once on all ranks.
        // Each rank of a pipeline computes its stages of the model, in the order of the schedule
        run.begin_step();
        trainer.begin_step(loader.micro_batches(), loader.most_micro_batches());
        bool dropped = false;
        MicroBatchSpan span;
        for (const PipelineAction& action : trainer.actions()) {
            if (trainer.begins_micro_batch(action)) {
                span.end();
                dropped = !run.begin_micro_batch(action.micro_batch);
                if (dropped) break;
                trainer.load(action.micro_batch, loader);
                run.loaded(action.micro_batch);
            }
            span.show(action.micro_batch);
            const StepSubmission submission;
            trainer.execute(action);
            run.end_action();
        }
        span.end();
        if (dropped) {
            run.drop_step();
            break;
        }
        run.update();
        run.save_in_background();

        // Outcomes of the steps so far, then whatever is due between two steps
        const Run::Pause pause = run.next_pause();
        const bool gradients_finite = run.settle(pause.any());
        if (!gradients_finite) break;
        if (run.went_back()) continue;
        if (pause.any()) {
            run.begin_pause(pause);
            if (pause.fingerprints) run.fingerprint();
            if (pause.evaluates && !run.evaluate()) break;
            if (pause.samples) run.sample();
            // Last, so that the log is complete up to the checkpoint
            if (pause.saves) run.save();
            run.end_pause();
        }
        run.check_limits();
    }
    run.settle(true);
}

ProgressStyle progress_style(const Config& config, int ranks) {
    const ProgressStyle style = config.log.progress;
    // mpirun gives its ranks a terminal even when its own output goes to a file.
    return style == ProgressStyle::automatic && ranks > 1 ? ProgressStyle::lines : style;
}

/// Prints which results too few steps are left for.
void note_missing_steps(const RunStart& start, const StepProfile& profile, const StepTrace& trace,
                        Progress& progress) {
    const int64_t first = start.first_step(), steps = start.schedule.steps();
    if (first > steps)
        progress.say(concat("the run in ", start.given.run_dir, " is at step ", first,
                            ", beyond the configuration's ", steps, ": nothing is trained"));
    for (const auto& [what, needed] :
         {std::pair{"profile", profile.steps().needed()}, {"trace", trace.steps().needed()}})
        if (start.steps_left() < needed)
            progress.say(concat("note: there will be no ", what, ", which takes ", needed,
                                " steps; ", start.steps_left(), " are left"));
}

/// Whether the run in the folder has no steps left; then says so.
bool is_complete(const CommandLine& line, const Config& given, const RunData& data,
                 const World& world, Progress& progress) {
    const std::string complete = describe_if_complete(given, data, world, progress);
    if (complete.empty()) return false;
    progress.say(complete);
    for (const auto& [what, wanted] : {std::pair{"profile", line.profile}, {"trace", line.trace}})
        if (wanted > 0)
            progress.say(concat("note: there is no ", what, ", since no steps are left"));
    return true;
}

/// Trains as one of the mesh's ranks. `given` is the configuration as the run's folder keeps it.
int train(const CommandLine& line, const Config& given, const Device& device, const Mesh& mesh) {
    const World& world = mesh.world();
    const int ranks = world.size();
    Progress progress(progress_style(given, ranks), world.rank() == 0, line.quiet);

    // Open the data, and end here if the run in the folder has no steps left
    if (!line.data.empty() && given.data.val.empty())
        progress.say(
            concat("note: ", line.data,
                   " has no validation shards (val_*.bin), so there is no validation loss"));
    const RunData data(given, line.config);
    std::map<std::string, std::string> facts = data.facts(given, device);
    facts["--trace"] = std::to_string(line.trace);
    require_same(world, facts);
    if (is_complete(line, given, data, world, progress)) return 0;

    // Decide what the configuration leaves open, allocate all memory, and choose kernels
    const Decisions decided = decide(given, data.spec(), device, mesh, line.choices);
    Config config = given;
    config.batch.micro_batch = decided.micro_batch;
    config.parallel.zero = decided.zero;
    config.parallel.sums = decided.sums;
    config.checkpoint.async = decided.saves_in_background;
    const double peak_flops =
        decided.peak_flops > 0 ? decided.peak_flops
                               : measure_peak_flops(device, decided.dtype, kernel_settings(given));
    world.activity().pulse();
    StepProfile profile(device, line.profile, peak_flops);
    StepTrace trace(device, line.trace, given.run_dir);
    const RunShape shape = RunShape(config, data.spec(), decided.dtype, decided.recompute, ranks)
                               .with_offload(decided.offload);
    const Arena plan = plan_memory(shape, device, mesh.rank());
    require_host_memory_on_ranks(plan, shape, mesh);
    Arena arena = allocate_or_advise(plan, shape, world.local_size());
    Trainer trainer(shape, arena, mesh.rank());
    const Choices choices = choose_kernels(trainer, decided, world);
    const AttentionUse attention = attention_of_ranks(trainer.stream, world);
    if (trainer.fp8) note_fp8_refusals(trainer.stream, world, progress);
    trainer.connect(mesh);

    // Take the weights and the optimizer's state from the newest checkpoint, or begin a new run
    if (line.command == CommandLine::Command::train) begin_decay(given, data, world);
    const RunFolder folder(given.run_dir, world);
    const std::optional<RunPosition> resumed = resume(given, data, trainer, world, progress);
    if (!resumed) initialize_weights(given, data, trainer, world, progress);
    const Schedule schedule(given, data.use().epoch_tokens(),
                            resumed ? *resumed : start_of(given, data));
    const TokenIds tokens =
        run_token_ids(given, data, resumed ? std::optional(resumed->step) : std::nullopt, world);
    const RunStart start{.given = given,
                         .config = config,
                         .data = data,
                         .schedule = schedule,
                         .mesh = mesh,
                         .trainer = trainer,
                         .plan = plan,
                         .kept = decided.kept,
                         .choices = choices,
                         .attention = attention,
                         .tokens = tokens,
                         .link = decided.link,
                         .peak_flops = peak_flops,
                         .resumes = resumed.has_value(),
                         .replays = line.command == CommandLine::Command::replay};
    note_missing_steps(start, profile, trace, progress);
    if (start.on_first_rank() && start.steps_left() > 0) record_start(folder, start, progress);

    // Begin to verify the data in the background, and to read batches ahead
    ShardWatch watch(folder, data.shards(), start.first_step(), world);
    TrainLoader loader(data.sources(), start.loading(),
                       [&](size_t) { return trainer.loader_memory; });
    set_steps(start.first_step(), start.first_step());  // saved, done
    catch_interrupts();

    // Print what is about to be trained, open the run's records, and train
    announce(start, progress);
    RunReports reports(start, progress);
    Run run({start, folder, loader, watch, profile, trace, reports}, line.stop_at);
    run.evaluate_at_start();
    try {
        run.choose_first_grids();
        train_steps(run);
    } catch (const std::exception& error) {
        run.rescue(message_of(error));
        throw;
    }
    return run.end();
}

void print_resolved(const Config& given, const World& world) {
    const ResolvedConfig resolved = resolve_here(given, world.size(), world.local_size());
    std::fputs(printable(to_json(resolved.config)).c_str(), stdout);
    for (const std::string& note : resolved.notes)
        print_line(stderr, "train_gpt: note: " + printable(note));
}

RankOptions rank_options(const Config& config) {
    return {.device = config.device,
            .timeout_seconds = config.parallel.timeout_seconds,
            .collectives = {.max_ctas = config.parallel.nccl_max_ctas,
                            .encrypt = config.parallel.encrypt},
            .mesh = mesh_sizes(config)};
}

int train(const CommandLine& line) {
    return run_as_rank([&](const World& world) {
        Config config;
        together(world, [&] {
            config = config_of_command(line, world.size());
            if (!line.print_config) require_run_inputs(config, line.config);
            return "";
        });
        if (line.print_config) {
            if (world.rank() == 0) print_resolved(config, world);
            return 0;
        }
        return run_watched(world, rank_options(config),
                           [&](const Device& device, const Mesh& mesh) {
                               return train(line, config, device, mesh);
                           });
    });
}

int replay(CommandLine line) {
    line.stop_at = line.replay.to;
    return run_as_rank([&](const World& world) {
        const Replay replay = plan_replay(line.replay, world);
        line.config = replay.config_file;
        // Without a checkpoint there are no choices that belong to it
        if (line.choices.empty() && replay.checkpoint.empty()) line.choices = line.replay.run;
        return run_watched(world, rank_options(replay.config),
                           [&](const Device& device, const Mesh& mesh) {
                               begin_replay(replay, line.choices, device, world);
                               const int code = train(line, replay.config, device, mesh);
                               return code == 0 ? compare_replay(replay, world) : code;
                           });
    });
}

int run(const CommandLine& line) {
    using Command = CommandLine::Command;
    if (line.command != Command::train && line.command != Command::replay &&
        line.command != Command::selfcheck && line.command != Command::tokenize)
        act_on_signals();
    const auto show = [](const std::string& text) {
        print_line(stdout, printable(text));
        return 0;
    };
    switch (line.command) {
        case Command::none:
            std::fputs(
                text_for_terminal(line.output, line.is_help ? columns_of(stdout) : 0).c_str(),
                stdout);
            return 0;
        case Command::config:
            return commands::config(line);
        case Command::tokenize:
            return commands::tokenize(line);
        case Command::verify:
            return verify(line.verifying, stdout) ? 0 : 1;
        case Command::report:
            return commands::report(line);
        case Command::import_:
            return show(import_model(line.importing));
        case Command::export_:
            return show(export_model(line.exporting));
        default:
            break;
    }
    require_cpu_features();
    switch (line.command) {
        case Command::sweep:
            return commands::sweep(line);
        case Command::supervise:
            return commands::supervise(line);
        case Command::plan:
            return commands::plan(line);
        case Command::sample:
            return commands::sample(line);
        case Command::look:
            return commands::look(line);
        case Command::eval:
            return commands::eval(line);
        case Command::selfcheck:
            return commands::selfcheck(line);
        case Command::replay:
            return replay(line);
        default:
            return train(line);
    }
}

/// Whether a command is run for its output. Other commands succeed even if their output is lost.
bool prints_its_result(const CommandLine& line) {
    using enum CommandLine::Command;
    for (const auto command : {none, config, plan, sample, eval, selfcheck, verify, replay})
        if (line.command == command) return true;
    return line.print_config || line.sweep.json || line.report.tolerance || line.report.gap;
}

int run(int argc, char** argv) {
    const CommandLine line = parse_command_line(argc, argv);
    const int code = run(line);
    if ((std::fflush(stdout) != 0 || std::ferror(stdout)) && prints_its_result(line))
        throw Error(
            "part of the output could not be written; check whether its destination is full or "
            "closed");
    return code;
}

}  // namespace
}  // namespace train_gpt

namespace {

/// Lets signals wait until main() has its handlers. It runs before the constructors of libraries;
/// while the system maps and binds the libraries, before this, a signal still ends the process.
[[gnu::no_sanitize("address", "thread", "undefined")]] void let_signals_wait() {
    constexpr auto bit = [](int signal) { return uint64_t{1} << (signal - 1); };
    static constexpr uint64_t ending = bit(SIGINT) | bit(SIGTERM) | bit(SIGUSR1) | bit(SIGHUP);
    // Sanitizers, whose functions replace the C library's, have not begun either.
    ::syscall(SYS_rt_sigprocmask, SIG_BLOCK, &ending, nullptr, sizeof ending);
}

__attribute__((section(".preinit_array"),
               used)) void (*const before_libraries)() = let_signals_wait;

}  // namespace

int main(int argc, char** argv) {
    train_gpt::end_at_signals();
    train_gpt::limit_openmp_spinning(argv);
    train_gpt::net::raise_descriptor_limit();
    // Makes a file larger than `ulimit -f` an error of write(), like a full disk.
    std::signal(SIGXFSZ, SIG_IGN);
    try {
        return train_gpt::run(argc, argv);
    } catch (const train_gpt::StoppedEarly& stopped) {
        return stopped.code;
    } catch (const train_gpt::ReportedError&) {
        return 1;
    } catch (const train_gpt::UsageError& error) {
        train_gpt::print_line(stderr, std::string("train_gpt: ") + error.what());
        return 2;
    } catch (const std::exception& error) {
        train_gpt::print_line(stderr, "train_gpt: " + train_gpt::message_of(error));
    }
    return 1;
}
