// Tensor parallelism with sequence parallelism (Korthikanti et al., arXiv 2205.05198) as a model
// sees it: the ranks that share each layer's products. Between the products, each of them has some
// of the tokens' rows.
#pragma once
#include <memory>

#include "base/tensor.h"
#include "device/device.h"
#include "device/stream.h"
#include "parallel/communicator.h"
#include "parallel/range.h"
#include "parallel/state/exchange.h"
#include "parallel/state/parameter.h"

namespace train_gpt {

struct TensorOptions {
    TensorRank rank = {};
    /// Rows travel in so many chunks, each while products of other chunks run.
    int chunks = 1;
    /// The gathered inputs of products are kept for the backward pass instead of gathered again.
    bool keep_gathered = false;
};

/// The M rows of a micro-batch are cut into equal chunks, and each chunk into a strip for each
/// rank. A tensor of all rows has them in order; one of a rank's rows has its strips in order.
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

    /// Of M rows, this rank's.
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

    /// With whom rows are exchanged. Before, as in a warm-up, copies of this rank's rows stand for
    /// those of the others. What the model's stream waits for counts as communication of the
    /// tensor axis in `clock`. All ranks call it.
    void connect(const Device& device, Communicator& communicator, StepClock* clock = nullptr);
    bool is_connected() const { return exchange_ != nullptr; }
    /// Where rows travel; null before connect().
    const Exchange* exchange() const { return exchange_.get(); }

    /// Chunks that travel for one purpose are waited for apart from those of another.
    enum class Lane : uint8_t { inputs, gradients, sums, count };
    /// The chunk's rows of `all` [M, C] become those of the ranks' strips; this rank's are in
    /// `held` [M / size, C], or if that is absent, in their place in `all`.
    void gather(Stream& stream, Lane lane, Tensor all, Tensor held, int chunk);
    /// This rank's strip of the chunk in `held` becomes the sum of the ranks' rows in `all`, which
    /// are undefined afterwards.
    void add_up(Stream& stream, Tensor held, Tensor all, int chunk);
    /// Later work of the stream finds the chunk in place.
    void wait(Stream& stream, Lane lane, int chunk);
    void wait(Stream& stream, Lane lane);  // for all chunks

    /// out [size·n] = in [n] of all ranks, by rank, for later work of the stream; fp32.
    void gather_numbers(Stream& stream, float* out, const float* in, int64_t n);
    /// gradients[n] become their sums over the ranks. wait_gradients() makes later work of the
    /// model's stream find all sums so far, and hold_gradients() that of another exchange.
    void add_up_gradients(Stream& stream, float* gradients, int64_t n);
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

}  // namespace train_gpt
