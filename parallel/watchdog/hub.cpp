#include "parallel/watchdog/hub.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <tuple>
#include <utility>

namespace train_gpt::watchdog {

Hub::Hub(Socket listener, const Invitation& invitation, const Activity& activity,
         WatchdogOptions options)
    : Watch(activity, std::move(options)),
      listener_(std::move(listener)),
      invitation_(invitation),
      members_(static_cast<size_t>(options_.size)) {
    members_[0].state = Member::State::watched;
    members_[0].host = Name(options_.host);
    for (Member& member : members_) member.heard = member.changed = now_;
}

void Hub::enlist(std::vector<pollfd>& polls) {
    polls.reserve(2 * members_.size() + spare_newcomers + 2);
    listener_slot_ = polls.size();
    listener_.enlist(polls);
    for (Newcomer& newcomer : newcomers_) newcomer.connection->enlist(polls);
    for (Member& member : members_)
        if (member.connection) member.connection->enlist(polls);
}

void Hub::receive(const std::vector<pollfd>& polls) {
    for (size_t r = 1; r < members_.size(); ++r)
        if (members_[r].connection) receive_from(static_cast<int>(r), polls);
    if (!listener_) return;
    for (Newcomer& newcomer : newcomers_) admit(newcomer, polls);
    std::erase_if(newcomers_, [&](const Newcomer& newcomer) {
        return !newcomer.connection || now_ >= newcomer.until;
    });
    if (polls[listener_slot_].revents & POLLIN) accept_newcomers();
    if (std::none_of(members_.begin(), members_.end(),
                     [](const Member& member) { return member.expected(); })) {
        newcomers_.clear();
        listener_ = net::PausingListener();
    }
}

void Hub::tick() {
    const ActivityReport report = report_of(activity_);
    if (members_[0].watched()) members_[0].update(report, now_);
    const Message beat = heartbeat(report);
    for (Member& member : members_)
        if (member.connection && member.connection->idle()) member.connection->send(beat);
    judge_silent();
    judge_stuck();
}

// --- members -------------------------------------------------------------------------------------

void Hub::receive_from(int rank, const std::vector<pollfd>& polls) {
    Member& member = members_[static_cast<size_t>(rank)];
    member.connection->serve(polls);
    while (const uint8_t* message = member.connection->next())
        if (!handle(rank, Fields(message))) return;
    if (member.connection->ended()) connection_ended(rank);
}

bool Hub::handle(int rank, Fields fields) {
    Member& member = members_[static_cast<size_t>(rank)];
    switch (fields.kind()) {
        case Kind::heartbeat:
            member.update(parse_report(fields), now_);
            return true;
        case Kind::failure: {
            member.failed = true;
            const int code = exit_code_of(fields.number());
            suspect(Cause::reported, settling_time,
                    failure_of(who(rank, member.host), fields.text<Line>(), code), code);
            return true;
        }
        case Kind::goodbye:
            member.leave();
            return false;
        default:
            return true;
    }
}

void Hub::connection_ended(int rank) {
    Member& member = members_[static_cast<size_t>(rank)];
    if (pause_ > Duration::zero())
        suspect(Cause::dead, 0s,
                line("rank 0 (host %s) was stopped, or its host frozen, for %.0f s, "
                     "and the others have ended",
                     members_[0].host.c_str(), std::chrono::duration<double>(pause_).count()));
    else if (!member.failed)  // a rank that has reported need not say goodbye
        suspect(Cause::dead, 0s,
                describe_failure(who(rank, member.host), member,
                                 Line("is dead: its connection ended")));
    member.leave();
}

void Hub::judge_silent() {
    int silent = 0;
    for (const Member& member : members_)
        silent += member.watched() && since(member.heard) > timeout_ / 2;
    for (size_t r = 1; r < members_.size(); ++r) {
        const Member& member = members_[r];
        if (member.gone() || since(member.heard) <= timeout_) continue;
        const int rank = static_cast<int>(r);
        if (member.watched())
            suspect(Cause::silent, 0s,
                    describe_failure(who(rank, member.host), member,
                                     silence(silent > 1 ? ", nor from others" : "")));
        else
            suspect(Cause::silent, 0s,
                    line("rank %d has not connected to rank 0 (host %s) within %g s; it has ended, "
                         "or cannot reach this host over TCP",
                         rank, options_.host.c_str(), options_.timeout_seconds));
    }
}

void Hub::judge_stuck() {
    const Member* last = nullptr;  // the rank that the others wait for
    for (const Member& member : members_) {
        const auto place = [](const Member& m) {
            return std::tuple(m.report.collectives, m.report.step, m.changed);
        };
        if (member.watched() && (!last || place(member) < place(*last))) last = &member;
    }
    if (!last) return;
    // The others may have waited for this rank until its last progress, so their time without
    // progress begins no earlier than that.
    for (Member& member : members_) member.changed = std::max(member.changed, last->changed);
    if (since(last->changed) <= timeout_) return;
    // Others may wait for a rank that is not heard from, which is left to judge_silent().
    if (std::any_of(members_.begin(), members_.end(), [&](const Member& member) {
            return member.watched() && since(member.heard) > timeout_ / 2;
        }))
        return;
    const auto waiting = std::count_if(members_.begin(), members_.end(), [&](const Member& m) {
        return &m != last && m.watched() && since(m.changed) > timeout_ / 2;
    });
    suspect(
        Cause::stuck, 0s,
        describe_failure(who(static_cast<int>(last - members_.data()), last->host), *last,
                         line("is stuck: it has made no progress for %g s, and %d of the %d ranks "
                              "wait for it",
                              options_.timeout_seconds, static_cast<int>(waiting), options_.size)));
}

// --- newcomers -----------------------------------------------------------------------------------

void Hub::accept_newcomers() {
    const size_t most = members_.size() + spare_newcomers;
    for (size_t count = 0; count < most; ++count) {
        Socket socket = listener_.admit();
        if (!socket) return;
        if (newcomers_.size() >= most) {
            // Drops the oldest connection that has not shown the secret.
            const auto stranger =
                std::find_if(newcomers_.begin(), newcomers_.end(),
                             [](const Newcomer& newcomer) { return newcomer.rank == 0; });
            if (stranger == newcomers_.end()) continue;
            newcomers_.erase(stranger);
        }
        Newcomer& newcomer = newcomers_.emplace_back();
        net::send_at_once(socket);
        newcomer.connection = std::make_unique<Connection>(answer(std::move(socket), invitation_));
        newcomer.until = now_ + std::min(introduction_limit, timeout_);
    }
}

void Hub::admit(Newcomer& newcomer, const std::vector<pollfd>& polls) {
    Connection& connection = *newcomer.connection;
    connection.serve(polls);
    while (const uint8_t* message = connection.next()) {
        const Fields fields(message);
        if (newcomer.rank == 0 && fields.kind() == Kind::hello) {
            if (!welcome(newcomer, fields)) return newcomer.connection.reset();
        } else if (newcomer.rank > 0 && fields.kind() == Kind::heartbeat &&
                   members_[static_cast<size_t>(newcomer.rank)].expected()) {
            Member& member = members_[static_cast<size_t>(newcomer.rank)];
            member.state = Member::State::watched;
            member.host = newcomer.host;
            member.changed = now_;
            member.update(parse_report(fields), now_);
            member.connection = std::move(newcomer.connection);
            return;  // anything after it is read with the next heartbeat
        } else {
            return newcomer.connection.reset();
        }
    }
    if (connection.ended()) newcomer.connection.reset();
}

bool Hub::welcome(Newcomer& newcomer, Fields hello) {
    const bool invited = equal(hello.key(), invitation_.client);
    const int64_t rank = hello.number(), size = hello.number();
    if (!invited || size != options_.size || rank < 1 || rank >= size ||
        !members_.at(static_cast<size_t>(rank)).expected())
        return false;
    newcomer.rank = static_cast<int>(rank);
    newcomer.host = hello.text<Name>();
    newcomer.connection->send(Message(Kind::welcome).key(invitation_.hub).text(members_[0].host));
    return true;
}

// --- the end -------------------------------------------------------------------------------------

void Hub::reported(const Line& message, int exit_code) {
    suspect(Cause::reported, settling_time,
            failure_of(who(0, members_[0].host), message, exit_code), exit_code);
}

bool Hub::left() {
    members_[0].state = Member::State::gone;
    if (leave_by_ == Time::max()) leave_by_ = now_ + timeout_;
    const bool all_gone = std::all_of(members_.begin(), members_.end(),
                                      [](const Member& member) { return member.gone(); });
    if (!all_gone && now_ < leave_by_) return false;
    for (Member& member : members_)
        if (member.connection) member.connection->send(Message(Kind::goodbye));
    await_others();
    return true;
}

void Hub::tell(const Line& text, int exit_code) {
    for (Newcomer& newcomer : newcomers_) {
        Member& member = members_[static_cast<size_t>(newcomer.rank)];
        if (newcomer.rank == 0 || !member.expected()) continue;
        member.connection = std::move(newcomer.connection);
        member.heard = now_;
    }
    const Message message = Message(Kind::failure).number(exit_code).text(text);
    for (Member& member : members_)
        if (member.connection) member.connection->send(message);
}

void Hub::await_others() {
    const Time end = Clock::now() + goodbye_limit;
    std::vector<pollfd> polls;
    for (;;) {
        polls.clear();
        for (Member& member : members_)
            if (member.connection && since(member.heard) < timeout_ / 2) {
                if (member.connection->idle()) member.connection->finish();
                member.connection->enlist(polls);
            }
        const Duration rest = end - Clock::now();
        if (polls.empty() || rest <= Duration::zero()) return;
        if (::poll(polls.data(), polls.size(), net::milliseconds(rest)) < 0) continue;
        for (Member& member : members_) {
            if (!member.connection) continue;
            member.connection->serve(polls);
            while (member.connection->next()) {
            }
            if (member.connection->ended()) member.leave();
        }
    }
}

}  // namespace train_gpt::watchdog
