#include "kernels/profile.h"

#include <algorithm>
#include <cstdio>

#ifdef TRAIN_GPT_CUDA
#include <nvtx3/nvToolsExt.h>
#endif

namespace train_gpt {

namespace {

double bytes_of(const Tensor& t) { return t ? static_cast<double>(t.bytes()) : 0.0; }

/// Written, and read before where it accumulates.
double bytes_of(const GradientSink& sink, int64_t n) {
    if (!sink) return 0;
    return static_cast<double>(n) * static_cast<double>(size_of(sink.dtype)) *
           (sink.accumulate ? 2 : 1);
}

double product(const Tensor& rows, const Tensor& weight) {
    return 2.0 * static_cast<double>(rows.rows()) * static_cast<double>(weight.numel());
}

/// Pairs of a query and a key that it sees, over batch and heads, in one document.
double pairs(const AttentionShape& s) {
    const double T = s.T, S = s.S;
    return (T * (S - T) + T * (T + 1) / 2) * s.B * s.H;
}

double tokens_bytes(const AttentionShape& s, int heads, int tokens) {
    return static_cast<double>(s.B) * tokens * heads * s.D * static_cast<double>(size_of(s.dtype));
}

}  // namespace

Work work_of(const LinearForward& a) {
    return {"linear_forward",
            bytes_of(a.x) + bytes_of(a.w) + bytes_of(a.bias) + bytes_of(a.residual) +
                bytes_of(a.preact) + bytes_of(a.out),
            product(a.x, a.w)};
}

Work work_of(const LinearBackwardInput& a) {
    return {"linear_backward_input",
            bytes_of(a.dy) + bytes_of(a.w) + bytes_of(a.preact) + bytes_of(a.dx),
            product(a.dy, a.w)};
}

Work work_of(const LinearBackwardWeight& a) {
    const int64_t N = a.dy.cols(), K = a.x.cols();
    return {"linear_backward_weight",
            bytes_of(a.x) + bytes_of(a.dy) + bytes_of(a.dw, N * K) + bytes_of(a.dbias, N),
            2.0 * static_cast<double>(a.x.numel()) * static_cast<double>(N)};
}

Work work_of(const LayerNormForward& a) {
    return {"layernorm_forward",
            bytes_of(a.x) + bytes_of(a.w) + bytes_of(a.b) + bytes_of(a.out) + bytes_of(a.stats), 0};
}

Work work_of(const LayerNormBackward& a) {
    const int64_t C = a.x.cols();
    return {"layernorm_backward",
            bytes_of(a.dy) + bytes_of(a.x) + bytes_of(a.stats) + bytes_of(a.w) +
                bytes_of(a.dres) * (a.overwrite_dres ? 1 : 2) + bytes_of(a.dw, C) +
                bytes_of(a.db, C) + bytes_of(a.dbias, C),
            0};
}

Work work_of(const AttentionForward& a) {
    const AttentionShape& s = a.shape;
    return {"attention_forward", 2 * tokens_bytes(s, s.H, s.T) + 2 * tokens_bytes(s, s.H_kv, s.S),
            4.0 * pairs(s) * s.D};
}

Work work_of(const AttentionBackward& a) {
    const AttentionShape& s = a.shape;
    return {"attention_backward", 4 * tokens_bytes(s, s.H, s.T) + 4 * tokens_bytes(s, s.H_kv, s.S),
            10.0 * pairs(s) * s.D};
}

Work work_of(const EmbeddingForward& a) { return {"embedding_forward", 2 * bytes_of(a.out), 0}; }

Work work_of(const EmbeddingBackward& a) {
    const int64_t C = a.dout.cols();
    const double fp32 = static_cast<double>(a.dout.numel()) * sizeof(float);
    return {"embedding_backward", bytes_of(a.dout) + 2 * fp32 + bytes_of(a.dwpe, a.n_ctx * C), 0};
}

Work work_of(const HeadLoss& a) {
    const double R = static_cast<double>(a.x.rows());
    const double logits =
        R * static_cast<double>(a.w.rows()) * static_cast<double>(size_of(a.logits.dtype));
    const double forward = product(a.x, a.w);
    if (!a.dx) return {"head_loss", bytes_of(a.x) + bytes_of(a.w) + 2 * logits, forward};
    return {"head_loss",
            2 * bytes_of(a.x) + 2 * bytes_of(a.w) + bytes_of(a.dx) + 5 * logits +
                bytes_of(a.dw, a.w.numel()),
            3 * forward};
}

Work work_of(std::span<const NormSegment> segments) {
    double n = 0;
    for (const NormSegment& s : segments) n += static_cast<double>(s.n);
    return {"norm_partials", sizeof(float) * n, 0};
}

Work work_of(std::span<const AdamWSegment> segments) {
    double bytes = 0;
    for (const AdamWSegment& s : segments)
        bytes += static_cast<double>(s.n) * (7 * sizeof(float) + (s.weights ? sizeof(bf16) : 0));
    return {"adamw", bytes, 0};
}

struct Profiler::Calls {
    struct Call {
        size_t total;  // of its kind, in totals
        Event first, last;
    };
    Device device;
    std::vector<Total> totals;
    std::vector<Call> open;  // not yet in totals
};

Profiler::Profiler(Device device) : calls_(std::make_unique<Calls>()) { calls_->device = device; }
Profiler::~Profiler() = default;

void Profiler::begin(Stream& stream, const Work& work) {
    if (depth_++ > 0) return;
    auto& totals = calls_->totals;
    auto found = std::find_if(totals.begin(), totals.end(),
                              [&](const Total& t) { return t.kind == work.kind; });
    if (found == totals.end()) found = totals.insert(totals.end(), Total{.kind = work.kind});
    ++found->calls;
    found->bytes += work.bytes;
    found->flops += work.flops;
    const auto timing = [&] { return Event(calls_->device, Event::Kind::timing); };
    calls_->open.push_back({static_cast<size_t>(found - totals.begin()), timing(), timing()});
    calls_->open.back().first.record(stream);
}

void Profiler::end(Stream& stream) {
    if (--depth_ > 0) return;
    calls_->open.back().last.record(stream);
}

std::vector<Profiler::Total> Profiler::totals() {
    for (const Calls::Call& call : calls_->open)
        calls_->totals[call.total].seconds += call.last.seconds_since(call.first);
    calls_->open.clear();
    return calls_->totals;
}

Profiled::Profiled(Stream& stream, const Work& work) : stream_(stream) {
#ifdef TRAIN_GPT_CUDA
    if (stream.device.is_cuda()) nvtxRangePushA(work.kind);
#endif
    if (stream.profiler) stream.profiler->begin(stream, work);
}

Profiled::~Profiled() {
    if (stream_.profiler) stream_.profiler->end(stream_);
#ifdef TRAIN_GPT_CUDA
    if (stream_.device.is_cuda()) nvtxRangePop();
#endif
}

NamedRange::NamedRange(const Device& device, [[maybe_unused]] const char* phase,
                       [[maybe_unused]] int number)
    : open_(device.is_cuda()) {
#ifdef TRAIN_GPT_CUDA
    if (!open_) return;
    char text[64];
    std::snprintf(text, sizeof text, "%s %d", phase, number);
    nvtxRangePushA(text);
#endif
}

NamedRange::~NamedRange() {
#ifdef TRAIN_GPT_CUDA
    if (open_) nvtxRangePop();
#endif
}

}  // namespace train_gpt
