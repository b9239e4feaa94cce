#include "training/run_start.h"

#include "training/config/resolved_config.h"

namespace train_gpt {

Config RunStart::recorded() const {
    return resolve(given, data.spec(), trainer.parameters.dtype());
}

LoaderOptions RunStart::loading() const {
    const DataOrder& order = schedule.start().order;
    LoaderOptions options = loader_options(config, mesh.layout(), mesh.rank());
    options.seed = order.key();
    options.first_sample = order.sample_after(schedule.tokens_before(first_step()));
    if (data.tokenizer()) options.document_boundary = data.tokenizer()->document_boundary();
    return options;
}

std::vector<SourceUse> RunStart::planned_use() const {
    return data.use().after(schedule.start().order, schedule.tokens());
}

}  // namespace train_gpt
