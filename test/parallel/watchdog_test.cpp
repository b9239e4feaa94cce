// Jobs of forked processes, each a rank with a watchdog, that meet in collectives as training does: whoever enters
// waits for all others. So a rank that is missing leaves the others waiting, and only their watchdogs end them.
#include "parallel/watchdog/watchdog.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <list>
#include <memory>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"

using namespace train_gpt;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int max_ranks = 8;
constexpr int watchdog_code = 77, exception_code = 3;
constexpr auto patience = 30s;  // nothing takes as long, however busy the machine

/// Waits until the condition holds; false when it never does.
bool eventually(const std::function<bool()>& condition) {
    for (const auto end = Clock::now() + patience; Clock::now() < end;
         std::this_thread::sleep_for(2ms))
        if (condition()) return true;
    return condition();
}

/// Memory that the ranks of a job and the test share.
struct Board {
    std::atomic<int> joined{0}, leaving{0};
    std::atomic<bool> done{false};      // the test says: enough
    std::atomic<int64_t> last_step{0};  // rank 0 says: then this is the last
    std::array<std::atomic<int64_t>, max_ranks> entered{};
    std::array<char[1024], max_ranks> line{};  // what on_failure was given
};

struct Rank {
    int rank, size;
    Watchdog& watchdog;
    Activity& activity;
    Board& board;

    /// Enters a collective, and waits for the others in it.
    void collective() {
        activity.enter("reduce-scatter");
        const int64_t number = activity.collectives;
        board.entered[rank] = number;
        for (int r = 0; r < size; ++r)
            while (board.entered[r] < number) std::this_thread::sleep_for(1ms);
        activity.pulse();
    }
    void train(int64_t steps) {
        activity.phase = "training";
        for (int64_t step = 0; step < steps; ++step) {
            activity.step = step + 1;
            collective();
        }
    }
    /// Until the test says that it is enough.
    void train() {
        activity.phase = "training";
        while (true) {
            const int64_t step = ++activity.step;
            if (rank == 0 && board.done) board.last_step = step;
            collective();
            if (board.last_step == step) return;
        }
    }
};

struct JobOptions {
    int size = 4;
    double timeout = 20;
    std::function<std::string(int rank, const std::string& invitation)> invitation = {};
    std::function<void(int rank)> check = {}, on_failure = {};
};

/// A job whose ranks do `work`; they exit with 0 behind it.
class Job {
  public:
    Job(JobOptions options, const std::function<void(Rank&)>& work) : options_(std::move(options)) {
        void* memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        REQUIRE(memory != MAP_FAILED);
        board_ = new (memory) Board;
        Watchdog::Listener listener(0, options_.size);
        invitation_ = listener.invitation();
        std::fflush(nullptr);
        for (int rank = 0; rank < options_.size; ++rank) {
            const pid_t process = ::fork();
            if (process == 0) ::_exit(run(rank, std::move(listener), work));
            REQUIRE(process > 0);
            processes_.push_back(process);
        }
        status_.resize(processes_.size(), running);
    }
    ~Job() {
        for (size_t r = 0; r < processes_.size(); ++r)
            if (status_[r] == running) {
                ::kill(processes_[r], SIGKILL);
                ::waitpid(processes_[r], nullptr, 0);
            }
        ::munmap(board_, sizeof(Board));
    }
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    Board& board() { return *board_; }
    int size() const { return options_.size; }
    const std::string& invitation() const { return invitation_; }
    void send(int rank, int signal) { ::kill(processes_[static_cast<size_t>(rank)], signal); }

    bool all_entered(int64_t number) {
        return eventually([&] {
            return std::all_of(board_->entered.begin(), board_->entered.begin() + size(),
                               [&](const auto& entered) { return entered >= number; });
        });
    }
    /// The exit code, 128 + the signal, or `running` where the process does not end.
    int status(int rank) {
        int& status = status_[static_cast<size_t>(rank)];
        eventually([&] {
            int raw = 0;
            if (status == running &&
                ::waitpid(processes_[static_cast<size_t>(rank)], &raw, WNOHANG) > 0)
                status = WIFEXITED(raw) ? WEXITSTATUS(raw) : 128 + WTERMSIG(raw);
            return status != running;
        });
        return status;
    }
    /// What a rank wrote on stderr.
    std::string output(int rank) const {
        std::ifstream file(folder_ / std::to_string(rank));
        return {std::istreambuf_iterator<char>(file), {}};
    }
    std::string output() const {
        std::string all;
        for (int rank = 0; rank < size(); ++rank) all += output(rank);
        return all;
    }

    static constexpr int running = -1;

  private:
    int run(int rank, Watchdog::Listener listener, const std::function<void(Rank&)>& work) {
        const int file =
            ::open((folder_ / std::to_string(rank)).c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
        ::dup2(file, STDERR_FILENO);
        Activity activity;
        WatchdogOptions options;
        options.rank = rank;
        options.size = size();
        options.host = "node" + std::to_string(rank);
        options.timeout_seconds = options_.timeout;
        options.exit_code = watchdog_code;
        if (options_.check) options.check = [&] { options_.check(rank); };
        options.on_failure = [&](const char* line) {
            std::strncpy(board_->line[static_cast<size_t>(rank)], line, 1023);
            if (options_.on_failure) options_.on_failure(rank);
        };
        try {
            Watchdog watchdog(
                std::move(listener),
                options_.invitation ? options_.invitation(rank, invitation_) : invitation_,
                activity, options);
            ++board_->joined;
            Rank self{rank, size(), watchdog, activity, *board_};
            work(self);
            return 0;
        } catch (const std::exception& error) {
            std::fprintf(stderr, "main: %s\n", error.what());
            return exception_code;
        }
    }

    JobOptions options_;
    TemporaryDirectory folder_;
    Board* board_;
    std::string invitation_;
    std::vector<pid_t> processes_;
    std::vector<int> status_;
};

int64_t count(const std::string& text, const std::string& what) {
    int64_t found = 0;
    for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += what.size()) ++found;
    return found;
}

bool contains(const std::string& text, const std::string& what) { return count(text, what) > 0; }

std::string named(int rank) { return concat("train_gpt: rank ", rank, " (host node", rank, ") "); }

/// The line names a collective that the rank had entered by its last heartbeat, `entered` at the latest, and its step.
bool names_last_collective(const std::string& line, int64_t entered) {
    if (contains(line, "; it has entered no collective, in step ")) return true;
    const std::string before = "; its last collective was reduce-scatter number ";
    const size_t at = line.find(before);
    if (at == std::string::npos) return false;
    const int64_t number = std::stoll(line.substr(at + before.size()));
    return number >= 1 && number <= entered &&
           (contains(line, concat(", in step ", number, " (training)\n")) ||
            contains(line, concat(", in step ", number + 1, " (training)\n")));
}

/// A TCP connection to the job's port from this host.
class Caller {
  public:
    explicit Caller(const std::string& invitation)
        : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        address.sin_port = htons(static_cast<uint16_t>(std::stoi(invitation)));
        connected_ = ::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    }
    ~Caller() { ::close(fd_); }
    Caller(const Caller&) = delete;
    Caller& operator=(const Caller&) = delete;

    int fd() const { return fd_; }
    bool connected() const { return connected_; }
    void send(const std::string& bytes) const {
        [[maybe_unused]] const auto sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    }
    /// What comes next, `size` bytes at most; empty when the other side has closed the connection.
    std::string read(size_t size) const {
        std::string bytes(size, '\0');
        pollfd ready{fd_, POLLIN, 0};
        if (::poll(&ready, 1, std::chrono::milliseconds(patience).count()) != 1) return "nothing";
        const ssize_t n = ::recv(fd_, bytes.data(), size, 0);
        bytes.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
        return bytes;
    }
    bool closed() const {
        for (std::string bytes = "more"; bytes != "nothing";) {
            bytes = read(4096);
            if (bytes.empty()) return true;
        }
        return false;
    }

  private:
    int fd_;
    bool connected_;
};

std::string random_bytes(int64_t size) {
    std::string bytes(static_cast<size_t>(size), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_int(-128, 127));
    return bytes;
}

/// The secret's halves, as bytes: what a rank shows, and what it is shown.
std::pair<std::string, std::string> secret_of(const std::string& invitation) {
    const std::string digits = invitation.substr(invitation.find(' ') + 1, 64);
    std::string bytes;
    for (size_t i = 0; i < 64; i += 2)
        bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
    return {bytes.substr(0, 16), bytes.substr(16)};
}

std::string number(int64_t value) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> 8 * i & 255);
    return bytes;
}

std::string padded(std::string text, size_t size) {
    text.resize(size, '\0');
    return text;
}

std::string hello(const std::string& secret, int rank, int size,
                  const std::string& host = "stranger") {
    return '\1' + secret + number(rank) + number(size) + padded(host, 64);
}

std::string heartbeat(int64_t pulses, int64_t step, int64_t collectives) {
    return '\3' + number(pulses) + number(step) + number(collectives) + padded("broadcast", 64) +
           padded("phase", 64);
}

/// A process that passes on, both ways, what one connection at its port and the job's port say, until the test cuts it.
class Relay {
  public:
    enum Cut { none, silent, closed };

    Relay() : door_(::socket(AF_INET, SOCK_STREAM, 0)) {
        void* memory = ::mmap(nullptr, sizeof *cut_, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        REQUIRE(memory != MAP_FAILED);
        cut_ = new (memory) std::atomic<int>(none);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t length = sizeof address;
        REQUIRE(::bind(door_, reinterpret_cast<sockaddr*>(&address), length) == 0);
        REQUIRE(::listen(door_, 1) == 0);
        REQUIRE(::getsockname(door_, reinterpret_cast<sockaddr*>(&address), &length) == 0);
        port_ = ntohs(address.sin_port);
    }
    ~Relay() {
        if (process_ > 0) {
            ::kill(process_, SIGKILL);
            ::waitpid(process_, nullptr, 0);
        }
        ::close(door_);
        ::munmap(cut_, sizeof *cut_);
    }
    Relay(const Relay&) = delete;
    Relay& operator=(const Relay&) = delete;

    std::string invitation(const std::string& invitation) const {
        const size_t space = invitation.find(' ');
        return std::to_string(port_) + invitation.substr(space, 66) + "127.0.0.1";
    }
    void start(const std::string& invitation) {
        process_ = ::fork();
        if (process_ != 0) return;
        {
            const Caller job(invitation);
            const int rank = ::accept(door_, nullptr, nullptr);
            std::array<pollfd, 2> ends{pollfd{rank, POLLIN, 0}, pollfd{job.fd(), POLLIN, 0}};
            while (*cut_ != closed) {
                if (*cut_ == silent || ::poll(ends.data(), 2, 5) <= 0) {
                    std::this_thread::sleep_for(1ms);
                    continue;
                }
                std::array<char, 4096> bytes;
                for (int end : {0, 1}) {
                    if (!ends[static_cast<size_t>(end)].revents) continue;
                    const ssize_t n =
                        ::recv(ends[static_cast<size_t>(end)].fd, bytes.data(), bytes.size(), 0);
                    if (n <= 0) ::_exit(0);
                    ::send(ends[static_cast<size_t>(1 - end)].fd, bytes.data(),
                           static_cast<size_t>(n), MSG_NOSIGNAL);
                }
            }
        }
        ::_exit(0);
    }
    void cut(Cut how) { *cut_ = how; }

  private:
    int door_;
    std::atomic<int>* cut_;
    int port_;
    pid_t process_ = 0;
};

/// All but the culprit were ended by their watchdogs with one and the same line, which rank 0 alone has printed.
void check_ended(Job& job, int culprit) {
    for (int rank = 0; rank < job.size(); ++rank) {
        if (rank == culprit) continue;
        CAPTURE(rank);
        CHECK(job.status(rank) == watchdog_code);
        CHECK(job.output(rank) ==
              (rank == 0 ? concat("train_gpt: ", job.board().line[0], '\n') : ""));
        CHECK(std::string(job.board().line[static_cast<size_t>(rank)]) == job.board().line[0]);
    }
}

}  // namespace

TEST_CASE("ranks that leave in any order end well and say nothing", "[watchdog]") {
    std::list<Job> jobs;
    for (int n = 0; n < 4; ++n) {
        std::vector<int> order(4);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), test_rng());
        if (n == 0) order = {0, 1, 2, 3};
        const int64_t steps = random_int(0, 30);
        jobs.emplace_back(JobOptions{}, [order, steps](Rank& self) {
            self.train(steps);
            // The next one leaves when this one is about to: they overlap, too.
            const int place =
                static_cast<int>(std::find(order.begin(), order.end(), self.rank) - order.begin());
            while (self.board.leaving < place) std::this_thread::sleep_for(1ms);
            ++self.board.leaving;
        });
    }
    for (Job& job : jobs) {
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
    std::list<Job> jobs;
    for (int victim = 0; victim < 4; ++victim)
        jobs.emplace_back(JobOptions{}, [](Rank& self) { self.train(); });
    int victim = 0;
    for (Job& job : jobs) {
        REQUIRE(job.all_entered(random_int(1, 50)));
        job.send(victim++, SIGKILL);
    }
    victim = 0;
    for (Job& job : jobs) {
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
    std::list<Job> jobs;
    for (int stopped = 0; stopped < 2; ++stopped)
        jobs.emplace_back(JobOptions{.size = 3, .timeout = 1}, [](Rank& self) { self.train(); });
    for (Job& job : jobs) REQUIRE(job.all_entered(3));
    jobs.front().send(0, SIGSTOP);
    jobs.back().send(2, SIGSTOP);
    Job& other = jobs.back();
    check_ended(other, 2);
    CHECK(contains(other.output(0), named(2) + "is hung: "));
    CHECK(names_last_collective(other.output(0), other.board().entered[2]));
    Job& first = jobs.front();
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

TEST_CASE("a job that is stopped as a whole goes on when it is continued", "[watchdog]") {
    Job job({.size = 3, .timeout = 0.8}, [](Rank& self) { self.train(); });
    REQUIRE(job.all_entered(3));
    for (int rank = 0; rank < 3; ++rank) job.send(rank, SIGSTOP);
    std::this_thread::sleep_for(1200ms);  // longer than the timeout
    for (int rank = 0; rank < 3; ++rank) job.send(rank, SIGCONT);
    REQUIRE(job.all_entered(job.board().entered[0] + 200));
    job.board().done = true;
    for (int rank = 0; rank < 3; ++rank) CHECK(job.status(rank) == 0);
    CAPTURE(job.output());
    CHECK(job.output().empty());
}

TEST_CASE("of ranks without progress the one that the others wait for is named", "[watchdog]") {
    const int culprit = static_cast<int>(random_int(0, 3));
    const int64_t last = random_int(1, 20);
    Job job({.timeout = 1}, [=](Rank& self) {
        self.train(last);
        ++self.activity.step;
        if (self.rank == culprit)
            while (true) std::this_thread::sleep_for(1s);
        self.collective();
    });
    check_ended(job, -1);
    CHECK(job.output(0) ==
          concat(named(culprit),
                 "is stuck: it has made no progress for 1 s, and 3 of the 4 ranks wait for it; ",
                 "its last collective was reduce-scatter number ", last, ", in step ", last + 1,
                 " (training)\n"));
}

TEST_CASE("ranks may wait for one that makes progress as long as it takes", "[watchdog]") {
    const int saver = static_cast<int>(random_int(0, 2));
    Job job({.size = 3, .timeout = 0.5}, [=](Rank& self) {
        self.train(3);
        if (self.rank == saver)
            for (int file = 0; file < 120; ++file) {
                std::this_thread::sleep_for(10ms);
                self.activity.pulse();
            }
        self.collective();
    });
    for (int rank = 0; rank < 3; ++rank) CHECK(job.status(rank) == 0);
    CAPTURE(job.output());
    CHECK(job.output().empty());
}

TEST_CASE("a rank that fails by an exception ends all ranks with its reason", "[watchdog]") {
    std::list<Job> jobs;
    for (int culprit = 0; culprit < 4; ++culprit)
        jobs.emplace_back(JobOptions{}, [culprit](Rank& self) {
            self.train(5);
            if (self.rank != culprit) self.train();
            try {
                throw Error("the disk is full,\nfree some of it");
            } catch (const Error& error) {
                if (!self.watchdog.report(error.what())) throw;
            }
            throw Error("reported");
        });
    // One that nobody reports, and that destroys the watchdog.
    const int thrower = static_cast<int>(random_int(0, 3));
    Job& unreported = jobs.emplace_back(JobOptions{}, [thrower](Rank& self) {
        self.train(5);
        if (self.rank == thrower) throw Error("lost");
        self.train();
    });
    int culprit = 0;
    for (Job& job : jobs) {
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

TEST_CASE("a check that throws ends all ranks with its reason", "[watchdog]") {
    std::list<Job> jobs;
    for (int culprit : {0, 2}) {
        const auto check = [culprit, calls = 0](int rank) mutable {
            if (rank == culprit && ++calls > 2) throw Error("an asynchronous error");
        };
        jobs.emplace_back(JobOptions{.timeout = 3, .check = check},
                          [](Rank& self) { self.train(); });
    }
    for (int culprit : {0, 2}) {
        Job& job = culprit == 0 ? jobs.front() : jobs.back();
        check_ended(job, -1);
        CHECK(job.output() == named(culprit) + "failed: an asynchronous error\n");
    }
}

TEST_CASE("what a death makes other ranks report is not taken for the reason", "[watchdog]") {
    Job job({}, [](Rank& self) {
        self.train(5);
        if (self.rank == 3) ::raise(SIGKILL);
        if (self.rank == 0 || self.rank == 2) self.watchdog.report("a collective has failed");
        self.train();
    });
    check_ended(job, 3);
    CHECK(contains(job.output(), named(3) + "is dead: "));
}

TEST_CASE("a cut connection ends both sides of it", "[watchdog]") {
    std::list<Relay> relays(2);
    std::list<Job> jobs;
    for (Relay& relay : relays) {
        jobs.emplace_back(JobOptions{.size = 3,
                                     .timeout = 1,
                                     .invitation =
                                         [&](int rank, const std::string& invitation) {
                                             return rank == 2 ? relay.invitation(invitation)
                                                              : invitation;
                                         }},
                          [](Rank& self) { self.train(); });
        relay.start(jobs.back().invitation());
    }
    for (Job& job : jobs) REQUIRE(job.all_entered(3));
    relays.front().cut(Relay::silent);
    relays.back().cut(Relay::closed);
    for (Job* job : {&jobs.front(), &jobs.back()}) {
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
    Job job(
        {.size = 3,
         .invitation =
             [gate](int rank, const std::string& invitation) {
                 while (rank == 2 && !gate->done) std::this_thread::sleep_for(1ms);
                 return invitation;
             }},
        [](Rank& self) {
            self.activity.phase = "start";
            while (self.board.joined < self.size) {  // the others have something to do meanwhile
                self.activity.pulse();
                std::this_thread::sleep_for(1ms);
            }
            self.train();
        });
    REQUIRE(eventually([&] { return job.board().joined == 2; }));
    const auto [secret, answer] = secret_of(job.invitation());
    std::list<Caller> strangers;
    const auto call = [&](const std::string& bytes) -> Caller& {
        strangers.emplace_back(job.invitation());
        CHECK(strangers.back().connected());
        strangers.back().send(bytes);
        return strangers.back();
    };
    // Each of them is thrown out, at once or a few seconds later.
    for (int n = 0; n < 50; ++n) call(random_bytes(random_int(0, 5000)));
    for (int kind = 0; kind < 256; ++kind)
        call(static_cast<char>(kind) + random_bytes(random_int(0, 1200)));
    for (int bit = 0; bit < 128; bit += static_cast<int>(random_int(1, 30))) {
        std::string wrong = secret;
        wrong[static_cast<size_t>(bit / 8)] ^= static_cast<char>(1 << bit % 8);
        call(hello(wrong, 2, 3));
    }
    call(hello(secret, 1, 3));  // is there already
    for (int rank : {0, 3, -1, INT32_MAX, INT32_MIN}) call(hello(secret, rank, 3));
    call(hello(secret, 2, 4));  // of another job
    call(heartbeat(1, 2, 3));
    call(hello(secret, 2, 3)
             .substr(0, static_cast<size_t>(random_int(0, 96))));  // half of it, and no more
    call(hello(secret, 2, 3) + '\4');
    call(hello(secret, 2, 3) + "garbage");
    call(hello(secret, 2, 3) + hello(secret, 2, 3));
    {
        // With the secret alone, without a heartbeat, nobody is a member; and one may come in single bytes.
        const Caller caller(job.invitation());
        for (char byte : hello(secret, 2, 3)) caller.send({byte});
        CHECK(caller.read(17) == '\2' + answer);
    }
    for (int n = 0; n < 200; ++n) call("");
    CHECK(std::all_of(strangers.begin(), strangers.end(),
                      [](const Caller& caller) { return caller.closed(); }));
    gate->done = true;
    INFO(job.output());
    REQUIRE(job.all_entered(10));
    // All ranks are there, and so nobody else is let in.
    CHECK(eventually([&] { return !Caller(job.invitation()).connected(); }));
    job.board().done = true;
    for (int rank = 0; rank < 3; ++rank) CHECK(job.status(rank) == 0);
    CAPTURE(job.output());
    CHECK(job.output().empty());
    ::munmap(gate, sizeof(Board));
}

TEST_CASE("a member that speaks garbage is as good as dead", "[watchdog]") {
    std::list<Job> jobs;
    std::list<Caller> members;
    for (int n = 0; n < 4; ++n) {
        // The test itself is rank 1.
        Job& job = jobs.emplace_back(JobOptions{.size = 3,
                                                .invitation =
                                                    [](int rank, const std::string& invitation) {
                                                        if (rank == 1) ::_exit(0);
                                                        return invitation;
                                                    }},
                                     [](Rank& self) { self.train(); });
        const Caller& member = members.emplace_back(job.invitation());
        member.send(hello(secret_of(job.invitation()).first, 1, 3, "no\x01where\x7f"));
        CHECK(member.read(1) == "\2");
        member.send(heartbeat(INT64_MAX, INT64_MIN, INT64_MAX) + heartbeat(INT64_MIN, -1, 7));
        REQUIRE(eventually([&] { return job.board().joined == 2; }));
        std::string reports = '\4' + std::string(1024, 'x');
        reports += reports;
        member.send(n == 0
                        ? static_cast<char>(random_int(6, 255)) + random_bytes(random_int(0, 2000))
                    : n == 1 ? reports
                    : n == 2 ? '\4' + random_bytes(1024)
                             : hello(random_bytes(16), 1, 3) + std::string(1, '\0'));
        ::shutdown(member.fd(), SHUT_WR);
    }
    int n = 0;
    for (Job& job : jobs) {
        INFO(job.output());
        check_ended(job, 1);
        CHECK(contains(job.output(0), concat("rank 1 (host no where ) ",
                                             n == 0 || n == 3 ? "is dead" : "failed")));
        CHECK(count(job.output(0), "\n") == 1);
        ++n;
    }
}

TEST_CASE("a rank that does not find rank 0 says where it has looked", "[watchdog]") {
    // Whoever answers at the port does not know the secret.
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
    Job job({.size = 3,
             .timeout = 1,
             .invitation =
                 [](int rank, const std::string& invitation) {
                     if (rank == 2) ::_exit(0);
                     return invitation;
                 }},
            [](Rank& self) { self.train(); });
    check_ended(job, 2);
    CHECK(contains(job.output(0), "rank 2 has not come to rank 0 (host node0) within 1 s"));
}

TEST_CASE("rank 0 does not wait for ever for the others' goodbyes", "[watchdog]") {
    Job job({.size = 3, .timeout = 1}, [](Rank& self) {
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

TEST_CASE("a process ends even if on_failure does not come back", "[watchdog][.][long]") {
    Job job({.on_failure =
                 [](int rank) {
                     if (rank < 2) std::this_thread::sleep_for(1h);
                 }},
            [](Rank& self) { self.train(); });
    REQUIRE(job.all_entered(3));
    job.send(3, SIGKILL);
    for (int rank : {0, 1}) CHECK(job.status(rank) == 128 + SIGALRM);
    CHECK(job.status(2) == watchdog_code);
    CHECK(contains(job.output(0), named(3) + "is dead: "));
}
