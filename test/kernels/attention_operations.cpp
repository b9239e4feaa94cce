// The operations of attention: operations.h says what each entry means.
#include <cmath>

#include "kernels/attention/attention.h"
#include "kernels/attention/engine.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"
#include "test/kernels/test_device.h"

namespace train_gpt::compare {

namespace {

// H heads of keys, each of which Q heads of queries share.
constexpr Letter sharing{'Q', 1, 1, 1}, key_heads = letter('H', 4, 12),
                                        head_size = letter('D', 64, 64);

template <class Extents>
int64_t query_channels(const Extents& of) {
    return of['Q'] * of['H'] * of['D'];
}
template <class Extents>
int64_t key_channels(const Extents& of) {
    return of['H'] * of['D'];
}
/// Of q, k and v of a token, one after the other.
template <class Extents>
int64_t packed_channels(const Extents& of) {
    return query_channels(of) + 2 * key_channels(of);
}

template <class Extents>
AttentionShape attention_shape(const Extents& of) {
    const int H = static_cast<int>(of['H']), T = static_cast<int>(of['T']),
              D = static_cast<int>(of['D']);
    return {.dtype = of.dtype(),
            .B = static_cast<int>(of['B']),
            .T = T,
            .S = T,
            .H = H * static_cast<int>(of['Q']),
            .H_kv = H,
            .D = D,
            .scale = 1 / std::sqrt(static_cast<float>(D))};
}

size_t attention_scratch(const Stream& stream, const Operands& o) {
    return attention_scratch_bytes(stream, attention_shape(o));
}

/// With kernels of our own alone.
std::vector<Implementation> own_attentions(const Operands& o, const Device& device) {
    if (!device.is_cuda()) return only_one(o, device);
    std::vector<Implementation> all{
        {"CUDA, own", {.attention = KernelSettings::Attention::own, .autotune = true}}};
    if (has_wgmma(device) && o.dtype() == DType::bf16)
        all.push_back(
            {"CUDA, wgmma", {.attention = KernelSettings::Attention::wgmma, .autotune = true}});
    return all;
}

std::vector<Implementation> attentions(const Operands& o, const Device& device) {
    std::vector<Implementation> all = own_attentions(o, device);
#ifdef TRAIN_GPT_CUDA
    if (device.is_cuda() &&
        cuda::attention_library_forward_scratch_bytes({}, attention_shape(o)) > 0)
        all.push_back(
            {"CUDA, cuDNN", {.attention = KernelSettings::Attention::cudnn, .autotune = true}});
#endif
    return all;
}

/// q (part 0), k (1) or v (2) of [B, T, packed_channels].
HeadsView packed(const Call& c, const char* name, int part) {
    const int64_t first = part == 0 ? 0 : query_channels(c) + (part - 1) * key_channels(c);
    const Tensor qkv = c[name];
    return {static_cast<char*>(qkv.data) + static_cast<size_t>(first) * size_of(qkv.dtype),
            c['T'] * packed_channels(c), packed_channels(c), c['D']};
}

/// Of heads of queries.
HeadsView plain(const Call& c, const char* name) {
    const int64_t C = query_channels(c);
    return {c[name].data, c['T'] * C, C, c['D']};
}

void run_attention_forward(Stream& stream, const Call& c) {
    attention_forward(stream, {.shape = attention_shape(c),
                               .q = packed(c, "qkv", 0),
                               .k = packed(c, "qkv", 1),
                               .v = packed(c, "qkv", 2),
                               .out = plain(c, "out"),
                               .lse = c.data<float>("lse")});
}

void run_attention_backward(Stream& stream, const Call& c) {
    attention_backward(stream, {.shape = attention_shape(c),
                                .q = packed(c, "qkv", 0),
                                .k = packed(c, "qkv", 1),
                                .v = packed(c, "qkv", 2),
                                .out = plain(c, "out"),
                                .dout = plain(c, "dout"),
                                .lse = c.data<float>("lse"),
                                .dq = packed(c, "dqkv", 0),
                                .dk = packed(c, "dqkv", 1),
                                .dv = packed(c, "dqkv", 2)});
}

AttentionProblem attention_problem(const Operands& o, const Values& qkv) {
    AttentionProblem problem{
        .shape = attention_shape(o), .doc_start = {}, .q = {}, .k = {}, .v = {}, .dout = {}};
    for (size_t i = 0; i < qkv.size(); ++i) {
        const int64_t channel = static_cast<int64_t>(i) % packed_channels(o) - query_channels(o);
        (channel < 0                 ? problem.q
         : channel < key_channels(o) ? problem.k
                                     : problem.v)
            .push_back(qkv[i]);
    }
    return problem;
}

const Derivative of_qkv{.gradient = "dqkv",
                        .point = [](const Operands& o) { return o.values("qkv"); },
                        .loss =
                            [](const Operands& o, const Values& qkv) {
                                return dot(
                                    o.values("dout"),
                                    attention_reference<double>(attention_problem(o, qkv)).out);
                            }};

Values packed_gradients(const Operands& o, const AttentionReference& r) {
    Values dqkv;
    const auto append = [&](const Values& from, int64_t token, int64_t channels) {
        if (from.empty()) return;  // only a forward pass
        dqkv.insert(dqkv.end(), from.begin() + token * channels,
                    from.begin() + (token + 1) * channels);
    };
    for (int64_t token = 0; token < o['B'] * o['T']; ++token) {
        append(r.dq, token, query_channels(o));
        append(r.dk, token, key_channels(o));
        append(r.dv, token, key_channels(o));
    }
    return dqkv;
}

Results attention_references(const Operands& o) {
    AttentionProblem problem = attention_problem(o, o.values("qkv"));
    if (o.has("dout")) problem.dout = o.values("dout");
    const AttentionReference r = attention_reference<double>(problem);
    return {{"out", r.out}, {"lse", r.lse}, {"dqkv", packed_gradients(o, r)}};
}

// A chunk of a sequence: T queries after P others, and separate keys and values of all S = P + T.

AttentionShape chunk_shape(const Operands& o) {
    AttentionShape shape = attention_shape(o);
    shape.S += static_cast<int>(o['P']);
    return shape;
}

AttentionForward chunk_forward(const Call& c) {
    const int64_t C = key_channels(c), S = c['P'] + c['T'];
    AttentionShape shape = attention_shape(c);
    shape.S = static_cast<int>(S);
    const auto keys = [&](const char* name) { return HeadsView{c[name].data, S * C, C, c['D']}; };
    return {.shape = shape,
            .q = plain(c, "q"),
            .k = keys("k"),
            .v = keys("v"),
            .out = plain(c, "out"),
            .lse = c.data<float>("lse")};
}

void run_chunk_forward(Stream& stream, const Call& c) {
    attention_forward(stream, chunk_forward(c));
}

void run_chunk_backward(Stream& stream, const Call& c) {
    const AttentionForward f = chunk_forward(c);
    HeadsView dk = f.k, dv = f.v;
    dk.data = c["dk"].data;
    dv.data = c["dv"].data;
    attention_backward(stream, {.shape = f.shape,
                                .q = f.q,
                                .k = f.k,
                                .v = f.v,
                                .out = f.out,
                                .dout = plain(c, "dout"),
                                .lse = f.lse,
                                .dq = plain(c, "dq"),
                                .dk = dk,
                                .dv = dv,
                                .key_gradients = KeyGradients::write_fp32});
}

AttentionProblem chunk_problem(const Operands& o) {
    return {.shape = chunk_shape(o),
            .doc_start = {},
            .q = o.values("q"),
            .k = o.values("k"),
            .v = o.values("v"),
            .dout = {}};
}

Results chunk_references(const Operands& o) {
    AttentionProblem problem = chunk_problem(o);
    problem.dout = o.values("dout");
    const AttentionReference r = attention_reference<double>(problem);
    return {{"out", r.out}, {"lse", r.lse}, {"dq", r.dq}, {"dk", r.dk}, {"dv", r.dv}};
}

template <Values AttentionProblem::*operand>
double chunk_loss(const Operands& o, const Values& at) {
    AttentionProblem problem = chunk_problem(o);
    problem.*operand = at;
    return dot(o.values("dout"), attention_reference<double>(problem).out);
}

const std::vector<Derivative> of_chunk{
    {"dq", [](const Operands& o) { return o.values("q"); }, chunk_loss<&AttentionProblem::q>},
    {"dk", [](const Operands& o) { return o.values("k"); }, chunk_loss<&AttentionProblem::k>},
    {"dv", [](const Operands& o) { return o.values("v"); }, chunk_loss<&AttentionProblem::v>},
};

// A window of W keys, and sinks.

AttentionForward window_forward(const Call& c) {
    AttentionShape shape = attention_shape(c);
    shape.window = static_cast<int>(c['W']);
    return {.shape = shape,
            .q = packed(c, "qkv", 0),
            .k = packed(c, "qkv", 1),
            .v = packed(c, "qkv", 2),
            .out = plain(c, "out"),
            .lse = c.data<float>("lse"),
            .sinks = c["sinks"]};
}

void run_window_forward(Stream& stream, const Call& c) {
    attention_forward(stream, window_forward(c));
}

void run_window_backward(Stream& stream, const Call& c) {
    const AttentionForward f = window_forward(c);
    attention_backward(stream, {.shape = f.shape,
                                .q = f.q,
                                .k = f.k,
                                .v = f.v,
                                .out = f.out,
                                .dout = plain(c, "dout"),
                                .lse = f.lse,
                                .dq = packed(c, "dqkv", 0),
                                .dk = packed(c, "dqkv", 1),
                                .dv = packed(c, "dqkv", 2),
                                .sinks = f.sinks,
                                .dsinks = c.sink("dsinks")});
}

AttentionProblem window_problem(const Operands& o, const Values& qkv, const Values& sinks) {
    AttentionProblem problem = attention_problem(o, qkv);
    problem.shape.window = static_cast<int>(o['W']);
    problem.sinks = sinks;
    return problem;
}

/// For each head, the root of the sum of exp(sink − lse)²·(dout ⊙ out)².
Values sink_terms(const Operands& o, const AttentionReference& r) {
    const Values dout = o.values("dout"), sinks = o.values("sinks");
    const int64_t B = o['B'], T = o['T'], H = o['Q'] * o['H'], D = o['D'];
    Values terms(sinks.size());
    for (int64_t row = 0; row < B * T * H; ++row) {
        const auto h = static_cast<size_t>(row % H);
        const int64_t t = row / H % T, b = row / H / T;
        const double p = std::exp(
            sinks[h] - r.lse[static_cast<size_t>((b * H + static_cast<int64_t>(h)) * T + t)]);
        for (int64_t d = 0; d < D; ++d) {
            const auto i = static_cast<size_t>(row * D + d);
            terms[h] += std::pow(p * dout[i] * r.out[i], 2);
        }
    }
    for (double& x : terms) x = std::sqrt(x);
    return terms;
}

Results window_references(const Operands& o) {
    AttentionProblem problem = window_problem(o, o.values("qkv"), o.values("sinks"));
    const bool backward = o.has("dout");
    if (backward) problem.dout = o.values("dout");
    const AttentionReference r = attention_reference<double>(problem);
    Results results{{"out", r.out}, {"lse", r.lse}, {"dqkv", packed_gradients(o, r)}};
    if (backward) {
        results["dsinks"] = r.dsinks;
        results[terms_of("dsinks")] = sink_terms(o, r);
    }
    return results;
}

const Derivative of_windowed_qkv{
    .gradient = "dqkv",
    .point = [](const Operands& o) { return o.values("qkv"); },
    .loss =
        [](const Operands& o, const Values& qkv) {
            const AttentionProblem problem = window_problem(o, qkv, o.values("sinks"));
            return dot(o.values("dout"), attention_reference<double>(problem).out);
        }};

}  // namespace

std::vector<Operation> attention_operations() {
    return {
        {.name = "attention_forward",
         .computes = "out = softmax(q·kᵀ/√D, causal)·v, lse = log Σ exp of each row",
         .letters = {batch, sequence, key_heads, sharing, head_size},
         .implementations = attentions,
         .declare =
             [](Operands& o) {
                 o.normal("qkv", {o['B'], o['T'], packed_channels(o)});
                 o.result("out", {o['B'], o['T'], query_channels(o)}, o.dtype(),
                          {.roundings = 2, .terms = o['T'] + o['D']});
                 o.result("lse", {o['B'], o['Q'] * o['H'], o['T']}, DType::fp32,
                          {.terms = o['T'] + o['D']});
             },
         .scratch_bytes = attention_scratch,
         .run = run_attention_forward,
         .reference = attention_references},
        {.name = "attention_backward",
         .computes = "dqkv, the gradients of q, k and v, with out and lse of the forward pass",
         .letters = {batch, sequence, key_heads, sharing, head_size},
         .implementations = attentions,
         .declare =
             [](Operands& o) {
                 o.normal("qkv", {o['B'], o['T'], packed_channels(o)});
                 o.normal("dout", {o['B'], o['T'], query_channels(o)});
                 o.room("out", {o['B'], o['T'], query_channels(o)}, o.dtype());
                 o.room("lse", {o['B'], o['Q'] * o['H'], o['T']}, DType::fp32);
                 o.result("dqkv", {o['B'], o['T'], packed_channels(o)}, o.dtype(),
                          {.roundings = 4, .terms = o['T'] + o['D']});
             },
         .scratch_bytes = attention_scratch,
         .prepare = run_attention_forward,
         .run = run_attention_backward,
         .reference = attention_references,
         .derivatives = {of_qkv}},
        {.name = "attention_backward_chunk",
         .computes = "dq, and dk and dv in fp32, of T queries that stand after P others",
         .letters = {batch, sequence, Letter{'P', 256, 256, 1024}, key_heads, sharing, head_size},
         .declare =
             [](Operands& o) {
                 const int64_t C = key_channels(o), S = o['P'] + o['T'];
                 o.normal("q", {o['B'], o['T'], query_channels(o)});
                 o.normal("k", {o['B'], S, C});
                 o.normal("v", {o['B'], S, C});
                 o.normal("dout", {o['B'], o['T'], query_channels(o)});
                 o.room("out", {o['B'], o['T'], query_channels(o)}, o.dtype());
                 o.room("lse", {o['B'], o['Q'] * o['H'], o['T']}, DType::fp32);
                 const Accuracy accuracy{.roundings = 4, .terms = S + o['D']};
                 o.result("dq", {o['B'], o['T'], query_channels(o)}, o.dtype(), accuracy);
                 o.result("dk", {o['B'], S, C}, DType::fp32, accuracy);
                 o.result("dv", {o['B'], S, C}, DType::fp32, accuracy);
             },
         .scratch_bytes =
             [](const Stream& stream, const Operands& o) {
                 return attention_scratch_bytes(stream, chunk_shape(o));
             },
         .prepare = run_chunk_forward,
         .run = run_chunk_backward,
         .reference = chunk_references,
         .derivatives = of_chunk},
        {.name = "attention_window_forward",
         .computes = "attention_forward with a window of W keys and a sink for each head",
         .letters = {batch, sequence, Letter{'W', 32, 128, 128}, key_heads, sharing, head_size},
         .implementations = own_attentions,
         .declare =
             [](Operands& o) {
                 o.normal("qkv", {o['B'], o['T'], packed_channels(o)});
                 o.normal("sinks", {o['Q'] * o['H']});
                 o.result("out", {o['B'], o['T'], query_channels(o)}, o.dtype(),
                          {.roundings = 2, .terms = o['T'] + o['D']});
                 o.result("lse", {o['B'], o['Q'] * o['H'], o['T']}, DType::fp32,
                          {.terms = o['T'] + o['D']});
             },
         .scratch_bytes = attention_scratch,
         .run = run_window_forward,
         .reference = window_references},
        {.name = "attention_window_backward",
         .computes = "attention_backward with a window of W keys, and the gradients of sinks",
         .letters = {batch, sequence, Letter{'W', 32, 128, 128}, key_heads, sharing, head_size},
         .implementations = own_attentions,
         .declare =
             [](Operands& o) {
                 o.normal("qkv", {o['B'], o['T'], packed_channels(o)});
                 o.normal("sinks", {o['Q'] * o['H']});
                 o.normal("dout", {o['B'], o['T'], query_channels(o)});
                 o.room("out", {o['B'], o['T'], query_channels(o)}, o.dtype());
                 o.room("lse", {o['B'], o['Q'] * o['H'], o['T']}, DType::fp32);
                 o.result("dqkv", {o['B'], o['T'], packed_channels(o)}, o.dtype(),
                          {.roundings = 4, .terms = o['T'] + o['D']});
                 o.result("dsinks", {o['Q'] * o['H']}, DType::fp32,
                          {.roundings = 4, .terms = o['B'] * o['T'] * o['D']});
             },
         .scratch_bytes = attention_scratch,
         .prepare = run_window_forward,
         .run = run_window_backward,
         .reference = window_references,
         .derivatives = {of_windowed_qkv}},
    };
}

}  // namespace train_gpt::compare
