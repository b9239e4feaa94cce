// The steps of a process that a profile or a trace measures.
#pragma once
#include <cstdint>

namespace train_gpt {

/// `count` steps after two of warm-up; count = 0: none.
class MeasuredSteps {
  public:
    static constexpr int64_t warm_up = 2;

    explicit MeasuredSteps(int64_t count) : count_(count) {}
    int64_t count() const { return count_; }

    /// Steps that the process must run; 0 if none is measured.
    int64_t needed() const { return count_ > 0 ? warm_up + count_ : 0; }
    /// Whether measuring starts with the next step, after `steps` steps of the process.
    bool start_after(int64_t steps) const { return count_ > 0 && steps == warm_up; }
    /// Whether the last measured step was the last one of `steps` steps.
    bool end_after(int64_t steps) const { return count_ > 0 && steps == needed(); }

  private:
    int64_t count_;
};

}  // namespace train_gpt
