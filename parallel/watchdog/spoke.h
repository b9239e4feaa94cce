// The side of every rank but rank 0: the rank connects to rank 0, watches rank 0, and learns from
// rank 0 which other rank has failed.
#pragma once
#include <memory>
#include <vector>

#include "parallel/watchdog/invitation.h"
#include "parallel/watchdog/member.h"
#include "parallel/watchdog/watch.h"

namespace train_gpt::watchdog {

class Spoke : public Watch {
  public:
    /// Returns when rank 0 has admitted this rank. Throws Error if rank 0 has not admitted it after
    /// a minute, or after timeout_seconds if that is less.
    Spoke(const Invitation& invitation, const Activity& activity, WatchdogOptions options);

  private:
    void join(const Invitation& invitation);
    /// Introduces this rank. Returns true if rank 0 is at the other end and has accepted this rank.
    bool introduce(std::unique_ptr<Connection> connection, const Invitation& invitation,
                   Time deadline);

    void enlist(std::vector<pollfd>& polls) override;
    void receive(const std::vector<pollfd>& polls) override;
    void tick() override;
    void reported(const Line& message, int exit_code) override;
    bool left() override;

    /// How long this rank waits for lower ranks to print a line about rank 0.
    Duration deference() const;

    Member hub_;  // rank 0, as this rank knows it
    bool said_goodbye_ = false;
};

}  // namespace train_gpt::watchdog
