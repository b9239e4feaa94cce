#include "training/plan/pipeline_plan.h"

#include <algorithm>

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/plan/plan.h"
#include "training/trainer.h"

using namespace train_gpt;

namespace {

/// A layer for each stage, next to which the head costs little, and m micro-batches.
Config pipeline_config(PipelineKind kind, int ranks, int stages_per_rank, int m) {
    Config config;
    config.model = {.n_layer = ranks * stages_per_rank,
                    .n_head = 32,
                    .n_embd = 4096,
                    .n_ctx = 8,
                    .vocab_size = 128};
    config.batch.micro_batch = 1;
    config.batch.sequence_length = 8;
    config.batch.tokens_per_step = int64_t{8} * m;
    config.schedule.steps = 10;
    config.parallel.pipeline = ranks;
    config.parallel.schedule = kind;
    config.parallel.stages_per_rank = stages_per_rank;
    config.memory.recompute = Recompute::none;
    config.checkpoint.async = random_int(0, 1) == 1;
    return config;
}

struct Case {
    PipelineKind kind;
    int ranks, stages_per_rank, micro_batches;
};

/// One of each kind, of more micro-batches than `rounds` times the ranks.
std::vector<Case> random_cases(int rounds) {
    std::vector<Case> cases;
    for (const PipelineKind kind : {PipelineKind::gpipe, PipelineKind::one_f_one_b,
                                    PipelineKind::interleaved, PipelineKind::zero_bubble}) {
        const int p = static_cast<int>(random_int(2, 5));
        const bool interleaved = kind == PipelineKind::interleaved;
        const int more = static_cast<int>(random_int(0, 3 * p));
        cases.push_back({kind, p, interleaved ? static_cast<int>(random_int(2, 3)) : 1,
                         rounds * p + (interleaved ? more / p * p : more)});
    }
    return cases;
}

}  // namespace

TEST_CASE("a plan's bubble is that of the schedules' formulas", "[plan][pipeline_plan]") {
    for (const auto& [kind, p, v, m] : random_cases(1)) {
        const Config config = pipeline_config(kind, p, v, m);
        const std::string text = plan_report(config, Device{}, p).text;
        CAPTURE(name_of(kind), p, v, m, text);
        // Forward and both halves of backward take the same time: F = I = W = 1.
        const double idle = kind == PipelineKind::interleaved   ? (p - 1) * 3.0 / v
                            : kind == PipelineKind::zero_bubble ? p - 1
                                                                : (p - 1) * 3;
        const std::string label = ": bubble ";
        REQUIRE(occurrences(text, label) == 1);
        const double printed = std::stod(text.substr(text.find(label) + label.size()));
        CHECK(std::abs(printed - 100 * idle / (idle + 3 * m)) < 0.4);  // the head's 0.26 % and more
        CHECK(contains(text, concat("pipeline of ", p, " ranks, ", name_of(kind), ", ", m,
                                    " micro-batches: ")));
        const std::string table = text.substr(text.find("pipeline of "));
        const DecoderSpec spec = spec_of(config, 128);
        const DType dtype = resolve_dtype("auto", Device{});
        for (int rank = 0; rank < p; ++rank)
            CHECK(contains(
                table,
                format_bytes(plan_memory({config, spec, dtype, Recompute::none, p}, Device{}, rank)
                                 .total_bytes())));
        const int first = kind == PipelineKind::gpipe ? m : p;  // of the first rank
        if (v == 1) CHECK(contains(table, concat(" 1   ", first, "\n")));
    }
    Config alone = pipeline_config(PipelineKind::one_f_one_b, 1, 1, 2);
    CHECK_FALSE(contains(plan_report(alone, Device{}, 1).text, "bubble"));
}

TEST_CASE("the FLOPs of stages add up to those of the model", "[plan][pipeline_plan]") {
    const int p = static_cast<int>(random_int(2, 6));
    Config config = pipeline_config(PipelineKind::one_f_one_b, p, 1, p);
    config.model.n_layer = p + static_cast<int>(random_int(0, 9));
    config.model.n_embd = 64 * static_cast<int>(random_int(1, 4));
    config.model.vocab_size = static_cast<int>(random_int(100, 5000));
    config.model.n_ctx = config.batch.sequence_length = static_cast<int>(random_int(1, 99));
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    const double C = spec.n_embd, T = spec.n_ctx;
    const double layer = 24 * C * C + 2 * C * T;  // forward
    const RunShape shape(config, spec, DType::fp32, Recompute::none, p);
    const auto total = [&](Recompute recompute) {
        double sum = 0;
        for (const StageTimes& t : stage_flops(shape.with_recompute(recompute)).stages)
            sum += t.forward + t.backward_inputs + t.backward_weights;
        return sum;
    };
    CHECK(total(Recompute::none) == Approx(spec.flops_per_token(static_cast<int>(T)) / layer));
    CHECK(total(Recompute::block) == Approx(total(Recompute::none) + spec.n_layer));
    const PipelineTimes times = stage_flops(shape);
    CHECK(times.stages.front().forward == Approx(layers_of_stages(shape).front()));
    // Attention's scores and values have no weights.
    CHECK(times.stages.front().backward_weights ==
          Approx(times.stages.front().forward * 24 * C * C / layer));
}

TEST_CASE("a plan that shortens a pipeline's schedule counts the memory of the whole one",
          "[plan][pipeline_plan]") {
    for (const auto& [kind, p, v, m] : random_cases(static_cast<int>(random_int(4, 9)))) {
        const Config config = pipeline_config(kind, p, v, m);
        const DecoderSpec spec = spec_of(config, 128);
        const MeshLayout mesh = mesh_of(config, p);
        for (int rank = 0; rank < p; ++rank) {
            CAPTURE(name_of(kind), p, v, m, rank);
            Arena whole = Arena::counting(Device{});
            const Trainer trainer({config, spec, DType::fp32, Recompute::none, mesh.world()}, whole,
                                  rank);
            const Arena plan =
                plan_memory({config, spec, DType::fp32, Recompute::none, p}, Device{}, rank);
            for (size_t i = 0; i < static_cast<size_t>(Purpose::count); ++i)
                CHECK(plan.bytes(static_cast<Purpose>(i)) == whole.bytes(static_cast<Purpose>(i)));
        }
    }
}
