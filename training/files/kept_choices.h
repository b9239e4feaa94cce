// What a run chose for its machine: what measured fastest, and what fits into memory. The choices
// are kept in the run's folder and in each checkpoint. A run that resumes uses them again, so that
// it computes the same bits.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "parallel/state/sharding.h"

namespace train_gpt {

struct Choices {
    int micro_batch = 0;  // sequences, even if batch.micro_batch gives them; 0: not chosen yet
    std::string recompute = {};    // the level that `auto` stands for; empty: not chosen yet
    std::optional<int> zero = {};  // of ZeRO, even if parallel.zero gives it; nothing: not chosen
    // What parallel.sums stands for, even if it is given. Nothing: not chosen.
    std::optional<GradientSums> sums = {};
    // The words of memory.offload, even if it gives them, on a GPU. Empty: not chosen. They change
    // no bits.
    std::vector<std::string> offload = {};
    // A rank's threads, where its products depend on them (products_depend_on_threads); else 0.
    int threads = 0;
    std::string platform = {};  // kernel_platform() where the kernels were chosen
    std::string kernels = {};   // kernel_choices()
};

std::string to_json(const Choices& choices);
/// Throws Error, which names `origin`, if the text is damaged.
Choices choices_from_json(const std::string& text,
                          const std::string& origin = "the first rank's choices");

/// Reads FOLDER/choices.json. Returns empty choices if the file does not exist. Throws Error if the
/// file is damaged.
Choices read_choices(const std::filesystem::path& folder);
void write_choices(const std::filesystem::path& folder, const Choices& choices);
/// The choices of a run or a checkpoint that the user names. Throws Error if there are none.
Choices given_choices(const std::filesystem::path& folder);

}  // namespace train_gpt
