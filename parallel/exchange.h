// Collectives beside a model's work: on a GPU on a stream of their own, ordered by events both ways; on the CPU, and in a
// group of one, at once.
#pragma once
#include <functional>
#include <vector>

#include "device/device.h"
#include "parallel/communicator.h"
#include "parallel/step_clock.h"

namespace train_gpt {

class Exchange {
  public:
    /// `slots`: pieces of work that are waited for each by itself.
    Exchange(const Device& device, Communicator& communicator, int slots, StepClock* clock);

    Communicator& communicator() const { return communicator_; }

    /// Submits work to the exchange's stream, behind all that `stream` has so far and what was submitted before.
    void submit(Stream& stream, int slot, const std::function<void(Stream&)>& work);
    /// Later work of `stream` waits for what was last submitted under this slot.
    void hold(Stream& stream, int slot);
    /// Whether what is submitted runs beside the stream's own work.
    bool beside() const { return stream_.device.is_cuda() && communicator_.size() > 1; }

  private:
    Communicator& communicator_;
    Stream stream_;
    StepClock* clock_;
    Event submitted_;
    std::vector<Event> done_;
    std::vector<bool> waited_for_;
};

}  // namespace train_gpt
