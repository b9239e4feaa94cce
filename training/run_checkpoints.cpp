#include "training/run_checkpoints.h"

#include <cmath>
#include <optional>

#include "base/error.h"
#include "base/formatted.h"
#include "base/stopwatch.h"
#include "parallel/together.h"
#include "training/decisions.h"
#include "training/files/checkpoint.h"
#include "training/interrupt.h"

namespace train_gpt {

namespace fs = std::filesystem;

RunCheckpoints::RunCheckpoints(const RunStart& start, const RunFolder& folder, ShardWatch& watch,
                               RunReports& reports)
    : start_(start),
      folder_(folder),
      watch_(watch),
      reports_(reports),
      saved_step_(start.first_step()),
      losses_(start.data.spec().vocab_size),
      background_(start, folder),
      same_bits_(attention_of_ranks(start.trainer.stream, world()).same_bits) {
    if (start_.resumes)
        losses_.read_text(first_for_all(world(), [&] {
            losses_.replay(start_.given.run_dir, start_.first_step());
            return losses_.to_text();
        }));
}

void RunCheckpoints::add_loss(int64_t step, double loss) {
    if (losses_.add(step, loss)) prune();
}

void RunCheckpoints::end_losses() {
    losses_.end();
    prune();
}

std::string RunCheckpoints::save_or_reason(const fs::path& run_dir, int64_t step) {
    finish_background();
    if (saved_step_ == step || start_.replays) return "";
    start_.trainer.parameters.weights.gather_rest(start_.trainer.stream);
    world().activity().phase = "checkpoint";
    const Trainer& trainer = start_.trainer;
    const Grids* grids = trainer.parameters.grids();
    try {
        CheckpointContents contents = start_.contents(step);
        contents.spikes = trainer.optimizer.spike_history();
        contents.routers = trainer.routers.last_counts();
        if (grids && grids->known()) contents.grids = grids->exponents();
        contents.fp8 = trainer.fp8.history();
        contents.deterministic = same_bits_;
        contents.history = reports_.history.head();
        contents.history_path = run_dir / history_file;
        if (run_dir == folder_.path())
            contents.require_in_place = [this] { folder_.require_in_place(); };
        save_checkpoint(run_dir, contents, start_.mesh);
    } catch (const Error& error) {
        reports_.history.failure(step, error.what());
        return concat("step ", step, " of ", start_.schedule.steps(),
                      " is not saved: ", error.what());
    }
    losses_.saved(step);
    saved(step);
    set_steps(saved_step_, step);
    return "";
}

void RunCheckpoints::saved(int64_t step) {
    saved_step_ = step;
    reports_.history.checkpoint(step);
    try {
        watch_.settle();  // damage that it finds ends the run at the next check
        reports_.history.data(step);
    } catch (const Error& error) {
        reports_.progress.warn(error.what());
    }
    prune();
}

void RunCheckpoints::begin_save(int64_t step) {
    background_.begin(step, same_bits_, reports_.history.head());
}

bool RunCheckpoints::take_outcome(int64_t step, double progress) {
    if (!in_background()) return false;
    if (background_.step() == step) losses_.saved(step);
    const std::optional<BackgroundSave::End> end = background_.take_outcome(step, progress);
    if (end) take_end(*end);
    return end.has_value();
}

void RunCheckpoints::finish_background() {
    if (const std::optional<BackgroundSave::End> end = background_.finish()) take_end(*end);
}

void RunCheckpoints::make_way(int64_t step) {
    constexpr double long_wait = 1;  // seconds
    const std::optional<int64_t> before = save_of_step();
    const Stopwatch waits;
    finish_background();
    if (!before || has_said_slow_ || waits.seconds() < long_wait) return;
    has_said_slow_ = true;
    reports_.progress.warn(
        concat("the checkpoint of step ", step, " was due before that of step ", *before,
               " was written, so training has waited for ", formatted("%.1f", waits.seconds()),
               " s: raise checkpoint.every, or write to a faster disk; this is said once"));
}

void RunCheckpoints::take_end(const BackgroundSave::End& end) {
    if (end.trouble.empty()) return saved(end.step);
    losses_.not_saved(end.step);
    reports_.history.failure(end.step, end.trouble);
    reports_.progress.warn(concat("step ", end.step, " of ", start_.schedule.steps(),
                                  " is not saved: ", end.trouble,
                                  "; training continues, and the next checkpoint is written when "
                                  "it is due"));
}

/// Deletes checkpoints that are not to be kept, if this start of the run has saved any.
void RunCheckpoints::prune() try {
    const Config& config = start_.given;
    if (!start_.on_first_rank() || saved_step_ <= start_.first_step() || !folder_.in_place())
        return;
    if (!in_background()) remove_unfinished_checkpoints(config.run_dir);
    prune_checkpoints(config.run_dir, config.checkpoint.keep, watch_.sound_step(),
                      losses_.sane_checkpoint());
} catch (const Error& error) {
    reports_.progress.warn(error.what());  // the next save tries again
}

std::string RunCheckpoints::set_aside_unsound(const ShardWatch::Damage& damage) const {
    const Config& config = start_.given;
    const std::string moved = first_for_all(world(), [&] {
        return std::to_string(set_aside_checkpoints(config.run_dir, watch_.sound_step()));
    });
    const auto checkpoints = list_checkpoints(config.run_dir);
    return concat(damage.message, "; checkpoints from before it was verified are not used",
                  moved == "0"
                      ? ""
                      : concat(" (", moved, moved == "1" ? " checkpoint is" : " checkpoints are",
                               " now called step-NNNNNNNN.suspect)"),
                  ": with undamaged data the same command ",
                  checkpoints.empty() ? "starts again from the beginning"
                                      : "resumes from " + checkpoints.front().string());
}

std::string RunCheckpoints::describe_saved(int64_t step, const std::string& trouble) const {
    if (!trouble.empty()) return trouble;
    if (start_.replays) return "a replay saves nothing";
    if (step == 0 && !start_.resumes) return "no step was finished, so there is nothing to save";
    return concat("step ", step, " of ", start_.schedule.steps(), " is saved in ",
                  start_.given.run_dir);
}

std::string RunCheckpoints::describe_sane(int64_t step) const {
    if (start_.replays) return "";
    const std::optional<int64_t> sane = losses_.sane_checkpoint();
    const double loss = losses_.last_loss();
    if (step == 0) return "; lower optimizer.learning_rate";
    if (!sane)
        return concat("; the loss after each checkpoint was ",
                      std::isfinite(loss) ? concat("far above the best, in the end ", loss)
                                          : std::string("not finite"),
                      ", so none is worth resuming from: lower optimizer.learning_rate and start "
                      "again in another run_dir");
    const std::string name = checkpoint_path(start_.given.run_dir, *sane).string();
    if (*sane == step)
        return concat("; ", name,
                      " is the last checkpoint with a sane loss: lower "
                      "optimizer.learning_rate or start from an earlier checkpoint");
    return concat(
        "; the loss ",
        std::isfinite(loss) ? concat("has risen to ", loss) : std::string("is no longer finite"),
        ", and ", name,
        " is the last checkpoint with a sane loss: to resume from it, remove the later "
        "ones and lower optimizer.learning_rate");
}

}  // namespace train_gpt
