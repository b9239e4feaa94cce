// The ranks of a run: who they are, and small messages between their hosts. One process drives one
// device. mpirun, srun, torchrun or a script starts several processes; without a launcher there is
// one.
#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/device.h"
#include "parallel/activity.h"

namespace train_gpt {

/// An error that has already been printed, here or by another rank.
class ReportedError : public Error {
  public:
    using Error::Error;
};

/// A signal has ended the start of this rank or of another one; all of them exit with this code. The
/// rank that got the signal has printed it.
class StoppedEarly : public ReportedError {
  public:
    explicit StoppedEarly(int exit_code)
        : ReportedError("a signal has ended the start of the ranks"), code(exit_code) {}
    int code;
};

/// All ranks call the collective functions in the same order. They are for setup and for step
/// boundaries; what a step moves goes through a Communicator.
class World {
  public:
    /// The MPI library and its version, or that this build has none.
    static std::string describe_library();

    /// A world of one.
    World();
    /// The world that the launcher started this process in: through MPI where MPI's launcher
    /// started it (mpirun, or srun with PMIx or PMI2), else over TCP where the variables of
    /// torchrun, of a step of Slurm or of TRAIN_GPT_RANK say so (launch/place.h); a world of one if
    /// there is no launcher. `program` is this program's version, which must be that of all ranks.
    /// Throws Error if the ranks cannot meet, and ReportedError on those that rank 0 could tell why:
    /// it prints the reason. While ranks meet over TCP, `stop_code` is called again and again:
    /// where it returns an exit code and not 0, StoppedEarly is thrown on all ranks that are there.
    static World join(const std::string& program = "", const std::function<int()>& stop_code = {});

    int rank() const;
    int size() const;
    /// The rank among those that share memory with this one, as found by what they share and not
    /// by the host's name.
    int local_rank() const;
    int local_size() const;
    const std::string& host() const;
    /// The ranks of this world that pass the same color, in its order, as a world of their own. All
    /// ranks call it. Throws Error for a world over TCP, which cannot be divided.
    World split(int color) const;

    /// What messages call a rank: "rank 37 (data 9, tensor 1)", or "rank 37" while it has no place.
    std::string describe(int rank) const;
    /// The place of each rank in the run's mesh; empty: nothing to add to its number.
    void set_places(std::vector<std::string> places) const;
    const std::vector<std::string>& places() const;

    void barrier() const;
    /// Sums over ranks, added in rank order, with the same bits on all ranks.
    void all_reduce_sum(std::span<double> values) const;
    /// Returns the root's text on all ranks.
    std::string broadcast(const std::string& text, int root = 0) const;
    /// The texts of all ranks, by rank.
    std::vector<std::string> all_gather(const std::string& text) const;
    /// The same among the ranks that share memory with this one, by local rank.
    std::vector<std::string> all_gather_local(const std::string& text) const;

    /// What this rank is doing. Code that works for long without a collective calls pulse() on it.
    Activity& activity() const;

    /// Ends all ranks of the job immediately.
    [[noreturn]] void abort(int exit_code) const;

    struct Membership;  // membership.h
    const std::shared_ptr<const Membership>& membership() const { return membership_; }

  private:
    std::shared_ptr<const Membership> membership_;  // the last owner leaves the world
};

/// The device that this rank trains on: open_device(wanted) in a world of one, or where `wanted` is
/// "cpu". Otherwise each rank gets its own GPU: local rank r takes the r-th that the ranks of its
/// node can see, or the only one that it can see itself (CUDA_VISIBLE_DEVICES). All ranks call it.
/// Throws Error on all ranks where one of them has no GPU, naming host and counts, unless `wanted`
/// is "auto" and no rank has any.
Device device_of_rank(const World& world, const std::string& wanted);

}  // namespace train_gpt
