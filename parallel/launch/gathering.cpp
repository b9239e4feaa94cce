// Rank 0's side of a meeting.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <thread>
#include <utility>

#include <poll.h>
#include <sys/socket.h>

#include "base/error.h"
#include "parallel/launch/rendezvous.h"
#include "parallel/net/pack.h"
#include "parallel/world.h"

namespace train_gpt::rendezvous {

using net::Channel, net::Clock, net::Duration, net::Socket, net::Time;
using namespace std::chrono_literals;

namespace {

// For a new connection to introduce itself.
constexpr Duration introduction_limit = 5s;
// For a port to become free that the job before used.
constexpr Duration port_limit = 10s;
// For ranks that come after the meeting has failed to be told why.
constexpr Duration refusal_limit = 3s;
// Connections that may wait to be introduced, in addition to one per rank.
constexpr size_t spare_newcomers = 64;

/// The name up to the first dot.
std::string short_name(const std::string& host) { return host.substr(0, host.find('.')); }

class Gathering {
  public:
    Gathering(const Place& place, const Secret& secret, const MeetingOptions& options)
        : place_(place),
          secret_(secret),
          options_(options),
          start_(Clock::now()),
          members_(static_cast<size_t>(place.size)) {
        // Each rank has a connection here and one to the watchdog.
        net::require_descriptors(2 * members_.size() + 2 * spare_newcomers,
                                 concat("rank 0 of ", place.size, " ranks"));
        open();
        meeting_.listener = net::open_port(members_[0].introduction.port, "the other ranks");
        members_[0].introduction.host = options.host;
        members_[0].introduction.addresses = joined_by_spaces(net::own_addresses());
        members_[0].is_here = true;
    }

    Meeting gather() {
        // Ranks often start seconds apart.
        for (Time next_note = start_ + options_.notes_every; !missing().empty();) {
            const Time now = Clock::now();
            if (now >= start_ + options_.limit) fail(describe_absence());
            if (now >= next_note) {
                std::fprintf(stderr, "note: rank 0 (host %s) waits for %s of %d\n",
                             options_.host.c_str(), name_ranks(missing()).c_str(), place_.size);
                next_note = now + options_.notes_every;
            }
            turn();
            if (stop_code_ == 0) stop_code_ = options_.stopped();
            if (stop_code_ != 0) fail("a signal", stop_limit);
            if (!failure_.empty()) fail(failure_, missing().empty() ? 0s : refusal_limit);
        }
        return send_roster();
    }

  private:
    struct Member {
        bool is_here = false;
        Channel channel;
        std::string address;  // from which it came
        Introduction introduction;
        bool has_left = false;  // it was here, and its connection ended
    };
    /// A connection that has not introduced itself yet.
    struct Newcomer {
        Channel channel;
        std::string address, received;
        Time until;
        bool is_done = false;
    };

    void open() {
        while (true) {
            for (const int port : place_.ports) {
                Socket listener = net::listen_on(port);
                if (!listener) continue;
                listener_ = net::PausingListener(std::move(listener));
                port_ = port;
                return;
            }
            const int reason = errno;
            if (Clock::now() > start_ + std::min<Duration>(port_limit, options_.limit / 2))
                throw Error("rank 0 (host ", options_.host, ") cannot listen on TCP port ",
                            place_.ports.front(),
                            place_.ports.size() > 1 ? concat(" to ", place_.ports.back()) : "",
                            ", where the other ranks would come to: ", std::strerror(reason),
                            reason == EADDRINUSE
                                ? "; another job may use it, or rank 0 was started twice"
                                : "");
            std::this_thread::sleep_for(100ms);
        }
    }

    std::vector<int> missing() const {
        std::vector<int> ranks;
        for (size_t r = 0; r < members_.size(); ++r)
            if (!members_[r].is_here) ranks.push_back(static_cast<int>(r));
        return ranks;
    }

    void turn() {
        std::vector<pollfd> polls;
        listener_.enlist(polls);
        for (const Newcomer& newcomer : newcomers_)
            polls.push_back({newcomer.channel.fd(), newcomer.channel.events(), 0});
        for (const Member& member : members_) polls.push_back({member.channel.fd(), POLLIN, 0});
        if (::poll(polls.data(), polls.size(), net::milliseconds(100ms)) < 0) return;
        const size_t first_member = 1 + newcomers_.size();
        for (size_t r = 0; r < members_.size(); ++r)
            if (polls[first_member + r].revents) hear(members_[r]);
        for (size_t i = 0; i < newcomers_.size(); ++i)
            if (polls[1 + i].revents) hear(newcomers_[i]);
        const Time now = Clock::now();
        std::erase_if(newcomers_, [&](const Newcomer& newcomer) {
            return newcomer.is_done || now >= newcomer.until;
        });
        if (polls[0].revents) admit_callers();
    }

    void admit_callers() {
        const size_t most = missing().size() + spare_newcomers;
        for (size_t count = 0; count < most; ++count) {
            Socket socket = listener_.admit();
            if (!socket) {
                if (listener_.is_paused() && !newcomers_.empty())
                    newcomers_.erase(newcomers_.begin());
                return;
            }
            // The oldest that has said nothing yet makes room, else the oldest.
            if (newcomers_.size() >= most) {
                const auto silent = std::ranges::find_if(newcomers_, [](const Newcomer& newcomer) {
                    return newcomer.channel.identity().empty();
                });
                newcomers_.erase(silent == newcomers_.end() ? newcomers_.begin() : silent);
            }
            net::send_at_once(socket);
            const std::string address = net::peer_address(socket);
            newcomers_.push_back(
                {Channel::answer(std::move(socket),
                                 [this](const std::string& identity) { return key_of(identity); }),
                 address, "", Clock::now() + introduction_limit});
        }
    }

    std::string key_of(const std::string& identity) const {
        if (!rank_of(identity, port_)) return "";
        return net::derive_key(secret_.text, identity);
    }

    /// A member says that it knows that it is admitted: it may have stopped waiting for that, and
    /// come again. Then it says nothing until it has the roster, except the exit code with which a
    /// signal ends it: its connection has ended.
    void hear(Member& member) {
        char byte = 0;
        ssize_t n = member.channel.read(&byte, 1);
        if (n == 1 && byte == is_here_now) {
            member.is_here = true;
            n = member.channel.read(&byte, 1);
        }
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n == 1) stop_code_ = static_cast<uint8_t>(byte);
        if (n == 1) ++told_;
        member.is_here = false;
        member.has_left = true;
        member.channel = Channel();
    }

    void hear(Newcomer& newcomer) {
        const Channel::Handshake state = newcomer.channel.handshake();
        if (state == Channel::Handshake::pending) return;
        if (state == Channel::Handshake::failed) {
            note_stranger(newcomer);
            newcomer.is_done = true;
            return;
        }
        while (!newcomer.is_done) {
            char bytes[4096];
            const ssize_t n = newcomer.channel.read(bytes, sizeof bytes);
            if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
            newcomer.is_done = n <= 0;
            if (n <= 0) return;
            std::string& received = newcomer.received;
            received.append(bytes, static_cast<size_t>(n));
            if (received.size() < 8) continue;
            const uint64_t length = net::decode(received);
            newcomer.is_done = length > longest_introduction || received.size() >= 8 + length;
            if (newcomer.is_done && received.size() == 8 + length) judge(newcomer);
        }
    }

    /// One that has named a rank, but does not know the secret.
    void note_stranger(const Newcomer& newcomer) {
        const std::optional<int64_t> rank = rank_of(newcomer.channel.identity(), port_);
        if (!rank) return;
        const std::string name = concat("rank ", *rank, " (address ", newcomer.address, ")");
        has_strangers_ |= !stranger_.empty() && stranger_ != name;
        stranger_ = name;
    }

    void judge(Newcomer& newcomer) {
        Introduction introduction = Introduction::parse(newcomer.received.substr(8));
        if (introduction.rank < 0) return;
        if (newcomer.channel.identity() != identity_of(introduction.rank, port_)) return;
        std::string verdict, failure;
        if (introduction.job != place_.job) {
            verdict = of_another_job + std::string("it is rank 0 of another job");
        } else if (stop_code_ != 0) {
            verdict = stopped + std::to_string(stop_code_);
        } else if (!failure_.empty()) {
            verdict = refused + failure_;
        } else {
            failure = reason_against(introduction);
            verdict = failure.empty() ? std::string(1, admitted) : refused + failure;
        }
        if (!net::send_all(newcomer.channel, with_length(verdict), Clock::now() + 1s)) return;
        if (verdict[0] == stopped) ++told_;
        if (!failure.empty()) failure_ = failure;
        if (verdict[0] != admitted) return;
        Member& member = members_[static_cast<size_t>(introduction.rank)];
        member.is_here = false;
        member.channel = std::move(newcomer.channel);
        member.address = newcomer.address;
        member.introduction = std::move(introduction);
    }

    /// Why a rank that knows the secret and is of this job cannot be admitted; empty if it can.
    std::string reason_against(const Introduction& newcomer) const {
        const std::string who = concat("rank ", newcomer.rank, " (host ", newcomer.host, ")");
        if (newcomer.program != options_.program)
            return concat(who, " is version ", newcomer.program, " of train_gpt, and rank 0 (host ",
                          options_.host, ") version ", options_.program,
                          "; start all ranks with the same program");
        if (newcomer.size != place_.size || newcomer.rank < 1 || newcomer.rank >= place_.size)
            return concat(who, " was started as one of ", newcomer.size,
                          " ranks, and rank 0 (host ", options_.host, ") as one of ", place_.size,
                          "; give all ranks the same number");
        const Member& member = members_[static_cast<size_t>(newcomer.rank)];
        // It may not have read yet that it is admitted.
        if (member.channel && member.introduction.process != newcomer.process)
            return concat("rank ", newcomer.rank, " was started twice: on host ",
                          member.introduction.host, " and on host ", newcomer.host,
                          "; give each rank a number of its own");
        return "";
    }

    /// Whether a rank is admitted that has not said yet that it knows.
    bool has_unconfirmed() const {
        return std::ranges::any_of(
            members_, [](const Member& member) { return member.channel && !member.is_here; });
    }

    /// Ends the meeting on all ranks that are here, and on those that come within `patience`.
    [[noreturn]] void fail(const std::string& text, Duration patience = {}) {
        failure_ = text;
        // A channel that is closed with an unread byte is reset, and may lose what was sent last.
        for (const Time end = Clock::now() + 1s; Clock::now() < end && has_unconfirmed();) turn();
        const std::string message = net::pack({text, std::to_string(stop_code_)});
        for (Member& member : members_)
            if (member.channel) {
                net::send_all(member.channel, with_length(message), Clock::now() + 1s);
                member.channel = Channel();
                ++told_;
            }
        for (const Time end = Clock::now() + patience;
             Clock::now() < end && told_ + 1 < members_.size();)
            turn();
        if (stop_code_ != 0) throw StoppedEarly(stop_code_);
        throw Error(text);
    }

    std::string describe_absence() const {
        const std::vector<int> absent = missing();
        std::string text =
            concat(name_ranks(absent), " of ", place_.size, " did not come to rank 0 (host ",
                   options_.host, ", TCP port ", port_, ") within ",
                   std::chrono::ceil<std::chrono::seconds>(options_.limit).count(), " s; ");
        text += describe_hosts(absent);
        std::vector<int> left;
        for (const int rank : absent)
            if (members_[static_cast<size_t>(rank)].has_left) left.push_back(rank);
        if (!left.empty()) text += concat("; ", name_ranks(left), " came, but ended again");
        if (!stranger_.empty())
            text += concat("; ", stranger_, has_strangers_ ? " and others" : "",
                           " showed another secret than rank 0's, which is from ", secret_.source);
        return text + "; TRAIN_GPT_JOIN_SECONDS sets how long rank 0 waits";
    }

    /// From which hosts nobody came, or, if it is not known which there are, who came from where.
    std::string describe_hosts(const std::vector<int>& absent) const {
        std::map<std::string, std::vector<int>> came;
        for (size_t r = 0; r < members_.size(); ++r)
            if (members_[r].is_here)
                came[short_name(members_[r].introduction.host)].push_back(static_cast<int>(r));
        std::string empty;
        for (const std::string& host : place_.hosts)
            if (!came.contains(short_name(host))) empty += (empty.empty() ? "" : ", ") + host;
        for (int first = 0; place_.ranks_per_node > 0 && first < place_.size;
             first += place_.ranks_per_node) {
            std::vector<int> node;
            for (int r = first; r < std::min(first + place_.ranks_per_node, place_.size); ++r)
                node.push_back(r);
            if (std::ranges::includes(absent, node))
                empty += concat(empty.empty() ? "" : ", ", "torchrun's node ",
                                first / place_.ranks_per_node, " (", name_ranks(node), ")");
        }
        if (!empty.empty()) return "nobody came from " + empty;
        std::string text;
        for (const auto& [host, ranks] : came)
            text += concat(text.empty() ? "" : ", ", name_ranks(ranks), " on ", host);
        return "only these are here: " + text;
    }

    Meeting send_roster() {
        listener_ = net::PausingListener();
        newcomers_.clear();
        const std::string random = net::random_text(32);
        meeting_.key = key_of_links(secret_, random);
        std::vector<std::string> parts{random};
        for (Member& member : members_) {
            std::vector<std::string> addresses = words(member.introduction.addresses);
            // Where it came from is where it can be reached, unless that is from this host.
            if (!member.address.empty() && !net::is_loopback(member.address))
                addresses.insert(addresses.begin(), member.address);
            parts.insert(parts.end(), {member.introduction.host, joined_by_spaces(addresses),
                                       member.introduction.port});
            meeting_.peers.push_back(
                {member.introduction.host, addresses, member.introduction.port});
            meeting_.channels.push_back(std::move(member.channel));
        }
        const std::string roster = with_length(net::pack(parts));
        for (size_t r = 1; r < meeting_.channels.size(); ++r)
            if (!net::send_all(meeting_.channels[r], roster, Clock::now() + 30s))
                throw Error("rank ", r, " (host ", meeting_.peers[r].host,
                            ") ended just after it had come: ", std::strerror(errno));
        return std::move(meeting_);
    }

    const Place& place_;
    const Secret& secret_;
    const MeetingOptions& options_;
    const Time start_;
    net::PausingListener listener_;
    int port_ = 0;
    std::vector<Member> members_;  // by rank
    std::vector<Newcomer> newcomers_;
    std::string stranger_;        // the last that did not know the secret
    bool has_strangers_ = false;  // others, too
    size_t told_ = 0;             // ranks that know of the failure
    std::string failure_;         // why there is no meeting
    int stop_code_ = 0;           // the exit code with which a signal to some rank ends all
    Meeting meeting_;
};

}  // namespace

Meeting gather_ranks(const Place& place, const Secret& secret, const MeetingOptions& options) {
    return Gathering(place, secret, options).gather();
}

}  // namespace train_gpt::rendezvous
