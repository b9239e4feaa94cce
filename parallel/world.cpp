#include "parallel/world.h"

#include <algorithm>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <sstream>

#include <unistd.h>

#include "base/error.h"
#include "device/cuda.h"
#include "parallel/mpi_world.h"

namespace train_gpt {

namespace {

struct Launcher {
    const char* variable =
        nullptr;    // the variable that revealed it; null: this process was started alone
    int ranks = 0;  // 0: unknown
};

/// Finds the launcher by what mpirun and srun leave in the environment. An mpirun within a job step
/// inherits Slurm's variable, so its own count comes first.
Launcher find_launcher() {
    for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
        const char* value = std::getenv(variable);
        if (const int ranks = value ? std::atoi(value) : 0; ranks > 0)
            return ranks > 1 ? Launcher{variable, ranks} : Launcher{};
    }
    for (const char* variable : {"PMIX_RANK", "PMI_RANK"})
        if (std::getenv(variable)) return {variable, 0};
    return {};
}

std::string host_name() {
    char name[HOST_NAME_MAX + 1] = "";
    return ::gethostname(name, sizeof name) == 0 ? name : "unknown host";
}

#ifdef TRAIN_GPT_MPI

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

#endif

}  // namespace

World::Membership::Membership() : host(host_name()) {}

World::Membership::~Membership() {
#ifdef TRAIN_GPT_MPI
    // MPI_Finalize waits for all ranks. A rank that fails must not wait: it ends without calling
    // it, which makes the launcher end the others.
    if (everyone == MPI_COMM_NULL || is_broken || std::uncaught_exceptions() > 0) return;
    MPI_Comm_free(&node);
    MPI_Comm_free(&everyone);
    if (!whole) MPI_Finalize();
#endif
}

std::string World::describe_library() {
#ifdef TRAIN_GPT_MPI
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(version, &length);
    const std::string text(version, static_cast<size_t>(length));
    return text.substr(0, text.find_first_of(",\n"));
#else
    return "not in this build";
#endif
}

#ifdef TRAIN_GPT_MPI
void World::Membership::find_ranks() {
    MPI_CHECK(MPI_Comm_set_errhandler(everyone, MPI_ERRORS_RETURN));
    MPI_CHECK(MPI_Comm_rank(everyone, &rank));
    MPI_CHECK(MPI_Comm_size(everyone, &size));
    MPI_CHECK(MPI_Comm_split_type(everyone, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node));
    MPI_CHECK(MPI_Comm_rank(node, &local_rank));
    MPI_CHECK(MPI_Comm_size(node, &local_size));
}
#endif

World::World() : membership_(std::make_shared<const Membership>()) {}

World World::join() {
    const Launcher launcher = find_launcher();
    World world;
    if (!launcher.variable) return world;
#ifdef TRAIN_GPT_MPI
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
    const auto membership = std::make_shared<Membership>();
    MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &membership->everyone));
    world.membership_ = membership;
    membership->find_ranks();

    if (level < MPI_THREAD_SERIALIZED)
        throw Error(
            "this MPI library does not let threads take turns (MPI_THREAD_SERIALIZED), which the "
            "watchdog needs; use one that was built with threads");
    if (launcher.ranks > 1 && membership->size == 1)
        throw Error(
            "this process was started as one of ", launcher.ranks, " ranks (", launcher.variable,
            "), but the MPI library of this build sees only one; start it with the mpirun that "
            "belongs to that library, or with srun --mpi=pmix");
    return world;
#else
    throw Error(
        "this process was started as one of ", launcher.ranks ? concat(launcher.ranks) : "several",
        " ranks (", launcher.variable,
        "), but this build has no MPI; install an MPI library (libopenmpi-dev and openmpi-bin) and "
        "rebuild, or start it without a launcher");
#endif
}

int World::rank() const { return membership_->rank; }
int World::size() const { return membership_->size; }
int World::local_rank() const { return membership_->local_rank; }
int World::local_size() const { return membership_->local_size; }
const std::string& World::host() const { return membership_->host; }
Activity& World::activity() const { return membership_->activity; }

std::string World::describe(int rank) const {
    const std::vector<std::string>& places = membership_->places;
    const std::string place = places.empty() ? "" : places[static_cast<size_t>(rank)];
    return concat("rank ", rank, place.empty() ? "" : " (" + place + ")");
}
void World::set_places(std::vector<std::string> places) const {
    membership_->places = std::move(places);
}
const std::vector<std::string>& World::places() const { return membership_->places; }

#ifdef TRAIN_GPT_MPI

World World::split(int color) const {
    World part;
    if (size() == 1) return part;
    const auto membership = std::make_shared<Membership>();
    membership->whole = membership_;
    MPI_CHECK(MPI_Comm_split(membership_->everyone, color, rank(), &membership->everyone));
    membership->find_ranks();
    part.membership_ = membership;
    return part;
}

void World::barrier() const {
    if (size() == 1) return;
    activity().enter("a barrier of ranks");
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_CHECK(MPI_Ibarrier(membership_->everyone, &request));
    complete(request);
}

void World::all_reduce_sum(std::span<double> values) const {
    if (size() == 1) return;
    activity().enter("a sum over ranks");
    const int n = length_of(static_cast<int64_t>(values.size()));
    std::vector<double> all(values.size() * static_cast<size_t>(size()));
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_CHECK(MPI_Iallgather(values.data(), n, MPI_DOUBLE, all.data(), n, MPI_DOUBLE,
                             membership_->everyone, &request));
    complete(request);
    std::copy_n(all.begin(), values.size(), values.begin());
    for (size_t i = values.size(); i < all.size(); ++i) values[i % values.size()] += all[i];
}

std::string World::broadcast(const std::string& text, int root) const {
    if (size() == 1) return text;
    activity().enter("a broadcast to ranks");
    int length = length_of(static_cast<int64_t>(text.size()));
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_CHECK(MPI_Ibcast(&length, 1, MPI_INT, root, membership_->everyone, &request));
    complete(request);
    std::string sent = rank() == root ? text : std::string(static_cast<size_t>(length), '\0');
    MPI_CHECK(MPI_Ibcast(sent.data(), length, MPI_CHAR, root, membership_->everyone, &request));
    complete(request);
    return sent;
}

std::vector<std::string> World::all_gather(const std::string& text) const {
    if (size() == 1) return {text};
    activity().enter("a gather from ranks");
    return gather_texts(membership_->everyone, text);
}

std::vector<std::string> World::all_gather_local(const std::string& text) const {
    if (local_size() == 1) return {text};
    activity().enter("a gather on one host");
    return gather_texts(membership_->node, text);
}

void World::abort(int exit_code) const {
    if (membership_->everyone != MPI_COMM_NULL) MPI_Abort(MPI_COMM_WORLD, exit_code);
    std::_Exit(exit_code);
}

#else  // every world has one rank

World World::split(int) const { return {}; }
void World::barrier() const {}
void World::all_reduce_sum(std::span<double>) const {}
std::string World::broadcast(const std::string& text, int) const { return text; }
std::vector<std::string> World::all_gather(const std::string& text) const { return {text}; }
std::vector<std::string> World::all_gather_local(const std::string& text) const { return {text}; }
void World::abort(int exit_code) const { std::_Exit(exit_code); }

#endif

Device device_of_rank([[maybe_unused]] const World& world, const std::string& wanted) {
#ifdef TRAIN_GPT_CUDA
    if (world.size() > 1 && wanted != "cpu") {
        // Each rank takes the first GPU it can see that no lower rank of the node has taken.
        std::string visible;
        for (const std::string& gpu : cuda::identities()) visible += gpu + "\n";
        std::vector<std::string> taken;
        int index = -1;  // of this rank's GPU
        for (const std::string& list : world.all_gather_local(visible)) {
            index = -1;
            std::istringstream lines(list);
            std::string gpu;
            for (int i = 0; index < 0 && std::getline(lines, gpu); ++i) {
                if (std::ranges::find(taken, gpu) == taken.end()) index = i;
            }
            taken.push_back(index < 0 ? "" : gpu);
            if (static_cast<int>(taken.size()) > world.local_rank()) break;
        }
        const std::string obstacle =
            index >= 0 || visible.empty()
                ? cuda::obstacle(std::max(index, 0))
                : concat(world.local_size(), " ranks were started there, but they see only ",
                         std::ranges::count(visible, '\n') == 1
                             ? "one GPU"
                             : concat(std::ranges::count(visible, '\n'), " GPUs"),
                         ", and two ranks cannot share one; start one rank for each GPU (mpirun "
                         "-np, srun "
                         "--ntasks-per-node), "
                         "and see CUDA_VISIBLE_DEVICES");
        // All ranks decide the same: one that stopped here alone would leave the others waiting.
        const std::vector<std::string> all_visible = world.all_gather(visible);
        const bool none =
            std::ranges::all_of(all_visible, [](const std::string& list) { return list.empty(); });
        const std::vector<std::string> obstacles =
            world.all_gather(obstacle.empty() ? "" : world.host() + ": " + obstacle);
        const auto first =
            std::ranges::find_if(obstacles, [](const std::string& text) { return !text.empty(); });
        if (first == obstacles.end()) return open_device(wanted, index);
        if (wanted == "cuda" || !none)
            throw Error("rank ", first - obstacles.begin(), " has no GPU of its own on ", *first,
                        "; or set device to \"cpu\"");
    }
#endif
    return open_device(wanted);
}

}  // namespace train_gpt
