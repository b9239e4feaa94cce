// What a watchdog knows about a rank.
#pragma once
#include <memory>

#include "parallel/watchdog/connection.h"
#include "parallel/watchdog/protocol.h"
#include "parallel/watchdog/text.h"

namespace train_gpt::watchdog {

struct Member {
    enum class State { expected, watched, gone };

    State state = State::expected;
    std::unique_ptr<Connection> connection;
    Name host;
    ActivityReport report;
    bool failed = false;  // it has reported a failure
    Time heard;           // when its last message arrived
    Time changed;         // when its pulses last changed

    void update(const ActivityReport& latest, Time now) {
        if (latest.pulses != report.pulses) changed = now;
        report = latest;
        heard = now;
    }
    bool expected() const { return state == State::expected; }
    bool watched() const { return state == State::watched; }
    bool gone() const { return state == State::gone; }
    void leave() {
        state = State::gone;
        connection.reset();
    }
};

/// "rank 3 (host nodeA) failed: message". If the exit code is not 0, the rank has not failed but is
/// to end: "rank 3 (host nodeA): message".
Line failure_of(const Line& who, const Line& message, int exit_code);

/// `who` and `verdict`, then what the member did last: "rank 3 (host nodeA) … ; its last collective
/// was reduce-scatter number 1207, in step 88 (training)".
Line describe_failure(const Line& who, const Member& member, const Line& verdict);

}  // namespace train_gpt::watchdog
