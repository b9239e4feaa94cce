// Checkpoints that are written while training continues: they hold what checkpoints hold that are
// written at once.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "parallel/state/state_copy.h"
#include "test/catch.h"
#include "test/file_difference.h"
#include "test/kernels/test_device.h"
#include "test/parallel/mesh_job.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/random.h"
#include "training/files/checkpoint.h"
#include "training/plan/memory_plan.h"
#include "training/watch/loss_watch.h"

using namespace train_gpt;
using namespace train_gpt::training_job;
using namespace train_gpt::mesh_job;

namespace {

const Settings in_background{{"checkpoint.async", "on"}}, at_once{{"checkpoint.async", "off"}};

std::set<std::string> files_in(const fs::path& folder) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
        names.insert(entry.path().filename().string());
    return names;
}

/// Every file of every checkpoint is the same, except for the key that differs, and its hash.
void check_same_checkpoints(const std::string& one, const std::string& other) {
    const auto all = list_checkpoints(one);
    CHECK(!all.empty());
    CHECK(list_checkpoints(other).size() == all.size());
    for (const fs::path& checkpoint : all) {
        const fs::path same = fs::path(other) / checkpoint.filename();
        CAPTURE(checkpoint, same);
        REQUIRE(fs::exists(same));
        CHECK(files_in(checkpoint) == files_in(same));
        verify_checkpoint(same, Verify::everything);
        for (const std::string& name : files_in(checkpoint)) {
            if (name == "train_gpt.json" || name == "manifest.json") continue;
            CAPTURE(name);
            CHECK(read(checkpoint / name) == read(same / name));
        }
    }
    for (const std::string& folder : {one, other})
        for (const std::string& name : files_in(folder)) CHECK(!name.ends_with(".tmp"));
}

/// What a run may be made of.
Settings random_model() {
    const std::vector<Settings> models{{},
                                       {{"model.family", "llama"}},
                                       {{"optimizer.name", "muon"}},
                                       {{"model.family", "qwen3_moe"},
                                        {"model.n_expert", "5"},
                                        {"model.n_expert_per_token", "2"}}};
    const Settings& model = models[static_cast<size_t>(random_int(0, std::ssize(models) - 1))];
    const char* const states[] = {"fp32", "bf16", "int8"};  // int8 is not for Muon
    const char* const state = states[random_int(0, model.contains("optimizer.name") ? 1 : 2)];
    return model + Settings{{"precision.dtype", random_dtype().name},
                            {"optimizer.state_dtype", state},
                            {"parallel.sums", random_int(0, 1) ? "exact" : "fp32"},
                            {"checkpoint.every", std::to_string(random_int(1, 4))},
                            {"schedule.steps", "13"}};
}

}  // namespace

TEST_CASE("a checkpoint written in the background has the bytes of one written at once",
          "[save][training]") {
    const TrainingJob job(6, random_model() + zero(static_cast<int>(random_int(0, 3))));
    for (const int ranks : {1, static_cast<int>(random_int(2, 3))}) {
        if (ranks > 1 && skip_without_mpirun()) return;
        const std::string number = std::to_string(ranks);
        const std::string one = job.train(ranks, "one" + number, at_once),
                          other = job.train(ranks, "other" + number, in_background);
        CAPTURE(ranks, job.config().parallel.zero.value(), job.config().model.family);
        check_same_checkpoints(one, other);
        CHECK(metrics_of(one) == metrics_of(other));
    }
}

TEST_CASE("also where ranks share the model", "[save][training]") {
    if (skip_without_mpirun()) return;
    const bool tensor = random_int(0, 1) == 1;
    const TrainingJob job(6, random_model() + zero(static_cast<int>(random_int(0, 3))) +
                                 Settings{{tensor ? "parallel.tensor" : "parallel.pipeline", "2"},
                                          {"model.n_embd", "32"},
                                          {"model.n_head", "4"},
                                          {"model.n_ctx", "16"},
                                          {"batch.sequence_length", "16"},
                                          {"batch.micro_batch", "2"},
                                          {"batch.tokens_per_step", "192"}});
    CAPTURE(tensor, job.config().parallel.zero.value(), job.config().model.family);
    const int ranks = static_cast<int>(2 * random_int(1, 2));
    check_same_checkpoints(job.train(ranks, "one", at_once),
                           job.train(ranks, "other", in_background));
}

TEST_CASE("a run resumes from a checkpoint written in the background", "[save][training]") {
    const TrainingJob job(3, random_model());
    const std::string whole = job.train(1, "whole", in_background);
    const auto all = list_checkpoints(whole);
    const fs::path from = all[static_cast<size_t>(random_int(1, std::ssize(all) - 1))];
    fs::create_directories(job.path("resumed"));
    fs::copy(from, fs::path(job.path("resumed")) / from.filename());
    for (const char* file : {"config.json", "manifest.json", "choices.json"})
        fs::copy(fs::path(whole) / file, fs::path(job.path("resumed")) / file);
    const std::string resumed = job.train(1, "resumed", in_background);
    CHECK(state_of(whole, 13) == state_of(resumed, 13));
}

namespace {

void check_copy(const Device& device, bool offload = false, const Settings& of_model = {}) {
    const Settings model = random_model() + of_model;
    const TrainingJob job(4, model + zero(static_cast<int>(random_int(0, 3))));
    CAPTURE(offload);
    MeshRun run(
        World(), device,
        job.config(in_background + Settings{{"memory.offload", offload ? "optimizer" : "none"}}));
    REQUIRE(run.trainer().state_copy);
    // With offload, the state is on its way to the host when a step ends.
    const auto settle = [&] { run.trainer().optimizer.settle_state(run.trainer().stream); };
    const auto step = [&] {
        run.step();
        settle();
        run.trainer().stream.synchronize();
    };
    const StateCopy& copy = *run.trainer().state_copy;
    const ParameterStore& store = run.trainer().parameters;
    const auto bytes_of_all = [&](auto&& view) {
        std::vector<std::vector<std::byte>> all;
        std::vector<std::byte> copied;
        for (const OptimizerSlot& state : store.state.saved())
            for (const ParameterStore::Piece& piece : store.pieces()) {
                if (!store.has(state, piece.parameter)) continue;
                const std::span<const std::byte> bytes =
                    view(piece, state.name, piece.range.n, copied);
                all.emplace_back(bytes.begin(), bytes.end());
            }
        return all;
    };
    const auto now = [&] {
        return bytes_of_all([&](const auto& piece, const auto& state, int64_t n, auto& copied) {
            return store.state.host_view(piece, state, n, copied);
        });
    };
    const auto kept = [&] {
        return bytes_of_all([&](const auto& piece, const auto& state, int64_t n, auto&) {
            return copy.view(piece, state, n);
        });
    };
    // A copy that is made at once has what the step leaves, though nothing has waited for that.
    run.step();
    settle();
    run.trainer().state_copy->begin(run.trainer().stream);
    copy.wait();
    // Parentheses: a failure would print all bytes.
    CHECK((kept() == now()));
    for (int save = 0; save < 2; ++save) {
        step();
        const auto before = now();
        const SpikeHistory spikes = run.trainer().optimizer.spike_history();
        settle();
        run.trainer().state_copy->begin(run.trainer().stream);
        step();
        CHECK((now() != before));  // so that the step's update has run, however late
        copy.wait();
        CHECK((kept() == before));
        CHECK(std::memcmp(copy.other(Trainer::saved_spikes), &spikes, sizeof spikes) == 0);
    }
    // The plan counts what is copied.
    size_t bytes = sizeof(SpikeHistory);
    for (const std::vector<std::byte>& piece : now()) bytes += piece.size();
    const RunShape shape(run.config(), run.spec(), store.dtype());
    const size_t planned = plan_memory(shape, device).bytes(Purpose::saving);
    CHECK(planned >= bytes);
    CHECK(planned <= bytes + (1 << 18));  // alignment, grids, counts of routers
    CHECK(plan_memory({job.config(at_once), run.spec(), store.dtype()}, device)
              .bytes(Purpose::saving) == 0);
}

}  // namespace

TEST_CASE("the copy of a state keeps what the state was, whatever follows", "[save]") {
    check_copy(Device{});
}

TEST_CASE("a checkpoint that could not be written is none that a run goes back to", "[save]") {
    LossWatch watch(100);
    watch.add(1, 4.5);
    watch.saved(1);
    watch.add(2, 4.4);
    CHECK(watch.sane_checkpoint() == 1);
    watch.saved(2);
    watch.add(3, 4.3);
    CHECK(watch.sane_checkpoint() == 2);
    watch.not_saved(2);
    CHECK(watch.sane_checkpoint() == 1);
    watch.saved(3);
    watch.not_saved(3);
    watch.add(4, 4.2);
    CHECK(watch.sane_checkpoint() == 1);
}

#ifdef TRAIN_GPT_CUDA

TEST_CASE("ranks: copy of a GPU's state", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Device device = device_of_rank(world, "cuda");
    const DeviceUnderTest under_test(device);
    const Settings adamw{{"optimizer.name", "adamw"}},
        muon{{"optimizer.name", "muon"},
             {"optimizer.state_dtype", random_int(0, 1) ? "bf16" : "fp32"}};  // int8 is refused
    for (const bool offload : {false, true})
        for (const Settings& optimizer : {adamw, muon}) check_copy(device, offload, optimizer);
}

TEST_CASE("a GPU's copy of a state keeps what the state was, however late it is made",
          "[save][cuda]") {
    if (skip_without_gpus(1)) return;
    // Seed 0: nothing runs before something waits for it. Kernels have other tests of races.
    check_case_on_ranks(
        1, "ranks: copy of a GPU's state",
        {{"GPUSIM_STREAMS", "lazy"}, {"GPUSIM_SEED", "0"}, {"GPUSIM_RACECHECK", "0"}});
}

TEST_CASE("a GPU saves in the background what it saves at once", "[save][training][cuda]") {
    if (skip_without_gpus(2)) return;
    const TrainingJob job(4, random_model() + zero(static_cast<int>(random_int(0, 3))) +
                                 Settings{{"device", "cuda"}, {"schedule.steps", "6"}});
    const Environment late{{"GPUSIM_STREAMS", "lazy"},
                           {"GPUSIM_SEED", std::to_string(random_int(1, 1000))}};
    const int ranks = static_cast<int>(random_int(1, 2));
    CAPTURE(ranks, job.config().parallel.zero.value(), job.config().model.family);
    check_same_checkpoints(job.train(ranks, "one", at_once),
                           job.train(ranks, "other", in_background, {}, late));
}

#endif
