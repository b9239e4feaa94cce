// Which ranks the next start of a supervised job has, on which hosts.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "training/supervise/start_ranks.h"
#include "training/supervise/supervise_decisions.h"

namespace train_gpt {

class HostChecks {
  public:
    /// The arguments must live longer.
    HostChecks(const SupervisedJob& job, const Config& config, RankStarter& starter,
               SupervisorLog& log);

    /// Checks the hosts, and chooses among them: at most `wanted` ranks. Says what it finds. Empty
    /// if nothing can be started now, or after a signal. Throws Error if nothing could be started
    /// later either: before the first start, if no host passes its check, a host does not see the
    /// run's folder, or the run does not fit; later, if the run does not fit although no host is
    /// missing.
    std::vector<HostRanks> next_ranks(int wanted);

    /// Gives a host, whatever its checks say, no ranks as long as a start is possible without it.
    /// Returns false if it has been avoided before.
    bool avoid(size_t host, const std::string& reason);

  private:
    void drop(size_t host, const std::string& reason);
    void check_each();
    std::vector<HostRanks> choose(int wanted);
    bool check_together(const std::vector<HostRanks>& ranks);
    void mark_used(const std::vector<HostRanks>& ranks);

    const SupervisedJob& job_;
    const Config& config_;
    RankStarter& starter_;
    SupervisorLog& log_;
    std::vector<HostStatus> hosts_;
    std::set<size_t> avoided_;
    std::vector<bool> passed_;  // its check, by host
    bool has_started_ = false, has_lost_host_ = false;
    std::string refusal_;  // of `plan`
};

}  // namespace train_gpt
