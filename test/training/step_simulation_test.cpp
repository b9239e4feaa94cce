#include "training/plan/step_simulation.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "base/error.h"
#include "parallel/pipeline/pipeline_simulation.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/plan/least_memory.h"
#include "training/plan/memory_plan.h"
#include "training/plan/plan.h"
#include "training/plan/prediction.h"
#include "training/plan/search.h"
#include "training/plan/simulated_trace.h"
#include "training/plan/traffic.h"

using namespace train_gpt;

namespace {

double random_seconds() { return 1e-3 * static_cast<double>(random_int(1, 1000)); }

/// Work of a random schedule in which each stage has some units, and nothing is exchanged.
StepWork random_work(PipelineKind kind, int p, int v, int m) {
    StepWork work{.schedule = pipeline_schedule(
                      {.kind = kind, .ranks = p, .stages_per_rank = v, .micro_batches = m})};
    for (int r = 0; r < p; ++r) {
        RankWork rank;
        for (int s = 0; s < v; ++s) {
            std::vector<UnitWork> units(static_cast<size_t>(random_int(1, 3)));
            for (UnitWork& unit : units) {
                unit.forward.products = random_seconds();
                unit.backward_inputs.attention = random_seconds();
                unit.backward_weights.memory = random_seconds();
            }
            rank.stages.push_back(units);
        }
        work.ranks.push_back(rank);
    }
    return work;
}

/// One rank with `units` units that each compute a second in every pass.
StepWork one_rank(int units, int m) {
    StepWork work{.schedule = pipeline_schedule({.micro_batches = m})};
    UnitWork unit;
    unit.forward.products = unit.backward_inputs.products = unit.backward_weights.products = 1;
    work.ranks.push_back({.stages = {std::vector<UnitWork>(static_cast<size_t>(units), unit)}});
    return work;
}

Config small_config() {
    Config config;
    config.model = {.family = "llama",
                    .n_layer = 8,
                    .n_head = 8,
                    .n_embd = 1024,
                    .n_ctx = 1024,
                    .vocab_size = 32000};
    config.batch.micro_batch = 2;
    config.batch.tokens_per_step = 64 * 1024;
    config.schedule.steps = 1000;
    config.parallel.sums = GradientSums::fp32;
    config.memory.recompute = Recompute::none;
    return config;
}

double seconds_on(const Config& config, int world, const char* cluster = "h100-dgx") {
    const Cluster on = find_cluster(cluster);
    const RunShape shape = shape_on(config, on, world);
    return simulate_step(step_work(shape, on)).seconds;
}

}  // namespace

TEST_CASE("without exchanges a step takes as long as the pipeline's simulation",
          "[plan][step_simulation]") {
    for (const PipelineKind kind : {PipelineKind::gpipe, PipelineKind::one_f_one_b,
                                    PipelineKind::interleaved, PipelineKind::zero_bubble}) {
        const int p = static_cast<int>(random_int(2, 4)),
                  v = kind == PipelineKind::interleaved ? 2 : 1,
                  m = p * static_cast<int>(random_int(1, 4));
        const StepWork work = random_work(kind, p, v, m);
        PipelineTimes times;
        for (int stage = 0; stage < work.schedule.stages; ++stage) {
            StageTimes of;
            for (const UnitWork& unit : work.ranks[static_cast<size_t>(stage % p)]
                                            .stages[static_cast<size_t>(stage / p)]) {
                of.forward += unit.forward.sum();
                of.backward_inputs += unit.backward_inputs.sum();
                of.backward_weights += unit.backward_weights.sum();
            }
            times.stages.push_back(of);
        }
        CAPTURE(name_of(kind), p, v, m);
        const SimulatedStep step = simulate_step(work, true);
        const PipelineTimeline timeline = simulate(work.schedule, times);
        CHECK(step.seconds == Approx(timeline.makespan));
        CHECK(step.bubble == Approx(timeline.idle_share()).margin(1e-9));
        for (const auto& spans : step.spans)
            for (size_t i = 1; i < spans.size(); ++i)
                CHECK(spans[i].begin >= spans[i - 1].end - 1e-9);
    }
}

TEST_CASE("gathers of weights and sums of gradients hide behind computing",
          "[plan][step_simulation]") {
    // Four units forward (4 s) and backward (8 s).
    StepWork work = one_rank(4, 1);
    CHECK(simulate_step(work).seconds == Approx(12));
    for (UnitWork& unit : work.ranks[0].stages[0]) unit.gather = 1;
    // The first unit waits for its weights; the others' come while units before compute.
    CHECK(simulate_step(work).seconds == Approx(13));
    for (UnitWork& unit : work.ranks[0].stages[0]) unit.reduce_once = 2;
    // Only the last sum is left after the last unit.
    CHECK(simulate_step(work).seconds == Approx(15));
    for (UnitWork& unit : work.ranks[0].stages[0]) unit.reduce_once = 5;
    // Sums follow one after the other from the first unit's end on.
    CHECK(simulate_step(work).seconds == Approx(1 + 4 + 2 + 4 * 5));
    work.ranks[0].optimizer = 3;
    CHECK(simulate_step(work).seconds == Approx(1 + 4 + 2 + 4 * 5 + 3));
}

TEST_CASE("with ZeRO-3 each pass gathers weights, one unit ahead", "[plan][step_simulation]") {
    StepWork work = one_rank(4, 2);
    work.gathers_each = true;
    for (UnitWork& unit : work.ranks[0].stages[0]) unit.gather = 0.5;
    // Only the first gather has nothing to hide behind.
    CHECK(simulate_step(work).seconds == Approx(24.5));
    for (UnitWork& unit : work.ranks[0].stages[0]) unit.gather = 3;
    // 16 gathers of 3 s decide; the last unit computes 2 s after its own.
    CHECK(simulate_step(work).seconds == Approx(16 * 3 + 2));
    for (UnitWork& unit : work.ranks[0].stages[0]) unit.gather = 0, unit.reduce_each = 2.5;
    // Backward passes take 8 s each and their sums 10 s: those of the first end at 16 s, while the
    // second pass computes from 16 s on; its sums end 0.5 s a unit later than its units.
    CHECK(simulate_step(work).seconds == Approx(16 + 2 + 4 * 2.5));
}

TEST_CASE("collectives beside computing slow it down", "[plan][step_simulation]") {
    StepWork work = one_rank(2, 1);
    work.beside_exchanges = 0.5;
    work.ranks[0].stages[0][1].gather = 1;
    // The second unit's weights arrive while the first computes: 1 s becomes 1.5 s.
    CHECK(simulate_step(work).seconds == Approx(6.5));
    // So do gathers before each pass. Each pass of four units has three beside it, of half a
    // second; the first one's has nothing to hide behind.
    StepWork each = one_rank(4, 1);
    each.beside_exchanges = 0.5, each.gathers_each = true;
    for (UnitWork& unit : each.ranks[0].stages[0]) unit.gather = 0.5;
    CHECK(simulate_step(each).seconds == Approx(0.5 + 4 + 8 + 2 * 3 * 0.25));
}

TEST_CASE("what the busiest rank of a pipeline does and waits for fills a step at most",
          "[plan][step_simulation]") {
    Config config = small_config();
    config.parallel.pipeline = 1 << random_int(1, 3);
    const Cluster cluster = find_cluster("h100-dgx");
    const Prediction p = predict(shape_on(config, cluster, 8), cluster);
    double sum = 0;
    for (const auto& [name, share] : p.shares) sum += share;
    CAPTURE(config.parallel.pipeline);
    CHECK(sum <= 1 + 1e-9);
    CHECK(sum > 0.8);
    CHECK(p.shares.at("pipeline bubble") > 0);
}

TEST_CASE("a trace is as long as the step on many ranks", "[plan][step_simulation]") {
    Config config = small_config();
    config.parallel.zero = 3;
    config.batch.tokens_per_step *= 4;
    const Cluster cluster = find_cluster("h100-dgx");
    const SimulatedStep step =
        simulate_step(step_work(shape_on(config, cluster, 64), cluster), true);
    double end = 0;
    for (const SimulatedSpan& span : step.spans[0]) end = std::max(end, span.end);
    CHECK(end == Approx(step.seconds));
}

TEST_CASE("a step without an axis's exchanges is not longer", "[plan][step_simulation]") {
    Config config = small_config();
    config.parallel.tensor = static_cast<int>(random_int(0, 1)) + 1;
    config.parallel.context = static_cast<int>(random_int(0, 1)) + 1;
    config.parallel.pipeline = 2;
    config.parallel.zero = static_cast<int>(random_int(1, 3));
    const Cluster cluster = find_cluster("a100-80");
    const RunShape shape = shape_on(config, cluster, 16);
    const Prediction all = predict(shape, cluster);
    for (const Axis axis : {Axis::data, Axis::tensor, Axis::context, Axis::pipeline}) {
        WorkOptions without;
        without.without = axis;
        const double seconds = simulate_step(step_work(shape, cluster, without)).seconds;
        CAPTURE(name_of(axis));
        CHECK(seconds <= all.step_seconds * (1 + 1e-9));
        if (all.exposed.contains(name_of(axis)))
            CHECK(all.exposed.at(name_of(axis)) == Approx(all.step_seconds - seconds).margin(1e-9));
    }
    CHECK(all.exposed.contains("pipeline"));
    CHECK(all.low < all.step_seconds);
    CHECK(all.high > all.step_seconds);
}

TEST_CASE("a layer waits for its own exchanges over tensor ranks in a prediction",
          "[plan][step_simulation]") {
    Config config = small_config();
    const int t = 2 << random_int(0, 2);
    config.parallel.tensor = t;
    config.parallel.tensor_keep_gathered = random_int(0, 1) == 1;
    config.memory.recompute = random_int(0, 1) ? Recompute::block : Recompute::none;
    Cluster cluster = find_cluster("h100-dgx");
    cluster.node = {.latency = 0, .bandwidth = 1e9 * static_cast<double>(random_int(10, 400))};
    const RunShape shape = shape_on(config, cluster, 8);
    // parallel/axes/tensor.h counts them.
    const int again = shape.recompute == Recompute::block    ? 3
                      : config.parallel.tensor_keep_gathered ? 0
                                                             : 2,
              exchanges = 4 + 4 + again;
    const double bytes = static_cast<double>(size_of(shape.dtype)) * 2 * 1024 * 1024 * (t - 1) / t;
    CAPTURE(t, again);
    int layers = 0;
    for (const RankWork& rank : step_work(shape, cluster).ranks)
        for (const std::vector<UnitWork>& stage : rank.stages)
            for (const UnitWork& unit : stage) {
                const bool is_layer = unit.layer >= 0;
                layers += is_layer;
                CHECK(unit.forward.tensor + unit.backward_inputs.tensor ==
                      Approx(is_layer ? exchanges * bytes / cluster.node.bandwidth : 0));
                CHECK(unit.backward_weights.tensor == 0);
            }
    CHECK(layers == config.model.n_layer);
}

TEST_CASE("a prediction follows what a step must do", "[plan][step_simulation]") {
    const Config config = small_config();
    const double one = seconds_on(config, 1);
    Config twice = config;
    twice.batch.tokens_per_step *= 2;
    CHECK(seconds_on(twice, 1) == Approx(2 * one).epsilon(0.05));
    CHECK(seconds_on(config, 1, "a100-80") > 1.5 * one);
    CHECK(seconds_on(config, 1, "h200") < one);
    CHECK(seconds_on(config, 8) < one / 4);
    CHECK(seconds_on(config, 8) > one / 8);
    Config recomputing = config;
    const Cluster cluster = find_cluster("h100-dgx");
    const RunShape shape = shape_on(recomputing, cluster, 1);
    double before = 0;
    for (const Recompute level : recompute_levels) {
        const double seconds =
            simulate_step(step_work(shape.with_recompute(level), cluster)).seconds;
        CHECK(seconds > before);
        before = seconds;
    }
    Config muon = config;
    muon.optimizer.name = OptimizerName::muon;
    CHECK(seconds_on(muon, 1) > one);
    Config offloading = config;
    offloading.memory.offload = {"optimizer"};
    CHECK(seconds_on(offloading, 1) > one);
    // Experts of which each token passes two take longer than an MLP of the size of one.
    Config mixture = config;
    mixture.model.n_expert = 8, mixture.model.n_expert_per_token = 2;
    mixture.model.n_ff_expert = spec_of(config, config.model.vocab_size).n_ff;
    CHECK(seconds_on(mixture, 1) > one);
    // fp8's products are faster.
    CHECK(simulate_step(step_work(shape, cluster, {.fp8 = true})).seconds < one);
}

TEST_CASE("an update takes its bytes, and offloaded state comes and goes at the same time",
          "[plan][step_simulation]") {
    const Cluster cluster = find_cluster("h100-dgx");
    const Efficiencies e = efficiencies_of(Software::own, cluster, false);
    const struct {
        const char *state, *dtype;
        double moved, held;  // bytes of an element, where AdamW updates it
    } kinds[] = {{"fp32", "bf16", 12 + 16 + 2, 4 + 8},
                 {"bf16", "bf16", 12 + 8 + 2, 4 + 4},
                 {"int8", "bf16", 12 + 4 + 16. / 256 + 2, 4 + 2 + 8. / 256},
                 {"fp32", "fp32", 12 + 16, 8}};
    for (const auto& kind : kinds) {
        const int zero = static_cast<int>(random_int(1, 3)), ranks = 1 << random_int(0, 3);
        Config config = small_config();
        config.optimizer.state_dtype.parse(kind.state);
        config.precision.dtype = resolve_dtype(kind.dtype, Device{});
        config.parallel.zero = zero;
        config.memory.offload = {"optimizer"};
        const RunShape shape = shape_on(config, cluster, ranks);
        const auto of_rank =
            static_cast<double>(whole_registry(shape)->numel()) / static_cast<double>(ranks);
        const RankWork work = step_work(shape, cluster).ranks[0];
        CAPTURE(kind.state, kind.dtype, zero, ranks);
        CHECK(work.optimizer ==
              Approx(kind.moved * of_rank / (e.memory * cluster.memory_bandwidth)).epsilon(0.01));
        CHECK(work.offload == Approx(kind.held * of_rank / cluster.host_link).epsilon(0.01));
        const auto planned =
            static_cast<double>(plan_memory(shape, Device{}, 0).bytes(Purpose::offloaded));
        CHECK(work.offload == Approx(planned / cluster.host_link).epsilon(0.01));

        const Prediction with = predict(shape, cluster),
                         without = predict(shape.with_offload({}), cluster);
        CHECK(with.offload == work.offload);
        CHECK(with.optimizer == without.optimizer);
        CHECK(without.offload == 0);
        CHECK(with.shares.at("offloading") == Approx(work.offload / with.step_seconds));
        CHECK(with.step_seconds - without.step_seconds == Approx(work.offload).epsilon(0.01));
    }
    // Of matrices Muon keeps one slot.
    Config muon = small_config();
    muon.optimizer.name = OptimizerName::muon;
    muon.memory.offload = {"optimizer"};
    const RunShape shape = shape_on(muon, cluster, 1);
    const auto planned =
        static_cast<double>(plan_memory(shape, Device{}, 0).bytes(Purpose::offloaded));
    const RankWork work = step_work(shape, cluster).ranks[0];
    CHECK(work.offload == Approx(planned / cluster.host_link).epsilon(0.01));
    muon.optimizer.name = OptimizerName::adamw;
    CHECK(work.offload < step_work(shape_on(muon, cluster, 1), cluster).ranks[0].offload);
    // A processor has no other memory.
    const Cluster cpu = find_cluster("cpu-8-cores");
    CHECK(step_work(shape_on(muon, cpu, 1), cpu).ranks[0].offload == 0);
}

TEST_CASE("computing in fp8 is estimated as shorter, and hides less of what is offloaded",
          "[plan][fp8]") {
    const Device gpu{.planned_architecture = 90};
    const Speeds speeds{.flops = 1e15, .host = 1e9};
    const auto seconds = [&](const Device& device, Fp8Recipe recipe, const char* offload) {
        Config config = small_config();
        config.parallel.zero = 1;
        config.precision.fp8 = recipe;
        config.memory.offload = {offload};
        const RunShape shape(config, spec_of(config, config.model.vocab_size), DType::bf16,
                             Recompute::none);
        return StepTime(shape, device, speeds).of(shape, 0);
    };
    const Fp8Recipe recipe = random_int(0, 1) ? Fp8Recipe::delayed : Fp8Recipe::current;
    const double bf16 = seconds(gpu, Fp8Recipe::off, "none"), fp8 = seconds(gpu, recipe, "none");
    CHECK(fp8 == Approx(0.85 * bf16));
    CHECK(seconds(gpu, recipe, "activations") - fp8 ==
          Approx(seconds(gpu, Fp8Recipe::off, "activations") - bf16 + 0.8 * (bf16 - fp8)));
    CHECK(seconds(Device{}, recipe, "none") == seconds(Device{}, Fp8Recipe::off, "none"));
}

TEST_CASE("of offloaded activations, those of the last three layers are on the GPU still",
          "[plan][step_simulation]") {
    Cluster cluster = find_cluster("h100-dgx");
    cluster.host_link = 1e6;  // nothing is hidden
    Config config = small_config();
    config.memory.offload = {"activations"};
    const double bytes = double{1} * config.batch.micro_batch * config.sequence_length() *
                         config.model.n_embd * sizeof(bf16);
    for (const int stages : {1, 2}) {
        config.parallel.pipeline = stages;
        const RunShape shape = shape_on(config, cluster, stages);
        const int layers = config.model.n_layer / stages, back = stages == 1 ? layers - 3 : layers;
        CHECK(layers_from_host(shape) == back);
        for (const RankWork& rank : step_work(shape, cluster).ranks) {
            int of_stage = 0, out = 0, in = 0;  // layers
            for (const UnitWork& unit : rank.stages[0]) {
                of_stage += unit.layer >= 0;
                out += unit.forward.offload > 0.9 * bytes / cluster.host_link;
                in += unit.backward_inputs.offload > 0.9 * bytes / cluster.host_link;
                CHECK((unit.backward_inputs.offload == 0 || unit.layer < back || stages > 1));
            }
            CAPTURE(stages);
            CHECK(out == of_stage);
            CHECK(in == (stages == 1 ? back : of_stage));
        }
    }
}

namespace {

/// The units of layers 0 and 1.
std::vector<UnitWork> first_layers(const Config& config) {
    const Cluster cluster = find_cluster("h100-dgx");
    const StepWork work = step_work(shape_on(config, cluster, 1), cluster, {.fp8 = is_fp8(config)});
    std::vector<UnitWork> layers;
    for (const UnitWork& unit : work.ranks[0].stages[0])
        if (unit.layer == 0 || unit.layer == 1) layers.push_back(unit);
    return layers;
}

}  // namespace

TEST_CASE("a prediction has in fp8 what a run has in fp8", "[plan][step_simulation]") {
    Config config = small_config();
    const UnitWork bf16 = first_layers(config)[0];
    config.precision.fp8 = random_int(0, 1) ? Fp8Recipe::delayed : Fp8Recipe::current;
    const UnitWork fp8 = first_layers(config)[0];
    CHECK(fp8.forward.products < 0.7 * bf16.forward.products);
    CHECK(fp8.backward_weights.products == Approx(fp8.forward.products));
    CHECK(fp8.forward.memory > bf16.forward.memory);

    Config without_third = config;
    without_third.precision.fp8_weight_gradient = false;
    const UnitWork two = first_layers(without_third)[0];
    CHECK(two.forward.products == Approx(fp8.forward.products));
    CHECK(two.backward_inputs.products == Approx(fp8.backward_inputs.products));
    CHECK(two.backward_weights.products == Approx(bf16.backward_weights.products));

    Config without_layer = config;
    without_layer.precision.fp8_skip = {"0"};
    const std::vector<UnitWork> layers = first_layers(without_layer);
    CHECK(layers[0].forward.sum() == Approx(bf16.forward.sum()));
    CHECK(layers[0].backward_weights.products == Approx(bf16.backward_weights.products));
    CHECK(layers[1].forward.sum() == Approx(fp8.forward.sum()));

    // What single products gain adds up.
    double gains = 0;
    for (const char* word : {"qkv", "out", "up", "down"}) {
        Config skips = config;
        skips.precision.fp8_skip = {word};
        gains += first_layers(skips)[0].forward.sum() - fp8.forward.sum();
    }
    CHECK(gains == Approx(bf16.forward.sum() - fp8.forward.sum()));

    // A product of fewer than 64 inputs stays in bf16.
    Config narrow = small_config();
    narrow.model.n_ff = 48;
    const UnitWork narrow_bf16 = first_layers(narrow)[0];
    narrow.precision.fp8 = config.precision.fp8;
    Config skipping = narrow;
    skipping.precision.fp8_skip = {"down"};
    CHECK(first_layers(narrow)[0].forward.sum() == first_layers(skipping)[0].forward.sum());
    CHECK(first_layers(narrow)[0].forward.products < narrow_bf16.forward.products);

    // The gradients of experts' weights stay in bf16, and others do not.
    Config mixture = config;
    mixture.model.family = "qwen3_moe";
    mixture.model.n_expert = 8, mixture.model.n_expert_per_token = 2;
    mixture.model.n_ff_expert = 512;
    const UnitWork of_mixture = first_layers(mixture)[0];
    mixture.precision.fp8_weight_gradient = false;
    const UnitWork all_in_bf16 = first_layers(mixture)[0];
    CHECK(of_mixture.backward_weights.products > 1.1 * of_mixture.forward.products);
    CHECK(of_mixture.backward_weights.products < all_in_bf16.backward_weights.products);

    // The head is the same, and so is the peak that the MFU is a share of.
    const Cluster cluster = find_cluster("h100-dgx");
    const auto predicted = [&](const Config& of) {
        return predict(shape_on(of, cluster, 8), cluster);
    };
    const Prediction p = predicted(config), before = predicted(small_config());
    CHECK(p.mfu / before.mfu == Approx(p.tokens_per_second / before.tokens_per_second));
    CHECK(contains(to_json(p)["mfu_convention"].get<std::string>(), "peak of bf16"));
    CHECK(contains(to_text(p, cluster), "of the bf16 peak)"));
    // Large numbers have separators, and no exponents.
    Prediction large = p;
    large.step_seconds = 19.5988, large.low = 9.99951, large.high = 0.12066;
    large.tokens_per_second = 548'291, large.gpu_hours = 43'087'065.7, large.days = 1.5;
    const std::string text = to_text(large, cluster);
    CHECK(contains(text, ": 19,600 ms a step (10,000 to 120.7)\n"));
    CHECK(contains(text, " 548,300 tokens/s of a rank"));
    CHECK(contains(text, " 43,090,000 GPU-hours, 1.50 days\n"));
}

TEST_CASE("a prediction has the casts to fp8 that each rank makes", "[plan][step_simulation]") {
    const Cluster cluster = find_cluster("h100-dgx");
    const Efficiencies e = efficiencies_of(Software::own, cluster, true);
    const double bandwidth = e.memory * cluster.memory_bandwidth;
    // What casts add to a step's end and to a layer's forward pass
    struct Casts {
        double end, forward;
    };
    const auto casts = [&](Config config, int world) {
        config.precision.fp8 = Fp8Recipe::delayed;
        const auto work_of = [&] {
            const RankWork work =
                step_work(shape_on(config, cluster, world), cluster, {.fp8 = true}).ranks[0];
            const auto layer = std::ranges::find_if(work.stages[0],
                                                    [](const UnitWork& u) { return u.layer == 0; });
            return Casts{work.optimizer, layer->forward.memory};
        };
        const Casts with = work_of();
        config.precision.fp8_skip = {"qkv", "out", "up", "down"};
        const Casts none = work_of();
        return Casts{with.end - none.end, with.forward - none.forward};
    };
    Config config = small_config();
    config.parallel.zero = static_cast<int>(random_int(1, 2));
    const LayerSpec layer = spec_of(config, config.model.vocab_size).layer(0);
    const double M = double{1} * config.batch.micro_batch * config.sequence_length(),
                 C = layer.n_embd, F = layer.n_ff,
                 weights = C * (layer.qkv_width() + C + layer.up_width() + F),
                 of_weights = (2 + 2) * weights / bandwidth;
    const auto of_inputs = [&](double elements) {
        return e.quantisation * 3 * M * elements / bandwidth;
    };
    const Casts one = casts(config, 2);
    CHECK(one.end == Approx(config.model.n_layer * of_weights));
    CHECK(one.forward == Approx(of_inputs(3 * C + 2 * F)));
    config.parallel.zero = 3;
    const Casts gathered = casts(config, 2);
    CHECK(gathered.end == 0);
    CHECK(gathered.forward == Approx(one.forward + of_weights));
    // Of two ranks that share products each rounds all of what a norm gives, and half of the rest.
    config.parallel.zero = 1;
    config.parallel.tensor = 2;
    const Casts shared = casts(config, 2);
    CHECK(shared.end == Approx(config.model.n_layer * of_weights / 2));
    CHECK(shared.forward == Approx(of_inputs(2 * C + C / 2 + 2 * F / 2)));
}

TEST_CASE("fp8 pays from the width at which products gain what casts take",
          "[plan][step_simulation]") {
    Cluster cluster = find_cluster("h100-dgx");
    const int width = fp8_pays_from(cluster);
    CHECK(width > 768);  // nanochat: slower with 768, faster with 1,664
    CHECK(width <= 1664);
    // Time of the three products of a layer, for a token of 8,192, and of its casts: twice from
    // bf16 to one byte for x, once to two bytes for dy, and the same once a step for the weight
    const Efficiencies bf16 = efficiencies_of(Software::own, cluster, false),
                       fp8 = efficiencies_of(Software::own, cluster, true);
    const auto gain = [&](double C) {
        const double in_bf16 = 6 * C * C / (cluster.flops_bf16 * bf16.products) * bf16.software *
                               (1 + bf16.half_size / (4 * C) + bf16.half_rows / 8192),
                     in_fp8 = 6 * C * C / (cluster.flops_fp8 * fp8.products) * fp8.software *
                              (1 + fp8.half_size / (4 * C) + fp8.half_rows / 8192),
                     bytes = 2 * (2 + 1) * C + (2 + 2) * C + (2 + 2) * C * C / 8192;
        return in_bf16 - in_fp8 - bytes / (fp8.memory * cluster.memory_bandwidth);
    };
    CHECK(gain(width) > 0);
    CHECK(gain(width - 64) <= 0);
    std::string row = "| fp8 pays from a width of |";
    for (const char* name : {"h100-dgx", "h200", "b200", "rtx5090", "rtx4090"})
        row += concat(" ", fp8_pays_from(find_cluster(name)), " |");
    CAPTURE(row);
    CHECK(contains(read("docs/planning.md"), row));
    // A faster memory makes it pay earlier, slower products never.
    Cluster faster = cluster;
    faster.memory_bandwidth *= 1.0 + static_cast<double>(random_int(1, 30)) / 10;
    CHECK(fp8_pays_from(faster) <= width);
    cluster.flops_fp8 = cluster.flops_bf16 / 2;
    CHECK(fp8_pays_from(cluster) == 0);
    CHECK(fp8_pays_from(find_cluster("a100-80")) == 0);

    Config config = small_config();
    config.precision.fp8 = Fp8Recipe::delayed;
    const Cluster dgx = find_cluster("h100-dgx");
    const Prediction prediction = predict(shape_on(config, dgx, 8), dgx);
    CHECK(prediction.fp8_pays_from == width);
    CHECK(to_json(prediction).at("fp8_pays_from_width") == width);
    CHECK(contains(to_text(prediction, dgx), concat("fp8 pays from a width of ", width)));
    CHECK(prediction.fp8_pays);
    CHECK(!contains(to_text(prediction, dgx), "not for this model"));
    config.model.n_embd = 64 * static_cast<int>(random_int(1, (width - 1) / 64));
    config.model.n_head = config.model.n_embd / 64;
    const Prediction narrow = predict(shape_on(config, dgx, 8), dgx);
    CHECK(!narrow.fp8_pays);
    CHECK(to_json(narrow).at("fp8_pays") == false);
    CHECK(contains(to_text(narrow, dgx),
                   concat("; not for this model, whose width is ", config.model.n_embd)));

    // A plan says it of its GPU, as far as its datasheet is known.
    PlanTarget target{Device{}};
    CHECK(fp8_note(target, 4096).empty());
    target.gpu = "GPU";
    CHECK(fp8_note(target, 4096) ==
          "from which width fp8 pays is not known for this GPU, whose datasheet is not at hand");
    target.gpu = "H100", target.multiprocessors = gpu_named("h100").multiprocessors;
    CHECK(fp8_note(target, 4096) ==
          fp8_note("H100", fp8_pays_from(gpu_named("h100")), 4096) + ", by its datasheet");

    // By a datasheet, where no cluster is shipped
    CHECK(fp8_pays_from(gpu_named("h100")) == width);
    CHECK(fp8_pays_from(gpu_named("l40s")) > 0);
    CHECK(fp8_pays_from(gpu_named("a100-80")) == 0);
    CHECK(fp8_pays_from(gpu_named("rtx3090")) == 0);
}

TEST_CASE("fp8 is refused on GPUs that do not have it", "[plan][fp8]") {
    Config config = small_config();
    config.precision.fp8 = Fp8Recipe::delayed;
    const auto error_of = [](const auto& call) -> std::string {
        try {
            call();
            return "";
        } catch (const Error& error) {
            return error.what();
        }
    };
    const auto check = [](const std::string& error, const std::string& gpu) {
        CAPTURE(error);
        for (const std::string& part :
             {gpu, std::string("no tensor cores for fp8"), std::string("precision.fp8 to \"off\"")})
            CHECK(contains(error, part));
    };
    for (const char* name : {"a100-80", "a100-40"}) {
        const Cluster cluster = find_cluster(name);
        check(error_of([&] { shape_on(config, cluster, 8); }), name);
        check(error_of([&] { search(config, cluster, 8); }), name);
    }
    CHECK(error_of([&] { shape_on(config, find_cluster("rtx4090"), 8); }).empty());
    CHECK(error_of([&] { shape_on(config, find_cluster("cpu-8-cores"), 8); }).empty());
    config.precision.fp8 = Fp8Recipe::off;
    CHECK(error_of([&] { shape_on(config, find_cluster("a100-80"), 8); }).empty());
}

TEST_CASE("a prediction in JSON has all keys, and shares that add up to less than a step",
          "[plan][step_simulation]") {
    Config config = small_config();
    const Cluster cluster = find_cluster("h100-dgx");
    const RunShape shape = shape_on(config, cluster, 8);
    const Json json = to_json(predict(shape, cluster, {.price = 2}));
    for (const char* key : {"step_ms", "step_ms_low", "step_ms_high", "tokens_per_second_per_gpu",
                            "mfu", "mfu_convention", "memory_bytes", "exposed_communication_ms",
                            "bubble_fraction", "gpu_hours", "days", "cost", "bound"}) {
        CAPTURE(key);
        CHECK(json.contains(key));
    }
    const double hours = json["step_ms"].get<double>() * 1000 * 8 / 3.6e6;
    CHECK(json["gpu_hours"].get<double>() == Approx(hours));
    CHECK(json["cost"].get<double>() == Approx(2 * hours));
    double shares = 0;
    for (const auto& [name, share] : json["shares"].items()) shares += share.get<double>();
    CHECK(shares > 0.9);
    CHECK(shares < 1.05);
    CHECK(json["memory_bytes"]["total"].get<uint64_t>() > 0);
}

TEST_CASE("a simulated trace is JSON with the spans of every pipeline rank",
          "[plan][step_simulation]") {
    Config config = small_config();
    config.parallel.pipeline = 2;
    const Cluster cluster = find_cluster("h100-dgx");
    const RunShape shape = shape_on(config, cluster, 4);
    const SimulatedStep step = simulate_step(step_work(shape, cluster), true);
    const TemporaryDirectory folder;
    write_trace(folder / "trace.json", step, shape.mesh.first_ranks(Axis::pipeline));
    const Json json = parse_json(read(folder / "trace.json"));
    std::set<int> ranks;
    std::set<std::string> names;
    double end = 0;
    for (const Json& event : json["traceEvents"]) {
        if (event["ph"] != "X") continue;
        ranks.insert(event["pid"].get<int>());
        const std::string name = event["name"];
        names.insert(name.substr(0, name.find_last_of(' ')));
        end = std::max(end, event["ts"].get<double>() + event["dur"].get<double>());
    }
    CHECK(ranks == std::set<int>{0, 2});
    for (const char* name : {"forward layer", "backward layer", "reduce bucket", "gather bucket"})
        CHECK(names.contains(name));
    CHECK(end == Approx(1e6 * step.seconds).epsilon(0.01));
}

TEST_CASE("a search's ways fit, are sorted, and simulate to their times", "[plan][search]") {
    Config config = small_config();
    config.batch.micro_batch = 0;
    config.memory.recompute = std::nullopt;
    Cluster cluster = find_cluster("h100-dgx");
    cluster.memory = 2e9;  // so that not all fit
    const SearchResult result = search(config, cluster, 16);
    REQUIRE(result.best.size() == 10);
    CHECK(!result.fuller.empty());
    double before = 0;
    for (const Candidate& way : result.best) {
        CHECK(way.memory <= result.memory_available);
        CHECK(way.memory > 0);
        CHECK(way.step_seconds >= before);
        before = way.step_seconds;
        CHECK(simulate_step(step_work(way.shape, cluster)).seconds ==
              Approx(way.step_seconds).epsilon(0.02));
    }
    for (const Candidate& way : result.fuller) CHECK(way.memory > result.memory_available);
    CHECK(problem_of(result).empty());
    // With too little memory for any, or too few sequences, it says so.
    cluster.memory = 1e8;
    CHECK(contains(problem_of(search(config, cluster, 16)), "fits into memory"));
    config.batch.tokens_per_step = config.sequence_length();
    CHECK(contains(problem_of(search(config, find_cluster("h100-dgx"), 1024)), "micro-batches"));
    const Json json = to_json(result);
    CHECK(json["best"].size() == 10);
    CHECK(json["best"][0].contains("parallel.tensor"));
    CHECK(json["best"][0]["memory.offload"] == Json({"none"}));
    // If the run fits as it is given, more ranks are not what is missing.
    SearchResult none = result;
    none.best.clear();
    CHECK(contains(problem_of(none), "use more ranks"));
    none.given_fits = true;
    CHECK(contains(problem_of(none), "plan it without --search"));
    CHECK(!contains(problem_of(none), "more ranks"));
}

namespace {

/// 32 layers of 1024 channels, without much else.
Config simulated_config() {
    Config config = small_config();
    config.model.n_layer = 32;
    config.model.vocab_size = 4096;
    config.batch.micro_batch = 0;
    config.batch.tokens_per_step = 8 * 1024;
    config.memory.recompute = std::nullopt;
    return config;
}

/// The least memory of a GPU of which a rank may take so much.
double memory_with(uint64_t bytes) { return static_cast<double>((bytes / 39 + 1) * 40); }

/// What one rank needs with one sequence at a time, and with blocks computed again.
uint64_t least_needed(const Config& config, const Cluster& cluster, const Offload& offload) {
    return plan_memory(shape_on(config, cluster, 1)
                           .with_micro_batch(1)
                           .with_recompute(Recompute::block)
                           .with_offload(offload),
                       target_of(cluster).device)
        .total_bytes();
}

}  // namespace

TEST_CASE("a search leaves out no way that fits, whatever the optimizer keeps", "[plan][search]") {
    for (const char* state : {"fp32", "bf16", "int8"})
        for (const DType dtype : {DType::bf16, DType::fp32})
            for (const OptimizerName name : {OptimizerName::adamw, OptimizerName::muon}) {
                if (name == OptimizerName::muon && state == std::string("int8")) continue;
                Config config = simulated_config();
                config.optimizer.state_dtype.parse(state);
                config.optimizer.name = name;
                config.precision.dtype = dtype;
                Cluster cluster = find_cluster("h100-dgx");
                cluster.memory = memory_with(least_needed(config, cluster, {}));
                CAPTURE(state, train_gpt::name_of(dtype), name == OptimizerName::muon);
                const SearchResult result = search(config, cluster, 1);
                REQUIRE(!result.best.empty());
                CHECK(!result.offloads);
                cluster.memory *= 0.9;
                for (const Candidate& way : search(config, cluster, 1).best)
                    CHECK(!(way.shape.offload() == Offload{}));
            }
}

TEST_CASE("a plan for a cluster's GPU keeps the offload that is given, in any build", "[plan]") {
    const Cluster cluster = find_cluster("rtx4090");
    Config config = small_config();
    config.precision.dtype = DType::bf16;
    const auto counted = [&](const Offload& given) {
        const RunShape shape =
            choose_for(shape_on(config, cluster, 1).with_offload(given), cluster);
        CHECK(shape.offload() == given);
        return plan_memory(shape, target_of(cluster).device);
    };
    const auto parameters =
        static_cast<double>(whole_registry(shape_on(config, cluster, 1))->numel());
    const double inputs =
        8.0 * 2 * 1024 * 1024 * 2;  // layers · sequences · tokens · channels, bf16
    const Arena none = counted({});
    CHECK(none.bytes(Purpose::offloaded) == 0);
    for (const Offload& given : {Offload{.optimizer = true}, {.activations = true}, {true, true}}) {
        const Arena plan = counted(given);
        const double expected =
            (given.optimizer ? 12 * parameters : 0) + (given.activations ? inputs : 0);
        CAPTURE(given.optimizer, given.activations);
        CHECK(static_cast<double>(plan.bytes(Purpose::offloaded)) ==
              Approx(expected).epsilon(0.01));
        CHECK(plan.host_bytes() >= plan.bytes(Purpose::offloaded));
        CHECK(plan.total_bytes() < none.total_bytes());
        Config with = config;
        with.memory.offload = words_of(given);
        const std::string text = plan_report(with, target_of(cluster), 1).text;
        CHECK(contains(
            text, given.optimizer ? "memory.offload = optimizer" : "memory.offload = activations"));
        CHECK(
            contains(text, format_bytes(plan.bytes(Purpose::offloaded)) + " of the host's memory"));
    }
    // A processor has no other memory.
    const Cluster cpu = find_cluster("cpu-8-cores");
    const RunShape on_cpu =
        choose_for(shape_on(config, cpu, 1).with_offload({.optimizer = true}), cpu);
    CHECK(on_cpu.offload() == Offload{});
}

namespace {

/// A mixture whose first layer is dense, or any layers, up to 64 times as wide as an expert or
/// narrower; cut along all axes.
Config random_mixture() {
    const auto power_of_two = [](int low, int high) {
        return 1 << static_cast<int>(random_int(low, high));
    };
    Config config = small_config();
    auto& m = config.model;
    m.family = "qwen3_moe";
    m.n_layer = static_cast<int>(random_int(4, 9));
    m.n_embd = 64 * power_of_two(0, 3);
    m.n_kv_head = power_of_two(1, 3);
    m.head_size = 16 * power_of_two(0, 2);
    m.vocab_size = 512 * power_of_two(0, 4);
    m.n_expert = static_cast<int>(random_int(2, 8));
    m.n_expert_per_token = static_cast<int>(random_int(1, 2));
    m.n_ff_expert = 32 * power_of_two(0, 3);
    m.n_ff = m.n_ff_expert / 2 * power_of_two(0, 7);
    if (random_int(0, 1) == 0)
        m.dense_layers = {0};
    else
        for (int l = 0; l + 1 < m.n_layer; ++l)
            if (random_int(0, 2) == 0) m.dense_layers.push_back(l);
    auto& p = config.parallel;
    p.tensor = power_of_two(0, 1), p.context = power_of_two(0, 1), p.pipeline = power_of_two(0, 2);
    p.zero = static_cast<int>(random_int(1, 3));
    if (p.pipeline > 1 && random_int(0, 1) == 0) p.schedule = PipelineKind::zero_bubble;
    if (p.pipeline == 2 && random_int(0, 1) == 0)
        p.schedule = PipelineKind::interleaved, p.stages_per_rank = 2;
    config.batch.micro_batch = power_of_two(0, 2);
    config.memory.offload = {"none"};
    return config;
}

}  // namespace

TEST_CASE("the least memory of a mixture is less than its fullest rank's, wherever it is dense",
          "[plan][search]") {
    const Cluster cluster = find_cluster("h100-dgx");
    for (int i = 0; i < 40; ++i) {
        Config config = random_mixture();
        const auto& p = config.parallel;
        const int data = static_cast<int>(random_int(1, 2)),
                  world = data * p.tensor * p.context * p.pipeline;
        config.batch.tokens_per_step = int64_t{1} * data * p.pipeline * config.batch.micro_batch *
                                       config.sequence_length() * random_int(1, 3);
        const RunShape given = shape_on(config, cluster, world).for_counting();
        const LeastMemory least(given);
        double of_level_before = INFINITY;
        for (const Recompute level : recompute_levels) {
            const RunShape shape = given.with_recompute(level);
            CAPTURE(p.tensor, p.context, p.pipeline, p.zero.value(), data,
                    name_of(PipelineKind(p.schedule)), config.batch.micro_batch, name_of(level),
                    config.model.n_layer, config.model.dense_layers, config.model.n_ff,
                    config.model.n_ff_expert);
            const double bytes = least.bytes(shape, layers_of_stages(shape));
            CHECK(bytes <=
                  static_cast<double>(plan_memory(shape, target_of(cluster).device).total_bytes()));
            CHECK(bytes < of_level_before);
            of_level_before = bytes;
        }
    }
}

TEST_CASE("a search offloads where nothing fits otherwise", "[plan][search]") {
    const Config config = simulated_config();
    Cluster cluster = find_cluster("h100-dgx");
    const auto least = [&](const Offload& offload) {
        return least_needed(config, cluster, offload);
    };
    const Offload optimizer{.optimizer = true}, both{true, true};
    REQUIRE(least(optimizer) < least({}));
    const double with_optimizer = memory_with(least(optimizer)),
                 with_both = memory_with(least(both)), too_little = 0.9 * with_both;
    cluster.memory = with_optimizer;
    const SearchResult result = search(config, cluster, 1);
    CHECK(result.offloads);
    REQUIRE(!result.best.empty());
    for (const Candidate& way : result.best) {
        CHECK(way.shape.offload().optimizer);
        CHECK(way.memory <= result.memory_available);
        CHECK(simulate_step(step_work(way.shape, cluster)).seconds == Approx(way.step_seconds));
    }
    CHECK(std::ranges::is_sorted(result.best, {}, &Candidate::step_seconds));
    CHECK(contains(to_text(result, cluster), "optimizer"));
    CHECK(problem_of(result).empty());
    cluster.memory = with_both;
    CHECK(!search(config, cluster, 1).best.empty());
    cluster.memory = too_little;
    CHECK(contains(problem_of(search(config, cluster, 1)), "not with memory.offload either"));
}
