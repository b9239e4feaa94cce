#include "training/evaluation.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>

#include "test/dataloader/shard_files.h"
#include "test/model/tiny_model.h"
#include "test/sorted_json.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

/// Words of a few letters.
std::string random_words(int64_t words) {
    std::string text;
    for (; words > 0; --words) {
        for (int64_t n = random_int(1, 4); n > 0; --n)
            text += static_cast<char>('a' + random_int(0, 4));
        text += words > 1 ? " " : "";
    }
    return text;
}

Tokenizer small_tokenizer() {
    const std::string text = random_words(500);
    return Tokenizer::train(std::vector<std::string_view>{text}, 300);
}

/// A model with random weights, large enough that its predictions differ; the same for the same
/// seed.
TinyModel random_model(int64_t vocab_size, int B, int T, uint64_t seed) {
    TinyModel model(
        gpt2.spec({.n_layer = 2, .n_head = 2, .n_embd = 16, .n_ctx = 40, .vocab_size = vocab_size}),
        B, T, DType::fp32);
    model.parameters->state.initialize(seed);
    for (int i = 0; i < model.count(); ++i) {
        std::vector<float> values(static_cast<size_t>(model.parameter(i).numel()));
        model.parameters->state.get(i, values);
        for (float& value : values) value *= 12;
        model.parameters->state.set(i, values);
    }
    return model;
}

/// A batch that owns its memory.
struct Batch {
    explicit Batch(const TinyModel& model)
        : arena(model.stream.device, planned(model)), batch(arena, shape_of(model)) {}
    operator const EvaluationBatch&() { return batch; }

  private:
    static BatchShape shape_of(const TinyModel& model) {
        return Pipeline(*model.model).batch_shape();
    }
    static Arena planned(const TinyModel& model) {
        Arena plan = Arena::counting(model.stream.device);
        EvaluationBatch(plan, shape_of(model));
        return plan;
    }

    Arena arena;
    EvaluationBatch batch;
};

/// −log of the probability of `token` after what the generator was fed.
double loss_of(const Generator& generator, int32_t token) {
    const auto logits = generator.logits();
    const double highest = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (float logit : logits) sum += std::exp(logit - highest);
    return std::log(sum) + highest - logits[static_cast<size_t>(token)];
}

}  // namespace

TEST_CASE("validation loss is the mean over all targets, whatever the batch", "[evaluation]") {
    const Tokenizer tokenizer = small_tokenizer();
    const uint32_t V = tokenizer.vocab_size();
    const int T = static_cast<int>(random_int(3, 20));
    const uint64_t seed = test_rng()();
    const TemporaryDirectory directory;
    std::vector<std::vector<uint32_t>> streams;
    for (int i = 0; i < 3; ++i) {
        streams.push_back(random_tokens(random_int(2, 90), V));
        for (uint32_t& token : streams.back())
            if (random_int(0, 9) == 0) token = *tokenizer.end_of_text();
    }
    const auto shards =
        std::make_shared<TokenShards>(write_shards(directory.path(), streams, V), V);

    // Token by token through the key-value cache: every window of T targets begins with an empty
    // context.
    TinyModel naive = random_model(V, 1, T, seed);
    double nats = 0, bytes = 0;
    int64_t targets = 0;
    for (const auto& stream : streams)
        for (size_t t = 0; t + 1 < stream.size(); ++t) {
            if (t % static_cast<size_t>(T) == 0) naive.generator->reset();
            const auto input = static_cast<int32_t>(stream[t]);
            naive.generator->feed(naive.stream, {&input, 1});
            nats += loss_of(*naive.generator, static_cast<int32_t>(stream[t + 1]));
            if (stream[t + 1] != *tokenizer.end_of_text())
                bytes += static_cast<double>(tokenizer.token_bytes(stream[t + 1]).size());
            ++targets;
        }
    const ValidationWindows windows(shards, T, 0);
    for (int B : {1, 2, 5}) {
        TinyModel m = random_model(V, B, T, seed);
        Batch batch(m);
        const Mesh alone;
        const EvaluatedModel on{m.stream, *m.model, batch, alone};
        const ValidationResult result = evaluate(on, windows, &tokenizer);
        CAPTURE(B, T, targets);
        CHECK(result.tokens == targets);
        CHECK(result.nats_per_token == Approx(nats / static_cast<double>(targets)).epsilon(1e-5));
        CHECK(result.bits_per_byte == Approx(nats / std::log(2.0) / bytes).epsilon(1e-5));
        CHECK(std::isnan(evaluate(on, windows, nullptr).bits_per_byte));
        CHECK(evaluate(on, ValidationWindows(shards, T, 1), nullptr).tokens == 1);
    }
}

namespace {

struct EndingScore {
    double nats = 0;
    int64_t tokens = 0;
};

/// The ending after as much of the context as fits into T tokens with it, token by token.
EndingScore naive_score(TinyModel& model, const Tokenizer& tokenizer, size_t T,
                        const std::string& context, const std::string& text) {
    const auto ending = tokenizer.encode(" " + text);
    const size_t scored = std::min(ending.size(), T);
    auto given = tokenizer.encode(context);
    if (given.empty()) given.push_back(*tokenizer.end_of_text());
    if (given.size() > T + 1 - scored)
        given.erase(given.begin(), given.end() - static_cast<std::ptrdiff_t>(T + 1 - scored));
    model.generator->reset();
    for (uint32_t token : given) {
        const auto input = static_cast<int32_t>(token);
        model.generator->feed(model.stream, {&input, 1});
    }
    EndingScore score{0, static_cast<int64_t>(scored)};
    for (size_t t = 0; t < scored; ++t) {
        const auto token = static_cast<int32_t>(ending[t]);
        score.nats += loss_of(*model.generator, token);
        if (t + 1 < scored) model.generator->feed(model.stream, {&token, 1});
    }
    return score;
}

}  // namespace

TEST_CASE("HellaSwag scores every ending as a continuation of its context", "[evaluation]") {
    const Tokenizer tokenizer = small_tokenizer();
    const uint64_t seed = test_rng()();
    const size_t T = 24;
    TinyModel naive = random_model(tokenizer.vocab_size(), 1, static_cast<int>(T), seed);
    const TemporaryDirectory directory;
    std::string jsonl;
    std::vector<double> losses;  // of all endings
    std::vector<int64_t> tokens;
    int right = 0, right_per_token = 0;
    const int examples = 12;
    for (int i = 0; i < examples; ++i) {
        // Contexts from none to more than T tokens, and endings of more than T tokens too.
        const std::string context = i == 0 ? "" : random_words(random_int(1, 25));
        std::vector<std::string> endings;
        double loss[4], per_token[4];
        for (int e = 0; e < 4; ++e) {
            endings.push_back(random_words(i == 1 ? 40 : random_int(1, 8)));
            const EndingScore score = naive_score(naive, tokenizer, T, context, endings.back());
            loss[e] = score.nats;
            per_token[e] = score.nats / static_cast<double>(score.tokens);
            losses.push_back(score.nats);
            tokens.push_back(score.tokens);
        }
        // In most examples, the ending that one of the two scores selects.
        const auto label =
            std::array<int64_t, 3>{std::min_element(loss, loss + 4) - loss,
                                   std::min_element(per_token, per_token + 4) - per_token,
                                   random_int(0, 3)}[static_cast<size_t>(i % 3)];
        right += std::min_element(loss, loss + 4) - loss == label;
        right_per_token += std::min_element(per_token, per_token + 4) - per_token == label;
        SortedJson line{{"ind", i}, {"ctx", context}, {"endings", endings}, {"label", label}};
        if (random_int(0, 1)) line["label"] = std::to_string(label);
        jsonl += line.dump() + (random_int(0, 1) ? "\n" : "\r\n\n");
    }
    write(directory / "h.jsonl", jsonl);
    const HellaSwag hellaswag(directory / "h.jsonl", tokenizer, 0);
    CHECK(hellaswag.size() == examples);
    for (int B : {1, 3, 4, 8}) {
        TinyModel m = random_model(tokenizer.vocab_size(), B, static_cast<int>(T), seed);
        Batch batch(m);
        const Mesh alone;
        const EvaluatedModel on{m.stream, *m.model, batch, alone};
        CAPTURE(B);
        for (size_t first = 0; first < losses.size(); first += static_cast<size_t>(B)) {
            const size_t count = std::min(static_cast<size_t>(B), losses.size() - first);
            const auto scores = hellaswag.score(on, first, count);
            REQUIRE(scores.size() == count);
            for (size_t r = 0; r < count; ++r) {
                CAPTURE(first + r);
                CHECK(scores[r].tokens == tokens[first + r]);
                CHECK(scores[r].nats == Approx(losses[first + r]).epsilon(1e-3).margin(1e-3));
            }
        }
        const HellaSwagResult result = hellaswag.evaluate(on);
        CHECK(result.examples == examples);
        CHECK(result.accuracy == Approx(right / double{examples}));
        CHECK(result.accuracy_normalised == Approx(right_per_token / double{examples}));
    }
    CHECK(HellaSwag(directory / "h.jsonl", tokenizer, 5).size() == 5);

    // A model with fewer tokens than the tokenizer cannot be scored.
    TinyModel small = random_model(100, 2, static_cast<int>(T), seed);
    Batch batch(small);
    const std::string error = error_of([&] {
        hellaswag.evaluate({small.stream, *small.model, batch, Mesh()});
    });
    CHECK(contains(error, "the tokenizer"));
}

TEST_CASE("a malformed line of HellaSwag is named with file, number and fault", "[evaluation]") {
    const Tokenizer tokenizer = small_tokenizer();
    const TemporaryDirectory directory;
    const std::string path = directory / "h.jsonl";
    const std::string good = R"({"ctx": "a", "endings": ["a", "b", "c", "d"], "label": 2})";
    const auto refused = [&](const std::string& line, const std::string& fault) {
        write(path, good + "\n\n" + line + "\n" + good + "\n");
        const std::string error = error_of([&] { HellaSwag(path, tokenizer, 0); });
        CAPTURE(line, error);
        CHECK(contains(error, path + ", line 3"));
        CHECK(contains(error, fault));
    };
    refused("{", "JSON");
    refused("[1]", "object");
    refused("\xff\xfe", "JSON");
    refused(R"({"endings": ["a", "b", "c", "d"], "label": 2})", "\"ctx\"");
    refused(R"({"ctx": 1, "endings": ["a", "b", "c", "d"], "label": 2})", "\"ctx\"");
    refused(R"({"ctx": "a", "label": 2})", "\"endings\"");
    refused(R"({"ctx": "a", "endings": ["a", "b", "c"], "label": 2})", "\"endings\"");
    refused(R"({"ctx": "a", "endings": ["a", "b", "c", 4], "label": 2})", "\"endings\"");
    refused(R"({"ctx": "a", "endings": ["a", "b", "c", "d"]})", "\"label\"");
    for (const char* label : {"4", "-1", "\"\"", "\"1x\"", "1.5", "null", "1099511627776"})
        refused(
            R"({"ctx": "a", "endings": ["a", "b", "c", "d"], "label": )" + std::string(label) + "}",
            "\"label\"");
    write(path, "\n\n");
    CHECK(contains(error_of([&] { HellaSwag(path, tokenizer, 0); }), path));
    CHECK(contains(error_of([&] { HellaSwag(directory / "none", tokenizer, 0); }), "none"));
}
