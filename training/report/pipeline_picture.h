// A picture of a pipeline's schedule.
#pragma once
#include <string>
#include <vector>

#include "parallel/pipeline/pipeline_simulation.h"

namespace train_gpt {

struct PictureOptions {
    std::string title = {}, subtitle = {};
    /// Times of the timeline are seconds. Otherwise they are printed without a unit.
    bool seconds = true;
    /// A text about each rank's memory, or none.
    std::vector<std::string> memory = {};
};

/// An SVG document, 1200 units wide, for light and dark backgrounds: what each rank computes and
/// when, with the numbers of micro-batches where there is room, and below it the micro-batches that
/// it has in flight, in whole stages, the most of them, and its memory. Bytes of the texts that XML
/// does not allow are escaped. Parts too narrow to see are joined, so that its size is limited for
/// any number of micro-batches.
std::string pipeline_picture(const PipelineSchedule& schedule, const PipelineTimeline& timeline,
                             const PictureOptions& options);

}  // namespace train_gpt
