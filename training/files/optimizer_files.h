// The optimizer's state in a checkpoint: fp32 masters and the optimizer's slots, in files that each
// rank writes for what it updates and that any number of ranks, along any axes, can read.
//
//   "master/KEY", and "SLOT/KEY" for each slot ("m/KEY", "v/KEY"): elements of a logical, unpadded tensor in this project's layout.
//   KEY is the tensor's name, or for a part of it NAME[first:end], or for equal runs at equal
//   distances NAME[first:end,count,distance]; metadata "range/KEY" = "first-end", or
//   "first-end,count,distance".
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/activity.h"
#include "parallel/state/parameters.h"
#include "training/files/safetensors.h"

namespace train_gpt {

bool is_optimizer_file(const std::string& name);

/// Writes what this rank updates. Of tensors that tensor-parallel ranks hold whole, the first does, and
/// of an embedding that two pipeline ranks hold the first one.
void write_optimizer_file(const std::filesystem::path& path, const ParameterStore& parameters,
                          Activity& activity);

/// `count` runs of n elements of a tensor; they begin at `first` and then `distance` apart.
struct ElementRuns {
    int64_t first = 0, n = 0, count = 1, distance = 0;

    int64_t numel() const { return n * count; }
    Range run(int64_t i) const { return {first + i * distance, n}; }
    bool operator==(const ElementRuns&) const = default;
};

/// The fewest ElementRuns that hold the elements of ascending runs, in their order.
std::vector<ElementRuns> joined(std::span<const HeldRun> runs);

/// Elements of one tensor in one of the files.
struct SavedElements {
    const SafetensorsFile* file;
    std::string key;
    ElementRuns runs;

    /// Reads n elements of a saved state ("master", …), as they follow each other in the file.
    void read(std::string_view state, int64_t first, std::span<float> values) const;
};

/// A checkpoint's optimizer files.
class OptimizerFiles {
  public:
    /// The parameters are those of the whole model. Throws Error unless the files hold every element
    /// of each exactly once, or there are no such files.
    OptimizerFiles(const std::filesystem::path& checkpoint,
                   const std::vector<Parameter>& parameters);

    bool empty() const { return files_.empty(); }
    /// Loads masters and slots into the parameters of a store that it holds itself.
    void load(ParameterStore& parameters, const std::function<void()>& pulse) const;
    /// Masters first … of parameter i.
    void read_masters(int i, int64_t first, std::span<float> values) const;

  private:
    void open(const std::filesystem::path& path, const std::vector<Parameter>& parameters);

    std::vector<std::unique_ptr<SafetensorsFile>> files_;
    std::map<std::string, size_t> index_;            // of parameters, by name
    std::vector<std::vector<SavedElements>> saved_;  // of each parameter
};

}  // namespace train_gpt
