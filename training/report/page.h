// A report: one HTML file about one or several runs. It needs no other files and no network.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "training/report/recorded_run.h"

namespace train_gpt {

/// The page, which aims at no more than most_page_bytes. Its curves have as many points as fit, but
/// at least as many as a plot of 60 pixels has. With these and the runs' texts it may be larger.
/// live: the page asks the server that it came from for "data", which is page_data(), and loads
/// itself again when there is more to show.
std::string report_page(const std::vector<RecordedRun>& runs, bool live = false);

constexpr size_t most_page_bytes = 300'000;

}  // namespace train_gpt
