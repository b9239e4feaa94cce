// Rank 0's side: rank 0 admits the other ranks, watches all ranks, decides which rank has failed,
// and sends its decision to the others.
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
        int rank = 0;  // > 0 after it has shown the secret
        Name host;
    };
    // How many newcomers may be connected at the same time, in addition to one for each rank.
    static constexpr size_t spare_newcomers = 64;

    void enlist(std::vector<pollfd>& polls) override;
    void receive(const std::vector<pollfd>& polls) override;
    void tick() override;
    void reported(const Line& message, int exit_code) override;
    bool left() override;
    void tell(const Line& text, int exit_code) override;
    /// Keeps reading until the others have closed their ends. If this end were closed with unread
    /// data, the kernel would discard what the others have not read yet. Does not wait for silent
    /// ranks.
    void await_others() override;

    void receive_from(int rank, const std::vector<pollfd>& polls);
    /// Handles a message from a member. Returns false if the message is a goodbye: the member is
    /// gone then.
    bool handle(int rank, Fields fields);
    void connection_ended(int rank);

    void accept_newcomers();
    /// Answers a newcomer that shows the secret. The newcomer becomes a member at its first
    /// heartbeat: a rank may give up a connection and try another of this host's addresses, and no
    /// heartbeat comes over a connection that was given up.
    void admit(Newcomer& newcomer, const std::vector<pollfd>& polls);
    /// Answers a hello. Returns false if the newcomer is not one of this job's expected ranks.
    bool welcome(Newcomer& newcomer, Fields hello);

    void judge_silent();
    void judge_stuck();

    net::PausingListener listener_;
    const Invitation invitation_;
    std::vector<Member> members_;  // by rank
    std::vector<Newcomer> newcomers_;
    size_t listener_slot_ = 0;
};

}  // namespace train_gpt::watchdog
