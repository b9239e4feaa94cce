// The operations of SwiGLU: operations.h says what each entry means.
#include "kernels/swiglu.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

namespace {

/// Those of SmolLM2-135M on the CPU and of Llama 3 8B on a GPU.
constexpr Letter hidden{'F', 1536, 1536, 14336};

SwigluReference reference(const Operands& o, const Values& gate_up) {
    return swiglu_reference<double>(o['F'], gate_up, o.has("dout") ? o.values("dout") : Values());
}

Results references(const Operands& o) {
    const SwigluReference r = reference(o, o.values("gate_up"));
    return {{"out", r.out}, {"dgate_up", r.dgate_up}};
}

}  // namespace

std::vector<Operation> swiglu_operations() {
    return {
        {.name = "swiglu_forward",
         .computes = "out = silu(gate) ⊙ up",
         .letters = {tokens, hidden},
         .declare =
             [](Operands& o) {
                 o.normal("gate_up", {o['M'], 2 * o['F']}, 2);
                 o.result("out", {o['M'], o['F']}, o.dtype(), {.roundings = 1});
             },
         .run =
             [](Stream& stream, const Call& c) {
                 swiglu_forward(stream, {.out = c["out"], .gate_up = c["gate_up"]});
             },
         .reference = references},
        {.name = "swiglu_backward",
         .computes = "dgate = dout ⊙ up ⊙ silu'(gate), dup = dout ⊙ silu(gate), and out once more",
         .letters = {tokens, hidden},
         .declare =
             [](Operands& o) {
                 o.normal("gate_up", {o['M'], 2 * o['F']}, 2);
                 o.normal("dout", {o['M'], o['F']});
                 o.result("dgate_up", {o['M'], 2 * o['F']}, o.dtype(), {.roundings = 1});
                 o.result("out", {o['M'], o['F']}, o.dtype(), {.roundings = 1});
             },
         .run =
             [](Stream& stream, const Call& c) {
                 swiglu_backward(stream, {.dgate_up = c["dgate_up"],
                                          .dout = c["dout"],
                                          .gate_up = c["gate_up"],
                                          .out = c["out"]});
             },
         .reference = references,
         .derivatives = {{.gradient = "dgate_up",
                          .point = [](const Operands& o) { return o.values("gate_up"); },
                          .loss =
                              [](const Operands& o, const Values& gate_up) {
                                  return dot(o.values("dout"), reference(o, gate_up).out);
                              }}}},
    };
}

}  // namespace train_gpt::compare
