#include "training/plan/search.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <queue>

#include "base/error.h"
#include "base/formatted.h"
#include "training/plan/least_memory.h"

namespace train_gpt {

namespace {

constexpr const char* too_little_memory =
    "weights, gradients, optimizer and activations need more memory";

/// Seconds of a step with these passes, whose schedule is replaced. With many micro-batches, the
/// time grows evenly with their number: it is taken from two shorter steps.
double seconds_of(StepWork& work, const PipelineShape& pipeline) {
    const auto of = [&](int micro_batches) {
        PipelineShape other = pipeline;
        other.micro_batches = micro_batches;
        if (!(work.schedule.shape == other)) work.schedule = pipeline_schedule(other);
        return simulate_step(work).seconds;
    };
    const int m = pipeline.micro_batches, longer = 8 * pipeline.ranks, shorter = longer / 2;
    if (m <= 2 * longer) return of(m);
    const double most = of(longer);
    return most + (most - of(shorter)) / (longer - shorter) * (m - longer);
}

/// The most memory that a rank needs. Ranks in the middle of a pipeline are alike.
DeviceAndHost memory_of(const RunShape& shape, const Device& device) {
    const std::vector<int> ranks = shape.mesh.first_ranks(Axis::pipeline);
    DeviceAndHost most;
    for (size_t place = 0; place < ranks.size(); ++place) {
        if (place >= 2 && place + 1 != ranks.size()) continue;
        const Arena plan = plan_memory(shape, device, ranks[place]);
        most.device = std::max(most.device, uint64_t{plan.total_bytes()});
        most.host = std::max(most.host, uint64_t{plan.host_bytes()});
    }
    return most;
}

class Search {
  public:
    Search(const Config& config, const Cluster& cluster, int world, const Offload& offload)
        : config_(open(config, offload)),
          shape_(shape_on(config_, cluster, world).for_counting()),
          cluster_(cluster),
          work_options_{.fp8 = is_fp8(config)},
          device_(target_of(cluster).device),
          available_(memory_on(target_of(cluster), shape_.mesh)),
          least_memory_(shape_) {
        result_.memory_available = available_.device;
    }

    SearchResult run(size_t most) {
        const int layers = shape_.spec.n_layer;
        for (int t = 1; t <= cluster_.ranks_per_node; t *= 2)
            for (int c = 1; c <= 8; c *= 2)
                for (int p = 1; p <= std::min(layers, 32); p *= 2) {
                    Config config = config_;
                    auto& of = config.parallel;
                    of.tensor = t, of.context = c, of.pipeline = p;
                    mesh(config);
                    if (p == 1) continue;
                    of.schedule = PipelineKind::zero_bubble;
                    mesh(config);
                    of.schedule = PipelineKind::interleaved;
                    for (int v = 2; p * v <= layers; v *= 2) of.stages_per_rank = v, mesh(config);
                }
        choose(most);
        result_.refused.assign(refused_.begin(), refused_.end());
        return std::move(result_);
    }

  private:
    /// The configuration with all that is searched set to the least.
    static Config open(Config config, const Offload& offload) {
        auto& p = config.parallel;
        p.tensor = p.context = p.pipeline = p.stages_per_rank = 1;
        p.schedule = PipelineKind::one_f_one_b;
        p.layers_per_stage = {};
        p.zero = 1;
        config.memory.offload = words_of(offload);
        config.batch.micro_batch = 1;
        return config;
    }
    void refuse(const std::string& why) { ++refused_[why]; }

    /// All ways on the mesh and schedule of `config`, with nothing computed again.
    void mesh(const Config& config) {
        const auto& p = config.parallel;
        const int world = shape_.mesh.world(), of_replica = p.tensor * p.context * p.pipeline;
        if (world % of_replica != 0) return refuse("the mesh does not divide the ranks");
        const int T = config.sequence_length();
        if (p.context > 1 && context_problem("batch.sequence_length", T, p.context))
            return refuse("context-parallel ranks cannot share the sequence");
        if (tensor_problem(shared_sizes(shape_.spec), p.tensor))
            return refuse("tensor-parallel ranks cannot share the heads or n_ff");
        const int data = world / of_replica;
        for (int zero = 1; zero <= 3; ++zero) {
            if (data * p.context == 1 && zero > 1) break;  // the same
            std::optional<StepWork> work;
            for (int B = 1; B <= 64; B *= 2) {
                Config with = config;
                with.batch.micro_batch = B;
                with.parallel.zero = zero;
                if (const std::string why = problem_of(with, data); !why.empty()) {
                    refuse(why);
                    break;
                }
                if (!add(with, Recompute::none, work)) break;
            }
        }
    }

    /// Why a step cannot be cut into such micro-batches; empty if it can.
    static std::string problem_of(const Config& config, int data) {
        const auto& p = config.parallel;
        const int64_t tokens = int64_t{config.batch.micro_batch} * config.sequence_length(),
                      all = config.batch.tokens_per_step / tokens;
        if (config.batch.tokens_per_step % tokens != 0 || all < data)
            return "the step has no whole micro-batches for each data-parallel rank";
        if (p.schedule == PipelineKind::interleaved &&
            (all % data != 0 || all / data % p.pipeline != 0))
            return "interleaved stages need a multiple of parallel.pipeline micro-batches";
        if (tokens / p.context % p.tensor != 0)
            return "tensor-parallel ranks cannot share the rows";
        if (p.sums == std::optional(GradientSums::exact)) return contributions_problem(config);
        return "";
    }

    /// work: of this mesh, schedule and stage of ZeRO with another micro-batch; made if it is
    /// empty. Returns whether it may fit.
    bool add(const Config& config, Recompute level, std::optional<StepWork>& work) {
        RunShape shape(config, shape_.spec, shape_.dtype, level, shape_.mesh.world());
        shape.whole = shape_.whole;
        const auto is_too_large = [&] {
            return least_memory_.bytes(shape, layers_of(shape)) >
                   static_cast<double>(result_.memory_available);
        };
        for (const Recompute next : {Recompute::elementwise, Recompute::block})
            if (next > shape.recompute && is_too_large()) shape.recompute = next;
        if (is_too_large()) {
            refuse(too_little_memory);
            return false;
        }
        if (work)
            time_passes(*work, shape, cluster_, work_options_);
        else
            work = step_work(shape, cluster_, work_options_);
        const double seconds = seconds_of(*work, pipeline_shape(shape));
        ++result_.simulated;
        waiting_.push({std::move(shape), seconds});
        return true;
    }

    /// The layers of each stage, which take a while to deal out where they differ.
    const std::vector<int>& layers_of(const RunShape& shape) {
        const auto& p = shape.config.parallel;
        std::vector<int>& layers = layers_of_stages_[p.pipeline * p.stages_per_rank];
        if (layers.empty()) layers = layers_of_stages(shape);
        return layers;
    }

    /// The same mesh, schedule and ZeRO's stage.
    static std::string family_of(const RunShape& shape) {
        const auto& p = shape.config.parallel;
        return concat(p.tensor, ",", p.context, ",", p.pipeline, ",",
                      name_of(PipelineKind(p.schedule)), ",", p.stages_per_rank, ",",
                      p.zero.value());
    }

    /// The fastest first. Where memory is short, the next level of recomputation waits for its
    /// turn: it is slower, so none is overlooked.
    void choose(size_t most) {
        std::map<std::string, int> too_large;  // micro-batches that do not fit, whatever the level
        while (!waiting_.empty() && result_.best.size() < most) {
            Candidate candidate = waiting_.top();
            waiting_.pop();
            const std::string family = family_of(candidate.shape);
            const int B = candidate.shape.config.batch.micro_batch;
            if (const auto found = too_large.find(family);
                found != too_large.end() && B >= found->second) {
                refuse("does not fit with a smaller micro-batch either");
                continue;
            }
            const DeviceAndHost memory = memory_of(candidate.shape, device_);
            candidate.memory = memory.device;
            ++result_.counted;
            if (memory.fits(available_)) {
                result_.best.push_back(candidate);
                continue;
            }
            if (result_.fuller.size() < most)
                result_.fuller.push_back(candidate);
            else
                refuse("needs more memory, like the ways above");
            if (candidate.shape.recompute == Recompute::block) {
                too_large[family] = B;
                continue;
            }
            std::optional<StepWork> work;
            add(candidate.shape.config,
                candidate.shape.recompute == Recompute::none ? Recompute::elementwise
                                                             : Recompute::block,
                work);
        }
        // seconds_of() may be a per cent off.
        for (Candidate& way : result_.best)
            way.step_seconds = simulate_step(step_work(way.shape, cluster_, work_options_)).seconds;
        std::ranges::stable_sort(result_.best, {}, &Candidate::step_seconds);
    }

    struct Slower {
        bool operator()(const Candidate& a, const Candidate& b) const {
            return a.step_seconds > b.step_seconds;
        }
    };

    Config config_;
    RunShape shape_;
    const Cluster& cluster_;
    WorkOptions work_options_;
    Device device_;
    DeviceAndHost available_;
    LeastMemory least_memory_;
    std::map<int, std::vector<int>> layers_of_stages_;  // by the number of stages
    std::priority_queue<Candidate, std::vector<Candidate>, Slower> waiting_;
    std::map<std::string, int> refused_;
    SearchResult result_;
};

std::string settings_of(const RunShape& shape) {
    const auto& p = shape.config.parallel;
    std::string offload;
    for (const std::string& word : shape.config.memory.offload)
        offload += (offload.empty() ? "" : ",") + word;
    std::string text =
        formatted("%6d %7d %8d %4d %5d %6d   %-11s %-21s ", p.tensor, p.context, p.pipeline,
                  shape.mesh.size(Axis::data), p.zero.value(), shape.config.batch.micro_batch,
                  name_of(shape.recompute), offload.c_str());
    if (p.pipeline > 1) text += name_of(PipelineKind(p.schedule));
    if (p.stages_per_rank > 1) text += formatted(" × %d", p.stages_per_rank);
    return text;
}

double tokens_per_second(const Candidate& candidate) {
    return static_cast<double>(candidate.shape.config.batch.tokens_per_step) /
           (candidate.step_seconds * candidate.shape.mesh.world());
}

std::string table(const std::vector<Candidate>& ways) {
    std::string text = formatted("  %10s %10s %10s %6s %7s %8s %4s %5s %6s   %-11s %-21s %s\n",
                                 "ms a step", "tokens/s", "memory", "tensor", "context", "pipeline",
                                 "data", "ZeRO", "micro", "recompute", "offload", "schedule");
    for (const Candidate& way : ways)
        text += formatted("  %10.1f %10.0f %10s ", 1e3 * way.step_seconds, tokens_per_second(way),
                          format_bytes(way.memory).c_str()) +
                settings_of(way.shape) + "\n";
    return text;
}

Json json_of(const std::vector<Candidate>& ways) {
    Json list = Json::array();
    for (const Candidate& way : ways) {
        const auto& p = way.shape.config.parallel;
        list.push_back({{"step_ms", 1e3 * way.step_seconds},
                        {"tokens_per_second_per_gpu", tokens_per_second(way)},
                        {"memory_bytes", way.memory},
                        {"parallel.tensor", p.tensor},
                        {"parallel.context", p.context},
                        {"parallel.pipeline", p.pipeline},
                        {"parallel.schedule", name_of(PipelineKind(p.schedule))},
                        {"parallel.stages_per_rank", p.stages_per_rank},
                        {"parallel.zero", p.zero.value()},
                        {"batch.micro_batch", way.shape.config.batch.micro_batch},
                        {"memory.recompute", name_of(way.shape.recompute)},
                        {"memory.offload", way.shape.config.memory.offload}});
    }
    return list;
}

}  // namespace

namespace {

/// Whether ways were left out since they need more memory.
bool lacks_memory(const SearchResult& result) {
    return !result.fuller.empty() || std::ranges::any_of(result.refused, [](const auto& why) {
        return why.first == too_little_memory;
    });
}

/// Whether a run fits as the configuration is given, with what it leaves open chosen.
bool fits_as_given(const Config& config, const Cluster& cluster, int world) {
    try {
        const RunShape shape = choose_for(shape_on(config, cluster, world), cluster);
        const PlanTarget target = target_of(cluster);
        return most_memory(shape, target.device).fits(memory_on(target, shape.mesh));
    } catch (const Error&) {
        return false;  // the mesh is not possible
    }
}

/// Adds what another search has found, and what it has left out.
void add(SearchResult& to, SearchResult from, size_t most) {
    std::ranges::move(from.best, std::back_inserter(to.best));
    std::ranges::stable_sort(to.best, {}, &Candidate::step_seconds);
    while (to.best.size() > most) to.best.pop_back();
    std::map<std::string, int> refused(to.refused.begin(), to.refused.end());
    for (const auto& [why, count] : from.refused) refused[why] += count;
    to.refused.assign(refused.begin(), refused.end());
    to.simulated += from.simulated, to.counted += from.counted;
}

}  // namespace

SearchResult search(const Config& config, const Cluster& cluster, int world, size_t most) {
    SearchResult result = Search(config, cluster, world, {}).run(most);
    if (!result.best.empty() || !lacks_memory(result)) return result;
    result.offloads = cluster.is_cuda();
    if (result.offloads)
        for (const Offload& offload :
             {Offload{.optimizer = true}, Offload{.activations = true}, Offload{true, true}})
            add(result, Search(config, cluster, world, offload).run(most), most);
    if (result.best.empty()) result.given_fits = fits_as_given(config, cluster, world);
    return result;
}

std::string to_text(const SearchResult& result, const Cluster& cluster) {
    std::string text = concat("\nthe fastest ways to divide a step on ", cluster.name, ", of ",
                              result.simulated, " that were simulated; each rank has ",
                              format_bytes(result.memory_available), "\n", table(result.best));
    if (!result.fuller.empty())
        text += "\nthese would be faster, but need more memory\n" + table(result.fuller);
    text += "\nothers were left out\n";
    for (const auto& [why, count] : result.refused)
        text += formatted("  %6d   ", count) + why + "\n";
    return text;
}

std::string problem_of(const SearchResult& result) {
    if (!result.best.empty()) return "";
    if (lacks_memory(result)) {
        const char* const none =
            "none of the ways that were tried to divide a step fits into memory";
        if (result.given_fits)
            return concat(none,
                          ", but the configuration as it is given does; plan it without "
                          "--search");
        return concat(none, result.offloads ? ", not with memory.offload either" : "",
                      "; use more ranks, or GPUs with more memory");
    }
    const auto most =
        std::ranges::max_element(result.refused, {}, [](const auto& why) { return why.second; });
    return concat("no way to divide a step is possible: ",
                  most == result.refused.end() ? "none was found" : most->first,
                  "; change --world or batch.tokens_per_step");
}

Json to_json(const SearchResult& result) {
    Json refused = Json::object();
    for (const auto& [why, count] : result.refused) refused[why] = count;
    return {{"best", json_of(result.best)},
            {"need_more_memory", json_of(result.fuller)},
            {"refused", refused},
            {"simulated", result.simulated},
            {"memory_available_bytes", result.memory_available}};
}

}  // namespace train_gpt
