// The operations of linear layers: operations.h says what each entry means.
#include <cmath>

#include "kernels/linear/linear.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

namespace {

void layer(Operands& o) {
    o.normal("x", {o['M'], o['K']});
    declare_weight(o, o['N'], o['K']);
}

size_t linear_scratch(const Stream& stream, const Operands& o) {
    return linear_scratch_bytes(stream, o.dtype(), o['M'], o['N'], o['K']);
}

void run_linear_forward(Stream& stream, const Call& c) {
    linear_forward(stream, {.out = c["out"],
                            .x = c["x"],
                            .w = c["w"],
                            .bias = c["bias"],
                            .residual = c["residual"],
                            .preact = c["preact"]});
}

Values product(const Operands& o, const Values& x, const Values& w) {
    return product_reference<double>(GemmOp::nt, x, w, o['M'], o['N'], o['K']);
}

/// x·wᵀ with what the form adds.
Values layer_reference(const Operands& o) {
    Values out = product(o, o.values("x"), o.values("w"));
    const Values bias = o.has("bias") ? o.values("bias") : Values(static_cast<size_t>(o['N']));
    const Values residual = o.has("residual") ? o.values("residual") : Values(out.size());
    for (size_t i = 0; i < out.size(); ++i) out[i] += bias[i % bias.size()] + residual[i];
    return out;
}

Results linear_forward_reference(const Operands& o) {
    const Values sum = layer_reference(o);
    if (!o.has("preact")) return {{"out", sum}};
    Values out = sum;
    for (double& value : out) value = gelu_reference(value);
    return {{"preact", sum}, {"out", out}};
}

void layer_below(Operands& o) {
    o.normal("dy", {o['M'], o['N']});
    declare_weight(o, o['N'], o['K']);
}

void run_linear_backward_input(Stream& stream, const Call& c) {
    linear_backward_input(stream,
                          {.dx = c["dx"], .dy = c["dy"], .w = c["w"], .preact = c["preact"]});
}

Results linear_backward_input_reference(const Operands& o) {
    Values dx = product_reference<double>(GemmOp::nn, o.values("dy"), o.values("w"), o['M'], o['K'],
                                          o['N']);
    if (o.has("preact")) {
        const Values preact = o.values("preact");
        for (size_t i = 0; i < dx.size(); ++i) dx[i] *= gelu_derivative_reference(preact[i]);
    }
    return {{"dx", dx}};
}

/// The loss is Σ dy ⊙ (x·wᵀ + bias). It is linear in x, w and bias, so any point will do.
Values zeros(int64_t n) { return Values(static_cast<size_t>(n)); }

const Derivative of_x{
    .gradient = "dx",
    .point = [](const Operands& o) { return zeros(o['M'] * o['K']); },
    .loss = [](const Operands& o,
               const Values& x) { return dot(o.values("dy"), product(o, x, o.values("w"))); }};

const Derivative of_preact{.gradient = "dx",
                           .point = [](const Operands& o) { return o.values("preact"); },
                           .loss =
                               [](const Operands& o, const Values& preact) {
                                   Values x = preact;
                                   for (double& value : x) value = gelu_reference(value);
                                   return dot(o.values("dy"), product(o, x, o.values("w")));
                               }};

const Derivative of_w{
    .gradient = "dw",
    .point = [](const Operands& o) { return zeros(o['N'] * o['K']); },
    .loss = [](const Operands& o,
               const Values& w) { return dot(o.values("dy"), product(o, o.values("x"), w)); }};

const Derivative of_bias{.gradient = "dbias",
                         .point = [](const Operands& o) { return zeros(o['N']); },
                         .loss =
                             [](const Operands& o, const Values& bias) {
                                 Values out = zeros(o['M'] * o['N']);
                                 for (size_t i = 0; i < out.size(); ++i)
                                     out[i] = bias[i % bias.size()];
                                 return dot(o.values("dy"), out);
                             }};

Results linear_backward_weight_reference(const Operands& o) {
    const Values dy = o.values("dy");
    Values dbias(static_cast<size_t>(o['N']));
    for (size_t i = 0; i < dy.size(); ++i) dbias[i % dbias.size()] += dy[i];
    return {
        {"dw", product_reference<double>(GemmOp::tn, dy, o.values("x"), o['N'], o['K'], o['M'])},
        {"dbias", dbias}};
}

}  // namespace

std::vector<Operation> linear_operations() {
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
         .implementations = products_with_epilogue,
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
         .reference = linear_backward_input_reference,
         .derivatives = {of_x}},
        {.name = "linear_backward_input_dgelu",
         .computes = "dx = (dy·w) ⊙ gelu'(preact)",
         .letters = {tokens, letter('N', 768, 768), letter('K', 512, 3072)},
         .implementations = products_with_epilogue,
         .declare =
             [](Operands& o) {
                 layer_below(o);
                 o.normal("preact", {o['M'], o['K']});
                 o.result("dx", {o['M'], o['K']}, o.dtype(), {.roundings = 2, .terms = o['N']});
             },
         .scratch_bytes = linear_scratch,
         .run = run_linear_backward_input,
         .reference = linear_backward_input_reference,
         .derivatives = {of_preact}},
        {.name = "linear_backward_weight",
         .computes = "dw = dyᵀ·x, dbias = Σ_rows dy",
         .letters = {tokens, letter('N', 768, 3072), letter('K', 512, 768)},
         .implementations = products_with_epilogue,
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
         .reference = linear_backward_weight_reference,
         .derivatives = {of_w, of_bias}},
    };
}

}  // namespace train_gpt::compare
