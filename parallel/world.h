// The ranks of a run: who they are, and small messages between their hosts. One process drives one device; mpirun or srun
// starts several, nothing starts one.
#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "device/device.h"
#include "parallel/activity.h"

namespace train_gpt {

/// All ranks call the collective functions in the same order. They are for setting up and for the borders of steps; what
/// a step moves goes through a Communicator.
class World {
  public:
    /// The MPI library and its version, or that this build has none.
    static std::string describe_library();

    /// A world of one.
    World();
    /// The world that the launcher started this process in (MPI, through mpirun, or srun with PMIx or PMI2); a world of one
    /// where there is no launcher. Throws Error where a launcher started several ranks and this build has no MPI.
    static World join();

    int rank() const;
    int size() const;
    /// Among the ranks that share this one's memory, found through MPI and not by the host's name.
    int local_rank() const;
    int local_size() const;
    const std::string& host() const;

    void barrier() const;
    /// Sums over ranks, added in the order of ranks, the same bits on all.
    void all_reduce_sum(std::span<double> values) const;
    /// The root's text on all ranks.
    std::string broadcast(const std::string& text, int root = 0) const;
    /// The texts of all ranks, by rank.
    std::vector<std::string> all_gather(const std::string& text) const;
    /// The same among the ranks that share this one's memory, by local rank.
    std::vector<std::string> all_gather_local(const std::string& text) const;

    /// What this rank is doing: whoever works for long without a collective says so there, pulse by pulse.
    Activity& activity() const;

    /// Ends all ranks of the job now.
    [[noreturn]] void abort(int exit_code) const;

    struct Membership;  // mpi_world.h
    const std::shared_ptr<const Membership>& membership() const { return membership_; }

  private:
    std::shared_ptr<const Membership> membership_;  // the last one leaves MPI
};

/// The device this rank trains on: open_device() alone; with others a GPU of its own, local rank r the r-th that its node's
/// ranks can see, or the one GPU that only it was given to see (CUDA_VISIBLE_DEVICES). All ranks call it. Throws Error on all
/// where one has none, naming host and counts, unless `wanted` is "auto" and no rank has any.
Device device_of_rank(const World& world, const std::string& wanted);

}  // namespace train_gpt
