// The operations of ReLU²: operations.h says what each entry means.
#include <algorithm>

#include "kernels/relu_squared.h"
#include "test/compare/operations.h"

namespace train_gpt::compare {

std::vector<Operation> relu_squared_operations() {
    return {
        {.name = "relu_squared_forward",
         .computes = "out = max(x, 0)²",
         .letters = {tokens, letter('N', 3072, 3072)},
         .declare =
             [](Operands& o) {
                 o.normal("x", {o['M'], o['N']}, 2);
                 o.result("out", {o['M'], o['N']}, o.dtype(), {.roundings = 1});
             },
         .run = [](Stream& stream,
                   const Call& c) { relu_squared_forward(stream, {.out = c["out"], .x = c["x"]}); },
         .reference = [](const Operands& o) -> Results {
             Values out = o.values("x");
             for (double& value : out) value = std::max(value, 0.0) * std::max(value, 0.0);
             return {{"out", out}};
         }},
        {.name = "relu_squared_backward",
         .computes = "dx = dout ⊙ 2·max(x, 0)",
         .letters = {tokens, letter('N', 3072, 3072)},
         .declare =
             [](Operands& o) {
                 o.normal("x", {o['M'], o['N']}, 2);
                 o.normal("dout", {o['M'], o['N']});
                 o.result("dx", {o['M'], o['N']}, o.dtype(), {.roundings = 1});
             },
         .run =
             [](Stream& stream, const Call& c) {
                 relu_squared_backward(stream, {.dx = c["dx"], .dout = c["dout"], .x = c["x"]});
             },
         .reference = [](const Operands& o) -> Results {
             Values dx = o.values("dout");
             const Values x = o.values("x");
             for (size_t i = 0; i < dx.size(); ++i) dx[i] *= 2 * std::max(x[i], 0.0);
             return {{"dx", dx}};
         }},
    };
}

}  // namespace train_gpt::compare
