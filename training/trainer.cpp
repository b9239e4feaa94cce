#include "training/trainer.h"

#include <algorithm>
#include <cassert>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "device/copy.h"
#include "device/trace.h"
#include "kernels/head_loss.h"
#include "parallel/pipeline/stage_layers.h"
#include "training/evaluations/task_evaluation.h"

namespace train_gpt {

namespace {

std::vector<std::string> names_of_all(const RunShape& shape) {
    std::vector<std::string> names;
    const std::shared_ptr<const Registry> whole = whole_registry(shape);
    for (const Parameter& p : whole->parameters) names.push_back(p.name);
    return names;
}

std::vector<std::unique_ptr<Stage>> make_stages(const RunShape& shape, int rank,
                                                const RankRegistry& registry, StageOptions options,
                                                ParameterStore& parameters, Arena& arena) {
    const PipelineSchedule schedule = pipeline_schedule(pipeline_shape(shape));
    std::vector<std::unique_ptr<Stage>> stages;
    options.backward_apart = schedule.halves_apart;
    for (const int stage : schedule.stages_of(shape.mesh.at(Axis::pipeline, rank))) {
        const Registry& of_stage = registry.stages[stages.size()];
        options.slots = schedule.slots[static_cast<size_t>(stage)];
        stages.push_back(std::make_unique<Stage>(shape.spec, of_stage, options, parameters, arena));
    }
    return stages;
}

std::vector<Stage*> pointers(const std::vector<std::unique_ptr<Stage>>& stages) {
    std::vector<Stage*> all;
    for (const std::unique_ptr<Stage>& stage : stages) all.push_back(stage.get());
    return all;
}

}  // namespace

Trainer::Trainer(const RunShape& shape, Arena& arena, int rank)
    : stream(arena.device(), arena.is_counting()),
      registry(registry_of_rank(shape, rank)),
      tensor(tensor_options(shape.config, tensor_rank(shape.mesh, rank))),
      context(context_rank(shape.mesh, rank)),
      parameters(arena, registry.parameters,
                 {.dtype = shape.dtype,
                  .sharding = sharding_of(shape, rank),
                  .slots = optimizer_slots(shape.config.optimizer.state_dtype),
                  .model = &whole_registry(shape)->parameters}),
      routers(shape.spec, shape.config.micro_batches_per_step() * context.size(),
              shape.mesh.world() == 1, arena),
      fp8(fp8_options(shape.config), fp8_products(shape), registry.parameters, arena),
      stages(make_stages(shape, rank, registry,
                         {.B = shape.config.batch.micro_batch,
                          .T = shape.config.sequence_length() / context.size(),
                          .recompute = shape.recompute,
                          .inputs_on_host = shape.offload().activations,
                          .use = ParameterStore::Use::training,
                          .document_mask = shape.config.data.document_mask,
                          .z_loss = static_cast<float>(shape.config.optimizer.z_loss),
                          .routers = &routers,
                          .router_losses = router_losses(shape.config),
                          .fp8 = &fp8,
                          .tensor = &tensor,
                          .context = &context},
                         parameters, arena)),
      model(pipeline_shape(shape), shape.mesh.at(Axis::pipeline, rank), pointers(stages), arena),
      optimizer(parameters, arena,
                {.sums = StepSums::count(static_cast<int>(shape.config.data.train.size())),
                 .skips_spikes = shape.config.optimizer.on_spike == OnSpike::skip,
                 .names = model.ranks() > 1 ? names_of_all(shape) : std::vector<std::string>(),
                 .contributions = contributions_of_step(shape),
                 .muon = muon_options(shape.config),
                 .routers = &routers}),
      fingerprints(parameters, model.batch_shape(), arena, names_of_all(shape),
                   shape.config.log.fingerprint_every > 0),
      feed(arena, model.batch_shape(), model.batches_in_use()),
      evaluation_batch(arena, model.batch_shape(),
                       shape.config.evaluation.tasks.empty()
                           ? 0
                           : model.last_stage().padded_vocabulary_of_all()),
      outcomes(arena),
      clock(arena.device()),
      counts_losses_(model.ends_model() && shape.mesh.at(Axis::tensor, rank) == 0),
      sources_(static_cast<int>(shape.config.data.train.size())),
      reserved_sms_(shape.mesh.size({Axis::data, Axis::context}) > 1
                        ? shape.config.parallel.reserved_sms
                        : 0),
      batches_(static_cast<size_t>(model.batches_in_use())) {
    stream.settings = kernel_settings(shape.config);
    if (fp8) parameters.weights.use_fp8(fp8.of_parameters(registry.parameters.size()), arena);
    if (tensor.is_split() || model.ranks() > 1)
        pass_generator_.emplace(model, arena);
    else
        cached_generator_.emplace(shape.spec, registry.stages.front(), parameters, arena,
                                  shape.config.evaluation.tasks.empty()
                                      ? Generator::Options()
                                      : scoring_generator(shape.spec.n_ctx));
    stream.scratch_bytes = std::max({model.scratch_bytes(stream), generator().scratch_bytes(stream),
                                     optimizer.scratch_bytes(stream)});
    stream.scratch = arena.take(stream.scratch_bytes, Purpose::workspaces);
    requests_ = static_cast<double*>(arena.take(2 * sizeof(double), Purpose::staging));
    if (!arena.is_counting()) requests_[0] = requests_[1] = 0;
    const size_t bytes = kept_micro_batches * sizeof(double);
    losses_ = static_cast<double*>(arena.take(bytes, Purpose::workspaces));
    kept_losses_ = static_cast<double*>(arena.take(2 * bytes, Purpose::workspaces));
    loader_memory =
        arena.take(TrainLoader::buffer_bytes(loader_options(shape.config, shape.mesh, rank)),
                   Purpose::staging);
    if (!shape.config.saves_in_background()) return;
    std::vector<StateCopy::Other> beside(4);
    beside[saved_spikes] = {optimizer.spike_history_on_device(), sizeof(SpikeHistory)};
    if (routers)
        beside[saved_router_counts] = {routers.last_on_device().data,
                                       routers.last_on_device().bytes()};
    if (const Grids* grids = parameters.grids())
        beside[saved_grids] = {grids->exponents_on_device().data(),
                               grids->exponents_on_device().size_bytes()};
    beside[saved_fp8] = {fp8.on_device().data(), fp8.on_device().size_bytes()};
    state_copy.emplace(arena, parameters, beside);
    optimizer.wait_for(*state_copy);
}

void Trainer::connect(const Mesh& mesh) {
    if (tensor.is_split()) tensor.connect(stream.device, mesh.along(Axis::tensor), &clock);
    if (context.is_split())
        context.connect(stream.device, mesh.along(Axis::context), &clock, tensor.exchange());
    if (model.ranks() > 1) model.connect(stream.device, mesh.along(Axis::pipeline), &clock);
    parameters.connect(mesh, &clock, &tensor);
}

void Trainer::begin_step(int micro_batches, int most) {
    optimizer.begin_step(stream);
    routers.begin_step(stream);
    fp8.begin_step(stream);
    parameters.weights.begin_step();
    fingerprints.begin_step(stream);
    parameters.gradients.begin_step(micro_batches, most);
    actions_ = &model.actions(most);
    micro_batches_ = micro_batches;
}

bool Trainer::begins_micro_batch(const PipelineAction& action) const {
    return action.work == PipelineWork::forward && action.stage < model.ranks() &&
           action.micro_batch < micro_batches_;
}

void Trainer::load(int micro_batch, TrainLoader& loader) {
    const TraceSpan span(TraceTrack::data, "data wait");
    const StepClock::Interval interval(&clock, stream, StepPhase::data);
    first_micro_batch_ = loader.first_micro_batch(loader.next_step());
    load(micro_batch, feed.next(stream, loader));
}

void Trainer::load(int micro_batch, const TokenBatch& batch) {
    TokenBatch& own = batches_[static_cast<size_t>(micro_batch) % batches_.size()];
    own = batch;
    own.trains = true;
}

void Trainer::execute(const PipelineAction& action) {
    const bool forward = action.work == PipelineWork::forward;
    if (action.micro_batch >= micro_batches_) return model.skip(stream, action);
    const TokenBatch& batch = batch_of(action.micro_batch);
    if (begins_micro_batch(action))
        fingerprints.add_input(stream, batch, first_micro_batch_ + action.micro_batch);
    const bool backward = is_compute(action.work) && !forward;
    const bool last = action.micro_batch == micro_batches_ - 1;
    if (backward && parameters.gradients.exchanges_beside(last))
        stream.settings.reserved_sms = reserved_sms_;
    model.execute(stream, action, batch);
    stream.settings.reserved_sms = 0;
    const bool has_losses = backward && action.work != PipelineWork::backward_weights &&
                            action.stage == model.schedule().stages - 1;
    if (has_losses && counts_losses_) add_losses(batch, action.micro_batch);
}

void Trainer::add_losses(const TokenBatch& batch, int micro_batch) {
    const bool first = micro_batch == 0;
    const float* const losses = model.last_stage().losses();
    const bool exact = parameters.sharding().is_exact();
    const int64_t n = model.batch_shape().tokens_of_rank();
    if (micro_batch < kept_micro_batches)
        accumulate_loss(stream, losses_ + micro_batch, losses, n, false, exact);
    accumulate_loss(stream, &sums()->loss, losses, n, !first, exact);
    if (sources_ > 1 && batch.sources)  // there are none before the first batch
        accumulate_loss_by_source(stream, {.totals = sums()->loss_of_source,
                                           .sources = sources_,
                                           .losses = losses,
                                           .source_of = batch.sources,
                                           .B = model.options().B,
                                           .T = model.options().T,
                                           .accumulate = !first,
                                           .exact = exact});
}

void Trainer::update(const OptimizerStep& args, float scale, float clip) {
    static_assert(offsetof(StepSums, save_progress) ==
                  offsetof(StepSums, stop_requests) + sizeof(double));
    copy(stream, &sums()->stop_requests, requests_, 2 * sizeof *requests_);
    const StepSubmission submission;
    const TraceSpan host(TraceTrack::host, "update"), span(TraceTrack::device, stream, "update");
    const StepClock::Interval interval(&clock, stream, StepPhase::optimizer);
    routers.add_over_ranks(stream, parameters, tensor.rank() == 0);
    fp8.add_over_ranks(stream, parameters);
    optimizer.update(stream, args, scale, clip);
    routers.finish_step(stream, optimizer.state_on_device());
    fp8.finish_step(stream, optimizer.state_on_device());
    if (counts_losses_)
        keep_at_spike(stream, optimizer.state_on_device(),
                      {.to = kept_losses_,
                       .stride = kept_micro_batches,
                       .from = losses_,
                       .n = micro_batches_with_losses()});
    outcomes.push(stream, optimizer, routers, fp8);
}

std::vector<double> Trainer::losses_at_spike(int64_t spike) const {
    if (!counts_losses_) return {};
    std::vector<double> losses(static_cast<size_t>(micro_batches_with_losses()));
    copy_now(stream.device, losses.data(), kept_losses_ + spike % 2 * kept_micro_batches,
             losses.size() * sizeof(double));
    return losses;
}

void Trainer::choose_first_grids(TrainLoader& loader) {
    Grids& grids = *parameters.grids();
    grids.forget_largest(stream);
    parameters.gradients.look_only(true);
    begin_step(1, model.ranks());  // as few as every schedule can execute
    for (const PipelineAction& action : actions()) {
        if (begins_micro_batch(action)) load(action.micro_batch, loader);
        execute(action);
    }
    parameters.gradients.look_only(false);
    parameters.reduce_over_ranks(stream, grids.largest(), grids.layout().blocks(), DType::fp32,
                                 Reduction::max);
    grids.begin(stream, optimizer.contributions());
    stream.synchronize();
}

void Trainer::warm_up() {
    parameters.state.fill_weights(stream);
    const RandomStream random(0, RandomPurpose::synthetic, 1, 0);
    uint64_t drawn = 0;
    const auto token = [&] {
        return static_cast<int32_t>(random.bits(drawn++) %
                                    static_cast<uint32_t>(model.spec().vocab_size));
    };
    std::ranges::generate(evaluation_batch.tokens, token);
    std::ranges::generate(evaluation_batch.targets, token);
    std::ranges::fill(evaluation_batch.doc_start, 0);
    TokenBatch batch = evaluation_batch.upload(stream);
    model.evaluate(stream, batch);
    batch.trains = bool{fp8};  // the kernels of a step
    // A product is timed when it first overwrites its result, as in a step's first micro-batch.
    const auto pass = [&](int reserved_sms) {
        parameters.gradients.begin_step(2, 2);
        for (int i = 0; i < 2; ++i) {
            model.warm_up(stream, batch, reserved_sms);
            if (counts_losses_) add_losses(batch, i);
        }
    };
    pass(0);
    if (reserved_sms_ > 0) pass(reserved_sms_);
    if (fp8.set_for_warm_up()) {
        pass(0);
        fp8.set_history({});
    }
    const std::vector<int32_t> prompt{token(), token()};
    for (const size_t n : {size_t{1}, prompt.size()}) {
        generator().reset();
        if (static_cast<int>(n) <= generator().context())
            generator().feed(stream, std::span(prompt).first(n));
    }
    generator().reset();
    optimizer.warm_up(stream);
    stream.synchronize();
}

OutcomeQueue::OutcomeQueue(Arena& arena)
    : outcomes_(static_cast<Numbers*>(arena.take(capacity * sizeof(Numbers), Purpose::staging))) {
    if (arena.is_counting()) return;
    for (Event& event : arrived_) event = Event(arena.device());
}

void OutcomeQueue::push(Stream& stream, const Optimizer& optimizer, RouterCounts& routers,
                        Fp8Scales& fp8) {
    assert(pushed_ - popped_ < capacity);
    const int place = static_cast<int>(pushed_ % capacity);
    Numbers& to = outcomes_[place];
    copy(stream, &to.state, optimizer.state_on_device(), sizeof to.state);
    copy(stream, &to.sums, optimizer.sums(), optimizer.sums_bytes());
    routers.copy_to_host(stream, place);
    fp8.copy_to_host(stream, place);
    arrived_[pushed_++ % capacity].record(stream);
}

StepOutcome OutcomeQueue::pop(const RouterCounts& routers, Fp8Scales& fp8) {
    assert(popped_ < pushed_);
    const int place = static_cast<int>(popped_ % capacity);
    arrived_[place].wait();
    ++popped_;
    return {outcomes_[place].state, outcomes_[place].sums, routers.report(place), fp8.found(place)};
}

}  // namespace train_gpt
