// Weights and optimizer state from and to the host: initial values, files.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "device/stream.h"
#include "parallel/state/parameter_buffers.h"

namespace train_gpt {

class ParameterState {
  public:
    /// `buffers` must live longer than the object.
    explicit ParameterState(const ParameterBuffers& buffers) : buffers_(buffers) {}

    /// Initial values from the registry: normal(init_mean, init_std) by Philox keyed by (seed,
    /// parameter's id, element); the optimizer's slots zero, padding zero.
    void initialize(uint64_t seed);
    /// Fills the weights that the model sees, padding included, or other memory, with small random
    /// numbers that repeat after 65,537 elements: for timing kernels before the real values are
    /// there. Takes little time.
    void fill_weights(Stream& stream);
    void fill(Stream& stream, std::span<std::byte> memory, DType dtype);
    /// Sets parameter i from its logical elements: master and weight, padding zero.
    void set(int i, std::span<const float> values);
    /// The logical elements of parameter i in fp32: the master where this rank holds it, else the
    /// weight, or with ZeRO-3 nothing.
    void get(int i, std::span<float> values) const;
    /// Weights of parameter i from element `first` on, for the host, after all work on the device.
    /// Not of a part of a split parameter, and not with ZeRO-3.
    void read_weights(int i, int64_t first, std::span<float> values) const;

    /// Elements first … of a state of parameter i, from and to the host, after all work on the
    /// device. A state is `master`, `gradient`, or an optimizer's slot by its name, but not one of
    /// scales. Codes (dynamic_map.h) are read as the values that they stand for: √v for roots. A
    /// part of a block is written with the block's other values, which then get another scale.
    /// Elements are counted in the whole tensor; where a rank holds a whole tensor, its padding
    /// follows. read() leaves values of elements that other ranks hold, or that have no such slot,
    /// unchanged, and write() ignores them. What is written to the masters is rounded into the
    /// weights, also of elements that are not this rank's, if it holds all weights.
    void read(std::string_view state, int i, int64_t first, std::span<float> values) const;
    void write(std::string_view state, int i, int64_t first, std::span<const float> values);
    /// Like read() and write(), for elements counted in this rank's memory.
    void read_held(std::string_view state, int i, int64_t first, std::span<float> values) const;
    void write_held(std::string_view state, int i, int64_t first, std::span<const float> values);
    static constexpr std::string_view master = "master", gradient = "gradient";
    /// What a checkpoint has: masters, and the optimizer's slots of the parameters that have them
    /// (ParameterBuffers::has).
    std::vector<OptimizerSlot> saved() const;
    /// The first n elements of a piece of a state, in its dtype, for the host to read: in place, or
    /// from a GPU copied into `copied`.
    std::span<const std::byte> host_view(const ParameterBuffers::Piece& piece,
                                         std::string_view state, int64_t n,
                                         std::vector<std::byte>& copied) const;
    /// Zeroes the padding after the logical elements of weights and states, but not of codes, which
    /// are written with their padding.
    void clear_padding();

  private:
    /// Where a piece of a state lies, and what it consists of.
    struct Place {
        char* data = nullptr;
        DType dtype = DType::fp32;
        Coding coding = Coding::none;
        float* scales = nullptr;

        /// With codes, from a multiple of code_block on.
        Place from(int64_t element) const {
            return {data + element * static_cast<int64_t>(size_of(dtype)), dtype, coding,
                    scales ? scales + element / code_block : nullptr};
        }
    };
    /// Null data: the parameter has no such slot.
    Place place_of(const ParameterBuffers::Piece& piece, std::string_view state) const;
    void write_values(const Place& to, std::span<const float> values);
    void read_values(const Place& from, std::span<float> values) const;
    /// Writes and reads codes: values from element `first` on of a piece of n elements.
    void write_codes(const Place& to, int64_t n, int64_t first, std::span<const float> values);
    void read_codes(const Place& from, int64_t n, int64_t first, std::span<float> values) const;

    const ParameterBuffers& buffers_;
};

}  // namespace train_gpt
