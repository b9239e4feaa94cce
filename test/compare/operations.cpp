#include "test/compare/operations.h"

#include <cmath>
#include <iterator>
#include <numeric>

namespace train_gpt::compare {

void declare_weight(Operands& o, int64_t rows, int64_t cols) {
    o.normal("w", {rows, cols}, 1 / std::sqrt(static_cast<float>(cols)));
}

Accuracy accuracy_of_fp8_sums(const Operands& o, int64_t terms) {
    return {.roundings = o.dtype() == DType::bf16 ? 3 : 1 << 22, .terms = terms};
}

std::vector<Implementation> only_one(const Operands&, const Device& device) {
    return {{device.is_cuda() ? "CUDA" : "CPU", {.autotune = true}}};
}

std::vector<Implementation> products(const Operands& o, const Device& device) {
    if (device.is_cuda()) return only_one(o, device);
    return {
#ifdef TRAIN_GPT_ONEDNN
        {"CPU, oneDNN", {.gemm = KernelSettings::Gemm::onednn}},
#endif
        {"CPU, own GEMM", {.gemm = KernelSettings::Gemm::own}}};
}

std::vector<Implementation> products_with_epilogue(const Operands& o, const Device& device) {
    using Epilogues = KernelSettings::Epilogues;
    if (!device.is_cuda()) return products(o, device);
    return {{"CUDA, fused", {.epilogues = Epilogues::fused, .autotune = true}},
            {"CUDA, separate", {.epilogues = Epilogues::separate, .autotune = true}}};
}

double dot(const Values& a, const Values& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

const std::vector<Operation>& operations() {
    static const std::vector<Operation> all = [] {
        std::vector<Operation> list;
        for (const auto& of :
             {linear_operations, fp8_operations, gelu_operations, swiglu_operations,
              relu_squared_operations, residual_operations, norm_operations, rope_operations,
              attention_operations, experts_operations, embedding_operations, head_loss_operations,
              adamw_operations}) {
            std::vector<Operation> some = of();
            std::ranges::move(some, std::back_inserter(list));
        }
        return list;
    }();
    return all;
}

}  // namespace train_gpt::compare
