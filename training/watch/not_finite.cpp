#include "training/watch/not_finite.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "parallel/together.h"

namespace train_gpt {

std::string describe_not_finite(const RunStart& start, const TrainLoader& loader, int64_t step,
                                int64_t steps_ago, const StepOutcome& outcome) {
    const int first_of_rank = loader.first_micro_batch(step - start.first_step());
    const std::vector<std::string> of_ranks = together(start.mesh.world(), [&] {
        const std::optional<int> own =
            start.trainer.parameters.gradients.first_not_finite(steps_ago);
        return own ? std::to_string(first_of_rank + *own) : std::string();
    });
    std::optional<std::pair<int, size_t>> first;
    for (size_t rank = 0; rank < of_ranks.size(); ++rank)
        if (const std::string& found = of_ranks[rank]; !found.empty())
            if (const std::pair here(std::stoi(found), rank); !first || here < *first) first = here;
    std::string text = start.trainer.optimizer.bad_parameter(outcome.state);
    if (first)
        text += concat(", in micro-batch ", first->first + 1, " of ", start.micro_batches_of(step),
                       ", on rank ", first->second);
    if (const int operand = outcome.fp8.not_finite; operand >= 0)
        text += concat("; the first operand of fp8 products that is not finite is the ",
                       start.trainer.fp8.name_of(operand));
    return text + describe_router_not_finite(expert_layers(start.data.spec()), outcome.routers);
}

std::string describe_router_not_finite(const std::vector<int>& layers, const RouterReport& report) {
    const auto first =
        std::ranges::find_if(report.not_finite, [](int32_t sequences) { return sequences > 0; });
    if (first == report.not_finite.end()) return "";
    return concat("; the router of layer ",
                  layers[static_cast<size_t>(first - report.not_finite.begin())],
                  " is the first with probabilities that are not finite, in ", *first,
                  *first == 1 ? " sequence" : " sequences");
}

}  // namespace train_gpt
