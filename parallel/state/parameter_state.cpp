#include "parallel/state/parameter_state.h"

#include <algorithm>
#include <cassert>

#include "base/random.h"
#include "device/copy.h"

namespace train_gpt {

namespace {

float* state_of(const ParameterBuffers::Piece& piece, ParameterState::State state) {
    switch (state) {
        case ParameterState::State::master:
            return piece.master;
        case ParameterState::State::moment1:
            return piece.m;
        case ParameterState::State::moment2:
            return piece.v;
        case ParameterState::State::gradient:
            break;
    }
    return piece.gradient;
}

}  // namespace

void ParameterState::initialize(uint64_t seed) {
    std::vector<float> values;
    clear_padding();
    for (int i = 0; i < static_cast<int>(buffers_.parameters().size()); ++i) {
        const Parameter& p = buffers_.parameters()[static_cast<size_t>(i)];
        const RandomStream random(seed, RandomPurpose::init, p.id, 0);
        values.assign(static_cast<size_t>(p.numel()), p.init_mean);
        if (p.init_std > 0) random.fill_normal(values.data(), p.numel(), p.init_std, p.init_mean);
        set(i, values);
        if (!buffers_.training()) continue;
        std::fill(values.begin(), values.end(), 0.0f);
        write(State::moment1, i, 0, values);
        write(State::moment2, i, 0, values);
    }
}

void ParameterState::fill_weights(Stream& stream) {
    constexpr int64_t period = 65537;  // a prime number, so that rows of a matrix differ
    for (const std::span<std::byte> weights : buffers_.whole_weights()) {
        const auto n = static_cast<int64_t>(weights.size() / size_of(buffers_.dtype()));
        std::vector<float> values(static_cast<size_t>(std::min(period, n)));
        RandomStream(0, RandomPurpose::synthetic, 0, 0)
            .fill_normal(values.data(), std::ssize(values), 0.02f);
        write_weights(reinterpret_cast<char*>(weights.data()), values);
        size_t done = values.size() * size_of(buffers_.dtype());
        for (; done < weights.size(); done *= 2)
            copy(stream, weights.data() + done, weights.data(),
                 std::min(done, weights.size() - done));
    }
}

void ParameterState::clear_padding() {
    constexpr int64_t piece_elements = 1 << 16;
    const std::vector<float> zeros(piece_elements, 0.0f);
    for (int i = 0; i < static_cast<int>(buffers_.parameters().size()); ++i) {
        const Parameter& p = buffers_.parameters()[static_cast<size_t>(i)];
        for (int64_t first = p.held_numel(); first < p.padded_numel(); first += piece_elements) {
            const auto piece = std::span(zeros).first(
                static_cast<size_t>(std::min(piece_elements, p.padded_numel() - first)));
            write_held(State::master, i, first, piece);
            write_held(State::moment1, i, first, piece);
            write_held(State::moment2, i, first, piece);
        }
    }
}

void ParameterState::set(int i, std::span<const float> values) {
    assert(static_cast<int64_t>(values.size()) ==
           buffers_.parameters()[static_cast<size_t>(i)].numel());
    write(State::master, i, 0, values);
}

void ParameterState::get(int i, std::span<float> values) const {
    if (buffers_.holds_all_weights()) read_weights(i, 0, values);
    read(State::master, i, 0, values);
}

void ParameterState::write(State which, int i, int64_t first, std::span<const float> values) {
    const Parameter& p = buffers_.parameters()[static_cast<size_t>(i)];
    if (!p.is_part()) return write_held(which, i, first, values);
    // Elements in the order of the tensor are in the order of memory.
    std::vector<float> held;
    const std::vector<HeldRun> runs = runs_in_tensor(held_runs(p), {first, std::ssize(values)});
    for (const HeldRun& run : runs) {
        const auto of_run =
            values.subspan(static_cast<size_t>(run.logical - first), static_cast<size_t>(run.n));
        held.insert(held.end(), of_run.begin(), of_run.end());
    }
    if (!held.empty()) write_held(which, i, runs.front().held, held);
}

void ParameterState::read(State which, int i, int64_t first, std::span<float> values) const {
    const Parameter& p = buffers_.parameters()[static_cast<size_t>(i)];
    if (!p.is_part()) return read_held(which, i, first, values);
    const std::vector<HeldRun> runs = runs_in_tensor(held_runs(p), {first, std::ssize(values)});
    if (runs.empty()) return;
    const auto of_run = [&](const HeldRun& run) {
        return values.subspan(static_cast<size_t>(run.logical - first), static_cast<size_t>(run.n));
    };
    std::vector<float> held;
    for (const HeldRun& run : runs) {
        const auto unchanged = of_run(run);
        held.insert(held.end(), unchanged.begin(), unchanged.end());
    }
    read_held(which, i, runs.front().held, held);
    auto next = held.cbegin();
    for (const HeldRun& run : runs) {
        std::copy_n(next, run.n, of_run(run).begin());
        next += run.n;
    }
}

void ParameterState::write_held(State which, int i, int64_t first, std::span<const float> values) {
    if (which == State::master && buffers_.holds_all_weights())
        write_weights(buffers_.weight_address(i, first), values);
    for (const ParameterBuffers::Piece& piece : buffers_.pieces_of(i)) {
        const Range part = intersection(piece.range, {first, std::ssize(values)});
        if (part.n == 0) continue;
        const int64_t at = part.first - piece.range.first;
        const std::span<const float> of_part =
            values.subspan(static_cast<size_t>(part.first - first), static_cast<size_t>(part.n));
        copy_now(buffers_.device(), state_of(piece, which) + at, of_part.data(),
                 of_part.size_bytes());
        if (which == State::master && piece.weights && !buffers_.holds_all_weights())
            write_weights(reinterpret_cast<char*>(piece.weights + at), of_part);
    }
}

void ParameterState::write_weights(char* to, std::span<const float> values) {
    if (buffers_.dtype() == DType::fp32) {
        copy_now(buffers_.device(), to, values.data(), values.size_bytes());
        return;
    }
    constexpr size_t piece_elements = 1 << 20;
    std::vector<bf16> rounded(std::min(piece_elements, values.size()));
    for (size_t done = 0; done < values.size(); done += rounded.size()) {
        const size_t n = std::min(rounded.size(), values.size() - done);
#pragma omp parallel for schedule(static)
        for (size_t k = 0; k < n; ++k) rounded[k] = bf16(values[done + k]);
        copy_now(buffers_.device(), to + done * sizeof(bf16), rounded.data(), n * sizeof(bf16));
    }
}

void ParameterState::read_held(State which, int i, int64_t first, std::span<float> values) const {
    for (const ParameterBuffers::Piece& piece : buffers_.pieces_of(i)) {
        const Range part = intersection(piece.range, {first, std::ssize(values)});
        if (part.n == 0) continue;
        copy_now(buffers_.device(), values.data() + (part.first - first),
                 state_of(piece, which) + (part.first - piece.range.first),
                 static_cast<size_t>(part.n) * sizeof(float));
    }
}

void ParameterState::read_weights(int i, int64_t first, std::span<float> values) const {
    assert(buffers_.holds_all_weights());
    const char* const from = buffers_.weight_address(i, first);
    if (buffers_.dtype() == DType::fp32) {
        copy_now(buffers_.device(), values.data(), from, values.size_bytes());
        return;
    }
    std::vector<bf16> rounded(values.size());
    copy_now(buffers_.device(), rounded.data(), from, rounded.size() * sizeof(bf16));
    std::transform(rounded.begin(), rounded.end(), values.begin(),
                   [](bf16 v) { return to_float(v); });
}

std::span<const float> ParameterState::host_view(const ParameterBuffers::Piece& piece, State which,
                                                 std::vector<float>& copied) const {
    const size_t n = static_cast<size_t>(piece.range.n);
    const float* const from = state_of(piece, which);
    if (!buffers_.device().is_cuda()) return {from, n};
    copied.resize(n);
    copy_now(buffers_.device(), copied.data(), from, n * sizeof(float));
    return copied;
}

}  // namespace train_gpt
