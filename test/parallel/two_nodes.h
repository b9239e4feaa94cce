// Two hosts on one machine, for tests of what happens between hosts.
#pragma once
#include <string>
#include <vector>

#include <sys/types.h>

#include "test/parallel/failing_job.h"
#include "test/random.h"

namespace train_gpt::failing_job {

/// Two nodes with separate names, addresses, loopbacks and shared memory, and a cable between them:
/// network, UTS and mount namespaces and a pair of veth devices. Ranks that meet over TCP are
/// started there directly. Open MPI takes them for two hosts by their names; it starts its ranks
/// there through an "rsh" that enters the namespaces. They go with the processes that live in them.
class TwoNodes {
  public:
    TwoNodes();
    ~TwoNodes();
    TwoNodes(const TwoNodes&) = delete;
    TwoNodes& operator=(const TwoNodes&) = delete;

    /// Whether namespaces cannot be used here; prints that.
    bool skip() const { return skip_since(obstacle_); }
    /// The same for ranks that mpirun starts; the options below are for Open MPI 4.
    bool skip_mpirun() const;

    bool has_ipv6() const { return has_ipv6_; }

    /// The beginning of a command that starts n ranks, half of them on each node, which meet over
    /// TCP.
    Arguments launch(int n, bool by_ipv6) const;
    /// The same under mpirun.
    Arguments mpirun_on_both(int n) const;

    void cut() const { check_succeeds(inside(1, {"ip", "link", "set", "cable", "down"})); }
    void mend() const { check_succeeds(inside(1, {"ip", "link", "set", "cable", "up"})); }

    /// Makes the cable slow in both directions; returns how, or nothing if this kernel cannot.
    std::string slow_down() const;

  private:
    /// A process that keeps a node alive.
    void hold(const char* name);
    Arguments inside(size_t node, const Arguments& command) const;
    void set_up(const Arguments& command);
    static bool skip_since(const std::string& obstacle);
    std::string agent() const { return directory_ / "enter"; }
    /// Names a process's network namespace; empty when there is none to see.
    static std::string network_of(pid_t process);

    TemporaryDirectory directory_;
    std::vector<pid_t> holders_;  // by node; in namespaces of their own
    std::string obstacle_;
    bool has_ipv6_ = false;
};

}  // namespace train_gpt::failing_job
