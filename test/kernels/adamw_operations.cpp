// The operations of the gradient norm and AdamW: operations.h says what each entry means.
#include "kernels/adamw.h"
#include "test/compare/operations.h"
#include "test/kernels/reference.h"

namespace train_gpt::compare {

namespace {

constexpr Letter parameters{'N', 500'000, 16 << 20, 124'475'904};
constexpr AdamWStep step{.learning_rate = 1e-3f,
                         .beta1 = 0.9f,
                         .beta2 = 0.95f,
                         .epsilon = 1e-8f,
                         .weight_decay = 0.1f,
                         .step = 3};
constexpr StepState step_state{.multiplier = 0.5f};

void run_adamw(Stream& stream, const Call& c) {
    const AdamWSegment segment{.weights = static_cast<bf16*>(c["weights"].data),
                               .master = c.data<float>("master"),
                               .m = c.data<float>("m"),
                               .v = c.data<float>("v"),
                               .gradient = c.data<float>("gradient"),
                               .n = c['N'],
                               .decay = true};
    AdamWStep args = step;
    args.state = c.data<StepState>("state");
    adamw(stream, {&segment, 1}, args);
}

Results adamw_references(const Operands& o) {
    Values master = o.values("master"), m = o.values("m"), v = o.values("v");
    const Values gradient = o.values("gradient");
    for (size_t i = 0; i < master.size(); ++i) {
        const AdamWReference r =
            adamw_reference({master[i], m[i], v[i]}, gradient[i],
                            static_cast<double>(step_state.multiplier), true, step);
        master[i] = r.master;
        m[i] = r.m;
        v[i] = r.v;
    }
    return {{"weights", master}, {"master", master}, {"m", m}, {"v", v}};
}

}  // namespace

std::vector<Operation> adamw_operations() {
    return {
        {.name = "norm_partials",
         .computes = "Σ gradient² of each block of 4096 elements",
         .letters = {parameters},
         .fp32_only = true,
         .declare =
             [](Operands& o) {
                 o.normal("gradient", {o['N']}, DType::fp32);
                 o.double_result("partials", {(o['N'] + norm_block - 1) / norm_block},
                                 {.terms = norm_block});
             },
         .run =
             [](Stream& stream, const Call& c) {
                 const NormSegment segment{c.data<float>("gradient"), c['N'],
                                           c.data<double>("partials")};
                 norm_partials(stream, {&segment, 1});
             },
         .reference = [](const Operands& o) -> Results {
             return {{"partials", norm_partials_reference(o.values("gradient"))}};
         }},
        {.name = "adamw",
         .computes = "m, v and master updated; in bf16 weights = master, rounded",
         .letters = {parameters},
         .declare =
             [](Operands& o) {
                 o.normal("gradient", {o['N']}, DType::fp32);
                 o.normal("master", {o['N']}, DType::fp32);
                 o.normal("m", {o['N']}, DType::fp32, 0.1f);
                 o.normal("v", {o['N']}, DType::fp32, 0.01f,
                          0.1f);  // never negative: ten standard deviations
                 o.words("state", &step_state, sizeof step_state / sizeof(int32_t));
                 for (const char* name : {"master", "m", "v"}) o.changes(name, {});
                 if (o.dtype() == DType::bf16)
                     o.result("weights", {o['N']}, DType::bf16, {.roundings = 1});
             },
         .run = run_adamw,
         .reference = adamw_references},
    };
}

}  // namespace train_gpt::compare
