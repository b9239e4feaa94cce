#include "kernels/head_loss.h"

#include <algorithm>
#include <functional>
#include <list>
#include <vector>

#include "base/error.h"
#include "kernels/exp_math.h"
#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

/// Target tokens in memory that the device can read.
class Targets {
  public:
    explicit Targets(const std::vector<int32_t>& values)
        : memory_(values.size() * sizeof(int32_t)) {
        std::copy(values.begin(), values.end(), static_cast<int32_t*>(memory_.data()));
    }
    const int32_t* data() const { return static_cast<const int32_t*>(memory_.data()); }
    int32_t operator[](size_t row) const { return data()[row]; }

  private:
    TestMemory memory_;
};

/// One target in five is ignored.
std::vector<int32_t> random_targets(int64_t R, int64_t V) {
    std::vector<int32_t> targets;
    for (int64_t row = 0; row < R; ++row)
        targets.push_back(static_cast<int32_t>(random_int(0, 4) == 0 ? -1 : random_int(0, V - 1)));
    return targets;
}

struct TestedHeadLoss {
    DType dtype;
    int64_t R, C, V, Vp;
    Buffer x, w;
    Targets targets;
    float z_loss = 1e-4f * static_cast<float>(random_int(0, 1) * random_int(1, 200));
    // At least about as large as logits. Far below them, tanh is so near 1 that gradients are
    // differences of roundings (fast_tanh has five times those of std::tanh).
    float softcap = static_cast<float>(
        random_int(0, 1) *
        std::max(random_int(1, 20),
                 static_cast<int64_t>(std::ceil(0.7 * std::sqrt(static_cast<double>(C))))));

    /// The padded rows of w are zero, as the parameter registry keeps them.
    static std::vector<float> padded_weights(int64_t V, int64_t Vp, int64_t C) {
        std::vector<float> values = random_normal(static_cast<size_t>(V * C));
        values.resize(static_cast<size_t>(Vp * C));
        return values;
    }
    explicit TestedHeadLoss(DType dtype_)
        : TestedHeadLoss(dtype_, random_int(1, 40), random_int(1, 70), random_int(2, 300),
                         random_int(0, 70)) {}
    TestedHeadLoss(DType dtype_, int64_t R_, int64_t C_, int64_t V_, int64_t padding)
        : dtype(dtype_),
          R(R_),
          C(C_),
          V(V_),
          Vp(V + padding),
          x(dtype, {R, C}, random_normal(static_cast<size_t>(R * C), 0.7f)),
          w(dtype, {Vp, C}, padded_weights(V, Vp, C)),
          targets(random_targets(R, V)) {}
    bool ignored(size_t row) const { return targets[row] == -1; }
};

/// The formulas of head_loss.h in Real; with `store`, stored values are rounded to the dtype.
template <class Real>
HeadLossReference textbook(const TestedHeadLoss& p, bool store) {
    return head_loss_reference<Real>({.R = p.R,
                                      .C = p.C,
                                      .V = p.V,
                                      .x = p.x.values(),
                                      .w = p.w.values(),
                                      .targets = {p.targets.data(), p.targets.data() + p.R},
                                      .z_loss = p.z_loss,
                                      .softcap = p.softcap},
                                     store ? p.dtype : DType::fp32);
}

struct Outputs {
    Buffer losses, dx, dw;
    explicit Outputs(const TestedHeadLoss& p)
        : losses(DType::fp32, {p.R}), dx(p.dtype, {p.R, p.C}), dw(DType::fp32, {p.Vp, p.C}) {}
};

void run(const TestedHeadLoss& p, const Outputs& out, int64_t chunk, bool backward,
         bool accumulate = false) {
    const Buffer logits(p.dtype, {chunk, p.Vp});
    TestStream stream(head_loss_scratch_bytes(planning(), p.dtype, chunk, p.Vp, p.C));
    head_loss(stream, {.x = p.x,
                       .w = p.w,
                       .logits = logits,
                       .V = p.V,
                       .targets = p.targets.data(),
                       .losses = out.losses.as<float>(),
                       .dx = backward ? out.dx.tensor() : Tensor{},
                       .dw = backward ? out.dw.sink(accumulate) : GradientSink{},
                       .z_loss = p.z_loss,
                       .softcap = p.softcap});
}

}  // namespace

TEST_CASE("fast_exp is within one unit in the last place over its range and keeps limits and NaN") {
    double worst = 0;
    for (int i = 0; i < 200000; ++i) {
        const float x = static_cast<float>(random_int(-87000000, 88000000)) * 1e-6f;
        const double exact = std::exp(static_cast<double>(x));
        worst = worse(worst, std::abs(static_cast<double>(fast_exp(x)) - exact) / exact);
    }
    CHECK(worst < 0x1p-23);
    constexpr float infinity = std::numeric_limits<float>::infinity();
    CHECK(fast_exp(0) == 1);
    CHECK(fast_exp(-infinity) == 0);
    CHECK(fast_exp(-1e30f) == 0);
    CHECK(fast_exp(infinity) == infinity);
    CHECK(std::isnan(fast_exp(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("fast_tanh is within 3e-7 of its value at every magnitude and keeps limits and NaN") {
    double worst = 0;
    const auto check = [&](float x) {
        const double exact = std::tanh(static_cast<double>(x));
        worst = worse(worst, std::abs(static_cast<double>(fast_tanh(x)) - exact) / std::abs(exact));
    };
    for (int i = 0; i < 100000; ++i) {
        check(static_cast<float>(random_int(-12000000, 12000000)) * 1e-6f + 1e-9f);
        check(std::exp(-static_cast<float>(random_int(0, 40000000)) * 1e-6f));
    }
    CHECK(worst < 3e-7);
    constexpr float infinity = std::numeric_limits<float>::infinity();
    CHECK(fast_tanh(0) == 0);
    CHECK(fast_tanh(infinity) == 1);
    CHECK(fast_tanh(-infinity) == -1);
    CHECK(std::isnan(fast_tanh(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("head_loss gives the losses and gradients of the formula in float64", "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        Accuracy accuracy;
        for (int repeat = 0; repeat < 8; ++repeat) {
            const TestedHeadLoss p(dtype);
            CAPTURE(name_of(dtype), p.R, p.C, p.V, p.Vp, p.softcap);
            const Outputs out(p);
            run(p, out, p.R, true);
            const HeadLossReference exact = textbook<double>(p, false),
                                    plain = textbook<float>(p, true);
            accuracy.check("losses", DType::fp32, out.losses.values(), plain.losses, exact.losses);
            accuracy.check("dx", dtype, out.dx.values(), plain.dx, exact.dx);
            accuracy.check("dw", DType::fp32, out.dw.values(), plain.dw, exact.dw);

            for (size_t row = 0; row < static_cast<size_t>(p.R); ++row) {
                if (!p.ignored(row)) continue;
                CHECK(out.losses[row] == 0);
                for (int64_t c = 0; c < p.C; ++c) {
                    CHECK(out.dx[row * static_cast<size_t>(p.C) + static_cast<size_t>(c)] == 0);
                }
            }
            bool padding_is_zero = true;
            for (size_t i = static_cast<size_t>(p.V * p.C); i < static_cast<size_t>(p.Vp * p.C);
                 ++i) {
                padding_is_zero = padding_is_zero && out.dw[i] == 0;
            }
            CHECK(padding_is_zero);
        }
    }
}

TEST_CASE("head_loss in chunks of rows equals head_loss in one piece", "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        Accuracy accuracy;
        for (int repeat = 0; repeat < 4; ++repeat) {
            const TestedHeadLoss p(dtype);
            const int64_t chunk = random_int(1, p.R);
            CAPTURE(name_of(dtype), p.R, p.C, p.V, p.Vp, chunk);
            const Outputs whole(p), pieces(p);
            run(p, whole, p.R, true);
            run(p, pieces, chunk, true);
            const HeadLossReference exact = textbook<double>(p, false);
            accuracy.check("losses", DType::fp32, pieces.losses.values(), whole.losses.values(),
                           exact.losses);
            accuracy.check("dx", dtype, pieces.dx.values(), whole.dx.values(), exact.dx);
            accuracy.check("dw", DType::fp32, pieces.dw.values(), whole.dw.values(), exact.dw);
        }
    }
}

TEST_CASE("head_loss accumulates the weight gradient over all chunks when the sink says so",
          "[cuda]") {
    ON_EACH_DEVICE();
    const TestedHeadLoss p(DType::fp32);
    const Outputs once(p), twice(p);
    run(p, once, p.R, true);
    run(p, twice, random_int(1, p.R), true, false);
    run(p, twice, random_int(1, p.R), true, true);
    std::vector<double> expected = once.dw.values();
    for (double& value : expected) value *= 2;
    std::vector<double> plain = stored_as(DType::fp32, expected);
    const HeadLossReference exact = textbook<double>(p, false);
    double worst = 0, largest = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        worst = worse(worst, std::abs(twice.dw[i] - expected[i]));
        largest = std::max(largest, std::abs(exact.dw[i]));
    }
    CHECK(worst <= 1e-5 * largest);
}

TEST_CASE("head_loss for evaluation gives the losses of training and touches no gradient",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const TestedHeadLoss p(dtype);
        const Outputs training(p), evaluation(p);
        const std::string dx = evaluation.dx.bytes(), dw = evaluation.dw.bytes();
        run(p, training, p.R, true);
        run(p, evaluation, p.R, false);
        CHECK((training.losses.bytes() == evaluation.losses.bytes()));
        CHECK((dx == evaluation.dx.bytes()));
        CHECK((dw == evaluation.dw.bytes()));
    }
}

TEST_CASE("head_loss matches the numerical gradient along random directions", "[cuda]") {
    ON_EACH_DEVICE();
    TestedHeadLoss p(DType::fp32);
    p.z_loss = 0;  // losses are without it
    const Outputs out(p);
    run(p, out, p.R, true);
    const auto check = [&](Buffer& input, const Buffer& gradient, size_t n) {
        const std::vector<double> at = input.values();
        const std::vector<float> direction = random_normal(n);
        const double h = 2e-3;
        double expected = 0, norm = 0, difference = 0;
        for (int sign : {1, -1}) {
            for (size_t i = 0; i < n; ++i)
                input.set(i, static_cast<float>(at[i] + sign * h * direction[i]));
            const Outputs moved(p);
            run(p, moved, p.R, false);
            for (double loss : moved.losses.values()) difference += sign * loss / (2 * h);
        }
        for (size_t i = 0; i < n; ++i) {
            input.set(i, static_cast<float>(at[i]));
            expected += gradient[i] * direction[i];
            norm += gradient[i] * gradient[i];
        }
        CAPTURE(p.R, p.C, p.V, expected, difference);
        CHECK(std::abs(expected - difference) <= 2e-2 * std::sqrt(norm) + 1e-2);
    };
    check(p.x, out.dx, static_cast<size_t>(p.R * p.C));
    check(p.w, out.dw, static_cast<size_t>(p.V * p.C));
}

TEST_CASE(
    "softmax statistics of a vocabulary in two halves combine to those of the whole, and so do the "
    "gradients",
    "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        Accuracy accuracy;
        const int64_t R = random_int(1, 20), V = random_int(2, 400), first = random_int(1, V - 1);
        const int64_t widths[] = {first + random_int(0, 9), V - first + random_int(0, 9)};
        const int64_t starts[] = {0, first}, columns[] = {first, V - first};
        const std::vector<float> z = random_normal(static_cast<size_t>(R * V), 3);
        const Targets targets(random_targets(R, V));
        CAPTURE(name_of(dtype), R, V, first);

        // Columns past those of a half stay poisoned: nothing may read them.
        std::unique_ptr<Buffer> halves[2], stats[2];
        TestStream stream;
        for (int half : {0, 1}) {
            halves[half] =
                std::make_unique<Buffer>(dtype, std::initializer_list<int64_t>{R, widths[half]});
            stats[half] =
                std::make_unique<Buffer>(DType::fp32, std::initializer_list<int64_t>{R, 3});
            for (int64_t row = 0; row < R; ++row) {
                for (int64_t j = 0; j < columns[half]; ++j) {
                    halves[half]->set(static_cast<size_t>(row * widths[half] + j),
                                      z[static_cast<size_t>(row * V + starts[half] + j)]);
                }
            }
            softmax_stats(stream, {.stats = *stats[half],
                                   .logits = *halves[half],
                                   .targets = targets.data(),
                                   .first_column = starts[half],
                                   .columns = columns[half]});
        }
        const Buffer combined(DType::fp32, {R, 3});
        for (size_t row = 0; row < static_cast<size_t>(R); ++row) {
            const Buffer &a = *stats[0], &b = *stats[1];
            const double max = std::max(a[3 * row], b[3 * row]);
            combined.as<float>()[3 * row] = static_cast<float>(max);
            combined.as<float>()[3 * row + 1] =
                static_cast<float>(a[3 * row + 1] * std::exp(a[3 * row] - max) +
                                   b[3 * row + 1] * std::exp(b[3 * row] - max));
            combined.as<float>()[3 * row + 2] =
                static_cast<float>(std::max(a[3 * row + 2], b[3 * row + 2]));
        }
        for (int half : {0, 1}) {
            std::vector<double> exact, plain;
            for (int64_t row = 0; row < R; ++row) {
                double max = -1e30, sum = 0;
                const auto logit = [&](int64_t j) {
                    const float value = z[static_cast<size_t>(row * V + j)];
                    return static_cast<double>(dtype == DType::bf16 ? to_float(bf16(value))
                                                                    : value);
                };
                for (int64_t j = 0; j < V; ++j) max = std::max(max, logit(j));
                for (int64_t j = 0; j < V; ++j) sum += std::exp(logit(j) - max);
                const int32_t target = targets[static_cast<size_t>(row)];
                const size_t at = 3 * static_cast<size_t>(row);
                CHECK(combined[at] == max);
                CHECK(std::abs(combined[at + 1] - sum) <= 1e-5 * sum);
                const double expected_logit =
                    target < 0 ? -std::numeric_limits<double>::infinity() : logit(target);
                CHECK(combined[at + 2] == expected_logit);
                for (int64_t j = 0; j < widths[half]; ++j) {
                    const int64_t column = starts[half] + j;
                    const bool inside = j < columns[half] && target >= 0;
                    const double dz =
                        inside ? std::exp(logit(column) - max) / sum - (column == target) : 0.0;
                    exact.push_back(dz);
                    plain.push_back(inside ? static_cast<double>(
                                                 std::exp(static_cast<float>(logit(column) - max)) /
                                                     static_cast<float>(sum) -
                                                 static_cast<float>(column == target))
                                           : 0.0);
                }
            }
            softmax_backward(stream, {.logits = *halves[half],
                                      .stats = combined,
                                      .targets = targets.data(),
                                      .first_column = starts[half],
                                      .columns = columns[half]});
            accuracy.check("dz", dtype, halves[half]->values(), stored_as(dtype, plain), exact);
        }
    }
}

namespace {

/// Entries [first, first + V) of a problem's vocabulary, with padding of their own.
struct Part {
    const TestedHeadLoss& whole;
    int64_t first, V, Vp;
    Buffer w, dw, dx, losses;

    Part(const TestedHeadLoss& p, int64_t first_, int64_t V_, int64_t padding)
        : whole(p),
          first(first_),
          V(V_),
          Vp(V + padding),
          w(p.dtype, {Vp, p.C}, rows_of(p)),
          dw(DType::fp32, {Vp, p.C}),
          dx(p.dtype, {p.R, p.C}),
          losses(DType::fp32, {p.R}) {}

    std::vector<float> rows_of(const TestedHeadLoss& p) const {
        const Values all = p.w.values();
        std::vector<float> rows(all.begin() + first * p.C, all.begin() + (first + V) * p.C);
        rows.resize(static_cast<size_t>(Vp * p.C));
        return rows;
    }
    void run(int64_t chunk, bool backward,
             const std::function<void(Stream&, Tensor)>& combine) const {
        const Buffer logits(whole.dtype, {chunk, Vp}), stats(DType::fp32, {chunk, 3});
        TestStream stream(head_loss_scratch_bytes(planning(), whole.dtype, chunk, Vp, whole.C));
        head_loss(stream, {.x = whole.x,
                           .w = w,
                           .logits = logits,
                           .V = V,
                           .targets = whole.targets.data(),
                           .losses = losses.as<float>(),
                           .dx = backward ? dx.tensor() : Tensor{},
                           .dw = backward ? dw.sink(false) : GradientSink{},
                           .z_loss = whole.z_loss,
                           .softcap = whole.softcap,
                           .first_column = first,
                           .stats = stats,
                           .combine = combine});
        static_cast<Stream&>(stream).synchronize();
    }
};

}  // namespace

TEST_CASE("parts of a vocabulary that combine their statistics give the whole's loss and gradients",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        Accuracy accuracy;
        for (const int64_t n : {2, 3, 5}) {
            const TestedHeadLoss p(dtype, random_int(1, 40), random_int(1, 70), random_int(n, 300),
                                   0);
            const int64_t chunk = random_int(1, p.R);
            CAPTURE(name_of(dtype), n, p.R, p.C, p.V, chunk, p.softcap);
            std::list<Part> parts;
            for (int64_t i = 0; i < n; ++i) {
                const int64_t first = p.V * i / n;
                parts.emplace_back(p, first, p.V * (i + 1) / n - first, random_int(0, 9));
            }

            // First each part's statistics of every chunk, then the combined ones for all.
            std::vector<std::vector<float>> of_chunks;
            for (const Part& part : parts) {
                size_t k = 0;
                part.run(chunk, false, [&](Stream& stream, Tensor stats) {
                    stream.synchronize();
                    if (of_chunks.size() == k) of_chunks.emplace_back();
                    const auto* values = static_cast<const float*>(stats.data);
                    of_chunks[k].insert(of_chunks[k].end(), values, values + stats.numel());
                    ++k;
                });
            }
            for (const Part& part : parts) {
                size_t k = 0;
                std::list<Buffer> alive;
                part.run(chunk, true, [&](Stream& stream, Tensor stats) {
                    alive.emplace_back(DType::fp32,
                                       std::initializer_list<int64_t>{n, stats.rows(), 3},
                                       of_chunks.at(k++));
                    combine_softmax_stats(stream, stats, alive.back());
                });
            }

            const HeadLossReference exact = textbook<double>(p, false),
                                    plain = textbook<float>(p, true);
            Values dx(exact.dx.size()), dw;
            for (const Part& part : parts) {
                accuracy.check("losses", DType::fp32, part.losses.values(), plain.losses,
                               exact.losses);
                const Values share = part.dx.values(), rows = part.dw.values();
                for (size_t i = 0; i < dx.size(); ++i) dx[i] += share[i];
                dw.insert(dw.end(), rows.begin(), rows.begin() + part.V * p.C);
                CHECK(std::all_of(rows.begin() + part.V * p.C, rows.end(),
                                  [](double value) { return value == 0; }));
            }
            accuracy.check("dw", DType::fp32, dw, plain.dw, exact.dw);
            // In bf16 each part's share is rounded.
            if (dtype == DType::fp32) accuracy.check("dx", dtype, dx, plain.dx, exact.dx);
        }
    }
}

TEST_CASE("large and infinite logits give finite losses, and a NaN among them shows in the loss",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (int64_t V : {int64_t{37}, random_int(3000, 40000)}) {
            CAPTURE(name_of(dtype), V);
            const auto loss_with = [&](float special, int32_t target) {
                std::vector<float> z(static_cast<size_t>(V), 0.0f);
                z[5] = special;
                const Buffer logits(dtype, {1, V}, z), stats(DType::fp32, {1, 3});
                const Targets targets({target});
                TestStream stream;
                softmax_stats(
                    stream,
                    {.stats = stats, .logits = logits, .targets = targets.data(), .columns = V});
                return std::log(stats[1]) + stats[0] - stats[2];
            };
            const double others = std::log(static_cast<double>(V - 1));
            const auto random = static_cast<float>(random_int(200, 30000));
            for (float large : {random, 40000.0f, 1e30f, 1e38f}) {
                CAPTURE(large);
                const float stored = dtype == DType::bf16 ? to_float(bf16(large)) : large;
                CHECK(loss_with(large, 5) == 0);
                CHECK(loss_with(large, 6) == stored);
                CHECK(std::abs(loss_with(-large, 6) - others) < 1e-6);
                CHECK(std::abs(loss_with(-large, 5) - (stored + others)) <= 1e-6 * stored);
            }
            constexpr float infinity = std::numeric_limits<float>::infinity();
            CHECK(std::abs(loss_with(-infinity, 6) - others) < 1e-6);
            CHECK(std::isnan(loss_with(std::numeric_limits<float>::quiet_NaN(), 6)));
        }
    }
}

TEST_CASE("head_loss is right wherever in a row the largest logits are, at any magnitude",
          "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (const float scale : {1.0f, 60.0f, 3e3f, 1e5f, 1e30f}) {
            // With x = ±1, rows of logits rise and fall. On a GPU, more than 116000 columns in bf16
            // are shared by a cluster of blocks.
            for (int64_t V : {random_int(2000, 60000), random_int(120000, 130000)}) {
                TestedHeadLoss p(dtype, 4, 1, V, random_int(0, 8));
                // Where tanh is nearly 1, its derivative 1 − tanh² has few digits left.
                if (p.softcap > 0) p.softcap = scale > 60 ? 0 : std::max(p.softcap, scale);
                for (size_t row = 0; row < 4; ++row) p.x.set(row, row % 2 == 0 ? 1.0f : -1.0f);
                const std::vector<float> noise = random_normal(static_cast<size_t>(V), 0.05f);
                for (size_t j = 0; j < noise.size(); ++j)
                    p.w.set(j, scale * (noise[j] + static_cast<float>(j) / static_cast<float>(V)));
                CAPTURE(name_of(dtype), scale, p.V, p.Vp);
                const Outputs out(p);
                run(p, out, p.R, true);
                const HeadLossReference exact = textbook<double>(p, false),
                                        plain = textbook<float>(p, true);
                accuracy.check(concat("losses at ", scale), DType::fp32, out.losses.values(),
                               plain.losses, exact.losses);
                accuracy.check(concat("dw at ", scale), DType::fp32, out.dw.values(), plain.dw,
                               exact.dw);
            }
        }
    }
}

TEST_CASE("rows of the same logits give the same bits wherever they begin in memory", "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        // With an odd number of columns, rows begin at any element of 16 bytes.
        const int64_t R = 8, V = random_int(2, 40000), Vp = V + 1 + V % 2;
        CAPTURE(name_of(dtype), V, Vp);
        std::vector<float> z = random_normal(static_cast<size_t>(V), 3);
        z.resize(static_cast<size_t>(Vp));
        const Targets targets(std::vector<int32_t>(R, static_cast<int32_t>(random_int(0, V - 1))));
        const auto same_rows = [](const std::string& bytes) {
            const size_t row = bytes.size() / R;
            for (size_t at = row; at < bytes.size(); at += row)
                if (bytes.compare(at, row, bytes, 0, row) != 0) return false;
            return true;
        };
        const Buffer x(dtype, {R, 1}, std::vector<float>(R, 1.0f)), w(dtype, {Vp, 1}, z),
            logits(dtype, {R, Vp}), losses(DType::fp32, {R}), dx(dtype, {R, 1});
        TestStream stream(head_loss_scratch_bytes(planning(), dtype, R, Vp, 1));
        head_loss(stream, {.x = x,
                           .w = w,
                           .logits = logits,
                           .V = V,
                           .targets = targets.data(),
                           .losses = losses.as<float>(),
                           .dx = dx});
        CHECK(same_rows(losses.bytes()));
        CHECK(same_rows(logits.bytes()));

        std::vector<float> all;
        for (int64_t row = 0; row < R; ++row) all.insert(all.end(), z.begin(), z.end());
        const Buffer of_part(dtype, {R, Vp}, all), stats(DType::fp32, {R, 3});
        softmax_stats(stream,
                      {.stats = stats, .logits = of_part, .targets = targets.data(), .columns = V});
        softmax_backward(
            stream, {.logits = of_part, .stats = stats, .targets = targets.data(), .columns = V});
        CHECK(same_rows(stats.bytes()));
        CHECK(same_rows(of_part.bytes()));
    }
}

TEST_CASE("head_logits are the products with the vocabulary, without its padding", "[cuda]") {
    ON_EACH_DEVICE();
    const float softcap = GENERATE(0.0f, 6.0f);
    for (DType dtype : {DType::fp32, DType::bf16}) {
        Accuracy accuracy;
        TestedHeadLoss p(dtype);
        p.softcap = softcap;
        const Buffer out(DType::fp32, {p.R, p.V}), scratch(dtype, {p.R, p.Vp});
        TestStream stream(head_loss_scratch_bytes(planning(), dtype, p.R, p.Vp, p.C));
        head_logits(stream,
                    {.out = out, .x = p.x, .w = p.w, .logits = scratch, .softcap = p.softcap});
        std::vector<double> exact;
        std::vector<double> plain;
        for (int64_t row = 0; row < p.R; ++row) {
            for (int64_t j = 0; j < p.V; ++j) {
                double sum = 0;
                float sum_float = 0;
                for (int64_t c = 0; c < p.C; ++c) {
                    const double x = p.x[static_cast<size_t>(row * p.C + c)],
                                 w = p.w[static_cast<size_t>(j * p.C + c)];
                    sum += x * w;
                    sum_float += static_cast<float>(x) * static_cast<float>(w);
                }
                exact.push_back(sum);
                plain.push_back(dtype == DType::bf16 ? to_float(bf16(sum_float)) : sum_float);
                if (p.softcap == 0) continue;
                const float cap = p.softcap;
                exact.back() = cap * std::tanh(exact.back() / static_cast<double>(cap));
                plain.back() = cap * std::tanh(static_cast<float>(plain.back()) / cap);
            }
        }
        accuracy.check("logits", dtype, out.values(), plain, exact);
    }
}

TEST_CASE("softmax gives the same bits whatever the number of threads, and losses add up in double",
          "[cuda]") {
    ON_EACH_DEVICE();
    const int64_t R = random_int(5, 60), V = random_int(2, 900);
    const std::vector<float> z = random_normal(static_cast<size_t>(R * V));
    const Targets targets(random_targets(R, V));
    check_thread_independence([&] {
        const Buffer logits(DType::bf16, {R, V}, z), stats(DType::fp32, {R, 3});
        TestStream stream;
        softmax_stats(stream,
                      {.stats = stats, .logits = logits, .targets = targets.data(), .columns = V});
        softmax_backward(
            stream, {.logits = logits, .stats = stats, .targets = targets.data(), .columns = V});
        return logits.bytes() + stats.bytes();
    });
    double expected = 0;
    for (float value : z) expected += static_cast<double>(value);
    const Buffer losses(DType::fp32, {static_cast<int64_t>(z.size())}, z);
    const TestMemory memory(sizeof(double));
    auto* const total = static_cast<double*>(memory.data());
    TestStream stream;
    for (int times : {1, 2}) {
        accumulate_loss(stream, total, losses.as<float>(), static_cast<int64_t>(z.size()),
                        times > 1);
        memory.settle();
        CHECK(std::abs(*total - times * expected) <= 1e-9);
    }
}

TEST_CASE("losses of each source add up by themselves", "[cuda]") {
    ON_EACH_DEVICE();
    const int64_t B = random_int(1, 9), T = random_int(1, 3000);
    const int sources = static_cast<int>(random_int(1, 5));
    const std::vector<float> values = random_normal(static_cast<size_t>(B * T));
    const Buffer losses(DType::fp32, {B, T}, values);
    std::vector<int32_t> source_of;
    for (int64_t b = 0; b < B; ++b)
        source_of.push_back(static_cast<int32_t>(random_int(0, sources - 1)));
    const TestMemory source_memory(source_of.size() * sizeof(int32_t)),
        memory(static_cast<size_t>(sources) * sizeof(double));
    std::copy(source_of.begin(), source_of.end(), static_cast<int32_t*>(source_memory.data()));
    auto* const totals = static_cast<double*>(memory.data());
    std::fill_n(totals, sources, std::nan(""));
    std::vector<double> expected(static_cast<size_t>(sources));
    for (int64_t i = 0; i < B * T; ++i)
        expected[static_cast<size_t>(source_of[static_cast<size_t>(i / T)])] +=
            static_cast<double>(values[static_cast<size_t>(i)]);
    TestStream stream;
    for (int times : {1, 2}) {
        accumulate_loss_by_source(stream,
                                  {.totals = totals,
                                   .sources = sources,
                                   .losses = losses.as<float>(),
                                   .source_of = static_cast<const int32_t*>(source_memory.data()),
                                   .B = B,
                                   .T = T,
                                   .accumulate = times > 1});
        memory.settle();
        for (int s = 0; s < sources; ++s)
            CHECK(std::abs(totals[s] - times * expected[static_cast<size_t>(s)]) <= 1e-9);
    }
}

TEST_CASE("head_loss takes vocabularies of any size, with rows that begin anywhere", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    // On a GPU, a block keeps a row of up to 227 KiB in its shared memory, and 2, 4 or 8 blocks a
    // longer one. More than 1816 KiB are read twice.
    struct Case {
        DType dtype;
        int64_t V, padding;
    };
    for (const auto& [dtype, V, padding] :
         {Case{DType::bf16, 50257, 47}, Case{DType::bf16, 50257, 0}, Case{DType::bf16, 70001, 3},
          Case{DType::bf16, 120001, 5}, Case{DType::bf16, 128256, 0}, Case{DType::fp32, 50257, 1},
          Case{DType::fp32, 65537, 2}, Case{DType::fp32, random_int(116225, 464896), 3},
          Case{DType::fp32, 470001, 4}}) {
        const TestedHeadLoss p(dtype, random_int(3, 6), 3, V, padding);
        CAPTURE(name_of(dtype), p.R, p.V, p.Vp);
        const Outputs training(p), evaluation(p);
        const int64_t rows = random_int(1, p.R);  // cuBLASLt's algorithm depends on it
        run(p, training, rows, true);
        run(p, evaluation, rows, false);
        const HeadLossReference exact = textbook<double>(p, false),
                                plain = textbook<float>(p, true);
        accuracy.check(concat("losses of ", name_of(dtype)), DType::fp32, training.losses.values(),
                       plain.losses, exact.losses);
        accuracy.check("dx", dtype, training.dx.values(), plain.dx, exact.dx);
        accuracy.check(concat("dw of ", name_of(dtype)), DType::fp32, training.dw.values(),
                       plain.dw, exact.dw);
        CHECK((training.losses.bytes() == evaluation.losses.bytes()));
    }
}

TEST_CASE(
    "the loss of a row with a NaN or without a finite logit is no number, and other rows stay as "
    "they are",
    "[cuda]") {
    ON_EACH_DEVICE();
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (DType dtype : {DType::fp32, DType::bf16})
        for (float special : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity}) {
            TestedHeadLoss p(dtype, 3, 1, 20, 4);
            // Row 1 of the logits is special·w.
            for (size_t row = 0; row < 3; ++row) p.x.set(row, row == 1 ? special : 0.5f);
            for (size_t j = 0; j < 20; ++j) p.w.set(j, 1.0f);
            const Targets targets({3, 4, -1});
            const Buffer losses(DType::fp32, {3}), logits(dtype, {3, p.Vp}), dx(dtype, {3, 1});
            TestStream stream(head_loss_scratch_bytes(planning(), p.dtype, 3, p.Vp, p.C));
            head_loss(stream, {.x = p.x,
                               .w = p.w,
                               .logits = logits,
                               .V = p.V,
                               .targets = targets.data(),
                               .losses = losses.as<float>(),
                               .dx = dx});
            CAPTURE(name_of(dtype), special);
            CHECK(std::abs(losses[0] - std::log(20.0)) < 1e-6);
            CHECK(std::isnan(losses[1]));
            CHECK(losses[2] == 0);
            for (size_t row = 0; row < 3; ++row) {
                for (size_t j = 0; j < static_cast<size_t>(p.Vp); ++j) {
                    const double dz = logits[row * static_cast<size_t>(p.Vp) + j];
                    if (row == 2 || j >= 20)
                        CHECK(dz == 0);
                    else
                        CHECK(std::isnan(dz) == (row == 1));
                }
            }
        }
}

TEST_CASE("a capped logit of −∞ has no probability and no gradient", "[cuda]") {
    ON_EACH_DEVICE();
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        TestedHeadLoss p(dtype, 1, 1, 20, random_int(0, 9));
        p.x.set(0, 1.0f);
        for (size_t j = 0; j < 20; ++j) p.w.set(j, j == 7 ? -infinity : 1.0f);
        const Targets targets({3});
        const Buffer losses(DType::fp32, {1}), logits(dtype, {1, p.Vp});
        TestStream stream(head_loss_scratch_bytes(planning(), p.dtype, 1, p.Vp, p.C));
        const Buffer dx(dtype, {1, 1});
        head_loss(stream, {.x = p.x,
                           .w = p.w,
                           .logits = logits,
                           .V = p.V,
                           .targets = targets.data(),
                           .losses = losses.as<float>(),
                           .dx = dx,
                           .softcap = 5});
        CAPTURE(name_of(dtype));
        CHECK(std::abs(losses[0] - std::log(19.0)) < 1e-5);
        for (size_t j = 0; j < 20; ++j)
            CHECK((j == 7 ? logits[j] == 0 : std::isfinite(logits[j]) && logits[j] != 0));
    }
}

TEST_CASE("head_loss on a GPU is as accurate as on the CPU", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        Accuracy accuracy;
        const TestedHeadLoss p(dtype, random_int(24, 40), random_int(1, 70), random_int(2, 300),
                               random_int(0, 70));
        CAPTURE(name_of(dtype), p.R, p.C, p.V, p.Vp);
        const Outputs ours(p), cpu(p);
        run(p, ours, p.R, true);

        const Buffer logits(dtype, {p.R, p.Vp});
        std::vector<char> scratch(
            head_loss_scratch_bytes(planning({}, Device{}), dtype, p.R, p.Vp, p.C) + 64);
        Stream host;
        host.scratch =
            scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
        host.scratch_bytes = scratch.size() - 64;
        head_loss(host, {.x = p.x,
                         .w = p.w,
                         .logits = logits,
                         .V = p.V,
                         .targets = p.targets.data(),
                         .losses = cpu.losses.as<float>(),
                         .dx = cpu.dx,
                         .dw = cpu.dw.sink(false),
                         .z_loss = p.z_loss,
                         .softcap = p.softcap});
        const HeadLossReference exact = textbook<double>(p, false);
        accuracy.check("losses", DType::fp32, ours.losses.values(), cpu.losses.values(),
                       exact.losses);
        accuracy.check("dx", dtype, ours.dx.values(), cpu.dx.values(), exact.dx);
        accuracy.check("dw", DType::fp32, ours.dw.values(), cpu.dw.values(), exact.dw);
    }
}

}  // namespace train_gpt
