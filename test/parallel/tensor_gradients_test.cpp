// Gradients of tensors that all tensor-parallel ranks hold are added up over these, then over other
// ranks, before anything reads them.
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "device/copy.h"
#include "model/families/family.h"
#include "parallel/axes/tensor.h"
#include "parallel/state/parameters.h"
#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "training/config/load_config.h"
#include "training/plan/memory_plan.h"
#include "training/trainer.h"

using namespace train_gpt;

namespace {

/// What a rank adds to an element of a gradient: an integer, so that sums are exact in any order.
float addend(uint64_t seed, int rank, int parameter, int64_t element) {
    const uint64_t number = seed + 31 * static_cast<uint64_t>(rank) +
                            17 * static_cast<uint64_t>(parameter) +
                            7 * static_cast<uint64_t>(element);
    return static_cast<float>(number % 101);
}

/// The parameters of a stage that does not begin the model: no exchange of its backward pass comes
/// after the last sums over tensor-parallel ranks, which a wait for another one could hide.
struct LaterStage {
    ParameterStore store;
    std::vector<float*> written;  // what this rank adds to the gradients, by parameter
    // What is found in the pieces by the work after the sums, and after all gradients are finished.
    std::vector<float*> after_sums, finished;

    LaterStage(Arena& arena, const std::vector<Parameter>& parameters, const Sharding& sharding)
        : store(arena, parameters, {.sharding = sharding}) {
        const auto take = [&](int64_t n) {
            return static_cast<float*>(
                arena.take(static_cast<size_t>(n) * sizeof(float), Purpose::buffers));
        };
        for (const Parameter& p : parameters) written.push_back(take(p.padded_numel()));
        for (const ParameterStore::Piece& piece : store.pieces()) {
            after_sums.push_back(take(piece.range.n));
            finished.push_back(take(piece.range.n));
        }
    }

    void find(Stream& stream, const std::vector<float*>& to, std::optional<size_t> bucket) const {
        for (size_t i = 0; i < to.size(); ++i) {
            const ParameterStore::Piece& piece = store.pieces()[i];
            if (!bucket || static_cast<size_t>(piece.bucket) == *bucket)
                copy(stream, to[i], piece.gradient,
                     static_cast<size_t>(piece.range.n) * sizeof(float));
        }
    }
};

void check_gradient_sums(const Mesh& mesh, const Device& device, const char* zero) {
    const TensorRank tensor{mesh.at(Axis::tensor), mesh.size(Axis::tensor)};
    const char* bucket_mb = random_int(0, 1) ? "0.02" : "64";
    const auto seed = static_cast<uint64_t>(random_int(0, 100));
    CAPTURE(tensor.rank, tensor.ranks, mesh.rank(), zero, bucket_mb, seed);
    const Config config = parse_config(
        "{}", "test",
        {"run_dir=unused", "data.train=synthetic", "schedule.steps=1", "parallel.sums=fp32",
         "model.family=gpt2", "model.n_layer=4", "model.n_head=4", "model.n_embd=32",
         "model.n_ff=64", "model.vocab_size=450", concat("parallel.tensor=", tensor.ranks),
         concat("parallel.zero=", zero), concat("parallel.bucket_mb=", bucket_mb)});
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    const Registry registry = registry_held_by(stage_of(registry_of(spec), 1, 4), tensor);
    const std::vector<Parameter>& parameters = registry.parameters;
    const Sharding sharding =
        sharding_of({config, spec, DType::fp32, Recompute::none, mesh.world().size()}, mesh.rank());
    Arena plan = Arena::counting(device);
    { LaterStage(plan, parameters, sharding); }
    Arena arena(device, plan);
    LaterStage stage(arena, parameters, sharding);
    TensorGroup group({.rank = tensor});
    group.connect(device, mesh.along(Axis::tensor));
    stage.store.connect(mesh, nullptr, &group);
    stage.store.gradients.when_summed(
        [&](Stream& stream, size_t bucket) { stage.find(stream, stage.after_sums, bucket); });
    for (size_t i = 0; i < parameters.size(); ++i) {
        std::vector<float> mine(static_cast<size_t>(parameters[i].padded_numel()));
        for (size_t k = 0; k < mine.size(); ++k)
            mine[k] = addend(seed, mesh.rank(), static_cast<int>(i), static_cast<int64_t>(k));
        copy_now(device, stage.written[i], mine.data(), mine.size() * sizeof(float));
    }

    Stream stream(device);
    stage.store.gradients.begin_step(1, 1);
    for (int unit = stage.store.units() - 1; unit >= 0; --unit) {
        for (size_t i = 0; i < parameters.size(); ++i)
            if (parameters[i].unit == unit)
                copy(stream, stage.store.gradients.sink(stream, static_cast<int>(i)).data,
                     stage.written[i],
                     static_cast<size_t>(parameters[i].padded_numel()) * sizeof(float));
        stage.store.gradients.ready(stream, unit);
    }
    stage.store.gradients.finish(stream);
    stage.find(stream, stage.finished, {});
    stream.synchronize();

    for (size_t i = 0; i < stage.finished.size(); ++i) {
        const ParameterStore::Piece& piece = stage.store.pieces()[i];
        const Parameter& p = parameters[static_cast<size_t>(piece.parameter)];
        std::vector<float> expected(static_cast<size_t>(piece.range.n)), found(expected.size());
        for (int rank = 0; rank < mesh.world().size(); ++rank)
            if (p.adds_over_tensor || mesh.layout().at(Axis::tensor, rank) == tensor.rank)
                for (size_t k = 0; k < expected.size(); ++k)
                    expected[k] += addend(seed, rank, piece.parameter,
                                          piece.range.first + static_cast<int64_t>(k));
        INFO(p.name << " from element " << piece.range.first);
        for (const float* at : {stage.after_sums[i], stage.finished[i]}) {
            copy_now(device, found.data(), at, found.size() * sizeof(float));
            CHECK(found == expected);
        }
    }
}

/// What lets simulated GPUs run each stream as late as the others allow; seed 0: exactly so late.
Environment late_streams(int64_t seed) {
    // A real GPU begins a collective that only other ranks wait for; a simulated one needs the
    // last.
    return {{"DEVICE", "cuda"},
            {"GPUSIM_STREAMS", "lazy"},
            {"GPUSIM_SEED", std::to_string(seed)},
            {"GPUSIM_NCCL_PROGRESS_MS", "300"}};
}

}  // namespace

TEST_CASE("ranks: gradient sums of a later stage", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Device device = device_of_rank(world, std::getenv("DEVICE"));
    for (const int tensor : {2, 4}) {
        Activity activity;
        const Mesh mesh(world, {.tensor = tensor}, open_communicator(world, device, activity));
        for (const char* zero : {"0", "1", "2", "3"})
            if (mesh.size(Axis::data) > 1 || zero[0] == '0')
                check_gradient_sums(mesh, device, zero);
    }
}

TEST_CASE("gradients of whole tensors are added up over tensor-parallel ranks, then over others",
          "[tensor]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: gradient sums of a later stage", {{"DEVICE", "cpu"}});
}

TEST_CASE("gradients are read on GPUs after their sums over tensor-parallel ranks and others",
          "[tensor][cuda]") {
    if (skip_without_gpus(4)) return;
    for (const int64_t seed : {int64_t{0}, random_int(1, 1000)}) {
        const ProgramResult result =
            run_case_on_ranks(4, "ranks: gradient sums of a later stage", late_streams(seed));
        INFO("GPUSIM_SEED " << seed << '\n' << result.output);
        CHECK(result.exit_code == 0);
    }
}
