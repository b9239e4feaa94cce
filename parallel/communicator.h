// Collectives over a group of ranks: what a step moves between devices. Uses NCCL on GPUs, shared
// memory and messages (MPI's or over TCP) on CPUs, and nothing in a group of one. The axes of parallelism are groups that
// split() makes; data parallelism is the first.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "device/device.h"
#include "parallel/activity.h"
#include "parallel/world.h"

namespace train_gpt {

enum class Reduction { sum, max };

/// Collectives are submitted to a stream in the same order on all ranks of the group. On a GPU they
/// run in the order of that stream's work, concurrently with other streams (use a high-priority
/// stream, and events in both directions); on the CPU they run immediately. Buffers are in the
/// memory of the stream's device. Sums of fp32 and fp64 are added in that dtype; on CPUs by rank
/// within each node and then by node, so that all_reduce and reduce_scatter + all_gather give the
/// same bits. Sums of bf16 are added in fp32 on CPUs and rounded once; NCCL may round after each
/// addition. A rank that is gone, or an asynchronous error of NCCL, is an Error that names the
/// collective.
class Communicator {
  public:
    virtual ~Communicator() = default;
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    /// data[count] becomes its sum, or its maximum, over the ranks. The maximum of numbers of which
    /// one is NaN may be any of them.
    virtual void all_reduce(Stream& stream, void* data, int64_t count, DType dtype,
                            Reduction reduction = Reduction::sum) = 0;
    /// out[count] = Σ over ranks of in[rank·count …]; in is [size·count], and its contents are
    /// undefined afterwards. out may be in + rank·count.
    virtual void reduce_scatter(Stream& stream, void* out, void* in, int64_t count,
                                DType dtype) = 0;
    /// out [size·count] = in[count] of all ranks, by rank. in may be out + rank·count.
    virtual void all_gather(Stream& stream, void* out, const void* in, int64_t count,
                            DType dtype) = 0;
    virtual void broadcast(Stream& stream, void* data, int64_t count, DType dtype, int root) = 0;
    virtual void send(Stream& stream, const void* data, int64_t count, DType dtype, int to) = 0;
    virtual void receive(Stream& stream, void* data, int64_t count, DType dtype, int from) = 0;
    /// A message that send() or receive() may not have finished when it returns.
    struct Message {
        int64_t first = 0, end = 0;  // what the group numbers
    };
    /// As send() and receive(). On the CPU they return at once, and the memory is in use until
    /// finish(); the messages between two ranks arrive in the order in which they were posted. On a
    /// GPU they are ordered by the stream, and finish() does nothing.
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
    /// The group of those ranks of this one that pass the same color, ordered by key, then rank.
    /// All ranks of this group call it.
    virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

    /// Lets collectives read and write these buffers in place, where the library can do that: null
    /// where it cannot. All ranks call it, with buffers of the same sizes, and pass addresses
    /// within them to collectives while the object lives; its owner destroys it before the buffers
    /// are freed. Waits for the other ranks.
    virtual std::shared_ptr<void> register_buffers(
        Stream& /*stream*/, const std::vector<std::span<std::byte>>& /*buffers*/) {
        return nullptr;
    }

    // These two may be called from any thread.
    /// Throws Error when a collective has failed asynchronously. Does not wait.
    virtual void check() {}
    /// Abandons collectives that wait for a rank that is gone. The group cannot be used any more.
    virtual void abort() {}

    /// Bytes that this rank has sent to others so far, as the algorithm moves them; for NCCL,
    /// computed from its documented volumes.
    int64_t bytes_sent() const { return bytes_sent_; }

  protected:
    Communicator(int rank, int size) : rank_(rank), size_(size) {}
    int64_t bytes_sent_ = 0;

  private:
    int rank_, size_;
};

struct CollectiveSettings {
    int max_ctas = 0;      // NCCL: thread blocks of a collective, at most; 0: as NCCL chooses
    bool encrypt = false;  // what ranks send each other over TCP; refused with MPI and NCCL
};

/// The group of all ranks, for buffers on `device`. Each collective that a rank enters is counted
/// in `activity`. Parts that split() makes have the same settings.
std::unique_ptr<Communicator> open_communicator(const World& world, const Device& device,
                                                Activity& activity,
                                                const CollectiveSettings& settings = {});

}  // namespace train_gpt
