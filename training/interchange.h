// The commands `import` and `export`: models between this program, Hugging Face's folders and llm.c's files.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "training/stored_model.h"

namespace train_gpt {

struct ImportOptions {
    std::string source;     // the folder of a GPT-2 model, or a model file of llm.c
    std::string out;        // a folder that does not exist or is empty
    std::string tokenizer;  // as Tokenizer::load takes it; empty: the source's
};

struct ExportOptions {
    enum class Format { hugging_face, llmc };

    std::string checkpoint;  // a checkpoint, a run's folder, or the folder of a GPT-2 model
    std::string
        out;  // a folder that does not exist or is empty; for llm.c a file that does not exist
    Format format = Format::hugging_face;
    std::optional<StoredType> dtype;  // nothing: as in the checkpoint
    uint64_t max_file_bytes = 5'000'000'000;
};

/// Makes a model folder (model_folder.h) of any source, its numbers as they were, and returns a sentence on what was done.
/// Throws Error, and leaves nothing behind, when the source cannot be used or the folder cannot be written.
std::string import_model(const ImportOptions& options);

/// The same from a checkpoint, in a dtype and format of choice. Where the checkpoint's weights are bf16, and it has the fp32
/// masters they are the rounding of, fp32 and fp16 are made from those.
std::string export_model(const ExportOptions& options);

}  // namespace train_gpt
