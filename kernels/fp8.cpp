#include "kernels/fp8.h"

#include <algorithm>
#include <bit>
#include <cassert>

#include "device/profile.h"
#include "kernels/fp8_math.h"

namespace train_gpt {

namespace {

constexpr int64_t tile = 64;  // rows and columns: both matrices get whole cache lines

template <class T>
float largest_magnitude(const T* x, int64_t n) {
    uint32_t most = 0;
#pragma omp parallel for simd schedule(static) reduction(max : most)
    for (int64_t i = 0; i < n; ++i) most = std::max(most, magnitude_of(to_float(x[i])));
    return std::bit_cast<float>(most);
}

template <class Format>
void put(uint8_t& to, float value) {
    to = fp8_code<Format>(value);
}
template <class Format>
void put(float& to, float value) {
    to = fp8_rounded<Format>(value);
}
template <class Format>
void put(bf16& to, float value) {  // whose low bits are 0
    to.bits = static_cast<uint16_t>(std::bit_cast<uint32_t>(fp8_rounded<Format>(value)) >> 16);
}

int64_t rows_of(const Fp8Round& args) {
    return args.row_count ? *args.row_count.as<int32_t>() : args.x.rows();
}

/// Tiles of rows of x, one after the other; returns the largest magnitude.
template <class Format, class Code, class T>
float round_tiles(const Fp8Round& args, float scale) {
    const int64_t rows = rows_of(args), cols = args.x.cols();
    const T* x = args.x.as<T>();
    auto* codes = static_cast<Code*>(args.codes.data);
    auto* transposed = static_cast<uint8_t*>(args.transposed.data);
    uint32_t most = 0;
#pragma omp parallel for collapse(2) schedule(static) reduction(max : most)
    for (int64_t row = 0; row < rows; row += tile) {
        for (int64_t col = 0; col < cols; col += tile) {
            const int64_t height = std::min(tile, rows - row), width = std::min(tile, cols - col);
            for (int64_t r = 0; codes && r < height; ++r) {
                const T* from = x + (row + r) * cols + col;
                Code* to = codes + (row + r) * cols + col;
#pragma omp simd reduction(max : most)
                for (int64_t c = 0; c < width; ++c) {
                    const float value = to_float(from[c]);
                    most = std::max(most, magnitude_of(value));
                    put<Format>(to[c], fp8_scaled(value, scale));
                }
            }
            for (int64_t c = 0; transposed && c < width; ++c) {
                uint8_t* to = transposed + (col + c) * rows + row;
                for (int64_t r = 0; r < height; ++r) {
                    const float value = to_float(x[(row + r) * cols + col + c]);
                    most = std::max(most, magnitude_of(value));
                    to[r] = fp8_code<Format>(fp8_scaled(value, scale));
                }
            }
        }
    }
    return std::bit_cast<float>(most);
}

/// As round_tiles(), in the format and the dtype that are asked for.
template <class T>
float round_all(const Fp8Round& args, float scale) {
    const bool numbers = args.codes && args.codes.dtype != DType::uint8;
    if (args.format == Fp8Format::e4m3)
        return numbers ? round_tiles<E4M3, T, T>(args, scale)
                       : round_tiles<E4M3, uint8_t, T>(args, scale);
    return numbers ? round_tiles<E5M2, T, T>(args, scale)
                   : round_tiles<E5M2, uint8_t, T>(args, scale);
}

}  // namespace

void fp8_round(Stream& stream, const Fp8Round& args) {
    const Profiled profiled(stream, cost_of(args));
    assert(!args.transposed || (args.transposed.dtype == DType::uint8 && !args.row_count));
    assert(!args.codes || args.codes.dtype == DType::uint8 ||
           (args.codes.dtype == args.x.dtype && !stream.device.is_cuda()));
    TRAIN_GPT_ON_CUDA(stream.device, fp8_round(stream, args));
    with_float_type(args.x.dtype, [&](auto type) {
        using T = decltype(type);
        float scale = args.scaling.scale ? *args.scaling.scale : 0;
        if (scale == 0)
            scale = fp8_scale(largest_magnitude(args.x.as<T>(), rows_of(args) * args.x.cols()),
                              largest_of(args.format));
        const float amax = round_all<T>(args, scale);
        *args.inverse = 1 / scale;
        if (args.scaling.amax) *args.scaling.amax = std::max(*args.scaling.amax, amax);
    });
}

size_t fp8_round_scratch_bytes(const Stream& stream) {
    TRAIN_GPT_ON_CUDA(stream.device, fp8_round_scratch_bytes());
    return 0;
}

void fp8_update(Stream& stream, const Fp8Update& args, const StepState* state) {
    TRAIN_GPT_ON_CUDA(stream.device, fp8_update(stream, args, state));
    Fp8Found& found = *args.found;
    found.saturated = 0, found.not_finite = -1;
    for (int64_t i = args.n - 1; i >= 0; --i) {
        const float largest = i < args.e4m3_count ? E4M3::largest : E5M2::largest;
        found.saturated += args.scale && saturates(args.amax[i], args.scale[i], largest);
        if (!(args.amax[i] - args.amax[i] == 0)) found.not_finite = static_cast<int32_t>(i);
    }
    if (state->stop || state->overflow || state->skip) return;
    const int64_t place = found.steps++ % args.H;
    if (!args.scale) return;
    const int64_t taken = std::min(found.steps, args.H);
    found.unset = 0;
    for (int64_t i = 0; i < args.n; ++i) {
        float& newest = args.history[place * args.n + i];
        const float oldest = found.steps > args.H ? newest : 0;
        newest = args.amax[i];
        float most = 0;
        for (int64_t h = 0; h < taken; ++h) most = std::max(most, args.history[h * args.n + i]);
        if (most == 0) newest = most = oldest;
        args.scale[i] =
            fp8_delayed_scale(most, i < args.e4m3_count ? E4M3::largest : E5M2::largest);
        found.unset += args.scale[i] == 0;
    }
}

Cost cost_of(const Fp8Round& a) {
    // With this call's own scale, x is read twice.
    const double reads = a.scaling.is_set ? 1 : 2;
    return {"fp8_round", reads * bytes_of(a.x) + bytes_of(a.codes) + bytes_of(a.transposed), 0};
}

}  // namespace train_gpt
