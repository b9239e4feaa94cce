// What the collectives on CPUs use: messages between the ranks of a group, and memory that the
// ranks of one node share. There are two kinds of links: MPI's, and links between ranks that met
// over TCP. Both give the same sums, because the collectives (communicator_cpu.cpp) determine their
// order.
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

    // Messages between two ranks arrive in the order in which they were posted. Both ranks know the
    // number of bytes (0 < bytes ≤ most_message_bytes). The memory is in use until finish(). Both
    // functions return the message's number; numbers count up.
    virtual int64_t post_send(const std::byte* data, int64_t bytes, int to) = 0;
    virtual int64_t post_receive(std::byte* data, int64_t bytes, int from) = 0;
    /// Returns when all posted messages are sent and received. Until then it calls `look` again and
    /// again; `look` may throw. Throws Error if a rank is gone.
    virtual void finish(const std::function<void()>& look) = 0;
    /// Returns when this message is sent or received; other messages need not be. Calls `look` and
    /// throws as the function above.
    virtual void finish(int64_t message, const std::function<void()>& look) = 0;
    /// Moves what can be moved now.
    virtual void advance() = 0;
    static constexpr int64_t most_message_bytes = int64_t{1} << 30;

    /// Memory that `neighbours` share: ranks of this node, including this rank. All of them call it
    /// with the same list. Returns the address of each neighbour's part, in the order of the list.
    /// Each part has `bytes` bytes in pages of its own. `prepare` gets this rank's part before any
    /// other rank sees it. May be called once. Throws Error if there is not so much memory.
    virtual std::vector<std::byte*> share(const std::vector<int>& neighbours, size_t bytes,
                                          const std::function<void(std::byte*)>& prepare) = 0;

    /// Returns links between the ranks that pass the same color, ordered by key, then by rank.
    /// Returns null if no other rank passes this rank's color. All ranks call it.
    virtual std::unique_ptr<Links> split(int color, int key) = 0;

    /// Says that some rank is gone: when this rank leaves, it must not wait for the other ranks.
    /// May be called from any thread.
    virtual void abandon() = 0;

  protected:
    Links(int rank, std::vector<int> nodes) : rank_(rank), nodes_(std::move(nodes)) {}

  private:
    int rank_;
    std::vector<int> nodes_;
};

}  // namespace train_gpt
