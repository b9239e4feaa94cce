#include "training/watch/not_finite.h"

#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "parallel/together.h"

namespace train_gpt {

std::string describe_not_finite(const RunStart& start, const TrainLoader& loader, int64_t step,
                                int64_t steps_ago) {
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
    if (!first) return "";
    return concat(", in micro-batch ", first->first + 1, " of ", start.micro_batches_of(step),
                  ", on rank ", first->second);
}

}  // namespace train_gpt
