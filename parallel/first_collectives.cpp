#include "parallel/first_collectives.h"

#include <algorithm>
#include <memory>
#include <set>

#include "device/copy.h"
#include "device/memory.h"
#include "parallel/axes/context.h"
#include "parallel/axes/data.h"
#include "parallel/axes/pipeline.h"
#include "parallel/axes/tensor.h"

namespace train_gpt {

void do_first_collectives(const Mesh& mesh, const Device& device, const BucketLayout& layout,
                          const Sharding& sharding, DType weights, int64_t sums) {
    // Each makes its groups, on any device.
    const auto data = first_use_of_data(mesh, sharding), tensor = first_use_of_tensor(mesh),
               context = first_use_of_context(mesh),
               pipeline = first_use_of_pipeline(mesh, sharding);
    Communicator& everyone = mesh.everyone();
    if (!device.is_cuda() || everyone.size() == 1) return;
    const FirstUse* const axes[] = {data.get(), context.get(), pipeline.get(), tensor.get()};
    int64_t ranks = 1;
    size_t bytes = static_cast<size_t>(everyone.size() * sums) * sizeof(double);
    for (const FirstUse* const axis : axes) {
        ranks = std::max(ranks, axis->ranks());
        bytes = std::max(bytes, axis->bytes());
    }
    std::set<int64_t> shards;
    for (const Bucket& bucket : layout.buckets())
        shards.insert(std::min<int64_t>(bucket.shard,
                                        largest_first_bytes / (ranks * int64_t{sizeof(float)})));
    bytes = std::max(bytes, static_cast<size_t>(ranks * *shards.rbegin()) * sizeof(float));

    Arena plan = Arena::counting(device);
    plan.take(bytes, Purpose::buffers);
    Arena arena(device, plan);
    Stream stream(device, false, Stream::Priority::high);
    const FirstData on{stream, static_cast<char*>(arena.take(bytes, Purpose::buffers)), weights};
    clear(stream, on.data, bytes);
    for (const int64_t shard : shards)
        for (const FirstUse* const axis : axes) axis->exchange_shards(on, shard);
    for (const FirstUse* const axis : axes) axis->exchange_rest(on);
    // One number: whether all ranks have registered their buffers.
    for (const int64_t count : {int64_t{1}, sums})
        everyone.all_gather(stream, on.data, on.own(everyone, count, DType::fp64), count,
                            DType::fp64);
    stream.synchronize();
    mesh.check();
}

}  // namespace train_gpt
