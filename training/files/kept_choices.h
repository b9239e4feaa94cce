// What a run chose for its machine, by measuring or by what fits. The choices are kept in its
// folder and in each checkpoint and used again when it resumes, so that it has the same bits.
#pragma once
#include <filesystem>
#include <string>

namespace train_gpt {

struct Choices {
    int micro_batch = 0;  // sequences, also where batch.micro_batch gives them; 0: not chosen yet
    std::string recompute = {};  // the level that `auto` stands for; empty: not chosen yet
    std::string platform = {};   // kernel_platform() where the kernels were chosen
    std::string kernels = {};    // kernel_choices()
};

std::string to_json(const Choices& choices);
/// Throws Error that names the text's origin if it is damaged.
Choices choices_from_json(const std::string& text,
                          const std::string& origin = "the first rank's choices");

/// FOLDER/choices.json. Reading returns empty choices if the file does not exist, and throws Error
/// if it is damaged.
Choices read_choices(const std::filesystem::path& folder);
void write_choices(const std::filesystem::path& folder, const Choices& choices);

}  // namespace train_gpt
