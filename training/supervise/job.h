// A job that a supervisor runs.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "training/config/config.h"
#include "training/supervise/hosts.h"
#include "training/supervise/ranks_on_hosts.h"
#include "training/supervise/supervise_arguments.h"

namespace train_gpt {

struct SupervisedJob {
    SuperviseOptions options;
    Reach reach;
    std::vector<JobHost> hosts;  // the spares are the last ones
    // The configuration on so many ranks. Throws Error if it cannot run on them.
    std::function<Config(int world)> config;
    std::vector<std::string> plan;  // arguments of `plan` for the same configuration
};

}  // namespace train_gpt
