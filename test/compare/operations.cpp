#include "test/compare/operations.h"

#include <algorithm>
#include <cmath>

#include "kernels/adamw.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/cudnn.h"
#include "kernels/attention/engine.h"
#include "kernels/embedding.h"
#include "kernels/gelu.h"
#include "kernels/head_loss.h"
#include "kernels/layernorm.h"
#include "kernels/linear/linear.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

namespace {

using References = std::map<std::string, Values>;

constexpr Letter batch{'B', 2, 4, 64}, sequence{'T', 256, 256, 1024};
constexpr Letter tokens{'M', 256, 4 * 256, 64 * 1024};

Letter letter(char name, int64_t small, int64_t gpt2) { return {name, small, gpt2, gpt2}; }

/// The elements of a very short row may be nearly equal: ρ then makes rounding errors large.
constexpr Letter normed{'C', 768, 768, 768, 8};

/// The CPU multiplies matrices with one of two libraries.
std::vector<Implementation> products(const Operands& o, const Device& device) {
    if (device.is_cuda()) return only_one(o, device);
    return {
#ifdef TRAIN_GPT_ONEDNN
        {"CPU, oneDNN", [] { select_cpu_gemm("onednn"); }},
#endif
        {"CPU, own GEMM", [] { select_cpu_gemm("own"); }}};
}

// --- linear.h --------------------------------------------------------------------------------------------------------

/// The product's terms keep the size of x's elements.
void weight(Operands& o, int64_t rows, int64_t cols) {
    o.normal("w", {rows, cols}, 1 / std::sqrt(static_cast<float>(cols)));
}

void layer(Operands& o) {
    o.normal("x", {o['M'], o['K']});
    weight(o, o['N'], o['K']);
}

size_t linear_scratch(const Device& device, const Operands& o) {
    return linear_scratch_bytes(device, o.dtype(), o['M'], o['N'], o['K']);
}

void run_linear_forward(Stream& stream, const Call& c) {
    linear_forward(stream, {.out = c["out"],
                            .x = c["x"],
                            .w = c["w"],
                            .bias = c["bias"],
                            .residual = c["residual"],
                            .preact = c["preact"]});
}

/// x·wᵀ with what the form adds.
Values layer_reference(const Operands& o) {
    Values out =
        product_reference<double>(GemmOp::nt, o.values("x"), o.values("w"), o['M'], o['N'], o['K']);
    const Values bias = o.has("bias") ? o.values("bias") : Values(static_cast<size_t>(o['N']));
    const Values residual = o.has("residual") ? o.values("residual") : Values(out.size());
    for (size_t i = 0; i < out.size(); ++i) out[i] += bias[i % bias.size()] + residual[i];
    return out;
}

References linear_forward_reference(const Operands& o) {
    const Values sum = layer_reference(o);
    if (!o.has("preact")) return {{"out", sum}};
    Values out = sum;
    for (double& value : out) value = gelu_reference(value);
    return {{"preact", sum}, {"out", out}};
}

void layer_below(Operands& o) {
    o.normal("dy", {o['M'], o['N']});
    weight(o, o['N'], o['K']);
}

void run_linear_backward_input(Stream& stream, const Call& c) {
    linear_backward_input(stream,
                          {.dx = c["dx"], .dy = c["dy"], .w = c["w"], .preact = c["preact"]});
}

References linear_backward_input_reference(const Operands& o) {
    Values dx = product_reference<double>(GemmOp::nn, o.values("dy"), o.values("w"), o['M'], o['K'],
                                          o['N']);
    if (o.has("preact")) {
        const Values preact = o.values("preact");
        for (size_t i = 0; i < dx.size(); ++i) dx[i] *= gelu_derivative_reference(preact[i]);
    }
    return {{"dx", dx}};
}

References linear_backward_weight_reference(const Operands& o) {
    const Values dy = o.values("dy");
    Values dbias(static_cast<size_t>(o['N']));
    for (size_t i = 0; i < dy.size(); ++i) dbias[i % dbias.size()] += dy[i];
    return {
        {"dw", product_reference<double>(GemmOp::tn, dy, o.values("x"), o['N'], o['K'], o['M'])},
        {"dbias", dbias}};
}

// --- layernorm.h -----------------------------------------------------------------------------------------------------

void norm(Operands& o) {
    o.normal("x", {o['M'], o['C']}, 2, 0.5f);
    o.normal("w", {o['C']}, 0.3f, 1);
    o.normal("b", {o['C']});
}

void run_layernorm_forward(Stream& stream, const Call& c) {
    layernorm_forward(
        stream, {.out = c["out"], .stats = c["stats"], .x = c["x"], .w = c["w"], .b = c["b"]});
}

LayerNormProblem norm_problem(const Operands& o) {
    return {.M = o['M'], .C = o['C'], .x = o.values("x"), .w = o.values("w"), .b = o.values("b")};
}

References layernorm_backward_reference(const Operands& o) {
    LayerNormProblem problem = norm_problem(o);
    problem.dy = o.values("dy");
    problem.dres = o.values("dres");
    const LayerNormReference r = layernorm_reference<double>(problem);
    Values dbias(static_cast<size_t>(o['C']));
    for (size_t i = 0; i < r.dres.size(); ++i) dbias[i % dbias.size()] += r.dres[i];
    return {{"dres", r.dres}, {"dw", r.dw}, {"db", r.db}, {"dbias", dbias}};
}

// --- attention.h -----------------------------------------------------------------------------------------------------

template <class Extents>
AttentionShape attention_shape(const Extents& of) {
    const int H = static_cast<int>(of['H']), T = static_cast<int>(of['T']),
              D = static_cast<int>(of['D']);
    return {.dtype = of.dtype(),
            .B = static_cast<int>(of['B']),
            .T = T,
            .S = T,
            .H = H,
            .H_kv = H,
            .D = D,
            .scale = 1 / std::sqrt(static_cast<float>(D))};
}

size_t attention_scratch(const Device& device, const Operands& o) {
    return attention_scratch_bytes(device, attention_shape(o));
}

std::vector<Implementation> attentions(const Operands& o, const Device& device) {
    if (!device.is_cuda()) return only_one(o, device);
    std::vector<Implementation> all{{"CUDA, own", [] { select_attention("own"); }}};
#ifdef TRAIN_GPT_CUDA
    if (cuda::cudnn_workspace_bytes(attention_shape(o)) > 0)  // else it cannot be used
        all.push_back({"CUDA, cuDNN", [] { select_attention("cudnn"); }});
#endif
    return all;
}

/// q (part 0), k (1) or v (2) of [B, T, 3·H·D].
HeadsView packed(const Call& c, const char* name, int64_t part) {
    const int64_t C = c['H'] * c['D'];
    const Tensor qkv = c[name];
    return {static_cast<char*>(qkv.data) + static_cast<size_t>(part * C) * size_of(qkv.dtype),
            c['T'] * 3 * C, 3 * C, c['D']};
}

HeadsView plain(const Call& c, const char* name) {
    const int64_t C = c['H'] * c['D'];
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

References attention_references(const Operands& o) {
    AttentionProblem problem{
        .shape = attention_shape(o), .doc_start = {}, .q = {}, .k = {}, .v = {}, .dout = {}};
    const Values qkv = o.values("qkv");
    const size_t C = static_cast<size_t>(o['H'] * o['D']);
    for (size_t i = 0; i < qkv.size(); ++i) {
        const size_t part = i / C % 3;
        (part == 0 ? problem.q : part == 1 ? problem.k : problem.v).push_back(qkv[i]);
    }
    if (o.has("dout")) problem.dout = o.values("dout");
    const AttentionReference r = attention_reference<double>(problem);
    Values dqkv(r.dq.size() * 3);
    for (size_t i = 0; i < r.dq.size(); ++i) {
        const size_t first = i / C * 3 * C + i % C;
        dqkv[first] = r.dq[i];
        dqkv[first + C] = r.dk[i];
        dqkv[first + 2 * C] = r.dv[i];
    }
    return {{"out", r.out}, {"lse", r.lse}, {"dqkv", dqkv}};
}

// --- embedding.h -----------------------------------------------------------------------------------------------------

EmbeddingRows embedding_rows(const Operands& o) {
    return {.T = o['T'], .C = o['C'], .tokens = o.integer_values("tokens")};
}

// --- head_loss.h -----------------------------------------------------------------------------------------------------

/// The chunk of rows is what gives its products enough to do; more would only take memory.
int64_t chunk(const Operands& o) { return std::min<int64_t>(o['M'], 8192); }
int64_t padded(int64_t V) { return (V + 127) / 128 * 128; }

void head(Operands& o) {
    o.normal("x", {o['M'], o['C']});
    weight(o, padded(o['V']), o['C']);
    o.integers("targets", {o['M']}, o['V'], true);
    o.room("logits", {chunk(o), padded(o['V'])}, o.dtype());
    o.result("losses", {o['M']}, DType::fp32, {.roundings = 1, .terms = o['C'] + o['V']});
}

size_t head_scratch(const Device& device, const Operands& o) {
    return head_loss_scratch_bytes(device, o.dtype(), chunk(o), padded(o['V']), o['C']);
}

void run_head_loss(Stream& stream, const Call& c) {
    head_loss(stream, {.x = c["x"],
                       .w = c["w"],
                       .logits = c["logits"],
                       .V = c['V'],
                       .targets = c.data<int32_t>("targets"),
                       .losses = c.data<float>("losses"),
                       .dx = c["dx"],
                       .dw = c.sink("dw")});
}

References head_references(const Operands& o) {
    const HeadLossReference r =
        head_loss_reference<double>({.R = o['M'],
                                     .C = o['C'],
                                     .V = o['V'],
                                     .x = o.values("x"),
                                     .w = o.values("w"),
                                     .targets = o.integer_values("targets")});
    return {{"losses", r.losses}, {"dx", r.dx}, {"dw", r.dw}};
}

// --- adamw.h ---------------------------------------------------------------------------------------------------------

constexpr Letter parameters{'N', 500'000, 16 << 20, 124'475'904};
constexpr AdamWStep step{.learning_rate = 1e-3f,
                         .beta1 = 0.9f,
                         .beta2 = 0.95f,
                         .epsilon = 1e-8f,
                         .weight_decay = 0.1f,
                         .step = 3};
constexpr StepState step_state{.multiplier = 0.5f};

void run_adamw(Stream& stream, const Call& c) {
    const AdamWSegment segment{.weights = static_cast<bf16*>(c["weights"].data),
                               .master = c.data<float>("master"),
                               .m = c.data<float>("m"),
                               .v = c.data<float>("v"),
                               .gradient = c.data<float>("gradient"),
                               .n = c['N'],
                               .decay = true};
    AdamWStep args = step;
    args.state = c.data<StepState>("state");
    adamw(stream, {&segment, 1}, args);
}

References adamw_references(const Operands& o) {
    Values master = o.values("master"), m = o.values("m"), v = o.values("v");
    const Values gradient = o.values("gradient");
    for (size_t i = 0; i < master.size(); ++i) {
        const AdamWReference r =
            adamw_reference({master[i], m[i], v[i]}, gradient[i],
                            static_cast<double>(step_state.multiplier), true, step);
        master[i] = r.master;
        m[i] = r.m;
        v[i] = r.v;
    }
    return {{"weights", master}, {"master", master}, {"m", m}, {"v", v}};
}

// --- the table -------------------------------------------------------------------------------------------------------

std::vector<Operation> make_operations() {
    return {
        {.name = "linear_forward",
         .computes = "out = x·wᵀ",
         .letters = {tokens, letter('N', 512, 768), letter('K', 768, 768)},
         .implementations = products,
         .declare =
             [](Operands& o) {
                 layer(o);
                 o.result("out", {o['M'], o['N']}, o.dtype(), {.roundings = 1, .terms = o['K']});
             },
         .scratch_bytes = linear_scratch,
         .run = run_linear_forward,
         .reference = linear_forward_reference},
        {.name = "linear_forward_bias",
         .computes = "out = x·wᵀ + bias",
         .letters = {tokens, letter('N', 512, 2304), letter('K', 768, 768)},
         .implementations = products,
         .declare =
             [](Operands& o) {
                 layer(o);
                 o.normal("bias", {o['N']});
                 o.result("out", {o['M'], o['N']}, o.dtype(), {.roundings = 2, .terms = o['K']});
             },
         .scratch_bytes = linear_scratch,
         .run = run_linear_forward,
         .reference = linear_forward_reference},
        {.name = "linear_forward_gelu",
         .computes = "preact = x·wᵀ + bias, out = gelu(preact)",
         .letters = {tokens, letter('N', 512, 3072), letter('K', 768, 768)},
         .implementations = products,
         .declare =
             [](Operands& o) {
                 layer(o);
                 o.normal("bias", {o['N']});
                 o.result("preact", {o['M'], o['N']}, o.dtype(), {.roundings = 2, .terms = o['K']});
                 o.result("out", {o['M'], o['N']}, o.dtype(), {.roundings = 3, .terms = o['K']});
             },
         .scratch_bytes = linear_scratch,
         .run = run_linear_forward,
         .reference = linear_forward_reference},
        {.name = "linear_forward_residual",
         .computes = "out = x·wᵀ + bias + residual",
         .letters = {tokens, letter('N', 512, 768), letter('K', 768, 3072)},
         .implementations = products,
         .declare =
             [](Operands& o) {
                 layer(o);
                 o.normal("bias", {o['N']});
                 o.normal("residual", {o['M'], o['N']});
                 o.result("out", {o['M'], o['N']}, o.dtype(), {.roundings = 2, .terms = o['K']});
             },
         .scratch_bytes = linear_scratch,
         .run = run_linear_forward,
         .reference = linear_forward_reference},
        {.name = "linear_backward_input",
         .computes = "dx = dy·w",
         .letters = {tokens, letter('N', 768, 2304), letter('K', 512, 768)},
         .implementations = products,
         .declare =
             [](Operands& o) {
                 layer_below(o);
                 o.result("dx", {o['M'], o['K']}, o.dtype(), {.roundings = 1, .terms = o['N']});
             },
         .scratch_bytes = linear_scratch,
         .run = run_linear_backward_input,
         .reference = linear_backward_input_reference},
        {.name = "linear_backward_input_dgelu",
         .computes = "dx = (dy·w) ⊙ gelu'(preact)",
         .letters = {tokens, letter('N', 768, 768), letter('K', 512, 3072)},
         .implementations = products,
         .declare =
             [](Operands& o) {
                 layer_below(o);
                 o.normal("preact", {o['M'], o['K']});
                 o.result("dx", {o['M'], o['K']}, o.dtype(), {.roundings = 2, .terms = o['N']});
             },
         .scratch_bytes = linear_scratch,
         .run = run_linear_backward_input,
         .reference = linear_backward_input_reference},
        {.name = "linear_backward_weight",
         .computes = "dw = dyᵀ·x, dbias = Σ_rows dy",
         .letters = {tokens, letter('N', 768, 3072), letter('K', 512, 768)},
         .implementations = products,
         .declare =
             [](Operands& o) {
                 o.normal("x", {o['M'], o['K']});
                 o.normal("dy", {o['M'], o['N']});
                 o.result("dw", {o['N'], o['K']}, DType::fp32, {.terms = o['M']});
                 o.result("dbias", {o['N']}, DType::fp32, {.terms = o['M']});
             },
         .scratch_bytes = linear_scratch,
         .run =
             [](Stream& stream, const Call& c) {
                 linear_backward_weight(
                     stream,
                     {.dw = c.sink("dw"), .x = c["x"], .dy = c["dy"], .dbias = c.sink("dbias")});
             },
         .reference = linear_backward_weight_reference},
        {.name = "gelu_forward",
         .computes = "out = gelu(x)",
         .letters = {tokens, letter('N', 3072, 3072)},
         .declare =
             [](Operands& o) {
                 o.normal("x", {o['M'], o['N']}, 2);
                 o.result("out", {o['M'], o['N']}, o.dtype(), {.roundings = 1});
             },
         .run = [](Stream& stream, const Call& c) { gelu_forward(stream, c["out"], c["x"]); },
         .reference = [](const Operands& o) -> References {
             Values out = o.values("x");
             for (double& value : out) value = gelu_reference(value);
             return {{"out", out}};
         }},
        {.name = "layernorm_forward",
         .computes = "out = (x − μ)·ρ ⊙ w + b, stats = (μ, ρ)",
         .letters = {tokens, normed},
         .declare =
             [](Operands& o) {
                 norm(o);
                 o.result("out", {o['M'], o['C']}, o.dtype(), {.roundings = 1, .terms = o['C']});
                 o.result("stats", {o['M'], 2}, DType::fp32, {.terms = o['C']});
             },
         .run = run_layernorm_forward,
         .reference = [](const Operands& o) -> References {
             const LayerNormReference r = layernorm_reference<double>(norm_problem(o));
             return {{"out", r.out}, {"stats", r.stats}};
         }},
        {.name = "layernorm_backward",
         .computes = "dres += the gradient of x, dw = Σ_rows dy ⊙ (x − μ)·ρ, db = Σ_rows dy, dbias "
                     "= Σ_rows dres",
         .letters = {tokens, normed},
         .declare =
             [](Operands& o) {
                 norm(o);
                 o.normal("dy", {o['M'], o['C']});
                 o.normal("dres", {o['M'], o['C']});
                 o.room("out", {o['M'], o['C']}, o.dtype());
                 o.room("stats", {o['M'], 2}, DType::fp32);
                 o.changes("dres", {.roundings = 1, .terms = o['C']});
                 o.result("dw", {o['C']}, DType::fp32, {.terms = o['C'] + o['M']});
                 o.result("db", {o['C']}, DType::fp32, {.terms = o['M']});
                 o.result("dbias", {o['C']}, DType::fp32,
                          {.roundings = 1, .terms = o['C'] + o['M']});
             },
         .scratch_bytes =
             [](const Device& device, const Operands& o) {
                 return layernorm_scratch_bytes(device, o['M'], o['C']);
             },
         .prepare = run_layernorm_forward,
         .run =
             [](Stream& stream, const Call& c) {
                 layernorm_backward(stream, {.dres = c["dres"],
                                             .dw = c.sink("dw"),
                                             .db = c.sink("db"),
                                             .dy = c["dy"],
                                             .x = c["x"],
                                             .w = c["w"],
                                             .stats = c["stats"],
                                             .dbias = c.sink("dbias")});
             },
         .reference = layernorm_backward_reference},
        {.name = "attention_forward",
         .computes = "out = softmax(q·kᵀ/√D, causal)·v, lse = log Σ exp of each row",
         .letters = {batch, sequence, letter('H', 4, 12), letter('D', 64, 64)},
         .implementations = attentions,
         .declare =
             [](Operands& o) {
                 o.normal("qkv", {o['B'], o['T'], 3 * o['H'] * o['D']});
                 o.result("out", {o['B'], o['T'], o['H'] * o['D']}, o.dtype(),
                          {.roundings = 2, .terms = o['T'] + o['D']});
                 o.result("lse", {o['B'], o['H'], o['T']}, DType::fp32, {.terms = o['T'] + o['D']});
             },
         .scratch_bytes = attention_scratch,
         .run = run_attention_forward,
         .reference = attention_references},
        {.name = "attention_backward",
         .computes = "dqkv, the gradients of q, k and v, with out and lse of the forward pass",
         .letters = {batch, sequence, letter('H', 4, 12), letter('D', 64, 64)},
         .implementations = attentions,
         .declare =
             [](Operands& o) {
                 o.normal("qkv", {o['B'], o['T'], 3 * o['H'] * o['D']});
                 o.normal("dout", {o['B'], o['T'], o['H'] * o['D']});
                 o.room("out", {o['B'], o['T'], o['H'] * o['D']}, o.dtype());
                 o.room("lse", {o['B'], o['H'], o['T']}, DType::fp32);
                 o.result("dqkv", {o['B'], o['T'], 3 * o['H'] * o['D']}, o.dtype(),
                          {.roundings = 4, .terms = o['T'] + o['D']});
             },
         .scratch_bytes = attention_scratch,
         .prepare = run_attention_forward,
         .run = run_attention_backward,
         .reference = attention_references},
        {.name = "embedding_forward",
         .computes = "out = wte[token] + wpe[position]",
         .letters = {batch, sequence, letter('C', 768, 768), letter('V', 1000, 50257)},
         .declare =
             [](Operands& o) {
                 o.integers("tokens", {o['B'] * o['T']}, o['V']);
                 o.normal("wte", {o['V'], o['C']});
                 o.normal("wpe", {o['T'], o['C']});
                 o.result("out", {o['B'], o['T'], o['C']}, o.dtype(), {.roundings = 1});
             },
         .run =
             [](Stream& stream, const Call& c) {
                 embedding_forward(stream, {.out = c["out"],
                                            .tokens = c.data<int32_t>("tokens"),
                                            .wte = c["wte"],
                                            .wpe = c["wpe"]});
             },
         .reference = [](const Operands& o) -> References {
             return {{"out", embedding_forward_reference(embedding_rows(o), o.values("wte"),
                                                         o.values("wpe"))}};
         }},
        {.name = "embedding_backward",
         .computes = "dwte[token] += dout, dwpe[position] = Σ_batch dout",
         .letters = {batch, sequence, letter('C', 768, 768), letter('V', 1000, 50257)},
         .declare =
             [](Operands& o) {
                 o.integers("tokens", {o['B'] * o['T']}, o['V']);
                 o.normal("dout", {o['B'], o['T'], o['C']});
                 o.normal("dwte", {o['V'], o['C']}, DType::fp32);
                 o.changes("dwte", {.terms = o['B'] * o['T']});
                 o.result("dwpe", {o['T'], o['C']}, DType::fp32, {.terms = o['B']});
             },
         .scratch_bytes =
             [](const Device& device, const Operands& o) {
                 return embedding_scratch_bytes(device, o['B'] * o['T'], o['V']);
             },
         .run =
             [](Stream& stream, const Call& c) {
                 embedding_backward(stream, {.dwte = c.sink("dwte", true),
                                             .dwpe = c.sink("dwpe"),
                                             .dout = c["dout"],
                                             .tokens = c.data<int32_t>("tokens"),
                                             .n_ctx = c['T']});
             },
         .reference = [](const Operands& o) -> References {
             Values dwte = o.values("dwte"), dwpe(static_cast<size_t>(o['T'] * o['C']));
             embedding_backward_reference<double>(embedding_rows(o), o.values("dout"), dwte, dwpe);
             return {{"dwte", dwte}, {"dwpe", dwpe}};
         }},
        {.name = "head_loss",
         .computes =
             "losses = log Σ exp z − z_target with z = x·wᵀ, and dx = dz·w, dw = dzᵀ·x: training",
         .letters = {{'M', 128, 4 * 256, 64 * 1024},
                     letter('C', 256, 768),
                     letter('V', 1000, 50257)},
         .implementations = products,
         .declare =
             [](Operands& o) {
                 head(o);
                 o.result("dx", {o['M'], o['C']}, o.dtype(),
                          {.roundings = 3, .terms = o['C'] + o['V']});
                 o.result("dw", {padded(o['V']), o['C']}, DType::fp32,
                          {.roundings = 2, .terms = o['C'] + o['M']});
             },
         .scratch_bytes = head_scratch,
         .run = run_head_loss,
         .reference = head_references},
        {.name = "head_loss_evaluation",
         .computes = "losses alone",
         .letters = {{'M', 128, 4 * 256, 64 * 1024},
                     letter('C', 256, 768),
                     letter('V', 1000, 50257)},
         .implementations = products,
         .declare = head,
         .scratch_bytes = head_scratch,
         .run = run_head_loss,
         .reference = head_references},
        {.name = "norm_partials",
         .computes = "Σ gradient² of each block of 4096 elements",
         .letters = {parameters},
         .fp32_only = true,
         .declare =
             [](Operands& o) {
                 o.normal("gradient", {o['N']}, DType::fp32);
                 o.double_result("partials", {(o['N'] + norm_block - 1) / norm_block},
                                 {.terms = norm_block});
             },
         .run =
             [](Stream& stream, const Call& c) {
                 const NormSegment segment{c.data<float>("gradient"), c['N'],
                                           c.data<double>("partials")};
                 norm_partials(stream, {&segment, 1});
             },
         .reference = [](const Operands& o) -> References {
             return {{"partials", norm_partials_reference(o.values("gradient"))}};
         }},
        {.name = "adamw",
         .computes = "m, v and master updated; in bf16 weights = master, rounded",
         .letters = {parameters},
         .declare =
             [](Operands& o) {
                 o.normal("gradient", {o['N']}, DType::fp32);
                 o.normal("master", {o['N']}, DType::fp32);
                 o.normal("m", {o['N']}, DType::fp32, 0.1f);
                 o.normal("v", {o['N']}, DType::fp32, 0.01f,
                          0.1f);  // never negative: ten standard deviations
                 o.words("state", &step_state, sizeof step_state / sizeof(int32_t));
                 for (const char* name : {"master", "m", "v"}) o.changes(name, {});
                 if (o.dtype() == DType::bf16)
                     o.result("weights", {o['N']}, DType::bf16, {.roundings = 1});
             },
         .run = run_adamw,
         .reference = adamw_references},
    };
}

}  // namespace

std::vector<Implementation> only_one(const Operands&, const Device& device) {
    return {{device.is_cuda() ? "CUDA" : "CPU"}};
}

const std::vector<Operation>& operations() {
    static const std::vector<Operation> all = make_operations();
    return all;
}

}  // namespace train_gpt::compare
