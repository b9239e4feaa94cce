#include "test/parallel/training_job.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "kernels/dynamic_map.h"
#include "model/families/family.h"
#include "training/config/load_config.h"
#include "training/files/checkpoint.h"
#include "training/files/model_folder.h"
#include "training/files/safetensors.h"
#include "training/trainer.h"

namespace train_gpt::training_job {

namespace {

/// States in 8 bits of an optimizer file: all elements that it has of each tensor, in its order.
std::map<std::string, std::vector<float>> decoded_states(const SafetensorsFile& file) {
    std::map<std::string, std::vector<uint8_t>> codes;
    for (const TensorInfo& info : file.tensors())
        if (info.dtype == "U8")
            for (const std::byte code : file.data(info))
                codes[info.name.substr(0, info.name.find('['))].push_back(
                    static_cast<uint8_t>(code));
    std::map<std::string, std::vector<float>> decoded;
    for (const auto& [name, of_tensor] : codes) {
        const std::string state = name.substr(0, name.find('/'));
        const int64_t n = std::ssize(of_tensor);
        std::vector<float> scales(static_cast<size_t>((n + 255) / 256));
        const TensorInfo& info = file.at(state + ".scale" + name.substr(name.find('/')));
        REQUIRE(info.numel() == std::ssize(scales));
        file.read_floats(info, scales.data());
        std::vector<float>& values = decoded[name];
        values.resize(of_tensor.size());
        decode(state == "v" ? Coding::roots : Coding::signs, of_tensor.data(), scales.data(),
               values);
    }
    return decoded;
}

}  // namespace

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

std::vector<uint32_t> skewed_tokens(int64_t n, int64_t vocab_size) {
    std::vector<uint32_t> tokens(static_cast<size_t>(n));
    for (uint32_t& token : tokens) {
        const int64_t x = random_int(0, vocab_size - 1);
        token = static_cast<uint32_t>(x * x / vocab_size * x / vocab_size);
    }
    return tokens;
}

TrainingJob::TrainingJob(int micro_batches, Settings settings) {
    const int64_t vocab_size = settings.contains("model.vocab_size")
                                   ? std::stoll(settings["model.vocab_size"])
                                   : random_int(900, 1000);
    for (const char* split : {"train", "val"}) {
        fs::create_directory(directory_ / split);
        std::vector<std::vector<uint32_t>> shards;
        for (int64_t n : {random_int(900, 1500), random_int(100, 500)})
            shards.push_back(skewed_tokens(n, vocab_size));
        settings.emplace(concat("data.", split), write_shards(directory_ / split, shards,
                                                              static_cast<uint32_t>(vocab_size)));
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
        // With a larger ε than usual an update is a smooth function of the gradient, and not
        // the sign of its rounding errors where the gradient is none (the biases of keys).
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

Config TrainingJob::config(const Settings& more) const {
    return parse_config("{}", "test", assignments(more));
}

std::vector<Parameter> TrainingJob::parameters() const {
    return registry_of(spec_of(config(), config().model.vocab_size)).parameters;
}

BucketLayout TrainingJob::layout(int ranks) const {
    return BucketLayout(
        parameters(), ranks,
        sharding_of({config(), {}, DType::fp32, Recompute::none, ranks}, 0).bucket_elements);
}

Command TrainingJob::command(const std::string& verb, const std::string& name, const Settings& more,
                             const Command& options) const {
    Command all{program(), verb, config_path()};
    for (const std::string& assignment : assignments(more))
        all.insert(all.end(), {"--set", assignment});
    all.insert(all.end(), {"--set", "run_dir=" + (more.contains("run_dir") ? more.at("run_dir")
                                                                           : path(name))});
    all.insert(all.end(), options.begin(), options.end());
    return all;
}

ProgramResult TrainingJob::start(int ranks, const std::string& name, const Settings& more,
                                 const Command& options, const Environment& environment,
                                 Launcher launcher) const {
    return run_ranks(ranks, command("train", name, more, options), environment, launcher);
}

std::string TrainingJob::train(int ranks, const std::string& name, const Settings& more,
                               const Command& options, Environment environment) const {
    environment.emplace("OMP_NUM_THREADS", "1");
    // A real GPU begins a collective that only other ranks wait for; a simulated one whose
    // streams run late needs this.
    environment.emplace("GPUSIM_NCCL_PROGRESS_MS", "300");
    const ProgramResult result =
        ranks == 1 ? run_program(command("train", name, more, options), environment)
                   : start(ranks, name, more, options, environment);
    INFO(name << " on " << ranks << " ranks, " << result.seconds << " s:\n" << result.output);
    REQUIRE(result.exit_code == 0);
    CHECK((ranks == 1 || contains(result.output, concat(" on ", ranks, " × "))));
    return path(name);
}

std::vector<std::string> TrainingJob::assignments(const Settings& more) const {
    std::vector<std::string> all;
    for (const Settings* from : {&settings_, &more})
        for (const auto& [key, value] : *from) all.push_back(concat(key, "=", value));
    return all;
}

std::vector<SortedJson> metrics_of(const std::string& run) {
    std::vector<SortedJson> lines;
    const std::string text = read(run + "/metrics.jsonl");
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos;
         begin = end + 1) {
        SortedJson line = SortedJson::parse(text.substr(begin, end - begin));
        for (const char* key :
             {"ms", "tokens_per_second", "flops_per_second", "peak_fraction", "compute_ms",
              "communication_ms", "data_wait_ms", "optimizer_ms", "seconds"})
            line.erase(key);
        // Depends on the mesh.
        std::erase_if(line.get_ref<SortedJson::object_t&>(), [](const auto& field) {
            return field.first.starts_with("bytes_sent/") || field.first.starts_with("exposed_ms/");
        });
        lines.push_back(std::move(line));
    }
    return lines;
}

Tensors state_of(const std::string& run, int64_t step) {
    const fs::path checkpoint = fs::path(run) / step_folder(step);
    Tensors all;
    const SafetensorsFile model(checkpoint / "model.safetensors");
    for (const TensorInfo& info : model.tensors()) {
        std::vector<float>& values = all["weights/" + info.name];
        values.resize(static_cast<size_t>(info.numel()));
        model.read_floats(info, values.data());
    }
    const bool muon = checkpoint_config(checkpoint).optimizer.name == OptimizerName::muon;
    for (const Parameter& p : registry_of(read_model_spec(checkpoint)).parameters)
        for (const char* state : {"master/", "m/", "v/"})
            if (*state != 'v' || !muon || p.update != Update::matrix)
                all[state + p.name].assign(static_cast<size_t>(p.numel()),
                                           std::numeric_limits<float>::quiet_NaN());
    for (const auto& entry : fs::directory_iterator(checkpoint)) {
        if (!entry.path().filename().string().starts_with("optimizer-")) continue;
        const SafetensorsFile file(entry.path());
        std::map<std::string, std::vector<float>> decoded = decoded_states(file);
        for (const TensorInfo& info : file.tensors()) {
            if (info.name.find(".scale/") != std::string::npos) continue;
            const std::string key = info.name.substr(info.name.find('/') + 1),
                              name = info.name.substr(0, info.name.find('['));
            std::vector<float>& values = all.at(name);
            const std::string range = file.metadata().at("range/" + key);
            // One run of elements, or several at equal distances
            long long first = 0, end = 0, count = 1, distance = 0;
            std::sscanf(range.c_str(), "%lld-%lld,%lld,%lld", &first, &end, &count, &distance);
            const int64_t n = end - first;
            REQUIRE(info.numel() == n * count);
            std::vector<float> saved(static_cast<size_t>(info.numel()));
            if (info.dtype == "U8") {
                std::vector<float>& left = decoded.at(name);
                std::copy_n(left.begin(), saved.size(), saved.begin());
                left.erase(left.begin(), left.begin() + info.numel());
            } else {
                file.read_floats(info, saved.data());
            }
            for (int64_t i = 0; i < count; ++i) {
                REQUIRE(end + i * distance <= std::ssize(values));
                float* const run = values.data() + first + i * distance;
                REQUIRE(std::all_of(run, run + n, [](float x) { return std::isnan(x); }));
                std::copy_n(saved.begin() + i * n, n, run);
            }
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

void check_equal(const std::string& a, const std::string& b, int64_t step) {
    CAPTURE(a, b);
    CHECK(metrics_of(a) == metrics_of(b));
    const Tensors of_a = state_of(a, step), of_b = state_of(b, step);
    std::vector<std::string> different;
    for (const auto& [name, values] : of_a)
        if (!of_b.contains(name) || !same_bits(values, of_b.at(name))) different.push_back(name);
    CHECK(different == std::vector<std::string>{});
    CHECK(of_a.size() == of_b.size());
}

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
                 int64_t step) {
    CAPTURE(run, reference);
    const std::vector<SortedJson> lines = metrics_of(run), wanted = metrics_of(reference);
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

void check_stages(const TrainingJob& job, const std::string& one_rank, int ranks,
                  const Settings& more, const Bounds& bounds, const Environment& environment) {
    const int64_t steps = job.config().schedule.steps;
    const BucketLayout layout = job.layout(ranks);
    // The embedding is split, and there are more buckets of blocks than ZeRO-2 has buffers.
    REQUIRE(layout.buckets()[1].first_unit == 0);
    REQUIRE(layout.buckets().size() >= 6);
    std::string runs[4];
    for (const int stage : {0, 1, 2, 3}) {
        runs[stage] = job.train(ranks, concat(ranks, "-ranks-zero-", stage), more + zero(stage), {},
                                environment);
        check_close(runs[stage], one_rank, bounds, steps);
    }
    if (job.config().device == "cpu" || gpus_are_simulated()) {
        check_equal(runs[0], runs[1], steps);
        check_equal(runs[2], runs[3], steps);
        if (job.config().micro_batches_per_step() == ranks) check_equal(runs[1], runs[2], steps);
    }
    for (const std::string& run : runs) fs::remove_all(run);
}

std::string random_examples(int n) {
    const auto words = [](int64_t most) {
        std::string text = "a";
        for (int64_t i = random_int(0, most - 1); i > 0; --i)
            text += random_int(0, 1) ? " b" : " ab";
        return text;
    };
    std::string jsonl;
    for (int i = 0; i < n; ++i)
        jsonl += SortedJson{{"ctx", words(9)},
                            {"endings", {words(4), words(4), words(4), words(4)}},
                            {"label", random_int(0, 3)}}
                     .dump() +
                 "\n";
    return jsonl;
}

void write_random_tasks(const TemporaryDirectory& directory, const std::string& continuation) {
    const auto words = [](int64_t most) {
        std::string text = "a";
        for (int64_t i = random_int(0, most - 1); i > 0; --i)
            text += random_int(0, 1) ? " b" : " ab";
        return text;
    };
    std::string choice = R"({"form": "multiple_choice", "shots": 1})"
                         "\n",
                schema = R"({"form": "schema", "procedure": "core"})"
                         "\n",
                text = R"({"form": "language_modeling", "procedure": "core", "delimiter": ""})"
                       "\n" +
                       SortedJson{{"context", ""},
                                  {"continuation", continuation.empty() ? "a" : continuation}}
                           .dump(-1, ' ', false, SortedJson::error_handler_t::replace) +
                       "\n";
    for (int i = 0; i < 5; ++i) {
        choice += SortedJson{{"query", words(6)},
                             {"choices", {words(4), words(2), words(3)}},
                             {"gold", random_int(0, 2)}}
                      .dump() +
                  "\n";
        schema += SortedJson{{"context_options", {words(6), words(6)}},
                             {"continuation", words(3)},
                             {"gold", random_int(0, 1)}}
                      .dump() +
                  "\n";
        text += SortedJson{{"context", words(6)}, {"continuation", words(4)}}.dump() + "\n";
    }
    write(directory / "choice.jsonl", choice);
    write(directory / "schema.jsonl", schema);
    write(directory / "text.jsonl", text);
}

void check_close_tasks(const SortedJson& a, const SortedJson& b, double tolerance) {
    for (const char* task : {"choice", "schema", "text"}) {
        const std::string name = concat("task/", task, "/bits_per_byte");
        CAPTURE(name);
        CHECK(a.at(name).get<double>() == Approx(b.at(name).get<double>()).epsilon(tolerance));
    }
}

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

}  // namespace train_gpt::training_job
