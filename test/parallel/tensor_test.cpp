// Tensor-parallel ranks compute what one rank does, whatever else is split; save what any mesh
// loads; and send what the plan says.
#include "parallel/axes/tensor.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "model/families/family.h"
#include "model/families/gpt2.h"
#include "test/catch.h"
#include "test/parallel/experiment.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/planned_traffic.h"
#include "test/random.h"
#include "test/text.h"
#include "tokenizer/tokenizer.h"
#include "training/files/checkpoint.h"
#include "training/files/optimizer_files.h"
#include "training/plan/memory_plan.h"
#include "training/trainer.h"

using namespace train_gpt;
using namespace train_gpt::training_job;
using namespace train_gpt::experiment;

namespace {

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
            const Parameter part = parameter_held_by(p, {rank, ranks});
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

TEST_CASE("the first size that tensor-parallel ranks cannot share is named", "[tensor]") {
    constexpr int64_t multiple = 8;
    int refused = 0;
    for (int repeat = 0; repeat < 200; ++repeat) {
        const int ranks = static_cast<int>(random_int(1, 6));
        const auto size = [&] { return (random_int(0, 2) ? ranks : 1) * random_int(1, 9); };
        const int64_t heads = size(), hidden = size(),
                      words = random_int(0, 1) ? multiple * random_int(1, 7) : random_int(1, 60);
        const std::vector<SharedSize> sizes = {
            {"heads", heads}, {"hidden", hidden}, {"words", words, multiple}};
        CAPTURE(ranks, heads, hidden, words);
        int64_t each = multiple;  // words in the memory of each rank
        while (each * ranks < words) each += multiple;
        const std::string unshared = heads % ranks != 0               ? "heads"
                                     : hidden % ranks != 0            ? "hidden"
                                     : words - each * (ranks - 1) < 1 ? "words"
                                                                      : "";
        const auto problem = tensor_problem(sizes, ranks);
        REQUIRE(problem.has_value() == !unshared.empty());
        CHECK(error_of([&] { require_shared(sizes, ranks); }).empty() == unshared.empty());
        if (!problem) continue;
        ++refused;
        CHECK(contains(problem->text, concat("parallel.tensor = ", ranks, " ranks cannot share ",
                                             unshared, " = ")));
        CHECK((problem->key == "parallel.tensor" && problem->value == ranks));
    }
    CHECK(refused > 0);
}

TEST_CASE("a model that tensor-parallel ranks cannot share is refused with the nearest number",
          "[tensor]") {
    DecoderSpec spec = gpt2.spec(
        {.n_layer = 1, .n_head = 12, .n_embd = 48, .n_ctx = 8, .vocab_size = 2000, .n_ff = 96});
    CHECK(contains(error_of([&] { share_of_spec(spec, 5); }), "parallel.tensor=4 can"));
    CHECK(share_of_spec(spec, 4).n_head == 3);
    CHECK(share_of_spec(spec, 4).layer(0).up_width() == 24);
    spec.vocab_size = 200;  // 128 rows for each of 4 ranks would leave two of them none
    CHECK(error_of([&] { share_of_spec(spec, 4); }) ==
          "parallel.tensor = 4 ranks cannot share model.vocab_size = 200 in equal parts of a "
          "multiple of 128; parallel.tensor=2 can");
    CHECK_NOTHROW(share_of_spec(spec, 2));
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
        const ProgramResult result = run_case_on_ranks(ranks, "ranks: tensor training",
                                                       {{"DEVICE", "cpu"}, {"REPEATS", repeats}});
        INFO(result.output);
        CHECK(result.exit_code == 0);
    }
}

TEST_CASE("tensor-parallel ranks on GPUs have one rank's gradients, losses and logits",
          "[tensor][cuda]") {
    if (skip_without_gpus(2)) return;
    check_case_on_ranks(2, "ranks: tensor training",
                        {{"DEVICE", "cuda"},
                         {"REPEATS", "2"},
                         {"GPUSIM_STREAMS", "lazy"},
                         {"GPUSIM_SEED", std::to_string(random_int(0, 1000))},
                         {"GPUSIM_NCCL_PROGRESS_MS", "300"}});
}

// ---- Checkpoints and traffic --------------------------------------------------------------------

namespace {

/// Masters and moments in optimizer files, in logical coordinates, and weights.
std::map<std::string, std::vector<float>> saved_state(const fs::path& checkpoint,
                                                      const DecoderSpec& spec) {
    const Experiment one(1, 1);
    Arena plan = Arena::counting(Device{});
    const auto build = [&](Arena& arena) {
        return std::make_unique<ParameterStore>(arena, registry_of(spec).parameters,
                                                ParameterStoreOptions{.slots = optimizer_slots()});
    };
    build(plan);
    Arena arena(Device{}, plan);
    const auto store = build(arena);
    for (int i = 0; i < static_cast<int>(store->parameters().size()); ++i)
        for (const OptimizerSlot& state : store->state.saved())
            store->state.write(
                state.name, i, 0,
                std::vector<float>(
                    static_cast<size_t>(store->parameters()[static_cast<size_t>(i)].numel()),
                    std::numeric_limits<float>::quiet_NaN()));
    load_training_state(checkpoint, *store);
    std::map<std::string, std::vector<float>> all;
    for (int i = 0; i < static_cast<int>(store->parameters().size()); ++i) {
        const Parameter& p = store->parameters()[static_cast<size_t>(i)];
        for (const OptimizerSlot& state : store->state.saved()) {
            std::vector<float>& values = all[state.name + "/" + p.name];
            values.resize(static_cast<size_t>(p.numel()));
            store->state.read(state.name, i, 0, values);
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
                parameters.weights.gather_all(rank.trainer().stream);
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
        rank.step(experiment.step());  // weights may be gathered in the step after their update
        const Traffic before = mesh.bytes_sent();
        rank.step(experiment.step());
        const Traffic after = mesh.bytes_sent(),
                      planned = planned_traffic({config, experiment.spec, experiment.dtype,
                                                 experiment.recompute, world.size()});
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
    check_case_on_ranks(4, "ranks: tensor traffic");
}

// ---- The program --------------------------------------------------------------------------------

namespace {

/// A job whose rows 4 ranks can share, on tokens that have a text.
struct SharedJob {
    TemporaryDirectory directory;
    Tokenizer tokenizer = Tokenizer::train(
        std::vector<std::string_view>{"ab abc aab b bab a ba ab a b abba cab"}, 260);
    TrainingJob job;

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
                {"evaluation.tasks", "[\"" + (directory / "choice.jsonl") + "\", \"" +
                                         (directory / "schema.jsonl") + "\", \"" +
                                         (directory / "text.jsonl") + "\"]"},
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
    const TrainingJob& job = shared.job;
    const auto stop = [](int64_t step) { return Command{"--stop-at", std::to_string(step)}; };
    const std::string one = job.train(1, "one"), chain = job.path("chain");
    job.train(2, "chain", tensor(2, 1), stop(random_int(1, 4)));
    job.train(4, "chain", tensor(2, 3, 2), stop(random_int(5, 9)));
    job.train(4, "chain", tensor(4, 0), stop(random_int(10, 14)));
    job.train(1, "chain", {}, stop(16));
    job.train(4, "chain", tensor(2, 2, 2));
    check_close(chain, one, in_fp32_order);
}

TEST_CASE("ranks that share a model evaluate as one rank does, and sample the same text",
          "[tensor][context][pipeline]") {
    if (skip_without_mpirun()) return;
    const SharedJob shared(Settings{{"model.vocab_size", "260"}});  // the tokenizer's
    const TrainingJob& job = shared.job;
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
    write_random_tasks(shared.directory);
    // What the model writes is what it expects most.
    const std::string head = "--- sample\n", written = evaluated(1, "first", {}).second;
    write_random_tasks(shared.directory, written.substr(head.size(), 3));
    const auto [one, text] = evaluated(1, "one", {});
    CHECK(one.contains("hellaswag"));
    const Settings context{{"parallel.context", "2"}}, pipeline{{"parallel.pipeline", "2"}},
        interleaved{{"parallel.schedule", "interleaved"}, {"parallel.stages_per_rank", "2"}};
    int number = 0;
    for (const auto& [ranks, mesh] : {std::pair{2, tensor(2, 1)},
                                      {4, tensor(2, 3)},
                                      {2, pipeline},
                                      {4, context + pipeline + interleaved},
                                      {4, context + tensor(2, 2)}}) {
        CAPTURE(number);
        const auto [metrics, sampled] = evaluated(ranks, concat("shared-", number++), mesh);
        CHECK(sampled == text);
        CHECK(metrics.at("val_loss").get<double>() ==
              Approx(one.at("val_loss").get<double>()).epsilon(1e-6));
        CHECK(metrics.at("hellaswag_normalised") == one.at("hellaswag_normalised"));
        check_close_tasks(metrics, one, 1e-4);
        CHECK(metrics.at("task/text/accuracy") == one.at("task/text/accuracy"));
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
