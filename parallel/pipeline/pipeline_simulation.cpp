#include "parallel/pipeline/pipeline_simulation.h"

#include <algorithm>
#include <cassert>
#include <deque>
#include <limits>
#include <optional>
#include <string>

#include "base/error.h"

namespace train_gpt {

namespace {

const char* verb_of(PipelineWork work) {
    switch (work) {
        case PipelineWork::forward:
            return "the forward";
        case PipelineWork::backward:
            return "the backward";
        case PipelineWork::backward_inputs:
            return "the backward of the inputs";
        case PipelineWork::backward_weights:
            return "the backward of the weights";
        case PipelineWork::send_activation:
            return "sending the activations";
        case PipelineWork::receive_activation:
            return "receiving the activations";
        case PipelineWork::send_gradient:
            return "sending the gradients";
        case PipelineWork::receive_gradient:
            return "receiving the gradients";
    }
    return "";
}

std::string described(const PipelineAction& action) {
    return concat(verb_of(action.work), " of micro-batch ", action.micro_batch, " in stage ",
                  action.stage);
}

bool is_activation(PipelineWork work) {
    return work == PipelineWork::send_activation || work == PipelineWork::receive_activation;
}

class Simulation {
  public:
    Simulation(const PipelineSchedule& schedule, const PipelineTimes& times,
               PipelineTransport transport)
        : schedule_(schedule), times_(times), transport_(transport), ranks_(schedule.ranks.size()) {
        assert(times.stages.size() == static_cast<size_t>(schedule.stages));
        links_.resize(ranks_.size() * ranks_.size());
        messages_.resize(2 * static_cast<size_t>(schedule.stages) *
                         static_cast<size_t>(schedule.shape.micro_batches));
        timeline_.computes.resize(ranks_.size());
    }

    PipelineTimeline run() {
        // A rank runs until it must wait for another one.
        for (bool any = true; any;) {
            any = false;
            for (size_t r = 0; r < ranks_.size(); ++r)
                while (const PipelineAction* action = next_of(r)) {
                    if (!execute(r, *action)) break;
                    any = true;
                }
        }
        refuse_unfinished();
        add_totals();
        return std::move(timeline_);
    }

  private:
    struct RankState {
        size_t next = 0;
        double time = 0;
    };
    /// What one rank sends to another.
    struct Link {
        std::deque<PipelineAction> sent, awaited;  // not yet matched
        double free = 0;
    };
    struct Message {
        bool received = false;               // its receive was reached
        std::optional<double> arrival = {};  // once it was sent
    };

    const PipelineAction* next_of(size_t rank) const {
        const std::vector<PipelineAction>& actions = schedule_.ranks[rank].actions;
        return ranks_[rank].next < actions.size() ? &actions[ranks_[rank].next] : nullptr;
    }
    /// The message with the input of a stage, or with the gradient of its output.
    Message& message_to(int stage, int micro_batch, bool activation) {
        const auto at =
            static_cast<size_t>(stage) * static_cast<size_t>(schedule_.shape.micro_batches) +
            static_cast<size_t>(micro_batch);
        return messages_[2 * at + activation];
    }
    Message& message_of(const PipelineAction& action) {
        const bool activation = is_activation(action.work);
        const int after_send = activation ? 1 : -1;
        return message_to(action.stage + (is_send(action.work) ? after_send : 0),
                          action.micro_batch, activation);
    }

    /// False if the rank must wait.
    bool execute(size_t r, const PipelineAction& action) {
        if (is_compute(action.work)) return compute(r, action);
        return transport_ == PipelineTransport::blocking ? meet(r, action) : post(r, action);
    }

    bool compute(size_t r, const PipelineAction& action) {
        RankState& rank = ranks_[r];
        double start = rank.time;
        const bool forward = action.work == PipelineWork::forward;
        const bool at_end = action.stage == (forward ? 0 : schedule_.stages - 1);
        if (action.work != PipelineWork::backward_weights && !at_end) {
            const Message& input = message_to(action.stage, action.micro_batch, forward);
            if (!input.received || !input.arrival) return false;
            start = std::max(start, *input.arrival);
        }
        rank.time = start + duration(action);
        ++rank.next;
        timeline_.computes[r].push_back({action, start, rank.time});
        return true;
    }

    double duration(const PipelineAction& action) const {
        const StageTimes& times = times_.stages[static_cast<size_t>(action.stage)];
        switch (action.work) {
            case PipelineWork::forward:
                return times.forward;
            case PipelineWork::backward:
                return times.backward_inputs + times.backward_weights;
            case PipelineWork::backward_inputs:
                return times.backward_inputs;
            default:
                return times.backward_weights;
        }
    }

    /// A send or receive that does not wait.
    bool post(size_t r, const PipelineAction& action) {
        const auto peer = static_cast<size_t>(schedule_.peer_of(action));
        Message& message = message_of(action);
        if (is_send(action.work)) {
            Link& link = links_[r * ranks_.size() + peer];
            link.free = std::max(link.free, ranks_[r].time) + times_.send;
            message.arrival = link.free;
            link.sent.push_back(action);
            match(link, r, peer);
        } else {
            Link& link = links_[peer * ranks_.size() + r];
            message.received = true;
            link.awaited.push_back(action);
            match(link, peer, r);
        }
        ++ranks_[r].next;
        return true;
    }

    /// The messages of a link are received in the order in which they are sent.
    void match(Link& link, size_t from, size_t to) {
        if (link.sent.empty() || link.awaited.empty()) return;
        require_same(link.sent.front(), from, link.awaited.front(), to);
        link.sent.pop_front();
        link.awaited.pop_front();
    }

    void require_same(const PipelineAction& sent, size_t from, const PipelineAction& awaited,
                      size_t to) {
        if (&message_of(sent) != &message_of(awaited))
            throw Error("the pipeline schedule is wrong: rank ", to, " is at ", described(awaited),
                        ", where rank ", from, " is at ", described(sent));
    }

    /// A send and its receive, which wait for each other.
    bool meet(size_t r, const PipelineAction& action) {
        const auto peer = static_cast<size_t>(schedule_.peer_of(action));
        const PipelineAction* other = next_of(peer);
        if (!other || is_compute(other->work) || is_send(other->work) == is_send(action.work) ||
            schedule_.peer_of(*other) != static_cast<int>(r))
            return false;
        if (is_send(action.work))
            require_same(action, r, *other, peer);
        else
            require_same(*other, peer, action, r);
        const double end = std::max(ranks_[r].time, ranks_[peer].time) + times_.send;
        message_of(action) = {.received = true, .arrival = end};
        for (const size_t rank : {r, peer}) ranks_[rank].time = end, ++ranks_[rank].next;
        return true;
    }

    void refuse_unfinished() const {
        std::string waiting;
        for (size_t r = 0; r < ranks_.size(); ++r) {
            const PipelineAction* action = next_of(r);
            if (!action) continue;
            if (waiting.size() > 300) {
                waiting += ", …";
                break;
            }
            waiting += concat(waiting.empty() ? "" : ", ", "rank ", r, " at ", described(*action));
        }
        if (!waiting.empty()) throw Error("the pipeline schedule deadlocks: ", waiting);
    }

    void add_totals() {
        double first = std::numeric_limits<double>::infinity(), last = 0;
        for (const auto& computes : timeline_.computes) {
            if (computes.empty()) continue;
            first = std::min(first, computes.front().start);
            last = std::max(last, computes.back().end);
        }
        timeline_.makespan = std::max(0.0, last - first);
        for (const auto& computes : timeline_.computes) {
            double busy = 0;
            for (const TimedAction& timed : computes) busy += timed.end - timed.start;
            timeline_.idle.push_back(timeline_.makespan - busy);
        }
    }

    const PipelineSchedule& schedule_;
    const PipelineTimes& times_;
    PipelineTransport transport_;
    std::vector<RankState> ranks_;
    std::vector<Link> links_;        // [from, to]
    std::vector<Message> messages_;  // [stage, micro-batch, gradient or activation]
    PipelineTimeline timeline_;
};

}  // namespace

double PipelineTimeline::idle_share() const {
    double sum = 0;
    for (const double time : idle) sum += time;
    return makespan > 0 ? sum / (makespan * static_cast<double>(idle.size())) : 0;
}

PipelineTimeline simulate(const PipelineSchedule& schedule, const PipelineTimes& times,
                          PipelineTransport transport) {
    return Simulation(schedule, times, transport).run();
}

}  // namespace train_gpt
