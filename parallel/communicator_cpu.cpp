// Collectives in host memory. The ranks of a node exchange data through shared memory. Nodes
// exchange data through messages (links.h), which MPI or TCP carries.
//
// The buffer of a collective consists of blocks, one for each rank of the group, which owns it. On
// every node each block has a handler: the owner itself if it belongs to the node, else one of the
// node's ranks, which communicates with the owner for the whole node.
//   reduce-scatter: the handler adds the node's contributions to the block and sends the sum to the
//                   owner, which adds the sums of all nodes.
//   all-gather:     the owner sends its block to its handler on each other node, and every handler
//                   shows its blocks to its node.
// So a block crosses between two nodes once, and the elements of all blocks are summed in the same
// order: within a node by rank, then by node. Buffers are processed in turns, each of which moves
// an equal piece of every block through the shared memory. Sums travel between nodes in the type in
// which they are added; sums of bf16 are added and travel as fp32. An all-reduce is a
// reduce-scatter and an all-gather. A broadcast is an all-gather in which all blocks but the root's
// are empty.
#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "parallel/combine.h"
#include "parallel/communicator_kinds.h"
#include "parallel/launch/membership.h"
#include "parallel/links.h"
#include "parallel/patience.h"

namespace train_gpt {

namespace {

// What a rank shows to its node in one turn: large enough that synchronizing costs little compared
// with copying, small enough to stay in caches while others read it.
constexpr size_t slot_bytes = size_t{1} << 20;
constexpr size_t cache_line = 64;

class CpuCommunicator final : public Communicator {
  public:
    CpuCommunicator(std::unique_ptr<Links> links, Activity& activity)
        : Communicator(links->rank(), links->size()),
          activity_(activity),
          links_(std::move(links)) {
        find_handlers();
        allocate();
    }

    void all_reduce(Stream&, void* data, int64_t count, DType dtype, Reduction reduction) override {
        activity_.enter("all-reduce");
        reduce_everywhere(data, count, dtype, reduction);
    }

    void reduce_scatter(Stream&, void* out, void* in, int64_t count, DType dtype) override {
        activity_.enter("reduce-scatter");
        for_each_turn(count, dtype, [&](int64_t first, int64_t n) {
            for (int b = 0; b < size(); ++b) piece(b) = {at(in, b * count + first, dtype), n};
            reduce_pieces(at(out, first, dtype), dtype, Reduction::sum);
        });
    }

    void all_gather(Stream&, void* out, const void* in, int64_t count, DType dtype) override {
        activity_.enter("all-gather");
        std::byte* mine = at(out, rank() * count, dtype);
        if (mine != in)
            copy_bytes(mine, static_cast<const std::byte*>(in), bytes_of({mine, count}, dtype));
        for_each_turn(count, dtype, [&](int64_t first, int64_t n) {
            for (int b = 0; b < size(); ++b) piece(b) = {at(out, b * count + first, dtype), n};
            share_pieces(dtype);
        });
    }

    void broadcast(Stream&, void* data, int64_t count, DType dtype, int root) override {
        activity_.enter("broadcast");
        for_each_turn(count, dtype, [&](int64_t first, int64_t n) {
            for (int b = 0; b < size(); ++b) piece(b) = {at(data, first, dtype), b == root ? n : 0};
            share_pieces(dtype);
        });
    }

    void send(Stream& stream, const void* data, int64_t count, DType dtype, int to) override {
        finish(post_send(stream, data, count, dtype, to));
    }

    void receive(Stream& stream, void* data, int64_t count, DType dtype, int from) override {
        finish(post_receive(stream, data, count, dtype, from));
    }

    Message post_send(Stream&, const void* data, int64_t count, DType dtype, int to) override {
        activity_.enter("send");
        const auto* bytes = static_cast<const std::byte*>(data);
        bytes_sent_ += count * static_cast<int64_t>(size_of(dtype));
        return post(count, dtype, [&](int64_t first, int64_t n) {
            return links_->post_send(bytes + first, n, to);
        });
    }

    Message post_receive(Stream&, void* data, int64_t count, DType dtype, int from) override {
        activity_.enter("receive");
        auto* bytes = static_cast<std::byte*>(data);
        return post(count, dtype, [&](int64_t first, int64_t n) {
            return links_->post_receive(bytes + first, n, from);
        });
    }

    void finish(const Message& message) override {
        for (int64_t m = message.first; m < message.end; ++m)
            links_->finish(m, [this] { check(); });
    }

    void barrier(Stream&) override {
        activity_.enter("barrier");
        int32_t nothing = 0;  // no rank gets the sum before all have contributed
        reduce_everywhere(&nothing, 1, DType::int32, Reduction::sum);
    }

    std::unique_ptr<Communicator> split(int color, int key, int /*max_ctas*/) override {
        activity_.enter("split");
        assert(color >= 0);
        if (std::unique_ptr<Links> part = links_->split(color, key))
            return std::make_unique<CpuCommunicator>(std::move(part), activity_);
        return open_group_of_one(activity_);
    }

    void check() override {
        if (is_aborted_)
            throw Error("rank ", rank(), " of ", size(), " abandoned the collective ",
                        activity_.collective.load(), ", since another rank is gone");
    }

    void abort() override {
        links_->abandon();
        is_aborted_ = true;
    }

  private:
    /// The part of a block that one turn moves.
    struct Piece {
        std::byte* data = nullptr;
        int64_t n = 0;
    };
    Piece& piece(int block) { return pieces_[static_cast<size_t>(block)]; }
    static int64_t bytes_of(const Piece& piece, DType dtype) {
        return piece.n * static_cast<int64_t>(size_of(dtype));
    }
    static std::byte* at(void* data, int64_t element, DType dtype) {
        return static_cast<std::byte*>(data) + element * static_cast<int64_t>(size_of(dtype));
    }

    /// The turn that a rank of the node has reached; other processes read it.
    struct alignas(cache_line) Arrivals {
        std::atomic<int64_t> turns{0};
    };
    static_assert(std::atomic<int64_t>::is_always_lock_free);

    void find_handlers() {
        const std::vector<int>& node_of = links_->nodes();
        std::vector<int> names;                 // of nodes, ordered by their first ranks
        std::vector<std::vector<int>> members;  // ranks of each node
        std::vector<size_t> place;              // of each rank within its node
        for (int r = 0; r < size(); ++r) {
            const int name = node_of[static_cast<size_t>(r)];
            const auto k = static_cast<size_t>(std::ranges::find(names, name) - names.begin());
            if (k == names.size()) {
                names.push_back(name);
                members.emplace_back();
            }
            place.push_back(members[k].size());
            members[k].push_back(r);
        }
        my_node_ = static_cast<size_t>(
            std::ranges::find(names, node_of[static_cast<size_t>(rank())]) - names.begin());
        neighbours_ = members[my_node_];
        local_ = place[static_cast<size_t>(rank())];
        locals_ = members[my_node_].size();
        for (int b = 0; b < size(); ++b) {
            handler_.push_back(place[static_cast<size_t>(b)] % locals_);
            if (handler_.back() == local_ && b != rank()) guests_.push_back(b);
        }
        for (const std::vector<int>& ranks : members)
            handler_on_node_.push_back(ranks[local_ % ranks.size()]);
    }

    void allocate() {
        stride_ =
            std::max(slot_bytes / static_cast<size_t>(size()) / cache_line, size_t{1}) * cache_line;
        const size_t slot = stride_ * static_cast<size_t>(size());
        // Addresses differ between processes, but by whole pages, so all find the same alignment.
        const auto aligned = [](std::byte* part) {
            const size_t beyond = reinterpret_cast<uintptr_t>(part) % cache_line;
            return part + (beyond ? cache_line - beyond : 0);
        };
        const std::vector<std::byte*> parts =
            links_->share(neighbours_, cache_line + sizeof(Arrivals) + 2 * slot,
                          [&](std::byte* mine) { new (aligned(mine)) Arrivals; });
        for (std::byte* part : parts) {
            std::byte* const begin = aligned(part);
            arrivals_.push_back(reinterpret_cast<Arrivals*>(begin));
            slots_.push_back({begin + sizeof(Arrivals), begin + sizeof(Arrivals) + slot});
        }

        const size_t nodes = handler_on_node_.size();
        pieces_.resize(static_cast<size_t>(size()));
        if (nodes > 1)
            sums_.resize((nodes + guests_.size()) * 2 * stride_);  // sums of bf16 are fp32
    }

    int64_t piece_elements(DType dtype) const {
        return static_cast<int64_t>(stride_ / size_of(dtype));
    }

    /// Calls turn(first, n) for each turn, which moves elements [first, first + n) of every block
    /// of `count` elements.
    template <class Turn>
    void for_each_turn(int64_t count, DType dtype, Turn&& turn) const {
        const int64_t most = piece_elements(dtype);
        for (int64_t first = 0; first < count; first += most)
            turn(first, std::min(most, count - first));
    }

    void reduce_everywhere(void* data, int64_t count, DType dtype, Reduction reduction) {
        const int64_t most = piece_elements(dtype) * size();
        for (int64_t first = 0; first < count; first += most) {
            const int64_t n = std::min(most, count - first), share = (n + size() - 1) / size();
            for (int b = 0; b < size(); ++b) {
                const int64_t begin = std::min(n, b * share), end = std::min(n, begin + share);
                piece(b) = {at(data, first + begin, dtype), end - begin};
            }
            reduce_pieces(piece(rank()).data, dtype, reduction);
            share_pieces(dtype);
        }
    }

    /// out = the sum, or the maximum, over ranks of their piece of this rank's block.
    void reduce_pieces(std::byte* out, DType dtype, Reduction reduction) {
        ++turn_;
        for (int b = 0; b < size(); ++b) {
            if (handler_[static_cast<size_t>(b)] != local_) show(b, dtype, 1);
        }
        meet();
        with_collective_type(dtype, [&]<class T>(T) {
            using Sum = SumOf<T>;
            const int64_t n = piece(rank()).n;
            if (handler_on_node_.size() == 1) {
                combine<T>(reduction, neighbours_pieces(rank()), reinterpret_cast<T*>(out), n);
                return;
            }
            // The sums of all nodes for this rank's own block, then this node's sums for its
            // guests.
            std::byte* sum = sums_.data();
            node_sums_.clear();
            for (size_t k = 0; k < handler_on_node_.size(); ++k, sum += 2 * stride_) {
                node_sums_.push_back(sum);
                if (k == my_node_) {
                    combine<T>(reduction, neighbours_pieces(rank()), reinterpret_cast<Sum*>(sum),
                               n);
                } else {
                    post_receive(sum, n * static_cast<int64_t>(sizeof(Sum)), handler_on_node_[k]);
                }
            }
            for (const int b : guests_) {
                combine<T>(reduction, neighbours_pieces(b), reinterpret_cast<Sum*>(sum),
                           piece(b).n);
                post_send(sum, piece(b).n * static_cast<int64_t>(sizeof(Sum)), b);
                sum += 2 * stride_;
            }
            finish_messages();
            combine<Sum>(reduction, node_sums_, reinterpret_cast<T*>(out), n);
        });
    }

    /// Gives every rank's piece of its own block to all ranks.
    void share_pieces(DType dtype) {
        ++turn_;
        for (size_t k = 0; k < handler_on_node_.size(); ++k) {
            if (k != my_node_)
                post_send(piece(rank()).data, bytes_of(piece(rank()), dtype), handler_on_node_[k]);
        }
        for (const int b : guests_) post_receive(piece(b).data, bytes_of(piece(b), dtype), b);
        finish_messages();
        if (locals_ > 1) {
            const auto readers = static_cast<int64_t>(locals_) - 1;
            show(rank(), dtype, readers);
            for (const int b : guests_) show(b, dtype, readers);
        }
        meet();
        for (int b = 0; b < size(); ++b) {
            const size_t handler = handler_[static_cast<size_t>(b)];
            if (handler != local_)
                copy_bytes(piece(b).data, slot(handler, b), bytes_of(piece(b), dtype));
        }
    }

    /// Copies a block's piece to where the node's ranks can see it.
    void show(int block, DType dtype, int64_t readers) {
        const int64_t bytes = bytes_of(piece(block), dtype);
        copy_bytes(slot(local_, block), piece(block).data, bytes);
        bytes_sent_ += readers * bytes;
    }

    /// The pieces of a block that this rank handles, from the node's ranks in their order.
    const std::vector<const void*>& neighbours_pieces(int block) {
        shown_.clear();
        for (size_t j = 0; j < locals_; ++j)
            shown_.push_back(j == local_ ? piece(block).data : slot(j, block));
        return shown_;
    }

    /// Where a rank of the node shows a block in this turn. A slot is overwritten two turns later:
    /// by then all ranks have reached the turn in between, and so have read it.
    std::byte* slot(size_t local, int block) const {
        return slots_[local][static_cast<size_t>(turn_ % 2)] + static_cast<size_t>(block) * stride_;
    }

    /// Returns when all ranks of the node have reached this turn.
    void meet() {
        arrivals_[local_]->turns.store(turn_, std::memory_order_release);
        Patience patience;
        for (const Arrivals* other : arrivals_) {
            while (other->turns.load(std::memory_order_acquire) < turn_) {
                check();
                patience.pause();
            }
        }
    }

    /// Posts all bytes, in messages that links carry.
    template <class Post>
    Message post(int64_t count, DType dtype, Post&& post_one) {
        const int64_t total = count * static_cast<int64_t>(size_of(dtype));
        Message message;
        for (int64_t first = 0; first < total; first += Links::most_message_bytes) {
            const int64_t number =
                post_one(first, std::min(Links::most_message_bytes, total - first));
            if (first == 0) message.first = number;
            message.end = number + 1;
        }
        links_->advance();
        return message;
    }

    void post_send(const std::byte* data, int64_t bytes, int to) {
        if (bytes == 0) return;
        links_->post_send(data, bytes, to);
        bytes_sent_ += bytes;
    }

    void post_receive(std::byte* data, int64_t bytes, int from) {
        if (bytes > 0) links_->post_receive(data, bytes, from);
    }

    void finish_messages() {
        links_->finish([this] { check(); });
    }

    Activity& activity_;
    std::unique_ptr<Links> links_;
    std::atomic<bool> is_aborted_{false};

    size_t my_node_ = 0;             // among the group's nodes, ordered by their first ranks
    size_t local_ = 0, locals_ = 1;  // this rank's index on its node, and the node's ranks
    std::vector<size_t> handler_;    // of each block on this node, as an index
    std::vector<int> guests_;        // other nodes' ranks whose blocks this rank handles
    std::vector<int>
        handler_on_node_;  // the rank that handles this rank's block on each node; here itself

    std::vector<int> neighbours_;      // the node's ranks of this group, with this one
    std::vector<Arrivals*> arrivals_;  // in their shared memory, as the two slots of each
    std::vector<std::array<std::byte*, 2>> slots_;
    size_t stride_ = 0;  // bytes from block to block in a slot
    int64_t turn_ = 0;

    // Reused in each turn.
    std::vector<Piece> pieces_;
    std::vector<const void*> shown_, node_sums_;
    std::vector<std::byte> sums_;
};

}  // namespace

std::unique_ptr<Communicator> open_cpu_communicator(const World& world, Activity& activity,
                                                    std::optional<int> node,
                                                    const CollectiveSettings& settings) {
    std::unique_ptr<Links> links = world.membership()->open_links(node, settings.encrypt);
    if (!links) return open_group_of_one(activity);
    return std::make_unique<CpuCommunicator>(std::move(links), activity);
}

}  // namespace train_gpt
