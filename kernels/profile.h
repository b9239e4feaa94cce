// Where a step's time goes: seconds per kind of kernel, beside the bytes that it must move and the FLOPs that it must do
// at least. Off, it costs nothing but a named range for NVIDIA's tools on a GPU.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/device.h"
#include "kernels/embedding.h"
#include "kernels/head_loss.h"
#include "kernels/layernorm.h"
#include "kernels/linear.h"

namespace train_gpt {

/// What a call has to do: every operand read once and every result written once; FLOPs of matrix products and attention
/// (causal pairs only), where a multiply-add counts two.
struct Work {
    const char* kind = "";
    double bytes = 0, flops = 0;
};
Work work_of(const LinearForward& args);
Work work_of(const LinearBackwardInput& args);
Work work_of(const LinearBackwardWeight& args);
Work work_of(const LayerNormForward& args);
Work work_of(const LayerNormBackward& args);
Work work_of(const AttentionForward& args);
Work work_of(const AttentionBackward& args);
Work work_of(const EmbeddingForward& args);
Work work_of(const EmbeddingBackward& args);
Work work_of(const HeadLoss& args);
Work work_of(std::span<const NormSegment> segments);
Work work_of(std::span<const AdamWSegment> segments);

class Profiler {
  public:
    struct Total {
        std::string kind;
        int64_t calls = 0;
        double seconds = 0, bytes = 0, flops = 0;
    };

    explicit Profiler(Device device);
    ~Profiler();

    /// Sums over all calls so far, in the order of their first; waits for the device.
    std::vector<Total> totals();

  private:
    friend class Profiled;
    void begin(Stream& stream, const Work& work);
    void end(Stream& stream);

    struct Calls;
    std::unique_ptr<Calls> calls_;
    int depth_ = 0;  // a kernel made of others counts as one
};

/// While it lives, work submitted to the stream counts as one call.
class Profiled {
  public:
    Profiled(Stream& stream, const Work& work);
    ~Profiled();
    Profiled(const Profiled&) = delete;
    Profiled& operator=(const Profiled&) = delete;

  private:
    Stream& stream_;
};

/// A named range on the host's timeline for NVIDIA's tools, such as a layer's forward pass.
class NamedRange {
  public:
    NamedRange(const Device& device, const char* phase, int number);
    ~NamedRange();
    NamedRange(const NamedRange&) = delete;
    NamedRange& operator=(const NamedRange&) = delete;

  private:
    bool open_ = false;
};

}  // namespace train_gpt
