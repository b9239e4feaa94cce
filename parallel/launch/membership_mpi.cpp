#include "parallel/launch/membership.h"

#ifdef TRAIN_GPT_MPI
#include <algorithm>
#include <climits>
#include <cstdint>
#include <exception>
#include <numeric>

#include "parallel/mpi_calls.h"

namespace train_gpt {

namespace {

int length_of(int64_t bytes) {
    if (bytes > INT_MAX)
        throw Error("a message of ", bytes,
                    " bytes between hosts is beyond MPI's limit; please report this");
    return static_cast<int>(bytes);
}

void complete(MPI_Request request) {
    finish(std::span(&request, 1), [] {});
}

/// The texts of a group's ranks, by rank.
std::vector<std::string> gather_texts(MPI_Comm group, const std::string& text) {
    int size = 0;
    MPI_CHECK(MPI_Comm_size(group, &size));
    const int length = length_of(static_cast<int64_t>(text.size()));
    std::vector<int> lengths(static_cast<size_t>(size)), starts(lengths.size());
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_CHECK(MPI_Iallgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, group, &request));
    complete(request);
    const int total = length_of(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}));
    std::exclusive_scan(lengths.begin(), lengths.end(), starts.begin(), 0);
    std::string joined(static_cast<size_t>(total), '\0');
    MPI_CHECK(MPI_Iallgatherv(text.data(), length, MPI_CHAR, joined.data(), lengths.data(),
                              starts.data(), MPI_CHAR, group, &request));
    complete(request);
    std::vector<std::string> texts;
    for (size_t i = 0; i < lengths.size(); ++i)
        texts.push_back(
            joined.substr(static_cast<size_t>(starts[i]), static_cast<size_t>(lengths[i])));
    return texts;
}

class MpiMembership final : public World::Membership {
  public:
    std::shared_ptr<MpiSession> session = std::make_shared<MpiSession>();

    /// Fills in ranks and node from session->everyone.
    void find_ranks() {
        MPI_CHECK(MPI_Comm_set_errhandler(session->everyone, MPI_ERRORS_RETURN));
        MPI_CHECK(MPI_Comm_rank(session->everyone, &rank));
        MPI_CHECK(MPI_Comm_size(session->everyone, &size));
        MPI_CHECK(MPI_Comm_split_type(session->everyone, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL,
                                      &session->node));
        MPI_CHECK(MPI_Comm_rank(session->node, &local_rank));
        MPI_CHECK(MPI_Comm_size(session->node, &local_size));
        node = rank;
        MPI_CHECK(MPI_Bcast(&node, 1, MPI_INT, 0, session->node));
    }

    void barrier() const override {
        MPI_Request request = MPI_REQUEST_NULL;
        MPI_CHECK(MPI_Ibarrier(session->everyone, &request));
        complete(request);
    }

    void all_reduce_sum(std::span<double> values) const override {
        const int n = length_of(static_cast<int64_t>(values.size()));
        std::vector<double> all(values.size() * static_cast<size_t>(size));
        MPI_Request request = MPI_REQUEST_NULL;
        MPI_CHECK(MPI_Iallgather(values.data(), n, MPI_DOUBLE, all.data(), n, MPI_DOUBLE,
                                 session->everyone, &request));
        complete(request);
        std::copy_n(all.begin(), values.size(), values.begin());
        for (size_t i = values.size(); i < all.size(); ++i) values[i % values.size()] += all[i];
    }

    std::string broadcast(const std::string& text, int root) const override {
        int length = length_of(static_cast<int64_t>(text.size()));
        MPI_Request request = MPI_REQUEST_NULL;
        MPI_CHECK(MPI_Ibcast(&length, 1, MPI_INT, root, session->everyone, &request));
        complete(request);
        std::string sent = rank == root ? text : std::string(static_cast<size_t>(length), '\0');
        MPI_CHECK(MPI_Ibcast(sent.data(), length, MPI_CHAR, root, session->everyone, &request));
        complete(request);
        return sent;
    }

    std::vector<std::string> all_gather(const std::string& text) const override {
        return gather_texts(session->everyone, text);
    }

    std::vector<std::string> all_gather_local(const std::string& text) const override {
        return gather_texts(session->node, text);
    }

    std::shared_ptr<const World::Membership> part(int color) const override {
        auto made = std::make_shared<MpiMembership>();
        made->session->whole = session;
        MPI_CHECK(MPI_Comm_split(session->everyone, color, rank, &made->session->everyone));
        made->find_ranks();
        return made;
    }

    [[noreturn]] void abort(int exit_code) const override {
        MPI_Abort(MPI_COMM_WORLD, exit_code);
        std::_Exit(exit_code);
    }

    // mpirun may wait for ever for ranks that have all ended without it.
    [[noreturn]] void end_process(int exit_code) const override { abort(exit_code); }

    std::unique_ptr<Links> open_links(std::optional<int> number, bool encrypt) const override {
        if (encrypt)
            throw Error(
                "parallel.encrypt is true, but these ranks were started through MPI, whose "
                "messages "
                "stay in clear; start them without it (docs/many-ranks.md), or set it to false");
        return open_mpi_links(session, number.value_or(node));
    }
};

}  // namespace

MpiSession::~MpiSession() {
    // MPI_Finalize waits for all ranks. A rank that fails must not wait: it ends without calling
    // it, which makes the launcher end the others.
    if (everyone == MPI_COMM_NULL || is_broken || std::uncaught_exceptions() > 0) return;
    if (node != MPI_COMM_NULL) MPI_Comm_free(&node);
    MPI_Comm_free(&everyone);
    if (!whole) MPI_Finalize();
}

std::string describe_mpi() {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(version, &length);
    const std::string text(version, static_cast<size_t>(length));
    return text.substr(0, text.find_first_of(",\n"));
}

std::shared_ptr<const World::Membership> join_mpi(const Place& place) {
    int joined_before = 0;
    MPI_Initialized(&joined_before);
    if (joined_before)
        throw Error(
            "a process can join its world only once; this is a fault of the program, please report "
            "it");

    // One thread at a time calls MPI, except that any thread may end the job while another one
    // waits. MULTIPLE guarantees that this works; with SERIALIZED it works where MPI_Abort takes no
    // lock.
    int level = MPI_THREAD_SINGLE;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    auto world = std::make_shared<MpiMembership>();
    MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &world->session->everyone));
    world->find_ranks();

    if (level < MPI_THREAD_SERIALIZED)
        throw Error(
            "this MPI library does not let threads take turns (MPI_THREAD_SERIALIZED), which the "
            "watchdog needs; use one that was built with threads");
    if (place.size > 1 && world->size == 1)
        throw Error(
            "this process was started as one of ", place.size, " ranks (", place.variable,
            "), but the MPI library of this build sees only one; start it with the mpirun that "
            "belongs to that library, with srun --mpi=pmix, or with srun --mpi=none, which needs "
            "no "
            "MPI");
    return world;
}

}  // namespace train_gpt

#else

#include "base/error.h"

namespace train_gpt {

std::string describe_mpi() { return "not in this build"; }

std::shared_ptr<const World::Membership> join_mpi(const Place& place) {
    throw Error(
        "this process was started as one of ", place.size ? concat(place.size) : "several",
        " ranks (", place.variable,
        "), but this build has no MPI; start it with srun --mpi=none, torchrun or variables of its "
        "own (docs/many-ranks.md), without a launcher, or install an MPI library (libopenmpi-dev "
        "and openmpi-bin) and rebuild");
}

}  // namespace train_gpt

#endif
