#include "training/plan/step_simulation.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace train_gpt {

namespace {

constexpr double never = std::numeric_limits<double>::infinity();

class StepSimulation {
  public:
    StepSimulation(const StepWork& work, bool keep_spans)
        : work_(work),
          keeps_(keep_spans),
          m_(static_cast<size_t>(work.schedule.shape.micro_batches)),
          ranks_(work.ranks.size()),
          activations_(static_cast<size_t>(work.schedule.stages) * m_, never),
          gradients_(activations_) {
        for (size_t r = 0; r < ranks_.size(); ++r) begin(r);
    }

    SimulatedStep run() {
        // A rank runs until it must wait for another one.
        for (bool any = true; any;) {
            any = false;
            for (size_t r = 0; r < ranks_.size(); ++r)
                while (ranks_[r].next < actions(r).size() && execute(r, actions(r)[ranks_[r].next]))
                    ++ranks_[r].next, any = true;
        }
        return result();
    }

  private:
    using Kind = SimulatedSpan::Kind;
    struct Rank {
        size_t next = 0;
        double time = 0, exchanges_end = 0, messages_end = 0, waited = 0;
        std::vector<std::vector<double>> gathered;  // when the weights of a stage's units are there
        double unit_start = 0;                      // of the last unit that was computed
        std::vector<SimulatedSpan> spans;
    };

    const std::vector<PipelineAction>& actions(size_t r) const {
        return work_.schedule.ranks[r].actions;
    }
    size_t at(int stage, int micro_batch) const {
        return static_cast<size_t>(stage) * m_ + static_cast<size_t>(micro_batch);
    }
    void keep(Rank& rank, Kind kind, int number, double start, double end) const {
        if (keeps_ && end > start) rank.spans.push_back({kind, number, start, end});
    }

    /// Queues an exchange that may start at `ready`; returns when it ends.
    double exchange(Rank& rank, Kind kind, int number, double ready, double seconds) {
        if (seconds == 0) return ready;
        const double start = std::max(rank.exchanges_end, ready);
        rank.exchanges_end = start + seconds;
        keep(rank, kind, number, start, rank.exchanges_end);
        return rank.exchanges_end;
    }

    /// The update before this step has ended, and its weights are on their way.
    void begin(size_t r) {
        Rank& rank = ranks_[r];
        int number = 0;
        for (const std::vector<UnitWork>& stage : work_.ranks[r].stages) {
            rank.gathered.emplace_back();
            for (const UnitWork& unit : stage) {
                double there = 0;
                if (!work_.gathers_each)
                    there = exchange(rank, Kind::gather, number, 0, unit.gather);
                rank.gathered.back().push_back(there);
                ++number;
            }
        }
    }

    bool execute(size_t r, const PipelineAction& action) {
        Rank& rank = ranks_[r];
        const bool activation = action.work == PipelineWork::send_activation;
        if (is_send(action.work)) {
            const double start = std::max(rank.messages_end, rank.time);
            rank.messages_end = start + work_.send;
            const int to = action.stage + (activation ? 1 : -1);
            (activation ? activations_ : gradients_)[at(to, action.micro_batch)] =
                rank.messages_end;
            keep(rank, Kind::send, action.micro_batch, start, rank.messages_end);
            return true;
        }
        if (!is_compute(action.work)) return true;  // a receive: the pass that reads it waits
        const bool forward = action.work == PipelineWork::forward;
        const bool at_end = action.stage == (forward ? 0 : work_.schedule.stages - 1);
        if (action.work != PipelineWork::backward_weights && !at_end) {
            const double arrival =
                (forward ? activations_ : gradients_)[at(action.stage, action.micro_batch)];
            if (arrival == never) return false;
            if (arrival > rank.time) {
                keep(rank, Kind::wait, action.micro_batch, rank.time, arrival);
                rank.waited += arrival - rank.time;
                rank.time = arrival;
            }
        }
        pass(r, action);
        return true;
    }

    void pass(size_t r, const PipelineAction& action) {
        const auto stage =
            static_cast<size_t>(action.stage) / static_cast<size_t>(work_.schedule.shape.ranks);
        const std::vector<UnitWork>& units = work_.ranks[r].stages[stage];
        int before = 0;  // units of this rank's stages before
        for (size_t s = 0; s < stage; ++s)
            before += static_cast<int>(work_.ranks[r].stages[s].size());
        const bool forward = action.work == PipelineWork::forward,
                   gradients = action.work == PipelineWork::backward ||
                               action.work == PipelineWork::backward_weights,
                   last = static_cast<size_t>(action.micro_batch) + 1 == m_;
        Rank& rank = ranks_[r];
        const bool gathers = work_.gathers_each && action.work != PipelineWork::backward_weights;
        const auto unit_at = [&](size_t i) { return forward ? i : units.size() - 1 - i; };
        const auto gather = [&](size_t i, double at) {
            const size_t u = unit_at(i);
            return exchange(rank, Kind::gather, before + static_cast<int>(u), at, units[u].gather);
        };
        double next_there = gathers ? gather(0, rank.unit_start) : 0;
        for (size_t i = 0; i < units.size(); ++i) {
            const size_t u = unit_at(i);
            const UnitWork& unit = units[u];
            const int number = before + static_cast<int>(u);
            const double ready = gathers ? next_there : rank.gathered[stage][u];
            const double start = std::max(rank.time, ready);
            keep(rank, Kind::wait, number, rank.time, start);
            rank.unit_start = start;
            // The next unit's weights come while this one computes.
            if (gathers && i + 1 < units.size()) next_there = gather(i + 1, start);
            const double alone = seconds(unit, action.work),
                         beside = std::clamp(rank.exchanges_end - start, 0.0, alone);
            rank.time = start + alone + work_.beside_exchanges * beside;
            keep(rank, kind_of(action.work), number, start, rank.time);
            if (gradients)
                exchange(rank, Kind::reduce, number, rank.time,
                         unit.reduce_each + (last ? unit.reduce_once : 0));
        }
    }

    static double seconds(const UnitWork& unit, PipelineWork work) {
        switch (work) {
            case PipelineWork::forward:
                return unit.forward.sum();
            case PipelineWork::backward:
                return unit.backward_inputs.sum() + unit.backward_weights.sum();
            case PipelineWork::backward_inputs:
                return unit.backward_inputs.sum();
            default:
                return unit.backward_weights.sum();
        }
    }
    static Kind kind_of(PipelineWork work) {
        switch (work) {
            case PipelineWork::forward:
                return Kind::forward;
            case PipelineWork::backward:
                return Kind::backward;
            case PipelineWork::backward_inputs:
                return Kind::backward_inputs;
            default:
                return Kind::backward_weights;
        }
    }

    SimulatedStep result() {
        SimulatedStep step;
        double computed = 0, waited = 0;
        for (size_t r = 0; r < ranks_.size(); ++r) {
            if (ranks_[r].next < actions(r).size())
                throw Error("the pipeline schedule deadlocks at rank ", r);
            computed = std::max({computed, ranks_[r].time, ranks_[r].exchanges_end});
        }
        // The norm of all gradients is known when the last rank has them.
        for (size_t r = 0; r < ranks_.size(); ++r) {
            const RankWork& work = work_.ranks[r];
            const double start = computed + work.sums, end = start + work.optimizer + work.offload;
            step.seconds = std::max(step.seconds, end);
            waited += ranks_[r].waited;
            keep(ranks_[r], Kind::optimizer, 0, start, end);
        }
        step.bubble = step.seconds > 0 ? (waited + trailing()) /
                                             (step.seconds * static_cast<double>(ranks_.size()))
                                       : 0;
        double last = 0;
        for (const Rank& rank : ranks_) last = std::max(last, rank.time);
        for (const Rank& rank : ranks_)
            step.waited.push_back(work_.factor * (rank.waited + last - rank.time));
        step.seconds *= work_.factor;
        for (Rank& rank : ranks_) {
            for (SimulatedSpan& span : rank.spans)
                span.begin *= work_.factor, span.end *= work_.factor;
            step.spans.push_back(std::move(rank.spans));
        }
        return step;
    }

    /// The time in which ranks have computed all and others have not.
    double trailing() const {
        double last = 0, sum = 0;
        for (const Rank& rank : ranks_) last = std::max(last, rank.time);
        for (const Rank& rank : ranks_) sum += last - rank.time;
        return sum;
    }

    const StepWork& work_;
    bool keeps_;
    size_t m_;
    std::vector<Rank> ranks_;
    std::vector<double> activations_, gradients_;  // arrivals, by stage and micro-batch
};

}  // namespace

SimulatedStep simulate_step(const StepWork& work, bool keep_spans) {
    return StepSimulation(work, keep_spans).run();
}

}  // namespace train_gpt
