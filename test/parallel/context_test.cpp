// Context-parallel ranks compute what one rank does.
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "test/catch.h"
#include "test/parallel/experiment.h"
#include "test/parallel/mesh_job.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/random.h"

using namespace train_gpt;
using namespace train_gpt::experiment;
using namespace train_gpt::training_job;

TEST_CASE("ranks: context training", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const char* wanted = std::getenv("DEVICE");
    const Device device = device_of_rank(world, wanted);
    const int repeats = std::atoi(std::getenv("REPEATS"));
    for (int context = 2; context <= world.size(); context *= 2)
        for (int tensor = 1; context * tensor <= world.size(); tensor *= 2) {
            if (world.size() % (context * tensor) != 0) continue;
            Activity activity;
            const Mesh mesh(world, {.context = context, .tensor = tensor},
                            open_communicator(world, device, activity));
            for (int repeat = 0; repeat < repeats; ++repeat) {
                Experiment experiment(tensor, world.size() / (context * tensor), context);
                experiment.device = wanted;
                check_as_one_rank(experiment, mesh, device);
            }
        }
}

TEST_CASE("ranks that share sequences have one rank's gradients, losses and logits", "[context]") {
    if (skip_without_mpirun()) return;
    for (const auto& [ranks, repeats] : {std::pair{2, "6"}, {4, "2"}}) {
        const ProgramResult result = run_case_on_ranks(ranks, "ranks: context training",
                                                       {{"DEVICE", "cpu"}, {"REPEATS", repeats}});
        INFO(result.output);
        CHECK(result.exit_code == 0);
    }
}

TEST_CASE("ranks that share sequences in groups of any number have one rank's results",
          "[context][.][long]") {
    if (skip_without_mpirun()) return;
    for (const auto& [ranks, repeats] : {std::pair{2, "20"}, {4, "8"}, {6, "6"}, {8, "3"}}) {
        const ProgramResult result = run_case_on_ranks(
            ranks, "ranks: context training", {{"DEVICE", "cpu"}, {"REPEATS", repeats}}, 600);
        INFO(result.output);
        CHECK(result.exit_code == 0);
    }
}

TEST_CASE("ranks that share sequences on GPUs have one rank's gradients, losses and logits",
          "[context][cuda]") {
    if (skip_without_gpus(2)) return;
    check_case_on_ranks(2, "ranks: context training",
                        {{"DEVICE", "cuda"}, {"REPEATS", "2"}, {"GPUSIM_NCCL_PROGRESS_MS", "300"}},
                        240);
}

// ---- The program -------------------------------------------------------------------------------

TEST_CASE("a run whose ranks share sequences trains and evaluates as one rank does",
          "[context][training]") {
    if (skip_without_mpirun()) return;
    const int T = 8 * static_cast<int>(random_int(1, 3)), B = static_cast<int>(random_int(1, 2));
    const Job job(3, {{"batch.sequence_length", std::to_string(T)},
                      {"batch.micro_batch", std::to_string(B)},
                      {"batch.tokens_per_step", std::to_string(3 * B * T)},
                      {"model.n_ctx", std::to_string(T)}});
    const std::string one = job.train(1, "one");
    for (const char* zero : {"0", "3"}) {
        const Settings shared{{"parallel.context", "2"}, {"parallel.zero", zero}};
        check_close(job.train(2, concat("context-zero", zero), shared), one, in_fp32_order);
    }
    // A sequence for each two of four ranks
    const Settings both{{"parallel.context", "2"}, {"parallel.zero", "2"}};
    check_close(job.train(4, "both", both), one, in_fp32_order);
}

// ---- Long sequences -----------------------------------------------------------------------------

TEST_CASE("ranks: long sequence", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const std::string seed = std::to_string(random_int(0, 1 << 30));
    for (const auto& [family, documents] : {std::pair{"gpt2", "false"}, {"llama", "true"}}) {
        const auto config = [&](int context) {
            return parse_config(
                "{}", "test",
                {"seed=" + seed, "device=cpu", "run_dir=unused", "data.train=synthetic",
                 concat("model.family=", family), "model.n_layer=2", "model.n_head=2",
                 "model.n_kv_head=" + std::string(family == std::string("gpt2") ? "2" : "1"),
                 "model.n_embd=16", "model.n_ctx=32768",
                 // Documents of some 9,000 tokens, so that many reach over chunks of 4,096
                 "model.vocab_size=9000", concat("data.document_mask=", documents),
                 "batch.tokens_per_step=32768", "batch.micro_batch=1", "optimizer.grad_clip=0.5",
                 "schedule.steps=20", "precision.dtype=fp32", "kernels.autotune=off",
                 concat("parallel.context=", context)});
        };
        CAPTURE(family, seed);
        mesh_job::MeshRun run(world, Device{}, config(world.size()));
        const StepOutcome outcome = run.step();
        const auto gradients = run.gradients();
        if (world.rank() > 0) continue;
        mesh_job::MeshRun one(World(), Device{}, config(1));
        const StepOutcome expected = one.step();
        CHECK(std::abs(outcome.sums.loss - expected.sums.loss) <= 1e-6 * expected.sums.loss);
        CHECK(std::abs(outcome.state.norm - expected.state.norm) <= 2e-5 * expected.state.norm);
        const auto exact = one.gradients();
        for (size_t i = 0; i < exact.size(); ++i) {
            CAPTURE(i);
            CHECK(relative_difference(gradients[i], exact[i]) <= 4e-5);
        }
    }
}

TEST_CASE("four ranks share a sequence of 32,768 tokens", "[context][.][long]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: long sequence", {}, 600);
}
