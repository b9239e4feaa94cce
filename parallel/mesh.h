// The axes along which a run is parallel, and the groups of ranks along them: every rank has a place
// on each axis, and exchanges data with the ranks that differ from it on some axes alone.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "device/device.h"
#include "parallel/communicator.h"
#include "parallel/world.h"

namespace train_gpt {

/// rank = ((pipeline · size(data) + data) · size(context) + context) · size(tensor) + tensor
/// data = replica · size(shard) + shard
/// Ranks that differ on the tensor axis alone are the nearest to each other. What ZeRO splits is
/// split over shard × context, and the same on all replicas. A set of axes has `data` or its parts.
enum class Axis : uint8_t { pipeline, data, replica, shard, context, tensor };
using Axes = std::initializer_list<Axis>;
const char* name_of(Axis axis);

/// The sizes that a configuration gives; data is what they leave of the ranks.
struct MeshSizes {
    int pipeline = 1, context = 1, tensor = 1;
    int shard_ranks = 0;  // the size of the shard axis; 0: of all data-parallel ranks
    bool allow_tensor_across_nodes = false;
};

/// The arithmetic of a mesh, for a plan of any number of ranks.
class MeshLayout {
  public:
    /// Without sizes, all ranks are data-parallel. Throws Error for sizes that do not divide the
    /// world, which names the key and the nearest value that does.
    MeshLayout(int world = 1, const MeshSizes& sizes = {});  // NOLINT(google-explicit-constructor)

    int world() const { return world_; }
    int size(Axis axis) const { return extents_[static_cast<size_t>(axis)].size; }
    int at(Axis axis, int rank) const {
        const Extent& extent = extents_[static_cast<size_t>(axis)];
        return rank / extent.stride % extent.size;
    }
    /// The group over several axes that a rank belongs to: its size, this rank's index in it (in the
    /// order of ranks), and its first rank, which identifies the group.
    int size(Axes axes) const;
    int at(Axes axes, int rank) const;
    /// The axes with more than one rank, a bit for each; data as its parts.
    unsigned extended(Axes axes) const;
    int first_rank(Axes axes, int rank) const;

    /// What a group over several axes is called: "data", "shard", "data+tensor"; replica and shard are
    /// "data" where they are all of it. Empty for groups of one.
    std::string group_name(Axes axes) const;
    std::string ends_name(Axes axes) const;  // of Mesh::over_ends()
    /// The first rank of each place on an axis.
    std::vector<int> first_ranks(Axis axis) const;

    /// A rank's place where several axes have more than one rank, or the pipeline has, as "data 9,
    /// tensor 1"; else empty.
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
    /// Of one rank.
    Mesh();
    /// All ranks call it. Throws SharedError where the ranks' sizes differ, do not fit the world, or
    /// put tensor-parallel ranks on different nodes without leave.
    Mesh(const World& world, const MeshSizes& sizes, std::unique_ptr<Communicator> everyone);
    Mesh(const Mesh&) = delete;
    Mesh& operator=(const Mesh&) = delete;

    const World& world() const { return world_; }
    const MeshLayout& layout() const { return layout_; }
    int rank() const { return world_.rank(); }
    int size(Axis axis) const { return layout_.size(axis); }
    int at(Axis axis) const { return layout_.at(axis, rank()); }
    int size(Axes axes) const { return layout_.size(axes); }
    int at(Axes axes) const { return layout_.at(axes, rank()); }

    /// The ranks that differ from this one on these axes alone, in the order of ranks. The first call
    /// for a set of axes makes the group: all ranks make such calls in the same order, before memory
    /// is planned, since NCCL takes some for each group.
    Communicator& over(Axes axes) const;
    Communicator& along(Axis axis) const { return over({axis}); }
    /// The same over the pipeline and these axes, but without the pipeline's places between the first
    /// and the last; their ranks have a group of their own each.
    Communicator& over_ends(Axes axes) const;
    /// All ranks of the run.
    Communicator& everyone() const { return *groups_.front().group; }
    /// MeshLayout::group_name of one of these groups.
    const std::string& name_of(const Communicator& group) const;

    /// Bytes that this rank has sent so far, by group (MeshLayout::group_name).
    std::map<std::string, int64_t> bytes_sent() const;

    // These two may be called from any thread: Communicator's, of all groups.
    void check() const;
    void abort() const;

  private:
    struct Group {
        unsigned axes;  // those with more than one rank, a bit for each
        std::string name;
        std::unique_ptr<Communicator> group;
    };
    std::vector<Communicator*> groups() const;

    World world_;
    MeshLayout layout_;
    mutable std::mutex mutex_;           // of groups_
    mutable std::vector<Group> groups_;  // the first one: everyone
};

}  // namespace train_gpt
