// What `train_gpt report` was asked for.
#pragma once
#include <string>
#include <vector>

namespace train_gpt {

struct ReportOptions {
    std::vector<std::string> runs = {};  // folders
    std::string out = {};      // empty: report.html, in the run's folder if there is one run
    std::string picture = {};  // an SVG of the loss alone; empty: none
};

}  // namespace train_gpt
