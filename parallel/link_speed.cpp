#include "parallel/link_speed.h"

#include <algorithm>

#include "base/stopwatch.h"
#include "device/copy.h"
#include "device/memory.h"

namespace train_gpt {

double measure_link(Communicator& group, const Device& device, int64_t count, DType dtype) {
    if (group.size() == 1) return 0;
    const auto bytes_of_rank = static_cast<size_t>(count) * size_of(dtype),
               bytes = static_cast<size_t>(group.size()) * bytes_of_rank;
    Arena plan = Arena::counting(device);
    plan.take(bytes, Purpose::buffers);
    Arena arena(device, plan);
    auto* const data = static_cast<char*>(arena.take(bytes, Purpose::buffers));
    const char* const own = data + static_cast<size_t>(group.rank()) * bytes_of_rank;
    Stream stream(device);
    clear(stream, data, bytes);
    // The first time connects ranks and touches memory.
    constexpr int repeats = 4;
    double fastest = 0;
    for (int i = 0; i < repeats; ++i) {
        stream.synchronize();
        const int64_t before = group.bytes_sent();
        const Stopwatch exchange;
        group.all_gather(stream, data, own, count, dtype);
        stream.synchronize();
        const double seconds = std::max(exchange.seconds(), 1e-9);
        if (i > 0)
            fastest = std::max(fastest, static_cast<double>(group.bytes_sent() - before) / seconds);
    }
    return fastest;
}

}  // namespace train_gpt
