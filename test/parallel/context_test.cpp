// Context-parallel ranks compute what one rank does.
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "model/context_attention.h"
#include "test/catch.h"
#include "test/kernels/attention_problem.h"
#include "test/parallel/experiment.h"
#include "test/parallel/mesh_job.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/random.h"
#include "training/config/load_config.h"

using namespace train_gpt;
using namespace train_gpt::experiment;
using namespace train_gpt::training_job;

// ---- Attention ----------------------------------------------------------------------------------

namespace {

using attention_problem::Case;

/// Attention of the ranks to a problem, of which each computes its rows: the results of all, on
/// all.
attention_problem::Run shared_attention(const World& world, ContextGroup& group, const Case& whole,
                                        bool gathers_again) {
    const ContextRank& place = group.place();
    Case mine = whole;
    AttentionShape& shape = mine.shape;
    shape.T = shape.S = whole.shape.T / place.ranks;
    const int length = shape.T / 2, B = shape.B;
    const auto position = [&](int t) {
        return place.first_position(t / length, whole.shape.T) + t % length;
    };
    /// Calls f(i, j) for the elements of this rank's rows and where they are in those of all.
    const auto each = [&](int heads, auto&& f) {
        const size_t width = static_cast<size_t>(heads) * static_cast<size_t>(shape.D);
        size_t i = 0;
        for (int b = 0; b < B; ++b)
            for (int t = 0; t < shape.T; ++t)
                for (size_t k = 0; k < width; ++k, ++i)
                    f(i, static_cast<size_t>(b * whole.shape.T + position(t)) * width + k);
    };
    const auto fill = [&](const attention_problem::Placed& placed, const Values& all) {
        Values rows(all.size() / static_cast<size_t>(place.ranks));
        each(placed.heads, [&](size_t i, size_t j) { rows[i] = all[j]; });
        placed.fill(rows);
    };
    const auto of_all = [&](const attention_problem::Placed& placed) {
        const Values rows = placed.read();
        Values all(rows.size() * static_cast<size_t>(place.ranks));
        each(placed.heads, [&](size_t i, size_t j) { all[j] = rows[i]; });
        world.all_reduce_sum(all);
        return all;
    };
    std::vector<int32_t> documents;
    for (int chunk = 0; chunk < 2 && !whole.doc_start.empty(); ++chunk)
        for (int b = 0; b < B; ++b)
            for (int t = 0; t < length; ++t)
                documents.push_back(whole.doc_start[static_cast<size_t>(
                    b * whole.shape.T + position(chunk * length + t))]);
    shape.doc_start = documents.empty() ? nullptr : documents.data();

    Stream stream((Device()));
    Arena plan = Arena::counting(Device{});
    AttentionShape widest = shape;  // of another layer, which shares the memory
    widest.H_kv += static_cast<int>(random_int(0, 2));
    const size_t scratch = ContextAttention(group, widest, plan, true).scratch_bytes(stream, shape);
    static_cast<void>(plan.take(scratch, Purpose::workspaces));
    Arena arena(Device{}, plan);
    ContextAttention attention(group, widest, arena, true);
    stream.scratch = arena.take(scratch, Purpose::workspaces);
    stream.scratch_bytes = scratch;

    const std::vector<int> heads{shape.H, shape.H_kv, shape.H_kv};
    const auto qkv = place_packed(mine, shape.T, heads), d = place_packed(mine, shape.T, heads),
               outs = place_packed(mine, shape.T, {shape.H, shape.H});
    for (const auto& [placed, values] : {std::pair{qkv[0], &whole.q},
                                         {qkv[1], &whole.k},
                                         {qkv[2], &whole.v},
                                         {outs[1], &whole.dout}})
        fill(placed, *values);
    std::vector<float> lse(static_cast<size_t>(B * shape.H * shape.T));
    const attention_problem::Sinks sinks(whole, {.dsinks = Values(whole.sinks.size(), 0)});
    attention.forward(stream, {shape, qkv[0].view, qkv[1].view, qkv[2].view, outs[0].view,
                               lse.data(), sinks.tensor()});
    if (gathers_again) {  // another layer has been there
        const auto other = place_packed(mine, shape.T, heads);
        for (const auto& placed : other) placed.fill(Values(whole.q.size(), 1));
        attention.forward(stream, {shape, other[0].view, other[1].view, other[2].view,
                                   place_packed(mine, shape.T, {shape.H})[0].view,
                                   std::vector<float>(lse.size()).data()});
    }
    attention.backward(
        stream,
        {shape, qkv[0].view, qkv[1].view, qkv[2].view, outs[0].view, outs[1].view, lse.data(),
         d[0].view, d[1].view, d[2].view, KeyGradients::write, sinks.tensor(), sinks.sink()},
        !gathers_again);
    const std::vector<float> of_rank = sinks.read();
    Values dsinks(of_rank.begin(), of_rank.end());
    world.all_reduce_sum(dsinks);
    return {of_all(outs[0]), of_all(d[0]), of_all(d[1]),
            of_all(d[2]),    {},           {dsinks.begin(), dsinks.end()}};
}

}  // namespace

TEST_CASE("ranks: context attention", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    Activity activity;
    const Mesh mesh(world, {.context = world.size()}, open_communicator(world, Device{}, activity));
    ContextGroup group(ContextRank{world.rank(), world.size()});
    group.connect(Device{}, mesh.along(Axis::context));
    for (const DType dtype : attention_problem::dtypes)
        for (int i = 0; i < 6; ++i) {
            attention_problem::Wish wish;
            wish.dtype = dtype;
            wish.T = 2 * world.size() * static_cast<int>(random_int(1, 30));
            wish.documents = i % 2 == 1;
            wish.windows = i % 3 > 0;
            const Case whole = random_case(wish);
            const attention_problem::Run results =
                shared_attention(world, group, whole, i % 3 == 2);
            if (world.rank() == 0) check_run(whole, results);
        }
}

TEST_CASE("attention of ranks that share sequences is that of float64 arithmetic on whole ones",
          "[context]") {
    if (skip_without_mpirun()) return;
    for (const int ranks : {2, 3}) check_case_on_ranks(ranks, "ranks: context attention");
}

// ---- Models -------------------------------------------------------------------------------------

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
        const ProgramResult result = run_case_on_ranks(ranks, "ranks: context training",
                                                       {{"DEVICE", "cpu"}, {"REPEATS", repeats}});
        INFO(result.output);
        CHECK(result.exit_code == 0);
    }
}

TEST_CASE("ranks that share sequences on GPUs have one rank's gradients, losses and logits",
          "[context][cuda]") {
    if (skip_without_gpus(2)) return;
    check_case_on_ranks(2, "ranks: context training",
                        {{"DEVICE", "cuda"}, {"REPEATS", "2"}, {"GPUSIM_NCCL_PROGRESS_MS", "300"}});
}

// ---- The program -------------------------------------------------------------------------------

TEST_CASE("a run whose ranks share sequences trains and evaluates as one rank does",
          "[context][training]") {
    if (skip_without_mpirun()) return;
    const int T = 8 * static_cast<int>(random_int(1, 3)), B = static_cast<int>(random_int(1, 2));
    const TrainingJob job(3, {{"batch.sequence_length", std::to_string(T)},
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
                 "parallel.sums=fp32", concat("parallel.context=", context)});
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
    check_case_on_ranks(4, "ranks: long sequence", {});
}
