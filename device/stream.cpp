#include "device/stream.h"

#include "base/error.h"
#include "base/stopwatch.h"
#include "device/cuda.h"
#include "device/memory.h"

namespace train_gpt {

Stream::Stream(Device device_, [[maybe_unused]] bool planning, [[maybe_unused]] Priority priority)
    : device(device_) {
#ifdef TRAIN_GPT_CUDA
    if (device.is_cuda() && !planning) queue = cuda::open_queue(device, priority == Priority::high);
#endif
}

void Stream::require_scratch(size_t bytes) const {
    if (bytes <= scratch_bytes) return;
    throw Error("a kernel needs ", format_bytes(bytes),
                " of scratch memory, but its stream was planned with ", format_bytes(scratch_bytes),
                "; this is a fault of the program, please report it with the configuration");
}

void Stream::synchronize() { TRAIN_GPT_ON_CUDA(device, synchronize(*this)); }

Event::Event(Device device, [[maybe_unused]] Kind kind) : device_(device) {
#ifdef TRAIN_GPT_CUDA
    if (device_.is_cuda()) event_ = cuda::create_event(device_, kind == Kind::timing);
#endif
}

void Event::record([[maybe_unused]] Stream& stream) {
    TRAIN_GPT_ON_CUDA(device_, record(event_.get(), stream));
    at_ = monotonic_seconds();
}

void Event::wait() const { TRAIN_GPT_ON_CUDA(device_, wait(event_.get())); }

void Event::hold([[maybe_unused]] Stream& stream) const {
    TRAIN_GPT_ON_CUDA(device_, hold(event_.get(), stream));
}

double Event::seconds_since(const Event& earlier) const {
    TRAIN_GPT_ON_CUDA(device_, seconds_between(earlier.event_.get(), event_.get()));
    return at_ - earlier.at_;
}

namespace {

thread_local int step_submissions = 0;

}  // namespace

StepSubmission::StepSubmission() { ++step_submissions; }
StepSubmission::~StepSubmission() { --step_submissions; }

void StepSubmission::require_none(const char* what) {
    if (step_submissions > 0)
        throw Error(what,
                    " within a step, which stalls the GPU; this is a fault of the program, "
                    "please report it");
}

}  // namespace train_gpt
