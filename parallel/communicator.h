// Collectives over a group of ranks: what a step moves between devices. GPUs use NCCL. CPUs use
// shared memory and messages (MPI's, or over TCP). A group of one moves nothing. split() makes the
// groups for the axes of parallelism.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "device/device.h"
#include "device/stream.h"
#include "parallel/activity.h"
#include "parallel/world.h"

namespace train_gpt {

enum class Reduction { sum, max };

/// All ranks of the group submit collectives to a stream in the same order. On a GPU, collectives
/// run in the order of that stream's work, concurrently with other streams: use a high-priority
/// stream, and events in both directions. On the CPU they run immediately. Buffers are in the
/// memory of the stream's device.
///
/// Sums of integers wrap. Sums of fp32 and fp64 are added in that dtype. CPUs add by rank within
/// each node, then by node, so that all_reduce gives the same bits as reduce_scatter and
/// all_gather. Sums of bf16 are added in fp32 on CPUs and rounded once; NCCL may round after each
/// addition.
///
/// Throws Error, which names the collective, if a rank is gone or NCCL reports an error later.
class Communicator {
  public:
    virtual ~Communicator() = default;
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    /// data[count] becomes its sum, or its maximum, over the ranks. If one of the numbers is NaN,
    /// their maximum may be any of them.
    virtual void all_reduce(Stream& stream, void* data, int64_t count, DType dtype,
                            Reduction reduction = Reduction::sum) = 0;
    /// out[count] = Σ over ranks of in[rank·count …]. The contents of in [size·count] are undefined
    /// afterwards. out may be in + rank·count.
    virtual void reduce_scatter(Stream& stream, void* out, void* in, int64_t count,
                                DType dtype) = 0;
    /// out [size·count] = in[count] of all ranks, by rank. in may be out + rank·count.
    virtual void all_gather(Stream& stream, void* out, const void* in, int64_t count,
                            DType dtype) = 0;
    virtual void broadcast(Stream& stream, void* data, int64_t count, DType dtype, int root) = 0;
    virtual void send(Stream& stream, const void* data, int64_t count, DType dtype, int to) = 0;
    virtual void receive(Stream& stream, void* data, int64_t count, DType dtype, int from) = 0;
    /// A message of all_to_all().
    struct Transfer {
        int rank = 0;  // to or from which it goes
        void* data = nullptr;
        int64_t count = 0;
    };
    /// Every rank sends messages of any sizes to any others, and receives theirs. The messages
    /// between two ranks are in the same order on both.
    virtual void all_to_all(Stream& stream, std::span<const Transfer> sends,
                            std::span<const Transfer> receives, DType dtype);
    /// A message that send() or receive() may not have finished when it returns.
    struct Message {
        int64_t first = 0, end = 0;  // the numbers that the links gave its pieces
    };
    /// Like send() and receive(). On the CPU these two return at once, and the memory is in use
    /// until finish(). Messages between two ranks arrive in the order in which they were posted. On
    /// a GPU the stream orders the messages, and finish() does nothing.
    virtual Message post_send(Stream& stream, const void* data, int64_t count, DType dtype,
                              int to) {
        send(stream, data, count, dtype, to);
        return {};
    }
    virtual Message post_receive(Stream& stream, void* data, int64_t count, DType dtype, int from) {
        receive(stream, data, count, dtype, from);
        return {};
    }
    virtual void finish(const Message& /*message*/) {}
    virtual void barrier(Stream& stream) = 0;
    /// Divides this group: returns the group of the ranks that pass the same color, ordered by key,
    /// then by rank. All ranks of this group call it.
    virtual std::unique_ptr<Communicator> split(int color, int key, int max_ctas) = 0;

    /// A stream of a GPU for collectives that run beside a model's work. Groups get a stream each,
    /// unless their library needs the operations of all groups of a process in one order.
    virtual std::shared_ptr<Stream> exchange_stream(const Device& device);

    /// Lets collectives read and write these buffers in place. Returns null where the library
    /// cannot do that. All ranks call it with buffers of the same sizes, and it waits for the other
    /// ranks. While the returned object lives, all ranks pass the same places in the buffers to
    /// collectives. The owner destroys the object before the buffers are freed.
    virtual std::shared_ptr<void> register_buffers(
        Stream& /*stream*/, const std::vector<std::span<std::byte>>& /*buffers*/) {
        return nullptr;
    }

    // These two may be called from any thread.
    /// Throws Error if a collective failed after it was submitted. Does not wait.
    virtual void check() {}
    /// Abandons collectives that wait for a missing rank. The group cannot be used any more.
    virtual void abort() {}

    /// Bytes that this rank has sent to others so far, as the algorithm moves them. For NCCL they
    /// are computed from the volumes that its documentation gives.
    int64_t bytes_sent() const { return bytes_sent_; }

  protected:
    Communicator(int rank, int size) : rank_(rank), size_(size) {}
    int64_t bytes_sent_ = 0;

  private:
    int rank_, size_;
};

struct CollectiveSettings {
    int max_ctas = 0;             // NCCL: most thread blocks of a collective; 0: NCCL chooses
    bool several_groups = false;  // whose collectives run at the same time
    bool encrypt = false;         // encrypts what ranks send over TCP; an Error with MPI and NCCL
};

/// The group of all ranks, for buffers on `device`. `activity` counts each collective that a rank
/// enters. Groups that split() makes have the same settings, and a limit of their own on thread
/// blocks.
std::unique_ptr<Communicator> open_communicator(const World& world, const Device& device,
                                                Activity& activity,
                                                const CollectiveSettings& settings = {});

}  // namespace train_gpt
