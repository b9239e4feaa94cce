// Looking inside a model: the weights of attention, what is recorded of a text, and the page.
#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "test/catch.h"
#include "test/model/random_spec.h"
#include "test/model/tiny_model.h"
#include "test/random.h"
#include "test/text.h"
#include "training/look/attention_text.h"
#include "training/look/attention_weights.h"
#include "training/look/inside.h"
#include "training/look/look_page.h"

using namespace train_gpt;

namespace {

constexpr double unit = 0x1p-24;  // of fp32

/// The weights in float64, and how far fp32 may be from them: relatively, for each row.
struct Reference {
    std::vector<double> weights;  // as attention_weights()
    std::vector<double> bound;    // [H, T]
};

Reference reference_weights(const AttentionWeightsShape& s, const std::vector<float>& q,
                            const std::vector<float>& k, const std::vector<float>& sinks) {
    Reference reference;
    for (int h = 0; h < s.H; ++h)
        for (int t = 0; t < s.T; ++t) {
            std::vector<double> row(static_cast<size_t>(s.T) + 1);
            double total = 0, magnitude = 0;
            if (!sinks.empty()) {
                const double sink = sinks[static_cast<size_t>(h)];
                total = row[0] = std::exp(sink), magnitude = std::abs(sink);
            }
            for (int j = 0; j <= t; ++j) {
                if (s.window > 0 && t - j >= s.window) continue;
                double dot = 0, sum = 0;
                for (int d = 0; d < s.D; ++d) {
                    const double
                        a = q[static_cast<size_t>((t * s.H + h) * s.D + d)],
                        b = k[static_cast<size_t>((j * s.H_kv + h / (s.H / s.H_kv)) * s.D + d)];
                    dot += a * b, sum += std::abs(a * b);
                }
                dot /= std::sqrt(s.D), sum /= std::sqrt(s.D);
                if (s.softcap > 0) dot = s.softcap * std::tanh(dot / s.softcap);
                total += row[static_cast<size_t>(j) + 1] = std::exp(dot);
                magnitude = std::max(magnitude, sum);
            }
            for (double& weight : row) weight /= total;
            reference.weights.insert(reference.weights.end(), row.begin(), row.end());
            // A score's error is (D + 4) roundings of its terms, and those of tanh; a weight has
            // the errors of two scores, of exp and of the sum.
            reference.bound.push_back(
                unit * (2 * (s.D + 8) * magnitude + 8 * double{s.softcap} + 2 * s.T + 16));
        }
    return reference;
}

/// The elements of a tensor on the device.
std::vector<float> values_of(Stream& stream, Tensor tensor) {
    stream.synchronize();
    std::vector<float> values(static_cast<size_t>(tensor.numel()));
    if (tensor.dtype == DType::fp32) {
        copy_now(stream.device, values.data(), tensor.data, tensor.bytes());
        return values;
    }
    std::vector<bf16> halves(values.size());
    copy_now(stream.device, halves.data(), tensor.data, tensor.bytes());
    for (size_t i = 0; i < values.size(); ++i) values[i] = to_float(halves[i]);
    return values;
}

struct LookedModel {
    DecoderSpec spec = random_spec();
    int T = static_cast<int>(random_int(1, spec.n_ctx));
    TinyModel model;
    std::vector<int32_t> tokens;

    explicit LookedModel(DType dtype, int chunk)
        : model(spec, 1, T, dtype, Recompute::none, {.chunk = chunk}) {
        model.parameters->state.initialize(static_cast<uint64_t>(random_int(1, 1 << 20)));
        for (int i = 0; i < model.count(); ++i) {
            std::vector<float> values(static_cast<size_t>(model.parameter(i).numel()));
            model.parameters->state.get(i, values);
            const std::vector<float> noise = random_normal(values.size(), 0.3f);
            for (size_t j = 0; j < values.size(); ++j) values[j] += noise[j];
            model.parameters->state.set(i, values);
        }
        for (int t = 0; t < T; ++t)
            tokens.push_back(static_cast<int32_t>(random_int(0, spec.vocab_size - 1)));
    }
};

double norm_of(const std::vector<float>& values, size_t row, size_t columns,
               const std::vector<float>* less = nullptr) {
    double squares = 0;
    for (size_t i = row * columns; i < (row + 1) * columns; ++i) {
        const double value = values[i] - (less ? double{(*less)[i]} : 0.0);
        squares += value * value;
    }
    return std::sqrt(squares);
}

/// The levels that packed_levels() packed.
std::vector<int> unpacked(const std::string& text) {
    const std::string letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    std::vector<int> levels;
    for (size_t i = 0; i < text.size(); ++i)
        if (text[i] == '.')
            levels.insert(levels.end(), letters.find(text[++i]) + 1, 0);
        else
            levels.push_back(static_cast<int>(letters.find(text[i])));
    return levels;
}

/// Layers of random queries and keys.
Inside random_inside(int T, int layers, int heads, int D, bool sinks) {
    Inside inside;
    const auto n = static_cast<size_t>(T);
    for (int t = 0; t < T; ++t) {
        TokenInside& token = inside.tokens.emplace_back();
        token.token = static_cast<int32_t>(random_int(0, 256));
        if (t == 0) continue;
        token.loss = static_cast<float>(random_int(0, 1000)) / 100;
        token.rank = random_int(0, 99);
        token.expected = {{static_cast<int32_t>(random_int(0, 256)), 0.25f}};
    }
    for (int l = 0; l < layers; ++l) {
        LayerInside& layer = inside.layers.emplace_back();
        layer.spec.n_head = heads, layer.spec.n_kv_head = heads, layer.spec.head_size = D;
        layer.q = random_normal(n * static_cast<size_t>(heads * D), 2);
        layer.k = random_normal(n * static_cast<size_t>(heads * D), 2);
        if (sinks) layer.sinks = random_normal(static_cast<size_t>(heads));
        layer.norm = random_normal(n), layer.attention_norm = layer.norm,
        layer.mlp_norm = layer.norm;
    }
    inside.norm = random_normal(n);
    inside.next = {{1, 0.5f}};
    return inside;
}

nlohmann::json data_of(const std::string& page) {
    const std::string begin = "<script type=\"application/json\" id=\"data\">";
    const size_t at = page.find(begin) + begin.size();
    return nlohmann::json::parse(page.substr(at, page.find("</script>", at) - at));
}

}  // namespace

TEST_CASE("attention's weights are those of float64, with windows, caps and sinks", "[look]") {
    for (int round = 0; round < 40; ++round) {
        AttentionWeightsShape s;
        s.T = static_cast<int>(random_int(1, 40));
        s.H_kv = static_cast<int>(random_int(1, 3));
        s.H = s.H_kv * static_cast<int>(random_int(1, 3));
        s.D = static_cast<int>(random_int(1, 48));
        s.window = random_int(0, 1) ? static_cast<int>(random_int(1, 45)) : 0;
        s.softcap = random_int(0, 1) ? 3.0f : 0.0f;
        const std::vector<float> q = random_normal(static_cast<size_t>(s.T * s.H * s.D), 1.5f),
                                 k = random_normal(static_cast<size_t>(s.T * s.H_kv * s.D), 1.5f),
                                 sinks = random_int(0, 1)
                                             ? random_normal(static_cast<size_t>(s.H), 2)
                                             : std::vector<float>{};
        CAPTURE(s.T, s.H, s.H_kv, s.D, s.window, s.softcap, sinks.size());
        const std::vector<float> ours = attention_weights(s, q, k, sinks);
        const Reference reference = reference_weights(s, q, k, sinks);
        REQUIRE(ours.size() == reference.weights.size());
        const auto columns = static_cast<size_t>(s.T) + 1;
        for (size_t i = 0; i < ours.size(); ++i) {
            const double expected = reference.weights[i];
            CAPTURE(i, ours[i], expected);
            REQUIRE(std::abs(ours[i] - expected) <= reference.bound[i / columns] * expected);
        }
    }
}

TEST_CASE("the recorded queries and keys are the ones with which attention computed its output",
          "[look][cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (int round = 0; round < 8; ++round) {
            LookedModel r(dtype, static_cast<int>(random_int(1, 20)));
            const int T = r.T;
            CAPTURE(described(r.spec), T, name_of(dtype));
            // Beside what look_inside() records: attention's output and values
            struct Seen {
                std::vector<float> v, att, x, x_mid, out;
            };
            std::vector<Seen> seen(static_cast<size_t>(r.spec.n_layer));
            const auto add = [](std::vector<float>& to, const std::vector<float>& more) {
                to.insert(to.end(), more.begin(), more.end());
            };
            r.model.generator->reset();
            r.model.generator->watch(
                r.model.stream, r.tokens,
                {.block =
                     [&](Stream& stream, int layer, const Block& block, Tensor out) {
                         Seen& of = seen[static_cast<size_t>(layer)];
                         const std::vector<float> qkv = values_of(stream, block.activations.qkv);
                         const auto width = static_cast<size_t>(block.layer.qkv_width()),
                                    v = static_cast<size_t>(block.layer.kv_width());
                         for (size_t row = width; row <= qkv.size(); row += width)
                             of.v.insert(of.v.end(), qkv.begin() + std::ptrdiff_t(row - v),
                                         qkv.begin() + std::ptrdiff_t(row));
                         add(of.att, values_of(stream, block.activations.att));
                         add(of.x, values_of(stream, block.activations.x));
                         add(of.x_mid, values_of(stream, block.activations.x_mid));
                         add(of.out, values_of(stream, out));
                     },
                 .logits = [](std::span<const float>) {}});
            const Inside inside =
                look_inside(r.model.stream, *r.model.generator, r.tokens, 3, r.spec.vocab_size);
            REQUIRE(inside.layers.size() == seen.size());
            const auto C = static_cast<size_t>(r.spec.n_embd);
            for (size_t l = 0; l < seen.size(); ++l) {
                const LayerInside& layer = inside.layers[l];
                const LayerSpec& spec = layer.spec;
                const int H = spec.n_head, H_kv = spec.n_kv_head, D = spec.head_size;
                const AttentionWeightsShape s{
                    .T = T,
                    .H = H,
                    .H_kv = H_kv,
                    .D = D,
                    .window = spec.window,
                    .softcap = static_cast<float>(spec.attention_softcap)};
                REQUIRE(layer.sinks.empty() == !r.spec.sinks);
                const Reference reference = reference_weights(s, layer.q, layer.k, layer.sinks);
                for (int t = 0; t < T; ++t)
                    for (int h = 0; h < H; ++h)
                        for (int d = 0; d < D; ++d) {
                            const auto row = static_cast<size_t>(h * T + t);
                            double sum = 0, size = 0;
                            for (int j = 0; j <= t; ++j) {
                                const double term =
                                    reference.weights[row * static_cast<size_t>(T + 1) +
                                                      static_cast<size_t>(j) + 1] *
                                    seen[l].v[static_cast<size_t>((j * H_kv + h / (H / H_kv)) * D +
                                                                  d)];
                                sum += term, size += std::abs(term);
                            }
                            // In bf16 weights and output are rounded to 8 bits each.
                            const double bound = (2 * reference.bound[row] + T * unit +
                                                  (dtype == DType::bf16 ? 3 * 0x1p-8 : 0.0)) *
                                                     size +
                                                 1e-30;
                            const float got = seen[l].att[static_cast<size_t>((t * H + h) * D + d)];
                            CAPTURE(l, t, h, d, got, sum);
                            REQUIRE(std::abs(got - sum) <= bound);
                        }
                for (size_t t = 0; t < static_cast<size_t>(T); ++t) {
                    const auto near = [](double value) { return Approx(value).epsilon(1e-6); };
                    REQUIRE(layer.norm[t] == near(norm_of(seen[l].x, t, C)));
                    REQUIRE(layer.attention_norm[t] ==
                            near(norm_of(seen[l].x_mid, t, C, &seen[l].x)));
                    REQUIRE(layer.mlp_norm[t] == near(norm_of(seen[l].out, t, C, &seen[l].x_mid)));
                    const bool is_last = l + 1 == seen.size();
                    REQUIRE((is_last ? inside.norm : inside.layers[l + 1].norm)[t] ==
                            near(norm_of(seen[l].out, t, C)));
                }
                const ExpertSpec& e = spec.experts;
                REQUIRE(layer.experts.size() ==
                        static_cast<size_t>(T) * static_cast<size_t>(e.n_expert_per_token));
                for (size_t i = 0; i < layer.experts.size();
                     i += static_cast<size_t>(e.n_expert_per_token)) {
                    const std::set<int32_t> of(
                        layer.experts.begin() + std::ptrdiff_t(i),
                        layer.experts.begin() + std::ptrdiff_t(i) + e.n_expert_per_token);
                    REQUIRE(of.size() == static_cast<size_t>(e.n_expert_per_token));
                    REQUIRE((*of.begin() >= 0 && *of.rbegin() < e.n_expert));
                }
            }
        }
}

TEST_CASE("losses and ranks and predictions are those of the logits before each token",
          "[look][cuda]") {
    ON_EACH_DEVICE();
    for (int round = 0; round < 12; ++round) {
        LookedModel r(DType::fp32, static_cast<int>(random_int(1, 20)));
        CAPTURE(described(r.spec), r.T);
        const int most = static_cast<int>(random_int(1, 6));
        const int64_t named = random_int(1, r.spec.vocab_size);
        Generator& generator = *r.model.generator;
        const Inside inside = look_inside(r.model.stream, generator, r.tokens, most, named);
        REQUIRE(std::isnan(inside.tokens[0].loss));
        generator.reset();
        for (size_t t = 0; t < r.tokens.size(); ++t) {
            REQUIRE(inside.tokens[t].token == r.tokens[t]);
            generator.feed(r.model.stream, {&r.tokens[t], 1});
            const std::span<const float> logits = generator.logits();
            // Chunks of other sizes add up in another order.
            double largest = 1, sum = 0;
            for (const float logit : logits) largest = std::max<double>(largest, std::abs(logit));
            for (const float logit : logits) sum += std::exp(double{logit});
            const double slack = 2e-4 * largest;
            const bool is_last = t + 1 == r.tokens.size();
            const std::vector<LikelyToken>& expected =
                is_last ? inside.next : inside.tokens[t + 1].expected;
            REQUIRE(std::ssize(expected) == std::min<int64_t>(most, named));
            std::vector<double> sorted(logits.begin(), logits.begin() + named);
            std::ranges::sort(sorted, std::greater<>());
            for (size_t i = 0; i < expected.size(); ++i) {
                REQUIRE(expected[i].token < named);
                const double logit = logits[static_cast<size_t>(expected[i].token)];
                CHECK(std::abs(logit - sorted[i]) <= 2 * slack);
                CHECK(std::abs(std::log(expected[i].probability) - (logit - std::log(sum))) <=
                      2 * slack);
            }
            if (is_last) continue;
            const double logit = logits[static_cast<size_t>(r.tokens[t + 1])];
            const TokenInside& next = inside.tokens[t + 1];
            CHECK(std::abs(next.loss - (std::log(sum) - logit)) <= 2 * slack);
            CHECK(next.rank >=
                  std::ranges::count_if(logits, [&](float l) { return l > logit + 2 * slack; }));
            CHECK(next.rank < std::ranges::count_if(  // the token itself is among them
                                  logits, [&](float l) { return l > logit - 2 * slack; }));
        }
    }
}

TEST_CASE("a model whose logits are not finite is refused", "[look]") {
    LookedModel r(DType::fp32, 8);
    std::vector<float> values(static_cast<size_t>(r.model.parameter(0).numel()), NAN);
    r.model.parameters->state.set(0, values);
    CHECK(contains(error_of([&] {
                       look_inside(r.model.stream, *r.model.generator, r.tokens, 3,
                                   r.spec.vocab_size);
                   }),
                   concat("logits after token 1 of ", r.T, " are not finite")));
}

TEST_CASE("the text of attention reads back as its weights", "[look]") {
    for (int round = 0; round < 20; ++round) {
        const int T = static_cast<int>(random_int(1, 40)),
                  heads = static_cast<int>(random_int(1, 3)),
                  D = static_cast<int>(random_int(1, 8));
        const bool sinks = random_int(0, 1) == 1;
        const Inside inside = random_inside(T, static_cast<int>(random_int(1, 2)), heads, D, sinks);
        const AttentionText text = attention_text(inside, 1 << 20);
        REQUIRE(text.every == 1);
        REQUIRE(text.floor == 1);
        for (size_t l = 0; l < inside.layers.size(); ++l) {
            const LayerInside& layer = inside.layers[l];
            const std::vector<float> weights = attention_weights(
                {.T = T, .H = heads, .H_kv = heads, .D = D}, layer.q, layer.k, layer.sinks);
            for (int h = 0; h < heads; ++h) {
                const std::vector<int> levels = unpacked(text.layers[l][static_cast<size_t>(h)]);
                size_t at = 0;
                for (int t = 0; t < T; ++t)
                    for (int i = sinks ? 0 : 1; i <= t + 1; ++i, ++at) {
                        const double w = weights[static_cast<size_t>((h * T + t) * (T + 1) + i)];
                        REQUIRE(std::abs(levels.at(at) / 63.0 - std::sqrt(w)) <= 0.5 / 63 + 1e-6);
                    }
                REQUIRE(at == levels.size());
            }
        }
    }
}

TEST_CASE("levels are packed and unpacked, and small ones become 0", "[look]") {
    for (int round = 0; round < 200; ++round) {
        std::vector<unsigned char> levels(static_cast<size_t>(random_int(0, 300)));
        const int64_t zeros = random_int(0, 9);
        for (unsigned char& level : levels)
            level = static_cast<unsigned char>(random_int(0, 9) < zeros ? 0 : random_int(0, 63));
        const int floor = static_cast<int>(random_int(1, 20));
        const std::vector<int> read = unpacked(packed_levels(levels, floor));
        REQUIRE(read.size() == levels.size());
        for (size_t i = 0; i < levels.size(); ++i)
            REQUIRE(read[i] == (levels[i] < floor ? 0 : int{levels[i]}));
    }
}

TEST_CASE(
    "a page about 128 tokens is smaller than 2 MB whatever the model, and says what it leaves "
    "out",
    "[look]") {
    const Tokenizer tokenizer =
        Tokenizer::train(std::vector<std::string_view>{"a few words of text"}, 257);
    struct Size {
        int layers, heads;
        bool cuts;
    };
    for (const Size& size : {Size{2, 3, false}, Size{12, 12, false}, Size{40, 24, true}}) {
        CAPTURE(size.layers, size.heads);
        const Inside inside = random_inside(128, size.layers, size.heads, 4, false);
        const std::string page = look_page({.inside = inside,
                                            .tokenizer = tokenizer,
                                            .name = "<b>",
                                            .model = "m & n",
                                            .note = "cut"});
        CHECK(page.size() < most_look_bytes);
        CHECK(contains(page, "<h1>&lt;b&gt;</h1>"));
        CHECK(contains(page, "m &amp; n"));
        CHECK(contains(page, "<p class=\"notes\">Cut.</p>"));
        CHECK(contains(page, "are shown as 0") == size.cuts);
        const nlohmann::json data = data_of(page);
        REQUIRE(data["tokens"].size() == 128);
        REQUIRE(data["layers"].size() == static_cast<size_t>(size.layers));
        const int every = data["every"];
        for (const auto& layer : data["layers"]) {
            REQUIRE(layer["attention"].size() ==
                    static_cast<size_t>((size.heads + every - 1) / every));
            REQUIRE(unpacked(layer["attention"][0].get<std::string>()).size() == 128 * 129 / 2);
        }
        CHECK(data["tokens"][0]["loss"].is_null());
        for (size_t t = 1; t < 128; ++t)
            REQUIRE(data["tokens"][t]["loss"].get<double>() ==
                    Approx(inside.tokens[t].loss).epsilon(1e-3));
    }
}

TEST_CASE("a page has texts of tokens as text, whatever they look like", "[look]") {
    const std::string text = "</script><b>&\n\xff";
    const Tokenizer tokenizer = Tokenizer::train(std::vector<std::string_view>{text}, 300);
    Inside inside = random_inside(1, 1, 1, 2, true);
    inside.tokens.clear();
    for (const uint32_t id : tokenizer.encode(text))
        inside.tokens.push_back({.token = static_cast<int32_t>(id)});
    inside.tokens.push_back({.token = 1 << 20});  // of a model with more rows than tokens
    const auto n = inside.tokens.size();
    LayerInside& layer = inside.layers[0];
    layer.q = random_normal(n * 2), layer.k = random_normal(n * 2);
    const std::string page = look_page(
        {.inside = inside, .tokenizer = tokenizer, .name = "n", .model = "m", .note = ""});
    const nlohmann::json data = data_of(page);
    std::string joined;
    for (size_t t = 0; t + 1 < n; ++t) joined += data["tokens"][t]["text"].get<std::string>();
    CHECK(joined == "</script><b>&\n\\xff");
    CHECK(data["tokens"][n - 1]["text"] == "[token 1048576]");
    CHECK_FALSE(contains(page, "class=\"notes\""));
    CHECK_FALSE(contains(page, "http://"));
    CHECK_FALSE(contains(page, "https://"));
}
