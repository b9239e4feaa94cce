#include "parallel/link_speed.h"

#include <algorithm>

#include "base/stopwatch.h"
#include "device/copy.h"
#include "device/memory.h"

namespace train_gpt {

double measure_link(Communicator& group, const Device& device, int64_t bucket_elements) {
    if (group.size() == 1) return 0;
    constexpr int64_t most = 1 << 24;
    const int64_t count = std::clamp<int64_t>(bucket_elements, 1024, most) / group.size() + 1;
    const size_t bytes = static_cast<size_t>(group.size() * count) * sizeof(float);
    Arena plan = Arena::counting(device);
    plan.take(bytes, Purpose::buffers);
    Arena arena(device, plan);
    auto* const data = static_cast<float*>(arena.take(bytes, Purpose::buffers));
    Stream stream(device);
    clear(stream, data, bytes);
    // The first time connects ranks and touches memory.
    constexpr int repeats = 4;
    double fastest = 0;
    for (int i = 0; i < repeats; ++i) {
        stream.synchronize();
        const int64_t before = group.bytes_sent();
        const Stopwatch exchange;
        group.all_gather(stream, data, data + group.rank() * count, count, DType::fp32);
        stream.synchronize();
        const double seconds = std::max(exchange.seconds(), 1e-9);
        if (i > 0)
            fastest = std::max(fastest, static_cast<double>(group.bytes_sent() - before) / seconds);
    }
    return fastest;
}

}  // namespace train_gpt
