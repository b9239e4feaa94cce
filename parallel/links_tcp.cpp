#include "parallel/links_tcp.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <numeric>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/error.h"
#include "parallel/patience.h"

namespace train_gpt {

namespace {

/// Shared memory that is mapped here, and has a name until forget().
class Segment {
  public:
    /// Makes it, with zeros. Throws Error if there is not so much memory.
    static Segment make(const std::string& name, size_t bytes) {
        const net::Socket file(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600));
        Segment segment;
        if (file) segment.name_ = name;
        // Takes the pages now: later there would be a signal instead of a reason.
        const int failure =
            file ? ::posix_fallocate(file.fd(), 0, static_cast<off_t>(bytes)) : errno;
        if (failure != 0)
            throw Error("ranks on one host cannot share ", bytes >> 10,
                        " KiB of memory each: ", std::strerror(failure),
                        "; see `df /dev/shm` (containers: --shm-size=1g)");
        segment.map(file, bytes);
        return segment;
    }
    static Segment open(const std::string& name, size_t bytes) {
        const net::Socket file(::shm_open(name.c_str(), O_RDWR, 0));
        if (!file)
            throw Error("the memory that another rank of this host shares is not there: ",
                        std::strerror(errno));
        Segment segment;
        segment.map(file, bytes);
        return segment;
    }
    Segment(Segment&& other) noexcept
        : name_(std::exchange(other.name_, "")),
          memory_(std::exchange(other.memory_, nullptr)),
          bytes_(other.bytes_) {}
    Segment& operator=(Segment&&) = delete;
    ~Segment() {
        forget();
        if (memory_) ::munmap(memory_, bytes_);
    }
    std::byte* memory() const { return static_cast<std::byte*>(memory_); }
    /// The memory is freed when no process has it mapped any more.
    void forget() {
        if (!std::exchange(name_, "").empty()) ::shm_unlink(unlinked_.c_str());
    }

  private:
    Segment() = default;
    void map(const net::Socket& file, size_t bytes) {
        unlinked_ = name_;
        bytes_ = bytes;
        void* const memory =
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(), 0);
        if (memory == MAP_FAILED)
            throw Error("shared memory cannot be mapped: ", std::strerror(errno));
        memory_ = memory;
    }

    std::string name_, unlinked_;
    void* memory_ = nullptr;
    size_t bytes_ = 0;
};

/// Lower ranks are called by higher ones. Each pair of ranks of a group has a connection of its
/// own, made when it is first needed.
class TcpLinks final : public Links {
  public:
    explicit TcpLinks(TcpGroup group)
        : Links(group.rank, group.nodes), group_(std::move(group)), peers_(group_.ranks.size()) {}

    int64_t post_send(const std::byte* data, int64_t bytes, int to) override {
        peer(to).sends.push_back({data, static_cast<size_t>(bytes), posted_});
        set_busy(to);
        return posted_++;
    }

    int64_t post_receive(std::byte* data, int64_t bytes, int from) override {
        peer(from).receives.push_back({data, static_cast<size_t>(bytes), posted_});
        set_busy(from);
        return posted_++;
    }

    void finish(const std::function<void()>& look) override {
        finish([this] { return busy_.empty(); }, look);
    }

    void finish(int64_t message, const std::function<void()>& look) override {
        const auto is_in = [&](const auto& messages) {
            return std::ranges::any_of(messages,
                                       [&](const auto& m) { return m.number == message; });
        };
        finish(
            [&] {
                return std::ranges::none_of(busy_, [&](int rank) {
                    return is_in(peer(rank).sends) || is_in(peer(rank).receives);
                });
            },
            look);
    }

    void advance() override { advance_all(); }
    std::vector<std::byte*> share(const std::vector<int>& neighbours, size_t bytes,
                                  const std::function<void(std::byte*)>& prepare) override {
        const auto name = [&](int rank) {
            return concat("/train_gpt-", group_.job, "-", group_.label, "-", rank);
        };
        const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
        bytes = (bytes + page - 1) / page * page;
        Segment mine = Segment::make(name(rank()), bytes);
        prepare(mine.memory());
        meet(neighbours);
        std::vector<std::byte*> parts;
        for (const int neighbour : neighbours) {
            if (neighbour == rank()) {
                parts.push_back(mine.memory());
            } else {
                segments_.push_back(Segment::open(name(neighbour), bytes));
                parts.push_back(segments_.back().memory());
            }
        }
        meet(neighbours);
        mine.forget();
        segments_.push_back(std::move(mine));
        return parts;
    }

    std::unique_ptr<Links> split(int color, int key) override {
        // Through the group's first rank: (color, key) of all ranks.
        struct Choice {
            int64_t color, key;
        };
        std::vector<Choice> choices(group_.ranks.size());
        choices[static_cast<size_t>(rank())] = {color, key};
        const auto exchange = [&](bool back) {
            for (int r = 1; r < size(); ++r) {
                if (rank() != 0 && rank() != r) continue;
                const bool whole = back;
                auto* const data = reinterpret_cast<std::byte*>(
                    whole ? choices.data() : &choices[static_cast<size_t>(r)]);
                const auto bytes =
                    static_cast<int64_t>((whole ? choices.size() : 1) * sizeof(Choice));
                const int other = rank() == 0 ? r : 0;
                if ((rank() == 0) == back)
                    post_send(data, bytes, other);
                else
                    post_receive(data, bytes, other);
            }
            finish([] {});
        };
        exchange(false);
        exchange(true);

        const int part_number = parts_++;
        std::vector<int> members;
        for (int r = 0; r < size(); ++r)
            if (choices[static_cast<size_t>(r)].color == color) members.push_back(r);
        std::ranges::stable_sort(members, {},
                                 [&](int r) { return choices[static_cast<size_t>(r)].key; });
        if (members.size() == 1) return nullptr;
        TcpGroup part{group_.connections,
                      group_.job,
                      concat(group_.label, ".", part_number, "-", color),
                      {},
                      {},
                      static_cast<int>(std::ranges::find(members, rank()) - members.begin()),
                      group_.encrypt};
        for (const int r : members) {
            part.ranks.push_back(group_.ranks[static_cast<size_t>(r)]);
            part.nodes.push_back(nodes()[static_cast<size_t>(r)]);
        }
        return std::make_unique<TcpLinks>(std::move(part));
    }

    void abandon() override { group_.connections->abandon(); }

  private:
    template <class Byte>
    struct Message {
        Byte* data;
        size_t bytes;
        int64_t number;
    };
    struct Peer {
        net::Channel channel;
        std::deque<Message<const std::byte>> sends;
        std::deque<Message<std::byte>> receives;
    };
    Peer& peer(int rank) { return peers_[static_cast<size_t>(rank)]; }
    int in_world(int rank) const { return group_.ranks[static_cast<size_t>(rank)]; }
    void set_busy(int rank) {
        if (std::ranges::find(busy_, rank) == busy_.end()) busy_.push_back(rank);
    }

    /// Whether anything moved.
    bool advance_all() {
        bool moved = false;
        for (const int rank : busy_) moved |= advance(rank);
        std::erase_if(busy_, [&](int rank) {
            return peer(rank).sends.empty() && peer(rank).receives.empty();
        });
        return moved;
    }

    template <class Done>
    void finish(Done&& done, const std::function<void()>& look) {
        Patience patience;
        while (!done()) {
            const bool moved = advance_all();
            if (done()) return;
            look();
            if (moved)
                patience = {};
            else if (patience.is_over())
                wait();
            else
                patience.pause();
        }
    }

    [[noreturn]] void fail(int rank, const char* reason) const {
        throw Error(group_.connections->name(in_world(rank)), " is gone: ", reason,
                    "; look for the rank that failed first");
    }

    /// Moves what can be moved now; whether that is anything.
    bool advance(int rank) {
        Peer& other = peer(rank);
        if (!other.channel) {
            RankConnections& connections = *group_.connections;
            other.channel =
                this->rank() > rank
                    ? connections.call(in_world(rank), group_.label, group_.encrypt)
                    : connections.take_caller(in_world(rank), group_.label, group_.encrypt);
            if (!other.channel) return false;
        }
        bool moved = false;
        const auto move_all = [&](auto& messages, auto&& transfer) {
            while (!messages.empty()) {
                auto& message = messages.front();
                const ssize_t n = transfer(message);
                if (n == 0) fail(rank, "its connection ended");
                if (n < 0) {
                    if (errno == EAGAIN) return;
                    if (errno != EINTR) fail(rank, std::strerror(errno));
                    continue;
                }
                moved = true;
                message.data += n;
                message.bytes -= static_cast<size_t>(n);
                if (message.bytes == 0) messages.pop_front();
            }
        };
        move_all(other.sends, [&](const auto& message) {
            return other.channel.write(reinterpret_cast<const char*>(message.data), message.bytes);
        });
        move_all(other.receives, [&](const auto& message) {
            return other.channel.read(reinterpret_cast<char*>(message.data), message.bytes);
        });
        return moved;
    }

    /// Sleeps until something can be moved, or a few milliseconds.
    void wait() {
        std::vector<pollfd> polls;
        for (const int rank : busy_) {
            const Peer& other = peer(rank);
            if (!other.channel) continue;
            const int events =
                (other.sends.empty() ? 0 : POLLOUT) | (other.receives.empty() ? 0 : POLLIN);
            polls.push_back({other.channel.fd(), static_cast<short>(events), 0});
        }
        ::poll(polls.data(), polls.size(), 2);
    }

    /// Returns when all of these ranks have come here.
    void meet(const std::vector<int>& ranks) {
        const int first = ranks.front();
        std::vector<std::byte> words(ranks.size());
        for (const bool back : {false, true}) {
            for (size_t i = 1; i < ranks.size(); ++i) {
                if (rank() != first && rank() != ranks[i]) continue;
                const int other = rank() == first ? ranks[i] : first;
                if ((rank() == first) == back)
                    post_send(&words[i], 1, other);
                else
                    post_receive(&words[i], 1, other);
            }
            finish([] {});
        }
    }

    TcpGroup group_;
    std::vector<Peer> peers_;
    std::vector<int> busy_;  // with messages that are not finished
    int64_t posted_ = 0;     // messages so far
    std::vector<Segment> segments_;
    int parts_ = 0;  // that split() has made
};

std::string name_of_mark(const std::string& job, int rank) {
    return concat("/train_gpt-", job, "-mark-", rank);
}

constexpr size_t mark_bytes = 16;

}  // namespace

SharedMark::SharedMark(const std::string& job, int rank) : name_(name_of_mark(job, rank)) {
    const net::Socket file(::shm_open(name_.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600));
    const std::string random = net::random_text(mark_bytes);
    if (file && ::write(file.fd(), random.data(), mark_bytes) == ssize_t{mark_bytes})
        contents_ = random;
}

SharedMark::~SharedMark() { ::shm_unlink(name_.c_str()); }

bool SharedMark::is_seen(const std::string& job, int rank, const std::string& contents) {
    const net::Socket file(::shm_open(name_of_mark(job, rank).c_str(), O_RDONLY, 0));
    std::array<char, mark_bytes> seen;
    return file && ::read(file.fd(), seen.data(), seen.size()) == ssize_t{mark_bytes} &&
           std::string_view(seen.data(), seen.size()) == contents;
}

std::unique_ptr<Links> open_tcp_links(TcpGroup group) {
    return std::make_unique<TcpLinks>(std::move(group));
}

}  // namespace train_gpt
