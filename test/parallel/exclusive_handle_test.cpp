#include "parallel/exclusive_handle.h"

#include <atomic>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "test/catch.h"
#include "test/random.h"

using namespace train_gpt;

namespace {

using Shared = ExclusiveHandle<int*>;
using Outcome = Shared::Outcome;
constexpr std::chrono::milliseconds forever{1 << 30};

/// A library's object: counts calls without a lock, so that a thread checker sees two at a time.
struct Object {
    int calls = 0;
    std::atomic<int> inside{0}, overlapping{0}, late{0};
    std::atomic<bool> freed{false};

    void call(int* handle) {
        overlapping += ++inside > 1;
        late += freed;
        ++calls;
        ++*handle;
        std::this_thread::yield();  // to a thread that would not wait
        --inside;
    }
};

}  // namespace

TEST_CASE("of many threads one at a time uses a shared handle, and none after its end",
          "[communicator]") {
    for (int round = 0; round < 50; ++round) {
        Object object;
        int number = 0;
        const auto threads = static_cast<int>(random_int(2, 6));
        const auto before_the_end = static_cast<int>(random_int(0, 300));
        std::atomic<int> used{0}, ends{0}, after_end{0};
        Shared handle(&number);
        std::vector<std::thread> all;
        for (int t = 0; t < threads; ++t) {
            all.emplace_back([&, t] {
                const auto call = [&](int* p) { object.call(p); };
                // Half of the threads end it, after about the same number of calls.
                const bool ends_it = t % 2 == 0;
                for (int i = 0; !ends_it || i < before_the_end; ++i) {
                    const Outcome outcome = i % 3 == 0 ? handle.try_use(call) : handle.use(call);
                    used += outcome == Outcome::called;
                    if (outcome == Outcome::ended && !ends_it) break;
                }
                const auto free = [&](int* p) {
                    object.call(p);
                    object.freed = true;
                };
                if (ends_it) ends += handle.end(forever, free) == Outcome::called;
                after_end += handle.try_use(call) == Outcome::ended &&
                             handle.use(call) == Outcome::ended &&
                             handle.end(forever, free) == Outcome::ended;
            });
        }
        for (std::thread& thread : all) thread.join();
        CAPTURE(round, threads, before_the_end);
        CHECK(object.overlapping == 0);
        CHECK(object.late == 0);
        CHECK(object.freed);
        CHECK(ends == 1);
        CHECK(object.calls == used + ends);
        CHECK(number == object.calls);
        CHECK(after_end == threads);
    }
}

TEST_CASE("a thread that does not come back keeps its handle, and the others continue",
          "[communicator]") {
    int number = 0, uses = 0, ends = 0;
    std::optional<Shared> handle(&number);
    std::promise<void> entered, leave;
    std::atomic<bool> may_go{false};
    Outcome of_thread{};
    std::thread thread([&] {
        of_thread = handle->use([&](int*) {
            entered.set_value();
            leave.get_future().wait();
        });
    });
    entered.get_future().wait();
    const auto use = [&](int*) { ++uses; };
    const auto end = [&](int*) { ++ends; };
    CHECK(handle->try_use(use) == Outcome::in_use);
    CHECK(handle->end(std::chrono::milliseconds(random_int(0, 20)), end) == Outcome::in_use);
    CHECK(handle->try_use(use) == Outcome::ended);
    CHECK(handle->use(use) == Outcome::ended);
    CHECK(handle->end(forever, end) == Outcome::ended);

    // The object itself lives until the thread has left it.
    std::thread releasing([&] {
        may_go = true;
        leave.set_value();
    });
    handle.reset();
    CHECK(may_go);
    thread.join();
    releasing.join();
    CHECK(of_thread == Outcome::called);
    CHECK((uses == 0 && ends == 0));
}

TEST_CASE("a shared handle is free again after a call that throws", "[communicator]") {
    int number = 0;
    Shared handle(&number);
    CHECK_THROWS_AS(handle.use([](int*) { throw std::runtime_error("no"); }), std::runtime_error);
    CHECK(handle.try_use([](int* p) { ++*p; }) == Outcome::called);
    CHECK_THROWS_AS(handle.end(forever, [](int*) { throw std::runtime_error("no"); }),
                    std::runtime_error);
    CHECK(handle.try_use([](int* p) { ++*p; }) == Outcome::ended);
    CHECK(number == 1);
}
