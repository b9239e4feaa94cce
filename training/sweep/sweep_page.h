// A sweep's page: one HTML file with its tables, a plot for each key whose values are numbers, and
// links to the reports of its runs.
#pragma once
#include <string>

#include "training/sweep/summary.h"

namespace train_gpt {

/// title: the name of the sweep's folder. Links are relative to this folder.
std::string sweep_page(const SweepSummary& summary, const std::string& title);

}  // namespace train_gpt
