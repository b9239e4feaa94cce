// The memory of a mixture of experts: the lists of what its passes keep, and their scratch memory.
#include <algorithm>

#include "kernels/experts/group_rows.h"
#include "kernels/experts/grouped_linear.h"
#include "kernels/experts/route.h"
#include "kernels/linear/linear.h"
#include "model/expert_layer.h"

namespace train_gpt {

Activations expert_activations(const LayerSpec& layer, DType dtype) {
    using A = BlockActivations;
    const ExpertSpec& e = layer.experts;
    const int64_t E = e.n_expert, k = e.n_expert_per_token, F = e.n_ff, C = layer.n_embd;
    Activations list;
    const auto route = [&](Tensor A::*member, int64_t width, DType type,
                           RowsOf rows_of = RowsOf::tokens, int64_t each = 1) {
        list.push_back({.member = member,
                        .width = width,
                        .dtype = type,
                        .rows_of = rows_of,
                        .each = each,
                        .is_route = true});
    };
    route(&A::logits, E, DType::fp32);
    route(&A::experts, k, DType::int32);
    route(&A::expert_weights, k, DType::fp32);
    route(&A::row_of, k, DType::int32);
    route(&A::row_token, 1, DType::int32, RowsOf::tokens, k);
    route(&A::offsets, E + 1, DType::int32, RowsOf::one);
    list.push_back({.member = &A::preact, .width = 2 * F, .dtype = dtype, .each = k});
    list.push_back({.member = &A::hidden,
                    .width = F,
                    .dtype = dtype,
                    .each = k,
                    .dropped = Recompute::elementwise,
                    .read_by = ReadBy::weights});
    list.push_back({.member = &A::expert_out,
                    .width = C,
                    .dtype = dtype,
                    .each = k,
                    .read_by = ReadBy::weights});  // as its gradient
    // Sums over the tokens of each sequence, for what training counts
    for (Tensor A::*sums : {&A::counts, &A::probabilities, &A::load})
        list.push_back({.member = sums,
                        .width = E,
                        .dtype = sums == &A::counts ? DType::int32 : DType::fp32,
                        .rows_of = RowsOf::sequences,
                        .is_route = sums == &A::load,
                        .dropped = Recompute::none,
                        .in_training_only = true});
    if (e.selection_bias)
        list.push_back({.member = &A::selection_bias,
                        .width = E,
                        .rows_of = RowsOf::one,
                        .dropped = Recompute::none});
    if (e.n_ff_shared == 0) return list;
    list.push_back(
        {.member = &A::shared_preact, .width = 2 * int64_t{e.n_ff_shared}, .dtype = dtype});
    list.push_back({.member = &A::shared_hidden,
                    .width = e.n_ff_shared,
                    .dtype = dtype,
                    .dropped = Recompute::elementwise,
                    .read_by = ReadBy::weights});
    list.push_back({.member = &A::shared_out,
                    .width = C,
                    .dtype = dtype,
                    .dropped = e.shared_gate ? Recompute::block : Recompute::none,
                    .read_by = e.shared_gate ? ReadBy::weights : ReadBy::inputs});
    if (!e.shared_gate) return list;
    route(&A::shared_logit, 1, DType::fp32);
    route(&A::shared_choice, 1, DType::int32);
    route(&A::shared_weight, 1, DType::fp32);
    return list;
}

PartGradients expert_gradients(const LayerSpec& layer) {
    using A = BlockActivations;
    using G = BlockGradients;
    using Shares = PartGradient::Shares;
    const ExpertSpec& e = layer.experts;
    const int64_t k = e.n_expert_per_token, C = layer.n_embd;
    PartGradients list{
        {.member = &G::dexpert_out,
         .width = C,
         .shares = Shares::activation,
         .activation = &A::expert_out,
         .each = k},
        {.member = &G::dweights, .width = k, .shares = Shares::own, .dtype = DType::fp32},
        {.member = &G::dhidden, .width = e.n_ff, .each = k},
        {.member = &G::dup,
         .width = 2 * int64_t{e.n_ff},
         .shares = Shares::activation,
         .activation = &A::preact,
         .each = k,
         .read_by = ReadBy::weights},
        {.member = &G::dgrouped, .width = C, .each = k},  // after dhidden
        {.member = &G::dlogits,
         .width = e.n_expert,
         .shares = Shares::own,
         .read_by = ReadBy::weights}};
    if (e.n_ff_shared == 0) return list;
    list.push_back({.member = &G::dshared_hidden, .width = e.n_ff_shared, .shares = Shares::own});
    list.push_back({.member = &G::dshared_up,
                    .width = 2 * int64_t{e.n_ff_shared},
                    .shares = Shares::activation,
                    .activation = &A::shared_preact,
                    .read_by = ReadBy::weights});
    list.push_back({.member = &G::dshared_input, .width = C, .shares = Shares::own});
    if (!e.shared_gate) return list;
    list.push_back({.member = &G::dshared_out,
                    .width = C,
                    .shares = Shares::activation,
                    .activation = &A::shared_out});
    list.push_back(
        {.member = &G::dshared_weight, .width = 1, .shares = Shares::own, .dtype = DType::fp32});
    list.push_back({.member = &G::dshared_logit,
                    .width = 1,
                    .shares = Shares::own,
                    .read_by = ReadBy::weights});
    return list;
}

size_t expert_layer_scratch_bytes(const Stream& stream, const LayerSpec& layer, DType dtype,
                                  int64_t rows, int64_t sequences) {
    const ExpertSpec& e = layer.experts;
    const int64_t C = layer.n_embd, E = e.n_expert, R = rows * e.n_expert_per_token,
                  S = e.n_ff_shared;
    const auto of_experts = [&](int64_t N, int64_t K) {
        return grouped_linear_scratch_bytes(stream, {.dtype = dtype,
                                                     .E = E,
                                                     .R = R,
                                                     .N = N,
                                                     .K = K,
                                                     .rounds_weights = false});  // leases have them
    };
    size_t most = std::max(
        {of_experts(2 * e.n_ff, C), of_experts(C, e.n_ff), route_scratch_bytes(rows, sequences, E),
         group_rows_scratch_bytes(stream, R, E), linear_scratch_bytes(stream, dtype, rows, E, C)});
    if (S > 0)
        most = std::max({most, linear_scratch_bytes(stream, dtype, rows, 2 * S, C),
                         linear_scratch_bytes(stream, dtype, rows, C, S)});
    if (e.shared_gate)
        most = std::max({most, route_scratch_bytes(rows, 1, 1),
                         linear_scratch_bytes(stream, dtype, rows, 1, C)});
    return most;
}

}  // namespace train_gpt
