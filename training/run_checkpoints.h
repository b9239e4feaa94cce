// The checkpoints of a run. All ranks write them, and the first one deletes old checkpoints.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "training/background_save.h"
#include "training/files/run_folder.h"
#include "training/run_reports.h"
#include "training/run_start.h"
#include "training/watch/loss_watch.h"
#include "training/watch/shard_watch.h"

namespace train_gpt {

class RunCheckpoints {
  public:
    /// All ranks call it. The arguments must live longer.
    RunCheckpoints(const RunStart& start, const RunFolder& folder, ShardWatch& watch,
                   RunReports& reports);

    /// The last step that is saved; a new run's step 0 counts as saved.
    int64_t saved_step() const { return saved_step_; }

    /// Takes the loss of a step, which judges the checkpoints before it. Deletes old checkpoints.
    void add_loss(int64_t step, double loss);
    /// Says that no step follows: the last loss judges the checkpoints that wait.
    void end_losses();

    /// Writes the checkpoint of a step unless it exists, or the run replays another one. Returns
    /// why that failed; empty on success. A save in the background ends before.
    std::string save_or_reason(const std::filesystem::path& run_dir, int64_t step);

    /// Whether checkpoints are written in the background.
    bool in_background() const { return background_.possible(); }
    bool is_saving() const { return save_of_step().has_value(); }
    /// The step that is being saved in the background.
    std::optional<int64_t> save_of_step() const { return background_.step(); }
    /// After the update of a step has been submitted: begins to save it in the background.
    void begin_save(int64_t step);
    /// Before each step.
    void begin_step() { background_.show_progress(); }
    /// Takes the outcome of a step that has not failed; progress: StepSums::save_progress. Returns
    /// whether a save has ended.
    bool take_outcome(int64_t step, double progress);
    /// Forgets what was begun for `step` and later steps, which have not changed the weights.
    void forget_from(int64_t step) { background_.forget_from(step); }
    /// Waits for a save in the background. The outcomes of all steps have been taken.
    void finish_background();
    /// Before the checkpoint of `step`, which is due: waits for a save in the background. Says once
    /// if that takes long.
    void make_way(int64_t step);

    /// Sets aside the checkpoints that may have been trained on damaged data, so that the newest
    /// one left was trained on verified data. Returns what to print about it.
    std::string set_aside_unsound(const ShardWatch::Damage& damage) const;
    /// What to print about the save of the last step. trouble: the result of save_or_reason().
    std::string describe_saved(int64_t step, const std::string& trouble) const;
    /// Where a run whose next gradient was not finite can start from: the last checkpoint before
    /// its loss diverged.
    std::string describe_sane(int64_t step) const;

  private:
    const World& world() const { return start_.mesh.world(); }
    void saved(int64_t step);
    void take_end(const BackgroundSave::End& end);
    void prune();

    const RunStart& start_;
    const RunFolder& folder_;
    ShardWatch& watch_;
    RunReports& reports_;
    int64_t saved_step_;
    LossWatch losses_;
    BackgroundSave background_;
    bool has_said_slow_ = false;
    const bool same_bits_;  // AttentionUse::same_bits of all ranks
};

}  // namespace train_gpt
