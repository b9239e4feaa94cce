#include "parallel/mesh.h"

#include <algorithm>
#include <cassert>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <thread>

#include "base/error.h"
#include "parallel/communicator_kinds.h"
#include "parallel/group_ctas.h"
#include "parallel/together.h"

namespace train_gpt {

namespace {

/// The value from 1 to `most` nearest to `wanted` that works; 1 always does.
int nearest_that_works(int wanted, int most, const std::function<bool(int)>& works) {
    for (int distance = 0; distance < std::max(wanted, most); ++distance)
        for (const int value : {wanted - distance, wanted + distance})
            if (value >= 1 && value <= most && works(value)) return value;
    return 1;
}

/// An axis with its name and, if a configuration gives its size, the key and the size.
struct AxisRow {
    Axis axis;
    const char* name;
    const char* key = nullptr;
    int MeshSizes::*size = nullptr;
    // What the size divides: if sizes before it leave all ranks, and if they leave fewer.
    const char *of_all = "", *of_others = "";

    bool is_given() const { return size != nullptr; }
};
/// The given sizes are in the order in which they divide the ranks.
constexpr AxisRow axis_rows[] = {
    {Axis::tensor, "tensor", "parallel.tensor", &MeshSizes::tensor, "ranks of this run"},
    {Axis::context, "context", "parallel.context", &MeshSizes::context, "ranks of this run",
     "tensor-parallel groups of this run"},
    {Axis::pipeline, "pipeline", "parallel.pipeline", &MeshSizes::pipeline, "ranks of this run",
     "ranks that parallel.tensor and parallel.context leave"},
    {Axis::shard, "shard", "parallel.shard_ranks", &MeshSizes::shard_ranks,
     "data-parallel ranks of this run", "data-parallel ranks of this run"},
    {Axis::data, "data"},
    {Axis::replica, "replica"}};

/// The same on all ranks.
void require_tensor_on_nodes(const World& world, const MeshSizes& sizes) {
    if (sizes.tensor == 1 || sizes.allow_tensor_across_nodes) return;
    const std::string first_of_node = world.all_gather_local(std::to_string(world.rank())).front();
    const std::vector<std::string> nodes = world.all_gather(first_of_node),
                                   hosts = world.all_gather(world.host());
    const auto node_of = [&](int rank) { return nodes[static_cast<size_t>(rank)]; };
    // A rank that is not on the node of the first of its group; −1: there is none.
    const auto astray = [&](int tensor) {
        for (int rank = 0; rank < world.size(); ++rank)
            if (node_of(rank) != node_of(rank / tensor * tensor)) return rank;
        return -1;
    };
    const int rank = astray(sizes.tensor);
    if (rank < 0) return;
    const int first = rank / sizes.tensor * sizes.tensor;
    const int fitting = nearest_that_works(
        sizes.tensor, sizes.tensor, [&](int t) { return world.size() % t == 0 && astray(t) < 0; });
    throw SharedError(
        "parallel.tensor = ", sizes.tensor, " puts ranks ", first, " (",
        hosts[static_cast<size_t>(first)], ") and ", rank, " (", hosts[static_cast<size_t>(rank)],
        "), which are on different nodes, into one tensor-parallel group, whose ranks "
        "exchange data in every layer; the nearest value that keeps groups on one node "
        "is ",
        fitting,
        ", or set parallel.allow_tensor_across_nodes=true if the network is fast "
        "enough");
}

/// Says how to start several ranks, where one has been started and the sizes are for more.
void require_several(const MeshSizes& sizes) {
    int needed = 1, count = 0;
    std::string keys;
    for (const AxisRow& row : axis_rows) {
        const int size = row.is_given() ? sizes.*row.size : 1;
        if (size <= 1) continue;
        keys += concat(count++ ? " and " : "", row.key, " = ", size);
        needed *= size;
    }
    if (needed > 1)
        throw Error(keys, count > 1 ? " need " : " needs ", needed,
                    " ranks, or a multiple, and this run has one; start ", needed,
                    " with mpirun -np ", needed,
                    " train_gpt train …; docs/many-ranks.md has other ways, such as torchrun");
}

MeshLayout checked_layout(const World& world, const MeshSizes& sizes) {
    if (world.size() == 1) require_several(sizes);
    std::map<std::string, std::string> facts = {
        {"parallel.allow_tensor_across_nodes", sizes.allow_tensor_across_nodes ? "true" : "false"}};
    for (const AxisRow& row : axis_rows)
        if (row.is_given()) facts[row.key] = concat(sizes.*row.size);
    require_same(world, facts);
    try {
        return {world.size(), sizes};
    } catch (const Error& error) {
        if (world.size() == 1) throw;
        throw SharedError(error.what());
    }
}

GroupCtas ctas_on(const World& world, const Device& device, const MeshSizes& sizes,
                  const CollectiveSettings& collectives) {
    return group_ctas(world.size(), sizes, multiprocessors(device), collectives.max_ctas);
}

std::unique_ptr<Communicator> open_everyone(const World& world, const Device& device,
                                            const MeshSizes& sizes,
                                            CollectiveSettings collectives) {
    collectives.max_ctas = ctas_on(world, device, sizes, collectives).everyone;
    collectives.several_groups = sizes.has_several_groups();
    return open_communicator(world, device, world.activity(), collectives);
}

}  // namespace

const char* name_of(Axis axis) { return std::ranges::find(axis_rows, axis, &AxisRow::axis)->name; }

std::optional<SizeProblem> mesh_problem(int world, const MeshSizes& sizes) {
    int left = world;
    for (const AxisRow& row : axis_rows) {
        const int size = row.is_given() ? std::max(1, sizes.*row.size) : 1;
        if (left % size != 0)
            return SizeProblem{.text = concat(row.key, " = ", size, " does not divide the ", left,
                                              " ", left == world ? row.of_all : row.of_others),
                               .key = row.key,
                               .value = size,
                               .most = left};
        left /= size;
    }
    return {};
}

MeshLayout::MeshLayout(int world, const MeshSizes& sizes) : world_(world) {
    if (const auto problem = mesh_problem(world, sizes)) {
        const int most = static_cast<int>(problem->most);
        throw Error(problem->text, "; the nearest value that does is ",
                    nearest_that_works(static_cast<int>(problem->value), most,
                                       [&](int value) { return most % value == 0; }));
    }
    const int left = world / (sizes.tensor * sizes.context * sizes.pipeline);
    const int shard = sizes.shard_ranks > 0 ? sizes.shard_ranks : left;
    int stride = 1;
    const auto lay = [&](Axis axis, int size) {
        extents_[static_cast<size_t>(axis)] = {size, stride};
        stride *= size;
    };
    lay(Axis::tensor, sizes.tensor);
    lay(Axis::context, sizes.context);
    extents_[static_cast<size_t>(Axis::data)] = {left, stride};
    lay(Axis::shard, shard);
    lay(Axis::replica, left / shard);
    lay(Axis::pipeline, sizes.pipeline);
}

int MeshLayout::size(Axes axes) const {
    int product = 1;
    for (const Axis axis : axes) product *= size(axis);
    return product;
}

int MeshLayout::at(Axes axes, int rank) const {
    std::vector<Axis> sorted(axes);
    std::sort(sorted.begin(), sorted.end());  // the nearest last
    int place = 0;
    for (const Axis axis : sorted) place = place * size(axis) + at(axis, rank);
    return place;
}

int MeshLayout::first_rank(Axes axes, int rank) const {
    int first = rank;
    for (const Axis axis : axes) first -= at(axis, rank) * stride(axis);
    return first;
}

std::vector<int> MeshLayout::first_ranks(Axis axis) const {
    std::vector<int> ranks;
    for (int i = 0; i < size(axis); ++i) ranks.push_back(i * stride(axis));
    return ranks;
}

std::string MeshLayout::place(int rank) const {
    std::string text;
    int several = 0;
    for (const Axis axis : all_axes) {
        if (size(axis) == 1) continue;
        text += concat(several++ ? ", " : "", name_of(axis), " ", at(axis, rank));
    }
    return several > 1 || size(Axis::pipeline) > 1 ? text : "";
}

unsigned MeshLayout::extended(Axes axes) const {
    unsigned bits = 0;
    for (const Axis axis : all_axes_and_parts) {
        if (axis == Axis::data) continue;  // it has the bits of its parts
        const bool wanted =
            std::ranges::find(axes, axis) != axes.end() ||
            (is_part_of_data(axis) && std::ranges::find(axes, Axis::data) != axes.end());
        if (wanted && size(axis) > 1) bits |= 1u << static_cast<unsigned>(axis);
    }
    return bits;
}

std::string MeshLayout::group_name(Axes axes) const {
    const unsigned wanted = extended(axes), data = extended({Axis::data});
    std::string name;
    const auto add = [&](Axis axis) { name += concat(name.empty() ? "" : "+", name_of(axis)); };
    const bool all_data = data != 0 && (wanted & data) == data;
    for (const Axis axis : all_axes_and_parts)
        if (axis == Axis::data
                ? all_data
                : !(is_part_of_data(axis) && all_data) && (wanted & extended({axis})) != 0)
            add(axis);
    return name;
}

std::string MeshLayout::ends_name(Axes axes) const {
    const std::string others = group_name(axes);
    return concat("pipeline ends", others.empty() ? "" : "+", others);
}

Mesh::Mesh() { groups_.push_back({0, "", open_group_of_one(world_.activity())}); }

Mesh::Mesh(const World& world, const Device& device, const MeshSizes& sizes,
           const CollectiveSettings& collectives)
    : Mesh(world, sizes, open_everyone(world, device, sizes, collectives),
           ctas_on(world, device, sizes, collectives)) {}

Mesh::Mesh(const World& world, const MeshSizes& sizes, std::unique_ptr<Communicator> everyone,
           const GroupCtas& ctas)
    : world_(world), layout_(checked_layout(world, sizes)), ctas_(ctas) {
    require_tensor_on_nodes(world, sizes);
    std::vector<std::string> places;
    for (int rank = 0; rank < world.size(); ++rank) places.push_back(layout_.place(rank));
    world.set_places(std::move(places));
    groups_.push_back(
        {layout_.extended(all_axes), layout_.group_name(all_axes), std::move(everyone)});
}

Communicator& Mesh::over(Axes axes) const {
    const unsigned wanted = layout_.extended(axes);
    for (const Group& group : groups_)
        if (group.axes == wanted) return *group.group;
    std::unique_ptr<Communicator> made =
        wanted == 0
            ? open_group_of_one(world_.activity())
            : everyone().split(
                  layout_.first_rank(axes, rank()), rank(),
                  wanted == layout_.extended({Axis::pipeline}) ? ctas_.messages : ctas_.exchange);
    assert(made->size() == size(axes) && made->rank() == at(axes));
    const std::lock_guard lock(mutex_);
    groups_.push_back({wanted, layout_.group_name(axes), std::move(made)});
    return *groups_.back().group;
}

const std::string& Mesh::name_of(const Communicator& group) const {
    return std::ranges::find(groups_, &group, [](const Group& g) { return g.group.get(); })->name;
}

Communicator& Mesh::over_ends(Axes axes) const {
    const int stages = size(Axis::pipeline), at = this->at(Axis::pipeline);
    constexpr unsigned ends = 1u << 31;
    const unsigned wanted = layout_.extended(axes) | layout_.extended({Axis::pipeline}) | ends;
    for (const Group& group : groups_)
        if (group.axes == wanted) return *group.group;
    const bool is_end = at == 0 || at == stages - 1;
    const int first = layout_.first_rank(axes, rank()) -
                      layout_.first_ranks(Axis::pipeline)[static_cast<size_t>(at)];
    std::unique_ptr<Communicator> made =
        everyone().split(is_end ? first : layout_.world() + rank(), rank(), ctas_.exchange);
    const std::lock_guard lock(mutex_);
    groups_.push_back({wanted, is_end ? layout_.ends_name(axes) : "", std::move(made)});
    return *groups_.back().group;
}

Traffic Mesh::bytes_sent() const {
    Traffic bytes;
    for (const Group& group : groups_)
        if (!group.name.empty()) bytes[group.name] += group.group->bytes_sent();
    return bytes;
}

std::vector<std::shared_ptr<Communicator>> Mesh::groups() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Communicator>> all;
    for (const Group& group : groups_) all.push_back(group.group);
    return all;
}

void Mesh::check() const {
    for (const std::shared_ptr<Communicator>& group : groups()) group->check();
}

/// A thread for each group: NCCL frees memory when it aborts a group, which may wait for the
/// kernels of other groups, and these end only when they are aborted, too.
bool Mesh::abort() const {
    struct Progress {
        std::mutex mutex;
        std::condition_variable changed;
        size_t left = 0;
    };
    const std::vector<std::shared_ptr<Communicator>> all = groups();
    const auto progress = std::make_shared<Progress>();
    progress->left = all.size();
    for (const std::shared_ptr<Communicator>& group : all)
        std::thread([group, progress] {
            group->abort();
            const std::lock_guard lock(progress->mutex);
            --progress->left;
            progress->changed.notify_all();
        }).detach();
    std::unique_lock lock(progress->mutex);
    return progress->changed.wait_for(lock, std::chrono::seconds(1),
                                      [&] { return progress->left == 0; });
}

}  // namespace train_gpt
