#include "parallel/first_collectives.h"

#include <algorithm>
#include <set>
#include <utility>

#include "device/copy.h"
#include "device/memory.h"
#include "parallel/axes/context.h"
#include "parallel/axes/data.h"
#include "parallel/axes/pipeline.h"
#include "parallel/axes/tensor.h"

namespace train_gpt {

namespace {

using Kind = StepCollective::Kind;

/// Each once, in the order in which all ranks of a group do them.
std::vector<StepCollective> all_collectives(const Mesh& mesh,
                                            const std::vector<Parameter>& parameters,
                                            const Sharding& sharding, const StepSizes& sizes) {
    std::vector<StepCollective> all;
    std::set<StepCollective> known;
    const auto add = [&](const std::vector<StepCollective>& of_axis) {
        for (const StepCollective& collective : of_axis)
            if (collective.count > 0 && known.insert(collective).second) all.push_back(collective);
    };
    add(collectives_of_data(mesh, parameters, sharding, sizes));
    add(collectives_of_context(mesh, sizes));
    add(collectives_of_pipeline(mesh, sizes));
    add(collectives_of_tensor(mesh, sizes));
    // One number: whether all ranks have registered their buffers.
    for (const int64_t count : {int64_t{1}, sizes.sums.fp64})
        add({{Kind::all_gather, &mesh.everyone(), DType::fp64, count}});
    add({{Kind::all_reduce, &mesh.everyone(), DType::int64, sizes.sums.int64},
         {Kind::all_reduce, &mesh.everyone(), DType::int32, sizes.sums.int32},
         {Kind::all_reduce, &mesh.everyone(), DType::fp32, sizes.sums.fp32},
         {Kind::all_reduce, &mesh.everyone(), DType::fp32, sizes.sums.amax},
         {Kind::all_reduce, &mesh.everyone(), DType::fp32, sizes.grids}});
    return all;
}

/// How many elements are in memory for each of `count`.
int64_t parts_of(const StepCollective& collective) {
    const bool has_all = collective.kind == Kind::reduce_scatter ||
                         collective.kind == Kind::all_gather || collective.kind == Kind::all_to_all;
    return has_all ? collective.group->size() : 1;
}

size_t bytes_of(const StepCollective& collective) {
    return static_cast<size_t>(parts_of(collective) * collective.count) * size_of(collective.dtype);
}

void cut(StepCollective& collective) {
    const auto most = largest_first_bytes /
                      (parts_of(collective) * static_cast<int64_t>(size_of(collective.dtype)));
    collective.count = std::min(collective.count, most);
}

/// Around the ranks and back, as activations and gradients pass.
void pass_around(Stream& stream, char* data, const StepCollective& c) {
    Communicator& group = *c.group;
    const int at = group.rank(), n = group.size(), next = (at + 1) % n, before = (at + n - 1) % n;
    for (const auto& [to, from] : {std::pair{next, before}, {before, next}}) {
        if (at == 0) group.send(stream, data, c.count, c.dtype, to);
        group.receive(stream, data, c.count, c.dtype, from);
        if (at != 0) group.send(stream, data, c.count, c.dtype, to);
    }
}

/// A message from each rank to each other one. What arrives lies after the message to that rank.
void exchange_all(Stream& stream, char* data, const StepCollective& c) {
    std::vector<Communicator::Transfer> sends, receives;
    for (int rank = 0; rank < c.group->size(); ++rank) {
        if (rank == c.group->rank()) continue;
        char* const place = data + rank * c.count * static_cast<int64_t>(size_of(c.dtype));
        const int64_t half = c.count / 2;
        sends.push_back({rank, place, half});
        receives.push_back({rank, place + half * static_cast<int64_t>(size_of(c.dtype)), half});
    }
    c.group->all_to_all(stream, sends, receives, c.dtype);
}

void run(Stream& stream, char* data, const StepCollective& c) {
    Communicator& group = *c.group;
    const auto own = [&] {
        return data + group.rank() * c.count * static_cast<int64_t>(size_of(c.dtype));
    };
    switch (c.kind) {
        case Kind::all_reduce:
            return group.all_reduce(stream, data, c.count, c.dtype);
        case Kind::reduce_scatter:
            return group.reduce_scatter(stream, own(), data, c.count, c.dtype);
        case Kind::all_gather:
            return group.all_gather(stream, data, own(), c.count, c.dtype);
        case Kind::broadcast:
            return group.broadcast(stream, data, c.count, c.dtype, group.size() - 1);
        case Kind::messages:
            return pass_around(stream, data, c);
        case Kind::all_to_all:
            return exchange_all(stream, data, c);
    }
}

}  // namespace

void do_first_collectives(const Mesh& mesh, const Device& device,
                          const std::vector<Parameter>& parameters, const Sharding& sharding,
                          const StepSizes& sizes) {
    // Makes the groups, on any device.
    std::vector<StepCollective> collectives = all_collectives(mesh, parameters, sharding, sizes);
    if (!device.is_cuda() || mesh.everyone().size() == 1) return;
    size_t bytes = 0;
    for (StepCollective& collective : collectives) {
        cut(collective);
        bytes = std::max(bytes, bytes_of(collective));
    }
    Arena plan = Arena::counting(device);
    plan.take(bytes, Purpose::buffers);
    Arena arena(device, plan);
    Stream stream(device, false, Stream::Priority::high);
    auto* const data = static_cast<char*>(arena.take(bytes, Purpose::buffers));
    clear(stream, data, bytes);
    for (const StepCollective& collective : collectives) run(stream, data, collective);
    stream.synchronize();
    mesh.check();
}

}  // namespace train_gpt
