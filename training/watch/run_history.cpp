#include "training/watch/run_history.h"

#include <utility>
#include <variant>

#include "base/error.h"
#include "base/sha256.h"
#include "training/files/checkpoint.h"
#include "training/files/history_check.h"
#include "training/files/run_folder.h"
#include "training/run_start.h"
#include "training/watch/start_event.h"

namespace train_gpt {

RunHistory::RunHistory(const std::filesystem::path& run_dir, bool writes) : run_dir_(run_dir) {
    if (writes) writer_.emplace(run_dir);
}

void RunHistory::add(const char* name, int64_t step, const Json& fields) {
    if (!writer_) return;
    Json event = history_event(name, step);
    event.update(fields);
    writer_->append(std::move(event));
}

std::string RunHistory::start(const RunStart& start, std::vector<std::string> hosts) {
    if (!writer_) return "";
    const HistoryChain found = writer_->take_found();
    Json event = start_event(start, std::move(hosts), found);
    manifest_ = event["files"].value(run_manifest, "");
    std::string trouble;
    if (found.broken) {
        trouble = describe_break(run_dir_, *found.broken);
    } else if (const std::string lacks = foreign_checkpoint(event, found); !lacks.empty()) {
        trouble = concat("in ", (run_dir_ / history_file).string(), " ", lacks);
    }
    if (!trouble.empty()) event["broken"] = trouble;
    writer_->append(std::move(event));
    return trouble.empty() ? "" : trouble + "; `train_gpt verify` says more";
}

void RunHistory::checkpoint(int64_t step) {
    if (writer_)
        add("checkpoint", step, {{"manifest", manifest_hash(checkpoint_path(run_dir_, step))}});
}

void RunHistory::evaluation(int64_t step, const MetricsRecord::Fields& fields) {
    Json of = Json::object();
    for (const auto& [name, value] : fields)
        std::visit([&of, key = name](const auto& v) { of[key] = v; }, value);
    add("evaluation", step, of);
}

void RunHistory::sample(int64_t step, const std::string& prompt, const std::string& text) {
    add("sample", step, {{"prompt", prompt}, {"text", text}});
}

void RunHistory::spike(int64_t step, const std::string& text) {
    add("spike", step, {{"text", text}});
}

void RunHistory::signal(int64_t step, const std::string& reason) {
    add("signal", step, {{"reason", reason}});
}

void RunHistory::failure(int64_t step, const std::string& reason) try {
    add("failure", step, {{"reason", reason}});
} catch (const Error&) {
    // The folder is not where it was, for example, which may be why the checkpoint failed.
}

void RunHistory::data(int64_t step) {
    const std::filesystem::path file = run_dir_ / run_manifest;
    if (!writer_ || !std::filesystem::exists(file)) return;
    const std::string now = sha256_of_file(file);
    if (std::exchange(manifest_, now) == now) return;
    if (Json data = data_of_run(run_dir_, {}); !data.empty())
        add("data", step, {{"data", std::move(data)}, {"files", hashes_of_run(run_dir_)}});
}

void RunHistory::end(int64_t step, const std::string& reason, int code) {
    data(step);
    add("end", step, {{"reason", reason}, {"code", code}});
}

}  // namespace train_gpt
