// A report: one HTML file about one or several runs, which needs nothing else, neither files nor a
// network.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "training/report/recorded_run.h"

namespace train_gpt {

/// The page. Its curves have as many points as fit: at most 300,000 bytes, unless the runs' texts
/// alone take more.
std::string report_page(const std::vector<RecordedRun>& runs);

constexpr size_t most_page_bytes = 300'000;

}  // namespace train_gpt
