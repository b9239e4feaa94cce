#include "training/run_start.h"

#include "training/config/resolved_config.h"

namespace train_gpt {

Config RunStart::recorded() const {
    return resolve(given, data.spec(), trainer.parameters.dtype());
}

CheckpointContents RunStart::contents(int64_t step) const {
    return {.step = step,
            .config = given,
            .spec = data.spec(),
            .parameters = trainer.parameters,
            .tokenizer = data.tokenizer(),
            .choices = choices,
            .position = schedule.position(step),
            .tokens = tokens};
}

LoaderOptions RunStart::loading() const {
    const DataOrder& order = schedule.start().order;
    LoaderOptions options = loader_options(config, mesh.layout(), mesh.rank());
    options.seed = order.key();
    options.first_sample = order.sample_after(schedule.tokens_before(first_step()));
    options.micro_batches_per_step = micro_batches_of(first_step());
    for (const TokenCount::Part& part : schedule.start().tokens.parts())
        if (part.first_step > first_step())
            options.changes.push_back(
                {part.first_step - first_step(), micro_batches_of(part.first_step)});
    if (data.tokenizer()) options.document_boundary = data.tokenizer()->document_boundary();
    return options;
}

int RunStart::micro_batches_of(int64_t step) const {
    const int64_t tokens = int64_t{config.batch.micro_batch} * config.sequence_length();
    return static_cast<int>(schedule.tokens_of(step) / tokens);
}

std::vector<SourceUse> RunStart::planned_use() const {
    return data.use().after(schedule.start().order, schedule.tokens());
}

}  // namespace train_gpt
