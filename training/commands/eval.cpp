#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/formatted.h"
#include "base/json_text.h"
#include "base/printable.h"
#include "base/stopwatch.h"
#include "base/terminal_text.h"
#include "dataloader/loader.h"
#include "dataloader/manifest.h"
#include "dataloader/verify.h"
#include "training/commands/commands.h"
#include "training/config/data_folder.h"
#include "training/config/known_data.h"
#include "training/evaluation.h"
#include "training/evaluations/task_evaluation.h"
#include "training/evaluations/task_report.h"
#include "training/files/run_folder.h"
#include "training/inference_session.h"
#include "training/watch/progress.h"

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

/// What is evaluated.
struct Questions {
    std::vector<Task> tasks;
    std::optional<HellaSwag> hellaswag = {};
};

/// What came out, and how it is printed.
class Answers {
  public:
    Answers(const CommandLine& line, const std::string& dtype) : line_(line), dtype_(dtype) {
        json_["checkpoint"] = line.checkpoint;
        json_["dtype"] = dtype;
    }

    void add(const ValidationResult& v, const std::string& data) {
        Json validation{{"data", data}, {"loss", v.nats_per_token}, {"tokens", v.tokens}};
        text_ += formatted("validation loss %.6f nats/token", v.nats_per_token);
        if (std::isfinite(v.bits_per_byte)) {
            text_ += formatted(", %.6f bits/byte", v.bits_per_byte);
            validation["bits_per_byte"] = v.bits_per_byte;
        }
        text_ += formatted(", perplexity %.4f (e to the nats/token) over %lld tokens of ",
                           std::exp(v.nats_per_token), static_cast<long long>(v.tokens));
        text_ += printable(data) + ", " + dtype_ + "\n";
        json_["validation"] = std::move(validation);
        show();
    }
    void add(const HellaSwagResult& h) {
        text_ += formatted("HellaSwag accuracy %.4f, length-normalised %.4f, over %lld examples, ",
                           h.accuracy, h.accuracy_normalised, static_cast<long long>(h.examples));
        text_ += dtype_ + "\n";
        json_["hellaswag"] = {{"accuracy", h.accuracy},
                              {"accuracy_normalised", h.accuracy_normalised},
                              {"examples", h.examples}};
        show();
    }
    void add(const std::vector<TaskResult>& results) {
        text_ += describe_tasks(results);
        json_.update(json_of(results));
        show();
    }
    void finish() const {
        if (line_.evaluation.json) std::printf("%s\n", to_text(json_, 2).c_str());
    }

  private:
    /// A result is printed when it is known.
    void show() {
        if (!line_.evaluation.json) {
            std::fputs(text_for_terminal(text_, columns_of(stdout)).c_str(), stdout);
            std::fflush(stdout);
        }
        text_.clear();
    }

    const CommandLine& line_;
    std::string dtype_, text_;
    Json json_;
};

/// Evaluates the tasks one after another, and writes their items if they are wanted.
std::vector<TaskResult> evaluate_tasks(const CommandLine& line, const CachedModel& model,
                                       const std::vector<Task>& tasks, const Tokenizer& tokenizer) {
    std::optional<AtomicFile> items;
    if (!line.evaluation.items.empty()) items.emplace(line.evaluation.items);
    // A line on a terminal that is rewritten, and gone when the results are there.
    Progress progress(ProgressStyle::line, columns_of(stdout) > 0 && !line.evaluation.json);
    std::vector<TaskResult> results;
    for (const Task& task : tasks) {
        const auto show = [&, since_start = Stopwatch()](double done) {
            const double seconds = since_start.seconds();
            if (done > 0 && seconds > 1)
                progress.show(concat(task.name, ": ", static_cast<int>(100 * done), "%"),
                              seconds / done - seconds);
            return false;
        };
        const std::vector<AnswerLosses> losses = losses_on(task, model, tokenizer, show);
        results.push_back(result_of(task, losses));
        if (items) items->write(items_json(task, losses));
    }
    if (items) items->commit();
    return results;
}

void require_something(const CommandLine& line, const std::string& data) {
    const bool has_tasks = !line.evaluation.tasks.empty();
    if (!line.evaluation.items.empty() && !has_tasks)
        throw UsageError("--items is about the items of tasks; name their files with --tasks");
    if (data.empty() && line.hellaswag.empty() && !has_tasks)
        throw UsageError(
            "nothing to evaluate: the checkpoint names no validation data; give --data GLOB, "
            "--tasks FILE or --hellaswag FILE");
}

}  // namespace

int eval(const CommandLine& line) {
    const bool has_tasks = !line.evaluation.tasks.empty();
    // Mistakes in tasks are found before a large model is read.
    Questions questions{.tasks = read_tasks(line.evaluation.tasks, line.max_examples)};
    const bool has_passes = !has_tasks || !line.data.empty() || !line.hellaswag.empty();
    InferenceSession session(line.checkpoint, line.device, line.dtype,
                             !has_tasks   ? InferenceSession::For::evaluation
                             : has_passes ? InferenceSession::For::evaluation_and_tasks
                                          : InferenceSession::For::tasks);
    require_made(line.data);
    const std::string data = !line.data.empty() ? validation_glob(line.data)
                             : has_tasks        ? ""
                                                : session.validation_data();
    require_made(line.hellaswag);
    require_something(line, data);
    if (!line.hellaswag.empty())
        questions.hellaswag.emplace(line.hellaswag, session.tokenizer(), line.max_examples);
    const Mesh alone;
    Answers answers(line, session.described_dtype());
    if (has_passes) {
        const EvaluatedModel model{session.stream(), session.model(), session.batch(), alone};
        if (!data.empty()) {
            const ValidationWindows windows = open_windows(line, data, session);
            answers.add(evaluate(model, windows, session.tokenizer_or_null()), data);
        }
        if (questions.hellaswag) answers.add(questions.hellaswag->evaluate(model));
    }
    if (has_tasks)
        answers.add(evaluate_tasks(
            line, {session.stream(), session.generator(), alone, session.sequence_length()},
            questions.tasks, session.tokenizer()));
    answers.finish();
    return 0;
}

}  // namespace train_gpt::commands
