// How build/compare judges results and takes times.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "test/compare/operations.h"

namespace train_gpt::compare {

/// How far numbers are from the expected ones; a NaN in either makes all three values NaN.
struct Difference {
    double max = 0, mean = 0;  // of |ours − theirs|
    double relative = 0;       // ‖ours − theirs‖ / ‖size‖; where that is zero, max
};
/// `size`: theirs or, for sums whose terms may cancel, the roots of their terms' squares.
Difference difference(const Values& ours, const Values& theirs, const Values& size);
inline Difference difference(const Values& ours, const Values& theirs) {
    return difference(ours, theirs, theirs);
}

/// A result compared with the expected one.
struct Judgement {
    std::string result, against;
    Difference difference;
    double bound = 0;

    bool holds() const { return difference.relative <= bound; }  // false for a NaN
};
/// Compares a call's results with others, by name. They may differ by `bounds` times what a correct
/// result may differ from the exact one.
std::vector<Judgement> judge(const Operands& operands, const Results& ours,
                             const std::string& against, const Results& theirs, double bounds);

/// The highest measured rates of a device, in bytes and FLOPs per second.
struct Limits {
    double bandwidth = 0;
    std::map<DType, double> flops;
};
Limits measure_limits(const Device& device, const std::vector<DType>& dtypes);

/// A call's time and its work.
struct Speed {
    double seconds = 0, bytes = 0, flops = 0;
};

/// Memory for calls of an operation on a device, and a stream to run them on.
class Workplace {
  public:
    Workplace(const Operation& operation, const Operands& operands, const Device& device,
              const Implementation& implementation, int64_t copies = 1);

    /// The results of one call, by name.
    Results results();
    /// The median of `repeats` calls, each on the next copy of the operands, after a few warm-up
    /// calls.
    Speed speed(int repeats);

  private:
    void take(Arena& arena, int64_t copies);

    const Operation& operation_;
    const Operands& operands_;
    std::unique_ptr<Arena> arena_;
    std::vector<Call> calls_;
    Stream stream_;
};

/// Enough copies of the operands that each has left the caches before it is used again. For
/// operands so small that starting the call takes longer than the call, fewer.
int64_t copies_beyond_caches(const Operands& operands);
constexpr size_t beyond_caches = size_t{256} << 20;
constexpr int warm_up_calls = 3;

}  // namespace train_gpt::compare
