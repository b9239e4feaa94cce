// Which meshes of a cluster are fast for a model.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "base/json_text.h"
#include "training/plan/prediction.h"

namespace train_gpt {

/// A way to divide a step. The rest of the configuration stays as it is given.
struct Candidate {
    RunShape shape;
    double step_seconds = 0;
    uint64_t memory = 0;  // of the rank that needs the most; 0: not counted
};

struct SearchResult {
    std::vector<Candidate> best;    // by time, the fastest first
    std::vector<Candidate> fuller;  // faster ones for which there is not enough memory
    /// Why others were not simulated, and how many.
    std::vector<std::pair<std::string, int>> refused;
    int simulated = 0, counted = 0;
    uint64_t memory_available = 0;
    bool offloads = false;    // where nothing fits without offloading: whether it was tried
    bool given_fits = false;  // where none was found: as the configuration is given, the run fits
};

/// The `most` fastest ways that fit, among
///
///   tensor      1, 2, 4, … up to a node's ranks
///   context     1, 2, 4, 8
///   pipeline    1, 2, 4, … up to 32, and of these at most the number of layers; 1F1B, interleaved
///               with 2, 4, … stages a rank, zero-bubble
///   ZeRO        1, 2 and 3
///   micro-batch 1, 2, 4, … up to 64 sequences that divide the step
///   recompute   none, elementwise, block
///   offload     none; on GPUs, if nothing fits, all that memory.offload has
///
/// All that can be are simulated; then memory is counted from the fastest on until enough fit.
SearchResult search(const Config& config, const Cluster& cluster, int world, size_t most = 10);

std::string to_text(const SearchResult& result, const Cluster& cluster);
/// Why there is no way, if there is none, and what helps.
std::string problem_of(const SearchResult& result);
Json to_json(const SearchResult& result);

}  // namespace train_gpt
