#include "training/decisions.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <omp.h>

#include "base/error.h"
#include "device/architecture.h"
#include "kernels/choices.h"
#include "kernels/linear/linear.h"
#include "parallel/first_collectives.h"
#include "parallel/link_speed.h"
#include "parallel/state/bucket_layout.h"
#include "parallel/state/gradient_sums.h"
#include "parallel/together.h"
#include "training/config/micro_batches.h"
#include "training/files/checkpoint.h"
#include "training/files/decay_start.h"
#include "training/plan/fit.h"
#include "training/plan/memory_advice.h"
#include "training/plan/peak.h"

namespace train_gpt {

Choices kept_choices(const Config& config) {
    std::vector<std::filesystem::path> checkpoints = list_checkpoints(config.run_dir);
    if (const auto start = decay_start_to_copy(config)) checkpoints = {*start};
    for (const auto& checkpoint : checkpoints) {
        try {
            verify_checkpoint(checkpoint, Verify::choices);
            Choices kept = read_choices(checkpoint);
            const std::optional<GradientSums> configured =
                checkpoint_config(checkpoint).parallel.sums;
            // Earlier versions kept no such choice, and chose none.
            if (!kept.sums) kept.sums = configured.value_or(GradientSums::fp32);
            return kept;
        } catch (const Error&) {
            // resume() reports what is wrong with it and uses the previous checkpoint.
        }
    }
    return {};
}

Config with_kept_sums(Config config, const Choices& kept) {
    if (!config.parallel.sums.is_auto() || !kept.sums) return config;
    Config with = config;
    if (with.batch.micro_batch == 0) with.batch.micro_batch = kept.micro_batch;
    if (kept.sums != GradientSums::exact || sums_of(with) == GradientSums::exact)
        config.parallel.sums = kept.sums;
    return config;
}

namespace {

std::vector<int> micro_batches_of(const RunShape& shape, const Device& device) {
    return possible_micro_batches(shape.config, device, shape.mesh.size(Axis::data));
}

void first_collectives(const RunShape& shape, const Device& device, const Mesh& mesh) {
    Activity& activity = mesh.world().activity();
    activity.phase = "connecting";
    const StepSizes sizes = sizes_of_step(shape, device, micro_batches_of(shape, device));
    std::vector<int> stages = {1, 2};  // stage 3 exchanges as stage 2 does
    if (const std::optional<int> given = shape.config.parallel.zero) stages = {*given};
    for (const int stage : stages) {
        const RunShape with_stage = shape.with_zero(stage);
        do_first_collectives(mesh, device, registry_of_rank(with_stage, mesh.rank()).parameters,
                             sharding_of(with_stage, mesh.rank()), sizes);
    }
    activity.phase = "start";
}

double measured_link(const RunShape& shape, const Device& device, const Mesh& mesh) {
    // As in first_collectives(): another size might take memory.
    const RunShape with_stage = shape.with_zero(1);
    const Sharding sharding = sharding_of(with_stage, mesh.rank());
    const BucketLayout layout(registry_of_rank(with_stage, mesh.rank()).parameters, sharding.size,
                              sharding.bucket_elements);
    int64_t shard = 0;
    for (const Bucket& bucket : layout.buckets()) shard = std::max(shard, bucket.shard);
    shard = std::min(shard, largest_first_bytes / (sharding.size * int64_t{sizeof(float)}));
    return measure_link(group_of(SumOver::shards, mesh, sharding), device, shard, shape.dtype);
}

}  // namespace

Decisions decide(const Config& config, const DecoderSpec& spec, const Device& device,
                 const Mesh& mesh, const std::string& choices_of) {
    const World& world = mesh.world();
    together(world, [&]() -> std::string {
        const bool is_here = device.is_cuda() && device.planned_architecture == 0;
        if (const std::string problem = fp8_problem(
                config, is_here ? device_name(device) : "the GPU", architecture(device));
            !problem.empty())
            throw Error(problem);
        return "";
    });
    Decisions decided;
    const std::string dtype = first_for_all(world, [&]() -> std::string {
        return name_of(resolve_dtype(config.precision.dtype, device));
    });
    decided.dtype = resolve_dtype(dtype, device);
    decided.kept = choices_from_json(first_for_all(world, [&] {
        return to_json(choices_of.empty() ? kept_choices(config) : given_choices(choices_of));
    }));
    const RunShape shape(with_kept_sums(config, decided.kept), spec, decided.dtype, Recompute::none,
                         world.size());
    decided.sums = sums_of(shape.config);
    first_for_all(world, [&]() -> std::string {
        // An Error where the model cannot be split, or a step feeds too few ranks.
        registry_of_rank(shape, 0);
        micro_batches_of(shape, device);
        return "";
    });
    first_collectives(shape, device, mesh);
    const auto available = [&] {
        return memory_for_a_rank(device, mesh.layout(), world.local_size());
    };
    const Choices usable = choices_from_json(first_for_all(
        world, [&] { return to_json(usable_choices(decided.kept, available(), shape, device)); }));
    const RunShape open = with_kept(shape, usable);
    Speeds speeds;
    if (weighs_link(open)) speeds.link = measured_link(shape, device, mesh);
    speeds = measured_here(speeds, available(), open, device);
    decided.link = speeds.link;
    decided.peak_flops = speeds.flops;
    decided.host_link = speeds.host;
    const Choices chosen = choices_from_json(first_for_all(world, [&] {
        return to_json(choose_by_memory(usable, available(), shape, device, speeds));
    }));
    decided.micro_batch = chosen.micro_batch;
    decided.recompute = recompute_from(chosen.recompute);
    decided.zero = chosen.zero.value();
    const auto offloads = [&](const char* word) {
        return std::ranges::find(chosen.offload, word) != chosen.offload.end();
    };
    decided.offload = {.optimizer = offloads("optimizer"), .activations = offloads("activations")};
    const std::string saves = first_for_all(world, [&]() -> std::string {
        Config chosen_config = shape.config;
        chosen_config.batch.micro_batch = decided.micro_batch;
        chosen_config.parallel.zero = decided.zero;
        const RunShape with =
            RunShape(chosen_config, spec, decided.dtype, decided.recompute, world.size())
                .with_offload(decided.offload);
        return saves_in_background(with, device, available()) ? "yes" : "";
    });
    decided.saves_in_background = !saves.empty();
    return decided;
}

Choices choose_kernels(Trainer& trainer, const Decisions& decided, const World& world) {
    Stream& stream = trainer.stream;
    const bool is_first = world.rank() == 0, is_cuda = stream.device.is_cuda();
    Choices choices = choices_from_json(first_for_all(world, [&] {
        const std::string platform = kernel_platform(stream);
        if (decided.kept.platform == platform) set_kernel_choices(stream, decided.kept.kernels);
        if (is_cuda) trainer.warm_up();
        return to_json(
            Choices{.micro_batch = decided.micro_batch,
                    .recompute = name_of(decided.recompute),
                    .zero = decided.zero,
                    .sums = decided.sums,
                    .offload = is_cuda ? words_of(decided.offload) : std::vector<std::string>(),
                    .threads = products_depend_on_threads(stream) ? omp_get_max_threads() : 0,
                    .platform = platform,
                    .kernels = kernel_choices(stream)});
    }));
    if (!is_cuda) return choices;
    // Later stages of a pipeline have shapes that the first rank lacks, such as the head's. Ranks
    // with the same stage may time them differently.
    const std::vector<std::string> of_ranks = together(world, [&] {
        if (!is_first) {
            set_kernel_choices(stream, choices.kernels);
            trainer.warm_up();
        }
        return kernel_choices(stream);
    });
    together(world, [&] {
        if (unite_kernel_choices(stream, of_ranks)) trainer.warm_up();
        return std::string();
    });
    choices.kernels = kernel_choices(stream);
    return choices;
}

AttentionUse attention_of_ranks(const Stream& stream, const World& world) {
    AttentionUse use = attention_use(stream);
    for (const std::string& differs :
         together(world, [&] { return std::string(use.same_bits ? "" : "differs"); }))
        use.same_bits = use.same_bits && differs.empty();
    return use;
}

void note_fp8_refusals(const Stream& stream, const World& world, Progress& progress) {
    std::set<std::string> all;
    for (const std::string& lines : together(world, [&] {
             std::string text;
             for (const std::string& sentence : fp8_refusals(stream)) text += sentence + "\n";
             return text;
         })) {
        std::istringstream of_rank(lines);
        for (std::string line; std::getline(of_rank, line);) all.insert(line);
    }
    for (const std::string& refusal : all)
        progress.say(concat("note: ", refusal,
                            "; kernels then do not round their results, unless precision.fp8_skip "
                            "names these products"));
}

void require_host_memory_on_ranks(const Arena& plan, const RunShape& shape, const Mesh& mesh) {
    const World& world = mesh.world();
    together(world, [&] {
        require_host_memory(plan, shape,
                            memory_for_a_rank(plan.device(), mesh.layout(), world.local_size()),
                            world.local_size());
        return std::string();
    });
}

}  // namespace train_gpt
