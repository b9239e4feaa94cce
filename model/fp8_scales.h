// The products of a model's blocks that a training run computes in fp8 (kernels/fp8.h), and the
// scales of their operands. Embedding, head, norms, routers, attention itself, the residual stream
// and the weight gradients of experts stay in the run's dtype, and so do evaluation and samples.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "device/memory.h"
#include "device/stream.h"
#include "kernels/linear/linear.h"
#include "model/registry.h"
#include "parallel/state/parameters.h"

namespace train_gpt {

enum class Fp8Recipe : uint8_t { off, delayed, current };

struct Fp8Options {
    Fp8Recipe recipe = Fp8Recipe::off;
    bool weight_gradient = true;
    /// Products that stay in the run's dtype: a layer ("0"), a product of all layers ("down"), or
    /// one of one layer ("0.down").
    std::vector<std::string> skip = {};
};

/// A product of a block.
struct Fp8Product {
    std::string name;         // as in Fp8Options::skip, with its layer
    std::string weight;       // the name of its weight
    uint32_t id = 0;          // Parameter::id of its weight
    std::string reason = {};  // why it stays in the run's dtype; empty: it is in fp8
    bool of_experts = false;  // of all experts of a layer

    bool is_fp8() const { return reason.empty(); }
};

/// All products of a model's blocks, layer by layer. A product stays in the run's dtype if its
/// inputs or outputs on a rank are fewer than 64 or not a multiple of 16. All products do if a
/// rank's part of a sequence is not a multiple of 16 tokens. tensor_ranks share each product.
std::vector<Fp8Product> products_of(const Registry& whole, const Fp8Options& options,
                                    int tensor_ranks, int64_t tokens_of_sequence);

/// What is wrong with Fp8Options::skip: the first entry that names no product of the whole model;
/// empty if nothing is.
std::string skip_problem(const std::vector<std::string>& skip, const Registry& whole);

/// A line about which products are in fp8 and which are not, and why.
std::string described(const std::vector<Fp8Product>& products, const Fp8Options& options,
                      DType dtype);

/// The largest magnitudes of operands in the last steps, oldest first.
struct Fp8History {
    std::vector<std::string> operands = {};  // "input of 3.up", …
    std::vector<float> amax = {};            // [steps, operands]
};

/// With delayed scaling, the scales of a step follow from the steps before, of which the history
/// has 1024; a step's amax is the largest over all micro-batches and all ranks. A maximum does not
/// depend on the order, so neither do the scales, nor on how many ranks there are. In the first
/// step each operand has the scale of its own amax, as always with current scaling.
class Fp8Scales {
  public:
    static constexpr int64_t history_steps = 1024;

    /// products: of the whole model, whichever of them are on this rank; held: the parameters in
    /// its memory. Takes nothing from the arena if none is in fp8.
    Fp8Scales(const Fp8Options& options, const std::vector<Fp8Product>& products,
              const std::vector<Parameter>& held, Arena& arena);

    /// How many fp32 all ranks compare in a step (add_over_ranks()).
    static int64_t operands(const std::vector<Fp8Product>& products);

    explicit operator bool() const { return n_ > 0; }
    /// The scales of a weight's products, by its index among the parameters that are held; null:
    /// the products are not in fp8.
    const ProductScales* of(int parameter) const {
        const int i =
            parameter < 0 || products_.empty() ? -1 : products_[static_cast<size_t>(parameter)];
        return i < 0 ? nullptr : &scales_[static_cast<size_t>(i)];
    }

    /// of() all parameters that are held, so many.
    std::vector<const ProductScales*> of_parameters(size_t held) const;

    void begin_step(Stream& stream);
    /// Takes the maximum over all ranks.
    void add_over_ranks(Stream& stream, ParameterStore& parameters);
    /// After the step's update, of which this is the state.
    void finish_step(Stream& stream, const StepState* state);

    /// Submits the copy of what was found to memory on the host, `place` 0 or 1. found() is what
    /// has arrived there.
    void copy_to_host(Stream& stream, int place);
    Fp8Found found(int place);
    /// "input of 3.up", by Fp8Found::not_finite.
    std::string name_of(int operand) const { return operands_[static_cast<size_t>(operand)]; }

    /// For checkpoints, after all work on the device. Empty unless scaling is delayed.
    Fp8History history() const;
    /// The history in a copy of on_device(), which is the device's memory that the history is made
    /// from.
    Fp8History history_in(const std::byte* copy) const;
    std::span<const std::byte> on_device() const;
    /// Continues after a history of the same operands; an operand with magnitudes of 0 alone has
    /// none.
    void set_history(const Fp8History& history);
    /// With delayed scaling, sets all scales to 1 until set_history() and takes them as known, so
    /// that a warm-up also runs the kernels that round their results. Returns whether it did.
    bool set_for_warm_up();

  private:
    size_t history_bytes() const;
    void set_known(bool known);

    int64_t n_ = 0;  // operands: input and weight of each product, then gradients in reverse
    bool delayed_ = false;
    Device device_;
    std::vector<std::string> operands_;
    std::vector<int> products_;                 // by parameter; −1: not in fp8
    std::vector<ProductScales> scales_;         // of each product
    std::byte* state_ = nullptr;                // Fp8Found and the ring [history_steps, n]
    float *amax_ = nullptr, *scale_ = nullptr;  // [n]
    float* inverse_ = nullptr;  // [n / 3, 4]: of inputs, where kernels round their results
    Fp8Found* host_ = nullptr;  // of two steps
};

}  // namespace train_gpt
