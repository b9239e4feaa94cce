#include "training/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/printable.h"
#include "base/random.h"

namespace train_gpt {

int32_t draw_token(std::span<const float> logits, const SamplingOptions& options, double uniform) {
    const auto more_likely = [&](int32_t a, int32_t b) {
        const float la = logits[static_cast<size_t>(a)], lb = logits[static_cast<size_t>(b)];
        return la > lb || (la == lb && a < b);
    };
    std::vector<int32_t> ids(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
    if (options.temperature <= 0) return *std::min_element(ids.begin(), ids.end(), more_likely);

    size_t kept = ids.size();
    if (options.top_k > 0) kept = std::min(kept, static_cast<size_t>(options.top_k));
    // Sorting is needed only where the draw is restricted to the likeliest tokens.
    if (kept < ids.size() || options.top_p < 1) {
        std::partial_sort(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(kept), ids.end(),
                          more_likely);
        ids.resize(kept);
    }
    const double highest = *std::max_element(logits.begin(), logits.end());
    std::vector<double> weights(ids.size());
    double total = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
        weights[i] =
            std::exp((logits[static_cast<size_t>(ids[i])] - highest) / options.temperature);
        total += weights[i];
    }
    if (options.top_p < 1) {
        double sum = 0;
        size_t n = 0;
        while (n < weights.size() && sum < options.top_p * total) sum += weights[n++];
        weights.resize(n);
        total = sum;
    }
    double remaining = uniform * total;
    for (size_t i = 0; i < weights.size(); ++i) {
        remaining -= weights[i];
        if (remaining < 0) return ids[i];
    }
    return ids[weights.size() - 1];
}

std::string sample_text(const SampledModel& model, const std::string& prompt,
                        const SamplingOptions& options, uint64_t sample,
                        const std::function<void(std::string_view)>& emit,
                        const std::function<bool()>& stop) {
    TokenGenerator& generator = model.generator;
    const Tokenizer& tokenizer = model.tokenizer;
    const size_t n_ctx = static_cast<size_t>(generator.context());
    std::vector<int32_t> context;
    for (uint32_t id : tokenizer.encode_beginning(prompt)) {
        if (id >= generator.vocab_size())
            throw Error("the tokenizer gives the prompt the token ", id,
                        ", but the model's vocabulary has only ", generator.vocab_size(),
                        "; use the tokenizer that the model was trained with");
        context.push_back(static_cast<int32_t>(id));
    }

    // A model may have more rows than its tokenizer has tokens, because its vocabulary is rounded
    // up; the extra rows stand for no text.
    const auto logits = [&] {
        const std::span<const float> all = generator.logits();
        return all.first(std::min<size_t>(all.size(), tokenizer.vocab_size()));
    };
    const auto is_end = [&, end = tokenizer.end_of_text()](int32_t token) {
        return (end && token == static_cast<int32_t>(*end)) ||
               std::ranges::find(options.ends, token) != options.ends.end();
    };
    const RandomStream random(options.seed, RandomPurpose::sampling, 0, sample);
    std::string text;
    size_t emitted = 0;
    size_t unfed = context.size();
    generator.reset();
    for (int i = 0; i < options.max_tokens && !(stop && stop()); ++i) {
        if (static_cast<size_t>(generator.position()) + unfed > n_ctx) {
            generator.reset();
            unfed = std::min(context.size(), std::max<size_t>(n_ctx / 2, 1));
        }
        generator.feed(model.stream, std::span(context).last(unfed));
        const double uniform = random.uniform(static_cast<uint64_t>(i));
        int32_t token = draw_token(logits(), options, uniform);
        if (options.agree) token = options.agree(token);
        if (is_end(token)) break;
        context.push_back(token);
        unfed = 1;
        text += tokenizer.token_bytes(static_cast<uint32_t>(token));
        const size_t whole = text.size() - unfinished_utf8(text);
        if (emit && whole > emitted) emit(std::string_view(text).substr(emitted, whole - emitted));
        emitted = std::max(emitted, whole);
    }
    if (emit && text.size() > emitted) emit(std::string_view(text).substr(emitted));
    return text;
}

}  // namespace train_gpt
