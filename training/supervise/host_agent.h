// The process that starts the ranks of one host: `train_gpt supervise --on-host`. The supervisor
// starts it through ssh or srun, and talks to it through its standard input and output. Ranks and
// the job's secret are not on command lines, which other users of a host can read.
//
// The agent reads one line of JSON, an AgentOrder, and then commands, a line each:
//
//   stop    asks its first rank to end after a checkpoint (SIGUSR1)
//   kill    ends its ranks at once
//
// The end of its input means "stop", too: the supervisor is gone. It writes lines that begin with @
//
//   @s RANK        the rank was started
//   @o RANK TEXT   a line of the rank's standard output
//   @e RANK TEXT   a line of the rank's standard error
//   @x RANK CODE   the rank has ended, with this exit code or, if it is negative, by this signal
//   @f TEXT        no rank was started, for this reason
//
// and ends after the last rank. Other lines, such as a login shell's, are none of its own.
#pragma once
#include <string>
#include <vector>

namespace train_gpt {

struct AgentOrder {
    std::string directory = {};               // where the ranks start
    std::vector<std::string> arguments = {};  // of this program
    std::vector<std::string> variables = {};  // "NAME=value", of all ranks
    int first = 0, count = 1;                 // the numbers of the ranks
    // A file that this host must see, and what to say if it does not; empty: none.
    std::string mark = {}, mark_missing = {};

    std::string packed() const;
    /// Throws Error if the text is not an order.
    static AgentOrder parse(const std::string& text);
};

/// Serves an order. Returns the exit code, 0 if the ranks were started.
int run_host_agent();

}  // namespace train_gpt
