// How ranks that no MPI has started meet: rank 0 listens on a TCP port, the others connect to it.
//
// Both sides of a connection prove that they know the job's secret (secret.h), and neither shows it:
//     rank 0  →  "train_gpt ranks 1\n", a random number S
//     rank    →  a random number C, its introduction, HMAC("rank", S, C, introduction)
//     rank 0  →  its verdict, HMAC("rank 0", C, S, verdict)
// The introduction says rank, world size, program version, job, host, a number of the process, and
// where other ranks can connect to this one. Who does not prove to know the secret is dropped and
// disturbs nobody. A rank of another job is sent away to look further (two jobs may use the same
// ports); a rank of this job that cannot be one (another version, another world size, a rank that
// is here already) ends the job with a sentence. When all ranks are here, rank 0 sends everyone the
// list of them and closes the port. What travels later is neither encrypted nor authenticated: as
// with MPI, nobody else may be able to change what passes between the nodes.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "parallel/launch/place.h"
#include "parallel/launch/secret.h"
#include "parallel/net/socket.h"

namespace train_gpt {

struct Meeting {
    struct Peer {
        std::string host;
        std::vector<std::string> addresses;  // where the rank may be reached, the best first
        std::string port;                    // that it listens on
    };
    std::vector<Peer> peers;           // by rank
    std::vector<net::Socket> sockets;  // rank 0: to each rank, by rank; other ranks: [0], to rank 0
    net::Socket listener;              // this rank's, for connections between ranks
    std::string key;                   // 32 random bytes that such connections show
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

constexpr std::string_view greeting = "train_gpt ranks 1\n";
constexpr size_t nonce_bytes = 32;
constexpr uint64_t longest_introduction = 1 << 14, longest_roster = 1 << 28;

struct Introduction {
    int64_t rank = -1, size = 0;
    std::string program, job, host, process, port, addresses;

    std::string packed() const;
    /// Rank −1 if the text is none.
    static Introduction parse(std::string_view text);
};

// A verdict begins with one of these.
constexpr char admitted = '+', refused = '-', of_another_job = '~';

std::string proof_of_rank(const Secret& secret, const std::string& of_rank_0,
                          const std::string& of_rank, const std::string& introduction);
std::string proof_of_rank_0(const Secret& secret, const std::string& of_rank,
                            const std::string& of_rank_0, const std::string& verdict);

std::vector<std::string> words(const std::string& text);
std::string sentence(const std::vector<std::string>& words);  // joined by spaces

Meeting gather_ranks(const Place& place, const Secret& secret, const MeetingOptions& options);
Meeting come_to_rank_0(const Place& place, const Secret& secret, const MeetingOptions& options);

}  // namespace rendezvous

}  // namespace train_gpt
