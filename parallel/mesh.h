// The axes along which a run is parallel, and the groups of ranks along these axes. Every rank has
// a place on each axis. A rank exchanges data with groups of ranks: the ranks of a group differ on
// some axes, and have the same places on all others.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "device/device.h"
#include "parallel/communicator.h"
#include "parallel/mesh_sizes.h"
#include "parallel/size_problem.h"
#include "parallel/world.h"

namespace train_gpt {

/// A rank's number follows from its places on the axes:
///
///   rank   ((pipeline · size(data) + data) · size(context) + context) · size(tensor) + tensor
///   data   replica · size(shard) + shard
///
/// Ranks that differ only on the tensor axis have consecutive numbers. ZeRO splits state over
/// shard × context; all replicas hold the same. A set of axes names `data`, or its parts `replica`
/// and `shard`, but not both.
enum class Axis : uint8_t { pipeline, data, replica, shard, context, tensor };
using Axes = std::initializer_list<Axis>;
const char* name_of(Axis axis);
/// The axes of a rank's number, from the outermost one on.
inline constexpr Axes all_axes = {Axis::pipeline, Axis::data, Axis::context, Axis::tensor};
/// The same axes, and after `data` its parts.
inline constexpr Axes all_axes_and_parts = {Axis::pipeline, Axis::data,    Axis::replica,
                                            Axis::shard,    Axis::context, Axis::tensor};
constexpr bool is_part_of_data(Axis axis) { return axis == Axis::replica || axis == Axis::shard; }

/// The first size that does not divide the ranks which the sizes before it leave; nothing if all
/// do.
std::optional<SizeProblem> mesh_problem(int world, const MeshSizes& sizes);

/// Bytes by group of ranks (MeshLayout::group_name).
using Traffic = std::map<std::string, int64_t>;

/// The arithmetic of a mesh. It needs no running ranks, so that a plan can be for any number of
/// ranks.
class MeshLayout {
  public:
    /// Without sizes, all ranks are data-parallel. Throws Error if the sizes do not divide the
    /// world. The message names the key and the nearest value that does.
    MeshLayout(int world = 1, const MeshSizes& sizes = {});  // NOLINT(google-explicit-constructor)

    int world() const { return world_; }
    int size(Axis axis) const { return extents_[static_cast<size_t>(axis)].size; }
    /// By how much the numbers of neighbours along an axis differ.
    int stride(Axis axis) const { return extents_[static_cast<size_t>(axis)].stride; }
    int at(Axis axis, int rank) const { return rank / stride(axis) % size(axis); }
    /// The number of ranks in a group over several axes.
    int size(Axes axes) const;
    /// A rank's index in its group over several axes, in the order of ranks.
    int at(Axes axes, int rank) const;
    /// The axes with more than one rank, a bit for each. `data` sets the bits of its parts.
    unsigned extended(Axes axes) const;
    /// The first rank of a rank's group over several axes. It identifies the group.
    int first_rank(Axes axes, int rank) const;

    /// The name of a group over several axes: "data", "shard", "data+tensor". Replica and shard are
    /// called "data" if all data-parallel ranks are in the group. Empty for groups of one.
    std::string group_name(Axes axes) const;
    std::string ends_name(Axes axes) const;  // of Mesh::over_ends()
    /// The first rank of each place on an axis.
    std::vector<int> first_ranks(Axis axis) const;

    /// A rank's place as text: "data 9, tensor 1". Empty if there is no pipeline and only one axis
    /// has more than one rank: then the rank's number says as much.
    std::string place(int rank) const;

  private:
    struct Extent {
        int size = 1, stride = 1;
    };
    int world_;
    Extent extents_[6];  // by Axis
};

/// The mesh of this run, with this rank's place in it and a communicator for each group.
class Mesh {
  public:
    /// A mesh of one rank.
    Mesh();
    /// All ranks call it. Opens the group of all ranks for buffers on `device`, and gives the
    /// groups of a GPU their shares of its multiprocessors (group_ctas.h). Throws SharedError if
    /// ranks pass different sizes, if the sizes do not divide the world, or if tensor-parallel
    /// ranks are on different nodes and the sizes do not allow that.
    Mesh(const World& world, const Device& device, const MeshSizes& sizes,
         const CollectiveSettings& collectives = {});
    /// A mesh whose group of all ranks, `everyone`, is open. `ctas`: the shares of the other
    /// groups. All ranks call it, and it throws as the constructor above.
    Mesh(const World& world, const MeshSizes& sizes, std::unique_ptr<Communicator> everyone,
         const GroupCtas& ctas = {});
    Mesh(const Mesh&) = delete;
    Mesh& operator=(const Mesh&) = delete;

    const World& world() const { return world_; }
    const MeshLayout& layout() const { return layout_; }
    int rank() const { return world_.rank(); }
    int size(Axis axis) const { return layout_.size(axis); }
    int at(Axis axis) const { return layout_.at(axis, rank()); }
    int size(Axes axes) const { return layout_.size(axes); }
    int at(Axes axes) const { return layout_.at(axes, rank()); }

    /// The group of the ranks that have this rank's places on all axes but these, in the order of
    /// ranks. The first call for a set of axes makes the group. All ranks make the first calls in
    /// the same order, and before memory is planned, because NCCL takes memory for each group.
    Communicator& over(Axes axes) const;
    Communicator& along(Axis axis) const { return over({axis}); }
    /// The group over the pipeline's first and last place and these axes. A rank in the middle of
    /// the pipeline gets a group of itself alone.
    Communicator& over_ends(Axes axes) const;
    /// All ranks of the run.
    Communicator& everyone() const { return *groups_.front().group; }
    /// The name of a group of this mesh: MeshLayout::group_name() or ends_name().
    const std::string& name_of(const Communicator& group) const;

    /// Bytes that this rank has sent so far, by name_of() the group. Groups of one are left out.
    Traffic bytes_sent() const;

    // Communicator::check() and abort() of every group. They may be called from any thread.
    void check() const;
    /// Returns false if a group's abort has not returned within a second. It may never return, and
    /// then nobody may wait for this process's work any more.
    bool abort() const;

  private:
    struct Group {
        unsigned axes;  // the axes with more than one rank, a bit for each
        std::string name;
        std::shared_ptr<Communicator> group;
    };
    std::vector<std::shared_ptr<Communicator>> groups() const;

    World world_;
    MeshLayout layout_;
    GroupCtas ctas_;
    mutable std::mutex mutex_;           // guards groups_
    mutable std::vector<Group> groups_;  // the first one: everyone
};

}  // namespace train_gpt
