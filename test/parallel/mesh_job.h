// Training on a mesh, in this process's part of the ranks that mpirun has started: many meshes are
// tried by one start of ranks.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <omp.h>

#include "device/copy.h"
#include "model/families/family.h"
#include "parallel/mesh.h"
#include "test/catch.h"
#include "test/parallel/training_job.h"
#include "training/config/load_config.h"
#include "training/plan/memory_plan.h"
#include "training/schedule.h"
#include "training/trainer.h"

namespace train_gpt::mesh_job {

/// A mesh, and a run on it.
struct MeshCase {
    const char* family;
    int micro_batches;
    const char* dtype = "fp32";
    int tensor = 1, data = 1, zero = 0, shard_ranks = 0, context = 1;
    bool has_documents = false;
    bool exact = false;          // parallel.sums
    bool muon = false;           // optimizer.name
    bool many_experts = false;   // more than there are tokens for
    const char* state = "fp32";  // optimizer.state_dtype
    bool offload = false;        // memory.offload: all that can be
    const char* fp8 = "off";     // precision.fp8; products are then wide enough for it
    struct Stages {
        int ranks = 1;
        const char* schedule = "1f1b";
        int per_rank = 1;
    } pipeline = {};

    int ranks() const { return tensor * data * context * pipeline.ranks; }
};

/// A row of a table of cases: trains("gpt2", 5).data(2).zero(3) is GPT-2 in five micro-batches on
/// two data-parallel ranks with ZeRO-3.
class MeshRow {
  public:
    constexpr explicit MeshRow(const MeshCase& c) : case_(c) {}
    constexpr operator MeshCase() const { return case_; }  // NOLINT(google-explicit-constructor)

    constexpr MeshRow bf16() const { return with(&MeshCase::dtype, "bf16"); }
    constexpr MeshRow tensor(int ranks) const { return with(&MeshCase::tensor, ranks); }
    constexpr MeshRow data(int ranks) const { return with(&MeshCase::data, ranks); }
    constexpr MeshRow zero(int stage) const { return with(&MeshCase::zero, stage); }
    constexpr MeshRow shard_ranks(int ranks) const { return with(&MeshCase::shard_ranks, ranks); }
    constexpr MeshRow context(int ranks) const { return with(&MeshCase::context, ranks); }
    constexpr MeshRow documents() const { return with(&MeshCase::has_documents, true); }
    constexpr MeshRow exact() const { return with(&MeshCase::exact, true); }
    constexpr MeshRow muon() const { return with(&MeshCase::muon, true); }
    constexpr MeshRow fp8(const char* recipe) const { return with(&MeshCase::fp8, recipe); }
    constexpr MeshRow offload() const { return with(&MeshCase::offload, true); }
    constexpr MeshRow state(const char* dtype) const { return with(&MeshCase::state, dtype); }
    constexpr MeshRow many_experts() const { return with(&MeshCase::many_experts, true); }
    constexpr MeshRow pipeline(int ranks, const char* schedule = "1f1b",
                               int stages_per_rank = 1) const {
        return with(&MeshCase::pipeline, {ranks, schedule, stages_per_rank});
    }

  private:
    template <class T>
    constexpr MeshRow with(T MeshCase::*member, std::type_identity_t<T> value) const {
        MeshRow changed = *this;
        changed.case_.*member = value;
        return changed;
    }

    MeshCase case_;
};
constexpr MeshRow trains(const char* family, int micro_batches) {
    return MeshRow({.family = family, .micro_batches = micro_batches});
}

inline std::string name_of(const MeshCase& c) {
    return concat("tensor ", c.tensor, " × data ", c.data, ", ZeRO-", c.zero, " over ",
                  c.shard_ranks, ", ", c.family, ", ", c.micro_batches, " micro-batches, ", c.dtype,
                  ", context ", c.context, c.has_documents ? ", documents" : "",
                  c.exact ? ", exact" : "", c.muon ? ", muon" : "", ", state in ", c.state,
                  c.many_experts ? ", many experts" : "", c.offload ? ", offload" : "", ", fp8 ",
                  c.fp8, ", pipeline ", c.pipeline.ranks, " ", c.pipeline.schedule, " × ",
                  c.pipeline.per_rank);
}

inline bool is_mixture(const std::string& family) {
    return family == "mixtral" || family == "olmoe" || family == "gpt_oss" ||
           family.ends_with("_moe");
}

/// A small mixture that every mesh can share, balanced in one of six ways; in four of them experts
/// have a capacity, which sequences on several ranks do not allow. A token goes to two of five
/// experts; or to one of so many that some of them have no token in a step.
inline std::vector<std::string> settings_of_experts(const MeshCase& c, int way) {
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
inline void place_choices(ParameterStore& store, const DecoderSpec& spec, uint64_t seed) {
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

/// The configuration of a case, the same for the same seed; of one rank if `split` is false.
inline Config config_of(const MeshCase& c, uint64_t seed, const std::string& device,
                        bool split = true) {
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
    if (split && c.offload) settings.emplace_back(R"(memory.offload=["optimizer", "activations"])");
    settings.push_back(concat("parallel.tensor_keep_gathered=", keeps ? "true" : "false"));
    return parse_config("{}", "test", settings);
}

/// A run on the ranks of a world, or of one rank.
class MeshRun {
  public:
    /// choose(trainer) is called where a run chooses its kernels.
    MeshRun(const World& world, const Device& device, const Config& config,
            const std::function<void(Trainer&)>& choose = {})
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

    const Mesh& mesh() const { return mesh_; }
    const Config& config() const { return config_; }
    const DecoderSpec& spec() const { return spec_; }
    Trainer& trainer() { return trainer_; }
    int ranks() const { return mesh_.layout().world(); }
    bool has_most_micro_batches() const {
        return loader_.micro_batches() == loader_.most_micro_batches();
    }

    StepOutcome step() {
        submit();
        const StepOutcome outcome = trainer_.outcome();
        check_counts(outcome.routers);
        return outcome;
    }
    /// A step whose outcome is not taken yet. before(i): before micro-batch i is computed.
    void submit(const std::function<void(int)>& before = {}) {
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

    /// Leaves the gradients of one micro-batch of random tokens, which only one of the
    /// data-parallel ranks has; no update.
    void lone_micro_batch(int owner, uint64_t seed) {
        std::mt19937_64 random(seed);
        const EvaluationBatch& batch = trainer_.evaluation_batch;
        for (size_t i = 0; i < batch.tokens.size(); ++i) {
            batch.tokens[i] =
                static_cast<int32_t>(random() % static_cast<uint64_t>(spec_.vocab_size));
            batch.targets[i] =
                static_cast<int32_t>(random() % static_cast<uint64_t>(spec_.vocab_size));
            if (!batch.doc_start.empty()) batch.doc_start[i] = 0;
            if (mesh_.at(Axis::data) != owner) batch.targets[i] = -1;
        }
        trainer_.begin_step(1, 1);
        trainer_.load(0, batch.upload(trainer_.stream));
        for (const PipelineAction& action : trainer_.actions()) trainer_.execute(action);
        trainer_.parameters.gradients.finish(trainer_.stream);
        trainer_.stream.synchronize();
    }

    /// A state of every parameter (ParameterState), put together from all ranks, on all of them.
    std::vector<std::vector<double>> values_of(std::string_view state) {
        const ParameterStore& store = trainer_.parameters;
        const Sharding& s = store.sharding();
        const bool is_copy = s.replica > 0 || (s.zero == 0 && s.rank > 0);
        std::vector<std::vector<double>> all;
        for (const Parameter& p : registry_of(spec_).parameters) {
            std::vector<float> mine(static_cast<size_t>(p.numel()));
            const int i = store.index_of(p.name);
            const bool is_here =
                i >= 0 && store.parameters()[static_cast<size_t>(i)].tied_to.empty();
            const bool is_whole_copy =
                is_here && !store.parameters()[static_cast<size_t>(i)].is_part() && s.tensor > 0;
            if (is_here && !is_copy && !is_whole_copy) store.state.read(state, i, 0, mine);
            std::vector<double>& sums = all.emplace_back(mine.begin(), mine.end());
            mesh_.world().all_reduce_sum(sums);
        }
        return all;
    }
    /// The last gradient sums over all ranks.
    std::vector<std::vector<double>> gradients() { return values_of(ParameterState::gradient); }

    /// Where exact sums overflow, the step comes again. `ahead`: it is known to overflow, and the
    /// next step is submitted before its outcome is taken.
    StepOutcome exact_step(bool ahead = false) {
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
    int repeated() const { return repeated_; }
    /// After so many steps, as a run that resumes.
    void skip(int64_t steps) { loader_.seek(steps_ = steps); }

  private:
    /// Each router has counted every token of the step once, on whichever rank.
    void check_counts(const RouterReport& report) const {
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

    TrainSource sources() const {
        return {std::make_shared<TokenShards>("synthetic", static_cast<uint32_t>(spec_.vocab_size)),
                1};
    }
    LoaderOptions loading(const Config& config) const {
        LoaderOptions options = loader_options(config, mesh_.layout(), mesh_.rank());
        if (config.data.document_mask) options.document_boundary = 0;
        return options;
    }

    Config config_;
    DecoderSpec spec_;
    DType dtype_;
    Recompute recompute_;
    Mesh mesh_;
    Arena arena_;
    Trainer trainer_;
    TrainLoader loader_;
    int64_t steps_ = 0;
    int repeated_ = 0;
};

/// Gives each of the next cases, as many as fit, a part of the ranks, until all have had one.
/// check(part, case, its number) runs on the ranks of the part.
template <class Check>
void on_parts(const World& world, std::span<const MeshCase> cases, Check&& check) {
    for (size_t first = 0, next = 0; first < cases.size(); first = next) {
        int used = 0;
        std::optional<size_t> mine;
        for (; next < cases.size() && used + cases[next].ranks() <= world.size(); ++next) {
            const int end = used + cases[next].ranks();
            if (world.rank() >= used && world.rank() < end) mine = next;
            used = end;
        }
        REQUIRE(next > first);
        const World part = world.split(static_cast<int>(mine ? *mine - first : cases.size()));
        if (mine) check(part, cases[*mine], *mine);
        world.barrier();
    }
}

/// An adverse order of a simulated GPU's streams, another one each time.
inline Environment late_streams() {
    return {{"GPUSIM_STREAMS", "lazy"},
            {"GPUSIM_SEED", std::to_string(random_int(1, 1000))},
            {"GPUSIM_NCCL_PROGRESS_MS", "300"}};
}

}  // namespace train_gpt::mesh_job
