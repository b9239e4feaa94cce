#include "training/muon.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "device/trace.h"

namespace train_gpt {

namespace {

float scale_of(MuonScale kind, int64_t rows, int64_t cols) {
    const auto m = static_cast<double>(rows), n = static_cast<double>(cols);
    return static_cast<float>(kind == MuonScale::rms ? 0.2 * std::sqrt(std::max(m, n))
                                                     : std::sqrt(std::max(1.0, m / n)));
}

}  // namespace

Muon::Muon(ParameterStore& parameters, StateLeases& leases, Arena& arena,
           const MuonOptions& options)
    : parameters_(parameters),
      leases_(leases),
      options_(options),
      segments_(parameters.layout().buckets().size()) {
    // For all shapes, so that every rank takes as much.
    const Matrices& matrices = *parameters.matrices;
    workspace_ = arena.take(
        newton_schulz_workspace_bytes(arena.device(), matrices.dtype(), matrices.shapes()),
        Purpose::workspaces);
    if (!arena.is_counting()) make_segments();
}

void Muon::make_segments() {
    const Grids* const grids = parameters_.grids();
    const auto bytes = static_cast<int64_t>(size_of(parameters_.matrices->dtype()));
    const size_t m = parameters_.slot_of("m");
    const auto momentum_bytes = static_cast<int64_t>(size_of(parameters_.slots()[m].dtype));
    for (const Matrices::Part& part : parameters_.matrices->parts()) {
        const ParameterStore::Piece piece = leases_.leased(parameters_.pieces()[part.piece]);
        const bool decay = parameters_.parameters()[static_cast<size_t>(piece.parameter)].decay;
        for (int64_t at = part.elements.first; at < part.elements.end();) {
            int64_t n = part.elements.end() - at;
            // Each norm_block of a tensor has a grid of its own.
            if (const int64_t in_block = at % norm_block; grids && in_block > 0)
                n = std::min(n, norm_block - in_block);
            MuonSegment segment{
                .weights = piece.weights ? piece.weights + at : nullptr,
                .master = piece.master + at,
                .momentum = piece.slots[m] + at * momentum_bytes,
                .gradient = piece.gradient + at,
                .values = static_cast<char*>(part.values) + (at - part.elements.first) * bytes,
                .n = n,
                .scale = scale_of(options_.scale, part.rows, part.cols),
                .decay = decay};
            if (grids) {
                segment.sums = reinterpret_cast<const int32_t*>(segment.gradient);
                segment.exponents = grids->exponents_of(piece) + at / norm_block;
            }
            segments_[static_cast<size_t>(piece.bucket)].push_back(segment);
            at += n;
        }
    }
}

size_t Muon::scratch_bytes(const Stream& stream) const {
    const Matrices& matrices = *parameters_.matrices;
    return newton_schulz_scratch_bytes(stream, matrices.dtype(), matrices.shapes());
}

void Muon::warm_up(Stream& stream) {
    const DType dtype = parameters_.matrices->dtype();
    for (const MatrixGroup& group : parameters_.matrices->groups()) {
        const int64_t numel = group.count * group.shape.rows * group.shape.cols;
        parameters_.state.fill(
            stream,
            {static_cast<std::byte*>(group.data), static_cast<size_t>(numel) * size_of(dtype)},
            dtype);
    }
    orthogonalize(stream);
}

void Muon::find_directions(Stream& stream, const MuonStep& args) {
    {
        const TraceSpan span(TraceTrack::device, stream, "momentum");
        for (size_t b = 0; b < segments_.size(); ++b) {
            leases_.acquire(stream, StateLeases::Part::momentum, b);
            muon_momentum(stream, segments_[b], args);
            leases_.release(stream, StateLeases::Part::momentum, b);
        }
    }
    parameters_.matrices->collect(stream);
    orthogonalize(stream);
    parameters_.matrices->distribute(stream);
}

void Muon::orthogonalize(Stream& stream) {
    const TraceSpan span(TraceTrack::device, stream, "orthogonalize");
    newton_schulz(stream, {.groups = parameters_.matrices->groups(),
                           .dtype = parameters_.matrices->dtype(),
                           .coefficients = options_.coefficients,
                           .workspace = workspace_});
}

void Muon::update(Stream& stream, size_t bucket, const MuonStep& args) {
    muon_update(stream, segments_[bucket], args);
}

}  // namespace train_gpt
