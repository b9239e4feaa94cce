// A run from its first step to its end: everything around a step's micro-batches and update.
// train_gpt.cu shows the order of the calls. All ranks of a run call the same functions in the same
// order.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "base/stopwatch.h"
#include "training/run_checkpoints.h"
#include "training/run_reports.h"
#include "training/run_start.h"
#include "training/test_flip.h"
#include "training/watch/shard_watch.h"
#include "training/watch/step_profile.h"
#include "training/watch/step_trace.h"

namespace train_gpt {

/// What a run uses while it trains; all of it must outlive the Run.
struct RunParts {
    const RunStart& start;
    const RunFolder& folder;
    TrainLoader& loader;
    ShardWatch& watch;
    StepProfile& profile;
    StepTrace& trace;
    RunReports& reports;
};

class Run {
  public:
    /// stop_at: the step after which the user wants the run to stop; 0: at the schedule's end.
    Run(const RunParts& parts, int64_t stop_at);

    Trainer& trainer() { return start_.trainer; }
    TrainLoader& loader() { return parts_.loader; }

    /// Evaluates the weights that a new run starts from. A run that resumes evaluates the step of
    /// its checkpoint, if an evaluation is due there and was not finished.
    void evaluate_at_start();
    /// With exact sums, chooses the first grids, if the run has none from a checkpoint.
    void choose_first_grids();
    /// Whether another step follows. After the last one, takes all outcomes: with exact sums a step
    /// may come again.
    bool has_next_step();

    // ---- A step ---------------------------------------------------------------------------------

    void begin_step();
    /// Shows that micro-batch i comes next. Returns false if a signal ends the run before this
    /// micro-batch; the caller then drops the step.
    bool begin_micro_batch(int i);
    /// Micro-batch i of the step is on its way to the device.
    void loaded(int i) {
        if (flip_)
            flip_->loaded(start_.trainer.stream.device, start_.trainer.batch_of(i), step_ + 1);
    }
    void end_action();
    /// Drops the step. Nothing of the step has been applied: a run that resumes repeats it.
    void drop_step();
    /// Applies the optimizer with the step's learning rate and the mean gradient over its tokens.
    void update();
    /// After update(): begins to save the step in the background, if that is due and possible.
    void save_in_background();

    // ---- After a step ---------------------------------------------------------------------------

    /// The reasons for a pause between two steps. The device is idle during it.
    struct Pause {
        bool fingerprints = false, evaluates = false, samples = false, saves = false,
             ends_profile = false, ends_trace = false, stops = false;

        bool any() const {
            return fingerprints || evaluates || samples || saves || ends_profile || ends_trace ||
                   stops;
        }
    };
    Pause next_pause() const;
    /// Takes the outcomes of submitted steps. Unless `all`, leaves out the steps that the device
    /// may still be computing. Returns false if a gradient was not finite, which ends the run.
    bool settle(bool all);
    /// Whether the last settle() has gone back: exact sums of a step have overflowed, and the step
    /// comes again, with coarser grids. What was due after it is not due yet.
    bool went_back() const { return went_back_; }
    void begin_pause(const Pause& pause);
    /// Writes the fingerprints of the step.
    void fingerprint();
    /// Returns false if a signal ended the evaluation. The run then ends, too.
    bool evaluate();
    /// Prints one sample.
    void sample();
    /// Writes a checkpoint, or begins to write it in the background after the save before has
    /// ended. Only warns if that fails: the run tries again when the next is due.
    void save();
    void end_pause();
    /// Checks whether the run ends before its schedule does.
    void check_limits();

    // ---- The end --------------------------------------------------------------------------------

    /// After an exception: saves a checkpoint of what was learned so far, if the device still
    /// responds and this is the only rank. why: the exception's message.
    void rescue(const std::string& why);
    /// Saves, evaluates and samples what is left to do, and prints how the run ended. Returns the
    /// exit code. Throws Error if the run failed.
    int end();

  private:
    /// Why no further step follows; it determines the exit code.
    enum class Ending { finished, stopped, interrupted, out_of_time, not_finite, damaged_data };

    const World& world() const { return start_.mesh.world(); }
    bool first_rank() const { return world().rank() == 0; }
    int ranks() const { return world().size(); }
    /// Whether this rank computes samples. If no rank holds all weights, all ranks compute them,
    /// else only the first rank.
    bool samples_here() const {
        return first_rank() || !start_.trainer.parameters.holds_whole_model();
    }
    bool save_due() const { return !start_.replays && due(start_.given.checkpoint.every); }
    /// A save in the background follows only when the one before has ended.
    bool saves_beside() const { return checkpoints_.in_background() && !checkpoints_.is_saving(); }
    bool due(int64_t every) const { return every > 0 && step_ % every == 0 && step_ < steps_; }
    bool fingerprints_due() const;
    bool out_of_time() const;
    void settle_until(int64_t may_remain);
    void go_back_before(int64_t step);
    bool was_evaluated() const;
    bool evaluate_and_log();
    void require_folder() const;
    void write_report() const;
    void record_failure(const std::string& why);

    void finish_verification();
    std::string why_it_ended() const;
    int finish();
    int end_early(const std::string& saved);
    int end_complete(const std::string& saved);
    int end_replay();
    int exit_code(Ending ending) const;

    RunParts parts_;
    const RunStart& start_;
    RunReports& reports_;
    const int64_t first_step_, steps_, stop_at_;
    const Stopwatch since_start_;
    Stopwatch since_step_start_;

    int64_t step_;           // steps submitted so far, counted over the whole run
    int64_t in_flight_ = 0;  // submitted steps whose outcome the host has not seen
    bool went_back_ = false;
    RunCheckpoints checkpoints_;
    Ending ending_ = Ending::finished;
    std::map<std::string, int64_t> sent_before_;  // bytes sent when the step began
    int64_t copies_equal_ = 0;  // the last step after which ranks' copies of the state were equal
    int64_t steps_after_bad_ = 0;  // steps that had begun when it was seen
    StepOutcome bad_step_;         // whose gradient was not finite
    std::optional<TestFlip> flip_;
};

}  // namespace train_gpt
