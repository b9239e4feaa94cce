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
constexpr int64_t matrix_alignment = 64;

int ranks_of(const Sharding& s) { return s.size * s.tensors; }

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
        matrix.place = alike ? end : rounded_up(end, matrix_alignment);
    }
    return all;
}

Matrices::Matrices(Arena& arena, const ParameterBuffers& buffers)
    : buffers_(buffers),
      rank_(buffers.sharding().rank * buffers.sharding().tensors + buffers.sharding().tensor),
      ranks_(ranks_of(buffers.sharding())),
      matrices_(owned_matrices(buffers)),
      sent_(static_cast<size_t>(ranks_)) {
    const std::vector<Stretch> stretches = all_stretches();
    const auto bytes = static_cast<int64_t>(size_of(dtype()));
    allocate(arena, stretches);
    auto* next = staging_;
    for (const Stretch& stretch : stretches) {
        const OwnedMatrix& matrix = matrices_[stretch.matrix];
        const bool is_mine = stretch.rank == rank_, is_owner = matrix.owner == rank_;
        if (!is_mine && !is_owner) continue;
        const int64_t n = stretch.range.n;
        const bool in_place = is_owner && is_consecutive(stretch);
        char* const values =
            in_place ? place_of(stretch)
                     : std::exchange(next, next + rounded_up(n, matrix_alignment) * bytes);
        if (is_owner && !in_place)
            copies_.push_back({stretch, values, !is_mine && !is_sent(stretch)});
        if (is_mine) add_part(stretch, values);
        if (is_mine == is_owner) continue;
        const int other = is_mine ? matrix.owner : stretch.rank;
        if (is_sent(stretch)) (is_mine ? given_ : collected_).push_back({other, values, n});
        (is_mine ? returned_ : distributed_).push_back({other, values, n});
    }
    for (const OwnedMatrix& matrix : matrices_) {
        if (matrix.owner != rank_) continue;
        const auto group = std::ranges::find_if(groups_, [&](const MatrixGroup& g) {
            return g.shape.rows == matrix.rows.n && g.shape.cols == matrix.cols;
        });
        if (group != groups_.end())
            ++group->count;
        else
            groups_.push_back({{matrix.rows.n, matrix.cols}, 1, memory_ + matrix.place * bytes});
    }
}

/// As much memory on every rank as on the one that needs most. Counts what each rank sends.
void Matrices::allocate(Arena& arena, const std::vector<Stretch>& stretches) {
    const auto bytes = static_cast<int64_t>(size_of(dtype()));
    std::vector<int64_t> owned(sent_.size()), staged(sent_.size());
    for (const OwnedMatrix& m : matrices_) {
        int64_t& end = owned[static_cast<size_t>(m.owner)];
        end = std::max(end, m.place + m.numel());
    }
    for (const Stretch& stretch : stretches) {
        const auto rank = static_cast<size_t>(stretch.rank),
                   owner = static_cast<size_t>(matrices_[stretch.matrix].owner);
        const int64_t n = rounded_up(stretch.range.n, matrix_alignment);
        if (rank != owner || !is_consecutive(stretch)) staged[rank] += n;
        if (rank == owner) continue;
        if (!is_consecutive(stretch)) staged[owner] += n;
        if (is_sent(stretch)) sent_[rank] += stretch.range.n * bytes;
        sent_[owner] += stretch.range.n * bytes;
    }
    const auto take = [&](const std::vector<int64_t>& elements) {
        return static_cast<char*>(arena.take(
            static_cast<size_t>(*std::ranges::max_element(elements) * bytes), Purpose::workspaces));
    };
    memory_ = take(owned);
    staging_ = take(staged);
}

void Matrices::add_part(const Stretch& stretch, char* values) {
    const OwnedMatrix& matrix = matrices_[stretch.matrix];
    const auto pieces = buffers_.pieces_of(matrix.parameter);
    const auto piece = std::ranges::find_if(pieces, [&](const ParameterBuffers::Piece& p) {
        return intersection(p.range, stretch.range).n > 0;
    });
    assert(piece != pieces.end());
    parts_.push_back({.piece = static_cast<size_t>(&*piece - buffers_.pieces().data()),
                      .elements = {stretch.range.first - piece->range.first, stretch.range.n},
                      .rows = matrix.rows.n,
                      .cols = matrix.cols,
                      .values = values});
}

std::vector<MatrixShape> Matrices::shapes() const {
    std::vector<MatrixShape> shapes;
    for (const OwnedMatrix& m : matrices_) shapes.push_back({m.rows.n, m.cols});
    return shapes;
}

/// What ranks with a place on the tensor axis hold of a matrix; nothing if that has no elements.
Matrices::Stretch Matrices::held_by(int tensor, size_t m) const {
    const OwnedMatrix& matrix = matrices_[m];
    Parameter p = buffers_.parameters()[static_cast<size_t>(matrix.parameter)];
    p.held_by.rank = tensor;
    Stretch part{.matrix = m, .range = {}, .cols = matrix.cols};
    if (p.is_part() && p.split->axis == 1) {
        const std::vector<Range> columns = part_of(p, p.held_by.rank, p.held_by.ranks);
        assert(columns.size() == 1 && matrix.rows.n == p.rows());
        part.range = {0, p.held_numel()};
        part.cols = columns[0].n, part.col = columns[0].first;
        return part;
    }
    const Range logical{matrix.rows.first * matrix.cols, matrix.numel()};
    const std::vector<HeldRun> runs = runs_in_tensor(held_runs(p), logical);
    if (runs.empty()) return part;
    assert(runs.size() == 1);
    part.range = {runs[0].held, runs[0].n};
    part.row = (runs[0].logical - logical.first) / matrix.cols;
    return part;
}

/// What each rank updates of each matrix: by matrix, and of one matrix in ascending order. Two
/// ranks send each other their stretches in this order.
std::vector<Matrices::Stretch> Matrices::all_stretches() const {
    const Sharding& s = buffers_.sharding();
    const std::vector<Bucket>& buckets = buffers_.layout().buckets();
    std::vector<Stretch> all;
    for (size_t m = 0; m < matrices_.size(); ++m)
        for (int tensor = 0; tensor < s.tensors; ++tensor) {
            const Stretch part = held_by(tensor, m);
            const auto add = [&](int shard, const Range& range) {
                Stretch stretch = part;
                stretch.rank = shard * s.tensors + tensor;
                stretch.range = intersection(part.range, range);
                stretch.first = stretch.range.first - part.range.first;
                if (stretch.range.n > 0) all.push_back(stretch);
            };
            if (!s.is_split()) {
                for (int shard = 0; shard < s.size; ++shard) add(shard, part.range);
                continue;
            }
            const int64_t offset = buffers_.layout().offset(matrices_[m].parameter),
                          begin = offset + part.range.first, end = offset + part.range.end();
            auto bucket = std::ranges::partition_point(
                buckets, [&](const Bucket& b) { return b.range.end() <= begin; });
            for (; part.range.n > 0 && bucket != buckets.end() && bucket->range.first < end;
                 ++bucket) {
                const int64_t first = std::max<int64_t>(0, begin - bucket->range.first),
                              last = std::min(end - bucket->range.first, bucket->range.n) - 1;
                for (int64_t shard = first / bucket->shard; shard <= last / bucket->shard; ++shard)
                    add(static_cast<int>(shard),
                        {bucket->range.first + shard * bucket->shard - offset, bucket->shard});
            }
        }
    return all;
}

/// Whether the owner gets values from the rank of a stretch: not if it, or another rank, gives it
/// the same.
bool Matrices::is_sent(const Stretch& stretch) const {
    const Sharding& s = buffers_.sharding();
    const OwnedMatrix& matrix = matrices_[stretch.matrix];
    const Parameter& p = buffers_.parameters()[static_cast<size_t>(matrix.parameter)];
    const int from = stretch.rank, to = matrix.owner;
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

int64_t Matrices::most_bytes_sent() const { return *std::ranges::max_element(sent_); }

Communicator& group_of_matrices(const Mesh& mesh, const Sharding& sharding) {
    return sharding.is_split() ? mesh.over({Axis::shard, Axis::context, Axis::tensor})
                               : mesh.over({Axis::data, Axis::context, Axis::tensor});
}

std::string name_of_matrix_group(const MeshLayout& mesh, const Sharding& sharding) {
    return sharding.is_split() ? mesh.group_name({Axis::shard, Axis::context, Axis::tensor})
                               : mesh.group_name({Axis::data, Axis::context, Axis::tensor});
}

}  // namespace train_gpt
