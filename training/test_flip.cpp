#include "training/test_flip.h"

#include <bit>
#include <cstdlib>
#include <span>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "device/copy.h"

namespace train_gpt {

std::optional<TestFlip> TestFlip::from_environment(int rank) {
    const char* text = std::getenv("TRAIN_GPT_TEST_FLIP");
    if (!text) return {};
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ':');) parts.push_back(part);
    TestFlip flip;
    try {
        flip.kind_ = parts.at(0);
        flip.tensor_ = parts.at(1);
        flip.element_ = std::stoll(parts.at(2));
        flip.step_ = std::stoll(parts.at(3));
        flip.here_ = parts.size() < 5 || std::stoi(parts[4]) == rank;
    } catch (const std::logic_error&) {
        throw Error("TRAIN_GPT_TEST_FLIP=", text,
                    " is not KIND:TENSOR:ELEMENT:STEP[:RANK]; unset it, since it is for tests");
    }
    return flip;
}

void TestFlip::loaded(const Device& device, const TokenBatch& batch, int64_t step) const {
    if (!here_ || step != step_ || kind_ != "input") return;
    auto* const place = const_cast<int32_t*>(batch.tokens + element_);
    int32_t token = 0;
    copy_now(device, &token, place, sizeof token);
    token = token > 0 ? token & (token - 1) : 1;  // one bit, and within the vocabulary
    copy_now(device, place, &token, sizeof token);
}

void TestFlip::before_update(ParameterStore& parameters, int64_t step) const {
    if (here_ && step == step_ && kind_ == ParameterState::gradient) flip(parameters);
}

void TestFlip::after_update(ParameterStore& parameters, int64_t step) const {
    if (here_ && step == step_ && kind_ != ParameterState::gradient && kind_ != "input")
        flip(parameters);
}

void TestFlip::flip(ParameterStore& parameters) const {
    const int i = parameters.index_of(tensor_);
    if (i < 0) return;                 // another pipeline rank's
    constexpr uint32_t bit = 1 << 16;  // bf16 has it, too
    float value = 0;
    const std::span<float> one(&value, 1);
    parameters.state.read(kind_, i, element_, one);
    value = std::bit_cast<float>(std::bit_cast<uint32_t>(value) ^ bit);
    parameters.state.write(kind_, i, element_, one);
}

}  // namespace train_gpt
