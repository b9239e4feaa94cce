// The operations of norms: operations.h says what each entry means.
#include <cmath>

#include "kernels/norm.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

namespace {

/// The elements of a very short row may be nearly equal: ρ then makes rounding errors large.
constexpr Letter normed{'C', 768, 768, 768, 8};

/// Operands, calls and references of one norm; RMSNorm has no b.
template <Norm norm>
struct Of {
    static constexpr bool has_b = norm == Norm::layer;

    static void declare(Operands& o) {
        o.normal("x", {o['M'], o['C']}, 2, 0.5f);
        o.normal("w", {o['C']}, 0.3f, 1);
        if (has_b) o.normal("b", {o['C']});
    }

    static void run_forward(Stream& stream, const Call& c) {
        norm_forward(stream, {.norm = norm,
                              .out = c["out"],
                              .stats = c["stats"],
                              .x = c["x"],
                              .w = c["w"],
                              .b = has_b ? c["b"] : Tensor{}});
    }

    static void run_backward(Stream& stream, const Call& c) {
        norm_backward(stream, {.norm = norm,
                               .dres = c["dres"],
                               .dw = c.sink("dw"),
                               .db = has_b ? c.sink("db") : GradientSink{},
                               .dy = c["dy"],
                               .x = c["x"],
                               .w = c["w"],
                               .stats = c["stats"],
                               .dbias = c.sink("dbias")});
    }

    static NormProblem problem(const Operands& o) {
        return {.norm = norm,
                .M = o['M'],
                .C = o['C'],
                .x = o.values("x"),
                .w = o.values("w"),
                .b = has_b ? o.values("b") : Values()};
    }

    /// Σ dy ⊙ norm(x) + Σ dres ⊙ x: the residual stream goes on as x.
    static double loss(const Operands& o, const NormProblem& problem) {
        return dot(o.values("dy"), norm_reference<double>(problem).out) +
               dot(o.values("dres"), problem.x);
    }

    /// The gradient of a member of the problem.
    template <Values NormProblem::*member>
    static double loss_with(const Operands& o, const Values& values) {
        NormProblem changed = problem(o);
        changed.*member = values;
        return loss(o, changed);
    }

    /// With the bias of the layer whose output was added into x.
    static double loss_with_bias(const Operands& o, const Values& bias) {
        NormProblem changed = problem(o);
        for (size_t i = 0; i < changed.x.size(); ++i) changed.x[i] += bias[i % bias.size()];
        return loss(o, changed);
    }

    static std::vector<Derivative> derivatives() {
        std::vector<Derivative> all{
            {.gradient = "dres",
             .point = [](const Operands& o) { return o.values("x"); },
             .loss = loss_with<&NormProblem::x>},
            {.gradient = "dw",
             .point = [](const Operands& o) { return o.values("w"); },
             .loss = loss_with<&NormProblem::w>},
            {.gradient = "dbias",
             .point = [](const Operands& o) { return Values(static_cast<size_t>(o['C'])); },
             .loss = loss_with_bias}};
        if (has_b)
            all.push_back({.gradient = "db",
                           .point = [](const Operands& o) { return o.values("b"); },
                           .loss = loss_with<&NormProblem::b>});
        return all;
    }

    static Results reference(const Operands& o) {
        NormProblem backward = problem(o);
        backward.dy = o.values("dy");
        backward.dres = o.values("dres");
        const NormReference r = norm_reference<double>(backward);
        Values dbias(static_cast<size_t>(o['C'])), terms(dbias.size());
        for (size_t i = 0; i < r.dres.size(); ++i) {
            dbias[i % dbias.size()] += r.dres[i];
            terms[i % dbias.size()] += r.dres[i] * r.dres[i];
        }
        for (double& term : terms) term = std::sqrt(term);
        // A row with a small variance has a large gradient, and two such rows may cancel.
        Results results{
            {"dres", r.dres}, {"dw", r.dw}, {"dbias", dbias}, {terms_of("dbias"), terms}};
        if (has_b) results["db"] = r.db;
        return results;
    }

    static std::vector<Operation> operations(const std::string& name) {
        return {
            {.name = name + "_forward",
             .computes = has_b ? "out = (x − μ)·ρ ⊙ w + b, stats = (μ, ρ)"
                               : "out = x·ρ ⊙ w, stats = (0, ρ)",
             .letters = {tokens, normed},
             .declare =
                 [](Operands& o) {
                     declare(o);
                     o.result("out", {o['M'], o['C']}, o.dtype(),
                              {.roundings = 1, .terms = o['C']});
                     o.result("stats", {o['M'], 2}, DType::fp32, {.terms = o['C']});
                 },
             .run = run_forward,
             .reference = [](const Operands& o) -> Results {
                 const NormReference r = norm_reference<double>(problem(o));
                 return {{"out", r.out}, {"stats", r.stats}};
             }},
            {.name = name + "_backward",
             .computes = has_b ? "dres += the gradient of x, dw = Σ_rows dy ⊙ (x − μ)·ρ, db = "
                                 "Σ_rows dy, dbias = Σ_rows dres"
                               : "dres += the gradient of x, dw = Σ_rows dy ⊙ x·ρ, dbias = Σ_rows "
                                 "dres",
             .letters = {tokens, normed},
             .declare =
                 [](Operands& o) {
                     declare(o);
                     o.normal("dy", {o['M'], o['C']});
                     o.normal("dres", {o['M'], o['C']});
                     o.room("out", {o['M'], o['C']}, o.dtype());
                     o.room("stats", {o['M'], 2}, DType::fp32);
                     o.changes("dres", {.roundings = 1, .terms = o['C']});
                     o.result("dw", {o['C']}, DType::fp32, {.terms = o['C'] + o['M']});
                     if (has_b) o.result("db", {o['C']}, DType::fp32, {.terms = o['M']});
                     o.result("dbias", {o['C']}, DType::fp32,
                              {.roundings = 1, .terms = o['C'] + o['M']});
                 },
             .scratch_bytes =
                 [](const Stream& stream, const Operands& o) {
                     return norm_scratch_bytes(stream, o['M'], o['C']);
                 },
             .prepare = run_forward,
             .run = run_backward,
             .reference = reference,
             .derivatives = derivatives()},
        };
    }
};

}  // namespace

std::vector<Operation> norm_operations() {
    std::vector<Operation> all = Of<Norm::layer>::operations("layernorm");
    for (Operation& operation : Of<Norm::rms>::operations("rmsnorm"))
        all.push_back(std::move(operation));
    return all;
}

}  // namespace train_gpt::compare
