// The operations of GELU: operations.h says what each entry means.
#include "kernels/gelu.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

std::vector<Operation> gelu_operations() {
    return {
        {.name = "gelu_forward",
         .computes = "out = gelu(x)",
         .letters = {tokens, letter('N', 3072, 3072)},
         .declare =
             [](Operands& o) {
                 o.normal("x", {o['M'], o['N']}, 2);
                 o.result("out", {o['M'], o['N']}, o.dtype(), {.roundings = 1});
             },
         .run = [](Stream& stream, const Call& c) { gelu_forward(stream, c["out"], c["x"]); },
         .reference = [](const Operands& o) -> Results {
             Values out = o.values("x");
             for (double& value : out) value = gelu_reference(value);
             return {{"out", out}};
         }},
    };
}

}  // namespace train_gpt::compare
