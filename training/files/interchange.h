// The commands `import` and `export`: models from and to Hugging Face's folders and llm.c's files.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "training/files/stored_model.h"
#include "training/files/upcycle.h"

namespace train_gpt {

struct ImportOptions {
    std::string source;     // a model folder, or a model file of llm.c
    std::string out;        // a folder that does not exist or is empty
    std::string tokenizer;  // for Tokenizer::load; empty: the source's tokenizer
    Upcycling upcycling = {};
};

struct ExportOptions {
    enum class Format { hugging_face, llmc };

    std::string checkpoint;  // a checkpoint, a run's folder, or a model folder
    std::string out;         // a new or empty folder; for llm.c a new file
    Format format = Format::hugging_face;
    std::optional<StoredType> dtype;  // nothing: as in the checkpoint
    uint64_t max_file_bytes = 5'000'000'000;
};

/// Makes a model folder (model_folder.h) from any source without changing its numbers, or a mixture
/// of experts from a dense model (upcycle.h). Returns a sentence that says what was done. Throws
/// Error, and leaves nothing, if the source cannot be used or the folder cannot be written.
std::string import_model(const ImportOptions& options);

/// Makes a model folder or a file of llm.c from a checkpoint, in the given dtype and format. If a
/// bf16 checkpoint still has the fp32 masters, weights in fp32 and fp16 are made from the masters.
std::string export_model(const ExportOptions& options);

}  // namespace train_gpt
