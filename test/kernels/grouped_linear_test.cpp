#include "kernels/experts/grouped_linear.h"

#include <cmath>
#include <exception>

#include "base/error.h"
#include "kernels/choices.h"
#include "kernels/linear/linear.h"
#include "test/kernels/experts_reference.h"
#include "test/kernels/kernel_test.h"
#include "test/kernels/linear_problem.h"
#ifdef TRAIN_GPT_CUDA
#include "device/cuda_queue.h"
#include "kernels/experts/grouped_ways.h"
#endif

namespace train_gpt {

namespace {

using linear_problem::cut_off_sums;
/// All ways to multiply matrices, and on the CPU the one that is chosen by itself, which may be one
/// that linear layers do not have (panel_products.h).
void for_each_grouped_product(const std::function<void(const KernelSettings&)>& check) {
    if (test_device().is_cuda()) {
        for (const auto grouped : {KernelSettings::Grouped::own, KernelSettings::Grouped::wgmma}) {
            if (grouped == KernelSettings::Grouped::wgmma && !has_wgmma(test_device())) continue;
            INFO((grouped == KernelSettings::Grouped::own ? "mma" : "wgmma"));
            // Blocks that stay on the GPU then process several tiles.
            const int blocks = static_cast<int>(random_int(1, 4));
            check({.grouped = grouped, .reserved_sms = multiprocessors(test_device()) - blocks});
        }
        return;
    }
    linear_problem::for_each_product(check);
    INFO("automatic");
    check({});
}

/// The offsets of experts with so many rows.
std::vector<int32_t> offsets_of(const std::vector<int64_t>& counts) {
    std::vector<int32_t> offsets{0};
    for (const int64_t count : counts)
        offsets.push_back(offsets.back() + static_cast<int32_t>(count));
    return offsets;
}

/// A stream whose product on a GPU is computed by the kernel that `choices` name, the same for all
/// products, if they name any; then none but those products may be asked for.
class ChosenStream {
  public:
    ChosenStream(size_t scratch_bytes, KernelSettings settings, const std::string& choices)
        : choices_(choices), stream_(scratch_bytes, with_timing(settings, !choices.empty())) {
        if (!choices.empty()) set_kernel_choices(stream_, choices);
    }
    ~ChosenStream() noexcept(false) {  // with Catch2's -a, a failed CHECK throws
        if (choices_.empty() || std::uncaught_exceptions() > 0) return;
        // A product that is not named would have been timed.
        CHECK(kernel_choices(stream_) == choices_);
#ifdef TRAIN_GPT_CUDA
        // Where the kernel that is named cannot run, another does.
        Stream& stream = stream_;
        const char* const last = name_of(stream.queue->kept<cuda::GroupedWays>().last());
        CAPTURE(last);
        CHECK(choices_.ends_with(concat(" ", last, "\n")));
#endif
    }
    ChosenStream(const ChosenStream&) = delete;
    ChosenStream& operator=(const ChosenStream&) = delete;
    operator Stream&() { return stream_; }

  private:
    static KernelSettings with_timing(KernelSettings settings, bool times) {
        settings.autotune = times;
        return settings;
    }
    std::string choices_;
    TestStream stream_;
};

/// A layer of experts with random contents. Half of the problems gather their rows from fewer
/// tokens.
struct Experts {
    DType dtype;
    int64_t E, R, N, K, tokens;
    std::vector<int32_t> row_offsets, tokens_of_rows;
    bool gathers;
    Buffer x, w, bias, dy;
    SharedArray<int32_t> offset_memory, token_memory;
    std::string choices = {};  // of ChosenStream

    Experts(DType dtype_, const std::vector<int64_t>& counts, int64_t N_, int64_t K_,
            bool gathers_ = random_int(0, 1) == 1)
        : dtype(dtype_),
          E(static_cast<int64_t>(counts.size())),
          R(std::accumulate(counts.begin(), counts.end(), int64_t{0})),
          N(N_),
          K(K_),
          tokens(gathers_ ? (R + 1) / 2 : R),
          row_offsets(offsets_of(counts)),
          gathers(gathers_),
          x(dtype, {tokens, K}, random_normal(static_cast<size_t>(tokens * K))),
          w(dtype, {E, N, K},
            random_normal(static_cast<size_t>(E * N * K), 1 / std::sqrt(static_cast<float>(K)))),
          bias(dtype, {E, N}, random_normal(static_cast<size_t>(E * N))),
          dy(dtype, {R, N}, random_normal(static_cast<size_t>(R * N))),
          offset_memory(static_cast<size_t>(E) + 1),
          token_memory(static_cast<size_t>(R)) {
        std::ranges::copy(row_offsets, offset_memory.data());
        for (int64_t r = 0; r < R; ++r)
            tokens_of_rows.push_back(static_cast<int32_t>(gathers ? random_int(0, tokens - 1) : r));
        std::ranges::copy(tokens_of_rows, token_memory.data());
    }
    Tensor offsets() const { return {offset_memory.data(), DType::int32, {E + 1}}; }
    Tensor row_token() const {
        return gathers ? Tensor(token_memory.data(), DType::int32, {R}) : Tensor{};
    }
    size_t scratch_bytes(const KernelSettings& settings) const {
        return grouped_linear_scratch_bytes(planning(settings), {dtype, E, R, N, K});
    }

    std::unique_ptr<Buffer> forward(const KernelSettings& settings, bool has_bias = true) const {
        auto out = std::make_unique<Buffer>(dtype, std::initializer_list<int64_t>{R, N});
        ChosenStream stream(scratch_bytes(settings), settings, choices);
        grouped_linear_forward(stream, {.out = *out,
                                        .x = x,
                                        .w = w,
                                        .offsets = offsets(),
                                        .row_token = row_token(),
                                        .bias = has_bias ? bias.tensor() : Tensor{}});
        return out;
    }
    std::unique_ptr<Buffer> backward_input(const KernelSettings& settings) const {
        auto dx = std::make_unique<Buffer>(dtype, std::initializer_list<int64_t>{R, K});
        ChosenStream stream(scratch_bytes(settings), settings, choices);
        grouped_linear_backward_input(stream, {.dx = *dx, .dy = dy, .w = w, .offsets = offsets()});
        return dx;
    }
    void backward_weight(const KernelSettings& settings, const GradientSink& dw,
                         const GradientSink& dbias) const {
        ChosenStream stream(scratch_bytes(settings), settings, choices);
        grouped_linear_backward_weight(stream, {.dw = dw,
                                                .x = x,
                                                .dy = dy,
                                                .offsets = offsets(),
                                                .row_token = row_token(),
                                                .dbias = dbias});
    }

    GroupedProblem problem() const {
        return {N,           K,
                row_offsets, gathered_reference(x.values(), tokens_of_rows, K),
                dy.values(), w.values()};
    }
    Values with_bias(Values out) const {
        for (int64_t e = 0; e < E; ++e)
            for (int64_t i = row_offsets[e] * N; i < row_offsets[e + 1] * N; ++i)
                out[i] += bias[e * N + i % N];
        return out;
    }
    template <class Real>
    Values column_sums() const {
        Values sums;
        for (int64_t e = 0; e < E; ++e)
            for (int64_t n = 0; n < N; ++n) {
                Real sum = 0;
                for (int64_t r = row_offsets[e]; r < row_offsets[e + 1]; ++r)
                    sum += static_cast<Real>(dy[r * N + n]);
                sums.push_back(sum);
            }
        return sums;
    }
};

struct GroupedExtent {
    std::vector<int64_t> counts;
    int64_t N, K;
};

/// Counts around the tiles, idle experts, one expert that has most rows, many experts with few.
std::vector<GroupedExtent> extents() {
    std::vector<int64_t> few(32);
    for (int64_t& count : few) count = random_int(0, 3);
    few[5] = 1;
    const auto random_counts = [](int64_t experts, int64_t most) {
        std::vector<int64_t> counts(static_cast<size_t>(experts));
        for (int64_t& count : counts) count = random_int(0, most);
        counts[0] = 1;
        return counts;
    };
    if (device_is_simulated())
        return {{{1}, 1, 1},
                {{0, 3, 0}, 8, 16},
                {{65, 0, 129}, 72, 40},
                {{0, 0, 330}, 136, 24},
                {{300}, 24, 136},
                {few, 16, 72},
                {random_counts(3, 90), random_int(1, 70), random_int(1, 70)},
                {random_counts(3, 90), 8 * random_int(1, 20), 8 * random_int(1, 20)}};
    std::vector<GroupedExtent> result{{{1}, 1, 1},
                                      {{0, 3, 0}, 8, 16},
                                      {{65, 0, 129, 127, 128, 0}, 72, 200},
                                      {{0, 0, 1300, 7}, 136, 64},
                                      {{390, 800}, 24, 650},
                                      {few, 64, 72}};
    for (int i = 0; i < 3; ++i) {
        result.push_back(
            {random_counts(random_int(1, 9), 200), random_int(1, 150), random_int(1, 150)});
        result.push_back(
            {random_counts(random_int(1, 9), 200), 8 * random_int(1, 40), 8 * random_int(1, 40)});
    }
    return result;
}

void for_each_layer(const std::function<void(const Experts&)>& check) {
    bool gathers = random_int(0, 1) == 1;
    for (const GroupedExtent& e : extents()) {
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            const Experts layer(dtype, e.counts, e.N, e.K, gathers);
            CAPTURE(name_of(dtype), layer.E, layer.R, e.N, e.K, gathers);
            check(layer);
        }
        gathers = !gathers;
    }
}

}  // namespace

TEST_CASE("grouped_linear_forward matches float64 whatever rows the experts have", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_layer([&](const Experts& layer) {
        const Values exact = layer.problem().product<double>(GemmOp::nt),
                     plain = layer.problem().product<float>(GemmOp::nt);
        for_each_grouped_product([&](const KernelSettings& settings) {
            for (const bool bias : {false, true}) {
                const auto with = [&](const Values& v) { return bias ? layer.with_bias(v) : v; };
                accuracy.check(bias ? "out with bias" : "out", layer.dtype,
                               layer.forward(settings, bias)->values(),
                               stored_as(layer.dtype, with(plain)), with(exact));
            }
        });
    });
}

TEST_CASE("every kernel for grouped products on sm_90 takes every width, and gives the same bits",
          "[cuda]") {
    ON_EACH_DEVICE();
    if (!has_wgmma(test_device())) return;
    // More rows of an expert than a band of tiles has, and more columns than any tile; fewer
    // columns than the narrowest tile.
    const std::vector<GroupedExtent> extents{{{2100, 1, 0}, 264, 16},
                                             {{random_int(1, 150), 0, random_int(1, 150)},
                                              8 * random_int(1, 16),
                                              8 * random_int(17, 40)}};
    Accuracy accuracy;
    for (const GroupedExtent& e : extents)
        for (const char* way : {"mma", "wgmma_128", "wgmma_256"})
            for (const bool gathers : {false, true}) {
                CAPTURE(way, gathers, e.counts, e.N, e.K);
                Experts layer(DType::bf16, e.counts, e.N, e.K, gathers);
                for (const char* product : {"backward_input", "backward_weight", "forward",
                                            "gathering", "gathering_weight"})
                    layer.choices += concat("grouped ", product, " E=", layer.E, ",R=", layer.R,
                                            ",N=", layer.N, ",K=", layer.K, " ", way, "\n");
                const GroupedProblem problem = layer.problem();
                const KernelSettings settings{.reserved_sms = multiprocessors(test_device()) -
                                                              static_cast<int>(random_int(1, 4))};
                const Buffer dw(DType::fp32, {layer.E, layer.N, layer.K}),
                    again(DType::fp32, {layer.E, layer.N, layer.K});
                layer.backward_weight(settings, dw.sink(false), {});
                layer.backward_weight(settings, again.sink(false), {});
                CHECK((dw.bytes() == again.bytes()));
                const auto out = layer.forward(settings), dx = layer.backward_input(settings);
                CHECK((out->bytes() == layer.forward(settings)->bytes()));
                CHECK((dx->bytes() == layer.backward_input(settings)->bytes()));
                accuracy.check(
                    "out", DType::bf16, out->values(),
                    stored_as(DType::bf16, layer.with_bias(problem.product<float>(GemmOp::nt))),
                    layer.with_bias(problem.product<double>(GemmOp::nt)));
                accuracy.check("dx", DType::bf16, dx->values(),
                               stored_as(DType::bf16, problem.product<float>(GemmOp::nn)),
                               problem.product<double>(GemmOp::nn));
                accuracy.check("dw", DType::fp32, dw.values(),
                               stored_as(DType::fp32, problem.product<float>(GemmOp::tn)),
                               problem.product<double>(GemmOp::tn),
                               cut_off_sums(DType::bf16, layer.R));
            }
}

TEST_CASE("grouped products touch no row that belongs to no expert", "[cuda]") {
    ON_EACH_DEVICE();
    for_each_layer([&](const Experts& layer) {
        const int64_t more = random_int(1, 200), R = layer.R + more, N = layer.N, K = layer.K;
        CAPTURE(more);
        // The layer with so many rows after its own, which hold NaNs and the tokens of nobody
        Buffer x(layer.dtype, {layer.gathers ? layer.tokens : R, K}), dy(layer.dtype, {R, N});
        const auto fill = [](Buffer& to, const Buffer& from) {
            for (int64_t i = 0; i < to.tensor().numel(); ++i)
                to.set(i, i < from.tensor().numel() ? static_cast<float>(from[i]) : NAN);
        };
        fill(x, layer.x);
        fill(dy, layer.dy);
        const SharedArray<int32_t> tokens(static_cast<size_t>(R));
        std::fill_n(tokens.data(), R, 1 << 30);
        std::ranges::copy(layer.tokens_of_rows, tokens.data());
        const Tensor row_token =
            layer.gathers ? Tensor(tokens.data(), DType::int32, {R}) : Tensor{};
        // The first rows are those of `own`, and the others have not changed.
        const auto check = [&](const Buffer& own, const auto& compute) {
            Buffer result(layer.dtype, {R, own.tensor().cols()});
            for (int64_t i = 0; i < result.tensor().numel(); ++i) result.set(i, 7);
            compute(result);
            std::vector<double> expected = own.values();
            expected.resize(static_cast<size_t>(result.tensor().numel()), 7);
            CHECK(result.values() == expected);
        };
        for_each_grouped_product([&](const KernelSettings& settings) {
            TestStream stream(
                grouped_linear_scratch_bytes(planning(settings), {layer.dtype, layer.E, R, N, K}),
                settings);
            check(*layer.forward(settings), [&](const Buffer& out) {
                grouped_linear_forward(stream, {.out = out,
                                                .x = x,
                                                .w = layer.w,
                                                .offsets = layer.offsets(),
                                                .row_token = row_token,
                                                .bias = layer.bias});
            });
            check(*layer.backward_input(settings), [&](const Buffer& dx) {
                grouped_linear_backward_input(
                    stream, {.dx = dx, .dy = dy, .w = layer.w, .offsets = layer.offsets()});
            });
            const Buffer dw(DType::fp32, {layer.E, N, K}), dbias(DType::fp32, {layer.E, N}),
                own_dw(DType::fp32, {layer.E, N, K}), own_dbias(DType::fp32, {layer.E, N});
            layer.backward_weight(settings, own_dw.sink(false), own_dbias.sink(false));
            grouped_linear_backward_weight(stream, {.dw = dw.sink(false),
                                                    .x = x,
                                                    .dy = dy,
                                                    .offsets = layer.offsets(),
                                                    .row_token = row_token,
                                                    .dbias = dbias.sink(false)});
            CHECK((dw.bytes() == own_dw.bytes()));
            CHECK((dbias.bytes() == own_dbias.bytes()));
        });
    });
}

TEST_CASE("grouped_linear_backward_input matches float64 whatever rows the experts have",
          "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_layer([&](const Experts& layer) {
        const Values exact = layer.problem().product<double>(GemmOp::nn),
                     plain = layer.problem().product<float>(GemmOp::nn);
        for_each_grouped_product([&](const KernelSettings& settings) {
            accuracy.check("dx", layer.dtype, layer.backward_input(settings)->values(),
                           stored_as(layer.dtype, plain), exact);
        });
    });
}

TEST_CASE("grouped_linear_backward_weight matches float64, and clears what idle experts have",
          "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for_each_layer([&](const Experts& layer) {
        const Values exact = layer.problem().product<double>(GemmOp::tn),
                     plain = layer.problem().product<float>(GemmOp::tn),
                     exact_sums = layer.column_sums<double>(),
                     plain_sums = layer.column_sums<float>();
        for_each_grouped_product([&](const KernelSettings& settings) {
            for (const bool accumulate : {false, true}) {
                Buffer dw(DType::fp32, {layer.E, layer.N, layer.K}),
                    dbias(DType::fp32, {layer.E, layer.N});
                Values before(exact.size()), sums_before(exact_sums.size());
                if (accumulate) {
                    for (size_t i = 0; i < before.size(); ++i)
                        dw.set(i, static_cast<float>(before[i] = static_cast<double>(i % 3)));
                    for (size_t i = 0; i < sums_before.size(); ++i)
                        dbias.set(i, static_cast<float>(sums_before[i] = 1));
                }
                const auto added = [](Values to, const Values& from) {
                    for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
                    return stored_as(DType::fp32, to);
                };
                layer.backward_weight(settings, dw.sink(accumulate), dbias.sink(accumulate));
                accuracy.check("dw", DType::fp32, dw.values(), added(plain, before),
                               added(exact, before), cut_off_sums(layer.dtype, layer.R));
                accuracy.check("dbias", DType::fp32, dbias.values(), added(plain_sums, sums_before),
                               added(exact_sums, sums_before));
                for (int64_t e = 0; e < layer.E; ++e) {
                    if (layer.row_offsets[e] != layer.row_offsets[e + 1]) continue;
                    const auto first = static_cast<size_t>(e * layer.N * layer.K);
                    CHECK(dw[first] == before[first]);
                }
            }
        });
    });
}

TEST_CASE("grouped products of one expert have the bits of a linear layer's own products") {
    const KernelSettings own{.gemm = KernelSettings::Gemm::own};
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        const Experts layer(dtype, {random_int(1, 1500)}, random_int(1, 600), random_int(1, 100),
                            false);
        CAPTURE(name_of(dtype), layer.R, layer.N, layer.K);
        const Buffer out(dtype, {layer.R, layer.N}), dx(dtype, {layer.R, layer.K}),
            dw(DType::fp32, {layer.N, layer.K}), dbias(DType::fp32, {layer.N}),
            grouped_dw(DType::fp32, {1, layer.N, layer.K}),
            grouped_dbias(DType::fp32, {1, layer.N});
        TestStream stream(linear_scratch_bytes(planning(own), dtype, layer.R, layer.N, layer.K),
                          own);
        const Tensor w = layer.w.tensor().reshaped({layer.N, layer.K}),
                     bias = layer.bias.tensor().reshaped({layer.N});
        linear_forward(stream, {.out = out, .x = layer.x, .w = w, .bias = bias});
        linear_backward_input(stream, {.dx = dx, .dy = layer.dy, .w = w});
        linear_backward_weight(
            stream,
            {.dw = dw.sink(false), .x = layer.x, .dy = layer.dy, .dbias = dbias.sink(false)});
        layer.backward_weight(own, grouped_dw.sink(false), grouped_dbias.sink(false));
        CHECK((layer.forward(own)->bytes() == out.bytes()));
        CHECK((layer.backward_input(own)->bytes() == dx.bytes()));
        CHECK((grouped_dw.bytes() == dw.bytes()));
        CHECK((grouped_dbias.bytes() == dbias.bytes()));
    }
}

TEST_CASE("grouped products give the same bits in every run, and with any threads", "[cuda]") {
    ON_EACH_DEVICE();
    const int64_t most = device_is_simulated() ? 60 : 500;
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const KernelSettings& settings :
             {KernelSettings{.gemm = KernelSettings::Gemm::own}, KernelSettings{},
              KernelSettings{.grouped = KernelSettings::Grouped::wgmma}}) {
            const Experts layer(dtype, {random_int(0, most), 0, random_int(1, 20), most},
                                8 * random_int(1, 50), 8 * random_int(1, 50));
            check_thread_independence([&] {
                const Buffer dw(DType::fp32, {layer.E, layer.N, layer.K}),
                    dbias(DType::fp32, {layer.E, layer.N});
                layer.backward_weight(settings, dw.sink(false), dbias.sink(false));
                return layer.forward(settings)->bytes() + layer.backward_input(settings)->bytes() +
                       dw.bytes() + dbias.bytes();
            });
        }
}

TEST_CASE("an expert's rows are computed alike whatever the other experts have") {
    // Products that one expert shares no sum with depend on its own rows alone.
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        const int64_t rows = random_int(1, 600), N = 8 * random_int(1, 60),
                      K = 8 * random_int(1, 60);
        const Experts both(dtype, {rows, random_int(0, 400)}, N, K, false);
        Experts alone(dtype, {rows}, N, K, false);
        for (size_t i = 0; i < static_cast<size_t>(rows * K); ++i)
            alone.x.set(i, static_cast<float>(both.x[i]));
        for (size_t i = 0; i < static_cast<size_t>(rows * N); ++i)
            alone.dy.set(i, static_cast<float>(both.dy[i]));
        for (size_t i = 0; i < static_cast<size_t>(N * K); ++i)
            alone.w.set(i, static_cast<float>(both.w[i]));
        const auto dw_of = [](const Experts& layer) {
            const Buffer dw(DType::fp32, {layer.E, layer.N, layer.K});
            layer.backward_weight({}, dw.sink(false), {});
            return dw.bytes();
        };
        CAPTURE(name_of(dtype), rows, both.R, N, K);
        const auto begins_with = [](const std::string& all, const std::string& first) {
            return all.starts_with(first);
        };
        CHECK(begins_with(both.forward({}, false)->bytes(), alone.forward({}, false)->bytes()));
        CHECK(begins_with(both.backward_input({})->bytes(), alone.backward_input({})->bytes()));
        CHECK(begins_with(dw_of(both), dw_of(alone)));
    }
}

TEST_CASE("gradients of experts' weights that bypass the caches are those that do not") {
    // More than fit into a cache: 40 experts of 512 × 512.
    const int64_t E = 40, N = 512, K = 512;
    std::vector<int64_t> counts(static_cast<size_t>(E), 0);
    for (int i = 0; i < 6; ++i)
        counts[static_cast<size_t>(random_int(0, E - 1))] = random_int(1, 9);
    counts[0] = random_int(1, 3);
    const Experts layer(DType::bf16, counts, N, K, false);
    const Buffer dw(DType::fp32, {E, N, K}), zeros(DType::fp32, {E, N, K});
    std::fill_n(zeros.as<float>(), E * N * K, 0.0f);
    layer.backward_weight({}, dw.sink(false), {});
    layer.backward_weight({}, zeros.sink(true), {});
    CHECK((dw.bytes() == zeros.bytes()));
}

TEST_CASE("grouped products take tensors that begin at any element", "[cuda]") {
    ON_EACH_DEVICE();
    const Experts layer(DType::bf16, {random_int(1, 40), random_int(1, 40)}, 8 * random_int(1, 9),
                        8 * random_int(1, 9), true);
    const auto shifted = [](const Buffer& memory, Tensor like) {
        like.data = static_cast<char*>(memory.tensor().data) + size_of(like.dtype);
        return like;
    };
    const auto moved = [&](const Buffer& from, Buffer& to) {
        const Values values = from.values();
        for (size_t i = 0; i < values.size(); ++i) to.set(i + 1, static_cast<float>(values[i]));
        return shifted(to, from.tensor());
    };
    Buffer x(layer.dtype, {layer.tokens * layer.K + 1}),
        w(layer.dtype, {layer.E * layer.N * layer.K + 1}), dy(layer.dtype, {layer.R * layer.N + 1}),
        out(layer.dtype, {layer.R * layer.N + 1}), dx(layer.dtype, {layer.R * layer.K + 1}),
        dw(DType::fp32, {layer.E * layer.N * layer.K + 1});
    const Tensor moved_x = moved(layer.x, x), moved_w = moved(layer.w, w),
                 moved_dy = moved(layer.dy, dy);
    const Buffer like_out(layer.dtype, {layer.R, layer.N}),
        like_dx(layer.dtype, {layer.R, layer.K});
    TestStream stream(layer.scratch_bytes({}));
    grouped_linear_forward(stream, {.out = shifted(out, like_out.tensor()),
                                    .x = moved_x,
                                    .w = moved_w,
                                    .offsets = layer.offsets(),
                                    .row_token = layer.row_token()});
    grouped_linear_backward_input(stream, {.dx = shifted(dx, like_dx.tensor()),
                                           .dy = moved_dy,
                                           .w = moved_w,
                                           .offsets = layer.offsets()});
    GradientSink sink = dw.sink(false);
    sink.data = static_cast<float*>(sink.data) + 1;
    grouped_linear_backward_weight(stream, {.dw = sink,
                                            .x = moved_x,
                                            .dy = moved_dy,
                                            .offsets = layer.offsets(),
                                            .row_token = layer.row_token()});
    const auto without_first = [](const Buffer& of) {
        Values values = of.values();
        CHECK(std::isnan(values[0]));
        values.erase(values.begin());
        return values;
    };
    const auto check = [&](DType dtype, GemmOp op, const Values& ours) {
        check_accuracy("shifted", dtype, ours, stored_as(dtype, layer.problem().product<float>(op)),
                       layer.problem().product<double>(op),
                       dtype == DType::fp32 ? cut_off_sums(layer.dtype, layer.R) : 0);
    };
    check(DType::bf16, GemmOp::nt, without_first(out));
    check(DType::bf16, GemmOp::nn, without_first(dx));
    check(DType::fp32, GemmOp::tn, without_first(dw));
}

}  // namespace train_gpt
