// The parts of a report's page that are text: they need no script. All of them are HTML, in which
// every text from a file is escaped.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "training/report/recorded_run.h"

namespace train_gpt {

/// A text as HTML: markup is escaped, and everything that printable() escapes.
std::string html(std::string_view text);

/// The first `most` bytes of a text that is longer, up to a whole character, and " …".
std::string shortened(std::string text, size_t most);

/// What the runs are, how far they are, and their last values.
std::string summary_html(const std::vector<RecordedRun>& runs);
/// What is wrong with the files, and what to mind when the runs are compared. Empty if there is
/// nothing to say.
std::string notes_html(const std::vector<RecordedRun>& runs);
/// What each run wrote at its checkpoints: the first and last sample, and some between them.
std::string samples_html(const std::vector<RecordedRun>& runs);
/// The configuration of all runs: first the keys on which they differ.
std::string configuration_html(const std::vector<RecordedRun>& runs);
/// Version, hosts, data and their hashes, and the starts and ends of each run.
std::string provenance_html(const std::vector<RecordedRun>& runs);

/// "2026-03-01 14:05 UTC"
std::string utc_time(int64_t seconds_since_1970);

}  // namespace train_gpt
