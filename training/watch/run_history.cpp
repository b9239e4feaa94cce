#include "training/watch/run_history.h"

#include <algorithm>
#include <ctime>

#include "base/json_text.h"
#include "model/families/family.h"
#include "training/commands/version.h"
#include "training/run_start.h"

namespace train_gpt {

namespace {

Json event(const char* name, int64_t step) {
    return {{"event", name}, {"step", step}, {"time", static_cast<int64_t>(std::time(nullptr))}};
}

constexpr const char* lost = "the history of the run has gaps";

}  // namespace

RunHistory::RunHistory(const std::filesystem::path& run_dir, bool writes) {
    if (!writes) return;
    file_.emplace(run_dir / history_file);
    file_->end_line();
}

void RunHistory::start(const RunStart& start, std::vector<std::string> hosts) {
    if (!file_) return;
    std::ranges::sort(hosts);
    hosts.erase(std::unique(hosts.begin(), hosts.end()), hosts.end());
    const DecoderSpec& spec = start.data.spec();
    Json line = event("start", start.first_step());
    line["resumes"] = start.resumes;
    line["steps"] = start.schedule.steps();
    if (const Json passes = passes_json(start.planned_use()); !passes.empty())
        line["passes"] = passes;
    line["version"] = version();
    line["device"] = device_name(start.trainer.stream.device);
    line["ranks"] = start.ranks();
    line["hosts"] = hosts;
    const int64_t parameters = registry_of(spec).numel(), idle = spec.idle_parameters();
    line["parameters"] = parameters;
    if (idle > 0) line["active_parameters"] = parameters - idle;
    line["vocabulary"] = spec.vocab_size;
    if (start.data.tokenizer()) line["tokenizer"] = start.data.tokenizer_hash();
    line["memory"] = Json::object();
    for (size_t i = 0; i < static_cast<size_t>(Purpose::count); ++i)
        if (const auto purpose = static_cast<Purpose>(i); start.plan.bytes(purpose) > 0)
            line["memory"][name_of(purpose)] = start.plan.bytes(purpose);
    file_->append(to_text(line) + '\n', lost);
}

void RunHistory::checkpoint(int64_t step) {
    if (file_) file_->append(to_text(event("checkpoint", step)) + '\n', lost);
}

void RunHistory::sample(int64_t step, const std::string& prompt, const std::string& text) {
    if (!file_) return;
    Json line = event("sample", step);
    line["prompt"] = prompt;
    line["text"] = text;
    file_->append(to_text(line) + '\n', lost);
}

void RunHistory::end(int64_t step, const std::string& reason, int code) {
    if (!file_) return;
    Json line = event("end", step);
    line["reason"] = reason;
    line["code"] = code;
    file_->append(to_text(line) + '\n', lost);
}

}  // namespace train_gpt
