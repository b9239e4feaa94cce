#include "parallel/state/parameter_state.h"

#include <algorithm>
#include <cassert>
#include <string>

#include "base/random.h"
#include "device/copy.h"

namespace train_gpt {

ParameterState::Place ParameterState::place_of(const ParameterBuffers::Piece& piece,
                                               std::string_view state) const {
    if (state == master) return {reinterpret_cast<char*>(piece.master)};
    if (state == gradient) return {reinterpret_cast<char*>(piece.gradient)};
    const size_t place = buffers_.slot_of(state);
    const OptimizerSlot& slot = buffers_.slots()[place];
    return {
        piece.slots[place], slot.dtype, slot.coding,
        slot.coding == Coding::none ? nullptr : reinterpret_cast<float*>(piece.slots[place + 1])};
}

std::vector<OptimizerSlot> ParameterState::saved() const {
    std::vector<OptimizerSlot> all{{std::string(master)}};
    all.insert(all.end(), buffers_.slots().begin(), buffers_.slots().end());
    return all;
}

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
        values.assign(static_cast<size_t>(p.padded_numel()), 0.0f);
        for (const OptimizerSlot& slot : buffers_.slots())
            if (slot.is_of_elements()) write_held(slot.name, i, 0, values);
    }
}

void ParameterState::fill_weights(Stream& stream) {
    for (const std::span<std::byte> weights : buffers_.whole_weights())
        fill(stream, weights, buffers_.dtype());
}

void ParameterState::fill(Stream& stream, std::span<std::byte> memory, DType dtype) {
    constexpr int64_t period = 65537;  // a prime number, so that rows of a matrix differ
    const auto n = static_cast<int64_t>(memory.size() / size_of(dtype));
    std::vector<float> values(static_cast<size_t>(std::min(period, n)));
    RandomStream(0, RandomPurpose::synthetic, 0, 0)
        .fill_normal(values.data(), std::ssize(values), 0.02f);
    write_values({reinterpret_cast<char*>(memory.data()), dtype}, values);
    size_t done = values.size() * size_of(dtype);
    for (; done < memory.size(); done *= 2)
        copy(stream, memory.data() + done, memory.data(), std::min(done, memory.size() - done));
}

void ParameterState::clear_padding() {
    constexpr int64_t piece_elements = 1 << 16;
    const std::vector<float> zeros(piece_elements, 0.0f);
    for (int i = 0; i < static_cast<int>(buffers_.parameters().size()); ++i) {
        const Parameter& p = buffers_.parameters()[static_cast<size_t>(i)];
        for (int64_t first = p.held_numel(); first < p.padded_numel(); first += piece_elements) {
            const auto piece = std::span(zeros).first(
                static_cast<size_t>(std::min(piece_elements, p.padded_numel() - first)));
            for (const OptimizerSlot& state : saved())
                if (state.is_of_elements() && state.coding == Coding::none)
                    write_held(state.name, i, first, piece);
        }
    }
}

void ParameterState::set(int i, std::span<const float> values) {
    assert(static_cast<int64_t>(values.size()) ==
           buffers_.parameters()[static_cast<size_t>(i)].numel());
    write(master, i, 0, values);
}

void ParameterState::get(int i, std::span<float> values) const {
    if (buffers_.holds_all_weights()) read_weights(i, 0, values);
    read(master, i, 0, values);
}

void ParameterState::write(std::string_view which, int i, int64_t first,
                           std::span<const float> values) {
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

void ParameterState::read(std::string_view which, int i, int64_t first,
                          std::span<float> values) const {
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

void ParameterState::write_held(std::string_view which, int i, int64_t first,
                                std::span<const float> values) {
    if (which == master && buffers_.holds_all_weights())
        write_values({buffers_.weight_address(i, first), buffers_.dtype()}, values);
    for (const ParameterBuffers::Piece& piece : buffers_.pieces_of(i)) {
        const Range part = intersection(piece.range, {first, std::ssize(values)});
        if (part.n == 0 || !place_of(piece, which).data) continue;
        const int64_t at = part.first - piece.range.first;
        const std::span<const float> of_part =
            values.subspan(static_cast<size_t>(part.first - first), static_cast<size_t>(part.n));
        if (place_of(piece, which).scales) {
            write_codes(place_of(piece, which), piece.range.n, at, of_part);
            continue;
        }
        write_values(place_of(piece, which).from(at), of_part);
        if (which == master && piece.weights && !buffers_.holds_all_weights())
            write_values({reinterpret_cast<char*>(piece.weights + at), DType::bf16}, of_part);
    }
}

void ParameterState::write_values(const Place& to, std::span<const float> values) {
    if (to.dtype == DType::fp32) {
        copy_now(buffers_.device(), to.data, values.data(), values.size_bytes());
        return;
    }
    assert(to.dtype == DType::bf16);
    constexpr size_t piece_elements = 1 << 20;
    std::vector<bf16> rounded(std::min(piece_elements, values.size()));
    for (size_t done = 0; done < values.size(); done += rounded.size()) {
        const size_t n = std::min(rounded.size(), values.size() - done);
#pragma omp parallel for schedule(static)
        for (size_t k = 0; k < n; ++k) rounded[k] = bf16(values[done + k]);
        copy_now(buffers_.device(), to.data + done * sizeof(bf16), rounded.data(),
                 n * sizeof(bf16));
    }
}

void ParameterState::read_values(const Place& from, std::span<float> values) const {
    if (from.dtype == DType::fp32) {
        copy_now(buffers_.device(), values.data(), from.data, values.size_bytes());
        return;
    }
    assert(from.dtype == DType::bf16);
    std::vector<bf16> rounded(values.size());
    copy_now(buffers_.device(), rounded.data(), from.data, rounded.size() * sizeof(bf16));
    std::transform(rounded.begin(), rounded.end(), values.begin(),
                   [](bf16 v) { return to_float(v); });
}

void ParameterState::read_held(std::string_view which, int i, int64_t first,
                               std::span<float> values) const {
    for (const ParameterBuffers::Piece& piece : buffers_.pieces_of(i)) {
        const Range part = intersection(piece.range, {first, std::ssize(values)});
        const Place place = place_of(piece, which);
        if (part.n == 0 || !place.data) continue;
        const int64_t at = part.first - piece.range.first;
        const std::span<float> of_part =
            values.subspan(static_cast<size_t>(part.first - first), static_cast<size_t>(part.n));
        if (place.scales)
            read_codes(place, piece.range.n, at, of_part);
        else
            read_values(place.from(at), of_part);
    }
}

void ParameterState::read_codes(const Place& from, int64_t n, int64_t first,
                                std::span<float> values) const {
    const int64_t begin = first / code_block * code_block,
                  end = std::min(n, rounded_up(first + std::ssize(values), code_block));
    const Place blocks = from.from(begin);
    std::vector<uint8_t> codes(static_cast<size_t>(end - begin));
    std::vector<float> scales(
        static_cast<size_t>(rounded_up(end - begin, code_block) / code_block)),
        decoded(codes.size());
    copy_now(buffers_.device(), codes.data(), blocks.data, codes.size());
    copy_now(buffers_.device(), scales.data(), blocks.scales, scales.size() * sizeof(float));
    decode(from.coding, codes.data(), scales.data(), decoded);
    std::copy_n(decoded.begin() + (first - begin), values.size(), values.begin());
}

void ParameterState::write_codes(const Place& to, int64_t n, int64_t first,
                                 std::span<const float> values) {
    const int64_t last = first + std::ssize(values), begin = first / code_block * code_block,
                  end = std::min(n, rounded_up(last, code_block));
    std::vector<float> whole(static_cast<size_t>(end - begin));
    if (begin < first || last < end) read_codes(to, n, begin, whole);
    std::copy(values.begin(), values.end(), whole.begin() + (first - begin));
    std::vector<uint8_t> codes(whole.size());
    std::vector<float> scales(
        static_cast<size_t>(rounded_up(end - begin, code_block) / code_block));
    encode(to.coding, whole, codes.data(), scales.data());
    const Place blocks = to.from(begin);
    copy_now(buffers_.device(), blocks.data, codes.data(), codes.size());
    copy_now(buffers_.device(), blocks.scales, scales.data(), scales.size() * sizeof(float));
}

void ParameterState::read_weights(int i, int64_t first, std::span<float> values) const {
    assert(buffers_.holds_all_weights());
    read_values({buffers_.weight_address(i, first), buffers_.dtype()}, values);
}

std::span<const std::byte> ParameterState::host_view(const ParameterBuffers::Piece& piece,
                                                     std::string_view which, int64_t n,
                                                     std::vector<std::byte>& copied) const {
    const Place from = place_of(piece, which);
    const bool is_slot = which != master && which != gradient;
    const size_t bytes =
        (is_slot ? buffers_.slots()[buffers_.slot_of(which)] : OptimizerSlot{}).bytes(n);
    if (!buffers_.device().is_cuda()) return {reinterpret_cast<const std::byte*>(from.data), bytes};
    copied.resize(bytes);
    copy_now(buffers_.device(), copied.data(), from.data, bytes);
    return copied;
}

}  // namespace train_gpt
