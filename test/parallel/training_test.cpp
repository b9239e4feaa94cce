// The program on many ranks: whatever their number and ZeRO's stage, they train what one rank trains, agree before they
// begin, keep what any others can go on from, and send and hold what the formulas say. TRAIN_GPT names the program, as in
// test/commands/.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "kernels/adamw.h"
#include "parallel/bucket_layout.h"
#include "test/catch.h"
#include "test/dataloader/shard_files.h"
#include "test/kernels/test_device.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"
#include "tokenizer/tokenizer.h"
#include "training/plan.h"
#include "training/safetensors.h"
#include "training/trainer.h"

#ifdef TRAIN_GPT_CUDA
#include "device/cuda.h"
#endif

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;
using Settings = std::map<std::string, std::string>;  // key → value
using Command = std::vector<std::string>;

std::string program() {
    for (const char* name : {"TRAIN_GPT_BINARY", "TRAIN_GPT"})
        if (const char* path = std::getenv(name)) return fs::absolute(path);
    return fs::absolute("build/train_gpt");
}

std::string step_folder(int64_t step) {
    char name[32];
    std::snprintf(name, sizeof name, "step-%08lld", static_cast<long long>(step));
    return name;
}

/// Tokens of which few are frequent, so that there is something to learn.
std::vector<uint32_t> skewed_tokens(int64_t n, int64_t vocab_size) {
    std::vector<uint32_t> tokens(static_cast<size_t>(n));
    for (uint32_t& token : tokens) {
        const int64_t x = random_int(0, vocab_size - 1);
        token = static_cast<uint32_t>(x * x / vocab_size * x / vocab_size);
    }
    return tokens;
}

// ---- Runs ---------------------------------------------------------------------------------------

/// A tiny model of odd sizes and its data. Its runs differ only in what each is told.
class Job {
  public:
    explicit Job(int micro_batches, Settings settings = {}) {
        const int64_t vocab_size = settings.contains("model.vocab_size")
                                       ? std::stoll(settings["model.vocab_size"])
                                       : random_int(900, 1000);
        for (const char* split : {"train", "val"}) {
            fs::create_directory(directory_ / split);
            std::vector<std::vector<uint32_t>> shards;
            for (int64_t n : {random_int(900, 1500), random_int(100, 500)})
                shards.push_back(skewed_tokens(n, vocab_size));
            settings.emplace(
                concat("data.", split),
                write_shards(directory_ / split, shards, static_cast<uint32_t>(vocab_size)));
        }
        const int64_t T = random_int(9, 19), B = random_int(1, 2), C = 8 * random_int(4, 6);
        const Settings defaults{
            {"seed", std::to_string(random_int(0, 1 << 30))},
            {"device", "cpu"},
            {"model.n_layer", std::to_string(random_int(4, 5))},
            {"model.n_head", std::to_string(random_int(0, 1) ? C / 8 : 1)},
            {"model.n_embd", std::to_string(C)},
            {"model.n_ctx", std::to_string(T + random_int(0, 5))},
            {"model.vocab_size", std::to_string(vocab_size)},
            {"batch.tokens_per_step", std::to_string(micro_batches * B * T)},
            {"batch.micro_batch", std::to_string(B)},
            {"batch.sequence_length", std::to_string(T)},
            {"optimizer.learning_rate", "0.003"},
            // With a larger ε than usual an update is a smooth function of the gradient, and not the sign of its rounding
            // errors where the gradient is none (the biases of keys).
            {"optimizer.epsilon", "0.001"},
            {"optimizer.grad_clip", "0.5"},
            {"schedule.steps", "20"},
            {"schedule.warmup_steps", "3"},
            {"precision.dtype", "fp32"},
            {"checkpoint.every", "0"},
            {"checkpoint.keep", "0"},
            {"evaluation.every", "7"},
            {"evaluation.max_tokens", "200"},
            {"kernels.autotune", "off"},
            {"log.progress", "lines"},
            {"parallel.bucket_mb", "0.04"}};
        settings.insert(defaults.begin(), defaults.end());
        write(config_path(), "{}");
        settings_ = std::move(settings);
    }

    std::string path(const std::string& name) const { return directory_ / name; }
    Config config(const Settings& more = {}) const {
        return parse_config("{}", "test", assignments(more));
    }
    std::vector<Parameter> parameters() const {
        return gpt_parameters(shape_of(config(), config().model.vocab_size));
    }
    BucketLayout layout(int ranks) const {
        return BucketLayout(parameters(), ranks, sharding_of(config(), 0, ranks).bucket_elements);
    }

    Command command(const std::string& verb, const std::string& name, const Settings& more = {},
                    const Command& options = {}) const {
        Command all{program(), verb, config_path()};
        for (const std::string& assignment : assignments(more))
            all.insert(all.end(), {"--set", assignment});
        all.insert(all.end(), {"--set", "run_dir=" + (more.contains("run_dir") ? more.at("run_dir")
                                                                               : path(name))});
        all.insert(all.end(), options.begin(), options.end());
        return all;
    }

    ProgramResult start(int ranks, const std::string& name, const Settings& more = {},
                        const Command& options = {}, const Environment& environment = {}) const {
        return run_ranks(ranks, command("train", name, more, options), environment);
    }

    /// Trains in the folder `name`, which is returned, as `ranks` ranks, a single one without a launcher; it must succeed.
    std::string train(int ranks, const std::string& name, const Settings& more = {},
                      const Command& options = {}, Environment environment = {}) const {
        environment.emplace("OMP_NUM_THREADS", "1");
        // A real GPU begins a collective that only other ranks wait for; a simulated one whose streams run late needs this.
        environment.emplace("GPUSIM_NCCL_PROGRESS_MS", "300");
        const ProgramResult result =
            ranks == 1 ? run_program(command("train", name, more, options), environment)
                       : start(ranks, name, more, options, environment);
        INFO(name << " on " << ranks << " ranks, " << result.seconds << " s:\n" << result.output);
        REQUIRE(result.exit_code == 0);
        CHECK((ranks == 1 || contains(result.output, concat(" on ", ranks, " × "))));
        return path(name);
    }

  private:
    std::string config_path() const { return directory_ / "config.json"; }
    std::vector<std::string> assignments(const Settings& more) const {
        std::vector<std::string> all;
        for (const Settings* from : {&settings_, &more})
            for (const auto& [key, value] : *from) all.push_back(concat(key, "=", value));
        return all;
    }

    TemporaryDirectory directory_;
    Settings settings_;
};

Settings zero(int stage) { return {{"parallel.zero", std::to_string(stage)}}; }
Settings operator+(Settings a, const Settings& b) {
    for (const auto& [key, value] : b) a[key] = value;
    return a;
}

const Settings in_bf16{{"precision.dtype", "bf16"}},
    sent_in_bf16{{"parallel.reduce_dtype", "bf16"}};

/// metrics.jsonl without what depends on the clock.
std::vector<Json> metrics_of(const std::string& run) {
    std::vector<Json> lines;
    const std::string text = read(run + "/metrics.jsonl");
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos;
         begin = end + 1) {
        Json line = Json::parse(text.substr(begin, end - begin));
        for (const char* key :
             {"ms", "tokens_per_second", "flops_per_second", "peak_fraction", "compute_ms",
              "communication_ms", "data_wait_ms", "optimizer_ms", "seconds"})
            line.erase(key);
        lines.push_back(std::move(line));
    }
    return lines;
}

using Tensors = std::map<std::string, std::vector<float>>;

/// Weights ("weights/NAME"), and of all optimizer files together masters and moments ("master/NAME", "m/NAME", "v/NAME"),
/// of which each element must be in exactly one.
Tensors state_of(const std::string& run, int64_t step) {
    const fs::path checkpoint = fs::path(run) / step_folder(step);
    Tensors all;
    const SafetensorsFile model(checkpoint / "model.safetensors");
    for (const TensorInfo& info : model.tensors()) {
        const std::string name = info.name.substr(std::string("transformer.").size());
        std::vector<float>& values = all["weights/" + name];
        values.resize(static_cast<size_t>(info.numel()));
        model.read_floats(info, values.data());
        for (const char* state : {"master/", "m/", "v/"})
            all[state + name].assign(values.size(), std::numeric_limits<float>::quiet_NaN());
    }
    for (const auto& entry : fs::directory_iterator(checkpoint)) {
        if (!entry.path().filename().string().starts_with("optimizer-")) continue;
        const SafetensorsFile file(entry.path());
        for (const TensorInfo& info : file.tensors()) {
            const std::string key = info.name.substr(info.name.find('/') + 1);
            std::vector<float>& values = all.at(info.name.substr(0, info.name.find('[')));
            const std::string range = file.metadata().at("range/" + key);
            const auto first = static_cast<size_t>(std::stoll(range));
            const auto end = static_cast<size_t>(std::stoll(range.substr(range.find('-') + 1)));
            REQUIRE(end <= values.size());
            REQUIRE(info.numel() == static_cast<int64_t>(end - first));
            REQUIRE(std::all_of(values.begin() + static_cast<std::ptrdiff_t>(first),
                                values.begin() + static_cast<std::ptrdiff_t>(end),
                                [](float x) { return std::isnan(x); }));
            file.read_floats(info, values.data() + first);
        }
    }
    for (const auto& [name, values] : all) {
        INFO(name << " is in no optimizer file, or not finite");
        REQUIRE(
            std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); }));
    }
    return all;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// Two runs have the same losses, norms, weights, masters and moments at a step, bit for bit.
void check_equal(const std::string& a, const std::string& b, int64_t step = 20) {
    CAPTURE(a, b);
    CHECK(metrics_of(a) == metrics_of(b));
    const Tensors of_a = state_of(a, step), of_b = state_of(b, step);
    std::vector<std::string> different;
    for (const auto& [name, values] : of_a)
        if (!of_b.contains(name) || !same_bits(values, of_b.at(name))) different.push_back(name);
    CHECK(different == std::vector<std::string>{});
    CHECK(of_a.size() == of_b.size());
}

// How far two runs may lie apart that differ in the order of sums alone. A gradient is a sum over hundreds of tokens, of
// products of vectors of up to a thousand elements: its rounding errors in the dtype, of unit roundoff u, are of the size of
// √1000·u, and grow by a small factor over 20 steps. In the norm and in the loss they average out.
struct Bounds {
    double loss, norm, tensor;  // relative; of a tensor's elements together
};
// Losses and gradients are sums in fp32.
constexpr double fp32_roundoff = 0x1p-24, bf16_roundoff = 0x1p-9;
constexpr Bounds in_fp32_order{2 * fp32_roundoff, 16 * fp32_roundoff, 128 * fp32_roundoff};
// A master that differs in its last bit may round to another bf16 weight, and activations behind it to others; sums are in
// fp32 also here. Gradients that are sent in bf16 differ by one or two roundings each.
constexpr Bounds in_bf16_order{bf16_roundoff / 4, 2 * bf16_roundoff, 16 * bf16_roundoff};

/// What a model computes in.
struct Dtype {
    const char* name;
    Bounds bounds;

    Settings settings() const { return {{"precision.dtype", name}}; }
};
constexpr Dtype dtypes[] = {{"fp32", in_fp32_order}, {"bf16", in_bf16_order}};
const Dtype& random_dtype() { return dtypes[random_int(0, 1)]; }

/// The largest relative distance of two runs' tensors of equal names, and the name.
std::pair<double, std::string> distance(const std::string& run, const std::string& reference,
                                        int64_t step) {
    const Tensors tensors = state_of(run, step), others = state_of(reference, step);
    REQUIRE(tensors.size() == others.size());
    std::pair<double, std::string> largest;
    for (const auto& [name, values] : tensors) {
        const std::vector<float>& other = others.at(name);
        REQUIRE(values.size() == other.size());
        double difference = 0, norm = 0;
        for (size_t i = 0; i < values.size(); ++i) {
            difference += std::pow(double{values[i]} - double{other[i]}, 2);
            norm += std::pow(double{other[i]}, 2);
        }
        REQUIRE(norm > 0);
        largest = std::max(largest, {std::sqrt(difference / norm), name});
    }
    return largest;
}

void check_close(const std::string& run, const std::string& reference, const Bounds& bounds,
                 int64_t step = 20) {
    CAPTURE(run, reference);
    const std::vector<Json> lines = metrics_of(run), wanted = metrics_of(reference);
    REQUIRE(lines.size() == wanted.size());
    for (size_t i = 0; i < lines.size(); ++i) {
        REQUIRE(lines[i].size() == wanted[i].size());
        REQUIRE(lines[i].at("step") == wanted[i].at("step"));
        for (const auto& [key, bound] : {std::pair{"loss", bounds.loss},
                                         {"val_loss", bounds.loss},
                                         {"grad_norm", bounds.norm},
                                         {"learning_rate", 0.0}}) {
            if (!wanted[i].contains(key)) continue;
            const double x = lines[i].at(key), y = wanted[i].at(key);
            CAPTURE(lines[i].dump(), wanted[i].dump(), key, bound);
            CHECK(std::abs(x - y) <= bound * std::abs(y));
        }
    }
    const auto [largest, name] = distance(run, reference, step);
    CAPTURE(name);
    CHECK(largest <= bounds.tensor);
}

/// The entries of a folder.
std::set<std::string> names_in(const fs::path& folder) {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
        names.insert(entry.path().filename().string());
    return names;
}

bool gpus_are_simulated() {
    const DeviceUnderTest gpu({Device::Kind::cuda, 0});
    return device_is_simulated();
}

/// Trains on `ranks` ranks with every stage of ZeRO: all come close to one rank, and where sums have a fixed order (NCCL may
/// choose another one for all-reduce than for reduce-scatter) stages 0 and 1 are equal; stage 2 as well when no rank has a
/// second micro-batch, whose sums it adds in another order.
void check_stages(const Job& job, const std::string& one_rank, int ranks, const Settings& more,
                  const Bounds& bounds, const Environment& environment = {}) {
    const int64_t steps = job.config().schedule.steps;
    const BucketLayout layout = job.layout(ranks);
    // The embedding is cut, and blocks are in more buckets than ZeRO-2 has room for at a time.
    REQUIRE(layout.buckets()[1].first_unit == 0);
    REQUIRE(layout.buckets().size() >= 6);
    std::string runs[3];
    for (const int stage : {0, 1, 2}) {
        runs[stage] = job.train(ranks, concat(ranks, "-ranks-zero-", stage), more + zero(stage), {},
                                environment);
        check_close(runs[stage], one_rank, bounds, steps);
    }
    if (job.config().device == "cpu" || gpus_are_simulated()) {
        check_equal(runs[0], runs[1], steps);
        if (job.config().micro_batches_per_step() == ranks) check_equal(runs[1], runs[2], steps);
    }
    for (const std::string& run : runs) fs::remove_all(run);
}

/// HellaSwag's format with a few random words.
std::string random_examples(int n) {
    const auto words = [](int64_t most) {
        std::string text = "a";
        for (int64_t i = random_int(0, most - 1); i > 0; --i)
            text += random_int(0, 1) ? " b" : " ab";
        return text;
    };
    std::string jsonl;
    for (int i = 0; i < n; ++i)
        jsonl += Json{{"ctx", words(9)},
                      {"endings", {words(4), words(4), words(4), words(4)}},
                      {"label", random_int(0, 3)}}
                     .dump() +
                 "\n";
    return jsonl;
}

/// The ranks of one job with different command lines: `ranks` of them each, in the folder.
struct Part {
    int ranks;
    Command command;
    std::string folder = ".";
};
ProgramResult start_parts(const Part& first, const Part& second) {
    Command all{"-wdir", first.folder};
    all.insert(all.end(), first.command.begin(), first.command.end());
    all.insert(all.end(), {":", "-np", std::to_string(second.ranks), "-wdir", second.folder});
    all.insert(all.end(), second.command.begin(), second.command.end());
    return run_ranks(first.ranks, all);
}

void check_refused(const ProgramResult& result, const Command& parts) {
    CAPTURE(result.output, result.seconds);
    CHECK(result.exit_code > 0);
    CHECK(contains(result.output, "train_gpt: "));
    for (const std::string& part : parts) {
        CAPTURE(part);
        CHECK(contains(result.output, part));
    }
}

}  // namespace

// ---- The same training --------------------------------------------------------------------------

TEST_CASE("ranks train what one rank trains, and ZeRO 0 and 1 give the same bits", "[training]") {
    if (skip_without_mpirun()) return;
    SECTION("in fp32, some with a micro-batch more than others") {
        const Job job(7);
        const std::string one = job.train(1, "one");
        CHECK(metrics_of(one).back().at("val_loss").get<double>() <
              metrics_of(one)[0].at("val_loss").get<double>());
        check_stages(job, one, 3, {}, in_fp32_order);
        check_equal(job.train(2, "once", zero(2)), job.train(2, "again", zero(2)));
    }
    SECTION("in bf16, with one micro-batch each") {
        const Job job(4, in_bf16);
        check_stages(job, job.train(1, "one"), 4, {}, in_bf16_order);
    }
    SECTION("sums sent in bf16") {
        const Job job(6);
        const std::string one = job.train(1, "one");
        check_stages(job, one, 2, sent_in_bf16, in_bf16_order);
        // They really are.
        CHECK(distance(job.train(2, "two", sent_in_bf16), one, 20).first > bf16_roundoff / 16);
    }
}

TEST_CASE("any number of ranks trains what one rank trains", "[training][.][long]") {
    if (skip_without_mpirun()) return;
    for (const Dtype& dtype : dtypes)
        for (const int micro_batches : {8, 11}) {
            const Job job(micro_batches, dtype.settings());
            const std::string one = job.train(1, "one");
            for (const int ranks : {2, 3, 4, 8}) {
                CAPTURE(dtype.name, micro_batches, ranks);
                check_stages(job, one, ranks, {}, dtype.bounds);
                check_stages(job, one, ranks, sent_in_bf16, in_bf16_order);
            }
        }
}

// ---- Evaluation ---------------------------------------------------------------------------------

TEST_CASE("validation loss and HellaSwag are those of one rank, bit for bit", "[training]") {
    if (skip_without_mpirun()) return;
    const TemporaryDirectory directory;
    const std::string text = "ab abc aab b bab a ba ab a b";
    const Tokenizer tokenizer = Tokenizer::train(std::vector<std::string_view>{text}, 260);
    tokenizer.save(directory / "tokenizer.json");
    write(directory / "hellaswag.jsonl", random_examples(5));
    const Job job(4, {{"model.vocab_size", std::to_string(tokenizer.vocab_size())},
                      {"tokenizer.path", directory / "tokenizer.json"},
                      {"evaluation.hellaswag", directory / "hellaswag.jsonl"},
                      {"evaluation.max_tokens", "0"},
                      {"sampling.samples", "0"},
                      {"precision.dtype", random_dtype().name}});
    const std::string trained = job.train(1, "trained");
    // A finished run without its metrics has only its last evaluation to do.
    const auto evaluated = [&](int ranks, const std::string& tokens) {
        const std::string name = concat(ranks, "-", tokens);
        fs::copy(trained, job.path(name), fs::copy_options::recursive);
        fs::remove(job.path(name) + "/metrics.jsonl");
        const std::vector<Json> metrics =
            metrics_of(job.train(ranks, name, {{"evaluation.max_tokens", tokens}}));
        REQUIRE(metrics.size() == 1);
        return metrics[0];
    };
    const Json all = evaluated(1, "0"), one_window = evaluated(1, "5");
    CHECK(all == metrics_of(trained).back());
    for (const char* key :
         {"val_loss", "val_bits_per_byte", "val_tokens", "hellaswag", "hellaswag_normalised"})
        CHECK(all.contains(key));
    CHECK(one_window.at("val_tokens") == 5);
    CHECK(evaluated(2, "0") == all);
    CHECK(evaluated(3, "0") == all);
    CHECK(evaluated(3, "5") == one_window);  // two ranks have nothing to do
}

// ---- Checkpoints --------------------------------------------------------------------------------

TEST_CASE("ranks go on from the checkpoints of any number of ranks at any stage", "[training]") {
    if (skip_without_mpirun()) return;
    const Dtype dtype = random_dtype();
    CAPTURE(dtype.name);
    const Job job(5, dtype.settings());
    const auto stop = [](int64_t step) { return Command{"--stop-at", std::to_string(step)}; };

    // As many ranks as before go on as if nothing had been, also at another stage.
    const std::string whole = job.train(2, "whole", zero(1));
    const int64_t step = random_int(1, 19);
    CAPTURE(step);
    const bool first_is_0 = random_int(0, 1);
    job.train(2, "parts", zero(first_is_0 ? 0 : 1), stop(step));
    const std::string parts = job.train(2, "parts", zero(first_is_0 ? 1 : 0));
    check_equal(parts, whole);

    // Other numbers of ranks go on within rounding.
    const std::string one = job.train(1, "one"), chain = job.path("chain");
    job.train(1, "chain", {}, stop(4));
    job.train(3, "chain", zero(2), stop(8));
    job.train(2, "chain", zero(0), stop(12));
    job.train(4, "chain", zero(1), stop(16));
    job.train(1, "chain");
    check_close(chain, one, dtype.bounds);

    // Each lists what its ranks wrote, and holds nothing else.
    for (const auto& [saved, files] : {std::pair{4, 1}, {8, 3}, {12, 1}, {16, 4}, {20, 1}}) {
        const fs::path checkpoint = fs::path(chain) / step_folder(saved);
        std::set<std::string> wanted{"choices.json", "config.json", "model.safetensors",
                                     "train_gpt.json"};
        for (int i = 0; i < files; ++i) {
            char name[64];
            std::snprintf(name, sizeof name, "optimizer-%05d-of-%05d.safetensors", i, files);
            wanted.insert(name);
        }
        std::set<std::string> listed;
        const Json manifest = Json::parse(read(checkpoint / "manifest.json"));
        for (const auto& entry : manifest.at("files").items()) listed.insert(entry.key());
        CAPTURE(saved);
        CHECK(listed == wanted);
        wanted.insert("manifest.json");
        CHECK(names_in(checkpoint) == wanted);
    }

    // Without one rank's file the checkpoint counts as damaged, and the run goes on from the one before.
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

TEST_CASE("ranks go on from every other number of ranks and every other stage",
          "[training][.][long]") {
    if (skip_without_mpirun()) return;
    for (const auto& [before, after] : {std::pair{1, 3}, {3, 1}, {2, 4}, {4, 2}, {8, 3}, {1, 8}}) {
        const Dtype dtype = random_dtype();
        const Job job(8, dtype.settings());
        const std::string one = job.train(1, "one");
        for (const int stage : {0, 1, 2})
            for (const int next : {0, 1, 2}) {
                CAPTURE(dtype.name, before, stage, after, next);
                job.train(before, "run", zero(stage),
                          {"--stop-at", std::to_string(random_int(1, 19))});
                check_close(job.train(after, "run", zero(next)), one, dtype.bounds);
                fs::remove_all(job.path("run"));
            }
    }
}

// ---- Before the first step ----------------------------------------------------------------------

TEST_CASE("ranks that do not agree end before they train, and are told who wants what",
          "[training]") {
    if (skip_without_mpirun()) return;
    const Job job(4);
    const std::string host = " (" + World().host() + ")", run = job.path("run");
    check_refused(
        start_parts({1, job.command("train", "run", {{"seed", "71"}, {"optimizer.beta1", "0.5"}})},
                    {2, job.command("train", "run", {{"seed", "17"}, {"optimizer.beta1", "0.5"}})}),
        {"the ranks do not agree",
         concat("\n  seed: 17 on ranks 1", host, ", 2", host, "; 71 on rank 0", host)});
    CHECK_FALSE(fs::exists(run));

    // A path that means another file on each.
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

TEST_CASE("more ranks than micro-batches are refused", "[training]") {
    if (skip_without_mpirun()) return;
    const Job job(2);
    check_refused(job.start(3, "run"), {"a step of 2 ", " cannot feed 3 ranks; "});
}

// ---- Memory -------------------------------------------------------------------------------------

TEST_CASE("a rank holds of weights, gradients and optimizer what its stage of ZeRO leaves it",
          "[training][plan]") {
    const Job job(8);
    for (const char* dtype_name : {"fp32", "bf16"})
        for (const int stage : {0, 1, 2})
            for (const int ranks : {2, 3, 8}) {
                CAPTURE(dtype_name, stage, ranks);
                const Config config = job.config(zero(stage));
                const GPTShape shape = shape_of(config, config.model.vocab_size);
                const DType dtype = resolve_dtype(dtype_name, Device{});
                const BucketLayout layout = job.layout(ranks);
                // A parameter takes, in bytes: its weight, 4 of gradient, 4 of master where the weight is rounded, 8 of moments.
                const auto all = static_cast<size_t>(layout.numel());
                const size_t shard = all / static_cast<size_t>(ranks),
                             updated = stage == 0 ? all : shard;
                int64_t
                    embedding = 0,
                    largest =
                        0;  // of the micro-batch's gradients, ZeRO-2 has room for these, the second three times
                for (const Bucket& bucket : layout.buckets())
                    if (bucket.first_unit == 0)
                        embedding += bucket.range.n;
                    else
                        largest = std::max(largest, bucket.range.n);
                const size_t in_turn =
                    stage == 2 ? static_cast<size_t>(embedding + 3 * largest) : 0;
                const std::map<Purpose, size_t> wanted{
                    {Purpose::parameters, all * size_of(dtype)},
                    {Purpose::gradients, 4 * ((stage == 2 ? shard : all) + in_turn)},
                    {Purpose::masters, dtype == DType::bf16 ? 4 * updated : 0},
                    {Purpose::moments, 8 * updated}};
                const Arena plan =
                    plan_memory(config, shape, dtype, Recompute::none, Device{}, ranks);
                for (int rank = 0; rank < ranks; rank += ranks - 1) {
                    Arena arena = allocate(plan);
                    const Trainer run(config, shape, dtype, Recompute::none, arena,
                                      sharding_of(config, rank, ranks));
                    CHECK(arena.total_bytes() == plan.total_bytes());
                    for (const auto& [purpose, bytes] : wanted) {
                        CAPTURE(name_of(purpose));
                        CHECK(arena.bytes(purpose) >= bytes);
                        CHECK(arena.bytes(purpose) <=
                              bytes + 5 * 1024);  // at most 5 buffers, which the arena aligns
                    }
                }
            }

    // What is planned is what each rank of a run says that it takes.
    if (skip_without_mpirun()) return;
    const Settings more = zero(2) + Settings{{"precision.recompute", "none"},
                                             {"schedule.steps", "1"},
                                             {"schedule.warmup_steps", "0"}};
    const ProgramResult plan =
        run_program(job.command("plan", "run", more, {"--world", "2"}), {{"OMP_NUM_THREADS", "1"}});
    const ProgramResult run = job.start(2, "run", more);
    CAPTURE(plan.output, run.output);
    const std::string label = "precision.recompute = none: ";
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
    config.model = {.n_layer = 36,
                    .n_head = 20,
                    .n_embd = 1280,
                    .n_ctx = 1024,
                    .vocab_size = 50257,
                    .init_from = ""};
    config.batch.micro_batch = 8;
    config.batch.sequence_length = 16;  // activations do not count
    const GPTShape shape = shape_of(config, config.model.vocab_size);
    double parameters = 0;
    for (const Parameter& p : gpt_parameters(shape)) parameters += static_cast<double>(p.numel());
    for (const int ranks : {2, 8, 64})
        for (const int stage : {0, 1, 2}) {
            config.parallel.zero = stage;
            const Arena plan =
                plan_memory(config, shape, DType::bf16, Recompute::block, Device{}, ranks);
            double bytes = 0;
            for (const Purpose purpose :
                 {Purpose::parameters, Purpose::gradients, Purpose::masters, Purpose::moments})
                bytes += static_cast<double>(plan.bytes(purpose));
            const double shares = 1.0 / ranks;
            double wanted = stage == 0 ? 18 : stage == 1 ? 6 + 12 * shares : 2 + 16 * shares;
            // Of gradients of a micro-batch: the embedding's, and three buckets of blocks.
            const double embedding = (50304.0 + 1024) * 1280, block = 12.0 * 1280 * 1280;
            if (stage == 2) wanted += 4 * (embedding + 3 * block) / parameters;
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

/// On a simulated GPU: streams run as late as they may, and those that are free to run in an order that depends on `seed`.
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
    const Job job(micro_batches, on_gpus + Settings{{"data.val", ""}});
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
    int64_t parameters = 0, partials = 0;
    for (const Parameter& p : job.parameters()) {
        parameters += p.padded_numel();
        partials += (p.padded_numel() + norm_block - 1) / norm_block;
    }
    // Padding: to whole norm blocks each tensor, and on each rank the bucket.
    const int64_t padding = elements - parameters;
    CHECK(padding < norm_block * (std::ssize(job.parameters()) + d * std::ssize(layout.buckets())));
    const auto size = [](const std::string& dtype) { return dtype == "bf16" ? 2 : 4; };
    // Bytes times d, of which every rank sends 1/d: a ring reduces and gathers in d − 1 rounds each.
    const int64_t reduced = size(t.sent) * elements * (d - 1),
                  gathered = size(t.dtype) * elements * (d - 1);
    const int64_t rounds = t.stage == 2 ? (micro_batches + d - 1) / d : 1;
    const int64_t sums = 8 * (2 + (t.stage == 0 ? 0 : partials)) * 2 * (d - 1);
    const int64_t step = t.stage == 0 ? 2 * reduced + sums : rounds * reduced + gathered + sums;
    for (int rank = 0; rank < t.ranks; ++rank) {
        const int64_t counted = bytes_sent(statistics[1], rank) - bytes_sent(statistics[0], rank);
        CAPTURE(t.ranks, t.stage, t.dtype, t.sent, rank, elements, padding);
        CHECK(counted > 0);
        CHECK(std::abs(counted * d - step) < d);  // it counts whole bytes
    }
}

}  // namespace

TEST_CASE("ranks on GPUs train what one rank trains, whatever order their streams run in",
          "[training][cuda]") {
    if (skip_without_gpus(4)) return;
    const bool simulated = gpus_are_simulated();
    SECTION("in fp32") {
        const Job job(5, on_gpus);
        const std::string one = job.train(1, "one");
        const int64_t seed = random_int(0, 1000);
        CAPTURE(seed);
        std::string runs[3];
        for (const int stage : {0, 1, 2}) {
            runs[stage] = job.train(2, concat("zero-", stage), zero(stage), {}, adverse(seed));
            check_close(runs[stage], one, in_fp32_order, 6);
        }
        check_equal(job.train(2, "at-once", zero(1)), runs[1], 6);
        if (simulated)
            check_equal(runs[0], runs[1],
                        6);  // NCCL may choose other orders for all-reduce and reduce-scatter
        check_close(job.train(4, "four", zero(1), {}, adverse(seed + 1)), one, in_fp32_order, 6);
    }
    SECTION("in bf16, on from a checkpoint") {
        const Job job(4, on_gpus + in_bf16 + sent_in_bf16 + zero(2));
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
        const Job job(micro_batches, on_gpus + dtype.settings());
        const std::string one = job.train(1, "one");
        for (const int ranks : {2, 3, 4, 8}) {
            const int64_t seed = random_int(0, 1000);
            CAPTURE(dtype.name, micro_batches, ranks, seed);
            check_stages(job, one, ranks, {}, dtype.bounds, adverse(seed));
            check_stages(job, one, ranks, sent_in_bf16, in_bf16_order, adverse(seed));
        }
    }
}

TEST_CASE("a step sends what the formula says", "[training][cuda]") {
    if (skip_without_gpus(3) || !gpus_are_simulated()) return;
    check_traffic({2, 0, "bf16", "fp32"});
    check_traffic({2, 1, "bf16", "fp32"});
    check_traffic({3, 2, "fp32", "bf16"});
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
