// Elapsed wall-clock time. <chrono> is slow to compile, so only stopwatch.cpp includes it.
#pragma once

namespace train_gpt {

/// Seconds on a clock that never goes back, since some point in the past.
double monotonic_seconds();

/// Measures the time since it was made or restarted.
class Stopwatch {
  public:
    double seconds() const { return monotonic_seconds() - start_; }
    void restart() { start_ = monotonic_seconds(); }

  private:
    double start_ = monotonic_seconds();
};

}  // namespace train_gpt
