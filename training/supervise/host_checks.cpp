#include "training/supervise/host_checks.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "training/config/layout.h"
#include "training/interrupt.h"

namespace train_gpt {

using Use = HostStatus::Use;

HostChecks::HostChecks(const SupervisedJob& job, const Config& config, RankStarter& starter,
                       SupervisorLog& log)
    : job_(job), config_(config), starter_(starter), log_(log) {
    for (size_t i = 0; i < job.hosts.size(); ++i)
        hosts_.push_back({.slots = job.hosts[i].slots,
                          .use = i + static_cast<size_t>(job.options.spares) < job.hosts.size()
                                     ? Use::in_use
                                     : Use::spare});
    passed_.resize(hosts_.size());
}

void HostChecks::drop(size_t host, const std::string& reason) {
    if (hosts_[host].use == Use::out) return;
    hosts_[host].use = Use::out;
    const std::string& name = job_.hosts[host].name;
    log_.record("host_out", concat("host ", name, " gets no ranks: ", reason), {{"host", name}});
}

bool HostChecks::avoid(size_t host, const std::string& reason) {
    if (!avoided_.insert(host).second) return false;
    drop(host, reason);
    return true;
}

void HostChecks::check_each() {
    std::vector<int> slots;
    for (const HostStatus& host : hosts_) slots.push_back(host.slots);
    // At first the selfcheck of all ranks together says more, unless there is one host.
    const bool is_alone =
        std::ranges::count(hosts_, Use::in_use, &HostStatus::use) == 1 && !has_started_;
    const std::vector<RankStarter::Answer> answers =
        starter_.check_each(slots, !job_.options.no_selfcheck && (has_started_ || is_alone));
    if (interrupted()) return;
    has_lost_host_ = false;
    for (size_t i = 0; i < hosts_.size(); ++i) {
        hosts_[i].is_good = answers[i].is_good && !avoided_.contains(i);
        passed_[i] = answers[i].is_good;
        if (answers[i].is_good) continue;
        if (!answers[i].sees_run && !has_started_)
            throw Error("host ", job_.hosts[i].name, " ", answers[i].reason);
        has_lost_host_ |= hosts_[i].use == Use::in_use;
        drop(i, "it " + answers[i].reason);
    }
}

std::vector<HostRanks> HostChecks::choose(int wanted) {
    const MeshSizes sizes = mesh_sizes(config_);
    const std::vector<size_t> used = hosts_to_use(hosts_, wanted, sizes.tensor);
    int most = 0;
    for (const size_t host : used) most += hosts_[host].slots / sizes.tensor * sizes.tensor;
    most = std::min(most, wanted);
    constexpr size_t most_plans = 32;
    std::vector<int> worlds = worlds_to_try(most, sizes, 0);
    if (worlds.size() > most_plans) worlds.resize(most_plans);
    refusal_.clear();
    for (const int world : worlds) {
        try {
            job_.config(world);
            // It has fitted on all of the ranks before.
            const bool asks = world != wanted || !has_started_;
            const std::vector<HostRanks> ranks = place_ranks(hosts_, used, world, sizes.tensor);
            const std::string reason = asks ? starter_.plan_on(ranks.front(), world) : "";
            if (reason.empty()) return ranks;
            if (refusal_.empty()) refusal_ = reason;
        } catch (const Error& error) {
            if (refusal_.empty()) refusal_ = error.what();
        }
        if (interrupted()) return {};
        // Nobody has asked for fewer ranks than the hosts have.
        if (world == wanted && !has_started_) return {};
        log_.line(concat("supervise: not on ", world, " ranks: ", refusal_));
    }
    return {};
}

/// Returns false if hosts were dropped, or if the check has failed.
bool HostChecks::check_together(const std::vector<HostRanks>& ranks) {
    const RankStarter::Selfcheck found = starter_.check_together(ranks);
    if (found.is_good || interrupted()) return true;
    std::set<size_t> named;
    for (const HostRanks& part : ranks)
        for (const int rank : found.ranks)
            if (rank >= part.first && rank < part.first + part.count) named.insert(part.host);
    const std::string reason = "the selfcheck of all ranks names it" +
                               (found.line.empty() ? std::string() : ": " + found.line);
    if (named.size() == ranks.size() || named.empty())
        log_.say("the selfcheck of all ranks has failed" +
                 (found.line.empty() ? std::string() : ": " + found.line));
    else
        for (const size_t host : named) {
            drop(host, reason);
            hosts_[host].is_good = false;
        }
    return false;
}

void HostChecks::mark_used(const std::vector<HostRanks>& ranks) {
    for (const HostRanks& part : ranks) hosts_[part.host].use = Use::in_use;
    has_started_ = true;
}

std::vector<HostRanks> HostChecks::next_ranks(int wanted) {
    check_each();
    while (!interrupted()) {
        const std::vector<HostRanks> ranks = choose(wanted);
        if (interrupted()) break;
        if (ranks.empty() && !avoided_.empty()) {
            log_.say("takes hosts again that it has avoided, since it cannot start without them");
            for (const size_t host : avoided_) hosts_[host].is_good = passed_[host];
            avoided_.clear();
            continue;
        }
        if (ranks.empty()) {
            const bool all_here =
                std::ranges::all_of(hosts_, [](const HostStatus& h) { return h.is_good; });
            const std::string why =
                refusal_.empty()
                    ? "no host has passed its check, so that no rank can be started"
                    : (has_started_ ? "the run does not fit on the hosts that are left: "
                                    : "the run cannot start: ") +
                          refusal_;
            if (!has_started_ || all_here) throw Error(why);
            log_.say(why);
            return {};
        }
        const bool checks =
            ranks.size() > 1 && !job_.options.no_selfcheck && (!has_started_ || !has_lost_host_);
        const size_t good =
            static_cast<size_t>(std::ranges::count_if(hosts_, &HostStatus::is_good));
        if (!checks || check_together(ranks)) {
            if (interrupted()) break;
            mark_used(ranks);
            return ranks;
        }
        // Hosts that it has named get no ranks; without such hosts, the next start checks again.
        const size_t left =
            static_cast<size_t>(std::ranges::count_if(hosts_, &HostStatus::is_good));
        if (left == good) {
            if (!has_started_)
                throw Error(
                    "the selfcheck of all ranks has failed on no host in particular, so "
                    "that no rank is started; --no-selfcheck starts them anyway");
            return {};
        }
    }
    return {};
}

}  // namespace train_gpt
