// What both sides of a meeting share, and the side of the ranks that come to rank 0; rank 0's is in
// gathering.cpp.
#include "parallel/launch/rendezvous.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include <poll.h>

#include "base/error.h"
#include "parallel/net/pack.h"
#include "parallel/world.h"

namespace train_gpt {

using net::Channel, net::Clock, net::Duration, net::Socket, net::Time;
using namespace std::chrono_literals;

Meeting meet(const Place& place, const Secret& secret, const MeetingOptions& options) {
    return place.rank == 0 ? rendezvous::gather_ranks(place, secret, options)
                           : rendezvous::come_to_rank_0(place, secret, options);
}

std::string name_ranks(const std::vector<int>& ranks) {
    std::vector<std::string> ranges;
    for (size_t i = 0, end; i < ranks.size(); i = end) {
        for (end = i + 1; end < ranks.size() && ranks[end] == ranks[end - 1] + 1;) ++end;
        if (end - i == 2) end = i + 1;
        ranges.push_back(std::to_string(ranks[i]));
        if (end - i > 1) ranges.back() += concat("-", ranks[end - 1]);
    }
    constexpr size_t most = 16;
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < std::min(ranges.size(), most); ++i)
        text += (i == 0 ? "" : i + 1 == ranges.size() ? " and " : ", ") + ranges[i];
    if (ranges.size() > most) text += " and others";
    return text;
}

namespace rendezvous {

// ---- What both sides share ----------------------------------------------------------------------

std::string Introduction::packed() const {
    return net::pack(
        {std::to_string(rank), std::to_string(size), program, job, host, process, port, addresses});
}

Introduction Introduction::parse(std::string_view text) {
    Introduction introduction;
    const auto fields = net::unpack(text);
    if (!fields || fields->size() != 8) return introduction;
    std::istringstream numbers(fields->at(0) + " " + fields->at(1));
    int64_t rank = -1, size = 0;
    if (!(numbers >> rank >> size)) return introduction;
    return {rank,          size,          fields->at(2), fields->at(3),
            fields->at(4), fields->at(5), fields->at(6), fields->at(7)};
}

std::string identity_of(int64_t rank, int port) {
    return concat("train_gpt ranks 2, port ", port, ", rank ", rank);
}

std::optional<int64_t> rank_of(const std::string& identity, int port) {
    int64_t rank = -1;
    const size_t at = identity.find_last_of(' ') + 1;
    const auto [end, error] =
        std::from_chars(identity.data() + at, identity.data() + identity.size(), rank);
    if (error != std::errc() || identity != identity_of(rank, port)) return {};
    return rank;
}

std::string with_length(const std::string& message) {
    return net::encode(message.size()) + message;
}

std::string key_of_links(const Secret& secret, const std::string& random) {
    return net::derive_key(secret.text, "train_gpt links 2 " + random);
}

std::vector<std::string> words(const std::string& text) {
    std::istringstream stream(text);
    std::vector<std::string> all;
    for (std::string word; stream >> word;) all.push_back(word);
    return all;
}

std::string joined_by_spaces(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
    return text;
}

// ---- The side of the ranks that come ------------------------------------------------------------

namespace {

/// Reads a message with its length in front; nothing when that fails.
std::optional<std::string> read_message(Channel& channel, uint64_t longest, Time deadline) {
    std::string length(8, '\0');
    if (!net::read_all(channel, length, deadline)) return {};
    if (net::decode(length) > longest) return errno = EBADMSG, std::nullopt;
    std::string message(net::decode(length), '\0');
    if (!net::read_all(channel, message, deadline)) return {};
    return message;
}

/// Says on stderr why this rank has not found rank 0 yet. A thread says it, since a name server or
/// a host may keep the rank itself waiting.
class Reminders {
  public:
    Reminders(const Place& place, const MeetingOptions& options)
        : place_(place), options_(options), thread_([this] { run(); }) {}
    ~Reminders() {
        {
            const std::lock_guard lock(mutex_);
            is_over_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }
    Reminders(const Reminders&) = delete;
    Reminders& operator=(const Reminders&) = delete;

    void set_reason(std::string reason) {
        const std::lock_guard lock(mutex_);
        reason_ = std::move(reason);
    }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        for (Duration wait = options_.first_note;
             !changed_.wait_for(lock, wait, [this] { return is_over_; });
             wait = options_.notes_every) {
            const std::string note = concat(
                "note: rank ", place_.rank, " (host ", options_.host,
                ") has not found rank 0 yet, which ", place_.host_from, " says is at ", reason_,
                "; it tries for ", std::chrono::ceil<std::chrono::seconds>(options_.limit).count(),
                " s (TRAIN_GPT_JOIN_SECONDS)");
            std::fprintf(stderr, "%s\n", printable_line(note).c_str());
        }
    }

    const Place& place_;
    const MeetingOptions& options_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_over_ = false;
    std::string reason_;
    std::thread thread_;
};

class Visitor {
  public:
    Visitor(const Place& place, const Secret& secret, const MeetingOptions& options)
        : place_(place), secret_(secret), options_(options), end_(Clock::now() + options.limit) {
        meeting_.listener = net::open_port(introduction_.port, "the other ranks");
        introduction_.rank = place.rank;
        introduction_.size = place.size;
        introduction_.program = options.program;
        introduction_.job = place.job;
        introduction_.host = options.host;
        introduction_.process = net::random_text(16);
        std::vector<std::string> addresses = net::own_addresses();
        constexpr size_t most = 32;
        if (addresses.size() > most) addresses.resize(most);
        introduction_.addresses = joined_by_spaces(addresses);
    }

    Meeting come() {
        std::optional<Reminders> reminders(std::in_place, place_, options_);
        // Rank 0 may start later or be slow to answer, and an address may lead nowhere: each gets
        // at most a few seconds at a time.
        for (Duration patience = 2s; Clock::now() < end_;
             patience = std::min<Duration>(2 * patience, 8s)) {
            if (reasons_.empty())
                reminders->set_reason(place_.host + " (its address is looked up)");
            reasons_.clear();
            std::string reason;
            const std::vector<std::string> addresses = net::addresses_of(place_.host, reason);
            if (addresses.empty()) note(place_.host, reason);
            for (const std::string& address : addresses)
                for (const int port : place_.ports) {
                    reminders->set_reason(reasons_.empty()
                                              ? concat(address, " port ", port, " (no answer yet)")
                                              : reasons_);
                    if (call(address, std::to_string(port),
                             std::min(end_, Clock::now() + patience))) {
                        reminders.reset();
                        return wait_for_all();
                    }
                }
            reminders->set_reason(reasons_);
            if (const int code = options_.stopped()) {
                // Still looks for rank 0 for a while, to tell it.
                if (stop_since_ == Time::max()) stop_since_ = Clock::now();
                if (Clock::now() > stop_since_ + stop_limit) throw StoppedEarly(code);
            }
            if (Clock::now() > strange_since_ + strange_limit) break;
            std::this_thread::sleep_for(100ms);
        }
        throw Error("rank ", place_.rank, " (host ", options_.host,
                    ") could not meet rank 0 within ",
                    std::chrono::ceil<std::chrono::seconds>(options_.limit).count(), " s at ",
                    strange_.empty() ? reasons_ + hint_of_network() : strange_ + hint_of_secret());
    }

  private:
    // A program that does not know the secret may be rank 0 of somebody else's job, and ours yet to
    // come. But not for long.
    static constexpr Duration strange_limit = 10s;

    void note(const std::string& where, const std::string& reason) {
        reasons_ += concat(reasons_.empty() ? "" : ", ", where, " (", reason, ")");
    }
    std::string hint_of_secret() const {
        return concat("; this rank's secret is from ", secret_.source,
                      ", and must be the same on all ranks");
    }
    std::string hint_of_network() const {
        return concat("; rank 0 must run there (", place_.host_from,
                      " says so), and the hosts of a job must be able to connect to one another");
    }

    /// Introduces this rank at an address. True if rank 0 is there and has admitted it.
    bool call(const std::string& address, const std::string& port, Time deadline) {
        const std::string where = concat(address, " port ", port);
        Socket socket = net::connect_to(address, port, deadline);
        if (!socket) return note(where, std::strerror(errno)), false;
        net::send_at_once(socket);
        const std::string identity = identity_of(place_.rank, std::stoi(port));
        Channel channel =
            Channel::call(std::move(socket), identity, net::derive_key(secret_.text, identity));
        if (!net::shake_hands(channel, deadline)) {
            if (!channel.is_refused())
                return note(where, "not a train_gpt that waits for ranks"), false;
            if (strange_.empty()) strange_since_ = Clock::now();
            strange_ = where + " (it has another secret)";
            return note(where, "it has another secret"), false;
        }
        std::optional<std::string> answer;
        if (!net::send_all(channel, with_length(introduction_.packed()), deadline) ||
            !(answer = read_message(channel, longest_introduction, deadline)) || answer->empty())
            return note(where, "no answer"), false;
        const std::string verdict = answer->substr(1);
        if (answer->front() == stopped) throw StoppedEarly(std::atoi(verdict.c_str()));
        if (answer->front() == refused) throw ReportedError(verdict);
        if (answer->front() != admitted) return note(where, verdict), false;
        if (!net::send_all(channel, std::string(1, is_here_now), deadline))
            return note(where, "no answer"), false;
        meeting_.channels.push_back(std::move(channel));
        address_ = address;
        return true;
    }

    /// Returns when rank 0 has something to say. Throws StoppedEarly after telling rank 0.
    void wait_for_rank_0(Channel& channel) {
        for (pollfd ready{channel.fd(), POLLIN, 0};
             !channel.has_unread() && ::poll(&ready, 1, net::milliseconds(100ms)) != 1;)
            if (const int code = options_.stopped()) {
                net::send_all(channel, std::string(1, static_cast<char>(code)), Clock::now() + 1s);
                throw StoppedEarly(code);
            }
    }

    Meeting wait_for_all() {
        wait_for_rank_0(meeting_.channels[0]);
        // Rank 0 ends by itself when its own time is up.
        const auto roster =
            read_message(meeting_.channels[0], longest_roster, end_ + options_.limit + 30s);
        const auto parts = roster ? net::unpack(*roster) : std::nullopt;
        if (parts && parts->size() == 2) {
            if (const int code = std::atoi(parts->back().c_str())) throw StoppedEarly(code);
            throw ReportedError(parts->front());
        }
        if (!parts || parts->size() != 1 + 3 * static_cast<size_t>(place_.size))
            throw Error("rank 0 (at ", address_, ") ended before all ranks had met");
        meeting_.key = key_of_links(secret_, parts->at(0));
        for (size_t i = 1; i < parts->size(); i += 3)
            meeting_.peers.push_back({parts->at(i), words(parts->at(i + 1)), parts->at(i + 2)});
        auto& addresses = meeting_.peers[0].addresses;
        addresses.insert(addresses.begin(), address_);
        return std::move(meeting_);
    }

    const Place& place_;
    const Secret& secret_;
    const MeetingOptions& options_;
    const Time end_;
    Introduction introduction_;
    Meeting meeting_;
    std::string address_;  // where rank 0 was found
    std::string reasons_;
    // The last program that did not know the secret: what to report even if it has ended since.
    std::string strange_;
    Time strange_since_ = Time::max() - strange_limit;
    Time stop_since_ = Time::max();  // of a signal
};

}  // namespace

Meeting come_to_rank_0(const Place& place, const Secret& secret, const MeetingOptions& options) {
    return Visitor(place, secret, options).come();
}

}  // namespace rendezvous

}  // namespace train_gpt
