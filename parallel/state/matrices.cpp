#include "parallel/state/matrices.h"

#include <algorithm>
#include <cassert>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "device/copy.h"
#include "device/trace.h"

namespace train_gpt {

namespace {

// Values of different parts begin at multiples of so many elements, for vector loads.
constexpr int64_t alignment = 64;

int64_t rounded_up(int64_t n) { return (n + alignment - 1) / alignment * alignment; }

int ranks_of(const Sharding& s) { return s.size * s.tensors; }

/// How many elements the owner's memory has.
int64_t numel_of_owner(const std::vector<OwnedMatrix>& matrices, int owner) {
    int64_t end = 0;
    for (const OwnedMatrix& m : matrices)
        if (m.owner == owner) end = std::max(end, m.place + m.numel());
    return end;
}

}  // namespace

double orthogonalization_cost(int64_t rows, int64_t cols) {
    const auto m = static_cast<double>(std::min(rows, cols)),
               n = static_cast<double>(std::max(rows, cols));
    return 3 * m * m * n + m * m * m;
}

std::vector<OwnedMatrix> owned_matrices(const ParameterBuffers& buffers) {
    std::vector<OwnedMatrix> all;
    for (int i = 0; i < static_cast<int>(buffers.parameters().size()); ++i) {
        if (!buffers.is_matrix(i)) continue;
        const Parameter& p = buffers.parameters()[static_cast<size_t>(i)];
        for (const Range& rows : matrices_of(p, buffers.sharding().matrices->heads))
            all.push_back({.parameter = i, .rows = rows, .cols = p.cols()});
    }
    std::vector<size_t> order(all.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, std::greater(), [&](size_t m) {
        return orthogonalization_cost(all[m].rows.n, all[m].cols);
    });
    std::vector<double> costs(static_cast<size_t>(ranks_of(buffers.sharding())));
    for (const size_t m : order) {
        const auto least = std::ranges::min_element(costs);
        *least += orthogonalization_cost(all[m].rows.n, all[m].cols);
        all[m].owner = static_cast<int>(least - costs.begin());
    }
    // Each owner has matrices of one shape next to each other.
    std::ranges::stable_sort(order, {}, [&](size_t m) {
        return std::tuple(all[m].owner, all[m].rows.n, all[m].cols, m);
    });
    for (size_t k = 0; k < order.size(); ++k) {
        if (k == 0 || all[order[k]].owner != all[order[k - 1]].owner) continue;
        const OwnedMatrix& before = all[order[k - 1]];
        OwnedMatrix& matrix = all[order[k]];
        const bool alike = before.rows.n == matrix.rows.n && before.cols == matrix.cols;
        const int64_t end = before.place + before.numel();
        matrix.place = alike ? end : rounded_up(end);
    }
    return all;
}

Matrices::Matrices(Arena& arena, const ParameterBuffers& buffers)
    : buffers_(buffers),
      rank_(buffers.sharding().rank * buffers.sharding().tensors + buffers.sharding().tensor),
      ranks_(ranks_of(buffers.sharding())),
      matrices_(owned_matrices(buffers)) {
    const auto bytes = static_cast<int64_t>(size_of(dtype()));
    // As much memory on every rank as on the one that needs most.
    int64_t owned = 0, staged = 0;
    for (int rank = 0; rank < ranks_; ++rank)
        owned = std::max(owned, numel_of_owner(matrices_, rank));
    std::vector<int64_t> staged_by(static_cast<size_t>(ranks_));
    for (int rank = 0; rank < ranks_; ++rank)
        for (const Stretch& stretch : stretches_of(rank)) {
            const int owner = matrices_[stretch.matrix].owner;
            const int64_t n = rounded_up(stretch.range.n);
            if (rank != owner || !is_consecutive(stretch))
                staged_by[static_cast<size_t>(rank)] += n;
            if (rank != owner && !is_consecutive(stretch))
                staged_by[static_cast<size_t>(owner)] += n;
        }
    staged = *std::ranges::max_element(staged_by);
    memory_ =
        static_cast<char*>(arena.take(static_cast<size_t>(owned * bytes), Purpose::workspaces));
    auto* next =
        static_cast<char*>(arena.take(static_cast<size_t>(staged * bytes), Purpose::workspaces));
    const auto stage = [&](const Stretch& stretch) {
        return std::exchange(next, next + rounded_up(stretch.range.n) * bytes);
    };

    for (int rank = 0; rank < ranks_; ++rank)
        for (const Stretch& stretch : stretches_of(rank)) {
            const OwnedMatrix& matrix = matrices_[stretch.matrix];
            const bool is_mine = rank == rank_, is_owner = matrix.owner == rank_;
            if (!is_mine && !is_owner) continue;
            const bool in_place = is_owner && is_consecutive(stretch);
            char* const values = in_place ? place_of(stretch) : stage(stretch);
            if (is_owner && !in_place)
                copies_.push_back({stretch, values, !is_mine && !sends(rank, matrix)});
            const int64_t n = stretch.range.n;
            if (is_mine) {
                const auto pieces = buffers_.pieces_of(matrix.parameter);
                const auto piece = std::ranges::find_if(pieces, [&](const auto& p) {
                    return intersection(p.range, stretch.range).n > 0;
                });
                assert(piece != pieces.end());
                parts_.push_back({.piece = static_cast<size_t>(&*piece - buffers_.pieces().data()),
                                  .elements = {stretch.range.first - piece->range.first, n},
                                  .rows = matrix.rows.n,
                                  .cols = matrix.cols,
                                  .values = values});
            }
            if (is_mine == is_owner) continue;
            const int other = is_mine ? matrix.owner : rank;
            if (sends(rank, matrix)) (is_mine ? given_ : collected_).push_back({other, values, n});
            (is_mine ? returned_ : distributed_).push_back({other, values, n});
        }
    // In each direction, what two ranks exchange is in the order of matrices.
    for (const OwnedMatrix& matrix : matrices_) {
        if (matrix.owner != rank_) continue;
        const auto group = std::ranges::find_if(groups_, [&](const MatrixGroup& g) {
            return g.shape.rows == matrix.rows.n && g.shape.cols == matrix.cols;
        });
        if (group == groups_.end()) {
            groups_.push_back({{matrix.rows.n, matrix.cols}, 1, memory_ + matrix.place * bytes});
            continue;
        }
        ++group->count;
        // Of one shape, the matrix with the lowest place is the first.
        group->data = std::min(static_cast<char*>(group->data), memory_ + matrix.place * bytes);
    }
}

std::vector<MatrixShape> Matrices::shapes() const {
    std::vector<MatrixShape> shapes;
    for (const OwnedMatrix& m : matrices_) shapes.push_back({m.rows.n, m.cols});
    return shapes;
}

/// What a rank updates of all matrices, in their order.
std::vector<Matrices::Stretch> Matrices::stretches_of(int rank) const {
    const Sharding& s = buffers_.sharding();
    const int shard = rank / s.tensors;
    std::vector<Stretch> all;
    int parameter = -1;
    Parameter p;
    std::vector<Range> owned;
    for (size_t m = 0; m < matrices_.size(); ++m) {
        const OwnedMatrix& matrix = matrices_[m];
        if (matrix.parameter != parameter) {
            parameter = matrix.parameter;
            p = buffers_.parameters()[static_cast<size_t>(parameter)];
            p.held_by.rank = rank % s.tensors;
            owned = buffers_.owned_of(parameter, shard);
        }
        Stretch part{.matrix = m, .range = {}, .cols = matrix.cols};
        if (p.is_part() && p.split->axis == 1) {
            const std::vector<Range> columns = part_of(p, p.held_by.rank, p.held_by.ranks);
            assert(columns.size() == 1 && matrix.rows.n == p.rows());
            part.range = {0, p.held_numel()};
            part.cols = columns[0].n, part.col = columns[0].first;
        } else {
            const Range logical{matrix.rows.first * matrix.cols, matrix.numel()};
            const std::vector<HeldRun> runs = runs_in_tensor(held_runs(p), logical);
            if (runs.empty()) continue;
            assert(runs.size() == 1);
            part.range = {runs[0].held, runs[0].n};
            part.row = (runs[0].logical - logical.first) / matrix.cols;
        }
        for (const Range& of_rank : owned) {
            Stretch stretch = part;
            stretch.range = intersection(part.range, of_rank);
            stretch.first = stretch.range.first - part.range.first;
            if (stretch.range.n > 0) all.push_back(stretch);
        }
    }
    return all;
}

/// Whether the owner gets values from a rank: not if it, or another rank, gives it the same.
bool Matrices::sends(int from, const OwnedMatrix& matrix) const {
    const Sharding& s = buffers_.sharding();
    const Parameter& p = buffers_.parameters()[static_cast<size_t>(matrix.parameter)];
    const int to = matrix.owner;
    return from != to && (s.is_split() || from / s.tensors == to / s.tensors) &&
           (p.is_part() || from % s.tensors == to % s.tensors);
}

char* Matrices::place_of(const Stretch& stretch) const {
    assert(is_consecutive(stretch));
    const OwnedMatrix& matrix = matrices_[stretch.matrix];
    return memory_ + (matrix.place + stretch.row * matrix.cols + stretch.first) *
                         static_cast<int64_t>(size_of(dtype()));
}

/// A stretch of a part that has fewer columns than the matrix: the rest of a row, whole rows, and
/// the beginning of a row.
void Matrices::copy_stretch(Stream& stream, const Copy& copy, bool to_matrix) const {
    const Stretch& s = copy.stretch;
    const OwnedMatrix& matrix = matrices_[s.matrix];
    const size_t bytes = size_of(dtype());
    for (int64_t done = 0; done < s.range.n;) {
        const int64_t at = s.first + done, row = at / s.cols, col = at % s.cols,
                      left = s.range.n - done;
        const int64_t rows = col == 0 ? std::max<int64_t>(1, left / s.cols) : 1,
                      n = std::min(s.cols - col, left);
        char* const in_matrix =
            memory_ +
            static_cast<size_t>(matrix.place + (s.row + row) * matrix.cols + s.col + col) * bytes;
        char* const in_part = copy.values + static_cast<size_t>(done) * bytes;
        const size_t of_matrix = static_cast<size_t>(matrix.cols) * bytes,
                     of_part = static_cast<size_t>(s.cols) * bytes;
        copy_rows(stream, {.to = to_matrix ? in_matrix : in_part,
                           .to_stride = to_matrix ? of_matrix : of_part,
                           .from = to_matrix ? in_part : in_matrix,
                           .from_stride = to_matrix ? of_part : of_matrix,
                           .row_bytes = static_cast<size_t>(n) * bytes,
                           .rows = rows});
        done += rows * n;
    }
}

void Matrices::connect(const Mesh& mesh, Exchange& exchange) {
    if (ranks_ == 1) return;
    group_ = &group_of_matrices(mesh, buffers_.sharding());
    assert(group_->size() == ranks_ && group_->rank() == rank_);
    exchange_ = &exchange;
    slot_ = exchange.add_slots({mesh.name_of(*group_)});
}

void Matrices::run(Stream& stream, const char* name, const Transfers& sends,
                   const Transfers& receives) {
    if (!group_) return;
    exchange_->submit(stream, slot_, [&](Stream& exchange) {
        const TraceSpan span(TraceTrack::exchange, exchange, name);
        group_->all_to_all(exchange, sends, receives, dtype());
    });
    exchange_->hold(stream, slot_);
}

void Matrices::collect(Stream& stream) {
    run(stream, "collect matrices", given_, collected_);
    for (const Copy& copy : copies_)
        if (!copy.is_copy) copy_stretch(stream, copy, true);
}

void Matrices::distribute(Stream& stream) {
    for (const Copy& copy : copies_) copy_stretch(stream, copy, false);
    run(stream, "distribute matrices", distributed_, returned_);
}

int64_t Matrices::bytes_sent() const {
    int64_t n = 0;
    for (const Transfers* sends : {&given_, &distributed_})
        for (const Communicator::Transfer& t : *sends) n += t.count;
    return n * static_cast<int64_t>(size_of(dtype()));
}

Communicator& group_of_matrices(const Mesh& mesh, const Sharding& sharding) {
    return sharding.is_split() ? mesh.over({Axis::shard, Axis::context, Axis::tensor})
                               : mesh.over({Axis::data, Axis::context, Axis::tensor});
}

std::string name_of_matrix_group(const MeshLayout& mesh, const Sharding& sharding) {
    return sharding.is_split() ? mesh.group_name({Axis::shard, Axis::context, Axis::tensor})
                               : mesh.group_name({Axis::data, Axis::context, Axis::tensor});
}

}  // namespace train_gpt
