// The parts of a report's page that say what made the runs: their configurations, programs, hosts
// and data. HTML, in which every text from a file is escaped.
#pragma once
#include <string>
#include <vector>

#include "training/report/recorded_run.h"

namespace train_gpt {

/// The configuration of all runs: first the keys on which they differ.
std::string configuration_html(const std::vector<RecordedRun>& runs);
/// Version, hosts, data and their hashes, and the starts and ends of each run.
std::string provenance_html(const std::vector<RecordedRun>& runs);

}  // namespace train_gpt
