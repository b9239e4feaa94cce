#include "training/plan/resolved_here.h"

#include "base/error.h"
#include "training/config/layout.h"
#include "training/config/resolved_config.h"
#include "training/decisions.h"
#include "training/plan/fit.h"
#include "training/plan/plan_target.h"

namespace train_gpt {

ResolvedConfig resolve_here(const Config& given, int ranks, int local_ranks) {
    ResolvedConfig resolved{given, {}};
    Config& config = resolved.config;
    const Device device = open_device(given.device);
    const DType dtype = resolve_dtype(given.precision.dtype, device);
    config.device = device.is_cuda() ? "cuda" : "cpu";
    try {
        const DecoderSpec spec = spec_of(given, vocab_size_of(given));
        config = resolve(config, spec, dtype);
        const Choices kept = kept_choices(given);
        const RunShape shape(with_kept_sums(given, kept), spec, dtype, Recompute::none, ranks);
        const DeviceAndHost available = memory_for_a_rank(device, shape.mesh, local_ranks);
        const Choices usable = usable_choices(kept, available, shape, device);
        const RunShape open = with_kept(shape, usable);
        if (weighs_link(open))
            resolved.notes.emplace_back(
                "parallel.zero is chosen for a link whose speed is assumed; a run measures its "
                "own");
        const Choices chosen = choose_by_memory(usable, available, shape, device,
                                                planned_speeds(device, available, open));
        config.memory.offload = device.is_cuda() ? chosen.offload : words_of({});
        config.batch.micro_batch = chosen.micro_batch;
        config.memory.recompute = recompute_from(chosen.recompute);
        config.parallel.zero = chosen.zero;
        config.parallel.sums = chosen.sums;
    } catch (const Error& error) {
        if (config.model.vocab_size == 0) {
            config = resolve(config, spec_of(given, 1), dtype);
            config.model.vocab_size = 0;
        }
        resolved.notes.push_back(
            concat("not all of the configuration is resolved: ", error.what()));
    }
    return resolved;
}

}  // namespace train_gpt
