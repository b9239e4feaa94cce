// `--trace`: the spans of each rank compared with the structure of a step, which follows from the
// model, the micro-batches and the layout of the parameters.
#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
using namespace train_gpt::training_job;

namespace {

struct Span {
    std::string name;
    double begin, end;  // µs
};
/// The spans of a rank's step by track, in the order in which they began.
using Step = std::map<std::string, std::vector<Span>>;

/// A file's spans by rank and step. Checks what every span must have, and that ranks and tracks
/// have names.
std::map<int, std::map<int64_t, Step>> spans_of(const fs::path& file) {
    const SortedJson trace = SortedJson::parse(read(file));
    std::map<int, std::map<int64_t, Step>> spans;
    std::map<std::pair<int, int>, std::string> tracks;
    std::map<int, std::string> ranks;
    for (const SortedJson& event : trace.at("traceEvents")) {
        const int rank = event.at("pid"), track = event.at("tid");
        const std::string name = event.at("name");
        if (name == "process_name") ranks[rank] = event.at("args").at("name");
        if (name == "thread_name") tracks[{rank, track}] = event.at("args").at("name");
        if (event.at("ph") != "X") continue;
        const double begin = event.at("ts"), duration = event.at("dur");
        CHECK(begin >= 0);
        CHECK(duration >= 0);
        spans[rank][event.at("args").at("step")][tracks.at({rank, track})].push_back(
            {name, begin, begin + duration});
    }
    for (const auto& [rank, steps] : spans)
        CHECK(ranks.at(rank).starts_with(concat("rank ", rank, " (")));
    CHECK(ranks.size() == spans.size());
    return spans;
}

/// What a step should be made of: a name, and the depth of the span within others of its track.
struct Expected {
    int depth;
    std::string name;
};

/// Checks that a track has these spans in this order, each within the one that it belongs to.
/// Others, such as kernels, must be within one of them.
void check_track(const std::vector<Span>& spans, const std::vector<Expected>& expected,
                 const std::vector<std::string>& known) {
    constexpr double rounding = 2;  // µs; CUDA gives times as floats
    std::vector<std::string> names, wanted;
    for (const Expected& e : expected) wanted.push_back(e.name);
    std::vector<Span> open;
    const auto is_within = [&](const Span& span, const Span& outer) {
        return span.begin >= outer.begin - rounding && span.end <= outer.end + rounding;
    };
    for (const Span& span : spans) {
        CAPTURE(span.name, span.begin, span.end);
        const bool is_known = std::ranges::any_of(
            known, [&](const std::string& start) { return span.name.starts_with(start); });
        if (!is_known) {
            REQUIRE_FALSE(open.empty());
            CHECK(std::ranges::any_of(open, [&](const Span& o) { return is_within(span, o); }));
            continue;
        }
        const size_t i = names.size();
        names.push_back(span.name);
        if (i >= expected.size() || std::ssize(open) < expected[i].depth) continue;
        open.resize(static_cast<size_t>(expected[i].depth));
        if (!open.empty()) CHECK(is_within(span, open.back()));
        open.push_back(span);
    }
    CHECK(names == wanted);
}

/// The structure of the steps of a job.
struct Structure {
    int layers, micro_batches;  // of a rank
    std::vector<Bucket> buckets;
    int ranks;

    int last_unit() const { return layers + 1; }
    std::vector<Expected> host(int64_t step) const {
        std::vector<Expected> all{{0, concat("step ", step)}};
        for (int i = 0; i < micro_batches; ++i) {
            all.push_back({1, concat("micro-batch ", i)});
            const auto acquire = [&](int unit) {
                all.push_back({2, concat("acquire unit ", unit)});
            };
            for (int unit = 0; unit <= last_unit(); ++unit) acquire(unit);
            acquire(0);  // the head is tied to the embedding
            for (int unit = last_unit(); unit > 0; --unit) acquire(unit);
        }
        all.push_back({1, "update"});
        return all;
    }
    std::vector<Expected> device() const {
        std::vector<Expected> all;
        for (int i = 0; i < micro_batches; ++i) {
            all.insert(all.end(), {{0, "forward"}, {1, "embedding"}});
            for (int l = 0; l < layers; ++l) all.push_back({1, concat("forward layer ", l)});
            all.insert(all.end(), {{0, "backward"}, {1, "head"}});
            for (int l = layers - 1; l >= 0; --l) all.push_back({1, concat("backward layer ", l)});
            all.push_back({1, "embedding"});
        }
        all.push_back({0, "update"});
        for (size_t b = 0; b < buckets.size(); ++b) all.push_back({1, concat("update bucket ", b)});
        return all;
    }
    std::vector<Expected> exchange() const {
        std::vector<Expected> all;
        if (ranks == 1) return all;
        // Gradients of later units are final first, and those of the embedding all at once.
        for (size_t b = buckets.size(); b > 0; --b)
            if (buckets[b - 1].first_unit > 0) all.push_back({0, concat("reduce bucket ", b - 1)});
        for (size_t b = 0; b < buckets.size() && buckets[b].first_unit == 0; ++b)
            all.push_back({0, concat("reduce bucket ", b)});
        all.push_back({0, "gather sums"});
        all.push_back({0, "add sums"});  // the integers of exact sums
        for (size_t b = 0; b < buckets.size(); ++b) all.push_back({0, concat("gather bucket ", b)});
        return all;
    }
};

const Span& find(const Step& step, const std::string& track, const std::string& name,
                 bool last = false) {
    const std::vector<Span>& spans = step.at(track);
    const Span* found = nullptr;
    for (const Span& span : spans)
        if (span.name == name && (last || !found)) found = &span;
    CAPTURE(name);
    REQUIRE(found);
    return *found;
}

/// after_evaluation: which has waited for the weights.
void check_step(const Structure& structure, Step step, int64_t number, bool on_gpu,
                bool after_evaluation) {
    CAPTURE(number, structure.ranks, structure.buckets.size());
    std::erase_if(step["host"], [](const Span& span) {
        return span.name.starts_with("wait for step") || span.name == "between steps";
    });
    // A GPU waits for the weights of each bucket, for the sums of its gradients, for those of all
    // norms, and for the integers of exact sums.
    const auto waits = std::erase_if(
        step["device"], [](const Span& span) { return span.name == "wait for the exchange"; });
    const size_t weights = after_evaluation ? 0 : structure.buckets.size();
    CHECK(waits == (on_gpu && structure.ranks > 1 ? weights + structure.buckets.size() + 2 : 0));
    const std::vector<std::string> known{"forward", "backward", "embedding", "head", "update"};
    std::erase_if(step["device"], [](const Span& span) { return span.name.starts_with("head_"); });
    std::erase_if(step["device"],
                  [](const Span& span) { return span.name.starts_with("embedding_"); });
    check_track(step["host"], structure.host(number), {""});
    check_track(step["device"], structure.device(), known);
    check_track(step["exchange"], structure.exchange(), {""});
    check_track(
        step["data"],
        std::vector<Expected>(static_cast<size_t>(structure.micro_batches), {0, "data wait"}),
        {""});

    // Between tracks: what must have begun before.
    const double rounding = on_gpu ? 1000 : 0.002;  // two clocks of a GPU are compared
    const auto follows = [&](const Span& later, const Span& earlier) {
        CAPTURE(later.name, earlier.name);
        CHECK(later.begin >= earlier.begin - rounding);
    };
    follows(find(step, "device", "forward"), find(step, "data", "data wait"));
    CHECK(find(step, "device", "forward layer 0").end >=
          find(step, "host", "acquire unit 1").begin - rounding);
    if (structure.ranks == 1) return;
    for (size_t b = 0; b < structure.buckets.size(); ++b) {
        const Span reduce = find(step, "exchange", concat("reduce bucket ", b));
        const Span update = find(step, "device", concat("update bucket ", b));
        follows(reduce, find(step, "device", "backward", true));
        CHECK(update.begin >= reduce.end - rounding);
        CHECK(find(step, "exchange", concat("gather bucket ", b)).begin >= update.end - rounding);
    }
}

/// Traces steps 3 to 2 + `steps` of a run and checks the trace.
void check_trace(const TrainingJob& job, int ranks, int64_t steps) {
    const std::string run = job.train(ranks, concat("on-", ranks), {},
                                      {"--trace", std::to_string(steps), "--stop-at", "10"});
    const Config config = job.config();
    const bool on_gpu = config.device == "cuda";
    const Structure structure{config.model.n_layer,
                              static_cast<int>(config.micro_batches_per_step()) / ranks,
                              job.layout(ranks).buckets(), ranks};
    CHECK(structure.buckets.size() > 2);
    const fs::path folder = fs::path(run) / "trace";
    const auto all = spans_of(folder / "step-00000003.json");
    CHECK(std::ssize(all) == ranks);
    for (const auto& [rank, of_rank] : all) {
        CAPTURE(rank);
        CHECK(std::ssize(of_rank) == steps);
        int64_t number = 3;
        std::map<std::string, int> others;
        for (const auto& [step, spans] : of_rank) {
            REQUIRE(step == number++);
            check_step(structure, spans, step, on_gpu, (step - 1) % config.evaluation.every == 0);
            for (const Span& span : spans.at("host")) ++others[span.name];
        }
        // The host reads each step's outcome; evaluations are between steps.
        for (int64_t step = 3; step < 3 + steps; ++step)
            CHECK(others[concat("wait for step ", step)] == 1);
        CHECK(others["between steps"] == 1);
    }
    if (ranks == 1) {
        CHECK(names_in(folder) == std::set<std::string>{"step-00000003.json"});
        return;
    }
    for (int rank = 0; rank < ranks; ++rank) {
        const auto alone = spans_of(folder / concat("step-00000003-rank-0000", rank, ".json"));
        REQUIRE(alone.size() == 1);
        CHECK(alone.begin()->first == rank);
        for (const auto& [step, tracks] : alone.begin()->second)
            for (const auto& [track, spans] : tracks)
                CHECK(spans.size() == all.at(rank).at(step).at(track).size());
    }
}

const Settings traced{{"parallel.zero", "1"}};

}  // namespace

TEST_CASE("a trace has the spans of a step in their order, on one rank and on two", "[training]") {
    if (skip_without_mpirun()) return;
    const TrainingJob job(4, traced);  // evaluated after step 7
    for (const int ranks : {1, 2}) check_trace(job, ranks, 6);
}

TEST_CASE("ranks that are to trace different steps end before they train", "[training]") {
    if (skip_without_mpirun()) return;
    const TrainingJob job(4);
    check_refused(start_parts({1, job.command("train", "run", {}, {"--trace", "2"})},
                              {1, job.command("train", "run")}),
                  {"the ranks do not agree", "\n  --trace: 0 on rank 1", "2 on rank 0"});
}

#ifdef TRAIN_GPT_CUDA

TEST_CASE("a trace has the spans of a step in their order, on one GPU and on two",
          "[training][cuda]") {
    if (skip_without_gpus(2)) return;
    const TrainingJob job(2, traced + Settings{{"device", "cuda"},
                                               {"schedule.steps", "7"},
                                               {"schedule.warmup_steps", "2"},
                                               {"evaluation.every", "4"},
                                               {"evaluation.max_tokens", "60"}});
    for (const int ranks : {1, 2}) check_trace(job, ranks, 3);
}

#endif
