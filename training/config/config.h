// The configuration of a run: one struct, read from JSON and written to it. config_keys.h has the
// table of its keys.
#pragma once
#include <cassert>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "device/stream.h"
#include "kernels/muon/muon.h"
#include "kernels/muon/newton_schulz.h"
#include "model/fp8_scales.h"
#include "model/recompute.h"
#include "model/router_counts.h"
#include "model/spec.h"
#include "parallel/pipeline/pipeline_schedule.h"
#include "parallel/state/sharding.h"
#include "training/config/one_of.h"

namespace train_gpt {

/// How a run shows its progress: a line that is rewritten, or separate lines. automatic: a
/// rewritten line for one rank on a terminal, else separate lines.
enum class ProgressStyle { automatic, line, lines };

/// How the learning rate falls after the warm-up: schedule.h.
enum class Decay { cosine, linear, constant, wsd };

template <>
struct WordsOf<Decay> {
    static constexpr Word<Decay> list[] = {{"cosine", Decay::cosine},
                                           {"linear", Decay::linear},
                                           {"constant", Decay::constant},
                                           {"wsd", Decay::wsd}};
};

/// What a run does at a spike of the loss or the gradient norm (kernels/spikes.h).
enum class OnSpike { report, skip };

template <>
struct WordsOf<OnSpike> {
    static constexpr Word<OnSpike> list[] = {{"report", OnSpike::report}, {"skip", OnSpike::skip}};
};

enum class OptimizerName { adamw, muon };

template <>
struct WordsOf<OptimizerName> {
    static constexpr Word<OptimizerName> list[] = {{"adamw", OptimizerName::adamw},
                                                   {"muon", OptimizerName::muon}};
};

template <>
struct WordsOf<NewtonSchulzList> {
    static constexpr Word<NewtonSchulzList> list[] = {
        {"quintic", NewtonSchulzList::quintic},
        {"tuned", NewtonSchulzList::tuned},
        {"polar_express", NewtonSchulzList::polar_express},
        {"polar_express_8", NewtonSchulzList::polar_express_8},
        {"cans", NewtonSchulzList::cans},
        {"cubic", NewtonSchulzList::cubic},
        {"deepseek", NewtonSchulzList::deepseek}};
};

/// How the optimizer's state is kept (kernels/adamw.h).
enum class StateDType : uint8_t { fp32, bf16, int8 };
template <>
struct WordsOf<StateDType> {
    static constexpr Word<StateDType> list[] = {
        {"fp32", StateDType::fp32}, {"bf16", StateDType::bf16}, {"int8", StateDType::int8}};
};

template <>
struct WordsOf<MuonScale> {
    static constexpr Word<MuonScale> list[] = {{"rms", MuonScale::rms},
                                               {"spectral", MuonScale::spectral}};
};

template <>
struct WordsOf<DType> {
    static constexpr Word<DType> list[] = {{name_of(DType::bf16), DType::bf16},
                                           {name_of(DType::fp32), DType::fp32}};
};

/// std::nullopt: the program chooses.
template <>
struct WordsOf<std::optional<DType>> {
    static constexpr Word<std::optional<DType>> list[] = {{"auto", std::nullopt},
                                                          {name_of(DType::bf16), DType::bf16},
                                                          {name_of(DType::fp32), DType::fp32}};
};

template <>
struct WordsOf<std::optional<GradientSums>> {
    static constexpr Word<std::optional<GradientSums>> list[] = {{"auto", std::nullopt},
                                                                 {"exact", GradientSums::exact},
                                                                 {"fp32", GradientSums::fp32},
                                                                 {"bf16", GradientSums::bf16}};
};

template <>
struct WordsOf<std::optional<Recompute>> {
    static constexpr Word<std::optional<Recompute>> list[] = {
        {"auto", std::nullopt},
        {name_of(Recompute::none), Recompute::none},
        {name_of(Recompute::elementwise), Recompute::elementwise},
        {name_of(Recompute::block), Recompute::block}};
};

template <>
struct WordsOf<std::optional<Norm>> {
    static constexpr Word<std::optional<Norm>> list[] = {
        {"auto", std::nullopt}, {"layernorm", Norm::layer}, {"rmsnorm", Norm::rms}};
};

template <>
struct WordsOf<std::optional<Mlp>> {
    static constexpr Word<std::optional<Mlp>> list[] = {{"auto", std::nullopt},
                                                        {"gelu", Mlp::gelu},
                                                        {"swiglu", Mlp::swiglu},
                                                        {"relu2", Mlp::relu2}};
};

template <>
struct WordsOf<std::optional<Biases>> {
    static constexpr Word<std::optional<Biases>> list[] = {{"auto", std::nullopt},
                                                           {"none", Biases::none},
                                                           {"qkv", Biases::qkv},
                                                           {"attention", Biases::attention},
                                                           {"all", Biases::all}};
};

/// "on" stands for heads.
template <>
struct WordsOf<std::optional<QkNormKind>> {
    static constexpr Word<std::optional<QkNormKind>> list[] = {{"auto", std::nullopt},
                                                               {"off", QkNormKind::off},
                                                               {"head", QkNormKind::head},
                                                               {"width", QkNormKind::width},
                                                               {"on", QkNormKind::head}};
};

template <>
struct WordsOf<std::optional<RouterScore>> {
    static constexpr Word<std::optional<RouterScore>> list[] = {{"auto", std::nullopt},
                                                                {"softmax", RouterScore::softmax},
                                                                {"sigmoid", RouterScore::sigmoid}};
};

/// How the experts of a mixture are kept equally busy.
enum class Balance { none, loss, bias };

template <>
struct WordsOf<Balance> {
    static constexpr Word<Balance> list[] = {
        {"none", Balance::none}, {"loss", Balance::loss}, {"bias", Balance::bias}};
};

template <>
struct WordsOf<BalanceLevel> {
    static constexpr Word<BalanceLevel> list[] = {{"sequence", BalanceLevel::sequence},
                                                  {"micro_batch", BalanceLevel::micro_batch},
                                                  {"step", BalanceLevel::step}};
};

template <>
struct WordsOf<std::optional<Positions>> {
    static constexpr Word<std::optional<Positions>> list[] = {
        {"auto", std::nullopt}, {"learned", Positions::learned}, {"rope", Positions::rope}};
};

template <>
struct WordsOf<std::optional<bool>> {
    static constexpr Word<std::optional<bool>> list[] = {
        {"auto", std::nullopt}, {"on", true}, {"off", false}};
};

template <>
struct WordsOf<RopeScaling> {
    static constexpr Word<RopeScaling> list[] = {{"none", RopeScaling::none},
                                                 {"linear", RopeScaling::linear},
                                                 {"llama3", RopeScaling::llama3},
                                                 {"yarn", RopeScaling::yarn}};
};

template <>
struct WordsOf<bool> {
    static constexpr Word<bool> list[] = {{"on", true}, {"off", false}};
};

template <>
struct WordsOf<Fp8Recipe> {
    static constexpr Word<Fp8Recipe> list[] = {
        {"off", Fp8Recipe::off}, {"delayed", Fp8Recipe::delayed}, {"current", Fp8Recipe::current}};
};

template <>
struct WordsOf<PipelineKind> {
    static constexpr Word<PipelineKind> list[] = {{"1f1b", PipelineKind::one_f_one_b},
                                                  {"gpipe", PipelineKind::gpipe},
                                                  {"interleaved", PipelineKind::interleaved},
                                                  {"zero_bubble", PipelineKind::zero_bubble}};
};

template <>
struct WordsOf<KernelSettings::Gemm> {
    static constexpr Word<KernelSettings::Gemm> list[] = {{"auto", KernelSettings::Gemm::automatic},
                                                          {"onednn", KernelSettings::Gemm::onednn},
                                                          {"own", KernelSettings::Gemm::own}};
};

template <>
struct WordsOf<KernelSettings::Attention> {
    static constexpr Word<KernelSettings::Attention> list[] = {
        {"auto", KernelSettings::Attention::automatic},
        {"own", KernelSettings::Attention::own},
        {"cudnn", KernelSettings::Attention::cudnn},
        {"wgmma", KernelSettings::Attention::wgmma}};
};

template <>
struct WordsOf<ProgressStyle> {
    static constexpr Word<ProgressStyle> list[] = {{"auto", ProgressStyle::automatic},
                                                   {"line", ProgressStyle::line},
                                                   {"lines", ProgressStyle::lines}};
};

/// Everything on which a run depends. The JSON file has the same sections and names. `train_gpt
/// config` prints the table of keys with types, defaults, rules and meanings.
struct Config {
    /// A note for people. A preset's note says where it departs from the published model.
    std::string description;
    std::string run_dir;
    uint64_t seed = 1337;
    std::string device = "auto";  // auto | cpu | cuda

    struct Model {
        std::string family = "gpt2";
        int n_layer = 12, n_head = 12, n_embd = 768, n_ctx = 1024;
        int vocab_size = 0;  // 0: the tokenizer's size
        // What differs from the model's family; 0 and "auto": nothing.
        int n_kv_head = 0, head_size = 0, n_ff = 0;
        OneOf<std::optional<Norm>> norm = {};
        double norm_epsilon = 0;
        OneOf<std::optional<Mlp>> mlp = {};
        OneOf<std::optional<Biases>> bias = {};
        OneOf<std::optional<QkNormKind>> qk_norm = {};
        OneOf<std::optional<bool>> tied_head = {};
        double attention_softcap = 0, head_softcap = 0;  // 0: none
        std::optional<int> window = {};
        std::string window_pattern = {};
        OneOf<std::optional<bool>> sinks = {};
        OneOf<std::optional<bool>> clamped_swiglu = {};
        // Experts
        int n_expert = 0, n_expert_per_token = 0, n_ff_expert = 0;
        std::optional<int> n_ff_shared = {};
        OneOf<std::optional<bool>> shared_gate = {};
        OneOf<std::optional<RouterScore>> router = {};
        OneOf<std::optional<bool>> router_normalise = {};
        double router_scale = 0;
        OneOf<std::optional<bool>> router_bias = {}, expert_bias = {};
        double expert_capacity = 0;  // 0: no route is dropped
        std::vector<int> dense_layers = {};
        int experts_every = 1;
        OneOf<std::optional<Positions>> positions = {};
        double init_std = 0;
        OneOf<bool> init_residual_scaling = true;
        OneOf<bool> init_zero_projections = false;
        double rope_theta = 0;
        OneOf<RopeScaling> rope_scaling = {};
        double rope_factor = 1, rope_low_freq_factor = 1, rope_high_freq_factor = 4;
        int rope_original_n_ctx = 8192;
        double rope_beta_fast = 32, rope_beta_slow = 1, rope_attention_factor = 0;
        bool rope_truncate = true;
        std::string init_from = {};  // a checkpoint whose weights start this run
    } model;

    struct Tokenizer {
        std::string path;
    } tokenizer;

    struct Data {
        struct Source {
            std::string glob;  // a glob of token shards, or "synthetic"
            double weight = 1;
            std::string name;  // in metrics
            bool operator==(const Source&) const = default;
        };
        std::vector<Source> train;
        std::string val;  // a glob of token shards, or "synthetic"
        bool document_mask = false;
    } data;

    struct Batch {
        int64_t tokens_per_step = 524288;
        /// Batch warm-up (plan_steps() in schedule.h): a step's tokens grow from
        /// warmup_tokens_per_step to tokens_per_step over the first warmup_tokens. 0: none.
        int64_t warmup_tokens = 0, warmup_tokens_per_step = 0;
        int micro_batch = 0;      // sequences; 0: chosen by fit_into() (fit.h)
        int sequence_length = 0;  // 0: n_ctx
    } batch;

    struct Optimizer {
        double learning_rate = 6e-4, weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8,
               grad_clip = 1.0;  // 0: no clipping
        OneOf<bool> cautious_decay = false;
        double z_loss = 0;
        OneOf<OnSpike> on_spike = OnSpike::report;
        OneOf<OptimizerName> name = {};
        OneOf<StateDType> state_dtype = StateDType::fp32;
        // Muon's
        double matrix_learning_rate = 0;  // 0: learning_rate
        double momentum = 0.95;
        bool nesterov = true, muon_heads = false;
        OneOf<NewtonSchulzList> muon_coefficients = {};
        OneOf<MuonScale> muon_scale = {};
        OneOf<DType> muon_dtype = DType::bf16;
    } optimizer;

    /// How the routers of a mixture are trained.
    struct Router {
        OneOf<Balance> balance = Balance::loss;
        OneOf<BalanceLevel> level = BalanceLevel::step;
        double balance_rate = 0;  // 0: 0.01 with a loss, 0.001 with a bias
        double z_loss = 0;
    } router;

    struct Schedule {
        int64_t steps = 0;  // exactly one of steps, tokens and epochs says how long a run is
        int64_t tokens = 0;
        double epochs = 0;
        /// After so many minutes the run saves a checkpoint and ends. Its schedule does not change.
        /// 0: no limit.
        double max_minutes = 0;
        int64_t warmup_steps = 0;
        OneOf<Decay> decay = Decay::cosine;
        double decay_fraction = 0.2;  // wsd: the share of the steps that the final decay takes
        int64_t decay_steps = 0;      // wsd: the same as a number of steps; 0: decay_fraction
        std::string decay_from = {};  // wsd: a checkpoint from where the run decays (decay_start.h)
        double final_fraction = 0.1;  // the last step's rate as a fraction of learning_rate
    } schedule;

    struct Precision {
        OneOf<std::optional<DType>> dtype;  // auto: bf16 if the device multiplies it natively
        OneOf<bool> tf32 = false;           // on a GPU
        OneOf<Fp8Recipe> fp8 = Fp8Recipe::off;
        std::vector<std::string> fp8_skip = {};  // Fp8Options::skip
        OneOf<bool> fp8_weight_gradient = true;
    } precision;

    /// What is kept where, and what is computed again instead.
    struct Memory {
        OneOf<std::optional<Recompute>> recompute;    // auto: the least that fits
        std::vector<std::string> offload = {"auto"};  // offload_of()
    } memory;

    struct Checkpoint {
        int64_t every = 1000;  // steps; 0: only at the end
        int keep = 2;          // how many of the newest checkpoints are kept; 0: all
        OneOf<std::optional<bool>> async = {};  // auto: on a GPU; on a CPU if the copy fits
    } checkpoint;

    struct Evaluation {
        int64_t every = 250;                  // steps; 0: only at the end
        int64_t max_tokens = 0;               // 0: the whole validation split
        std::string hellaswag;                // HellaSwag's published JSONL; empty: no HellaSwag
        std::vector<std::string> tasks = {};  // files or globs
        int64_t task_items = 500;             // of each task; 0: all
    } evaluation;

    struct Sampling {
        int64_t every = 0;  // steps; 0: not during training
        std::string prompt;
        int max_tokens = 64;
        double temperature = 0.8;
        int top_k = 0;  // 0: all
        double top_p = 1.0;
        uint64_t seed = 1;
        int samples = 3;  // at the end of a run
    } sampling;

    struct Log {
        int64_t every = 1;              // steps between lines
        int64_t fingerprint_every = 0;  // steps between fingerprints; 0: none
        OneOf<ProgressStyle> progress;
        OneOf<bool> tensorboard = true;
    } log;

    struct Kernels {
        OneOf<KernelSettings::Gemm> gemm;            // on the CPU
        OneOf<KernelSettings::Attention> attention;  // on a GPU
        OneOf<bool> autotune = true;                 // on a GPU
        OneOf<bool> deterministic = true;            // on a GPU
    } kernels;

    struct Parallel {
        int tensor = 1;  // tensor-parallel ranks
        bool allow_tensor_across_nodes = false;
        int tensor_chunks = 1;  // how many chunks the rows of activations travel in
        bool tensor_keep_gathered = false;
        int context = 1;   // context-parallel ranks
        int pipeline = 1;  // pipeline ranks
        OneOf<PipelineKind> schedule = PipelineKind::one_f_one_b;
        int stages_per_rank = 1;
        std::vector<int> layers_per_stage = {};   // empty: dealt by cost
        std::optional<int> zero = 1;              // ZeRO's stage: 0 to 3; nothing: auto
        int shard_ranks = 0;                      // 0: all data-parallel ranks
        double bucket_mb = 64;                    // MiB of fp32 gradients in a bucket
        OneOf<std::optional<GradientSums>> sums;  // auto: exact where possible
        double timeout_seconds = 300;
        bool encrypt = false;   // encrypts what ranks without MPI send each other on CPUs
        int nccl_max_ctas = 0;  // 0: NCCL chooses
        int reserved_sms = 0;   // on a GPU
    } parallel;

    int sequence_length() const {
        return batch.sequence_length ? batch.sequence_length : model.n_ctx;
    }
    /// The tokens of the smallest step. Every step's tokens are a multiple of them.
    int64_t least_tokens_per_step() const {
        return batch.warmup_tokens > 0 ? batch.warmup_tokens_per_step : batch.tokens_per_step;
    }
    /// Whether training continues while checkpoints are written, once checkpoint.async is decided.
    bool saves_in_background() const {
        return checkpoint.every > 0 && checkpoint.async == std::optional(true);
    }
    /// Micro-batches of the largest step over all ranks: tokens_per_step / (micro_batch ·
    /// sequence_length). micro_batch must be given or have been chosen.
    int64_t micro_batches_per_step() const {
        assert(batch.micro_batch > 0);
        return batch.tokens_per_step / (int64_t{batch.micro_batch} * sequence_length());
    }
};

/// The weight of the balance loss, or the step of the selection biases.
double balance_rate(const Config& config);
RouterLosses router_losses(const Config& config);

/// The model that a configuration describes, with this vocabulary.
DecoderSpec spec_of(const Config& config, int64_t vocab_size);

}  // namespace train_gpt
