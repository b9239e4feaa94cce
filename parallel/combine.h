// The arithmetic of collectives in host memory: sums and maxima of arrays, and copies.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/dtype.h"
#include "parallel/communicator.h"

namespace train_gpt {

/// The type in which numbers are added.
template <class T>
using SumOf = std::conditional_t<std::is_same_v<T, bf16>, float, T>;

/// a + b; integers wrap.
template <class T>
T added(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
        using Unsigned = std::make_unsigned_t<T>;
        return static_cast<T>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
    } else {
        return a + b;
    }
}

/// Calls f with a value of the dtype's C++ type.
template <class F>
void with_collective_type(DType dtype, F&& f) {
    switch (dtype) {
        case DType::fp32:
            return f(float{});
        case DType::bf16:
            return f(bf16{});
        case DType::int32:
            return f(int32_t{});
        case DType::int64:
            return f(int64_t{});
        case DType::fp64:
        case DType::uint8:  // no sums
            return f(double{});
    }
}

// Below this many elements a team of threads costs more than it gains.
inline constexpr int64_t team_elements = 1 << 15;
inline constexpr int64_t strip = 1024;  // elements whose sums stay in the L1 cache

/// to[i] = from[0][i] + from[1][i] + …, in this order, or the largest of them. `to` may be one of
/// them.
template <class In, class Out>
void combine(Reduction reduction, const std::vector<const void*>& from, Out* to, int64_t n) {
    using Sum = SumOf<In>;
#pragma omp parallel for schedule(static) if (n >= team_elements)
    for (int64_t first = 0; first < n; first += strip) {
        const int64_t m = std::min(strip, n - first);
        std::array<Sum, strip> sum;
        for (size_t j = 0; j < from.size(); ++j) {
            const In* x = static_cast<const In*>(from[j]) + first;
            if (j == 0) {
                for (int64_t i = 0; i < m; ++i)
                    sum[static_cast<size_t>(i)] = static_cast<Sum>(x[i]);
            } else if (reduction == Reduction::sum) {
                for (int64_t i = 0; i < m; ++i)
                    sum[static_cast<size_t>(i)] =
                        added(sum[static_cast<size_t>(i)], static_cast<Sum>(x[i]));
            } else {
                for (int64_t i = 0; i < m; ++i)
                    sum[static_cast<size_t>(i)] =
                        std::max(sum[static_cast<size_t>(i)], static_cast<Sum>(x[i]));
            }
        }
        for (int64_t i = 0; i < m; ++i)
            to[first + i] = static_cast<Out>(sum[static_cast<size_t>(i)]);
    }
}

inline void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
    constexpr int64_t part = int64_t{1} << 16;
#pragma omp parallel for schedule(static) if (bytes >= 2 * part)
    for (int64_t first = 0; first < bytes; first += part)
        std::memcpy(to + first, from + first, static_cast<size_t>(std::min(part, bytes - first)));
}

}  // namespace train_gpt
