// The operations of the head with its loss: operations.h says what each entry means.
#include <algorithm>
#include <numeric>

#include "kernels/head_loss.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

namespace {

/// The chunk of rows is what gives its products enough to do; more would only take memory.
int64_t chunk(const Operands& o) { return std::min<int64_t>(o['M'], 8192); }
int64_t padded(int64_t V) { return (V + 127) / 128 * 128; }

void head(Operands& o) {
    o.normal("x", {o['M'], o['C']});
    declare_weight(o, padded(o['V']), o['C']);
    o.integers("targets", {o['M']}, o['V'], true);
    o.room("logits", {chunk(o), padded(o['V'])}, o.dtype());
    o.result("losses", {o['M']}, DType::fp32, {.roundings = 1, .terms = o['C'] + o['V']});
}

size_t head_scratch(const Stream& stream, const Operands& o) {
    return head_loss_scratch_bytes(stream, o.dtype(), chunk(o), padded(o['V']), o['C']);
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

HeadLossProblem head_problem(const Operands& o, const Values& x, const Values& w) {
    return {.R = o['M'],
            .C = o['C'],
            .V = o['V'],
            .x = x,
            .w = w,
            .targets = o.integer_values("targets")};
}

double sum_of_losses(const HeadLossProblem& problem) {
    const Values losses = head_loss_reference<double>(problem).losses;
    return std::accumulate(losses.begin(), losses.end(), 0.0);
}

const Derivative of_x{
    .gradient = "dx",
    .point = [](const Operands& o) { return o.values("x"); },
    .loss = [](const Operands& o,
               const Values& x) { return sum_of_losses(head_problem(o, x, o.values("w"))); }};
const Derivative of_w{
    .gradient = "dw",
    .point = [](const Operands& o) { return o.values("w"); },
    .loss = [](const Operands& o,
               const Values& w) { return sum_of_losses(head_problem(o, o.values("x"), w)); }};

Results head_references(const Operands& o) {
    const HeadLossReference r =
        head_loss_reference<double>(head_problem(o, o.values("x"), o.values("w")));
    return {{"losses", r.losses}, {"dx", r.dx}, {"dw", r.dw}};
}

}  // namespace

std::vector<Operation> head_loss_operations() {
    return {
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
         .reference = head_references,
         .derivatives = {of_x, of_w}},
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
    };
}

}  // namespace train_gpt::compare
