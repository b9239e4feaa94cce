#include "training/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include <omp.h>

#include "model/families/qwen3.h"
#include "test/catch.h"
#include "test/model/tiny_model.h"
#include "test/random.h"

using namespace train_gpt;

namespace {

/// Logits with ties, and with tokens that cannot be drawn.
std::vector<float> random_logits(size_t n) {
    std::vector<float> logits = random_normal(n, 2.0f);
    for (float& logit : logits) {
        if (random_int(0, 3) == 0) logit = std::round(logit);
        if (random_int(0, 9) == 0) logit = -std::numeric_limits<float>::infinity();
    }
    logits[static_cast<size_t>(random_int(0, static_cast<int64_t>(n) - 1))] = 0;
    return logits;
}

/// The contract of draw_token, step by step: the probability of each token.
std::vector<double> reference(const std::vector<float>& logits, const SamplingOptions& o) {
    std::vector<size_t> rank(logits.size());
    std::iota(rank.begin(), rank.end(), size_t{0});
    std::stable_sort(rank.begin(), rank.end(),
                     [&](size_t a, size_t b) { return logits[a] > logits[b]; });
    if (o.top_k > 0) rank.resize(std::min(rank.size(), static_cast<size_t>(o.top_k)));
    std::vector<double> p(logits.size(), 0.0);
    if (o.temperature == 0) {
        p[rank[0]] = 1;
        return p;
    }
    double total = 0;
    for (size_t i : rank)
        total += p[i] = std::exp((double{logits[i]} - double{logits[rank[0]]}) / o.temperature);
    if (o.top_p < 1) {
        double sum = 0;
        for (size_t i : rank) {
            if (sum >= o.top_p * total) p[i] = 0;
            sum += p[i];
        }
        total = sum;
    }
    for (double& x : p) x /= total;
    return p;
}

/// A vocabulary of 256 bytes, 43 merges and <|endoftext|>.
Tokenizer sampled_tokenizer() {
    const std::string_view text =
        "the cat sat on the mat and the rat ate the cat; é ü ß 中文 the end of that";
    return Tokenizer::train(std::vector<std::string_view>{text, text}, 300);
}

TinyModel random_model(int64_t vocab_size, int n_ctx, const Family& family = gpt2) {
    TinyModel model(family.spec({.n_layer = 1,
                                 .n_head = 2,
                                 .n_embd = 16,
                                 .n_ctx = n_ctx,
                                 .vocab_size = vocab_size,
                                 .head_size = 8}),
                    1, 2, DType::fp32);
    for (int i = 0; i < model.count(); ++i)
        model.parameters->state.set(
            i, random_normal(static_cast<size_t>(model.parameter(i).numel()), 0.3f));
    return model;
}

/// Whether a UTF-8 character begins before the boundary and continues after it.
bool character_across(const std::string& text, size_t border) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    for (size_t start = border - std::min<size_t>(border, 3); start < border; ++start) {
        const size_t length = byte(start) >= 0xf0   ? 4
                              : byte(start) >= 0xe0 ? 3
                              : byte(start) >= 0xc0 ? 2
                                                    : 1;
        if (start + length <= border || start + length > text.size()) continue;
        bool whole = true;
        for (size_t i = start + 1; i < start + length; ++i)
            whole = whole && (byte(i) & 0xc0) == 0x80;
        if (whole) return true;
    }
    return false;
}

}  // namespace

TEST_CASE(
    "tokens are drawn with the probabilities of the softmax after temperature, top-k and top-p",
    "[sampling]") {
    for (int round = 0; round < 12; ++round) {
        const auto logits = random_logits(static_cast<size_t>(random_int(1, 60)));
        SamplingOptions o;
        o.temperature = std::exp(random_normal(1)[0]);
        if (random_int(0, 1)) o.top_k = static_cast<int>(random_int(1, 70));
        if (random_int(0, 1)) o.top_p = std::uniform_real_distribution<>(0.05, 0.99)(test_rng());
        CAPTURE(logits, o.temperature, o.top_k, o.top_p);
        const auto p = reference(logits, o);
        // Each token owns an interval of [0, 1) as long as its probability, so among n evenly
        // spaced points it gets n·p, give or take one at its ends.
        constexpr int n = 4000;
        std::vector<int> count(logits.size());
        for (int i = 0; i < n; ++i)
            ++count[static_cast<size_t>(draw_token(logits, o, (i + 0.5) / n))];
        for (size_t token = 0; token < logits.size(); ++token) {
            CAPTURE(token, count[token], p[token]);
            CHECK(std::abs(count[token] - n * p[token]) <= 1.01);
            if (p[token] == 0) CHECK(count[token] == 0);
        }
    }
}

TEST_CASE("of equally likely tokens top-p and top-k keep those of the lowest ids, and no more",
          "[sampling]") {
    for (int n : {2, 4, 8, 64, 256}) {
        const auto level = static_cast<float>(random_int(-3, 3));
        const std::vector<float> logits(static_cast<size_t>(n), level);
        const int kept = static_cast<int>(random_int(1, n - 1));
        // Each token has the probability 1/n, a power of two: the first `kept` have exactly top_p.
        const SamplingOptions by_probability{.temperature = 0.7,
                                             .top_p = kept / static_cast<double>(n)},
            by_number{.temperature = 0.7, .top_k = kept};
        CAPTURE(n, kept, level);
        for (const SamplingOptions& o : {by_probability, by_number})
            for (int i = 0; i < kept; ++i)
                for (double within : {0x1p-30, 0.5, 1 - 0x1p-30})
                    CHECK(draw_token(logits, o, (i + within) / kept) == i);
    }
}

TEST_CASE("temperature 0, top-k 1 and a tiny top-p take the likeliest token, of equals the first",
          "[sampling]") {
    for (int round = 0; round < 20; ++round) {
        auto logits = random_logits(50);
        const float highest = *std::max_element(logits.begin(), logits.end());
        logits[static_cast<size_t>(random_int(0, 49))] = highest;
        const auto first = std::find(logits.begin(), logits.end(), highest) - logits.begin();
        for (double uniform : {0.0, 0.5, std::nextafter(1.0, 0.0)}) {
            CHECK(draw_token(logits, {.temperature = 0}, uniform) == first);
            CHECK(draw_token(logits, {.temperature = 2, .top_k = 1}, uniform) == first);
            CHECK(draw_token(logits, {.temperature = 2, .top_p = 1e-9}, uniform) == first);
        }
    }
    const std::vector<float> two{-std::numeric_limits<float>::infinity(), 1.0f};
    for (double uniform : {0.0, std::nextafter(1.0, 0.0)})
        CHECK(draw_token(two, {.temperature = 1}, uniform) == 1);
}

TEST_CASE("prompts of any length fit into the memory that was planned, with any number of threads",
          "[sampling]") {
    const int threads = omp_get_max_threads();
    for (const int team : {1, 3, 16, 32}) {
        omp_set_num_threads(team);
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            const int heads = static_cast<int>(random_int(1, 12)), length = 70;
            TinyModel model(gpt2.spec({.n_layer = 1,
                                       .n_head = heads,
                                       .n_embd = heads * 64,
                                       .n_ctx = length,
                                       .vocab_size = 50}),
                            1, 2, dtype);
            model.stream.scratch_bytes =
                model.generator->scratch_bytes(model.stream);  // not what training needs
            const std::vector<int32_t> prompt(length, 7);
            for (const size_t n : {1, 2, 3, 4, 5, 64, 67, length}) {
                CAPTURE(team, name_of(dtype), heads, n);
                model.generator->reset();
                model.generator->feed(model.stream, {prompt.data(), n});
                CHECK(std::ranges::all_of(model.generator->logits(),
                                          [](float logit) { return std::isfinite(logit); }));
            }
        }
    }
    omp_set_num_threads(threads);
}

TEST_CASE("a sample is a function of seed and number, and comes in whole characters",
          "[sampling]") {
    const Tokenizer tokenizer = sampled_tokenizer();
    TinyModel m = random_model(tokenizer.vocab_size(), 24);
    const auto sample = [&](const std::string& prompt, SamplingOptions o, uint64_t number,
                            const std::function<void(std::string_view)>& emit = {}) {
        o.max_tokens = 60;  // more than n_ctx
        return sample_text({m.stream, *m.generator, tokenizer}, prompt, o, number, emit);
    };
    const SamplingOptions o{.temperature = 1.2, .seed = test_rng()()};
    // Several at a time: a single one may end immediately, and so equal another.
    const auto samples = [&](const std::string& prompt, const SamplingOptions& options,
                             uint64_t first) {
        std::string text;
        for (uint64_t number = first; number < first + 8; ++number)
            text += sample(prompt, options, number) + "|";
        return text;
    };
    const std::string prompt = "the cat";
    const std::string text = samples(prompt, o, 1);
    CHECK(samples(prompt, o, 1) == text);
    SamplingOptions other = o;
    other.seed += 1;
    std::set<std::string> texts{text, samples(prompt, o, 9), samples(prompt, other, 1)};
    CHECK(texts.size() == 3);
    CHECK(sample("", o, 1) == sample("", o, 1));
    std::string long_prompt;
    for (int i = 0; i < 10; ++i) long_prompt += "the rat ";
    CHECK(samples(long_prompt, o, 1) != text);

    for (uint64_t number = 0; number < 4; ++number) {
        std::vector<std::string> pieces;
        const std::string whole = sample("\xff\xe2\x82 x", o, number, [&](std::string_view piece) {
            pieces.emplace_back(piece);
        });
        std::string joined;
        for (const std::string& piece : pieces) joined += piece;
        CHECK(joined == whole);
        size_t border = 0;
        for (size_t i = 0; i + 1 < pieces.size(); ++i) {
            CHECK_FALSE(pieces[i].empty());
            border += pieces[i].size();
            CAPTURE(whole, border);
            CHECK_FALSE(character_across(whole, border));
        }
    }
}

TEST_CASE("a sample beyond n_ctx is what a model without a cache writes from the newer half",
          "[sampling]") {
    const Tokenizer tokenizer = sampled_tokenizer();
    const size_t V = tokenizer.vocab_size();
    int compared = 0;
    while (compared < 8) {
        const auto n_ctx = static_cast<size_t>(random_int(3, 12));
        const Family& family = compared % 2 == 0 ? gpt2 : qwen3;
        TinyModel m = random_model(static_cast<int64_t>(V), static_cast<int>(n_ctx), family);
        // Large, so that the same token at another position is a different input.
        if (!m.generator->spec().is_rotary())
            m.parameters->state.set(m.parameters->index_of("wpe.weight"),
                                    random_normal(n_ctx * 16, 2.0f));
        std::string prompt;  // shorter than n_ctx or longer
        for (int64_t words = random_int(1, 12); words > 0; --words)
            prompt +=
                std::vector{"the ", "cat ", "rat; ", "x"}[static_cast<size_t>(random_int(0, 3))];
        constexpr int max_tokens = 30;

        std::vector<int32_t> context;
        for (uint32_t id : tokenizer.encode(prompt)) context.push_back(static_cast<int32_t>(id));
        std::string expected;
        size_t first = 0;
        bool is_clear = true;
        for (int i = 0; i < max_tokens; ++i) {
            if (context.size() - first > n_ctx) first = context.size() - n_ctx / 2;
            m.generator->reset();
            for (size_t t = first; t < context.size(); ++t)
                m.generator->feed(m.stream, {&context[t], 1});
            auto logits = std::vector(m.generator->logits().begin(), m.generator->logits().end());
            const auto best = std::max_element(logits.begin(), logits.end());
            const float highest = *best;
            const auto token = static_cast<uint32_t>(best - logits.begin());
            *best = -std::numeric_limits<float>::infinity();
            is_clear = is_clear && highest - *std::ranges::max_element(logits) > 1e-3f;
            if (token == *tokenizer.end_of_text()) break;
            context.push_back(static_cast<int32_t>(token));
            expected += tokenizer.token_bytes(token);
        }
        // If two tokens are equally likely within rounding, either may be drawn.
        if (!is_clear || context.size() < 2 * n_ctx) continue;
        CAPTURE(n_ctx, prompt);
        CHECK(sample_text({m.stream, *m.generator, tokenizer}, prompt,
                          {.max_tokens = max_tokens, .temperature = 0}, 0) == expected);
        ++compared;
    }
}

TEST_CASE("a sample ends at the end of the document, and rows beyond the tokenizer never come",
          "[sampling]") {
    const Tokenizer tokenizer = sampled_tokenizer();
    const int64_t V = 500;
    TinyModel m = random_model(V, 24);
    // ln_f gives a constant vector, so wte alone determines the logits.
    const auto set = [&](const char* name, const std::function<float(int64_t)>& value) {
        const int i = m.parameters->index_of(name);
        std::vector<float> values(static_cast<size_t>(m.parameter(i).numel()));
        for (size_t k = 0; k < values.size(); ++k) values[k] = value(static_cast<int64_t>(k));
        m.parameters->state.set(i, values);
    };
    set("ln_f.weight", [](int64_t) { return 0.0f; });
    set("ln_f.bias", [](int64_t k) { return k == 0 ? 1.0f : 0.0f; });
    const auto logits = [&](const std::function<float(int64_t)>& of_token) {
        set("wte.weight", [&](int64_t k) { return k % 16 == 0 ? of_token(k / 16) : 0.0f; });
    };
    const auto sample = [&](double temperature) {
        return sample_text({m.stream, *m.generator, tokenizer}, "the",
                           {.max_tokens = 50, .temperature = temperature}, 0);
    };
    const int64_t end = static_cast<int64_t>(*tokenizer.end_of_text());
    logits([&](int64_t token) { return token == 97 ? 20.0f : token >= 300 ? 100.0f : 0.0f; });
    CHECK(sample(0).size() == 50);
    CHECK(sample(1).size() >= 50);
    logits([&](int64_t token) { return token == end ? 50.0f : 0.0f; });
    CHECK(sample(0).empty());
    CHECK(sample(1).empty());
    // Of several tokens that end a text, any does.
    const std::vector<int64_t> ends{-1, random_int(0, 96), 97, 1 << 30};
    logits([&](int64_t token) { return token == 97 ? 50.0f : 0.0f; });
    for (const double temperature : {0.0, 1.0}) {
        CHECK(sample(temperature).size() == 50);
        CHECK(sample_text({m.stream, *m.generator, tokenizer}, "the",
                          {.max_tokens = 50, .temperature = temperature, .ends = ends}, 0)
                  .empty());
    }
}
