// Starts programs on the hosts of a supervised job: ranks that train, checks, plans.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "training/config/config.h"
#include "training/supervise/job.h"
#include "training/supervise/supervise_decisions.h"
#include "training/supervise/supervisor_log.h"

namespace train_gpt {

class RankStarter {
  public:
    /// The arguments must live longer. Makes a file in the run's folder, by which hosts show that
    /// they see the folder.
    RankStarter(const SupervisedJob& job, const Config& config, SupervisorLog& log);
    ~RankStarter();
    RankStarter(const RankStarter&) = delete;
    RankStarter& operator=(const RankStarter&) = delete;

    /// Trains until the ranks end. start: the number of this start.
    Verdict train(const std::vector<HostRanks>& ranks, int start);

    /// What the check of one host has found.
    struct Answer {
        bool is_good = false;
        bool sees_run = true;  // false: the host does not see the run's folder
        std::string reason;    // why it is not good, as the end of a sentence
    };
    /// A selfcheck of each host's ranks by themselves, on all hosts at the same time. Unless
    /// `measures`, only the question whether the host is there. By host.
    std::vector<Answer> check_each(const std::vector<int>& slots, bool measures);

    struct Selfcheck {
        bool is_good = false;
        std::vector<int> ranks;  // that it names
        std::string line;
    };
    /// A selfcheck of all ranks together.
    Selfcheck check_together(const std::vector<HostRanks>& ranks);

    /// Why the run does not fit on `world` ranks, by `plan` on the host of some of them; empty if
    /// it fits. First with the micro-batch that the run has kept, with which its bits stay the
    /// same, then with any.
    std::string plan_on(const HostRanks& part, int world);

  private:
    std::string plan_on(size_t host, const std::vector<std::string>& options);
    AgentOrder order_of(const HostRanks& part) const;
    std::vector<std::string> variables(int world, const std::string& address) const;
    std::string address_of(size_t host, int port_offset) const;
    std::vector<std::string> selfcheck_arguments() const;
    void show(const std::string& host, const RankLine& line);

    const SupervisedJob& job_;
    const Config& config_;
    SupervisorLog& log_;
    std::filesystem::path mark_;
    int checks_ = 0;
};

}  // namespace train_gpt
