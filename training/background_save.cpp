#include "training/background_save.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <omp.h>

#include "base/error.h"
#include "base/stopwatch.h"
#include "base/thread_priority.h"
#include "parallel/together.h"
#include "training/files/history_chain.h"

namespace train_gpt {

namespace {

/// Called between pieces of work, sleeps as long as the last piece took, so that the thread takes
/// at most half of a core and half of what a disk can write. Not in a hurry.
class Pauses {
  public:
    explicit Pauses(const std::atomic<bool>& hurry) : hurry_(&hurry) {}

    void operator()() {
        constexpr double longest = 0.5;  // seconds, so that a hurry is soon seen
        const double worked = since_.seconds();
        if (!*hurry_)
            std::this_thread::sleep_for(std::chrono::duration<double>(std::min(worked, longest)));
        since_.restart();
    }

  private:
    const std::atomic<bool>* hurry_;
    Stopwatch since_;
};

template <class T>
std::vector<T> copied(const StateCopy& copy, size_t other, int64_t n) {
    const auto* values = static_cast<const T*>(copy.other(other));
    return values ? std::vector<T>(values, values + n) : std::vector<T>();
}

}  // namespace

BackgroundSave::BackgroundSave(const RunStart& start, const RunFolder& folder)
    : start_(start), folder_(folder) {
    // The first save follows a step of all ranks.
    if (possible() && root()) remove_unfinished_checkpoints(folder.path());
    if (possible())
        touch_ = in_background([this] {
            start_.trainer.state_copy->touch(touch_ends_);
            return std::string();
        });
}

BackgroundSave::~BackgroundSave() {
    end_touch();
    hurry_ = true;
    if (work_.valid()) work_.wait();
}

void BackgroundSave::end_touch() {
    touch_ends_ = true;
    if (touch_.valid()) touch_.get();
}

std::optional<int64_t> BackgroundSave::step() const {
    return phase_ == Phase::none ? std::nullopt : std::optional(contents_->step);
}

void BackgroundSave::begin(int64_t step, bool same_bits, const std::string& history) {
    if (phase_ != Phase::none) return;
    end_touch();
    Trainer& trainer = start_.trainer;
    {
        const StepSubmission submission;  // nothing waits for the GPU
        trainer.optimizer.settle_state(trainer.stream);
        trainer.state_copy->begin(trainer.stream);
    }
    contents_.emplace(start_.contents(step));
    contents_->deterministic = same_bits;
    contents_->history = history;
    contents_->history_path = folder_.path() / history_file;
    contents_->copy = &*trainer.state_copy;
    contents_->require_in_place = [this] { folder_.require_in_place(); };
    phase_ = Phase::copying;
}

void BackgroundSave::show_progress() {
    using namespace std::chrono_literals;
    const bool ready = work_.valid() && work_.wait_for(0s) == std::future_status::ready;
    const int before = phase_ == Phase::completing ? 1 : 0;
    start_.trainer.show_save_progress(before + (ready ? 1 : 0));
}

void BackgroundSave::forget_from(int64_t step) {
    if (phase_ == Phase::copying && contents_->step >= step) phase_ = Phase::none;
}

std::optional<BackgroundSave::End> BackgroundSave::take_outcome(int64_t step, double progress) {
    last_outcome_ = step;
    if (phase_ == Phase::copying && step >= contents_->step) begin_writing();
    if (step <= stale_until_) return {};
    const int ranks = world().size();
    if (phase_ == Phase::writing && progress >= ranks) return take_files();
    if (phase_ == Phase::completing && progress >= ranks + 1) return take_completion();
    return {};
}

std::optional<BackgroundSave::End> BackgroundSave::finish() {
    hurry_ = true;
    std::optional<End> end;
    if (phase_ == Phase::copying) phase_ = Phase::none;  // of a step that has not succeeded
    if (phase_ == Phase::writing) end = take_files();
    if (phase_ == Phase::completing) end = take_completion();
    hurry_ = false;
    return end;
}

std::future<std::string> BackgroundSave::in_background(std::function<std::string()> work) {
    return std::async(std::launch::async, [work = std::move(work)] {
        lower_thread_priority();
        omp_set_num_threads(1);
        return work();
    });
}

void BackgroundSave::begin_writing() {
    phase_ = Phase::writing;
    files_.emplace(folder_.path(), *contents_, Pauses(hurry_));
    work_ = in_background([this] {
        const StateCopy& copy = *contents_->copy;
        copy.wait();
        const ParameterStore& parameters = contents_->parameters;
        contents_->spikes = copied<SpikeHistory>(copy, Trainer::saved_spikes, 1).at(0);
        contents_->routers = copied<int32_t>(copy, Trainer::saved_router_counts,
                                             start_.trainer.routers.last_on_device().numel());
        if (const Grids* grids = parameters.grids(); grids && grids->known())
            contents_->grids =
                copied<int32_t>(copy, Trainer::saved_grids, grids->layout().blocks());
        const Fp8Scales& fp8 = start_.trainer.fp8;
        if (fp8)
            contents_->fp8 =
                fp8.history_in(static_cast<const std::byte*>(copy.other(Trainer::saved_fp8)));
        files_->make_place();
        return files_->write_own(root());
    });
}

/// After all ranks' threads have ended: their files are there, or the save has failed.
std::optional<BackgroundSave::End> BackgroundSave::take_files() {
    std::vector<std::string> hashes;
    try {
        hashes = together(world(), [&] { return work_.get(); });
    } catch (const Error& error) {
        return end(error.what());
    }
    phase_ = Phase::completing;
    if (root())
        work_ = in_background([this, hashes = std::move(hashes)]() mutable {
            hashes.push_back(files_->write_weights(true));
            files_->complete(hashes);
            return std::string();
        });
    return {};
}

/// After the first rank's thread has ended.
BackgroundSave::End BackgroundSave::take_completion() {
    try {
        first_for_all(world(), [&] { return work_.get(); });
    } catch (const Error& error) {
        return end(error.what());
    }
    return end("");
}

BackgroundSave::End BackgroundSave::end(const std::string& trouble) {
    if (root() && !trouble.empty()) files_->give_up();
    phase_ = Phase::none;
    stale_until_ = last_outcome_ + OutcomeQueue::capacity;
    start_.trainer.show_save_progress(0);
    return {contents_->step, trouble};
}

}  // namespace train_gpt
