#include "training/inference_session.h"

#include <algorithm>

#include "base/error.h"
#include "model/families/family.h"
#include "training/config/layout.h"
#include "training/evaluations/task_evaluation.h"
#include "training/files/checkpoint.h"
#include "training/look/inside.h"
#include "training/plan/memory_plan.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr int evaluation_batch_size = 8;

}  // namespace

InferenceSession::InferenceSession(const std::string& path, const std::string& device_wanted,
                                   const std::string& dtype_wanted, For use)
    : path_(find_whole_checkpoint(path)) {
    const StoredModel model = open_model_folder(path_);
    spec_ = model.spec;
    stored_ = model.dtype;
    ends_ = ends_of_text(model.tokens);
    sequence_length_ = spec_.n_ctx;
    if (fs::exists(path_ / "train_gpt.json")) {
        const Config config = checkpoint_config(path_);
        sequence_length_ = config.sequence_length();
        document_mask_ = config.data.document_mask;
        validation_data_ = config.data.val;
    }
    tokenizer_ = read_folder_tokenizer(path_);

    const Device device = open_device(device_wanted);
    // Not what the machine computes fastest in: a result depends on the model alone.
    dtype_ = dtype_wanted != "auto"        ? resolve_dtype(dtype_wanted, device)
             : stored_ == StoredType::bf16 ? DType::bf16
                                           : DType::fp32;
    Arena plan = Arena::counting(device);
    build(plan, use);
    arena_ = std::make_unique<Arena>(allocate(plan));
    build(*arena_, use);
    load_weights(model, *parameters_);
}

std::string InferenceSession::described_dtype() const {
    const std::string computed = name_of(dtype_), stored = name_of(stored_);
    return "in " + computed + (stored == computed ? "" : " from weights in " + stored);
}

void InferenceSession::build(Arena& arena, For use) {
    stream_ = Stream(arena.device(), arena.is_counting());
    const Registry registry = registry_of(spec_);
    parameters_ = std::make_unique<ParameterStore>(
        arena, registry.parameters,
        ParameterStoreOptions{.dtype = dtype_, .use = ParameterStore::Use::inference});
    if (use == For::evaluation || use == For::evaluation_and_tasks) {
        const StageOptions options{.B = evaluation_batch_size,
                                   .T = sequence_length_,
                                   .use = ParameterStore::Use::inference,
                                   .document_mask = document_mask_};
        model_ = std::make_unique<Stage>(spec_, registry, options, *parameters_, arena);
        stream_.scratch_bytes = model_->scratch_bytes(stream_);
        batch_ = EvaluationBatch(arena, Pipeline(*model_).batch_shape());
    }
    if (use != For::evaluation)
        generator_ = std::make_unique<Generator>(
            spec_, registry, *parameters_, arena,
            use == For::sampling  ? Generator::Options()
            : use == For::looking ? Generator::Options{.context = most_look_tokens}
                                  : scoring_generator(sequence_length_));
    if (generator_)
        stream_.scratch_bytes = std::max(stream_.scratch_bytes, generator_->scratch_bytes(stream_));
    stream_.scratch = arena.take(stream_.scratch_bytes, Purpose::workspaces);
}

const Tokenizer& InferenceSession::tokenizer() const {
    if (!tokenizer_)
        throw Error(
            path_.string(),
            " has no tokenizer.json; copy the tokenizer the model was trained with into it");
    return *tokenizer_;
}

}  // namespace train_gpt
