// Weights and optimizer state from and to the host: initial values, files.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "device/device.h"
#include "parallel/state/parameter_buffers.h"

namespace train_gpt {

class ParameterState {
  public:
    /// `buffers` must live longer than the object.
    explicit ParameterState(const ParameterBuffers& buffers) : buffers_(buffers) {}

    /// Initial values from the registry: normal(init_mean, init_std) by Philox keyed by (seed,
    /// parameter's id, element); moments zero, padding zero.
    void initialize(uint64_t seed);
    /// Fills the weights that the model sees, padding included, with small random numbers that repeat
    /// after 65,537 elements: for timing kernels before the real weights are there. Takes little time.
    void fill_weights(Stream& stream);
    /// Sets parameter i from its logical elements: master and weight, padding zero.
    void set(int i, std::span<const float> values);
    /// The logical elements of parameter i in fp32: the master where this rank holds it, else the
    /// weight, or with ZeRO-3 nothing.
    void get(int i, std::span<float> values) const;
    /// Weights of parameter i from element `first` on, for the host, after all work on the device. Not
    /// of a part of a split parameter, and not with ZeRO-3.
    void read_weights(int i, int64_t first, std::span<float> values) const;

    enum class State : uint8_t { master, moment1, moment2, gradient };
    /// Elements first … of a state of parameter i, from and to the host, after all work on the
    /// device. Elements are counted in the whole tensor; where a rank holds a whole tensor, its padding
    /// follows. read() leaves values of elements that other ranks hold unchanged, and write() ignores
    /// them. What is written to the masters is rounded into the weights, also of elements that are not
    /// this rank's, if it holds all weights.
    void read(State state, int i, int64_t first, std::span<float> values) const;
    void write(State state, int i, int64_t first, std::span<const float> values);
    /// The same for elements counted in this rank's memory.
    void read_held(State state, int i, int64_t first, std::span<float> values) const;
    void write_held(State state, int i, int64_t first, std::span<const float> values);
    /// A state of a piece for the host to read: in place, or from a GPU copied into `copied`.
    std::span<const float> host_view(const ParameterBuffers::Piece& piece, State state,
                                     std::vector<float>& copied) const;
    /// Zeroes the padding after the logical elements of weights and states.
    void clear_padding();

  private:
    void write_weights(char* to, std::span<const float> values);
    const ParameterBuffers& buffers_;
};

}  // namespace train_gpt
