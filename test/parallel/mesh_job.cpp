#include "test/parallel/mesh_job.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <utility>

#include "base/error.h"
#include "model/families/family.h"
#include "test/random.h"
#include "training/config/load_config.h"
#include "training/plan/memory_plan.h"
#include "training/schedule.h"

namespace train_gpt::mesh_job {

namespace {

bool is_mixture(const std::string& family) {
    return family == "mixtral" || family == "olmoe" || family == "gpt_oss" ||
           family.ends_with("_moe");
}

/// A small mixture that every mesh can share, balanced in one of six ways; in four of them experts
/// have a capacity, which sequences on several ranks do not allow. A token goes to two of five
/// experts; or to one of so many that some of them have no token in a step.
std::vector<std::string> settings_of_experts(const MeshCase& c, int way) {
    const bool fp8 = std::string(c.fp8) != "off";
    std::vector<std::string> settings{concat("model.n_expert=", c.many_experts ? 48 : 5),
                                      concat("model.n_expert_per_token=", c.many_experts ? 1 : 2),
                                      concat("model.n_ff_expert=", fp8              ? 64 * c.tensor
                                                                   : c.many_experts ? 8
                                                                                    : 24),
                                      "model.dense_layers=[1]",
                                      concat("router.balance=", way % 2 ? "bias" : "loss"),
                                      concat("router.z_loss=", way % 2 ? "0" : "0.01")};
    if (way % 2 == 0)
        settings.push_back(
            concat("router.level=",
                   std::array{"sequence", "micro_batch", "step"}[static_cast<size_t>(way / 2)]));
    if (c.context == 1 && way % 3 != 0)
        settings.push_back(concat("model.expert_capacity=", c.exact ? 1 : 0.7));
    if (std::string(c.family) == "qwen2_moe")
        settings.push_back(concat("model.n_ff_shared=", fp8 ? 64 * c.tensor : 40));
    if (std::string(c.family) == "gpt_oss") settings.push_back("model.window=5");
    return settings;
}

/// Ranks that share products or sequences round differently, and a token must not go elsewhere for
/// it. So a token's experts follow from its number: embeddings and routers are such that a logit is
/// about 2.4 for one expert, 1.2 for the next and 0 for the others, with random parts of about 0.2.
void place_choices(ParameterStore& store, const DecoderSpec& spec, uint64_t seed) {
    const Registry registry = registry_of(spec);
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0, 0.02f);
    const auto set = [&](int parameter, auto&& larger) {
        const Parameter& p = registry.parameters[static_cast<size_t>(parameter)];
        std::vector<float> values(static_cast<size_t>(p.numel()));
        for (size_t i = 0; i < values.size(); ++i)
            values[i] = normal(random) + larger(static_cast<int64_t>(i) / spec.n_embd,
                                                static_cast<int64_t>(i) % spec.n_embd);
        if (const int i = store.index_of(p.name); i >= 0)
            store.state.write(ParameterState::master, i, 0, values);
    };
    const int64_t E = spec.experts.n_expert;
    set(registry.tokens, [&](int64_t token, int64_t c) {
        return c == token % E ? 0.4f : c == (token + 1) % E ? 0.2f : 0;
    });
    for (const BlockParameters& p : registry.blocks)
        if (p.router_w >= 0)
            set(p.router_w, [](int64_t expert, int64_t c) { return expert == c ? 0.5f : 0; });
}

}  // namespace

std::string name_of(const MeshCase& c) {
    return concat("tensor ", c.tensor, " × data ", c.data, ", ZeRO-", c.zero, " over ",
                  c.shard_ranks, ", ", c.family, ", ", c.micro_batches, " micro-batches, ", c.dtype,
                  ", context ", c.context, c.has_documents ? ", documents" : "",
                  c.exact ? ", exact" : "", c.muon ? ", muon" : "", ", state in ", c.state,
                  c.many_experts ? ", many experts" : "", c.offload ? ", offload" : "",
                  ", recompute ", c.recompute, ", fp8 ", c.fp8, ", pipeline ", c.pipeline.ranks,
                  " ", c.pipeline.schedule, " × ", c.pipeline.per_rank);
}

Config config_of(const MeshCase& c, uint64_t seed, const std::string& device, bool split) {
    std::mt19937_64 random(seed);
    const auto from = [&](int low, int high) {
        return std::uniform_int_distribution<int>(low, high)(random);
    };
    // Tensor-parallel ranks share the rows of micro-batches evenly, in up to two chunks.
    // Context-parallel ranks have two chunks of each sequence.
    const int whole_T = c.tensor == 1 ? from(9, 16) : 2 * c.tensor * from(2, 3), B = from(1, 2);
    const bool fp8 = std::string(c.fp8) != "off";
    const int T = fp8              ? 16 * c.context
                  : c.context == 1 ? whole_T
                                   : 2 * c.context * c.tensor * from(1, 4);
    const int n_embd = fp8 ? 128 : 32;
    const int kv_heads = std::max(c.tensor, 2 * from(1, 2));
    // Buckets of single blocks, one for all blocks, and of several: one after the other, so that a
    // table of cases has all of them.
    constexpr const char* bucket_mb[] = {"0.02", "64", "0.04", "0.09"};
    const std::string family = c.family;
    std::vector<std::string> settings{
        concat("seed=", from(0, 1 << 30)), "device=" + device, "run_dir=unused",
        "data.train=synthetic", "model.family=" + family,
        // So many that with ZeRO-3 small buckets, of up to two blocks, take turns more than once.
        concat("model.n_layer=", std::max(from(7, 9), c.pipeline.ranks * c.pipeline.per_rank)),
        "model.n_head=4", concat("model.n_embd=", n_embd), concat("model.head_size=", n_embd / 4),
        concat("model.n_ff=", 2 * n_embd), concat("precision.fp8=", c.fp8),
        concat("model.n_kv_head=", family == "gpt2" ? 4 : kv_heads),
        concat("model.n_ctx=", T + from(0, 4)),
        // Where there are documents, a few tokens long
        concat("model.vocab_size=", 128 * (c.tensor - 1) + (c.has_documents ? from(3, 8)
                                                            : c.tensor == 1 ? from(201, 300)
                                                                            : from(1, 100))),
        concat("data.document_mask=", c.has_documents ? "true" : "false"),
        concat("batch.tokens_per_step=", c.micro_batches * B * T), concat("batch.micro_batch=", B),
        concat("batch.sequence_length=", T),
        // With 0.003, rounding errors grow up to threefold in a step.
        "optimizer.learning_rate=0.0005",
        "optimizer.epsilon=0.001",  // as in training_job.h
        "optimizer.grad_clip=0.5", "schedule.steps=20", "schedule.warmup_steps=3",
        concat("precision.dtype=", c.dtype), "kernels.autotune=off",
        concat("parallel.sums=", c.exact ? "exact" : "fp32"),
        concat("parallel.bucket_mb=", bucket_mb[seed % 4]),
        concat("optimizer.state_dtype=", c.state)};
    if (is_mixture(family))
        for (const std::string& setting : settings_of_experts(c, from(0, 5)))
            settings.push_back(setting);
    if (c.muon)
        for (const std::string& setting :
             {concat("optimizer.name=muon"),
              concat("optimizer.muon_heads=", from(0, 1) ? "true" : "false"),
              concat("optimizer.nesterov=", from(0, 1) ? "true" : "false"),
              concat("optimizer.muon_dtype=", from(0, 1) ? "bf16" : "fp32")})
            settings.push_back(setting);
    const int chunks = from(1, 2), keeps = from(0, 1);
    if (split)
        for (const auto& [key, value] : {std::pair{"tensor", c.tensor},
                                         {"zero", c.zero},
                                         {"shard_ranks", c.shard_ranks},
                                         {"context", c.context},
                                         {"pipeline", c.pipeline.ranks},
                                         {"stages_per_rank", c.pipeline.per_rank},
                                         {"tensor_chunks", chunks}})
            settings.push_back(concat("parallel.", key, "=", value));
    if (split) settings.push_back(concat("parallel.schedule=", c.pipeline.schedule));
    if (split) settings.push_back(concat("memory.recompute=", c.recompute));
    if (split && c.offload) settings.emplace_back(R"(memory.offload=["optimizer", "activations"])");
    settings.push_back(concat("parallel.tensor_keep_gathered=", keeps ? "true" : "false"));
    return parse_config("{}", "test", settings);
}

MeshRun::MeshRun(const World& world, const Device& device, const Config& config,
                 const std::function<void(Trainer&)>& choose)
    : config_(config),
      spec_(spec_of(config, config.model.vocab_size)),
      dtype_(resolve_dtype(config.precision.dtype, device)),
      recompute_(std::optional<Recompute>(config.memory.recompute).value_or(Recompute::none)),
      mesh_(world, device, mesh_sizes(config)),
      arena_(allocate(
          plan_memory({config, spec_, dtype_, recompute_, ranks()}, device, mesh_.rank()))),
      trainer_({config, spec_, dtype_, recompute_, ranks()}, arena_, mesh_.rank()),
      loader_({sources()}, loading(config)) {
    if (choose) choose(trainer_);
    trainer_.connect(mesh_);
    trainer_.parameters.state.initialize(config.seed);
    if (spec_.experts && config.parallel.sums != GradientSums::exact)
        place_choices(trainer_.parameters, spec_, config.seed);
    trainer_.parameters.weights.gather_all(trainer_.stream);
    if (config.parallel.sums != GradientSums::exact) return;
    LoaderOptions options = loading(config);
    options.rank = 0, options.world = 1;
    TrainLoader first({sources()}, options);
    trainer_.choose_first_grids(first);
}

StepOutcome MeshRun::step() {
    submit();
    const StepOutcome outcome = trainer_.outcome();
    check_counts(outcome.routers);
    return outcome;
}

void MeshRun::submit(const std::function<void(int)>& before) {
    trainer_.begin_step(loader_.micro_batches(), loader_.most_micro_batches());
    for (const PipelineAction& action : trainer_.actions()) {
        if (trainer_.begins_micro_batch(action)) {
            trainer_.load(action.micro_batch, loader_);
            if (before) before(action.micro_batch);
        }
        trainer_.execute(action);
    }
    trainer_.update(optimizer_step(config_, steps_, learning_rate(config_, steps_, 20)),
                    1.0f / static_cast<float>(config_.batch.tokens_per_step),
                    static_cast<float>(config_.optimizer.grad_clip));
    ++steps_;
}

void MeshRun::lone_micro_batch(int owner, uint64_t seed) {
    std::mt19937_64 random(seed);
    const EvaluationBatch& batch = trainer_.evaluation_batch;
    for (size_t i = 0; i < batch.tokens.size(); ++i) {
        batch.tokens[i] = static_cast<int32_t>(random() % static_cast<uint64_t>(spec_.vocab_size));
        batch.targets[i] = static_cast<int32_t>(random() % static_cast<uint64_t>(spec_.vocab_size));
        if (!batch.doc_start.empty()) batch.doc_start[i] = 0;
        if (mesh_.at(Axis::data) != owner) batch.targets[i] = -1;
    }
    trainer_.begin_step(1, 1);
    trainer_.load(0, batch.upload(trainer_.stream));
    for (const PipelineAction& action : trainer_.actions()) trainer_.execute(action);
    trainer_.parameters.gradients.finish(trainer_.stream);
    trainer_.stream.synchronize();
}

std::vector<std::vector<double>> MeshRun::values_of(std::string_view state) {
    const ParameterStore& store = trainer_.parameters;
    const Sharding& s = store.sharding();
    const bool is_copy = s.replica > 0 || (s.zero == 0 && s.rank > 0);
    std::vector<std::vector<double>> all;
    for (const Parameter& p : registry_of(spec_).parameters) {
        std::vector<float> mine(static_cast<size_t>(p.numel()));
        const int i = store.index_of(p.name);
        const bool is_here = i >= 0 && store.parameters()[static_cast<size_t>(i)].tied_to.empty();
        const bool is_whole_copy =
            is_here && !store.parameters()[static_cast<size_t>(i)].is_part() && s.tensor > 0;
        if (is_here && !is_copy && !is_whole_copy) store.state.read(state, i, 0, mine);
        std::vector<double>& sums = all.emplace_back(mine.begin(), mine.end());
        mesh_.world().all_reduce_sum(sums);
    }
    return all;
}

StepOutcome MeshRun::exact_step(bool ahead) {
    for (;; ahead = false) {
        submit();
        if (ahead) submit();
        const StepOutcome outcome = trainer_.outcome();
        check_counts(outcome.routers);
        if (!outcome.state.overflow) return outcome;
        if (ahead) trainer_.outcome();
        ++repeated_;
        trainer_.optimizer.clear_overflow();
        loader_.seek(steps_ -= ahead ? 2 : 1);
    }
}

void MeshRun::check_counts(const RouterReport& report) const {
    int64_t routers = 0;
    for (int l = 0; l < spec_.n_layer; ++l) routers += spec_.has_experts(l);
    REQUIRE(report.routers() == routers);
    const ExpertSpec& e = spec_.experts;
    for (int64_t r = 0; r < routers; ++r) {
        const auto first = report.chosen.begin() + r * e.n_expert;
        CHECK(std::accumulate(first, first + e.n_expert, int64_t{0}) ==
              config_.batch.tokens_per_step * e.n_expert_per_token);
    }
    CHECK(std::ssize(report.biases) == (e.selection_bias ? routers * e.n_expert : 0));
    for (const float bias : report.biases) CHECK(std::isfinite(bias));
}

TrainSource MeshRun::sources() const {
    return {std::make_shared<TokenShards>("synthetic", static_cast<uint32_t>(spec_.vocab_size)), 1};
}

LoaderOptions MeshRun::loading(const Config& config) const {
    LoaderOptions options = loader_options(config, mesh_.layout(), mesh_.rank());
    if (config.data.document_mask) options.document_boundary = 0;
    return options;
}

Environment late_streams() {
    return {{"GPUSIM_STREAMS", "lazy"},
            {"GPUSIM_SEED", std::to_string(random_int(1, 1000))},
            {"GPUSIM_NCCL_PROGRESS_MS", "300"}};
}

}  // namespace train_gpt::mesh_job
