#include "parallel/launch/rank_connections.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "parallel/net/pack.h"

namespace train_gpt {

using net::Channel, net::Clock, net::Duration, net::Socket, net::Time;
using namespace std::chrono_literals;

namespace {

// For a caller to show the key.
constexpr Duration introduction_limit = 5s;
// For a rank to answer its caller, and to be reached at all.
constexpr Duration answer_limit = 20s, call_limit = 60s;
// For a last word.
constexpr Duration farewell_limit = 1s;
// A rank reads all the time, so a message that is not taken for so long never will be.
constexpr Duration send_limit = std::chrono::hours(24);

constexpr size_t header_bytes = 1 + 8;
constexpr uint64_t longest_message = uint64_t{1} << 32;
constexpr size_t longest_purpose = 63;
// Ranks that call at the same time and strangers: the oldest makes room.
constexpr size_t most_newcomers = 64;

constexpr std::string_view link_name = "train_gpt link 2: ";

// What a rank answers to one that has called.
constexpr char taken = '+';

/// What a call is for: part of its name in clear, which both ends prove.
std::string kind_of(const std::string& purpose, bool is_encrypted) {
    return (is_encrypted ? "encrypted " : "clear ") + purpose;
}

}  // namespace

RankConnections::RankConnections(int rank, Meeting meeting, Duration grace)
    : rank_(rank),
      grace_(grace),
      known_(std::move(meeting.peers)),
      key_(std::move(meeting.key)),
      listener_(std::move(meeting.listener)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) throw Error("this rank cannot make an event: ", std::strerror(errno));
    peers_.resize(rank == 0 ? known_.size() : 1);
    for (size_t r = 0; r < peers_.size(); ++r) {
        if (static_cast<int>(r) == rank) continue;
        peers_[r] = std::make_unique<Peer>();
        peers_[r]->channel = std::move(meeting.channels[r]);
    }
    sigset_t all, before;  // signals go to the main thread
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { run(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

RankConnections::~RankConnections() {
    if (!is_abandoned_ && std::uncaught_exceptions() == 0) tell_all(Kind::goodbye, "");
    {
        const std::lock_guard lock(mutex_);
        is_leaving_ = true;
    }
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_.fd(), &one, sizeof one);
    thread_.join();
}

std::string RankConnections::name(int rank) const {
    return concat("rank ", rank, " (host ", known_[static_cast<size_t>(rank)].host, ")");
}

// ---- The main thread's part ---------------------------------------------------------------------

bool RankConnections::send_kind(Peer& peer, Kind kind, const std::string& text, Duration limit) {
    const Time deadline = Clock::now() + limit;
    const std::unique_lock lock(peer.sending, deadline);
    if (!lock) return false;
    return net::send_all(peer.channel, static_cast<char>(kind) + net::encode(text.size()),
                         deadline) &&
           net::send_all(peer.channel, text, deadline);
}

void RankConnections::tell_all(Kind kind, const std::string& text) {
    for (const auto& peer : peers_)
        if (peer) send_kind(*peer, kind, text, farewell_limit);
}

void RankConnections::send(int to, const std::string& text) {
    if (!send_kind(peer(to), Kind::message, text, send_limit))
        throw Error(name(to), " is gone: ", std::strerror(errno));
}

std::string RankConnections::receive(int from) {
    std::unique_lock lock(mutex_);
    Peer& sender = peer(from);
    changed_.wait(lock,
                  [&] { return !sender.messages.empty() || sender.has_left || sender.has_ended; });
    if (sender.messages.empty())
        throw Error(name(from), sender.has_left
                                    ? " has left already; the ranks are not at the same "
                                      "place of the program, please report it"
                                    : " is gone: its connection ended");
    std::string text = std::move(sender.messages.front());
    sender.messages.pop_front();
    return text;
}

Channel RankConnections::call(int rank, const std::string& purpose, bool is_encrypted) {
    const Meeting::RankAddress& other = known_[static_cast<size_t>(rank)];
    if (purpose.size() > longest_purpose)
        throw Error(
            "the group of ranks ", purpose,
            " is too deep a part of others; this is a fault of the program, please report it");
    const std::string identity =
        concat(link_name, rank_, " to ", rank, " ", kind_of(purpose, is_encrypted));
    const Time end = Clock::now() + call_limit;
    std::string reasons;
    for (Duration patience = 2s; Clock::now() < end;
         patience = std::min<Duration>(2 * patience, 8s)) {
        reasons.clear();
        for (const std::string& address : other.addresses) {
            errno = 0;
            Socket socket = net::connect_to(address, other.port, Clock::now() + patience);
            if (socket) {
                net::send_at_once(socket);
                const Time deadline = Clock::now() + answer_limit;
                Channel channel =
                    Channel::call(std::move(socket), identity, net::derive_key(key_, identity));
                char answer = 0;
                if (net::shake_hands(channel, deadline) &&
                    net::read_all(channel, {&answer, 1}, deadline) && answer == taken)
                    return is_encrypted ? std::move(channel)
                                        : Channel(std::move(channel).release());
            }
            reasons += concat(reasons.empty() ? "" : ", ", address, " (",
                              errno ? std::strerror(errno) : "no answer", ")");
        }
        std::this_thread::sleep_for(100ms);
    }
    throw Error(RankConnections::name(rank_), " could not reach ", name(rank), " at TCP port ",
                other.port, " of ", reasons,
                "; the hosts of a job must be able to connect to one another");
}

Channel RankConnections::take_caller(int rank, const std::string& purpose, bool is_encrypted) {
    const std::lock_guard lock(mutex_);
    const auto found = callers_.find({rank, kind_of(purpose, is_encrypted)});
    if (found == callers_.end()) return {};
    Channel channel = std::move(found->second);
    callers_.erase(found);
    return channel;
}

void RankConnections::abort(int exit_code) {
    tell_all(Kind::abort, std::to_string(exit_code));
    std::_Exit(exit_code);
}

// ---- The thread's part --------------------------------------------------------------------------

void RankConnections::run() {
    std::vector<pollfd> polls;
    std::vector<int> ranks;
    while (true) {
        polls = {{wake_.fd(), POLLIN, 0}};
        listener_.enlist(polls);
        ranks.clear();
        for (size_t r = 0; r < peers_.size(); ++r) {
            if (!peers_[r] || peers_[r]->has_ended) continue;
            ranks.push_back(static_cast<int>(r));
            polls.push_back({peers_[r]->channel.fd(), POLLIN, 0});
        }
        const size_t first_newcomer = polls.size();
        for (const Newcomer& newcomer : newcomers_)
            polls.push_back({newcomer.channel.fd(), newcomer.channel.events(), 0});
        const bool waited = ::poll(polls.data(), polls.size(), 500) >= 0;
        {
            const std::lock_guard lock(mutex_);
            if (is_leaving_) return;
        }
        if (!waited) continue;
        for (size_t i = 0; i < ranks.size(); ++i)
            if (polls[2 + i].revents) read_from(ranks[i]);
        for (size_t i = 0; i < newcomers_.size(); ++i)
            if (polls[first_newcomer + i].revents) hear(newcomers_[i]);
        std::erase_if(newcomers_, [](const Newcomer& newcomer) {
            return newcomer.is_done || Clock::now() >= newcomer.until;
        });
        if (polls[1].revents) admit_callers();
        end_where_others_have();
    }
}

void RankConnections::read_from(int rank) {
    Peer& sender = peer(rank);
    bool has_failed = false;
    do {
        char bytes[1 << 16];
        const ssize_t n = sender.channel.read(bytes, sizeof bytes);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
        has_failed = n <= 0;
        if (n > 0) sender.received.append(bytes, static_cast<size_t>(n));
    } while (!has_failed && sender.channel.has_unread());
    size_t at = 0;
    while (sender.received.size() - at >= header_bytes) {
        const std::string_view rest = std::string_view(sender.received).substr(at);
        const uint64_t length = net::decode(rest.substr(1));
        const bool is_garbled = rest[0] < static_cast<char>(Kind::message) ||
                                rest[0] > static_cast<char>(Kind::abort) ||
                                length > longest_message;
        has_failed |= is_garbled;
        if (is_garbled || rest.size() - header_bytes < length) break;
        handle(sender, static_cast<Kind>(rest[0]), std::string(rest.substr(header_bytes, length)));
        at += header_bytes + length;
    }
    sender.received.erase(0, at);
    if (!has_failed) return;
    const std::lock_guard lock(mutex_);
    sender.has_ended = true;
    if (!sender.has_left) sender.deadline = Clock::now() + grace_;
    changed_.notify_all();
}

void RankConnections::handle(Peer& peer, Kind kind, std::string text) {
    if (kind == Kind::abort) {
        if (rank_ == 0) tell_all(Kind::abort, text);
        std::_Exit(std::max(1, std::atoi(text.c_str())));
    }
    const std::lock_guard lock(mutex_);
    if (kind == Kind::goodbye)
        peer.has_left = true;
    else
        peer.messages.push_back(std::move(text));
    changed_.notify_all();
}

void RankConnections::admit_callers() {
    for (size_t count = 0; count < most_newcomers; ++count) {
        Socket socket = listener_.admit();
        if (!socket) {
            if (listener_.is_paused() && !newcomers_.empty()) newcomers_.erase(newcomers_.begin());
            return;
        }
        if (newcomers_.size() >= most_newcomers) {
            const auto silent = std::ranges::find_if(newcomers_, [](const Newcomer& newcomer) {
                return newcomer.channel.identity().empty();
            });
            newcomers_.erase(silent == newcomers_.end() ? newcomers_.begin() : silent);
        }
        net::send_at_once(socket);
        newcomers_.push_back(
            {Channel::answer(std::move(socket),
                             [this](const std::string& identity) { return key_of(identity); }),
             Clock::now() + introduction_limit});
    }
}

std::string RankConnections::key_of(const std::string& identity) const {
    return identity.starts_with(link_name) ? net::derive_key(key_, identity) : "";
}

/// A caller that has proved its name becomes one of callers_.
void RankConnections::hear(Newcomer& newcomer) {
    const Channel::Handshake state = newcomer.channel.handshake();
    if (state == Channel::Handshake::pending) return;
    newcomer.is_done = true;
    if (state == Channel::Handshake::failed) return;
    std::istringstream words(newcomer.channel.identity().substr(link_name.size()));
    std::string to, kind, purpose;
    int from = -1, called = -1;
    if (!(words >> from >> to >> called >> kind >> purpose) || called != rank_ || from < 0 ||
        from >= static_cast<int>(known_.size()))
        return;
    const std::lock_guard lock(mutex_);
    if (!net::send_all(newcomer.channel, {&taken, 1}, Clock::now() + farewell_limit)) return;
    callers_.insert_or_assign({from, kind + " " + purpose},
                              kind == "encrypted" ? std::move(newcomer.channel)
                                                  : Channel(std::move(newcomer.channel).release()));
}

void RankConnections::end_where_others_have() {
    for (size_t r = 0; r < peers_.size(); ++r) {
        if (!peers_[r] || Clock::now() < peers_[r]->deadline) continue;
        std::fprintf(stderr, "train_gpt: %s has ended, and so the other ranks end\n",
                     printable_line(name(static_cast<int>(r))).c_str());
        abort(1);
    }
}

}  // namespace train_gpt
