#include "parallel/parameter.h"

#include "base/error.h"

namespace train_gpt {

std::vector<Range> part_of(const Parameter& parameter, int rank, int ranks) {
    if (!parameter.split) return {{0, parameter.rows()}};
    std::vector<Range> part;
    int64_t first = 0;
    for (const int64_t section : parameter.split->sections) {
        if (section % ranks != 0)
            throw Error(parameter.name, " has a section of ", section, " ",
                        parameter.split->axis == 0 ? "rows" : "columns", ", which ", ranks,
                        " tensor-parallel ranks cannot share evenly; take a number of ranks that "
                        "divides it");
        const int64_t n = section / ranks;
        part.push_back({first + rank * n, n});
        first += section;
    }
    return part;
}

}  // namespace train_gpt
