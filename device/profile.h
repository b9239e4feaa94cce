// Where a step's time goes: seconds per kind of kernel, with the bytes and FLOPs that it needs at
// least. When profiling is off, it costs only a named range for NVIDIA's tools on a GPU.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "device/device.h"
#include "device/stream.h"
#include "device/trace.h"

namespace train_gpt {

/// The least that a call must do: read every operand once, write every result once, and compute the
/// FLOPs of matrix products and attention (causal pairs only). A multiply-add counts as two FLOPs.
/// Each operation's header declares cost_of(its arguments).
struct Cost {
    const char* kind = "";
    double bytes = 0, flops = 0;
};

/// 0 for an absent operand.
inline double bytes_of(const Tensor& t) { return t ? static_cast<double>(t.bytes()) : 0.0; }

/// Bytes for n gradients: written, and also read when the sink accumulates.
inline double bytes_of(const GradientSink& sink, int64_t n) {
    if (!sink) return 0;
    return static_cast<double>(n) * static_cast<double>(size_of(sink.dtype)) *
           (sink.accumulate ? 2 : 1);
}

/// FLOPs of rows [M, K] times a weight [N, K].
inline double product_flops(const Tensor& rows, const Tensor& weight) {
    return 2.0 * static_cast<double>(rows.rows()) * static_cast<double>(weight.numel());
}

class Profiler {
  public:
    struct Total {
        std::string kind;
        int64_t calls = 0;
        double seconds = 0, bytes = 0, flops = 0;
    };

    explicit Profiler(Device device);
    ~Profiler();

    /// Totals over all calls so far, kinds in the order of their first call. Waits for the device.
    std::vector<Total> totals();

  private:
    friend class Profiled;
    void begin(Stream& stream, const Cost& cost);
    void end(Stream& stream);

    struct Calls;
    std::unique_ptr<Calls> calls_;
    int depth_ = 0;  // nested calls count as one
};

/// While it lives, all work submitted to the stream counts as one call. On the CPU a call is also a
/// span of the trace; on a GPU the events around each kernel would slow down a step.
class Profiled {
  public:
    Profiled(Stream& stream, const Cost& cost);
    ~Profiled();
    Profiled(const Profiled&) = delete;
    Profiled& operator=(const Profiled&) = delete;

  private:
    Stream& stream_;
    std::optional<TraceSpan> span_;
};

}  // namespace train_gpt
