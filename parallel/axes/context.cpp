#include "parallel/axes/context.h"

#include <cassert>
#include <string>
#include <vector>

#include "device/copy.h"
#include "parallel/mesh.h"

namespace train_gpt {

void ContextGroup::connect(const Device& device, Communicator& communicator, StepClock* clock,
                           const Exchange* tensor) {
    assert(communicator.size() == size() && communicator.rank() == rank());
    if (!is_split()) return;
    communicator_ = &communicator;
    const std::vector<std::string> groups{name_of(Axis::context)};
    exchange_ =
        tensor ? std::make_unique<Exchange>(*tensor, groups)
               : std::make_unique<Exchange>(communicator.exchange_stream(device), groups, clock);
}

template <class Work>
void ContextGroup::exchange(Stream& stream, const Work& work) {
    exchange_->submit(stream, 0, work);
    exchange_->hold(stream, 0);
}

Tensor ContextGroup::part(const Tensor& all, int rank) const {
    const int64_t n = all.numel() / size();
    return all.reshaped({size(), n}).row_range(rank, 1);
}

void ContextGroup::gather(Stream& stream, Tensor all) {
    if (!is_split()) return;
    const Tensor own = part(all, rank());
    if (!is_connected()) {
        for (int r = 0; r < size(); ++r)
            if (r != rank()) copy(stream, part(all, r).data, own.data, own.bytes());
        return;
    }
    exchange(stream, [&](Stream& on) {
        communicator_->all_gather(on, all.data, own.data, own.numel(), own.dtype);
    });
}

void ContextGroup::add_up(Stream& stream, Tensor all) {
    if (!is_connected()) return;
    const Tensor own = part(all, rank());
    exchange(stream, [&](Stream& on) {
        communicator_->reduce_scatter(on, own.data, all.data, own.numel(), own.dtype);
    });
}

void ContextGroup::broadcast(Stream& stream, Tensor data, int from) {
    if (!is_connected()) return;
    exchange(stream, [&](Stream& on) {
        communicator_->broadcast(on, data.data, data.numel(), data.dtype, from);
    });
}

}  // namespace train_gpt
