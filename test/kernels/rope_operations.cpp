// The operations of rotary position embedding: operations.h says what each entry means.
#include <algorithm>
#include <cmath>

#include "kernels/rope.h"
#include "kernels/rope_table.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

namespace {

/// Those of SmolLM2-135M on the CPU and of Llama 3 8B on a GPU. D is rounded up to an even number.
const std::vector<Letter> letters{
    batch, sequence, {'H', 9, 9, 32}, {'G', 3, 3, 8}, {'D', 64, 64, 128}};

int64_t head_size(const auto& of) { return of['D'] + of['D'] % 2; }
int64_t packed_heads(const auto& of) { return of['H'] + 2 * of['G']; }

RopeFrequencies frequencies(const auto& of) {
    return {.D = static_cast<int>(head_size(of)), .theta = 10000};
}

RopeShape shape_of(const auto& of) {
    return {.dtype = of.dtype(),
            .B = static_cast<int>(of['B']),
            .T = static_cast<int>(of['T']),
            .H = static_cast<int>(of['H']),
            .H_kv = static_cast<int>(of['G']),
            .D = static_cast<int>(head_size(of))};
}

RopeShape shape_with_table(const Call& c) {
    RopeShape shape = shape_of(c);
    shape.table = {c["table"].data, DType::fp32, {c['T'], head_size(c)}};
    return shape;
}

/// The heads from the `first` on in [B, T, heads, D].
HeadsView view(const Call& c, const char* name, int64_t first, int64_t heads) {
    const int64_t D = head_size(c);
    auto* data =
        static_cast<char*>(c[name].data) + static_cast<size_t>(first * D) * size_of(c[name].dtype);
    return {data, c['T'] * heads * D, heads * D, D};
}
HeadsView q(const Call& c, const char* name) { return view(c, name, 0, packed_heads(c)); }
HeadsView k(const Call& c, const char* name) { return view(c, name, c['H'], packed_heads(c)); }

/// Over the whole width if there are sums.
QkNorm norm(const Call& c) {
    return {.q_w = c["q_w"],
            .k_w = c["k_w"],
            .width = {.H = static_cast<int>(c['H']),
                      .H_kv = static_cast<int>(c['G']),
                      .sums = c["sums"],
                      .dots = c["dots"]}};
}

/// Heads [first, first + count) of each token's packed heads.
Values part(const Operands& o, const Values& packed, int64_t first, int64_t count) {
    const int64_t D = head_size(o), width = packed_heads(o) * D;
    Values result;
    for (auto row = packed.begin(); row != packed.end(); row += width)
        result.insert(result.end(), row + first * D, row + (first + count) * D);
    return result;
}

/// The opposite of part() for q and k; the values' heads are those of `packed`.
Values with_parts(const Operands& o, Values packed, const Values& q, const Values& k) {
    const size_t D = static_cast<size_t>(head_size(o)), H = static_cast<size_t>(o['H']) * D,
                 G = static_cast<size_t>(o['G']) * D, width = H + 2 * G;
    for (size_t i = 0; i < packed.size(); ++i) {
        const size_t row = i / width, column = i % width;
        if (column < H)
            packed[i] = q[row * H + column];
        else if (column < H + G)
            packed[i] = k[row * G + column - H];
    }
    return packed;
}

/// `qkv`: the packed projection.
RopeProblem problem(const Operands& o, const Values& qkv) {
    RopeProblem p{.shape = shape_of(o),
                  .frequencies = rope_frequencies(frequencies(o)),
                  .q = part(o, qkv, 0, o['H']),
                  .k = part(o, qkv, o['H'], o['G'])};
    if (o.has("q_w")) p.q_w = o.values("q_w"), p.k_w = o.values("k_w");
    p.whole_width = o.has("sums");
    return p;
}

enum Normed { nothing, heads, whole_width };

void declare_shared(Operands& o, Normed normed) {
    const std::vector<float> table = rope_table(frequencies(o), o['T']);
    o.words("table", table.data(), static_cast<int64_t>(table.size()));
    if (normed == nothing) return;
    const bool whole = normed == whole_width;
    o.normal("q_w", {(whole ? o['H'] : 1) * head_size(o)}, 0.3f, 1);
    o.normal("k_w", {(whole ? o['G'] : 1) * head_size(o)}, 0.3f, 1);
}
Dims packed_dims(const Operands& o) { return {o['B'], o['T'], packed_heads(o) * head_size(o)}; }
Dims rotated_dims(const Operands& o) { return {o['B'], o['T'], (o['H'] + o['G']) * head_size(o)}; }

/// Σ dqkv ⊙ (the packed results; v as it is).
double loss(const Operands& o, const RopeProblem& p, const Values& qkv) {
    const RopeReference r = rope_reference<double>(p);
    return dot(o.values("dqkv"), with_parts(o, qkv, r.q, r.k));
}

double loss_of_qkv(const Operands& o, const Values& qkv) { return loss(o, problem(o, qkv), qkv); }

template <Values RopeProblem::*weight>
double loss_of_weight(const Operands& o, const Values& at) {
    const Values qkv = o.values("qkv");
    RopeProblem p = problem(o, qkv);
    p.*weight = at;
    return loss(o, p, qkv);
}

/// A rotation's gradient is the same everywhere: o may have no qkv.
Results backward_references(const Operands& o) {
    const Values dqkv = o.values("dqkv");
    RopeProblem p = problem(o, o.has("qkv") ? o.values("qkv") : dqkv);
    p.dq = part(o, dqkv, 0, o['H']);
    p.dk = part(o, dqkv, o['H'], o['G']);
    const RopeReference r = rope_reference<double>(p);
    return {{"dqkv", with_parts(o, dqkv, r.dq, r.dk)}, {"dq_w", r.dq_w}, {"dk_w", r.dk_w}};
}

Operation forward() {
    return {.name = "rope_forward",
            .computes = "q and k of a packed qkv turned by their positions' angles, in place",
            .letters = letters,
            .declare =
                [](Operands& o) {
                    declare_shared(o, nothing);
                    o.normal("qkv", packed_dims(o));
                    o.changes("qkv", {.roundings = 1, .terms = 2});
                },
            .run =
                [](Stream& stream, const Call& c) {
                    rope_forward(stream, {.shape = shape_with_table(c),
                                          .q = q(c, "qkv"),
                                          .k = k(c, "qkv"),
                                          .q_out = q(c, "qkv"),
                                          .k_out = k(c, "qkv")});
                },
            .reference = [](const Operands& o) -> Results {
                const Values qkv = o.values("qkv");
                const RopeReference r = rope_reference<double>(problem(o, qkv));
                return {{"qkv", with_parts(o, qkv, r.q, r.k)}};
            }};
}

Operation backward() {
    return {.name = "rope_backward",
            .computes = "dq and dk of a packed dqkv turned back, in place",
            .letters = letters,
            .declare =
                [](Operands& o) {
                    declare_shared(o, nothing);
                    o.normal("dqkv", packed_dims(o));
                    o.changes("dqkv", {.roundings = 1, .terms = 2});
                },
            .run =
                [](Stream& stream, const Call& c) {
                    rope_backward(
                        stream,
                        {.shape = shape_with_table(c), .dq = q(c, "dqkv"), .dk = k(c, "dqkv")});
                },
            .reference = backward_references,
            .derivatives = {{.gradient = "dqkv",
                             .point = [](const Operands& o) { return o.values("dqkv"); },
                             .loss = loss_of_qkv}}};
}

/// Room for what a norm over the whole width needs, which prepare() computes.
void declare_sums(Operands& o, bool dots) {
    o.room("sums", {o['B'] * o['T'], 2}, DType::fp32);
    if (dots) o.room("dots", {o['B'] * o['T'], 2}, DType::fp32);
}
void sum_squares(Stream& stream, const Call& c) {
    qk_norm_sums(stream,
                 {.shape = shape_of(c), .q = q(c, "qkv"), .k = k(c, "qkv"), .sums = c["sums"]});
}
void sum_dots(Stream& stream, const Call& c) {
    qk_norm_dots(stream, {.shape = shape_with_table(c),
                          .dq = q(c, "dqkv"),
                          .dk = k(c, "dqkv"),
                          .q = q(c, "qkv"),
                          .k = k(c, "qkv"),
                          .q_w = c["q_w"],
                          .k_w = c["k_w"],
                          .dots = c["dots"]});
}

/// For each token what `of` gives for the elements of its queries, and of its keys.
template <class F>
Values of_tokens(const Operands& o, F&& of) {
    Values result;
    const int64_t H = o['H'] * head_size(o), G = o['G'] * head_size(o);
    for (int64_t row = 0; row < o['B'] * o['T']; ++row) {
        result.push_back(of(true, row * H, H));
        result.push_back(of(false, row * G, G));
    }
    return result;
}

Operation sums() {
    return {.name = "qk_norm_sums",
            .computes = "Σ q² and Σ k² of each token of a packed qkv",
            .letters = letters,
            .declare =
                [](Operands& o) {
                    o.normal("qkv", packed_dims(o), 2);
                    o.result("sums", {o['B'] * o['T'], 2}, DType::fp32,
                             {.terms = std::max(o['H'], o['G']) * head_size(o)});
                },
            .run = sum_squares,
            .reference = [](const Operands& o) -> Results {
                const RopeProblem p = problem(o, o.values("qkv"));
                return {{"sums", of_tokens(o, [&](bool of_q, int64_t first, int64_t n) {
                             const Values& x = of_q ? p.q : p.k;
                             double sum = 0;
                             for (int64_t i = first; i < first + n; ++i) sum += x[i] * x[i];
                             return sum;
                         })}};
            }};
}

Operation dots() {
    return {.name = "qk_norm_dots",
            .computes = "Σ g ⊙ w ⊙ q and Σ g ⊙ w ⊙ k of each token, g being dq and dk turned back",
            .letters = letters,
            .declare =
                [](Operands& o) {
                    declare_shared(o, whole_width);
                    o.normal("qkv", packed_dims(o), 2);
                    o.normal("dqkv", packed_dims(o));
                    o.result("dots", {o['B'] * o['T'], 2}, DType::fp32,
                             {.terms = std::max(o['H'], o['G']) * head_size(o)});
                },
            .run = sum_dots,
            .reference = [](const Operands& o) -> Results {
                RopeProblem p = problem(o, o.values("qkv")), turned = p;
                const Values dqkv = o.values("dqkv");
                turned.q_w = turned.k_w = {};
                turned.dq = part(o, dqkv, 0, o['H']);
                turned.dk = part(o, dqkv, o['H'], o['G']);
                const RopeReference r = rope_reference<double>(turned);
                const auto sum = [&](bool squares) {
                    return of_tokens(o, [&](bool of_q, int64_t first, int64_t n) {
                        double sum = 0;
                        for (int64_t i = first; i < first + n; ++i) {
                            const double term = of_q ? r.dq[i] * p.q_w[i - first] * p.q[i]
                                                     : r.dk[i] * p.k_w[i - first] * p.k[i];
                            sum += squares ? term * term : term;
                        }
                        return squares ? std::sqrt(sum) : sum;
                    });
                };
                return {{"dots", sum(false)}, {terms_of("dots"), sum(true)}};
            }};
}

template <Normed normed>
Operation normed_forward(const char* name, const char* computes) {
    return {.name = name,
            .computes = computes,
            .letters = letters,
            .declare =
                [](Operands& o) {
                    declare_shared(o, normed);
                    if (normed == whole_width) declare_sums(o, false);
                    o.normal("qkv", packed_dims(o), 2);
                    o.result("qk", rotated_dims(o), o.dtype(),
                             {.roundings = 1,
                              .terms = head_size(o) * (normed == whole_width ? o['H'] : 1)});
                },
            .prepare =
                [](Stream& stream, const Call& c) {
                    if (normed == whole_width) sum_squares(stream, c);
                },
            .run =
                [](Stream& stream, const Call& c) {
                    const int64_t heads = c['H'] + c['G'];
                    rope_forward(stream, {.shape = shape_with_table(c),
                                          .q = q(c, "qkv"),
                                          .k = k(c, "qkv"),
                                          .q_out = view(c, "qk", 0, heads),
                                          .k_out = view(c, "qk", c['H'], heads),
                                          .norm = norm(c)});
                },
            .reference = [](const Operands& o) -> Results {
                const RopeReference r = rope_reference<double>(problem(o, o.values("qkv")));
                const auto H = o['H'] * head_size(o), G = o['G'] * head_size(o);
                Values qk;
                for (int64_t row = 0; row < o['B'] * o['T']; ++row) {
                    qk.insert(qk.end(), r.q.begin() + row * H, r.q.begin() + (row + 1) * H);
                    qk.insert(qk.end(), r.k.begin() + row * G, r.k.begin() + (row + 1) * G);
                }
                return {{"qk", qk}};
            }};
}

template <Normed normed>
Operation normed_backward(const char* name, const char* computes) {
    return {.name = name,
            .computes = computes,
            .letters = letters,
            .declare =
                [](Operands& o) {
                    declare_shared(o, normed);
                    if (normed == whole_width) declare_sums(o, true);
                    o.normal("qkv", packed_dims(o), 2);
                    o.normal("dqkv", packed_dims(o));
                    const bool whole = normed == whole_width;
                    const int64_t D = head_size(o), width = D * (whole ? o['H'] : 1);
                    o.changes("dqkv", {.roundings = 1, .terms = width});
                    const int64_t terms = o['B'] * o['T'] * (whole ? 1 : o['H']) + width;
                    o.result("dq_w", {width}, DType::fp32, {.terms = terms});
                    o.result("dk_w", {D * (whole ? o['G'] : 1)}, DType::fp32, {.terms = terms});
                },
            .scratch_bytes =
                [](const Stream& stream, const Operands& o) {
                    return rope_scratch_bytes(stream, shape_of(o), normed == whole_width);
                },
            .prepare =
                [](Stream& stream, const Call& c) {
                    if (normed != whole_width) return;
                    sum_squares(stream, c);
                    sum_dots(stream, c);
                },
            .run =
                [](Stream& stream, const Call& c) {
                    rope_backward(stream, {.shape = shape_with_table(c),
                                           .dq = q(c, "dqkv"),
                                           .dk = k(c, "dqkv"),
                                           .q = q(c, "qkv"),
                                           .k = k(c, "qkv"),
                                           .norm = norm(c),
                                           .dq_w = c.sink("dq_w"),
                                           .dk_w = c.sink("dk_w")});
                },
            .reference = backward_references,
            .derivatives = {{.gradient = "dqkv",
                             .point = [](const Operands& o) { return o.values("qkv"); },
                             .loss = loss_of_qkv},
                            {.gradient = "dq_w",
                             .point = [](const Operands& o) { return o.values("q_w"); },
                             .loss = loss_of_weight<&RopeProblem::q_w>},
                            {.gradient = "dk_w",
                             .point = [](const Operands& o) { return o.values("k_w"); },
                             .loss = loss_of_weight<&RopeProblem::k_w>}}};
}

}  // namespace

std::vector<Operation> rope_operations() {
    return {forward(),
            backward(),
            normed_forward<heads>("rope_norm_forward",
                                  "RMS norm of each head of q and k, turned; into a packed qk"),
            normed_backward<heads>(
                "rope_norm_backward",
                "dq and dk of a packed dqkv turned back and through the RMS norm, in place; "
                "dq_w, dk_w = Σ_heads g ⊙ x̂"),
            sums(),
            dots(),
            normed_forward<whole_width>(
                "rope_width_forward",
                "RMS norm over the whole width of q and k, turned; into a packed qk"),
            normed_backward<whole_width>(
                "rope_width_backward",
                "dq and dk of a packed dqkv turned back and through the RMS norm over the whole "
                "width, in place; dq_w, dk_w = Σ_tokens g ⊙ x̂")};
}

}  // namespace train_gpt::compare
