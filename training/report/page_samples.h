// The part of a report's page that shows what the runs wrote.
#pragma once
#include <string>
#include <vector>

#include "training/report/recorded_run.h"

namespace train_gpt {

/// What each run wrote at its checkpoints, as HTML: the first and last sample, and some between
/// them.
std::string samples_html(const std::vector<RecordedRun>& runs);

}  // namespace train_gpt
