// Where the weights of a model, and in training their gradients and optimizer state, lie: addresses
// in flat buffers, which data parallelism splits over ranks (ZeRO: Rajbhandari et al., arXiv
// 1910.02054).
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/tensor.h"
#include "device/memory.h"
#include "parallel/state/bucket_layout.h"
#include "parallel/state/parameter.h"

namespace train_gpt {

/// How the state of a training run is split over ranks, and which rank this is.
struct Sharding {
    /// Among the ranks that the state is split over (shard × context; with stage 0, which splits
    /// nothing, all that gradients are summed over).
    int rank = 0, size = 1;
    /// Groups of such ranks, which hold the same: the gradients of all are added up.
    int replica = 0, replicas = 1;
    int tensor = 0, tensors = 1;  // tensor-parallel rank
    /// The pipeline rank, and whether the first and the last one hold the same embedding.
    int pipeline = 0, pipelines = 1;
    bool tied_ends = false;
    int world = 1;  // all ranks of the run, which add up the norm
    /// ZeRO's stage. 0: every rank updates everything. 1: masters and moments are split. 2:
    /// gradient sums as well; they are then reduced in every micro-batch. 3: weights as well; they
    /// are gathered bucket by bucket while a pass uses them.
    int zero = 1;
    int64_t bucket_elements = (int64_t{64} << 20) / 4;
    /// Of gradients on their way between ranks; sums in memory stay fp32.
    DType reduce_dtype = DType::fp32;
};

/// The registry of parameters and, in the flat buffers of a BucketLayout, their weights, and in
/// training fp32 masters, AdamW's moments and gradient sums. Of the optimizer's state a rank holds its
/// shard of each bucket, with ZeRO-2 of the gradient sums as well, and with ZeRO-3 of the weights. In
/// fp32 the weights are the masters.
///
/// With ZeRO-3, whole weights are in buffers that the ranks gather them into. Unit 0's, and a head's
/// that is larger than a block, have places of their own; the other buckets take turns in two
/// buffers, so that one is gathered while the one before it is used.
class ParameterBuffers {
  public:
    enum class Use { inference, training };
    /// The buffers in which buckets take turns.
    static constexpr size_t turns = 2;

    ParameterBuffers(Arena& arena, std::vector<Parameter> parameters, DType dtype, Use use,
                     const Sharding& sharding);

    const std::vector<Parameter>& parameters() const { return parameters_; }
    int index_of(const std::string& name) const;  // −1: no such parameter
    DType dtype() const { return dtype_; }
    bool training() const { return use_ == Use::training; }
    int units() const { return parameters_.back().unit + 1; }
    int64_t logical_numel() const;
    const Device& device() const { return device_; }
    const Sharding& sharding() const { return sharding_; }
    const BucketLayout& layout() const { return layout_; }
    /// The first bucket of a unit; only unit 0 may have several.
    size_t first_bucket(int unit) const { return bucket_of_unit_[static_cast<size_t>(unit)]; }
    /// The elements of a bucket that this rank updates.
    Range owned(const Bucket& bucket) const {
        return sharding_.zero == 0 ? bucket.range : layout_.shard_of(bucket, sharding_.rank);
    }

    /// Weight of parameter i in the compute dtype, padded shape. A model takes it from a lease
    /// (ParameterCollectives::acquire).
    Tensor weight(int i) const;
    /// Whether this rank's buffers always have all weights, not only while they are gathered.
    bool holds_all_weights() const { return sharding_.zero < 3; }
    /// The same for the whole model, not a stage or a tensor-parallel rank's part.
    bool holds_whole_model() const {
        return holds_all_weights() && sharding_.tensors == 1 && sharding_.pipelines == 1;
    }
    /// The weights of a bucket; with ZeRO-3 where they are gathered.
    char* bucket_weights(size_t bucket) const;
    /// Those of them that this rank updates.
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

    /// Where the gradients of a bucket, and of a parameter, are written in a micro-batch.
    float* bucket_gradients(size_t bucket) const;
    float* gradient_of_micro_batch(int i) const;
    /// From ZeRO-2 on, the buffer, 0 or 1, in which gradients of a bucket take turns with those of
    /// others; −1: they have their own place.
    int turn_of_gradients(size_t bucket) const {
        return is_embedding(bucket) ? -1 : static_cast<int>(turn_of(bucket));
    }
    /// From ZeRO-2 on: the sums over micro-batches of the elements of a bucket that are this rank's.
    float* owned_gradients(const Bucket& bucket) const { return gradient_ + owned_offset(bucket); }
    /// Room for the gradients of a bucket on their way; null unless reduce_dtype is bf16.
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
        float *master = nullptr, *m = nullptr, *v = nullptr, *gradient = nullptr;
    };
    /// In the order of the registry.
    const std::vector<Piece>& pieces() const { return pieces_; }
    std::span<const Piece> pieces_of(int i) const;

  private:
    void find_buckets();
    void allocate(Arena& arena);
    void find_pieces();
    /// Where the owned elements of a bucket lie in buffers that hold only such.
    int64_t owned_offset(const Bucket& bucket) const {
        return sharding_.zero == 0 ? bucket.range.first : layout_.shard_offset(bucket);
    }
    char* at(void* weights, int64_t element) const {
        return static_cast<char*>(weights) + element * static_cast<int64_t>(size_of(dtype_));
    }
    bool has_large_head() const;
    /// The two turns that buckets take from the last one down, but not unit 0's.
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
    void* weights_ = nullptr;  // all; with ZeRO-3 the owned ones
    // With ZeRO-3, where weights are gathered.
    void *gathered_embedding_ = nullptr, *gathered_head_ = nullptr, *gathered_[turns] = {};
    std::vector<std::span<std::byte>> whole_weights_;
    // Owned elements; in fp32 the masters are the weights.
    float *master_ = nullptr, *m_ = nullptr, *v_ = nullptr;
    float* gradient_ = nullptr;  // all; from ZeRO-2 on the owned ones
    std::vector<Piece> pieces_;

    // From ZeRO-2 on: gradients of a micro-batch. Unit 0 has a separate buffer, since its gradient is first
    // written when the backward pass begins and last when it ends; the other buckets take turns: one
    // is reduced while the next is written.
    float* embedding_gradients_ = nullptr;
    float* block_gradients_[turns] = {};
    bf16* rounded_gradients_ = nullptr;

    std::vector<std::span<std::byte>> exchanged_;
};

}  // namespace train_gpt
