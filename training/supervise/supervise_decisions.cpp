#include "training/supervise/supervise_decisions.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <regex>

namespace train_gpt {

std::vector<size_t> hosts_to_use(const std::vector<HostStatus>& hosts, int wanted, int unit) {
    std::vector<size_t> used;
    int ranks = 0;
    for (const auto use : {HostStatus::Use::in_use, HostStatus::Use::spare, HostStatus::Use::out})
        for (size_t i = 0; i < hosts.size() && ranks < wanted; ++i) {
            const int its = hosts[i].slots / unit * unit;
            if (hosts[i].use != use || !hosts[i].is_good || its == 0) continue;
            used.push_back(i);
            ranks += its;
        }
    return used;
}

std::vector<HostRanks> place_ranks(const std::vector<HostStatus>& hosts,
                                   const std::vector<size_t>& used, int world, int unit) {
    std::vector<HostRanks> places;
    int next = 0;
    for (const size_t host : used) {
        const int count = std::min(hosts[host].slots / unit * unit, world - next);
        if (count <= 0) break;
        places.push_back({host, next, count});
        next += count;
    }
    return places;
}

std::vector<int> worlds_to_try(int most, const MeshSizes& sizes, int64_t micro_batches) {
    const int others = sizes.pipeline * sizes.context * sizes.tensor;
    const int step = std::max(sizes.shard_ranks, 1);
    std::vector<int> worlds;
    for (int data = most / others / step * step; data >= 1; data -= step)
        if (micro_batches == 0 || data <= micro_batches) worlds.push_back(data * others);
    return worlds;
}

double backoff_seconds(int without_progress, double base) {
    if (without_progress <= 1) return 0;
    return std::min(base * std::exp2(std::min(without_progress - 2, 60)), 600.0);
}

namespace {

/// "rank 3 (host nodeA)", "rank 3 (data 1, tensor 0, host nodeA)"
const std::regex& rank_and_host() {
    static const std::regex expression(R"(rank ([0-9]+) \(([^()]*, )?host [^()]*\))");
    return expression;
}

/// "ranks 0-2, 5 and 7" of a longer text
std::vector<int> listed_ranks(const std::string& list) {
    std::vector<int> ranks;
    static const std::regex range("([0-9]+)(-([0-9]+))?");
    for (std::sregex_iterator it(list.begin(), list.end(), range), end; it != end; ++it) {
        const int first = std::stoi((*it)[1]);
        const int last = (*it)[3].matched ? std::stoi((*it)[3]) : first;
        for (int rank = first; rank <= last && last - first < 1 << 20; ++rank)
            ranks.push_back(rank);
    }
    return ranks;
}

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

/// Whether a line tells of a rank that is gone or cannot be reached, rather than of an error.
bool tells_of_loss(const std::string& line) {
    for (const char* part :
         {") is dead", ") is hung", ") is stuck", " has not connected to rank 0",
          "was stopped, or its host frozen", " did not come to rank 0", ") could not meet rank 0",
          "ended before all ranks had met", "has ended, and so the other ranks end"})
        if (has(line, part)) return true;
    return false;
}

/// Whether a line is an error that all ranks share since one of them has met it, and not the first
/// one. An error in what all ranks read is the first rank's.
bool is_of_another_rank(const std::string& line) {
    static const std::regex expression(R"(^rank [1-9][0-9]*( \([^()]*\))?: )");
    return std::regex_search(line, expression);
}

/// Whether a line tells of ranks of the last start that have not ended yet.
bool is_passing(const std::string& line) {
    return has(line, "another run is writing into") || has(line, "cannot listen on TCP port");
}

}  // namespace

std::vector<int> ranks_named(const std::string& line) {
    std::smatch found;
    static const std::regex absent("^ranks? ([0-9, and-]+) of [0-9]+ did not come");
    if (std::regex_search(line, found, absent)) return listed_ranks(found[1]);
    // A line may name another rank after the one that it is about.
    static const std::regex first(R"(^rank ([0-9]+)( \(|:| has not connected))");
    if (std::regex_search(line, found, first)) return {std::stoi(found[1])};
    if (std::regex_search(line, found, rank_and_host())) return {std::stoi(found[1])};
    return {};
}

bool is_same_error(const std::string& a, const std::string& b) {
    const auto bare = [](const std::string& line) {
        return std::regex_replace(line, rank_and_host(), "");
    };
    return !a.empty() && bare(a) == bare(b);
}

Verdict judge(const std::vector<RankEnd>& ends, const std::vector<std::string>& lines) {
    using Kind = Verdict::Kind;
    std::vector<int> gone;
    const auto ended_with = [&](int code) { return std::ranges::count(ends, RankEnd(code)) > 0; };
    bool is_done = true;
    for (size_t rank = 0; rank < ends.size(); ++rank) {
        const int code = ends[rank].value_or(-1);
        if (code < 0) gone.push_back(static_cast<int>(rank));
        is_done &= code == 0 || code == 3 || code == 75 || code == 130;
    }
    const auto about = [&](auto&& condition) {
        const auto line = std::ranges::find_if(lines, condition);
        return line == lines.end() ? std::string() : *line;
    };
    if (ended_with(2)) return {Kind::hopeless, 2, {}, lines.empty() ? "" : lines.back()};
    if (is_done)
        return {.code = ended_with(3) ? 3 : ended_with(130) ? 130 : ended_with(75) ? 75 : 0};
    // When one rank is gone, the others end, too, some of them by a signal. The line knows which
    // rank was the first.
    Verdict verdict{.kind = Kind::lost, .code = 1, .line = about(tells_of_loss)};
    const std::string error = about([](const std::string& line) {
        return std::regex_search(line, rank_and_host()) || is_of_another_rank(line);
    });
    if (!verdict.line.empty() || (error.empty() && !gone.empty())) {
        verdict.ranks = ranks_named(verdict.line);
        if (verdict.ranks.empty()) verdict.ranks = gone;
        return verdict;
    }
    verdict.kind = Kind::failed;
    verdict.line = error;
    if (const std::string line = about(is_passing); !line.empty())
        return {.kind = Kind::blocked, .code = 1, .line = line};
    if (verdict.line.empty() && !lines.empty()) {
        verdict.kind = Kind::hopeless;
        verdict.line = lines.back();  // others may come before it, about devices and kernels
    }
    verdict.ranks = ranks_named(verdict.line);
    return verdict;
}

}  // namespace train_gpt
