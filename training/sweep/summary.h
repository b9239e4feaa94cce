// What a sweep has found: the mean loss of each combination over its seeds, the best combination,
// and for each key that was varied how the loss depends on it.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/json_text.h"
#include "training/sweep/recorded.h"
#include "training/sweep/variants.h"

namespace train_gpt {

/// A run of a sweep, and how it went.
struct SweptRun {
    enum class State { waiting, finished, stopped, halved, failed };

    std::string name;  // also its folder's, in the sweep's folder
    size_t combination = 0;
    uint64_t seed = 0;
    State state = State::waiting;
    std::string reason = {};     // why it failed
    int64_t step = 0;            // how far it is
    double loss = std::nan("");  // of a finished run
};
const char* word_of(SweptRun::State state);

struct SweepSummary {
    /// A combination with its seeds. `mean` is over the seeds that have finished, `spread` their
    /// standard deviation (n - 1 in the denominator; NaN for a single one).
    struct Row {
        size_t combination = 0;
        int seeds = 0, finished = 0;
        double mean = std::nan(""), spread = std::nan("");
        SweptRun::State state = SweptRun::State::waiting;  // of a run that has not finished, if any

        bool complete() const { return finished == seeds && std::isfinite(mean); }
    };
    /// A varied key. For each value: the best complete row that has it, whatever the other keys
    /// are. Nothing if no row with the value is complete.
    struct Key {
        std::vector<std::optional<size_t>> best_with;  // indices of rows
        std::optional<size_t> best;                    // index of the value
        /// The best value is the smallest or the largest number that was tried: a better one may
        /// lie outside. Never for words, nor for a single value.
        bool at_low_edge = false, at_high_edge = false;
    };

    Measure measure = Measure::val_loss;
    std::vector<VariedKey> keys;
    std::vector<Combination> combinations;
    std::vector<SweptRun> runs;
    std::vector<Row> rows;         // the complete ones first, by their mean
    std::vector<Key> key_results;  // as `keys`

    /// The first row, if it is complete.
    const Row* best() const { return !rows.empty() && rows[0].complete() ? &rows[0] : nullptr; }
};

SweepSummary summarize(Measure measure, std::vector<VariedKey> keys,
                       std::vector<Combination> combinations, std::vector<SweptRun> runs);

/// The table that `sweep` prints.
std::string summary_text(const SweepSummary& summary);
/// The summary as JSON; docs/recipes.md describes it.
Json summary_json(const SweepSummary& summary);
/// "the best lies at the edge: it is the largest value tried; try larger ones, too"
std::string describe_edge(const SweepSummary& summary, size_t key);
/// A number with four digits after the point; "–" for NaN.
std::string loss_text(double loss);

}  // namespace train_gpt
