// Where the weights of a model, and in training their gradients and optimizer state, lie: addresses
// in flat buffers, which data parallelism splits over ranks (Sharding).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/tensor.h"
#include "device/memory.h"
#include "kernels/dynamic_map.h"
#include "parallel/state/bucket_layout.h"
#include "parallel/state/parameter.h"
#include "parallel/state/sharding.h"

namespace train_gpt {

/// What an optimizer keeps of elements besides the master weight, such as a moment. Buffers, files
/// and plans go through the list of slots.
struct OptimizerSlot {
    std::string name;              // in optimizer files and ParameterState
    DType dtype = DType::fp32;     // fp32 or bf16; uint8 if it has codes
    bool of_matrices = true;       // also of parameters that are updated as whole matrices
    Coding coding = Coding::none;  // of codes, whose scales are in the next slot
    int64_t block = 1;  // elements of a tensor for each of the slot: code_block of scales

    bool is_of_elements() const { return block == 1; }
    /// What the slot has of n elements of a tensor, from a multiple of `block` on.
    int64_t count(int64_t n) const { return (n + block - 1) / block; }
    size_t bytes(int64_t n) const { return static_cast<size_t>(count(n)) * size_of(dtype); }
    bool operator==(const OptimizerSlot&) const = default;
};

/// The registry of parameters and, in the flat buffers of a BucketLayout, their weights, and in
/// training fp32 masters, the optimizer's slots and gradient sums. With ZeRO-1 a rank holds its
/// shard of each bucket of masters and slots, with ZeRO-2 also of gradient sums, with ZeRO-3 also
/// of weights; with ZeRO-0 it holds all. In fp32 the weights are the masters.
///
/// Masters and slots may be in host memory (Sharding::state_on_host).
///
/// With ZeRO-3, whole weights are in buffers that the ranks gather them into. The weights of unit
/// 0, and of a head that is larger than a block, have places of their own. The other buckets take
/// turns in two buffers, so that one is gathered while the one before it is used.
class ParameterBuffers {
  public:
    enum class Use { inference, training };
    /// The buffers in which buckets take turns.
    static constexpr size_t turns = 2;

    ParameterBuffers(Arena& arena, std::vector<Parameter> parameters, DType dtype, Use use,
                     const Sharding& sharding, std::vector<OptimizerSlot> slots = {});

    const std::vector<Parameter>& parameters() const { return parameters_; }
    int index_of(const std::string& name) const;  // −1: no such parameter
    DType dtype() const { return dtype_; }
    bool training() const { return use_ == Use::training; }
    int units() const { return parameters_.back().unit + 1; }
    const Device& device() const { return device_; }
    const Sharding& sharding() const { return sharding_; }
    const BucketLayout& layout() const { return layout_; }
    const std::vector<OptimizerSlot>& slots() const { return slots_; }
    /// Whether a parameter is updated as whole matrices, and whether it has a slot.
    bool is_matrix(int i) const {
        return sharding_.matrices && parameters_[static_cast<size_t>(i)].update == Update::matrix;
    }
    bool has(const OptimizerSlot& slot, int i) const { return slot.of_matrices || !is_matrix(i); }
    /// A slot by its name, which the optimizer has.
    size_t slot_of(std::string_view name) const;
    /// The first bucket of a unit; only unit 0 may have several.
    size_t first_bucket(int unit) const { return bucket_of_unit_[static_cast<size_t>(unit)]; }
    /// The elements of a bucket that this rank updates.
    Range owned(const Bucket& bucket) const { return owned_by(bucket, sharding_.rank); }
    /// The elements of a bucket that rank `rank` updates, of the ranks that the state is split
    /// over.
    Range owned_by(const Bucket& bucket, int rank) const {
        return sharding_.is_split() ? layout_.shard_of(bucket, rank) : bucket.range;
    }
    /// The ranges of parameter i, in memory, that rank `rank` updates, numbered as in owned_by().
    std::vector<Range> owned_of(int i, int rank) const;

    /// Weight of parameter i in the compute dtype, padded shape. A model takes it from a lease
    /// (Weights::acquire).
    Tensor weight(int i) const;
    /// Whether this rank's buffers always have all weights, not only while they are gathered.
    bool holds_all_weights() const { return !sharding_.gathers_each(); }
    /// Whether this rank's buffers always have all weights of the whole model, not of a stage or a
    /// tensor-parallel rank's part.
    bool holds_whole_model() const {
        return holds_all_weights() && sharding_.tensors == 1 && sharding_.pipelines == 1;
    }
    /// The weights of a bucket; with ZeRO-3 where they are gathered.
    char* bucket_weights(size_t bucket) const;
    /// The weights of a bucket that this rank updates.
    char* owned_weights(const Bucket& bucket) const {
        return at(weights_, holds_all_weights() ? owned(bucket).first : owned_offset(bucket));
    }
    /// The buffer, 0 or 1, in which a bucket takes turns with others; −1: it has its own place.
    int turn_of_weights(size_t bucket) const;
    /// Where fill_weights() and files find the weights of parameter i, if holds_all_weights().
    char* weight_address(int i, int64_t element) const {
        return at(weights_, layout_.offset(i) + element);
    }
    /// All memory that has weights as the model sees them.
    const std::vector<std::span<std::byte>>& whole_weights() const { return whole_weights_; }

    /// What the ranks reduce: the sums of a bucket, and of a parameter, in this step or, where
    /// ranks reduce in every micro-batch, of a micro-batch. int32 if sums are exact.
    float* bucket_gradients(size_t bucket) const;
    float* reduced_gradient(int i) const;
    /// Where the gradient of a parameter is written in a micro-batch.
    float* gradient_of_micro_batch(int i) const;
    /// Where ranks reduce gradients in every micro-batch: the buffer, 0 or 1, in which gradients of
    /// a bucket take turns with gradients of other buckets; −1: they have their own place.
    int turn_of_gradients(size_t bucket) const {
        return is_embedding(bucket) ? -1 : static_cast<int>(turn_of(bucket));
    }
    /// The sums over micro-batches of the elements of a bucket that are this rank's; int32 if they
    /// are exact.
    float* owned_gradients(const Bucket& bucket) const {
        return gradient_ + (sharding_.reduces_each() ? owned_offset(bucket) : owned(bucket).first);
    }
    /// Room for the gradients of a bucket on their way; null unless sums are in bf16.
    bf16* rounded_gradients() const { return rounded_gradients_; }
    /// What ranks read and write with collectives: whole buffers, of the same sizes on all ranks.
    /// None in a group of one.
    const std::vector<std::span<std::byte>>& exchanged() const { return exchanged_; }

    /// A range of one parameter whose update is this rank's: all of it, or what lies in this rank's
    /// shards. A piece begins at a multiple of norm_block of its tensor.
    struct Piece {
        int parameter = 0, bucket = 0;
        Range range;              // of the tensor's padded elements
        bf16* weights = nullptr;  // null in fp32, where the master is the weight
        float *master = nullptr, *gradient = nullptr;
        std::vector<char*> slots;  // in the order of slots(); null: the parameter has no such slot
        /// No earlier rank of the run updates the same elements, or a copy of them.
        bool is_first_copy = true;
    };
    /// In the order of the registry.
    const std::vector<Piece>& pieces() const { return pieces_; }
    std::span<const Piece> pieces_of(int i) const;
    /// The memory of a piece's master (state 0) or of slot `state` − 1; empty: it has no such slot.
    std::span<std::byte> memory_of(const Piece& piece, size_t state) const;

  private:
    void find_units();
    void allocate(Arena& arena);
    void find_pieces();
    int64_t elements_of(const OptimizerSlot& slot) const;
    /// Pieces lie one after the other, not where their elements lie in the flat buffers.
    bool is_packed(const OptimizerSlot& slot) const {
        return !slot.is_of_elements() || (sharding_.matrices && !slot.of_matrices);
    }
    /// Where the owned elements of a bucket lie in buffers that hold only such.
    int64_t owned_offset(const Bucket& bucket) const {
        return sharding_.is_split() ? layout_.shard_offset(bucket) : bucket.range.first;
    }
    char* at(void* weights, int64_t element) const {
        return static_cast<char*>(weights) + element * static_cast<int64_t>(size_of(dtype_));
    }
    bool has_large_head() const;
    /// The turn, 0 or 1, that a bucket takes, counted from the last bucket down. Buckets of unit 0
    /// take none.
    size_t turn_of(size_t bucket) const { return (layout_.buckets().size() - 1 - bucket) % turns; }
    bool is_embedding(size_t bucket) const { return layout_.buckets()[bucket].last_unit == 0; }

    std::vector<Parameter> parameters_;
    std::unordered_map<std::string, int> index_of_name_;
    DType dtype_;
    Use use_;
    Device device_;
    Sharding sharding_;
    BucketLayout layout_;
    std::vector<size_t> bucket_of_unit_;
    std::vector<Range> range_of_unit_;
    void* weights_ = nullptr;  // all; with ZeRO-3 the owned ones
    // With ZeRO-3, where weights are gathered.
    void *gathered_embedding_ = nullptr, *gathered_head_ = nullptr, *gathered_[turns] = {};
    std::vector<std::span<std::byte>> whole_weights_;
    // Owned elements; in fp32 the masters are the weights.
    float* master_ = nullptr;
    std::vector<OptimizerSlot> slots_;
    std::vector<void*> slot_memory_;
    float* gradient_ = nullptr;  // all; the owned ones where ranks reduce in every micro-batch
    std::vector<Piece> pieces_;

    // Where gradients of a micro-batch stand alone, and are reduced once in a step: a unit's.
    float* unit_gradients_ = nullptr;
    // Where ranks reduce in every micro-batch. Unit 0 has a separate buffer, since its
    // gradient is first written when the backward pass begins and last when it ends; the other
    // buckets take turns: one is reduced while the next is written.
    float* embedding_gradients_ = nullptr;
    float* block_gradients_[turns] = {};
    bf16* rounded_gradients_ = nullptr;

    std::vector<std::span<std::byte>> exchanged_;
};

}  // namespace train_gpt
