#include "training/evaluations/core_tasks.h"

#include <algorithm>

namespace train_gpt {

namespace {

constexpr CoreTask tasks[] = {{"hellaswag_zeroshot", {25, 25}},
                              {"jeopardy", {0, 0}},
                              {"bigbench_qa_wikidata", {0, 0}},
                              {"arc_easy", {25, 25}},
                              {"arc_challenge", {25, 25}},
                              {"copa", {50, 50}},
                              {"commonsense_qa", {20, 40.3}},
                              {"piqa", {50, 50}},
                              {"openbook_qa", {25, 25}},
                              {"lambada_openai", {0, 0}},
                              {"hellaswag", {25, 25}},
                              {"winograd", {50, 50}},
                              {"winogrande", {50, 50}},
                              {"bigbench_dyck_languages", {0, 0}},
                              {"agi_eval_lsat_ar", {20, 25}},
                              {"bigbench_cs_algorithms", {0, 0}},
                              {"bigbench_operators", {0, 0}},
                              {"bigbench_repeat_copy_logic", {0, 0}},
                              {"squad", {0, 0}},
                              {"coqa", {0, 0}},
                              {"boolq", {62, 62}},
                              {"bigbench_language_identification", {9.1, 25}}};
static_assert(std::size(tasks) == 22);

}  // namespace

std::span<const CoreTask> core_tasks() { return tasks; }

std::optional<CoreScore> core_score(std::span<const TaskResult> results) {
    CoreScore core;
    for (size_t v = 0; v < std::size(core.by_version); ++v) {
        double sum = 0, squares = 0;
        for (const CoreTask& task : tasks) {
            const auto found = std::ranges::find_if(results, [&](const TaskResult& result) {
                return result.name == task.name && result.procedure == TaskProcedure::core;
            });
            if (found == results.end()) return {};
            const Estimate score = centered(found->accuracy, task.baseline[v]);
            sum += score.mean;
            squares += score.error * score.error;
        }
        const double n = static_cast<double>(std::size(tasks));
        core.by_version[v] = {.mean = sum / n, .error = std::sqrt(squares) / n};
    }
    return core;
}

}  // namespace train_gpt
