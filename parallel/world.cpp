#include "parallel/world.h"

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <set>
#include <sstream>

#include <unistd.h>

#include "base/error.h"
#include "device/cuda.h"
#include "parallel/launch/membership.h"
#include "parallel/launch/place.h"

namespace train_gpt {

namespace {

std::string host_name() {
    char name[HOST_NAME_MAX + 1] = "";
    return ::gethostname(name, sizeof name) == 0 ? name : "unknown host";
}

}  // namespace

World::Membership::Membership() : host(host_name()) {}

std::shared_ptr<const World::Membership> World::Membership::part(int) const {
    throw Error("a world of ranks that met without MPI cannot be divided");
}

void World::Membership::abort(int exit_code) const { std::_Exit(exit_code); }
void World::Membership::end_process(int exit_code) const { std::_Exit(exit_code); }

std::string World::describe_library() { return describe_mpi(); }

World::World() : membership_(std::make_shared<const Membership>()) {}

World World::join(const std::string& program, const std::function<int()>& stop_code) {
#ifdef TRAIN_GPT_MPI
    constexpr bool has_mpi = true;
#else
    constexpr bool has_mpi = false;
#endif
    const Place place =
        find_place([](const std::string& name) { return std::getenv(name.c_str()); }, has_mpi);
    World world;
    if (place.through == Place::Through::mpi) world.membership_ = join_mpi(place);
    if (place.through == Place::Through::tcp)
        world.membership_ = join_tcp(place, program, stop_code);
    return world;
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

World World::split(int color) const {
    World part;
    if (size() > 1) part.membership_ = membership_->part(color);
    return part;
}

void World::barrier() const {
    if (size() == 1) return;
    activity().enter("a barrier of ranks");
    membership_->barrier();
}

void World::all_reduce_sum(std::span<double> values) const {
    if (size() == 1) return;
    activity().enter("a sum over ranks");
    membership_->all_reduce_sum(values);
}

std::string World::broadcast(const std::string& text, int root) const {
    if (size() == 1) return text;
    activity().enter("a broadcast to ranks");
    return membership_->broadcast(text, root);
}

std::vector<std::string> World::all_gather(const std::string& text) const {
    if (size() == 1) return {text};
    activity().enter("a gather from ranks");
    return membership_->all_gather(text);
}

std::vector<std::string> World::all_gather_local(const std::string& text) const {
    // Ranks alone on their node take part too: over TCP, the gather passes through rank 0.
    if (size() == 1) return {text};
    activity().enter("a gather on one host");
    return membership_->all_gather_local(text);
}

void World::abort(int exit_code) const {
    membership_->abort(exit_code);
    std::_Exit(exit_code);  // not reached, but the compiler cannot know of a virtual function
}

Device device_of_rank([[maybe_unused]] const World& world, const std::string& wanted) {
#ifdef TRAIN_GPT_CUDA
    if (world.size() > 1 && wanted != "cpu") {
        // Each rank takes the first GPU it can see that no lower rank of the node has taken.
        std::string visible;
        std::set<std::string> different;  // two instances of one GPU (MIG) are one
        for (const std::string& gpu : cuda::identities()) {
            visible += gpu + "\n";
            different.insert(gpu);
        }
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
        const auto [obstacle, is_fault] =
            index >= 0 || visible.empty()
                ? cuda::obstacle(std::max(index, 0))
                : cuda::Obstacle{
                      concat(world.local_size(), " ranks were started there, but they see only ",
                             different.size() == 1 ? "one GPU" : concat(different.size(), " GPUs"),
                             ", and two ranks cannot share one (nor its MIG instances); start one "
                             "rank for each GPU (mpirun -np, srun --ntasks-per-node, torchrun "
                             "--nproc-per-node), and see CUDA_VISIBLE_DEVICES"),
                      true};
        // All ranks decide the same: one that stopped here alone would leave the others waiting.
        const std::vector<std::string> needed =
            world.all_gather(visible.empty() && !is_fault ? "" : "a GPU");
        const bool none =
            std::ranges::all_of(needed, [](const std::string& gpu) { return gpu.empty(); });
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
