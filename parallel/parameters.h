// Parameters of a model as the layers below the model see them: named tensors in units, with their gradients and optimizer
// state in flat buffers, which data parallelism splits over ranks (ZeRO: Rajbhandari et al., arXiv 1910.02054). Offload and
// packed copies will hang on the same calls: acquire(), release() and gradients_ready().
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/tensor.h"
#include "device/memory.h"
#include "parallel/bucket_layout.h"
#include "parallel/exchange.h"
#include "parallel/parameter.h"

namespace train_gpt {

/// How the state of a training run is split over the ranks of its data-parallel group.
struct Sharding {
    int rank = 0, size = 1;
    /// ZeRO's stage. 0: every rank updates everything. 1: masters and moments are split. 2: gradient sums as well; they are
    /// then reduced in every micro-batch.
    int zero = 1;
    int64_t bucket_elements = (int64_t{64} << 20) / 4;
    /// Of gradients on their way between ranks; sums in memory stay fp32.
    DType reduce_dtype = DType::fp32;
};

/// Weights, and in training fp32 masters, AdamW's moments and gradient sums, in the flat buffers of a BucketLayout. Every
/// rank holds all weights; of the optimizer's state, and with ZeRO-2 of the gradient sums, it holds its shard of each bucket.
/// In fp32 the weights are the masters.
///
/// In a training step the model calls begin_micro_batch(), then acquire() and release() around each use of a unit's
/// weights, begin_backward(), and gradients_ready() as soon as all gradients of a unit are written. A bucket whose units are
/// ready is reduced while the model goes on. finish_gradients() then waits for the sums, the optimizer updates pieces(),
/// and gather() collects each bucket's weights, for which the next acquire() waits.
class ParameterStore {
  public:
    enum class Use { inference, training };

    ParameterStore(Arena& arena, std::vector<Parameter> parameters, DType dtype, Use use,
                   const Sharding& sharding = {});
    /// With whom a store with sharding.size > 1 exchanges. What the model's stream waits for counts as communication in
    /// `clock`.
    void connect(Communicator& communicator, StepClock* clock = nullptr);

    const std::vector<Parameter>& parameters() const { return parameters_; }
    int index_of(const std::string& name) const;  // −1: no such parameter
    DType dtype() const { return dtype_; }
    bool training() const { return use_ == Use::training; }
    int units() const { return parameters_.back().unit + 1; }
    int64_t logical_numel() const;
    const Sharding& sharding() const { return sharding_; }
    const BucketLayout& layout() const { return layout_; }

    /// Weight of parameter i in the compute dtype, padded shape. Valid between acquire(unit) and release(unit).
    Tensor weight(int i) const;
    void acquire(Stream& stream, int unit);
    void release(int /*unit*/) {}

    /// Where the gradient of parameter i goes in the present micro-batch.
    GradientSink sink(int i) const {
        return {gradient_of_micro_batch(i), DType::fp32, !first_micro_batch_ && sharding_.zero < 2};
    }
    /// first, last: of the micro-batches that this rank computes in the step.
    void begin_micro_batch(bool first, bool last) {
        first_micro_batch_ = first;
        last_micro_batch_ = last;
    }
    void begin_backward(Stream& stream);
    /// All gradients of a unit have been written for this micro-batch. Units become ready from the last one down.
    void gradients_ready(Stream& stream, int unit);
    /// In place of a micro-batch, on a rank that has one less than others: takes part in what they reduce in it.
    void skip_micro_batch(Stream& stream);
    /// Later work of the stream finds the gradient sums of the step, over all ranks, in pieces(), and
    /// what behind_sums() was given done for every bucket.
    void finish_gradients(Stream& stream);
    /// Does `work` as soon as the gradient sums of a bucket are in its pieces: on a GPU with other ranks
    /// behind the bucket's reduction, beside the backward pass of the blocks before it.
    void behind_sums(std::function<void(Stream&, size_t bucket)> work) {
        behind_sums_ = std::move(work);
    }
    /// Collects the weights of a bucket from the ranks that have updated them.
    void gather(Stream& stream, int bucket);
    void gather_all(Stream& stream);
    /// data[n] becomes its sum over ranks, for later work of the stream.
    void sum_over_ranks(Stream& stream, double* data, int64_t n);

    /// A range of one parameter whose update is this rank's: all of it, or what lies in this rank's shards. A piece begins
    /// at a multiple of norm_block of its tensor.
    struct Piece {
        int parameter = 0, bucket = 0;
        Range range;              // of the tensor's padded elements
        bf16* weights = nullptr;  // null in fp32, where the master is the weight
        float *master = nullptr, *m = nullptr, *v = nullptr, *gradient = nullptr;
    };
    /// In the order of the registry.
    const std::vector<Piece>& pieces() const { return pieces_; }
    std::span<const Piece> pieces_of(int i) const;

    /// Initial values from the registry: normal(init_mean, init_std) by Philox keyed by (seed, parameter, element);
    /// moments zero, padding zero.
    void initialize(uint64_t seed);
    /// Sets parameter i from its logical elements: master and weight, padding zero.
    void set(int i, std::span<const float> values);
    /// The logical elements of parameter i in fp32: the master where this rank holds it, else the weight.
    void get(int i, std::span<float> values) const;
    /// Weights of parameter i from element `first` on, for the host, behind all work on the device.
    void read_weights(int i, int64_t first, std::span<float> values) const;

    enum class State : uint8_t { master, moment1, moment2, gradient };
    /// Elements first … of a state of parameter i, from and to the host, behind all work on the device. Of values for
    /// elements that are not this rank's, read() leaves the places as they are, and write() takes none. What is written to
    /// the masters is rounded into the weights, also of elements that are not this rank's.
    void read(State state, int i, int64_t first, std::span<float> values) const;
    void write(State state, int i, int64_t first, std::span<const float> values);
    /// A state of a piece for the host to read: in place, or from a GPU copied into `copied`.
    std::span<const float> host_view(const Piece& piece, State state,
                                     std::vector<float>& copied) const;
    /// Zeroes what lies behind the logical elements of weights and states.
    void clear_padding();

  private:
    /// The elements of a bucket that this rank updates, and where they lie in buffers that hold only such.
    Range owned(const Bucket& bucket) const {
        return sharding_.zero == 0 ? bucket.range : layout_.shard_of(bucket, sharding_.rank);
    }
    int64_t owned_offset(const Bucket& bucket) const {
        return sharding_.zero == 0 ? bucket.range.first : layout_.shard_offset(bucket);
    }
    void write_weights(int i, int64_t first, std::span<const float> values);
    char* weight_address(int64_t flat) const {
        return static_cast<char*>(weights_) + flat * static_cast<int64_t>(size_of(dtype_));
    }
    void find_pieces();

    /// Where the gradients of a bucket, and of a parameter, are written in a micro-batch.
    float* bucket_gradients(size_t bucket) const;
    float* gradient_of_micro_batch(int i) const;
    void reduce(Stream& stream, size_t bucket);
    // What is waited for each by itself: every bucket's reduction, every bucket's weights, sums.
    int reduce_slot(size_t bucket) const { return static_cast<int>(bucket); }
    int gather_slot(size_t bucket) const {
        return static_cast<int>(layout_.buckets().size() + bucket);
    }
    int sum_slot() const { return 2 * static_cast<int>(layout_.buckets().size()); }

    std::vector<Parameter> parameters_;
    std::unordered_map<std::string, int> index_of_name_;
    DType dtype_;
    Use use_;
    Device device_;
    Sharding sharding_;
    BucketLayout layout_;
    std::vector<size_t> bucket_of_unit_;  // the first one; only unit 0 may have several
    void* weights_ = nullptr;             // all
    float *master_ = nullptr, *m_ = nullptr,
          *v_ = nullptr;         // owned elements; in fp32 the masters are the weights
    float* gradient_ = nullptr;  // all; with ZeRO-2 the owned ones
    std::vector<Piece> pieces_;

    // ZeRO-2: gradients of a micro-batch. Unit 0 has room of its own, since its gradient is first written when the backward
    // pass begins and last when it ends; the buckets of blocks take turns, three because the gradient of a bias belongs to
    // a block and is written by the one above.
    static constexpr size_t turns = 3;
    float* embedding_gradients_ = nullptr;
    float* block_gradients_[turns] = {};
    bf16* rounded_gradients_ = nullptr;  // a bucket on its way, when reduce_dtype is bf16

    std::unique_ptr<Exchange> exchange_;  // null in a group of one
    std::function<void(Stream&, size_t)> behind_sums_ = [](Stream&, size_t) {};
    std::vector<int> units_missing_;  // of each bucket, in this micro-batch
    bool first_micro_batch_ = true, last_micro_batch_ = true;
};

}  // namespace train_gpt
