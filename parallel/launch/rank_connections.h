// The connections of a rank whose world met over TCP. Every rank has a connection to rank 0. This
// connection is always encrypted. A thread reads from it all the time, so that a rank that waits
// for another rank learns when that rank is gone.
//
// Collectives on CPUs open more connections between ranks. Such a connection begins with a TLS
// handshake, in which both ends prove that they are these ranks of this job. Then the connection
// leaves TLS, unless the configuration asks for encryption (parallel.encrypt).
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
    /// `grace`: how long this rank may take to end by itself after another rank has ended without
    /// goodbye. Then the connections' thread ends all ranks. A watchdog needs less time than that,
    /// and knows more about the failure.
    RankConnections(int rank, Meeting meeting, net::Duration grace = std::chrono::seconds(10));
    /// Says goodbye, except after abandon() or while an exception unwinds the stack. Without a
    /// goodbye the other ranks see that this rank has failed.
    ~RankConnections();
    RankConnections(const RankConnections&) = delete;
    RankConnections& operator=(const RankConnections&) = delete;

    /// "rank 3 (host nodeA)"
    std::string name(int rank) const;

    // Messages between rank 0 and another rank, which arrive in the order in which they were sent.
    // Both functions throw Error if the other rank is gone.
    void send(int to, const std::string& text);
    std::string receive(int from);

    /// Returns a new connection to another rank for one purpose (at most 63 bytes). The other rank
    /// gets this connection from take_caller() with the same purpose. Throws Error if the rank
    /// cannot be reached.
    net::Channel call(int rank, const std::string& purpose, bool is_encrypted);
    /// Returns the connection that `rank` has made by call() for this purpose. Returns an invalid
    /// one if `rank` has not called yet.
    net::Channel take_caller(int rank, const std::string& purpose, bool is_encrypted);

    /// Says that some rank is gone and this rank will fail too: the destructor then says no
    /// goodbye. Any thread may call it.
    void abandon() { is_abandoned_ = true; }
    /// Ends the processes of all ranks that can be reached, and this process. Any thread may call
    /// it.
    [[noreturn]] void abort(int exit_code);

  private:
    struct Peer {
        net::Channel channel;
        std::timed_mutex sending;  // held while a message is sent
        std::string received;      // a message that is not complete; only the thread uses it
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
    const std::vector<Meeting::RankAddress> known_;
    const std::string key_;
    net::PausingListener listener_;
    net::Socket wake_;
    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null where there is no connection
    std::vector<Newcomer> newcomers_;

    std::mutex mutex_;  // guards messages, callers_ and the states of peers
    std::condition_variable changed_;
    std::map<std::pair<int, std::string>, net::Channel> callers_;
    bool is_leaving_ = false;
    std::atomic<bool> is_abandoned_{false};
    std::thread thread_;
};

}  // namespace train_gpt
