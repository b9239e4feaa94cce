#include "training/evaluation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"
#include "device/copy.h"
#include "kernels/head_loss.h"

namespace train_gpt {

EvaluationBatch::EvaluationBatch(Arena& arena, const BatchShape& shape, int64_t vocabulary)
    : on_device_(arena, shape, {}) {
    const size_t n = static_cast<size_t>(shape.tokens());
    const bool on_cuda = arena.device().is_cuda(), is_split = shape.context.is_split();
    const auto host = [&](size_t bytes) { return arena.take(bytes, Purpose::staging); };
    const auto numbers = [&] {
        return std::span(static_cast<int32_t*>(host(n * sizeof(int32_t))), n);
    };
    tokens = numbers();
    targets = numbers();
    if (shape.document_mask) doc_start = numbers();
    total_ = device_total_ = static_cast<double*>(host(sizeof(double)));
    if (on_cuda) device_total_ = static_cast<double*>(arena.take(sizeof(double), Purpose::buffers));
    if (is_split) {
        part_losses_ = arena.tensor(DType::fp32, {shape.tokens()}, Purpose::buffers);
        part_losses_on_host_ =
            on_cuda ? arena.tensor(DType::fp32, {shape.tokens()}, Purpose::staging) : part_losses_;
    }
    if (on_cuda || is_split) losses_ = static_cast<float*>(host(n * sizeof(float)));
    if (vocabulary == 0) return;
    logits_ = arena.tensor(DType::fp32, {1, vocabulary}, Purpose::buffers);
    logits_on_host_ =
        on_cuda ? arena.tensor(DType::fp32, {1, vocabulary}, Purpose::staging) : logits_;
}

TokenBatch EvaluationBatch::upload(Stream& stream) const {
    return on_device_.upload(
        stream,
        {.tokens = tokens.data(), .targets = targets.data(), .doc_start = doc_start.data()});
}

void EvaluationBatch::run(Stream& stream, const Pipeline& model) const {
    model.evaluate(stream, upload(stream));
}

double EvaluationBatch::total(Stream& stream, const Pipeline& model) const {
    accumulate_loss(stream, device_total_, model.last_stage().losses(),
                    std::ssize(tokens) / model.context().size(), false);
    if (stream.device.is_cuda()) copy(stream, total_, device_total_, sizeof *total_);
    stream.synchronize();
    return *total_;
}

std::span<const float> EvaluationBatch::losses(Stream& stream, const Pipeline& model) const {
    const float* const losses = model.last_stage().losses();
    if (part_losses_) {
        const int ranks = model.context().size();
        const Tensor all = part_losses_.reshaped({ranks, part_losses_.numel() / ranks}),
                     own = all.row_range(model.context().rank(), 1);
        copy(stream, own.data, losses, own.bytes());
        model.context().gather(stream, all);
        if (stream.device.is_cuda())
            copy(stream, part_losses_on_host_.data, part_losses_.data, part_losses_.bytes());
        stream.synchronize();
        on_device_.put_together(losses_, part_losses_on_host_.as<float>());
        return {losses_, tokens.size()};
    }
    if (!stream.device.is_cuda()) return {losses, tokens.size()};
    copy(stream, losses_, losses, tokens.size() * sizeof(float));
    stream.synchronize();
    return {losses_, tokens.size()};
}

int32_t EvaluationBatch::likeliest_token(Stream& stream, const Pipeline& model,
                                         int64_t token) const {
    model.next_token_logits(stream, token, logits_);
    if (stream.device.is_cuda()) copy(stream, logits_on_host_.data, logits_.data, logits_.bytes());
    stream.synchronize();
    const std::span<const float> logits(logits_on_host_.as<float>(),
                                        static_cast<size_t>(model.spec().vocab_size));
    return static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin());
}

void stop_together(const Mesh& mesh, const StopEvaluation& stop, double done) {
    if (!stop) return;
    double wanting[] = {stop(done) ? 1.0 : 0.0};
    mesh.world().all_reduce_sum(wanting);
    if (wanting[0] > 0) throw EvaluationStopped();
}

bool counts_tokens(const Mesh& mesh, const Pipeline& model) {
    return model.ends_model() && mesh.at(Axis::tensor) == 0;
}
bool counts_sequences(const Mesh& mesh, const Pipeline& model) {
    return model.ends_model() && mesh.at({Axis::context, Axis::tensor}) == 0;
}

ValidationResult evaluate(const EvaluatedModel& on, const ValidationWindows& windows,
                          const Tokenizer* tokenizer, const StopEvaluation& stop) {
    const Pipeline& model = on.model;
    const EvaluationBatch& batch = on.batch;
    const Mesh& mesh = on.mesh;
    const int64_t B = model.options().B, batches = (windows.count() + B - 1) / B;
    // The sum of losses of each batch, then the bytes. Each is 0 on all ranks but one, so sums over
    // ranks are exact, except that context-parallel ranks each have a part of a batch.
    std::vector<double> sums(static_cast<size_t>(batches) + 1);
    int64_t round = 0;
    for (int64_t first = 0; first < batches; first += mesh.size(Axis::data), ++round) {
        // Between these points, batches follow each other through the stages.
        if (round % model.ranks() == 0)
            stop_together(mesh, stop, static_cast<double>(first) / static_cast<double>(batches));
        // Beyond the last batch there are only targets that are ignored.
        const int64_t i = first + mesh.at(Axis::data);
        windows.fill(i * B, static_cast<int>(B), batch.tokens.data(), batch.targets.data(),
                     batch.doc_start.empty() ? nullptr : batch.doc_start.data(),
                     tokenizer ? tokenizer->document_boundary() : std::nullopt);
        batch.run(on.stream, model);
        const double total = model.ends_model() ? batch.total(on.stream, model) : 0;
        if (!model.ends_model()) on.stream.synchronize();
        mesh.world().activity().pulse();
        if (i >= batches || !counts_tokens(mesh, model)) continue;
        sums[static_cast<size_t>(i)] = total;
        if (!tokenizer || !counts_sequences(mesh, model)) continue;
        for (const int32_t target : batch.targets)
            if (target >= 0 && !tokenizer->is_special(static_cast<uint32_t>(target)))
                sums.back() += static_cast<double>(
                    tokenizer->token_bytes(static_cast<uint32_t>(target)).size());
    }
    mesh.world().all_reduce_sum(sums);
    const double bytes = sums.back(), nats = std::accumulate(sums.begin(), sums.end() - 1, 0.0);
    return {.nats_per_token = nats / static_cast<double>(windows.target_tokens()),
            .bits_per_byte = bytes > 0 ? nats / (std::log(2.0) * bytes)
                                       : std::numeric_limits<double>::quiet_NaN(),
            .tokens = windows.target_tokens()};
}

namespace {

std::vector<int32_t> as_input(const std::vector<uint32_t>& ids) { return {ids.begin(), ids.end()}; }

/// The label, 0 to 3, given as a number or (in older editions of the published file) as text; -1 if
/// it is neither.
int read_label(const Json& label) {
    if (label.is_number_integer())
        return label.get<int64_t>() >= 0 && label.get<int64_t>() <= 3 ? label.get<int>() : -1;
    const std::string text = label.is_string() ? label.get<std::string>() : "";
    return text.size() == 1 && text[0] >= '0' && text[0] <= '3' ? text[0] - '0' : -1;
}

}  // namespace

HellaSwag::HellaSwag(const std::filesystem::path& jsonl, const Tokenizer& tokenizer,
                     int64_t max_examples)
    : path_(jsonl) {
    const MappedFile file(jsonl);
    std::string_view rest = file.text();
    for (int64_t line_number = 1; !rest.empty(); ++line_number) {
        if (max_examples > 0 && size() == max_examples) break;
        const std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(rest.size(), line.size() + 1));
        if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;

        const auto bad = [&](const char* what) -> Error {
            return Error(jsonl.string(), ", line ", line_number,
                         " is not a HellaSwag example: ", what,
                         "; the published file has \"ctx\", \"endings\" (4) and \"label\" (0 to 3) "
                         "in each line");
        };
        const auto json = try_parse_json(line);
        if (json.is_discarded()) throw bad("it is not valid JSON");
        if (!json.is_object()) throw bad("it is not a JSON object");
        for (const char* key : {"ctx", "endings", "label"})
            if (!json.contains(key)) throw bad(concat("it has no \"", key, "\"").c_str());
        const auto &context = json["ctx"], &endings = json["endings"];
        if (!context.is_string()) throw bad("its \"ctx\" is not a text");
        if (!endings.is_array() || endings.size() != endings_per_example ||
            !std::all_of(endings.begin(), endings.end(),
                         [](const auto& ending) { return ending.is_string(); }))
            throw bad("its \"endings\" are not 4 texts");

        Example& example = examples_.emplace_back();
        example.label = read_label(json["label"]);
        if (example.label < 0) throw bad("its \"label\" is not a number from 0 to 3");
        example.context = as_input(tokenizer.encode_beginning(context.get<std::string>()));
        for (size_t i = 0; i < endings_per_example; ++i)
            example.endings[i] = as_input(tokenizer.encode(" " + endings[i].get<std::string>()));
    }
    if (examples_.empty())
        throw Error(jsonl.string(), " holds no HellaSwag example; check the path");
}

std::vector<HellaSwag::EndingLoss> HellaSwag::score(const EvaluatedModel& on, size_t first,
                                                    size_t count) const {
    const Pipeline& model = on.model;
    const EvaluationBatch& batch = on.batch;
    const size_t T = static_cast<size_t>(model.sequence_length());
    const auto checked = [&](int32_t token) {
        if (token >= model.spec().vocab_size)
            throw Error("the tokenizer has token ", token, ", but the model knows only ",
                        model.spec().vocab_size,
                        "; use the tokenizer that the model was trained with");
        return token;
    };
    std::fill(batch.tokens.begin(), batch.tokens.end(), 0);
    std::fill(batch.targets.begin(), batch.targets.end(), -1);
    std::fill(batch.doc_start.begin(), batch.doc_start.end(), 0);
    std::vector<EndingLoss> scores(count);
    for (size_t r = 0; r < count; ++r) {
        const Example& example = examples_[(first + r) / endings_per_example];
        const std::vector<int32_t>& ending = example.endings[(first + r) % endings_per_example];
        // T inputs predict T tokens: T + 1 tokens at most, one of the context at least.
        const size_t scored = std::min(ending.size(), T);
        const size_t given = std::min(example.context.size(), T + 1 - scored);
        for (size_t i = 0; i < given; ++i)
            batch.tokens[r * T + i] = checked(example.context[example.context.size() - given + i]);
        for (size_t i = 0; i < scored; ++i) {
            batch.targets[r * T + given - 1 + i] = checked(ending[i]);
            if (given + i < T) batch.tokens[r * T + given + i] = ending[i];
        }
        scores[r].tokens = static_cast<int64_t>(scored);
    }
    batch.run(on.stream, model);
    if (!model.ends_model()) {
        on.stream.synchronize();
        return scores;
    }
    const std::span<const float> losses = batch.losses(on.stream, model);
    for (size_t i = 0; i < count * T; ++i)
        if (batch.targets[i] >= 0) scores[i / T].nats += losses[i];
    return scores;
}

HellaSwagResult HellaSwag::evaluate(const EvaluatedModel& on, const StopEvaluation& stop) const {
    const Mesh& mesh = on.mesh;
    const size_t B = static_cast<size_t>(on.model.options().B);
    double right[2] = {};  // by the sum of losses, and by the loss per token
    EndingLoss endings[endings_per_example];
    const auto first_row = [&](int rank) {
        return examples_.size() * static_cast<size_t>(rank) /
               static_cast<size_t>(mesh.size(Axis::data)) * endings_per_example;
    };
    size_t rounds = 0;  // of the rank with the most examples
    for (int rank = 0; rank < mesh.size(Axis::data); ++rank)
        rounds = std::max(rounds, (first_row(rank + 1) - first_row(rank) + B - 1) / B);
    const size_t begin = first_row(mesh.at(Axis::data)), end = first_row(mesh.at(Axis::data) + 1);
    for (size_t round = 0; round < rounds; ++round) {
        if (round % static_cast<size_t>(on.model.ranks()) == 0)
            stop_together(mesh, stop, static_cast<double>(round) / static_cast<double>(rounds));
        size_t row = begin + round * B;
        // A rank that has no more rows runs the model once more for the others.
        const auto scores = row < end ? score(on, row, std::min(B, end - row)) : score(on, 0, 1);
        mesh.world().activity().pulse();
        if (row >= end || !counts_sequences(mesh, on.model)) continue;
        for (const EndingLoss& ending : scores) {
            endings[row % endings_per_example] = ending;
            const Example& example = examples_[row / endings_per_example];
            if (++row % endings_per_example != 0) continue;
            const auto least = [&](auto cost) {
                return std::ranges::min_element(endings, {}, cost) - endings == example.label;
            };
            right[0] += least([](const EndingLoss& e) { return e.nats; });
            right[1] +=
                least([](const EndingLoss& e) { return e.nats / static_cast<double>(e.tokens); });
        }
    }
    mesh.world().all_reduce_sum(right);
    const double n = static_cast<double>(size());
    return {.examples = size(), .accuracy = right[0] / n, .accuracy_normalised = right[1] / n};
}

}  // namespace train_gpt
