// Rank 0's side: it admits the other ranks, watches all ranks, decides which one has failed, and
// tells the others.
#pragma once
#include <memory>
#include <vector>

#include "parallel/watchdog/invitation.h"
#include "parallel/watchdog/member.h"
#include "parallel/watchdog/watch.h"

namespace train_gpt::watchdog {

class Hub : public Watch {
  public:
    Hub(Socket listener, const Invitation& invitation, const Activity& activity,
        WatchdogOptions options);

  private:
    /// A connection that does not belong to a member yet.
    struct Newcomer {
        std::unique_ptr<Connection> connection;
        Time until;
        int rank = 0;  // > 0 once it has shown the secret
        Name host;
    };
    // Newcomers that may be connected at the same time, in addition to one per rank.
    static constexpr size_t spare_newcomers = 64;

    void enlist(std::vector<pollfd>& polls) override;
    void receive(const std::vector<pollfd>& polls) override;
    void tick() override;
    void reported(const Line& message, int exit_code) override;
    bool left() override;
    void tell(const Line& text, int exit_code) override;
    /// Keeps reading until the others have closed their ends: if this end were closed with unread
    /// data, the kernel would discard what the others have not read yet. It does not wait for
    /// silent ranks.
    void await_others() override;

    void receive_from(int rank, const std::vector<pollfd>& polls);
    /// Handles a message from a member. False if the member has left with it.
    bool handle(int rank, Fields fields);
    void connection_ended(int rank);

    void accept_newcomers();
    /// Answers a newcomer that shows the secret, and makes it a member at its first heartbeat: a
    /// connection that the rank has given up, to try another of this host's addresses, sends none.
    void admit(Newcomer& newcomer, const std::vector<pollfd>& polls);
    /// Answers a hello. False if the newcomer is not one of this job's expected ranks.
    bool welcome(Newcomer& newcomer, Fields hello);

    void judge_silent();
    void judge_stuck();

    net::Door door_;
    const Invitation invitation_;
    std::vector<Member> members_;  // by rank
    std::vector<Newcomer> newcomers_;
    size_t listener_slot_ = 0;
};

}  // namespace train_gpt::watchdog
