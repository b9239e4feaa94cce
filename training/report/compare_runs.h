// Two runs compared step by step: the losses and gradient norms that they logged, and the
// fingerprints of their tensors.
#pragma once
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "training/watch/fingerprint_log.h"

namespace train_gpt {

/// The steps after `after`, up to `to`.
struct StepRange {
    int64_t after = -1, to = std::numeric_limits<int64_t>::max();

    bool contains(int64_t step) const { return step > after && step <= to; }
};

struct RunComparison {
    /// A number that both runs logged for a step.
    struct Pair {
        int64_t step = 0;
        double a = 0, b = 0;

        /// |a − b| / max(|a|, |b|); 0 for equal numbers and two NaNs; ∞ for one NaN.
        double difference() const;
    };
    struct Column {
        std::string name;                    // "loss", "gradient norm"
        std::optional<Pair> first, largest;  // first and largest difference; nothing: all the same
    };
    /// Fingerprints that differ at `step`, and were equal at `after`; −1: no earlier step has them.
    struct State {
        int64_t after = -1, step = 0;
        FingerprintDifference what;
    };

    int64_t first_step = 0, last_step = 0, steps = 0;  // that both have logged
    int64_t only_a = 0;  // lines of a, of numbers and fingerprints, for steps that b has none for
    std::vector<Column> columns;
    int64_t fingerprints = 0, last_fingerprint = 0;  // that both have
    std::optional<State> state;                      // nothing: all the same

    /// The number that differs first; of several in a step, the loss. Null if none differs.
    const Column* first_difference() const;
    /// The largest difference of numbers.
    double largest_difference() const;
    bool same() const { return !first_difference() && !state; }
};

/// Compares what both folders have of these steps. Throws Error for a folder that is not a run's.
RunComparison compare_runs(const std::filesystem::path& a, const std::filesystem::path& b,
                           const StepRange& steps = {});

/// What `train_gpt report A B --tolerance` says, and whether the runs are within the tolerance:
/// their numbers differ by no more, relatively, and if it is 0, fingerprints are the same, too.
/// Throws Error if the runs have no step in common.
struct ComparisonReport {
    std::string text;
    bool within = true;
};
ComparisonReport report_on_comparison(const std::filesystem::path& a,
                                      const std::filesystem::path& b, double tolerance);

/// How far the losses of b lie above the losses of a, in nats: means over steps that both have
/// logged, in runs whose every step differs by roundings.
struct LossGap {
    int64_t first_step = 0, last_step = 0, steps = 0;  // with a finite loss in both
    double thirds[3] = {};                             // of these steps
    double halves[2] = {};                             // of the last third
    /// The standard error of halves[1] − halves[0]. Steps near each other have similar gaps, so
    /// each half is cut into eight stretches of steps, and the variance is of the stretches' means:
    /// √((variance in the first half + variance in the second half) / 8). Nothing: fewer than 48
    /// steps.
    std::optional<double> noise;
    /// The last validation loss at a step that both have evaluated.
    std::optional<RunComparison::Pair> validation;

    /// The largest gap, up or down, of the last third, its second half and the validation loss.
    double at_the_end() const;
    /// Whether the gap grows in the last third: up or down, it is larger in the second half than in
    /// the first by more than twice `noise`.
    bool grows() const;
};
/// Throws Error for a folder that is not a run's, and if fewer than six losses can be compared.
LossGap loss_gap(const std::filesystem::path& a, const std::filesystem::path& b);

/// What `train_gpt report A B --gap` says, and whether at_the_end() is at most `most` and the gap
/// does not grow.
ComparisonReport report_on_gap(const std::filesystem::path& a, const std::filesystem::path& b,
                               double most);

}  // namespace train_gpt
