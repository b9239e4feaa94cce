#include "training/decisions.h"

#include <filesystem>
#include <string>

#include "base/error.h"
#include "device/memory.h"
#include "kernels/choices.h"
#include "parallel/first_collectives.h"
#include "parallel/together.h"
#include "training/files/checkpoint.h"
#include "training/plan/plan.h"

namespace train_gpt {

Choices kept_choices(const std::filesystem::path& run_dir) {
    for (const auto& checkpoint : list_checkpoints(run_dir)) {
        try {
            verify_checkpoint(checkpoint, Verify::choices);
            return read_choices(checkpoint);
        } catch (const Error&) {
            // resume() reports what is wrong with it and uses the previous checkpoint.
        }
    }
    return {};
}

uint64_t memory_for_a_rank(const Device& device, int local_ranks) {
    return memory_available(device) / static_cast<uint64_t>(device.is_cuda() ? 1 : local_ranks);
}

namespace {

void first_collectives(const RunShape& shape, const Device& device, const Mesh& mesh) {
    const RankRegistry registry = registry_of_rank(shape, mesh.rank());
    const Sharding sharding = sharding_of(shape, mesh.rank());
    Activity& activity = mesh.world().activity();
    activity.phase = "connecting";
    do_first_collectives(mesh, device,
                         BucketLayout(registry.parameters, sharding.size, sharding.bucket_elements),
                         sharding, shape.dtype, sums_of_step(shape));
    activity.phase = "start";
}

}  // namespace

Decisions decide(const Config& config, const DecoderSpec& spec, const Device& device,
                 const Mesh& mesh) {
    const World& world = mesh.world();
    Decisions decided;
    const std::string dtype = first_for_all(world, [&]() -> std::string {
        return name_of(resolve_dtype(config.precision.dtype, device));
    });
    decided.dtype = dtype == name_of(DType::bf16) ? DType::bf16 : DType::fp32;
    decided.kept = choices_from_json(
        first_for_all(world, [&] { return to_json(kept_choices(config.run_dir)); }));
    const RunShape shape(config, spec, decided.dtype, Recompute::none, world.size());
    first_for_all(world, [&]() -> std::string {
        registry_of_rank(shape, 0);  // an Error where it cannot be split
        return "";
    });
    first_collectives(shape, device, mesh);
    const uint64_t available = memory_for_a_rank(device, world.local_size());
    const Choices chosen = choices_from_json(first_for_all(
        world, [&] { return to_json(choose_by_memory(decided.kept, available, shape, device)); }));
    decided.micro_batch = chosen.micro_batch;
    decided.recompute = recompute_from(chosen.recompute);
    return decided;
}

Choices choose_kernels(Trainer& trainer, const Decisions& decided, const World& world) {
    Stream& stream = trainer.stream;
    const bool is_first = world.rank() == 0, is_cuda = stream.device.is_cuda();
    Choices choices = choices_from_json(first_for_all(world, [&] {
        const std::string platform = kernel_platform(stream);
        if (decided.kept.platform == platform) set_kernel_choices(stream, decided.kept.kernels);
        if (is_cuda) trainer.warm_up();
        return to_json(Choices{.micro_batch = decided.micro_batch,
                               .recompute = name_of(decided.recompute),
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

}  // namespace train_gpt
