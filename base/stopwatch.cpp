#include "base/stopwatch.h"

#include <chrono>

namespace train_gpt {

double monotonic_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

}  // namespace train_gpt
