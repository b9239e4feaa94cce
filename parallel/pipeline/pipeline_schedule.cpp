#include "parallel/pipeline/pipeline_schedule.h"

#include <algorithm>
#include <cassert>

#include "base/error.h"

namespace train_gpt {

namespace {

void check(const PipelineShape& shape) {
    if (shape.ranks < 1 || shape.micro_batches < 1 || shape.stages_per_rank < 1)
        throw Error("a pipeline of ", shape.ranks, " ranks with ", shape.stages_per_rank,
                    " stages each and ", shape.micro_batches,
                    " micro-batches per step is impossible: each must be at least 1");
    const bool interleaved = shape.kind == PipelineKind::interleaved;
    if (!interleaved && shape.stages_per_rank != 1)
        throw Error("the pipeline schedule \"", name_of(shape.kind),
                    "\" has one stage per rank, not ", shape.stages_per_rank,
                    "; set parallel.stages_per_rank to 1 or parallel.schedule to \"interleaved\"");
    if (interleaved && shape.ranks > 1 && shape.stages_per_rank < 2)
        throw Error(
            "the pipeline schedule \"interleaved\" needs at least 2 stages per rank; set "
            "parallel.stages_per_rank to 2 or more, or parallel.schedule to \"1f1b\"");
    if (interleaved && shape.micro_batches % shape.ranks != 0)
        throw Error("the pipeline schedule \"interleaved\" cannot run ", shape.micro_batches,
                    " micro-batches on ", shape.ranks, " pipeline ranks: it needs a multiple of ",
                    shape.ranks,
                    "; change the number of micro-batches per step, or set parallel.schedule to "
                    "\"1f1b\"");
}

/// Forwards of a rank before its first backward, without the one that both follow.
int forwards_ahead(const PipelineShape& shape, int rank) {
    const int after = shape.ranks - rank - 1;
    switch (shape.kind) {
        case PipelineKind::gpipe:
            return shape.micro_batches;
        case PipelineKind::interleaved:
            return 2 * after + (shape.stages_per_rank - 1) * shape.ranks;
        case PipelineKind::one_f_one_b:
        case PipelineKind::zero_bubble:
            return after;
    }
    return 0;
}

/// What a rank computes, in order.
std::vector<PipelineAction> computes_of(const PipelineShape& shape, int rank) {
    const int p = shape.ranks, v = shape.stages_per_rank, n = shape.micro_batches * v;
    std::vector<PipelineAction> order;
    // Each of the rank's stages takes p micro-batches in turn.
    const auto add = [&](PipelineWork work, int k) {
        const int turn = k / p % v;
        const int stage = work == PipelineWork::forward ? turn : v - 1 - turn;
        order.push_back(
            {.work = work, .micro_batch = k / (p * v) * p + k % p, .stage = stage * p + rank});
    };
    const bool apart = shape.kind == PipelineKind::zero_bubble;
    const int ahead = std::min(forwards_ahead(shape, rank), n);
    // ZB-H1: the later the rank, the longer are weight gradients kept back, since it has fewer
    // activations in flight. They fill the time in which the last backwards pass through the ranks.
    const int kept_back = std::min(rank, n);
    for (int k = 0; k < n + ahead; ++k) {
        if (k < n) add(PipelineWork::forward, k);
        const int b = k - ahead;
        if (b < 0) continue;
        add(apart ? PipelineWork::backward_inputs : PipelineWork::backward, b);
        if (apart && b >= kept_back) add(PipelineWork::backward_weights, b - kept_back);
    }
    for (int k = n - kept_back; apart && k < n; ++k) add(PipelineWork::backward_weights, k);
    return order;
}

/// Numbers that are taken and given back; the lowest free one is next.
class Numbers {
  public:
    int take() {
        const auto free = std::find(taken_.begin(), taken_.end(), false);
        const auto number = free - taken_.begin();
        if (free == taken_.end())
            taken_.push_back(true);
        else
            *free = true;
        return static_cast<int>(number);
    }
    void give_back(int number) { taken_[static_cast<size_t>(number)] = false; }
    int most() const { return static_cast<int>(taken_.size()); }

  private:
    std::vector<bool> taken_;
};

/// Runs the computes of all ranks in ticks, one for each forward and each half of backward, and
/// writes the ranks' lists. A message is written into the lists of its two ranks in the tick in
/// which it was computed.
class ListWriter {
  public:
    explicit ListWriter(const PipelineShape& shape) {
        schedule_.shape = shape;
        schedule_.stages = shape.ranks * shape.stages_per_rank;
        schedule_.halves_apart = shape.kind == PipelineKind::zero_bubble;
        for (int rank = 0; rank < shape.ranks; ++rank)
            ranks_.push_back({.computes = computes_of(shape, rank)});
        schedule_.ranks.resize(ranks_.size());
        slots_.resize(static_cast<size_t>(schedule_.stages));
        places_.resize(slots_.size() * static_cast<size_t>(shape.micro_batches));
    }

    PipelineSchedule write() {
        size_t finished = 0;
        for (int tick = 0; finished < ranks_.size(); ++tick) {
            // Everything that ends in this tick is free for the messages that follow.
            for (RankState& rank : ranks_)
                if (rank.runs && rank.ends == tick) release(rank);
            for (RankState& rank : ranks_)
                if (rank.runs && rank.ends == tick) send_output(rank), rank.runs = false;
            finished = 0;
            bool any_runs = false;
            for (size_t i = 0; i < ranks_.size(); ++i) {
                if (!ranks_[i].runs) start_next(i, tick);
                finished += !ranks_[i].runs && ranks_[i].next == ranks_[i].computes.size();
                any_runs |= ranks_[i].runs;
            }
            assert(any_runs || finished == ranks_.size());
        }
        for (size_t i = 0; i < ranks_.size(); ++i) {
            schedule_.ranks[i].activation_buffers = ranks_[i].activations.most();
            schedule_.ranks[i].gradient_buffers = ranks_[i].gradients.most();
        }
        for (const Numbers& slots : slots_) schedule_.slots.push_back(slots.most());
        return std::move(schedule_);
    }

  private:
    struct RankState {
        std::vector<PipelineAction> computes;
        size_t next = 0;
        bool runs = false;  // computes[next − 1], until the tick `ends`
        int ends = 0;
        Numbers activations = {}, gradients = {};  // buffers
    };
    /// Where a stage has a micro-batch.
    struct Place {
        int slot = -1, activation = -1, gradient = -1;
    };

    Numbers& slots_of(const PipelineAction& action) {
        return slots_[static_cast<size_t>(action.stage)];
    }
    Place& place(int stage, int micro_batch) {
        return places_[static_cast<size_t>(stage) *
                           static_cast<size_t>(schedule_.shape.micro_batches) +
                       static_cast<size_t>(micro_batch)];
    }
    RankState& rank_with(int stage) {
        return ranks_[static_cast<size_t>(schedule_.rank_of(stage))];
    }
    void append(const PipelineAction& action) {
        schedule_.ranks[static_cast<size_t>(schedule_.rank_of(action.stage))].actions.push_back(
            action);
    }

    void start_next(size_t i, int tick) {
        RankState& rank = ranks_[i];
        if (rank.next == rank.computes.size()) return;
        PipelineAction& action = rank.computes[rank.next];
        Place& here = place(action.stage, action.micro_batch);
        const bool forward = action.work == PipelineWork::forward;
        if (action.work != PipelineWork::backward_weights) {
            const bool at_end = action.stage == (forward ? 0 : schedule_.stages - 1);
            action.buffer = forward ? here.activation : here.gradient;
            if (!at_end && action.buffer < 0) return;  // has not arrived
        }
        if (forward) here.slot = slots_of(action).take();
        action.slot = here.slot;
        append(action);
        rank.ends = tick + (action.work == PipelineWork::backward ? 2 : 1);
        rank.runs = true;
        ++rank.next;
    }

    void release(RankState& rank) {
        const PipelineAction& action = rank.computes[rank.next - 1];
        if (action.buffer >= 0)
            (action.work == PipelineWork::forward ? rank.activations : rank.gradients)
                .give_back(action.buffer);
        if (action.work == PipelineWork::backward || action.work == PipelineWork::backward_weights)
            slots_of(action).give_back(action.slot);
    }

    void send_output(const RankState& rank) {
        const auto& [work, micro_batch, from, slot, buffer] = rank.computes[rank.next - 1];
        if (work == PipelineWork::backward_weights) return;
        const bool forward = work == PipelineWork::forward;
        const int to = forward ? from + 1 : from - 1;
        if (to < 0 || to == schedule_.stages) return;
        append({.work = forward ? PipelineWork::send_activation : PipelineWork::send_gradient,
                .micro_batch = micro_batch,
                .stage = from});
        RankState& receiver = rank_with(to);
        const int at = (forward ? receiver.activations : receiver.gradients).take();
        Place& there = place(to, micro_batch);
        (forward ? there.activation : there.gradient) = at;
        append({.work = forward ? PipelineWork::receive_activation : PipelineWork::receive_gradient,
                .micro_batch = micro_batch,
                .stage = to,
                .buffer = at});
    }

    PipelineSchedule schedule_;
    std::vector<RankState> ranks_;
    std::vector<Numbers> slots_;  // of each stage
    std::vector<Place> places_;
};

}  // namespace

const char* name_of(PipelineKind kind) {
    switch (kind) {
        case PipelineKind::gpipe:
            return "gpipe";
        case PipelineKind::one_f_one_b:
            return "1f1b";
        case PipelineKind::interleaved:
            return "interleaved";
        case PipelineKind::zero_bubble:
            return "zero_bubble";
    }
    return "";
}

bool holds_all_micro_batches(PipelineKind kind) { return kind == PipelineKind::gpipe; }

double idle_micro_batches(PipelineKind kind, int ranks, int stages_per_rank) {
    const double of_one_stage = ranks - 1;
    switch (kind) {
        case PipelineKind::interleaved:
            return of_one_stage / stages_per_rank;
        case PipelineKind::zero_bubble:
            return of_one_stage / 3;
        case PipelineKind::gpipe:
        case PipelineKind::one_f_one_b:
            return of_one_stage;
    }
    return 0;
}

std::vector<int> PipelineSchedule::stages_of(int rank) const {
    std::vector<int> own;
    for (int stage = 0; stage < stages; ++stage)
        if (rank_of(stage) == rank) own.push_back(stage);
    return own;
}

int PipelineSchedule::peer_of(const PipelineAction& action) const {
    const bool later = action.work == PipelineWork::send_activation ||
                       action.work == PipelineWork::receive_gradient;
    assert(!is_compute(action.work));
    return rank_of(later ? action.stage + 1 : action.stage - 1);
}

PipelineSchedule pipeline_schedule(const PipelineShape& shape) {
    check(shape);
    // A plan asks for the same one for each rank and each level of recomputation.
    thread_local PipelineShape last_shape;
    thread_local PipelineSchedule last;
    if (last.ranks.empty() || last_shape != shape) {
        last_shape = shape;
        last = shape.ranks > 1
                   ? ListWriter(shape).write()
                   : ListWriter({.ranks = 1, .micro_batches = shape.micro_batches}).write();
    }
    return last;
}

}  // namespace train_gpt
