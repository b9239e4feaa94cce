#include "test/kernels/linear_problem.h"

#include <array>
#include <cmath>

#include "base/error.h"

namespace train_gpt::linear_problem {

std::vector<Product> products() {
    using Gemm = KernelSettings::Gemm;
    using Epilogues = KernelSettings::Epilogues;
    if (test_device().is_cuda())
        return {{"fused epilogues", {.epilogues = Epilogues::fused}},
                {"separate kernels", {.epilogues = Epilogues::separate}},
                {"the faster", {.autotune = true}}};
    return {
        {"own", {.gemm = Gemm::own}},
#ifdef TRAIN_GPT_ONEDNN
        {"onednn", {.gemm = Gemm::onednn}},
#endif
    };
}

int64_t cut_off_sums(DType dtype, int64_t depth) {
    return test_device().is_cuda() && dtype == DType::bf16 ? (depth + 15) / 16 : 0;
}

Layer::Layer(DType dtype_, int64_t M_, int64_t N_, int64_t K_)
    : dtype(dtype_),
      M(M_),
      N(N_),
      K(K_),
      x(dtype, {M, K}, random_normal(static_cast<size_t>(M * K))),
      w(dtype, {N, K},
        random_normal(static_cast<size_t>(N * K), 1.0f / std::sqrt(static_cast<float>(K)))),
      bias(dtype, {N}, random_normal(static_cast<size_t>(N))),
      residual(dtype, {M, N}, random_normal(static_cast<size_t>(M * N))),
      dy(dtype, {M, N}, random_normal(static_cast<size_t>(M * N))),
      input_preact(dtype, {M, K}, random_normal(static_cast<size_t>(M * K), 2.0f)) {}

size_t Layer::scratch_bytes(const KernelSettings& settings) const {
    return linear_scratch_bytes(planning(settings), dtype, M, N, K);
}

std::vector<Extent> extents() {
    if (device_is_simulated()) {
        return {{1, 1, 1},
                {1, 70, 7},
                {33, 1, 65},
                {15, 31, 17},
                {64, 192, 64},
                {13, 104, 40},
                {270, 24, 16},
                {33, 24, 96},
                {random_int(1, 90), random_int(1, 90), random_int(1, 90)}};
    }
    std::vector<Extent> result{{1, 1, 1},      {1, 300, 7},   {300, 1, 65},   {2, 33, 300},
                               {15, 31, 17},   {64, 192, 64}, {13, 1024, 40}, {50, 48, 1024},
                               {129, 96, 768}, {520, 64, 33}, {260, 192, 768}};
    for (int i = 0; i < 6; ++i)
        result.push_back({random_int(1, 300), random_int(1, 300), random_int(1, 300)});
    // Sums of as many products as AMX kernels of oneDNN get wrong with some numbers of rows
    const int64_t rows = std::array{34, 35, 37, 38, 47}[static_cast<size_t>(random_int(0, 4))];
    result.push_back({rows, 290, 63});
    result.push_back({rows, 63, 290});
    result.push_back({1099, 2079, 40});
    result.push_back({1167, 28, 2111});
    // Enough rows for a packed weight, enough columns for epilogues range by range.
    result.push_back({random_int(1024, 1300), random_int(2048, 2200), random_int(1, 40)});
    result.push_back({random_int(1024, 1300), random_int(1, 40), random_int(2048, 2200)});
    return result;
}

void for_each_layer(const std::function<void(const Layer&)>& check) {
    for (const Extent& e : extents()) {
        for (DType dtype : {DType::fp32, DType::bf16}) {
            CAPTURE(name_of(dtype), e.M, e.N, e.K);
            check(Layer(dtype, e.M, e.N, e.K));
        }
    }
}

void for_each_product(const std::function<void(const KernelSettings&)>& check) {
    for (const Product& product : products()) {
        CAPTURE(product.name);
        check(product.settings);
    }
}

HostStream::HostStream(size_t scratch_bytes) : scratch_(scratch_bytes + 64) {
    stream_.scratch =
        scratch_.data() + (64 - reinterpret_cast<uintptr_t>(scratch_.data()) % 64) % 64;
    stream_.scratch_bytes = scratch_bytes;
}

}  // namespace train_gpt::linear_problem
