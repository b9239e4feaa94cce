// What the collectives on CPUs stand on: messages between the ranks of a group, and memory that
// those of one node share. MPI has one kind of links, ranks that met over TCP have another; the
// order of sums is that of the collectives (communicator_cpu.cpp) on both.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace train_gpt {

class Links {
  public:
    virtual ~Links() = default;
    Links(const Links&) = delete;
    Links& operator=(const Links&) = delete;

    int rank() const { return rank_; }
    int size() const { return static_cast<int>(nodes_.size()); }
    /// The number of each rank's node: ranks with the same number share memory.
    const std::vector<int>& nodes() const { return nodes_; }

    // Messages between two ranks arrive in the order in which they were posted. Both sides know
    // the number of bytes (0 < bytes ≤ most_message_bytes); the memory is in use until finish().
    // Both return the message's number, which counts up.
    virtual int64_t post_send(const std::byte* data, int64_t bytes, int to) = 0;
    virtual int64_t post_receive(std::byte* data, int64_t bytes, int from) = 0;
    /// Returns when all posted messages are sent and received; until then it calls `look`, which
    /// may throw. Throws Error when a rank is gone.
    virtual void finish(const std::function<void()>& look) = 0;
    /// The same for one message, while others may stay on their way.
    virtual void finish(int64_t message, const std::function<void()>& look) = 0;
    /// Moves what can be moved now.
    virtual void advance() = 0;
    static constexpr int64_t most_message_bytes = int64_t{1} << 30;

    /// Memory that `neighbours` share: ranks of this node with this one among them, which all call
    /// it with the same list. Returns where each of them has `bytes` bytes, in their order, each in
    /// pages of its own. `prepare` gets this rank's part before any other sees it. May be called
    /// once. Throws Error when there is not so much memory.
    virtual std::vector<std::byte*> share(const std::vector<int>& neighbours, size_t bytes,
                                          const std::function<void(std::byte*)>& prepare) = 0;

    /// Links between those ranks that pass the same color, ordered by key, then rank. All ranks
    /// call it; null for a rank that would be alone.
    virtual std::unique_ptr<Links> split(int color, int key) = 0;

    /// Some rank is gone: this one must not wait for it when it leaves. May be called from any
    /// thread.
    virtual void abandon() = 0;

  protected:
    Links(int rank, std::vector<int> nodes) : rank_(rank), nodes_(std::move(nodes)) {}

  private:
    int rank_;
    std::vector<int> nodes_;
};

}  // namespace train_gpt
