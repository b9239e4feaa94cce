// Activations and gradients on their way between the stages of a pipeline.
#pragma once
#include <memory>
#include <vector>

#include "device/device.h"
#include "device/memory.h"
#include "device/stream.h"
#include "parallel/communicator.h"
#include "parallel/pipeline/pipeline_schedule.h"
#include "parallel/step_clock.h"

namespace train_gpt {

/// The buffers of one pipeline rank, and the messages in them. Messages move while the rank
/// computes. On a GPU they move in a stream of their own. This stream waits only for the compute
/// before a send, and for the last reader of a buffer before a receive. On the CPU the links carry
/// them. Two calls may wait for another rank there: wait(), and send_buffer() if the messages of
/// all buffers are still on their way.
class StageMessages {
  public:
    enum class Kind : uint8_t { activation, gradient };

    StageMessages() = default;
    /// Takes buffers [rows, columns] for what this rank receives and sends in the schedule. Takes
    /// none in a pipeline of one rank.
    StageMessages(const PipelineSchedule& schedule, int rank, DType dtype, int64_t rows,
                  int64_t columns, Arena& arena);

    /// Connects the pipeline's ranks; all ranks call it. Without it nothing moves, as in a warm-up.
    /// When the model's stream waits for messages, `clock` counts that as communication of the
    /// pipeline axis.
    void connect(const Device& device, Communicator& pipeline, StepClock* clock);

    /// Returns the buffer into which the next compute of the stream writes its output.
    Tensor send_buffer(Stream& stream, Kind kind);
    /// Sends the buffer that send_buffer() has returned.
    void send(Stream& stream, Kind kind, int to);
    /// Lets a message come into a buffer. Only work submitted before release() may read what the
    /// buffer held until now.
    void receive(Stream& stream, Kind kind, int buffer, int from);
    /// Returns the buffer. Later work of the stream finds the message in it.
    Tensor wait(Stream& stream, Kind kind, int buffer);
    /// Says that no later work of the stream reads the message in the buffer.
    void release(Stream& stream, Kind kind, int buffer);
    /// Copies data[n] from rank `root` to all ranks of the pipeline, for later work of the stream.
    void broadcast(Stream& stream, float* data, int64_t n, int root);

    /// All buffers, for a warm-up to fill.
    std::vector<Tensor> buffers() const;

  private:
    struct Buffer {
        Tensor memory;
        Communicator::Message message;
        bool moves = false;  // the model's stream has not waited for the message
        Event moved, used;   // on a GPU: the message has arrived or left; its last reader has ended
        bool was_used = false;
    };
    struct Side {
        std::vector<Buffer> sends, receives;
        size_t next = 0;  // index in sends
    };
    Side& side(Kind kind) { return sides_[static_cast<size_t>(kind)]; }
    void wait(Stream& stream, Buffer& buffer);

    DType dtype_ = DType::fp32;
    Side sides_[2];
    Communicator* pipeline_ = nullptr;
    StepClock* clock_ = nullptr;
    std::shared_ptr<Stream> stream_;  // on a GPU
    Event turn_;                      // lets one of the two streams wait for the other
};

}  // namespace train_gpt
