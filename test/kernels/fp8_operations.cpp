// The operations of fp8: operations.h says what each entry means. A product's sizes count 16 rows
// or columns each, which fp8 needs.
#include "kernels/fp8.h"
#include "kernels/linear/linear.h"
#include "test/compare/operations.h"
#include "test/kernels/fp8_reference.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

using fp8_reference::rounded;

namespace {

constexpr Letter rows{'M', 16, 4 * 16, 64 * 64};

std::vector<Implementation> fp8_products(const Operands& o, const Device& device) {
    std::vector<Implementation> all = products(o, device);
    for (Implementation& one : all) one.settings.fp8 = true;
    return all;
}

size_t scratch(const Stream& stream, const Operands& o) {
    return linear_scratch_bytes(stream, o.dtype(), 16 * o['M'], 16 * o['N'], 16 * o['K']);
}

/// Each operand has the scale of its own largest magnitude.
constexpr ProductScales current = {};

}  // namespace

std::vector<Operation> fp8_operations() {
    return {
        {.name = "fp8_round",
         .computes = "codes of x and of xᵀ in e4m3, with a scale from before",
         .letters = {tokens, letter('K', 768, 768)},
         .declare =
             [](Operands& o) {
                 o.normal("x", {o['M'], o['K']});
                 const float scale = 100;
                 o.words("scale", &scale, 1);
                 o.room("inverse", {1}, DType::fp32);
                 o.result("codes", {o['M'], o['K']}, DType::uint8, {});
                 o.result("transposed", {o['K'], o['M']}, DType::uint8, {});
             },
         .scratch_bytes = [](const Stream& stream,
                             const Operands&) { return fp8_round_scratch_bytes(stream); },
         .run =
             [](Stream& stream, const Call& c) {
                 fp8_round(stream, {.codes = c["codes"],
                                    .transposed = c["transposed"],
                                    .inverse = c.data<float>("inverse"),
                                    .x = c["x"],
                                    .scaling = {.scale = c.data<float>("scale"), .is_set = true}});
             },
         .reference = [](const Operands& o) -> Results {
             const Values x = o.values("x");
             Values codes, transposed(x.size());
             for (const double value : x)
                 codes.push_back(
                     fp8_reference::nearest_code(Fp8Format::e4m3, static_cast<float>(value) * 100));
             for (int64_t row = 0; row < o['M']; ++row)
                 for (int64_t col = 0; col < o['K']; ++col)
                     transposed[static_cast<size_t>(col * o['M'] + row)] =
                         codes[static_cast<size_t>(row * o['K'] + col)];
             return {{"codes", codes}, {"transposed", transposed}};
         }},
        {.name = "linear_forward_fp8",
         .computes = "out = x·wᵀ of operands rounded to e4m3",
         .letters = {rows, letter('N', 32, 48), letter('K', 48, 192)},
         .implementations = fp8_products,
         .declare =
             [](Operands& o) {
                 o.normal("x", {16 * o['M'], 16 * o['K']});
                 declare_weight(o, 16 * o['N'], 16 * o['K']);
                 o.result("out", {16 * o['M'], 16 * o['N']}, o.dtype(),
                          accuracy_of_fp8_sums(o, 16 * o['K']));
             },
         .scratch_bytes = scratch,
         .run =
             [](Stream& stream, const Call& c) {
                 linear_forward(stream, {.out = c["out"], .x = c["x"], .w = {c["w"], &current}});
             },
         .reference = [](const Operands& o) -> Results {
             return {{"out",
                      product_reference<double>(GemmOp::nt, rounded(o.values("x"), Fp8Format::e4m3),
                                                rounded(o.values("w"), Fp8Format::e4m3),
                                                16 * o['M'], 16 * o['N'], 16 * o['K'])}};
         }},
        {.name = "linear_backward_weight_fp8",
         .computes = "dw = dyᵀ·x of dy rounded to e5m2 and x to e4m3",
         .letters = {rows, letter('N', 48, 192), letter('K', 32, 48)},
         .implementations = fp8_products,
         .declare =
             [](Operands& o) {
                 o.normal("x", {16 * o['M'], 16 * o['K']});
                 o.normal("dy", {16 * o['M'], 16 * o['N']});
                 o.result("dw", {16 * o['N'], 16 * o['K']}, DType::fp32,
                          accuracy_of_fp8_sums(o, 16 * o['M']));
             },
         .scratch_bytes = scratch,
         .run =
             [](Stream& stream, const Call& c) {
                 linear_backward_weight(
                     stream, {.dw = c.sink("dw"), .x = c["x"], .dy = c["dy"], .scales = &current});
             },
         .reference = [](const Operands& o) -> Results {
             return {{"dw", product_reference<double>(GemmOp::tn,
                                                      rounded(o.values("dy"), Fp8Format::e5m2),
                                                      rounded(o.values("x"), Fp8Format::e4m3),
                                                      16 * o['N'], 16 * o['K'], 16 * o['M'])}};
         }},
    };
}

}  // namespace train_gpt::compare
