#include "kernels/embedding.h"

#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

/// Integers that kernels read.
class Integers {
  public:
    explicit Integers(const std::vector<int32_t>& values)
        : memory_(values.size() * sizeof(int32_t)) {
        std::memcpy(memory_.data(), values.data(), values.size() * sizeof(int32_t));
    }
    const int32_t* data() const { return static_cast<const int32_t*>(memory_.data()); }

  private:
    TestMemory memory_;
};

struct TestedEmbedding {
    int64_t B = random_int(1, 5), T = random_int(1, 40),
            C = random_int(0, 1) ? random_int(1, 300) : 8 * random_int(1, 40);
    int64_t n_ctx = T + random_int(0, 9), vocab = random_int(1, 60),
            padded = vocab + random_int(0, 5);
    std::vector<int32_t> tokens, doc_start;
    std::vector<float> w, positions, dout;

    TestedEmbedding() { fill(); }
    TestedEmbedding(int64_t B_, int64_t T_, int64_t C_) : B(B_), T(T_), C(C_) { fill(); }

    void fill() {
        for (int64_t b = 0; b < B; ++b) {
            // A document begins, or rows are at later positions than their number says.
            auto start = static_cast<int32_t>(random_int(0, 1) * random_int(T - n_ctx, 0));
            for (int64_t t = 0; t < T; ++t) {
                if (random_int(0, 9) == 0)
                    start = static_cast<int32_t>(random_int(0, 1) ? t : random_int(T - n_ctx, t));
                doc_start.push_back(start);
                tokens.push_back(static_cast<int32_t>(random_int(0, vocab - 1)));
            }
        }
        w = random_normal(static_cast<size_t>(padded * C));
        positions = random_normal(static_cast<size_t>(n_ctx * C));
        dout = random_normal(static_cast<size_t>(B * T * C));
    }
    EmbeddingRows rows(bool documents) const {
        return {.T = T,
                .C = C,
                .tokens = tokens,
                .doc_start = documents ? doc_start : std::vector<int32_t>()};
    }
};

/// Runs the backward pass and judges both gradients.
void check_backward(Accuracy& accuracy, const TestedEmbedding& p, DType dtype, bool documents,
                    bool accumulate) {
    CAPTURE(name_of(dtype), p.B, p.T, p.C, p.n_ctx, documents, accumulate);
    const Buffer dout(dtype, {p.B, p.T, p.C}, p.dout);
    const Buffer filled_wte(DType::fp32, {p.padded, p.C}, p.w),
        poisoned_wte(DType::fp32, {p.padded, p.C}),
        filled_wpe(DType::fp32, {p.n_ctx, p.C}, p.positions),
        poisoned_wpe(DType::fp32, {p.n_ctx, p.C});
    const bool accumulate_wte = random_int(0, 1) == 1;
    CAPTURE(accumulate_wte);
    const Buffer& dw = accumulate_wte ? filled_wte : poisoned_wte;
    const Buffer& dpositions = accumulate ? filled_wpe : poisoned_wpe;

    Values w_exact(p.w.size()), positions_exact(p.positions.size());
    if (accumulate_wte) w_exact.assign(p.w.begin(), p.w.end());
    if (accumulate) positions_exact.assign(p.positions.begin(), p.positions.end());
    Values w_plain = w_exact, positions_plain = positions_exact;
    embedding_backward_reference<double>(p.rows(documents), dout.values(), w_exact,
                                         positions_exact);
    embedding_backward_reference<float>(p.rows(documents), dout.values(), w_plain, positions_plain);
    const Integers tokens(p.tokens), doc_start(p.doc_start);
    TestStream stream(embedding_scratch_bytes(planning(), p.B * p.T, p.padded));
    embedding_backward(stream, {.dw = dw.sink(accumulate_wte),
                                .dpositions = dpositions.sink(accumulate),
                                .dout = dout,
                                .tokens = tokens.data(),
                                .vocab_rows = p.padded,
                                .n_ctx = p.n_ctx,
                                .doc_start = documents ? doc_start.data() : nullptr});
    accuracy.check("dw", DType::fp32, dw.values(), w_plain, w_exact);
    accuracy.check("dpositions", DType::fp32, dpositions.values(), positions_plain,
                   positions_exact);
}

}  // namespace

TEST_CASE("embedding forward adds the token's and the position's row, rounded once", "[cuda]") {
    ON_EACH_DEVICE();
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (int repeat = 0; repeat < 6; ++repeat) {
            const TestedEmbedding p;
            const bool documents = repeat % 2 == 1;
            CAPTURE(name_of(dtype), p.B, p.T, p.C, documents);
            const Buffer w(dtype, {p.padded, p.C}, p.w),
                positions(dtype, {p.n_ctx, p.C}, p.positions);
            const Buffer out(dtype, {p.B, p.T, p.C});
            const Integers tokens(p.tokens), doc_start(p.doc_start);
            TestStream stream;
            embedding_forward(stream, {.out = out,
                                       .tokens = tokens.data(),
                                       .w = w,
                                       .positions = positions,
                                       .doc_start = documents ? doc_start.data() : nullptr});
            const Values expected =
                embedding_forward_reference(p.rows(documents), w.values(), positions.values());
            CHECK((out.values() == stored_as(dtype, expected)));
        }
    }
}

TEST_CASE("embedding forward continues at first_position", "[cuda]") {
    ON_EACH_DEVICE();
    const TestedEmbedding p;
    const Buffer w(DType::fp32, {p.padded, p.C}, p.w),
        positions(DType::fp32, {p.n_ctx, p.C}, p.positions);
    const Buffer whole(DType::fp32, {1, p.T, p.C}), last(DType::fp32, {1, 1, p.C});
    const Integers tokens(p.tokens);
    TestStream stream;
    embedding_forward(stream,
                      {.out = whole, .tokens = tokens.data(), .w = w, .positions = positions});
    embedding_forward(stream, {.out = last,
                               .tokens = tokens.data() + p.T - 1,
                               .w = w,
                               .positions = positions,
                               .first_position = static_cast<int>(p.T - 1)});
    const std::string row = whole.bytes();
    CHECK((row.substr(row.size() - last.bytes().size()) == last.bytes()));
}

TEST_CASE("embedding backward writes every row of both tables, or adds to what they hold",
          "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (int repeat = 0; repeat < 8; ++repeat) {
            check_backward(accuracy, TestedEmbedding(), dtype, repeat % 2 == 1,
                           repeat / 2 % 2 == 1);
        }
    }
}

TEST_CASE("embedding backward sums tokens that fill the batch, and runs of every length",
          "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (DType dtype : {DType::fp32, DType::bf16}) {
        for (int repeat = 0; repeat < 6; ++repeat) {
            const int64_t T = random_int(100, 400);
            TestedEmbedding p(random_int(3, 6), T,
                              repeat % 2 ? random_int(1, 20) : 8 * random_int(1, 20));
            const int64_t length = std::vector<int64_t>{
                1 << 20, 31, 32, 33, 64, random_int(1, 200)}[static_cast<size_t>(repeat)];
            int32_t token = 0;
            for (size_t row = 0; row < p.tokens.size(); ++row) {
                // Runs of `length` rows of one token, spread over the batch by the stride.
                const size_t at = row * 7 % p.tokens.size();
                if (static_cast<int64_t>(row) % length == length - 1)
                    token = static_cast<int32_t>((token + 1) % p.vocab);
                p.tokens[at] = token;
            }
            CAPTURE(length);
            check_backward(accuracy, p, dtype, repeat % 3 == 1, random_int(0, 1) == 1);
        }
    }
}

TEST_CASE("embedding backward sorts more tokens than one thread block does", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    const TestedEmbedding p(random_int(3, 5), random_int(6000, 7000), 3);
    check_backward(accuracy, p, DType::fp32, true, false);
    check_backward(accuracy, p, DType::bf16, false, true);
}

TEST_CASE("embedding backward adds up a position that every token has", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    TestedEmbedding p(2, random_int(50, 300), 8 * random_int(1, 10));
    for (size_t row = 0; row < p.doc_start.size(); ++row)
        p.doc_start[row] = static_cast<int32_t>(static_cast<int64_t>(row) % p.T);
    check_backward(accuracy, p, DType::bf16, true, false);
}

TEST_CASE("embedding takes views that begin at any element", "[cuda]") {
    ON_EACH_DEVICE();
    const TestedEmbedding p(2, 9, 16);
    const Integers tokens(p.tokens);
    const auto view = [&](const Buffer& memory, std::initializer_list<int64_t> shape) {
        return Tensor(memory.as<float>() + 1, DType::fp32, shape);
    };
    const auto shifted = [](std::vector<float> values) {
        values.insert(values.begin(), 0.0f);
        return values;
    };
    const Buffer w(DType::fp32, {p.padded * p.C + 1}, shifted(p.w)),
        positions(DType::fp32, {p.n_ctx * p.C + 1}, shifted(p.positions));
    const Buffer out(DType::fp32, {18 * p.C + 1});
    TestStream stream(embedding_scratch_bytes(planning(), 18, p.padded));
    embedding_forward(stream, {.out = view(out, {2, 9, p.C}),
                               .tokens = tokens.data(),
                               .w = view(w, {p.padded, p.C}),
                               .positions = view(positions, {p.n_ctx, p.C})});
    const Values exact = embedding_forward_reference(p.rows(false), {p.w.begin(), p.w.end()},
                                                     {p.positions.begin(), p.positions.end()});
    const std::vector<float> expected(exact.begin(), exact.end());
    CHECK(
        (std::memcmp(out.as<float>() + 1, expected.data(), expected.size() * sizeof(float)) == 0));
    CHECK(std::isnan(out[0]));

    const Buffer dw(DType::fp32, {p.padded, p.C}, p.w),
        dwte_expected(DType::fp32, {p.padded, p.C}, p.w);
    const Buffer dout(DType::fp32, {18 * p.C + 1}, shifted(p.dout)),
        dout_aligned(DType::fp32, {2, 9, p.C}, p.dout);
    const auto backward = [&](const Buffer& to, Tensor from) {
        embedding_backward(stream, {.dw = to.sink(true),
                                    .dpositions = {},
                                    .dout = from,
                                    .tokens = tokens.data(),
                                    .vocab_rows = p.padded,
                                    .n_ctx = p.n_ctx});
    };
    backward(dw, view(dout, {2, 9, p.C}));
    backward(dwte_expected, dout_aligned);
    CHECK((dw.bytes() == dwte_expected.bytes()));
}

TEST_CASE("a vocabulary split into parts gives what the whole gives", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        for (const int64_t parts : {2, 3, 5}) {
            TestedEmbedding p(random_int(1, 5), random_int(1, 60),
                              random_int(0, 1) ? random_int(1, 50) : 8 * random_int(1, 8));
            if (p.padded < parts) continue;
            const bool documents = random_int(0, 1) == 1, accumulate = random_int(0, 1) == 1;
            CAPTURE(name_of(dtype), parts, p.padded, p.B, p.T, p.C, documents, accumulate);
            const Integers tokens(p.tokens), doc_start(p.doc_start);
            const int32_t* const starts = documents ? doc_start.data() : nullptr;
            const Buffer w(dtype, {p.padded, p.C}, p.w),
                positions(dtype, {p.n_ctx, p.C}, p.positions), dout(dtype, {p.B, p.T, p.C}, p.dout),
                whole(dtype, {p.B, p.T, p.C});
            const Buffer filled(DType::fp32, {p.padded, p.C}, p.w),
                filled_parts(DType::fp32, {p.padded, p.C}, p.w),
                poisoned(DType::fp32, {p.padded, p.C}),
                poisoned_parts(DType::fp32, {p.padded, p.C});
            const Buffer &dw = accumulate ? filled : poisoned,
                         &dwte_parts = accumulate ? filled_parts : poisoned_parts;
            TestStream stream(embedding_scratch_bytes(planning(), p.B * p.T, p.padded));
            embedding_forward(stream, {.out = whole,
                                       .tokens = tokens.data(),
                                       .w = w,
                                       .positions = positions,
                                       .doc_start = starts});
            embedding_backward(stream, {.dw = dw.sink(accumulate),
                                        .dpositions = {},
                                        .dout = dout,
                                        .tokens = tokens.data(),
                                        .vocab_rows = p.padded,
                                        .n_ctx = p.n_ctx,
                                        .doc_start = starts});

            // One part has the positions. Every element of the sum has one or two terms.
            Values sum(whole.values().size());
            const int64_t with_positions = random_int(0, parts - 1);
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t first = p.padded * part / parts,
                              rows = p.padded * (part + 1) / parts - first;
                const Buffer out(dtype, {p.B, p.T, p.C});
                embedding_forward(
                    stream, {.out = out,
                             .tokens = tokens.data(),
                             .w = w.tensor().row_range(first, rows),
                             .positions = part == with_positions ? positions.tensor() : Tensor(),
                             .doc_start = starts,
                             .first_token = first});
                const Tensor sink = dwte_parts.tensor().row_range(first, rows);
                embedding_backward(stream, {.dw = {sink.data, sink.dtype, accumulate},
                                            .dpositions = {},
                                            .dout = dout,
                                            .tokens = tokens.data(),
                                            .vocab_rows = rows,
                                            .n_ctx = p.n_ctx,
                                            .doc_start = starts,
                                            .first_token = first});
                const Values values = out.values();
                for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
            }
            CHECK((stored_as(dtype, sum) == whole.values()));
            CHECK((dwte_parts.bytes() == dw.bytes()));
        }
    }
}

TEST_CASE("embedding on the GPU agrees with the CPU", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    const TestedEmbedding p;
    const Integers tokens(p.tokens), doc_start(p.doc_start);
    const Buffer dout(DType::bf16, {p.B, p.T, p.C}, p.dout);
    const auto run = [&](Stream& stream) {
        const Buffer dw(DType::fp32, {p.padded, p.C}, p.w), dpositions(DType::fp32, {p.n_ctx, p.C});
        embedding_backward(stream, {.dw = dw.sink(true),
                                    .dpositions = dpositions.sink(false),
                                    .dout = dout,
                                    .tokens = tokens.data(),
                                    .vocab_rows = p.padded,
                                    .n_ctx = p.n_ctx,
                                    .doc_start = doc_start.data()});
        std::vector<double> values = dw.values(), positions = dpositions.values();
        values.insert(values.end(), positions.begin(), positions.end());
        return values;
    };
    TestStream gpu(embedding_scratch_bytes(planning(), p.B * p.T, p.padded));
    Stream cpu;
    const std::vector<double> ours = run(gpu), expected = run(cpu);
    double worst = 0;
    for (size_t i = 0; i < ours.size(); ++i) worst = worse(worst, std::abs(ours[i] - expected[i]));
    CHECK(worst <= 0x1p-24 * 200 *
                       20);  // at most 200 terms, with partial sums below 20 times their deviation
}

TEST_CASE("embedding backward gives the same bits whatever the number of threads, and in every run",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 4; ++repeat) {
        const TestedEmbedding p;
        const Buffer dout(DType::bf16, {p.B, p.T, p.C}, p.dout);
        const Integers tokens(p.tokens), doc_start(p.doc_start);
        check_thread_independence([&] {
            const Buffer dw(DType::fp32, {p.padded, p.C}, p.w),
                dpositions(DType::fp32, {p.n_ctx, p.C});
            TestStream stream(embedding_scratch_bytes(planning(), p.B * p.T, p.padded));
            embedding_backward(stream, {.dw = dw.sink(true),
                                        .dpositions = dpositions.sink(false),
                                        .dout = dout,
                                        .tokens = tokens.data(),
                                        .vocab_rows = p.padded,
                                        .n_ctx = p.n_ctx,
                                        .doc_start = doc_start.data()});
            return dw.bytes() + dpositions.bytes();
        });
    }
}

}  // namespace train_gpt
