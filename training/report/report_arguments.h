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
    /// Serve the page, which follows the runs, and write no file.
    bool live = false;
    std::string address = "127.0.0.1";
    int port = 0;  // 0: the kernel chooses
    /// If set, no page is written: two runs are compared step by step, and may differ by so much.
    std::optional<double> tolerance = {}, gap = {};
};

}  // namespace train_gpt
