// The loss of runs as a picture of its own: for READMEs and chats, and for a report's page if no
// script runs.
#pragma once
#include <cstddef>
#include <iterator>
#include <string>
#include <vector>

#include "training/report/recorded_run.h"

namespace train_gpt {

/// An SVG of 960 × 600 pixels on white: the loss over steps, its running mean, and the validation
/// loss. `pixels`: for curves_of().
std::string loss_picture(const std::vector<RecordedRun>& runs, int pixels = 870);

/// The colours of runs, in their order. page.css has the same for light screens.
constexpr const char* run_colours[] = {"#2166ac", "#d6541c", "#1b7f5c", "#8e44ad",
                                       "#b8860b", "#c2185b", "#00838f", "#6d4c41",
                                       "#5c6bc0", "#7cb342", "#e53935", "#546e7a"};
constexpr size_t most_runs = std::size(run_colours);

}  // namespace train_gpt
