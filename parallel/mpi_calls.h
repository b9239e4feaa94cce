// What the files that use MPI share: the world of ranks that MPI has started, checked calls, and
// waiting that yields the core to others.
#pragma once
#ifdef TRAIN_GPT_MPI
// MPI's own C++ interface is not used.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <atomic>
#include <memory>
#include <span>

#include <mpi.h>

#include "base/error.h"
#include "parallel/launch/membership.h"
#include "parallel/patience.h"

namespace train_gpt {

/// Calls MPI; throws Error with the text of the call and MPI's reason.
#define MPI_CHECK(call) ::train_gpt::check_mpi(call, #call)

inline void check_mpi(int status, const char* call) {
    if (status == MPI_SUCCESS) return;
    char reason[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(status, reason, &length);
    throw Error("MPI reports: ", reason, " (", call, "); look for the rank that failed first");
}

/// Returns when all requests are done. Until then it calls `look` again and again; `look` may
/// throw.
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

/// MPI from MPI_Init to MPI_Finalize, for all ranks or a part of the ranks. Every object that keeps
/// handles of MPI shares ownership of the session.
struct MpiSession {
    MPI_Comm everyone = MPI_COMM_NULL;
    MPI_Comm node = MPI_COMM_NULL;            // the ranks that share memory, by rank
    std::shared_ptr<const MpiSession> whole;  // a part of the ranks: the session of all ranks
    /// Some rank has abandoned a collective: MPI_Finalize would wait for ranks that never come.
    std::atomic<bool> is_broken{false};

    MpiSession() = default;
    ~MpiSession();
    MpiSession(const MpiSession&) = delete;
    MpiSession& operator=(const MpiSession&) = delete;
};

/// Links between the ranks of session->everyone, through MPI's messages and MPI's shared memory.
std::unique_ptr<Links> open_mpi_links(std::shared_ptr<MpiSession> session, int node);

}  // namespace train_gpt
#endif
