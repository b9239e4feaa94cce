#include "parallel/pipeline/pipeline_schedule.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "parallel/pipeline/pipeline_simulation.h"
#include "test/catch.h"
#include "test/parallel/peak_slots.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

using Work = PipelineWork;

const std::vector<PipelineKind> kinds{PipelineKind::gpipe, PipelineKind::one_f_one_b,
                                      PipelineKind::interleaved, PipelineKind::zero_bubble};

std::string text_of(const PipelineShape& shape) {
    return concat(name_of(shape.kind), ", ", shape.ranks, " ranks, ", shape.stages_per_rank,
                  " stages each, ", shape.micro_batches, " micro-batches");
}

/// Every kind on up to max_ranks ranks with up to max_micro_batches, and some that are large.
std::vector<PipelineShape> shapes(int max_ranks, int max_micro_batches) {
    std::vector<PipelineShape> all;
    for (const PipelineKind kind : kinds)
        for (int p = 1; p <= max_ranks; ++p)
            for (int m = 1; m <= max_micro_batches; ++m) {
                if (kind != PipelineKind::interleaved)
                    all.push_back({kind, p, 1, m});
                else if (m % p == 0)
                    for (int v = 2; v <= 4; ++v) all.push_back({kind, p, v, m});
            }
    for (const PipelineKind kind : kinds) {
        const bool interleaved = kind == PipelineKind::interleaved;
        all.push_back({kind, interleaved ? 16 : 64, interleaved ? 4 : 1, 512});
        const int p = static_cast<int>(random_int(2, 64));
        const int m = static_cast<int>(random_int(1, 512));
        all.push_back({kind, p, interleaved ? static_cast<int>(random_int(2, 5)) : 1,
                       interleaved ? std::max(1, m / p) * p : m});
    }
    all.push_back({PipelineKind::interleaved, 64, 2, 512});
    return all;
}

/// The actions of all ranks in one sequence in which each reads what was written before, if there
/// is one where each rank keeps its order and a send and its receive come together. Throws a text
/// that says what is wrong.
class Checker {
  public:
    explicit Checker(const PipelineSchedule& schedule)
        : schedule_(schedule), next_(schedule.ranks.size()), readable_(schedule.ranks.size()) {}

    void run() {
        for (bool any = true; any;) {
            any = false;
            for (size_t r = 0; r < next_.size(); ++r)
                while (step(r)) any = true;
        }
        for (size_t r = 0; r < next_.size(); ++r) {
            if (action(r)) throw concat("rank ", r, " waits for ever at action ", next_[r]);
            if (!readable_[r].empty()) throw concat("rank ", r, " does not read a message");
        }
        const size_t all = static_cast<size_t>(schedule_.stages) *
                           static_cast<size_t>(schedule_.shape.micro_batches);
        const bool apart = schedule_.halves_apart;
        for (const Work work :
             {Work::forward, Work::backward, Work::backward_inputs, Work::backward_weights})
            if (done_[work].size() !=
                (work == Work::forward || apart == (work != Work::backward) ? all : 0))
                throw std::string("some work is missing");
        if (!slots_.empty()) throw std::string("a slot is not free at the end");
    }

  private:
    const PipelineAction* action(size_t r) const {
        const auto& actions = schedule_.ranks[r].actions;
        return next_[r] < actions.size() ? &actions[next_[r]] : nullptr;
    }
    static void require(bool holds, const char* what, const PipelineAction& a) {
        if (!holds) throw concat(what, ": micro-batch ", a.micro_batch, ", stage ", a.stage);
    }

    bool step(size_t r) {
        const PipelineAction* a = action(r);
        if (!a) return false;
        if (a->work <= Work::backward_weights) return compute(r, *a), ++next_[r], true;
        // A send and its receive come together; the receiver is found from the sender's side.
        if (a->work != Work::send_activation && a->work != Work::send_gradient) return false;
        const bool forward = a->work == Work::send_activation;
        const int stage = forward ? a->stage + 1 : a->stage - 1;
        require(stage >= 0 && stage < schedule_.stages, "a send beyond the stages", *a);
        require(unsent_.count({forward, a->stage, a->micro_batch}) > 0,
                "something is sent that was not computed, or twice", *a);
        const auto to = static_cast<size_t>(stage % schedule_.shape.ranks);
        require(schedule_.peer_of(*a) == static_cast<int>(to), "a send to another rank", *a);
        const PipelineAction* b = action(to);
        if (!b || b->work != (forward ? Work::receive_activation : Work::receive_gradient) ||
            b->stage != stage || b->micro_batch != a->micro_batch)
            return false;
        require(schedule_.peer_of(*b) == static_cast<int>(r), "a receive from another rank", *b);
        const int buffers =
            forward ? schedule_.ranks[to].activation_buffers : schedule_.ranks[to].gradient_buffers;
        require(b->buffer >= 0 && b->buffer < buffers, "no such buffer", *b);
        require(readable_[to]
                    .emplace(std::pair{forward, b->buffer}, std::pair{b->stage, b->micro_batch})
                    .second,
                "a buffer is overwritten", *b);
        unsent_.erase({forward, a->stage, a->micro_batch});
        ++next_[r], ++next_[to];
        return true;
    }

    void compute(size_t r, const PipelineAction& a) {
        require(a.stage % schedule_.shape.ranks == static_cast<int>(r), "another rank's stage", a);
        require(a.stage < schedule_.stages && a.micro_batch < schedule_.shape.micro_batches,
                "no such stage or micro-batch", a);
        const std::pair place{a.stage, a.micro_batch};
        require(done_[a.work].insert(place).second, "computed twice", a);
        // In order of micro-batches: the sums of gradients depend on it.
        require(latest_[{a.work, a.stage}]++ == a.micro_batch, "out of order", a);
        require(unsent_of_.count(r) == 0 || unsent_.count(unsent_of_[r]) == 0,
                "an output is overwritten before it was sent", a);
        const bool forward = a.work == Work::forward;
        if (forward) {
            require(a.slot >= 0 && a.slot < schedule_.slots[static_cast<size_t>(a.stage)],
                    "no such slot", a);
            require(slots_.emplace(std::pair{a.stage, a.slot}, a.micro_batch).second,
                    "a slot is overwritten", a);
        } else {
            require(slots_.at({a.stage, a.slot}) == a.micro_batch, "another slot", a);
        }
        if (a.work == Work::backward_weights) {
            require(done_[Work::backward_inputs].count(place) > 0, "before its other half", a);
        } else if (a.stage != (forward ? 0 : schedule_.stages - 1)) {
            const auto message = readable_[r].find({forward, a.buffer});
            require(message != readable_[r].end() && message->second == place, "no input", a);
            readable_[r].erase(message);
        }
        if (a.work == Work::backward || a.work == Work::backward_weights)
            slots_.erase({a.stage, a.slot});
        if (a.work != Work::backward_weights && a.stage != (forward ? schedule_.stages - 1 : 0)) {
            unsent_of_[r] = {forward, a.stage, a.micro_batch};
            unsent_.insert(unsent_of_[r]);
        }
    }

    using Output = std::tuple<bool, int, int>;  // forward?, stage, micro-batch
    const PipelineSchedule& schedule_;
    std::vector<size_t> next_;
    std::vector<std::map<std::pair<bool, int>, std::pair<int, int>>> readable_;
    std::map<Work, std::set<std::pair<int, int>>> done_;
    std::map<std::pair<Work, int>, int> latest_;
    std::map<std::pair<int, int>, int> slots_;
    std::set<Output> unsent_;
    std::map<size_t, Output> unsent_of_;
};

std::string fault_of(const PipelineSchedule& schedule) {
    try {
        Checker(schedule).run();
    } catch (const std::string& fault) {
        return fault;
    } catch (const std::out_of_range&) {
        return "a backward reads a slot that nothing has taken";
    }
    return "";
}

PipelineTimes equal_times(const PipelineSchedule& schedule, double F, double I, double W) {
    return {.stages = std::vector<StageTimes>(static_cast<size_t>(schedule.stages), {F, I, W})};
}

}  // namespace

TEST_CASE("a pipeline's ranks compute everything once, in a legal order, in slots that are free",
          "[pipeline_schedule]") {
    for (const PipelineShape& shape : shapes(7, 21))
        REQUIRE(concat(text_of(shape), ": ", fault_of(pipeline_schedule(shape))) ==
                text_of(shape) + ": ");
}

TEST_CASE("pipelines deadlock neither with sends that wait nor with sends that return at once",
          "[pipeline_schedule]") {
    for (const PipelineShape& shape : shapes(6, 18)) {
        INFO(text_of(shape));
        const PipelineSchedule schedule = pipeline_schedule(shape);
        PipelineTimes times;
        for (int stage = 0; stage < schedule.stages; ++stage) {
            const auto time = [] { return static_cast<double>(random_int(1, 20)); };
            times.stages.push_back({time(), time(), time()});
        }
        times.send = static_cast<double>(random_int(0, 9));
        REQUIRE_NOTHROW(simulate(schedule, times, PipelineTransport::blocking));
        const PipelineTimeline timeline = simulate(schedule, times);
        REQUIRE(peak_slots(timeline, schedule.stages) == schedule.slots);
    }
}

TEST_CASE("ranks of a pipeline idle as long as its schedule's formula says",
          "[pipeline_schedule]") {
    for (const PipelineShape& shape : shapes(9, 20)) {
        const PipelineSchedule schedule = pipeline_schedule(shape);
        const int F = static_cast<int>(random_int(1, 9)), I = static_cast<int>(random_int(1, 9)),
                  W = static_cast<int>(random_int(1, 9)), p = shape.ranks;
        if (shape.kind == PipelineKind::zero_bubble && shape.micro_batches < p) continue;
        // Times of one stage, so that interleaved's division by v is done.
        const int expected =
            (p - 1) *
            (shape.kind == PipelineKind::zero_bubble ? F + I - std::min({F, I, W}) : F + I + W);
        const PipelineTimeline timeline = simulate(schedule, equal_times(schedule, F, I, W));
        INFO(text_of(shape) << ", F " << F << ", I " << I << ", W " << W);
        for (const double idle : timeline.idle) REQUIRE(idle == expected);
        const int busy = (F + I + W) * shape.micro_batches * schedule.stages / p;
        REQUIRE(timeline.makespan == busy + expected);
        REQUIRE(timeline.idle_share() == Approx(1.0 * expected / (busy + expected)));
    }
}

TEST_CASE("the idle time in micro-batches is that of a schedule whose works take the same time",
          "[pipeline_schedule]") {
    for (const PipelineShape& shape : shapes(9, 20)) {
        if (shape.kind == PipelineKind::zero_bubble && shape.micro_batches < shape.ranks) continue;
        const PipelineSchedule schedule = pipeline_schedule(shape);
        const double idle = simulate(schedule, equal_times(schedule, 1, 1, 1)).idle.front();
        INFO(text_of(shape));
        REQUIRE(idle_micro_batches(shape.kind, shape.ranks, shape.stages_per_rank) ==
                Approx(idle / (3 * shape.stages_per_rank)));
    }
}

TEST_CASE("zero bubble idles a third of 1F1B's time if forward and both halves take the same",
          "[pipeline_schedule]") {
    for (const auto& [p, m] : {std::pair{2, 2}, {4, 8}, {8, 64}, {64, 512}}) {
        const auto idle = [&](PipelineKind kind) {
            const PipelineSchedule schedule = pipeline_schedule({kind, p, 1, m});
            return simulate(schedule, equal_times(schedule, 1, 1, 1)).idle.front();
        };
        CHECK(3 * idle(PipelineKind::zero_bubble) == idle(PipelineKind::one_f_one_b));
    }
}

TEST_CASE("GPipe and 1F1B lose no time to sends that wait, if sends take none",
          "[pipeline_schedule]") {
    for (const PipelineKind kind : {PipelineKind::gpipe, PipelineKind::one_f_one_b})
        for (const auto& [p, m] : {std::pair{2, 1}, {3, 7}, {5, 12}, {64, 100}}) {
            const PipelineSchedule schedule = pipeline_schedule({kind, p, 1, m});
            const auto time = [] { return static_cast<double>(random_int(1, 9)); };
            const PipelineTimes times = equal_times(schedule, time(), time(), time());
            CHECK(simulate(schedule, times, PipelineTransport::blocking).makespan ==
                  simulate(schedule, times).makespan);
        }
}

/// Micro-batches between their forward and the end of their backward, added over a rank's stages.
int most_in_flight(const PipelineRank& rank) {
    int now = 0, most = 0;
    for (const PipelineAction& a : rank.actions) {
        if (a.work == Work::forward) most = std::max(most, ++now);
        if (a.work == Work::backward || a.work == Work::backward_weights) --now;
    }
    return most;
}

/// Micro-batches of a rank between the halves of their backward.
int most_with_halves_apart(const PipelineRank& rank) {
    int now = 0, most = 0;
    for (const PipelineAction& a : rank.actions) {
        if (a.work == Work::backward_inputs) most = std::max(most, ++now);
        if (a.work == Work::backward_weights) --now;
    }
    return most;
}

TEST_CASE("a stage holds as many micro-batches in flight as its schedule's bound says",
          "[pipeline_schedule]") {
    for (const PipelineShape& shape : shapes(9, 30)) {
        INFO(text_of(shape));
        const PipelineSchedule schedule = pipeline_schedule(shape);
        const int p = shape.ranks, m = shape.micro_batches;
        for (int r = 0; r < p; ++r) {
            const PipelineRank& rank = schedule.ranks[static_cast<size_t>(r)];
            const int slots = schedule.slots[static_cast<size_t>(r)],
                      in_flight = most_in_flight(rank), apart = most_with_halves_apart(rank);
            CAPTURE(r, slots, apart, in_flight);
            if (p == 1) {
                REQUIRE((slots == 1 && in_flight == 1 && apart == 0));
                continue;
            }
            switch (shape.kind) {
                case PipelineKind::gpipe:
                    REQUIRE((slots == m && apart == 0));
                    break;
                case PipelineKind::one_f_one_b:
                    REQUIRE((slots == std::min(m, p - r) && apart == 0));
                    break;
                case PipelineKind::zero_bubble:
                    REQUIRE((slots == std::min(m, p) && apart == std::min(m, r + 1)));
                    break;
                case PipelineKind::interleaved: {
                    const int v = shape.stages_per_rank;
                    REQUIRE(in_flight == std::min(m * v, p * v + p - 1 - 2 * r));
                    for (int stage = r; stage < schedule.stages; stage += p)
                        REQUIRE(schedule.slots[static_cast<size_t>(stage)] <= std::min(m, 2 * p));
                }
            }
            if (shape.kind != PipelineKind::interleaved) {
                REQUIRE(in_flight == slots);
                REQUIRE((rank.activation_buffers <= 1 && rank.gradient_buffers <= 1));
            }
        }
    }
}

TEST_CASE("only schedules that hold all micro-batches need more slots for more of them",
          "[pipeline_schedule]") {
    for (const PipelineKind kind : kinds) {
        const int p = static_cast<int>(random_int(2, 8)),
                  v = kind == PipelineKind::interleaved ? static_cast<int>(random_int(2, 4)) : 1,
                  m = 4 * p;  // enough for all others
        const PipelineSchedule schedule = pipeline_schedule({kind, p, v, m}),
                               longer = pipeline_schedule({kind, p, v, m + p});
        CAPTURE(name_of(kind), p, v);
        CHECK((longer.slots == schedule.slots) != holds_all_micro_batches(kind));
    }
}

/// How many of the spans [from, to) of time there are at once, at most.
class Spans {
  public:
    void add(int from, int to) { ++changes_[from], --changes_[to]; }
    int most_at_once() const {
        int now = 0, most = 0;
        for (const auto& [time, change] : changes_) most = std::max(most, now += change);
        return most;
    }

  private:
    std::map<int, int> changes_;
};

/// What ranks hold if each computes its list, and a compute begins as soon as its input is there:
/// a forward takes one tick, a backward two, and each of its halves one.
struct Held {
    std::vector<Spans> activations, gradients;  // of a rank, from when a message is computed
    std::vector<Spans> slots;                   // of a stage

    explicit Held(const PipelineSchedule& schedule)
        : activations(schedule.ranks.size()),
          gradients(schedule.ranks.size()),
          slots(static_cast<size_t>(schedule.stages)) {
        std::map<std::tuple<bool, int, int>, int> ends;  // forward?, stage, micro-batch
        std::map<std::pair<int, int>, int> slot_since;
        std::vector<size_t> next(schedule.ranks.size());
        std::vector<int> time(schedule.ranks.size());
        for (bool any = true; std::exchange(any, false);)
            for (size_t r = 0; r < next.size(); ++r)
                for (; next[r] < schedule.ranks[r].actions.size(); ++next[r], any = true) {
                    const PipelineAction& a = schedule.ranks[r].actions[next[r]];
                    if (!is_compute(a.work)) continue;
                    const bool forward = a.work == Work::forward;
                    const int before = forward ? a.stage - 1 : a.stage + 1;
                    const bool reads =
                        a.work != Work::backward_weights && before >= 0 && before < schedule.stages;
                    const auto input = ends.find({forward, before, a.micro_batch});
                    if (reads && input == ends.end()) break;
                    const int begin = reads ? std::max(time[r], input->second) : time[r];
                    const int end = begin + (a.work == Work::backward ? 2 : 1);
                    time[r] = end;
                    if (reads) (forward ? activations : gradients)[r].add(input->second, end);
                    const auto stage = static_cast<size_t>(a.stage);
                    const std::pair place{a.stage, a.micro_batch};
                    if (forward) slot_since[place] = begin;
                    if (a.work == Work::backward || a.work == Work::backward_weights)
                        slots[stage].add(slot_since.at(place), end);
                    if (a.work != Work::backward_weights)
                        ends[{forward, a.stage, a.micro_batch}] = end;
                }
    }
};

TEST_CASE("a pipeline has as many buffers and slots as its ranks hold messages and activations",
          "[pipeline_schedule]") {
    for (const PipelineShape& shape : shapes(7, 21)) {
        INFO(text_of(shape));
        const PipelineSchedule schedule = pipeline_schedule(shape);
        const Held held(schedule);
        for (size_t r = 0; r < schedule.ranks.size(); ++r) {
            CAPTURE(r);
            REQUIRE(schedule.ranks[r].activation_buffers == held.activations[r].most_at_once());
            REQUIRE(schedule.ranks[r].gradient_buffers == held.gradients[r].most_at_once());
        }
        for (size_t stage = 0; stage < schedule.slots.size(); ++stage)
            REQUIRE(schedule.slots[stage] == held.slots[stage].most_at_once());
    }
}

TEST_CASE("a data rank with fewer micro-batches needs no more slots or buffers than one with more",
          "[pipeline_schedule]") {
    for (const PipelineShape& shape : shapes(6, 18)) {
        INFO(text_of(shape));
        PipelineShape larger = shape;
        larger.micro_batches += shape.kind == PipelineKind::interleaved
                                    ? shape.ranks
                                    : static_cast<int>(random_int(1, 3));
        const PipelineSchedule few = pipeline_schedule(shape), more = pipeline_schedule(larger);
        for (size_t stage = 0; stage < few.slots.size(); ++stage)
            REQUIRE(few.slots[stage] <= more.slots[stage]);
        for (size_t r = 0; r < few.ranks.size(); ++r) {
            REQUIRE(few.ranks[r].activation_buffers <= more.ranks[r].activation_buffers);
            REQUIRE(few.ranks[r].gradient_buffers <= more.ranks[r].gradient_buffers);
        }
    }
}

TEST_CASE("one rank computes forward and backward of one micro-batch after the other",
          "[pipeline_schedule]") {
    for (const PipelineKind kind : kinds) {
        const PipelineSchedule schedule =
            pipeline_schedule({kind, 1, kind == PipelineKind::interleaved ? 3 : 1, 5});
        CHECK((schedule.stages == 1 && !schedule.halves_apart));
        std::vector<PipelineAction> expected;
        for (int i = 0; i < 5; ++i)
            for (const Work work : {Work::forward, Work::backward})
                expected.push_back({.work = work, .micro_batch = i, .slot = 0});
        CHECK(schedule.ranks.at(0).actions == expected);
    }
}

TEST_CASE("1F1B's first and last rank of two have the lists of the paper", "[pipeline_schedule]") {
    const PipelineSchedule schedule = pipeline_schedule({PipelineKind::one_f_one_b, 2, 1, 3});
    const auto letters = [&](size_t rank) {
        std::string all;
        for (const PipelineAction& a : schedule.ranks[rank].actions)
            all += concat("FBIWsrSR"[static_cast<size_t>(a.work)], a.micro_batch, " ");
        return all;
    };
    CHECK(letters(0) == "F0 s0 F1 s1 R0 B0 F2 s2 R1 B1 R2 B2 ");
    CHECK(letters(1) == "r0 F0 r1 B0 S0 F1 B1 r2 S1 F2 B2 S2 ");
}

TEST_CASE("shapes that a pipeline cannot have are refused with what to change",
          "[pipeline_schedule]") {
    const auto refusal = [](const PipelineShape& shape) {
        return error_of([&] { pipeline_schedule(shape); });
    };
    CHECK(
        refusal({PipelineKind::interleaved, 4, 2, 10}) ==
        "the pipeline schedule \"interleaved\" cannot run 10 micro-batches on 4 pipeline ranks: it "
        "needs a multiple of 4; change the number of micro-batches per step, or set "
        "parallel.schedule to \"1f1b\"");
    CHECK(contains(refusal({PipelineKind::interleaved, 4, 1, 8}),
                   "needs at least 2 stages per rank"));
    for (const PipelineKind kind : kinds) {
        if (kind != PipelineKind::interleaved)
            CHECK(contains(refusal({kind, 4, 2, 8}),
                           concat("\"", name_of(kind), "\" has one stage per rank, not 2")));
        CHECK(contains(refusal({kind, 0, 1, 8}), "each must be at least 1"));
        CHECK(contains(refusal({kind, 4, 0, 8}), "each must be at least 1"));
        CHECK(contains(refusal({kind, 4, 1, 0}), "each must be at least 1"));
    }
}
