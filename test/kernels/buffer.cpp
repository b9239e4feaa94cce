#include "test/kernels/buffer.h"

#include "test/catch.h"

namespace train_gpt {

Buffer::Buffer(DType dtype, std::initializer_list<int64_t> shape)
    : tensor_(nullptr, dtype, shape), memory_(tensor_.bytes()) {
    tensor_.data = memory_.data();
}

Buffer::Buffer(DType dtype, std::initializer_list<int64_t> shape, const std::vector<float>& values)
    : Buffer(dtype, shape) {
    REQUIRE(static_cast<int64_t>(values.size()) == tensor_.numel());
    for (size_t i = 0; i < values.size(); ++i) set(i, values[i]);
}

std::vector<double> Buffer::values() const {
    memory_.settle();
    std::vector<double> result(static_cast<size_t>(tensor_.numel()));
    for (size_t i = 0; i < result.size(); ++i) result[i] = stored(i);
    return result;
}

std::string Buffer::bytes() const {
    memory_.settle();
    return {static_cast<const char*>(tensor_.data), tensor_.bytes()};
}

TestStream::TestStream(size_t scratch_bytes, const KernelSettings& settings)
    : scratch_(scratch_bytes), stream_(test_device()) {
    stream_.settings = settings;
    stream_.scratch = scratch_.data();
    stream_.scratch_bytes = scratch_bytes;
}

std::vector<double> stored_as(DType dtype, std::vector<double> values) {
    for (double& value : values) {
        const float rounded = static_cast<float>(value);
        value = dtype == DType::bf16 ? to_float(bf16(rounded)) : rounded;
    }
    return values;
}

}  // namespace train_gpt
