// How ranks that no MPI has started meet: rank 0 listens on a TCP port, the others connect to it.
//
// Every connection is TLS 1.3 whose key follows from the job's secret (secret.h), the port and the
// rank: who does not know the secret learns nothing, changes nothing and is dropped, also where it
// takes rank 0's port first and relays. Within TLS,
//     rank    →  its introduction: rank, world size, program version, job, host, a number of the
//                process, and where other ranks can connect to this one
//     rank 0  →  its verdict
// A rank of another job is sent away to look further (two jobs may use the same ports); a rank of
// this job that cannot be one (another version, another world size, a rank that is here already)
// ends the job with a sentence. When all ranks are here, rank 0 sends everyone the list of them and
// closes the port. The connections remain, for small messages.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "parallel/launch/place.h"
#include "parallel/launch/secret.h"
#include "parallel/net/channel.h"
#include "parallel/net/socket.h"

namespace train_gpt {

struct Meeting {
    struct Peer {
        std::string host;
        std::vector<std::string> addresses;  // where the rank may be reached, the best first
        std::string port;                    // that it listens on
    };
    std::vector<Peer> peers;             // by rank
    std::vector<net::Channel> channels;  // rank 0: to each rank, by rank; others: [0], to rank 0
    net::Socket listener;                // this rank's, for connections between ranks
    // From which the keys of such connections follow. It was not sent: it follows from the secret
    // and from random bytes of rank 0, which are this meeting's alone.
    std::string key;
};

struct MeetingOptions {
    std::string program;    // the version
    std::string host;       // this rank's, for messages
    net::Duration limit{};  // for all ranks to come
    // Until a line says that a rank has not found rank 0, or whom rank 0 waits for, and between
    // such lines.
    net::Duration first_note = std::chrono::seconds(5), notes_every = std::chrono::seconds(30);
    std::function<int()> stop_code = {};  // as in World::join()

    int stopped() const { return stop_code ? stop_code() : 0; }
};

/// Returns when all ranks of the place's world have met. Throws Error when that fails, ReportedError
/// on a rank that rank 0 has told why, and StoppedEarly as World::join().
Meeting meet(const Place& place, const Secret& secret, const MeetingOptions& options);

/// "rank 3", "ranks 3 and 5", "ranks 0-2, 5 and 7"
std::string name_ranks(const std::vector<int>& ranks);

namespace rendezvous {

constexpr uint64_t longest_introduction = 1 << 14, longest_roster = 1 << 28;

/// What a rank that comes to a port calls itself, in clear. The key of its connection follows from
/// this and the secret.
std::string identity_of(int64_t rank, int port);
/// The rank in such a name for this port; nothing where it is none.
std::optional<int64_t> rank_of(const std::string& identity, int port);

struct Introduction {
    int64_t rank = -1, size = 0;
    std::string program, job, host, process, port, addresses;

    std::string packed() const;
    /// Rank −1 if the text is none.
    static Introduction parse(std::string_view text);
};

// A verdict begins with one of these.
constexpr char admitted = '+', refused = '-', of_another_job = '~';
constexpr char stopped = '!';  // by a signal; the exit code follows

// For a rank that a signal ends to tell the others, or rank 0, which may not have met yet.
constexpr net::Duration stop_limit = std::chrono::seconds(5);

std::string with_length(const std::string& message);
/// From the secret and the roster's random bytes.
std::string key_of_links(const Secret& secret, const std::string& random);

std::vector<std::string> words(const std::string& text);
std::string sentence(const std::vector<std::string>& words);  // joined by spaces

Meeting gather_ranks(const Place& place, const Secret& secret, const MeetingOptions& options);
Meeting come_to_rank_0(const Place& place, const Secret& secret, const MeetingOptions& options);

}  // namespace rendezvous

}  // namespace train_gpt
