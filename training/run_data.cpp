#include "training/run_data.h"

#include <filesystem>
#include <set>

#include "base/error.h"
#include "base/hash.h"
#include "base/version.h"
#include "dataloader/manifest.h"
#include "training/config/config_text.h"
#include "training/config/data_folder.h"
#include "training/config/known_data.h"
#include "training/plan/memory_plan.h"
#include "training/trainer.h"

namespace train_gpt {

void require_run_inputs(const Config& config, const std::string& file) {
    if (config.run_dir.empty())
        throw Error(file, ": run_dir is not set; name a folder for the run");
    if (config.data.train.empty())
        throw Error(file, ": data.train is not set; name token shards to train on");
    require_no_folders(config, file);
    for (const auto& source : config.data.train) require_made(source.glob);
    for (const std::string& path :
         {config.tokenizer.path, config.data.val, config.evaluation.hellaswag})
        require_made(path);
    for (const std::string& glob : config.evaluation.tasks) require_made(glob);
}

RunData::RunData(const Config& config, const std::string& file) {
    if (!config.tokenizer.path.empty()) tokenizer_ = Tokenizer::load(config.tokenizer.path);
    spec_ = spec_of(config, vocab_size_of(config, tokenizer()));
    if (config.data.document_mask && !(tokenizer_ && tokenizer_->document_boundary()))
        throw Error(file, ": data.document_mask needs a tokenizer with an end-of-text token, ",
                    "which separates documents; set tokenizer.path to the one the data were made "
                    "with");
    for (const auto& [glob, weight, name] : config.data.train)
        sources_.push_back(
            {std::make_shared<TokenShards>(glob, static_cast<uint32_t>(spec_.vocab_size)), weight});
    open_evaluations(config, file);
    for (const auto& source : config.data.train) check_prepared(source.glob, tokenizer());
    check_prepared(config.data.val, tokenizer());
    use_.emplace(config, sources_);
}

void RunData::open_evaluations(const Config& config, const std::string& file) {
    evaluations_.tokenizer = tokenizer();
    if (!config.data.val.empty()) {
        validation_ =
            std::make_shared<TokenShards>(config.data.val, static_cast<uint32_t>(spec_.vocab_size));
        evaluations_.validation = std::make_unique<ValidationWindows>(
            validation_, config.sequence_length(), config.evaluation.max_tokens);
    }
    const bool has_hellaswag = !config.evaluation.hellaswag.empty();
    if (!has_hellaswag && config.evaluation.tasks.empty()) return;
    if (!tokenizer_ || !evaluations_.validation)
        throw Error(file, ": evaluation.", has_hellaswag ? "hellaswag" : "tasks",
                    " needs tokenizer.path and data.val; set them too");
    if (has_hellaswag) evaluations_.hellaswag.emplace(config.evaluation.hellaswag, *tokenizer_, 0);
    evaluations_.tasks = read_tasks(config.evaluation.tasks, config.evaluation.task_items);
}

std::string RunData::tokenizer_hash() const {
    return tokenizer_ ? hash_text(tokenizer_->to_json()) : "none";
}

std::map<std::string, std::string> RunData::facts(const Config& config,
                                                  const Device& device) const {
    std::map<std::string, std::string> facts = config_values(config);
    facts["program"] = version();
    facts["device"] = device.is_cuda() ? "cuda" : "cpu";
    facts["tokenizer"] = tokenizer_hash();
    for (size_t s = 0; s < sources_.size(); ++s)
        facts["training data" + (sources_.size() > 1 ? " " + config.data.train[s].name : "")] =
            sources_[s].shards->fingerprint();
    return facts;
}

std::vector<WatchedShard> RunData::shards() const {
    std::vector<WatchedShard> all;
    std::set<std::filesystem::path> seen;
    const auto add = [&](const TokenShards& shards, bool trains) {
        for (int i = 0; i < shards.shard_count() && !shards.synthetic(); ++i)
            if (seen.insert(shards.shard_path(i)).second)
                all.push_back({shards.shard_path(i), trains});
    };
    for (const TrainSource& source : sources_) add(*source.shards, true);
    if (validation_) add(*validation_, false);
    return all;
}

}  // namespace train_gpt
