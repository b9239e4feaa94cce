#include "parallel/state/parameter.h"

#include <algorithm>

#include "base/error.h"

namespace train_gpt {

namespace {

/// The parts of ascending runs whose places, as `place` says, are in a range.
std::vector<HeldRun> runs_in(const std::vector<HeldRun>& runs, int64_t HeldRun::*place,
                             const Range& range) {
    auto run = std::partition_point(
        runs.begin(), runs.end(), [&](const HeldRun& r) { return r.*place + r.n <= range.first; });
    std::vector<HeldRun> found;
    for (; run != runs.end() && (*run).*place < range.end(); ++run) {
        const Range part = intersection({(*run).*place, run->n}, range);
        const int64_t skipped = part.first - (*run).*place;
        if (part.n > 0) found.push_back({run->held + skipped, run->logical + skipped, part.n});
    }
    return found;
}

}  // namespace

int64_t part_extent(int64_t extent, int64_t multiple, int ranks) {
    const int64_t whole = ranks * multiple;
    return (extent + whole - 1) / whole * multiple;
}

std::vector<Range> part_of(const Parameter& parameter, int rank, int ranks) {
    if (!parameter.split) return {{0, parameter.rows()}};
    const TensorSplit& split = *parameter.split;
    std::vector<Range> part;
    int64_t first = 0;
    for (const int64_t section : split.sections) {
        const int64_t n = part_extent(section, split.multiple, ranks);
        if (split.multiple == 1 && section % ranks != 0)
            throw Error(parameter.name, " has a section of ", section, " ",
                        split.axis == 0 ? "rows" : "columns", ", which ", ranks,
                        " tensor-parallel ranks cannot share evenly; take a number of ranks that "
                        "divides it");
        if ((ranks - 1) * n >= section)
            throw Error(parameter.name, " has ", section, " rows, too few for ", ranks,
                        " tensor-parallel ranks with multiples of ", split.multiple,
                        " rows each; take fewer ranks");
        part.push_back({first + rank * n, std::min(n, section - rank * n)});
        first += section;
    }
    return part;
}

Parameter parameter_held_by(Parameter whole, const TensorRank& rank) {
    whole.held_by = rank;
    if (rank.ranks == 1 || !whole.split) return whole;
    part_of(whole, rank.rank, rank.ranks);  // checks
    whole.padded = whole.shape;
    int64_t& extent = whole.padded[static_cast<size_t>(whole.split->axis)];
    extent = 0;
    for (const int64_t section : whole.split->sections)
        extent += part_extent(section, whole.split->multiple, rank.ranks);
    return whole;
}

std::vector<Range> matrices_of(const Parameter& p, bool heads) {
    std::vector<int64_t> rows{p.rows()};
    if (p.split && p.split->axis == 0)
        rows = p.split->sections;
    else if (p.matrix_rows > 0)
        rows.assign(static_cast<size_t>(p.rows() / p.matrix_rows), p.matrix_rows);
    std::vector<Range> matrices;
    int64_t first = 0;
    for (const int64_t section : rows) {
        const int64_t n = heads && p.head_rows > 0 ? p.head_rows : section;
        for (const int64_t end = first + section; first < end; first += n)
            matrices.push_back({first, n});
    }
    return matrices;
}

int64_t Parameter::held_numel() const {
    if (!is_part()) return numel();
    int64_t extent = 0;
    for (const Range& range : part_of(*this, held_by.rank, held_by.ranks)) extent += range.n;
    return extent * (split->axis == 0 ? cols() : rows());
}

std::vector<HeldRun> held_runs(const Parameter& p) {
    if (!p.is_part()) return {{0, 0, p.numel()}};
    const std::vector<Range> part = part_of(p, p.held_by.rank, p.held_by.ranks);
    // A split of rows cuts the tensor as one of columns would cut a tensor with a single row.
    const int64_t rows = p.split->axis == 0 ? 1 : p.rows(),
                  unit = p.split->axis == 0 ? p.cols() : 1, stride = p.numel() / rows;
    std::vector<HeldRun> runs;
    int64_t held = 0;
    for (int64_t row = 0; row < rows; ++row)
        for (const Range& range : part) {
            runs.push_back({held, row * stride + range.first * unit, range.n * unit});
            held += runs.back().n;
        }
    return runs;
}

std::vector<HeldRun> runs_in_memory(const std::vector<HeldRun>& runs, const Range& memory) {
    return runs_in(runs, &HeldRun::held, memory);
}

std::vector<HeldRun> runs_in_tensor(const std::vector<HeldRun>& runs, const Range& logical) {
    return runs_in(runs, &HeldRun::logical, logical);
}

}  // namespace train_gpt
