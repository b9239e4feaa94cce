#include "training/run.h"

#include <algorithm>
#include <csignal>
#include <exception>
#include <filesystem>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "parallel/together.h"
#include "training/interrupt.h"
#include "training/run_evaluation.h"
#include "training/watch/not_finite.h"
#include "training/watch/spike_lines.h"

namespace train_gpt {

namespace fs = std::filesystem;

Run::Run(const RunParts& parts, int64_t stop_at)
    : parts_(parts),
      start_(parts.start),
      reports_(parts.reports),
      first_step_(start_.first_step()),
      steps_(start_.schedule.steps()),
      stop_at_(stop_at),
      step_(first_step_),
      checkpoints_(parts.start, parts.folder, parts.watch, parts.reports),
      flip_(TestFlip::from_environment(world().rank())) {
    if (stop_at_ > 0 && step_ >= stop_at_) ending_ = Ending::stopped;
}

void Run::evaluate_at_start() {
    const Config& config = start_.given;
    const Evaluations& evaluations = start_.data.evaluations();
    if (!evaluations.validation || config.evaluation.every <= 0 || start_.replays) return;
    if (start_.resumes) {
        if (ending_ != Ending::finished || !due(config.evaluation.every) || was_evaluated()) return;
        evaluate();
    } else {
        world().activity().phase = "evaluation";
        if (const std::string note = note_on_validation(config.data.val); !note.empty())
            reports_.progress.say(note);
        // A forward pass is a third of a step's work.
        const double steps_of_it = static_cast<double>(evaluations.validation->target_tokens()) /
                                   static_cast<double>(3 * config.batch.tokens_per_step);
        train_gpt::evaluate_at_start(
            evaluations, {start_.trainer, step_, start_.mesh, reports_.progress, reports_.metrics},
            steps_of_it * reports_.log.expected_seconds());
    }
    reports_.log.restart_time();
}

void Run::choose_first_grids() {
    Trainer& trainer = start_.trainer;
    const Grids* grids = trainer.parameters.grids();
    if (!grids || grids->known() || !has_next_step()) return;
    world().activity().phase = "first grids";
    LoaderOptions options = start_.loading();
    options.rank = 0, options.world = 1, options.prefetch = 1;
    TrainLoader loader(start_.data.sources(), options);
    trainer.choose_first_grids(loader);
    reports_.log.restart_time();
}

bool Run::has_next_step() {
    if (step_ >= steps_ && ending_ == Ending::finished) settle(true);
    return step_ < steps_ && ending_ == Ending::finished;
}

// ---- A step -------------------------------------------------------------------------------------

void Run::begin_step() {
    Trainer& trainer = start_.trainer;
    // A step may come again, after which it is another one that begins.
    if (parts_.profile.starts_before(step_ - first_step_) ||
        parts_.trace.starts_before(step_ - first_step_))
        settle(true);
    const int64_t step_of_process = step_ - first_step_;
    parts_.profile.begin_step(trainer.stream, step_of_process);
    if (parts_.trace.starts_before(step_of_process))
        parts_.trace.start(trainer.stream, step_ + 1, world());
    parts_.trace.begin_step(trainer.stream, step_ + 1, step_of_process);
    Activity& activity = world().activity();
    activity.phase = "training";
    activity.step = step_ + 1;
    // A single rank stops immediately; several agree on the step after which they stop.
    if (ranks() > 1 &&
        (interrupted() || parts_.watch.found_damage() || (first_rank() && out_of_time())))
        trainer.request_stop();
    checkpoints_.begin_step();
    trainer.clock.begin(trainer.stream);
    sent_before_ = start_.mesh.bytes_sent();
    since_step_start_.restart();
}

bool Run::begin_micro_batch(int i) {
    if (ranks() == 1 && interrupted()) return false;
    reports_.progress.show_step(step_ + 1, i, parts_.loader.micro_batches(),
                                since_step_start_.seconds(), reports_.log.expected_seconds());
    return true;
}

void Run::end_action() { world().activity().pulse(); }

void Run::drop_step() {
    ending_ = Ending::interrupted;
    start_.trainer.clock.drop();
}

void Run::update() {
    const Config& config = start_.given;
    Trainer& trainer = start_.trainer;
    if (flip_) flip_->before_update(trainer.parameters, step_ + 1);
    trainer.update(optimizer_step(config, step_, start_.schedule.learning_rate(step_)),
                   1.0f / static_cast<float>(start_.schedule.tokens_of(step_)),
                   static_cast<float>(config.optimizer.grad_clip));
    if (flip_) flip_->after_update(trainer.parameters, step_ + 1);
    trainer.clock.end(trainer.stream);
    parts_.trace.end_step();
    std::map<std::string, int64_t> sent = start_.mesh.bytes_sent();
    for (auto& [group, bytes] : sent) bytes -= sent_before_[group];
    reports_.log.sent(std::move(sent));
    ++step_;
    ++in_flight_;
    set_steps(checkpoints_.saved_step(), step_);
}

void Run::save_in_background() {
    if (save_due() && saves_beside()) checkpoints_.begin_save(step_);
}

// ---- After a step -------------------------------------------------------------------------------

Run::Pause Run::next_pause() const {
    const Config& config = start_.given;
    const bool replays = start_.replays;
    return {.fingerprints = fingerprints_due(),
            .evaluates =
                !replays && start_.data.evaluations().validation && due(config.evaluation.every),
            .samples = !replays && start_.data.tokenizer() && due(config.sampling.every),
            .saves = save_due() && !saves_beside() && checkpoints_.save_of_step() != step_,
            .ends_profile = parts_.profile.steps().end_after(step_ - first_step_),
            .ends_trace = parts_.trace.steps().end_after(step_ - first_step_),
            .stops = step_ == stop_at_};
}

bool Run::settle(bool all) {
    went_back_ = false;
    // A GPU computes one step while the host submits the next.
    settle_until(all || !start_.trainer.stream.device.is_cuda() ? 0 : 1);
    return ending_ != Ending::not_finite;
}

/// Takes outcomes, oldest first, until at most `may_remain` are left.
void Run::settle_until(int64_t may_remain) {
    Trainer& trainer = start_.trainer;
    while (in_flight_ > may_remain) {
        const int64_t number = step_ - in_flight_ + 1;
        const StepOutcome outcome = [&] {
            const TraceSpan span(TraceTrack::host, "wait for step", static_cast<int>(number));
            return trainer.outcome();
        }();
        --in_flight_;
        if (outcome.state.overflow || outcome.state.stop) checkpoints_.forget_from(number);
        if (outcome.state.overflow && !outcome.state.stop) return go_back_before(number);
        const auto targets = static_cast<double>(start_.schedule.tokens_of(number - 1));
        checkpoints_.add_loss(number, outcome.sums.loss / targets);
        if (outcome.state.stop) {  // neither this update nor a later one was applied
            bad_step_ = outcome;
            steps_after_bad_ = in_flight_;
            ending_ = Ending::not_finite;
            step_ = number - 1;
            in_flight_ = 0;
            return;
        }
        if (outcome.sums.stop_requests > 0 && ending_ == Ending::finished)
            ending_ = out_of_time() && !interrupted() ? Ending::out_of_time : Ending::interrupted;
        if (outcome.state.spike)
            reports_.spike(number, describe_spike(start_, parts_.loader, number, outcome));
        reports_.add(number, outcome, trainer.clock);
        if (checkpoints_.take_outcome(number, outcome.sums.save_progress)) {
            set_steps(checkpoints_.saved_step(), step_);
            write_report();
        }
    }
}

/// Steps that were submitted after it have changed nothing, and come again, too.
void Run::go_back_before(int64_t step) {
    Trainer& trainer = start_.trainer;
    StepTimes lost = trainer.clock.pop();
    for (; in_flight_ > 0; --in_flight_) {
        trainer.outcome();
        lost.add(trainer.clock.pop());
    }
    trainer.optimizer.clear_overflow();
    step_ = step - 1;
    parts_.loader.seek(step_ - first_step_);
    went_back_ = true;
    set_steps(checkpoints_.saved_step(), step_);
    reports_.log.repeat(step, lost);
}

void Run::begin_pause(const Pause& pause) {
    Stream& stream = start_.trainer.stream;
    if (pause.ends_profile)
        reports_.progress.say(profile_of_stages(start_.mesh, parts_.profile.finish(stream)));
    parts_.profile.pause(stream);
    if (pause.ends_trace) {
        require_folder();
        parts_.trace.finish(world(), reports_.progress);
    }
    parts_.trace.pause();
}

void Run::end_pause() {
    parts_.profile.resume(start_.trainer.stream);
    parts_.trace.resume(start_.trainer.stream);
    reports_.log.restart_time();
}

/// Also for the last step, and the last one of this start.
bool Run::fingerprints_due() const {
    const int64_t every = start_.given.log.fingerprint_every;
    return every > 0 && (step_ % every == 0 || step_ == steps_ || step_ == stop_at_);
}

void Run::fingerprint() {
    world().activity().phase = "fingerprints";
    const Fingerprints& fingerprints = start_.trainer.fingerprints;
    const Fingerprints::OfStep taken = fingerprints.take(start_.trainer.stream, world());
    reports_.fingerprints.write(step_, fingerprints, taken);
    if (!taken.differing_copies.empty())
        throw SharedError("after step ", step_, " ", taken.differing_copies,
                          ", so the memory or the processor of one of them is faulty; the copies "
                          "were equal ",
                          copies_equal_ ? concat("after step ", copies_equal_)
                                        : std::string("when this start of the run began"),
                          ": run `train_gpt selfcheck` on the hosts, remove later checkpoints than "
                          "that, and run the same command again");
    copies_equal_ = step_;
}

bool Run::evaluate() {
    if (evaluate_and_log()) return true;
    ending_ = Ending::interrupted;
    return false;
}

bool Run::evaluate_and_log() {
    world().activity().phase = "evaluation";
    return train_gpt::evaluate_and_log(
        start_.data.evaluations(),
        {start_.trainer, step_, start_.mesh, reports_.progress, reports_.metrics});
}

/// Whether an earlier start of this run has evaluated this step.
bool Run::was_evaluated() const {
    const std::string last = first_for_all(
        world(), [&] { return std::to_string(last_evaluation(start_.given.run_dir, step_).step); });
    return last == std::to_string(step_);
}

void Run::sample() {
    if (samples_here()) print_samples(start_, reports_, step_, {static_cast<uint64_t>(step_), 1});
}

void Run::save() {
    require_folder();
    if (checkpoints_.in_background()) {
        checkpoints_.make_way(step_);
        checkpoints_.begin_save(step_);
        checkpoints_.take_outcome(step_, 0);
        return write_report();
    }
    const std::string trouble = checkpoints_.save_or_reason(parts_.folder.path(), step_);
    if (!trouble.empty())
        reports_.progress.warn(
            trouble + "; training continues, and the next checkpoint is written when it is due");
    write_report();
}

/// Ends the run if its folder is no longer where it was: half of its files would be elsewhere.
void Run::require_folder() const {
    first_for_all(world(), [&] {
        parts_.folder.require_in_place();
        return "";
    });
}

/// Not into a folder that has taken the place of the run's.
void Run::write_report() const {
    if (parts_.folder.in_place()) reports_.page.write();
}

bool Run::out_of_time() const {
    const double minutes = start_.given.schedule.max_minutes;
    return !start_.replays && minutes > 0 && since_start_.seconds() > 60 * minutes;
}

void Run::check_limits() {
    if (ending_ != Ending::finished) return;
    if (step_ == stop_at_)
        ending_ = Ending::stopped;
    else if (ranks() == 1 && parts_.watch.found_damage())
        ending_ = Ending::damaged_data;
    else if (ranks() == 1 && out_of_time())
        ending_ = Ending::out_of_time;
}

// ---- The end ------------------------------------------------------------------------------------

void Run::rescue(const std::string& why) {
    const fs::path place = parts_.folder.place();
    try {
        if (ranks() == 1 && !place.empty()) {
            settle(true);
            if (step_ > first_step_ && !parts_.watch.found_damage())
                if (const std::string trouble = checkpoints_.save_or_reason(place, step_);
                    !trouble.empty())
                    reports_.progress.warn(trouble);
        }
    } catch (const Error&) {
        // The run ends for what went wrong first.
    }
    record_failure(why);
}

/// If the run's folder is not in place, that is why its files could not be written, and thrown.
void Run::record_failure(const std::string& why) {
    parts_.folder.require_in_place();
    try {
        reports_.history.end(step_, why, 1);
        write_report();
    } catch (const Error&) {
        // The run ends for what went wrong first.
    }
}

int Run::end() {
    try {
        const int code = finish();
        reports_.history.end(step_, code == 0 && step_ >= steps_ ? "complete" : why_it_ended(),
                             code);
        write_report();
        return code;
    } catch (const std::exception& error) {
        record_failure(message_of(error));
        throw;
    }
}

/// Why a run ended that did not fail, and is not complete.
std::string Run::why_it_ended() const {
    if (ending_ == Ending::stopped) return "--stop-at";
    if (ending_ == Ending::out_of_time) return "schedule.max_minutes have passed";
    return interrupted() ? interrupted() : "a signal to another rank";
}

int Run::finish() {
    require_folder();
    if (ending_ == Ending::interrupted) reports_.history.signal(step_, why_it_ended());
    parts_.trace.finish(world(), reports_.progress);  // if the run ends before it does
    // Also where the time limit or a signal came in the last step: no step is left, so the run ends
    // as a complete one.
    if (!start_.replays &&
        (ending_ == Ending::finished || ending_ == Ending::stopped || step_ == steps_))
        finish_verification();
    const std::optional<ShardWatch::Damage> damage = parts_.watch.settle();
    if (damage && damage->trained) throw SharedError(checkpoints_.set_aside_unsound(*damage));
    const std::string trouble = checkpoints_.save_or_reason(parts_.folder.path(), step_);
    const std::string saved = checkpoints_.describe_saved(step_, trouble);
    if (ending_ == Ending::not_finite)
        throw SharedError(
            "the gradient of step ", step_ + 1, " is not finite (first in ",
            describe_not_finite(start_, parts_.loader, step_, steps_after_bad_, bad_step_),
            "), so its update was not applied; ", saved, checkpoints_.describe_sane(step_));
    checkpoints_.end_losses();
    if (damage) throw SharedError(damage->message, "; ", saved);
    if (!trouble.empty()) throw SharedError(trouble);
    if (const std::string summary = reports_.log.summary(world()); !summary.empty())
        reports_.progress.say(summary);
    if (start_.replays) return end_replay();
    return step_ < steps_ ? end_early(saved) : end_complete(saved);
}

/// Reads what has not been verified yet, at full speed since no step competes with it any more.
void Run::finish_verification() {
    constexpr uint64_t worth_a_line = 1 << 30;
    if (const uint64_t left = parts_.watch.bytes_left(); left > worth_a_line)
        reports_.progress.say("verifying the rest of the data, " + format_bytes(left));
    parts_.watch.finish([] { return interrupted() != nullptr; });
}

int Run::end_early(const std::string& saved) {
    const std::string why = ending_ == Ending::stopped ? "" : why_it_ended() + ": ";
    const bool nothing_trained = step_ == 0 && !start_.resumes;
    reports_.progress.say(concat(why, saved, "; the same command ",
                                 ending_ == Ending::stopped ? "without --stop-at " : "",
                                 nothing_trained ? "starts the run again" : "resumes from there"));
    return exit_code(ending_);
}

int Run::end_complete(const std::string& saved) {
    if (parts_.watch.sound_step() < step_) {  // a signal ended the verification
        reports_.progress.say(saved +
                              "; the same command continues with the verification of its data");
        return exit_code(Ending::interrupted);
    }
    const bool has_validation = start_.data.evaluations().validation != nullptr;
    const bool evaluated = was_evaluated();
    if (has_validation && !evaluated && !evaluate_and_log()) {
        reports_.progress.say(saved + "; the same command continues with its evaluation");
        return exit_code(Ending::interrupted);
    }
    if (has_validation && first_rank()) {
        const std::string& folder = start_.given.run_dir;
        const LoggedEvaluation e = last_evaluation(folder, step_);
        if (evaluated)
            reports_.progress.say(describe_validation(e.step, e.nats_per_token, e.bits_per_byte));
        if (const std::string best = describe_best(folder, step_); !best.empty())
            reports_.progress.say(best);
    }
    if (start_.data.tokenizer() && samples_here())
        print_samples(start_, reports_, step_, {0, start_.given.sampling.samples});
    reports_.progress.say(saved);
    return 0;
}

int Run::end_replay() {
    if (step_ == stop_at_ || step_ == steps_) return 0;
    reports_.progress.say(concat(why_it_ended(), ": the replay ends after step ", step_,
                                 "; remove ", start_.given.run_dir, " to start it again"));
    return exit_code(ending_);
}

/// Collective; the same on all ranks.
int Run::exit_code(Ending ending) const {
    if (ending == Ending::stopped) return 0;
    double ctrl_c[] = {interrupt_signal() == SIGINT ? 1.0 : 0.0};
    world().all_reduce_sum(ctrl_c);
    return stopped_early_code(ctrl_c[0] > 0);
}

}  // namespace train_gpt
