// What `train_gpt supervise` was asked for.
#pragma once
#include <string>
#include <vector>

namespace train_gpt {

struct SuperviseOptions {
    std::string hosts;  // the hosts file; empty: the hosts of a Slurm allocation, or this machine
    int ranks = 0;      // on this machine, if there is no hosts file; 0: one for each GPU, or one
    int spares = 0;     // the last hosts of the file, which wait until another host is lost
    int max_restarts = 10;  // one after the other without a new checkpoint
    double backoff = 5;     // seconds before the second such restart; then twice as long each time
    double patience = 120;  // seconds in which a host must answer and end its selfcheck
    int port = 0;           // at which ranks meet, on rank 0's host; 0: the usual one
    int threads = 0;        // of each rank; 0: ranks of a host share its cores
    std::string ssh;        // the words that begin a command on another host; empty: ssh's
    std::string selfcheck;  // words: arguments of `selfcheck`
    bool no_selfcheck = false;           // only asks whether hosts answer
    std::vector<std::string> command{};  // after "--": train CONFIG …
    bool on_host = false;                // this process starts the ranks of one host (host_agent.h)
};

}  // namespace train_gpt
