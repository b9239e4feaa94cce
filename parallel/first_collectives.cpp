#include "parallel/first_collectives.h"

#include <algorithm>
#include <set>
#include <utility>

#include "device/copy.h"
#include "device/memory.h"
#include "parallel/state/gradient_sums.h"

namespace train_gpt {

void do_first_collectives(const Mesh& mesh, const Device& device, const BucketLayout& layout,
                          const Sharding& sharding, DType weights, int64_t sums) {
    const auto sum_group = [&](SumOver over, bool exists) {
        return exists ? &group_of(over, mesh, sharding) : nullptr;
    };
    Communicator &group = group_of(SumOver::shards, mesh, sharding), &everyone = mesh.everyone();
    Communicator* const replicas = sum_group(SumOver::replicas, sharding.replicas > 1);
    Communicator* const tensor = sum_group(SumOver::tensor, sharding.tensors > 1);
    Communicator* const context =
        mesh.size(Axis::context) > 1 ? &mesh.along(Axis::context) : nullptr;
    Communicator* const pipeline = sharding.pipelines > 1 ? &mesh.along(Axis::pipeline) : nullptr;
    Communicator* const ends = sum_group(SumOver::ends, sharding.tied_ends);
    if (!device.is_cuda() || everyone.size() == 1) return;
    const int64_t ranks = std::max({group.size(), sharding.tensors, mesh.size(Axis::context)});
    std::set<int64_t> shards;
    for (const Bucket& bucket : layout.buckets())
        shards.insert(std::min<int64_t>(bucket.shard,
                                        largest_first_bytes / (ranks * int64_t{sizeof(float)})));
    constexpr int64_t passed = 1 << 18;  // elements, the same on all stages
    const size_t bytes =
        std::max({static_cast<size_t>(ranks * *shards.rbegin()) * sizeof(float),
                  static_cast<size_t>(everyone.size() * sums) * sizeof(double),
                  pipeline ? static_cast<size_t>(passed) * sizeof(float) : size_t{0}});

    Arena plan = Arena::counting(device);
    plan.take(bytes, Purpose::buffers);
    Arena arena(device, plan);
    auto* const data = static_cast<char*>(arena.take(bytes, Purpose::buffers));
    Stream stream(device, false, Stream::Priority::high);
    clear(stream, data, bytes);
    const auto own = [&](const Communicator& of, int64_t count, DType dtype) {
        return data + of.rank() * count * static_cast<int64_t>(size_of(dtype));
    };
    for (const int64_t shard : shards) {
        const DType dtype = sharding.reduce_dtype;
        if (!sharding.is_split()) {
            group.all_reduce(stream, data, group.size() * shard, dtype);
        } else {
            group.reduce_scatter(stream, own(group, shard, dtype), data, shard, dtype);
            group.all_gather(stream, data, own(group, shard, weights), shard, weights);
            if (replicas) replicas->all_reduce(stream, data, shard, dtype);
        }
        if (context) {
            // Keys and values of micro-batches, and their gradients, of sizes like these
            context->all_gather(stream, data, own(*context, shard, weights), shard, weights);
            context->reduce_scatter(stream, own(*context, shard, DType::fp32), data, shard,
                                    DType::fp32);
        }
        if (!tensor) continue;
        // Rows of micro-batches, of sizes like these, and gradients of whole tensors
        tensor->reduce_scatter(stream, own(*tensor, shard, weights), data, shard, weights);
        tensor->all_gather(stream, data, own(*tensor, shard, weights), shard, weights);
        tensor->all_reduce(stream, data, shard, DType::fp32);
    }
    if (ends) ends->all_reduce(stream, data, passed, DType::fp32);
    if (pipeline) {
        // Around the stages and back, as activations and gradients pass.
        const int at = pipeline->rank(), n = pipeline->size(), next = (at + 1) % n,
                  before = (at + n - 1) % n;
        for (const auto& [to, from] : {std::pair{next, before}, {before, next}}) {
            if (at == 0) pipeline->send(stream, data, passed, weights, to);
            pipeline->receive(stream, data, passed, weights, from);
            if (at != 0) pipeline->send(stream, data, passed, weights, to);
        }
        pipeline->broadcast(stream, data, passed, DType::fp32, n - 1);
    }
    if (tensor) tensor->all_gather(stream, data, own(*tensor, 1, DType::fp32), 1, DType::fp32);
    // One number: whether all ranks have registered their buffers.
    for (const int64_t count : {int64_t{1}, sums})
        everyone.all_gather(stream, data, own(everyone, count, DType::fp64), count, DType::fp64);
    stream.synchronize();
    mesh.check();
}

}  // namespace train_gpt
