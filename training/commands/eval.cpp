#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/printable.h"
#include "dataloader/loader.h"
#include "dataloader/manifest.h"
#include "dataloader/verify.h"
#include "training/commands/commands.h"
#include "training/config/data_folder.h"
#include "training/config/known_data.h"
#include "training/evaluation.h"
#include "training/files/run_folder.h"
#include "training/inference_session.h"

namespace train_gpt::commands {

namespace {

/// The shards of --data, or of the data that the checkpoint names, in windows of the model's
/// length. Throws Error if they do not match their manifest.
ValidationWindows open_windows(const CommandLine& line, const std::string& data,
                               InferenceSession& session) {
    std::shared_ptr<const TokenShards> shards;
    ValidationWindows windows = [&] {
        try {
            check_prepared(data, session.tokenizer_or_null());
            shards = std::make_shared<TokenShards>(
                data, static_cast<uint32_t>(session.spec().vocab_size));
            return ValidationWindows(shards, session.model().sequence_length(), line.max_tokens);
        } catch (const Error& error) {
            if (!line.data.empty()) throw;
            throw Error(
                error.what(),
                " (the checkpoint names these data, relative to the current folder; use --data "
                "GLOB for others)");
        }
    }();
    std::vector<std::filesystem::path> read;
    for (int i = 0; i < windows.shards_read() && !shards->synthetic(); ++i)
        read.push_back(shards->shard_path(i));
    std::vector<RecordedFile> files = recorded_shards(read);
    // For shards that no data.json describes, the run recorded hashes when it first read them.
    const std::filesystem::path run = session.path().parent_path();
    if (line.data.empty())
        for (const auto hashes = hashes_by_run(run); RecordedFile & file : files)
            if (const auto known = hashes.find(file.path.string());
                known != hashes.end() && file.hash.empty()) {
                file.hash = known->second;
                file.manifest = run / run_manifest;
            }
    require_undamaged(files);
    return windows;
}

void print_validation(const ValidationResult& v, const std::string& data,
                      const std::string& dtype) {
    std::printf("validation loss %.6f nats/token", v.nats_per_token);
    if (std::isfinite(v.bits_per_byte)) std::printf(", %.6f bits/byte", v.bits_per_byte);
    std::printf(", perplexity %.4f (e to the nats/token)", std::exp(v.nats_per_token));
    std::printf(" over %lld tokens of %s, %s\n", static_cast<long long>(v.tokens),
                printable(data).c_str(), dtype.c_str());
}

}  // namespace

int eval(const CommandLine& line) {
    InferenceSession session(line.checkpoint, line.device, line.dtype,
                             InferenceSession::For::evaluation);
    require_made(line.data);
    const std::string data =
        line.data.empty() ? session.validation_data() : validation_glob(line.data);
    require_made(line.hellaswag);
    if (data.empty() && line.hellaswag.empty())
        throw UsageError(
            "nothing to evaluate: the checkpoint names no validation data; give --data GLOB or "
            "--hellaswag FILE");
    std::optional<HellaSwag> hellaswag;
    if (!line.hellaswag.empty())
        hellaswag.emplace(line.hellaswag, session.tokenizer(), line.max_examples);
    const Mesh alone;
    const EvaluatedModel model{session.stream(), session.model(), session.batch(), alone};
    if (!data.empty()) {
        const ValidationWindows windows = open_windows(line, data, session);
        print_validation(evaluate(model, windows, session.tokenizer_or_null()), data,
                         session.described_dtype());
    }
    if (hellaswag) {
        const HellaSwagResult h = hellaswag->evaluate(model);
        std::printf("HellaSwag accuracy %.4f, length-normalised %.4f, over %lld examples, %s\n",
                    h.accuracy, h.accuracy_normalised, static_cast<long long>(h.examples),
                    session.described_dtype().c_str());
    }
    return 0;
}

}  // namespace train_gpt::commands
