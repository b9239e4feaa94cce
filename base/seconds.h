// Elapsed wall-clock time.
#pragma once
#include <chrono>

namespace train_gpt {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace train_gpt
