// Rank 0's side: it lets the other ranks in, watches all ranks, decides which one has failed, and
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
    /// A connection that is no member's yet.
    struct Newcomer {
        std::unique_ptr<Connection> connection;
        Time until;
        int rank = 0;  // > 0 once it has shown the secret
        Name host;
    };
    // Connections beyond the job's own that are kept until they have shown what they are.
    static constexpr size_t spare_newcomers = 64;

    void enlist(std::vector<pollfd>& polls) override;
    void receive(const std::vector<pollfd>& polls) override;
    void tick() override;
    void reported(const Line& message) override;
    bool left() override;
    void tell(const Line& text) override;
    /// Reads on until the others have closed their ends: were there anything unread when this end
    /// is closed, the kernel would throw away what they have not read yet. Those who are silent are
    /// not waited for.
    void await_others() override;

    void receive_from(int rank, const std::vector<pollfd>& polls);
    /// What a member says. False when it has left by that.
    bool handle(int rank, Fields fields);
    void connection_ended(int rank);

    void accept_newcomers();
    /// Lets a newcomer in that shows the secret, and makes it a member by its first heartbeat: an
    /// attempt that the rank has given up, for another of this host's addresses, sends none.
    void admit(Newcomer& newcomer, const std::vector<pollfd>& polls);
    /// Answers a hello. False when the newcomer is none of this job's ranks that are expected.
    bool welcome(Newcomer& newcomer, Fields hello);

    void judge_silent();
    void judge_stuck();

    Socket listener_;
    const Invitation invitation_;
    std::vector<Member> members_;  // by rank
    std::vector<Newcomer> newcomers_;
    size_t listener_slot_ = 0;
    bool accepting_ = true;
};

}  // namespace train_gpt::watchdog
