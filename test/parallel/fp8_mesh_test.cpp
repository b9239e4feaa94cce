// fp8 on several ranks: one set of scales, whichever rank has which part. (Data-parallel ranks and
// pipelines give one rank's bits: exact_test.cpp.)
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "test/parallel/mesh_job.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"

using namespace train_gpt;
using namespace train_gpt::training_job;
using namespace train_gpt::mesh_job;

namespace {

constexpr MeshCase meshes[] = {
    trains("llama", 4).tensor(2).fp8("delayed"),
    trains("gpt2", 4).bf16().tensor(2).data(2).zero(3).fp8("delayed"),
    trains("qwen3", 3).context(2).zero(1).fp8("delayed"),
    trains("gpt2", 3).bf16().context(2).data(2).zero(2).fp8("delayed"),
    trains("llama", 4).tensor(2).pipeline(2).fp8("delayed"),
    trains("gpt2", 4).tensor(2).context(2).fp8("current"),
    trains("olmoe", 4).tensor(2).fp8("delayed"),
    trains("qwen2_moe", 4).bf16().tensor(2).data(2).zero(3).fp8("delayed").offload(),
    trains("gpt_oss", 4).context(2).pipeline(2).fp8("delayed").state("int8"),
    trains("llama", 4).bf16().tensor(2).data(2).zero(1).fp8("current").state("int8"),
    trains("gpt2", 4).tensor(2).pipeline(2, "zero_bubble").fp8("delayed").offload(),
    trains("qwen3", 4).context(2).pipeline(2, "interleaved", 2).fp8("delayed"),
};

/// Whether ranks that share products or sequences compute this operand with the bits of one rank in
/// the first step: weights, and what comes straight from the embedding.
bool is_exact(const std::string& operand) {
    return operand.starts_with("weight") || operand == "input of 0.qkv";
}

void check_case(const World& part, const MeshCase& c, uint64_t seed) {
    CAPTURE(mesh_job::name_of(c), seed);
    MeshRun run(part, Device{}, config_of(c, seed, "cpu"));
    std::vector<double> losses;
    Fp8History first;
    for (int step = 0; step < 4; ++step) {
        losses.push_back(run.step().sums.loss);
        if (step == 0) first = run.trainer().fp8.history();
    }
    // All ranks have the same history, with numbers for each operand of the model.
    const Fp8History history = run.trainer().fp8.history();
    std::vector<double> sums(history.amax.begin(), history.amax.end());
    part.all_reduce_sum(sums);
    for (size_t i = 0; i < sums.size(); ++i)
        REQUIRE(sums[i] == static_cast<double>(part.size()) * history.amax[i]);
    if (part.rank() > 0) return;

    MeshRun one(World(), Device{}, config_of(c, seed, "cpu", false));
    std::vector<double> expected;
    Fp8History of_one;
    for (int step = 0; step < 4; ++step) {
        expected.push_back(one.step().sums.loss);
        if (step == 0) of_one = one.trainer().fp8.history();
    }
    for (size_t step = 0; step < expected.size(); ++step) {
        CAPTURE(step);
        CHECK(std::abs(losses[step] / expected[step] - 1) < 0.005);
    }
    CHECK(first.operands == of_one.operands);
    for (size_t i = 0; i < first.amax.size(); ++i) {
        CAPTURE(first.operands[i]);
        if (is_exact(first.operands[i]))
            CHECK(first.amax[i] == of_one.amax[i]);
        else  // an element that rounds otherwise changes the largest one
            CHECK(std::abs(first.amax[i] / of_one.amax[i] - 1) < 0.2);
    }
}

}  // namespace

TEST_CASE("ranks: fp8 meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    const World world = World::join();
    on_parts(world, meshes, [&](const World& part, const MeshCase& c, size_t number) {
        check_case(part, c, seed + 101 * number);
    });
}

TEST_CASE("ranks that share products or sequences have one rank's scales, and nearly its losses",
          "[fp8][mesh][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: fp8 meshes");
}

TEST_CASE("a run in fp8 continues on other ranks with the same bytes, scales among them",
          "[fp8][mesh][training]") {
    const Job job(6, {{"parallel.sums", "exact"},
                      {"kernels.gemm", "own"},
                      {"model.n_embd", "64"},
                      {"model.n_head", "4"},
                      {"model.n_ctx", "16"},
                      {"batch.sequence_length", "16"},
                      {"batch.micro_batch", "1"},
                      {"batch.tokens_per_step", "96"},
                      {"checkpoint.every", "7"},
                      {"precision.fp8", "delayed"},
                      {"precision.fp8_skip", "[\"0\", \"1.down\"]"},
                      {"precision.dtype", random_dtype().name}});
    const std::string one = job.train(1, "one", {{"checkpoint.async", "on"}});
    CHECK(metrics_of(one)[3].contains("fp8_saturated"));
    const auto check_same = [&](const std::string& other, const char* step) {
        for (const char* file : {"model.safetensors", "fp8.safetensors"}) {
            const std::string bytes = read(one + "/" + step + "/" + file);
            CHECK_FALSE(bytes.empty());
            CHECK((bytes == read(other + "/" + step + "/" + file)));
        }
    };
    job.train(3, "resumed", {{"parallel.zero", "3"}}, {"--stop-at", "11"});
    const std::string resumed =
        job.train(2, "resumed", {{"parallel.zero", "1"}, {"parallel.pipeline", "2"}});
    CHECK((state_of(one, 20) == state_of(resumed, 20)));
    check_same(resumed, "step-00000007");
    check_same(resumed, "step-00000020");
}
