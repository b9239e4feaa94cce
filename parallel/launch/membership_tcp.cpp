// A World whose ranks have met over TCP: small messages go through rank 0.
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "parallel/launch/membership.h"
#include "parallel/launch/rank_connections.h"
#include "parallel/launch/rendezvous.h"
#include "parallel/launch/secret.h"
#include "parallel/links_tcp.h"
#include "parallel/net/pack.h"

namespace train_gpt {

namespace {

constexpr double default_join_seconds = 600;

double join_seconds() {
    const char* text = std::getenv("TRAIN_GPT_JOIN_SECONDS");
    if (!text) return default_join_seconds;
    char* end = nullptr;
    const double seconds = std::strtod(text, &end);
    if (end == text || *end || !(seconds > 0 && seconds <= 1e6))
        throw Error("TRAIN_GPT_JOIN_SECONDS is \"", text,
                    "\", but must be a number of seconds above 0");
    return seconds;
}

/// Throws Error where a message between ranks is not what it must be.
void require_whole(bool is_whole) {
    if (!is_whole)
        throw Error(
            "a message between ranks is damaged, or the ranks are not at the same place of the "
            "program; this is a fault of the program, please report it");
}

class TcpMembership final : public World::Membership {
  public:
    TcpMembership(const Place& place, Meeting meeting)
        : connections_(std::make_shared<RankConnections>(place.rank, std::move(meeting))) {
        rank = place.rank;
        size = place.size;
        find_neighbours();
    }

    void barrier() const override {
        exchange("", [](const auto&) { return std::string(); });
    }

    void all_reduce_sum(std::span<double> values) const override {
        const std::string mine(reinterpret_cast<const char*>(values.data()), values.size_bytes());
        const std::string sum = exchange(mine, [&](const std::vector<std::string>& all) {
            std::vector<double> sums(values.size()), addends(values.size());
            for (size_t r = 0; r < all.size(); ++r) {
                if (all[r].size() != values.size_bytes())
                    throw Error(connections_->name(static_cast<int>(r)),
                                " adds another number of values; this is a fault of the program, "
                                "please report it");
                std::ranges::copy(all[r], reinterpret_cast<char*>(addends.data()));
                for (size_t i = 0; i < sums.size(); ++i)
                    sums[i] = r == 0 ? addends[i] : sums[i] + addends[i];
            }
            return std::string(reinterpret_cast<const char*>(sums.data()), values.size_bytes());
        });
        require_whole(sum.size() == values.size_bytes());
        std::ranges::copy(sum, reinterpret_cast<char*>(values.data()));
    }

    std::string broadcast(const std::string& text, int root) const override {
        return exchange(rank == root ? text : "", [&](const std::vector<std::string>& all) {
            return all[static_cast<size_t>(root)];
        });
    }

    std::vector<std::string> all_gather(const std::string& text) const override {
        auto texts = net::unpack(exchange(text, net::pack));
        require_whole(texts && texts->size() == static_cast<size_t>(size));
        return *std::move(texts);
    }

    std::vector<std::string> all_gather_local(const std::string& text) const override {
        const std::vector<std::string> all = all_gather(text);
        std::vector<std::string> local;
        for (size_t r = 0; r < all.size(); ++r)
            if (nodes_[r] == node) local.push_back(all[r]);
        return local;
    }

    [[noreturn]] void abort(int exit_code) const override { connections_->abort(exit_code); }

    std::unique_ptr<Links> open_links(std::optional<int> number, bool encrypt) const override {
        TcpGroup group{connections_, job_, std::to_string(groups_++), {}, {}, rank, encrypt};
        group.ranks.resize(static_cast<size_t>(size));
        std::iota(group.ranks.begin(), group.ranks.end(), 0);
        const std::string how = encrypt ? " encrypted" : " in clear";
        for (const std::string& text : all_gather(std::to_string(number.value_or(node)) + how)) {
            if (!text.ends_with(how))
                throw Error("parallel.encrypt is not the same on all ranks; give them one value");
            group.nodes.push_back(std::atoi(text.c_str()));
        }
        return open_tcp_links(std::move(group));
    }

  private:
    /// Rank 0 makes an answer of the texts of all ranks, which all ranks get.
    std::string exchange(
        const std::string& text,
        const std::function<std::string(const std::vector<std::string>&)>& answer) const {
        if (rank != 0) {
            connections_->send(0, text);
            return connections_->receive(0);
        }
        std::vector<std::string> texts{text};
        for (int r = 1; r < size; ++r) texts.push_back(connections_->receive(r));
        const std::string given = answer(texts);
        for (int r = 1; r < size; ++r) connections_->send(r, given);
        return given;
    }

    /// Ranks are on one node if they see each other's shared memory, whatever their hosts are
    /// called: containers on one host may not, and hosts may have equal names.
    void find_neighbours() {
        const std::string random = net::random_text(8);
        job_ = broadcast(
            net::hexadecimal({reinterpret_cast<const uint8_t*>(random.data()), random.size()}), 0);
        const SharedMark mark(job_, rank);
        const std::vector<std::string> marks = all_gather(mark.contents());
        node = rank;
        for (int r = 0; r < rank && node == rank; ++r) {
            const std::string& contents = marks[static_cast<size_t>(r)];
            if (!contents.empty() && SharedMark::is_seen(job_, r, contents)) node = r;
        }
        for (const std::string& text : all_gather(std::to_string(node)))
            nodes_.push_back(std::atoi(text.c_str()));
        local_size = static_cast<int>(std::ranges::count(nodes_, node));
        local_rank = static_cast<int>(std::count(nodes_.begin(), nodes_.begin() + rank, node));
    }

    std::shared_ptr<RankConnections> connections_;
    std::string job_;  // a random name
    std::vector<int> nodes_;
    mutable int groups_ = 0;
};

}  // namespace

std::shared_ptr<const World::Membership> join_tcp(const Place& place, const std::string& program,
                                                  const std::function<int()>& stop_code) {
    MeetingOptions options{.program = program,
                           .host = World().host(),
                           .limit = std::chrono::duration_cast<net::Duration>(
                               std::chrono::duration<double>(join_seconds())),
                           .stop_code = stop_code};
    if (!net::has_tls())
        throw Error("this process was started as one of ", place.size, " ranks (", place.variable,
                    "), but this build has no TLS, through which ranks meet without MPI: start "
                    "them with mpirun, or install OpenSSL's libssl (libssl-dev) and rebuild");
    const Secret secret = take_secret();
    return std::make_shared<TcpMembership>(place, meet(place, secret, options));
}

}  // namespace train_gpt
