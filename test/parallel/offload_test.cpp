// What a GPU keeps in host memory: leases of optimizer state, and blocks' inputs. The CPU and the
// GPU run the same code.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/copy.h"
#include "device/trace.h"
#include "model/block_inputs.h"
#include "parallel/state/parameters.h"
#include "parallel/state/state_leases.h"
#include "test/catch.h"
#include "test/kernels/test_device.h"
#include "test/model/random_spec.h"
#include "test/parallel/mesh_job.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/random.h"
#include "training/optimizer.h"
#include "training/plan/memory_plan.h"

using namespace train_gpt;
using namespace train_gpt::training_job;
using namespace train_gpt::mesh_job;

namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(size_t n) {
    Bytes bytes(n);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_int(0, 255));
    return bytes;
}

Bytes bytes_at(const void* memory, size_t n) {
    Bytes bytes(n);
    copy_now(test_device(), bytes.data(), memory, n);
    return bytes;
}

}  // namespace

TEST_CASE("leases bring each byte of state to the device once, and what was changed goes back",
          "[offload][cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 4; ++repeat) {
        Sharding sharding{.size = static_cast<int>(random_int(1, 3)),
                          .zero = static_cast<int>(random_int(0, 3)),
                          .bucket_elements = random_int(64, 20000),
                          .state_on_host = true};
        sharding.rank = static_cast<int>(random_int(0, sharding.size - 1));
        if (random_int(0, 1)) sharding.matrices = MatrixUpdates{};
        const DType dtype = random_int(0, 1) ? DType::bf16 : DType::fp32;
        std::vector<OptimizerSlot> slots = optimizer_slots();
        if (random_int(0, 1)) slots.push_back({.name = "w", .dtype = DType::bf16});
        const std::vector<Parameter> parameters = registry_of(random_spec()).parameters;
        CAPTURE(sharding.size, sharding.rank, sharding.zero, sharding.bucket_elements,
                sharding.matrices.has_value(), name_of(dtype), slots.size());
        Arena plan = Arena::counting(test_device());
        {
            const ParameterStore store(plan, parameters, dtype, ParameterStore::Use::training,
                                       sharding, slots);
            const StateLeases leases(plan, store);
        }
        CHECK(plan.bytes(Purpose::masters) + plan.bytes(Purpose::moments) == 0);
        Arena arena(test_device(), plan);
        const ParameterStore store(arena, parameters, dtype, ParameterStore::Use::training,
                                   sharding, slots);
        StateLeases leases(arena, store);
        Stream stream(test_device());

        // Every state that is in host memory, and what it should be.
        struct State {
            size_t piece, state;
            Bytes value;
        };
        std::vector<State> all;
        size_t bytes = 0;
        for (size_t p = 0; p < store.pieces().size(); ++p)
            for (size_t state = 0; state <= slots.size(); ++state) {
                const auto memory = store.memory_of(store.pieces()[p], state);
                if (memory.empty() || (state == 0 && dtype == DType::fp32)) continue;
                all.push_back({p, state, random_bytes(memory.size())});
                copy_now(test_device(), memory.data(), all.back().value.data(), memory.size());
                bytes += memory.size();
            }
        // Padding between tensors may come along.
        CHECK(leases.bytes() >= static_cast<int64_t>(bytes));
        CHECK(leases.bytes() <= static_cast<int64_t>(bytes + all.size() * 64 * sizeof(float)));

        for (int step = 0; step < 3; ++step) {
            leases.begin_step();
            size_t seen = 0;
            for (const auto part : {StateLeases::Part::momentum, StateLeases::Part::elements}) {
                if (part == StateLeases::Part::momentum && !sharding.matrices) continue;
                for (size_t b = 0; b < store.layout().buckets().size(); ++b) {
                    leases.acquire(stream, part, b);
                    for (State& state : all) {
                        const ParameterStore::Piece& home = store.pieces()[state.piece];
                        const bool is_momentum =
                            state.state == 1 && store.is_matrix(home.parameter);
                        if (static_cast<size_t>(home.bucket) != b ||
                            is_momentum != (part == StateLeases::Part::momentum))
                            continue;
                        const ParameterStore::Piece leased = leases.leased(home);
                        void* const place = state.state == 0
                                                ? reinterpret_cast<char*>(leased.master)
                                                : leased.slots[state.state - 1];
                        CAPTURE(step, b, state.piece, state.state);
                        REQUIRE(place != store.memory_of(home, state.state).data());
                        CHECK(reinterpret_cast<uintptr_t>(place) % 16 == 0);
                        // A copy waits for all work on the device, and then overtakes nothing.
                        CHECK(bytes_at(place, state.value.size()) == state.value);
                        state.value = random_bytes(state.value.size());
                        copy_now(test_device(), place, state.value.data(), state.value.size());
                        seen += state.value.size();
                    }
                    leases.release(stream, part, b);
                }
            }
            CHECK(seen == bytes);
            leases.settle(stream);
            stream.synchronize();
            for (const State& state : all)
                CHECK(bytes_at(store.memory_of(store.pieces()[state.piece], state.state).data(),
                               state.value.size()) == state.value);
        }
    }
}

TEST_CASE("the inputs of blocks come back from the host as they were, in any order of passes",
          "[offload][cuda]") {
    ON_EACH_DEVICE();
    const int slots = static_cast<int>(random_int(1, 4)),
              layers = static_cast<int>(random_int(1, 7));
    const BlockInputsShape shape{.slots = slots,
                                 .layers = layers,
                                 .dtype = DType::bf16,
                                 .rows = random_int(1, 40),
                                 .channels = random_int(1, 40),
                                 .on_host = true};
    CAPTURE(slots, layers, shape.rows, shape.channels);
    Arena plan = Arena::counting(test_device());
    { const BlockInputs counted(plan, shape); }
    Arena arena(test_device(), plan);
    BlockInputs inputs(arena, shape);
    Stream stream(test_device());
    const size_t bytes = inputs.at(0, 0).bytes();
    CHECK(inputs.bytes() == static_cast<int64_t>(bytes) * layers);
    const auto input_of = [&](int slot, int layer, int pass) {
        Bytes value(bytes);
        std::mt19937 rng(static_cast<unsigned>(slot + 10 * layer + 100 * pass));
        for (std::byte& byte : value) byte = static_cast<std::byte>(rng());
        return value;
    };
    // The input is copied by the stream, from memory that it can read until the end.
    std::vector<SharedArray<std::byte>> sources;
    std::vector<int> pass_of(static_cast<size_t>(slots), -1);
    SharedArray<std::byte> read_back(bytes);
    for (int pass = 0; pass < 12; ++pass) {
        const int slot = static_cast<int>(random_int(0, slots - 1));
        CAPTURE(pass, slot);
        if (pass_of[static_cast<size_t>(slot)] < 0) {
            pass_of[static_cast<size_t>(slot)] = pass;
            inputs.make_room(stream, slot, 0);
            for (int l = 0; l < layers; ++l) {
                const Bytes value = input_of(slot, l, pass);
                sources.emplace_back(bytes);
                std::ranges::copy(value, sources.back().values().begin());
                copy(stream, inputs.at(slot, l).data, sources.back().data(), bytes);
                if (l + 1 < layers) inputs.make_room(stream, slot, l + 1);
                inputs.store(stream, slot, l);
            }
            continue;
        }
        for (int l = layers - 1; l >= 0; --l) {
            inputs.fetch(stream, slot, l);
            for (const int next : {l - 1, l - 2}) inputs.prefetch(stream, slot, next);
            copy(stream, read_back.data(), inputs.at(slot, l).data, bytes);
            const Bytes expected = input_of(slot, l, pass_of[static_cast<size_t>(slot)]);
            CAPTURE(l);
            stream.synchronize();
            CHECK(std::ranges::equal(read_back.values(), expected));
        }
        pass_of[static_cast<size_t>(slot)] = -1;
    }
}

TEST_CASE("state is fetched for the bucket after next while a bucket is updated, and fits the plan",
          "[offload][training]") {
    const Job job(4, Settings{{"precision.dtype", "bf16"},
                              {"memory.offload", R"(["optimizer", "activations"])"},
                              {"memory.recompute", "block"}});
    MeshRun run(World(), Device{}, job.config());
    run.step();
    Trainer& trainer = run.trainer();
    Tracer tracer{Device{}};
    tracer.reserve(10000, 1);
    tracer.activate(trainer.stream);
    tracer.begin_step(trainer.stream, 1);
    run.step();
    tracer.deactivate();
    const auto buckets = static_cast<int>(trainer.parameters.layout().buckets().size());
    REQUIRE(buckets > 3);
    std::vector<std::string> order;
    for (const TracedSpan& span : tracer.collect()) {
        const std::string name = concat(span.name, " ", span.number);
        for (const char* wanted : {"fetch state", "update bucket", "store state"})
            if (std::string(span.name) == wanted) order.push_back(name);
    }
    std::vector<std::string> expected{"fetch state 0", "fetch state 1"};
    for (int b = 0; b < buckets; ++b) {
        expected.push_back(concat("update bucket ", b));
        expected.push_back(concat("store state ", b));
        if (b + 2 < buckets) expected.push_back(concat("fetch state ", b + 2));
    }
    CHECK(order == expected);

    // What the device holds, and what the host does.
    const RunShape shape(run.config(), run.spec(), DType::bf16, Recompute::block);
    const Arena all = plan_memory(shape, Device{}),
                none = plan_memory(shape.with_offload({}), Device{});
    const int64_t n = trainer.parameters.layout().numel(),
                  inputs = int64_t{run.config().batch.micro_batch} *
                           run.config().sequence_length() * run.spec().n_embd *
                           int64_t{sizeof(bf16)};
    const auto about = [](size_t bytes, int64_t expected) {
        constexpr int64_t alignment = 1 << 16;  // and staggering, of some tens of tensors
        CAPTURE(bytes, expected);
        CHECK(std::abs(static_cast<int64_t>(bytes) - expected) < alignment);
    };
    CHECK(all.bytes(Purpose::masters) + all.bytes(Purpose::moments) == 0);
    about(none.bytes(Purpose::masters) + none.bytes(Purpose::moments), 12 * n);
    about(all.bytes(Purpose::offloaded), 12 * n + run.spec().n_layer * inputs);
    about(none.bytes(Purpose::activations) - all.bytes(Purpose::activations),
          (run.spec().n_layer - 3) * inputs);
}

#ifdef TRAIN_GPT_CUDA

TEST_CASE("a GPU trains to the same bits whatever it offloads, in an adverse order of streams",
          "[offload][training][cuda]") {
    if (skip_without_gpus(2)) return;
    const std::vector<Settings> models{{},
                                       {{"optimizer.name", "muon"}},
                                       {{"model.family", "qwen3_moe"},
                                        {"model.n_expert", "5"},
                                        {"model.n_expert_per_token", "2"}}};
    const Job job(4, models[static_cast<size_t>(random_int(0, 2))] +
                         zero(static_cast<int>(random_int(0, 3))) +
                         Settings{{"device", "cuda"},
                                  {"precision.dtype", random_int(0, 3) ? "bf16" : "fp32"},
                                  {"memory.recompute", random_int(0, 1) ? "block" : "none"},
                                  {"schedule.steps", "5"},
                                  {"checkpoint.every", "2"}});
    const std::vector<std::string> words{"optimizer", "activations",
                                         R"(["optimizer", "activations"])"};
    const Settings offload{{"memory.offload", words[static_cast<size_t>(random_int(0, 2))]}};
    const Environment late{{"GPUSIM_STREAMS", "lazy"},
                           {"GPUSIM_SEED", std::to_string(random_int(1, 1000))}};
    const int ranks = static_cast<int>(random_int(1, 2));
    CAPTURE(ranks, job.config().parallel.zero.value(), job.config().model.family,
            offload.begin()->second);
    check_equal(job.train(ranks, "none", {{"memory.offload", "none"}}),
                job.train(ranks, "offloaded", offload, {}, late), 5);
}

#endif
