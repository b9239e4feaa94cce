// What is called of NCCL, and when, as a library in front of it sees it (observed_nccl.cpp).
#ifdef TRAIN_GPT_CUDA
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "device/copy.h"
#include "device/cuda.h"
#include "device/memory.h"
#include "kernels/choices.h"
#include "model/families/family.h"
#include "parallel/first_collectives.h"
#include "parallel/state/parameters.h"
#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"
#include "training/decisions.h"
#include "training/plan/fit.h"
#include "training/plan/memory_plan.h"

using namespace train_gpt;
using namespace train_gpt::training_job;

namespace {

/// The environment in which ranks find the observing library, and behind it the one that this
/// process would find, if `passes_on`. Nothing if there is none.
std::optional<Environment> observed(const TemporaryDirectory& folder, bool passes_on = true) {
    const fs::path observing = fs::path(this_program()).parent_path() / "observed";
    const std::string paths = std::getenv("LD_LIBRARY_PATH") ? std::getenv("LD_LIBRARY_PATH") : "";
    std::string behind;
    std::istringstream list(paths);
    for (std::string path; passes_on && behind.empty() && std::getline(list, path, ':');)
        if (fs::exists(fs::path(path) / "libnccl.so.2")) behind = path + "/libnccl.so.2";
    if (!fs::exists(observing / "libnccl.so.2") || (passes_on && behind.empty())) return {};
    return Environment{{"LD_LIBRARY_PATH", observing.string() + ":" + paths},
                       {"OBSERVED_NCCL", behind},
                       {"OBSERVED_NCCL_LOG", folder / "rank"}};
}

/// What a rank has called, line by line.
std::vector<std::string> calls_of(const TemporaryDirectory& folder, int rank) {
    std::vector<std::string> lines;
    std::istringstream text(read(folder / concat("rank", rank)));
    for (std::string line; std::getline(text, line);) lines.push_back(line);
    return lines;
}

int64_t count(const std::vector<std::string>& lines, const std::string& part) {
    return std::ranges::count_if(lines, [&](const auto& line) { return contains(line, part); });
}

Device gpu_of(const World& world) { return device_of_rank(world, "cuda"); }

/// A configuration whose micro-batch is to be chosen.
Config config_of(const std::vector<std::string>& settings) {
    std::vector<std::string> all{"device=cuda", "data.train=synthetic", "schedule.steps=1",
                                 "kernels.autotune=off",
                                 "run_dir=" + std::string(std::getenv("FOLDER")) + "/run"};
    all.insert(all.end(), settings.begin(), settings.end());
    return parse_config("{}", "test", all);
}

}  // namespace

TEST_CASE("ranks: gpu first collectives", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Device device = gpu_of(world);
    Activity activity;
    const Mesh mesh(world, {}, open_communicator(world, device, activity));
    for (int zero = std::atoi(std::getenv("FROM_STAGE")); zero <= 3; ++zero) {
        for (const GradientSums sums : {GradientSums::fp32, GradientSums::bf16}) {
            const Config config = config_of({"model.n_layer=3", "model.n_embd=32", "model.n_head=2",
                                             "model.vocab_size=900", "parallel.bucket_mb=0.04"});
            Sharding sharding =
                sharding_of({config, {}, DType::bf16, Recompute::none, world.size()}, world.rank());
            sharding.zero = zero;
            sharding.sums = sums;
            const std::vector<Parameter> parameters =
                registry_of(spec_of(config, config.model.vocab_size)).parameters;
            const StepNumbers numbers{.fp64 = static_cast<int64_t>(parameters.size()) + 2};
            const auto store = [&](Arena& arena) {
                return std::make_unique<ParameterStore>(
                    arena, parameters,
                    ParameterStoreOptions{.dtype = DType::bf16, .sharding = sharding});
            };
            const uint64_t whole = memory_available(device);
            do_first_collectives(mesh, device, parameters, sharding,
                                 {.dtype = DType::bf16, .sums = numbers});
            Arena plan = Arena::counting(device);
            store(plan);
            auto* unused = plan.take(static_cast<size_t>(numbers.fp64 * (1 + world.size())) * 8,
                                     Purpose::buffers);
            static_cast<void>(unused);
            Arena arena(device, plan);
            const auto trained = store(arena);
            auto* mine = static_cast<double*>(arena.take(
                static_cast<size_t>(numbers.fp64 * (1 + world.size())) * 8, Purpose::buffers));
            const uint64_t left = memory_available(device);
            // The collectives of a step, which find nothing to take any more
            trained->connect(mesh);
            Stream stream(device);
            trained->gradients.begin_step(1, 1);
            for (int unit = trained->units() - 1; unit >= 0; --unit)
                trained->gradients.ready(stream, unit);
            trained->gradients.finish(stream);
            trained->gather_from_ranks(stream, mine + numbers.fp64, mine, numbers.fp64);
            trained->weights.gather_all(stream);
            trained->weights.acquire(stream, 0);
            stream.synchronize();
            CAPTURE(zero, (sums == GradientSums::bf16 ? "bf16" : "fp32"), whole, left);
            CHECK(memory_available(device) == left);
        }
    }
}

TEST_CASE("NCCL takes its memory before a step, and knows the buffers that it exchanges",
          "[communicator][cuda]") {
    if (skip_without_gpus(2)) return;
    const TemporaryDirectory folder;
    std::optional<Environment> environment = observed(folder);
    if (!environment) return;
    environment->insert(
        {{"FOLDER", folder.path()}, {"FROM_STAGE", "0"}, {"OBSERVED_NCCL_TAKES", "1048576"}});
    const ProgramResult result = run_case_on_ranks(2, "ranks: gpu first collectives", *environment);
    INFO(result.output);
    REQUIRE(result.exit_code == 0);
    for (const int rank : {0, 1}) {
        const std::vector<std::string> calls = calls_of(folder, rank);
        CAPTURE(rank);
        CHECK(count(calls, "misuse") == 0);
        for (const char* operation : {"all-reduce", "reduce-scatter", "all-gather"})
            CHECK(count(calls, operation + std::string(" ")) > 0);
        // Every buffer of a step is registered; those of the first collectives and the sums
        // (type 8) are not.
        bool in_step = false;
        int64_t registered = 0, open = 0;
        for (const std::string& call : calls) {
            const bool registers = call.starts_with("register");
            open += registers - call.starts_with("deregister");
            in_step = registers || (in_step && open > 0);
            registered += registers;
            const bool of_sums = contains(call, "all-gather 8 ");
            if (!contains(call, "registered") || call.starts_with("destroy")) continue;
            INFO(call);
            CHECK(contains(call, " registered") == (in_step && !of_sums));
            if (in_step) CHECK(!contains(call, "first"));
        }
        CHECK(registered > 6);
        CHECK(open == 0);
        CHECK(calls.back() == "destroy, 0 registered");
    }
}

TEST_CASE("buffers stay unregistered on all ranks where one cannot register them, or NCCL is old",
          "[communicator][cuda]") {
    if (skip_without_gpus(2)) return;
    for (const bool old : {false, true}) {
        const TemporaryDirectory folder;
        std::optional<Environment> environment = observed(folder);
        if (!environment) return;
        // From ZeRO-1 on there are several buffers, the first of which is registered.
        environment->insert({{"FOLDER", folder.path()}, {"FROM_STAGE", "1"}});
        environment->insert(old ? std::pair{"OBSERVED_NCCL_VERSION", "22304"}
                                : std::pair{"OBSERVED_NCCL_REFUSES", "1"});
        const ProgramResult result =
            run_case_on_ranks(2, "ranks: gpu first collectives", *environment);
        INFO(result.output);
        CHECK(result.exit_code == 0);
        const std::string note = "note: NCCL does not register the memory that ranks exchange";
        CHECK(contains(result.output, note + " (rank 1: ") == !old);
        CHECK(!contains(result.output, note + " (rank 0: "));
        for (const int rank : {0, 1}) {
            const std::vector<std::string> calls = calls_of(folder, rank);
            CHECK((count(calls, "deregister") > 0) == !old);
            CHECK(count(calls, "register ") == 2 * count(calls, "deregister "));
            CHECK((count(calls, " unregistered") > 10 && count(calls, "misuse") == 0));
            CHECK(count(calls, " registered") == 1);
            CHECK(calls.back() == "destroy, 0 registered");
        }
    }
}

TEST_CASE("ranks: gpu decide", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Device device = gpu_of(world);
    const Mesh mesh(world, {}, open_communicator(world, device, world.activity()));
    const Config config =
        config_of({"model.n_layer=8", "model.n_embd=256", "model.n_head=4", "model.n_ctx=128",
                   "model.vocab_size=8192", "batch.tokens_per_step=1048576"});
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    const uint64_t whole = memory_available(device);
    const Decisions decided = decide(config, spec, device, mesh);
    const uint64_t left = memory_available(device);
    Config chosen = config;
    chosen.batch.micro_batch = decided.micro_batch;
    const RunShape shape = RunShape(chosen, spec, decided.dtype, decided.recompute, world.size())
                               .with_offload(decided.offload);
    const Arena plan = plan_memory(shape, device);
    CAPTURE(whole, left, decided.micro_batch, plan.total_bytes());
    CHECK(plan.total_bytes() <= left);
    // With the memory that NCCL has taken it would have chosen more than there is.
    CHECK(fit_into({whole, whole}, {config, spec, decided.dtype, Recompute::none, world.size()},
                   device)
              .memory.device > left);
}

TEST_CASE("the micro-batch is chosen for the memory that NCCL leaves", "[communicator][cuda]") {
    if (skip_without_gpus(2)) return;
    const TemporaryDirectory folder;
    std::optional<Environment> environment = observed(folder);
    if (!environment) return;
    environment->insert({{"FOLDER", folder.path()},
                         {"GPUSIM_MEM", "1G"},
                         {"OBSERVED_NCCL_TAKES", std::to_string(24 << 20)}});
    check_case_on_ranks(2, "ranks: gpu decide", *environment);
}

namespace {

/// Two steps of this configuration on the mesh's ranks, and a sampled token. Returns by how much
/// less of the GPU's memory is available afterwards than before the first step.
int64_t taken_by_steps(const Config& config, const World& world, const Device& device) {
    const Mesh mesh(world, device, mesh_sizes(config));
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    const Decisions decided = decide(config, spec, device, mesh);
    const RunShape shape = RunShape(config, spec, decided.dtype, decided.recompute, world.size())
                               .with_micro_batch(decided.micro_batch);
    Arena arena = allocate(plan_memory(shape, device, world.rank()));
    Trainer trainer(shape, arena, world.rank());
    trainer.connect(mesh);
    trainer.parameters.state.fill_weights(trainer.stream);
    trainer.stream.synchronize();
    const uint64_t left = memory_available(device);
    std::ranges::fill(trainer.evaluation_batch.tokens, 1);
    std::ranges::fill(trainer.evaluation_batch.targets, 2);
    const TokenBatch batch = trainer.evaluation_batch.upload(trainer.stream);
    const auto each =
        static_cast<int>(shape.config.micro_batches_per_step() / mesh.size(Axis::data));
    for (int step = 1; step <= 2; ++step) {
        trainer.begin_step(each, each);
        for (const PipelineAction& action : trainer.actions()) {
            if (trainer.begins_micro_batch(action)) trainer.load(action.micro_batch, batch);
            trainer.execute(action);
        }
        trainer.update({.adamw = {.learning_rate = 0.001f, .step = step}}, 1, 0);
        trainer.outcome();
    }
    trainer.generator().feed(trainer.stream, std::vector<int32_t>{1, 2});
    trainer.stream.synchronize();
    return static_cast<int64_t>(left - memory_available(device));
}

}  // namespace

TEST_CASE("ranks: gpu first messages", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Config config =
        config_of({"model.family=llama", "model.n_layer=8", "model.n_embd=32", "model.n_head=2",
                   "model.n_ctx=16", "model.vocab_size=300", "batch.micro_batch=1",
                   "batch.tokens_per_step=64", "parallel.pipeline=4",
                   "parallel.schedule=interleaved", "parallel.stages_per_rank=2"});
    CHECK(taken_by_steps(config, world, gpu_of(world)) == 0);
}

TEST_CASE("ranks: gpu steps of meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Device device = gpu_of(world);
    for (int round = std::atoi(std::getenv("MESHES")); round > 0; --round) {
        // The extents of pipeline, context and tensor, in factors of two, and ranks of data
        int sizes[] = {1, 1, 1};
        for (int i = 0; i < 3; ++i)
            if (const auto axis = static_cast<size_t>(random_int(0, 3)); axis < 3) sizes[axis] *= 2;
        const int data = world.size() / (sizes[0] * sizes[1] * sizes[2]);
        const bool tied = random_int(0, 1) == 1;
        const int64_t zero = random_int(0, 3);
        // Tensor-parallel ranks have as many multiples of 128 rows each, the last one's cut.
        const int64_t vocabulary = 128 * sizes[2] * random_int(3, 9) - random_int(0, 127);
        const Config config = config_of(
            {concat("model.family=", tied ? "gpt2" : "llama"), "model.n_layer=8", "model.n_embd=64",
             "model.n_head=8", "model.n_ctx=64", concat("model.vocab_size=", vocabulary),
             "batch.tokens_per_step=1024", concat("batch.micro_batch=", random_int(0, 1)),
             "parallel.bucket_mb=0.05", concat("parallel.pipeline=", sizes[0]),
             concat("parallel.context=", sizes[1]), concat("parallel.tensor=", sizes[2]),
             concat("parallel.zero=", zero),
             concat("parallel.shard_ranks=", data > 1 && zero > 0 ? data / random_int(1, 2) : 0)});
        INFO(to_json(config));
        CHECK(taken_by_steps(config, world, device) == 0);
    }
}

namespace {

void check_steps_of_meshes(int meshes) {
    if (skip_without_gpus(8)) return;
    const TemporaryDirectory folder;
    std::optional<Environment> environment = observed(folder);
    if (!environment) return;
    // The simulator takes memory by size, the observing library by operation, dtype and size.
    environment->insert({{"FOLDER", folder.path()},
                         {"MESHES", std::to_string(meshes)},
                         {"OBSERVED_NCCL_TAKES", "65536"},
                         {"GPUSIM_NCCL_MEMORY", "0.1"}});
    check_case_on_ranks(8, "ranks: gpu steps of meshes", *environment);
}

}  // namespace

TEST_CASE("NCCL takes nothing in steps of a mesh, whatever its algorithms take at first",
          "[communicator][pipeline][tensor][context][cuda]") {
    check_steps_of_meshes(2);
}

TEST_CASE("NCCL takes nothing in steps of any mesh",
          "[communicator][pipeline][tensor][context][cuda][.][long]") {
    check_steps_of_meshes(10);
}

TEST_CASE("NCCL connects the stages of a pipeline before a step",
          "[communicator][pipeline][cuda]") {
    if (skip_without_gpus(4)) return;
    const TemporaryDirectory folder;
    std::optional<Environment> environment = observed(folder);
    if (!environment) return;
    environment->insert({{"FOLDER", folder.path()}, {"OBSERVED_NCCL_TAKES", "1048576"}});
    check_case_on_ranks(4, "ranks: gpu first messages", *environment);
    int64_t sent = 0, received = 0;
    for (int rank = 0; rank < 4; ++rank) {
        const std::vector<std::string> calls = calls_of(folder, rank);
        sent += count(calls, "send to ");
        received += count(calls, "receive from ");
        CHECK(count(calls, "misuse") == 0);
    }
    // Both ways around the ring; in each of two steps, 4 micro-batches through 8 stages and back; a
    // prompt through them
    CHECK(sent == 2 * 4 + 2 * (2 * 4 * 7) + 7);
    CHECK(received == sent);
}

TEST_CASE("ranks: gpu abort", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Device device = gpu_of(world);
    for (int round = 0; round < 20; ++round) {
        Activity activity;
        Stream stream(device);
        const auto group = open_communicator(world, device, activity);
        const int64_t last = activity.collectives + random_int(1, 200);
        std::thread watchdog([&] {
            while (activity.collectives < last) group->check();
            group->abort();
        });
        const std::string message = error_of([&] {
            for (;;) group->all_reduce(stream, nullptr, 0, DType::fp32);
        });
        CHECK(contains(message, "abandoned the collective all-reduce"));
        watchdog.join();
        CHECK_THROWS_AS(group->check(), Error);
    }
}

TEST_CASE("a group is aborted once, between two collectives, and not used afterwards",
          "[communicator][cuda]") {
    if (skip_without_gpus(2)) return;
    const TemporaryDirectory folder;
    const std::optional<Environment> environment = observed(folder, false);
    if (!environment) return;
    const ProgramResult result = run_case_on_ranks(2, "ranks: gpu abort", *environment);
    INFO(result.output);
    CHECK(result.exit_code == 0);
    for (const int rank : {0, 1}) {
        const std::vector<std::string> calls = calls_of(folder, rank);
        CHECK(count(calls, "misuse") == 0);
        CHECK((count(calls, "abort") == 20 && count(calls, "destroy") == 0));
    }
}

TEST_CASE("ranks: gpu collectives of two groups", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Device device = gpu_of(world);
    const Mesh mesh(world, device, {.tensor = 2});
    Communicator* const groups[] = {&mesh.along(Axis::data), &mesh.along(Axis::tensor)};
    constexpr int64_t n = 1000;
    Arena plan = Arena::counting(device);
    for (int i = 0; i < 2; ++i) plan.take(n * sizeof(float), Purpose::buffers);
    Arena arena(device, plan);
    std::vector<std::shared_ptr<Stream>> streams;
    std::vector<void*> data;
    for (Communicator* const group : groups) {
        streams.push_back(group->exchange_stream(device));
        data.push_back(arena.take(n * sizeof(float), Purpose::buffers));
        const std::vector<float> ones(n, 1);
        copy_now(device, data.back(), ones.data(), n * sizeof(float));
    }
    for (int round = 0; round < 40; ++round)
        for (const size_t i : {0, 1})
            groups[i]->all_reduce(*streams[i], data[i], n, DType::fp32, Reduction::max);
    for (const auto& stream : streams) stream->synchronize();
    mesh.check();
}

TEST_CASE(
    "collectives of several groups come in one order, also where not all fit on a GPU at once",
    "[communicator][cuda]") {
    if (skip_without_gpus(4)) return;
    for (const bool old : {false, true}) {
        const TemporaryDirectory folder;
        std::optional<Environment> environment = observed(folder);
        if (!environment) return;
        // Both groups have 24 thread blocks. An old NCCL does not know the variable.
        environment->insert({{"GPUSIM_SMS", "30"},
                             {"GPUSIM_STREAMS", "lazy"},
                             {"GPUSIM_SEED", std::to_string(random_int(1, 1000))},
                             {"GPUSIM_NCCL_PROGRESS_MS", "100"}});
        if (old)
            environment->insert(
                {{"OBSERVED_NCCL_VERSION", "22505"}, {"NCCL_LAUNCH_ORDER_IMPLICIT", "0"}});
        CAPTURE(old);
        check_case_on_ranks(4, "ranks: gpu collectives of two groups", *environment);
        const std::vector<std::string> calls = calls_of(folder, 0);
        CHECK(count(calls, "open, at most 2 blocks") == 1);
        CHECK(count(calls, "split, at most 24 blocks") == 2);
    }
}

TEST_CASE("ranks: gpu abort of a mesh", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Mesh mesh(world, {.tensor = 2},
                    open_communicator(world, gpu_of(world), world.activity()));
    mesh.along(Axis::data);
    mesh.along(Axis::tensor);
    CHECK(mesh.abort() == (std::string(std::getenv("OBSERVED_NCCL_ABORTS")) == "together"));
}

TEST_CASE("the groups of a mesh are aborted together, and one that blocks is not waited for",
          "[communicator][cuda]") {
    if (skip_without_gpus(4)) return;
    for (const char* how : {"together", "never"}) {
        const TemporaryDirectory folder;
        std::optional<Environment> environment = observed(folder);
        if (!environment) return;
        environment->insert({"OBSERVED_NCCL_ABORTS", how});
        check_case_on_ranks(4, "ranks: gpu abort of a mesh", *environment);
        for (int rank = 0; rank < 4; ++rank) CHECK(count(calls_of(folder, rank), "abort") == 3);
    }
}

TEST_CASE("ranks: gpu reserved multiprocessors", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Device device = gpu_of(world);
    Activity activity;
    const Mesh mesh(world, {}, open_communicator(world, device, activity));
    for (const int zero : {0, 1, 2, 3}) {
        const Config config =
            config_of({"model.n_layer=2", "model.n_embd=32", "model.n_head=2", "model.n_ctx=8",
                       "model.vocab_size=300", "batch.micro_batch=1", "batch.tokens_per_step=32",
                       "parallel.reserved_sms=5", concat("parallel.zero=", zero)});
        const DecoderSpec spec = spec_of(config, config.model.vocab_size);
        Arena arena = allocate(
            plan_memory({config, spec, DType::fp32, Recompute::none, world.size()}, device));
        Trainer trainer({config, spec, DType::fp32, Recompute::none, mesh.layout().world()}, arena,
                        world.rank());
        // The products that the last micro-batch has used, by whether they leave multiprocessors.
        const auto used = [&] {
            std::istringstream lines(kernel_choices(trainer.stream));
            int64_t all = 0, reserving = 0;
            for (std::string line; std::getline(lines, line); ++all) {
                const bool reserves = line.ends_with(" 5");
                reserving += reserves;
                if (reserves) CHECK(!contains(line, "bias"));  // of the forward pass
            }
            set_kernel_choices(trainer.stream, "");
            return std::pair{all - reserving, reserving};
        };
        trainer.warm_up();
        const auto [plain, reserving] = used();
        CHECK((plain > reserving && reserving > 0));
        trainer.parameters.connect(mesh);
        trainer.begin_step(2, 2);
        const TokenBatch batch = trainer.evaluation_batch.upload(trainer.stream);
        const auto micro_batch = [&](int i) {
            trainer.load(i, batch);
            for (const PipelineAction& action : trainer.actions())
                if (action.micro_batch == i) trainer.execute(action);
        };
        micro_batch(0);
        CHECK((used().second > 0) == (zero >= 2));
        micro_batch(1);
        CHECK(used().second == reserving);
        trainer.parameters.gradients.finish(trainer.stream);
        trainer.stream.synchronize();
    }
}

TEST_CASE("products leave multiprocessors free while ranks exchange gradients, and only then",
          "[communicator][cuda]") {
    if (skip_without_gpus(2)) return;
    const TemporaryDirectory folder;
    check_case_on_ranks(2, "ranks: gpu reserved multiprocessors", {{"FOLDER", folder.path()}});
}

TEST_CASE("a run caps NCCL's blocks, and registers and forgets its buffers",
          "[communicator][cuda]") {
    if (skip_without_gpus(2)) return;
    const TemporaryDirectory folder;
    std::optional<Environment> environment = observed(folder);
    if (!environment) return;
    const auto blocks = random_int(1, 32);
    const TrainingJob job(2, {{"device", "cuda"},
                              {"schedule.steps", "2"},
                              {"schedule.warmup_steps", "1"},
                              {"data.val", ""},
                              {"parallel.nccl_max_ctas", std::to_string(blocks)},
                              {"parallel.reserved_sms", "3"}});
    job.train(2, "run", {}, {}, *environment);
    for (const int rank : {0, 1}) {
        const std::vector<std::string> calls = calls_of(folder, rank);
        CHECK(calls.front() == concat("open, at most ", blocks, " blocks"));
        CHECK(count(calls, "misuse") == 0);
        CHECK(calls.back() == "destroy, 0 registered");
        // The first step finds all connections made.
        const auto step = std::ranges::find_if(
            calls, [](const std::string& call) { return call.starts_with("register"); });
        CHECK(std::count_if(calls.begin(), step, [](const std::string& call) {
                  return contains(call, "unregistered first");
              }) > 2);
        const int64_t late = std::count_if(
            step, calls.end(), [](const std::string& call) { return contains(call, " first"); });
        CHECK(late == 0);
        CHECK(count(calls, " registered") > 4);
    }
}
#endif  // TRAIN_GPT_CUDA
