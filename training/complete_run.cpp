#include "training/complete_run.h"

#include "base/error.h"
#include "training/run_evaluation.h"
#include "training/watch/shard_watch.h"

namespace train_gpt {

std::optional<CompleteRun> find_complete_run(const Config& config, int64_t steps,
                                             const Pulse& pulse) {
    const auto checkpoints = list_checkpoints(config.run_dir);
    if (checkpoints.empty()) return {};
    try {
        CompleteRun run{checkpoints.front(), checkpoint_step(checkpoints.front()), {}};
        if (run.step < steps) return {};
        if (ShardWatch::kept_sound_step(config.run_dir).value_or(run.step) < run.step) return {};
        run.evaluation = last_evaluation(config.run_dir, run.step);
        if (!config.data.val.empty() && run.evaluation.step != run.step) return {};
        verify_checkpoint(run.checkpoint, Verify::everything, pulse);
        return run;
    } catch (const Error&) {  // resuming from it reports what is wrong with it
        return {};
    }
}

std::string describe(const CompleteRun& run, const Config& config, int64_t steps) {
    std::string text =
        concat("already complete: step ", run.step, " is saved in ", config.run_dir,
               run.step > steps ? concat(", beyond the configuration's ", steps) : "");
    const LoggedEvaluation& e = run.evaluation;
    if (e.step != run.step) return text;
    text += "\n" + describe_validation(e.step, e.nats_per_token, e.bits_per_byte);
    const std::string best = describe_best(config.run_dir, e.step);
    return text + (best.empty() ? "" : "\n" + best);
}

}  // namespace train_gpt
