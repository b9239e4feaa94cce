// What `train_gpt sweep` was asked for, besides the configuration.
#pragma once
#include <string>
#include <vector>

namespace train_gpt {

struct SweepOptions {
    std::vector<std::string> vary = {};  // "section.key=VALUE,VALUE,…"
    int seeds = 1;
    int jobs = 1;        // runs that train at the same time
    bool halve = false;  // stop the worse half at each point of halving_points()
    bool json = false;   // print the result as JSON
};

}  // namespace train_gpt
