// Which implementation of attention computes on a GPU: our own kernels (attention.cu) or cuDNN's (cudnn.h).
#pragma once
#include <string>

#include "kernels/attention/attention.h"

#ifdef TRAIN_GPT_CUDA
#include <array>
#include <functional>
#include <memory>
#include <optional>

struct CUstream_st;  // what a cudaStream_t points to
#endif

namespace train_gpt {

/// What attention on GPUs runs on, in all of the process: "own"; "cudnn", wherever it can; or "auto", the faster of the
/// two as timed when a training shape is first seen. Throws Error for another name. Nothing depends on it on the CPU.
void select_attention(const std::string& name);

#ifdef TRAIN_GPT_CUDA
namespace cuda {

/// A library's attention, opened for one stream. Both functions submit their work to that stream and throw the reason,
/// with none of the outputs valid, when they cannot; its text ends a sentence.
class AttentionLibrary {
  public:
    virtual ~AttentionLibrary() = default;
    virtual void forward(const AttentionForward& args, void* workspace, size_t workspace_bytes) = 0;
    virtual void backward(const AttentionBackward& args, void* workspace,
                          size_t workspace_bytes) = 0;
};

/// Opens cuDNN for a stream; throws the reason, which ends a sentence, where it cannot be used.
std::unique_ptr<AttentionLibrary> open_cudnn_attention(CUstream_st* stream);

/// Sends the calls of attention on a queue to our own kernels or to the library. Both compute the same from the same
/// buffers, log-sum-exp included, so that each pass is chosen for itself. Where the library is absent or fails, our own
/// kernels do the pass from then on, and one line on stderr says why.
class AttentionEngines {
  public:
    using Work = std::function<void()>;  // submits our own kernels
    using Open = std::unique_ptr<AttentionLibrary> (*)(CUstream_st*);
    using Time = double (*)(Stream&, const Work&);  // seconds that the device takes for the work

    /// queue.kept<AttentionEngines>()
    explicit AttentionEngines(const Queue& queue);
    explicit AttentionEngines(CUstream_st* stream, Open open = open_cudnn_attention,
                              Time time = median_seconds)
        : stream_(stream), open_(open), time_(time) {}

    /// The arguments have been checked. The host waits for the device only while it times, the first time.
    void forward(Stream& stream, const AttentionForward& args, const Work& own);
    void backward(Stream& stream, const AttentionBackward& args, const Work& own);

    /// The engines that "auto" has chosen so far, a line for each pass: what a run keeps, so that a later one gets the
    /// same bits.
    std::string choices() const;
    /// "auto" takes the engines of this text; what was chosen before is forgotten. Throws Error when it is damaged.
    void set_choices(const std::string& text);

  private:
    enum class Engine : uint8_t { own, library };
    enum Direction : uint8_t { forward_pass, backward_pass };
    struct Pass {
        std::optional<Engine> chosen;
        bool failed = false;  // the library did
    };

    void run(Direction direction, Stream& stream, const Work& own, const Work& by_library);
    void choose(Direction direction, Stream& stream, const Work& own, const Work& by_library);
    bool attempt(Direction direction, const Work& by_library);
    AttentionLibrary& library();
    static double median_seconds(Stream& stream, const Work& work);

    CUstream_st* stream_;
    Open open_;
    Time time_;
    std::unique_ptr<AttentionLibrary> library_;
    std::array<Pass, 2> passes_;
};

/// Scratch that cuDNN may want for the shape; 0 where it is not going to be used.
size_t attention_library_scratch_bytes(const AttentionShape& shape);

}  // namespace cuda
#endif

}  // namespace train_gpt
