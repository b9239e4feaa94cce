// Decoders of all kinds, for tests.
#pragma once
#include <array>
#include <string>

#include "base/error.h"
#include "model/families/gpt2.h"
#include "model/spec.h"
#include "test/random.h"

namespace train_gpt {

/// A decoder with whatever a family may have: grouped heads of any size, any norm, MLP, biases,
/// head and positions.
inline DecoderSpec random_spec(int least_layers = 1) {
    const int n_kv_head = static_cast<int>(random_int(1, 2)),
              n_head = n_kv_head * static_cast<int>(random_int(1, 3));
    const bool rotary = random_int(0, 1) == 0, llama3 = random_int(0, 1) == 0;
    return gpt2.spec(
        {.n_layer = random_int(least_layers, 3),
         .n_head = n_head,
         .n_embd = n_head * random_int(1, 2) * 8,
         .n_ctx = random_int(8, 20),
         .vocab_size = random_int(30, 150),
         .n_kv_head = n_kv_head,
         .head_size = 2 * random_int(1, 12),
         .n_ff = random_int(2, 9) * 8,
         .norm = random_int(0, 1) ? Norm::rms : Norm::layer,
         .norm_epsilon = random_int(0, 1) ? 1e-5 : 1e-6,
         .mlp =
             std::array{Mlp::gelu, Mlp::swiglu, Mlp::relu2}[static_cast<size_t>(random_int(0, 2))],
         .biases = std::array{Biases::none, Biases::qkv,
                              Biases::all}[static_cast<size_t>(random_int(0, 2))],
         .qk_norm = rotary && random_int(0, 1) == 0,
         .tied_head = random_int(0, 1) == 0,
         .attention_softcap = random_int(0, 3) ? 0.0 : 2.0,
         .head_softcap = random_int(0, 3) ? 0.0 : 5.0,
         .positions = rotary ? Positions::rope : Positions::learned,
         .rope_theta = 100,
         .rope_scaling = rotary && llama3 ? RopeFrequencies{.scaling = RopeScaling::llama3,
                                                            .factor = 4,
                                                            .original_context = 6}
                                          : RopeFrequencies{}});
}

inline std::string described(const DecoderSpec& spec) {
    return concat(spec.n_layer, " layers, ", spec.n_head, "/", spec.n_kv_head, " heads of ",
                  spec.head_size, ", n_ff ", spec.n_ff, spec.norm == Norm::rms ? ", RMSNorm" : "",
                  spec.mlp == Mlp::swiglu  ? ", SwiGLU"
                  : spec.mlp == Mlp::relu2 ? ", ReLU²"
                                           : "",
                  spec.biases == Biases::all   ? ""
                  : spec.biases == Biases::qkv ? ", biases of qkv"
                                               : ", no biases",
                  spec.qk_norm ? ", QK-norm" : "", spec.tied_head ? "" : ", own head",
                  spec.attention_softcap != 0 ? ", capped scores" : "",
                  spec.head_softcap != 0 ? ", capped logits" : "",
                  spec.is_rotary() ? ", RoPE" : "");
}

}  // namespace train_gpt
