#include "kernels/rope.h"

#include <algorithm>
#include <numbers>
#include <optional>

#include "base/error.h"
#include "kernels/rope_table.h"
#include "test/kernels/kernel_test.h"
#include "test/kernels/reference.h"

namespace train_gpt {

namespace {

/// Heads of q, k and v packed as a projection leaves them, in memory that begins `shift` elements
/// before them.
struct Packed {
    int heads;
    RopeShape shape;
    Buffer memory;
    int64_t shift;

    Packed(const RopeShape& s, int heads_, int64_t shift_ = 0)
        : heads(heads_),
          shape(s),
          memory(s.dtype, {int64_t{s.B} * s.T * heads_ * s.D + shift_}),
          shift(shift_) {}

    size_t size() const { return static_cast<size_t>(memory.tensor().numel() - shift); }
    void fill(const std::vector<float>& values) {
        for (size_t i = 0; i < values.size(); ++i)
            memory.set(i + static_cast<size_t>(shift), values[i]);
    }
    void fill(float stddev = 1) { fill(random_normal(size(), stddev)); }
    void fill(const Packed& other) {
        const std::vector<double> values = other.memory.values();
        fill(std::vector<float>(values.begin() + other.shift, values.end()));
    }
    HeadsView from(int first) const {
        auto* data = static_cast<char*>(memory.tensor().data) +
                     static_cast<size_t>(shift + first * shape.D) * size_of(shape.dtype);
        const int64_t width = int64_t{heads} * shape.D;
        return {data, shape.T * width, width, shape.D};
    }
    /// Heads [first, first + count) of each token.
    Values part(int first, int count) const {
        const Values all = memory.values();
        const auto width = int64_t{heads} * shape.D, D = int64_t{shape.D};
        Values result;
        for (auto row = all.begin() + shift; row != all.end(); row += width)
            result.insert(result.end(), row + first * D, row + (first + count) * D);
        return result;
    }
};

/// What is normed before it is turned.
enum Form { nothing, heads, whole_width };
constexpr Form all_forms[] = {nothing, heads, whole_width};

/// Random operands of both passes, and their results.
struct TestedRope {
    static constexpr int most_ahead = 20;
    RopeShape shape;
    Form form;
    bool normed;
    float epsilon;
    std::optional<Buffer> doc_start;
    RopeFrequencies frequencies;
    Buffer table;
    Packed qkv, qk, dqkv;  // qk: the results of a norm
    Buffer q_w, k_w, dq_w, dk_w, sums, dots;

    TestedRope(const RopeShape& s, Form form_, int64_t shift = 0)
        : shape(s),
          form(form_),
          normed(form != nothing),
          epsilon(random_int(0, 1) ? 1e-6f : 1e-2f),
          frequencies{.D = s.D, .theta = random_int(0, 1) ? 10000.0 : 500.0},
          table(DType::fp32, {s.first_position + s.T + most_ahead, s.D},
                rope_table(frequencies, s.first_position + s.T + most_ahead)),
          qkv(s, s.H + 2 * s.H_kv, shift),
          qk(s, s.H + s.H_kv, shift),
          dqkv(s, s.H + 2 * s.H_kv, shift),
          q_w(s.dtype, {weight_size(s.H)}, weights(weight_size(s.H))),
          k_w(s.dtype, {weight_size(s.H_kv)}, weights(weight_size(s.H_kv))),
          dq_w(DType::fp32, {weight_size(s.H)}),
          dk_w(DType::fp32, {weight_size(s.H_kv)}),
          sums(DType::fp32, {int64_t{s.B} * s.T, 2}),
          dots(DType::fp32, {int64_t{s.B} * s.T, 2}) {
        shape.table = table;
        qkv.fill(2);
        dqkv.fill();
    }
    /// Documents begin at random places, the first of them maybe before this chunk; or rows are
    /// at later positions than their number says.
    void cut_into_documents() {
        doc_start.emplace(DType::int32, std::initializer_list<int64_t>{shape.B, shape.T});
        auto* starts = doc_start->as<int32_t>();
        for (int b = 0; b < shape.B; ++b) {
            auto start = static_cast<int32_t>(random_int(-most_ahead, shape.first_position));
            for (int t = 0; t < shape.T; ++t) {
                const int64_t here = shape.first_position + t;
                if (random_int(0, 4) == 0)
                    start = static_cast<int32_t>(random_int(0, 1) ? here
                                                                  : random_int(-most_ahead, here));
                starts[b * shape.T + t] = start;
            }
        }
        shape.doc_start = starts;
    }

    QkNorm norm() const {
        if (!normed) return {.epsilon = epsilon};
        QkNorm norm{.q_w = q_w, .k_w = k_w, .epsilon = epsilon};
        if (form == whole_width)
            norm.width = {.H = shape.H, .H_kv = shape.H_kv, .sums = sums, .dots = dots};
        return norm;
    }
    int64_t weight_size(int H) const { return int64_t{shape.D} * (form == whole_width ? H : 1); }
    /// What a norm over the whole width needs before each pass.
    void sum_squares(Stream& stream) const {
        if (form == whole_width)
            qk_norm_sums(stream,
                         {.shape = shape, .q = qkv.from(0), .k = qkv.from(shape.H), .sums = sums});
    }
    void sum_dots(Stream& stream) const {
        if (form == whole_width)
            qk_norm_dots(stream, {.shape = shape,
                                  .dq = dqkv.from(0),
                                  .dk = dqkv.from(shape.H),
                                  .q = qkv.from(0),
                                  .k = qkv.from(shape.H),
                                  .q_w = q_w,
                                  .k_w = k_w,
                                  .dots = dots});
    }
    /// Where the forward pass writes.
    const Packed& rotated() const { return normed ? qk : qkv; }
    void forward(Stream& stream) const { forward(stream, rotated()); }
    void forward(Stream& stream, const Packed& out) const {
        sum_squares(stream);
        rope_forward(stream, {.shape = shape,
                              .q = qkv.from(0),
                              .k = qkv.from(shape.H),
                              .q_out = out.from(0),
                              .k_out = out.from(shape.H),
                              .norm = norm()});
    }
    void backward(Stream& stream, bool accumulate = false) const {
        sum_squares(stream);
        sum_dots(stream);
        rope_backward(stream, {.shape = shape,
                               .dq = dqkv.from(0),
                               .dk = dqkv.from(shape.H),
                               .q = normed ? qkv.from(0) : HeadsView{},
                               .k = normed ? qkv.from(shape.H) : HeadsView{},
                               .norm = norm(),
                               .dq_w = normed ? dq_w.sink(accumulate) : GradientSink{},
                               .dk_w = normed ? dk_w.sink(accumulate) : GradientSink{}});
    }
    size_t scratch() const {
        return normed ? rope_scratch_bytes(planning(), shape, form == whole_width) : 0;
    }
    std::string bytes() const {
        return rotated().memory.bytes() + dqkv.memory.bytes() +
               (normed ? dq_w.bytes() + dk_w.bytes() : "");
    }

    template <class Real>
    RopeReference reference() const {
        RopeProblem p{.shape = shape,
                      .frequencies = rope_frequencies(frequencies),
                      .q = qkv.part(0, shape.H),
                      .k = qkv.part(shape.H, shape.H_kv),
                      .dq = dqkv.part(0, shape.H),
                      .dk = dqkv.part(shape.H, shape.H_kv),
                      .epsilon = epsilon,
                      .whole_width = form == whole_width};
        if (normed) p.q_w = q_w.values(), p.k_w = k_w.values();
        if (doc_start) {
            const auto* starts = doc_start->as<int32_t>();
            p.doc_start.assign(starts, starts + shape.B * shape.T);
        }
        return rope_reference<Real>(p, std::is_same_v<Real, float> ? shape.dtype : DType::fp32);
    }
    std::string text() const {
        return concat(name_of(shape.dtype), " B=", shape.B, " T=", shape.T, " H=", shape.H,
                      " H_kv=", shape.H_kv, " D=", shape.D, " first=", shape.first_position,
                      form == heads         ? " with a norm of heads"
                      : form == whole_width ? " with a norm over the width"
                                            : "",
                      doc_start ? ", documents" : "");
    }

  private:
    static std::vector<float> weights(int64_t n) {
        std::vector<float> w = random_normal(static_cast<size_t>(n), 0.5f);
        for (float& value : w) value += 1;
        return w;
    }
};

RopeShape random_shape(DType dtype, int D, int H, int H_kv) {
    const bool small = device_is_simulated();
    return {.dtype = dtype,
            .B = static_cast<int>(random_int(1, 3)),
            .T = static_cast<int>(random_int(1, small ? 9 : 37)),
            .H = H,
            .H_kv = H_kv,
            .D = D,
            .first_position = random_int(0, 1) ? random_int(1, 300) : 0};
}

/// Both passes, compared with float64; what is not q or k must keep its bits.
void check(Accuracy& accuracy, const TestedRope& p, bool accumulate = false) {
    INFO(p.text());
    const int H = p.shape.H, H_kv = p.shape.H_kv;
    const RopeReference exact = p.reference<double>(), plain = p.reference<float>();
    const Values v = p.qkv.part(H + H_kv, H_kv), dv = p.dqkv.part(H + H_kv, H_kv);
    const Values before_q = p.dq_w.values(), before_k = p.dk_w.values();

    TestStream stream(p.scratch());
    const DType dtype = p.shape.dtype;
    const auto judge = [&](const char* what, DType of, const Values& ours,
                           Values RopeReference::*member, const Values& before = {}) {
        Values reference = exact.*member, like = plain.*member;
        for (size_t i = 0; i < before.size(); ++i) reference[i] += before[i], like[i] += before[i];
        accuracy.check(what, of, ours, like, reference);
    };
    p.backward(stream, accumulate);  // before q and k are overwritten
    p.forward(stream);
    judge("q", dtype, p.rotated().part(0, H), &RopeReference::q);
    judge("k", dtype, p.rotated().part(H, H_kv), &RopeReference::k);
    judge("dq", dtype, p.dqkv.part(0, H), &RopeReference::dq);
    judge("dk", dtype, p.dqkv.part(H, H_kv), &RopeReference::dk);
    if (p.normed) {
        judge("dq_w", DType::fp32, p.dq_w.values(), &RopeReference::dq_w,
              accumulate ? before_q : Values());
        judge("dk_w", DType::fp32, p.dk_w.values(), &RopeReference::dk_w,
              accumulate ? before_k : Values());
    }
    CHECK((p.qkv.part(H + H_kv, H_kv) == v));
    CHECK((p.dqkv.part(H + H_kv, H_kv) == dv));
}

}  // namespace

TEST_CASE("rope matches float64 for every head size and ratio of heads, both passes", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (const int D : {2, 4, 6, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 254, 256,
                        2 * static_cast<int>(random_int(1, 128))}) {
        const int ratio = std::vector{1, 2, 4, 8, 3}[static_cast<size_t>(random_int(0, 4))];
        const int H_kv = static_cast<int>(random_int(1, ratio > 2 ? 2 : 4));
        for (const DType dtype : {DType::fp32, DType::bf16})
            for (const Form form : all_forms) {
                TestedRope p(random_shape(dtype, D, ratio * H_kv, H_kv), form);
                if (random_int(0, 1)) p.cut_into_documents();
                check(accuracy, p);
            }
    }
}

TEST_CASE("rope takes any number of heads, with and without a norm", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (const int H_kv : {1, 2, static_cast<int>(random_int(17, 20))})
        for (const DType dtype : {DType::fp32, DType::bf16})
            for (const Form form : all_forms) {
                const int least = 16 / H_kv + 1;
                const int H = H_kv * static_cast<int>(random_int(least, least + 24 / H_kv));
                RopeShape shape =
                    random_shape(dtype, 2 * static_cast<int>(random_int(1, 20)), H, H_kv);
                shape.T = static_cast<int>(random_int(1, 5));
                check(accuracy, TestedRope(shape, form));
            }
}

TEST_CASE("rope adds to the norm weights' gradients or overwrites them, as asked", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const bool accumulate : {false, true}) {
            TestedRope p(random_shape(dtype, 2 * static_cast<int>(random_int(8, 64)), 3, 1),
                         random_int(0, 1) ? heads : whole_width);
            if (accumulate)
                for (Buffer* sums : {&p.dq_w, &p.dk_w})
                    for (size_t i = 0; i < static_cast<size_t>(sums->tensor().numel()); ++i)
                        sums->set(i, random_normal(1, 5)[0]);
            check(accuracy, p, accumulate);
        }
}

TEST_CASE("rope without one of the weights' gradients computes the others", "[cuda]") {
    ON_EACH_DEVICE();
    for (const Form form : {heads, whole_width}) {
        const TestedRope p(random_shape(DType::fp32, 16, 4, 2), form);
        TestedRope other(p.shape, form);
        other.qkv.fill(p.qkv);
        other.dqkv.fill(p.dqkv);
        TestStream stream(p.scratch());
        p.backward(stream);
        rope_backward(stream, {.shape = p.shape,
                               .dq = other.dqkv.from(0),
                               .dk = other.dqkv.from(p.shape.H),
                               .q = p.qkv.from(0),
                               .k = p.qkv.from(p.shape.H),
                               .norm = p.norm(),
                               .dk_w = other.dk_w.sink(false)});
        CHECK((other.dqkv.memory.bytes() == p.dqkv.memory.bytes()));
        CHECK((other.dk_w.bytes() == p.dk_w.bytes()));
        CHECK(std::isnan(other.dq_w[0]));
    }
}

TEST_CASE("ranks that add their sums norm the whole width of their heads together", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        const int ranks = static_cast<int>(random_int(2, 3)),
                  ratio = static_cast<int>(random_int(1, 3));
        const int D = 2 * static_cast<int>(random_int(4, 64)),
                  H_kv = ranks * static_cast<int>(random_int(1, 2)), H = ratio * H_kv;
        TestedRope p(random_shape(dtype, D, H, H_kv), whole_width);
        if (random_int(0, 1)) p.cut_into_documents();
        INFO(p.text() << " on " << ranks << " ranks");
        const RopeReference exact = p.reference<double>(), plain = p.reference<float>();

        // What a rank has of q and k, of their gradients, of the weights and of their gradients.
        RopeShape own = p.shape;
        own.H = H / ranks, own.H_kv = H_kv / ranks;
        const auto part = [&](const Buffer& all, int rank, int own_heads) {
            return Tensor(
                static_cast<char*>(all.tensor().data) +
                    static_cast<size_t>(rank * own_heads * D) * size_of(all.tensor().dtype),
                all.tensor().dtype, {int64_t{own_heads} * D});
        };
        const auto sink = [&](const Buffer& all, int rank, int own_heads) {
            return GradientSink{part(all, rank, own_heads).data, DType::fp32};
        };
        const auto q = [&](const Packed& of, int rank) { return of.from(rank * own.H); };
        const auto k = [&](const Packed& of, int rank) { return of.from(H + rank * own.H_kv); };

        TestStream stream(rope_scratch_bytes(planning(), own, true));
        const Buffer of_rank(DType::fp32, {int64_t{own.B} * own.T, 2});
        const auto add_over_ranks = [&](Buffer& total, const auto& of) {
            for (size_t i = 0; i < static_cast<size_t>(total.tensor().numel()); ++i)
                total.set(i, 0);
            for (int rank = 0; rank < ranks; ++rank) {
                of(rank);
                for (size_t i = 0; i < static_cast<size_t>(total.tensor().numel()); ++i)
                    total.set(i, static_cast<float>(total[i] + of_rank[i]));
            }
        };
        add_over_ranks(p.sums, [&](int rank) {
            qk_norm_sums(stream,
                         {.shape = own, .q = q(p.qkv, rank), .k = k(p.qkv, rank), .sums = of_rank});
        });
        add_over_ranks(p.dots, [&](int rank) {
            qk_norm_dots(stream, {.shape = own,
                                  .dq = q(p.dqkv, rank),
                                  .dk = k(p.dqkv, rank),
                                  .q = q(p.qkv, rank),
                                  .k = k(p.qkv, rank),
                                  .q_w = part(p.q_w, rank, own.H),
                                  .k_w = part(p.k_w, rank, own.H_kv),
                                  .dots = of_rank});
        });
        for (int rank = 0; rank < ranks; ++rank) {
            QkNorm norm = p.norm();
            norm.q_w = part(p.q_w, rank, own.H), norm.k_w = part(p.k_w, rank, own.H_kv);
            rope_backward(stream, {.shape = own,
                                   .dq = q(p.dqkv, rank),
                                   .dk = k(p.dqkv, rank),
                                   .q = q(p.qkv, rank),
                                   .k = k(p.qkv, rank),
                                   .norm = norm,
                                   .dq_w = sink(p.dq_w, rank, own.H),
                                   .dk_w = sink(p.dk_w, rank, own.H_kv)});
            norm.width.dots = {};
            rope_forward(stream, {.shape = own,
                                  .q = q(p.qkv, rank),
                                  .k = k(p.qkv, rank),
                                  .q_out = q(p.qk, rank),
                                  .k_out = k(p.qk, rank),
                                  .norm = norm});
        }
        accuracy.check("q", dtype, p.qk.part(0, H), plain.q, exact.q);
        accuracy.check("k", dtype, p.qk.part(H, H_kv), plain.k, exact.k);
        accuracy.check("dq", dtype, p.dqkv.part(0, H), plain.dq, exact.dq);
        accuracy.check("dk", dtype, p.dqkv.part(H, H_kv), plain.dk, exact.dk);
        accuracy.check("dq_w", DType::fp32, p.dq_w.values(), plain.dq_w, exact.dq_w);
        accuracy.check("dk_w", DType::fp32, p.dk_w.values(), plain.dk_w, exact.dk_w);
    }
}

TEST_CASE("rope writes in place what it writes elsewhere, with and without a norm", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const Form form : all_forms) {
            const int D = 8 * static_cast<int>(random_int(1, 32));
            const TestedRope p(random_shape(dtype, D, 6, 2), form);
            INFO(p.text());
            TestStream stream;
            const Packed elsewhere(p.shape, p.shape.H + p.shape.H_kv);
            p.forward(stream, elsewhere);
            p.forward(stream, p.qkv);
            CHECK((p.qkv.part(0, 8) == elsewhere.part(0, 8)));
        }
}

TEST_CASE("rope turns tokens after a cache, and later documents, as those of a whole sequence",
          "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const Form form : {nothing, heads}) {
            RopeShape s = random_shape(dtype, 2 * static_cast<int>(random_int(1, 64)), 4, 2);
            s.T += 2, s.first_position = 0;
            const TestedRope whole(s, form);
            INFO(whole.text());
            TestStream stream;
            const Packed expected(s, 6);
            whole.forward(stream, expected);

            // The tokens from `split` on, as a call of their own.
            const int split = static_cast<int>(random_int(1, s.T - 1));
            const Packed chunk(s, 6);
            const auto after = [&](HeadsView view) {
                view.data = static_cast<char*>(view.data) +
                            static_cast<size_t>(split * view.token) * size_of(dtype);
                return view;
            };
            RopeShape of_chunk = whole.shape;
            of_chunk.T -= split, of_chunk.first_position = split;
            rope_forward(stream, {.shape = of_chunk,
                                  .q = after(whole.qkv.from(0)),
                                  .k = after(whole.qkv.from(s.H)),
                                  .q_out = after(chunk.from(0)),
                                  .k_out = after(chunk.from(s.H)),
                                  .norm = whole.norm()});
            const Values ours = chunk.part(0, 6), all = expected.part(0, 6);
            const size_t width = static_cast<size_t>(6 * s.D), T = static_cast<size_t>(s.T);
            int wrong = 0;
            for (size_t i = 0; i < all.size(); ++i)
                wrong += i / width % T < static_cast<size_t>(split) ? !std::isnan(ours[i])
                                                                    : !(ours[i] == all[i]);
            CHECK(wrong == 0);

            // Its first tokens, repeated as a second document.
            TestedRope documents(s, form);
            documents.shape.table = whole.table;
            std::vector<float> values(documents.qkv.size());
            const std::vector<double> first = whole.qkv.memory.values();
            const size_t packed = static_cast<size_t>(s.H + 2 * s.H_kv) * static_cast<size_t>(s.D);
            for (size_t i = 0; i < values.size(); ++i) {
                const size_t t = i / packed % T, start = t < static_cast<size_t>(split)
                                                             ? size_t{0}
                                                             : static_cast<size_t>(split);
                values[i] = static_cast<float>(first[i - start * packed]);
            }
            documents.qkv.fill(values);
            documents.cut_into_documents();
            for (int i = 0; i < s.B * s.T; ++i)
                documents.doc_start->as<int32_t>()[i] = i % s.T < split ? 0 : split;
            rope_forward(stream, {.shape = documents.shape,
                                  .q = documents.qkv.from(0),
                                  .k = documents.qkv.from(s.H),
                                  .q_out = documents.qk.from(0),
                                  .k_out = documents.qk.from(s.H),
                                  .norm = whole.norm()});
            const Values twice = documents.qk.part(0, 6);
            wrong = 0;
            for (size_t i = 0; i < all.size(); ++i) {
                const size_t t = i / width % T, start = static_cast<size_t>(split);
                wrong += !(twice[i] == all[t < start ? i : i - start * width]);
            }
            CHECK(wrong == 0);
        }
}

TEST_CASE("rope takes heads that begin at any element and writes nothing next to them", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const Form form : all_forms)
            for (const int D : {32, 64, 128, 256}) {
                const TestedRope p(random_shape(dtype, D, 2, 1), form, 1);
                check(accuracy, p);
                CHECK(std::isnan(p.qkv.memory[0]));
                CHECK(std::isnan(p.qk.memory[0]));
                CHECK(std::isnan(p.dqkv.memory[0]));
            }
}

TEST_CASE("rope processes more tokens than fit into one round of thread blocks", "[cuda]") {
    ON_EACH_DEVICE();
    Accuracy accuracy;
    for (const auto& [dtype, D, T] :
         {std::tuple{DType::bf16, 16, random_int(69'000, 70'000)},  // one lane
          {DType::fp32, 256, random_int(2200, 2300)},               // a whole warp
          {DType::bf16, 94, random_int(2200, 2300)}}) {             // single elements
        RopeShape s{.dtype = dtype, .B = 1, .T = static_cast<int>(T), .H = 3, .H_kv = 1, .D = D};
        for (const Form form : all_forms) check(accuracy, TestedRope(s, form));
    }
}

TEST_CASE("rope of a head of zeros is zero, and its gradients are finite", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        TestedRope p(random_shape(dtype, 64, 1, 1), random_int(0, 1) ? heads : whole_width);
        p.qkv.fill(0);
        TestStream stream(p.scratch());
        p.forward(stream);
        p.backward(stream);
        const Values out = p.qk.part(0, 2), gradients = p.dqkv.part(0, 2);
        CHECK(std::ranges::all_of(out, [](double value) { return value == 0; }));
        CHECK(std::ranges::all_of(gradients, [](double value) { return std::isfinite(value); }));
        CHECK(std::ranges::all_of(p.dq_w.values(), [](double value) { return value == 0; }));
    }
}

TEST_CASE("rope on the GPU agrees with the CPU", "[cuda]") {
    ON_EACH_DEVICE();
    if (!test_device().is_cuda()) return;
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const int D : {64, 66}) {
            const TestedRope gpu(random_shape(dtype, D, 4, 2), heads);
            TestedRope cpu(gpu.shape, heads);
            cpu.qkv.fill(gpu.qkv);
            cpu.dqkv.fill(gpu.dqkv);
            std::vector<char> scratch(rope_scratch_bytes(planning({}, Device{}), gpu.shape));
            Stream host;
            host.scratch = scratch.data(), host.scratch_bytes = scratch.size();
            TestStream stream(gpu.scratch());
            gpu.forward(stream);
            gpu.backward(stream);
            cpu.shape.table = gpu.table;
            cpu.epsilon = gpu.epsilon;
            for (size_t i = 0; i < static_cast<size_t>(D); ++i) {
                cpu.q_w.set(i, static_cast<float>(gpu.q_w[i]));
                cpu.k_w.set(i, static_cast<float>(gpu.k_w[i]));
            }
            cpu.forward(host);
            cpu.backward(host);
            const auto worst = [](const Values& ours, const Values& theirs) {
                double result = 0;
                for (size_t i = 0; i < ours.size(); ++i)
                    result =
                        worse(result, std::abs(ours[i] - theirs[i]) / (std::abs(theirs[i]) + 1));
                return result;
            };
            const double rounding = dtype == DType::bf16 ? 0x1p-7 : 0x1p-18;
            INFO(gpu.text());
            CHECK(worst(gpu.qk.part(0, 6), cpu.qk.part(0, 6)) <= rounding);
            CHECK(worst(gpu.dqkv.part(0, 6), cpu.dqkv.part(0, 6)) <= rounding);
            CHECK(worst(gpu.dq_w.values(), cpu.dq_w.values()) <= 0x1p-16);
            CHECK(worst(gpu.dk_w.values(), cpu.dk_w.values()) <= 0x1p-16);
        }
}

TEST_CASE("rope gives the same bits whatever the number of threads, and in every run", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16})
        for (const Form form : all_forms) {
            RopeShape s = random_shape(dtype, 2 * static_cast<int>(random_int(1, 64)), 4, 2);
            if (!device_is_simulated()) s.T = static_cast<int>(random_int(100, 200));
            const TestedRope p(s, form);
            Packed qkv(s, 8), dqkv(s, 8);
            INFO(p.text());
            qkv.fill(p.qkv);
            dqkv.fill(p.dqkv);
            TestedRope run(s, form);
            check_thread_independence([&] {
                run.qkv.fill(qkv);
                run.dqkv.fill(dqkv);
                TestStream stream(run.scratch());
                run.backward(stream);
                run.forward(stream);
                return run.bytes();
            });
        }
}

TEST_CASE("rope frequencies are those of the published formulas") {
    for (int repeat = 0; repeat < 10; ++repeat) {
        RopeFrequencies of{.D = 2 * static_cast<int>(random_int(1, 128)),
                           .theta = static_cast<double>(random_int(1000, 1'000'000)),
                           .factor = static_cast<double>(random_int(2, 32))};
        const double low = of.low_frequency_factor = static_cast<double>(random_int(1, 3)),
                     high = of.high_frequency_factor = low + static_cast<double>(random_int(1, 4));
        of.original_context = int64_t{1} << random_int(9, 14);
        for (const RopeScaling scaling :
             {RopeScaling::none, RopeScaling::linear, RopeScaling::llama3}) {
            of.scaling = scaling;
            const std::vector<double> ours = rope_frequencies(of);
            REQUIRE(ours.size() == static_cast<size_t>(of.D / 2));
            double worst = 0;
            for (size_t i = 0; i < ours.size(); ++i) {
                const double f = std::exp(-std::log(of.theta) * 2 * static_cast<double>(i) / of.D);
                const double n = static_cast<double>(of.original_context),
                             wavelength = 2 * std::numbers::pi / f;
                double expected = f;
                if (scaling == RopeScaling::linear) expected = f / of.factor;
                if (scaling == RopeScaling::llama3) {
                    const double s = (n / wavelength - low) / (high - low);
                    if (wavelength > n / low)
                        expected = f / of.factor;
                    else if (wavelength >= n / high)
                        expected = (1 - s) * (f / of.factor) + s * f;
                }
                worst = worse(worst, std::abs(ours[i] / expected - 1));
            }
            CAPTURE(of.D, of.theta, of.factor, low, high, of.original_context);
            CHECK(worst < 1e-12);
        }
    }
}

namespace {

RopeFrequencies random_yarn() {
    RopeFrequencies of{.D = 2 * static_cast<int>(random_int(1, 128)),
                       .theta = static_cast<double>(random_int(1000, 1'000'000)),
                       .scaling = RopeScaling::yarn,
                       .factor = static_cast<double>(random_int(2, 128)) / 2,
                       .original_context = random_int(1, 3) << random_int(4, 16)};
    of.yarn.beta_fast = static_cast<double>(random_int(4, 128)) / 2;
    of.yarn.beta_slow = of.yarn.beta_fast / static_cast<double>(random_int(2, 64));
    of.yarn.truncate = random_int(0, 1) != 0;
    return of;
}

/// From how often each frequency turns in the original context: the logarithms of these numbers
/// fall in equal steps, so the share of the division is linear in them.
std::vector<double> yarn_reference(const RopeFrequencies& of) {
    const auto f_at = [&](double i) { return std::exp(-2 * i / of.D * std::log(of.theta)); };
    const auto turns = [&](double i) {
        return static_cast<double>(of.original_context) * f_at(i) / (2 * std::numbers::pi);
    };
    // Whole frequencies between which the number of turns passes a bound; bisection otherwise.
    const auto where = [&](double bound, bool up) {
        double below = -4096, above = 4096;  // turns(below) > bound >= turns(above)
        const double step = of.yarn.truncate ? 1 : 1e-11;
        while (above - below > step) {
            double middle = below + (above - below) / 2;
            if (of.yarn.truncate) middle = std::floor(middle);
            (turns(middle) > bound ? below : above) = middle;
        }
        return up ? above : below;
    };
    const double first = std::max(0.0, where(of.yarn.beta_fast, false)),
                 last = std::min(of.D - 1.0, where(of.yarn.beta_slow, true));
    std::vector<double> result;
    for (int i = 0; i < of.D / 2; ++i) {
        double share = (i - first) / ((last == first ? last + 0.001 : last) - first);
        share = share < 0 ? 0 : share > 1 ? 1 : share;
        result.push_back(f_at(i) * (1 + share * (1 / of.factor - 1)));
    }
    return result;
}

}  // namespace

TEST_CASE("yarn's frequencies and attention factor are those of the published formulas") {
    for (int repeat = 0; repeat < 30; ++repeat) {
        RopeFrequencies of = random_yarn();
        CAPTURE(of.D, of.theta, of.factor, of.original_context, of.yarn.beta_fast,
                of.yarn.beta_slow, of.yarn.truncate);
        const std::vector<double> ours = rope_frequencies(of), expected = yarn_reference(of);
        REQUIRE(ours.size() == expected.size());
        double worst = 0;
        for (size_t i = 0; i < ours.size(); ++i)
            worst = worse(worst, std::abs(ours[i] / expected[i] - 1));
        CHECK(worst < 1e-9);

        const auto m = [&](double mscale) { return mscale * std::log(of.factor) / 10 + 1; };
        CHECK(std::abs(rope_attention_factor(of) / m(1) - 1) < 1e-14);
        of.yarn.mscale = static_cast<double>(random_int(1, 30)) / 10;
        CHECK(std::abs(rope_attention_factor(of) / m(1) - 1) < 1e-14);
        of.yarn.mscale_all_dim = static_cast<double>(random_int(1, 30)) / 10;
        CHECK(std::abs(rope_attention_factor(of) * m(of.yarn.mscale_all_dim) / m(of.yarn.mscale) -
                       1) < 1e-14);
        of.yarn.attention_factor = 0.77;
        CHECK(rope_attention_factor(of) == 0.77);
        of.yarn = {}, of.factor = 1;
        CHECK(rope_attention_factor(of) == 1);
        of.scaling = RopeScaling::linear, of.factor = 4, of.yarn.attention_factor = 2;
        CHECK(rope_attention_factor(of) == 1);
    }
}

// The frequencies and factors of transformers 5.24.
TEST_CASE("yarn computes what transformers computes") {
    struct Case {
        RopeFrequencies of;
        double attention_factor;
        std::vector<std::pair<size_t, double>> frequencies;
    };
    for (const auto& [of, factor, frequencies] : std::vector<Case>{
             {{.D = 64,
               .theta = 150000,
               .scaling = RopeScaling::yarn,
               .factor = 32,
               .original_context = 4096,
               .yarn = {.beta_fast = 32, .beta_slow = 1, .truncate = false}},  // gpt-oss
              1.3465735902799727,
              {{0, 1.0},
               {1, 0.6890443058881633},
               {8, 0.050813274815461475},
               {10, 0.019335001126540362},
               {12, 0.006794959489732219},
               {16, 0.00045648391922324086},
               {21, 1.2532569824095001e-05},
               {31, 3.0235114281192144e-07}}},
             {{.D = 128,
             .theta = 1e6,
             .scaling = RopeScaling::yarn,
             .factor = 4,
             .original_context = 32768,
             .yarn = {}},  // qwen
              1.138629436111989,
              {{0, 1.0},
               {1, 0.8058421877614819},
               {16, 0.03162277660168379},
               {21, 0.010746078283213174},
               {25, 0.004131738022518394},
               {32, 0.0006029411764705882},
               {42, 2.8869549617236455e-05},
               {63, 3.102344401879299e-07}}},
             {{.D = 64,
             .theta = 10000,
             .scaling = RopeScaling::yarn,
             .factor = 40,
             .original_context = 4096,
             .yarn = {.beta_fast = 32,
                     .beta_slow = 1,
                     .mscale = 1,
                     .mscale_all_dim = 0.707}},  // deepseek
              1.0857263992561355,
              {{0, 1.0},
               {1, 0.7498942093324559},
               {8, 0.1},
               {10, 0.056234132519034905},
               {12, 0.026879360111431223},
               {16, 0.0055},
               {21, 0.0004149903984907897},
               {31, 3.33380358040831e-06}}},
             {{.D = 16,
             .theta = 500,
             .scaling = RopeScaling::yarn,
             .factor = 2,
             .original_context = 6,
             .yarn = {.beta_fast = 4, .beta_slow = 0.5, .attention_factor = 0.9}},  // short
              0.9,
              {{0, 1.0},
               {1, 0.22993164891338513},
               {2, 0.10573712634405641},
               {3, 0.04862462362330365},
               {4, 0.022360679774997897},
               {5, 0.010282855942978897},
               {7, 0.0021745592760409817}}}}) {
        CAPTURE(of.D, of.theta, of.factor, of.original_context);
        CHECK(std::abs(rope_attention_factor(of) / factor - 1) < 1e-12);
        const std::vector<double> ours = rope_frequencies(of);
        for (const auto& [i, expected] : frequencies) {
            CAPTURE(i, ours[i], expected);
            CHECK(std::abs(ours[i] / expected - 1) < 1e-12);
        }
    }
}

TEST_CASE("Llama 3.1's frequencies fall into all three ranges") {
    const RopeFrequencies scaled{.D = 128,
                                 .theta = 500000,
                                 .scaling = RopeScaling::llama3,
                                 .factor = 8,
                                 .low_frequency_factor = 1,
                                 .high_frequency_factor = 4,
                                 .original_context = 8192};
    RopeFrequencies plain = scaled;
    plain.scaling = RopeScaling::none;
    const std::vector<double> ours = rope_frequencies(scaled), before = rope_frequencies(plain);
    // Wavelengths 2π·500000^(i/64): below 2048 up to i = 28, above 8192 from i = 35 on.
    for (size_t i = 0; i < 64; ++i) {
        CAPTURE(i);
        const double ratio = before[i] / ours[i];
        if (i <= 28) CHECK(ratio == 1);
        if (i > 28 && i < 35) CHECK((ratio > 1 && ratio < 8));
        if (i >= 35) CHECK(std::abs(ratio - 8) < 1e-12);
    }
}

TEST_CASE("the rope table holds cosines and sines to half a unit of fp32") {
    const int64_t n_ctx = random_int(1, 5000);
    RopeFrequencies of{.D = 2 * static_cast<int>(random_int(1, 128)),
                       .theta = 500000,
                       .scaling = RopeScaling::linear,
                       .factor = 3};
    const std::vector<float> table = rope_table(of, n_ctx);
    const size_t D = static_cast<size_t>(of.D), half = D / 2;
    REQUIRE(table.size() == static_cast<size_t>(n_ctx) * D);
    double worst = 0;
    for (size_t at = 0; at < table.size(); ++at) {
        const size_t position = at / D, i = at % half;
        const long double exponent = 2.0L * static_cast<long double>(i) / of.D,
                          angle = static_cast<long double>(position) /
                                  (std::pow(500000.0L, exponent) * 3);
        const long double expected = at % D < half ? std::cos(angle) : std::sin(angle);
        worst = worse(worst, static_cast<double>(std::abs(table[at] - expected)));
    }
    CHECK(worst < 0x1p-25 * 1.001);

    // With yarn, times the attention factor.
    of = random_yarn();
    of.yarn.attention_factor = static_cast<double>(random_int(50, 190)) / 100;
    const std::vector<float> longer = rope_table(of, n_ctx);
    const std::vector<double> frequencies = rope_frequencies(of);
    double of_yarn = 0;
    for (size_t at = 0; at < longer.size(); ++at) {
        const size_t i = at % static_cast<size_t>(of.D / 2);
        const long double angle = static_cast<long double>(at / static_cast<size_t>(of.D)) *
                                  static_cast<long double>(frequencies[i]);
        const long double expected =
            static_cast<long double>(of.yarn.attention_factor) *
            (at % static_cast<size_t>(of.D) < static_cast<size_t>(of.D / 2) ? std::cos(angle)
                                                                            : std::sin(angle));
        of_yarn = worse(of_yarn, static_cast<double>(std::abs(longer[at] - expected)));
    }
    CHECK(of_yarn < 0x1p-24 * 1.001);
}

}  // namespace train_gpt
