#include "training/files/fp8_file.h"

#include <algorithm>
#include <span>
#include <vector>

#include "base/error.h"
#include "training/files/safetensors.h"

namespace train_gpt {

namespace {

constexpr const char* fp8_name = "fp8.safetensors";

}  // namespace

std::string write_fp8(const std::filesystem::path& checkpoint, const Fp8History& history) {
    const size_t n = history.operands.size(), steps = history.amax.size() / n;
    std::vector<TensorInfo> tensors;
    for (const std::string& operand : history.operands)
        tensors.push_back(
            {.name = operand, .dtype = "F32", .shape = {static_cast<int64_t>(steps)}});
    SafetensorsWriter writer(checkpoint / fp8_name, std::move(tensors));
    std::vector<float> of_operand(steps);
    for (size_t i = 0; i < n; ++i) {
        for (size_t step = 0; step < steps; ++step) of_operand[step] = history.amax[step * n + i];
        writer.append(std::as_bytes(std::span(of_operand)));
    }
    writer.commit();
    return fp8_name;
}

std::vector<std::string> read_fp8(const std::filesystem::path& checkpoint, Fp8Scales& scales) {
    const std::filesystem::path path = checkpoint / fp8_name;
    Fp8History history = scales.history();
    const size_t n = history.operands.size();
    if (n == 0) return {};
    if (!std::filesystem::exists(path)) return history.operands;
    const SafetensorsFile file(path);
    std::vector<std::string> absent;
    const TensorInfo* first = nullptr;
    for (const std::string& operand : history.operands) {
        const TensorInfo* const tensor = file.find(operand);
        if (!tensor) absent.push_back(operand);
        if (!first) first = tensor;
    }
    if (!first) return absent;
    const int64_t steps = first->numel();
    if (steps > Fp8Scales::history_steps)
        throw Error(path.string(), " has ", steps, " steps, more than ", Fp8Scales::history_steps,
                    "; restore the checkpoint from a copy or use another one");
    history.amax.assign(static_cast<size_t>(steps) * n, 0);
    std::vector<float> of_operand(static_cast<size_t>(steps));
    for (size_t i = 0; i < n; ++i) {
        const TensorInfo* const tensor = file.find(history.operands[i]);
        if (!tensor) continue;
        file.read_floats(file.at(tensor->name, first->shape), of_operand.data());
        if (std::ranges::any_of(of_operand, [](float x) { return !(x >= 0 && x - x == 0); }))
            throw Error(path.string(), ": ", quoted(tensor->name),
                        " has a magnitude that is negative or not finite; restore the checkpoint "
                        "from a copy or use another one");
        for (size_t step = 0; step < of_operand.size(); ++step)
            history.amax[step * n + i] = of_operand[step];
    }
    scales.set_history(history);
    return absent;
}

}  // namespace train_gpt
