// The tensor axis: tensor parallelism with sequence parallelism (Korthikanti et al., arXiv
// 2205.05198). Its ranks share the products of each layer. Between the products, each rank has some
// of the tokens' rows.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/tensor.h"
#include "device/device.h"
#include "device/stream.h"
#include "parallel/communicator.h"
#include "parallel/mesh.h"
#include "parallel/range.h"
#include "parallel/size_problem.h"
#include "parallel/state/exchange.h"
#include "parallel/state/parameter.h"
#include "parallel/step_collectives.h"

namespace train_gpt {

/// A rank's place on the axis.
TensorRank tensor_rank(const MeshLayout& mesh, int rank);

/// A size of a model that tensor-parallel ranks share in equal parts, and the key that gives it. If
/// `multiple` is more than 1, parts are multiples of it, which are padded where the size ends, and
/// no rank has padding alone.
struct SharedSize {
    std::string_view key;
    int64_t size = 0, multiple = 1;

    bool operator==(const SharedSize&) const = default;
};

/// The first of these sizes that so many ranks cannot share, in words; nothing if they can share
/// all.
std::optional<SizeProblem> tensor_problem(const std::vector<SharedSize>& sizes, int ranks);
/// Throws Error if so many ranks cannot share one of these sizes. The message has the nearest
/// number of ranks that can share all.
void require_shared(const std::vector<SharedSize>& sizes, int ranks);

struct TensorOptions {
    TensorRank rank = {};
    /// Rows travel in so many chunks, each while products of other chunks run.
    int chunks = 1;
    /// The gathered inputs of products are kept for the backward pass instead of gathered again.
    bool keep_gathered = false;
};

/// The M rows of a micro-batch are cut into equal chunks, and each chunk into a strip for each
/// rank. A tensor of all rows has the rows in order; a tensor of a rank's rows has the rank's
/// strips in order.
class TensorGroup {
  public:
    /// A group of one, in which nothing moves.
    TensorGroup() = default;
    explicit TensorGroup(const TensorOptions& options) : options_(options) {}

    int rank() const { return options_.rank.rank; }
    int size() const { return options_.rank.ranks; }
    bool is_split() const { return size() > 1; }
    int chunks() const { return options_.chunks; }
    const TensorOptions& options() const { return options_; }

    /// How many of M rows this rank has.
    int64_t rows_of_rank(int64_t M) const { return M / size(); }
    /// Where the rows of a chunk are: `chunk` of all M rows; this rank's strip of it, as `strip` of
    /// all rows and as `held` of the rank's rows.
    struct Rows {
        Range chunk, strip, held;
    };
    Rows rows(int64_t M, int chunk) const;
    /// Whether M rows can be cut evenly; require_even() throws Error where not. `rows` says what
    /// they are, and `parts` how many ranks each have M of them.
    bool is_even(int64_t M) const { return M % (int64_t{size()} * chunks()) == 0; }
    void require_even(int64_t M, const char* rows, int parts = 1) const;

    /// With whom rows are exchanged. Before this call, as in a warm-up, copies of this rank's rows
    /// stand for the rows of other ranks. The time that the model's stream waits counts as
    /// communication of the tensor axis in `clock`. All ranks call it.
    void connect(const Device& device, Communicator& communicator, StepClock* clock = nullptr);
    bool is_connected() const { return exchange_ != nullptr; }
    /// Where rows travel; null before connect().
    const Exchange* exchange() const { return exchange_.get(); }

    /// A purpose for which chunks travel. Each lane's chunks are waited for separately.
    enum class Lane : uint8_t { inputs, gradients, sums, count };
    /// Gathers the ranks' strips of the chunk into `all` [M, C]. This rank's strip is in `held`
    /// [M / size, C]. If `held` is absent, the strip is already in its place in `all`.
    void gather(Stream& stream, Lane lane, Tensor all, Tensor held, int chunk);
    /// This rank's strip of the chunk in `held` becomes the sum of the ranks' rows in `all`, which
    /// are undefined afterwards.
    void add_up(Stream& stream, Tensor held, Tensor all, int chunk);
    /// Later work of the stream finds the chunk in place.
    void wait(Stream& stream, Lane lane, int chunk);
    void wait(Stream& stream, Lane lane);  // for all chunks

    /// out [size·n] = in [n] of all ranks, by rank, for later work of the stream; fp32.
    void gather_numbers(Stream& stream, float* out, const float* in, int64_t n);
    /// numbers[n], fp32, become their sums over the ranks, for later work of the stream.
    void add_up_numbers(Stream& stream, float* numbers, int64_t n);
    /// gradients[n], fp32 or int32, become their sums over the ranks. Later work finds all sums so
    /// far: after wait_gradients() the work of the model's stream, after hold_gradients() the work
    /// of another exchange.
    void add_up_gradients(Stream& stream, void* gradients, int64_t n, DType dtype);
    void wait_gradients(Stream& stream);
    void hold_gradients(Stream& exchange);

  private:
    int slot(Lane lane, int chunk) const { return static_cast<int>(lane) * chunks() + chunk; }
    int number_slot() const { return static_cast<int>(Lane::count) * chunks(); }
    int gradient_slot() const { return number_slot() + 1; }

    TensorOptions options_;
    Communicator* communicator_ = nullptr;
    std::unique_ptr<Exchange> exchange_;
};

/// Makes the group along the axis. Returns the exchanges of a micro-batch's rows, and of the sums
/// of norms over the whole width of q and k. At the end of the model, also returns the exchanges of
/// the softmax's statistics and of a token's logits.
std::vector<StepCollective> collectives_of_tensor(const Mesh& mesh, const StepSizes& sizes);

/// A micro-batch of `rows` tokens on `ranks` ranks, of a model of this width (n_embd).
struct TensorTraffic {
    int64_t rows = 0, ranks = 1, width = 0;
    DType dtype = DType::fp32;  // of activations
    bool recomputes_block = false, keep_gathered = false, halves_apart = false;
    // What the rank's stages have:
    int layers = 0;
    /// How many of these layers have norms of queries and keys over the whole width, which need two
    /// sums of each token.
    int layers_with_sums = 0;
    bool has_embedding = true, has_head = true;
};
/// The bytes that each rank sends, as Communicator counts them, for M rows of C elements of s bytes
/// on t ranks:
///
///   each exchange of all rows                           s·M·C·(t−1)/t
///   statistics of the softmax, on ranks with the head   12·M·(t−1)
///   sums of a norm over the whole width                 16·M·(t−1)/t, twice in a layer, or three
///                                                       times if blocks are recomputed
///
/// The embedding has an exchange in the forward and one in the backward pass, and so has the head.
/// A layer has so many:
///
///   forward pass    4   gathers the outputs of both norms; adds up the two products into the
///                       residual stream
///   backward pass   4   the same for gradients
///                   2   gathers the norms' outputs again, unless they are kept
///   recompute       3   exchanges of the forward pass again, if blocks are recomputed
///   halves apart    2   gathers both gradients of the residual stream a second time
///
/// The norms' outputs are kept with keep_gathered. Recomputing a block keeps them, too, unless the
/// halves of the backward pass are apart.
int64_t tensor_bytes_sent(const TensorTraffic& traffic);

}  // namespace train_gpt
