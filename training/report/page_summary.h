// The parts of a report's page that say what the runs are, how far they are, and how they went.
// HTML, in which every text from a file is escaped.
#pragma once
#include <string>
#include <vector>

#include "training/report/recorded_run.h"

namespace train_gpt {

/// What the runs are, how far they are, and their last values.
std::string summary_html(const std::vector<RecordedRun>& runs);
/// What is wrong with the files, and what to mind when the runs are compared. Empty if there is
/// nothing to say.
std::string notes_html(const std::vector<RecordedRun>& runs);

}  // namespace train_gpt
