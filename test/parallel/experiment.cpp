#include "test/parallel/experiment.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "training/plan/memory_plan.h"

namespace train_gpt::experiment {

namespace {

/// A vocabulary in parts of one or two multiples of 128 rows; the last rank has at least one entry.
int64_t shared_vocabulary(int ranks) {
    const int64_t part = 128 * random_int(1, 2);
    return part * (ranks - 1) + random_int(1, part);
}

/// A decoder that so many ranks can share.
DecoderSpec shared_spec(int ranks) {
    const int n_kv_head = ranks * static_cast<int>(random_int(1, 2)),
              n_head = n_kv_head * static_cast<int>(random_int(1, 2));
    const bool rotary = random_int(0, 1) == 0, experts = random_int(0, 1) == 0;
    DecoderSettings settings{
        .n_layer = random_int(1, 3),
        .n_head = n_head,
        .n_embd = n_head * random_int(1, 2) * 4,
        .n_ctx = 32,
        .vocab_size = shared_vocabulary(ranks),
        .n_kv_head = n_kv_head,
        .head_size = 2 * random_int(2, 6),
        .n_ff = ranks * random_int(3, 20),
        .norm = random_int(0, 1) ? Norm::rms : Norm::layer,
        .mlp = experts ? Mlp::swiglu
                       : std::array{Mlp::gelu, Mlp::swiglu,
                                    Mlp::relu2}[static_cast<size_t>(random_int(0, 2))],
        .biases = std::array{Biases::none, Biases::qkv,
                             Biases::all}[static_cast<size_t>(random_int(0, 2))],
        .qk_norm = rotary ? std::array{QkNormKind::off, QkNormKind::head,
                                       QkNormKind::width}[static_cast<size_t>(random_int(0, 2))]
                          : QkNormKind::off,
        .tied_head = random_int(0, 1) == 0,
        .attention_softcap = random_int(0, 3) ? 0.0 : 2.0,
        .head_softcap = random_int(0, 3) ? 0.0 : 5.0,
        .positions = rotary ? Positions::rope : Positions::learned,
        .init_std = 0.1,
        .rope_theta = 100};
    if (random_int(0, 1) == 0)
        settings.window = static_cast<int>(random_int(1, 40)), settings.window_pattern = "SL";
    settings.sinks = random_int(0, 1) == 0;
    if (!experts) return gpt2.spec(settings);
    // Ranks that share products round differently, and a token must not go elsewhere for it: all
    // experts, or those that biases decide on (place_routers()).
    settings = with_experts(settings, ranks);
    if (random_int(0, 1) == 0)
        settings.n_expert = settings.n_expert_per_token;
    else
        settings.router_bias = true;
    return gpt2.spec(settings);
}

/// Router biases so far apart that the tokens' own logits do not matter.
void place_routers(ParameterStore& store, const DecoderSpec& spec) {
    const auto E = static_cast<size_t>(spec.experts.n_expert);
    if (spec.experts.n_expert == spec.experts.n_expert_per_token) return;
    for (size_t i = 0; i < store.parameters().size(); ++i) {
        if (!store.parameters()[i].name.ends_with("mlp.gate.bias")) continue;
        std::vector<float> biases(E);
        for (size_t e = 0; e < E; ++e) biases[e] = 20.0f * static_cast<float>((e + i) % E);
        store.state.set(static_cast<int>(i), biases);
    }
}

double largest(const std::vector<double>& values) {
    double most = 0;
    for (const double value : values) most = std::max(most, std::abs(value));
    return most;
}

}  // namespace

Experiment::Experiment(int tensor_ranks, int data_ranks, int context_ranks)
    : spec(shared_spec(tensor_ranks)),
      B(static_cast<int>(random_int(1, 2))),
      T(context_ranks == 1 && tensor_ranks < 8
            ? 8 * static_cast<int>(random_int(1, 3))
            : 2 * tensor_ranks * context_ranks *
                  static_cast<int>(random_int(1, 16 / (tensor_ranks * context_ranks)))),
      micro_batches(static_cast<int>(random_int(data_ranks, 2 * data_ranks + 1))) {
    if (spec.experts && context_ranks == 1) spec.experts.capacity = random_capacity();
    const auto drawn = [](int64_t least, int64_t most) {
        return std::to_string(random_int(least, most));
    };
    settings = {{"parallel.tensor", std::to_string(tensor_ranks)},
                {"parallel.context", std::to_string(context_ranks)},
                {"parallel.zero", drawn(0, 3)},
                {"parallel.tensor_chunks", drawn(1, 2)},
                {"parallel.tensor_keep_gathered", random_int(0, 1) ? "true" : "false"},
                {"parallel.bucket_mb", "0.02"},
                {"optimizer.z_loss", random_int(0, 1) ? "0.01" : "0"},
                {"optimizer.epsilon", "0.001"},
                {"optimizer.grad_clip", "0.5"}};
    router.balance = random_int(0, 1) ? Balance::loss : Balance::bias;
    router.level = std::array{BalanceLevel::sequence, BalanceLevel::micro_batch,
                              BalanceLevel::step}[static_cast<size_t>(random_int(0, 2))];
    router.z_loss = random_int(0, 1) ? 0.01 : 0;
}

Config Experiment::config(bool one_rank) const {
    std::vector<std::string> all{"data.train=synthetic",
                                 "parallel.sums=fp32",  // exact sums: test/parallel/exact_test
                                 "schedule.steps=10",
                                 "kernels.autotune=off",
                                 "model.n_ctx=32",
                                 "model.n_head=64",  // what any mesh can share
                                 "model.n_embd=768",
                                 "run_dir=none",
                                 concat("device=", device),
                                 concat("data.document_mask=", documents ? "true" : "false"),
                                 concat("batch.micro_batch=", B),
                                 concat("batch.sequence_length=", T),
                                 concat("batch.tokens_per_step=", micro_batches * B * T)};
    for (const auto& [key, value] : settings)
        if (!one_rank || !key.starts_with("parallel.")) all.push_back(concat(key, "=", value));
    Config config = parse_config("{}", "test", all);
    config.router = router;
    return config;
}

Batch Experiment::batch() const {
    Batch b;
    for (int i = 0; i < B * T; ++i) {
        b.tokens.push_back(static_cast<int32_t>(random_int(0, spec.vocab_size - 1)));
        b.targets.push_back(static_cast<int32_t>(random_int(0, spec.vocab_size - 1)));
        const int t = i % T;
        b.doc_start.push_back(t == 0 ? 0 : random_int(0, 4) == 0 ? t : b.doc_start.back());
    }
    return b;
}

std::vector<Batch> Experiment::step() const {
    std::vector<Batch> batches;
    for (int i = 0; i < micro_batches; ++i) batches.push_back(batch());
    return batches;
}

std::string Experiment::described() const {
    std::string text =
        concat(train_gpt::described(spec), ", C ", spec.n_embd, ", V ", spec.vocab_size, ", B ", B,
               ", T ", T, ", ", micro_batches, " micro-batches, recompute ", name_of(recompute),
               documents ? ", documents" : "", ", router.balance=", router.balance.word(),
               ", router.level=", router.level.word(), ", router.z_loss=", router.z_loss);
    for (const auto& [key, value] : settings) text += concat(", ", key, "=", value);
    return text;
}

Rank::Rank(const Experiment& experiment, const Config& config, const Mesh& mesh,
           const Device& device)
    : mesh_(mesh),
      config_(config),
      arena_(allocate(plan_memory(
          {config, experiment.spec, experiment.dtype, experiment.recompute, mesh.world().size()},
          device))),
      trainer_(
          {config, experiment.spec, experiment.dtype, experiment.recompute, mesh.world().size()},
          arena_, mesh.rank()) {
    trainer_.connect(mesh);
    trainer_.parameters.state.initialize(experiment.seed);
    place_routers(trainer_.parameters, experiment.spec);
    trainer_.parameters.weights.gather_all(trainer_.stream);
}

StepOutcome Rank::step(const std::vector<Batch>& batches) {
    const size_t ranks = static_cast<size_t>(mesh_.size(Axis::data)),
                 first = static_cast<size_t>(mesh_.at(Axis::data));
    const size_t most = (batches.size() + ranks - 1) / ranks;
    const size_t mine = (batches.size() - first + ranks - 1) / ranks;
    trainer_.begin_step(static_cast<int>(mine), static_cast<int>(most));
    int64_t targets = 0;
    for (const Batch& batch : batches) targets += std::ssize(batch.targets);
    for (const PipelineAction& action : trainer_.actions()) {
        if (trainer_.begins_micro_batch(action)) {
            const size_t i = static_cast<size_t>(action.micro_batch) * ranks + first;
            trainer_.load(action.micro_batch, on_device(batches[i]));
        }
        trainer_.execute(action);
    }
    trainer_.update(optimizer_step(config_, step_++, 5e-4), 1.0f / static_cast<float>(targets),
                    static_cast<float>(config_.optimizer.grad_clip));
    trainer_.stream.synchronize();
    return trainer_.outcome();
}

std::vector<double> Rank::state(std::string_view which, int i) {
    const ParameterStore& store = trainer_.parameters;
    const Parameter& p = store.parameters()[static_cast<size_t>(i)];
    const Sharding& sharding = store.sharding();
    std::vector<float> held(static_cast<size_t>(p.numel()),
                            std::numeric_limits<float>::quiet_NaN());
    store.state.read(which, i, 0, held);
    // Several ranks may hold the same elements; only the first of them counts.
    const bool counts =
        (sharding.zero > 0 || sharding.rank == 0) && (p.is_part() || sharding.tensor == 0);
    std::vector<double> whole(held.size());
    for (size_t k = 0; counts && k < held.size(); ++k) whole[k] = std::isnan(held[k]) ? 0 : held[k];
    mesh_.world().all_reduce_sum(whole);
    return whole;
}

std::vector<float> Rank::logits(const std::vector<int32_t>& tokens) {
    TokenGenerator& generator = trainer_.generator();
    generator.reset();
    const size_t first = static_cast<size_t>(random_int(1, std::ssize(tokens) - 1));
    generator.feed(trainer_.stream, std::span(tokens).first(first));
    generator.feed(trainer_.stream, std::span(tokens).subspan(first));
    return {generator.logits().begin(), generator.logits().end()};
}

std::array<double, 2> Rank::evaluate(const Batch& batch) {
    const EvaluationBatch& to = trainer_.evaluation_batch;
    fill(batch);
    to.run(trainer_.stream, trainer_.model);
    std::array<double, 2> sums = {to.total(trainer_.stream, trainer_.model), 0};
    if (mesh_.at({Axis::data, Axis::tensor}) > 0) sums[0] = 0;
    mesh_.world().all_reduce_sum(std::span(sums).first(1));
    size_t i = 0;
    for (const float loss : to.losses(trainer_.stream, trainer_.model))
        sums[1] += loss * static_cast<double>(++i);  // differs where two are exchanged
    return sums;
}

void Rank::fill(const Batch& batch) {
    const EvaluationBatch& to = trainer_.evaluation_batch;
    std::ranges::copy(batch.tokens, to.tokens.begin());
    std::ranges::copy(batch.targets, to.targets.begin());
    if (!to.doc_start.empty()) std::ranges::copy(batch.doc_start, to.doc_start.begin());
}

TokenBatch Rank::on_device(const Batch& batch) {
    trainer_.stream.synchronize();  // the batch before is not needed any more
    fill(batch);
    return trainer_.evaluation_batch.upload(trainer_.stream);
}

double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
    REQUIRE(a.size() == b.size());
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double difference = std::abs(a[i] - b[i]);
        if (!(difference <= most)) most = difference;
    }
    return most / std::max(largest(b), 1e-30);
}

void check_as_one_rank(const Experiment& experiment, const Mesh& mesh, const Device& device) {
    INFO(experiment.described() << ", rank " << mesh.rank() << " of " << mesh.world().size());
    const Mesh alone;
    Rank one(experiment, experiment.config(true), alone, device);
    Rank rank(experiment, experiment.config(), mesh, device);
    for (int step = 0; step < steps; ++step) {
        CAPTURE(step);
        const std::vector<Batch> batches = experiment.step();
        const StepOutcome expected = one.step(batches), ours = rank.step(batches);
        CHECK(std::abs(ours.sums.loss - expected.sums.loss) <= 1e-5 * expected.sums.loss);
        CHECK(std::abs(ours.state.norm - expected.state.norm) <= 2e-5 * expected.state.norm);
        if (step > 0) continue;
        const auto gradient = ParameterState::gradient;
        const auto parameters = one.trainer().registry.parameters;
        double of_all = 0;  // the largest element
        for (int i = 0; i < static_cast<int>(parameters.size()); ++i)
            of_all = std::max(of_all, largest(one.state(gradient, i)));
        for (int i = 0; i < static_cast<int>(parameters.size()); ++i) {
            INFO(parameters[static_cast<size_t>(i)].name);
            const std::vector<double> exact = one.state(gradient, i);
            const double difference =
                relative_difference(rank.state(gradient, i), exact) * largest(exact);
            // A gradient can be all rounding of terms that cancel: with a vocabulary of one token
            // attention has the same result wherever it looks.
            CHECK(difference <= 2e-5 * largest(exact) + 0x1p-24 * of_all);
        }
    }
    const Batch batch = experiment.batch();
    const auto expected = one.evaluate(batch), sums = rank.evaluate(batch);
    for (size_t i = 0; i < sums.size(); ++i)
        CHECK(std::abs(sums[i] - expected[i]) <= 1e-5 * expected[i]);
    std::vector<int32_t> prompt = batch.tokens;
    prompt.resize(std::min<size_t>(prompt.size(), 7));
    const std::vector<float> ours = rank.logits(prompt), theirs = one.logits(prompt);
    CHECK(relative_difference({ours.begin(), ours.end()}, {theirs.begin(), theirs.end()}) <= 1e-4);
}

}  // namespace train_gpt::experiment
