// The operations of the gradient norm and AdamW: operations.h says what each entry means.
#include <bit>

#include "kernels/adamw.h"
#include "kernels/dynamic_map.h"
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

template <DType moments>
void run_adamw(Stream& stream, const Call& c) {
    const AdamWSegment segment{.weights = static_cast<bf16*>(c["weights"].data),
                               .master = c.data<float>("master"),
                               .m = c["m"].data,
                               .v = c["v"].data,
                               .gradient = c.data<float>("gradient"),
                               .n = c['N'],
                               .decay = true,
                               .m_scales = c.data<float>("m_scales"),
                               .v_scales = c.data<float>("v_scales")};
    AdamWStep args = step;
    args.state = c.data<StepState>("state");
    args.moments = moments;
    adamw(stream, {&segment, 1}, args);
}

/// What the update reads and changes besides the moments.
void declare_update(Operands& o) {
    o.normal("gradient", {o['N']}, DType::fp32);
    o.normal("master", {o['N']}, DType::fp32);
    o.words("state", &step_state, sizeof step_state / sizeof(int32_t));
    o.changes("master", {});
    if (o.dtype() == DType::bf16) o.result("weights", {o['N']}, DType::bf16, {.roundings = 1});
}

/// Of what is kept in bf16, in roundings to the dtype of the operation: two, since one up or down
/// at random is about √2 times as far off as one to nearest.
int bf16_roundings(const Operands& o) { return o.dtype() == DType::bf16 ? 2 : 2 << 29; }

/// A moment of random values in 8 bits: codes, whose last word may be longer than the tensor, and
/// scales.
void declare_codes(Operands& o, const std::string& name, Coding coding, float stddev, float mean) {
    o.normal(name + " before", {o['N']}, DType::fp32, stddev, mean);
    std::vector<float> values;
    for (const double value : o.values(name + " before"))
        values.push_back(static_cast<float>(value));
    const auto n = static_cast<size_t>(o['N']);
    std::vector<uint8_t> codes((n + 3) / 4 * 4);
    std::vector<float> scales((n + code_block - 1) / code_block);
    encode(coding, values, codes.data(), scales.data());
    o.words(name, codes.data(), static_cast<int64_t>(codes.size() / 4));
    o.words(name + "_scales", scales.data(), static_cast<int64_t>(scales.size()));
}

/// The values of such a moment.
Values decoded(const Operands& o, const std::string& name, Coding coding) {
    const auto n = static_cast<size_t>(o['N']);
    std::vector<uint8_t> codes;
    for (const int32_t word : o.integer_values(name))
        for (int byte = 0; byte < 4; ++byte)
            codes.push_back(static_cast<uint8_t>(static_cast<uint32_t>(word) >> (8 * byte)));
    std::vector<float> scales, values(n);
    for (const int32_t word : o.integer_values(name + "_scales"))
        scales.push_back(std::bit_cast<float>(word));
    decode(coding, codes.data(), scales.data(), values);
    return {values.begin(), values.end()};
}

Results adamw_references_from(const Operands& o, Values m, Values v) {
    Values master = o.values("master");
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

Results adamw_references(const Operands& o) {
    return adamw_references_from(o, o.values("m"), o.values("v"));
}

Results adamw_int8_references(const Operands& o) {
    Values v = decoded(o, "v", Coding::roots);
    for (double& value : v) value *= value;
    const Results all = adamw_references_from(o, decoded(o, "m", Coding::signs), v);
    return {{"weights", all.at("weights")}, {"master", all.at("master")}};
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
                 o.normal("m", {o['N']}, DType::fp32, 0.1f);
                 o.normal("v", {o['N']}, DType::fp32, 0.01f,
                          0.1f);  // never negative: ten standard deviations
                 declare_update(o);
                 for (const char* name : {"m", "v"}) o.changes(name, {});
             },
         .run = run_adamw<DType::fp32>,
         .reference = adamw_references},
        {.name = "adamw_bf16",
         .computes = "the same with m and v in bf16, v rounded up or down at random",
         .letters = {parameters},
         .declare =
             [](Operands& o) {
                 o.normal("m", {o['N']}, DType::bf16, 0.1f);
                 o.normal("v", {o['N']}, DType::bf16, 0.01f, 0.1f);
                 declare_update(o);
                 for (const char* name : {"m", "v"})
                     o.changes(name, {.roundings = bf16_roundings(o)});
             },
         .run = run_adamw<DType::bf16>,
         .reference = adamw_references},
        {.name = "adamw_int8",
         .computes = "the same with m and √v in 8 bits",
         .letters = {parameters},
         .declare =
             [](Operands& o) {
                 declare_codes(o, "m", Coding::signs, 0.1f, 0);
                 declare_codes(o, "v", Coding::roots, 0.01f, 0.3f);
                 declare_update(o);
             },
         .run = run_adamw<DType::uint8>,
         .reference = adamw_int8_references},
    };
}

}  // namespace train_gpt::compare
