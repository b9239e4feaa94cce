#include "training/supervise/ranks_on_hosts.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <filesystem>
#include <limits>
#include <memory>

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/child_process.h"
#include "base/error.h"
#include "base/printable.h"
#include "base/stopwatch.h"
#include "training/supervise/line_reader.h"

namespace train_gpt {

namespace {

// Without these, ssh asks for passwords, and waits for minutes for a host that is gone.
constexpr const char* usual_ssh =
    "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3";
// One task for a host, with all its processors and GPUs, beside other steps. --no-kill: the
// allocation outlives a node.
constexpr const char* usual_srun =
    "srun --nodes=1 --ntasks=1 --overlap --no-kill --mpi=none --cpu-bind=none --gpu-bind=none "
    "--input=all";

}  // namespace

bool HostEnd::all_succeeded() const {
    return has_answered && refusal.empty() &&
           std::ranges::all_of(ranks, [](const RankEnd& end) { return end == 0; });
}

// ---- How a host is reached ----------------------------------------------------------------------

Reach::Reach(Way way, const std::string& words)
    : way_(way),
      words_(split_at_blanks(words)),
      program_(std::filesystem::read_symlink("/proc/self/exe")) {}

bool Reach::is_direct(const std::string& host) const {
    return words_.empty() && way_ == Way::ssh && is_this_machine(host);
}

std::vector<std::string> Reach::agent_on(const std::string& host) const {
    if (is_direct(host)) return {"", "supervise", "--on-host"};
    std::vector<std::string> command =
        !words_.empty() ? words_ : split_at_blanks(way_ == Way::srun ? usual_srun : usual_ssh);
    if (way_ == Way::srun) {
        command.insert(command.end(), {"--nodelist=" + host, program_, "supervise", "--on-host"});
    } else {
        command.push_back(host);
        command.push_back("exec " + shell_word(program_) + " supervise --on-host");
    }
    return command;
}

// ---- The connection to a host -------------------------------------------------------------------

namespace {

constexpr double never = std::numeric_limits<double>::infinity();

class HostConnection {
  public:
    HostConnection(const Reach& reach, const HostOrder& order) : first_(order.order.first) {
        end_.ranks.resize(static_cast<size_t>(order.order.count));
        const Pipe input = open_pipe(), output = open_pipe(), error = open_pipe();
        pid_ = start_process({.command = reach.agent_on(order.host),
                              .input = input.reads,
                              .output = output.writes,
                              .error = error.writes,
                              .own_session = true});
        for (const int theirs : {input.reads, output.writes, error.writes}) ::close(theirs);
        input_ = input.writes;
        output_ = LineReader(output.reads);
        error_ = LineReader(error.reads);
        tell(order.order.packed());
    }
    ~HostConnection() {
        close_input();
        if (pid_ > 0) end_process();
    }
    HostConnection(const HostConnection&) = delete;
    HostConnection& operator=(const HostConnection&) = delete;

    void tell(const std::string& line) {
        // A pipe holds far more than an order, so that this does not wait for a host.
        const std::string text = line + "\n";
        if (input_ >= 0 &&
            ::write(input_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
            close_input();
    }
    /// Ends the connection, whatever happens on the host.
    void end_process() {
        ::kill(-pid_, SIGKILL);
        while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
        }
        pid_ = 0;
    }

    bool has_ended() const { return pid_ <= 0; }
    const HostEnd& end() const { return end_; }
    /// Whether a rank has failed, or none was started.
    bool has_failed() const {
        return !end_.refusal.empty() || std::ranges::any_of(end_.ranks, [](const RankEnd& rank) {
            return rank && *rank != 0 && *rank != 75 && *rank != 130;
        });
    }
    /// Whether the connection has ended before the ranks.
    bool is_lost() const {
        return has_ended() && end_.refusal.empty() &&
               std::ranges::any_of(end_.ranks, [](const RankEnd& rank) { return !rank; });
    }
    void add_waits(std::vector<pollfd>& waits) const {
        for (const LineReader* reader : {&output_, &error_})
            if (!reader->is_at_end()) waits.push_back({reader->descriptor(), POLLIN, 0});
    }

    void read(size_t host, const std::function<void(const RankLine&)>& on_line) {
        // What the process has printed before its end is in the pipes when it has ended.
        int status = 0;
        const bool ended = pid_ > 0 && ::waitpid(pid_, &status, WNOHANG) == pid_;
        if (ended) {
            pid_ = 0;
            output_.finish();
            error_.finish();
        }
        for (const std::string& line : output_.take()) take(host, line, on_line);
        for (const std::string& line : error_.take()) note(host, line, on_line);
        // Nothing is left to tell: ssh and others may wait for the end of their input.
        if (ended || !end_.refusal.empty() ||
            std::ranges::all_of(end_.ranks, [](const RankEnd& rank) { return rank.has_value(); }))
            close_input();
    }

  private:
    void close_input() {
        if (input_ >= 0) ::close(input_);
        input_ = -1;
    }
    void note(size_t host, const std::string& line,
              const std::function<void(const RankLine&)>& on_line) {
        constexpr size_t most = 20;
        if (end_.said.size() == most) end_.said.erase(end_.said.begin());
        end_.said.push_back(line);
        on_line({host, -1, true, line});
    }
    void take(size_t host, const std::string& line,
              const std::function<void(const RankLine&)>& on_line) {
        const char kind = line.size() > 3 && line[0] == '@' && line[2] == ' ' ? line[1] : '\0';
        if (kind == 'f') {
            end_.has_answered = true;
            end_.refusal = line.substr(3);
            return;
        }
        int rank = 0;
        const auto [stop, code] = std::from_chars(line.data() + std::min<size_t>(3, line.size()),
                                                  line.data() + line.size(), rank);
        const int at = rank - first_;
        if (kind == '\0' || code != std::errc() || at < 0 || at >= std::ssize(end_.ranks))
            return note(host, line, on_line);
        end_.has_answered = true;
        const size_t begin =
            std::min<size_t>(static_cast<size_t>(stop - line.data()) + 1, line.size());
        const std::string rest = line.substr(begin);
        if (kind == 'o' || kind == 'e')
            on_line({host, rank, kind == 'e', rest});
        else if (kind == 'x')
            end_.ranks[static_cast<size_t>(at)] = std::atoi(rest.c_str());
    }

    int first_;
    pid_t pid_ = 0;
    int input_ = -1;
    LineReader output_, error_;
    HostEnd end_;
};

}  // namespace

std::vector<HostEnd> run_on_hosts(const Reach& reach, const std::vector<HostOrder>& orders,
                                  const RankLimits& limits,
                                  const std::function<void(const RankLine&)>& on_line,
                                  const std::function<bool()>& stop) {
    constexpr double kill_seconds = 5;  // for a host to end its ranks when it is told to
    std::vector<std::unique_ptr<HostConnection>> hosts;
    for (const HostOrder& order : orders)
        hosts.push_back(std::make_unique<HostConnection>(reach, order));
    const Stopwatch since_start;
    double kill_at = limits.answer_seconds > 0 ? limits.answer_seconds : never, end_at = never;
    bool is_failing = false, is_losing = false, is_stopping = false;
    const auto is_running = [](const auto& host) { return !host->has_ended(); };
    while (std::ranges::any_of(hosts, is_running)) {
        std::vector<pollfd> waits;
        for (const auto& host : hosts) host->add_waits(waits);
        ::poll(waits.data(), waits.size(), 100);
        for (size_t i = 0; i < hosts.size(); ++i) hosts[i]->read(i, on_line);
        const double now = since_start.seconds();
        if (!is_stopping && stop()) {
            is_stopping = true;
            if (limits.answer_seconds > 0)
                kill_at = 0;  // a check has nothing to save
            else
                hosts.front()->tell("stop");
        }
        const auto end_soon = [&](bool& known, bool (HostConnection::*happened)() const,
                                  double seconds) {
            if (known) return;
            known = std::ranges::any_of(hosts, [&](const auto& h) { return (*h.*happened)(); });
            if (known && end_at == never) kill_at = std::min(kill_at, now + seconds);
        };
        end_soon(is_failing, &HostConnection::has_failed, limits.grace_seconds);
        end_soon(is_losing, &HostConnection::is_lost, limits.loss_seconds);
        if (now > kill_at) {
            for (const auto& host : hosts) host->tell("kill");
            kill_at = never;
            end_at = now + kill_seconds;
        }
        if (now > end_at)
            for (const auto& host : hosts)
                if (!host->has_ended()) host->end_process();
    }
    std::vector<HostEnd> ends;
    for (const auto& host : hosts) ends.push_back(host->end());
    return ends;
}

}  // namespace train_gpt
