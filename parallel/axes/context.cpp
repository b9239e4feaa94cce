#include "parallel/axes/context.h"

#include <cassert>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/copy.h"

namespace train_gpt {

ContextRank context_rank(const MeshLayout& mesh, int rank) {
    return {mesh.at(Axis::context, rank), mesh.size(Axis::context)};
}

std::optional<SizeProblem> context_problem(const char* key, int64_t length, int ranks) {
    const int chunks = 2 * ranks;
    if (ranks == 1 || length % chunks == 0) return {};
    return SizeProblem{
        .text = concat(key, " = ", length, " cannot be cut into 2 · parallel.context = ", chunks,
                       " equal chunks"),
        .key = key,
        .value = length,
        .does = "can"};
}

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

std::vector<StepCollective> collectives_of_context(const Mesh& mesh, const StepSizes& sizes) {
    using Kind = StepCollective::Kind;
    if (mesh.size(Axis::context) == 1) return {};
    Communicator* const group = &mesh.along(Axis::context);
    std::vector<StepCollective> all;
    for (const int64_t tokens : sizes.tokens) {
        for (const int64_t kv_width : sizes.kv_widths) {
            const int64_t own = tokens * 2 * kv_width;
            all.push_back({Kind::all_gather, group, sizes.dtype, own});
            all.push_back({Kind::reduce_scatter, group, DType::fp32, own});
        }
    }
    for (const int64_t counts : sizes.expert_counts)
        all.push_back({Kind::all_gather, group, DType::int32, counts});
    if (mesh.at(Axis::pipeline) == mesh.size(Axis::pipeline) - 1)
        all.push_back({Kind::broadcast, group, DType::fp32, sizes.vocabulary});
    return all;
}

int64_t context_bytes_sent(int64_t elements, DType dtype, int ranks) {
    const auto bytes = static_cast<int64_t>(2 * size_of(dtype) + sizeof(float));
    return elements / ranks * (ranks - 1) * bytes;
}

int64_t counts_bytes_sent(int64_t counts, int ranks) {
    return counts * int64_t{sizeof(int32_t)} * (ranks - 1);
}

}  // namespace train_gpt
