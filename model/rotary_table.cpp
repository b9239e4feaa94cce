#include "model/rotary_table.h"

#include <cassert>
#include <vector>

#include "device/copy.h"

namespace train_gpt {

RotaryTable::RotaryTable(const DecoderSpec& spec, int64_t n, Arena& arena, Purpose purpose)
    : frequencies_(spec.rope) {
    for (int l = 0; l < spec.n_layer; ++l) assert(spec.layer(l).head_size == spec.head_size);
    if (spec.is_rotary()) table_ = arena.tensor(DType::fp32, {n, spec.head_size}, purpose);
}

const Tensor& RotaryTable::get(Stream& stream) {
    if (!is_filled_) {
        const std::vector<float> values = rope_table(frequencies_, table_.shape[0]);
        copy_now(stream.device, table_.data, values.data(), table_.bytes());
        is_filled_ = true;
    }
    return table_;
}

}  // namespace train_gpt
