// Files of a run's folder in which each line is a JSON object with the "step" that it belongs to,
// such as metrics.jsonl.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>

#include "base/json_text.h"

namespace train_gpt {

using TakeLine = std::function<void(std::string_view line, const Json& json)>;

/// Calls take() for each line of a step up to last_step. Leaves out lines that are no such objects,
/// and an incomplete last line. A file that does not exist has no lines. Little of the file is in
/// memory at a time.
void for_each_step_line(const std::filesystem::path& file, int64_t last_step, const TakeLine& take);

/// Prepares the file for a start of its run. Keeps the lines of steps <= resume_step, and calls
/// take() for each. Drops the lines of later steps, since these steps are run again, and an
/// incomplete last line. A run that starts from the beginning (no resume_step) moves all lines of
/// NAME.jsonl to NAME.old.jsonl, unless that is longer.
void keep_step_lines(const std::filesystem::path& file, std::optional<int64_t> resume_step,
                     const TakeLine& take = {});

}  // namespace train_gpt
