// An entry of a model's parameter registry.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace train_gpt {

/// One entry of a model's parameter registry. Shapes are as in memory: a linear weight is [out,
/// in].
struct Parameter {
    std::string name;             // as in Hugging Face's GPT-2, without the "transformer." prefix
    std::vector<int64_t> shape;   // logical
    std::vector<int64_t> padded;  // in memory; rows beyond the logical ones are zero and stay zero
    int unit = 0;                 // the group it is acquired, reduced and gathered with
    bool decay = false;           // AdamW's weight decay applies
    bool transposed = false;      // Hugging Face stores it as [in, out] (its Conv1D)
    int split_axis = -1;  // tensor parallelism: 0 splits outputs, 1 inputs, −1 keeps it whole
    int split_parts =
        1;  // equal parts along split_axis, each of which is split (3: Q, K and V, by heads)
    float init_mean = 0, init_std = 0;

    int64_t numel() const { return product(shape); }  // logical
    int64_t padded_numel() const {
        return product(padded);
    }  // in memory; the logical elements come first

  private:
    static int64_t product(const std::vector<int64_t>& extents) {
        int64_t n = 1;
        for (const int64_t extent : extents) n *= extent;
        return n;
    }
};

}  // namespace train_gpt
