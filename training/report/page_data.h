// The numbers of a report's page, as JSON that its script draws.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "training/report/recorded_run.h"
#include "training/report/thinning.h"

namespace train_gpt {

/// The curves of a run by name, thinned for a plot of `pixels` pixels. They are the fields of
/// metrics.jsonl over steps, and
///   loss_mean, loss_mean/NAME, grad_norm_mean, tokens_per_second_mean, router_load_mean,
///   router_idle_mean            running means
///   seconds                     the seconds of training up to a step
///   tokens                      the tokens up to a step; straight between the curve's points
///   task/NAME, core/VERSION     the accuracy of tasks, and CORE; with …/low and …/high, which are
///                               one standard error below and above
/// Curves without points are left out.
std::vector<std::pair<std::string, Curve>> curves_of(const RecordedRun& run, int pixels);

/// A loss that 98 of 100 rows of a table do not exceed, of those after the first 3 % of the steps,
/// whatever extremes the drawn curve or the table keeps. Higher ones, such as single losses of
/// 10^7, would flatten the others. NaN without losses.
double usual_loss(const MetricsTable& table, const std::string& column);

/// What a supervisor did after the run's first start, without ends of ranks that have not failed:
/// lines of supervise.jsonl.
std::vector<Json> supervisor_events(const RecordedRun& run);

/// A start or an end of the run within its steps, or what a supervisor did.
struct RunMark {
    int64_t step = 0;
    std::string text;  // "stopped (SIGTERM), resumed"
};
/// Where the run stopped or resumed, why it was started again, and spikes, in the order of steps.
/// If there are many marks, marks that are near each other become one, until about a hundred are
/// left.
std::vector<RunMark> marks_of(const RecordedRun& run);

/// One JSON object, {"stamp": …, "runs": […]}. The stamp differs when there is more to show.
/// Each run is an object with
///
///   "name", "clip", "vocabulary", "limit" (tokens per second at the measured rate of products)
///   "curves"    {NAME: {"x": [first, then differences], "y": […]}}
///   "usual"     {NAME: usual_loss()} of losses
///   "shares"    {"x": [edges of intervals of steps], PHASE: [its share of time in each interval]}
///   "memory"    [[PURPOSE, bytes]]
///   "marks"     [[step, text]]
///   "routers"   routers_json() (router_picture.h)
///
/// Numbers have seven digits. The text is safe inside a <script> element, whatever texts the run
/// has.
std::string page_data(const std::vector<RecordedRun>& runs, int pixels);

}  // namespace train_gpt
