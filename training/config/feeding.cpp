#include "training/config/feeding.h"

#include <algorithm>

#include "parallel/axes/tensor.h"
#include "training/config/layout.h"

namespace train_gpt {

namespace {

/// Rows of a micro-batch of B sequences on a context-parallel rank.
int64_t rows_of(const Config& config, int64_t B) {
    return B * config.sequence_length() / config.parallel.context;
}

TensorGroup tensor_group(const Config& config) {
    return TensorGroup(tensor_options(config, {.rank = 0, .ranks = config.parallel.tensor}));
}

}  // namespace

int64_t most_tokens(const Device& device) { return device.is_cuda() ? 65536 : 4096; }

int64_t step_multiple(const Config& config, int data_ranks) {
    const auto& p = config.parallel;
    const int of_pipeline = micro_batches_multiple(p.schedule, p.pipeline);
    return of_pipeline > 1 ? int64_t{of_pipeline} * data_ranks : 1;
}

std::vector<int> feeding_micro_batches(const Config& config, int64_t most_tokens, int ranks) {
    const int given = config.batch.micro_batch;
    const int64_t sequences = config.least_tokens_per_step() / config.sequence_length(),
                  most = given > 0
                             ? given
                             : std::min(sequences / ranks,
                                        std::max<int64_t>(1, most_tokens / rows_of(config, 1)));
    const int64_t together = step_multiple(config, ranks);
    const TensorGroup tensor = tensor_group(config);
    std::vector<int> feeding;
    for (int64_t B = std::max(given, 1); B <= most; ++B)
        if (sequences % B == 0 && sequences / B >= ranks && sequences / B % together == 0 &&
            tensor.is_even(rows_of(config, B)))
            feeding.push_back(static_cast<int>(B));
    return feeding;
}

bool can_feed(const Config& config, int data_ranks) {
    return !feeding_micro_batches(config, most_tokens(Device{}), data_ranks).empty();
}

void require_even_rows(const Config& config, int64_t B, const char* rows) {
    tensor_group(config).require_even(rows_of(config, B), rows, config.parallel.context);
}

}  // namespace train_gpt
