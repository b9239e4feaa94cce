// Jobs of forked processes, each a rank with a watchdog, that enter collectives as training does
// and wait there for all others. A missing rank leaves the others waiting, and only their watchdogs
// end them.
#include "parallel/watchdog/watchdog.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <list>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "base/printable.h"
#include "parallel/watchdog/text.h"
#include "test/catch.h"
#include "test/parallel/watchdog_job.h"
#include "test/random.h"

using namespace train_gpt;
using namespace train_gpt::watchdog_job;

TEST_CASE("a watchdog's line is printable, and other ranks pass it on unchanged", "[watchdog]") {
    for (int round = 0; round < 200; ++round) {
        const watchdog::Line line(random_bytes(random_int(0, 1100)));
        const std::string text = line.c_str();
        CHECK(text.size() < 1024);
        CHECK(printable_line(text) == text);
        CHECK(watchdog::Line(text).c_str() == text);
    }
}

TEST_CASE("ranks that leave in any order succeed and print nothing", "[watchdog]") {
    std::list<WatchdogJob> jobs;
    for (int n = 0; n < 4; ++n) {
        std::vector<int> order(4);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), test_rng());
        if (n == 0) order = {0, 1, 2, 3};
        const int64_t steps = random_int(0, 30);
        jobs.emplace_back(JobOptions{}, [order, steps](WatchedRank& self) {
            self.train(steps);
            // The next one leaves when this one is about to: they overlap, too.
            const int place =
                static_cast<int>(std::find(order.begin(), order.end(), self.rank) - order.begin());
            while (self.board.leaving < place) std::this_thread::sleep_for(1ms);
            ++self.board.leaving;
        });
    }
    for (WatchdogJob& job : jobs) {
        for (int rank = 0; rank < job.size(); ++rank) CHECK(job.status(rank) == 0);
        CAPTURE(job.output());
        CHECK(job.output().empty());
    }
}

TEST_CASE("a world of one has no port, no thread and nobody to report to", "[watchdog]") {
    const auto threads = [] {
        return std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                             std::filesystem::directory_iterator());
    };
    const auto before = threads();
    Watchdog::Listener listener(0, 1);
    CHECK(listener.invitation().empty());
    CHECK(Watchdog::Listener(1, 2).invitation().empty());
    Activity activity;
    Watchdog watchdog(std::move(listener), "", activity, {});
    CHECK_FALSE(watchdog.report("nobody hears it"));
    CHECK(threads() == before);
}

TEST_CASE("a rank that is killed ends the job, which names it, its host and its collective",
          "[watchdog]") {
    std::list<WatchdogJob> jobs;
    for (int victim = 0; victim < 4; ++victim)
        jobs.emplace_back(JobOptions{}, [](WatchedRank& self) { self.train(); });
    int victim = 0;
    for (WatchdogJob& job : jobs) {
        REQUIRE(job.all_entered(random_int(1, 50)));
        job.send(victim++, SIGKILL);
    }
    victim = 0;
    for (WatchdogJob& job : jobs) {
        CAPTURE(victim, job.output());
        if (victim > 0) {
            check_ended(job, victim);
        } else {
            for (int rank = 1; rank < 4; ++rank) {
                CHECK(job.status(rank) == watchdog_code);
                CHECK(count(job.output(rank), "\n") == 1);
            }
        }
        const std::string line = job.output(victim > 0 ? 0 : 1);
        CHECK(contains(line, named(victim) + "is dead: its connection ended; "));
        CHECK(names_last_collective(line, job.board().entered[static_cast<size_t>(victim)]));
        ++victim;
    }
}

TEST_CASE("a stopped process is found by its silence, and ends when it is continued",
          "[watchdog]") {
    std::list<WatchdogJob> jobs;
    for (int stopped = 0; stopped < 2; ++stopped)
        jobs.emplace_back(JobOptions{.size = 3, .timeout = timeout},
                          [](WatchedRank& self) { self.train(); });
    for (WatchdogJob& job : jobs) REQUIRE(job.all_entered(3));
    jobs.front().send(0, SIGSTOP);
    jobs.back().send(2, SIGSTOP);
    WatchdogJob& other = jobs.back();
    check_ended(other, 2);
    CHECK(contains(other.output(0), named(2) + "is hung: "));
    CHECK_FALSE(contains(other.output(0), "nor from others"));
    CHECK(names_last_collective(other.output(0), other.board().entered[2]));
    WatchdogJob& first = jobs.front();
    for (int rank : {1, 2}) {
        CHECK(first.status(rank) == watchdog_code);
        CHECK(contains(first.output(rank), named(0) + "is hung: "));
        CHECK(count(first.output(rank), "\n") == 1);
    }
    other.send(2, SIGCONT);
    first.send(0, SIGCONT);
    CHECK(other.status(2) == watchdog_code);
    CHECK(first.status(0) == watchdog_code);
    CHECK(contains(first.output(0), named(0) + "was stopped, or its host frozen, for "));
}

TEST_CASE("where several ranks fall silent, the line says so", "[watchdog]") {
    WatchdogJob job({.timeout = timeout}, [](WatchedRank& self) { self.train(); });
    REQUIRE(job.all_entered(3));
    for (const int rank : {1, 2, 3}) job.send(rank, SIGSTOP);
    CHECK(job.status(0) == watchdog_code);
    CHECK(contains(job.output(0), "nothing was heard from it for 2 s, nor from others; "));
    for (const int rank : {1, 2, 3}) job.send(rank, SIGCONT);
    for (const int rank : {1, 2, 3}) CHECK(job.status(rank) == watchdog_code);
}

TEST_CASE("a rank that is stopped after it has made no progress for a while is hung, not stuck",
          "[watchdog]") {
    constexpr std::chrono::duration<double> longer = 3s;
    const int victim = static_cast<int>(random_int(1, 2));
    WatchdogJob job({.size = 3, .timeout = longer}, [=](WatchedRank& self) {
        self.train(3);
        if (self.rank == victim) {
            // Is heard from meanwhile.
            std::this_thread::sleep_for(0.3 * longer);
            ::raise(SIGSTOP);
        }
        self.train();
    });
    check_ended(job, victim);
    CHECK(contains(job.output(0), named(victim) + "is hung: "));
}

TEST_CASE("a rank that is stopped is named, not those that stopped making progress before it",
          "[watchdog]") {
    constexpr std::chrono::duration<double> longer = 3s;
    const int victim = static_cast<int>(random_int(1, 2));
    WatchdogJob job({.size = 3, .timeout = longer}, [=](WatchedRank& self) {
        self.train(3);
        if (self.rank == victim) {
            self.activity.enter("send");  // it is ahead of the others
            std::this_thread::sleep_for(0.3 * longer);
            ::raise(SIGSTOP);
        }
        while (true) std::this_thread::sleep_for(1s);
    });
    check_ended(job, victim);
    CHECK(contains(job.output(0), named(victim) + "is hung: "));
}

TEST_CASE("a rank that is to end ends all ranks with its code, and says why", "[watchdog]") {
    std::list<WatchdogJob> jobs;
    static std::atomic<bool> is_over{false};  // in each process
    for (int first = 0; first < 3; ++first)
        jobs.emplace_back(JobOptions{.size = 3, .on_failure = [](int) { is_over = true; }},
                          [first](WatchedRank& self) {
                              self.train(2);
                              if (self.rank == first)
                                  self.watchdog.report("SIGTERM: nothing to save", 75);
                              if (self.rank == 2) std::this_thread::sleep_for(1h);
                              // As a collective that others have left.
                              while (!is_over) std::this_thread::sleep_for(1ms);
                              throw Error("the others are gone");
                          });
    int first = 0;
    for (WatchdogJob& job : jobs) {
        for (int rank = 0; rank < 3; ++rank) CHECK(job.status(rank) == 75);
        CHECK(job.output() == concat("train_gpt: rank ", first, " (host node", first,
                                     "): SIGTERM: nothing to save\n"));
        ++first;
    }
}

TEST_CASE("a process in which something may block for ever does not wait for its main thread",
          "[watchdog]") {
    const int first = static_cast<int>(random_int(0, 2));
    for (const bool can_unwind : {true, false}) {
        WatchdogJob job({.size = 3, .can_unwind = can_unwind}, [first](WatchedRank& self) {
            self.train(2);
            if (self.rank == first) throw Error("a tensor is not finite");
            self.train();
        });
        for (int rank = 0; rank < 3; ++rank)
            CHECK((job.status(rank) == watchdog_code) == (rank != first || !can_unwind));
    }
}

TEST_CASE("a job that is stopped as a whole continues when it is resumed", "[watchdog]") {
    WatchdogJob job({.size = 3, .timeout = timeout}, [](WatchedRank& self) { self.train(); });
    REQUIRE(job.all_entered(3));
    for (int rank = 0; rank < 3; ++rank) job.send(rank, SIGSTOP);
    std::this_thread::sleep_for(1.4 * timeout);
    for (int rank = 0; rank < 3; ++rank) job.send(rank, SIGCONT);
    REQUIRE(job.all_entered(job.board().entered[0] + 200));
    job.board().done = true;
    for (int rank = 0; rank < 3; ++rank) CHECK(job.status(rank) == 0);
    CAPTURE(job.output());
    CHECK(job.output().empty());
}

TEST_CASE("among ranks without progress the one that the others wait for is named", "[watchdog]") {
    const int culprit = static_cast<int>(random_int(0, 3));
    const int64_t last = random_int(1, 20);
    WatchdogJob job({.timeout = timeout}, [=](WatchedRank& self) {
        self.train(last);
        ++self.activity.step;
        if (self.rank == culprit)
            while (true) std::this_thread::sleep_for(1s);
        self.collective();
    });
    check_ended(job, -1);
    CHECK(job.output(0) ==
          concat(named(culprit),
                 "is stuck: it has made no progress for 2 s, and 3 of the 4 ranks wait for it; ",
                 "its last collective was reduce-scatter number ", last, ", in step ", last + 1,
                 " (training)\n"));
}

TEST_CASE("ranks may wait for one that makes progress as long as it takes", "[watchdog]") {
    const int saver = static_cast<int>(random_int(0, 2));
    WatchdogJob job({.size = 3, .timeout = timeout}, [=](WatchedRank& self) {
        self.train(3);
        if (self.rank == saver)
            for (int file = 0; file < 150; ++file) {  // longer than the timeout
                std::this_thread::sleep_for(timeout / 100);
                self.activity.pulse();
            }
        self.collective();
    });
    for (int rank = 0; rank < 3; ++rank) CHECK(job.status(rank) == 0);
    CAPTURE(job.output());
    CHECK(job.output().empty());
}

TEST_CASE("a rank that fails by an exception ends all ranks with its reason", "[watchdog]") {
    std::list<WatchdogJob> jobs;
    for (int culprit = 0; culprit < 4; ++culprit)
        jobs.emplace_back(JobOptions{}, [culprit](WatchedRank& self) {
            self.train(5);
            if (self.rank != culprit) self.train();
            try {
                throw Error("the disk is full,\nfree some of it");
            } catch (const Error& error) {
                if (!self.watchdog.report(error.what())) throw;
            }
            throw Error("reported");
        });
    // An exception that is not reported and destroys the watchdog.
    const int thrower = static_cast<int>(random_int(0, 3));
    WatchdogJob& unreported = jobs.emplace_back(JobOptions{}, [thrower](WatchedRank& self) {
        self.train(5);
        if (self.rank == thrower) throw Error("lost");
        self.train();
    });
    int culprit = 0;
    for (WatchdogJob& job : jobs) {
        if (&job == &unreported) break;
        CAPTURE(culprit);
        check_ended(job, culprit);
        CHECK(job.status(culprit) == exception_code);
        CHECK(job.output() ==
              named(culprit) + "failed: the disk is full, free some of it\nmain: reported\n");
        ++culprit;
    }
    check_ended(unreported, thrower);
    CHECK(unreported.status(thrower) == exception_code);
    CHECK(unreported.output() == named(thrower) + "failed: it ended by an exception\nmain: lost\n");
}

TEST_CASE("a line names a rank's place in the mesh", "[watchdog]") {
    const std::vector<std::string> places{"data 0, tensor 0", "data 0, tensor 1",
                                          "data 1, tensor 0", "data 1, tensor 1"};
    WatchdogJob job(JobOptions{.places = places}, [](WatchedRank& self) { self.train(); });
    REQUIRE(job.all_entered(random_int(1, 50)));
    job.send(2, SIGKILL);
    CHECK(job.status(0) == watchdog_code);
    CHECK(contains(job.output(0),
                   "rank 2 (data 1, tensor 0, host node2) is dead: its connection ended; "));
}

TEST_CASE("a check that throws ends all ranks with its reason", "[watchdog]") {
    std::list<WatchdogJob> jobs;
    for (int culprit : {0, 2}) {
        const auto check = [culprit, calls = 0](int rank) mutable {
            if (rank == culprit && ++calls > 2) throw Error("an asynchronous error");
        };
        jobs.emplace_back(JobOptions{.timeout = timeout, .check = check},
                          [](WatchedRank& self) { self.train(); });
    }
    for (int culprit : {0, 2}) {
        WatchdogJob& job = culprit == 0 ? jobs.front() : jobs.back();
        check_ended(job, -1);
        CHECK(job.output() == named(culprit) + "failed: an asynchronous error\n");
    }
}

TEST_CASE("errors that follow from a rank's death are not taken for the cause", "[watchdog]") {
    WatchdogJob job({}, [](WatchedRank& self) {
        self.train(5);
        if (self.rank == 3) ::raise(SIGKILL);
        if (self.rank == 0 || self.rank == 2) self.watchdog.report("a collective has failed");
        self.train();
    });
    check_ended(job, 3);
    CHECK(contains(job.output(), named(3) + "is dead: "));
}

TEST_CASE("of ranks that lose rank 0 the first one says so before the last", "[watchdog]") {
    WatchdogJob job({.size = max_ranks}, [](WatchedRank& self) { self.train(); });
    REQUIRE(job.all_entered(3));
    job.send(1, SIGSTOP);  // gives the last one a start
    job.send(0, SIGKILL);
    std::this_thread::sleep_for(100ms);
    job.send(1, SIGCONT);
    for (int rank = 1; rank < max_ranks; ++rank) CHECK(job.status(rank) == watchdog_code);
    const auto& order = job.board().order;
    CHECK(std::ranges::find(order, 1) < std::ranges::find(order, max_ranks - 1));
}

TEST_CASE("a cut connection ends both sides of it", "[watchdog]") {
    std::list<Relay> relays(2);
    std::list<WatchdogJob> jobs;
    for (Relay& relay : relays) {
        jobs.emplace_back(JobOptions{.size = 3,
                                     .timeout = timeout,
                                     .invitation =
                                         [&](int rank, const std::string& invitation) {
                                             return rank == 2 ? relay.invitation(invitation)
                                                              : invitation;
                                         }},
                          [](WatchedRank& self) { self.train(); });
        relay.start(jobs.back().invitation());
    }
    for (WatchdogJob& job : jobs) REQUIRE(job.all_entered(3));
    relays.front().cut(Relay::silent);
    relays.back().cut(Relay::closed);
    for (WatchdogJob* job : {&jobs.front(), &jobs.back()}) {
        const std::string verdict = job == &jobs.front() ? "is hung: " : "is dead: ";
        CHECK(job->status(2) == watchdog_code);
        CHECK(contains(job->output(2), named(0) + verdict));
        check_ended(*job, 2);
        CHECK(contains(job->output(0), named(2) + verdict));
    }
}

TEST_CASE("a job is not disturbed by strangers at its port", "[watchdog]") {
    // The last rank comes late: until then the port is open.
    Board* gate = static_cast<Board*>(
        ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    new (gate) Board;
    WatchdogJob job({.size = 3,
                     .invitation =
                         [gate](int rank, const std::string& invitation) {
                             while (rank == 2 && !gate->done) std::this_thread::sleep_for(1ms);
                             return invitation;
                         }},
                    [](WatchedRank& self) {
                        self.activity.phase = "start";
                        while (self.board.joined < self.size) {  // the others work meanwhile
                            self.activity.pulse();
                            std::this_thread::sleep_for(1ms);
                        }
                        self.train();
                    });
    REQUIRE(eventually([&] { return job.board().joined == 2; }));
    const auto [secret, answer] = secret_of(job.invitation());
    std::list<Caller> strangers;
    const auto call = [&](const std::string& bytes,
                          Caller::Kind kind = Caller::invited) -> Caller& {
        strangers.emplace_back(job.invitation(), kind);
        CHECK(strangers.back().connected());
        strangers.back().send(bytes);
        return strangers.back();
    };
    // Each of them is dropped, immediately or a few seconds later.
    for (const auto from : {Caller::stranger, Caller::invited}) {
        for (int n = 0; n < 30; ++n) call(random_bytes(random_int(0, 5000)), from);
        for (int kind = 0; kind < 256; kind += static_cast<int>(random_int(1, 9)))
            call(static_cast<char>(kind) + random_bytes(random_int(0, 1200)), from);
    }
    {
        // With half of the invitation
        std::string wrong = job.invitation();
        char& digit = wrong[wrong.find(' ') + 1 + static_cast<size_t>(random_int(0, 63))];
        digit = digit == '0' ? '1' : '0';
        Caller caller(wrong);
        caller.send(hello(secret, 2, 3));
        CHECK(caller.read(1).empty());
    }
    for (int bit = 0; bit < 128; bit += static_cast<int>(random_int(1, 30))) {
        std::string wrong = secret;
        wrong[static_cast<size_t>(bit / 8)] ^= static_cast<char>(1 << bit % 8);
        call(hello(wrong, 2, 3));
    }
    call(hello(secret, 1, 3));  // has already joined
    for (int rank : {0, 3, -1, INT32_MAX, INT32_MIN}) {
        Caller caller(job.invitation());
        caller.send(hello(secret, rank, 3));
        CHECK(caller.read(1).empty());  // no welcome
    }
    call(hello(secret, 2, 4));  // of another job
    call(heartbeat(1, 2, 3));
    call(hello(secret, 2, 3)
             .substr(0, static_cast<size_t>(random_int(0, 96))));  // half of it, and no more
    call(hello(secret, 2, 3) + '\4');
    call(hello(secret, 2, 3) + "garbage");
    call(hello(secret, 2, 3) + hello(secret, 2, 3));
    {
        // With the secret alone, without a heartbeat, nobody is a member; and one may come in
        // single bytes.
        Caller caller(job.invitation());
        for (char byte : hello(secret, 2, 3)) caller.send({byte});
        CHECK(caller.read(17) == '\2' + answer);
    }
    for (int n = 0; n < 200; ++n) call("", Caller::stranger);
    CHECK(std::all_of(strangers.begin(), strangers.end(),
                      [](Caller& caller) { return caller.closed(); }));
    gate->done = true;
    INFO(job.output());
    REQUIRE(job.all_entered(10));
    // All ranks have joined, so no other connection is admitted.
    CHECK(eventually([&] { return !Caller(job.invitation()).connected(); }));
    job.board().done = true;
    for (int rank = 0; rank < 3; ++rank) CHECK(job.status(rank) == 0);
    CAPTURE(job.output());
    CHECK(job.output().empty());
    ::munmap(gate, sizeof(Board));
}

TEST_CASE("a member that sends garbage counts as dead", "[watchdog]") {
    std::list<WatchdogJob> jobs;
    std::list<Caller> members;
    for (int n = 0; n < 4; ++n) {
        // The test itself is rank 1.
        WatchdogJob& job =
            jobs.emplace_back(JobOptions{.size = 3,
                                         .invitation =
                                             [](int rank, const std::string& invitation) {
                                                 if (rank == 1) ::_exit(0);
                                                 return invitation;
                                             }},
                              [](WatchedRank& self) { self.train(); });
        Caller& member = members.emplace_back(job.invitation());
        member.send(hello(secret_of(job.invitation()).first, 1, 3, "no\x01where\x7f"));
        CHECK(member.read(1) == "\2");
        member.send(heartbeat(INT64_MAX, INT64_MIN, INT64_MAX) + heartbeat(INT64_MIN, -1, 7));
        REQUIRE(eventually([&] { return job.board().joined == 2; }));
        // Of two reports the first one counts.
        std::string reports;
        for (const char letter : {'x', 'y'})
            reports += '\4' + number(random_int(-9, 0)) + std::string(1024, letter);
        member.send(n == 0
                        ? static_cast<char>(random_int(6, 255)) + random_bytes(random_int(0, 2000))
                    : n == 1 ? reports
                    : n == 2 ? '\4' + random_bytes(8 + 1024)
                             : hello(random_bytes(16), 1, 3) + std::string(1, '\0'));
        ::shutdown(member.fd(), SHUT_WR);
    }
    int n = 0;
    for (WatchdogJob& job : jobs) {
        INFO(job.output());
        check_ended(job, 1);
        CHECK(contains(job.output(0), concat("rank 1 (host no where ) ",
                                             n == 0 || n == 3 ? "is dead" : "failed")));
        CHECK(count(job.output(0), "\n") == 1);
        if (n == 1) CHECK(contains(job.output(0), "failed: xxx"));
        ++n;
    }
}

TEST_CASE("a rank that does not find rank 0 says where it has looked", "[watchdog]") {
    // The program that answers at the port does not know the secret.
    const int door = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    REQUIRE(::bind(door, reinterpret_cast<sockaddr*>(&address), length) == 0);
    REQUIRE(::listen(door, 100) == 0);
    REQUIRE(::getsockname(door, reinterpret_cast<sockaddr*>(&address), &length) == 0);
    const std::string port = std::to_string(ntohs(address.sin_port));
    const std::string word = random_bytes(random_int(1, 3000));
    const pid_t impostor = ::fork();
    if (impostor == 0)
        while (true) {
            const int fd = ::accept(door, nullptr, nullptr);
            ::send(fd, word.data(), word.size(), MSG_NOSIGNAL);
            std::this_thread::sleep_for(10ms);
            ::close(fd);
        }
    REQUIRE(impostor > 0);
    const Activity activity;
    WatchdogOptions options;
    options.rank = 1;
    options.size = 2;
    options.host = "nodeB";
    options.timeout_seconds = 0.5;
    const std::string secret(64, 'a');
    try {
        const Watchdog watchdog({1, 2}, port + ' ' + secret + " 127.0.0.1 127.0.0.2 nonsense",
                                activity, options);
        FAIL("an impostor was taken for rank 0");
    } catch (const Error& error) {
        CAPTURE(error.what());
        const std::string text = error.what();
        CHECK(contains(text, "rank 1 (host nodeB) could not reach rank 0"));
        CHECK(contains(text, port));
        CHECK(contains(text, "127.0.0.1 (no answer)"));
        CHECK(contains(text, "127.0.0.2 (Connection refused)"));
        CHECK_FALSE(contains(text, "aaaaaa"));
    }
    ::kill(impostor, SIGKILL);
    ::waitpid(impostor, nullptr, 0);
    ::close(door);
    for (const std::string& wrong :
         {std::string(), port, concat(port, ' ', secret), port + " 12 127.0.0.1",
          concat(port, ' ', std::string(64, 'g'), " 127.0.0.1"), random_bytes(100)})
        CHECK_THROWS_AS(Watchdog({1, 2}, wrong, activity, options), Error);
}

TEST_CASE("a rank that never comes ends the others", "[watchdog]") {
    WatchdogJob job({.size = 3,
                     .timeout = timeout,
                     .invitation =
                         [](int rank, const std::string& invitation) {
                             if (rank == 2) ::_exit(0);
                             return invitation;
                         }},
                    [](WatchedRank& self) { self.train(); });
    check_ended(job, 2);
    CHECK(contains(job.output(0), "rank 2 has not connected to rank 0 (host node0) within 2 s"));
}

TEST_CASE("rank 0 does not wait for ever for the others' goodbyes", "[watchdog]") {
    WatchdogJob job({.size = 3, .timeout = timeout}, [](WatchedRank& self) {
        self.train(3);
        while (self.rank > 0 && !self.board.done) {
            self.activity.pulse();
            std::this_thread::sleep_for(1ms);
        }
    });
    CHECK(job.status(0) == 0);
    job.board().done = true;
    for (int rank : {1, 2}) CHECK(job.status(rank) == 0);
    CAPTURE(job.output());
    CHECK(job.output().empty());
}

TEST_CASE("a process ends even if on_failure does not return", "[watchdog][.][long]") {
    WatchdogJob job({.on_failure =
                         [](int rank) {
                             if (rank < 2) std::this_thread::sleep_for(1h);
                         }},
                    [](WatchedRank& self) { self.train(); });
    REQUIRE(job.all_entered(3));
    job.send(3, SIGKILL);
    for (int rank : {0, 1}) CHECK(job.status(rank) == 128 + SIGALRM);
    CHECK(job.status(2) == watchdog_code);
    CHECK(contains(job.output(0), named(3) + "is dead: "));
}
