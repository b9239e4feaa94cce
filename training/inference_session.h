// A trained model opened for `sample`, `look` and `eval`: its weights, tokenizer and memory.
#pragma once
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/generator.h"
#include "model/stage.h"
#include "tokenizer/tokenizer.h"
#include "training/evaluation.h"
#include "training/files/stored_model.h"

namespace train_gpt {

class InferenceSession {
  public:
    enum class For { sampling, looking, evaluation, tasks, evaluation_and_tasks };

    /// path: a checkpoint, a run's folder, or a Hugging Face model folder. dtype: "fp32", "bf16" or
    /// "auto". "auto" takes the dtype of the files, in which a run writes its own dtype. If the
    /// files hold fp16 or several dtypes, "auto" takes fp32, which is exact. Throws Error if the
    /// model, the device or the dtype cannot be used.
    InferenceSession(const std::string& path, const std::string& device, const std::string& dtype,
                     For use);

    /// The checkpoint's folder.
    const std::filesystem::path& path() const { return path_; }
    const DecoderSpec& spec() const { return spec_; }
    /// The length with which the run trained that wrote the checkpoint; the model's context if no
    /// run wrote it.
    int sequence_length() const { return sequence_length_; }
    Stream& stream() { return stream_; }
    Generator& generator() { return *generator_; }           // not For::evaluation
    Stage& model() { return *model_; }                       // For::evaluation[_and_tasks]
    const EvaluationBatch& batch() const { return batch_; }  // For::evaluation[_and_tasks]
    /// The memory that the session takes.
    size_t bytes() const { return arena_->total_bytes(); }
    /// The dtype in which the session computes, and the dtype of the files if that is another one:
    /// "in fp32 from weights in fp16".
    std::string described_dtype() const;
    /// The tokens that end a text, from the folder's files.
    const std::vector<int64_t>& ends() const { return ends_; }
    /// Throws Error if the folder has no tokenizer.
    const Tokenizer& tokenizer() const;
    const Tokenizer* tokenizer_or_null() const { return tokenizer_ ? &*tokenizer_ : nullptr; }
    /// data.val of the run that wrote the checkpoint, or empty.
    const std::string& validation_data() const { return validation_data_; }

  private:
    void build(Arena& arena, For use);

    std::filesystem::path path_;
    DecoderSpec spec_;
    StoredType stored_ = StoredType::fp32;
    DType dtype_ = DType::fp32;
    std::vector<int64_t> ends_;
    int sequence_length_ = 0;
    bool document_mask_ = false;
    std::string validation_data_;
    std::optional<Tokenizer> tokenizer_;
    std::unique_ptr<Arena> arena_;
    Stream stream_;
    std::unique_ptr<ParameterStore> parameters_;
    std::unique_ptr<Stage> model_;
    std::unique_ptr<Generator> generator_;
    EvaluationBatch batch_;
};

}  // namespace train_gpt
