// Pipelines: what they are refused for, and that they compute what one rank computes, bit for bit.
// mesh_test.cpp trains them beside other axes.
#include "model/pipeline.h"

#include "model/families/family.h"
#include "parallel/axes/pipeline.h"
#include "parallel/pipeline/stage_layers.h"
#include "test/parallel/mesh_job.h"
#include "test/parallel/training_job.h"
#include "training/config/load_config.h"
#include "training/plan/fit.h"
#include "training/plan/memory_plan.h"

using namespace train_gpt;
using namespace train_gpt::training_job;
using namespace train_gpt::mesh_job;

namespace {

std::string error_with(const std::vector<std::string>& settings) {
    return error_of([&] {
        std::vector<std::string> all{"run_dir=r", "data.train=synthetic", "schedule.steps=1",
                                     "model.n_layer=6"};
        all.insert(all.end(), settings.begin(), settings.end());
        parse_config("{}", "test.json", all);
    });
}

}  // namespace

TEST_CASE("settings of a pipeline that do not fit are refused with the key and the nearest value",
          "[pipeline][config]") {
    CHECK(contains(error_with({"parallel.pipeline=8"}),
                   "test.json: parallel.pipeline = 8 is more than model.n_layer = 6, and each "
                   "pipeline rank needs a layer; the nearest value that fits is 6"));
    CHECK(contains(error_with({"parallel.pipeline=2", "parallel.schedule=interleaved"}),
                   "parallel.stages_per_rank = 1 does not fit parallel.schedule = \"interleaved\"; "
                   "the nearest value that does is 2"));
    CHECK(contains(error_with({"parallel.pipeline=2", "parallel.stages_per_rank=2"}),
                   "parallel.stages_per_rank = 2 does not fit parallel.schedule = \"1f1b\"; the "
                   "nearest value that does is 1"));
    CHECK(contains(error_with({"parallel.pipeline=2", "parallel.schedule=interleaved",
                               "parallel.stages_per_rank=4"}),
                   "each stage needs a layer; the nearest value that fits is 3"));
    CHECK(contains(error_with({"parallel.stages_per_rank=2"}), "needs a pipeline"));
    CHECK(contains(error_with({"parallel.layers_per_stage=[3,3]"}), "needs a pipeline"));
    CHECK(
        contains(error_with({"parallel.pipeline=2", "parallel.layers_per_stage=[3,4]"}),
                 "test.json: parallel.layers_per_stage adds up to 7 layers, but the model has 6"));
    CHECK(contains(error_with({"parallel.pipeline=2", "parallel.layers_per_stage=[3,0]"}),
                   "it must be a list of whole numbers from 1 to 4096"));
    CHECK(contains(error_with({"parallel.pipeline=2", "parallel.layers_per_stage=3"}),
                   "it must be a list of whole numbers from 1 to 4096"));
    CHECK(contains(error_with({"parallel.schedule=2f2b"}),
                   "it must be one of \"1f1b\", \"gpipe\", \"interleaved\" or \"zero_bubble\""));
    CHECK(error_with({"parallel.pipeline=3", "parallel.layers_per_stage=[1,4,1]"}).empty());
    CHECK(contains(error_of([] { MeshLayout(8, {.pipeline = 3, .tensor = 2}); }),
                   "parallel.pipeline = 3 does not divide the 4 ranks that parallel.tensor and "
                   "parallel.context leave; "
                   "the nearest value that does is 2"));
}

TEST_CASE("layers of stages that are not those of the model are refused with what to change",
          "[pipeline]") {
    const auto refusal = [](const std::vector<int>& layers) {
        const auto problem = pipeline_problem({.ranks = 4, .layers_per_stage = layers}, 12);
        return problem ? problem->text : "";
    };
    CHECK(refusal({3, 3, 3, 3}).empty());
    CHECK(refusal({1, 9, 1, 1}).empty());
    CHECK(contains(refusal({4, 4, 4}), "has 3 numbers, but the pipeline has 4 stages"));
    CHECK(contains(refusal({6, 0, 3, 3}), "gives stage 1 0 layers"));
    CHECK(contains(refusal({5, 4, -1, 4}), "gives stage 2 -1 layers"));
    CHECK(contains(refusal({3, 3, 3, 2}), "adds up to 11 layers, but the model has 12"));
    CHECK(
        contains(refusal({2147483647, 2147483647, 2147483647, 1}), "adds up to 6442450942 layers"));
}

TEST_CASE("an interleaved pipeline refuses a step that is no multiple of its ranks",
          "[pipeline][plan]") {
    const auto fit = [](int micro_batches, int batch) {
        const Config config = parse_config(
            "{}", "test",
            {"run_dir=r", "data.train=synthetic", "schedule.steps=1", "model.n_layer=8",
             "model.n_embd=32", "model.n_head=2", "model.n_ctx=16", "model.vocab_size=99",
             "parallel.pipeline=4", "parallel.schedule=interleaved", "parallel.stages_per_rank=2",
             concat("batch.tokens_per_step=", micro_batches * 16),
             concat("batch.micro_batch=", batch)});
        const DecoderSpec spec = spec_of(config, 99);
        return fit_into({uint64_t{1} << 40}, {config, spec, DType::fp32, Recompute::none, 8},
                        Device{});
    };
    CHECK(contains(error_of([&] { fit(20, 1); }),
                   "parallel.schedule = \"interleaved\" cannot run a step of 20 micro-batches on 2 "
                   "pipelines of 4 ranks: it needs a multiple of 8; the nearest value of "
                   "batch.tokens_per_step that gives one is 384"));
    CHECK(fit(16, 1).micro_batch == 1);
    CHECK(fit(48, 0).micro_batch == 6);  // the largest that leaves 8
}

TEST_CASE("ranks along a pipeline are named by their place", "[pipeline][mesh]") {
    CHECK(MeshLayout(4, {.pipeline = 4}).place(2) == "pipeline 2");
    CHECK(MeshLayout(8, {.pipeline = 2, .tensor = 2}).place(7) == "pipeline 1, data 1, tensor 1");
}

TEST_CASE("the stages of all pipeline ranks hold each parameter once, but a tied embedding twice",
          "[pipeline]") {
    for (const bool tied : {true, false}) {
        Config config = config_of(trains("gpt2", 4).zero(1), 1, "cpu");
        config.model.n_layer = static_cast<int>(random_int(6, 9));
        config.model.tied_head = std::optional(tied);
        const DecoderSpec spec = spec_of(config, 300);
        const Registry whole = registry_of(spec);
        const int p = static_cast<int>(random_int(2, 3)), v = static_cast<int>(random_int(1, 2));
        std::map<std::string, int> held;
        for (int rank = 0; rank < p; ++rank) {
            const RankRegistry of_rank = registry_of_rank(
                whole,
                deal_layers({std::vector<double>(static_cast<size_t>(spec.n_layer), 1)}, p * v),
                rank, p, {});
            REQUIRE(std::ssize(of_rank.stages) == v);
            int unit = 0;
            for (const Parameter& parameter : of_rank.parameters) {
                CHECK((parameter.unit == unit || parameter.unit == unit + 1));
                unit = parameter.unit;
                ++held[parameter.name];
                CHECK(whole.parameters[parameter.id].name == parameter.name);
            }
            for (const Registry& stage : of_rank.stages)
                for (size_t l = 0; l < stage.blocks.size(); ++l)
                    CHECK(
                        contains(of_rank.parameters[static_cast<size_t>(stage.blocks[l].up_w)].name,
                                 concat(".", static_cast<size_t>(stage.first_layer) + l, ".")));
        }
        for (const Parameter& parameter : whole.parameters)
            CHECK(held[parameter.name] == (tied && parameter.id == 0 ? 2 : 1));
    }
}

// ---- Bits ---------------------------------------------------------------------------------------

namespace {

constexpr MeshCase alone[] = {
    trains("gpt2", 5).zero(1).pipeline(4),
    trains("llama", 3).bf16().pipeline(2, "gpipe"),
    trains("gpt2", 8).zero(1).pipeline(2, "interleaved", 2),
    trains("qwen3", 6).zero(1).pipeline(4, "zero_bubble"),
    trains("mistral", 2).zero(1).pipeline(3, "zero_bubble"),
};

struct Results {
    std::vector<double> losses, norms;
    std::vector<std::vector<double>> gradients;
    double evaluated = 0;
    std::vector<float> logits;
};

Results results_of(MeshRun& run, uint64_t seed) {
    Results results;
    for (int step = 0; step < 3; ++step) {
        const StepOutcome outcome = run.step();
        results.losses.push_back(outcome.sums.loss);
        results.norms.push_back(outcome.state.norm);
    }
    results.gradients = run.gradients();
    Trainer& trainer = run.trainer();
    const EvaluationBatch& batch = trainer.evaluation_batch;
    std::mt19937_64 random(seed);
    const auto token = [&] {
        return static_cast<int32_t>(random() % static_cast<uint64_t>(run.spec().vocab_size));
    };
    std::ranges::generate(batch.tokens, token);
    std::ranges::generate(batch.targets, token);
    batch.run(trainer.stream, trainer.model);
    double total[] = {trainer.model.ends_model() ? batch.total(trainer.stream, trainer.model) : 0};
    run.mesh().world().all_reduce_sum(total);
    results.evaluated = total[0];
    trainer.generator().reset();
    trainer.generator().feed(trainer.stream, std::span(batch.tokens).first(5));
    results.logits.assign(trainer.generator().logits().begin(), trainer.generator().logits().end());
    return results;
}

}  // namespace

TEST_CASE("ranks: bits of pipelines", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    on_parts(World::join(), alone, [&](const World& part, const MeshCase& c, size_t number) {
        const uint64_t of_case = seed + number;
        CAPTURE(mesh_job::name_of(c), of_case);
        const auto config = [&](bool split) {
            Config made = config_of(c, of_case, "cpu", split);
            made.model.n_layer =
                std::max(made.model.n_layer, c.pipeline.ranks * c.pipeline.per_rank);
            made.model.tied_head = std::optional(false);
            return made;
        };
        MeshRun run(part, Device{}, config(true));
        const Results here = results_of(run, of_case);
        // All ranks get the logits.
        std::vector<double> sum(here.logits.begin(), here.logits.end());
        part.all_reduce_sum(sum);
        for (size_t i = 0; i < sum.size(); ++i)
            REQUIRE(sum[i] == Approx(part.size() * here.logits[i]).margin(1e-6));
        if (part.rank() != 0) return;
        MeshRun one(World(), Device{}, config(false));
        const Results there = results_of(one, of_case);
        CHECK(here.losses == there.losses);
        CHECK(here.norms == there.norms);
        CHECK(here.gradients == there.gradients);
        CHECK(here.evaluated == there.evaluated);
        const double tolerance = std::string(c.dtype) == "fp32" ? 1e-4 : 0.05;
        for (size_t i = 0; i < here.logits.size(); ++i)
            REQUIRE(std::abs(here.logits[i] - there.logits[i]) <= tolerance);
    });
}

TEST_CASE("pipelines compute what one rank computes, bit for bit, in every schedule",
          "[pipeline][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: bits of pipelines");
}

// ---- The program --------------------------------------------------------------------------------

TEST_CASE("a profile of a pipeline has a table of each stage", "[pipeline][training]") {
    if (skip_without_mpirun()) return;
    const TrainingJob job(
        4, {{"parallel.pipeline", "2"}, {"schedule.steps", "4"}, {"evaluation.every", "0"}});
    const ProgramResult result = job.start(2, "run", {}, {"--profile", "2"});
    INFO(result.output);
    REQUIRE(result.exit_code == 0);
    const size_t first = result.output.find("pipeline rank 0 (rank 0), profile of 2 steps"),
                 second = result.output.find("pipeline rank 1 (rank 1), profile of 2 steps");
    REQUIRE(first != std::string::npos);
    REQUIRE((second != std::string::npos && second > first));
    const std::string tables[] = {result.output.substr(first, second - first),
                                  result.output.substr(second)};
    for (const std::string& table : tables) {
        CHECK(contains(table, "\n  wait for a stage "));
        CHECK(contains(table, "\n  step "));
    }
    CHECK(contains(tables[0], "\n  embedding_forward "));
    CHECK(!contains(tables[0], "\n  head_loss "));
    CHECK(contains(tables[1], "\n  head_loss "));
    CHECK(!contains(tables[1], "\n  embedding_forward "));
}
