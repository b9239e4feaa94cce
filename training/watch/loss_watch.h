// Which checkpoint a run can go back to when its loss has diverged.
#pragma once
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace train_gpt {

/// Judges checkpoints by the loss of the step that begins with their weights. A loss is sane if it
/// is finite, and above the best so far by no more than a tenth of it, or half of the way back to the
/// loss of the first step (or of a guess among all tokens, if that is more).
class LossWatch {
  public:
    explicit LossWatch(int64_t vocab_size);

    /// The loss of a step, which counts from 1; steps come in order, and some may be left out.
    /// Returns whether a later checkpoint than before is now known to be sane.
    bool add(int64_t step, double loss);
    void saved(int64_t step) { waiting_.push_back(step); }
    /// No step follows: checkpoints that wait for their judgement get the one of the last loss.
    void end();

    /// The step of the newest checkpoint that is known to be sane.
    std::optional<int64_t> sane_checkpoint() const { return sane_; }
    double last_loss() const { return last_loss_; }

    /// What earlier starts of a run that resumes at a step have logged, for one rank to tell others.
    void replay(const std::filesystem::path& run_dir, int64_t step);
    std::string to_text() const;
    void read_text(const std::string& text);

  private:
    bool is_sane(double loss) const;
    bool judge(int64_t before_step);

    double first_loss_, best_ = std::numeric_limits<double>::infinity(), last_loss_ = first_loss_;
    std::vector<int64_t> waiting_;  // checkpoints from which no step has been taken yet
    std::optional<int64_t> sane_;
};

}  // namespace train_gpt
