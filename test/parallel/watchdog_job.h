// Jobs of forked processes for the watchdog's tests, each process a rank that enters collectives as
// training does.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
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
#include "parallel/watchdog/invitation.h"
#include "parallel/watchdog/watchdog.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

namespace train_gpt::watchdog_job {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr int max_ranks = 8;
constexpr int watchdog_code = 77, exception_code = 3;
constexpr auto patience = 30s;  // nothing takes this long, however busy the machine
// The watchdog's, where a test waits for it: longer than a busy machine keeps a rank from running.
constexpr std::chrono::duration<double> timeout = 2s;

/// Waits until the condition holds; false when it never does.
inline bool eventually(const std::function<bool()>& condition) {
    for (const auto end = Clock::now() + patience; Clock::now() < end;
         std::this_thread::sleep_for(2ms))
        if (condition()) return true;
    return condition();
}

/// Memory that the ranks of a job and the test share.
struct Board {
    std::atomic<int> joined{0}, leaving{0};
    std::atomic<bool> done{false};      // set by the test: ranks may end
    std::atomic<int64_t> last_step{0};  // set by rank 0: the last step
    std::array<std::atomic<int64_t>, max_ranks> entered{};
    std::array<char[1024], max_ranks> line{};  // what on_failure was given
    std::atomic<int> ended{0};                 // ranks whose on_failure was called,
    std::array<int, max_ranks> order{};        // in their order
};

struct WatchedRank {
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
    std::chrono::duration<double> timeout = 20s;
    std::function<std::string(int rank, const std::string& invitation)> invitation = {};
    std::function<void(int rank)> check = {}, on_failure = {};
    bool can_unwind = true;  // what on_failure returns
    std::vector<std::string> places = {};
};

/// A job whose ranks do `work` and then exit with 0.
class WatchdogJob {
  public:
    WatchdogJob(JobOptions options, const std::function<void(WatchedRank&)>& work)
        : options_(std::move(options)) {
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
    ~WatchdogJob() {
        for (size_t r = 0; r < processes_.size(); ++r)
            if (status_[r] == running) {
                ::kill(processes_[r], SIGKILL);
                ::waitpid(processes_[r], nullptr, 0);
            }
        ::munmap(board_, sizeof(Board));
    }
    WatchdogJob(const WatchdogJob&) = delete;
    WatchdogJob& operator=(const WatchdogJob&) = delete;

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
    int run(int rank, Watchdog::Listener listener, const std::function<void(WatchedRank&)>& work) {
        const int file =
            ::open((folder_ / std::to_string(rank)).c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600);
        ::dup2(file, STDERR_FILENO);
        Activity activity;
        WatchdogOptions options;
        options.rank = rank;
        options.size = size();
        options.host = "node" + std::to_string(rank);
        options.timeout_seconds = options_.timeout.count();
        options.exit_code = watchdog_code;
        options.places = options_.places;
        if (options_.check) options.check = [&] { options_.check(rank); };
        options.on_failure = [&](const char* line) {
            std::strncpy(board_->line[static_cast<size_t>(rank)], line, 1023);
            board_->order[static_cast<size_t>(board_->ended++)] = rank;
            if (options_.on_failure) options_.on_failure(rank);
            return options_.can_unwind;
        };
        try {
            Watchdog watchdog(
                std::move(listener),
                options_.invitation ? options_.invitation(rank, invitation_) : invitation_,
                activity, options);
            ++board_->joined;
            WatchedRank self{rank, size(), watchdog, activity, *board_};
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

inline int64_t count(const std::string& text, const std::string& what) {
    int64_t found = 0;
    for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += what.size()) ++found;
    return found;
}

inline std::string named(int rank) {
    return concat("train_gpt: rank ", rank, " (host node", rank, ") ");
}

/// The line names a collective that the rank had entered by its last heartbeat, `entered` at the
/// latest, and its step.
inline bool names_last_collective(const std::string& line, int64_t entered) {
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
    /// Who is invited knows the invitation; others send bytes as they are.
    enum Kind { invited, stranger };

    explicit Caller(const std::string& invitation, Kind kind = invited) {
        net::Socket socket = net::connect_to("127.0.0.1", std::to_string(std::stoi(invitation)),
                                             net::Clock::now() + patience);
        connected_ = static_cast<bool>(socket);
        if (!connected_) return;
        channel_ = kind == stranger
                       ? net::Channel(std::move(socket))
                       : watchdog::call(std::move(socket), watchdog::parse_invitation(invitation));
        net::shake_hands(channel_, net::Clock::now() + patience);
    }

    int fd() const { return channel_.fd(); }
    bool connected() const { return connected_; }
    void send(const std::string& bytes) {
        net::send_all(channel_, bytes, net::Clock::now() + patience);
    }
    /// The next bytes, at most `size`; empty when the other side has closed the connection.
    std::string read(size_t size) {
        std::string bytes(size, '\0');
        const auto end = net::Clock::now() + patience;
        while (true) {
            const ssize_t n = channel_.read(bytes.data(), size);
            if (n >= 0 || errno != EAGAIN) {
                bytes.resize(static_cast<size_t>(std::max<ssize_t>(n, 0)));
                return bytes;
            }
            pollfd ready{channel_.fd(), POLLIN, 0};
            if (::poll(&ready, 1, net::milliseconds(end - net::Clock::now())) != 1)
                return "nothing";
        }
    }
    bool closed() {
        for (std::string bytes = "more"; bytes != "nothing";) {
            bytes = read(4096);
            if (bytes.empty()) return true;
        }
        return false;
    }

  private:
    net::Channel channel_;
    bool connected_ = false;
};

inline std::string random_bytes(int64_t size) {
    std::string bytes(static_cast<size_t>(size), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_int(-128, 127));
    return bytes;
}

/// The secret's halves, as bytes: what a rank shows, and what it is shown.
inline std::pair<std::string, std::string> secret_of(const std::string& invitation) {
    const std::string digits = invitation.substr(invitation.find(' ') + 1, 64);
    std::string bytes;
    for (size_t i = 0; i < 64; i += 2)
        bytes += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
    return {bytes.substr(0, 16), bytes.substr(16)};
}

inline std::string number(int64_t value) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(value >> 8 * i & 255);
    return bytes;
}

inline std::string padded(std::string text, size_t size) {
    text.resize(size, '\0');
    return text;
}

inline std::string hello(const std::string& secret, int rank, int size,
                         const std::string& host = "stranger") {
    return '\1' + secret + number(rank) + number(size) + padded(host, 64);
}

inline std::string heartbeat(int64_t pulses, int64_t step, int64_t collectives) {
    return '\3' + number(pulses) + number(step) + number(collectives) + padded("broadcast", 64) +
           padded("phase", 64);
}

/// A process that relays between one connection at its port and the job's port, in both directions,
/// until the test cuts it.
class Relay {
  public:
    enum Cut { none, silent, closed };

    Relay() : listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
        void* memory = ::mmap(nullptr, sizeof *cut_, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        REQUIRE(memory != MAP_FAILED);
        cut_ = new (memory) std::atomic<int>(none);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t length = sizeof address;
        REQUIRE(::bind(listener_, reinterpret_cast<sockaddr*>(&address), length) == 0);
        REQUIRE(::listen(listener_, 1) == 0);
        REQUIRE(::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length) == 0);
        port_ = ntohs(address.sin_port);
    }
    ~Relay() {
        if (process_ > 0) {
            ::kill(process_, SIGKILL);
            ::waitpid(process_, nullptr, 0);
        }
        ::close(listener_);
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
            const Caller job(invitation, Caller::stranger);
            const int rank = ::accept(listener_, nullptr, nullptr);
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
    int listener_;
    std::atomic<int>* cut_;
    int port_;
    pid_t process_ = 0;
};

/// All but the culprit were ended by their watchdogs with one and the same line, which rank 0 alone
/// has printed.
inline void check_ended(WatchdogJob& job, int culprit) {
    for (int rank = 0; rank < job.size(); ++rank) {
        if (rank == culprit) continue;
        CAPTURE(rank);
        CHECK(job.status(rank) == watchdog_code);
        CHECK(job.output(rank) ==
              (rank == 0 ? concat("train_gpt: ", job.board().line[0], '\n') : ""));
        CHECK(std::string(job.board().line[static_cast<size_t>(rank)]) == job.board().line[0]);
    }
}

}  // namespace train_gpt::watchdog_job
