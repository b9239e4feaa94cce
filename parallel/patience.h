// Waits for another process, and lets it have the core.
#pragma once
#include <chrono>
#include <cstdint>
#include <thread>

#include <sched.h>

namespace train_gpt {

/// pause() first returns at once: what is waited for often comes within microseconds. Later pause()
/// yields the core each time, since the other process may need it. Then pause() sleeps.
class Patience {
  public:
    void pause() {
        ++rounds_;
        if (rounds_ <= awake_rounds) return;
        if (!is_over()) {
            sched_yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }
    /// Whether pause() sleeps from now on.
    bool is_over() const { return rounds_ > awake_rounds + yielding_rounds; }

  private:
    static constexpr int64_t awake_rounds = 1000, yielding_rounds = 1000;
    int64_t rounds_ = 0;
};

}  // namespace train_gpt
