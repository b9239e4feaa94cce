// The operations of SwiGLU: operations.h says what each entry means.
#include "kernels/swiglu.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

namespace {

/// Those of SmolLM2-135M on the CPU and of Llama 3 8B on a GPU.
constexpr Letter hidden{'F', 1536, 1536, 14336};

constexpr ClampedSwiglu clamp{};

template <bool clamped>
SwigluReference reference(const Operands& o, const Values& gate_up) {
    return swiglu_reference<double>(o['F'], gate_up, o.has("dout") ? o.values("dout") : Values(),
                                    DType::fp32, clamped ? std::optional(clamp) : std::nullopt);
}

template <bool clamped>
Results references(const Operands& o) {
    const SwigluReference r = reference<clamped>(o, o.values("gate_up"));
    return {{"out", r.out}, {"dgate_up", r.dgate_up}};
}

template <bool clamped>
Operation forward(const char* name, const char* computes) {
    return {.name = name,
            .computes = computes,
            .letters = {tokens, hidden},
            .declare =
                [](Operands& o) {
                    o.normal("gate_up", {o['M'], 2 * o['F']}, clamped ? 4 : 2);
                    o.result("out", {o['M'], o['F']}, o.dtype(), {.roundings = 1});
                },
            .run =
                [](Stream& stream, const Call& c) {
                    SwigluForward args{.out = c["out"], .gate_up = c["gate_up"]};
                    if (clamped) args.clamped = clamp;
                    swiglu_forward(stream, args);
                },
            .reference = references<clamped>};
}

template <bool clamped>
Operation backward(const char* name, const char* computes) {
    Operation operation{
        .name = name,
        .computes = computes,
        .letters = {tokens, hidden},
        .declare =
            [](Operands& o) {
                o.normal("gate_up", {o['M'], 2 * o['F']}, clamped ? 4 : 2);
                o.normal("dout", {o['M'], o['F']});
                o.result("dgate_up", {o['M'], 2 * o['F']}, o.dtype(), {.roundings = 1});
                o.result("out", {o['M'], o['F']}, o.dtype(), {.roundings = 1});
            },
        .run =
            [](Stream& stream, const Call& c) {
                SwigluBackward args{.dgate_up = c["dgate_up"],
                                    .dout = c["dout"],
                                    .gate_up = c["gate_up"],
                                    .out = c["out"]};
                if (clamped) args.clamped = clamp;
                swiglu_backward(stream, args);
            },
        .reference = references<clamped>};
    // At its limits the clamped form has no slope: swiglu_test.cpp checks the gradient elsewhere.
    if (!clamped)
        operation.derivatives = {{.gradient = "dgate_up",
                                  .point = [](const Operands& o) { return o.values("gate_up"); },
                                  .loss =
                                      [](const Operands& o, const Values& gate_up) {
                                          return dot(o.values("dout"),
                                                     reference<clamped>(o, gate_up).out);
                                      }}};
    return operation;
}

}  // namespace

std::vector<Operation> swiglu_operations() {
    return {forward<false>("swiglu_forward", "out = silu(gate) ⊙ up"),
            backward<false>("swiglu_backward",
                            "dgate = dout ⊙ up ⊙ silu'(gate), dup = dout ⊙ silu(gate), and out "
                            "once more"),
            forward<true>("swiglu_clamped_forward", "out = (u + 1) ⊙ g ⊙ σ(α·g), g and u clamped"),
            backward<true>("swiglu_clamped_backward",
                           "dgate and dup, 0 where they were clamped, and out once more")};
}

}  // namespace train_gpt::compare
