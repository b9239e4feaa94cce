// How ranks meet that MPI has not started: rank 0 listens on a TCP port, and the other ranks
// connect to this port.
//
// Every connection is TLS 1.3. Its key follows from the job's secret (secret.h), the port and the
// rank. A connection that cannot prove it knows the secret is dropped. A stranger that takes rank
// 0's port first and relays the bytes can neither read nor change them. Within TLS,
//     rank    →  its introduction: rank, world size, program version, job, host, a number of the
//                process, and where other ranks can connect to this rank
//     rank 0  →  its verdict
// Two jobs may use the same ports, so rank 0 answers a rank of another job that it must try other
// ports. If a rank of this job does not fit (another version, another world size, a rank that is
// here already), rank 0 ends the job and prints why. When all ranks are here, rank 0 sends every
// rank the list of ranks and closes the port. The connections remain, for small messages.
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
    struct RankAddress {
        std::string host;
        std::vector<std::string> addresses;  // where the rank may be reached, the best first
        std::string port;                    // the port on which the rank listens
    };
    std::vector<RankAddress> peers;      // by rank
    std::vector<net::Channel> channels;  // rank 0: to each rank, by rank; others: [0], to rank 0
    net::Socket listener;                // of this rank, for connections between ranks
    // The keys of connections between ranks follow from this key. No rank sends it: it follows from
    // the secret and from random bytes that rank 0 draws for each meeting.
    std::string key;
};

struct MeetingOptions {
    std::string program;    // the version
    std::string host;       // of this rank, for messages
    net::Duration limit{};  // the time in which all ranks must come
    // While ranks wait, they print lines: a rank that it has not found rank 0, rank 0 which ranks
    // it waits for. The time before the first line, and the time between lines.
    net::Duration first_note = std::chrono::seconds(5), notes_every = std::chrono::seconds(30);
    std::function<int()> stop_code = {};  // as in World::join()

    int stopped() const { return stop_code ? stop_code() : 0; }
};

/// Returns when all ranks of the place's world have met. Throws Error, ReportedError and
/// StoppedEarly as World::join().
Meeting meet(const Place& place, const Secret& secret, const MeetingOptions& options);

/// "rank 3", "ranks 3 and 5", "ranks 0-2, 5 and 7"
std::string name_ranks(const std::vector<int>& ranks);

namespace rendezvous {

constexpr uint64_t longest_introduction = 1 << 14, longest_roster = 1 << 28;

/// The name that a rank sends in clear when it connects to a port. The key of the connection
/// follows from this name and the secret.
std::string identity_of(int64_t rank, int port);
/// The rank in a name of identity_of() for this port; nothing if the text is not such a name.
std::optional<int64_t> rank_of(const std::string& identity, int port);

struct Introduction {
    int64_t rank = -1, size = 0;
    std::string program, job, host, process, port, addresses;

    std::string packed() const;
    /// Returns rank −1 if the text is not an introduction.
    static Introduction parse(std::string_view text);
};

// A verdict begins with one of these characters.
constexpr char admitted = '+', refused = '-', of_another_job = '~';
// What the rank says when it has read that it is admitted; other bytes are exit codes.
constexpr char is_here_now = 0;
constexpr char stopped = '!';  // a signal ends the job; the exit code follows

// How long a rank that a signal ends tries to tell rank 0, or rank 0 the others: they may not have
// met yet.
constexpr net::Duration stop_limit = std::chrono::seconds(5);

std::string with_length(const std::string& message);
/// Meeting::key, from the secret and the random bytes that rank 0 sends with the list of ranks.
std::string key_of_links(const Secret& secret, const std::string& random);

std::vector<std::string> words(const std::string& text);
std::string joined_by_spaces(const std::vector<std::string>& words);

Meeting gather_ranks(const Place& place, const Secret& secret, const MeetingOptions& options);
Meeting come_to_rank_0(const Place& place, const Secret& secret, const MeetingOptions& options);

}  // namespace rendezvous

}  // namespace train_gpt
