// The loads of experts in a page: what routers.jsonl has of a run (training/watch/router_log.h),
// with a letter for each expert.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/json_text.h"

namespace train_gpt {

/// A line of routers.jsonl.
struct RouterSnapshot {
    int64_t step = 0;
    std::vector<int> layers;                 // that have experts
    std::vector<std::vector<double>> loads;  // of each, in thousandths of the mean

    int experts() const { return loads.empty() ? 0 : static_cast<int>(loads[0].size()); }
};

/// Adds a line. Removes snapshots of the same or a later step, since these steps were run again,
/// and all of another shape. A line that is none of a run is left out.
void add_snapshot(std::vector<RouterSnapshot>& snapshots, const Json& line);

/// {"layers": […], "experts": E, "steps": […], "load": ["…", …]}, or null if there are no
/// snapshots. A snapshot's load is a text with E letters for each layer, which load_letter() gives.
/// There are as many snapshots as have at most `most_letters` together, spread evenly, with the
/// first and the last one; at least the last.
std::string routers_json(const std::vector<RouterSnapshot>& snapshots, size_t most_letters);

/// One of 64 letters, A to Z, a to z, 0 to 9, - and _, for the load of an expert in thousandths of
/// the mean: letter 0 for 0, else letter 32 + 6·log₂ of the multiple of the mean, rounded to 1 …
/// 63.
char load_letter(double thousandths);

}  // namespace train_gpt
