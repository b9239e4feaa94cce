// Training on a mesh, in this process's part of the ranks that mpirun has started: many meshes are
// tried by one start of ranks.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "parallel/mesh.h"
#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "training/trainer.h"

namespace train_gpt::mesh_job {

/// A mesh, and a run on it.
struct MeshCase {
    const char* family;
    int micro_batches;
    const char* dtype = "fp32";
    int tensor = 1, data = 1, zero = 0, shard_ranks = 0, context = 1;
    bool has_documents = false;
    bool exact = false;              // parallel.sums
    bool muon = false;               // optimizer.name
    bool many_experts = false;       // more than there are tokens for
    const char* state = "fp32";      // optimizer.state_dtype
    bool offload = false;            // memory.offload: all that can be
    const char* recompute = "none";  // memory.recompute
    const char* fp8 = "off";         // precision.fp8; products are then wide enough for it
    struct Stages {
        int ranks = 1;
        const char* schedule = "1f1b";
        int per_rank = 1;
    } pipeline = {};

    int ranks() const { return tensor * data * context * pipeline.ranks; }
};

/// A row of a table of cases: trains("gpt2", 5).data(2).zero(3) is GPT-2 in five micro-batches on
/// two data-parallel ranks with ZeRO-3.
class MeshRow {
  public:
    constexpr explicit MeshRow(const MeshCase& c) : case_(c) {}
    constexpr operator MeshCase() const { return case_; }  // NOLINT(google-explicit-constructor)

    constexpr MeshRow bf16() const { return with(&MeshCase::dtype, "bf16"); }
    constexpr MeshRow tensor(int ranks) const { return with(&MeshCase::tensor, ranks); }
    constexpr MeshRow data(int ranks) const { return with(&MeshCase::data, ranks); }
    constexpr MeshRow zero(int stage) const { return with(&MeshCase::zero, stage); }
    constexpr MeshRow shard_ranks(int ranks) const { return with(&MeshCase::shard_ranks, ranks); }
    constexpr MeshRow context(int ranks) const { return with(&MeshCase::context, ranks); }
    constexpr MeshRow documents() const { return with(&MeshCase::has_documents, true); }
    constexpr MeshRow exact() const { return with(&MeshCase::exact, true); }
    constexpr MeshRow muon() const { return with(&MeshCase::muon, true); }
    constexpr MeshRow fp8(const char* recipe) const { return with(&MeshCase::fp8, recipe); }
    constexpr MeshRow offload() const { return with(&MeshCase::offload, true); }
    constexpr MeshRow recompute(const char* level) const {
        return with(&MeshCase::recompute, level);
    }
    constexpr MeshRow state(const char* dtype) const { return with(&MeshCase::state, dtype); }
    constexpr MeshRow many_experts() const { return with(&MeshCase::many_experts, true); }
    constexpr MeshRow pipeline(int ranks, const char* schedule = "1f1b",
                               int stages_per_rank = 1) const {
        return with(&MeshCase::pipeline, {ranks, schedule, stages_per_rank});
    }

  private:
    template <class T>
    constexpr MeshRow with(T MeshCase::*member, std::type_identity_t<T> value) const {
        MeshRow changed = *this;
        changed.case_.*member = value;
        return changed;
    }

    MeshCase case_;
};
constexpr MeshRow trains(const char* family, int micro_batches) {
    return MeshRow({.family = family, .micro_batches = micro_batches});
}

std::string name_of(const MeshCase& c);

/// The configuration of a case, the same for the same seed; of one rank if `split` is false.
Config config_of(const MeshCase& c, uint64_t seed, const std::string& device, bool split = true);

/// A run on the ranks of a world, or of one rank.
class MeshRun {
  public:
    /// choose(trainer) is called where a run chooses its kernels.
    MeshRun(const World& world, const Device& device, const Config& config,
            const std::function<void(Trainer&)>& choose = {});

    const Mesh& mesh() const { return mesh_; }
    const Config& config() const { return config_; }
    const DecoderSpec& spec() const { return spec_; }
    Trainer& trainer() { return trainer_; }
    int ranks() const { return mesh_.layout().world(); }
    bool has_most_micro_batches() const {
        return loader_.micro_batches() == loader_.most_micro_batches();
    }

    StepOutcome step();
    /// A step whose outcome is not taken yet. before(i): before micro-batch i is computed.
    void submit(const std::function<void(int)>& before = {});

    /// Leaves the gradients of one micro-batch of random tokens, which only one of the
    /// data-parallel ranks has; no update.
    void lone_micro_batch(int owner, uint64_t seed);

    /// A state of every parameter (ParameterState), put together from all ranks, on all of them.
    std::vector<std::vector<double>> values_of(std::string_view state);
    /// The last gradient sums over all ranks.
    std::vector<std::vector<double>> gradients() { return values_of(ParameterState::gradient); }

    /// Where exact sums overflow, the step comes again. `ahead`: it is known to overflow, and the
    /// next step is submitted before its outcome is taken.
    StepOutcome exact_step(bool ahead = false);
    int repeated() const { return repeated_; }
    /// After so many steps, as a run that resumes.
    void skip(int64_t steps) { loader_.seek(steps_ = steps); }

  private:
    /// Each router has counted every token of the step once, on whichever rank.
    void check_counts(const RouterReport& report) const;

    TrainSource sources() const;
    LoaderOptions loading(const Config& config) const;

    Config config_;
    DecoderSpec spec_;
    DType dtype_;
    Recompute recompute_;
    Mesh mesh_;
    Arena arena_;
    Trainer trainer_;
    TrainLoader loader_;
    int64_t steps_ = 0;
    int repeated_ = 0;
};

/// Gives each of the next cases, as many as fit, a part of the ranks, until all have had one.
/// check(part, case, its number) runs on the ranks of the part.
template <class Check>
void on_parts(const World& world, std::span<const MeshCase> cases, Check&& check) {
    for (size_t first = 0, next = 0; first < cases.size(); first = next) {
        int used = 0;
        std::optional<size_t> mine;
        for (; next < cases.size() && used + cases[next].ranks() <= world.size(); ++next) {
            const int end = used + cases[next].ranks();
            if (world.rank() >= used && world.rank() < end) mine = next;
            used = end;
        }
        REQUIRE(next > first);
        const World part = world.split(static_cast<int>(mine ? *mine - first : cases.size()));
        if (mine) check(part, cases[*mine], *mine);
        world.barrier();
    }
}

/// An adverse order of a simulated GPU's streams, another one each time.
Environment late_streams();

}  // namespace train_gpt::mesh_job
