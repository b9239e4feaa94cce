// The operations of LayerNorm: operations.h says what each entry means.
#include "kernels/layernorm.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

namespace {

/// The elements of a very short row may be nearly equal: ρ then makes rounding errors large.
constexpr Letter normed{'C', 768, 768, 768, 8};

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

/// Σ dy ⊙ layernorm(x) + Σ dres ⊙ x: the residual stream goes on as x.
double layernorm_loss(const Operands& o, const LayerNormProblem& problem) {
    return dot(o.values("dy"), layernorm_reference<double>(problem).out) +
           dot(o.values("dres"), problem.x);
}

const Derivative of_x{.gradient = "dres",
                      .point = [](const Operands& o) { return o.values("x"); },
                      .loss =
                          [](const Operands& o, const Values& x) {
                              LayerNormProblem problem = norm_problem(o);
                              problem.x = x;
                              return layernorm_loss(o, problem);
                          }};
const Derivative of_w{.gradient = "dw",
                      .point = [](const Operands& o) { return o.values("w"); },
                      .loss =
                          [](const Operands& o, const Values& w) {
                              LayerNormProblem problem = norm_problem(o);
                              problem.w = w;
                              return layernorm_loss(o, problem);
                          }};
const Derivative of_b{.gradient = "db",
                      .point = [](const Operands& o) { return o.values("b"); },
                      .loss =
                          [](const Operands& o, const Values& b) {
                              LayerNormProblem problem = norm_problem(o);
                              problem.b = b;
                              return layernorm_loss(o, problem);
                          }};
/// Of the layer whose output was added into x.
const Derivative of_bias{
    .gradient = "dbias",
    .point = [](const Operands& o) { return Values(static_cast<size_t>(o['C'])); },
    .loss =
        [](const Operands& o, const Values& bias) {
            LayerNormProblem problem = norm_problem(o);
            for (size_t i = 0; i < problem.x.size(); ++i) problem.x[i] += bias[i % bias.size()];
            return layernorm_loss(o, problem);
        }};

Results layernorm_backward_reference(const Operands& o) {
    LayerNormProblem problem = norm_problem(o);
    problem.dy = o.values("dy");
    problem.dres = o.values("dres");
    const LayerNormReference r = layernorm_reference<double>(problem);
    Values dbias(static_cast<size_t>(o['C']));
    for (size_t i = 0; i < r.dres.size(); ++i) dbias[i % dbias.size()] += r.dres[i];
    return {{"dres", r.dres}, {"dw", r.dw}, {"db", r.db}, {"dbias", dbias}};
}

}  // namespace

std::vector<Operation> layernorm_operations() {
    return {
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
         .reference = [](const Operands& o) -> Results {
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
             [](const Stream& stream, const Operands& o) {
                 return layernorm_scratch_bytes(stream, o['M'], o['C']);
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
         .reference = layernorm_backward_reference,
         .derivatives = {of_x, of_w, of_b, of_bias}},
    };
}

}  // namespace train_gpt::compare
