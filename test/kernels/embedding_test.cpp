#include "kernels/embedding.h"

#include "test/kernels/kernel_test.h"

namespace train_gpt {

namespace {

struct Problem {
    int64_t B = random_int(1, 5), T = random_int(1, 40), C = random_int(1, 300);
    int64_t n_ctx = T + random_int(0, 9), vocab = random_int(1, 60),
            padded = vocab + random_int(0, 5);
    std::vector<int32_t> tokens, doc_start;
    std::vector<float> wte, wpe, dout;

    Problem() {
        for (int64_t b = 0; b < B; ++b) {
            int32_t start = 0;
            for (int64_t t = 0; t < T; ++t) {
                if (random_int(0, 9) == 0) start = static_cast<int32_t>(t);
                doc_start.push_back(start);
                tokens.push_back(static_cast<int32_t>(random_int(0, vocab - 1)));
            }
        }
        wte = random_normal(static_cast<size_t>(padded * C));
        wpe = random_normal(static_cast<size_t>(n_ctx * C));
        dout = random_normal(static_cast<size_t>(B * T * C));
    }
    int64_t position(size_t row, bool documents) const {
        return static_cast<int64_t>(row) % T - (documents ? doc_start[row] : 0);
    }
};

}  // namespace

TEST_CASE("embedding forward adds the token's and the position's row, rounded once") {
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (int repeat = 0; repeat < 6; ++repeat) {
            const Problem p;
            const bool documents = repeat % 2 == 1;
            CAPTURE(name_of(dtype), p.B, p.T, p.C, documents);
            const Buffer wte(dtype, {p.padded, p.C}, p.wte), wpe(dtype, {p.n_ctx, p.C}, p.wpe);
            const Buffer out(dtype, {p.B, p.T, p.C});
            TestStream stream;
            embedding_forward(stream, {.out = out,
                                       .tokens = p.tokens.data(),
                                       .wte = wte,
                                       .wpe = wpe,
                                       .doc_start = documents ? p.doc_start.data() : nullptr});
            std::vector<double> expected;
            for (size_t row = 0; row < p.tokens.size(); ++row) {
                for (int64_t c = 0; c < p.C; ++c) {
                    expected.push_back(
                        wte[static_cast<size_t>(p.tokens[row] * p.C + c)] +
                        wpe[static_cast<size_t>(p.position(row, documents) * p.C + c)]);
                }
            }
            CHECK((out.values() == stored_as(dtype, expected)));
        }
    }
}

TEST_CASE("embedding forward continues at first_position") {
    const Problem p;
    const Buffer wte(DType::fp32, {p.padded, p.C}, p.wte), wpe(DType::fp32, {p.n_ctx, p.C}, p.wpe);
    const Buffer whole(DType::fp32, {1, p.T, p.C}), last(DType::fp32, {1, 1, p.C});
    TestStream stream;
    embedding_forward(stream, {.out = whole, .tokens = p.tokens.data(), .wte = wte, .wpe = wpe});
    embedding_forward(stream, {.out = last,
                               .tokens = p.tokens.data() + p.T - 1,
                               .wte = wte,
                               .wpe = wpe,
                               .first_position = static_cast<int>(p.T - 1)});
    const std::string row = whole.bytes();
    CHECK((row.substr(row.size() - last.bytes().size()) == last.bytes()));
}

TEST_CASE(
    "embedding backward always adds to dwte, and writes every row of dwpe unless it accumulates") {
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (int repeat = 0; repeat < 8; ++repeat) {
            const Problem p;
            const bool documents = repeat % 2 == 1, accumulate = repeat / 2 % 2 == 1;
            CAPTURE(name_of(dtype), p.B, p.T, p.C, p.n_ctx, documents, accumulate);
            const Buffer dout(dtype, {p.B, p.T, p.C}, p.dout);
            const Buffer dwte(DType::fp32, {p.padded, p.C}, p.wte);
            const Buffer filled(DType::fp32, {p.n_ctx, p.C}, p.wpe),
                poisoned(DType::fp32, {p.n_ctx, p.C});
            const Buffer& dwpe = accumulate ? filled : poisoned;

            // Sums in token order, in both precisions; the kernel's order is the same, so fp32 must agree in every bit.
            std::vector<float> wte_plain(p.wte), wpe_plain(p.wpe.size());
            if (accumulate) wpe_plain = p.wpe;
            std::vector<double> wte_exact(wte_plain.begin(), wte_plain.end());
            std::vector<double> wpe_exact(wpe_plain.begin(), wpe_plain.end());
            for (size_t row = 0; row < p.tokens.size(); ++row) {
                for (int64_t c = 0; c < p.C; ++c) {
                    const double gradient =
                        dout[row * static_cast<size_t>(p.C) + static_cast<size_t>(c)];
                    const size_t token = static_cast<size_t>(p.tokens[row] * p.C + c);
                    const size_t position =
                        static_cast<size_t>(p.position(row, documents) * p.C + c);
                    wte_exact[token] += gradient;
                    wpe_exact[position] += gradient;
                    wte_plain[token] += static_cast<float>(gradient);
                    wpe_plain[position] += static_cast<float>(gradient);
                }
            }
            TestStream stream(embedding_scratch_bytes({}, p.B * p.T, p.padded));
            embedding_backward(stream, {.dwte = dwte.sink(random_int(0, 1) == 1),
                                        .dwpe = dwpe.sink(accumulate),
                                        .dout = dout,
                                        .tokens = p.tokens.data(),
                                        .n_ctx = p.n_ctx,
                                        .doc_start = documents ? p.doc_start.data() : nullptr});
            check_accuracy("dwte", DType::fp32, dwte.values(), {wte_plain.begin(), wte_plain.end()},
                           wte_exact);
            check_accuracy("dwpe", DType::fp32, dwpe.values(), {wpe_plain.begin(), wpe_plain.end()},
                           wpe_exact);
        }
    }
}

TEST_CASE("embedding backward gives the same bits whatever the number of threads") {
    for (int repeat = 0; repeat < 4; ++repeat) {
        const Problem p;
        const Buffer dout(DType::bf16, {p.B, p.T, p.C}, p.dout);
        check_thread_independence([&] {
            const Buffer dwte(DType::fp32, {p.padded, p.C}, p.wte),
                dwpe(DType::fp32, {p.n_ctx, p.C});
            TestStream stream(embedding_scratch_bytes({}, p.B * p.T, p.padded));
            embedding_backward(stream, {.dwte = dwte.sink(true),
                                        .dwpe = dwpe.sink(false),
                                        .dout = dout,
                                        .tokens = p.tokens.data(),
                                        .n_ctx = p.n_ctx,
                                        .doc_start = p.doc_start.data()});
            return dwte.bytes() + dwpe.bytes();
        });
    }
}

}  // namespace train_gpt
