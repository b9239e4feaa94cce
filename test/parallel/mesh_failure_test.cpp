// What a job does when something goes wrong in a rank that shares its weights with others, along
// each axis of the mesh: the real program under mpirun. No case can hang, as in failure_test.cpp.
#include <csignal>
#include <string>
#include <vector>

#include "parallel/mesh.h"
#include "test/catch.h"
#include "test/parallel/failing_job.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/parallel/two_nodes.h"
#include "test/random.h"

using namespace train_gpt;
using namespace train_gpt::failing_job;

namespace {

/// Ranks that share a model along axes.
struct SplitRanks {
    int tensor, data, zero, shard_ranks, context = 1, pipeline = 1;
    const char* schedule = "1f1b";

    int ranks() const { return tensor * data * context * pipeline; }
    Arguments settings() const {
        Arguments all{"--set", concat("parallel.schedule=", schedule)};
        for (const auto& [key, value] : {std::pair{"tensor", tensor},
                                         {"zero", zero},
                                         {"shard_ranks", shard_ranks},
                                         {"context", context},
                                         {"pipeline", pipeline}})
            all = all + Arguments{"--set", concat("parallel.", key, "=", value)};
        return all;
    }
    /// A rank as lines name it.
    std::string named(int rank) const { return failing_job::named(rank, place(rank)); }
    std::string place(int rank) const {
        return MeshLayout(ranks(), {.pipeline = pipeline,
                                    .context = context,
                                    .tensor = tensor,
                                    .shard_ranks = shard_ranks})
            .place(rank);
    }
};

// With a place on two axes, and with every rank in both kinds of groups.
constexpr SplitRanks tensor_and_data{2, 2, 3, 0}, pipeline_and_context{1, 1, 1, 0, 2, 2};
constexpr SplitRanks splits[] = {
    {2, 1, 0, 0},       {1, 2, 3, 0},       {1, 4, 3, 2},
    {2, 2, 0, 0},       {1, 1, 1, 0, 2},    {1, 1, 0, 0, 1, 2, "zero_bubble"},
    {2, 1, 1, 0, 1, 2}, {1, 2, 3, 0, 1, 2}, {2, 1, 0, 0, 2, 2},
};

int random_rank(const SplitRanks& split) {
    return static_cast<int>(random_int(0, split.ranks() - 1));
}

/// Checks that one line says what happened to which rank, and that all have ended.
void check_killed(const SplitRanks& split, int rank) {
    CAPTURE(split.settings(), rank);
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    {
        FailingJob job(split.ranks(), run, split.settings());
        REQUIRE(job.wait_for_step(random_int(5, 12)));
        REQUIRE(job.signal(rank, SIGKILL));
        check_failed(job, run, split.named(rank) + " is dead: " + last_words);
    }
    // It continues on another mesh.
    const Arguments stop{"--stop-at", std::to_string(newest_whole_checkpoint(run) + 3)};
    CHECK(contains(
        check_succeeds(mpirun(3) + train(run, stop + Arguments{"--set", "parallel.zero=3"})),
        "resuming from "));
}

void check_stopped(const SplitRanks& split, int rank) {
    CAPTURE(split.settings(), rank);
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(split.ranks(), run, split.settings());
    REQUIRE(job.wait_for_step(random_int(5, 12)));
    REQUIRE(job.signal(rank, SIGSTOP));
    check_hung(job, run, rank, usual_launcher(), split.place(rank));
    newest_whole_checkpoint(run);
}

/// Starts the command in a shell that runs `limit` in one rank first.
Arguments limited(int rank, const std::string& limit) {
    return {"sh", "-c",
            concat("if [ \"${OMPI_COMM_WORLD_RANK:-$PMI_RANK}\" = ", rank, " ]; then ", limit,
                   "; fi; exec \"$@\""),
            "sh"};
}

void check_without_memory(const SplitRanks& split, int rank) {
    CAPTURE(split.settings(), rank);
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    // A rank of a model of gigabytes needs much more than its address space may grow to.
    const Arguments large{"--set", "model.n_embd=2048",     "--set", "model.n_head=16",
                          "--set", "model.vocab_size=30000"};
    FailingJob job(run, mpirun(split.ranks()) + limited(rank, "ulimit -v 1400000") +
                            train(run, large + split.settings()));
    check_failed(job, run, split.named(rank) + " failed: the system refused [^\n]* of memory");
}

}  // namespace

TEST_CASE(
    "a rank that is killed while it shares a model is named with its place, and the job "
    "continues on another mesh",
    "[failure][mesh]") {
    if (skip_without_mpirun()) return;
    for (const SplitRanks& split : {tensor_and_data, pipeline_and_context})
        check_killed(split, random_rank(split));
}

TEST_CASE("a rank that is stopped while it shares a model is named with its place",
          "[failure][mesh]") {
    if (skip_without_mpirun()) return;
    for (const SplitRanks& split : {tensor_and_data, pipeline_and_context})
        check_stopped(split, random_rank(split));
}

#ifndef __SANITIZE_ADDRESS__  // which reserves terabytes of addresses
TEST_CASE("a rank without enough memory for its part of a model is named with its place",
          "[failure][mesh]") {
    if (skip_without_mpirun()) return;
    for (const SplitRanks& split : {tensor_and_data, pipeline_and_context})
        check_without_memory(split, random_rank(split));
}
#endif

TEST_CASE("any rank that fails along any axis ends the job with a line that names it",
          "[failure][mesh][.][long]") {
    if (skip_without_mpirun()) return;
    for (const SplitRanks& split : splits) {
        check_killed(split, random_rank(split));
        check_stopped(split, random_rank(split));
        check_without_memory(split, random_rank(split));
    }
    for (const SplitRanks& split : {tensor_and_data, pipeline_and_context})
        for (int rank = 0; rank < split.ranks(); ++rank) check_stopped(split, rank);
}

#ifdef TRAIN_GPT_CUDA
TEST_CASE("a rank whose GPU has too little memory for its part of the weights is named",
          "[failure][mesh][cuda]") {
    if (skip_without_mpirun() || skip_without_gpus(2) || !training_job::gpus_are_simulated())
        return;
    for (const SplitRanks& split : {SplitRanks{2, 1, 0, 0}, SplitRanks{1, 1, 1, 0, 1, 2}}) {
        const TemporaryDirectory directory;
        const fs::path run = directory / "run";
        const int rank = random_rank(split);
        CAPTURE(split.settings(), rank);
        FailingJob job(run, mpirun(2) + limited(rank, "export GPUSIM_MEM=100M") +
                                train(run, Arguments{"--set", "device=cuda"} + split.settings()));
        check_failed(job, run,
                     split.named(rank) + " failed: this run needs [^\n]* of GPU memory, but only ");
    }
}
#endif

// ---- Two hosts ----------------------------------------------------------------------------------

TEST_CASE("a pipeline whose tensor-parallel groups are on two nodes trains what one node trains",
          "[failure][mesh][pipeline]") {
    const TwoNodes nodes;
    if (nodes.skip_mpirun()) return;
    const TemporaryDirectory directory;
    const Arguments settings =
        SplitRanks{2, 1, 1, 0, 1, 2}.settings() + Arguments{"--stop-at", "3"};
    check_succeeds(nodes.mpirun_on_both(4) + train(directory / "two", settings));
    check_succeeds(mpirun(4) + train(directory / "one", settings));
    CHECK(newest_whole_checkpoint(directory / "two") == 3);
    const auto two = training_job::metrics_of(directory / "two"),
               one = training_job::metrics_of(directory / "one");
    REQUIRE(two.size() == 3);
    REQUIRE(one.size() == 3);
    for (size_t i = 0; i < 3; ++i)
        for (const char* key : {"loss", "grad_norm"}) CHECK(two[i].at(key) == one[i].at(key));
}

TEST_CASE("tensor-parallel groups cross nodes only where the configuration allows it",
          "[failure][mesh]") {
    const TwoNodes nodes;
    if (nodes.skip_mpirun()) return;
    const TemporaryDirectory directory;
    const Arguments model{"--set", "model.n_head=4", "--set", "model.vocab_size=500", "--stop-at",
                          "3"};
    const auto of = [&](int tensor, const char* allowed) {
        return model + Arguments{"--set", concat("parallel.tensor=", tensor), "--set",
                                 concat("parallel.allow_tensor_across_nodes=", allowed)};
    };
    {
        const fs::path run = directory / "refused";
        FailingJob job(run, nodes.mpirun_on_both(4) + train(run, of(4, "false")));
        const ProgramResult result = job.finish();
        INFO(result.output);
        CHECK(result.exit_code > 0);
        CHECK(count(result.output, "train_gpt: ") == 1);
        CHECK(contains(
            result.output,
            "train_gpt: parallel.tensor = 4 puts ranks 0 (node-a) and 2 (node-b), which are on "
            "different nodes, into one tensor-parallel group, whose ranks exchange data in every "
            "layer; the nearest value that keeps groups on one node is 2, or set "
            "parallel.allow_tensor_across_nodes=true if the network is fast enough"));
        check_gone(run);
        CHECK_FALSE(fs::exists(run / "metrics.jsonl"));
    }
    // Groups of two are within nodes; with leave, groups of four train the same as on one node.
    check_succeeds(nodes.mpirun_on_both(4) + train(directory / "two", of(2, "false")));
    check_succeeds(nodes.mpirun_on_both(4) + train(directory / "across", of(4, "true")));
    check_succeeds(mpirun(4) + train(directory / "within", of(4, "false")));
    CHECK(newest_whole_checkpoint(directory / "two") == 3);
    const auto across = training_job::metrics_of(directory / "across"),
               within = training_job::metrics_of(directory / "within");
    REQUIRE(across.size() == 3);
    REQUIRE(within.size() == 3);
    for (size_t i = 0; i < 3; ++i)
        CHECK(across[i].at("loss").get<double>() ==
              Approx(within[i].at("loss").get<double>()).epsilon(1e-6));
}
