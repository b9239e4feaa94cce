// fingerprints.jsonl in a run's folder (log.fingerprint_every): one line a step,
//
//   {"step": 40, "input": "0123456789abcdef",
//    "tensors": {"NAME": {"gradient": "0123456789abcdef", "master": …, "m": …}, …}}
//
// kernels/fingerprint.h has the formula, and training/fingerprints.h what is hashed.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string_view>

#include "base/file.h"
#include "training/files/append_file.h"
#include "training/fingerprints.h"

namespace train_gpt {

class FingerprintLog {
  public:
    /// Prepares the file as keep_step_lines() says. Makes none unless the run writes fingerprints.
    /// writes: whether this rank writes; only one of several ranks does.
    FingerprintLog(const std::filesystem::path& run_dir, std::optional<int64_t> resume_step,
                   bool wanted, bool writes);

    void write(int64_t step, const Fingerprints& of, const Fingerprints::OfStep& taken);

  private:
    std::optional<AppendFile> file_;
};

/// The fingerprints that a run's folder has.
class RecordedFingerprints {
  public:
    explicit RecordedFingerprints(const std::filesystem::path& run_dir);

    /// The line of each step.
    const std::map<int64_t, std::string_view>& lines() const { return lines_; }

  private:
    MappedFile file_;
    std::map<int64_t, std::string_view> lines_;
};

/// Where two steps' fingerprints differ: the first kind in the order in which a step has them (the
/// input, the gradient, the optimizer's slots, the master), its first tensor, and how many other
/// tensors differ in this kind.
struct FingerprintDifference {
    std::string kind, tensor;  // no tensor: the input
    int64_t others = 0;

    /// "m of h.0.ln_1.weight and 3 other tensors"
    std::string described() const;
};
/// The first difference of two lines; nothing if they have the same fingerprints.
std::optional<FingerprintDifference> first_difference(std::string_view a, std::string_view b);

}  // namespace train_gpt
