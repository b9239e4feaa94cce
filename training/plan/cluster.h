// A cluster, which need not be here: what its GPUs and links can do. A file in configs/clusters/
// describes it, or a file of the user's.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace train_gpt {

/// A measured bus bandwidth (all_reduce_bandwidth() in training/selfcheck.h) of large collectives
/// over so many nodes, with buffers of so many bytes.
struct BusBandwidth {
    int nodes = 1;
    double bytes = 0, bandwidth = 0;  // bytes per second of a rank
};

/// What connects ranks.
struct Link {
    double latency = 0;    // seconds of one message
    double bandwidth = 0;  // bytes per second of a rank in each direction, as it is reached
    /// Sorted by nodes, then bytes; empty: `bandwidth`, whatever the size.
    std::vector<BusBandwidth> measured = {};

    /// The bus bandwidth of a collective over so many nodes with a buffer of so many bytes. It is
    /// taken from the entries of the most nodes that are not more than `nodes` (or the fewest), and
    /// on a logarithmic scale between two sizes.
    double bandwidth_of(double bytes, int nodes) const;
};

/// What a step's products and attention reach of the peak, where `selfcheck --save` measured it
/// (measure_shares() in peak.h). Efficiencies has the formulas.
struct ReachedShares {
    double products = 0, half_size = 0;  // 0: not measured
    double attention = 0, attention_backward = 0;
};

struct Cluster {
    std::string name = {}, source = {};
    std::string note = {};  // what a prediction for it must say, such as "extrapolated"
    std::string gpu = {};   // the key of a datasheet (datasheet.h); empty: a CPU
    int architecture = 0;
    int multiprocessors = 0;  // or cores
    // FLOP/s of dense products; 0: the device has no such products
    double flops_fp32 = 0, flops_bf16 = 0, flops_fp8 = 0;
    double memory = 0;            // bytes of each GPU
    double memory_bandwidth = 0;  // bytes per second
    int ranks_per_node = 8;
    Link node = {}, network = {};
    double host_link = 0;  // bytes per second between a GPU and its host, in each direction
    double storage = 0;    // bytes per second of a node to the storage of checkpoints; 0: unknown
    bool is_measured = false;  // by `selfcheck --save`: the rates are what is reached
    ReachedShares shares = {};

    bool is_cuda() const { return !gpu.empty(); }
    double flops(DType dtype) const { return dtype == DType::bf16 ? flops_bf16 : flops_fp32; }

    /// The bus bandwidth of collectives over `ranks` ranks, of which neighbours differ by `stride`
    /// in their numbers. Between nodes, all ranks of a group on the same node share their links:
    /// the bus bandwidth is the network's times the group's ranks on a node, at most the node's.
    double bus_bandwidth(double bytes, int ranks, int stride) const;
    /// The latency of such a collective's steps: over the ranks of a node, and over nodes.
    double latency(int ranks, int stride) const;
};

/// A cluster by the name of a file in configs/clusters/, which is found like a preset, or by the
/// path of a file that ends in .json. Throws Error: no such cluster (the message names all), a key
/// that is missing or unknown, or a value that no machine has.
Cluster find_cluster(const std::string& name_or_path);
/// The names of the shipped clusters, sorted.
std::vector<std::string> cluster_names();
/// The name of a shipped cluster of this GPU (a datasheet's key); empty if there is none.
std::string cluster_of_gpu(const std::string& gpu);
Cluster read_cluster(const std::filesystem::path& path);
/// The text of a file that read_cluster() reads.
std::string to_text(const Cluster& cluster);

}  // namespace train_gpt
