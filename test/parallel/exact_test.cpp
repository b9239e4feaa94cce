// Exact sums: the same bits on any number of data-parallel ranks, under every ZeRO stage, bucket
// size and pipeline.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/families/family.h"
#include "parallel/mesh.h"
#include "test/catch.h"
#include "test/parallel/mesh_job.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/planned_traffic.h"
#include "test/random.h"
#include "training/config/load_config.h"

using namespace train_gpt;
using namespace train_gpt::training_job;
using namespace train_gpt::mesh_job;

namespace {

constexpr MeshCase few_exact_meshes[] = {
    trains("gpt2", 5).data(2),
    trains("gpt2", 5).data(2).zero(3),
    trains("llama", 3).bf16().data(3).zero(1),
    trains("qwen3", 6).data(4).zero(2).shard_ranks(2),
    trains("gpt2", 4).pipeline(2),
    trains("llama", 6).data(2).zero(2).pipeline(2, "zero_bubble"),
    trains("gpt2", 7).bf16().data(2).zero(1).pipeline(2, "interleaved", 2),
    trains("mistral", 7).data(4).zero(3),
    trains("gpt2", 5).data(2).muon(),
    trains("llama", 6).bf16().data(3).zero(3).muon(),
    trains("qwen3", 6).data(4).zero(2).shard_ranks(2).muon(),
    trains("mistral", 4).bf16().data(2).zero(1).pipeline(2).muon(),
    trains("gpt2", 5).bf16().data(2).offload(),
    trains("llama", 6)
        .bf16()
        .data(2)
        .zero(2)
        .pipeline(2, "zero_bubble")
        .offload()
        .state("int8")
        .recompute("elementwise"),
    trains("mistral", 4).bf16().data(2).zero(1).pipeline(2).muon().offload().state("bf16"),
    trains("qwen2_moe", 5).data(2).zero(3).offload().recompute("block"),
    trains("qwen2_moe", 5).data(2).zero(3),
    trains("olmoe", 6).bf16().data(4).zero(2).shard_ranks(2),
    trains("gpt_oss", 4).data(2).zero(1).pipeline(2, "zero_bubble"),
    trains("mixtral", 5).data(2).muon(),
    trains("olmoe", 4).data(4).zero(1).many_experts(),
    trains("qwen2_moe", 3).data(2).zero(3).many_experts().muon(),
    trains("gpt_oss", 4).data(2).zero(2).pipeline(2).many_experts(),
    trains("gpt2", 5).data(2).zero(1).state("int8"),
    trains("llama", 6).bf16().data(3).zero(3).state("int8"),
    trains("qwen3", 6).data(4).zero(2).shard_ranks(2).state("bf16"),
    trains("gpt2", 4).data(2).zero(3).pipeline(2, "gpipe").offload().state("int8"),
    trains("mistral", 4).bf16().data(2).pipeline(2, "zero_bubble").state("bf16"),
    trains("gpt2", 5).data(3).zero(1).muon().state("bf16"),
    trains("olmoe", 4).data(2).zero(2).state("int8"),
    trains("gpt2", 5).data(2).fp8("delayed"),
    trains("llama", 6).bf16().data(4).zero(3).fp8("delayed"),
    trains("qwen3", 3).bf16().data(3).zero(2).fp8("current"),
    trains("llama", 4).pipeline(2, "zero_bubble").data(2).zero(1).fp8("delayed"),
    trains("gpt2", 7).bf16().data(2).pipeline(2, "interleaved", 2).fp8("delayed").muon(),
    trains("qwen2_moe", 4).bf16().data(2).zero(2).fp8("delayed").offload().state("int8"),
    trains("olmoe", 4).bf16().data(2).zero(3).fp8("delayed"),
    trains("gpt_oss", 4).data(2).zero(1).pipeline(2, "zero_bubble").fp8("current").offload(),
    trains("mixtral", 5).data(2).fp8("delayed").state("bf16").muon(),
    trains("llama", 6).bf16().data(4).zero(3).shard_ranks(2).fp8("current").offload().state("int8"),
    trains("gpt2", 7)
        .data(2)
        .zero(3)
        .pipeline(2, "interleaved", 2)
        .fp8("current")
        .offload()
        .state("bf16"),
    trains("qwen3", 7).bf16().data(2).pipeline(2, "interleaved", 2).fp8("delayed").state("int8"),
    trains("olmoe", 6).data(4).zero(2).shard_ranks(2).fp8("delayed").recompute("block"),
    trains("mixtral", 5)
        .data(2)
        .pipeline(2, "gpipe")
        .fp8("current")
        .muon()
        .state("bf16")
        .recompute("elementwise"),
    trains("olmoe", 4)
        .data(2)
        .zero(3)
        .many_experts()
        .fp8("delayed")
        .state("int8")
        .offload()
        .recompute("block"),
    trains("llama", 5).bf16().data(2).documents().fp8("current").offload().state("bf16"),
};
constexpr MeshCase more_exact_meshes[] = {
    trains("gpt2", 9).data(2).zero(1),
    trains("gpt2", 9).data(2).zero(2),
    trains("gpt2", 9).data(3),
    trains("gpt2", 9).data(3).zero(1),
    trains("gpt2", 9).data(3).zero(2),
    trains("gpt2", 9).data(3).zero(3),
    trains("gpt2", 9).data(4),
    trains("gpt2", 9).data(4).zero(1),
    trains("gpt2", 9).data(4).zero(2),
    trains("gpt2", 9).data(4).zero(3),
    trains("gpt2", 9).data(5),
    trains("gpt2", 9).data(5).zero(1),
    trains("gpt2", 9).data(5).zero(2),
    trains("gpt2", 9).data(5).zero(3),
    trains("gpt2", 9).data(6),
    trains("gpt2", 9).data(6).zero(1),
    trains("gpt2", 9).data(6).zero(2),
    trains("gpt2", 9).data(6).zero(3),
    trains("gpt2", 9).data(7),
    trains("gpt2", 9).data(7).zero(1),
    trains("gpt2", 9).data(7).zero(2),
    trains("gpt2", 9).data(7).zero(3),
    trains("gpt2", 9).data(8),
    trains("gpt2", 9).data(8).zero(1),
    trains("gpt2", 9).data(8).zero(2),
    trains("gpt2", 9).data(8).zero(3),
    trains("llama", 5).data(2).zero(3).shard_ranks(1),
    trains("llama", 5).bf16().data(4).zero(3).shard_ranks(2),
    trains("qwen2", 17).data(2).documents(),
    trains("qwen3_moe", 9).data(3).zero(3),
    trains("mixtral", 9).bf16().data(5).zero(2),
    trains("gpt_oss", 9).data(8).zero(1).documents(),
    trains("qwen2_moe", 8).pipeline(4, "interleaved", 2),
    trains("llama", 33).data(4).zero(1).shard_ranks(2),
    trains("qwen3", 12).bf16().data(6).zero(2).shard_ranks(3),
    trains("gpt2", 13).data(6).zero(3).shard_ranks(2).documents(),
    trains("gpt2", 8).pipeline(4),
    trains("gpt2", 8).pipeline(4, "gpipe"),
    trains("gpt2", 8).pipeline(4, "interleaved", 2),
    trains("gpt2", 8).pipeline(4, "zero_bubble"),
    trains("llama", 6).pipeline(2, "zero_bubble"),
    trains("llama", 7).bf16().data(2).pipeline(2),
    trains("gpt2", 9).data(2).zero(1).pipeline(2),
    trains("gpt2", 8).data(2).zero(3).pipeline(2, "interleaved", 2),
    trains("gpt2", 9).data(4).zero(2).pipeline(2, "zero_bubble"),
    trains("qwen3", 12).data(3).zero(1).pipeline(2, "interleaved", 3),
    trains("qwen3", 7).bf16().data(2).zero(3).documents().pipeline(2, "zero_bubble"),
    trains("mistral", 8).data(2).zero(2).pipeline(4),
    trains("llama", 8).data(4).zero(3).shard_ranks(2).pipeline(2),
    trains("gpt2", 6).data(4).zero(1).shard_ranks(2).pipeline(2, "gpipe"),
    trains("gpt2", 9).data(8).zero(1).muon(),
    trains("llama", 9).bf16().data(5).muon(),
    trains("qwen2", 9).data(8).zero(3).muon(),
    trains("llama", 8).data(4).zero(3).shard_ranks(2).pipeline(2, "zero_bubble").muon(),
    trains("gpt2", 9).bf16().data(6).zero(2).shard_ranks(3).muon(),
    trains("qwen3", 8).pipeline(4, "interleaved", 2).muon(),
    trains("llama", 9).data(8).zero(3).state("int8"),
    trains("gpt2", 9).bf16().data(5).state("int8"),
    trains("qwen2", 8).data(4).zero(2).shard_ranks(2).pipeline(2).state("bf16"),
    trains("qwen3", 8).pipeline(4, "interleaved", 2).state("int8"),
};

/// What a run computes: the norm and the loss of each step, and the state after the last one.
struct Bits {
    std::vector<double> losses, norms;
    std::vector<std::vector<double>> masters, m, v;
    std::vector<int32_t> exponents, dropped;
    std::vector<float> fp8;                    // largest magnitudes of operands
    std::vector<int32_t> saturated;            // operands of each step
    std::vector<std::vector<int32_t>> chosen;  // of each step, how often routers chose each expert
    int repeated = 0;
};

/// All grids become finer by so many bits, as if the gradients had grown.
void refine_grids(MeshRun& run, int32_t bits) {
    Grids& grids = *run.trainer().parameters.grids();
    std::vector<int32_t> exponents = grids.exponents();
    for (int32_t& e : exponents) e -= bits;
    grids.set_exponents(run.trainer().stream, exponents);
}

/// The weights of the first norm grow, and with them gradients before and after it.
void amplify(MeshRun& run, float factor) {
    ParameterStore& store = run.trainer().parameters;
    const std::vector<Parameter> all = registry_of(run.spec()).parameters;
    const auto norm =
        std::ranges::find_if(all, [](const Parameter& p) { return p.shape.size() == 1; });
    const int i = store.index_of(norm->name);
    if (i >= 0) {
        std::vector<float> values(
            static_cast<size_t>(store.parameters()[static_cast<size_t>(i)].numel()));
        store.state.read(ParameterState::master, i, 0, values);
        for (float& x : values) x *= factor;
        store.state.write(ParameterState::master, i, 0, values);
    }
    store.weights.gather_all(run.trainer().stream);
}

Bits bits_of(MeshRun& run, int steps, uint64_t seed) {
    Bits bits;
    for (int i = 0; i < steps; ++i) {
        if (i == 2) refine_grids(run, 12 + static_cast<int32_t>(seed % 13));
        if (i == 4) amplify(run, 0x1p11f);
        const StepOutcome outcome = run.exact_step(i == 2);
        bits.losses.push_back(outcome.sums.loss);
        bits.norms.push_back(outcome.state.norm);
        bits.dropped.insert(bits.dropped.end(), outcome.routers.dropped.begin(),
                            outcome.routers.dropped.end());
        bits.chosen.push_back(outcome.routers.chosen);
        bits.saturated.push_back(outcome.fp8.saturated);
    }
    bits.fp8 = run.trainer().fp8.history().amax;
    bits.masters = run.values_of(ParameterState::master);
    bits.m = run.values_of("m");
    bits.v = run.values_of("v");
    bits.exponents = run.trainer().parameters.grids()->exponents();
    bits.repeated = run.repeated();
    return bits;
}

void check_equal(const DecoderSpec& spec, const Bits& bits, const Bits& expected) {
    CHECK(bits.losses == expected.losses);
    CHECK(bits.norms == expected.norms);
    CHECK(bits.exponents == expected.exponents);
    CHECK(bits.dropped == expected.dropped);
    CHECK(bits.chosen == expected.chosen);
    CHECK(bits.fp8 == expected.fp8);
    CHECK(bits.saturated == expected.saturated);
    CHECK(bits.repeated == expected.repeated);
    CHECK(bits.repeated > 0);
    const std::vector<Parameter> parameters = registry_of(spec).parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
        CAPTURE(parameters[i].name);
        CHECK(bits.masters[i] == expected.masters[i]);
        CHECK(bits.m[i] == expected.m[i]);
        CHECK(bits.v[i] == expected.v[i]);
    }
}

/// Some experts were idle in a step and had tokens in the next one, and the other way round.
void check_idle_experts(const Bits& bits) {
    int came = 0, went = 0;
    for (size_t step = 1; step < bits.chosen.size(); ++step)
        for (size_t e = 0; e < bits.chosen[step].size(); ++e) {
            came += bits.chosen[step - 1][e] == 0 && bits.chosen[step][e] > 0;
            went += bits.chosen[step - 1][e] > 0 && bits.chosen[step][e] == 0;
        }
    CHECK(came > 0);
    CHECK(went > 0);
}

/// Bytes of a step between two others are what the plan says.
void check_traffic(MeshRun& run, const MeshCase& c, const World& part) {
    const auto before = run.mesh().bytes_sent();
    run.step();
    const Traffic after = run.mesh().bytes_sent(),
                  planned =
                      planned_traffic({run.config(), run.spec(), run.trainer().parameters.dtype(),
                                       Recompute::none, part.size()},
                                      part.rank());
    // An all-reduce cuts its elements into blocks, of which the last may lack up to one for each
    // rank, and each of them is sent to each rank.
    const auto buckets = std::ssize(run.trainer().parameters.layout().buckets());
    for (const auto& [group, bytes] : planned) {
        if (group == "pipeline" && !run.has_most_micro_batches()) continue;
        CAPTURE(group);
        const int64_t rounding = 8 * (buckets + 1) * c.ranks() * c.ranks();
        CHECK(std::abs(after.at(group) - before.at(group) - bytes) <= rounding);
    }
}

void check_exact_case(const World& part, const Device& device, const MeshCase& c, uint64_t seed) {
    CAPTURE(mesh_job::name_of(c), seed);
    const std::string name = device.is_cuda() ? "cuda" : "cpu";
    const int steps = static_cast<int>(6 + seed % 3);
    MeshRun run(part, device, config_of(c, seed, name));
    const Bits bits = bits_of(run, steps, seed);
    check_traffic(run, c, part);
    if (part.rank() > 0) return;
    MeshRun one(World(), device, config_of(c, seed, name, false));
    check_equal(run.spec(), bits, bits_of(one, steps, seed));
    if (c.many_experts) check_idle_experts(bits);
}

void check_exact_meshes(const Device& device, const World& world, std::span<const MeshCase> cases) {
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    on_parts(world, cases, [&](const World& part, const MeshCase& c, size_t number) {
        MeshCase exact = c;
        exact.exact = true;
        check_exact_case(part, device, exact, seed + 101 * number);
    });
}

}  // namespace

TEST_CASE("the first micro-batch with a gradient that is not finite is known", "[exact]") {
    const auto micro_batches = static_cast<int>(random_int(1, 6));
    const Config config =
        parse_config("{}", "test",
                     {"run_dir=unused", "data.train=synthetic", "model.n_layer=2", "model.n_head=2",
                      "model.n_embd=32", "model.n_ctx=16", "model.vocab_size=50",
                      "schedule.steps=20", concat("batch.tokens_per_step=", 16 * micro_batches),
                      "batch.micro_batch=1", "precision.dtype=fp32",
                      concat("parallel.zero=", random_int(0, 3)), "parallel.sums=exact"});
    MeshRun run(World(), Device{}, config);
    for (int i = 0; i < 3; ++i) run.exact_step();
    const Trainer& trainer = run.trainer();
    CHECK(!trainer.parameters.gradients.first_not_finite());
    const auto bad = static_cast<int>(random_int(0, micro_batches - 1));
    const auto parameter =
        static_cast<int>(random_int(0, std::ssize(trainer.parameters.parameters()) - 1));
    CAPTURE(micro_batches, bad,
            trainer.parameters.parameters()[static_cast<size_t>(parameter)].name);
    run.submit([&](int i) {
        if (i != bad) return;
        const int64_t n = trainer.parameters.parameters()[static_cast<size_t>(parameter)].numel();
        const std::vector<float> nan(static_cast<size_t>(n), NAN);
        run.trainer().parameters.state.write(ParameterState::master, parameter, 0, nan);
    });
    CHECK(run.trainer().outcome().state.stop != 0);
    CHECK(trainer.parameters.gradients.first_not_finite() == bad);
}

TEST_CASE("ranks: exact mixtures and scales with other axes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join(), half = world.split(world.rank() / 2);
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    for (const MeshRow& row : {trains("olmoe", 3).exact().many_experts().tensor(2),
                               trains("gpt_oss", 4).exact().many_experts().context(2),
                               trains("llama", 4).exact().tensor(2).fp8("delayed"),
                               trains("gpt2", 4).exact().context(2).fp8("delayed"),
                               trains("qwen3", 4)
                                   .exact()
                                   .context(2)
                                   .documents()
                                   .fp8("delayed")
                                   .offload()
                                   .state("int8")}) {
        const MeshCase c = row;
        CAPTURE(mesh_job::name_of(c), seed);
        MeshRun two(half, Device{}, config_of(row, seed, "cpu")),
            four(world, Device{}, config_of(row.data(2).zero(3), seed, "cpu"));
        const Bits bits = bits_of(four, 6, seed), expected = bits_of(two, 6, seed);
        check_equal(two.spec(), bits, expected);
        if (c.many_experts) check_idle_experts(bits);
        // A maximum for each operand and step, of which there are the same on two and four ranks
        CHECK(bits.fp8.empty() == (std::string(c.fp8) == "off"));
    }
}

TEST_CASE(
    "experts come and go, and scales of fp8 follow, with the same bits on any number of "
    "data-parallel ranks that share products or sequences",
    "[exact][fp8][mesh][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: exact mixtures and scales with other axes");
}

TEST_CASE("ranks: few exact meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_exact_meshes(Device{}, World::join(), few_exact_meshes);
}

TEST_CASE("ranks: more exact meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_exact_meshes(Device{}, World::join(), more_exact_meshes);
}

TEST_CASE("exact sums give one rank's bits on several ranks", "[exact][mesh][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: few exact meshes");
}

TEST_CASE("exact runs of the program write the same bytes on other ranks, and continue on them",
          "[exact][training]") {
    const TrainingJob job(7, {{"parallel.sums", "exact"},
                              {"kernels.gemm", "own"},
                              {"optimizer.name", random_int(0, 1) == 0 ? "adamw" : "muon"},
                              {"precision.dtype", random_dtype().name}});
    const auto with_threads = [](int n) {
        return Environment{{"OMP_NUM_THREADS", std::to_string(n)}};
    };
    const std::string one = job.train(1, "one", {}, {}, with_threads(2));
    const auto check_same = [&](const std::string& other) {
        check_equal(one, other);
        for (const char* file : {"model.safetensors", "grids.safetensors"})
            CHECK(read(one + "/" + step_folder(20) + "/" + file) ==
                  read(other + "/" + step_folder(20) + "/" + file));
    };
    check_same(job.train(2, "two", zero(static_cast<int>(random_int(0, 3)))));
    if (std::ranges::count(launchers(), Launcher::own) > 0) {  // over TCP
        const ProgramResult tcp = job.start(3, "tcp", zero(1), {}, with_threads(1), Launcher::own);
        INFO(tcp.output);
        REQUIRE(tcp.exit_code == 0);
        check_same(job.path("tcp"));
    }
    // From another number of ranks to yet another one
    const Settings first{{"parallel.zero", "3"}, {"parallel.bucket_mb", "0.02"}};
    job.train(3, "resumed", first, {"--stop-at", "11"});
    check_same(job.train(2, "resumed", zero(1)));
}

TEST_CASE("exact runs with other axes give the same bits on any number of data-parallel ranks",
          "[exact][training]") {
    const bool tensor = random_int(0, 1) == 1;
    const TrainingJob job(6, Settings{{"parallel.sums", "exact"},
                                      {tensor ? "parallel.tensor" : "parallel.context", "2"},
                                      {"model.n_embd", "32"},
                                      {"model.n_head", "4"},
                                      {"model.n_ctx", "16"},
                                      {"batch.sequence_length", "16"},
                                      {"batch.micro_batch", "2"},
                                      {"batch.tokens_per_step", "192"},
                                      {"schedule.steps", "12"},
                                      {"precision.dtype", random_dtype().name}});
    CAPTURE(tensor);
    const std::string two = job.train(2, "two", zero(static_cast<int>(random_int(0, 3))));
    check_equal(two, job.train(4, "four", zero(static_cast<int>(random_int(0, 3)))), 12);
}

TEST_CASE("exact sums give one rank's bits on 1 to 8 ranks, with every stage and schedule",
          "[exact][mesh][training][.][long]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(8, "ranks: more exact meshes", {});
}

#ifdef TRAIN_GPT_CUDA

namespace {

constexpr MeshCase exact_gpu_meshes[] = {
    trains("gpt2", 3).data(2),
    trains("llama", 3).bf16().data(2).zero(3),
    trains("llama", 3).bf16().data(2).zero(2).offload().state("int8"),
    trains("qwen3", 4).bf16().pipeline(2).muon().offload().state("bf16"),
    trains("qwen3", 5).data(4).zero(2).shard_ranks(2),
    trains("gpt2", 4).data(2).zero(1).pipeline(2, "zero_bubble"),
    trains("mistral", 4).pipeline(2, "interleaved", 2),
    trains("gpt2", 3).bf16().data(3).zero(1),
    trains("llama", 3).bf16().data(2).zero(2).muon(),
    trains("gpt2", 5).data(4).muon(),
    trains("qwen3_moe", 3).bf16().data(2).zero(3),
    trains("gpt_oss", 4).data(2).zero(1).pipeline(2).many_experts(),
};
// Of kernels that round their results, weights that are rounded after each gather, experts' units.
constexpr MeshCase fp8_gpu_meshes[] = {
    trains("llama", 2).bf16().data(2).zero(3).fp8("delayed").offload(),
    trains("gpt2", 2).bf16().pipeline(2, "zero_bubble").fp8("delayed"),
    trains("olmoe", 2).bf16().data(2).zero(3).fp8("delayed").state("int8"),
};

}  // namespace

TEST_CASE("ranks: exact gpu meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    check_exact_meshes(device_of_rank(world, "cuda"), world, exact_gpu_meshes);
}

TEST_CASE("ranks: exact gpu meshes in fp8", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    check_exact_meshes(device_of_rank(world, "cuda"), world, fp8_gpu_meshes);
}

TEST_CASE("exact sums give one GPU's bits on several GPUs", "[exact][mesh][training][cuda]") {
    if (skip_without_gpus(4)) return;
    check_case_on_ranks(4, "ranks: exact gpu meshes", late_streams());
}

TEST_CASE("exact sums in fp8 give one GPU's bits on several GPUs",
          "[exact][fp8][mesh][training][cuda]") {
    if (skip_without_gpus(4)) return;
    check_case_on_ranks(4, "ranks: exact gpu meshes in fp8", late_streams());
}

#endif
