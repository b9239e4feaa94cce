#include "training/supervise/start_ranks.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>

#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "parallel/net/socket.h"
#include "training/files/checkpoint.h"
#include "training/files/kept_choices.h"
#include "training/interrupt.h"

namespace train_gpt {

namespace {

namespace fs = std::filesystem;

constexpr const char* failure_prefix = "train_gpt: ";
constexpr int ports_of_starts = 16;

std::string new_secret() {
    const std::string random = net::random_text(32);
    return net::hexadecimal({reinterpret_cast<const uint8_t*>(random.data()), random.size()});
}

/// A port of this machine that is free now.
int free_port() {
    const net::Socket socket = net::listen_on(0);
    if (!socket) throw Error("this machine has no free TCP port");
    return net::port_of(socket);
}

bool is_stopped() { return interrupted() != nullptr; }

/// The text of a line about a failure; empty if the line is another one.
std::string failure_in(const RankLine& line) {
    if (!line.is_error || !line.text.starts_with(failure_prefix)) return "";
    const std::string text = line.text.substr(std::string(failure_prefix).size());
    return text.starts_with("note: ") ? "" : text;
}

/// Why a host's ranks have not all ended well, as the end of a sentence.
std::string reason_of(const HostEnd& end, const std::string& failure) {
    if (!end.has_answered)
        return end.said.empty() ? "does not answer" : "does not answer (" + end.said.back() + ")";
    if (!end.refusal.empty()) return "has started no ranks: " + end.refusal;
    if (!failure.empty()) return "has failed its check: " + failure;
    for (const RankEnd& rank : end.ranks) {
        if (!rank) return "has not ended its check: the connection to it was lost";
        if (*rank < 0) return concat("has failed its check: signal ", -*rank, " has ended it");
        if (*rank == 127) return "has failed its check: the program cannot be run there";
        if (*rank > 0) return concat("has failed its check (exit code ", *rank, ")");
    }
    return "";
}

}  // namespace

RankStarter::RankStarter(const SupervisedJob& job, const Config& config, SupervisorLog& log)
    : job_(job),
      config_(config),
      log_(log),
      mark_(fs::path(config.run_dir) /
            concat(".supervised-", std::random_device()(), "-", ::getpid())) {
    write_file(mark_, "hosts that see this file see the run's folder\n");
}

RankStarter::~RankStarter() {
    std::error_code ignored;
    fs::remove(mark_, ignored);
}

// ---- Orders -------------------------------------------------------------------------------------

std::string RankStarter::address_of(size_t host, int port_offset) const {
    const JobHost& first = job_.hosts[host];
    if (job_.options.port == 0) return concat("127.0.0.1:", free_port());
    const bool is_ipv6 = first.address.find(':') != std::string::npos;
    return concat(is_ipv6 ? "[" : "", first.address, is_ipv6 ? "]:" : ":",
                  job_.options.port + port_offset);
}

std::vector<std::string> RankStarter::variables(int world, const std::string& address) const {
    std::vector<std::string> all{concat("TRAIN_GPT_WORLD=", world)};
    if (world > 1) all.push_back("TRAIN_GPT_ADDRESS=" + address);
    const auto add = [&](const char* name, const std::string& otherwise) {
        const char* const value = std::getenv(name);
        const std::string text = value ? value : otherwise;
        if (!text.empty()) all.push_back(concat(name, "=", text));
        return !text.empty();
    };
    // With a new secret for each start, a rank of an earlier one cannot take part.
    if (std::getenv("TRAIN_GPT_SECRET") || !add("TRAIN_GPT_SECRET_FILE", ""))
        add("TRAIN_GPT_SECRET", new_secret());
    add("TRAIN_GPT_JOIN_SECONDS", "120");
    if (job_.options.threads > 0)
        all.push_back(concat("OMP_NUM_THREADS=", job_.options.threads));
    else
        add("OMP_NUM_THREADS", "");
    for (char** variable = environ; *variable; ++variable)
        if (std::string(*variable).starts_with("NCCL_")) all.push_back(*variable);
    return all;
}

AgentOrder RankStarter::order_of(const HostRanks& part) const {
    const std::string folder = fs::absolute(config_.run_dir).lexically_normal().string();
    return {.directory = fs::current_path(),
            .first = part.first,
            .count = part.count,
            .mark = mark_.string(),
            .mark_missing =
                concat("the run folder ", folder,
                       " on this host is not the one that the supervisor "
                       "writes to; put run_dir on storage that all hosts see, at the same path")};
}

std::vector<std::string> RankStarter::selfcheck_arguments() const {
    std::vector<std::string> arguments{"selfcheck", "--device", config_.device};
    std::istringstream words(job_.options.selfcheck);
    for (std::string word; words >> word;) {
        if (word == "--device") arguments.resize(1);
        arguments.push_back(word);
    }
    return arguments;
}

// ---- Output -------------------------------------------------------------------------------------

void RankStarter::show(const std::string& host, const RankLine& line) {
    const std::string text = printable(line.text);
    if (line.rank == 0) {
        std::FILE* const to = line.is_error ? stderr : stdout;
        std::fprintf(to, "%s\n", text.c_str());
        std::fflush(to);
        return log_.line(text);
    }
    const std::string named =
        line.rank < 0 ? concat(host, ": ", text) : concat(host, " rank ", line.rank, ": ", text);
    std::fprintf(stderr, "%s\n", named.c_str());
    log_.line(named);
}

// ---- What is started ----------------------------------------------------------------------------

Verdict RankStarter::train(const std::vector<HostRanks>& ranks, int start) {
    constexpr double end_seconds = 30;  // a watchdog ends its rank much sooner
    const int world = ranks.back().first + ranks.back().count;
    const std::vector<std::string> shared =
        variables(world, address_of(ranks.front().host, start % ports_of_starts));
    std::vector<HostOrder> orders;
    for (const HostRanks& part : ranks) {
        orders.push_back({job_.hosts[part.host].name, order_of(part)});
        orders.back().order.arguments = job_.options.command;
        orders.back().order.variables = shared;
    }
    std::vector<std::string> failures;
    const std::vector<HostEnd> ends = run_on_hosts(
        job_.reach, orders,
        {.grace_seconds = end_seconds,
         .loss_seconds = config_.parallel.timeout_seconds + end_seconds},
        [&](const RankLine& line) {
            show(orders[line.host].host, line);
            if (const std::string failure = failure_in(line); !failure.empty())
                failures.push_back(failure);
        },
        is_stopped);
    std::vector<RankEnd> all;
    for (const HostEnd& end : ends) {
        all.insert(all.end(), end.ranks.begin(), end.ranks.end());
        if (!end.refusal.empty()) failures.push_back(end.refusal);
    }
    return judge(all, failures);
}

std::vector<RankStarter::Answer> RankStarter::check_each(const std::vector<int>& slots,
                                                         bool measures) {
    std::vector<HostOrder> orders;
    for (size_t host = 0; host < slots.size(); ++host) {
        HostOrder& order =
            orders.emplace_back(HostOrder{job_.hosts[host].name, order_of({host, 0, slots[host]})});
        order.order.arguments = selfcheck_arguments();
        if (!measures) {
            order.order.count = 1;
            order.order.arguments = {"--version"};
        }
        const int port = job_.options.port == 0
                             ? free_port()
                             : job_.options.port + ports_of_starts + static_cast<int>(host);
        order.order.variables = variables(order.order.count, concat("127.0.0.1:", port));
    }
    std::vector<std::string> failures(orders.size());
    const std::vector<HostEnd> ends = run_on_hosts(
        job_.reach, orders,
        {.answer_seconds = job_.options.patience, .grace_seconds = 1e9, .loss_seconds = 1e9},
        [&](const RankLine& line) {
            log_.line(concat(orders[line.host].host, " check: ", printable(line.text)));
            if (std::string& failure = failures[line.host]; failure.empty())
                failure = failure_in(line);
        },
        is_stopped);
    std::vector<Answer> answers;
    for (size_t host = 0; host < ends.size(); ++host)
        answers.push_back({.is_good = ends[host].all_succeeded(),
                           .sees_run = ends[host].refusal.find(orders[host].order.mark_missing) ==
                                       std::string::npos,
                           .reason = reason_of(ends[host], failures[host])});
    return answers;
}

RankStarter::Selfcheck RankStarter::check_together(const std::vector<HostRanks>& ranks) {
    const int world = ranks.back().first + ranks.back().count;
    const std::vector<std::string> shared =
        variables(world, address_of(ranks.front().host, checks_++ % ports_of_starts));
    std::vector<HostOrder> orders;
    for (const HostRanks& part : ranks) {
        orders.push_back({job_.hosts[part.host].name, order_of(part)});
        orders.back().order.arguments = selfcheck_arguments();
        orders.back().order.variables = shared;
    }
    Selfcheck found;
    const std::vector<HostEnd> ends = run_on_hosts(
        job_.reach, orders, {.answer_seconds = job_.options.patience},
        [&](const RankLine& line) {
            show(orders[line.host].host, line);
            const std::string failure = failure_in(line);
            const std::vector<int> named = ranks_named(failure.empty() ? line.text : failure);
            found.ranks.insert(found.ranks.end(), named.begin(), named.end());
            if (found.line.empty()) found.line = failure;
        },
        is_stopped);
    found.is_good = std::ranges::all_of(ends, &HostEnd::all_succeeded);
    if (found.is_good) found.ranks.clear();
    if (!found.is_good && found.ranks.empty())
        for (size_t part = 0; part < ends.size(); ++part)
            for (size_t i = 0; i < ends[part].ranks.size(); ++i)
                if (!ends[part].ranks[i] || *ends[part].ranks[i] < 0)
                    found.ranks.push_back(ranks[part].first + static_cast<int>(i));
    return found;
}

std::string RankStarter::plan_on(const HostRanks& part, int world) {
    const std::vector<std::string> options{"--world", std::to_string(world), "--local-ranks",
                                           std::to_string(part.count)};
    const auto checkpoints = list_checkpoints(config_.run_dir);
    const int kept = config_.batch.micro_batch == 0 && !checkpoints.empty()
                         ? read_choices(checkpoints.front()).micro_batch
                         : 0;
    if (kept == 0) return plan_on(part.host, options);
    std::vector<std::string> with_kept = options;
    with_kept.insert(with_kept.end(), {"--set", concat("batch.micro_batch=", kept)});
    return plan_on(part.host, with_kept).empty() ? "" : plan_on(part.host, options);
}

std::string RankStarter::plan_on(size_t host, const std::vector<std::string>& options) {
    HostOrder order{job_.hosts[host].name, order_of({host, 0, 1})};
    order.order.arguments = job_.plan;
    order.order.arguments.insert(order.order.arguments.end(), options.begin(), options.end());
    std::string failure;
    const std::vector<HostEnd> ends = run_on_hosts(
        job_.reach, {order}, {.answer_seconds = job_.options.patience},
        [&](const RankLine& line) {
            log_.line(concat(order.host, " plan: ", printable(line.text)));
            if (const std::string text = failure_in(line); !text.empty()) failure = text;
        },
        is_stopped);
    if (ends.front().all_succeeded()) return "";
    return !failure.empty() ? failure : order.host + " " + reason_of(ends.front(), "");
}

}  // namespace train_gpt
