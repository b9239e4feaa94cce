#include "training/plan/cluster.h"

#include <algorithm>
#include <cmath>

namespace train_gpt {

double Link::bandwidth_of(double bytes, int nodes) const {
    if (measured.empty()) return bandwidth;
    int of_nodes = measured.front().nodes;
    for (const BusBandwidth& entry : measured)
        if (entry.nodes <= nodes) of_nodes = entry.nodes;
    BusBandwidth below{.nodes = 0};
    for (const BusBandwidth& entry : measured) {
        if (entry.nodes != of_nodes) continue;
        if (entry.bytes >= bytes) {
            // A smaller buffer takes as long, if latency decides, or latency and its share.
            if (below.nodes == 0)
                return std::max(entry.bandwidth * bytes / entry.bytes,
                                bytes / (latency + bytes / entry.bandwidth));
            const double at = std::log(bytes / below.bytes) / std::log(entry.bytes / below.bytes);
            return below.bandwidth + at * (entry.bandwidth - below.bandwidth);
        }
        below = entry;
    }
    return below.bandwidth;
}

namespace {

/// The ranks of a group that are on one node.
int ranks_on_node(int ranks, int stride, int ranks_per_node) {
    return std::clamp(ranks_per_node / stride, 1, ranks);
}

}  // namespace

double Cluster::bus_bandwidth(double bytes, int ranks, int stride) const {
    const double inside = node.bandwidth_of(bytes, 1);
    const int local = ranks_on_node(ranks, stride, ranks_per_node);
    if (local == ranks) return inside;
    const int nodes = (ranks + local - 1) / local;
    return local == 1 ? network.bandwidth_of(bytes, nodes)
                      : std::min(inside, local * network.bandwidth_of(bytes, nodes));
}

double Cluster::latency(int ranks, int stride) const {
    const int local = ranks_on_node(ranks, stride, ranks_per_node),
              nodes = (ranks + local - 1) / local;
    return (local - 1) * node.latency + (nodes > 1 ? std::log2(nodes) * network.latency : 0);
}

}  // namespace train_gpt
