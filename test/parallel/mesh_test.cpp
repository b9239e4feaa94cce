// Training on many meshes, each compared with one rank's. A mesh is tried by adding a row to a
// table.
#include "parallel/mesh.h"

#include <cstdlib>
#include <fstream>
#include <numeric>
#include <sstream>

#include <malloc.h>
#include <omp.h>

#include "kernels/choices.h"
#include "model/families/family.h"
#include "parallel/communicator_kinds.h"
#include "test/parallel/mesh_job.h"
#include "test/parallel/training_job.h"
#include "test/planned_traffic.h"
#include "training/config/load_config.h"
#include "training/decisions.h"
#include "training/plan/memory_plan.h"

using namespace train_gpt;
using namespace train_gpt::training_job;
using namespace train_gpt::mesh_job;

// ---- Training -----------------------------------------------------------------------------------

namespace {

constexpr MeshCase few_meshes[] = {
    trains("gpt2", 5).data(2).zero(3),
    trains("qwen3", 3).bf16().data(2).zero(3),
    trains("llama", 6).data(4).zero(3).shard_ranks(2),
    trains("gpt2", 7).data(4).zero(1).shard_ranks(2),
    trains("mistral", 4).data(3).zero(3),
    trains("qwen2", 5).bf16().data(4).zero(2).shard_ranks(2),
    trains("gpt2", 2).tensor(2),
    trains("llama", 5).tensor(2).data(2).zero(3).shard_ranks(2),
    trains("qwen3", 2).tensor(4).zero(1),
    trains("gpt2", 3).tensor(2).data(2).zero(2),
    trains("qwen2", 3).bf16().tensor(2).data(2).zero(1),
    trains("qwen3_moe", 5).data(2).zero(3),
    trains("qwen2_moe", 3).bf16().tensor(2).data(2).zero(1).offload(),
    trains("qwen2_moe", 3).tensor(2).data(2).zero(2),
    trains("olmoe", 2).tensor(2),
};
constexpr MeshCase few_context_meshes[] = {
    trains("gpt2", 2).context(2).documents(),
    trains("llama", 3).data(2).zero(3).context(2),
    trains("qwen3", 3).bf16().tensor(2).zero(2).context(2).documents(),
    trains("gpt_oss", 3).zero(1).context(2).documents(),
    trains("llama", 3).data(2).zero(2).context(2).offload(),
};
constexpr MeshCase more_context_meshes[] = {
    trains("llama", 3).zero(1).context(4).documents(),
    trains("gpt2", 5).bf16().data(2).context(2),
    trains("mistral", 3).data(2).zero(1).shard_ranks(1).context(2),
    trains("qwen3", 5).data(2).zero(2).context(2).documents(),
    trains("gpt2", 2).tensor(2).zero(3).context(2),
    trains("llama", 2).tensor(4).zero(1).context(2),
    trains("qwen2", 5).bf16().tensor(2).data(2).zero(3).shard_ranks(1).context(2),
    trains("gpt2", 4).bf16().data(3).zero(3).context(2).documents(),
    trains("qwen3", 3).tensor(2).context(4),
    trains("qwen2", 3).bf16().data(2).zero(3).shard_ranks(2).context(4),
    trains("qwen2_moe", 3).tensor(2).zero(3).context(2).documents(),
    trains("olmoe", 4).data(2).zero(2).context(2),
    trains("gpt_oss", 3).bf16().zero(3).context(4),
};
constexpr MeshCase more_meshes[] = {
    trains("llama", 3).bf16().data(2),
    trains("gpt2", 5).data(2).shard_ranks(1),
    trains("qwen3", 3).data(2).zero(1),
    trains("llama", 5).data(2).zero(2),
    trains("gpt2", 4).data(3),
    trains("llama", 7).bf16().data(3).zero(1).shard_ranks(3),
    trains("qwen2", 5).data(3).zero(2).shard_ranks(1),
    trains("qwen3", 5).bf16().data(3).zero(3).shard_ranks(3),
    trains("mistral", 5).data(4).shard_ranks(2),
    trains("qwen2", 9).data(4).zero(1),
    trains("gpt2", 6).bf16().data(4).zero(2).shard_ranks(4),
    trains("gpt2", 4).bf16().data(4).zero(3),
    trains("llama", 5).data(4).zero(3).shard_ranks(1),
    trains("gpt2", 13).data(6).zero(3).shard_ranks(3),
    trains("llama", 7).bf16().data(6).zero(3).shard_ranks(2),
    trains("mistral", 6).data(6).zero(2).shard_ranks(3),
    trains("qwen3", 8).bf16().data(6).zero(1).shard_ranks(2),
    trains("gpt2", 11).data(6).zero(3),
    trains("llama", 7).tensor(2).data(3).zero(3),
    trains("gpt2", 4).bf16().tensor(2).data(3).zero(2),
    trains("qwen3", 5).tensor(2).data(3).zero(1).shard_ranks(1),
    trains("mistral", 3).tensor(4),
    trains("gpt2", 8).tensor(2).data(3),
    trains("gpt2", 2).bf16().tensor(4).zero(2),
    trains("qwen2", 5).tensor(2).data(2).zero(3).shard_ranks(1),
    trains("mistral", 3).bf16().tensor(2).zero(3),
    trains("mixtral", 6).data(4).zero(3).shard_ranks(2),
    trains("olmoe", 3).bf16().tensor(2).data(2).zero(3),
    trains("gpt_oss", 3).tensor(4).zero(1),
    trains("qwen2_moe", 5).bf16().data(3).zero(3),
};
// Tensor-parallel ranks, whose partial sums are rounded
constexpr MeshCase bf16_meshes[] = {
    trains("gpt2", 2).bf16().tensor(4),
    trains("llama", 3).bf16().tensor(4),
    trains("qwen3", 4).bf16().tensor(2).data(2).zero(3),
    trains("gpt2", 2).bf16().tensor(2),
    trains("mistral", 2).bf16().tensor(2),
    trains("qwen2", 3).bf16().tensor(2).data(2).zero(1),
};

constexpr MeshCase few_pipelines[] = {
    trains("gpt2", 5).zero(1).pipeline(2),
    trains("llama", 8).data(2).zero(1).pipeline(2, "interleaved", 2),
    trains("gpt2", 3).tensor(2).pipeline(2, "zero_bubble"),
    trains("mixtral", 5).data(2).zero(2).pipeline(2, "zero_bubble"),
};
constexpr MeshCase more_pipelines[] = {
    trains("gpt2", 6).zero(1).pipeline(4, "gpipe"),
    trains("llama", 9).bf16().zero(1).pipeline(4),
    trains("gpt2", 8).pipeline(4, "interleaved", 2),
    trains("qwen3", 7).zero(1).pipeline(4, "zero_bubble"),
    trains("gpt2", 7).data(2).zero(3).pipeline(2),
    trains("gpt2", 5).bf16().data(2).zero(2).pipeline(2, "gpipe"),
    trains("gpt2", 7).data(3).pipeline(2, "zero_bubble"),
    trains("llama", 8).data(3).zero(3).shard_ranks(1).pipeline(2),
    trains("gpt2", 4).zero(1).pipeline(2, "interleaved", 3),
    trains("mistral", 4).tensor(2).zero(1).pipeline(2, "interleaved", 2),
    trains("qwen2", 10).bf16().data(3).zero(1).shard_ranks(3).pipeline(2, "zero_bubble"),
    trains("gpt2", 5).data(3).zero(2).shard_ranks(3).pipeline(2),
    trains("gpt2", 2).zero(1).pipeline(6),
    trains("gpt_oss", 5).zero(1).pipeline(4),
    trains("qwen2_moe", 7).bf16().data(2).zero(3).pipeline(2),
    trains("olmoe", 4).tensor(2).zero(1).pipeline(2, "interleaved", 2),
};

// Stages whose ranks share sequences and products
constexpr MeshCase few_mixed_meshes[] = {
    trains("gpt2", 3).zero(1).context(2).documents().pipeline(2),
    trains("llama", 4).context(2).pipeline(2, "interleaved", 2),
};
constexpr MeshCase more_mixed_meshes[] = {
    trains("gpt2", 3).tensor(2).zero(1).context(2).documents().pipeline(2),
    trains("qwen3", 5).bf16().context(2).documents().pipeline(2, "zero_bubble"),
    trains("mistral", 3).zero(2).context(2).pipeline(2, "gpipe"),
    trains("gpt2", 3).zero(3).context(2).pipeline(4),
    trains("llama", 7).data(2).zero(2).context(2).documents().pipeline(2, "gpipe"),
    trains("mistral", 4).bf16().tensor(2).pipeline(4, "zero_bubble"),
    trains("qwen2", 5).tensor(2).zero(3).context(2).pipeline(2),
    trains("gpt2", 9).bf16().data(2).zero(1).shard_ranks(2).context(2).pipeline(2),
    trains("llama", 4).tensor(4).zero(1).pipeline(2, "interleaved", 2),
    trains("gpt2", 8).zero(1).context(2).documents().pipeline(4, "interleaved", 2),
    trains("qwen3", 5).tensor(2).data(2).zero(3).shard_ranks(1).pipeline(2),
    trains("llama", 3).zero(2).context(4).documents().pipeline(2),
};
// Schedules in which gradients of several stages or micro-batches are computed in turns, and
// reduced in every micro-batch
constexpr MeshCase reordered_pipelines[] = {
    trains("gpt2", 8).data(2).zero(2).pipeline(2, "interleaved", 2),
    trains("qwen3", 5).data(2).zero(3).pipeline(2, "zero_bubble"),
    trains("gpt2", 7).bf16().data(2).zero(2).documents().pipeline(2, "zero_bubble"),
    trains("llama", 4).bf16().data(2).zero(3).pipeline(2, "interleaved", 3),
};
constexpr MeshCase more_reordered_pipelines[] = {
    trains("gpt2", 9).data(4).zero(3).shard_ranks(2).pipeline(2, "zero_bubble"),
    trains("llama", 8).data(4).zero(2).shard_ranks(2).documents().pipeline(2, "interleaved", 2),
    trains("qwen3", 5).tensor(2).data(2).zero(3).pipeline(2, "zero_bubble"),
    trains("gpt2", 4).bf16().tensor(2).data(2).zero(2).pipeline(2, "interleaved", 2),
    trains("llama", 6).zero(3).context(2).documents().pipeline(2, "interleaved", 3),
    trains("gpt2", 5).zero(2).context(2).pipeline(2, "zero_bubble"),
    trains("mistral", 7).bf16().data(2).zero(3).pipeline(4, "zero_bubble"),
    trains("gpt2", 8).data(2).zero(2).pipeline(4, "interleaved", 2),
    trains("qwen2", 7).bf16().data(2).zero(3).context(2).documents().pipeline(2, "zero_bubble"),
    trains("gpt2", 8).tensor(2).data(2).zero(3).documents().pipeline(2, "interleaved", 2),
};

double largest_of(const std::vector<double>& values) {
    double most = 0;
    for (const double x : values) most = std::max(most, std::abs(x));
    return most;
}

/// The gradient of a micro-batch that one rank has is that of a single rank, bit for bit.
void check_lone_micro_batches(MeshRun& run, MeshRun* one, uint64_t seed) {
    // Auxiliary losses of routers have gradients where targets have none.
    const RouterLosses losses = router_losses(run.config());
    if (run.spec().experts && (losses.balance != 0 || losses.z_loss != 0)) return;
    for (int owner = 0; owner < run.mesh().size(Axis::data); ++owner) {
        run.lone_micro_batch(owner, seed + static_cast<uint64_t>(owner));
        const auto gradients = run.gradients();
        if (!one) continue;
        one->lone_micro_batch(0, seed + static_cast<uint64_t>(owner));
        CAPTURE(owner);
        CHECK(gradients == one->gradients());
    }
}

struct Curve {
    std::vector<std::vector<double>> first_gradients;
    std::vector<double> losses, norms;
    std::vector<std::vector<int32_t>> chosen;  // how often routers chose each expert
};

Curve curve_of(MeshRun& run) {
    Curve curve;
    for (int step = 0; step < 10; ++step) {
        const StepOutcome outcome = run.step();
        curve.losses.push_back(outcome.sums.loss);
        curve.norms.push_back(outcome.state.norm);
        curve.chosen.push_back(outcome.routers.chosen);
        if (step == 0) curve.first_gradients = run.gradients();
    }
    return curve;
}

/// The same run on one rank with a number of threads.
Curve curve_on_one(const Config& config, const Device& device, int threads) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(threads);
    MeshRun one(World(), device, config);
    Curve curve = curve_of(one);
    omp_set_num_threads(before);
    return curve;
}

void check_gradients(const MeshRun& run, const Curve& curve, const Curve& one, double tolerance) {
    const std::vector<Parameter> parameters = registry_of(run.spec()).parameters;
    for (size_t i = 0; i < parameters.size(); ++i) {
        const std::vector<double>&a = curve.first_gradients[i], &b = one.first_gradients[i];
        double difference = 0;
        for (size_t k = 0; k < a.size(); ++k)
            difference = std::max(difference, std::abs(a[k] - b[k]));
        CAPTURE(parameters[i].name);
        CHECK(difference <= tolerance * largest_of(b));
    }
}

// What another order of sums may change where another number of threads changes nothing, as with
// tensors this small: the norm differed by at most 2.3 roundings in 160 runs of ten steps.
constexpr double least_spread = 4 * fp32_roundoff;

/// Losses and norms are within four times what another number of threads changes; in bf16, where a
/// sum in another order soon rounds weights to others, within four times what rounding changes: of
/// one rank in fp32, with `threads` in bf16.
void check_curves(const Curve& curve, const Curve& one, const Curve& threads, double least) {
    const auto check = [&](const std::vector<double>& x, const std::vector<double>& y,
                           const std::vector<double>& z) {
        double spread = least;
        for (size_t i = 0; i < y.size(); ++i)
            spread = std::max(spread, std::abs(z[i] - y[i]) / std::abs(y[i]));
        for (size_t i = 0; i < y.size(); ++i) {
            CAPTURE(i, x[i], y[i], spread);
            CHECK(std::abs(x[i] - y[i]) <= 4 * spread * std::abs(y[i]));
        }
    };
    check(curve.losses, one.losses, threads.losses);
    check(curve.norms, one.norms, threads.norms);
}

/// In bf16, tensor-parallel ranks round each part of a sum before these are added up, where one
/// rank rounds the sum: a few more roundings among those that any activation and gradient in bf16
/// has gone through, of the same size. So their distance from one rank's gradients in fp32 is
/// compared with that of one rank in bf16. All tensors together are hardly farther away. In a
/// tensor of few elements, or whose gradient is all rounding, chance counts: once a k_norm of eight
/// elements was 8 times closer in one rank than the mean of all tensors. So no tensor is expected
/// to be closer than the mean.
void check_rounding(const MeshRun& run, const Curve& curve, const Curve& one, const Curve& exact) {
    const std::vector<Parameter> parameters = registry_of(run.spec()).parameters;
    struct Distance {
        std::string tensor;
        double ours, of_one;  // relative squares
    };
    std::vector<Distance> distances;
    double ours = 0, of_one = 0;  // over all tensors
    for (size_t i = 0; i < parameters.size(); ++i) {
        const std::vector<double>& e = exact.first_gradients[i];
        const double size = std::inner_product(e.begin(), e.end(), e.begin(), 0.0);
        if (size == 0) {  // selection biases have no gradient
            CAPTURE(parameters[i].name);
            CHECK(curve.first_gradients[i] == e);
            continue;
        }
        const auto square = [&](const std::vector<double>& a) {
            double sum = 0;
            for (size_t k = 0; k < e.size(); ++k) sum += (a[k] - e[k]) * (a[k] - e[k]);
            return sum / size;
        };
        distances.push_back(
            {parameters[i].name, square(curve.first_gradients[i]), square(one.first_gradients[i])});
        ours += distances.back().ours;
        of_one += distances.back().of_one;
    }
    const double mean = of_one / static_cast<double>(distances.size());
    for (const Distance& d : distances) {
        CAPTURE(d.tensor, d.ours, d.of_one, mean);
        CHECK(d.ours <= 4 * 4 * std::max(d.of_one, mean));
    }
    CAPTURE(ours, of_one);
    CHECK(ours <= 1.5 * 1.5 * of_one);
}

/// Not all tokens of a run went to the same experts.
void check_choices(const DecoderSpec& spec, const Curve& curve) {
    if (!spec.experts) return;
    const auto E = static_cast<size_t>(spec.experts.n_expert);
    for (size_t router = 0; router < curve.chosen[0].size() / E; ++router) {
        size_t used = 0;
        for (size_t e = router * E; e < (router + 1) * E; ++e)
            used += std::ranges::any_of(curve.chosen, [&](const auto& of) { return of[e] > 0; });
        CAPTURE(router);
        CHECK(used > static_cast<size_t>(spec.experts.n_expert_per_token));
    }
}

void check_case(const World& part, const Device& device, const MeshCase& c, uint64_t seed) {
    CAPTURE(mesh_job::name_of(c), seed);
    const std::string device_name = device.is_cuda() ? "cuda" : "cpu";
    const bool first = part.rank() == 0, is_fp32 = std::string(c.dtype) == "fp32";
    MeshRun run(part, device, config_of(c, seed, device_name));
    const Config alone = config_of(c, seed, device_name, false);
    {
        std::optional<MeshRun> one;
        if (first) one.emplace(World(), device, alone);
        if (c.tensor == 1 && c.context == 1 && c.pipeline.ranks == 1)
            check_lone_micro_batches(run, one ? &*one : nullptr, seed);
    }
    const Curve curve = curve_of(run);

    // Bytes of a step between two others
    const auto before = run.mesh().bytes_sent();
    StepClock& clock = run.trainer().clock;
    clock.begin(run.trainer().stream);
    run.step();
    clock.end(run.trainer().stream);
    const StepTimes times = clock.pop();
    const Traffic after = run.mesh().bytes_sent(),
                  planned =
                      planned_traffic({run.config(), run.spec(), resolve_dtype(c.dtype, device),
                                       Recompute::none, part.size()},
                                      part.rank());
    CHECK(after.size() == planned.size());
    // What is sent is waited for, along the same axes.
    double waited = 0;
    for (const auto& [group, seconds] : times.exposed) {
        CAPTURE(group);
        CHECK(planned.contains(group));
        waited += seconds;
    }
    CHECK(times.exposed.size() == planned.size());
    CHECK(waited == Approx(times[StepPhase::communication]));
    // Replicas need not divide a shard. An all-reduce cuts its elements into blocks, of which the
    // last may lack up to one for each rank, and each of them is sent to each rank.
    const auto buckets = std::ssize(run.trainer().parameters.layout().buckets());
    for (const auto& [group, bytes] : planned) {
        CAPTURE(group);
        const int64_t rounding = group == "replica"  ? buckets * 8 * run.mesh().size(Axis::replica)
                                 : group == "tensor" ? buckets * 8 * c.tensor
                                 : group.starts_with("pipeline ends") ? 4 * c.ranks() * c.ranks()
                                                                      : 0;
        const int64_t of_counts = run.spec().experts ? 2 * 8 * c.ranks() : 0;  // two all-reduces
        // Between ranks that share micro-batches, those with the most of them send what is planned.
        if ((group == "tensor" || group == "context" || group == "pipeline") &&
            !run.has_most_micro_batches())
            continue;
        CHECK(std::abs(after.at(group) - before.at(group) - bytes) <= rounding + of_counts);
        CHECK(bytes > 0);
    }

    if (!first) return;
    const Curve one = curve_on_one(alone, device, 1), threads = curve_on_one(alone, device, 2);
    CHECK(curve.chosen == one.chosen);
    check_choices(run.spec(), one);
    if (is_fp32) {
        check_gradients(run, curve, one, 2e-5);
        check_curves(curve, one, threads, least_spread);
        return;
    }
    MeshCase in_fp32 = c;
    in_fp32.dtype = "fp32";
    const Curve exact = curve_on_one(config_of(in_fp32, seed, device_name, false), device, 1);
    // The same micro-batches and chunks of attention: only sums of gradients differ.
    if (c.tensor == 1 && c.context == 1)
        check_gradients(run, curve, one, 4 * bf16_roundoff);
    else
        check_rounding(run, curve, one, exact);
    check_curves(curve, exact, one, least_spread);
}

void check_meshes(const Device& device, const World& world, std::span<const MeshCase> cases) {
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    on_parts(world, cases, [&](const World& part, const MeshCase& c, size_t number) {
        check_case(part, device, c, seed + 101 * number);
    });
}

}  // namespace

TEST_CASE("ranks: few meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_meshes(Device{}, World::join(), few_meshes);
}

TEST_CASE("ranks: meshes in bf16", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    for (int repeat = 0; repeat < 4; ++repeat) check_meshes(Device{}, world, bf16_meshes);
}

TEST_CASE("tensor-parallel ranks round in bf16 hardly more than one rank does",
          "[mesh][training][.][long]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: meshes in bf16", {});
}

TEST_CASE("ranks: few context meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_meshes(Device{}, World::join(), few_context_meshes);
}

TEST_CASE("ranks: more context meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_meshes(Device{}, World::join(), more_context_meshes);
}

TEST_CASE("ranks: more meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_meshes(Device{}, World::join(), more_meshes);
}

TEST_CASE("meshes train what one rank trains, and send what the plan says", "[mesh][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: few meshes");
}

TEST_CASE("ranks that share sequences train what one rank trains, and send what the plan says",
          "[mesh][context][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: few context meshes");
}

TEST_CASE("many meshes whose ranks share sequences train what one rank trains",
          "[mesh][context][training][.][long]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(8, "ranks: more context meshes", {});
}

TEST_CASE("many meshes train what one rank trains, and send what the plan says",
          "[mesh][training][.][long]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(6, "ranks: more meshes", {});
}

TEST_CASE("ranks: few pipelines", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_meshes(Device{}, World::join(), few_pipelines);
}

TEST_CASE("ranks: more pipelines", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_meshes(Device{}, World::join(), more_pipelines);
}

TEST_CASE("pipelines train what one rank trains, and send what the plan says",
          "[mesh][pipeline][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: few pipelines");
}

TEST_CASE("many pipelines train what one rank trains, and send what the plan says",
          "[mesh][pipeline][training][.][long]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(6, "ranks: more pipelines", {});
}

TEST_CASE("ranks: few mixed meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_meshes(Device{}, World::join(), few_mixed_meshes);
}

TEST_CASE("ranks: more mixed meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_meshes(Device{}, World::join(), more_mixed_meshes);
}

TEST_CASE("stages whose ranks share sequences train what one rank trains",
          "[mesh][pipeline][context][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: few mixed meshes");
}

TEST_CASE("many stages whose ranks share sequences and products train what one rank trains",
          "[mesh][pipeline][context][training][.][long]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(8, "ranks: more mixed meshes", {});
}

TEST_CASE("ranks: reordered pipelines", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_meshes(Device{}, World::join(), reordered_pipelines);
}

TEST_CASE("ranks: more reordered pipelines", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_meshes(Device{}, World::join(), more_reordered_pipelines);
}

TEST_CASE(
    "pipelines with gradients of several stages or micro-batches in turns split these as well",
    "[mesh][pipeline][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: reordered pipelines");
}

TEST_CASE("many pipelines with gradients in turns train what one rank trains",
          "[mesh][pipeline][training][.][long]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(8, "ranks: more reordered pipelines", {});
}

TEST_CASE("ranks: one ahead", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    for (const char* bucket_mb : {"0.02", "0.09", "64"})
        for (const char* family : {"gpt2", "llama"}) {
            CAPTURE(bucket_mb, family);
            Config config = config_of(trains(family, 2).data(2).zero(3), seed, "cpu");
            config.parallel.bucket_mb = std::stod(bucket_mb);
            MeshRun run(world, Device{}, config);
            ParameterStore& store = run.trainer().parameters;
            const auto sent = [&] { return run.mesh().bytes_sent().at("data"); };
            const int units = store.units();
            for (int pass = 0; pass < 4; ++pass)
                for (int i = 0; i < units; ++i) {
                    const int step = pass % 2 == 0 ? 1 : -1;
                    const int unit = step > 0 ? i : units - 1 - i;
                    const int64_t before = sent();
                    const UnitLease weights = store.weights.acquire(run.trainer().stream, unit);
                    CAPTURE(pass, unit);
                    CHECK(sent() == before);
                    if (i + 1 < units)
                        store.weights.prefetch(run.trainer().stream, unit + step,
                                               step > 0 ? units - 1 : 0);
                    // As soon as a pass reaches a bucket, it asks for the next one.
                    const bool reaches =
                        i == 0 || store.first_bucket(unit) != store.first_bucket(unit - step);
                    if (!reaches) CHECK(sent() == before);
                }
        }
}

TEST_CASE("a pass gathers one bucket ahead, in both directions", "[mesh][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(2, "ranks: one ahead");
}

TEST_CASE("ranks: gathers after an update", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    for (const int tensor : {1, 2})
        for (const int zero : {1, 2}) {
            CAPTURE(tensor, zero);
            Config config = config_of(trains("gpt2", 4).data(4 / tensor).tensor(tensor).zero(zero),
                                      seed, "cpu");
            config.parallel.bucket_mb = 0.02;
            config.model.n_layer = 6;
            MeshRun run(world, Device{}, config);
            ParameterStore& store = run.trainer().parameters;
            Stream& stream = run.trainer().stream;
            const std::vector<Bucket>& buckets = store.layout().buckets();
            const auto sent = [&] { return run.mesh().bytes_sent().at("data"); };
            const auto sends = [&](const auto& work) {
                const int64_t before = sent();
                work();
                return sent() > before;
            };
            store.weights.gather_rest(stream);
            const size_t at_once = store.first_bucket(1) + 2;
            REQUIRE(buckets.size() > at_once);
            for (size_t b = 0; b < buckets.size(); ++b) {
                CAPTURE(b);
                CHECK(sends([&] { store.weights.gather(stream, static_cast<int>(b)); }) ==
                      (tensor == 1 || b < at_once));
            }
            // Rows of layers, which are also exchanged, wait for one bucket at most.
            for (int unit = 0; unit < store.units(); ++unit) {
                CAPTURE(unit);
                const size_t b = store.first_bucket(unit);
                const bool begins = unit == 0 || store.first_bucket(unit - 1) != b;
                CHECK(sends([&] { store.weights.acquire(stream, unit); }) ==
                      (tensor > 1 && begins && b >= at_once));
            }
            CHECK(!sends([&] { store.weights.gather_rest(stream); }));
        }
}

TEST_CASE("updated weights are gathered as the next pass needs them if rows are exchanged, too",
          "[mesh][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: gathers after an update");
}

TEST_CASE("ranks: rounded sums", "[.ranks]") {
    if (skip_outside_ranks()) return;
    constexpr MeshCase cases[] = {
        trains("llama", 4).data(4).shard_ranks(2),
        trains("gpt2", 4).data(4).zero(1).shard_ranks(2),
        trains("qwen3", 4).data(4).zero(2).shard_ranks(2),
        trains("gpt2", 4).bf16().data(4).zero(3),
    };
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    const auto owner = static_cast<int>(random_int(0, 3));
    on_parts(World::join(), cases, [&](const World& part, const MeshCase& c, size_t number) {
        const uint64_t of_case = seed + number;
        CAPTURE(mesh_job::name_of(c), of_case, owner);
        Config config = config_of(c, of_case, "cpu");
        config.parallel.sums = GradientSums::bf16;
        MeshRun run(part, Device{}, config);
        run.lone_micro_batch(owner, of_case);
        const auto gradients = run.gradients();
        if (part.rank() != 0) return;
        // The others add zeros, so that nothing is rounded but the gradient itself.
        MeshRun one(World(), Device{}, config_of(c, of_case, "cpu", false));
        one.lone_micro_batch(0, of_case);
        auto rounded = one.gradients();
        for (std::vector<double>& gradient : rounded)
            for (double& x : gradient)
                x = static_cast<float>(static_cast<bf16>(static_cast<float>(x)));
        CHECK(gradients == rounded);
    });
}

TEST_CASE("gradients that are sent in bf16 are one rank's, rounded", "[mesh][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: rounded sums");
}

// ---- Memory -------------------------------------------------------------------------------------

namespace {

/// A line of /proc/self/status, in bytes.
double memory_of_process(const std::string& name) {
    std::istringstream lines(read("/proc/self/status"));
    for (std::string line; std::getline(lines, line);)
        if (line.starts_with(name + ":")) return 1024 * std::stod(line.substr(name.size() + 1));
    return 0;
}

}  // namespace

TEST_CASE("ranks: peak memory", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    // What one case frees is given back, and is not there for the next one.
    ::mallopt(M_MMAP_THRESHOLD, 1 << 16);
    ::mallopt(M_TRIM_THRESHOLD, 0);
    struct Case {
        int tensor, zero, shard_ranks, chunks;
        bool keeps;
        const char* sums = "fp32";
    };
    for (const Case& c : {Case{1, 3, 4, 1, false}, Case{1, 3, 2, 1, false}, Case{2, 3, 2, 2, false},
                          Case{4, 0, 1, 1, true}, Case{2, 1, 2, 1, true}, Case{2, 2, 1, 1, false},
                          Case{1, 1, 4, 1, false, "exact"}, Case{2, 3, 2, 1, false, "exact"}}) {
        const Config config = parse_config(
            "{}", "test",
            {"run_dir=unused", "data.train=synthetic", "model.n_layer=8", "model.n_head=8",
             "model.n_embd=512", "model.n_ctx=16", "model.vocab_size=2000", "schedule.steps=20",
             "batch.tokens_per_step=64", "batch.micro_batch=1", "precision.dtype=fp32",
             concat("parallel.tensor=", c.tensor), concat("parallel.zero=", c.zero),
             concat("parallel.shard_ranks=", c.shard_ranks), concat("parallel.sums=", c.sums),
             concat("parallel.tensor_chunks=", c.chunks),
             concat("parallel.tensor_keep_gathered=", c.keeps ? "true" : "false"),
             "parallel.bucket_mb=4"});
        const double before = memory_of_process("RssAnon");
        std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins here
        MeshRun run(world, Device{}, config);
        for (int i = 0; i < 2; ++i) run.step();
        // Programs and what the ranks of a node share are not the plan's.
        const double peak = memory_of_process("VmHWM") - memory_of_process("RssFile") -
                            memory_of_process("RssShmem") - before;
        const auto planned = static_cast<double>(
            plan_memory({config, run.spec(), DType::fp32, Recompute::none, world.size()}, Device{})
                .total_bytes());
        // 16 bytes of each parameter split over tensor and shard ranks; with ZeRO-3 also weights
        // and gradients whole, of this tensor rank, of the embedding and two blocks, else of all.
        const double embedding = (2048 + 16) * 512, block = 12.03 * 512 * 512;
        const double all = (embedding + 8 * block) / c.tensor,
                     whole = (embedding + 2 * block) / c.tensor;
        const double state = c.zero == 3   ? 16 * all / c.shard_ranks + 8 * whole
                             : c.zero == 0 ? 16 * all
                                           : 8 * all + 8 * all / c.shard_ranks;
        CAPTURE(c.tensor, c.zero, c.shard_ranks, before, peak, planned, state);
        CHECK((c.zero == 2 || planned >= state));  // ZeRO-2 splits gradients as well
        // Exact sums need memory for a micro-batch's gradients of the embedding and of a block.
        const double apart =
            c.zero < 2 && c.sums == std::string("exact") ? 4 * (embedding + block) / c.tensor : 0;
        if (c.zero != 2) CHECK(planned <= 1.06 * (state + apart));
        CHECK(std::abs(peak - planned) <= 0.03 * planned);
    }
}

#ifndef __SANITIZE_ADDRESS__  // which keeps what was freed
TEST_CASE("a process of split training takes the memory that the plan says",
          "[mesh][training][plan]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: peak memory");
}
#endif

// ---- Before the first step ----------------------------------------------------------------------

TEST_CASE("ranks: refused meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    Activity activity;
    const auto error = [&](const MeshSizes& sizes) {
        return error_of([&] { Mesh(world, sizes, open_group_of_one(activity)); });
    };
    CHECK(contains(error({.tensor = world.rank() == 2 ? 2 : 1}), "parallel.tensor: 1 on ranks 0"));
    CHECK(
        contains(error({.context = world.rank() == 1 ? 4 : 2}), "parallel.context: 2 on ranks 0"));
    CHECK(contains(error({.shard_ranks = 3}), "parallel.shard_ranks = 3 does not divide the 4 "));
    CHECK(error({.tensor = 4}).empty());
}

TEST_CASE("ranks with different meshes, and meshes that do not fit, are refused on all ranks",
          "[mesh][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: refused meshes");
}

// ---- GPUs ---------------------------------------------------------------------------------------

#ifdef TRAIN_GPT_CUDA

namespace {

constexpr MeshCase gpu_meshes[] = {
    trains("gpt2", 2).tensor(2),
    trains("llama", 5).tensor(2).data(2).zero(3),
    trains("qwen3", 3).bf16().tensor(2).data(2).zero(2),
    trains("gpt2", 5).data(2).zero(3),
    trains("llama", 3).bf16().data(2).zero(3),
    trains("qwen3", 6).data(4).zero(3).shard_ranks(2),
    trains("gpt2", 5).bf16().data(4).zero(2).shard_ranks(2),
    trains("mistral", 2).tensor(4).zero(1),
    trains("qwen3_moe", 3).bf16().data(2).zero(3),
    trains("qwen2_moe", 3).tensor(2).data(2).zero(2),
    trains("olmoe", 2).tensor(2),
    trains("gpt_oss", 2).zero(1).context(2).documents(),
    trains("gpt2", 2).zero(1).context(2).documents(),
    trains("llama", 3).bf16().data(2).zero(3).context(2),
    trains("qwen3", 2).tensor(2).zero(2).context(2).documents(),
    trains("llama", 3).data(2),
    trains("qwen2", 5).bf16().data(4).zero(1),
    trains("mistral", 3).data(2).zero(2),
    trains("llama", 4).data(3).zero(1),
};
constexpr MeshCase gpu_mixtures[] = {
    trains("mixtral", 5).data(2).zero(1),
    trains("olmoe", 3).bf16().data(2).zero(2),
    trains("qwen3_moe", 6).data(4).zero(3).shard_ranks(2),
    trains("gpt_oss", 5).bf16().data(4).zero(3),
    trains("qwen2_moe", 2).tensor(2),
    trains("qwen3_moe", 3).bf16().tensor(2).data(2).zero(3),
    trains("gpt_oss", 2).tensor(4).zero(1),
    trains("qwen2_moe", 3).data(2).zero(3).context(2),
    trains("gpt_oss", 2).tensor(2).zero(2).context(2).documents(),
    trains("olmoe", 4).zero(1).pipeline(2),
    trains("gpt_oss", 5).data(2).zero(2).pipeline(2, "zero_bubble"),
    trains("qwen2_moe", 4).bf16().tensor(2).pipeline(2, "interleaved", 2),
};
constexpr MeshCase gpu_pipelines[] = {
    trains("gpt2", 5).zero(1).pipeline(2),
    trains("llama", 4).bf16().zero(1).pipeline(2, "gpipe"),
    trains("llama", 5).data(2).zero(3).pipeline(2),
    trains("gpt2", 6).bf16().zero(1).pipeline(4, "zero_bubble"),
    trains("qwen3", 4).zero(1).pipeline(2, "interleaved", 2),
    trains("gpt2", 3).pipeline(2, "zero_bubble"),
    trains("qwen2", 3).tensor(2).zero(1).pipeline(2),
    trains("mixtral", 4).bf16().data(2).zero(3).pipeline(2, "zero_bubble"),
    trains("mistral", 3).zero(2).context(2).documents().pipeline(2),
};

}  // namespace

TEST_CASE("ranks: choices of gpu pipelines", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const Device device = device_of_rank(world, "cuda");
    constexpr MeshCase c = trains("gpt2", 4).bf16().data(2).zero(1).pipeline(2);
    Config config = config_of(c, static_cast<uint64_t>(random_int(0, 1 << 30)), "cuda");
    config.kernels.autotune = true;
    const auto choose = [&](const Choices& kept) {
        const Decisions decided{.micro_batch = config.batch.micro_batch, .kept = kept};
        Choices chosen;
        MeshRun run(world, device, config,
                    [&](Trainer& trainer) { chosen = choose_kernels(trainer, decided, world); });
        const std::string here = kernel_choices(run.trainer().stream);
        for (const std::string& there : world.all_gather(here)) CHECK(there == here);
        CHECK(chosen.kernels == here);
        CHECK(std::isfinite(run.step().sums.loss));
        // A step plans nothing that the warm-up did not.
        CHECK(kernel_choices(run.trainer().stream) == here);
        // Only the last stage of the pipeline has these logits.
        CHECK(contains(here, concat(" ", run.spec().padded_vocab(), " ")));
        return chosen;
    };
    const Choices chosen = choose({});
    CHECK(choose(chosen).kernels == chosen.kernels);
}

TEST_CASE("ranks: gpu meshes", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    check_meshes(device_of_rank(world, "cuda"), world, gpu_meshes);
}

TEST_CASE("ranks: gpu mixtures", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    check_meshes(device_of_rank(world, "cuda"), world, gpu_mixtures);
}

TEST_CASE("ranks: gpu pipelines", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    check_meshes(device_of_rank(world, "cuda"), world, gpu_pipelines);
}

TEST_CASE("ranks: reordered gpu pipelines", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    check_meshes(device_of_rank(world, "cuda"), world, reordered_pipelines);
}

namespace {

/// Streams run in a random order, and collectives hold so many multiprocessors of a GPU that those
/// of a mesh's groups do not all run at the same time unless each has its share. NCCL's own order,
/// with which the simulator runs one after the other, is off.
void check_on_gpus(const std::string& name, int multiprocessors, bool one_queue = false,
                   bool races = false) {
    check_case_on_ranks(4, name,
                        {{"GPUSIM_STREAMS", "lazy"},
                         {"GPUSIM_RACECHECK", races ? "1" : "0"},
                         {"GPUSIM_SEED", std::to_string(random_int(1, 1000))},
                         {"GPUSIM_SMS", std::to_string(multiprocessors)},
                         {"GPUSIM_QUEUES", one_queue ? "1" : "0"},
                         {"NCCL_LAUNCH_ORDER_IMPLICIT", "0"},
                         {"GPUSIM_NCCL_PROGRESS_MS", "300"}});
}

}  // namespace

TEST_CASE(
    "all ranks of a pipeline run each product as the first rank that has it chose, also later",
    "[mesh][pipeline][training][cuda]") {
    if (skip_without_gpus(4)) return;
    check_on_gpus("ranks: choices of gpu pipelines", 30);
}

TEST_CASE("meshes of GPUs train what one GPU trains, whatever order their streams run in",
          "[mesh][training][cuda]") {
    if (skip_without_gpus(4)) return;
    check_on_gpus("ranks: gpu meshes", 60, random_int(0, 1) == 1);
}

TEST_CASE("mixtures train on meshes of GPUs what one GPU trains, without races",
          "[mesh][pipeline][training][cuda][.][long]") {
    if (skip_without_gpus(4)) return;
    check_on_gpus("ranks: gpu mixtures", 60, random_int(0, 1) == 1, true);
}

TEST_CASE("pipelines of GPUs train what one GPU trains, whatever order their streams run in",
          "[mesh][pipeline][training][cuda]") {
    if (skip_without_gpus(4)) return;
    check_on_gpus("ranks: gpu pipelines", 30);
}

TEST_CASE("pipelines of GPUs with gradients in turns train what one GPU trains",
          "[mesh][pipeline][training][cuda]") {
    if (skip_without_gpus(4)) return;
    check_on_gpus("ranks: reordered gpu pipelines", 30);
}

#endif
