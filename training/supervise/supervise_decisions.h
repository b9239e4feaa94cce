// What a supervisor decides: which hosts a job gets, on how many ranks it continues, and what the
// end of a job means. Functions of their arguments alone.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "parallel/mesh.h"

namespace train_gpt {

// ---- Hosts --------------------------------------------------------------------------------------

struct HostStatus {
    enum class Use { in_use, spare, out };  // out: it was lost, or failed a check

    int slots = 1;
    Use use = Use::in_use;
    bool is_good = true;  // it has passed the check before this start
};

/// The hosts of the next start, as indices, in the order of their ranks. Good hosts that are in use
/// stay; then come spares, then hosts that were out and are good again, until there are `wanted`
/// ranks. unit: ranks that must be on one host (parallel.tensor); a host has a multiple of them.
/// Fewer ranks if there are not enough good hosts.
std::vector<size_t> hosts_to_use(const std::vector<HostStatus>& hosts, int wanted, int unit);

/// The ranks of a host. Numbers of ranks are consecutive.
struct HostRanks {
    size_t host = 0;  // index
    int first = 0, count = 0;

    bool operator==(const HostRanks&) const = default;
};
/// Fills hosts with ranks, one host after the other. Leaves out hosts for which no ranks are left.
std::vector<HostRanks> place_ranks(const std::vector<HostStatus>& hosts,
                                   const std::vector<size_t>& used, int world, int unit);

/// The numbers of ranks on which a run may continue, the largest first: at most `most`, and other
/// axes than data keep their sizes. micro_batches: how many the smallest step has, of which each
/// data-parallel rank needs one; 0: unknown.
std::vector<int> worlds_to_try(int most, const MeshSizes& sizes, int64_t micro_batches);

/// The seconds before a restart, when so many restarts have brought no new checkpoint: 0, then
/// `base` and twice as long each time, at most ten minutes.
double backoff_seconds(int without_progress, double base);

// ---- How a job ended ----------------------------------------------------------------------------

/// Nothing: the connection to the rank's host ended first. Negative: minus the signal that ended
/// the rank.
using RankEnd = std::optional<int>;

struct Verdict {
    enum class Kind {
        done,     // with `code`: complete, or stopped with everything saved
        lost,     // a rank was killed, or hangs, or its host does not answer
        blocked,  // by ranks of the start before, which have not ended yet
        failed,   // a rank has failed with an error of its own
        hopeless  // an error that the same start would meet again
    };
    Kind kind = Kind::done;
    int code = 0;
    std::vector<int> ranks = {};  // that the job names, or that were lost
    std::string line = {};        // what the job says about it; may be empty
};

/// ends: of the ranks, by rank. lines: what they have printed about failures, without
/// "train_gpt: ", in this order.
///
/// Code 2 (wrong usage) is hopeless, and so is an error that all ranks share: its line names no
/// host, and no rank but the first. An error of one rank names rank and host, or another rank.
Verdict judge(const std::vector<RankEnd>& ends, const std::vector<std::string>& lines);

/// The ranks that a line is about: "rank 3 (host nodeA) is dead", "ranks 3-5 and 7 of 8 did not
/// come …", the lines of `selfcheck` about slow ranks. Empty if it names none.
std::vector<int> ranks_named(const std::string& line);

/// Whether two lines tell of the same error, whatever rank and host they name.
bool is_same_error(const std::string& a, const std::string& b);

}  // namespace train_gpt
