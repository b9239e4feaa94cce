// Products of experts beside what bounds them: the dense product of the same FLOPs, and reading the
// weights from memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/tensor.h"
#include "device/stream.h"
#include "kernels/experts/grouped_linear.h"
#include "test/bench/limits.h"
#include "test/bench/machine.h"

namespace train_gpt::bench {

/// A layer of E experts [N, K], each token choosing k of them. half: one expert gets half of the
/// rows.
struct ExpertProducts {
    int64_t tokens, N, K, E, k;
    bool half;

    int64_t rows() const { return tokens * k; }
    Linear dense() const { return {"", rows(), N, K, 1}; }
};

/// The rows of the experts, and the token of each row.
struct Grouping {
    std::vector<int32_t> offsets, row_token;

    explicit Grouping(const ExpertProducts& layer)
        : offsets(static_cast<size_t>(layer.E) + 1), row_token(static_cast<size_t>(layer.rows())) {
        std::mt19937 random(1);
        std::vector<int32_t> expert(row_token.size());
        for (int32_t& e : expert) {
            e = static_cast<int32_t>(random() % static_cast<uint32_t>(layer.E));
            if (layer.half && random() % 2) e = 3;
            ++offsets[static_cast<size_t>(e) + 1];
        }
        std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
        std::vector<int32_t> next(offsets.begin(), offsets.end() - 1);
        for (size_t s = 0; s < expert.size(); ++s)
            row_token[static_cast<size_t>(next[static_cast<size_t>(expert[s])]++)] =
                static_cast<int32_t>(s) / static_cast<int32_t>(layer.k);
    }
};

/// Seconds of the three products. The weights of every call are others, so that they come from
/// memory, as in training.
class GroupedProduct {
  public:
    GroupedProduct(const ExpertProducts& layer, DType dtype) : layer_(layer), grouping_(layer) {
        const auto [tokens, N, K, E, k, half] = layer;
        const int64_t R = layer.rows();
        x_ = memory_.random(dtype, {tokens, K});
        rows_ = memory_.tensor(dtype, {R, K});
        y_ = memory_.random(dtype, {R, N});
        const auto sets =
            static_cast<size_t>((int64_t{128} << 20) / (E * N * K * static_cast<int64_t>(4)) + 2);
        for (size_t i = 0; i < sets; ++i) {
            w_.push_back(memory_.random(dtype, {E * N, K}));
            dw_.push_back(memory_.random(DType::fp32, {E * N, K}));
        }
        stream_.scratch_bytes = grouped_linear_scratch_bytes(stream_, {dtype, E, R, N, K});
        stream_.scratch = memory_.take(stream_.scratch_bytes);
    }
    double seconds(Timing& timing, Product product) {
        const Tensor offsets(grouping_.offsets.data(), DType::int32, {layer_.E + 1}),
            row_token(grouping_.row_token.data(), DType::int32, {layer_.rows()});
        return timing([&] {
            const Tensor &w = w_[call_ % w_.size()], &dw = dw_[call_ % dw_.size()];
            ++call_;
            switch (product) {
                case Product::forward:
                    return grouped_linear_forward(
                        stream_,
                        {.out = y_, .x = x_, .w = w, .offsets = offsets, .row_token = row_token});
                case Product::backward_input:
                    return grouped_linear_backward_input(
                        stream_, {.dx = rows_, .dy = y_, .w = w, .offsets = offsets});
                case Product::backward_weight:
                    return grouped_linear_backward_weight(stream_,
                                                          {.dw = {dw.data, DType::fp32, false},
                                                           .x = x_,
                                                           .dy = y_,
                                                           .offsets = offsets,
                                                           .row_token = row_token});
            }
        });
    }

  private:
    ExpertProducts layer_;
    Grouping grouping_;
    Buffers memory_;
    Stream stream_{Device()};
    Tensor x_, rows_, y_;
    std::vector<Tensor> w_, dw_;
    size_t call_ = 0;
};

inline void print_expert_products(Timing& timing, const Bandwidth& bandwidth, bool quick) {
    std::printf(
        "\nProducts of experts: time over the longer of two, the dense product of as many rows "
        "with one weight, as fast as any of the table above, and the bytes of the weights at "
        "triad bandwidth. \"half\": one expert has half of the rows.\n\n"
        "| | tokens | N×K | experts | rows | forward | d input | d weight |\n"
        "|---|---|---|---|---|---|---|---|\n");
    const auto row = [&](DType dtype, const ExpertProducts& layer) {
        std::printf("| %s | %lld | %lld×%lld | %lld of %lld | %s |", name_of(dtype),
                    static_cast<long long>(layer.tokens), static_cast<long long>(layer.N),
                    static_cast<long long>(layer.K), static_cast<long long>(layer.k),
                    static_cast<long long>(layer.E), layer.half ? "half" : "even");
        GroupedProduct grouped(layer, dtype);
        for (const Product product : products) {
            const double dense = measure_product(timing, product, dtype, layer.dense()).best(),
                         ours = grouped.seconds(timing, product);
            const size_t element = product == Product::backward_weight ? 4 : size_of(dtype);
            const double bytes =
                static_cast<double>(layer.E * layer.N * layer.K) * static_cast<double>(element);
            std::printf(" %.2f |", ours / std::max(dense, bytes / bandwidth.triad));
        }
        std::printf("\n");
        std::fflush(stdout);
    };
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const int64_t tokens : {int64_t{1024}, int64_t{4096}})
            for (const auto& [N, K] : {std::pair<int64_t, int64_t>{576, 320}, {1024, 1024}})
                for (const int64_t E : {int64_t{8}, int64_t{64}})
                    for (const int64_t k : {int64_t{2}, int64_t{8}})
                        for (const bool half : {false, true}) {
                            if (quick && (tokens > 1024 || N > 576 || half)) continue;
                            row(dtype, {tokens, N, K, E, k, half});
                        }
}

}  // namespace train_gpt::bench
