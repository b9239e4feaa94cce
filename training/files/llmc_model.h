// llm.c's model files: 256 int32 (magic 20240326, version, maxT, V, L, NH, C, Vp, zeros), then 16
// tensors in the host's byte order, each stacked over the layers: wte [Vp, C], wpe, ln1w, ln1b,
// qkvw, qkvb, attprojw, attprojb, ln2w, ln2b, fcw, fcb, fcprojw, fcprojb, lnfw, lnfb. Linear
// weights are [out, in]; wte has Vp >= V rows. Version 3 is fp32, version 5 bf16. The last 8 int32
// of the header, 0 in llm.c's files, hold the 32 bytes of a hash: the line of the run's history
// (history_chain.h) that the checkpoint's manifest names. 0: there is none.
#pragma once
#include <filesystem>
#include <string>

#include "training/files/stored_model.h"

namespace train_gpt {

/// Opens a file. Throws Error if it is not a model file of llm.c, or if its size is not what its
/// header implies.
StoredModel open_llmc_model(const std::filesystem::path& file);

/// Writes a file in fp32 or bf16. Rows of zeros pad wte to a multiple of 128 rows. history: 64 hex
/// digits; empty: none. Throws Error for fp16.
void write_llmc_model(const std::filesystem::path& file, const StoredModel& model, StoredType dtype,
                      const std::string& history = {});

}  // namespace train_gpt
