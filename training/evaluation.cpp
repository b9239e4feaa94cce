#include "training/evaluation.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "kernels/error.h"
#include "kernels/file.h"
#include "kernels/head_loss.h"

namespace train_gpt {

ValidationResult evaluate(Stream& stream, GPT& model, const ValidationWindows& windows, const Tokenizer* tokenizer,
                          EvaluationBatch batch) {
    const int B = model.options().B, T = model.options().T;
    const TokenBatch device_batch{.tokens = batch.tokens, .targets = batch.targets};
    double nats = 0;
    int64_t bytes = 0;
    for (int64_t first = 0; first < windows.count(); first += B) {
        windows.fill(first, B, batch.tokens, batch.targets, nullptr, {});
        model.forward(stream, device_batch);
        model.evaluate_head(stream, device_batch);
        accumulate_loss(stream, &nats, model.losses(), int64_t{B} * T, first > 0);
        for (int64_t i = 0; tokenizer && i < int64_t{B} * T; ++i) {
            const int32_t target = batch.targets[i];
            if (target >= 0 && !tokenizer->is_special(static_cast<uint32_t>(target)))
                bytes += static_cast<int64_t>(tokenizer->token_bytes(static_cast<uint32_t>(target)).size());
        }
    }
    return {.nats_per_token = nats / static_cast<double>(windows.target_tokens()),
            .bits_per_byte = bytes ? nats / (std::log(2.0) * static_cast<double>(bytes))
                                   : std::numeric_limits<double>::quiet_NaN(),
            .tokens = windows.target_tokens()};
}

namespace {

constexpr int endings_per_example = 4;

/// One ending of one example, as a row of a batch.
struct Choice {
    size_t example;
    int ending;
    std::vector<int32_t> tokens;  // context and ending
    size_t context_tokens;
};

struct Example {
    int label = 0;
    double loss[endings_per_example] = {};
    int64_t tokens[endings_per_example] = {};
};

std::vector<int32_t> encode(const Tokenizer& tokenizer, const std::string& text) {
    const std::vector<uint32_t> ids = tokenizer.encode(text);
    return {ids.begin(), ids.end()};
}

int best_ending(const Example& example, bool per_token) {
    const auto score = [&](int i) {
        return per_token ? example.loss[i] / static_cast<double>(std::max<int64_t>(example.tokens[i], 1))
                         : example.loss[i];
    };
    int best = 0;
    for (int i = 1; i < endings_per_example; ++i)
        if (score(i) < score(best)) best = i;
    return best;
}

}  // namespace

HellaSwagResult evaluate_hellaswag(Stream& stream, GPT& model, const Tokenizer& tokenizer,
                                   const std::filesystem::path& jsonl, int64_t max_examples, EvaluationBatch batch) {
    const int B = model.options().B;
    const size_t T = static_cast<size_t>(model.options().T);
    const MappedFile file(jsonl);
    std::vector<Example> examples;
    std::vector<Choice> row_queue;

    const auto run_rows = [&] {
        std::fill_n(batch.tokens, static_cast<size_t>(B) * T, 0);
        std::fill_n(batch.targets, static_cast<size_t>(B) * T, -1);
        for (size_t r = 0; r < row_queue.size(); ++r) {
            const Choice& c = row_queue[r];
            for (size_t t = 0; t + 1 < c.tokens.size(); ++t) {
                batch.tokens[r * T + t] = c.tokens[t];
                if (t + 1 >= c.context_tokens) batch.targets[r * T + t] = c.tokens[t + 1];
            }
        }
        const TokenBatch device_batch{.tokens = batch.tokens, .targets = batch.targets};
        model.forward(stream, device_batch);
        model.evaluate_head(stream, device_batch);
        for (size_t r = 0; r < row_queue.size(); ++r) {
            Example& example = examples[row_queue[r].example];
            for (size_t t = 0; t < T; ++t) {
                if (batch.targets[r * T + t] < 0) continue;
                example.loss[row_queue[r].ending] += model.losses()[r * T + t];
                example.tokens[row_queue[r].ending] += 1;
            }
        }
        row_queue.clear();
    };

    std::string_view rest = file.text();
    for (int64_t line_number = 1; !rest.empty(); ++line_number) {
        if (max_examples > 0 && static_cast<int64_t>(examples.size()) == max_examples) break;
        const std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(rest.size(), line.size() + 1));
        if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
        std::string context;
        std::vector<std::string> endings;
        Example example;
        try {
            const auto json = nlohmann::json::parse(line);
            context = json.at("ctx").get<std::string>();
            endings = json.at("endings").get<std::vector<std::string>>();
            example.label = json.at("label").is_string() ? std::stoi(json.at("label").get<std::string>())
                                                         : json.at("label").get<int>();
        } catch (const std::exception& error) {
            throw Error(jsonl.string(), ", line ", line_number, " is not a HellaSwag example (", error.what(),
                        "); the published file has \"ctx\", \"endings\" and \"label\" in each line");
        }
        if (endings.size() != endings_per_example || example.label < 0 || example.label >= endings_per_example)
            throw Error(jsonl.string(), ", line ", line_number, " has ", endings.size(), " endings and the label ",
                        example.label, "; an example has 4 endings and a label from 0 to 3");
        const std::vector<int32_t> context_ids = encode(tokenizer, context);
        examples.push_back(example);
        for (int i = 0; i < endings_per_example; ++i) {
            std::vector<int32_t> ending = encode(tokenizer, " " + endings[static_cast<size_t>(i)]);
            if (ending.empty()) ending.push_back(0);
            if (ending.size() > T) ending.resize(T);
            Choice choice{.example = examples.size() - 1, .ending = i, .tokens = context_ids,
                          .context_tokens = context_ids.size()};
            // T inputs predict T tokens: at most T + 1 tokens, the oldest context given up first.
            const size_t room = T + 1 - ending.size();
            if (choice.tokens.size() > room)
                choice.tokens.erase(choice.tokens.begin(), choice.tokens.end() - static_cast<std::ptrdiff_t>(room));
            choice.context_tokens = choice.tokens.size();
            choice.tokens.insert(choice.tokens.end(), ending.begin(), ending.end());
            row_queue.push_back(std::move(choice));
            if (row_queue.size() == static_cast<size_t>(B)) run_rows();
        }
    }
    if (!row_queue.empty()) run_rows();
    if (examples.empty()) throw Error(jsonl.string(), " holds no HellaSwag example; check the path");

    HellaSwagResult result{.examples = static_cast<int64_t>(examples.size())};
    for (const Example& example : examples) {
        result.accuracy += best_ending(example, false) == example.label;
        result.accuracy_normalised += best_ending(example, true) == example.label;
    }
    result.accuracy /= static_cast<double>(examples.size());
    result.accuracy_normalised /= static_cast<double>(examples.size());
    return result;
}

}  // namespace train_gpt
