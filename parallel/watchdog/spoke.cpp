#include "parallel/watchdog/spoke.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"

namespace train_gpt::watchdog {

Spoke::Spoke(const Invitation& invitation, const Activity& activity, WatchdogOptions options)
    : Watch(activity, std::move(options)) {
    join(invitation);
    hub_.connection->send(heartbeat(report_of(activity_)));
    hub_.state = Member::State::watched;
    advance_clock();
    hub_.heard = hub_.changed = now_;
}

void Spoke::join(const Invitation& invitation) {
    const Duration limit = std::min<Duration>(timeout_, 60s);
    const Time end = Clock::now() + limit;
    std::string reasons;
    // Rank 0 may be slow to answer, and an address may lead nowhere: each address gets at most a
    // few seconds at a time.
    for (Duration patience = 2s; Clock::now() < end;
         patience = std::min<Duration>(2 * patience, 8s)) {
        reasons.clear();
        for (const std::string& address : invitation.addresses) {
            const Time deadline = std::min(end, Clock::now() + patience);
            Socket socket = net::connect_to(address, invitation.port, deadline);
            if (!socket) {
                reasons +=
                    concat(reasons.empty() ? "" : ", ", address, " (", std::strerror(errno), ")");
                continue;
            }
            net::send_at_once(socket);
            if (introduce(std::make_unique<Connection>(call(std::move(socket), invitation)),
                          invitation, deadline)) {
                return;
            } else {
                reasons += concat(reasons.empty() ? "" : ", ", address, " (no answer)");
            }
        }
        std::this_thread::sleep_for(100ms);
    }
    throw Error("rank ", options_.rank, " (host ", options_.host,
                ") could not reach rank 0 within ", std::chrono::duration<double>(limit).count(),
                " s at TCP port ", invitation.port, " of ", reasons,
                "; the hosts of a job must be able to connect to one another");
}

bool Spoke::introduce(std::unique_ptr<Connection> connection, const Invitation& invitation,
                      Time deadline) {
    connection->send(Message(Kind::hello)
                         .key(invitation.client)
                         .number(options_.rank)
                         .number(options_.size)
                         .text(Name(options_.host)));
    std::vector<pollfd> polls;
    while (!connection->ended() && Clock::now() < deadline) {
        polls.clear();
        connection->enlist(polls);
        if (::poll(polls.data(), polls.size(), net::milliseconds(deadline - Clock::now())) < 0)
            continue;
        connection->serve(polls);
        if (const uint8_t* message = connection->next()) {
            Fields fields(message);
            if (fields.kind() != Kind::welcome || !equal(fields.key(), invitation.hub))
                return false;
            hub_.host = fields.text<Name>();
            hub_.connection = std::move(connection);
            return true;
        }
    }
    return false;
}

void Spoke::enlist(std::vector<pollfd>& polls) {
    if (hub_.connection) hub_.connection->enlist(polls);
}

void Spoke::receive(const std::vector<pollfd>& polls) {
    if (!hub_.connection) return;
    hub_.connection->serve(polls);
    while (const uint8_t* message = hub_.connection->next()) {
        Fields fields(message);
        if (said_goodbye_) continue;
        if (fields.kind() == Kind::heartbeat) hub_.update(parse_report(fields), now_);
        if (fields.kind() == Kind::failure) {
            const int code = exit_code_of(fields.number());
            return fail(fields.text<Line>(), false, code);
        }
        if (fields.kind() == Kind::goodbye) return hub_.leave();
    }
    if (!hub_.connection->ended()) return;
    if (!said_goodbye_)
        suspect(Cause::dead, deference(),
                describe_failure(who(0, hub_.host), hub_, Line("is dead: its connection ended")));
    hub_.leave();
}

void Spoke::tick() {
    if (!hub_.connection || said_goodbye_) return;
    if (hub_.connection->idle()) hub_.connection->send(heartbeat(report_of(activity_)));
    if (since(hub_.heard) > timeout_)
        suspect(Cause::silent, deference(), describe_failure(who(0, hub_.host), hub_, silence()));
}

Duration Spoke::deference() const {
    return options_.rank == 1 ? 0s : 1s + std::min(options_.rank - 2, 8) * Duration(250ms);
}

void Spoke::reported(const Line& message, int exit_code) {
    if (hub_.connection)
        hub_.connection->send(Message(Kind::failure).number(exit_code).text(message));
    suspect(Cause::reported, hub_.connection ? answer_limit : Duration::zero(),
            failure_of(who(options_.rank, Name(options_.host)), message, exit_code), exit_code);
}

bool Spoke::left() {
    if (hub_.connection && !said_goodbye_) {
        hub_.connection->send(Message(Kind::goodbye));
        said_goodbye_ = true;
        leave_by_ = now_ + goodbye_limit;
    }
    // Rank 0 closes the connection when it has read the goodbye.
    return !hub_.connection || now_ >= leave_by_;
}

}  // namespace train_gpt::watchdog
