// A view of the heads of queries, keys, values or their gradients.
#pragma once
#include <cstdint>

namespace train_gpt {

/// Element (b, t, h, d) of a query, key, value or output is data[b·batch + t·token + h·head + d];
/// strides in elements. The kernels treat packed QKV [B, T, 3, H, D], separate tensors and a KV
/// cache alike.
struct HeadsView {
    void* data = nullptr;
    int64_t batch = 0, token = 0, head = 0;
};

}  // namespace train_gpt
