// Tensor-parallel ranks compute what one rank does, whatever else is split; save what any mesh loads;
// and send what the plan says.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "device/copy.h"
#include "model/families/gpt2.h"
#include "parallel/tensor_group.h"
#include "test/catch.h"
#include "test/model/random_spec.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/random.h"
#include "test/text.h"
#include "training/checkpoint.h"
#include "training/optimizer_files.h"
#include "training/plan.h"
#include "training/trainer.h"

using namespace train_gpt;
using namespace train_gpt::training_job;

namespace {

/// A vocabulary in parts of one or two multiples of 128 rows; the last rank has at least one entry.
int64_t shared_vocabulary(int ranks) {
    const int64_t part = 128 * random_int(1, 2);
    return part * (ranks - 1) + random_int(1, part);
}

/// A decoder that so many ranks can share.
DecoderSpec shared_spec(int ranks) {
    const int n_kv_head = ranks * static_cast<int>(random_int(1, 2)),
              n_head = n_kv_head * static_cast<int>(random_int(1, 2));
    const bool rotary = random_int(0, 1) == 0;
    return gpt2.spec({.n_layer = random_int(1, 3),
                      .n_head = n_head,
                      .n_embd = n_head * random_int(1, 2) * 4,
                      .n_ctx = 32,
                      .vocab_size = shared_vocabulary(ranks),
                      .n_kv_head = n_kv_head,
                      .head_size = 2 * random_int(2, 6),
                      .n_ff = ranks * random_int(3, 20),
                      .norm = random_int(0, 1) ? Norm::rms : Norm::layer,
                      .mlp = random_int(0, 1) ? Mlp::gelu : Mlp::swiglu,
                      .biases = std::array{Biases::none, Biases::qkv,
                                           Biases::all}[static_cast<size_t>(random_int(0, 2))],
                      .qk_norm = rotary && random_int(0, 1) == 0,
                      .tied_head = random_int(0, 1) == 0,
                      .positions = rotary ? Positions::rope : Positions::learned,
                      .init_std = 0.1,
                      .rope_theta = 100});
}

struct Batch {
    std::vector<int32_t> tokens, targets, doc_start;
};

/// A training run: its model, settings and micro-batches. The same on all ranks, which draw the same
/// random numbers.
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

    Experiment(int tensor_ranks, int data_ranks)
        : spec(shared_spec(tensor_ranks)),
          B(static_cast<int>(random_int(1, 2))),
          T(tensor_ranks < 8 ? 8 * static_cast<int>(random_int(1, 3)) : 2 * tensor_ranks),
          micro_batches(static_cast<int>(random_int(data_ranks, 2 * data_ranks + 1))) {
        const auto drawn = [](int64_t least, int64_t most) {
            return std::to_string(random_int(least, most));
        };
        settings = {{"parallel.tensor", std::to_string(tensor_ranks)},
                    {"parallel.zero", drawn(0, 3)},
                    {"parallel.tensor_chunks", drawn(1, 2)},
                    {"parallel.tensor_keep_gathered", random_int(0, 1) ? "true" : "false"},
                    {"parallel.bucket_mb", "0.02"},
                    {"optimizer.z_loss", random_int(0, 1) ? "0.01" : "0"},
                    {"optimizer.epsilon", "0.001"},
                    {"optimizer.grad_clip", "0.5"}};
    }

    Config config(bool one_rank = false) const {
        std::vector<std::string> all{"data.train=synthetic",
                                     "schedule.steps=10",
                                     "kernels.autotune=off",
                                     "model.n_ctx=32",
                                     "model.n_head=64",  // what any mesh can share
                                     "model.n_embd=768",
                                     "run_dir=none",
                                     concat("device=", device),
                                     concat("data.document_mask=", documents ? "true" : "false"),
                                     concat("batch.micro_batch=", B),
                                     concat("batch.sequence_length=", T),
                                     concat("batch.tokens_per_step=", micro_batches * B * T)};
        for (const auto& [key, value] : settings)
            if (!one_rank || !key.starts_with("parallel.")) all.push_back(concat(key, "=", value));
        return parse_config("{}", "test", all);
    }

    Batch batch() const {
        Batch b;
        for (int i = 0; i < B * T; ++i) {
            b.tokens.push_back(static_cast<int32_t>(random_int(0, spec.vocab_size - 1)));
            b.targets.push_back(static_cast<int32_t>(random_int(0, spec.vocab_size - 1)));
            const int t = i % T;
            b.doc_start.push_back(t == 0 ? 0 : random_int(0, 4) == 0 ? t : b.doc_start.back());
        }
        return b;
    }
    std::vector<Batch> step() const {
        std::vector<Batch> batches;
        for (int i = 0; i < micro_batches; ++i) batches.push_back(batch());
        return batches;
    }
    std::string described() const {
        std::string text =
            concat(train_gpt::described(spec), ", C ", spec.n_embd, ", V ", spec.vocab_size, ", B ",
                   B, ", T ", T, ", ", micro_batches, " micro-batches, recompute ",
                   name_of(recompute), documents ? ", documents" : "");
        for (const auto& [key, value] : settings) text += concat(", ", key, "=", value);
        return text;
    }
};

/// A trainer as one of a mesh's ranks, with initial weights.
class Rank {
  public:
    Rank(const Experiment& experiment, const Config& config, const Mesh& mesh, const Device& device)
        : mesh_(mesh),
          config_(config),
          arena_(allocate(plan_memory(config, experiment.spec, experiment.dtype,
                                      experiment.recompute, device, mesh.world().size()))),
          trainer_(config, experiment.spec, experiment.dtype, experiment.recompute, arena_,
                   mesh.layout(), mesh.rank()) {
        trainer_.connect(mesh);
        trainer_.parameters.initialize(experiment.seed);
        trainer_.parameters.gather_all(trainer_.stream);
    }

    Trainer& trainer() { return trainer_; }

    /// Trains a step on this rank's micro-batches.
    StepOutcome step(const std::vector<Batch>& batches) {
        const size_t ranks = static_cast<size_t>(mesh_.size(Axis::data)),
                     first = static_cast<size_t>(mesh_.at(Axis::data));
        const size_t most = (batches.size() + ranks - 1) / ranks;
        const size_t mine = (batches.size() - first + ranks - 1) / ranks;
        trainer_.begin_step(static_cast<int>(mine), static_cast<int>(most));
        int64_t targets = 0;
        for (const Batch& batch : batches) targets += std::ssize(batch.targets);
        for (size_t i = first; i < batches.size(); i += ranks)
            trainer_.micro_batch(on_device(batches[i]));
        for (size_t i = mine; i < most; ++i) trainer_.parameters.skip_micro_batch(trainer_.stream);
        trainer_.update(adamw_step(config_, step_++, 3e-3), 1.0f / static_cast<float>(targets),
                        static_cast<float>(config_.optimizer.grad_clip));
        trainer_.stream.synchronize();
        return trainer_.outcomes.pop();
    }

    /// The sum over all ranks of the step's gradient of a parameter, or another state.
    std::vector<double> state(ParameterStore::State which, int i) {
        const ParameterStore& store = trainer_.parameters;
        const Parameter& p = store.parameters()[static_cast<size_t>(i)];
        const Sharding& sharding = store.sharding();
        std::vector<float> held(static_cast<size_t>(p.numel()),
                                std::numeric_limits<float>::quiet_NaN());
        store.read(which, i, 0, held);
        // Of ranks that hold the same elements, the first one's count.
        const bool counts =
            (sharding.zero > 0 || sharding.rank == 0) && (p.is_part() || sharding.tensor == 0);
        std::vector<double> whole(held.size());
        for (size_t k = 0; counts && k < held.size(); ++k)
            whole[k] = std::isnan(held[k]) ? 0 : held[k];
        mesh_.world().all_reduce_sum(whole);
        return whole;
    }

    std::vector<float> logits(const std::vector<int32_t>& tokens) {
        TokenGenerator& generator = trainer_.generator();
        generator.reset();
        const size_t first = static_cast<size_t>(random_int(1, std::ssize(tokens) - 1));
        generator.feed(trainer_.stream, std::span(tokens).first(first));
        generator.feed(trainer_.stream, std::span(tokens).subspan(first));
        return {generator.logits().begin(), generator.logits().end()};
    }

    double evaluate(const Batch& batch) {
        const EvaluationBatch& to = trainer_.evaluation_batch;
        fill(batch);
        to.run(trainer_.stream, trainer_.model);
        return to.total(trainer_.stream, trainer_.model);
    }

  private:
    void fill(const Batch& batch) {
        const EvaluationBatch& to = trainer_.evaluation_batch;
        std::ranges::copy(batch.tokens, to.tokens.begin());
        std::ranges::copy(batch.targets, to.targets.begin());
        if (!to.doc_start.empty()) std::ranges::copy(batch.doc_start, to.doc_start.begin());
    }

    TokenBatch on_device(const Batch& batch) {
        const EvaluationBatch& to = trainer_.evaluation_batch;
        fill(batch);
        const TokenBatch all = to.on_device();
        const Device& device = trainer_.stream.device;
        if (!device.is_cuda()) return all;
        const auto upload = [&](const int32_t* there, std::span<const int32_t> here) {
            if (there)
                copy_now(device, const_cast<int32_t*>(there), here.data(), here.size_bytes());
        };
        upload(all.tokens, to.tokens);
        upload(all.targets, to.targets);
        upload(all.doc_start, to.doc_start);
        return all;
    }

    const Mesh& mesh_;
    Config config_;
    Arena arena_;
    Trainer trainer_;
    int64_t step_ = 0;
};

double largest(const std::vector<double>& values) {
    double most = 0;
    for (const double value : values) most = std::max(most, std::abs(value));
    return most;
}

/// The greatest difference, of the largest element.
double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
    REQUIRE(a.size() == b.size());
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double difference = std::abs(a[i] - b[i]);
        if (!(difference <= most)) most = difference;
    }
    return most / std::max(largest(b), 1e-30);
}

constexpr int steps = 10;

/// Gradients of the first step, losses and norms of ten, an evaluation and what would be sampled.
void check_as_one_rank(const Experiment& experiment, const Mesh& mesh, const Device& device) {
    INFO(experiment.described() << ", rank " << mesh.rank() << " of " << mesh.world().size());
    const Mesh alone;
    Rank one(experiment, experiment.config(true), alone, device);
    Rank rank(experiment, experiment.config(), mesh, device);
    for (int step = 0; step < steps; ++step) {
        CAPTURE(step);
        const std::vector<Batch> batches = experiment.step();
        const StepOutcome expected = one.step(batches), ours = rank.step(batches);
        CHECK(std::abs(ours.sums.loss - expected.sums.loss) <= 1e-5 * expected.sums.loss);
        CHECK(std::abs(ours.state.norm - expected.state.norm) <= 2e-5 * expected.state.norm);
        if (step > 0) continue;
        for (int i = 0; i < static_cast<int>(one.trainer().registry.parameters.size()); ++i) {
            INFO(one.trainer().registry.parameters[static_cast<size_t>(i)].name);
            const auto gradient = ParameterStore::State::gradient;
            const double difference =
                relative_difference(rank.state(gradient, i), one.state(gradient, i));
            CHECK(difference <= 2e-5);
        }
    }
    const Batch batch = experiment.batch();
    const double expected = one.evaluate(batch);
    CHECK(std::abs(rank.evaluate(batch) - expected) <= 1e-5 * expected);
    const std::vector<int32_t> prompt(batch.tokens.begin(), batch.tokens.begin() + 7);
    const std::vector<float> ours = rank.logits(prompt), theirs = one.logits(prompt);
    CHECK(relative_difference({ours.begin(), ours.end()}, {theirs.begin(), theirs.end()}) <= 1e-4);
}

int ranks_of(const char* variable) { return std::atoi(std::getenv(variable)); }

MeshSizes tensor_of(int ranks) { return {.tensor = ranks}; }

}  // namespace

// ---- Ranks and what they hold -------------------------------------------------------------------

TEST_CASE("every row is in one chunk and in one rank's strip of it", "[tensor]") {
    for (int repeat = 0; repeat < 50; ++repeat) {
        const int ranks = static_cast<int>(random_int(1, 8)),
                  chunks = static_cast<int>(random_int(1, 5));
        const int64_t M = ranks * chunks * random_int(1, 7);
        std::vector<int> owner(static_cast<size_t>(M), -1);
        for (int rank = 0; rank < ranks; ++rank) {
            const TensorGroup group({.rank = {rank, ranks}, .chunks = chunks});
            int64_t held = 0;
            for (int chunk = 0; chunk < chunks; ++chunk) {
                const TensorGroup::Rows rows = group.rows(M, chunk);
                CHECK(rows.held.first == held);
                held = rows.held.end();
                CHECK(intersection(rows.strip, rows.chunk) == rows.strip);
                // A chunk's strips are in the order of ranks, as a gather puts them.
                CHECK(rows.strip.first == rows.chunk.first + rank * rows.strip.n);
                for (int64_t row = rows.strip.first; row < rows.strip.end(); ++row) {
                    CHECK(owner[static_cast<size_t>(row)] == -1);
                    owner[static_cast<size_t>(row)] = rank;
                }
            }
            CHECK(held == group.rows_of_rank(M));
        }
        CHECK(std::ranges::count(owner, -1) == 0);
    }
}

TEST_CASE("rows that cannot be cut evenly are refused with what can", "[tensor]") {
    const TensorGroup group({.rank = {0, 4}, .chunks = 3});
    CHECK_NOTHROW(group.require_even(24, "tokens"));
    const std::string chunks = error_of([&] { group.require_even(16, "tokens"); });
    CHECK(contains(chunks, "16 tokens cannot be cut into 3 chunks of 4 equal parts"));
    CHECK(contains(chunks, "parallel.tensor_chunks=2 can"));
    CHECK(
        contains(error_of([&] { group.require_even(18, "tokens"); }), "a product that 12 divides"));
}

TEST_CASE("parts of a tensor hold each of its elements once, in the order of the tensor",
          "[tensor]") {
    for (int repeat = 0; repeat < 50; ++repeat) {
        const int ranks = static_cast<int>(random_int(2, 5));
        Parameter p;
        p.name = "p";
        const int axis = static_cast<int>(random_int(0, 1));
        const int64_t other = random_int(1, 6);
        std::vector<int64_t> sections;
        const bool vocabulary = axis == 0 && random_int(0, 1);
        if (vocabulary) {
            const int64_t part_rows = 8 * random_int(1, 3);
            sections = {part_rows * (ranks - 1) + random_int(1, part_rows)};
        } else {
            for (int64_t i = random_int(1, 3); i > 0; --i)
                sections.push_back(ranks * random_int(1, 4));
        }
        int64_t extent = 0;
        for (const int64_t section : sections) extent += section;
        p.shape = p.padded = axis == 0 ? std::vector{extent, other} : std::vector{other, extent};
        p.split = TensorSplit{axis, sections, vocabulary ? 8 : 1};

        std::vector<int> held_by(static_cast<size_t>(p.numel()), -1);
        for (int rank = 0; rank < ranks; ++rank) {
            const Parameter part = tensor_part(p, {rank, ranks});
            int64_t held = 0, before = -1;
            const std::vector<HeldRun> runs = held_runs(part);
            for (const HeldRun& run : runs) {
                CHECK((run.held == held && run.logical > before && run.n > 0));
                held += run.n;
                before = run.logical + run.n - 1;
                for (int64_t i = run.logical; i < run.logical + run.n; ++i) {
                    CHECK(held_by[static_cast<size_t>(i)] == -1);
                    held_by[static_cast<size_t>(i)] = rank;
                    // Where the split says
                    const int64_t along = axis == 0 ? i / other : i % extent;
                    bool found = false;
                    for (const Range& range : part_of(p, rank, ranks))
                        found |= along >= range.first && along < range.end();
                    CHECK(found);
                }
            }
            CHECK(held == part.held_numel());
            CHECK((held <= part.padded_numel() && part.is_part()));
            if (!vocabulary) CHECK(part.padded_numel() == p.numel() / ranks);

            // A range of memory has the same elements as its runs, and files describe them.
            const int64_t first = random_int(0, held - 1), n = random_int(1, held - first);
            const std::vector<HeldRun> some = runs_in_memory(runs, {first, n});
            std::vector<int64_t> elements, joined_elements;
            for (const HeldRun& run : some)
                for (int64_t i = 0; i < run.n; ++i) elements.push_back(run.logical + i);
            CHECK(std::ssize(elements) == n);
            for (const ElementRuns& run : joined(some))
                for (int64_t i = 0; i < run.count; ++i)
                    for (int64_t k = 0; k < run.n; ++k)
                        joined_elements.push_back(run.run(i).first + k);
            CHECK(joined_elements == elements);
            const std::vector<HeldRun> again =
                runs_in_tensor(runs, {elements.front(), elements.back() + 1 - elements.front()});
            REQUIRE(!again.empty());
            CHECK((again.front().held == first && again.back().held + again.back().n == first + n));
        }
        CHECK(std::ranges::count(held_by, -1) == 0);
    }
}

TEST_CASE("a model that tensor-parallel ranks cannot share is refused with the nearest number",
          "[tensor]") {
    DecoderSpec spec = gpt2.spec(
        {.n_layer = 1, .n_head = 12, .n_embd = 48, .n_ctx = 8, .vocab_size = 2000, .n_ff = 96});
    CHECK(contains(error_of([&] { tensor_part(spec, 5); }), "parallel.tensor=4 can"));
    CHECK(tensor_part(spec, 4).n_head == 3);
    CHECK(tensor_part(spec, 4).up_width() == 24);
    spec.vocab_size = 200;  // 128 rows for each of 4 ranks would leave two of them none
    CHECK(contains(error_of([&] { tensor_part(spec, 4); }), "parallel.tensor=2 can"));
    CHECK_NOTHROW(tensor_part(spec, 2));
}

// ---- The same training --------------------------------------------------------------------------

TEST_CASE("ranks: tensor training", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const char* wanted = std::getenv("DEVICE");
    const Device device = device_of_rank(world, wanted);
    const int repeats = ranks_of("REPEATS");
    for (int tensor = 2; tensor <= world.size(); tensor *= 2) {
        if (world.size() % tensor != 0) continue;
        Activity activity;
        const Mesh mesh(world, tensor_of(tensor), open_communicator(world, device, activity));
        for (int repeat = 0; repeat < repeats; ++repeat) {
            Experiment experiment(tensor, world.size() / tensor);
            experiment.device = wanted;
            check_as_one_rank(experiment, mesh, device);
        }
    }
}

TEST_CASE("tensor-parallel ranks have one rank's gradients, losses and logits", "[tensor]") {
    if (skip_without_mpirun()) return;
    for (const auto& [ranks, repeats] : {std::pair{2, "6"}, {4, "3"}}) {
        const ProgramResult result = run_case_on_ranks(ranks, "ranks: tensor training",
                                                       {{"DEVICE", "cpu"}, {"REPEATS", repeats}});
        INFO(result.output);
        CHECK(result.exit_code == 0);
    }
}

TEST_CASE("tensor-parallel ranks in groups of any number have one rank's results",
          "[tensor][.][long]") {
    if (skip_without_mpirun()) return;
    for (const auto& [ranks, repeats] : {std::pair{2, "20"}, {4, "12"}, {6, "8"}, {8, "4"}}) {
        const ProgramResult result = run_case_on_ranks(
            ranks, "ranks: tensor training", {{"DEVICE", "cpu"}, {"REPEATS", repeats}}, 600);
        INFO(result.output);
        CHECK(result.exit_code == 0);
    }
}

TEST_CASE("tensor-parallel ranks on GPUs have one rank's gradients, losses and logits",
          "[tensor][cuda]") {
    if (skip_without_gpus(2)) return;
    const ProgramResult result =
        run_case_on_ranks(2, "ranks: tensor training",
                          {{"DEVICE", "cuda"},
                           {"REPEATS", "2"},
                           {"GPUSIM_STREAMS", "lazy"},
                           {"GPUSIM_SEED", std::to_string(random_int(0, 1000))},
                           {"GPUSIM_NCCL_PROGRESS_MS", "300"}},
                          240);
    INFO(result.output);
    CHECK(result.exit_code == 0);
}

// ---- Checkpoints and traffic --------------------------------------------------------------------

namespace {

/// Masters and moments in optimizer files, in logical coordinates, and weights.
std::map<std::string, std::vector<float>> saved_state(const fs::path& checkpoint,
                                                      const DecoderSpec& spec) {
    const Experiment one(1, 1);
    Arena plan = Arena::counting(Device{});
    const auto build = [&](Arena& arena) {
        return std::make_unique<ParameterStore>(arena, registry_of(spec).parameters, DType::fp32,
                                                ParameterStore::Use::training);
    };
    build(plan);
    Arena arena(Device{}, plan);
    const auto store = build(arena);
    for (int i = 0; i < static_cast<int>(store->parameters().size()); ++i)
        for (const auto state : {ParameterStore::State::master, ParameterStore::State::moment1,
                                 ParameterStore::State::moment2})
            store->write(
                state, i, 0,
                std::vector<float>(
                    static_cast<size_t>(store->parameters()[static_cast<size_t>(i)].numel()),
                    std::numeric_limits<float>::quiet_NaN()));
    load_training_state(checkpoint, *store);
    std::map<std::string, std::vector<float>> all;
    for (int i = 0; i < static_cast<int>(store->parameters().size()); ++i) {
        const Parameter& p = store->parameters()[static_cast<size_t>(i)];
        for (const auto& [name, state] : {std::pair{"master/", ParameterStore::State::master},
                                          {"m/", ParameterStore::State::moment1},
                                          {"v/", ParameterStore::State::moment2}}) {
            std::vector<float>& values = all[name + p.name];
            values.resize(static_cast<size_t>(p.numel()));
            store->read(state, i, 0, values);
        }
        std::vector<float>& weights = all["weights/" + p.name];
        weights.resize(static_cast<size_t>(p.numel()));
        open_model_folder(checkpoint).read(p, 0, weights);
    }
    return all;
}

}  // namespace

TEST_CASE("ranks: tensor checkpoints", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const fs::path folder = std::getenv("FOLDER");
    Experiment experiment(world.size(), 1);
    experiment.micro_batches = world.size();
    experiment.dtype = random_int(0, 1) ? DType::bf16 : DType::fp32;
    INFO(experiment.described() << ", " << name_of(experiment.dtype));
    fs::path from;
    std::map<std::string, std::vector<float>> expected;
    int64_t number = 0;
    // Each mesh loads what the one before it saved.
    for (int tensor = 1; tensor <= world.size(); tensor *= 2)
        for (const char* zero : {"0", "1", "2", "3"}) {
            Activity activity;
            const Mesh mesh(world, tensor_of(tensor), open_communicator(world, Device{}, activity));
            experiment.settings["parallel.tensor"] = std::to_string(tensor);
            experiment.settings["parallel.zero"] = zero;
            const Config config = experiment.config();
            Rank rank(experiment, config, mesh, Device{});
            ParameterStore& parameters = rank.trainer().parameters;
            if (from.empty()) {
                for (int i = 0; i < 3; ++i) rank.step(experiment.step());
            } else {
                load_training_state(from, parameters);
                parameters.gather_all(rank.trainer().stream);
            }
            from = save_checkpoint(folder, {++number, config, experiment.spec, parameters}, mesh);
            INFO(from << ", tensor " << tensor << ", zero " << zero);
            verify_checkpoint(from, Verify::everything);
            const auto saved = saved_state(from, experiment.spec);
            if (expected.empty()) expected = saved;
            CHECK(saved.size() == expected.size());
            for (const auto& [name, values] : saved) {
                INFO(name);
                CHECK(same_bits(values, expected.at(name)));
                CHECK(std::ranges::all_of(values, [](float v) { return std::isfinite(v); }));
            }
            world.barrier();
        }
}

TEST_CASE("checkpoints pass between meshes without a bit's change", "[tensor]") {
    if (skip_without_mpirun()) return;
    for (const int ranks : {2, 4}) {
        const TemporaryDirectory folder;
        const ProgramResult result =
            run_case_on_ranks(ranks, "ranks: tensor checkpoints", {{"FOLDER", folder.path()}});
        INFO(result.output);
        CHECK(result.exit_code == 0);
    }
}

TEST_CASE("ranks: tensor traffic", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    for (int repeat = 0; repeat < 6; ++repeat) {
        const int tensor = repeat % 2 == 0 ? 2 : world.size();
        Activity activity;
        const Mesh mesh(world, tensor_of(tensor), open_communicator(world, Device{}, activity));
        Experiment experiment(tensor, world.size() / tensor);
        experiment.micro_batches = world.size() / tensor * 2;
        INFO(experiment.described());
        const Config config = experiment.config();
        Rank rank(experiment, config, mesh, Device{});
        const Traffic before = mesh.bytes_sent();
        rank.step(experiment.step());
        const Traffic after = mesh.bytes_sent(),
                      planned = step_traffic(config, experiment.spec, experiment.dtype,
                                             world.size(), experiment.recompute);
        CHECK(planned.contains("tensor"));
        for (const auto& [group, bytes] : planned) {
            // Ranks of a group share what does not divide evenly.
            double counted[] = {static_cast<double>(after.at(group) - before.at(group))};
            world.all_reduce_sum(counted);
            CAPTURE(group, bytes);
            CHECK(std::abs(counted[0] - static_cast<double>(bytes * world.size())) <= world.size());
        }
    }
}

TEST_CASE("ranks send along each axis what the plan says", "[tensor]") {
    if (skip_without_mpirun()) return;
    const ProgramResult result = run_case_on_ranks(4, "ranks: tensor traffic");
    INFO(result.output);
    CHECK(result.exit_code == 0);
}

// ---- The program --------------------------------------------------------------------------------

namespace {

/// A job whose rows 4 ranks can share, on tokens that have a text.
struct SharedJob {
    TemporaryDirectory directory;
    Tokenizer tokenizer = Tokenizer::train(
        std::vector<std::string_view>{"ab abc aab b bab a ba ab a b abba cab"}, 260);
    Job job;

    explicit SharedJob(const Settings& more = {}) : job(6, settings(more)) {}

    Settings settings(const Settings& more) {
        tokenizer.save(directory / "tokenizer.json");
        write(directory / "hellaswag.jsonl", random_examples(5));
        const Settings shared{{"model.n_head", "4"},
                              {"model.n_embd", "32"},
                              {"model.n_ctx", "16"},
                              // More than the tokenizer's, for 4 parts of 128 rows
                              {"model.vocab_size", "420"},
                              {"batch.sequence_length", "16"},
                              {"batch.micro_batch", "1"},
                              {"batch.tokens_per_step", "96"}};
        return shared + more;
    }
    Settings with_text() const {
        return {{"tokenizer.path", directory / "tokenizer.json"},
                {"evaluation.hellaswag", directory / "hellaswag.jsonl"},
                {"sampling.samples", "1"},
                {"sampling.max_tokens", "24"},
                {"sampling.temperature", "0"}};
    }
};

Settings tensor(int ranks, int zero, int chunks = 1) {
    return {{"parallel.tensor", std::to_string(ranks)},
            {"parallel.zero", std::to_string(zero)},
            {"parallel.tensor_chunks", std::to_string(chunks)}};
}

}  // namespace

TEST_CASE("a run whose mesh changes at each start trains what one rank trains", "[tensor]") {
    if (skip_without_mpirun()) return;
    const bool llama = random_int(0, 1) == 0;
    const SharedJob shared(
        llama ? Settings{{"model.family", "llama"},
                         {"model.n_kv_head", "4"},
                         {"model.n_ff", "64"},
                         // With 0.003 its gradients grow to many times their norm in single steps,
                         // and rounding errors with them.
                         {"optimizer.learning_rate", "0.0005"}}
              : Settings{});
    const Job& job = shared.job;
    const auto stop = [](int64_t step) { return Command{"--stop-at", std::to_string(step)}; };
    const std::string one = job.train(1, "one"), chain = job.path("chain");
    job.train(2, "chain", tensor(2, 1), stop(random_int(1, 4)));
    job.train(4, "chain", tensor(2, 3, 2), stop(random_int(5, 9)));
    job.train(4, "chain", tensor(4, 0), stop(random_int(10, 14)));
    job.train(1, "chain", {}, stop(16));
    job.train(4, "chain", tensor(2, 2, 2));
    check_close(chain, one, in_fp32_order);
}

TEST_CASE("tensor-parallel ranks evaluate as one rank does, and sample the same text", "[tensor]") {
    if (skip_without_mpirun()) return;
    const SharedJob shared(Settings{{"model.vocab_size", "260"}});  // the tokenizer's
    const Job& job = shared.job;
    const std::string trained = job.train(1, "trained");
    const auto text_of = [](const std::string& output) {
        const size_t at = output.find("--- sample");
        REQUIRE(at != std::string::npos);
        return output.substr(at, output.rfind("step ") - at);
    };
    // A finished run without its metrics has only its last evaluation and its samples to do.
    const auto evaluated = [&](int ranks, const std::string& name, const Settings& mesh) {
        fs::copy(trained, job.path(name), fs::copy_options::recursive);
        fs::remove(job.path(name) + "/metrics.jsonl");
        const Settings settings = mesh + shared.with_text();
        const ProgramResult result = ranks == 1 ? run_program(job.command("train", name, settings),
                                                              {{"OMP_NUM_THREADS", "1"}})
                                                : job.start(ranks, name, settings);
        INFO(result.output);
        REQUIRE(result.exit_code == 0);
        return std::pair{metrics_of(job.path(name)).back(), text_of(result.output)};
    };
    const auto [one, text] = evaluated(1, "one", {});
    CHECK(one.contains("hellaswag"));
    for (const auto& [ranks, mesh] : {std::pair{2, tensor(2, 1)}, {4, tensor(2, 3)}}) {
        const auto [metrics, sampled] = evaluated(ranks, concat("on-", ranks), mesh);
        CHECK(sampled == text);
        CHECK(metrics.at("val_loss").get<double>() ==
              Approx(one.at("val_loss").get<double>()).epsilon(1e-6));
        CHECK(metrics.at("hellaswag_normalised") == one.at("hellaswag_normalised"));
    }
}

TEST_CASE("a gradient of a tensor-parallel rank that is not finite stops all with one sentence",
          "[tensor]") {
    if (skip_without_mpirun()) return;
    const SharedJob shared({{"optimizer.learning_rate", "1e30"}, {"optimizer.grad_clip", "0"}});
    const ProgramResult result = shared.job.start(2, "run", tensor(2, 1));
    INFO(result.output);
    CHECK(result.exit_code == 1);
    const size_t at = result.output.find("train_gpt: the gradient of step ");
    REQUIRE(at != std::string::npos);
    CHECK(result.output.find("train_gpt: ", at + 1) == std::string::npos);
    CHECK(contains(result.output, "is not finite (first in "));
}

TEST_CASE("meshes whose ranks cannot share the rows or the vocabulary are refused", "[tensor]") {
    if (skip_without_mpirun()) return;
    const auto output = [](const SharedJob& shared, const Settings& settings) {
        const ProgramResult result = shared.job.start(4, "run", settings);
        CHECK(result.exit_code != 0);
        return result.output;
    };
    CHECK(contains(output(SharedJob(), tensor(4, 1, 3)), "parallel.tensor_chunks=2 can"));
    CHECK(contains(output(SharedJob(Settings{{"model.vocab_size", "300"}}), tensor(4, 1)),
                   "parallel.tensor=2 can"));
}
