#include "training/trainer.h"

#include <algorithm>
#include <cassert>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "device/copy.h"
#include "device/trace.h"
#include "kernels/head_loss.h"

namespace train_gpt {

MeshSizes mesh_sizes(const Config& config) {
    const auto& p = config.parallel;
    return {.context = p.context,
            .tensor = p.tensor,
            .shard_ranks = p.shard_ranks,
            .allow_tensor_across_nodes = p.allow_tensor_across_nodes};
}

MeshLayout mesh_of(const Config& config, int world) { return {world, mesh_sizes(config)}; }

LoaderOptions loader_options(const Config& config, int64_t first_step, const MeshLayout& mesh,
                             int rank) {
    return {.seed = config.seed,
            .B = config.batch.micro_batch,
            .T = config.sequence_length(),
            .first_step = first_step,
            .micro_batches_per_step = static_cast<int>(config.micro_batches_per_step()),
            .rank = mesh.at(Axis::data, rank),
            .world = mesh.size(Axis::data),
            .document_boundary = {}};
}

Sharding sharding_of(const Config& config, const MeshLayout& mesh, int rank) {
    const auto& p = config.parallel;
    // Groups of one rank split nothing.
    const bool splits = p.zero > 0 && mesh.size({Axis::shard, Axis::context}) > 1;
    const Axes summed = {Axis::data, Axis::context}, split = {Axis::shard, Axis::context};
    return {.rank = splits ? mesh.at(split, rank) : mesh.at(summed, rank),
            .size = splits ? mesh.size(split) : mesh.size(summed),
            .replica = splits ? mesh.at(Axis::replica, rank) : 0,
            .replicas = splits ? mesh.size(Axis::replica) : 1,
            .tensor = mesh.at(Axis::tensor, rank),
            .tensors = mesh.size(Axis::tensor),
            .world = mesh.world(),
            .zero = splits ? p.zero : 0,
            .bucket_elements = static_cast<int64_t>(p.bucket_mb * (1 << 20) / sizeof(float)),
            .reduce_dtype = p.reduce_dtype};
}

TensorOptions tensor_options(const Config& config, const MeshLayout& mesh, int rank) {
    const TensorRank tensor{mesh.at(Axis::tensor, rank), mesh.size(Axis::tensor)};
    if (tensor.ranks == 1) return {};
    return {.rank = tensor,
            .chunks = config.parallel.tensor_chunks,
            .keep_gathered = config.parallel.tensor_keep_gathered};
}

ContextRank context_rank(const MeshLayout& mesh, int rank) {
    return {mesh.at(Axis::context, rank), mesh.size(Axis::context)};
}

Registry registry_of_rank(const DecoderSpec& spec, const MeshLayout& mesh, int rank) {
    const TensorRank tensor{mesh.at(Axis::tensor, rank), mesh.size(Axis::tensor)};
    tensor_part(spec, tensor.ranks);  // checks
    return tensor_part(registry_of(spec), tensor);
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
            .autotune = k.autotune,
            .tf32 = config.precision.tf32};
}

AdamWStep adamw_step(const Config& config, int64_t step, double rate) {
    const auto& o = config.optimizer;
    return {.learning_rate = static_cast<float>(rate),
            .beta1 = static_cast<float>(o.beta1),
            .beta2 = static_cast<float>(o.beta2),
            .epsilon = static_cast<float>(o.epsilon),
            .weight_decay = static_cast<float>(o.weight_decay),
            .step = step + 1};
}

Trainer::Trainer(const Config& config, const DecoderSpec& spec, DType dtype, Recompute recompute,
                 Arena& arena, const MeshLayout& mesh, int rank)
    : stream(arena.device(), arena.is_counting()),
      registry(registry_of_rank(spec, mesh, rank)),
      tensor(tensor_options(config, mesh, rank)),
      context(context_rank(mesh, rank)),
      parameters(arena, registry.parameters, dtype, ParameterStore::Use::training,
                 sharding_of(config, mesh, rank)),
      model(spec, registry,
            {.B = config.batch.micro_batch,
             .T = config.sequence_length() / context.size(),
             .recompute = recompute,
             .use = ParameterStore::Use::training,
             .document_mask = config.data.document_mask,
             .z_loss = static_cast<float>(config.optimizer.z_loss),
             .tensor = &tensor,
             .context = &context},
            parameters, arena),
      optimizer(parameters, arena, StepSums::count(static_cast<int>(config.data.train.size()))),
      feed(arena, config.batch.micro_batch, config.sequence_length(), config.data.document_mask,
           context.place()),
      evaluation_batch(arena, config.batch.micro_batch, config.sequence_length(),
                       config.data.document_mask, context.place()),
      outcomes(arena),
      clock(arena.device()),
      counts_losses_(mesh.at(Axis::tensor, rank) == 0),
      sources_(static_cast<int>(config.data.train.size())),
      reserved_sms_(mesh.size({Axis::data, Axis::context}) > 1 ? config.parallel.reserved_sms : 0) {
    stream.settings = kernel_settings(config);
    if (tensor.is_split())
        pass_generator_.emplace(model, arena);
    else
        cached_generator_.emplace(spec, registry, parameters, arena);
    stream.scratch_bytes = std::max(model.scratch_bytes(stream), generator().scratch_bytes(stream));
    stream.scratch = arena.take(stream.scratch_bytes, Purpose::workspaces);
    stop_request_ = static_cast<double*>(arena.take(sizeof(double), Purpose::staging));
    if (!arena.is_counting()) *stop_request_ = 0;
    loader_memory = arena.take(TrainLoader::buffer_bytes(loader_options(config, 0, mesh, rank)),
                               Purpose::staging);
}

void Trainer::connect(const Mesh& mesh) {
    if (tensor.is_split()) tensor.connect(stream.device, mesh.along(Axis::tensor), &clock);
    if (context.is_split())
        context.connect(stream.device, mesh.along(Axis::context), &clock, tensor.exchange());
    parameters.connect(mesh, &clock, &tensor);
}

TokenBatch Trainer::next_batch(TrainLoader& loader) {
    const TraceSpan span(TraceTrack::data, "data wait");
    const StepClock::Interval interval(&clock, stream, StepPhase::data);
    return feed.next(stream, loader);
}

void Trainer::begin_step(int micro_batches, int most) {
    parameters.begin_step(micro_batches, most);
    first_micro_batch_ = true;
    micro_batches_left_ = micro_batches;
}

void Trainer::micro_batch(const TokenBatch& batch) {
    micro_batch(batch, parameters.exchanges_beside(--micro_batches_left_ == 0));
}

void Trainer::micro_batch(const TokenBatch& batch, bool exchanges) {
    const bool first = std::exchange(first_micro_batch_, false);
    {
        const TraceSpan span(TraceTrack::device, stream, "forward");
        model.forward(stream, 0, batch);
    }
    stream.settings.reserved_sms = exchanges ? reserved_sms_ : 0;
    {
        const TraceSpan span(TraceTrack::device, stream, "backward");
        model.backward(stream, 0, batch);
    }
    stream.settings.reserved_sms = 0;
    if (!counts_losses_) return;
    accumulate_loss(stream, &sums()->loss, model.losses(), feed.targets(), !first);
    if (sources_ > 1 && feed.sources())  // there are none before the first batch
        accumulate_loss_by_source(stream, {.totals = sums()->loss_of_source,
                                           .sources = sources_,
                                           .losses = model.losses(),
                                           .source_of = feed.sources(),
                                           .B = model.options().B,
                                           .T = model.options().T,
                                           .accumulate = !first});
}

void Trainer::update(const AdamWStep& args, float scale, float clip) {
    copy(stream, &sums()->stop_requests, stop_request_, sizeof *stop_request_);
    const StepSubmission submission;
    const TraceSpan host(TraceTrack::host, "update"), span(TraceTrack::device, stream, "update");
    const StepClock::Interval interval(&clock, stream, StepPhase::optimizer);
    optimizer.update(stream, args, scale, clip);
    outcomes.push(stream, optimizer);
}

void Trainer::warm_up() {
    parameters.fill_weights(stream);
    const RandomStream random(0, RandomPurpose::synthetic, 1, 0);
    uint64_t drawn = 0;
    const auto token = [&] {
        return static_cast<int32_t>(random.bits(drawn++) %
                                    static_cast<uint32_t>(model.spec().vocab_size));
    };
    std::ranges::generate(evaluation_batch.tokens, token);
    std::ranges::generate(evaluation_batch.targets, token);
    std::ranges::fill(evaluation_batch.doc_start, 0);
    evaluation_batch.run(stream, model);
    // A product is timed when it first overwrites its result, as in a step's first micro-batch.
    for (const bool exchanges : {false, true}) {
        if (exchanges && reserved_sms_ == 0) continue;
        begin_step(2, 2);
        for (int i = 0; i < 2; ++i) micro_batch(evaluation_batch.on_device(), exchanges);
    }
    const std::vector<int32_t> prompt{token(), token()};
    for (const size_t n : {size_t{1}, prompt.size()}) {
        generator().reset();
        if (static_cast<int>(n) <= generator().context())
            generator().feed(stream, std::span(prompt).first(n));
    }
    generator().reset();
    stream.synchronize();
}

OutcomeQueue::OutcomeQueue(Arena& arena)
    : outcomes_(
          static_cast<StepOutcome*>(arena.take(capacity * sizeof(StepOutcome), Purpose::staging))) {
    if (arena.is_counting()) return;
    for (Event& event : arrived_) event = Event(arena.device());
}

void OutcomeQueue::push(Stream& stream, const Optimizer& optimizer) {
    assert(pushed_ - popped_ < capacity);
    StepOutcome& to = outcomes_[pushed_ % capacity];
    copy(stream, &to.state, optimizer.state_on_device(), sizeof to.state);
    copy(stream, &to.sums, optimizer.sums(), optimizer.sums_bytes());
    arrived_[pushed_++ % capacity].record(stream);
}

StepOutcome OutcomeQueue::pop() {
    assert(popped_ < pushed_);
    arrived_[popped_ % capacity].wait();
    return outcomes_[popped_++ % capacity];
}

}  // namespace train_gpt
