// The optimizer's state in a checkpoint: fp32 masters and the optimizer's slots. Each rank writes a
// file for the tensors and parts of tensors that it updates. Any number of ranks, along any axes,
// can read the files.
//
// A file has tensors "master/KEY", and "SLOT/KEY" for each slot ("m/KEY", "v/KEY"). They hold
// elements of a logical, unpadded tensor in this project's layout. KEY, and "range/KEY" in the
// file's metadata, say which elements:
//
//   elements                        KEY                               "range/KEY"
//   the whole tensor                NAME                              first-end
//   a part of it                    NAME[first:end]                   first-end
//   equal runs at equal distances   NAME[first:end,count,distance]    first-end,count,distance
//
// Slots are F32, BF16, or U8: codes (kernels/dynamic_map.h), as "coding/SLOT" says: signs or roots
// (√v). "SLOT.scale/NAME" has the scales of all elements of a tensor that the file has, in the
// file's order, one for each 256. "place/KEY" is the number of such elements before KEY's.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/state/parameters.h"
#include "parallel/state/state_copy.h"
#include "training/files/safetensors.h"

namespace train_gpt {

bool is_optimizer_file(const std::string& name);

/// Writes the elements that this rank updates, from a copy of them if there is one. If several
/// tensor-parallel ranks hold a whole tensor, the first of them writes it. If two pipeline ranks
/// hold an embedding, the first of them writes it.
void write_optimizer_file(const std::filesystem::path& path, const ParameterStore& parameters,
                          const StateCopy* copy, const std::function<void()>& pulse);

/// `count` runs of n elements of a tensor. The first run begins at `first`, and each other run
/// begins `distance` elements after the run before it.
struct ElementRuns {
    int64_t first = 0, n = 0, count = 1, distance = 0;

    int64_t numel() const { return n * count; }
    Range run(int64_t i) const { return {first + i * distance, n}; }
    bool operator==(const ElementRuns&) const = default;
};

/// The fewest ElementRuns that hold the elements of ascending runs, in the order of the runs.
std::vector<ElementRuns> joined(std::span<const HeldRun> runs);

/// Elements of one tensor in one of the files.
struct SavedElements {
    const SafetensorsFile* file;
    std::string key;
    ElementRuns runs;
    int64_t place = 0;  // where there are codes: elements of the tensor before these in the file

    /// Reads elements of a saved state, from number `first` on in the file's order, as the values
    /// of a slot with this coding, whatever dtype the file has: of `roots` the square roots.
    void read(const OptimizerSlot& state, int64_t first, std::span<float> values) const;

  private:
    void read_codes(const OptimizerSlot& state, const TensorInfo& info, Coding coding,
                    int64_t first, std::span<float> values) const;
};

/// A checkpoint's optimizer files.
class OptimizerFiles {
  public:
    /// `parameters` are all parameters of the model. Throws Error unless the files hold every
    /// element of every parameter exactly once. Does not throw if there are no optimizer files.
    OptimizerFiles(const std::filesystem::path& checkpoint,
                   const std::vector<Parameter>& parameters);

    bool empty() const { return files_.empty(); }
    /// Loads masters and slots into a store, for the elements that the store holds itself.
    void load(ParameterStore& parameters, const std::function<void()>& pulse) const;
    /// Reads the masters of parameter i, from element `first` on.
    void read_masters(int i, int64_t first, std::span<float> values) const;

  private:
    void open(const std::filesystem::path& path, const std::vector<Parameter>& parameters);

    std::vector<std::unique_ptr<SafetensorsFile>> files_;
    std::map<std::string, size_t> index_;            // the parameters' indices, by name
    std::vector<std::vector<SavedElements>> saved_;  // for each parameter
};

}  // namespace train_gpt
