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
#include "parallel/bucket_layout.h"
#include "parallel/parameter.h"

namespace train_gpt {

/// How the state of a training run is split over ranks, and which rank this is.
struct Sharding {
    /// Among the ranks that gradients are summed over (data × context), which split the state.
    int rank = 0, size = 1;
    int tensor = 0, tensors = 1;  // tensor-parallel rank
    int world = 1;                // all ranks of the run, which add up the norm
    /// ZeRO's stage. 0: every rank updates everything. 1: masters and moments are split. 2:
    /// gradient sums as well; they are then reduced in every micro-batch.
    int zero = 1;
    int64_t bucket_elements = (int64_t{64} << 20) / 4;
    /// Of gradients on their way between ranks; sums in memory stay fp32.
    DType reduce_dtype = DType::fp32;
};

/// The registry of parameters and, in the flat buffers of a BucketLayout, their weights, and in
/// training fp32 masters, AdamW's moments and gradient sums. Every rank holds all weights; of the
/// optimizer's state, and with ZeRO-2 of the gradient sums, it holds its shard of each bucket. In
/// fp32 the weights are the masters.
class ParameterBuffers {
  public:
    enum class Use { inference, training };

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
    /// Of an element of the layout.
    char* weight_address(int64_t element) const {
        return static_cast<char*>(weights_) + element * static_cast<int64_t>(size_of(dtype_));
    }

    /// Where the gradients of a bucket, and of a parameter, are written in a micro-batch.
    float* bucket_gradients(size_t bucket) const;
    float* gradient_of_micro_batch(int i) const;
    /// ZeRO-2: the sums over micro-batches of the elements of a bucket that are this rank's.
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

    std::vector<Parameter> parameters_;
    std::unordered_map<std::string, int> index_of_name_;
    DType dtype_;
    Use use_;
    Device device_;
    Sharding sharding_;
    BucketLayout layout_;
    std::vector<size_t> bucket_of_unit_;
    void* weights_ = nullptr;  // all
    // Owned elements; in fp32 the masters are the weights.
    float *master_ = nullptr, *m_ = nullptr, *v_ = nullptr;
    float* gradient_ = nullptr;  // all; with ZeRO-2 the owned ones
    std::vector<Piece> pieces_;

    // ZeRO-2: gradients of a micro-batch. Unit 0 has a separate buffer, since its gradient is first
    // written when the backward pass begins and last when it ends; the buckets of blocks take
    // turns: one is reduced while the next is written.
    static constexpr size_t turns = 2;
    float* embedding_gradients_ = nullptr;
    float* block_gradients_[turns] = {};
    bf16* rounded_gradients_ = nullptr;

    std::vector<std::span<std::byte>> exchanged_;
};

}  // namespace train_gpt
