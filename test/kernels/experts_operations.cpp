// The operations of a mixture of experts: operations.h says what each entry means.
#include <cmath>

#include "base/error.h"
#include "kernels/experts/combine.h"
#include "kernels/experts/group_rows.h"
#include "kernels/experts/grouped_linear.h"
#include "kernels/experts/route.h"
#include "test/compare/operations.h"
#include "test/kernels/experts_reference.h"
#include "test/kernels/fp8_reference.h"
#include "test/kernels/test_device.h"

namespace train_gpt::compare {

namespace {

// OLMoE's on a GPU: 64 experts, 8 of them for a token.
constexpr Letter routed{'M', 64, 1024, 16384}, experts{'E', 8, 8, 64}, slots{'k', 2, 2, 8},
    width{'N', 64, 512, 1024}, depth{'K', 64, 512, 2048}, channels{'C', 64, 512, 2048};

/// A token's experts, drawn evenly.
std::vector<int32_t> chosen(const Operands& o) {
    return distinct_experts(o.integer_values("drawn"), o['k'], o['E']);
}

void declare_chosen(Operands& o) {
    o.integers("drawn", {o['M'], o['k']}, o['E']);
    const std::vector<int32_t> experts_of_tokens = chosen(o);
    o.words("experts", experts_of_tokens.data(), o['M'] * o['k']);
}

/// The rows of the products: every S-th of a token's slots goes to expert 0 instead.
constexpr Letter skew{'S', 1'000'000, 1'000'000, 1'000'000};
std::vector<int32_t> skewed(const Operands& o) {
    std::vector<int32_t> experts_of_tokens = chosen(o);
    for (size_t i = 0; i < experts_of_tokens.size(); i += static_cast<size_t>(o['S']))
        experts_of_tokens[i] = 0;
    return experts_of_tokens;
}

void declare_grouping(Operands& o,
                      std::vector<int32_t> (*experts_of_tokens)(const Operands& o) = chosen) {
    declare_chosen(o);
    const Grouping grouping(experts_of_tokens(o), o['k'], o['E']);
    o.words("offsets", grouping.offsets.data(), o['E'] + 1);
    o.words("row_token", grouping.row_token.data(), o['M'] * o['k']);
    o.words("row_of", grouping.row_of.data(), o['M'] * o['k']);
}

Tensor as_slots(const Call& c, const char* name) { return c[name].reshaped({c['M'], c['k']}); }

// --- route ---------------------------------------------------------------------------------------

constexpr RouterRule rule{.normalise = true};
constexpr RouterRule sigmoid_rule{.score = RouterScore::sigmoid, .normalise = true, .scale = 2.5f};

void declare_route(Operands& o) {
    o.normal("logits", {o['M'], o['E']}, DType::fp32, 2);
    o.result("weights", {o['M'], o['k']}, DType::fp32, {.roundings = 6, .terms = o['E']});
    o.result("probabilities", {o['E']}, DType::fp32, {.roundings = 4, .terms = o['E'] + o['M']});
    o.result("squared_lse", {1}, DType::fp32, {.roundings = 6, .terms = o['E'] + o['M']});
    o.room("chosen", {o['M'], o['k']}, DType::int32);
    o.room("counts", {o['E']}, DType::int32);
    o.normal("dweights", {o['M'], o['k']}, DType::fp32);
}

/// The k largest logits of each token.
RouteProblem problem_of(const Operands& o, const RouterRule& of, const Values& logits) {
    RouteProblem p{
        .N = o['M'], .E = o['E'], .k = o['k'], .rule = of, .logits = logits, .experts = {}};
    for (int64_t t = 0; t < p.N; ++t) {
        std::vector<int32_t> order(static_cast<size_t>(p.E));
        std::iota(order.begin(), order.end(), 0);
        std::ranges::stable_sort(order, [&](int32_t a, int32_t b) {
            return logits[static_cast<size_t>(t * p.E + a)] >
                   logits[static_cast<size_t>(t * p.E + b)];
        });
        p.experts.insert(p.experts.end(), order.begin(), order.begin() + p.k);
    }
    return p;
}

Results route_results(const Operands& o) {
    const RouteReference r = route_reference<double>(problem_of(o, rule, o.values("logits")));
    return {
        {"weights", r.weights}, {"probabilities", r.probabilities}, {"squared_lse", r.squared_lse}};
}

constexpr float balance = 0.01f, z_loss = 0.001f;

void declare_route_backward(Operands& o) {
    declare_chosen(o);
    o.normal("logits", {o['M'], o['E']}, DType::fp32, 2);
    o.normal("dweights", {o['M'], o['k']}, DType::fp32);
    o.normal("load", {o['E']}, DType::fp32, 0.1f, 1);
    o.result("dlogits", {o['M'], o['E']}, DType::fp32, {.roundings = 12, .terms = o['E']});
}

RouteReference route_gradient(const Operands& o, const RouterRule& of, const Values& logits) {
    return route_reference<double>({.N = o['M'],
                                    .E = o['E'],
                                    .k = o['k'],
                                    .rule = of,
                                    .logits = logits,
                                    .experts = chosen(o),
                                    .dweights = o.values("dweights"),
                                    .load = o.values("load"),
                                    .balance = double{balance},
                                    .z_loss = double{z_loss}});
}

template <const RouterRule& of>
void run_route_backward(Stream& stream, const Call& c) {
    route_backward(stream, {.dlogits = c["dlogits"],
                            .logits = c["logits"],
                            .rule = of,
                            .experts = as_slots(c, "experts"),
                            .dweights = c["dweights"],
                            .load = c["load"].reshaped({1, c['E']}),
                            .balance = balance,
                            .z_loss = z_loss});
}

template <const RouterRule& of>
Operation route_backward_operation(const char* name, const char* computes) {
    return {.name = name,
            .computes = computes,
            .letters = {routed, experts, slots},
            .fp32_only = true,
            .declare = declare_route_backward,
            .run = run_route_backward<of>,
            .reference =
                [](const Operands& o) {
                    const RouteReference r = route_gradient(o, of, o.values("logits"));
                    return Results{{"dlogits", r.dlogits}, {terms_of("dlogits"), r.dlogits_terms}};
                },
            .derivatives = {
                {.gradient = "dlogits",
                 .point = [](const Operands& o) { return o.values("logits"); },
                 .loss = [](const Operands& o,
                            const Values& logits) { return route_gradient(o, of, logits).loss; }}}};
}

// --- products ------------------------------------------------------------------------------------

/// The choices of wgmma with tiles of 128 × 128 for the products of a layer.
std::string narrow_tiles(const Operands& o) {
    std::string choices;
    for (const char* product : {"gathering", "backward_input", "gathering_weight"})
        choices += concat("grouped ", product, " E=", o['E'], ",R=", o['M'] * o['k'], ",N=", o['N'],
                          ",K=", o['K'], " wgmma_128\n");
    return choices;
}

/// The CPU has products of its own for experts; GPUs of sm_90 have three kernels. "wgmma" has tiles
/// of 128 × 256 where results are wider than 128.
std::vector<Implementation> grouped_products(const Operands& o, const Device& device) {
    using Grouped = KernelSettings::Grouped;
    if (device.is_cuda()) {
        std::vector<Implementation> all{{"CUDA", {.grouped = Grouped::own}}};
        if (has_wgmma(device) && o.dtype() == DType::bf16) {
            all.push_back({"CUDA, wgmma", {.grouped = Grouped::wgmma}});
            all.push_back({"CUDA, wgmma 128", {}, narrow_tiles(o)});
        }
        return all;
    }
    std::vector<Implementation> all = products(o, device);
    all.push_back({"CPU, automatic"});
    return all;
}

void declare_layer(Operands& o) {
    declare_grouping(o, skewed);
    o.normal("w", {o['E'] * o['N'], o['K']}, 1 / std::sqrt(static_cast<float>(o['K'])));
}

size_t grouped_scratch(const Stream& stream, const Operands& o) {
    return grouped_linear_scratch_bytes(stream,
                                        {o.dtype(), o['E'], o['M'] * o['k'], o['N'], o['K']});
}

/// With x [M, K] or dy [R, N], or w; the others may be empty.
GroupedProblem layer_of(const Operands& o, const Values& x, const Values& dy, const Values& w) {
    const Grouping grouping(skewed(o), o['k'], o['E']);
    return {o['N'],
            o['K'],
            grouping.offsets,
            x.empty() ? x : gathered_reference(x, grouping.row_token, o['K']),
            dy,
            w};
}

/// In fp8 N and K are the next multiple of 16.
int64_t in_fp8(const Operands& o, char letter) { return (o[letter] + 15) / 16 * 16; }
/// Each operand has the scale of its own largest magnitude.
constexpr ProductScales current = {};

std::vector<Implementation> grouped_fp8_products(const Operands& o, const Device& device) {
    using Grouped = KernelSettings::Grouped;
    std::vector<Implementation> all = products(o, device);
    if (device.is_cuda()) all = {{"CUDA", {.grouped = Grouped::own}}};
    if (has_wgmma(device)) all.push_back({"CUDA, wgmma", {.grouped = Grouped::wgmma}});
    for (Implementation& one : all) one.settings.fp8 = true;
    return all;
}

void declare_fp8_layer(Operands& o) {
    declare_grouping(o, skewed);
    o.normal("w", {o['E'], in_fp8(o, 'N'), in_fp8(o, 'K')},
             1 / std::sqrt(static_cast<float>(in_fp8(o, 'K'))));
}

size_t grouped_fp8_scratch(const Stream& stream, const Operands& o) {
    return grouped_linear_scratch_bytes(
        stream, {o.dtype(), o['E'], o['M'] * o['k'], in_fp8(o, 'N'), in_fp8(o, 'K')});
}

/// layer_of() with operands as the products read them.
GroupedProblem fp8_layer_of(const Operands& o, const Values& x, const Values& dy) {
    using fp8_reference::rounded;
    const Grouping grouping(skewed(o), o['k'], o['E']);
    return {in_fp8(o, 'N'),
            in_fp8(o, 'K'),
            grouping.offsets,
            x.empty() ? x
                      : gathered_reference(rounded(x, Fp8Format::e4m3), grouping.row_token,
                                           in_fp8(o, 'K')),
            dy.empty() ? dy : rounded(dy, Fp8Format::e5m2),
            rounded(o.values("w"), Fp8Format::e4m3)};
}

Values zeros(int64_t n) { return Values(static_cast<size_t>(n)); }

// --- combine -------------------------------------------------------------------------------------

Values combined(const Operands& o, const Values& y, const Values& weights) {
    const std::vector<int32_t> row_of = o.integer_values("row_of");
    Values out = zeros(o['M'] * o['C']);
    for (int64_t slot = 0; slot < o['M'] * o['k']; ++slot)
        for (int64_t c = 0; c < o['C']; ++c)
            out[slot / o['k'] * o['C'] + c] += weights[slot] * y[row_of[slot] * o['C'] + c];
    return out;
}

Results combine_gradients(const Operands& o) {
    const std::vector<int32_t> row_of = o.integer_values("row_of");
    const Values y = o.values("y"), dout = o.values("dout"), weights = o.values("weights");
    Values dy = zeros(o['M'] * o['k'] * o['C']), dweights, terms;
    for (int64_t slot = 0; slot < o['M'] * o['k']; ++slot) {
        double sum = 0, squares = 0;
        for (int64_t c = 0; c < o['C']; ++c) {
            const int64_t at = row_of[slot] * o['C'] + c;
            const double gradient = dout[slot / o['k'] * o['C'] + c];
            dy[at] = gradient * weights[slot];
            sum += gradient * y[at];
            squares += gradient * y[at] * gradient * y[at];
        }
        dweights.push_back(sum);
        terms.push_back(std::sqrt(squares));
    }
    return {{"dy", dy}, {"dweights", dweights}, {terms_of("dweights"), terms}};
}

}  // namespace

std::vector<Operation> experts_operations() {
    return {
        {.name = "route",
         .computes = "experts and weights = top k of softmax(logits), with sums over the tokens",
         .letters = {routed, experts, slots},
         .fp32_only = true,
         .declare = declare_route,
         .scratch_bytes = [](const Stream&,
                             const Operands& o) { return route_scratch_bytes(o['M'], 1, o['E']); },
         .run =
             [](Stream& stream, const Call& c) {
                 route(stream, {.logits = c["logits"],
                                .rule = rule,
                                .experts = c["chosen"],
                                .weights = c["weights"],
                                .counts = c["counts"].reshaped({1, c['E']}),
                                .probabilities = c["probabilities"].reshaped({1, c['E']}),
                                .squared_lse = c["squared_lse"]});
             },
         .reference = route_results},
        route_backward_operation<rule>("route_backward",
                                       "the gradient of weights, balance and z-loss"),
        route_backward_operation<sigmoid_rule>("route_backward_sigmoid",
                                               "the same for scores σ(logits)"),
        {.name = "group_rows",
         .computes = "rows sorted by expert",
         .letters = {routed, experts, slots},
         .fp32_only = true,
         .declare =
             [](Operands& o) {
                 declare_chosen(o);
                 o.result("offsets", {o['E'] + 1}, DType::int32, {});
                 o.result("row_token", {o['M'] * o['k']}, DType::int32, {});
                 o.result("row_of", {o['M'], o['k']}, DType::int32, {});
             },
         .scratch_bytes =
             [](const Stream& stream, const Operands& o) {
                 return group_rows_scratch_bytes(stream, o['M'] * o['k'], o['E']);
             },
         .run =
             [](Stream& stream, const Call& c) {
                 group_rows(stream, {.experts = as_slots(c, "experts"),
                                     .offsets = c["offsets"],
                                     .row_token = c["row_token"],
                                     .row_of = c["row_of"]});
             },
         .reference =
             [](const Operands& o) {
                 const Grouping g(chosen(o), o['k'], o['E']);
                 return Results{{"offsets", {g.offsets.begin(), g.offsets.end()}},
                                {"row_token", {g.row_token.begin(), g.row_token.end()}},
                                {"row_of", {g.row_of.begin(), g.row_of.end()}}};
             }},
        {.name = "grouped_linear_forward",
         .computes = "out = x[row_token]·w_eᵀ",
         .letters = {routed, experts, slots, skew, width, depth},
         .implementations = grouped_products,
         .declare =
             [](Operands& o) {
                 declare_layer(o);
                 o.normal("x", {o['M'], o['K']});
                 o.result("out", {o['M'] * o['k'], o['N']}, o.dtype(),
                          {.roundings = 1, .terms = o['K']});
             },
         .scratch_bytes = grouped_scratch,
         .run =
             [](Stream& stream, const Call& c) {
                 grouped_linear_forward(stream, {.out = c["out"],
                                                 .x = c["x"],
                                                 .w = c["w"],
                                                 .offsets = c["offsets"],
                                                 .row_token = c["row_token"]});
             },
         .reference =
             [](const Operands& o) {
                 return Results{
                     {"out",
                      layer_of(o, o.values("x"), {}, o.values("w")).product<double>(GemmOp::nt)}};
             }},
        {.name = "grouped_linear_backward_input",
         .computes = "dx = dy·w_e",
         .letters = {routed, experts, slots, skew, width, depth},
         .implementations = grouped_products,
         .declare =
             [](Operands& o) {
                 declare_layer(o);
                 o.normal("dy", {o['M'] * o['k'], o['N']});
                 o.result("dx", {o['M'] * o['k'], o['K']}, o.dtype(),
                          {.roundings = 1, .terms = o['N']});
             },
         .scratch_bytes = grouped_scratch,
         .run =
             [](Stream& stream, const Call& c) {
                 grouped_linear_backward_input(
                     stream, {.dx = c["dx"], .dy = c["dy"], .w = c["w"], .offsets = c["offsets"]});
             },
         .reference =
             [](const Operands& o) {
                 return Results{
                     {"dx",
                      layer_of(o, {}, o.values("dy"), o.values("w")).product<double>(GemmOp::nn)}};
             },
         .derivatives = {{.gradient = "dx",
                          .point =
                              [](const Operands& o) { return zeros(o['M'] * o['k'] * o['K']); },
                          .loss =
                              [](const Operands& o, const Values& x) {
                                  GroupedProblem layer = layer_of(o, {}, {}, o.values("w"));
                                  layer.x = x;
                                  return dot(o.values("dy"), layer.product<double>(GemmOp::nt));
                              }}}},
        {.name = "grouped_linear_backward_weight",
         .computes = "dw_e = dy_eᵀ·x[row_token]_e",
         .letters = {routed, experts, slots, skew, width, depth},
         .implementations = grouped_products,
         .declare =
             [](Operands& o) {
                 declare_grouping(o, skewed);
                 o.normal("x", {o['M'], o['K']});
                 o.normal("dy", {o['M'] * o['k'], o['N']});
                 o.result("dw", {o['E'] * o['N'], o['K']}, DType::fp32, {.terms = o['M'] * o['k']});
             },
         .scratch_bytes = grouped_scratch,
         .run =
             [](Stream& stream, const Call& c) {
                 grouped_linear_backward_weight(stream, {.dw = c.sink("dw"),
                                                         .x = c["x"],
                                                         .dy = c["dy"],
                                                         .offsets = c["offsets"],
                                                         .row_token = c["row_token"]});
             },
         .reference =
             [](const Operands& o) {
                 return Results{
                     {"dw",
                      layer_of(o, o.values("x"), o.values("dy"), {}).product<double>(GemmOp::tn)}};
             },
         .derivatives =
             {{.gradient = "dw",
               .point = [](const Operands& o) { return zeros(o['E'] * o['N'] * o['K']); },
               .loss =
                   [](const Operands& o, const Values& w) {
                       return dot(o.values("dy"),
                                  layer_of(o, o.values("x"), {}, w).product<double>(GemmOp::nt));
                   }}}},
        {.name = "grouped_linear_forward_fp8",
         .computes = "out = x[row_token]·w_eᵀ of operands rounded to e4m3",
         .letters = {routed, experts, slots, skew, width, depth},
         .implementations = grouped_fp8_products,
         .declare =
             [](Operands& o) {
                 declare_fp8_layer(o);
                 o.normal("x", {o['M'], in_fp8(o, 'K')});
                 o.result("out", {o['M'] * o['k'], in_fp8(o, 'N')}, o.dtype(),
                          accuracy_of_fp8_sums(o, in_fp8(o, 'K')));
             },
         .scratch_bytes = grouped_fp8_scratch,
         .run =
             [](Stream& stream, const Call& c) {
                 grouped_linear_forward(stream, {.out = c["out"],
                                                 .x = c["x"],
                                                 .w = {c["w"], &current},
                                                 .offsets = c["offsets"],
                                                 .row_token = c["row_token"]});
             },
         .reference =
             [](const Operands& o) {
                 return Results{
                     {"out", fp8_layer_of(o, o.values("x"), {}).product<double>(GemmOp::nt)}};
             }},
        {.name = "grouped_linear_backward_input_fp8",
         .computes = "dx = dy·w_e of dy rounded to e5m2 and w to e4m3",
         .letters = {routed, experts, slots, skew, width, depth},
         .implementations = grouped_fp8_products,
         .declare =
             [](Operands& o) {
                 declare_fp8_layer(o);
                 o.normal("dy", {o['M'] * o['k'], in_fp8(o, 'N')});
                 o.result("dx", {o['M'] * o['k'], in_fp8(o, 'K')}, o.dtype(),
                          accuracy_of_fp8_sums(o, in_fp8(o, 'N')));
             },
         .scratch_bytes = grouped_fp8_scratch,
         .run =
             [](Stream& stream, const Call& c) {
                 grouped_linear_backward_input(stream, {.dx = c["dx"],
                                                        .dy = c["dy"],
                                                        .w = {c["w"], &current},
                                                        .offsets = c["offsets"]});
             },
         .reference =
             [](const Operands& o) {
                 return Results{
                     {"dx", fp8_layer_of(o, {}, o.values("dy")).product<double>(GemmOp::nn)}};
             }},
        {.name = "combine",
         .computes = "out = Σ_slots weight·y[row_of]",
         .letters = {routed, experts, slots, channels},
         .declare =
             [](Operands& o) {
                 declare_grouping(o);
                 o.normal("y", {o['M'] * o['k'], o['C']});
                 o.normal("weights", {o['M'], o['k']}, DType::fp32);
                 o.result("out", {o['M'], o['C']}, o.dtype(), {.roundings = 1, .terms = o['k']});
             },
         .run =
             [](Stream& stream, const Call& c) {
                 combine(stream, {.out = c["out"],
                                  .y = c["y"],
                                  .row_of = as_slots(c, "row_of"),
                                  .weights = c["weights"]});
             },
         .reference =
             [](const Operands& o) {
                 return Results{{"out", combined(o, o.values("y"), o.values("weights"))}};
             }},
        {.name = "combine_backward",
         .computes = "dy[row_of] = weight·dout, dweight = ⟨dout, y[row_of]⟩",
         .letters = {routed, experts, slots, channels},
         .declare =
             [](Operands& o) {
                 declare_grouping(o);
                 o.normal("y", {o['M'] * o['k'], o['C']});
                 o.normal("weights", {o['M'], o['k']}, DType::fp32);
                 o.normal("dout", {o['M'], o['C']});
                 o.result("dy", {o['M'] * o['k'], o['C']}, o.dtype(), {.roundings = 1});
                 o.result("dweights", {o['M'], o['k']}, DType::fp32, {.terms = o['C']});
             },
         .run =
             [](Stream& stream, const Call& c) {
                 combine_backward(stream, {.dy = c["dy"],
                                           .dweights = c["dweights"],
                                           .dout = c["dout"],
                                           .y = c["y"],
                                           .row_of = as_slots(c, "row_of"),
                                           .weights = c["weights"]});
             },
         .reference = combine_gradients,
         .derivatives = {{.gradient = "dy",
                          .point = [](const Operands& o) { return o.values("y"); },
                          .loss =
                              [](const Operands& o, const Values& y) {
                                  return dot(o.values("dout"), combined(o, y, o.values("weights")));
                              }},
                         {.gradient = "dweights",
                          .point = [](const Operands& o) { return o.values("weights"); },
                          .loss =
                              [](const Operands& o, const Values& weights) {
                                  return dot(o.values("dout"), combined(o, o.values("y"), weights));
                              }}}},
    };
}

}  // namespace train_gpt::compare
