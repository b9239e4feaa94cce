// The whole model against PyTorch in float64 (test/fixtures/*-tiny, made by
// scripts/model_fixtures.py and scripts/family_fixtures.py), and against itself.
#include "model/stage.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "device/cuda.h"
#include "model/families/llama.h"
#include "model/families/mistral.h"
#include "model/families/qwen2.h"
#include "model/families/qwen3.h"
#include "test/catch.h"
#include "test/model/random_spec.h"
#include "test/model/tiny_model.h"
#include "test/random.h"
#include "test/text.h"
#include "training/files/safetensors.h"
#include "training/files/upcycle.h"

using namespace train_gpt;

namespace {

const char* const families[] = {"gpt2",    "llama",     "qwen2",     "qwen3", "mistral",
                                "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"};

std::vector<float> read(const SafetensorsFile& file, const std::string& name) {
    const TensorInfo& info = file.at(name);
    std::vector<float> values(static_cast<size_t>(info.numel()));
    file.read_floats(info, values.data());
    return values;
}

double read_metadata(const SafetensorsFile& file, const std::string& name) {
    return std::stod(file.metadata().at(name));
}

/// The tensors that hold a parameter in a file: of transformers 5, a layer's experts are one.
const std::vector<StoredTensor>& tensors_of(const SafetensorsFile& file, const std::string& prefix,
                                            const Parameter& p) {
    const bool other = !p.or_stored.empty() && file.find(prefix + p.or_stored[0].name);
    return other ? p.or_stored : p.stored;
}

/// Values of a parameter, which files may hold as several tensors, in our layout.
std::vector<float> read(const SafetensorsFile& file, const std::string& prefix,
                        const Parameter& p) {
    std::vector<float> result;
    for (const StoredTensor& stored : tensors_of(file, prefix, p)) {
        const std::vector<float> values = read(file, prefix + stored.name);
        const auto matrices = static_cast<size_t>(stored.stacked > 0 ? stored.stacked : 1),
                   out = static_cast<size_t>(stored.rows) / matrices,
                   in = static_cast<size_t>(p.cols());
        REQUIRE(values.size() == matrices * out * in);
        for (size_t m = 0; m < matrices; ++m)
            for (size_t o = 0; o < out; ++o) {
                // Gate and up may take turns.
                const size_t row = !stored.interleaved ? o
                                   : o < out / 2       ? 2 * o
                                                       : 2 * (o - out / 2) + 1;
                for (size_t i = 0; i < in; ++i)
                    result.push_back(
                        values[m * out * in + (stored.transposed ? i * out + row : row * in + i)]);
            }
    }
    return result;
}

struct Difference {
    double greatest = 0, norm = 0, relative = 0;  // max |a − b|, ‖a − b‖, ‖a − b‖ / ‖b‖
};

Difference difference(const std::vector<float>& ours, const std::vector<float>& reference,
                      double scale = 1) {
    REQUIRE(ours.size() == reference.size());
    double square = 0, norm = 0;
    Difference d;
    for (size_t i = 0; i < ours.size(); ++i) {
        const double delta = scale * double{ours[i]} - double{reference[i]};
        if (!std::isfinite(delta)) return {INFINITY, INFINITY, INFINITY};
        d.greatest = std::max(d.greatest, std::fabs(delta));
        square += delta * delta;
        norm += double{reference[i]} * double{reference[i]};
    }
    d.norm = std::sqrt(square);
    d.relative = std::sqrt(square / std::max(norm, 1e-300));
    return d;
}

/// How far a tensor may differ from the float64 reference: by rounding in fp32, or by 3 times what
/// PyTorch's own bf16 differs.
void check_close(const SafetensorsFile& expected, const std::string& name, DType dtype,
                 Difference d) {
    INFO(name << " in " << name_of(dtype) << ": greatest difference " << d.greatest << ", relative "
              << d.relative);
    if (dtype == DType::fp32) {
        CHECK(d.relative < 1e-5);
        return;
    }
    const std::vector<float> bound = read(expected, "pure.error." + name);
    INFO("PyTorch's bf16: " << bound[0] << ", " << bound[1]);
    CHECK(d.relative <= 3 * bound[1]);
    CHECK(d.greatest <= 3 * bound[0]);
}

struct Fixture {
    std::string folder;
    SafetensorsFile expected;
    std::vector<int32_t> tokens = expected.read_integers(expected.at("tokens"));
    std::vector<int32_t> targets = expected.read_integers(expected.at("targets"));
    int B = static_cast<int>(expected.at("tokens").shape[0]),
        T = static_cast<int>(expected.at("tokens").shape[1]);
    DecoderSpec spec = read_model_spec(folder);
    double valid = static_cast<double>(
        std::count_if(targets.begin(), targets.end(), [](int t) { return t >= 0; }));

    explicit Fixture(const std::string& family)
        : folder(concat("test/fixtures/", family, "-tiny")),
          expected(folder + "/expected.safetensors") {}

    TinyModel model(DType dtype, Recompute recompute = Recompute::none) const {
        TinyModel m(spec, B, T, dtype, recompute);
        load_weights(open_model_folder(folder), *m.parameters);
        return m;
    }
};

std::vector<int32_t> random_ids(size_t n, int64_t vocab_size) {
    std::vector<int32_t> tokens(n);
    for (int32_t& token : tokens) token = static_cast<int32_t>(random_int(0, vocab_size - 1));
    return tokens;
}

/// Checks each tensor that files hold for itself.
void check_gradient(const Fixture& f, const TinyModel& m, int i, DType dtype) {
    const Parameter& p = m.parameter(i);
    const std::vector<float> ours = m.gradient(i), reference = read(f.expected, "gradient.", p);
    std::ptrdiff_t first = 0;
    const std::string prefix = "gradient.";
    for (const StoredTensor& stored : tensors_of(f.expected, prefix, p)) {
        const std::ptrdiff_t end = first + stored.rows * p.cols();
        check_close(f.expected, prefix + stored.name, dtype,
                    difference({ours.begin() + first, ours.begin() + end},
                               {reference.begin() + first, reference.begin() + end}, 1 / f.valid));
        first = end;
    }
}

const DType dtypes[] = {DType::fp32, DType::bf16};

}  // namespace

TEST_CASE("loss and every gradient equal PyTorch's float64", "[model][cuda]") {
    ON_EACH_DEVICE();
    for (const char* family : families) {
        const Fixture f(family);
        REQUIRE(f.T < f.spec.n_ctx);
        REQUIRE(f.spec.family->model_type == std::string(family));
        for (DType dtype : dtypes)
            for (Recompute level : recompute_levels) {
                CAPTURE(family, name_of(dtype), name_of(level));
                TinyModel m = f.model(dtype, level);
                const double loss = m.run(f.tokens.data(), f.targets.data()) / f.valid;
                const double reference = read(f.expected, "loss")[0];
                const double bound = dtype == DType::fp32
                                         ? 1e-6 * reference
                                         : 3 * double{read(f.expected, "pure.error.loss")[0]};
                CHECK(std::fabs(loss - reference) <= bound);

                check_close(f.expected, "token_losses", dtype,
                            difference(m.losses(), read(f.expected, "token_losses")));
                for (int i = 0; i < m.count(); ++i) check_gradient(f, m, i, dtype);
            }
    }
}

TEST_CASE("an upcycled model has the loss of its dense model", "[model]") {
    for (const char* family : {"llama", "qwen2", "qwen3", "mistral"}) {
        const Fixture f(family);
        const StoredModel mixture =
            upcycled(open_model_folder(f.folder), {.n_expert = 5, .n_expert_per_token = 3}, "it");
        TinyModel m(mixture.spec, f.B, f.T, DType::fp32);
        load_weights(mixture, *m.parameters);
        const double loss = m.run(f.tokens.data(), f.targets.data()) / f.valid;
        CAPTURE(family);
        CHECK(std::fabs(loss - double{read(f.expected, "loss")[0]}) < 1e-5);
    }
}

TEST_CASE("logits with a key-value cache equal PyTorch's float64", "[model][cuda]") {
    ON_EACH_DEVICE();
    for (const char* family : families) {
        const Fixture f(family);
        const std::vector<float> reference = read(f.expected, "logits");
        const size_t V = static_cast<size_t>(f.spec.vocab_size);
        for (DType dtype : dtypes) {
            CAPTURE(family, name_of(dtype));
            TinyModel m = f.model(dtype);
            std::vector<float> ours;
            for (int b = 0; b < f.B; ++b) {
                m.generator->reset();
                // One token at a time here, two pieces of random length below: the cache must not
                // show.
                for (int t = 0; t < f.T; ++t) {
                    m.generator->feed(m.stream, {f.tokens.data() + b * f.T + t, 1});
                    const auto logits = m.generator->logits();
                    REQUIRE(logits.size() == V);
                    ours.insert(ours.end(), logits.begin(), logits.end());
                }
            }
            check_close(f.expected, "logits", dtype, difference(ours, reference));

            const int last = f.T - 1, first_piece = static_cast<int>(random_int(1, f.T - 1));
            m.generator->reset();
            m.generator->feed(m.stream, {f.tokens.data(), static_cast<size_t>(first_piece)});
            m.generator->feed(
                m.stream, {f.tokens.data() + first_piece, static_cast<size_t>(f.T - first_piece)});
            const auto logits = m.generator->logits();
            const auto row = reference.begin() + static_cast<std::ptrdiff_t>(V) * last;
            check_close(f.expected, "logits", dtype,
                        difference({logits.begin(), logits.end()},
                                   {row, row + static_cast<std::ptrdiff_t>(V)}));
        }
    }
}

TEST_CASE("ten AdamW steps follow PyTorch's losses", "[model][cuda]") {
    ON_EACH_DEVICE();
    const Fixture f("gpt2");
    const std::vector<int32_t> tokens = f.expected.read_integers(f.expected.at("steps.tokens"));
    const std::vector<int32_t> targets = f.expected.read_integers(f.expected.at("steps.targets"));
    const std::vector<float> losses = read(f.expected, "steps.losses"),
                             norms = read(f.expected, "steps.norms");
    const std::vector<float> torch_bf16 = read(f.expected, "pure.steps.losses");
    const size_t batch = static_cast<size_t>(f.B * f.T);
    // How far PyTorch's bf16 strays over these steps; ours may stray 3 times as far.
    double torch_stray = 0;
    for (size_t s = 0; s < losses.size(); ++s)
        torch_stray = std::max(torch_stray, std::fabs(double{torch_bf16[s]} - double{losses[s]}));

    for (DType dtype : dtypes) {
        TinyModel m = f.model(dtype);
        for (int i = 0; i < m.count(); ++i)
            for (const auto moment : {"m", "v"}) m.set_state(moment, i, 0);
        for (size_t s = 0; s < losses.size(); ++s) {
            CAPTURE(name_of(dtype), s);
            const int32_t* t = targets.data() + s * batch;
            const double valid =
                static_cast<double>(std::count_if(t, t + batch, [](int x) { return x >= 0; }));
            const double loss = m.run(tokens.data() + s * batch, t) / valid;
            const auto number = [&](const char* key) {
                return static_cast<float>(read_metadata(f.expected, key));
            };
            m.optimizer->update(m.stream,
                                {.adamw = {.learning_rate = number("learning_rate"),
                                           .beta1 = number("beta1"),
                                           .beta2 = number("beta2"),
                                           .epsilon = number("epsilon"),
                                           .weight_decay = number("weight_decay"),
                                           .step = static_cast<int64_t>(s) + 1}},
                                static_cast<float>(1 / valid), number("grad_clip"));
            CHECK(std::fabs(loss - losses[s]) <= (dtype == DType::fp32 ? 1e-4 : 3 * torch_stray));
            if (dtype == DType::fp32)
                CHECK(m.optimizer->state().norm == Approx(norms[s]).epsilon(1e-3));
        }
    }
}

TEST_CASE("recomputation changes no bit of any gradient", "[model][cuda]") {
    ON_EACH_DEVICE();
    const bool normalizes_heads = GENERATE(false, true);
    DecoderSpec spec = random_spec(2);  // blocks share what is recomputed
    if (normalizes_heads) {
        spec.positions = Positions::rope;
        spec.rope = {.D = spec.head_size, .theta = 100};
        spec.qk_norm = QkNormKind::head;
    }
    CAPTURE(described(spec));
    const int B = static_cast<int>(random_int(1, 3)),
              T = static_cast<int>(random_int(1, spec.n_ctx));
    const auto tokens = random_ids(static_cast<size_t>(B * T), spec.vocab_size);
    const auto targets = random_ids(static_cast<size_t>(B * T), spec.vocab_size);
    const uint64_t seed = test_rng()();
    for (DType dtype : dtypes) {
        TinyModel plain(spec, B, T, dtype);
        plain.parameters->state.initialize(seed);
        plain.run(tokens.data(), targets.data());
        for (Recompute level : {Recompute::elementwise, Recompute::block}) {
            TinyModel other(spec, B, T, dtype, level);
            other.parameters->state.initialize(seed);
            other.run(tokens.data(), targets.data());
            for (int i = 0; i < plain.count(); ++i) {
                CAPTURE(name_of(dtype), name_of(level), plain.parameter(i).name);
                // On CUDA, a product's epilogue applies GELU to the sum before it is rounded;
                // recomputation applies it to the rounded sum.
                if (level == Recompute::elementwise && test_device().is_cuda() &&
                    spec.mlp == Mlp::gelu)
                    CHECK(difference(other.gradient(i), plain.gradient(i)).relative <
                          (dtype == DType::fp32 ? 1e-5 : 0.02));
                else
                    CHECK(plain.gradient(i) == other.gradient(i));
            }
        }
    }
}

TEST_CASE("accumulated micro-batches add up to the gradient of both", "[model][cuda]") {
    ON_EACH_DEVICE();
    const DecoderSpec spec = random_spec();
    CAPTURE(described(spec));
    const int B = static_cast<int>(random_int(1, 3)),
              T = static_cast<int>(random_int(1, spec.n_ctx));
    const size_t n = static_cast<size_t>(B * T);
    const auto tokens = random_ids(2 * n, spec.vocab_size),
               targets = random_ids(2 * n, spec.vocab_size);
    const uint64_t seed = test_rng()();
    TinyModel m(spec, B, T, DType::fp32);
    m.parameters->state.initialize(seed);
    std::vector<std::vector<float>> parts[2];
    for (int part : {0, 1}) {
        m.run(tokens.data() + static_cast<size_t>(part) * n,
              targets.data() + static_cast<size_t>(part) * n);
        for (int i = 0; i < m.count(); ++i) parts[part].push_back(m.gradient(i));
    }
    m.run(tokens.data(), targets.data(), true, 2);
    m.run(tokens.data() + n, targets.data() + n, false);
    for (int i = 0; i < m.count(); ++i) {
        auto& first = parts[0][static_cast<size_t>(i)];
        const auto& second = parts[1][static_cast<size_t>(i)];
        for (size_t k = 0; k < first.size(); ++k) first[k] += second[k];
        CAPTURE(m.parameter(i).name);
        CHECK(difference(m.gradient(i), first).relative < 1e-5);
    }
}

TEST_CASE("masked documents in one window learn what each learns in a window of its own",
          "[model][cuda]") {
    ON_EACH_DEVICE();
    const DecoderSpec spec = random_spec();
    CAPTURE(described(spec));
    const int T = static_cast<int>(random_int(4, std::min(spec.n_ctx, 40)));
    const uint64_t seed = test_rng()();
    // All documents fill one window. When separate, each begins its own window, and ignored tokens
    // follow it.
    std::vector<int32_t> doc_start;
    int documents = 0;
    for (int start = 0; start < T; ++documents) {
        const int end = std::min<int>(T, start + static_cast<int>(random_int(1, T / 2)));
        doc_start.insert(doc_start.end(), static_cast<size_t>(end - start), start);
        start = end;
    }
    const auto tokens = random_ids(static_cast<size_t>(T), spec.vocab_size);
    const auto targets = random_ids(static_cast<size_t>(T), spec.vocab_size);
    std::vector<int32_t> apart_tokens(static_cast<size_t>(documents * T), 0),
        apart_targets(static_cast<size_t>(documents * T), -1);
    std::vector<size_t> place;  // of each token
    for (int t = 0, document = -1; t < T; ++t) {
        const int start = doc_start[static_cast<size_t>(t)];
        document += start == t;
        place.push_back(static_cast<size_t>(document * T + t - start));
        apart_tokens[place.back()] = tokens[static_cast<size_t>(t)];
        apart_targets[place.back()] = targets[static_cast<size_t>(t)];
    }
    TinyModel masked(spec, 1, T, DType::fp32), apart(spec, documents, T, DType::fp32);
    for (TinyModel* model : {&masked, &apart}) model->parameters->state.initialize(seed);
    masked.set_documents(doc_start.data());
    masked.run(tokens.data(), targets.data());
    apart.run(apart_tokens.data(), apart_targets.data());

    std::vector<float> expected;
    const std::vector<float> apart_losses = apart.losses();
    for (const size_t at : place) expected.push_back(apart_losses[at]);
    CHECK(difference(masked.losses(), expected).greatest < 1e-4);
    double square = 0;  // of the whole gradient
    for (int i = 0; i < apart.count(); ++i)
        for (const float g : apart.gradient(i)) square += double{g} * double{g};
    for (int i = 0; i < masked.count(); ++i) {
        CAPTURE(masked.parameter(i).name, T, documents);
        const Difference d = difference(masked.gradient(i), apart.gradient(i));
        CAPTURE(d.relative, std::sqrt(square));
        // A router's gradient is 0 but for rounding, if its only score is divided by itself.
        CHECK((d.relative < 1e-4 || d.norm < 1e-6 * std::sqrt(square)));
    }
}

TEST_CASE("documents of whole attention tiles in one window are, bit for bit, windows of their own",
          "[model]") {
    DecoderSpec spec = random_spec();
    spec.positions = Positions::rope;  // relative: rounding alone shows where a document begins
    spec.rope = {.D = spec.head_size, .theta = 100};
    spec.window = 0;     // windows end within tiles
    spec.sinks = false;  // their gradients are sums over all queries of a sequence
    spec.n_ctx = 128;
    CAPTURE(described(spec));
    constexpr int tile = 64;
    const auto tokens = random_ids(2 * tile, spec.vocab_size);
    const auto targets = random_ids(2 * tile, spec.vocab_size);
    std::vector<int32_t> doc_start(2 * tile, 0);
    std::fill(doc_start.begin() + tile, doc_start.end(), tile);
    const uint64_t seed = test_rng()();
    for (DType dtype : dtypes) {
        TinyModel masked(spec, 1, 2 * tile, dtype), apart(spec, 2, tile, dtype);
        for (TinyModel* model : {&masked, &apart}) model->parameters->state.initialize(seed);
        masked.set_documents(doc_start.data());
        for (TinyModel* model : {&masked, &apart}) model->run(tokens.data(), targets.data());
        CHECK(masked.losses() == apart.losses());
        for (int i = 0; i < masked.count(); ++i) {
            CAPTURE(name_of(dtype), masked.parameter(i).name);
            CHECK(masked.gradient(i) == apart.gradient(i));
        }
    }
}

TEST_CASE(
    "padding of the vocabulary stays zero and weights of positions beyond T stay as they decay",
    "[model][cuda]") {
    ON_EACH_DEVICE();
    const DecoderSpec spec = gpt2.spec({.n_layer = 2,
                                        .n_head = 2,
                                        .n_embd = 8 * random_int(1, 4) * 2,
                                        .n_ctx = random_int(20, 40),
                                        .vocab_size = random_int(129, 250)});  // padded to 256
    const int B = 2, T = spec.n_ctx / 2;
    for (DType dtype : dtypes) {
        TinyModel m(spec, B, T, dtype);
        m.parameters->state.initialize(test_rng()());
        const int wpe = m.parameters->index_of("wpe.weight"),
                  wte = m.parameters->index_of("wte.weight");
        const int64_t C = spec.n_embd;
        const auto at = static_cast<size_t>(T * C);
        const float before = m.state(ParameterState::master, wpe)[at];
        for (int step = 1; step <= 3; ++step) {
            const auto tokens = random_ids(static_cast<size_t>(B * T), spec.vocab_size);
            m.run(tokens.data(), tokens.data());
            m.optimizer->update(m.stream,
                                {.adamw = {.learning_rate = 0.1f,
                                           .beta1 = 0.9f,
                                           .beta2 = 0.95f,
                                           .epsilon = 1e-8f,
                                           .weight_decay = 0.5f,
                                           .step = step}},
                                1.0f / static_cast<float>(B * T), 1.0f);
        }
        const std::vector<float> rows = m.state(ParameterState::master, wte);
        bool all_zero = true;
        for (int64_t i = spec.vocab_size * C; i < spec.padded_vocab() * C; ++i)
            all_zero &= rows[static_cast<size_t>(i)] == 0;
        CHECK(all_zero);
        CHECK(m.state(ParameterState::master, wpe)[at] ==
              Approx(before * 0.95 * 0.95 * 0.95).epsilon(1e-5));
    }
}

TEST_CASE("one batch is learnt by heart within 200 steps", "[model][cuda]") {
    ON_EACH_DEVICE();
    // A simulated GPU takes a minute for 200 steps of the larger model.
    const bool small = device_is_simulated();
    const DecoderSpec spec = gpt2.spec(
        {.n_layer = small ? 1 : 2, .n_head = 2, .n_embd = 64, .n_ctx = 32, .vocab_size = 128});
    const int B = small ? 1 : 4, T = small ? 16 : 32;
    auto text = random_ids(static_cast<size_t>(B * (T + 1)), spec.vocab_size);
    // Every sequence has its own first token: two that begin alike could not both be predicted.
    for (int b = 0; b < B; ++b) text[static_cast<size_t>(b * (T + 1))] = b;
    std::vector<int32_t> tokens, targets;
    for (int b = 0; b < B; ++b)
        for (int t = 0; t < T; ++t) {
            tokens.push_back(text[static_cast<size_t>(b * (T + 1) + t)]);
            targets.push_back(text[static_cast<size_t>(b * (T + 1) + t + 1)]);
        }
    for (DType dtype : dtypes) {
        CAPTURE(name_of(dtype));
        TinyModel m(spec, B, T, dtype);
        m.parameters->state.initialize(test_rng()());
        double loss = INFINITY;
        for (int step = 1; step <= 200 && loss >= 0.01; ++step) {
            loss = m.run(tokens.data(), targets.data()) / (B * T);
            m.optimizer->update(m.stream,
                                {.adamw = {.learning_rate = 1e-2f,
                                           .beta1 = 0.9f,
                                           .beta2 = 0.95f,
                                           .epsilon = 1e-8f,
                                           .step = step}},
                                1.0f / (B * T), 1.0f);
        }
        CHECK(loss < 0.01);
    }
}

TEST_CASE("a gradient that is not finite stops the optimizer for good and is named",
          "[model][cuda]") {
    ON_EACH_DEVICE();
    const DecoderSpec spec = random_spec();
    CAPTURE(described(spec));
    TinyModel m(spec, 1, 4, DType::bf16);
    m.parameters->state.initialize(1);
    const auto tokens = random_ids(4, spec.vocab_size);
    m.run(tokens.data(), tokens.data());
    const int bad = static_cast<int>(random_int(0, m.count() - 1));
    const float infinity = INFINITY;
    m.parameters->state.write(ParameterState::gradient, bad,
                              random_int(0, m.parameter(bad).numel() - 1), {&infinity, 1});
    const std::vector<float> before = m.state(ParameterState::master, 0);
    const AdamWStep step{
        .learning_rate = 1, .beta1 = 0.9f, .beta2 = 0.95f, .epsilon = 1e-8f, .step = 1};
    m.optimizer->update(m.stream, {.adamw = step}, 1, 1);
    CHECK(m.optimizer->state().stop != 0);
    CHECK(m.optimizer->bad_parameter(m.optimizer->state()) == m.parameter(bad).name);
    m.run(tokens.data(), tokens.data());
    m.optimizer->update(m.stream, {.adamw = step}, 1, 1);
    CHECK(m.optimizer->bad_parameter(m.optimizer->state()) == m.parameter(bad).name);
    CHECK((before == m.state(ParameterState::master, 0)));
}

#ifdef TRAIN_GPT_CUDA
TEST_CASE(
    "a step neither allocates nor waits for the device: it can be captured, and then does the same",
    "[model][cuda]") {
    if (test_devices().size() < 2) return;
    const DeviceUnderTest on_cuda(test_devices()[1]);
    const DecoderSpec spec = random_spec();
    CAPTURE(described(spec));
    const int B = 2, T = static_cast<int>(random_int(1, spec.n_ctx));
    const uint64_t seed = test_rng()();
    const auto tokens = random_ids(static_cast<size_t>(B * T), spec.vocab_size);
    const auto targets = random_ids(static_cast<size_t>(B * T), spec.vocab_size);
    for (DType dtype : dtypes) {
        CAPTURE(name_of(dtype));
        std::vector<std::vector<float>> masters[2];
        for (const bool captured : {false, true}) {
            TinyModel m(spec, B, T, dtype);
            m.parameters->state.initialize(seed);
            m.set_batch(tokens.data(), targets.data());
            m.submit();  // the first step chooses algorithms
            const auto step = [&] {
                m.submit(true, 2);
                m.submit(false);
                m.optimizer->update(m.stream,
                                    {.adamw = {.learning_rate = 0.01f,
                                               .beta1 = 0.9f,
                                               .beta2 = 0.95f,
                                               .epsilon = 1e-8f}},
                                    0.5f / static_cast<float>(B * T), 1.0f);
            };
            if (captured)
                cuda::run_captured(m.stream, step);
            else
                step();
            for (int i = 0; i < m.count(); ++i)
                masters[captured].push_back(m.state(ParameterState::master, i));
        }
        CHECK((masters[0] == masters[1]));
    }
}
#endif

TEST_CASE("parameter counts are those of the published GPT-2 models", "[model]") {
    const auto parameters = [](int n_layer, int n_head, int n_embd) {
        return registry_of(gpt2.spec({.n_layer = n_layer,
                                      .n_head = n_head,
                                      .n_embd = n_embd,
                                      .n_ctx = 1024,
                                      .vocab_size = 50257}))
            .numel();
    };
    CHECK(parameters(12, 12, 768) == 124439808);
    CHECK(parameters(24, 16, 1024) == 354823168);
    CHECK(parameters(36, 20, 1280) == 774030080);
    CHECK(parameters(48, 25, 1600) == 1557611200);
}

namespace {

/// Checks mean and spread of each initial tensor; expected_std is that of its name, 0 for biases.
void check_spread(const DecoderSpec& spec,
                  const std::function<double(const std::string&)>& expected_std_of) {
    TinyModel m(spec, 1, 1, DType::fp32);
    m.parameters->state.initialize(test_rng()());
    for (int i = 0; i < m.count(); ++i) {
        const Parameter& p = m.parameter(i);
        std::vector<float> values(static_cast<size_t>(p.numel()));
        m.parameters->state.get(i, values);
        const double n = static_cast<double>(values.size());
        const double mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
        double variance = 0;
        for (float v : values) variance += (v - mean) * (v - mean) / n;
        const bool is_vector = p.shape.size() == 1;
        const double expected_std = is_vector ? 0 : expected_std_of(p.name);
        CAPTURE(p.name);
        CHECK(mean == Approx(is_vector && p.name.ends_with("weight") ? 1.0 : 0.0)
                          .margin(6 * expected_std / std::sqrt(n)));
        CHECK(std::sqrt(variance) == Approx(expected_std).epsilon(0.06));
        CHECK(p.decay == !is_vector);  // norms and biases do not decay
    }
}

}  // namespace

TEST_CASE("initial weights have their family's spread, and norms and biases do not decay",
          "[model]") {
    check_spread(
        gpt2.spec({.n_layer = 8, .n_head = 2, .n_embd = 128, .n_ctx = 128, .vocab_size = 1000}),
        [](const std::string& name) {
            return name == "wpe.weight"       ? 0.01
                   : contains(name, "c_proj") ? 0.02 / 4  // √(2·8)
                                              : 0.02;
        });
    for (const Family* family : {&llama, &qwen2, &qwen3, &mistral})
        for (const auto& [given, scaled] :
             {std::pair(0.0, true), std::pair(0.05, true), std::pair(0.05, false)}) {
            const double std = given > 0 ? given : 0.02;
            const bool zero = random_int(0, 1) == 1;
            CAPTURE(family->model_type, std, scaled, zero);
            check_spread(family->spec({.n_layer = 2,
                                       .n_head = 4,
                                       .n_embd = 128,
                                       .n_ctx = 32,
                                       .vocab_size = 500,
                                       .n_kv_head = 2,
                                       .head_size = 32,
                                       .init_std = given,
                                       .init_residual_scaling = scaled,
                                       .init_zero_projections = zero}),
                         [&](const std::string& name) {
                             const bool residual =
                                 contains(name, "o_proj") || contains(name, "down_proj");
                             if (residual && zero) return 0.0;
                             return residual && scaled ? std / 2 : std;  // √(2·2)
                         });
        }
}

TEST_CASE("no two parameters, and no two seeds, share their initial values", "[model]") {
    const DecoderSpec spec =
        gpt2.spec({.n_layer = 3, .n_head = 2, .n_embd = 32, .n_ctx = 40, .vocab_size = 70});
    const uint64_t seed = test_rng()();
    std::vector<std::pair<std::string, std::vector<float>>> drawn;  // around 0, with deviation 1
    for (const uint64_t of : {seed, seed + 1}) {
        TinyModel m(spec, 1, 1, DType::fp32);
        m.parameters->state.initialize(of);
        for (int i = 0; i < m.count(); ++i) {
            const Parameter& p = m.parameter(i);
            if (p.init_std == 0) continue;
            auto& [name, values] = drawn.emplace_back(p.name, static_cast<size_t>(p.numel()));
            m.parameters->state.get(i, values);
            for (float& value : values) value = (value - p.init_mean) / p.init_std;
        }
    }
    REQUIRE(drawn.size() == 2 * (2 + 4 * 3));
    for (size_t a = 0; a < drawn.size(); ++a)
        for (size_t b = 0; b < a; ++b) {
            const size_t n = std::min(drawn[a].second.size(), drawn[b].second.size());
            double correlation = 0;
            for (size_t k = 0; k < n; ++k)
                correlation += double{drawn[a].second[k]} * double{drawn[b].second[k]};
            correlation /= static_cast<double>(n);
            CAPTURE(drawn[a].first, drawn[b].first, n, correlation);
            CHECK(std::abs(correlation) < 7 / std::sqrt(static_cast<double>(n)));
        }
}
