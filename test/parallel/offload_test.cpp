// What a GPU keeps in host memory: leases of optimizer state, and blocks' inputs. The CPU and the
// GPU run the same code.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device/architecture.h"
#include "device/copy.h"
#include "device/trace.h"
#include "model/block_inputs.h"
#include "model/families/family.h"
#include "parallel/state/parameters.h"
#include "parallel/state/state_leases.h"
#include "test/catch.h"
#include "test/kernels/test_device.h"
#include "test/model/random_spec.h"
#include "test/parallel/mesh_job.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/random.h"
#include "training/config/load_config.h"
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

/// What an update copies in each direction: all that a part of a bucket has in host memory. Where
/// fewer than 64 elements are left free between two tensors, these come along.
int64_t bytes_to_lease(const ParameterStore& store) {
    struct HostMemory {
        const std::byte* first;
        size_t bytes, element;
    };
    std::map<std::pair<bool, int>, std::vector<HostMemory>> parts;
    for (const ParameterStore::Piece& piece : store.pieces())
        for (size_t state = 0; state <= store.slots().size(); ++state) {
            const auto memory = store.memory_of(piece, state);
            if (memory.empty() || (state == 0 && store.dtype() == DType::fp32)) continue;
            const bool is_momentum = state == 1 && store.is_matrix(piece.parameter);
            const DType dtype = state == 0 ? DType::fp32 : store.slots()[state - 1].dtype;
            parts[{is_momentum, piece.bucket}].push_back(
                {memory.data(), memory.size(), size_of(dtype)});
        }
    int64_t bytes = 0;
    for (auto& [part, pieces] : parts) {
        std::ranges::sort(pieces, {}, &HostMemory::first);
        for (size_t i = 0; i < pieces.size(); ++i) {
            bytes += static_cast<int64_t>(pieces[i].bytes);
            if (i == 0) continue;
            const std::ptrdiff_t gap =
                pieces[i].first - (pieces[i - 1].first + pieces[i - 1].bytes);
            REQUIRE(gap >= 0);
            if (gap < 64 * static_cast<std::ptrdiff_t>(pieces[i].element)) bytes += gap;
        }
    }
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
        const StateDType state_dtype =
            std::array{StateDType::fp32, StateDType::bf16,
                       StateDType::int8}[static_cast<size_t>(random_int(0, 2))];
        std::vector<OptimizerSlot> slots = optimizer_slots(state_dtype);
        if (random_int(0, 1)) slots.push_back({.name = "w", .dtype = DType::bf16});
        const std::vector<Parameter> parameters = registry_of(random_spec()).parameters;
        CAPTURE(sharding.size, sharding.rank, sharding.zero, sharding.bucket_elements,
                sharding.matrices.has_value(), name_of(dtype), static_cast<int>(state_dtype),
                slots.size());
        const ParameterStoreOptions options{.dtype = dtype, .sharding = sharding, .slots = slots};
        Arena plan = Arena::counting(test_device());
        {
            const ParameterStore store(plan, parameters, options);
            const StateLeases leases(plan, store);
        }
        CHECK(plan.bytes(Purpose::masters) + plan.bytes(Purpose::moments) == 0);
        Arena arena(test_device(), plan);
        const ParameterStore store(arena, parameters, options);
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
        CHECK(leases.bytes() == bytes_to_lease(store));

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

TEST_CASE("all inputs of blocks go to the host, and all but the last three come back",
          "[offload][cuda]") {
    ON_EACH_DEVICE();
    const int layers = static_cast<int>(random_int(1, 8));
    CAPTURE(layers);
    const BlockInputsShape shape{
        .layers = layers, .dtype = DType::bf16, .rows = 16, .channels = 24, .on_host = true};
    Arena plan = Arena::counting(test_device());
    { const BlockInputs counted(plan, shape); }
    Arena arena(test_device(), plan);
    BlockInputs inputs(arena, shape);
    Stream stream(test_device());
    Tracer tracer(test_device());
    tracer.reserve(2000, 1);
    tracer.activate(stream);
    tracer.begin_step(stream, 1);
    inputs.make_room(stream, 0, 0);
    for (int l = 0; l < layers; ++l) {
        if (l + 1 < layers) inputs.make_room(stream, 0, l + 1);
        inputs.store(stream, 0, l);
    }
    for (int l = layers - 1; l >= 0; --l) {
        inputs.fetch(stream, 0, l);
        for (const int next : {l - 1, l - 2}) inputs.prefetch(stream, 0, next);
    }
    stream.synchronize();
    tracer.deactivate();
    std::map<std::string, int64_t> copies;
    for (const TracedSpan& span : tracer.collect()) ++copies[span.name];
    CHECK(copies["store input"] == layers);
    CHECK(copies["fetch input"] == std::max(layers - 3, 0));
    CHECK(BlockInputs::layers_from_host(layers) == copies["fetch input"]);
}

TEST_CASE("state is fetched for the bucket after next while a bucket is updated, and fits the plan",
          "[offload][training]") {
    const TrainingJob job(4, Settings{{"precision.dtype", "bf16"},
                                      {"model.n_embd", "128"},
                                      {"model.n_head", "4"},
                                      {"model.n_ctx", "64"},
                                      {"batch.sequence_length", "64"},
                                      {"batch.micro_batch", "2"},
                                      {"batch.tokens_per_step", "128"},
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
    // Of so many tensors; memory of each is aligned and staggered.
    const auto about = [](size_t bytes, int64_t expected, int64_t tensors) {
        constexpr int64_t alignment = 1024;
        CAPTURE(bytes, expected, tensors);
        CHECK(static_cast<int64_t>(bytes) >= expected);
        CHECK(static_cast<int64_t>(bytes) <= expected + tensors * alignment);
    };
    const int64_t layers = run.spec().n_layer;
    REQUIRE(inputs >= 32 * 1024);
    CHECK(all.bytes(Purpose::masters) + all.bytes(Purpose::moments) == 0);
    about(none.bytes(Purpose::masters) + none.bytes(Purpose::moments), 12 * n, 3);
    about(all.bytes(Purpose::offloaded), 12 * n + layers * inputs, 3 + layers);
    about(none.bytes(Purpose::activations) - all.bytes(Purpose::activations), (layers - 3) * inputs,
          layers - 3);
}

#ifdef TRAIN_GPT_CUDA

// What moves beside work neither waits for that work nor holds it up. The simulator's late streams
// run what somebody waits for and what that needs, and nothing else: while the host waits for work
// alone, copies come after the work that need not wait for them; while it waits for a copy, work
// comes after the copy.

namespace {

/// Spans of one step, by name and number.
class Spans {
  public:
    explicit Spans(const Tracer& tracer) {
        for (const TracedSpan& span : tracer.collect())
            spans_.emplace(concat(span.name, " ", span.number), span);
    }
    const TracedSpan& at(const char* name, int number) const {
        return spans_.at(concat(name, " ", number));
    }
    bool has(const char* name, int number) const {
        return spans_.contains(concat(name, " ", number));
    }
    /// Checks that the first span begins before the second one.
    void check_begins(const char* first, int of_first, const char* second, int of_second) const {
        CAPTURE(first, of_first, second, of_second);
        CHECK(at(first, of_first).begin <= at(second, of_second).begin);
    }
    /// Checks that all of the first span is over when the second one begins.
    void check_order(const char* first, int of_first, const char* second, int of_second) const {
        CAPTURE(first, of_first, second, of_second);
        CHECK(at(first, of_first).end <= at(second, of_second).begin);
    }

  private:
    std::map<std::string, TracedSpan> spans_;
};

void trace(Tracer& tracer, Stream& stream) {
    tracer.reserve(2000, 2);
    tracer.activate(stream);
    tracer.begin_step(stream, 1);
}

/// The state of a small model in several buckets, on the host.
struct LeasedStore {
    std::optional<Arena> arena;
    std::unique_ptr<ParameterStore> store;
    std::unique_ptr<StateLeases> leases;

    explicit LeasedStore(const Device& device) {
        const DecoderSpec spec =
            spec_of(parse_config("{}", "test",
                                 {"run_dir=unused", "data.train=synthetic", "schedule.steps=1",
                                  "model.vocab_size=50", "model.n_layer=5", "model.n_head=1",
                                  "model.n_embd=16", "model.n_ctx=8"}),
                    50);
        Arena plan = Arena::counting(device);
        take(spec, plan);
        leases.reset(), store.reset();
        arena.emplace(device, plan);
        take(spec, *arena);
    }

  private:
    void take(const DecoderSpec& spec, Arena& from) {
        store = std::make_unique<ParameterStore>(
            from, registry_of(spec).parameters,
            ParameterStoreOptions{.dtype = DType::bf16,
                                  .sharding = {.bucket_elements = 4000, .state_on_host = true},
                                  .slots = optimizer_slots()});
        leases = std::make_unique<StateLeases>(from, *store);
    }
};

/// Memory that copies read and write. It is there before they begin: to allocate it, or to ask for
/// its values, waits for all streams.
class CopiedBytes {
  public:
    explicit CopiedBytes(size_t most) : memory_(most), free_(memory_.values()) {}

    std::span<std::byte> take(size_t n) {
        REQUIRE(n <= free_.size());
        const std::span<std::byte> taken = free_.first(n);
        free_ = free_.subspan(n);
        return taken;
    }
    const std::byte* take(const Bytes& bytes) {
        const std::span<std::byte> copied = take(bytes.size());
        std::ranges::copy(bytes, copied.begin());
        return copied.data();
    }

  private:
    SharedArray<std::byte> memory_;
    std::span<std::byte> free_;
};

bool gpu_is_simulated() {
    const DeviceUnderTest last(test_devices().back());
    return device_is_simulated();
}

bool has_late_streams() {
    const char* const streams = std::getenv("GPUSIM_STREAMS");
    return gpu_is_simulated() && streams && std::string(streams) == "lazy";
}

}  // namespace

TEST_CASE("late order: leases of state", "[.late]") {
    if (!has_late_streams()) return;
    const Device device = test_devices().back();
    const DeviceUnderTest on_gpu(device);
    for (const bool waits_for_copies : {false, true}) {
        const LeasedStore of(device);
        const ParameterStore& store = *of.store;
        StateLeases& leases = *of.leases;
        const auto buckets = static_cast<int>(store.layout().buckets().size());
        CAPTURE(waits_for_copies, buckets);
        REQUIRE(buckets > 3);
        Stream stream(device), other(device);
        TestMemory memory(1024);
        Tracer tracer(device);
        trace(tracer, stream);
        constexpr auto part = StateLeases::Part::elements;
        leases.begin_step();
        for (int b = 0; b < buckets; ++b) {
            leases.acquire(stream, part, static_cast<size_t>(b));
            {
                const TraceSpan span(TraceTrack::device, stream, "update bucket", b);
                clear(stream, memory.data(), 1024);
            }
            if (waits_for_copies && b + 1 < buckets) {
                leases.acquire(other, part, static_cast<size_t>(b) + 1);
                other.synchronize();
            }
            leases.release(stream, part, static_cast<size_t>(b));
        }
        stream.synchronize();
        tracer.deactivate();
        const Spans spans(tracer);
        for (int b = 1; b + 1 < buckets; ++b) {
            if (waits_for_copies) {
                spans.check_begins("store state", b - 1, "update bucket", b);
                spans.check_begins("fetch state", b + 1, "update bucket", b);
            } else {
                spans.check_order("update bucket", b, "store state", b - 1);
                spans.check_order("update bucket", b, "fetch state", b + 1);
            }
        }
    }
}

TEST_CASE("late order: inputs of blocks", "[.late]") {
    if (!has_late_streams()) return;
    const Device device = test_devices().back();
    const DeviceUnderTest on_gpu(device);
    constexpr int layers = 7;
    for (const bool waits_for_copies : {false, true}) {
        CAPTURE(waits_for_copies);
        const BlockInputsShape shape{
            .layers = layers, .dtype = DType::bf16, .rows = 16, .channels = 16, .on_host = true};
        Arena plan = Arena::counting(device);
        { const BlockInputs counted(plan, shape); }
        Arena arena(device, plan);
        BlockInputs inputs(arena, shape);
        Stream stream(device), other(device);
        TestMemory memory(1024);
        Tracer tracer(device);
        trace(tracer, stream);
        const auto work = [&](const char* name, int layer) {
            const TraceSpan span(TraceTrack::device, stream, name, layer);
            clear(stream, memory.data(), 1024);
        };
        inputs.make_room(stream, 0, 0);
        for (int l = 0; l < layers; ++l) {
            if (l + 1 < layers) inputs.make_room(stream, 0, l + 1);
            work("forward", l);
            inputs.store(stream, 0, l);
        }
        for (const int l : {layers - 1, layers - 2}) inputs.prefetch(stream, 0, l);
        for (int l = layers - 1; l >= 0; --l) {
            inputs.fetch(stream, 0, l);
            for (const int next : {l - 1, l - 2}) inputs.prefetch(stream, 0, next);
            work("backward", l);
            if (!waits_for_copies || l < 2) continue;
            inputs.fetch(other, 0, l - 2);
            other.synchronize();
        }
        stream.synchronize();
        tracer.deactivate();
        const Spans spans(tracer);
        int fetched = 0;
        for (int l = 0; l < layers; ++l) {
            if (l + 1 < layers && !waits_for_copies)
                spans.check_order("forward", l + 1, "store input", l);
            if (!spans.has("fetch input", l)) continue;
            ++fetched;
            if (waits_for_copies)
                spans.check_begins("fetch input", l, "backward", l + 2);
            else
                spans.check_order("backward", l + 1, "fetch input", l);
        }
        CHECK(fetched == layers - 3);
    }
}

TEST_CASE("late order: a step", "[.late]") {
    if (!has_late_streams()) return;
    const TrainingJob job(2, Settings{{"device", "cuda"},
                                      {"precision.dtype", "bf16"},
                                      {"memory.offload", R"(["optimizer", "activations"])"},
                                      {"memory.recompute", "block"}});
    MeshRun run(World(), test_devices().back(), job.config());
    run.step();
    Trainer& trainer = run.trainer();
    trainer.stream.synchronize();
    Tracer tracer(test_devices().back());
    tracer.reserve(4000, 2);
    tracer.activate(trainer.stream);
    tracer.begin_step(trainer.stream, 1);
    run.submit();
    trainer.outcome();
    tracer.deactivate();
    CHECK(tracer.lost() == 0);
    const Spans spans(tracer);  // of the first micro-batch
    const auto buckets = static_cast<int>(trainer.parameters.layout().buckets().size());
    REQUIRE(buckets > 3);
    for (int b = 1; b + 1 < buckets; ++b) {
        spans.check_order("update bucket", b, "store state", b - 1);
        spans.check_order("update bucket", b, "fetch state", b + 1);
    }
    const int layers = run.spec().n_layer;
    for (int l = 0; l + 1 < layers; ++l) {
        spans.check_order("forward layer", l + 1, "store input", l);
        if (l + 3 < layers) spans.check_order("backward layer", l + 1, "fetch input", l);
    }
}

TEST_CASE("late bytes: leases of state", "[.late]") {
    if (!has_late_streams()) return;
    const Device device = test_devices().back();
    const DeviceUnderTest on_gpu(device);
    const LeasedStore of(device);
    const ParameterStore& store = *of.store;
    Stream stream(device);
    struct State {
        size_t piece, slot;
        Bytes value;
    };
    std::vector<State> all;
    for (size_t p = 0; p < store.pieces().size(); ++p)
        for (size_t slot = 1; slot <= store.slots().size(); ++slot) {
            const auto memory = store.memory_of(store.pieces()[p], slot);
            if (memory.empty()) continue;
            all.push_back({p, slot, random_bytes(memory.size())});
            copy_now(device, memory.data(), all.back().value.data(), memory.size());
        }
    struct Read {
        std::span<const std::byte> seen;
        Bytes expected;
    };
    constexpr int steps = 3;
    size_t bytes = 0;
    for (const State& state : all) bytes += state.value.size();
    CopiedBytes memory(2 * steps * bytes);
    std::vector<Read> reads;
    constexpr auto part = StateLeases::Part::elements;
    for (int step = 0; step < steps; ++step) {
        of.leases->begin_step();
        for (size_t b = 0; b < store.layout().buckets().size(); ++b) {
            of.leases->acquire(stream, part, b);
            for (State& state : all) {
                const ParameterStore::Piece& home = store.pieces()[state.piece];
                if (static_cast<size_t>(home.bucket) != b) continue;
                const size_t n = state.value.size();
                char* const place = of.leases->leased(home).slots[state.slot - 1];
                const std::span<std::byte> seen = memory.take(n);
                reads.push_back({seen, state.value});
                copy(stream, seen.data(), place, n);
                state.value = random_bytes(n);
                copy(stream, place, memory.take(state.value), n);
            }
            of.leases->release(stream, part, b);
        }
    }
    of.leases->settle(stream);
    stream.synchronize();
    for (const Read& read : reads) CHECK((std::ranges::equal(read.seen, read.expected)));
    for (const State& state : all)
        CHECK((bytes_at(store.memory_of(store.pieces()[state.piece], state.slot).data(),
                        state.value.size()) == state.value));
}

TEST_CASE("late bytes: inputs of blocks", "[.late]") {
    if (!has_late_streams()) return;
    const Device device = test_devices().back();
    const DeviceUnderTest on_gpu(device);
    constexpr int slots = 2, layers = 6;
    const BlockInputsShape shape{.slots = slots,
                                 .layers = layers,
                                 .dtype = DType::bf16,
                                 .rows = 24,
                                 .channels = 16,
                                 .on_host = true};
    Arena plan = Arena::counting(device);
    { const BlockInputs counted(plan, shape); }
    Arena arena(device, plan);
    BlockInputs inputs(arena, shape);
    Stream stream(device);
    const size_t bytes = inputs.at(0, 0).bytes();
    struct Read {
        std::span<const std::byte> seen;
        Bytes expected;
    };
    constexpr int passes = 3;
    CopiedBytes memory(passes * size_t{slots} * layers * 3 * bytes);
    std::vector<Read> reads;
    const auto forward = [&](int slot) {
        std::vector<Bytes> values;
        inputs.make_room(stream, slot, 0);
        for (int l = 0; l < layers; ++l) {
            values.push_back(random_bytes(bytes));
            copy(stream, inputs.at(slot, l).data, memory.take(values.back()), bytes);
            if (l + 1 < layers) inputs.make_room(stream, slot, l + 1);
            inputs.store(stream, slot, l);
        }
        return values;
    };
    const auto backward = [&](int slot, const std::vector<Bytes>& values) {
        for (int l = layers - 1; l >= 0; --l) {
            inputs.fetch(stream, slot, l);
            for (const int next : {l - 1, l - 2}) inputs.prefetch(stream, slot, next);
            const std::span<std::byte> seen = memory.take(bytes);
            reads.push_back({seen, values[static_cast<size_t>(l)]});
            copy(stream, seen.data(), inputs.at(slot, l).data, bytes);
        }
    };
    for (int pass = 0; pass < passes; ++pass) {
        const std::vector<Bytes> first = forward(0), second = forward(1);
        // The inputs may come back more than once.
        backward(0, first);
        backward(1, second);
        backward(0, first);
        backward(1, second);
    }
    stream.synchronize();
    for (const Read& read : reads) CHECK((std::ranges::equal(read.seen, read.expected)));
}

TEST_CASE("state and inputs of blocks move beside the work on a GPU, and arrive as they were",
          "[offload][cuda]") {
    if (!gpu_is_simulated()) return;
    for (const auto& [tests, cases, seeds] :
         {std::tuple{"late order: *", 3, 1}, std::tuple{"late bytes: *", 2, 4}})
        for (int seed = 0; seed < seeds; ++seed) {
            const ProgramResult late =
                run_program({this_program(), tests},
                            {{"GPUSIM_STREAMS", "lazy"}, {"GPUSIM_SEED", std::to_string(seed)}});
            INFO(late.output);
            CHECK(late.exit_code == 0);
            CHECK(contains(late.output, concat("in ", cases, " test cases")));
        }
}

TEST_CASE(
    "a GPU trains to the same bits whatever it offloads and where it resumes, in an adverse "
    "order of streams",
    "[offload][training][cuda]") {
    if (skip_without_gpus(2)) return;
    const std::vector<Settings> models{{},
                                       {{"optimizer.name", "muon"}},
                                       {{"model.family", "qwen3_moe"},
                                        {"model.n_expert", "5"},
                                        {"model.n_expert_per_token", "2"}}};
    const auto model = static_cast<size_t>(random_int(0, 2));
    const bool is_muon = model == 1;  // which has no state in int8
    const std::vector<std::string> state_dtypes{"fp32", "bf16", "int8"};
    // Products that are wide enough for fp8, of bf16, where the GPU can compute them
    const bool in_fp8 = random_int(0, 1) == 1 && architecture(test_devices().back()) >= 89;
    const Settings sizes_for_fp8{{"precision.fp8", random_int(0, 1) ? "delayed" : "current"},
                                 {"precision.dtype", "bf16"},
                                 {"model.n_embd", "64"},
                                 {"model.n_head", "4"},
                                 {"model.n_ctx", "16"},
                                 {"batch.sequence_length", "16"},
                                 {"batch.micro_batch", "1"},
                                 {"batch.tokens_per_step", "64"}};
    const TrainingJob job(
        4, models[model] + zero(static_cast<int>(random_int(0, 3))) +
               Settings{{"device", "cuda"},
                        {"precision.dtype", random_int(0, 3) ? "bf16" : "fp32"},
                        {"optimizer.state_dtype",
                         state_dtypes[static_cast<size_t>(random_int(0, is_muon ? 1 : 2))]},
                        {"memory.recompute", random_int(0, 1) ? "block" : "none"},
                        {"schedule.steps", "5"},
                        {"checkpoint.every", "2"}} +
               (in_fp8 ? sizes_for_fp8 : Settings{}));
    const std::vector<std::string> words{"optimizer", "activations",
                                         R"(["optimizer", "activations"])"};
    const Settings offload{{"memory.offload", words[static_cast<size_t>(random_int(0, 2))]}};
    const Environment late{{"GPUSIM_STREAMS", "lazy"},
                           {"GPUSIM_SEED", std::to_string(random_int(1, 1000))}};
    const int ranks = static_cast<int>(random_int(1, 2));
    CAPTURE(ranks, job.config().parallel.zero.value(), job.config().model.family,
            job.config().optimizer.name.word(), job.config().optimizer.state_dtype.word(),
            job.config().precision.fp8.word(), offload.begin()->second);
    const Settings none{{"memory.offload", "none"}};
    // What was offloaded is resumed without, or the other way round.
    const bool offloads_first = random_int(0, 1) == 0;
    CAPTURE(offloads_first);
    job.train(ranks, "offloaded", offloads_first ? offload : none, {"--stop-at", "3"}, late);
    check_equal(job.train(ranks, "none", none),
                job.train(ranks, "offloaded", offloads_first ? none : offload, {}, late), 5);
}

#endif
