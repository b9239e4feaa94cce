#include "training/config/layout.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/error.h"
#include "device/processor.h"
#include "kernels/linear/fp8_layout.h"
#include "model/families/family.h"
#include "model/stage.h"
#include "parallel/pipeline/stage_layers.h"
#include "parallel/state/grids.h"
#include "tokenizer/formats.h"
#include "training/config/known_data.h"
#include "training/config/step_sums.h"

namespace train_gpt {

std::optional<Tokenizer> tokenizer_there(const Config& config) {
    const std::string& path = config.tokenizer.path;
    if (config.model.vocab_size == 0) require_made(path);
    if (path.empty() || (config.model.vocab_size > 0 && !has_tokenizer(path))) return {};
    return Tokenizer::load(path);
}

int64_t vocab_size_of(const Config& config, const Tokenizer* tokenizer) {
    const int64_t wanted = config.model.vocab_size;
    if (wanted == 0 && !tokenizer)
        throw Error(
            "model.vocab_size is 0 and there is no tokenizer.path to take it from; set one of "
            "them");
    if (wanted == 0) return tokenizer->vocab_size();
    if (tokenizer && tokenizer->vocab_size() > wanted)
        throw Error("the tokenizer ", config.tokenizer.path, " has ", tokenizer->vocab_size(),
                    " tokens, but model.vocab_size is ", wanted,
                    "; set model.vocab_size=0 to take the tokenizer's");
    return wanted;
}

int64_t vocab_size_of(const Config& config) {
    const std::optional<Tokenizer> tokenizer = tokenizer_there(config);
    return vocab_size_of(config, tokenizer ? &*tokenizer : nullptr);
}

DType resolve_dtype(std::optional<DType> wanted, const Device& device) {
    if (wanted) return *wanted;
    return device.kind == Device::Kind::cuda || cpu_info().native_bf16() ? DType::bf16
                                                                         : DType::fp32;
}

DType resolve_dtype(const std::string& word, const Device& device) {
    OneOf<std::optional<DType>> wanted;
    wanted = word;
    return resolve_dtype(wanted, device);
}

GradientSums sums_of(const Config& config) {
    if (const std::optional<GradientSums> given = config.parallel.sums) return *given;
    Config with = config;
    with.batch.micro_batch = std::max(with.batch.micro_batch, 1);
    const bool possible = config.parallel.reserved_sms == 0 && contributions_problem(with).empty();
    return possible ? GradientSums::exact : GradientSums::fp32;
}

MeshSizes mesh_sizes(const Config& config) {
    const auto& p = config.parallel;
    return {.pipeline = p.pipeline,
            .context = p.context,
            .tensor = p.tensor,
            .shard_ranks = p.shard_ranks,
            .allow_tensor_across_nodes = p.allow_tensor_across_nodes};
}

MeshLayout mesh_of(const Config& config, int world) { return {world, mesh_sizes(config)}; }

PipelineOptions pipeline_options(const Config& config) {
    const auto& p = config.parallel;
    return {.kind = p.schedule,
            .ranks = p.pipeline,
            .stages_per_rank = p.stages_per_rank,
            .layers_per_stage = p.layers_per_stage};
}

std::optional<Offload> offload_of(const Config& config) {
    Offload offload;
    for (const std::string& word : config.memory.offload) {
        if (word == "auto") return {};
        offload.optimizer |= word == "optimizer";
        offload.activations |= word == "activations";
    }
    return offload;
}

std::vector<std::string> words_of(const Offload& offload) {
    std::vector<std::string> words;
    if (offload.optimizer) words.emplace_back("optimizer");
    if (offload.activations) words.emplace_back("activations");
    if (words.empty()) words.emplace_back("none");
    return words;
}

RunShape::RunShape(Config config_, const DecoderSpec& spec_, DType dtype_, Recompute recompute_,
                   int world)
    : config(std::move(config_)),
      spec(spec_),
      dtype(dtype_),
      recompute(recompute_),
      mesh(mesh_of(config, world)) {
    config.parallel.sums = sums_of(config);
}

RunShape RunShape::with_micro_batch(int sequences) const {
    RunShape shape = *this;
    shape.config.batch.micro_batch = sequences;
    return shape;
}

RunShape RunShape::with_recompute(Recompute level) const {
    RunShape shape = *this;
    shape.recompute = level;
    return shape;
}

RunShape RunShape::with_zero(int stage) const {
    RunShape shape = *this;
    shape.config.parallel.zero = stage;
    return shape;
}

RunShape RunShape::with_offload(const Offload& offload) const {
    RunShape shape = *this;
    shape.config.memory.offload = words_of(offload);
    return shape;
}

RunShape RunShape::for_counting() const {
    RunShape shape = *this;
    if (shape.whole) return shape;
    Registry registry = registry_of(spec);
    // The names of thousands of experts
    for (Parameter& p : registry.parameters) p.stored = {}, p.or_stored = {};
    shape.whole = std::make_shared<const Registry>(std::move(registry));
    return shape;
}

Fp8Options fp8_options(const Config& config) {
    const auto& p = config.precision;
    return {.recipe = p.fp8, .weight_gradient = p.fp8_weight_gradient, .skip = p.fp8_skip};
}

namespace {

std::vector<Fp8Product> products_of(const Config& config, const Registry& whole) {
    return products_of(whole, fp8_options(config), config.parallel.tensor,
                       config.sequence_length() / config.parallel.context);
}

}  // namespace

std::string fp8_problem(const Config& config, const DecoderSpec& spec) {
    const auto& p = config.precision;
    if (p.fp8 == Fp8Recipe::off) return "";
    const Registry whole = registry_of(spec);
    if (const std::string problem = skip_problem(p.fp8_skip, whole); !problem.empty())
        return problem;
    const std::vector<Fp8Product> products = products_of(config, whole);
    if (std::ranges::any_of(products, &Fp8Product::is_fp8)) return "";
    return concat("precision.fp8 = \"", p.fp8.word(),
                  "\", but no product of a block can be in fp8: ", products.front().name,
                  " cannot, since ", products.front().reason, "; set precision.fp8 to \"off\"");
}

std::string fp8_problem(const Config& config, const std::string& gpu, int architecture) {
    const auto& p = config.precision;
    if (p.fp8 == Fp8Recipe::off || architecture == 0 ||
        fp8_layouts(architecture) != Fp8Layouts::none)
        return "";
    return concat("precision.fp8 = \"", p.fp8.word(), "\", but ", gpu, " (sm_", architecture,
                  ") has no tensor cores for fp8, which came with Ada (sm_", first_with_fp8,
                  "); set precision.fp8 to \"off\", or take a GPU of Ada, Hopper or newer");
}

std::vector<Fp8Product> fp8_products(const RunShape& shape) {
    if (shape.config.precision.fp8 == Fp8Recipe::off) return {};
    return products_of(shape.config, *whole_registry(shape));
}

LoaderOptions loader_options(const Config& config, const MeshLayout& mesh, int rank) {
    return {.seed = config.seed,
            .B = config.batch.micro_batch,
            .T = config.sequence_length(),
            .first_sample = 0,
            .micro_batches_per_step = static_cast<int>(config.micro_batches_per_step()),
            .rank = mesh.at(Axis::data, rank),
            .world = mesh.size(Axis::data),
            .document_boundary = {}};
}

namespace {

std::optional<MatrixUpdates> matrix_updates(const Config& config) {
    if (config.optimizer.name != OptimizerName::muon) return {};
    return MatrixUpdates{config.optimizer.muon_dtype, config.optimizer.muon_heads};
}

}  // namespace

Sharding sharding_of(const RunShape& shape, int rank) {
    const auto& p = shape.config.parallel;
    return sharding_of(
        shape.mesh, rank,
        {.zero = p.zero.value_or(1),
         .tied_head = shape.spec.tied_head,
         .bucket_elements = static_cast<int64_t>(p.bucket_mb * (1 << 20) / sizeof(float)),
         .sums = sums_of(shape.config),
         .matrices = matrix_updates(shape.config),
         .state_on_host = shape.offload().optimizer});
}

TensorOptions tensor_options(const Config& config, const TensorRank& tensor) {
    if (tensor.ranks == 1) return {};
    return {.rank = tensor,
            .chunks = config.parallel.tensor_chunks,
            .keep_gathered = config.parallel.tensor_keep_gathered};
}

std::vector<int> layers_of_stages(const RunShape& shape) {
    const DecoderSpec& spec = shape.spec;
    const auto& p = shape.config.parallel;
    if (p.pipeline == 1) return {spec.n_layer};
    if (!p.layers_per_stage.empty()) return p.layers_per_stage;
    // Per token, forward and backward.
    LayerCosts costs{.layers = {},
                     .embedding = 2.0 * spec.n_embd,
                     .head = 6.0 * static_cast<double>(spec.vocab_size) * spec.n_embd};
    for (int l = 0; l < spec.n_layer; ++l)
        costs.layers.push_back(spec.layer(l).flops_per_token(shape.config.sequence_length()));
    return deal_layers(costs, p.pipeline * p.stages_per_rank);
}

PipelineShape pipeline_shape(const RunShape& shape) {
    const auto& p = shape.config.parallel;
    const int64_t ranks = shape.mesh.size(Axis::data);
    return {.kind = p.schedule,
            .ranks = p.pipeline,
            .stages_per_rank = p.stages_per_rank,
            .micro_batches =
                static_cast<int>((shape.config.micro_batches_per_step() + ranks - 1) / ranks)};
}

std::shared_ptr<const Registry> whole_registry(const RunShape& shape) {
    return shape.whole ? shape.whole : std::make_shared<const Registry>(registry_of(shape.spec));
}

RankRegistry registry_of_rank(const RunShape& shape, int rank) {
    return registry_of_rank(shape, *whole_registry(shape), rank);
}

RankRegistry registry_of_rank(const RunShape& shape, const Registry& whole, int rank) {
    const MeshLayout& mesh = shape.mesh;
    const TensorRank tensor = tensor_rank(mesh, rank);
    require_shared(shared_sizes(shape.spec), tensor.ranks);
    RankRegistry registry =
        registry_of_rank(whole, layers_of_stages(shape), mesh.at(Axis::pipeline, rank),
                         mesh.size(Axis::pipeline), tensor);
    const auto& p = shape.config.parallel;
    if (sharding_of(shape, rank).reduces_each())
        number_sweeps(registry, p.pipeline > 1 && p.schedule == PipelineKind::zero_bubble);
    return registry;
}

bool gathers_counts(const RunShape& shape) {
    const RouterLosses losses = router_losses(shape.config);
    return shape.spec.experts && shape.mesh.size(Axis::context) > 1 && losses.balance != 0 &&
           losses.level != BalanceLevel::step;
}

StepNumbers sums_of_step(const RunShape& shape) {
    const int64_t losses = StepSums::count(static_cast<int>(shape.config.data.train.size()));
    const std::shared_ptr<const Registry> model = whole_registry(shape);
    const ExpertSpec& experts = shape.spec.experts;
    int64_t chosen = 0;
    for (int l = 0; l < shape.spec.n_layer; ++l)
        if (shape.spec.has_experts(l)) chosen += experts.n_expert;
    StepNumbers numbers{.int32 = RouterCounts::totals(shape.spec),
                        .fp32 = experts.selection_bias ? chosen : 0,
                        .amax = Fp8Scales::operands(fp8_products(shape))};
    if (shape.config.parallel.sums == GradientSums::exact) {
        numbers.fp64 = losses;
        numbers.int64 = GridLayout(model->parameters, shape.mesh.size(Axis::tensor)).sums();
    } else {
        numbers.fp64 = losses + std::ssize(model->parameters);
    }
    return numbers;
}

int64_t contributions_of_step(const RunShape& shape) {
    const Config& config = shape.config;
    if (config.parallel.sums == GradientSums::exact)
        if (const std::string problem = contributions_problem(config); !problem.empty())
            throw Error(problem);
    return config.micro_batches_per_step() * config.parallel.context;
}

namespace {

/// Settings with a larger micro-batch, of which a step has at most so many; each step of a batch
/// warm-up stays a whole number of micro-batches. Empty if there are none.
std::string larger_micro_batch(const Config& config, int64_t most) {
    if (most == 0) return "";
    const int64_t T = config.sequence_length(), sequences = config.batch.tokens_per_step / T,
                  least = config.least_tokens_per_step() / T;
    const auto is_enough = [&](int64_t B) { return sequences % B == 0 && sequences / B <= most; };
    const int64_t smallest = std::max<int64_t>(config.batch.micro_batch + 1, sequences / most);
    for (int64_t B = smallest; B <= least; ++B)
        if (is_enough(B) && least % B == 0) return concat("batch.micro_batch=", B);
    int64_t B = smallest;
    while (B <= sequences && !is_enough(B)) ++B;
    if (B > sequences) return "";
    // The smallest step of the warm-up that is nearest to the given one
    int64_t step = B;
    for (int64_t other = B; other <= sequences; other += B)
        if (sequences % other == 0 && std::abs(other - least) < std::abs(step - least))
            step = other;
    return concat("batch.micro_batch=", B, " with batch.warmup_tokens_per_step=", step * T);
}

}  // namespace

std::string contributions_problem(const Config& config) {
    // With more, each is rounded to fewer than 18 bits, which fp32 sums exceed
    // (docs/many-ranks.md).
    constexpr int64_t most = 2048;
    const int64_t micro_batches = config.micro_batches_per_step(), parts = config.parallel.context;
    if (micro_batches * parts <= most) return "";
    const std::string larger = larger_micro_batch(config, most / parts);
    return concat("parallel.sums = \"exact\" adds up to ", most,
                  " gradients in a step, but a step has ", micro_batches, " micro-batches",
                  parts > 1 ? concat(" on ", parts, " context-parallel ranks each") : "",
                  larger.empty() ? "; use " : concat("; use ", larger, ", or "),
                  "parallel.sums=fp32");
}

StepSizes sizes_of_step(const RunShape& shape, const Device& device,
                        const std::vector<int>& micro_batches) {
    const int tensors = shape.mesh.size(Axis::tensor);
    const DecoderSpec part = share_of_spec(shape.spec, tensors);
    StepSizes sizes{
        .dtype = shape.dtype,
        .sums = sums_of_step(shape),
        .grids = shape.config.parallel.sums == GradientSums::exact
                     ? GridLayout(whole_registry(shape)->parameters, tensors).blocks()
                     : 0,
        .width = shape.spec.n_embd,
        .vocabulary = tensors * part_extent(shape.spec.vocab_size, vocab_multiple, tensors),
        .tensor_chunks = shape.config.parallel.tensor_chunks};
    int64_t taken = 0;
    for (const int B : micro_batches) {
        if (B < 2 * taken && B != micro_batches.back()) continue;
        sizes.tokens.push_back(int64_t{B} * shape.config.sequence_length() /
                               shape.mesh.size(Axis::context));
        if (gathers_counts(shape))
            sizes.expert_counts.push_back(int64_t{B} * shape.spec.experts.n_expert);
        taken = B;
    }
    for (const int64_t tokens : sizes.tokens) {
        const int64_t rows = logits_rows(device, tokens, sizes.vocabulary / tensors, sizes.dtype);
        sizes.head_rows.push_back(rows);
        if (tokens % rows != 0) sizes.head_rows.push_back(tokens % rows);
    }
    for (int l = 0; l < part.n_layer; ++l) {
        const LayerSpec layer = part.layer(l);
        sizes.norms_width |= layer.qk_norm == QkNormKind::width;
        if (std::ranges::find(sizes.kv_widths, layer.kv_width()) == sizes.kv_widths.end())
            sizes.kv_widths.push_back(layer.kv_width());
    }
    return sizes;
}

KernelSettings kernel_settings(const Config& config) {
    using Attention = KernelSettings::Attention;
    const auto& k = config.kernels;
#ifndef TRAIN_GPT_ONEDNN
    if (k.gemm == KernelSettings::Gemm::onednn)
        throw Error(
            "kernels.gemm is \"onednn\", which is not in this build; install oneDNN (Debian: "
            "libdnnl-dev) and build again, or choose \"own\"");
#endif
    Attention attention = k.attention;
    if (attention == Attention::automatic && !k.autotune) attention = Attention::own;
    return {.gemm = k.gemm,
            .attention = attention,
            .deterministic = k.deterministic,
            .autotune = k.autotune,
            .tf32 = config.precision.tf32,
            .fp8 = config.precision.fp8 != Fp8Recipe::off};
}

}  // namespace train_gpt
