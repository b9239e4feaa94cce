#include "parallel/launch/rank_connections.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"
#include "parallel/net/pack.h"

namespace train_gpt {

using net::Clock, net::Duration, net::Socket, net::Time;
using namespace std::chrono_literals;

namespace {

// For a rank whose peer has ended without goodbye to end by itself: a watchdog, where there is one,
// knows more about the failure and needs less time.
constexpr Duration grace = 10s;
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
constexpr size_t half_key = 16, purpose_bytes = 64;
constexpr size_t call_bytes = half_key + 8 + purpose_bytes;
constexpr size_t most_newcomers = 1024;

}  // namespace

RankConnections::RankConnections(int rank, Meeting meeting)
    : rank_(rank),
      known_(std::move(meeting.peers)),
      key_(std::move(meeting.key)),
      listener_(std::move(meeting.listener)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!wake_) throw Error("this rank cannot make an event: ", std::strerror(errno));
    peers_.resize(rank == 0 ? known_.size() : 1);
    for (size_t r = 0; r < peers_.size(); ++r) {
        if (static_cast<int>(r) == rank) continue;
        peers_[r] = std::make_unique<Peer>();
        peers_[r]->socket = std::move(meeting.sockets[r]);
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
    return net::send_all(peer.socket, static_cast<char>(kind) + net::encode(text.size()),
                         deadline) &&
           net::send_all(peer.socket, text, deadline);
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

Socket RankConnections::call(int rank, const std::string& purpose) {
    const Meeting::Peer& other = known_[static_cast<size_t>(rank)];
    if (purpose.size() >= purpose_bytes)
        throw Error(
            "the group of ranks ", purpose,
            " is too deep a part of others; this is a fault of the program, please report it");
    const std::string message = key_.substr(0, half_key) +
                                net::encode(static_cast<uint64_t>(rank_)) + purpose +
                                std::string(purpose_bytes - purpose.size(), '\0');
    const Time end = Clock::now() + call_limit;
    std::string reasons;
    for (Duration patience = 2s; Clock::now() < end;
         patience = std::min<Duration>(2 * patience, 8s)) {
        reasons.clear();
        for (const std::string& address : other.addresses) {
            Socket socket = net::connect_to(address, other.port, Clock::now() + patience);
            std::string answer(key_.size() - half_key, '\0');
            const Time deadline = Clock::now() + answer_limit;
            if (socket && net::send_all(socket, message, deadline) &&
                net::read_all(socket, answer, deadline) &&
                net::equal_secrets(answer, std::string_view(key_).substr(half_key))) {
                net::send_at_once(socket);
                return socket;
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

Socket RankConnections::take_caller(int rank, const std::string& purpose) {
    const std::lock_guard lock(mutex_);
    const auto found = callers_.find({rank, purpose});
    if (found == callers_.end()) return {};
    Socket socket = std::move(found->second);
    callers_.erase(found);
    return socket;
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
        polls = {{wake_.fd(), POLLIN, 0}, {listener_.fd(), POLLIN, 0}};
        ranks.clear();
        for (size_t r = 0; r < peers_.size(); ++r) {
            if (!peers_[r] || peers_[r]->has_ended) continue;
            ranks.push_back(static_cast<int>(r));
            polls.push_back({peers_[r]->socket.fd(), POLLIN, 0});
        }
        const size_t first_newcomer = polls.size();
        for (const Newcomer& newcomer : newcomers_)
            polls.push_back({newcomer.socket.fd(), POLLIN, 0});
        const bool waited = ::poll(polls.data(), polls.size(), 500) >= 0;
        {
            const std::lock_guard lock(mutex_);
            if (is_leaving_) return;
        }
        if (!waited) continue;
        for (size_t i = 0; i < ranks.size(); ++i)
            if (polls[2 + i].revents) read_from(ranks[i]);
        for (size_t i = 0; i < newcomers_.size(); ++i)
            if (polls[first_newcomer + i].revents) read_from(newcomers_[i]);
        std::erase_if(newcomers_, [](const Newcomer& newcomer) {
            return newcomer.is_done || Clock::now() >= newcomer.until;
        });
        if (polls[1].revents) accept_all();
        end_where_others_have();
    }
}

void RankConnections::read_from(int rank) {
    Peer& sender = peer(rank);
    char bytes[1 << 16];
    const ssize_t n = ::recv(sender.socket.fd(), bytes, sizeof bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n > 0) sender.received.append(bytes, static_cast<size_t>(n));
    bool is_garbled = false;
    size_t at = 0;
    while (sender.received.size() - at >= header_bytes) {
        const std::string_view rest = std::string_view(sender.received).substr(at);
        const uint64_t length = net::decode(rest.substr(1));
        is_garbled = length > longest_message;
        if (is_garbled || rest.size() - header_bytes < length) break;
        handle(sender, static_cast<Kind>(rest[0]), std::string(rest.substr(header_bytes, length)));
        at += header_bytes + length;
    }
    sender.received.erase(0, at);
    if (n > 0 && !is_garbled) return;
    const std::lock_guard lock(mutex_);
    sender.has_ended = true;
    if (!sender.has_left) sender.deadline = Clock::now() + grace;
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

void RankConnections::accept_all() {
    while (true) {
        Socket socket = net::accept_from(listener_);
        if (!socket) return;
        if (newcomers_.size() >= most_newcomers) newcomers_.erase(newcomers_.begin());
        newcomers_.push_back({std::move(socket), "", Clock::now() + introduction_limit});
    }
}

void RankConnections::read_from(Newcomer& newcomer) {
    char bytes[call_bytes];
    const ssize_t n = ::recv(newcomer.socket.fd(), bytes, call_bytes - newcomer.received.size(), 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    newcomer.is_done = n <= 0;
    if (n <= 0) return;
    newcomer.received.append(bytes, static_cast<size_t>(n));
    if (newcomer.received.size() < call_bytes) return;
    newcomer.is_done = true;
    const std::string_view call = newcomer.received;
    if (!net::equal_secrets(call.substr(0, half_key), std::string_view(key_).substr(0, half_key)))
        return;
    const auto rank = static_cast<int>(net::decode(call.substr(half_key)));
    const std::string purpose(call.substr(half_key + 8).data());
    if (!net::send_all(newcomer.socket, std::string_view(key_).substr(half_key),
                       Clock::now() + farewell_limit))
        return;
    net::send_at_once(newcomer.socket);
    const std::lock_guard lock(mutex_);
    callers_.insert_or_assign({rank, purpose}, std::move(newcomer.socket));
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
