// How a World reaches its ranks: as a world of one (here), through MPI, or over TCP.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parallel/launch/place.h"
#include "parallel/links.h"
#include "parallel/world.h"

namespace train_gpt {

struct World::Membership {
    int rank = 0, size = 1, local_rank = 0, local_size = 1;
    int node = 0;  // the first rank on this rank's node
    std::string host;
    mutable std::vector<std::string> places;  // of ranks, for messages
    mutable Activity activity;

    Membership();
    virtual ~Membership() = default;
    Membership(const Membership&) = delete;
    Membership& operator=(const Membership&) = delete;

    // The functions of World, for several ranks.
    virtual void barrier() const {}
    virtual void all_reduce_sum(std::span<double>) const {}
    virtual std::string broadcast(const std::string& text, int /*root*/) const { return text; }
    virtual std::vector<std::string> all_gather(const std::string& text) const { return {text}; }
    virtual std::vector<std::string> all_gather_local(const std::string& text) const {
        return {text};
    }
    virtual std::shared_ptr<const Membership> part(int color) const;
    [[noreturn]] virtual void abort(int exit_code) const;
    /// Ends this process while the other ranks end as well. The launcher learns that the job is
    /// over. Any thread may call it.
    [[noreturn]] virtual void end_process(int exit_code) const;

    /// Links between all ranks, for collectives on CPUs. All ranks call it. `node` as in
    /// open_cpu_communicator(). Throws Error if `encrypt` is set and these links cannot be
    /// encrypted.
    virtual std::unique_ptr<Links> open_links(std::optional<int> /*node*/, bool /*encrypt*/) const {
        return nullptr;
    }
};

/// The world that MPI's launcher started this process in. Throws Error if this build has no MPI.
std::shared_ptr<const World::Membership> join_mpi(const Place& place);
/// The name and version of the MPI library, or a text that says that this build has no MPI.
std::string describe_mpi();

/// Meets the other ranks over TCP. Throws Error, ReportedError and StoppedEarly as World::join().
std::shared_ptr<const World::Membership> join_tcp(const Place& place, const std::string& program,
                                                  const std::function<int()>& stop_code);

}  // namespace train_gpt
