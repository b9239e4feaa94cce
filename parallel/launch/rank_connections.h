// The connections of a rank whose world met over TCP: one to rank 0 (rank 0: to every rank), and
// more between ranks as the collectives on CPUs need them. Those begin with a TLS handshake by which
// both ends prove that they are these ranks of this job; then they leave TLS, unless they are to be
// encrypted (parallel.encrypt). The connections to rank 0 always are. A thread reads from them all the time,
// so that a rank which waits for another one learns that it is gone.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <poll.h>

#include "parallel/launch/rendezvous.h"
#include "parallel/net/channel.h"
#include "parallel/net/socket.h"

namespace train_gpt {

class RankConnections {
  public:
    /// `grace`: how long this rank has to end by itself after another one has ended without goodbye:
    /// a watchdog, where there is one, knows more about the failure and needs less time.
    RankConnections(int rank, Meeting meeting, net::Duration grace = std::chrono::seconds(10));
    /// Says goodbye, except after abandon() and where the stack unwinds by an exception: then the
    /// others see that this rank has failed.
    ~RankConnections();
    RankConnections(const RankConnections&) = delete;
    RankConnections& operator=(const RankConnections&) = delete;

    /// "rank 3 (host nodeA)"
    std::string name(int rank) const;

    // Messages between rank 0 and another rank arrive in their order. These throw Error when the
    // rank is gone.
    void send(int to, const std::string& text);
    std::string receive(int from);

    /// A new connection to another rank for one purpose. That rank gets it from take_caller() with
    /// the same purpose (at most 63 bytes). Throws Error if the rank cannot be reached.
    net::Channel call(int rank, const std::string& purpose, bool is_encrypted);
    /// The connection by which `rank` has called for this purpose; invalid as long as it has not.
    net::Channel take_caller(int rank, const std::string& purpose, bool is_encrypted);

    /// Some rank is gone, and so this one will fail. Any thread may call it.
    void abandon() { is_abandoned_ = true; }
    /// Ends the processes of all ranks that can be reached, and this one. Any thread may call it.
    [[noreturn]] void abort(int exit_code);

  private:
    struct Peer {
        net::Channel channel;
        std::timed_mutex sending;  // held while a message is sent
        std::string received;      // a message that is not complete; the thread's own
        std::deque<std::string> messages;
        bool has_left = false;  // it said goodbye
        bool has_ended = false;
        net::Time deadline = net::Time::max();  // for this process to end by itself
    };
    struct Newcomer {
        net::Channel channel;
        net::Time until;
        bool is_done = false;
    };
    enum class Kind : char { message = 1, goodbye, abort };

    Peer& peer(int rank) { return *peers_.at(static_cast<size_t>(rank)); }
    bool send_kind(Peer& peer, Kind kind, const std::string& text, net::Duration limit);
    void tell_all(Kind kind, const std::string& text);

    // The thread's part.
    void run();
    void read_from(int rank);
    void handle(Peer& peer, Kind kind, std::string text);
    void admit_callers();
    std::string key_of(const std::string& identity) const;
    void hear(Newcomer& newcomer);
    void end_where_others_have();

    const int rank_;
    const net::Duration grace_;
    const std::vector<Meeting::Peer> known_;
    const std::string key_;
    net::Door door_;
    net::Socket wake_;
    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null where there is no connection
    std::vector<Newcomer> newcomers_;

    std::mutex mutex_;  // of messages, callers_ and the states of peers
    std::condition_variable changed_;
    std::map<std::pair<int, std::string>, net::Channel> callers_;
    bool is_leaving_ = false;
    std::atomic<bool> is_abandoned_{false};
    std::thread thread_;
};

}  // namespace train_gpt
