// Links between ranks that have met over TCP.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "parallel/launch/rank_connections.h"
#include "parallel/links.h"

namespace train_gpt {

/// A file of random contents that other ranks can open if they share memory with this rank. The
/// destructor removes the file.
class SharedMark {
  public:
    SharedMark(const std::string& job, int rank);
    ~SharedMark();
    SharedMark(const SharedMark&) = delete;
    SharedMark& operator=(const SharedMark&) = delete;
    /// Empty if memory cannot be shared here.
    const std::string& contents() const { return contents_; }
    /// Whether this process sees the mark of a rank.
    static bool is_seen(const std::string& job, int rank, const std::string& contents);

  private:
    std::string name_, contents_;
};

/// A group of ranks, by their numbers in the world, and the numbers of their nodes.
struct TcpGroup {
    std::shared_ptr<RankConnections> connections;
    std::string job;    // in the names of shared memory: each job on this host has another
    std::string label;  // each group of the job has another
    std::vector<int> ranks, nodes;
    int rank = 0;  // this rank's number in the group
    bool encrypt = false;
};

std::unique_ptr<Links> open_tcp_links(TcpGroup group);

}  // namespace train_gpt
