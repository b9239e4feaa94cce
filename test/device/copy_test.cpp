#include "device/copy.h"

#include <cstring>
#include <vector>

#include "device/memory.h"
#include "test/kernels/kernel_test.h"

namespace train_gpt {

namespace {

/// An arena with `bytes` of device memory and as many of pinned host memory.
Arena arena_for(size_t bytes) {
    Arena plan = Arena::counting(test_device());
    plan.take(bytes, Purpose::buffers);
    plan.take(bytes, Purpose::staging);
    return {test_device(), plan};
}

std::vector<char> random_bytes(size_t count) {
    std::vector<char> bytes(count);
    for (char& byte : bytes) byte = static_cast<char>(random_int(0, 255));
    return bytes;
}

}  // namespace

// The simulator lets such copies land late if streams run in lazy order (GPUSIM_STREAMS=lazy).
TEST_CASE("streams opened earlier see what copy_now copied, from the host and within the device",
          "[cuda]") {
    ON_EACH_DEVICE();
    Stream stream(test_device());
    for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{300000}}) {
        Arena source_arena = arena_for(bytes), target_arena = arena_for(bytes);
        void* const source = source_arena.take(bytes, Purpose::buffers);
        void* const target = target_arena.take(bytes, Purpose::buffers);
        void* const read_back = source_arena.take(bytes, Purpose::staging);
        const std::vector<char> first = random_bytes(bytes), second = random_bytes(bytes);
        const auto stream_reads = [&](const void* memory, const std::vector<char>& expected) {
            copy(stream, read_back, memory, bytes);
            stream.synchronize();
            return std::memcmp(read_back, expected.data(), bytes) == 0;
        };
        CAPTURE(bytes);
        copy_now(test_device(), source, first.data(), bytes);
        CHECK(stream_reads(source, first));
        copy_now(test_device(), target, source, bytes);
        CHECK(stream_reads(target, first));
        copy_now(test_device(), source, second.data(), bytes);
        CHECK(stream_reads(source, second));
        CHECK(stream_reads(target, first));
    }
}

TEST_CASE("copy_now of the stream's own earlier work reads its result", "[cuda]") {
    ON_EACH_DEVICE();
    Stream stream(test_device());
    const size_t bytes = static_cast<size_t>(random_int(1, 100000));
    Arena arena = arena_for(bytes);
    void* const memory = arena.take(bytes, Purpose::buffers);
    copy_now(test_device(), memory, random_bytes(bytes).data(), bytes);
    clear(stream, memory, bytes);
    std::vector<char> found(bytes, 1);
    copy_now(test_device(), found.data(), memory, bytes);
    CHECK(found == std::vector<char>(bytes, 0));
}

TEST_CASE("rows are copied between any distances", "[cuda]") {
    ON_EACH_DEVICE();
    Stream stream(test_device());
    const auto rows = static_cast<size_t>(random_int(1, 6)),
               width = static_cast<size_t>(random_int(1, 90)),
               to_stride = width + static_cast<size_t>(random_int(0, 50)),
               from_stride = width + static_cast<size_t>(random_int(0, 50));
    CAPTURE(rows, width, to_stride, from_stride);
    const TestMemory from(rows * from_stride), to(rows * to_stride);
    const std::vector<char> content = random_bytes(rows * from_stride);
    std::memcpy(from.data(), content.data(), content.size());
    std::vector<char> expected(rows * to_stride, '\xff');  // as TestMemory starts
    for (size_t r = 0; r < rows; ++r)
        std::memcpy(expected.data() + r * to_stride, content.data() + r * from_stride, width);
    copy_rows(stream, {.to = to.data(),
                       .to_stride = to_stride,
                       .from = from.data(),
                       .from_stride = from_stride,
                       .row_bytes = width,
                       .rows = static_cast<int64_t>(rows)});
    stream.synchronize();
    to.settle();
    CHECK(std::memcmp(to.data(), expected.data(), expected.size()) == 0);
}

// CUDA's own copies of rows refuse distances of 2 GiB and more; the simulator does not.
TEST_CASE("rows that are more than 2 GiB apart are copied", "[cuda][.][long]") {
    ON_EACH_DEVICE();
    if (memory_available(test_device()) < uint64_t{6} << 30) return;
    const size_t stride = (size_t{1} << 31) + 512, width = 1000;
    Arena arena = arena_for(stride + width);
    auto* const from = static_cast<char*>(arena.take(stride + width, Purpose::buffers));
    const TestMemory to(2 * width);
    const std::vector<char> content = random_bytes(2 * width);
    copy_now(test_device(), from, content.data(), width);
    copy_now(test_device(), from + stride, content.data() + width, width);
    Stream stream(test_device());
    copy_rows(stream, {.to = to.data(),
                       .to_stride = width,
                       .from = from,
                       .from_stride = stride,
                       .row_bytes = width,
                       .rows = 2});
    stream.synchronize();
    to.settle();
    CHECK(std::memcmp(to.data(), content.data(), content.size()) == 0);
}

}  // namespace train_gpt
