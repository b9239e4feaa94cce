#include "training/resume.h"

#include <algorithm>
#include <filesystem>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/json_text.h"
#include "parallel/together.h"
#include "training/complete_run.h"
#include "training/config/config_text.h"
#include "training/files/checkpoint.h"
#include "training/files/decay_start.h"
#include "training/files/fp8_file.h"
#include "training/files/grids_file.h"
#include "training/files/model_folder.h"
#include "training/files/routers_file.h"
#include "training/files/same_model.h"
#include "training/files/spikes_file.h"
#include "training/files/upcycle.h"
#include "training/schedule.h"

namespace train_gpt {

namespace {

/// Whether the tokenizer of a model folder maps the ids to the same bytes as the run's; true if
/// either has none.
bool same_tokens(const std::filesystem::path& folder, const Tokenizer* tokenizer) {
    const auto theirs = read_folder_tokenizer(folder);
    return !theirs || !tokenizer || tokenizer->has_tokens_of(*theirs);
}

/// Throws Error if the run cannot continue from a checkpoint because it has another model,
/// tokenizer or optimizer.
void require_continuable(const std::filesystem::path& checkpoint, const Config& config,
                         const RunData& data) {
    require_same_model(checkpoint, read_model_spec(checkpoint), data.spec());
    if (!same_tokens(checkpoint, data.tokenizer()))
        throw Error("the tokenizer ", config.tokenizer.path,
                    " has different tokens from the one in ", checkpoint.string(),
                    "; change tokenizer.path back, or start afresh with "
                    "another run_dir");
    const Config before = checkpoint_config(checkpoint);
    if (!(before.optimizer.name == config.optimizer.name))
        throw Error(checkpoint.string(), " has the state of the optimizer ",
                    before.optimizer.name.word(), ", and optimizer.name is ",
                    config.optimizer.name.word(),
                    "; change it back, or start another run_dir from these weights with "
                    "model.init_from");
}

/// The same; prints what else has changed.
void compare_with(const std::filesystem::path& checkpoint, const Config& config,
                  const RunData& data, Progress& progress) {
    require_continuable(checkpoint, config, data);
    Config before = checkpoint_config(checkpoint);
    // "auto" is what the run did before, or another line says what has changed.
    if (config.parallel.sums.is_auto()) before.parallel.sums = config.parallel.sums;
    for (const std::string& change : config_differences(before, config))
        progress.say("note: since this checkpoint " + change);
    if (!(before.optimizer.state_dtype == config.optimizer.state_dtype))
        progress.say(concat("note: the optimizer's state of the checkpoint is converted to ",
                            config.optimizer.state_dtype.word()));
}

/// The note for a run that resumes with changed training data in the same order, or with changed
/// validation data.
std::string note_on_changed(const std::string& data) {
    return concat("note: ", data, " has changed since this run was last started; ",
                  data == "data.train"
                      ? "its order continues, since its shards begin and end as when this "
                        "checkpoint was written, with the same sizes"
                      : "validation losses before and after this step cannot be compared");
}

/// The changes to the order of training data since a checkpoint; empty if there are none.
std::string changed_order(const DataOrder& before, const DataOrder& now, const Config& config) {
    const auto has_changed = [&] {
        if (!before.sources.empty()) return !before.has_sources_of(now);
        const std::vector<std::string> changed = changed_data(config.run_dir, config);
        return std::ranges::find(changed, "data.train") != changed.end();
    };
    std::string what;
    const auto add = [&](const char* name) { what += concat(what.empty() ? "" : ", ", name); };
    if (has_changed()) add("data.train");
    if (before.seed != now.seed) add("seed");
    if (before.T != now.T) add("the sequence length");
    return what;
}

/// Where a run with this configuration continues after a checkpoint.
struct Continuation {
    RunPosition position;
    std::string changed;  // what makes the order of training data begin anew; empty: it continues
};

/// The same if the order of training data continues.
RunPosition continued(const std::filesystem::path& checkpoint, const Config& config) {
    RunPosition position = checkpoint_position(checkpoint);
    plan_steps(position.tokens, position.step, config);
    return position;
}

Continuation continue_after(const std::filesystem::path& checkpoint, const Config& config,
                            const RunData& data) {
    RunPosition at = continued(checkpoint, config);
    const DataOrder& now = data.use().order();
    std::string changed = changed_order(at.order, now, config);
    if (changed.empty()) {
        at.order.sources = now.sources;
        return {std::move(at), ""};
    }
    // Older versions did not record the contents; they are known if only the seed has changed.
    const bool has_other_data = changed.find("data.train") != std::string::npos;
    if (at.order.sources.empty() && !has_other_data) at.order.sources = now.sources;
    DataOrder next = now;
    next.first_token = at.tokens.before(at.step);
    next.tokens_before = at.order.tokens_before;
    if (!at.order.sources.empty()) {
        const std::vector<int64_t> given = at.order.tokens_of_sources(next.first_token);
        for (size_t s = 0; s < given.size(); ++s)
            next.tokens_before[at.order.sources[s].content] += given[s];
    }
    at.order = std::move(next);
    return {std::move(at), std::move(changed)};
}

/// The note for a run whose earlier, or given, choices do not suit this machine and its number of
/// ranks; empty if they do.
std::string note_on_choices(const Config& config, const Choices& kept, const Choices& chosen) {
    if (kept.micro_batch == 0) return "";
    const bool other_batch =
        config.batch.micro_batch == 0 && chosen.micro_batch != kept.micro_batch;
    const bool other_level =
        config.memory.recompute.is_auto() && chosen.recompute != kept.recompute;
    const bool other_sums = config.parallel.sums.is_auto() && kept.sums && chosen.sums != kept.sums;
    const bool other_stage = !config.parallel.zero && kept.zero && chosen.zero != kept.zero;
    if (!other_batch && !other_level && !other_stage && !other_sums) return "";
    const auto stage = [&](const char* before, const Choices& choices) {
        return other_stage ? concat(before, *choices.zero) : "";
    };
    const auto sums = [&](const char* before, const Choices& choices) {
        return other_sums ? concat(before, OneOf<std::optional<GradientSums>>(choices.sums).word())
                          : "";
    };
    return concat("note: the run had chosen batch.micro_batch=", kept.micro_batch,
                  " and memory.recompute=", kept.recompute, stage(" and parallel.zero=", kept),
                  sums(" and parallel.sums=", kept), ", which is not possible here; it now uses ",
                  chosen.micro_batch, " and ", chosen.recompute, stage(" and ", chosen),
                  sums(" and ", chosen),
                  "; the samples stay the same, but their gradients are added in another order");
}

/// The note for a run whose kernels were chosen on another platform; empty if none were.
std::string note_on_kernels(const Choices& kept, const Choices& chosen) {
    if (kept.kernels.empty() || chosen.platform.empty() || kept.platform == chosen.platform)
        return "";
    return concat("note: the run's kernels had been chosen on ",
                  kept.platform.empty() ? "a GPU that is not recorded" : kept.platform,
                  "; they are chosen anew on ", chosen.platform,
                  ", so its results may differ in the last bits");
}

/// The note for a run that resumes with operands in fp8 of which its checkpoint has no magnitudes.
std::string note_on_fp8(const std::vector<std::string>& operands) {
    const size_t others = operands.size() - 1;
    return concat("note: the checkpoint has no magnitudes in fp8 of the ", operands.front(),
                  others == 0   ? ""
                  : others == 1 ? concat(" and of the ", operands[1])
                                : concat(" and of ", others, " other operands"),
                  "; delayed scaling begins anew for ", others == 0 ? "it" : "them");
}

/// The note for a run whose ranks had another number of threads, where that changes bits.
std::string note_on_threads(const Choices& kept, const Choices& chosen) {
    if (kept.threads == 0 || chosen.threads == 0 || kept.threads == chosen.threads) return "";
    return concat(
        "note: a rank had ", kept.threads, kept.threads == 1 ? " thread" : " threads", " and has ",
        chosen.threads,
        " now, so the run's results may differ in the last bits; with kernels.gemm=own they "
        "do not depend on threads");
}

/// Sets the weights to the weights of the model that model.init_from names.
void start_from(const Config& config, const RunData& data, ParameterStore& parameters,
                const World& world, Progress& progress) {
    const auto source =
        find_whole_checkpoint(config.model.init_from, [&] { world.activity().pulse(); });
    StoredModel model = open_model_folder(source);
    if (model.spec.experts && data.spec().experts.selection_bias &&
        !model.spec.experts.selection_bias)
        model = with_selection_biases(std::move(model));  // router.balance = bias begins with 0
    require_same_model(source, model.spec, data.spec());
    model.read = [&, read = std::move(model.read)](const Parameter& p, int64_t first,
                                                   std::span<float> values) {
        world.activity().pulse();
        read(p, first, values);
    };
    load_weights(model, parameters);
    progress.say("starting from the weights of " + source.string());
    if (!same_tokens(source, data.tokenizer()))
        progress.warn("the tokenizer " + config.tokenizer.path +
                      " has different tokens from the one of these weights");
}

}  // namespace

std::string describe_if_complete(const Config& config, const RunData& data, const World& world,
                                 Progress& progress) {
    return first_for_all(world, [&]() -> std::string {
        TokenCount tokens = start_of(config, data).tokens;
        const auto checkpoints = list_checkpoints(config.run_dir);
        try {
            if (!checkpoints.empty()) tokens = continued(checkpoints.front(), config).tokens;
        } catch (const Error&) {  // resuming from it reports what is wrong with it
            return "";
        }
        const int64_t steps = total_steps(config, data.use().epoch_tokens(), tokens);
        const auto done = find_complete_run(config, steps, [&] { world.activity().pulse(); });
        if (!done) return "";
        compare_with(done->checkpoint, config, data, progress);
        return describe(*done, config, steps);
    });
}

void begin_decay(const Config& config, const RunData& data, const World& world) {
    first_for_all(world, [&] {
        if (const auto checkpoint = decay_start_to_copy(config))
            require_continuable(*checkpoint, config, data);
        copy_decay_start(config, [&] { world.activity().pulse(); });
        return "";
    });
}

RunPosition start_of(const Config& config, const RunData& data) {
    TokenCount tokens(config.batch.tokens_per_step);
    plan_steps(tokens, 0, config);
    return {.step = 0, .tokens = std::move(tokens), .order = data.use().order()};
}

std::optional<RunPosition> resume(const Config& config, const RunData& data, Trainer& trainer,
                                  const World& world, Progress& progress) {
    const auto pulse = [&] { world.activity().pulse(); };
    const std::filesystem::path checkpoint = first_for_all(world, [&]() -> std::string {
        const auto found = recover_newest_checkpoint(
            config.run_dir, [&](const std::string& text) { progress.warn(text); }, pulse);
        if (!found) return "";
        compare_with(*found, config, data, progress);
        return found->string();
    });
    if (checkpoint.empty()) return {};
    std::vector<std::string> new_in_fp8;
    together(world, [&] {
        load_training_state(checkpoint, trainer.parameters, pulse);
        trainer.optimizer.set_spike_history(read_spikes(checkpoint));
        const size_t counts = trainer.routers.last_counts().size();
        if (counts > 0) trainer.routers.set_last_counts(read_routers(checkpoint, counts));
        if (Grids* grids = trainer.parameters.grids())
            read_grids(checkpoint, trainer.stream, *grids);
        new_in_fp8 = read_fp8(checkpoint, trainer.fp8);
        return "";
    });
    trainer.parameters.weights.gather_all(trainer.stream);
    Continuation next;
    together(world, [&] {
        next = continue_after(checkpoint, config, data);
        return "";
    });
    const int64_t tokens = next.position.tokens.before(next.position.step);
    progress.say(concat("resuming from ", checkpoint.string(), ", after ", tokens, " tokens"));
    if (!new_in_fp8.empty()) progress.say(note_on_fp8(new_in_fp8));
    if (!next.changed.empty())
        progress.say(concat("note: ", next.changed,
                            next.changed.find(',') == std::string::npos ? " has" : " have",
                            " changed since this checkpoint; a new permutation of the training "
                            "data begins here, in which each sample comes once before any comes "
                            "again"));
    return next.position;
}

void initialize_weights(const Config& config, const RunData& data, Trainer& trainer,
                        const World& world, Progress& progress) {
    ParameterStore& parameters = trainer.parameters;
    parameters.state.initialize(config.seed);
    if (!config.model.init_from.empty()) start_from(config, data, parameters, world, progress);
    if (!parameters.holds_all_weights()) parameters.weights.gather_all(trainer.stream);
}

TokenIds run_token_ids(const Config& config, const RunData& data, std::optional<int64_t> resumed,
                       const World& world) {
    const auto read = [&]() -> TokenIds {
        const Tokenizer* tokenizer = data.tokenizer();
        if (!resumed && config.model.init_from.empty()) return token_ids_of(tokenizer);
        const auto source = find_checkpoint(resumed ? config.run_dir : config.model.init_from);
        const TokenIds ids = read_token_ids(source);
        if (!tokenizer) return ids;
        const auto theirs = read_folder_tokenizer(source);
        return adapt_token_ids(ids, theirs ? &*theirs : nullptr, *tokenizer);
    };
    const Json both = parse_json(first_for_all(world, [&] {
        const TokenIds ids = read();
        return to_text(Json::array({ids.config, ids.generation}));
    }));
    return {.config = both[0], .generation = both[1]};
}

void record_start(const RunFolder& folder, const RunStart& start, Progress& progress) {
    const bool order_continues =
        start.schedule.start().order.first_token < start.schedule.tokens_before(start.first_step());
    for (const std::string& data : folder.describe(start.recorded(), start.attention))
        if (start.resumes && (data != "data.train" || order_continues))
            progress.say(note_on_changed(data));
    for (const std::string& note :
         {note_on_choices(start.given, start.kept, start.choices),
          note_on_kernels(start.kept, start.choices), note_on_threads(start.kept, start.choices)})
        if (!note.empty()) progress.say(note);
    write_choices(folder.path(), start.choices);
}

}  // namespace train_gpt
