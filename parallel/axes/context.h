// The context axis: its ranks share each sequence, and gather the keys and values of all ranks in
// every layer.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/tensor.h"
#include "device/device.h"
#include "device/stream.h"
#include "parallel/communicator.h"
#include "parallel/mesh.h"
#include "parallel/size_problem.h"
#include "parallel/state/exchange.h"
#include "parallel/step_collectives.h"

namespace train_gpt {

/// A place among context-parallel ranks. A sequence of T tokens is cut into 2·ranks chunks, of
/// which rank r has chunk r and chunk 2·ranks − 1 − r, one after the other in its memory: so all
/// ranks have the same number of pairs of a query and a key that it sees (Grattafiori et al., arXiv
/// 2407.21783).
struct ContextRank {
    int rank = 0, ranks = 1;

    bool is_split() const { return ranks > 1; }
    int chunk_length(int T) const { return T / (2 * ranks); }
    /// Where chunk 0 or 1 of a rank begins in a sequence of T tokens.
    int first_position(int of_rank, int chunk, int T) const {
        return (chunk == 0 ? of_rank : 2 * ranks - 1 - of_rank) * chunk_length(T);
    }
    int first_position(int chunk, int T) const { return first_position(rank, chunk, T); }
    /// The rank that has a position, and which of its tokens of the sequence that is.
    std::pair<int, int64_t> place_of(int64_t position, int T) const {
        if (!is_split()) return {0, position};
        const int64_t length = chunk_length(T), in_chunk = position % length;
        const int chunk = static_cast<int>(position / length);
        return chunk < ranks ? std::pair{chunk, in_chunk}
                             : std::pair{2 * ranks - 1 - chunk, length + in_chunk};
    }
};

/// A rank's place on the axis.
ContextRank context_rank(const MeshLayout& mesh, int rank);

/// Why so many ranks cannot share sequences of `length` tokens, which this key gives; nothing if
/// they can.
std::optional<SizeProblem> context_problem(const char* key, int64_t length, int ranks);

class ContextGroup {
  public:
    /// A group of one, in which nothing moves.
    ContextGroup() = default;
    explicit ContextGroup(const ContextRank& place) : place_(place) {}

    const ContextRank& place() const { return place_; }
    int rank() const { return place_.rank; }
    int size() const { return place_.ranks; }
    bool is_split() const { return place_.is_split(); }

    /// With whom the model exchanges data. Before this call, as in a warm-up, copies of this rank's
    /// data stand for the data of other ranks. The time that the model's stream waits counts as
    /// communication of the context axis in `clock`. tensor: where tensor-parallel ranks exchange
    /// data; null if there are none. All ranks call it.
    void connect(const Device& device, Communicator& communicator, StepClock* clock = nullptr,
                 const Exchange* tensor = nullptr);
    bool is_connected() const { return exchange_ != nullptr; }

    // In place, for later work of the stream. `all` has an equal part for each rank, by rank.
    /// Afterwards, each part has what its rank had there.
    void gather(Stream& stream, Tensor all);
    /// This rank's part becomes the sum over the ranks. The other parts are undefined afterwards.
    void add_up(Stream& stream, Tensor all);
    void broadcast(Stream& stream, Tensor data, int from);

  private:
    template <class Work>
    void exchange(Stream& stream, const Work& work);
    Tensor part(const Tensor& all, int rank) const;

    ContextRank place_;
    Communicator* communicator_ = nullptr;
    std::unique_ptr<Exchange> exchange_;
};

/// Makes the group along the axis. Returns the exchanges of keys, values and their gradients, the
/// gathers of experts' counts, and at the end of the model the exchange of a token's logits.
std::vector<StepCollective> collectives_of_context(const Mesh& mesh, const StepSizes& sizes);

/// The bytes that each rank sends for a micro-batch in a layer, as Communicator counts them:
///
///   keys and values in the forward pass              s·n·(c−1)/c
///   keys and values in the backward pass, or in
///   recomputation, after which they are still here   s·n·(c−1)/c
///   gradients of keys and values, in fp32            4·n·(c−1)/c
///
///   c   `ranks`
///   n   `elements` of the keys and values on all ranks: B·T·2·H_kv·D, for B sequences of T tokens
///   s   bytes of an element in `dtype`
int64_t context_bytes_sent(int64_t elements, DType dtype, int ranks);

/// The bytes that each rank sends to gather the counts of experts in a layer, for a balance loss:
/// 4·counts·(ranks−1). counts: on one rank, B·E for B sequences and E experts.
int64_t counts_bytes_sent(int64_t counts, int ranks);

}  // namespace train_gpt
