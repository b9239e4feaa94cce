// Checks a cluster before a long run: how fast each rank's device is, how fast the ranks exchange
// data, and which rank is slower than the others. A step waits for its slowest rank, so one bad
// node costs as much as if all of them were bad.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "device/device.h"
#include "parallel/mesh.h"
#include "training/plan/cluster.h"

namespace train_gpt {

struct SelfcheckOptions {
    double tolerance = 15;                   // percent that a rank may be below the median of ranks
    int64_t max_bytes = int64_t{256} << 20;  // of the largest buffer that is copied or exchanged
    /// Collectives are measured along the axes of this mesh.
    MeshSizes mesh = {.allow_tensor_across_nodes = true};
    std::string save = {};  // a file for the cluster that was measured; empty: none
};

/// Measures on all ranks at the same time. Measures again if a rank looks slow, since a momentary
/// load slows a rank, too. Prints the tables on the first rank. Returns 0 if no rank was slow both
/// times. Else prints lines that name the slow ranks, and throws SharedError. Takes 3 to 30
/// seconds.
int selfcheck(const SelfcheckOptions& options, const Device& device, const Mesh& mesh);

// ---- Parts that need no device ------------------------------------------------------------------

/// A rate that each rank measured on its own device.
struct RankRates {
    std::string name;             // with the unit: "bf16 TFLOP/s"
    std::vector<double> of_rank;  // higher is better
};

/// Bus bandwidths of the collectives for buffers of one size, bytes per second.
struct CollectiveRates {
    int64_t bytes = 0;
    double reduce_scatter = 0, all_gather = 0, all_reduce = 0;
};

/// Rates of collectives along an axis, measured in all groups of the axis at the same time.
struct AxisRates {
    std::string axis;
    int ranks = 1;  // of each group
    std::vector<CollectiveRates> rates;
};

struct SelfcheckTable {
    std::vector<std::string> hosts, devices;  // of each rank
    std::vector<RankRates> rates;
    std::vector<RankRates> rates_again;        // none if no rank looked slow
    std::vector<CollectiveRates> collectives;  // over all ranks; none in a world of one
    std::vector<AxisRates> along;              // axes with several ranks, but not all
    ReachedShares shares;                      // of a CPU, if the cluster is to be saved
};

/// What was measured, as a cluster of nodes with so many ranks: medians over the ranks. Collectives
/// over all ranks describe the links between nodes if there are several, else inside one. A link
/// that nothing was measured of is assumed, and the cluster's note says so. Throws Error for a GPU
/// that is not in the table of datasheets.
Cluster measured_cluster(const SelfcheckTable& table, const Device& device, int ranks_per_node);
/// This machine, of which `ranks` ranks have a device each, or share the processor evenly. Measures
/// the device for some seconds; the links are assumed.
Cluster measure_this(const Device& device, int ranks);

/// The bytes per second that each rank's link carries when a collective over n = `ranks` ranks
/// takes `seconds`. `bytes`: the buffer's size, which is all_gather's output and reduce_scatter's
/// input.
///
///   all_reduce                      2(n−1)/n · bytes / seconds
///   reduce_scatter or all_gather     (n−1)/n · bytes / seconds
///
/// nccl-tests defines bus bandwidth in this way: the numbers can be compared with the hardware's,
/// and do not depend on the number of ranks.
double all_reduce_bandwidth(int ranks, int64_t bytes, double seconds);
double half_reduce_bandwidth(int ranks, int64_t bytes, double seconds);

/// Buffer sizes: 64 KiB, and each four times the previous one, up to max_bytes.
std::vector<int64_t> collective_sizes(int64_t max_bytes);

struct SlowRate {
    std::string name;
    double value = 0, median = 0;
};

/// A rank with all rates at which it is slow.
struct SlowRank {
    int rank = 0;
    std::vector<SlowRate> rates;
};

/// Returns the ranks with a rate more than `tolerance` percent below the median over the ranks,
/// ordered by rank. The median of an even number of ranks is the mean of the middle two. A rate
/// that is not a positive number always counts as slow, and is left out of the median.
std::vector<SlowRank> find_slow_ranks(const std::vector<RankRates>& rates, double tolerance);

/// Returns the ranks that are slow at the same rate in both measurements, with their values in the
/// second measurement.
std::vector<SlowRank> slow_in_both(const std::vector<SlowRank>& first,
                                   const std::vector<SlowRank>& second);

/// The table as text: ranks, medians, collectives, what was measured again, then a line for each
/// slow rank.
std::string format_selfcheck(const SelfcheckTable& table, const std::vector<SlowRank>& slow,
                             double tolerance);

}  // namespace train_gpt
