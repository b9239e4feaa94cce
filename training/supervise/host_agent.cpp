#include "training/supervise/host_agent.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/child_process.h"
#include "base/error.h"
#include "base/json_text.h"
#include "training/supervise/line_reader.h"

namespace train_gpt {

std::string AgentOrder::packed() const {
    const Json json = {{"directory", directory},
                       {"arguments", arguments},
                       {"variables", variables},
                       {"first", first},
                       {"count", count},
                       {"mark", mark},
                       {"mark_missing", mark_missing}};
    return to_text(json);
}

AgentOrder AgentOrder::parse(const std::string& text) {
    const Json json = try_parse_json(text);
    try {
        return {.directory = json.at("directory"),
                .arguments = json.at("arguments"),
                .variables = json.at("variables"),
                .first = json.at("first"),
                .count = json.at("count"),
                .mark = json.at("mark"),
                .mark_missing = json.at("mark_missing")};
    } catch (const nlohmann::json::exception&) {
        throw Error(
            "supervise --on-host is started by train_gpt supervise alone; its input is not "
            "an order");
    }
}

namespace {

// What would make a rank look for others than those of its job (parallel/launch/place.h).
const std::vector<std::string> other_launchers{"TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE",
                                               "PMI_SIZE", "PMI_RANK", "PMIX_RANK"};

void write_line(const std::string& text) {
    const std::string line = text + "\n";
    for (size_t done = 0; done < line.size();) {
        const ssize_t n = ::write(STDOUT_FILENO, line.data() + done, line.size() - done);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {  // ssh's daemon gives one socket for input and output
            pollfd wait{STDOUT_FILENO, POLLOUT, 0};
            ::poll(&wait, 1, -1);
            continue;
        }
        if (n <= 0) return;  // the supervisor is gone; the ranks need not notice
        done += static_cast<size_t>(n);
    }
}

volatile std::sig_atomic_t was_signalled = 0;

class Agent {
  public:
    explicit Agent(const AgentOrder& order) : order_(order) {
        for (int i = 0; i < order.count; ++i) start(order.first + i);
    }

    void serve(LineReader& commands) {
        while (std::ranges::any_of(ranks_, [](const Rank& r) { return r.pid > 0; })) {
            wait_for_input(commands);
            if (was_signalled) {
                was_signalled = 0;
                stop();
            }
            for (const std::string& command : commands.take()) {
                if (command == "stop") stop();
                if (command == "kill") signal_all(SIGKILL);
            }
            if (commands.is_at_end() && !input_ended_) {
                input_ended_ = true;
                stop();
            }
            for (Rank& rank : ranks_) forward(rank);
            collect_ends();
        }
    }

  private:
    struct Rank {
        int number = 0;
        pid_t pid = 0;  // 0: it has ended
        LineReader output, error;
    };

    void start(int number) {
        std::vector<std::string> command{""};
        command.insert(command.end(), order_.arguments.begin(), order_.arguments.end());
        std::vector<std::string> variables = order_.variables;
        variables.push_back(concat("TRAIN_GPT_RANK=", number));
        const Pipe output = open_pipe(), error = open_pipe();
        ranks_.push_back({.number = number,
                          .pid = start_process({.command = command,
                                                .environment = variables,
                                                .without = other_launchers,
                                                .output = output.writes,
                                                .error = error.writes,
                                                .death_signal = SIGTERM}),
                          .output = LineReader(output.reads),
                          .error = LineReader(error.reads)});
        ::close(output.writes);
        ::close(error.writes);
        write_line(concat("@s ", number));
    }

    void wait_for_input(const LineReader& commands) {
        std::vector<pollfd> waits;
        const auto add = [&](const LineReader& reader) {
            if (!reader.is_at_end()) waits.push_back({reader.descriptor(), POLLIN, 0});
        };
        add(commands);
        for (const Rank& rank : ranks_) {
            add(rank.output);
            add(rank.error);
        }
        // A rank may end while a process that it has started still holds its output.
        ::poll(waits.data(), waits.size(), 100);
    }
    static void forward(Rank& rank) {
        for (const std::string& line : rank.output.take())
            write_line(concat("@o ", rank.number, " ", line));
        for (const std::string& line : rank.error.take())
            write_line(concat("@e ", rank.number, " ", line));
    }
    void collect_ends() {
        for (Rank& rank : ranks_) {
            int status = 0;
            if (rank.pid <= 0 || ::waitpid(rank.pid, &status, WNOHANG) != rank.pid) continue;
            rank.pid = 0;
            forward(rank);  // what it has printed last
            rank.output.finish();
            rank.error.finish();
            forward(rank);
            write_line(concat("@x ", rank.number, " ", exit_code_of(status)));
        }
    }

    /// One rank is enough: ranks agree on when they stop.
    void stop() {
        for (const Rank& rank : ranks_)
            if (rank.pid > 0) {
                ::kill(rank.pid, SIGUSR1);
                return;
            }
    }
    void signal_all(int number) const {
        for (const Rank& rank : ranks_)
            if (rank.pid > 0) ::kill(rank.pid, number);
    }

    const AgentOrder& order_;
    std::vector<Rank> ranks_;
    bool input_ended_ = false;
};

}  // namespace

int run_host_agent() {
    struct sigaction action {};
    action.sa_handler = [](int) { was_signalled = 1; };
    ::sigemptyset(&action.sa_mask);
    for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1})
        ::sigaction(number, &action, nullptr);
    action.sa_handler = [](int) {};  // unlike an ignored one, a handled signal is not inherited
    ::sigaction(SIGPIPE, &action, nullptr);
    std::signal(SIGCHLD, SIG_DFL);
    try {
        LineReader commands(STDIN_FILENO);
        const std::string first = commands.wait_for_line();
        const AgentOrder order = AgentOrder::parse(first);
        std::error_code code;
        std::filesystem::current_path(order.directory, code);
        if (code)
            throw Error("the folder ", order.directory, " cannot be entered (", code.message(),
                        "); the supervisor's folder must be on storage that all hosts see");
        if (!order.mark.empty() && !std::filesystem::exists(order.mark, code))
            throw Error(order.mark_missing);
        Agent(order).serve(commands);
        return 0;
    } catch (const Error& error) {
        write_line(std::string("@f ") + error.what());
        return 1;
    }
}

}  // namespace train_gpt
