// The program on many ranks. Whatever their number and ZeRO's stage, they train what one rank
// trains, agree before they begin, save what any other number can resume from, and send and hold
// what the formulas say. TRAIN_GPT names the program, as in test/commands/.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "kernels/adamw.h"
#include "model/families/family.h"
#include "parallel/state/bucket_layout.h"
#include "test/catch.h"
#include "test/dataloader/shard_files.h"
#include "test/kernels/test_device.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/planned_traffic.h"
#include "test/random.h"
#include "test/text.h"
#include "tokenizer/tokenizer.h"
#include "training/files/safetensors.h"
#include "training/plan/memory_plan.h"
#include "training/trainer.h"

#ifdef TRAIN_GPT_CUDA
#include "device/cuda.h"
#endif

using namespace train_gpt;
using namespace train_gpt::training_job;

// ---- The same training --------------------------------------------------------------------------

TEST_CASE("ranks train what one rank trains, and ZeRO 0 and 1 give the same bits", "[training]") {
    SECTION("in fp32, some with a micro-batch more than others") {
        const TrainingJob job(7);
        const std::string one = job.train(1, "one");
        CHECK(metrics_of(one).back().at("val_loss").get<double>() <
              metrics_of(one)[0].at("val_loss").get<double>());
        check_stages(job, one, 3, {}, in_fp32_order);
        check_equal(job.train(2, "once", zero(2)), job.train(2, "again", zero(2)));
    }
    SECTION("in bf16, with one micro-batch each") {
        const TrainingJob job(4, in_bf16);
        check_stages(job, job.train(1, "one"), 4, {}, in_bf16_order);
    }
    SECTION("sums sent in bf16") {
        const TrainingJob job(6);
        const std::string one = job.train(1, "one", summed_in_fp32);
        check_stages(job, one, 2, sent_in_bf16, in_bf16_order);
        // They really are.
        CHECK(distance(job.train(2, "two", sent_in_bf16), one, 20).first > bf16_roundoff / 16);
    }
}

TEST_CASE("any number of ranks trains what one rank trains", "[training][.][long]") {
    for (const Dtype& dtype : dtypes)
        for (const int micro_batches : {8, 11}) {
            const TrainingJob job(micro_batches, dtype.settings());
            const std::string one = job.train(1, "one"),
                              in_fp32 = job.train(1, "one-fp32", summed_in_fp32);
            for (const int ranks : {2, 3, 4, 8}) {
                CAPTURE(dtype.name, micro_batches, ranks);
                check_stages(job, one, ranks, {}, dtype.bounds);
                check_stages(job, in_fp32, ranks, sent_in_bf16, in_bf16_order);
            }
        }
}

TEST_CASE("ranks train a model of any family as one rank does", "[training]") {
    const char* const families[] = {"llama", "qwen2", "qwen3", "mistral"};
    const Dtype& dtype = random_dtype();
    const Settings settings{{"model.family", families[random_int(0, 3)]},
                            {"model.n_head", "6"},
                            {"model.n_kv_head", std::to_string(random_int(1, 3))},
                            {"model.n_embd", "42"},
                            {"model.head_size", std::to_string(2 * random_int(2, 6))},
                            {"model.n_ff", std::to_string(8 * random_int(5, 15))},
                            {"model.tied_head", random_int(0, 1) ? "on" : "off"},
                            // Enough buckets of the smallest of these blocks
                            {"parallel.bucket_mb", "0.02"},
                            // Longer runs amplify rounding errors more than GPT-2's.
                            {"schedule.steps", "3"}};
    const TrainingJob job(6, settings + dtype.settings());
    CAPTURE(settings.at("model.family"), dtype.name);
    const std::string one = job.train(1, "one");
    for (const int ranks : {2, 3, 4}) {
        CAPTURE(ranks);
        check_stages(job, one, ranks, {}, dtype.bounds);
    }
}

// ---- Evaluation ---------------------------------------------------------------------------------

TEST_CASE("validation loss and HellaSwag are those of one rank, bit for bit", "[training]") {
    const TemporaryDirectory directory;
    const std::string text = "ab abc aab b bab a ba ab a b";
    const Tokenizer tokenizer = Tokenizer::train(std::vector<std::string_view>{text}, 260);
    tokenizer.save(directory / "tokenizer.json");
    write(directory / "hellaswag.jsonl", random_examples(5));
    const TrainingJob job(4, {{"model.vocab_size", std::to_string(tokenizer.vocab_size())},
                              {"tokenizer.path", directory / "tokenizer.json"},
                              {"evaluation.hellaswag", directory / "hellaswag.jsonl"},
                              {"evaluation.max_tokens", "0"},
                              {"sampling.samples", "0"},
                              {"precision.dtype", random_dtype().name}});
    const std::string trained = job.train(1, "trained");
    // A finished run without its metrics has only its last evaluation to do.
    const auto evaluated = [&](int ranks, const std::string& tokens, const Settings& more = {}) {
        const std::string name = concat(ranks, "-", tokens, "-", more.size());
        fs::copy(trained, job.path(name), fs::copy_options::recursive);
        fs::remove(job.path(name) + "/metrics.jsonl");
        const std::vector<SortedJson> metrics =
            metrics_of(job.train(ranks, name, more + Settings{{"evaluation.max_tokens", tokens}}));
        REQUIRE(metrics.size() == 1);
        return metrics[0];
    };
    const SortedJson all = evaluated(1, "0"), one_window = evaluated(1, "5");
    CHECK(all == metrics_of(trained).back());
    for (const char* key :
         {"val_loss", "val_bits_per_byte", "val_tokens", "hellaswag", "hellaswag_normalised"})
        CHECK(all.contains(key));
    CHECK(one_window.at("val_tokens") == 5);
    CHECK(evaluated(2, "0") == all);
    CHECK(evaluated(3, "0") == all);
    CHECK(evaluated(3, "5") == one_window);  // two ranks have nothing to do
    // Ranks that share their weights run the model equally often.
    CHECK(evaluated(3, "0", zero(3)) == all);
    CHECK(evaluated(3, "5", zero(3)) == one_window);
}

TEST_CASE("tasks have the scores of one rank, bit for bit where each rank has the model",
          "[training]") {
    const TemporaryDirectory directory;
    const std::string text = "ab abc aab b bab a ba ab a b";
    const Tokenizer tokenizer = Tokenizer::train(std::vector<std::string_view>{text}, 260);
    tokenizer.save(directory / "tokenizer.json");
    write_random_tasks(directory);
    const Dtype& dtype = random_dtype();
    const TrainingJob job(4, {{"model.vocab_size", std::to_string(tokenizer.vocab_size())},
                              {"tokenizer.path", directory / "tokenizer.json"},
                              {"evaluation.tasks", directory / "*.jsonl"},
                              {"evaluation.task_items", std::to_string(random_int(2, 6))},
                              {"evaluation.max_tokens", "5"},
                              {"sampling.samples", "0"},
                              {"precision.dtype", dtype.name}});
    const std::string trained = job.train(1, "trained");
    const auto evaluated = [&](int ranks, const Settings& more = {}) {
        const std::string name = concat(ranks, "-", more.size());
        fs::copy(trained, job.path(name), fs::copy_options::recursive);
        fs::remove(job.path(name) + "/metrics.jsonl");
        return metrics_of(job.train(ranks, name, more)).back();
    };
    const SortedJson one = evaluated(1);
    for (const char* key : {"task/choice/accuracy", "task/schema/stderr", "task/text/accuracy"})
        CHECK(one.contains(key));
    CHECK(evaluated(2) == one);
    CHECK(evaluated(3) == one);  // some of which have no item left in the last round
    CAPTURE(dtype.name);
    check_close_tasks(evaluated(3, zero(3)), one, dtype.name == std::string("fp32") ? 1e-4 : 0.05);
}

TEST_CASE("ranks that share their weights start from given ones, and sample what one rank does",
          "[training]") {
    if (skip_without_mpirun()) return;
    const TemporaryDirectory directory;
    const std::string text = "ab abc aab b bab a ba ab a b";
    const Tokenizer tokenizer = Tokenizer::train(std::vector<std::string_view>{text}, 260);
    tokenizer.save(directory / "tokenizer.json");
    const TrainingJob job(4, {{"model.vocab_size", std::to_string(tokenizer.vocab_size())},
                              {"tokenizer.path", directory / "tokenizer.json"},
                              {"schedule.steps", "2"},
                              {"schedule.warmup_steps", "0"},
                              {"evaluation.every", "0"},
                              {"sampling.every", "1"},
                              {"sampling.samples", "2"},
                              {"sampling.max_tokens", "30"}});
    const std::string given = job.train(1, "given");
    // Without a learning rate the weights stay the given ones, and samples are the same.
    const Settings from_given{{"model.init_from", given}, {"optimizer.learning_rate", "1e-30"}};
    const auto samples = [](const std::string& output) {
        const size_t begin = output.find("--- sample");
        return begin == std::string::npos
                   ? ""
                   : output.substr(begin, output.find("\n", begin + 11) - begin);
    };
    const ProgramResult one =
        run_program(job.command("train", "one", from_given), {{"OMP_NUM_THREADS", "1"}});
    const ProgramResult three = job.start(3, "three", from_given + zero(3));
    CAPTURE(one.output, three.output);
    CHECK(one.exit_code == 0);
    CHECK(three.exit_code == 0);
    CHECK(!samples(one.output).empty());
    CHECK(samples(one.output) == samples(three.output));
    CHECK(distance(job.path("three"), job.path("one"), 2).first < 1e-6);
}

// ---- Checkpoints --------------------------------------------------------------------------------

TEST_CASE("ranks resume from checkpoints of any number of ranks at any stage", "[training]") {
    const Dtype dtype = random_dtype();
    CAPTURE(dtype.name);
    const TrainingJob job(5, dtype.settings());
    const auto stop = [](int64_t step) { return Command{"--stop-at", std::to_string(step)}; };

    // The same number of ranks continues bit for bit, also at another stage.
    const std::string whole = job.train(2, "whole", zero(1));
    const int64_t step = random_int(1, 19);
    CAPTURE(step);
    const bool first_is_0 = random_int(0, 1);
    job.train(2, "parts", zero(first_is_0 ? 0 : 1), stop(step));
    const std::string parts = job.train(2, "parts", zero(first_is_0 ? 1 : 0));
    check_equal(parts, whole);

    // Other numbers of ranks continue with the same results up to rounding.
    const std::string one = job.train(1, "one"), chain = job.path("chain");
    job.train(1, "chain", {}, stop(4));
    job.train(3, "chain", zero(random_int(0, 1) ? 2 : 3), stop(8));
    job.train(2, "chain", zero(0), stop(12));
    job.train(4, "chain", zero(random_int(0, 1) ? 1 : 3), stop(16));
    job.train(1, "chain");
    check_close(chain, one, dtype.bounds);

    // Each lists what its ranks wrote, and holds nothing else.
    for (const auto& [saved, files] : {std::pair{4, 1}, {8, 3}, {12, 1}, {16, 4}, {20, 1}}) {
        const fs::path checkpoint = fs::path(chain) / step_folder(saved);
        std::set<std::string> wanted{"choices.json",     "config.json", "model.safetensors",
                                     "position.json",    "spikes.json", "train_gpt.json",
                                     "grids.safetensors"};
        for (int i = 0; i < files; ++i) {
            char name[64];
            std::snprintf(name, sizeof name, "optimizer-%05d-of-%05d.safetensors", i, files);
            wanted.insert(name);
        }
        std::set<std::string> listed;
        const SortedJson manifest = SortedJson::parse(read(checkpoint / "manifest.json"));
        for (const auto& entry : manifest.at("files").items()) listed.insert(entry.key());
        CAPTURE(saved);
        CHECK(listed == wanted);
        wanted.insert("manifest.json");
        CHECK(names_in(checkpoint) == wanted);
    }

    // Without one rank's file the checkpoint counts as damaged, and the run resumes from the
    // previous one.
    fs::remove_all(fs::path(chain) / step_folder(20));
    const std::string missing =
        concat("optimizer-", "0000", random_int(0, 3), "-of-00004.safetensors");
    fs::remove(fs::path(chain) / step_folder(16) / missing);
    const ProgramResult mended = job.start(3, "chain", zero(1));
    CAPTURE(mended.output);
    CHECK(mended.exit_code == 0);
    CHECK(contains(mended.output, step_folder(16) + " is missing its file " + missing));
    CHECK(contains(mended.output, "resuming from " + chain + "/" + step_folder(12)));
    check_close(chain, one, dtype.bounds);
}

TEST_CASE("ranks resume from every other number of ranks and every other stage",
          "[training][.][long]") {
    for (const auto& [before, after] : {std::pair{1, 3}, {3, 1}, {2, 4}, {4, 2}, {8, 3}, {1, 8}}) {
        const Dtype dtype = random_dtype();
        const TrainingJob job(8, dtype.settings());
        const std::string one = job.train(1, "one");
        for (const int stage : {0, 1, 2, 3})
            for (const int next : {0, 1, 2, 3}) {
                CAPTURE(dtype.name, before, stage, after, next);
                job.train(before, "run", zero(stage),
                          {"--stop-at", std::to_string(random_int(1, 19))});
                check_close(job.train(after, "run", zero(next)), one, dtype.bounds);
                fs::remove_all(job.path("run"));
            }
    }
}

// ---- Before the first step ----------------------------------------------------------------------

TEST_CASE("ranks that do not agree end before they train, and a message says which rank has what",
          "[training]") {
    if (skip_without_mpirun()) return;
    const TrainingJob job(4);
    const std::string host = " (" + World().host() + ")", run = job.path("run");
    check_refused(
        start_parts({1, job.command("train", "run", {{"seed", "71"}, {"optimizer.beta1", "0.5"}})},
                    {2, job.command("train", "run", {{"seed", "17"}, {"optimizer.beta1", "0.5"}})}),
        {"the ranks do not agree",
         concat("\n  seed: 17 on ranks 1", host, ", 2", host, "; 71 on rank 0", host)});
    CHECK_FALSE(fs::exists(run));

    // A path that names a different file on each rank.
    const TemporaryDirectory a, b;
    for (const TemporaryDirectory* folder : {&a, &b}) {
        fs::create_directory(*folder / "data");
        write_shards(*folder / "data", {skewed_tokens(1000, 500)}, 500);
    }
    const Command other_data = job.command("train", "run", {{"data.train", "data/*.bin"}});
    const ProgramResult result = start_parts({1, other_data, a.path()}, {1, other_data, b.path()});
    check_refused(result, {"the ranks do not agree", "\n  training data: ", " on rank 0" + host,
                           " on rank 1" + host});
    CHECK_FALSE(contains(result.output, "seed"));
    CHECK_FALSE(fs::exists(run));

    const Command other_run = job.command("train", "run", {{"run_dir", "here"}});
    check_refused(start_parts({1, other_run, a.path()}, {1, other_run, b.path()}),
                  {"rank 1: the run folder " + (b / "here"), "not the one that rank 0 writes to"});
    CHECK_FALSE(fs::exists(b / "here"));
    CHECK(names_in(a / "here") == std::set<std::string>{"lock"});
}

TEST_CASE("ranks that choose ZeRO's stage keep it, and train as if it were given", "[training]") {
    const TrainingJob job(5, {{"checkpoint.every", "10"}});
    const Settings open{{"parallel.zero", "auto"}};
    const auto chosen = [](const std::string& run) {
        return SortedJson::parse(read(run + "/choices.json")).at("zero").get<int>();
    };
    const ProgramResult result = job.start(2, "open", open);
    INFO(result.output);
    REQUIRE(result.exit_code == 0);
    const std::string run = job.path("open");
    const int stage = chosen(run);
    CHECK(stage == 1);  // all fit, and stage 1 sends the least
    CHECK(contains(result.output, concat("parallel.zero: stage ", stage, ", chosen for ")));
    check_equal(run, job.train(2, "given", zero(stage)));
    CHECK(SortedJson::parse(read(run + "/config.json")).at("parallel").at("zero") == "auto");
    CHECK(contains(read(run + "/report.html"), concat("ZeRO stage ", stage, " (chosen)")));
    // A checkpoint's stage is taken, also by another number of ranks.
    const std::string resumed = job.train(2, "resumed", open, {"--stop-at", "10"});
    const fs::path checkpoint = fs::path(resumed) / step_folder(10);
    SortedJson choices = SortedJson::parse(read(checkpoint / "choices.json"));
    choices["zero"] = 3;
    write(checkpoint / "choices.json", choices.dump(2));
    SortedJson manifest = SortedJson::parse(read(checkpoint / "manifest.json"));
    manifest.at("files").at("choices.json") = {{"bytes", choices.dump(2).size()},
                                               {"xxh3", hash_file(checkpoint / "choices.json")}};
    write(checkpoint / "manifest.json", manifest.dump(2));
    const ProgramResult rest = job.start(3, "resumed", open);
    INFO(rest.output);
    REQUIRE(rest.exit_code == 0);
    CHECK(contains(rest.output, "parallel.zero: stage 3, as the kept choices say"));
    CHECK(chosen(resumed) == 3);
    const std::string given = job.train(2, "given-3", zero(1), {"--stop-at", "10"});
    job.train(3, "given-3", zero(3));
    check_equal(resumed, given);
}

TEST_CASE("more ranks than micro-batches are refused", "[training]") {
    const TrainingJob job(2);
    check_refused(job.start(3, "run"), {"a step of 2 ", " cannot feed 3 ranks; "});
}

TEST_CASE("a mesh that does not fit the ranks is refused in one sentence", "[training][mesh]") {
    if (skip_without_mpirun()) return;
    const TrainingJob job(4);
    check_refused(
        job.start(3, "run", {{"parallel.shard_ranks", "2"}}),
        {"parallel.shard_ranks = 2 does not divide the 3 data-parallel ranks of this run; the "
         "nearest value that does is 1"});
    CHECK_FALSE(fs::exists(job.path("run")));
}

// ---- Memory -------------------------------------------------------------------------------------

TEST_CASE("a rank holds the weights, gradients and optimizer state of its share at each ZeRO stage",
          "[training][plan]") {
    const TrainingJob job(8, {{"parallel.sums", "fp32"}});
    for (const char* dtype_name : {"fp32", "bf16"})
        for (const int stage : {0, 1, 2, 3})
            for (const int ranks : {2, 3, 8}) {
                CAPTURE(dtype_name, stage, ranks);
                const Config config = job.config(zero(stage));
                const DecoderSpec spec = spec_of(config, config.model.vocab_size);
                const DType dtype = resolve_dtype(dtype_name, Device{});
                const BucketLayout layout = job.layout(ranks);
                // A parameter takes, in bytes: its weight, 4 of gradient, 4 of master where the
                // weight is rounded, 8 of moments.
                const auto all = static_cast<size_t>(layout.numel());
                const size_t shard = all / static_cast<size_t>(ranks),
                             updated = stage == 0 ? all : shard;
                // From ZeRO-2 on there is room for a micro-batch's gradients of the embedding and
                // of two buckets in turn, and with ZeRO-3 for as many gathered weights.
                int64_t embedding = 0, turns[2] = {};
                for (size_t b = 0; b < layout.buckets().size(); ++b) {
                    const Bucket& bucket = layout.buckets()[b];
                    int64_t& turn = turns[(layout.buckets().size() - b) % 2];
                    if (bucket.first_unit == 0)
                        embedding += bucket.range.n;
                    else
                        turn = std::max(turn, bucket.range.n);
                }
                const auto whole = static_cast<size_t>(embedding + turns[0] + turns[1]);
                const std::map<Purpose, size_t> wanted{
                    {Purpose::parameters, (stage == 3 ? shard + whole : all) * size_of(dtype)},
                    {Purpose::gradients, 4 * (stage >= 2 ? shard + whole : all)},
                    {Purpose::masters, dtype == DType::bf16 ? 4 * updated : 0},
                    {Purpose::moments, 8 * updated}};
                const Arena plan =
                    plan_memory({config, spec, dtype, Recompute::none, ranks}, Device{});
                for (int rank = 0; rank < ranks; rank += ranks - 1) {
                    Arena arena = allocate(plan);
                    const Trainer run(
                        {config, spec, dtype, Recompute::none, mesh_of(config, ranks).world()},
                        arena, rank);
                    CHECK(arena.total_bytes() == plan.total_bytes());
                    for (const auto& [purpose, bytes] : wanted) {
                        CAPTURE(name_of(purpose));
                        CHECK(arena.bytes(purpose) >= bytes);
                        CHECK(arena.bytes(purpose) <=
                              bytes + 5 * 1024);  // at most 5 buffers, which the arena aligns
                    }
                }
            }

    // The plan equals the memory that each rank of a run reports.
    const Settings more = zero(random_int(0, 1) ? 2 : 3) + Settings{{"memory.recompute", "none"},
                                                                    {"schedule.steps", "1"},
                                                                    {"schedule.warmup_steps", "0"}};
    const ProgramResult plan =
        run_program(job.command("plan", "run", more, {"--world", "2"}), {{"OMP_NUM_THREADS", "1"}});
    const ProgramResult run = job.start(2, "run", more);
    CAPTURE(plan.output, run.output);
    const std::string label = "memory.recompute = none: ";
    const size_t at = plan.output.find(label);
    REQUIRE(at != std::string::npos);
    const size_t begin = at + label.size();
    CHECK(contains(run.output,
                   ", " + plan.output.substr(begin, plan.output.find(" of ", begin) - begin) +
                       " each, into "));
}

TEST_CASE("in a model of real size the bytes per parameter are those of the literature",
          "[training][plan]") {
    Config config;
    config.model = {
        .n_layer = 36, .n_head = 20, .n_embd = 1280, .n_ctx = 1024, .vocab_size = 50257};
    config.batch.micro_batch = 8;
    config.batch.sequence_length = 16;  // activations do not count
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    double parameters = 0;
    for (const Parameter& p : registry_of(spec).parameters)
        parameters += static_cast<double>(p.numel());
    for (const int ranks : {2, 8, 64})
        for (const int stage : {0, 1, 2, 3}) {
            config.parallel.zero = stage;
            const Arena plan =
                plan_memory({config, spec, DType::bf16, Recompute::block, ranks}, Device{});
            double bytes = 0;
            for (const Purpose purpose :
                 {Purpose::parameters, Purpose::gradients, Purpose::masters, Purpose::moments})
                bytes += static_cast<double>(plan.bytes(purpose));
            const double shares = 1.0 / ranks;
            double wanted = stage == 0   ? 18
                            : stage == 1 ? 6 + 12 * shares
                            : stage == 2 ? 2 + 16 * shares
                                         : 18 * shares;
            // Whole: the embedding's, and two buckets of blocks, of gradients of a micro-batch, and
            // with ZeRO-3 of weights.
            const double embedding = (50304.0 + 1024) * 1280, block = 12.0 * 1280 * 1280,
                         whole = (embedding + 2 * block) / parameters;
            if (stage >= 2) wanted += 4 * whole;
            if (stage == 3) wanted += 2 * whole;
            CAPTURE(ranks, stage, bytes / parameters, wanted);
            CHECK(bytes / parameters > wanted);
            CHECK(bytes / parameters < 1.02 * wanted);
        }
}

// ---- GPUs ---------------------------------------------------------------------------------------

#ifdef TRAIN_GPT_CUDA

namespace {

const Settings on_gpus{{"device", "cuda"},
                       {"schedule.steps", "6"},
                       {"schedule.warmup_steps", "2"},
                       {"evaluation.every", "2"},
                       {"evaluation.max_tokens", "60"}};

/// On a simulated GPU: streams run as late as they may, and those that are free to run in an order
/// that depends on `seed`.
Environment adverse(int64_t seed) {
    return {{"GPUSIM_STREAMS", "lazy"}, {"GPUSIM_SEED", std::to_string(seed)}};
}

/// What a rank has sent through NCCL, as the simulator counts it.
int64_t bytes_sent(const std::string& statistics, int rank) {
    int64_t bytes = 0;
    size_t begin = 0;
    for (size_t end; (end = statistics.find('\n', begin)) != std::string::npos; begin = end + 1) {
        const std::string line = statistics.substr(begin, end - begin);
        if (contains(line, concat(" rank=", rank, " ")))
            bytes += std::stoll(line.substr(line.find(" sent=") + 6));
    }
    return bytes;
}

struct Traffic {
    int ranks, stage;
    const char *dtype, *sent;
};

/// A step's bytes, counted as those of two steps less those of one, are the formula's.
void check_traffic(const Traffic& t) {
    constexpr int micro_batches = 5;
    const TrainingJob job(micro_batches, on_gpus + Settings{{"data.val", ""}});
    const Settings settings =
        zero(t.stage) + Settings{{"precision.dtype", t.dtype}, {"parallel.reduce_dtype", t.sent}};
    std::string statistics[2];
    for (const int steps : {1, 2}) {
        const std::string file = job.path(concat("traffic-", steps));
        job.train(t.ranks, concat("steps-", steps), settings, {"--stop-at", std::to_string(steps)},
                  {{"GPUSIM_STATS", "1"}, {"GPUSIM_STATS_FILE", file}});
        statistics[steps - 1] = read(file);
    }
    const BucketLayout layout = job.layout(t.ranks);
    const int64_t elements = layout.numel(), d = t.ranks;
    int64_t parameters = 0;
    for (const Parameter& p : job.parameters()) parameters += p.padded_numel();
    // Padding: to whole norm blocks each tensor, and on each rank the bucket.
    const int64_t padding = elements - parameters;
    CHECK(padding < norm_block * (std::ssize(job.parameters()) + d * std::ssize(layout.buckets())));
    const auto size = [](const std::string& dtype) { return dtype == "bf16" ? 2 : 4; };
    // Bytes times d, of which every rank sends 1/d: a ring reduces and gathers in d − 1 rounds
    // each.
    const int64_t reduced = size(t.sent) * elements * (d - 1),
                  gathered = size(t.dtype) * elements * (d - 1);
    const int64_t rounds = t.stage == 2 ? (micro_batches + d - 1) / d : 1;
    // All ranks get a loss, a stop request, the progress of a save, and one sum of squares per
    // tensor from each.
    const int64_t sums = 8 * (3 + std::ssize(job.parameters())) * d * (d - 1);
    const int64_t step = t.stage == 0 ? 2 * reduced + sums : rounds * reduced + gathered + sums;
    for (int rank = 0; rank < t.ranks; ++rank) {
        const int64_t counted = bytes_sent(statistics[1], rank) - bytes_sent(statistics[0], rank);
        CAPTURE(t.ranks, t.stage, t.dtype, t.sent, rank, elements, padding);
        CHECK(counted > 0);
        // What the communicators count, and tests of meshes compare with the plan's.
        const Config config = job.config(settings);
        const int64_t planned =
            planned_traffic({config, spec_of(config, config.model.vocab_size),
                             resolve_dtype(t.dtype, Device{}), Recompute::none, t.ranks})
                .at("data");
        CHECK(std::abs(counted - planned) < std::ssize(layout.buckets()));
        if (t.stage < 3) CHECK(std::abs(counted * d - step) < d);  // it counts whole bytes
    }
}

}  // namespace

TEST_CASE("ranks on GPUs train what one rank trains, whatever order their streams run in",
          "[training][cuda]") {
    if (skip_without_gpus(4)) return;
    const bool simulated = gpus_are_simulated();
    SECTION("in fp32") {
        const TrainingJob job(5, on_gpus);
        const std::string one = job.train(1, "one");
        const int64_t seed = random_int(0, 1000);
        CAPTURE(seed);
        std::string runs[4];
        for (const int stage : {0, 1, 2, 3}) {
            runs[stage] = job.train(2, concat("zero-", stage), zero(stage), {}, adverse(seed));
            check_close(runs[stage], one, in_fp32_order, 6);
        }
        check_equal(job.train(2, "at-once", zero(1)), runs[1], 6);
        check_equal(runs[2], runs[3], 6);
        if (simulated)
            check_equal(runs[0], runs[1],
                        6);  // NCCL may choose other orders for all-reduce and reduce-scatter
        check_close(job.train(4, "four", zero(1), {}, adverse(seed + 1)), one, in_fp32_order, 6);
    }
    SECTION("in bf16, resumed from a checkpoint") {
        const TrainingJob job(4, on_gpus + in_bf16 + sent_in_bf16 + zero(random_int(0, 1) ? 2 : 3));
        const int64_t seed = random_int(0, 1000);
        CAPTURE(seed);
        const std::string one = job.train(1, "one"),
                          whole = job.train(2, "whole", {}, {}, adverse(seed));
        check_close(whole, one, in_bf16_order, 6);
        job.train(2, "parts", {}, {"--stop-at", "3"}, adverse(seed + 1));
        check_equal(job.train(2, "parts", {}, {}, adverse(seed + 2)), whole, 6);
    }
}

TEST_CASE("any number of GPUs trains what one trains", "[training][cuda][.][long]") {
    if (skip_without_gpus(8)) return;
    for (const Dtype& dtype : dtypes) {
        const auto micro_batches = static_cast<int>(random_int(8, 11));
        const TrainingJob job(micro_batches, on_gpus + dtype.settings());
        const std::string one = job.train(1, "one"),
                          in_fp32 = job.train(1, "one-fp32", summed_in_fp32);
        for (const int ranks : {2, 3, 4, 8}) {
            const int64_t seed = random_int(0, 1000);
            CAPTURE(dtype.name, micro_batches, ranks, seed);
            check_stages(job, one, ranks, {}, dtype.bounds, adverse(seed));
            check_stages(job, in_fp32, ranks, sent_in_bf16, in_bf16_order, adverse(seed));
        }
    }
}

TEST_CASE("a step sends what the formula says", "[training][cuda]") {
    if (skip_without_gpus(3) || !gpus_are_simulated()) return;
    check_traffic({2, 0, "bf16", "fp32"});
    check_traffic({2, 1, "bf16", "fp32"});
    check_traffic({3, 2, "fp32", "bf16"});
    check_traffic({2, 3, "bf16", "fp32"});
}

TEST_CASE("a step sends what the formula says, at every stage, in every dtype",
          "[training][cuda][.][long]") {
    if (skip_without_gpus(4) || !gpus_are_simulated()) return;
    for (const int ranks : {2, 3, 4})
        for (const int stage : {0, 1, 2})
            for (const char* dtype : {"fp32", "bf16"})
                for (const char* sent : {"fp32", "bf16"})
                    check_traffic({ranks, stage, dtype, sent});
}

#endif
