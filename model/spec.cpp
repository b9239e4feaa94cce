#include "model/spec.h"

#include "base/error.h"

namespace train_gpt {

double DecoderSpec::flops_per_token(int T) const {
    const double C = n_embd, L = n_layer, width = attention_width();
    const double of_block = C * qkv_width() + width * C + 2 * C * n_ff;
    const double matrix_parameters = L * of_block + static_cast<double>(vocab_size) * C;
    return 6 * matrix_parameters + 6 * L * width * T;
}

const DecoderSize& checked(const DecoderSize& size, const std::string& where) {
    const auto require = [&](const char* key, int64_t value, int64_t most) {
        if (value < 1 || value > most)
            throw Error(where, " has ", key, " = ", value, "; it must lie between 1 and ", most);
    };
    require("n_layer", size.n_layer, 10000);
    require("n_head", size.n_head, 10000);
    require("n_embd", size.n_embd, 1 << 20);
    require("n_positions", size.n_ctx, 1 << 24);
    require("vocab_size", size.vocab_size, 1 << 24);
    if (size.n_embd % size.n_head != 0 || size.n_embd / size.n_head > 256)
        throw Error(where, " has n_embd = ", size.n_embd, " and n_head = ", size.n_head,
                    "; heads must divide channels and be at most 256 wide");
    return size;
}

}  // namespace train_gpt
