// Processes on the same host that are not of a job and want to disturb it, or take part in it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <future>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "parallel/launch/rank_connections.h"
#include "parallel/launch/rendezvous.h"
#include "parallel/links_tcp.h"
#include "parallel/net/pack.h"
#include "parallel/net/socket.h"
#include "parallel/world.h"
#include "test/catch.h"
#include "test/parallel/failing_job.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
using namespace train_gpt::failing_job;
using namespace std::chrono_literals;
using net::Channel, net::Socket;

namespace {

bool skip_without_tls() {
    if (net::has_tls()) return false;
    std::printf("skipped: ranks that meet over TCP, for which this build has no TLS\n");
    return true;
}

const MeetingOptions options{.program = "1", .host = "a host of the tests", .limit = 40s};

Place place_of(int rank, int size, std::vector<int> ports) {
    Place place;
    place.through = Place::Through::tcp;
    place.launcher = "a test";
    place.host = "127.0.0.1";
    place.host_from = "a test";
    place.rank = rank;
    place.size = size;
    place.ports = std::move(ports);
    return place;
}

/// A meeting of all ranks in this process. Empty texts: they have met.
struct Met {
    std::vector<Meeting> meetings;
    std::vector<std::string> errors;
};
Met meet_all(const std::vector<Place>& places, const std::vector<Secret>& secrets,
             MeetingOptions how = options) {
    Met met{std::vector<Meeting>(places.size()), std::vector<std::string>(places.size())};
    std::vector<std::thread> threads;
    for (size_t r = 0; r < places.size(); ++r)
        threads.emplace_back([&, r] {
            met.errors[r] = error_of(
                [&] { met.meetings[r] = meet(places[r], secrets[r % secrets.size()], how); });
        });
    for (std::thread& thread : threads) thread.join();
    return met;
}

void wait_for_listener(int port) {
    while (!net::connect_to("127.0.0.1", std::to_string(port), net::Clock::now() + 1s))
        std::this_thread::sleep_for(5ms);
}

/// A free port that is followed by others.
std::vector<int> free_ports(size_t n) {
    for (;;) {
        std::vector<Socket> held;
        std::vector<int> ports;
        held.push_back(net::listen_on(0));
        const int first = net::port_of(held.front());
        ports.push_back(first);
        while (ports.size() < n) {
            held.push_back(net::listen_on(first + static_cast<int>(ports.size())));
            if (!held.back()) break;
            ports.push_back(first + static_cast<int>(ports.size()));
        }
        if (ports.size() == n) return ports;
    }
}

/// Passes on what comes to a port, in both directions, and keeps it.
class Relay {
  public:
    explicit Relay(int to, int at = 0) : listener_(net::listen_on(at)), to_(to) {
        thread_ = std::thread([this] { run(); });
    }
    ~Relay() {
        ends_ = true;
        thread_.join();
    }
    int port() const { return net::port_of(listener_); }
    /// What has passed so far.
    std::string seen() {
        const std::lock_guard lock(mutex_);
        return seen_;
    }

  private:
    void run() {
        std::vector<std::pair<Socket, Socket>> pairs;
        while (!ends_) {
            std::vector<pollfd> polls{{listener_.fd(), POLLIN, 0}};
            for (const auto& [a, b] : pairs) {
                polls.push_back({a.fd(), POLLIN, 0});
                polls.push_back({b.fd(), POLLIN, 0});
            }
            ::poll(polls.data(), polls.size(), 20);
            for (size_t i = 0; i < pairs.size(); ++i) {
                pass(pairs[i].first, pairs[i].second);
                pass(pairs[i].second, pairs[i].first);
            }
            std::erase_if(pairs, [](const auto& pair) { return !pair.first || !pair.second; });
            if (Socket caller = net::accept_from(listener_)) {
                Socket there =
                    net::connect_to("127.0.0.1", std::to_string(to_), net::Clock::now() + 1s);
                if (there) pairs.emplace_back(std::move(caller), std::move(there));
            }
        }
    }
    void pass(Socket& from, Socket& to) {
        if (!from || !to) return;
        char bytes[1 << 16];
        const ssize_t n = ::recv(from.fd(), bytes, sizeof bytes, 0);
        if (n < 0) return;
        if (n == 0) {
            from = Socket();
            return;
        }
        const std::lock_guard lock(mutex_);
        seen_.append(bytes, static_cast<size_t>(n));
        net::send_all(to, {bytes, static_cast<size_t>(n)}, net::Clock::now() + 1s);
    }

    Socket listener_;
    const int to_;
    std::mutex mutex_;
    std::string seen_;
    std::atomic<bool> ends_{false};
    std::thread thread_;
};

const Secret secret{test_secret, "a test"};

}  // namespace

// ---- The meeting --------------------------------------------------------------------------------

TEST_CASE("a relay at the first of rank 0's ports learns nothing and is passed by",
          "[launch][hostile]") {
    if (skip_without_tls()) return;
    const std::vector<int> ports = free_ports(3);
    Relay relay(ports[1], ports[0]);
    auto first =
        std::async(std::launch::async, [&] { return meet_all({place_of(0, 3, ports)}, {secret}); });
    wait_for_listener(ports[1]);
    const Met others = meet_all({place_of(1, 3, ports), place_of(2, 3, ports)}, {secret});
    const Met rank_0 = first.get();
    for (const std::string& error : {rank_0.errors[0], others.errors[0], others.errors[1]})
        CHECK(error.empty());
    for (const Meeting& meeting : others.meetings) {
        sockaddr_in6 there{};
        socklen_t length = sizeof there;
        REQUIRE(::getpeername(meeting.channels[0].fd(), reinterpret_cast<sockaddr*>(&there),
                              &length) == 0);
        CHECK(ntohs(there.sin6_port) == ports[1]);  // where an IPv4 address has it, too
    }
    // Its port is not the one that rank 0 listens on, which the keys contain.
    CHECK(contains(relay.seen(), rendezvous::identity_of(1, ports[0])));
    const std::string& key = rank_0.meetings[0].key;
    CHECK(key.size() == 32);
    for (const std::string& told : {key, options.host, test_secret + std::string()})
        CHECK_FALSE(contains(relay.seen(), told));
    for (const Meeting& meeting : others.meetings) CHECK(meeting.key == key);
}

TEST_CASE("no two meetings with the same secret have the same key", "[launch][hostile]") {
    if (skip_without_tls()) return;
    std::set<std::string> keys;
    for (int i = 0; i < 3; ++i) {
        const int port = free_port();
        keys.insert(
            meet_all({place_of(0, 2, {port}), place_of(1, 2, {port})}, {secret}).meetings[0].key);
    }
    CHECK(keys.size() == 3);
}

TEST_CASE("a rank 0 that does not know the secret learns nothing, and is not joined",
          "[launch][hostile]") {
    if (skip_without_tls()) return;
    const int port = free_port();
    Relay relay(port);
    MeetingOptions brief = options;
    brief.limit = 1500ms;
    const Met met = meet_all({place_of(0, 2, {port}), place_of(1, 2, {port})},
                             {{"what somebody else has chosen", "elsewhere"}, secret}, brief);
    CHECK(contains(met.errors[0], "rank 1 of 2 did not come to rank 0"));
    CHECK(contains(met.errors[0], "; rank 1 (address 127.0.0.1)"));
    CHECK(
        contains(met.errors[0], " showed another secret than rank 0's, which is from elsewhere;"));
    CHECK(contains(met.errors[1], "(it has another secret)"));
    for (const std::string& error : met.errors) CHECK(error.size() < 1000);
}

TEST_CASE("a rank's name in clear is that of its place, or rank 0 does not know it",
          "[launch][hostile]") {
    using namespace rendezvous;
    const int port = static_cast<int>(random_int(1, 65535));
    const int64_t rank = random_int(0, 1 << 20);
    CHECK(rank_of(identity_of(rank, port), port) == rank);
    CHECK_FALSE(rank_of(identity_of(rank, port), port - 1));
    CHECK_FALSE(rank_of("", port));
    CHECK_FALSE(rank_of(identity_of(rank, port) + " ", port));
    CHECK_FALSE(rank_of(identity_of(rank, port) + "x", port));
    CHECK_FALSE(rank_of(net::random_text(40), port));
}

namespace {

/// A connection to rank 0 that proves to be rank `proved`, and says that it is process `process` of
/// rank `rank` of `size`.
Channel introduce(int proved, int rank, int size, int port, const std::string& process = "") {
    Socket socket;
    for (const auto end = net::Clock::now() + 30s; !socket && net::Clock::now() < end;)
        socket = net::connect_to("127.0.0.1", std::to_string(port), net::Clock::now() + 1s);
    const std::string identity = rendezvous::identity_of(proved, port);
    Channel channel =
        Channel::call(std::move(socket), identity, net::derive_key(test_secret, identity));
    REQUIRE(net::shake_hands(channel, net::Clock::now() + 20s));
    rendezvous::Introduction introduction;
    introduction.rank = rank;
    introduction.size = size;
    introduction.program = "1";
    introduction.process = process;
    net::send_all(channel, rendezvous::with_length(introduction.packed()), net::Clock::now() + 1s);
    return channel;
}

/// The next message of rank 0.
std::string message_of(Channel& channel) {
    std::string length(8, '\0');
    REQUIRE(net::read_all(channel, length, net::Clock::now() + 20s));
    REQUIRE(net::decode(length) < 1 << 20);
    std::string message(net::decode(length), '\0');
    REQUIRE(net::read_all(channel, message, net::Clock::now() + 20s));
    return message;
}

void confirm(Channel& channel) {
    REQUIRE(
        net::send_all(channel, std::string(1, rendezvous::is_here_now), net::Clock::now() + 1s));
}

}  // namespace

TEST_CASE("a rank that stopped waiting to be admitted may come again", "[launch][hostile]") {
    if (skip_without_tls()) return;
    const int port = free_port();
    auto first = std::async(std::launch::async,
                            [&] { return meet_all({place_of(0, 2, {port})}, {secret}); });
    const std::string process = net::random_text(16);
    Channel before = introduce(1, 1, 2, port, process);
    REQUIRE(message_of(before) == std::string(1, rendezvous::admitted));
    SECTION("its first connection has ended") {
        before = Channel();
        CHECK(meet_all({place_of(1, 2, {port})}, {secret}).errors[0].empty());
    }
    SECTION("its first connection has not ended") {
        Channel again = introduce(1, 1, 2, port, process);
        REQUIRE(message_of(again) == std::string(1, rendezvous::admitted));
        confirm(again);
        CHECK(net::unpack(message_of(again)).value().size() == 1 + 3 * 2);
    }
    CHECK(first.get().errors[0].empty());
}

TEST_CASE("two processes of one rank that come at once are named, and both are told",
          "[launch][hostile]") {
    if (skip_without_tls()) return;
    const int port = free_port();
    auto first = std::async(std::launch::async,
                            [&] { return meet_all({place_of(0, 2, {port})}, {secret}); });
    Channel one = introduce(1, 1, 2, port, net::random_text(16));
    REQUIRE(message_of(one) == std::string(1, rendezvous::admitted));
    // The first has not said yet that it knows.
    Channel two = introduce(1, 1, 2, port, net::random_text(16));
    const std::string verdict = message_of(two);
    CHECK(verdict.front() == rendezvous::refused);
    CHECK(contains(verdict, "rank 1 was started twice: on host "));
    confirm(one);
    const auto told = net::unpack(message_of(one));
    REQUIRE(told.value().size() == 2);
    CHECK(told->front() == verdict.substr(1));
    CHECK(first.get().errors[0] == verdict.substr(1));
}

TEST_CASE("a rank that says another number than it has proved is not taken", "[launch][hostile]") {
    if (skip_without_tls()) return;
    const int port = free_port();
    auto first = std::async(std::launch::async, [&] {
        return meet_all({place_of(0, 3, {port}), place_of(1, 3, {port})}, {secret});
    });
    Channel liar = introduce(1, 2, 3, port);
    char byte = 0;
    CHECK_FALSE(net::read_all(liar, {&byte, 1}, net::Clock::now() + 20s));
    const Met other = meet_all({place_of(2, 3, {port})}, {secret});
    CHECK(other.errors[0].empty());
    for (const std::string& error : first.get().errors) CHECK(error.empty());
}

namespace {

/// Connections that say nothing.
std::vector<Socket> idle_at(const std::vector<int>& ports, size_t n) {
    std::vector<Socket> all;
    for (size_t i = 0; i < n; ++i)
        if (Socket socket = net::connect_to("127.0.0.1", std::to_string(ports[i % ports.size()]),
                                            net::Clock::now() + 5s))
            all.push_back(std::move(socket));
    return all;
}

/// A limit of open files for this process and those that it starts.
class Descriptors {
  public:
    explicit Descriptors(rlim_t wanted) {
        ::getrlimit(RLIMIT_NOFILE, &before_);
        const rlimit limit{std::min(wanted, before_.rlim_max), before_.rlim_max};
        ::setrlimit(RLIMIT_NOFILE, &limit);
    }
    ~Descriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

  private:
    rlimit before_{};
};

}  // namespace

TEST_CASE("1500 half-open connections do not keep ranks from meeting", "[launch][hostile]") {
    if (skip_without_tls()) return;
    const Descriptors many(8192);
    const int port = free_port();
    auto first = std::async(std::launch::async,
                            [&] { return meet_all({place_of(0, 2, {port})}, {secret}); });
    wait_for_listener(port);
    const std::vector<Socket> idle = idle_at({port}, 1500);
    CHECK(idle.size() == 1500);
    CHECK(meet_all({place_of(1, 2, {port})}, {secret}).errors[0].empty());
    CHECK(first.get().errors[0].empty());
    // Rank 0 has dropped nearly all of them.
    const auto open = std::ranges::count_if(idle, [](const Socket& socket) {
        pollfd ended{socket.fd(), POLLIN, 0};
        return ::poll(&ended, 1, 0) == 0;
    });
    CHECK(open <= 100);
}

TEST_CASE("rank 0 that has hardly any descriptors left meets its ranks all the same",
          "[launch][hostile]") {
    if (skip_without_tls()) return;
    const int port = free_port();
    const pid_t rank_0 = ::fork();
    if (rank_0 == 0) {
        ::alarm(60);
        std::vector<Socket> held;
        const Place place = place_of(0, 2, {port});
        int left = 14;
        MeetingOptions filling = options;
        // Called while ranks meet: takes what is left, except a few.
        filling.stop_code = [&] {
            while (left > 0) {
                Socket socket(::dup(2));
                if (!socket) {
                    for (; left > 0 && !held.empty(); --left) held.pop_back();
                    left = 0;
                    break;
                }
                held.push_back(std::move(socket));
            }
            return 0;
        };
        ::_exit(error_of([&] { meet(place, secret, filling); }).empty() ? 0 : 1);
    }
    while (!net::connect_to("127.0.0.1", std::to_string(port), net::Clock::now() + 1s))
        std::this_thread::sleep_for(5ms);
    const std::vector<Socket> idle = idle_at({port}, 100);
    CHECK(meet_all({place_of(1, 2, {port})}, {secret}).errors[0].empty());
    int status = 0;
    ::waitpid(rank_0, &status, 0);
    CHECK(status == 0);
}

TEST_CASE("rank 0 of 2000 ranks under a low limit of open files says so", "[launch][hostile]") {
    if (skip_without_tls()) return;
    const ProgramResult result =
        run_program({"sh", "-c", "ulimit -n 1000 && exec \"$0\" train x --set run_dir=x", binary()},
                    {{"TRAIN_GPT_RANK", "0"},
                     {"TRAIN_GPT_WORLD", "2000"},
                     {"TRAIN_GPT_ADDRESS", concat("127.0.0.1:", free_port())},
                     {"TRAIN_GPT_SECRET", test_secret}});
    INFO(result.output);
    CHECK(result.exit_code == 1);
    CHECK(contains(result.output, "train_gpt: rank 0 of 2000 ranks needs "));
    CHECK(contains(result.output, "and this host allows a process 1000; raise the hard limit"));
}

// ---- Connections between ranks ------------------------------------------------------------------

namespace {

/// Two ranks of this process that have met. The caller's connections pass through a relay.
struct Pair {
    explicit Pair(net::Duration grace = 10s) {
        const int port = free_port();
        Met met = meet_all({place_of(0, 2, {port}), place_of(1, 2, {port})}, {secret});
        for (const std::string& error : met.errors) REQUIRE(error.empty());
        relay = std::make_unique<Relay>(std::stoi(met.meetings[1].peers[0].port));
        port_of_0 = met.meetings[1].peers[0].port;
        key = met.meetings[0].key;
        met.meetings[1].peers[0].port = std::to_string(relay->port());
        met.meetings[1].peers[0].addresses = {"127.0.0.1"};
        for (const int rank : {0, 1})
            ranks.push_back(std::make_shared<RankConnections>(
                rank, std::move(met.meetings[static_cast<size_t>(rank)]), grace));
    }
    std::string port_of_0, key;
    std::unique_ptr<Relay> relay;
    std::vector<std::shared_ptr<RankConnections>> ranks;
};

Channel taken(RankConnections& connections, int rank, const std::string& purpose, bool encrypted) {
    Channel channel;
    for (const auto end = net::Clock::now() + 20s; !channel && net::Clock::now() < end;
         std::this_thread::sleep_for(1ms))
        channel = connections.take_caller(rank, purpose, encrypted);
    REQUIRE(channel);
    return channel;
}

}  // namespace

TEST_CASE("a connection between ranks is encrypted where it is to be, and proved in any case",
          "[launch][hostile]") {
    if (skip_without_tls()) return;
    Pair pair;
    for (const bool encrypted : {false, true}) {
        Channel caller = pair.ranks[1]->call(0, "sums", encrypted);
        Channel answerer = taken(*pair.ranks[0], 1, "sums", encrypted);
        const std::string there = net::random_text(5000), back = net::random_text(5000);
        REQUIRE(net::send_all(caller, there, net::Clock::now() + 5s));
        REQUIRE(net::send_all(answerer, back, net::Clock::now() + 5s));
        std::string got(5000, '\0');
        REQUIRE(net::read_all(answerer, got, net::Clock::now() + 5s));
        CHECK(got == there);
        REQUIRE(net::read_all(caller, got, net::Clock::now() + 5s));
        CHECK(got == back);
        for (const std::string& text : {there, back})
            CHECK(contains(pair.relay->seen(), text.substr(100, 32)) == !encrypted);
        CHECK_FALSE(contains(pair.relay->seen(), pair.key));
    }
}

TEST_CASE("who does not know the job's key gets no connection to a rank", "[launch][hostile]") {
    if (skip_without_tls()) return;
    Pair pair;
    // What ranks of other jobs know: the secret, and what travels in clear.
    const std::string right = "train_gpt link 2: 1 to 0 clear x";
    for (const auto& [identity, key] :
         {std::pair{right, net::derive_key(net::random_text(32), right)},
          {right, net::derive_key(test_secret, right)},
          {std::string("train_gpt link 2: 0 to 0 clear x"), net::random_text(32)},
          {std::string(), net::random_text(32)}}) {
        Channel channel = Channel::call(
            net::connect_to("127.0.0.1", pair.port_of_0, net::Clock::now() + 5s), identity, key);
        CHECK_FALSE(net::shake_hands(channel, net::Clock::now() + 20s));
        CHECK(channel.is_refused());
    }
    // With the key, but to another rank, or from one that is not there.
    for (const std::string from_to :
         {"1 to 1", "2 to 0", "-1 to 0", "99999999999 to 0", "x to 0"}) {
        const std::string identity = "train_gpt link 2: " + from_to + " clear x";
        Channel channel =
            Channel::call(net::connect_to("127.0.0.1", pair.port_of_0, net::Clock::now() + 5s),
                          identity, net::derive_key(pair.key, identity));
        CHECK(net::shake_hands(channel, net::Clock::now() + 20s));
        char byte = 0;
        CHECK_FALSE(net::read_all(channel, {&byte, 1}, net::Clock::now() + 20s));
    }
    CHECK_FALSE(pair.ranks[0]->take_caller(1, "x", false));
}

TEST_CASE("a recorded connection between ranks cannot be replayed", "[launch][hostile]") {
    if (skip_without_tls()) return;
    Pair pair;
    { const Channel caller = pair.ranks[1]->call(0, "sums", true); }
    taken(*pair.ranks[0], 1, "sums", true);
    const std::string recorded = pair.relay->seen();
    const Socket stranger = net::connect_to("127.0.0.1", pair.port_of_0, net::Clock::now() + 5s);
    net::send_all(stranger, recorded, net::Clock::now() + 5s);
    ::shutdown(stranger.fd(), SHUT_WR);
    // Rank 0 ends it.
    pollfd ended{stranger.fd(), POLLIN, 0};
    std::string answer(1 << 16, '\0');
    for (ssize_t n = 1; n > 0;) {
        REQUIRE(::poll(&ended, 1, 20000) == 1);
        n = ::recv(stranger.fd(), answer.data(), answer.size(), 0);
    }
    CHECK_FALSE(pair.ranks[0]->take_caller(1, "sums", true));
}

TEST_CASE("links of equal parts of a group at the same time do not mix", "[launch][hostile]") {
    if (skip_without_tls()) return;
    for (const bool encrypt : {false, true}) {
        Pair pair;
        const auto links_of = [&](int rank) {
            return open_tcp_links(
                {pair.ranks[static_cast<size_t>(rank)], "job", "0", {0, 1}, {0, 1}, rank, encrypt});
        };
        std::string texts[] = {net::random_text(1000), net::random_text(1000)};
        std::string error;
        std::thread other([&] {
            error = error_of([&] {
                const auto links = links_of(1);
                const auto first = links->split(0, 1), second = links->split(0, 1);
                for (const int i : {1, 0}) {
                    Links& by = i == 1 ? *second : *first;
                    by.post_send(reinterpret_cast<const std::byte*>(texts[i].data()), 1000, 0);
                    by.finish([] {});
                }
            });
        });
        const auto links = links_of(0);
        const auto first = links->split(0, 0), second = links->split(0, 0);
        for (const int i : {0, 1}) {
            std::string got(1000, '\0');
            Links& by = i == 1 ? *second : *first;
            by.post_receive(reinterpret_cast<std::byte*>(got.data()), 1000, 1);
            by.finish([] {});
            CHECK(got == texts[i]);
        }
        other.join();
        CHECK(error.empty());
    }
}

TEST_CASE("ranks: other places of a program", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    std::vector<double> sums(10000, 1);
    const std::string error = error_of([&] {
        if (world.rank() == 0)
            world.broadcast("short");
        else if (std::getenv("SUMS"))
            world.all_reduce_sum(sums);
        else
            world.all_gather("x");
    });
    std::printf("rank %d: %s\n", world.rank(), error.c_str());
    std::fflush(stdout);
    world.barrier();
}

TEST_CASE("a rank trusts no length in another rank's message", "[launch][hostile]") {
    if (skip_without_tls()) return;
    for (const Environment& which : {Environment{{"SUMS", "1"}}, Environment{}}) {
        const ProgramResult result =
            run_case_on_ranks(2, "ranks: other places of a program", which, Launcher::own);
        INFO(result.output);
        CHECK(contains(result.output,
                       "rank 1: a message between ranks is damaged, or the ranks "
                       "are not at the same place"));
    }
}

TEST_CASE("a rank that has said goodbye ends no other rank", "[launch][hostile]") {
    if (skip_without_tls()) return;
    std::fflush(nullptr);
    const pid_t process = ::fork();
    if (process == 0) {
        ::alarm(60);
        Pair pair(1ms);
        pair.ranks[1].reset();
        std::this_thread::sleep_for(1200ms);  // rank 0 looks twice a second
        ::_exit(7);
    }
    int status = 0;
    ::waitpid(process, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 7);
}

// ---- Training -----------------------------------------------------------------------------------

namespace {

/// The TCP ports that a process listens on.
std::vector<int> ports_of(pid_t process) {
    std::set<std::string> inodes;
    for (const auto& entry :
         fs::directory_iterator(fs::path("/proc") / std::to_string(process) / "fd")) {
        std::error_code ignored;
        const std::string target = fs::read_symlink(entry.path(), ignored);
        if (target.starts_with("socket:[")) inodes.insert(target.substr(8, target.size() - 9));
    }
    std::vector<int> ports;
    for (const char* name : {"/proc/net/tcp", "/proc/net/tcp6"}) {
        std::ifstream lines(name);
        for (std::string line; std::getline(lines, line);) {
            std::istringstream words(line);
            std::vector<std::string> all;
            for (std::string word; words >> word;) all.push_back(word);
            if (all.size() > 9 && all[3] == "0A" && inodes.contains(all[9]))
                ports.push_back(std::stoi(all[1].substr(all[1].rfind(':') + 1), nullptr, 16));
        }
    }
    return ports;
}

size_t descriptors_of(pid_t process) {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator(fs::path("/proc") / std::to_string(process) / "fd"),
                      fs::directory_iterator()));
}

}  // namespace

TEST_CASE("a thousand idle connections at the ports of ranks do not end training",
          "[launch][hostile]") {
    if (skip_without_tls()) return;
    const Descriptors many(8192);
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    FailingJob job(2, run, {}, {}, Launcher::own);
    REQUIRE(job.wait_for_step(3));
    std::list<std::vector<Socket>> idle;
    std::map<pid_t, size_t> before;
    for (const Process& process : processes_of(run)) {
        if (process.rank < 0) continue;
        before[process.pid] = descriptors_of(process.pid);
        if (const auto ports = ports_of(process.pid); !ports.empty())
            idle.push_back(idle_at(ports, 1000));
    }
    REQUIRE(before.size() == 2);
    CHECK(!idle.empty());
    const int64_t step = last_step(run);
    REQUIRE(job.wait_for_step(step + 9));  // with checkpoints
    for (const auto& [process, descriptors] : before)
        CHECK(descriptors_of(process) <= descriptors + 80);
    REQUIRE(job.signal(0, SIGUSR1));
    check_saved(job, run, "SIGUSR1");
}

// ---- How long it takes --------------------------------------------------------------------------

TEST_CASE("measure: a meeting of 64 ranks", "[.measure]") {
    if (skip_without_tls()) return;
    std::vector<double> seconds, cpu;
    for (int repeat = 0; repeat < 9; ++repeat) {
        const int port = free_port();
        std::vector<Place> places;
        for (int rank = 0; rank < 64; ++rank) places.push_back(place_of(rank, 64, {port}));
        const auto start = Clock::now();
        const std::clock_t cpu_start = std::clock();
        const Met met = meet_all(places, {secret});
        cpu.push_back(static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC);
        seconds.push_back(seconds_since(start));
        for (const std::string& error : met.errors) REQUIRE(error.empty());
    }
    std::ranges::sort(seconds);
    std::ranges::sort(cpu);
    std::printf("64 ranks met within %.3f s (%.3f to %.3f), with %.3f s of a core\n", seconds[4],
                seconds.front(), seconds.back(), cpu[4]);
    std::fflush(stdout);
}
