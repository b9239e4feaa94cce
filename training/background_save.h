// A checkpoint that is written while training continues. After the step's update its state is
// copied (StateCopy). When the step's outcome has arrived, a thread of each rank writes the rank's
// files from the copy; then a thread of the first rank writes the weights and the manifest. The
// ranks learn of each other's threads from a sum that steps add up anyway
// (StepSums::save_progress).
#pragma once
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "training/files/checkpoint.h"
#include "training/files/run_folder.h"
#include "training/run_start.h"

namespace train_gpt {

class BackgroundSave {
  public:
    /// How a save ended.
    struct End {
        int64_t step = 0;
        std::string trouble = {};  // why it failed; empty: it has not
    };

    /// The arguments must live longer.
    BackgroundSave(const RunStart& start, const RunFolder& folder);
    /// Waits for this rank's threads.
    ~BackgroundSave();

    /// Whether the run can save in the background.
    bool possible() const { return start_.trainer.state_copy.has_value(); }
    /// The step whose checkpoint is being written; nothing between saves.
    std::optional<int64_t> step() const;

    /// Copies the state after a step, whose update has been submitted, unless another save has not
    /// ended. same_bits: AttentionUse::same_bits of all ranks. history: RunHistory::head().
    void begin(int64_t step, bool same_bits, const std::string& history);
    /// Before each step: what this rank's threads have done is added to the step's sums.
    void show_progress();
    /// Forgets a copy of `step` or a later one: the step has changed nothing, or comes again.
    void forget_from(int64_t step);
    /// Takes the outcome of a step that has not failed. All ranks call it for the same steps.
    /// Returns the end of a save.
    std::optional<End> take_outcome(int64_t step, double progress);
    /// Waits until the save has ended, if there is one; the outcome of its step has been taken. All
    /// ranks call it.
    std::optional<End> finish();

  private:
    enum class Phase : uint8_t { none, copying, writing, completing };

    const World& world() const { return start_.mesh.world(); }
    bool root() const { return world().rank() == 0; }
    /// A thread of low priority for `work`.
    std::future<std::string> in_background(std::function<std::string()> work);
    void end_touch();
    void begin_writing();
    std::optional<End> take_files();
    End take_completion();
    End end(const std::string& trouble);

    const RunStart& start_;
    const RunFolder& folder_;
    std::atomic<bool> touch_ends_ = false;
    std::future<std::string> touch_;  // of the copy's memory, before the first save
    Phase phase_ = Phase::none;
    std::optional<CheckpointContents> contents_;
    std::optional<CheckpointFiles> files_;
    std::future<std::string> work_;  // of this rank
    std::atomic<bool> hurry_ = false;
    int64_t last_outcome_ = 0;
    // Outcomes up to this step may have the progress of the save before.
    int64_t stale_until_ = 0;
};

}  // namespace train_gpt
