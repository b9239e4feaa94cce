#include "test/model/random_spec.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "model/families/gpt2.h"
#include "test/random.h"

namespace train_gpt {

DecoderSettings with_experts(DecoderSettings s, int tensor_ranks) {
    const auto one_of_two = [] { return random_int(0, 1) == 0; };
    s.n_expert = random_int(1, 6);
    s.n_expert_per_token = random_int(1, std::min<int64_t>(3, s.n_expert));
    s.n_ff_expert = tensor_ranks * random_int(3, 20);
    if (one_of_two()) {
        s.n_ff_shared = tensor_ranks * static_cast<int>(random_int(3, 20));
        s.shared_gate = one_of_two();
    }
    s.router = one_of_two() ? RouterScore::softmax : RouterScore::sigmoid;
    s.router_normalise = one_of_two();
    s.router_scale = one_of_two() ? 1 : 2.5;
    s.router_bias = one_of_two();
    s.expert_bias = s.biases != Biases::all && one_of_two();
    s.selection_bias = one_of_two();
    s.clamped_swiglu = one_of_two();
    if (s.n_layer > 1 && one_of_two())
        s.dense_layers = {static_cast<int>(random_int(0, s.n_layer - 1))};
    return s;
}

double random_capacity() {
    return std::array{0.0, 0.3, 0.7, 1.0, 1.3}[static_cast<size_t>(random_int(0, 4))];
}

DecoderSpec random_spec(int least_layers) {
    const int n_kv_head = static_cast<int>(random_int(1, 2)),
              n_head = n_kv_head * static_cast<int>(random_int(1, 3));
    const bool rotary = random_int(0, 1) == 0, llama3 = random_int(0, 1) == 0;
    const auto one_of_two = [] { return random_int(0, 1) == 0; };
    const bool experts = one_of_two();
    const Biases biases = std::array{Biases::none, Biases::qkv, Biases::attention,
                                     Biases::all}[static_cast<size_t>(random_int(0, 3))];
    DecoderSettings settings = {
        .n_layer = random_int(least_layers, 3),
        .n_head = n_head,
        .n_embd = n_head * random_int(1, 2) * 8,
        .n_ctx = random_int(8, 20),
        .vocab_size = random_int(30, 150),
        .n_kv_head = n_kv_head,
        .head_size = 2 * random_int(1, 12),
        .n_ff = random_int(2, 9) * 8,
        .norm = random_int(0, 1) ? Norm::rms : Norm::layer,
        .norm_epsilon = random_int(0, 1) ? 1e-5 : 1e-6,
        .mlp = experts ? Mlp::swiglu
                       : std::array{Mlp::gelu, Mlp::swiglu,
                                    Mlp::relu2}[static_cast<size_t>(random_int(0, 2))],
        .biases = biases,
        .qk_norm = rotary ? std::array{QkNormKind::off, QkNormKind::head,
                                       QkNormKind::width}[static_cast<size_t>(random_int(0, 2))]
                          : QkNormKind::off,
        .tied_head = random_int(0, 1) == 0,
        .attention_softcap = random_int(0, 3) ? 0.0 : 2.0,
        .head_softcap = random_int(0, 3) ? 0.0 : 5.0,
        .positions = rotary ? Positions::rope : Positions::learned,
        .rope_theta = 100,
        .rope_scaling = rotary && llama3 ? RopeFrequencies{.scaling = RopeScaling::llama3,
                                                           .factor = 4,
                                                           .original_context = 6}
                                         : RopeFrequencies{}};
    if (one_of_two()) {
        settings.window = static_cast<int>(random_int(1, 9));
        settings.window_pattern =
            std::array{"S", "SL", "LSS"}[static_cast<size_t>(random_int(0, 2))];
    }
    settings.sinks = one_of_two();
    if (experts) settings = with_experts(settings);
    return gpt2.spec(settings);
}

std::string described(const DecoderSpec& spec) {
    return concat(
        spec.n_layer, " layers, ", spec.n_head, "/", spec.n_kv_head, " heads of ", spec.head_size,
        ", n_ff ", spec.n_ff, spec.norm == Norm::rms ? ", RMSNorm" : "",
        spec.mlp == Mlp::swiglu  ? ", SwiGLU"
        : spec.mlp == Mlp::relu2 ? ", ReLU²"
                                 : "",
        spec.biases == Biases::all         ? ""
        : spec.biases == Biases::attention ? ", biases of attention"
        : spec.biases == Biases::qkv       ? ", biases of qkv"
                                           : ", no biases",
        spec.qk_norm == QkNormKind::head    ? ", QK-norm"
        : spec.qk_norm == QkNormKind::width ? ", QK-norm of the width"
                                            : "",
        spec.experts
            ? concat(
                  ", ", spec.experts.n_expert_per_token, " of ", spec.experts.n_expert,
                  " experts of ", spec.experts.n_ff,
                  spec.experts.n_ff_shared > 0 ? ", a shared one" : "",
                  spec.experts.shared_gate ? " with a gate" : "",
                  spec.experts.selection_bias ? ", biased choice" : "",
                  spec.experts.biases ? ", with biases" : "",
                  spec.experts.capacity > 0 ? concat(" of capacity ", spec.experts.capacity) : "",
                  spec.experts.rule.score == RouterScore::sigmoid ? ", sigmoid" : "",
                  spec.dense_layers.empty() ? "" : ", a dense layer")
            : "",
        spec.clamped ? ", clamped" : "",
        spec.window > 0 ? concat(", windows of ", spec.window, " in ", spec.window_pattern) : "",
        spec.sinks ? ", sinks" : "", spec.tied_head ? "" : ", own head",
        spec.attention_softcap != 0 ? ", capped scores" : "",
        spec.head_softcap != 0 ? ", capped logits" : "", spec.is_rotary() ? ", RoPE" : "");
}

}  // namespace train_gpt
