// Chooses among alternatives by timing them.
#pragma once
#include <cstddef>
#include <functional>

namespace train_gpt {

/// Runs candidate i `runs` times in a row and returns the seconds per run; infinity if it cannot
/// run.
using TimeCandidate = std::function<double(size_t i, int runs)>;

/// The fastest of `count` candidates; `count` if none can run. Each runs once untimed, since first
/// runs load code, and twice timed: first in order, then in reverse order, so that a clock whose
/// speed changes steadily favours none. Then the fastest five take turns up to five times, and the
/// least median wins. If candidates are slow, fewer runs are made, and only the first of them are
/// tried, but at least four: all in all about half a second, and no less than 16 runs.
size_t fastest(size_t count, const TimeCandidate& time);

}  // namespace train_gpt
