#include "device/memory.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "test/kernels/kernel_test.h"

namespace train_gpt {

namespace {

struct Request {
    size_t bytes;
    Purpose purpose;
};

std::vector<Request> random_requests() {
    std::vector<Request> requests;
    for (int64_t i = random_int(5, 30); i > 0; --i) {
        const size_t bytes =
            static_cast<size_t>(random_int(0, 3) == 0 ? random_int(0, 100) : random_int(1, 300000));
        requests.push_back(
            {bytes, static_cast<Purpose>(random_int(0, static_cast<int64_t>(Purpose::count) - 1))});
    }
    return requests;
}

}  // namespace

TEST_CASE("an arena gives exactly the memory that its plan counted") {
    const std::vector<Request> requests = random_requests();
    Arena plan = Arena::counting({});
    CHECK(plan.is_counting());
    size_t wanted = 0;
    for (const Request& request : requests) {
        CHECK(plan.take(request.bytes, request.purpose) != nullptr);
        wanted += request.bytes;
    }
    CHECK(plan.total_bytes() >= wanted);
    CHECK(plan.total_bytes() <= wanted + requests.size() * 1024);

    Arena arena({}, plan);
    CHECK_FALSE(arena.is_counting());
    CHECK(arena.total_bytes() == 0);
    std::vector<unsigned char*> starts;
    for (size_t i = 0; i < requests.size(); ++i) {
        auto* memory =
            static_cast<unsigned char*>(arena.take(requests[i].bytes, requests[i].purpose));
        CHECK(reinterpret_cast<uintptr_t>(memory) % 64 == 0);
        std::memset(memory, static_cast<int>(i), requests[i].bytes);
        starts.push_back(memory);
    }
    for (size_t i = 0; i < requests.size(); ++i) {
        const std::vector<unsigned char> expected(requests[i].bytes, static_cast<unsigned char>(i));
        CHECK(std::equal(expected.begin(), expected.end(), starts[i]));
    }
    size_t by_purpose = 0;
    for (size_t i = 0; i < static_cast<size_t>(Purpose::count); ++i) {
        const Purpose purpose = static_cast<Purpose>(i);
        CHECK(arena.bytes(purpose) == plan.bytes(purpose));
        CHECK_FALSE(std::string(name_of(purpose)).empty());
        by_purpose += arena.bytes(purpose);
    }
    CHECK(by_purpose == arena.total_bytes());
    CHECK(arena.total_bytes() == plan.total_bytes());
    CHECK_THROWS_AS(arena.take(1, Purpose::staging), Error);
}

TEST_CASE("an arena survives being moved") {
    Arena plan = Arena::counting({});
    plan.tensor(DType::fp32, {3, 5}, Purpose::buffers);
    Arena first({}, plan);
    Arena second(std::move(first));
    const Tensor tensor = second.tensor(DType::fp32, {3, 5}, Purpose::buffers);
    CHECK(tensor.numel() == 15);
    tensor.as<float>()[14] = 1;
    CHECK(second.total_bytes() == plan.total_bytes());
}

TEST_CASE("tensors of whole pages do not start at the same offset of a page") {
    Arena plan = Arena::counting({});
    std::set<uintptr_t> offsets;
    for (int i = 0; i < 64; ++i) {
        const Tensor tensor = plan.tensor(DType::fp32, {1024 * random_int(1, 9)}, Purpose::moments);
        offsets.insert(reinterpret_cast<uintptr_t>(tensor.data) % 4096);
    }
    CHECK(offsets.size() == 64);
}

TEST_CASE(
    "sizes that overflow, are negative or exceed the machine's memory are errors, not wrong "
    "numbers") {
    constexpr int64_t huge = int64_t{1} << 40;
    Arena plan = Arena::counting({});
    CHECK_THROWS_AS(plan.tensor(DType::fp32, {huge, huge}, Purpose::parameters), Error);
    CHECK_THROWS_AS(plan.tensor(DType::bf16, {huge, huge, huge, 0}, Purpose::parameters), Error);
    CHECK_THROWS_AS(plan.tensor(DType::fp32, {-1}, Purpose::parameters), Error);
    CHECK(plan.total_bytes() == 0);
    for (int i = 0; i < 3; ++i) plan.tensor(DType::fp32, {huge, 256}, Purpose::parameters);
    try {
        Arena arena({}, plan);
        FAIL("three pebibytes were allocated");
    } catch (const Error& error) {
        CHECK(std::string(error.what()).find("3.00 PiB") != std::string::npos);
        CHECK(std::string(error.what()).find("available") != std::string::npos);
    }
    const auto fill_address_space = [&] {
        for (int i = 0; i < 100; ++i) plan.take(size_t{1} << 61, Purpose::parameters);
    };
    CHECK_THROWS_AS(fill_address_space(), Error);
}

TEST_CASE("format_bytes prints three digits or more and never 1024 of a unit") {
    CHECK(format_bytes(0) == "0 B");
    CHECK(format_bytes(1023) == "1023 B");
    CHECK(format_bytes(1024) == "1.00 KiB");
    CHECK(format_bytes(5 << 18) == "1.25 MiB");
    CHECK(format_bytes((uint64_t{1} << 30) - 1) == "1.00 GiB");
    CHECK(format_bytes(uint64_t{5} << 28) == "1.25 GiB");
    CHECK(format_bytes(~uint64_t{0}) == "16.00 EiB");
}

}  // namespace train_gpt
