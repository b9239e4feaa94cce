// Collectives that overlap with a model's work. On a GPU they run in a stream beside the model's,
// ordered by events in both directions; on the CPU they run immediately.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/stream.h"
#include "parallel/step_clock.h"

namespace train_gpt {

class Exchange {
  public:
    /// `groups`: for each piece of work that can be waited for separately, the group of ranks
    /// (MeshLayout::group_name) for which the time counts that the model's stream waits for it.
    /// `stream`: Communicator::exchange_stream().
    Exchange(std::shared_ptr<Stream> stream, std::vector<std::string> groups, StepClock* clock);

    /// Another exchange that submits to the stream of `other`. The collectives of both run in the
    /// order in which they are submitted.
    Exchange(const Exchange& other, std::vector<std::string> groups);

    /// More pieces of work that can be waited for separately. Returns the first one's slot; the
    /// others follow.
    int add_slots(std::vector<std::string> groups);

    /// Submits work to the exchange's stream, after everything that `stream` has so far and
    /// everything submitted before.
    void submit(Stream& stream, int slot, const std::function<void(Stream&)>& work);
    /// Makes later work of `stream` wait for what was last submitted under this slot.
    void hold(Stream& stream, int slot);
    /// Makes later work of another exchange's stream wait for what was last submitted under this
    /// slot. The waiting time does not count, and the model's stream must still wait for the slot.
    void hold_other(Stream& stream, int slot);
    /// Whether submitted work runs concurrently with the stream's own work.
    bool beside() const { return stream_->device.is_cuda(); }

  private:
    std::shared_ptr<Stream> stream_;
    StepClock* clock_;
    std::vector<std::string> groups_;  // of each slot
    Event submitted_;
    std::vector<Event> done_;
    std::vector<bool> waited_for_;
};

}  // namespace train_gpt
