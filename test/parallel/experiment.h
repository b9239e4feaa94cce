// Training of random models on this process's part of the ranks that mpirun has started, beside the
// same on one rank.
#pragma once
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "model/families/gpt2.h"
#include "parallel/mesh.h"
#include "test/catch.h"
#include "test/model/random_spec.h"
#include "test/random.h"
#include "training/config/load_config.h"
#include "training/trainer.h"

namespace train_gpt::experiment {

struct Batch {
    std::vector<int32_t> tokens, targets, doc_start;
};

/// A training run: its model, settings and micro-batches. The same on all ranks, which draw the
/// same random numbers.
struct Experiment {
    DecoderSpec spec;
    int B, T, micro_batches;
    bool documents = random_int(0, 1) == 0;
    Recompute recompute = std::array{Recompute::none, Recompute::elementwise,
                                     Recompute::block}[static_cast<size_t>(random_int(0, 2))];
    DType dtype = DType::fp32;
    std::string device = "cpu";
    uint64_t seed = test_rng()();
    std::map<std::string, std::string> settings;
    Config::Router router;  // not among the settings, which describe no experts

    Experiment(int tensor_ranks, int data_ranks, int context_ranks = 1);

    Config config(bool one_rank = false) const;

    Batch batch() const;
    std::vector<Batch> step() const;
    std::string described() const;
};

/// A trainer as one of a mesh's ranks, with initial weights.
class Rank {
  public:
    Rank(const Experiment& experiment, const Config& config, const Mesh& mesh,
         const Device& device);

    Trainer& trainer() { return trainer_; }

    /// Trains a step on this rank's micro-batches.
    StepOutcome step(const std::vector<Batch>& batches);

    /// The sum over all ranks of the step's gradient of a parameter, or another state.
    std::vector<double> state(std::string_view which, int i);

    std::vector<float> logits(const std::vector<int32_t>& tokens);

    /// The sum of losses, of the device and by token.
    std::array<double, 2> evaluate(const Batch& batch);

  private:
    void fill(const Batch& batch);

    TokenBatch on_device(const Batch& batch);

    const Mesh& mesh_;
    Config config_;
    Arena arena_;
    Trainer trainer_;
    int64_t step_ = 0;
};

/// The greatest difference, of the largest element.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b);

constexpr int steps = 10;

/// Gradients of the first step, losses and norms of ten, an evaluation and what would be sampled.
void check_as_one_rank(const Experiment& experiment, const Mesh& mesh, const Device& device);

}  // namespace train_gpt::experiment
