// Which implementation of attention runs on a GPU: our own kernels (attention.cu) or cuDNN's
// (cudnn.h).
#pragma once
#include <string>

#include "kernels/attention/attention.h"

#ifdef TRAIN_GPT_CUDA
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

struct CUstream_st;  // what a cudaStream_t points to
#endif

namespace train_gpt {

/// What ran the latest passes of a stream's attention; empty before the first, and on the CPU,
/// where there is no choice.
struct AttentionUse {
    struct Pass {
        // "own", "own (wgmma)", or the library and how it adds up dq: "cuDNN 9.28.1", "cuDNN 9.28.1
        // (ordered)"
        std::string engine;
        std::string reason;  // if own, why, as a clause: "since cuDNN is used for bf16 alone"

        bool operator==(const Pass&) const = default;
    };
    Pass forward, backward;
    bool same_bits = true;  // no call so far has added up dq in an order that changes

    /// "cuDNN 9.19.0"; "cuDNN 9.19.0 forward, own backward".
    std::string engines() const;
    /// The same with reasons: "own kernels, since …".
    std::string explained() const;
};
AttentionUse attention_use(const Stream& stream);

#ifdef TRAIN_GPT_CUDA
namespace cuda {

/// The ways to compute a pass. cuDNN's differ in how the backward pass adds up dq; its forward pass
/// is always `cudnn`. Files of choices have these names.
enum class AttentionWay : uint8_t {
    own,
    cudnn,            // through a matrix of the scores' gradients, except on data-center Blackwell
    cudnn_ordered,    // block by block, in a fixed order (cudnn_has)
    cudnn_unordered,  // block by block, in any order: the last bits differ from run to run
    wgmma,            // our own kernels for sm_90a (cuda.h)
};

/// A library's attention, opened for one stream. Both functions submit their work to that stream.
/// If they cannot, they throw the reason, worded as the end of a sentence, and none of the outputs
/// is valid.
class AttentionLibrary {
  public:
    virtual ~AttentionLibrary() = default;
    /// With its version: "cuDNN 9.19.0".
    virtual std::string name() const = 0;
    virtual size_t version() const = 0;  // 91900
    virtual void forward(const AttentionForward& args, void* workspace, size_t workspace_bytes) = 0;
    virtual void backward(AttentionWay way, const AttentionBackward& args, void* workspace,
                          size_t workspace_bytes) = 0;
};

/// Opens cuDNN for a stream. If cuDNN cannot be used, throws the reason, worded as the end of a
/// sentence.
std::unique_ptr<AttentionLibrary> open_cudnn_attention(CUstream_st* stream);

/// Sends the attention calls of a queue to our own kernels or to the library, as the stream's
/// settings say. All ways compute the same from the same buffers, including the log-sum-exp, so the
/// way is chosen separately for each pass and shape. If a way of the library fails, it is not tried
/// again, and one line on stderr says why; another way runs that pass from then on, in the end our
/// own kernels. The library's backward pass runs in several calls where one would need too much
/// memory (cudnn_calls).
class AttentionEngines {
  public:
    using Work = std::function<void()>;  // submits our own kernels
    /// Submits our own kernels for sm_90a. False, with nothing submitted, if they cannot compute
    /// the call. Empty if this GPU or the call rules them out.
    using Attempt = std::function<bool()>;
    using Open = std::unique_ptr<AttentionLibrary> (*)(CUstream_st*);
    using Time = double (*)(Stream&, const Work&);  // seconds that the device takes for the work

    /// queue.kept<AttentionEngines>()
    explicit AttentionEngines(const Queue& queue);
    AttentionEngines(CUstream_st* stream, int architecture, Open open = open_cudnn_attention,
                     Time time = median_seconds)
        : stream_(stream), architecture_(architecture), open_(open), time_(time) {}

    /// The arguments must already have been checked. The host waits for the device only while it
    /// times a pass, the first time. A backward pass that adds to dk and dv is not timed, since it
    /// must run once: it goes the way that was chosen for the same shape with another number of
    /// keys, if there is one.
    /// No library computes dsinks, nor need `own` and `wgmma`: a pass that is timed runs several
    /// times, and dsinks may be added to. `wgmma` is timed only with KernelSettings::autotune.
    void forward(Stream& stream, const AttentionForward& args, const Work& own,
                 const Attempt& wgmma = {});
    /// Returns whether our own kernels computed what stands in the outputs.
    bool backward(Stream& stream, const AttentionBackward& args, const Work& own,
                  const Attempt& wgmma = {});

    /// The ways that were chosen by timing so far, one line for each pass and shape: "attention
    /// forward B=2,T=512,S=512,H=12,H_kv=12,D=64 cudnn"; with a window, and in the forward pass
    /// with sinks, the shape ends with ",window=128" and ",sinks"; where no library computes it,
    /// with ",own". A run keeps this text so that a later run gets the same bits.
    std::string choices() const;
    /// Uses the ways in this text; earlier choices are forgotten. A line without a shape, as older
    /// versions wrote, holds for all shapes that have no line. A way that the settings of a call
    /// rule out is chosen anew. Throws Error if the text is damaged.
    void set_choices(const std::string& text);
    /// set_choices() with the lines of several ranks: where two name the same pass and shape, the
    /// earlier text holds. Returns whether one had been chosen otherwise here.
    bool unite_choices(const std::vector<std::string>& texts);

    /// Calls without a log-sum-exp, as in sampling, do not count: no library runs them.
    AttentionUse use() const;

  private:
    enum Direction : uint8_t { forward_pass, backward_pass };
    struct Choice {
        AttentionWay way = AttentionWay::own;
        std::string reason = {};  // if own: AttentionUse::Pass
    };
    /// By shape, as it is written in choices(); "": for all shapes without a choice of their own.
    using Choices = std::map<std::string, Choice>;
    struct Pass {
        Choices chosen;
        std::set<AttentionWay> failed;
        std::string failure;  // the latest
        // About the latest call:
        std::optional<AttentionWay> ran;
        std::string reason;  // AttentionUse::Pass

        Choice* choice_of(const std::string& shape);
        /// The first one of a shape that is the same but for S.
        std::optional<Choice> choice_with_other_keys(const std::string& shape) const;
    };
    /// A call: its pass, its shape as text, and how to compute it.
    struct Call {
        Direction direction;
        std::string shape;
        std::vector<AttentionWay> ways;  // that may compute it, the preferred one first
        size_t oldest_version;           // of the library
        std::string unable;              // why none of the library's ways can, if none has failed
        bool repeatable = true;          // writes the same outputs however often it runs
        const Work& own;
        const Attempt& wgmma;
        std::function<void(AttentionWay)> by_library;
    };

    bool run(Stream& stream, const Call& call);
    bool run_own(Direction direction, const Work& own, std::string reason);
    Choice& choose(Stream& stream, const Call& call);
    Choice preferred(const Call& call);
    std::vector<AttentionWay> working(const Call& call);
    bool works(const Call& call, AttentionWay way);
    bool attempt(const Call& call, AttentionWay way);
    void give_up(const std::string& reason);
    static double median_seconds(Stream& stream, const Work& work);
    static std::array<Choices, 2> read(const std::string& choices);

    CUstream_st* stream_;
    int architecture_;  // of the GPU: 80, 90, …
    Open open_;
    Time time_;
    std::unique_ptr<AttentionLibrary> library_;
    std::array<Pass, 2> passes_;
    bool same_bits_ = true;
};

/// The scratch memory that cuDNN may need for the forward pass, or for both passes, of a shape; 0
/// if it will not be used.
size_t attention_library_forward_scratch_bytes(const KernelSettings& settings,
                                               const AttentionShape& shape);
size_t attention_library_scratch_bytes(const KernelSettings& settings, const AttentionShape& shape,
                                       int architecture);

}  // namespace cuda
#endif

}  // namespace train_gpt
