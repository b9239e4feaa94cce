// What `train_gpt report` was asked for.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace train_gpt {

struct ReportOptions {
    std::vector<std::string> runs = {};  // folders
    std::string out = {};      // empty: report.html, in the run's folder if there is one run
    std::string picture = {};  // an SVG of the loss alone; empty: none
    /// If set, no page is written: two runs are compared step by step, and may differ by so much.
    std::optional<double> tolerance = {};
};

}  // namespace train_gpt
