// The operation of the residual stream: operations.h says what each entry means.
#include "kernels/residual.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

std::vector<Operation> residual_operations() {
    return {
        {.name = "residual_add",
         .computes = "out = x + residual + bias",
         .letters = {tokens, letter('C', 768, 768)},
         .declare =
             [](Operands& o) {
                 o.normal("x", {o['M'], o['C']}, 2);
                 o.normal("residual", {o['M'], o['C']}, 2);
                 o.normal("bias", {o['C']});
                 o.result("out", {o['M'], o['C']}, o.dtype(), {.roundings = 1});
             },
         .run =
             [](Stream& stream, const Call& c) {
                 residual_add(
                     stream,
                     {.out = c["out"], .x = c["x"], .residual = c["residual"], .bias = c["bias"]});
             },
         .reference = [](const Operands& o) -> Results {
             Values out = o.values("x");
             const Values &residual = o.values("residual"), &bias = o.values("bias");
             for (size_t i = 0; i < out.size(); ++i) out[i] += residual[i] + bias[i % bias.size()];
             return {{"out", out}};
         }},
    };
}

}  // namespace train_gpt::compare
