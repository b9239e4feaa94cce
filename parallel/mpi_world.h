// What the files that use MPI share: the membership behind a World, checked calls, and waiting that
// yields the core to others.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "parallel/world.h"

#ifdef TRAIN_GPT_MPI
// MPI's own C++ interface is not used.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <chrono>
#include <cstdint>
#include <span>
#include <thread>

#include <mpi.h>
#include <sched.h>

#include "base/error.h"
#endif

namespace train_gpt {

struct World::Membership {
    int rank = 0, size = 1, local_rank = 0, local_size = 1;
    std::string host;
    mutable std::vector<std::string> places;  // of ranks, for messages
    mutable Activity activity;

    Membership();
    ~Membership();
    Membership(const Membership&) = delete;
    Membership& operator=(const Membership&) = delete;

#ifdef TRAIN_GPT_MPI
    MPI_Comm everyone = MPI_COMM_NULL;        // null in a world of one that no launcher started
    MPI_Comm node = MPI_COMM_NULL;            // the ranks that share memory, by rank
    std::shared_ptr<const Membership> whole;  // of the world that this one is a part of, if it is
    /// Some rank has abandoned a collective: leaving MPI would wait for ranks that never come.
    mutable std::atomic<bool> is_broken{false};

    /// Fills in ranks and node from `everyone`.
    void find_ranks();
#endif
};

#ifdef TRAIN_GPT_MPI

/// Calls MPI; throws Error with the text of the call and MPI's reason.
#define MPI_CHECK(call) ::train_gpt::check_mpi(call, #call)

inline void check_mpi(int status, const char* call) {
    if (status == MPI_SUCCESS) return;
    char reason[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(status, reason, &length);
    throw Error("MPI reports: ", reason, " (", call, "); look for the rank that failed first");
}

/// Waits for another process: first by spinning, for what comes within microseconds; then by
/// yielding the core each time, since the other process may need it; then by sleeping.
class Patience {
  public:
    void pause() {
        ++rounds_;
        if (rounds_ <= awake_rounds) return;
        if (rounds_ <= awake_rounds + yielding_rounds) {
            sched_yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

  private:
    static constexpr int64_t awake_rounds = 1000, yielding_rounds = 1000;
    int64_t rounds_ = 0;
};

/// Returns when all requests are done; until then it calls `look`, which may throw.
template <class Look>
void finish(std::span<MPI_Request> requests, Look&& look) {
    Patience patience;
    for (int done = 0;;) {
        MPI_CHECK(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done,
                              MPI_STATUSES_IGNORE));
        if (done) return;
        look();
        patience.pause();
    }
}

#endif

}  // namespace train_gpt
