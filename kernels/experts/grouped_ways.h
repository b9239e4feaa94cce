// Which of the tensor cores' kernels computes a grouped product of bf16 or fp8: grouped_tile.h and
// grouped_fp8_rows.h have them.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "device/stream.h"

namespace train_gpt::cuda {

class Queue;

enum class GroupedWay : uint8_t { mma, wgmma_128, wgmma_256 };
/// As texts of choices have it: "wgmma_128".
const char* name_of(GroupedWay way);

/// The ways of a queue's grouped products: queue.kept<GroupedWays>(). On sm_90, with
/// KernelSettings::autotune, all ways are timed when a product is first seen, with the actual
/// arguments; the host then waits for the device. Without it a product goes its untimed way, and on
/// other GPUs mma. Where that kernel cannot run, mma does.
class GroupedWays {
  public:
    explicit GroupedWays(const Queue& queue);

    /// Submits the product; false, with nothing submitted, if this way cannot.
    using Submit = std::function<bool(GroupedWay)>;
    /// name: the product and its extents, "forward E=8,R=4096,N=1536,K=768". repeatable: whether it
    /// overwrites its outputs; one that does not is not timed and goes the way of the same product
    /// that does, if that was seen before. columns: of a result. untimed: the way of a product that
    /// is not timed.
    void run(Stream& stream, const std::string& name, bool repeatable, int64_t columns,
             const Submit& submit, GroupedWay untimed = GroupedWay::mma);
    /// The kernel that computed the last product.
    GroupedWay last() const { return last_; }

    /// What was chosen by timing so far, one line per product: "grouped forward
    /// E=8,R=4096,N=1536,K=768 wgmma_256". A run keeps this text so that a later run gets the same
    /// bits.
    std::string choices() const;
    /// Uses the ways in this text; earlier choices are forgotten. Throws Error if it is damaged.
    void set_choices(const std::string& text);
    /// set_choices() with the lines of several ranks: where two name the same product, the earlier
    /// text holds. Returns whether one had been chosen otherwise here.
    bool unite_choices(const std::vector<std::string>& texts);

  private:
    using Chosen = std::map<std::string, GroupedWay>;
    static Chosen read(const std::string& text);
    GroupedWay choose(Stream& stream, const std::string& name, bool repeatable,
                      const Submit& submit, GroupedWay untimed);

    bool has_wgmma_;
    Chosen chosen_;
    GroupedWay last_ = GroupedWay::mma;
};

}  // namespace train_gpt::cuda
