#include "model/spec.h"

#include <algorithm>

#include "base/error.h"

namespace train_gpt {

double DecoderSpec::flops_per_token(int T) const {
    const double C = n_embd, L = n_layer, width = attention_width();
    const double of_block = C * qkv_width() + width * C + C * up_width() + C * n_ff;
    const double matrix_parameters = L * of_block + static_cast<double>(vocab_size) * C;
    return 6 * matrix_parameters + 6 * L * width * T;
}

namespace {

/// Whether every rank gets equal shares and some of the vocabulary.
bool can_be_shared(const DecoderSpec& spec, int64_t ranks) {
    const int64_t whole = ranks * vocab_multiple,
                  part = (spec.vocab_size + whole - 1) / whole * vocab_multiple;
    return spec.n_head % ranks == 0 && spec.n_kv_head % ranks == 0 && spec.n_ff % ranks == 0 &&
           (ranks - 1) * part < spec.vocab_size;
}

}  // namespace

DecoderSpec tensor_part(const DecoderSpec& spec, int ranks) {
    if (!can_be_shared(spec, ranks)) {
        int64_t distance = 1;
        while (!can_be_shared(spec, std::max<int64_t>(ranks - distance, 1)) &&
               !can_be_shared(spec, ranks + distance))
            ++distance;
        const int64_t lower = std::max<int64_t>(ranks - distance, 1);
        throw Error("parallel.tensor = ", ranks, " ranks cannot share ", spec.n_head, " heads, ",
                    spec.n_kv_head, " key/value heads, n_ff = ", spec.n_ff, " and a vocabulary of ",
                    spec.vocab_size, " evenly; parallel.tensor=",
                    can_be_shared(spec, lower) ? lower : ranks + distance, " can");
    }
    DecoderSpec part = spec;
    part.n_head /= ranks;
    part.n_kv_head /= ranks;
    part.n_ff /= ranks;
    return part;
}

}  // namespace train_gpt
