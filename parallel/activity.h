// What a rank is doing: written by the training loop and the communicators, read by the watchdog's
// thread.
#pragma once
#include <atomic>
#include <cstdint>

namespace train_gpt {

struct Activity {
    // Grows with each piece of work that is done: a micro-batch, a collective, a file.
    std::atomic<int64_t> pulses{0};
    std::atomic<int64_t> step{0};
    std::atomic<int64_t> collectives{0};          // entered so far
    std::atomic<const char*> collective{"none"};  // the last one entered; a string literal
    // A string literal: "training", "evaluation", "checkpoint", …
    std::atomic<const char*> phase{"start"};

    void pulse() { pulses.fetch_add(1, std::memory_order_relaxed); }
    void enter(const char* name) {
        collective.store(name, std::memory_order_relaxed);
        collectives.fetch_add(1, std::memory_order_relaxed);
        pulse();
    }
};

}  // namespace train_gpt
