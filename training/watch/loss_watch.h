// Which checkpoint a run can go back to when its loss has diverged.
#pragma once
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace train_gpt {

/// Judges checkpoints by the loss of the step that begins with their weights. A loss is sane if
///
///   loss ≤ best + max(best / 10, (first − best) / 2)
///
/// with the best loss so far, and `first`, which is the larger of the first step's loss and the
/// loss of a guess among all tokens. A loss that is not finite is not sane.
class LossWatch {
  public:
    explicit LossWatch(int64_t vocab_size);

    /// Takes the loss of a step. Steps count from 1 and come in order; some may be left out.
    /// Returns whether a later checkpoint than before is now known to be sane.
    bool add(int64_t step, double loss);
    void saved(int64_t step) { waiting_.push_back(step); }
    /// After saved(): the checkpoint could not be written after all.
    void not_saved(int64_t step);
    /// Says that no step follows: the last loss judges the checkpoints that wait.
    void end();

    /// The step of the newest checkpoint that is known to be sane.
    std::optional<int64_t> sane_checkpoint() const { return sane_; }
    double last_loss() const { return last_loss_; }

    /// Takes the losses that earlier starts of a run have logged; the run resumes at `step`. Only
    /// one rank calls it. The others get what it knows through to_text() and read_text().
    void replay(const std::filesystem::path& run_dir, int64_t step);
    std::string to_text() const;
    void read_text(const std::string& text);

  private:
    bool is_sane(double loss) const;
    bool judge(int64_t before_step);

    double first_loss_, best_ = std::numeric_limits<double>::infinity(), last_loss_ = first_loss_;
    std::vector<int64_t> waiting_;  // checkpoints from which no step has been taken yet
    std::optional<int64_t> sane_, sane_before_;
};

}  // namespace train_gpt
