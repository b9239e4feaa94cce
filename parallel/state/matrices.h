// Whole matrices for an optimizer that cannot update elements one by one (Muon). ZeRO and tensor
// parallelism leave the state of a matrix in parts on several ranks. One of these ranks owns the
// matrix: once in a step it gets all parts, and hands the results back.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/memory.h"
#include "kernels/muon/newton_schulz.h"
#include "parallel/communicator.h"
#include "parallel/mesh.h"
#include "parallel/state/exchange.h"
#include "parallel/state/parameter_buffers.h"

namespace train_gpt {

/// A matrix, and who owns it. The ranks that share a pipeline stage's state own its matrices, and
/// are numbered by (shard, tensor). The matrices with the largest cost of an orthogonalization are
/// dealt first, each to the rank that has least to do.
struct OwnedMatrix {
    int parameter = 0;
    Range rows;  // of the parameter
    int64_t cols = 0;
    int owner = 0;
    int64_t place = 0;  // of the first element in the owner's memory

    int64_t numel() const { return rows.n * cols; }
};
std::vector<OwnedMatrix> owned_matrices(const ParameterBuffers& buffers);

/// FLOPs of one step of the Newton–Schulz iteration for a matrix, up to a factor: with m ≤ n,
/// 3·m²·n + m³ (newton_schulz.h).
double orthogonalization_cost(int64_t rows, int64_t cols);

/// In a step, every rank writes values for the elements that it updates to parts(), of the dtype of
/// Sharding::matrices. After collect(), each owner has its matrices whole in groups(), and writes
/// the results over them. After distribute(), parts() have the results.
class Matrices {
  public:
    /// `buffers` must live longer than the object. Takes as much memory on every rank of a stage.
    Matrices(Arena& arena, const ParameterBuffers& buffers);
    /// All ranks call it; `mesh` and `exchange` must live longer than the object.
    void connect(const Mesh& mesh, Exchange& exchange);

    /// Consecutive elements of one matrix that this rank updates.
    struct Part {
        size_t piece = 0;            // of ParameterBuffers::pieces()
        Range elements;              // of the piece
        int64_t rows = 0, cols = 0;  // of the matrix
        void* values = nullptr;
    };
    const std::vector<Part>& parts() const { return parts_; }
    /// The matrices that this rank owns.
    const std::vector<MatrixGroup>& groups() const { return groups_; }
    /// All shapes of matrices of the stage.
    std::vector<MatrixShape> shapes() const;
    DType dtype() const { return buffers_.sharding().matrices->dtype; }

    void collect(Stream& stream);
    void distribute(Stream& stream);
    /// What this rank sends in a step, and the most that any of the ranks sends.
    int64_t bytes_sent() const { return sent_[static_cast<size_t>(rank_)]; }
    int64_t most_bytes_sent() const;

  private:
    /// Elements of a matrix that are consecutive in a rank's memory: number `first` … of its part,
    /// which has `cols` columns and whose first element is in row `row`, column `col`.
    struct Stretch {
        int rank = 0;
        size_t matrix = 0;
        Range range;  // of the parameter, in memory
        int64_t first = 0, cols = 0, row = 0, col = 0;
    };
    /// Elements between a place in the owner's matrix, where they are not consecutive, and memory
    /// where they are.
    struct Copy {
        Stretch stretch;
        char* values = nullptr;
        bool is_copy = false;  // another rank gives the same elements
    };

    std::vector<Stretch> all_stretches() const;
    Stretch held_by(int tensor, size_t matrix) const;
    void allocate(Arena& arena, const std::vector<Stretch>& stretches);
    void add_part(const Stretch& stretch, char* values);
    bool is_sent(const Stretch& stretch) const;
    bool is_consecutive(const Stretch& stretch) const {
        return stretch.cols == matrices_[stretch.matrix].cols;
    }
    char* place_of(const Stretch& stretch) const;
    void copy_stretch(Stream& stream, const Copy& copy, bool to_matrix) const;
    void run(Stream& stream, const char* name, const std::vector<Communicator::Transfer>& sends,
             const std::vector<Communicator::Transfer>& receives);

    const ParameterBuffers& buffers_;
    int rank_, ranks_;
    std::vector<OwnedMatrix> matrices_;
    std::vector<Part> parts_;
    std::vector<MatrixGroup> groups_;
    std::vector<int64_t> sent_;  // bytes in a step, of each rank
    char* memory_ = nullptr;     // of the matrices that this rank owns
    char* staging_ = nullptr;    // of parts that are not in it, or not consecutive there
    std::vector<Copy> copies_;   // of matrices that it owns
    using Transfers = std::vector<Communicator::Transfer>;
    Transfers given_;        // parts that this rank sends to owners before the update
    Transfers collected_;    // parts that this rank receives as an owner
    Transfers returned_;     // results that this rank receives after the update
    Transfers distributed_;  // results that this rank sends as an owner
    Communicator* group_ = nullptr;
    Exchange* exchange_ = nullptr;
    int slot_ = 0;
};

/// The group of the ranks that share matrices, and its name (MeshLayout::group_name).
Communicator& group_of_matrices(const Mesh& mesh, const Sharding& sharding);
std::string name_of_matrix_group(const MeshLayout& mesh, const Sharding& sharding);

}  // namespace train_gpt
