#include "model/expert_layer.h"

#include "device/copy.h"
#include "kernels/convert.h"
#include "kernels/experts/combine.h"
#include "kernels/experts/group_rows.h"
#include "kernels/experts/grouped_linear.h"
#include "kernels/experts/route.h"
#include "kernels/linear/linear.h"
#include "kernels/swiglu.h"

namespace train_gpt {

using Lane = TensorGroup::Lane;

namespace {

/// The router of a shared expert's gate: σ(w·x).
constexpr RouterRule gate_rule{.score = RouterScore::sigmoid};

/// A layer's experts in memory: weights [E, N, K], and biases [E, N], which may be absent.
Tensor by_expert(Tensor all, const LayerSpec& layer) {
    const int64_t E = layer.experts.n_expert;
    if (!all) return {};
    return all.rank == 1 ? all.reshaped({E, all.numel() / E})
                         : all.reshaped({E, all.rows() / E, all.cols()});
}

Operand by_expert(const Operand& all, const LayerSpec& layer) {
    return {by_expert(all.values, layer), all.scales, all.rounded};
}

/// Whether this rank counts what all tensor-parallel ranks have: they add up what they compute.
bool counts_whole(const Block& block) { return block.residual.tensor().rank() == 0; }

/// The router's selection bias in fp32.
Tensor selection_bias(Stream& stream, const Block& block) {
    if (!block.layer.experts.selection_bias) return {};
    const Tensor weight = block.weight(block.parameters.selection_bias),
                 bias = block.routing.counts ? block.routing.counts->bias(block.routing.router)
                                             : block.activations.selection_bias;
    widen(stream, bias.as<float>(), weight.data, weight.dtype, weight.numel(), false);
    return bias;
}

/// Each expert's share of the tokens of a sequence or micro-batch, on all context-parallel ranks.
void keep_load(Stream& stream, const Block& block) {
    const Routing& routing = block.routing;
    const BlockActivations& a = block.activations;
    Tensor counts = a.counts;
    if (routing.counts_of_ranks) {
        const int64_t n = counts.rows();
        counts = routing.counts_of_ranks;
        copy(stream, counts.row_range(routing.context->rank() * n, n).data, a.counts.data,
             a.counts.bytes());
        routing.context->gather(stream, counts);
    }
    const bool by_sequence = routing.losses.level == BalanceLevel::sequence;
    expert_load(stream, a.load.row_range(0, by_sequence ? a.load.rows() : 1), counts);
}

Tensor offsets_of(const BlockActivations& a) { return a.offsets.reshaped({a.offsets.numel()}); }
Tensor row_token_of(const BlockActivations& a) {
    return a.row_token.reshaped({a.row_token.numel()});
}
/// offsets[E], if experts do not have all R rows.
Tensor row_count_of(const Block& block) {
    const Tensor& offsets = block.activations.offsets;
    if (block.routing.capacity == 0) return {};
    return {offsets.as<int32_t>() + offsets.numel() - 1, DType::int32, {1}};
}

/// Which experts a token goes to, and where its rows are.
void choose_experts(Stream& stream, const Block& block) {
    const BlockParameters& p = block.parameters;
    const BlockActivations& a = block.activations;
    const Routing& routing = block.routing;
    const ExpertSpec& e = block.layer.experts;
    linear_forward(stream, {.out = a.logits,
                            .x = a.norm2,
                            .w = block.weight(p.router_w),
                            .bias = block.weight(p.router_b)});
    const bool counts = routing.counts != nullptr;
    route(stream, {.logits = a.logits,
                   .selection_bias = selection_bias(stream, block),
                   .rule = e.rule,
                   .experts = a.experts,
                   .weights = a.expert_weights,
                   .counts = counts ? a.counts : Tensor{},
                   .probabilities = counts ? a.probabilities : Tensor{}});
    group_rows(stream, {.experts = a.experts,
                        .offsets = offsets_of(a),
                        .row_token = row_token_of(a),
                        .row_of = a.row_of,
                        .capacity = routing.capacity,
                        .sequences = counts ? a.counts.rows() : 1});
    if (e.shared_gate) {
        linear_forward(stream,
                       {.out = a.shared_logit, .x = a.norm2, .w = block.weight(p.shared_gate_w)});
        route(stream, {.logits = a.shared_logit,
                       .rule = gate_rule,
                       .experts = a.shared_choice,
                       .weights = a.shared_weight});
    }
    if (!counts) return;
    routing.counts->add(stream, routing.router,
                        {.counts = a.counts,
                         .probabilities = a.probabilities,
                         .tokens = a.norm2.rows(),
                         .capacity = routing.capacity});
    if (routing.losses.balance != 0 && routing.losses.level != BalanceLevel::step)
        keep_load(stream, block);
}

void shared_forward(Stream& stream, const Block& block) {
    const BlockParameters& p = block.parameters;
    const BlockActivations& a = block.activations;
    linear_forward(stream,
                   {.out = a.shared_preact, .x = a.norm2, .w = block.operand(p.shared_up_w)});
    swiglu_forward(
        stream,
        {.out = a.shared_hidden, .gate_up = a.shared_preact, .clamped = block.layer.clamped});
    linear_forward(
        stream, {.out = a.shared_out, .x = a.shared_hidden, .w = block.operand(p.shared_down_w)});
}

void experts_forward(Stream& stream, const Block& block) {
    const BlockParameters& p = block.parameters;
    const BlockActivations& a = block.activations;
    const UnitLease experts = block.experts.lease(stream);
    const auto weight = [&](int i) { return by_expert(experts.weight(i), block.layer); };
    const auto operand = [&](int i) { return by_expert(experts.operand(i), block.layer); };
    grouped_linear_forward(stream, {.out = a.preact,
                                    .x = a.norm2,
                                    .w = operand(p.up_w),
                                    .offsets = offsets_of(a),
                                    .row_token = row_token_of(a),
                                    .bias = weight(p.up_b)});
    swiglu_forward(stream, {.out = a.hidden,
                            .gate_up = a.preact,
                            .clamped = block.layer.clamped,
                            .row_count = row_count_of(block)});
    grouped_linear_forward(stream, {.out = a.expert_out,
                                    .x = a.hidden,
                                    .w = operand(p.down_w),
                                    .offsets = offsets_of(a),
                                    .bias = counts_whole(block) ? weight(p.down_b) : Tensor{}});
}

/// The gradients of the experts' inputs, in the order of rows, and of their weights.
void experts_backward(const BackwardPass& pass, Tensor dout) {
    const BlockParameters& p = pass.block.parameters;
    const BlockActivations& a = pass.block.activations;
    const BlockGradients& g = pass.g;
    Stream& stream = pass.stream;
    const Tensor offsets = offsets_of(a);
    const UnitLease experts = pass.inputs ? pass.block.experts.lease(stream) : UnitLease();
    const auto operand = [&](int i) { return by_expert(experts.operand(i), pass.block.layer); };
    if (pass.inputs) {
        combine_backward(stream, {.dy = g.dexpert_out,
                                  .dweights = g.dweights,
                                  .dout = dout,
                                  .y = a.expert_out,
                                  .row_of = a.row_of,
                                  .weights = a.expert_weights});
        grouped_linear_backward_input(
            stream,
            {.dx = g.dhidden, .dy = g.dexpert_out, .w = operand(p.down_w), .offsets = offsets});
        swiglu_backward(stream, {.dgate_up = g.dup,
                                 .dout = g.dhidden,
                                 .gate_up = a.preact,
                                 .out = pass.recomputes_elementwise() ? a.hidden : Tensor{},
                                 .clamped = pass.block.layer.clamped,
                                 .row_count = row_count_of(pass.block)});
        grouped_linear_backward_input(
            stream, {.dx = g.dgrouped, .dy = g.dup, .w = operand(p.up_w), .offsets = offsets});
    }
    if (!pass.weights) return;
    grouped_linear_backward_weight(stream, {.dw = pass.gradients.sink(stream, p.down_w),
                                            .x = a.hidden,
                                            .dy = g.dexpert_out,
                                            .offsets = offsets,
                                            .dbias = pass.gradients.sink(stream, p.down_b)});
    pass.wait_for_norm();
    grouped_linear_backward_weight(stream, {.dw = pass.gradients.sink(stream, p.up_w),
                                            .x = a.norm2,
                                            .dy = g.dup,
                                            .offsets = offsets,
                                            .row_token = row_token_of(a),
                                            .dbias = pass.gradients.sink(stream, p.up_b)});
}

/// The gradients of the router's logits and of its weights.
void router_backward(const BackwardPass& pass) {
    const Block& block = pass.block;
    const BlockParameters& p = block.parameters;
    const BlockActivations& a = block.activations;
    const BlockGradients& g = pass.g;
    const Routing& routing = block.routing;
    if (pass.inputs) {
        // Tensor-parallel ranks add up the gradients of the logits by way of the router's products.
        const RouterLosses losses = counts_whole(block) ? routing.losses : RouterLosses{};
        const bool by_step = losses.level == BalanceLevel::step,
                   by_sequence = losses.level == BalanceLevel::sequence;
        route_backward(pass.stream,
                       {.dlogits = g.dlogits,
                        .logits = a.logits,
                        .rule = block.layer.experts.rule,
                        .experts = a.experts,
                        .dweights = g.dweights,
                        .load = losses.balance == 0 ? Tensor{}
                                : by_step           ? routing.counts->load(routing.router)
                                          : a.load.row_range(0, by_sequence ? a.load.rows() : 1),
                        .balance = losses.balance,
                        .z_loss = losses.z_loss});
    }
    pass.weight_gradient_of_norm(p.router_w, p.router_b, a.norm2, g.dlogits);
    if (pass.weights) pass.clear_gradient(p.selection_bias);
}

void shared_backward(const BackwardPass& pass, Tensor dout) {
    const Block& block = pass.block;
    const BlockParameters& p = block.parameters;
    const BlockActivations& a = block.activations;
    const BlockGradients& g = pass.g;
    const bool has_gate = block.layer.experts.shared_gate;
    if (pass.inputs && has_gate) {
        combine_backward(pass.stream, {.dy = g.dshared_out,
                                       .dweights = g.dshared_weight,
                                       .dout = dout,
                                       .y = a.shared_out,
                                       .weights = a.shared_weight});
        route_backward(pass.stream, {.dlogits = g.dshared_logit,
                                     .logits = a.shared_logit,
                                     .rule = gate_rule,
                                     .experts = a.shared_choice,
                                     .dweights = g.dshared_weight});
    }
    const Tensor dshared = has_gate ? g.dshared_out : dout;
    if (pass.inputs) {
        linear_backward_input(
            pass.stream,
            {.dx = g.dshared_hidden, .dy = dshared, .w = block.operand(p.shared_down_w)});
        swiglu_backward(pass.stream,
                        {.dgate_up = g.dshared_up,
                         .dout = g.dshared_hidden,
                         .gate_up = a.shared_preact,
                         .out = pass.recomputes_elementwise() ? a.shared_hidden : Tensor{},
                         .clamped = block.layer.clamped});
    }
    pass.weight_gradient(p.shared_down_w, -1, a.shared_hidden, dshared);
    pass.weight_gradient_of_norm(p.shared_up_w, -1, a.norm2, g.dshared_up);
    if (has_gate) pass.weight_gradient_of_norm(p.shared_gate_w, -1, a.norm2, g.dshared_logit);
}

/// g.dy: what the router, the experts and the shared expert give, added up.
void add_input_gradients(const BackwardPass& pass) {
    const Block& block = pass.block;
    const BlockParameters& p = block.parameters;
    const BlockGradients& g = pass.g;
    Stream& stream = pass.stream;
    const Tensor sum = block.residual.partial(g.dy);
    linear_backward_input(stream, {.dx = sum, .dy = g.dlogits, .w = block.weight(p.router_w)});
    combine(stream,
            {.out = sum, .y = g.dgrouped, .row_of = block.activations.row_of, .residual = sum});
    const auto add = [&](Tensor dy, int weight) {
        linear_backward_input(stream,
                              {.dx = g.dshared_input, .dy = dy, .w = block.operand(weight)});
        combine(stream, {.out = sum, .y = g.dshared_input, .residual = sum});
    };
    if (block.layer.experts.n_ff_shared > 0) add(g.dshared_up, p.shared_up_w);
    if (block.layer.experts.shared_gate) add(g.dshared_logit, p.shared_gate_w);
    block.residual.add_partials(stream, g.dy);
}

}  // namespace

Addends expert_layer_forward(Stream& stream, const Block& block, Tensor out) {
    const BlockActivations& a = block.activations;
    const bool has_shared = block.layer.experts.n_ff_shared > 0;
    block.residual.tensor().wait(stream, Lane::inputs);
    if (out) choose_experts(stream, block);
    if (has_shared) shared_forward(stream, block);
    experts_forward(stream, block);
    if (!out) return {};
    return block.residual.add_sum(stream, out, a.x_mid, [&](Tensor sum, Tensor residual) {
        combine(stream, {.out = sum,
                         .y = a.expert_out,
                         .row_of = a.row_of,
                         .weights = a.expert_weights,
                         .residual = residual});
        if (has_shared)
            combine(stream,
                    {.out = sum, .y = a.shared_out, .weights = a.shared_weight, .residual = sum});
    });
}

void expert_layer_backward(const BackwardPass& pass) {
    const Tensor dout = pass.gather_dres(pass.g.dout);
    pass.restore(pass.block.norm2());
    pass.block.residual.tensor().wait(pass.stream, Lane::gradients);
    experts_backward(pass, dout);
    if (pass.inputs) pass.block.experts.released(pass.stream);
    if (pass.weights) pass.block.experts.ready(pass.stream);
    if (pass.block.layer.experts.n_ff_shared > 0) shared_backward(pass, dout);
    router_backward(pass);
    if (pass.inputs) add_input_gradients(pass);
}

}  // namespace train_gpt
