// Ranks on several hosts, from their start to their end: a connection to each host, on which a
// HostAgent starts and watches the host's ranks.
#pragma once
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "training/supervise/host_agent.h"
#include "training/supervise/hosts.h"
#include "training/supervise/supervise_decisions.h"

namespace train_gpt {

/// How a host is reached.
class Reach {
  public:
    enum class Way { ssh, srun };
    /// words: of the command that reaches a host; the host's name and a command for its shell are
    /// added. Empty: ssh, and nothing on this machine.
    Reach(Way way, const std::string& words);

    /// The command that starts an agent on a host.
    std::vector<std::string> agent_on(const std::string& host) const;
    /// Whether the host is this machine, and is reached without a command.
    bool is_direct(const std::string& host) const;

  private:
    Way way_;
    std::vector<std::string> words_;
    std::string program_;
};

/// What one host is to do. Ranks of several hosts form one world if their orders say so.
struct HostOrder {
    std::string host;  // the host's name
    AgentOrder order;
};

/// How the ranks of a host ended.
struct HostEnd {
    std::vector<RankEnd> ranks;     // by number from the order's first
    std::string refusal;            // why the agent has started none; empty: it has
    bool has_answered = false;      // the agent was started
    std::vector<std::string> said;  // the last lines that came from ssh or srun themselves
    bool all_succeeded() const;
};

struct RankLine {
    size_t host = 0;  // index of the order
    int rank = 0;     // −1: a line of ssh, srun or a login shell
    bool is_error = false;
    std::string text;
};

struct RankLimits {
    double answer_seconds = 0;  // until all ranks have ended; 0: no limit
    // After the first rank has failed, the others have so long to end by themselves; their
    // watchdogs know of it.
    double grace_seconds = 10;
    // After a connection to a host was lost, all ranks have so long to end. They may still save a
    // checkpoint, since an agent whose input has ended stops them.
    double loss_seconds = 10;
};

/// Starts all ranks, and returns when all have ended or were ended, in the order of `orders`.
/// on_line gets each line that they print. stop: called again and again; when it first returns
/// true, the first rank is asked to end after a checkpoint.
std::vector<HostEnd> run_on_hosts(const Reach& reach, const std::vector<HostOrder>& orders,
                                  const RankLimits& limits,
                                  const std::function<void(const RankLine&)>& on_line,
                                  const std::function<bool()>& stop);

}  // namespace train_gpt
