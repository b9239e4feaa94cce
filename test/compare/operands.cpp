#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/random.h"
#include "device/copy.h"
#include "device/memory.h"
#include "test/compare/operations.h"

namespace train_gpt::compare {

namespace {

constexpr int64_t distinct_values = int64_t{1} << 22;

template <class T>
T load(const std::byte* memory, size_t i) {
    T value;
    std::memcpy(&value, memory + i * sizeof(T), sizeof(T));
    return value;
}

template <class T>
void store(Operand& operand, const std::vector<T>& values) {
    operand.content.resize(operand.bytes());
    std::memcpy(operand.content.data(), values.data(), operand.content.size());
}

}  // namespace

double Accuracy::bound(DType dtype) const {
    const double u = dtype == DType::bf16 ? 0x1p-9 : 0x1p-24;
    return 2 * std::sqrt(roundings * u * u + static_cast<double>(terms + 16) * 0x1p-48);
}

size_t Operand::bytes() const {
    size_t n = is_double ? sizeof(double) : size_of(dtype);
    for (int64_t extent : dims) n *= static_cast<size_t>(extent);
    return n;
}

Values Operand::values(const std::byte* memory) const {
    Values values(bytes() / (is_double ? sizeof(double) : size_of(dtype)));
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] = is_double               ? load<double>(memory, i)
                    : dtype == DType::bf16  ? to_float(load<bf16>(memory, i))
                    : dtype == DType::fp32  ? load<float>(memory, i)
                    : dtype == DType::uint8 ? static_cast<double>(load<uint8_t>(memory, i))
                                            : load<int32_t>(memory, i);
    }
    return values;
}

Operand& Operands::declare(const std::string& name, const Dims& dims, DType dtype, bool is_double) {
    double needed = static_cast<double>(total_bytes());
    const double elements = [&] {
        double n = 1;
        for (int64_t extent : dims) n *= static_cast<double>(extent);
        return n;
    }();
    needed += elements * (is_double ? sizeof(double) : static_cast<double>(size_of(dtype)));
    // In addition to the content: the memory of the call, and results in double.
    const uint64_t available = memory_available({});
    if (4 * needed > static_cast<double>(available))
        throw Error("this shape takes too much memory: ", name, " has ", elements,
                    " elements, and ", format_bytes(available),
                    " are free; give a smaller --shape");
    return operands_.emplace_back(
        Operand{.name = name, .dims = dims, .dtype = dtype, .is_double = is_double, .content = {}});
}

void Operands::normal(const std::string& name, const Dims& dims, float stddev, float mean) {
    normal(name, dims, dtype_, stddev, mean);
}

void Operands::normal(const std::string& name, const Dims& dims, DType dtype, float stddev,
                      float mean) {
    Operand& operand = declare(name, dims, dtype);
    std::vector<float> values(operand.bytes() / size_of(dtype));
    RandomStream(seed_, RandomPurpose::test, static_cast<uint32_t>(operands_.size()), 0)
        .fill_normal(values.data(), std::min(static_cast<int64_t>(values.size()), distinct_values),
                     stddev, mean);
    for (size_t i = distinct_values; i < values.size(); ++i)
        values[i] = values[i - distinct_values];
    if (dtype == DType::bf16) {
        store(operand, std::vector<bf16>(values.begin(), values.end()));
    } else {
        store(operand, values);
    }
}

void Operands::integers(const std::string& name, const Dims& dims, int64_t below, bool ignored) {
    Operand& operand = declare(name, dims, DType::int32);
    const RandomStream random(seed_, RandomPurpose::test, static_cast<uint32_t>(operands_.size()),
                              0);
    std::vector<int32_t> values(operand.bytes() / sizeof(int32_t));
    for (size_t i = 0; i < values.size(); ++i) {
        const uint64_t bits = random.bits(i);
        values[i] = ignored && bits % 10 == 0
                        ? -1
                        : static_cast<int32_t>(bits * static_cast<uint64_t>(below) >> 32);
    }
    store(operand, values);
}

void Operands::words(const std::string& name, const void* content, int64_t n) {
    Operand& operand = declare(name, {n}, DType::int32);
    operand.content.resize(operand.bytes());
    std::memcpy(operand.content.data(), content, operand.bytes());
}

void Operands::room(const std::string& name, const Dims& dims, DType dtype) {
    declare(name, dims, dtype);
}

void Operands::result(const std::string& name, const Dims& dims, DType dtype,
                      const Accuracy& accuracy) {
    declare(name, dims, dtype);
    changes(name, accuracy);
}

void Operands::double_result(const std::string& name, const Dims& dims, const Accuracy& accuracy) {
    declare(name, dims, DType::fp32, true);
    changes(name, accuracy);
}

void Operands::changes(const std::string& name, const Accuracy& accuracy) {
    Operand& operand = const_cast<Operand&>(*find(name));
    operand.is_result = true;
    operand.accuracy = accuracy;
}

size_t Operands::total_bytes() const {
    size_t bytes = 0;
    for (const Operand& operand : operands_) bytes += operand.bytes();
    return bytes;
}

const Operand* Operands::find(const std::string& name) const {
    const auto found = std::find_if(operands_.begin(), operands_.end(),
                                    [&](const Operand& o) { return o.name == name; });
    return found == operands_.end() ? nullptr : &*found;
}

Values Operands::values(const std::string& name) const {
    const Operand& operand = *find(name);
    return operand.content.empty() ? Values() : operand.values(operand.content.data());
}

std::vector<int32_t> Operands::integer_values(const std::string& name) const {
    const Values values = this->values(name);
    return {values.begin(), values.end()};
}

Call::Call(const Operands& operands, Arena& arena) : operands_(operands), device_(arena.device()) {
    for (const Operand& operand : operands.all()) {
        Tensor tensor(arena.take(operand.bytes(), Purpose::workspaces), operand.dtype, {});
        tensor.rank = static_cast<int>(operand.dims.size());
        std::copy(operand.dims.begin(), operand.dims.end(), tensor.shape);
        tensors_[operand.name] = tensor;
    }
}

void Call::reset() const {
    static const std::vector<std::byte> ones(size_t{1} << 22,
                                             std::byte{0xff});  // NaN in every floating type
    for (const Operand& operand : operands_.all()) {
        auto* const memory = static_cast<std::byte*>(tensors_.at(operand.name).data);
        const size_t bytes = operand.bytes();
        if (!operand.content.empty()) {
            copy_now(device_, memory, operand.content.data(), bytes);
            continue;
        }
        for (size_t at = 0; at < bytes; at += ones.size())
            copy_now(device_, memory + at, ones.data(), std::min(ones.size(), bytes - at));
    }
}

Tensor Call::operator[](const char* name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? Tensor() : found->second;
}

GradientSink Call::sink(const char* name, bool accumulate) const {
    const Tensor tensor = (*this)[name];
    return {tensor.data, tensor.dtype, accumulate};
}

Values Call::values(const Operand& operand) const {
    std::vector<std::byte> memory(operand.bytes());
    copy_now(device_, memory.data(), tensors_.at(operand.name).data, memory.size());
    return operand.values(memory.data());
}

}  // namespace train_gpt::compare
