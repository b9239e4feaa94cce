// The ranks of a run: who they are, and small messages between their hosts. One process drives one
// device. mpirun, srun, torchrun or a script starts several processes. Without a launcher there is
// one process.
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

/// A signal has ended the start of this rank or of another rank. All ranks exit with this code. The
/// rank that got the signal has printed a line about it.
class StoppedEarly : public ReportedError {
  public:
    explicit StoppedEarly(int exit_code)
        : ReportedError("a signal has ended the start of the ranks"), code(exit_code) {}
    int code;
};

/// All ranks call the collective functions in the same order. These functions are for setup, and
/// for use between steps. What a step moves goes through a Communicator.
class World {
  public:
    /// The name and version of the MPI library, or a text that says that this build has no MPI.
    static std::string describe_library();

    /// A world of one.
    World();
    /// The world that the launcher started this process in:
    ///
    ///   MPI           if MPI's launcher started the process: mpirun, or srun with PMIx or PMI2
    ///   TCP           if variables of torchrun, of a step of Slurm or TRAIN_GPT_RANK say so
    ///                 (launch/place.h lists them)
    ///   world of one  if there is no launcher
    ///
    /// `program` is this program's version; all ranks must have the same. Throws Error if the ranks
    /// cannot meet. If rank 0 knows the reason, it prints the reason, and the ranks that it can
    /// reach throw ReportedError. While ranks meet over TCP, `stop_code` is called again and again.
    /// If it returns an exit code other than 0, all ranks that have met so far throw StoppedEarly.
    static World join(const std::string& program = "", const std::function<int()>& stop_code = {});

    int rank() const;
    int size() const;
    /// This rank's number among the ranks that share memory with it. Ranks find out by sharing
    /// memory, not by the host's name.
    int local_rank() const;
    int local_size() const;
    const std::string& host() const;
    /// Returns a world of the ranks that pass the same color, in the order of this world. All ranks
    /// call it. Throws Error for a world over TCP, which cannot be divided.
    World split(int color) const;

    /// What messages call a rank: "rank 37 (data 9, tensor 1)", or "rank 37" if its place is empty.
    std::string describe(int rank) const;
    /// Sets the place of each rank in the run's mesh. A place may be empty.
    void set_places(std::vector<std::string> places) const;
    const std::vector<std::string>& places() const;

    void barrier() const;
    /// The values become their sums over the ranks, added in the order of ranks. All ranks get the
    /// same bits.
    void all_reduce_sum(std::span<double> values) const;
    /// Returns the root's text on all ranks.
    std::string broadcast(const std::string& text, int root = 0) const;
    /// Returns the texts of all ranks, by rank.
    std::vector<std::string> all_gather(const std::string& text) const;
    /// Returns the texts of the ranks that share memory with this rank, by local rank.
    std::vector<std::string> all_gather_local(const std::string& text) const;

    /// What this rank is doing. Code that works for long without a collective calls its pulse().
    Activity& activity() const;

    /// Ends all ranks of the job immediately.
    [[noreturn]] void abort(int exit_code) const;

    struct Membership;  // membership.h
    const std::shared_ptr<const Membership>& membership() const { return membership_; }

  private:
    std::shared_ptr<const Membership> membership_;  // the last owner leaves the world
};

/// The device that this rank trains on. In a world of one, or if `wanted` is "cpu", this is
/// open_device(wanted). Otherwise each rank takes the first GPU that it can see
/// (CUDA_VISIBLE_DEVICES) and that no lower rank of its node has taken. All ranks call it. Throws
/// Error on all ranks if one of them has no GPU; the message names the host and counts ranks and
/// GPUs. If `wanted` is "auto" and no rank has a GPU, all ranks get the CPU.
Device device_of_rank(const World& world, const std::string& wanted);

}  // namespace train_gpt
