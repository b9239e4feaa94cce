// A picture of a pipeline's schedule.
#pragma once
#include <string>
#include <vector>

#include "parallel/pipeline/pipeline_simulation.h"

namespace train_gpt {

struct PictureOptions {
    std::string title = {}, subtitle = {};
    /// Whether the timeline's times are seconds. Otherwise they are printed without a unit.
    bool seconds = true;
    /// A text about each rank's memory. Empty: no such texts.
    std::vector<std::string> memory = {};
};

/// An SVG document, 1200 units wide, for light and dark backgrounds. It shows what each rank
/// computes and when, with the numbers of micro-batches if there is room. Below that it shows how
/// many micro-batches the rank has in flight, in whole stages, the most that are in flight, and the
/// rank's memory. Bytes of the texts that XML does not allow are escaped. Parts too narrow to see
/// are joined, so that the document's size is limited for any number of micro-batches.
std::string pipeline_picture(const PipelineSchedule& schedule, const PipelineTimeline& timeline,
                             const PictureOptions& options);

}  // namespace train_gpt
