// What scripts/bench_ranks.py expects of a pipeline.
#include <string>

#include "base/error.h"
#include "parallel/pipeline/pipeline_simulation.h"
#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"

using namespace train_gpt;

namespace {

/// A rank's computes and their times as a Python tuple; an update takes no time.
std::string traced(const PipelineRank& rank, const StageTimes& times, bool halves_apart) {
    std::string order;
    for (const PipelineAction& action : rank.actions)
        if (is_compute(action.work))
            order += action.work == PipelineWork::forward            ? "'forward',"
                     : action.work == PipelineWork::backward_weights ? "'backward of weights',"
                                                                     : "'backward',";
    const double backward = times.backward_inputs + (halves_apart ? 0 : times.backward_weights);
    return concat("([", order, "],{'forward':", times.forward, ",'backward':", backward,
                  ",'backward of weights':", times.backward_weights, "},0),");
}

}  // namespace

TEST_CASE("the schedule that ranks of a pipeline are compared with takes the simulated time",
          "[scripts][pipeline]") {
    if (skip_without_python()) return;
    std::string stages, expected;
    for (const PipelineKind kind :
         {PipelineKind::gpipe, PipelineKind::one_f_one_b, PipelineKind::zero_bubble})
        for (int repeat = 0; repeat < 4; ++repeat) {
            const PipelineSchedule schedule =
                pipeline_schedule({.kind = kind,
                                   .ranks = static_cast<int>(random_int(2, 5)),
                                   .micro_batches = static_cast<int>(random_int(1, 9))});
            PipelineTimes times;
            stages += "[";
            for (const PipelineRank& rank : schedule.ranks) {
                const auto some = [] { return static_cast<double>(random_int(1, 9)); };
                times.stages.push_back({some(), some(), some()});
                stages += traced(rank, times.stages.back(), schedule.halves_apart);
            }
            stages += "],";
            expected += concat(simulate(schedule, times).makespan, "\n");
        }
    const ProgramResult result = run_program(
        {"python3", "-c",
         concat("import sys; sys.path.insert(0, 'scripts'); from bench_ranks import replayed\n"
                "for stages in [",
                stages, "]: print(f'{replayed(stages):g}')")});
    CHECK(result.output == expected);
}
