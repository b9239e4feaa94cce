// Activations and gradients on their way between the stages of a pipeline.
#pragma once
#include <memory>
#include <vector>

#include "device/device.h"
#include "device/memory.h"
#include "parallel/communicator.h"
#include "parallel/pipeline/pipeline_schedule.h"
#include "parallel/step_clock.h"

namespace train_gpt {

/// The buffers of one pipeline rank, and the messages in them. Messages move while the rank
/// computes: on a GPU in a stream of their own, which waits only for the compute before a send and
/// for the last reader of a buffer before a receive; on the CPU the links carry them, and no call
/// but wait(), and send_buffer() where all buffers are still on their way, waits for another rank.
class StageMessages {
  public:
    enum class Kind : uint8_t { activation, gradient };

    StageMessages() = default;
    /// Takes buffers of [rows, columns] for what the schedule's rank receives and sends. None in a
    /// pipeline of one rank.
    StageMessages(const PipelineSchedule& schedule, int rank, DType dtype, int64_t rows,
                  int64_t columns, Arena& arena);

    /// The pipeline's ranks. What the model's stream waits for counts as communication of
    /// the pipeline axis in `clock`. Before, as in a warm-up, nothing moves. All ranks call it.
    void connect(const Device& device, Communicator& pipeline, StepClock* clock);

    /// Where the output of the next compute goes, for later work of the stream; send() sends it.
    Tensor send_buffer(Stream& stream, Kind kind);
    void send(Stream& stream, Kind kind, int to);
    /// Lets the message come into a buffer, which nothing submitted later than release() reads.
    void receive(Stream& stream, Kind kind, int buffer, int from);
    /// The buffer, in which later work of the stream finds the message.
    Tensor wait(Stream& stream, Kind kind, int buffer);
    /// The stream's work so far was the last that reads the buffer.
    void release(Stream& stream, Kind kind, int buffer);
    /// data[n] of rank `root` on all ranks of the pipeline, for later work of the stream.
    void broadcast(Stream& stream, float* data, int64_t n, int root);

    /// All buffers, for a warm-up to fill.
    std::vector<Tensor> buffers() const;

  private:
    struct Buffer {
        Tensor memory;
        Communicator::Message message;
        bool moves = false;  // the model's stream has not waited for the message
        Event moved, used;   // on a GPU: the message has finished; so has the last work with it
        bool was_used = false;
    };
    struct Side {
        std::vector<Buffer> sends, receives;
        size_t next = 0;  // of sends
    };
    Side& side(Kind kind) { return sides_[static_cast<size_t>(kind)]; }
    void wait(Stream& stream, Buffer& buffer);

    DType dtype_ = DType::fp32;
    Side sides_[2];
    Communicator* pipeline_ = nullptr;
    StepClock* clock_ = nullptr;
    std::unique_ptr<Stream> stream_;  // on a GPU
    Event turn_;                      // from one of the two streams to the other
};

}  // namespace train_gpt
