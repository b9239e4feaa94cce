#include "training/files/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <stop_token>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "test/catch.h"
#include "test/model/tiny_model.h"
#include "test/random.h"
#include "test/sorted_json.h"
#include "test/text.h"
#include "training/config/config_text.h"
#include "training/files/safetensors.h"
#include "training/files/same_model.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

const std::string fixture = "test/fixtures/gpt2-tiny";
const char* const optimizer_file = "optimizer-00000-of-00001.safetensors";

DecoderSpec random_spec() {
    const int n_head = static_cast<int>(random_int(1, 3));
    return gpt2.spec({.n_layer = static_cast<int>(random_int(1, 2)),
                      .n_head = n_head,
                      .n_embd = n_head * static_cast<int>(random_int(1, 3)) * 8,
                      .n_ctx = static_cast<int>(random_int(3, 20)),
                      .vocab_size = random_int(50, 300)});
}

/// A model with random weights and moments; the padding is zero.
TinyModel random_model(const DecoderSpec& spec, DType dtype) {
    TinyModel model(spec, 1, 2, dtype);
    for (int i = 0; i < model.count(); ++i) {
        const size_t n = static_cast<size_t>(model.parameter(i).numel());
        model.parameters->state.set(i, random_normal(n));
        for (const auto moment : {"m", "v"}) {
            model.set_state(moment, i, 0);
            model.parameters->state.write(moment, i, 0, random_normal(n, 1e-3f));
        }
    }
    return model;
}

constexpr std::string_view restored_states[] = {ParameterState::master, "m", "v"};

/// Fills everything that a checkpoint restores with NaN.
void poison(TinyModel& model) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (int i = 0; i < model.count(); ++i)
        for (const auto state : restored_states) model.set_state(state, i, nan);
}

void check_equal(const TinyModel& a, const TinyModel& b) {
    for (int i = 0; i < a.count(); ++i) {
        CAPTURE(a.parameter(i).name);
        for (const auto state : restored_states) CHECK(a.state(state, i) == b.state(state, i));
        const Tensor x = a.parameters->weight(i), y = b.parameters->weight(i);
        CHECK(std::memcmp(x.data, y.data, x.bytes()) == 0);
    }
}

/// Saves checkpoints of one model at these steps in a run's folder.
void save_steps(const fs::path& run_dir, const std::vector<int64_t>& steps) {
    const DecoderSpec spec =
        gpt2.spec({.n_layer = 1, .n_head = 1, .n_embd = 8, .n_ctx = 4, .vocab_size = 20});
    const TinyModel model = random_model(spec, DType::fp32);
    for (int64_t step : steps) save_checkpoint(run_dir, {step, Config{}, spec, *model.parameters});
}

std::vector<std::string> names(const std::vector<fs::path>& paths) {
    std::vector<std::string> result;
    for (const fs::path& path : paths) result.push_back(path.filename().string());
    return result;
}

std::set<std::string> names_in(const fs::path& folder) {
    std::set<std::string> result;
    for (const auto& entry : fs::directory_iterator(folder))
        result.insert(entry.path().filename().string());
    return result;
}

using Names = std::vector<std::string>;

/// The most memory that this process has had so far, in KiB.
long peak_memory() {
    const std::string status = read("/proc/self/status");
    return std::stol(status.substr(status.find("VmHWM:") + 6));
}

/// Whether the work, in a process of its own, takes less memory than a number of MiB at any time.
bool takes_less_than(long most, const std::function<void()>& work) {
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
        const long before = peak_memory();
        work();
        ::_exit(peak_memory() - before < most << 10 ? 0 : 1);
    }
    int status = -1;
    return ::waitpid(child, &status, 0) == child && status == 0;
}

}  // namespace

TEST_CASE("large files are hashed and read with little memory", "[checkpoint]") {
    const TemporaryDirectory folder;
    const fs::path tensors = folder / "tensors";
    const int64_t floats = random_int(40, 60) << 20;
    SafetensorsWriter writer(tensors, {{.name = "x", .dtype = "F32", .shape = {floats}}});
    const std::vector<float> some(1 << 20);
    for (int64_t i = 0; i < floats >> 20; ++i) writer.append(std::as_bytes(std::span(some)));
    writer.commit();
    CHECK(takes_less_than(40, [&] { hash_file(tensors); }));
    CHECK(takes_less_than(40, [&] {  // in small pieces, as ranks read their parts
        const SafetensorsFile from(tensors);
        std::vector<float> values(static_cast<size_t>(random_int(1000, 300'000)));
        for (int64_t first = 0; first + std::ssize(values) <= floats; first += std::ssize(values))
            from.read_floats(from.at("x"), values.data(), first, std::ssize(values));
    }));
    // At once. The values are allocated before, so that only the reader's memory counts. If the
    // work freed them, AddressSanitizer would take another eighth of their size to mark them as
    // freed.
    std::vector<float> values(static_cast<size_t>(floats));
    CHECK(takes_less_than(40, [&] {
        const SafetensorsFile from(tensors);
        from.read_floats(from.at("x"), values.data());
    }));
}

TEST_CASE("the hash of a file is that of its bytes, and its progress is reported") {
    const TemporaryDirectory folder;
    const fs::path path = folder / "large";
    write_file(path, "begin");
    fs::resize_file(path, (200 << 20) + static_cast<uintmax_t>(random_int(1, 1000)));  // zeros
    int pulses = 0;
    CHECK(hash_file(path, [&] { ++pulses; }) == hash_text(MappedFile(path).text()));
    CHECK(pulses == 26);  // 8 MiB each
}

TEST_CASE("a checkpoint restores masters, moments and weights bit for bit", "[checkpoint]") {
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const DecoderSpec spec = random_spec();
        CAPTURE(name_of(dtype), spec.n_embd, spec.vocab_size);
        const TemporaryDirectory directory;
        const TinyModel model = random_model(spec, dtype);
        const int64_t step = random_int(0, 99999999);
        Config config;
        config.schedule.steps = 7;
        const fs::path path =
            save_checkpoint(directory.path(), {step, config, spec, *model.parameters});
        verify_checkpoint(path, Verify::everything);
        CHECK(checkpoint_step(path) == step);
        CHECK(config_differences(checkpoint_config(path), config).empty());
        require_same_model(path, read_model_spec(path), spec);
        CHECK(open_model_folder(path).dtype ==
              (dtype == DType::bf16 ? StoredType::bf16 : StoredType::fp32));

        TinyModel other(spec, 1, 2, dtype);
        poison(other);
        load_training_state(path, *other.parameters);
        check_equal(model, other);

        // The weights alone equal the masters in fp32, and the rounded masters in bf16.
        TinyModel weights(spec, 1, 2, dtype);
        poison(weights);
        load_weights(open_model_folder(path), *weights.parameters);
        for (int i = 0; i < model.count(); ++i) {
            std::vector<float> wanted = model.state(ParameterState::master, i);
            if (dtype == DType::bf16)
                std::transform(wanted.begin(), wanted.end(), wanted.begin(),
                               [](float v) { return to_float(bf16(v)); });
            CHECK(weights.state(ParameterState::master, i) == wanted);
        }
    }
}

TEST_CASE("weights lie in model.safetensors as Hugging Face stores them", "[checkpoint]") {
    const DecoderSpec spec = read_model_spec(fixture);
    TinyModel model(spec, 1, 2, DType::fp32);
    model.parameters->state.initialize(test_rng()());
    load_weights(open_model_folder(fixture), *model.parameters);
    const SafetensorsFile theirs(fs::path(fixture) / "model.safetensors");

    // c_attn is [in, out] there, and [out, in] here.
    const int qkv = model.parameters->index_of("h.0.attn.c_attn.weight");
    const int64_t C = spec.n_embd;
    const TensorInfo* info = theirs.find("transformer.h.0.attn.c_attn.weight");
    if (!info) info = &theirs.at("h.0.attn.c_attn.weight");
    REQUIRE(info->shape == std::vector<int64_t>{C, 3 * C});
    std::vector<float> stored(static_cast<size_t>(3 * C * C));
    theirs.read_floats(*info, stored.data());
    const std::vector<float> weights = model.state(ParameterState::master, qkv);
    for (int64_t in = 0; in < C; ++in)
        for (int64_t out = 0; out < 3 * C; ++out)
            REQUIRE(weights[static_cast<size_t>(out * C + in)] ==
                    stored[static_cast<size_t>(in * 3 * C + out)]);

    // Saved again, every tensor is present under its name, with its shape and its values.
    const TemporaryDirectory directory;
    const fs::path path = save_checkpoint(directory.path(), {1, Config{}, spec, *model.parameters});
    const SafetensorsFile ours(path / "model.safetensors");
    CHECK(static_cast<int>(ours.tensors().size()) == model.count());
    for (const TensorInfo& tensor : ours.tensors()) {
        REQUIRE(tensor.name.starts_with("transformer."));
        const TensorInfo* same = theirs.find(tensor.name);
        if (!same) same = theirs.find(tensor.name.substr(std::string("transformer.").size()));
        CAPTURE(tensor.name);
        REQUIRE(same);
        CHECK(same->shape == tensor.shape);
        std::vector<float> a(static_cast<size_t>(tensor.numel())), b(a.size());
        ours.read_floats(tensor, a.data());
        theirs.read_floats(*same, b.data());
        CHECK(a == b);
    }
    const SortedJson config = SortedJson::parse(read(path / "config.json")),
                     original = SortedJson::parse(read(fixture + "/config.json"));
    for (const char* key : {"model_type", "n_layer", "n_head", "n_embd", "n_positions",
                            "vocab_size", "activation_function", "layer_norm_epsilon"}) {
        CAPTURE(key);
        CHECK(config.at(key).dump() == original.at(key).dump());
    }
}

TEST_CASE("optimizer state that several ranks wrote loads into one", "[checkpoint]") {
    const TemporaryDirectory directory;
    const DecoderSpec spec = random_spec();
    const TinyModel model = random_model(spec, DType::fp32);
    const fs::path path = save_checkpoint(directory.path(), {1, Config{}, spec, *model.parameters});
    fs::remove(path / optimizer_file);
    const int ranks = static_cast<int>(random_int(2, 4));
    const auto write_rank = [&](int rank) {
        std::vector<TensorInfo> tensors;
        std::map<std::string, std::string> metadata;
        std::vector<float> bytes;
        for (const std::string kind : {"master", "m", "v"})
            for (int i = 0; i < model.count(); ++i) {
                const Parameter& p = model.parameter(i);
                const int64_t first = p.numel() * rank / ranks,
                              end = p.numel() * (rank + 1) / ranks;
                const std::vector<float> state = model.state(kind, i);
                tensors.push_back(
                    {.name = kind + "/" + p.name, .dtype = "F32", .shape = {end - first}});
                metadata["range/" + p.name] = std::to_string(first) + "-" + std::to_string(end);
                bytes.insert(bytes.end(), state.begin() + first, state.begin() + end);
            }
        SafetensorsWriter writer(path / ("optimizer-" + std::to_string(rank) + "-of-n.safetensors"),
                                 tensors, metadata);
        writer.append(std::as_bytes(std::span(bytes)));
        writer.commit();
    };
    for (int rank = 0; rank < ranks; ++rank) write_rank(rank);
    TinyModel other(spec, 1, 2, DType::fp32);
    poison(other);
    load_training_state(path, *other.parameters);
    check_equal(model, other);

    fs::remove(path / "optimizer-1-of-n.safetensors");
    CHECK(contains(error_of([&] { load_training_state(path, *other.parameters); }),
                   "one of them is missing"));
}

TEST_CASE("any flipped bit, missing byte or missing file of a checkpoint is found",
          "[checkpoint]") {
    const TemporaryDirectory directory;
    save_steps(directory.path(), {3});
    const fs::path path = fs::path(directory.path()) / "step-00000003";
    verify_checkpoint(path, Verify::everything);
    for (const std::string& name : names_in(path)) {
        const std::string good = read(path / name);
        const auto refused = [&](const std::string& bytes) {
            write(path / name, bytes);
            const std::string error =
                error_of([&] { verify_checkpoint(path, Verify::everything); });
            write(path / name, good);
            return contains(error, path.string());
        };
        CAPTURE(name);
        for (int i = 0; i < 20; ++i) {
            std::string bytes = good;
            const size_t at =
                static_cast<size_t>(random_int(0, static_cast<int64_t>(bytes.size()) - 1));
            bytes[at] ^= static_cast<char>(1 << random_int(0, 7));
            CAPTURE(at);
            // The manifest itself may change without harm (the version in it); only the step in it
            // must stay the same.
            if (name != "manifest.json") CHECK(refused(bytes));
            // Only the last line break may be missing.
            CHECK(refused(good.substr(0, std::min(at, good.size() - 2))));
        }
        fs::remove(path / name);
        CHECK(contains(error_of([&] { verify_checkpoint(path, Verify::everything); }),
                       path.string()));
        if (name == optimizer_file)
            CHECK(error_of([&] { verify_checkpoint(path, Verify::model); }).empty());
        fs::create_directory(path / name);
        CHECK(contains(error_of([&] { verify_checkpoint(path, Verify::everything); }),
                       path.string()));
        fs::remove(path / name);
        write(path / name, good);
    }
    const SortedJson manifest = SortedJson::parse(read(path / "manifest.json"));
    const auto edited = [&](const std::function<void(SortedJson&)>& edit) {
        SortedJson other = manifest;
        edit(other);
        write(path / "manifest.json", other.dump());
        return error_of([&] { verify_checkpoint(path, Verify::everything); });
    };
    CHECK(edited([](SortedJson&) {}).empty());
    CHECK(contains(edited([](SortedJson& m) { m["step"] = 4; }), "step 4"));
    CHECK(contains(edited([](SortedJson& m) { m["format_version"] = 1000; }), "newer version"));
    CHECK(contains(edited([](SortedJson& m) { m["files"] = 5; }), "files"));
    CHECK(contains(edited([](SortedJson& m) { m["files"].erase("model.safetensors"); }),
                   "model.safetensors"));
    CHECK(contains(edited([](SortedJson& m) { m["files"]["config.json"] = nullptr; }), "bytes"));
    CHECK(contains(edited([](SortedJson& m) { m = SortedJson::array(); }), "format_version"));
}

TEST_CASE(
    "the newest whole checkpoint is found, damaged ones are set aside, and none whole is an error",
    "[checkpoint]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    Names warnings;
    const auto recover = [&] {
        warnings.clear();
        const auto found = recover_newest_checkpoint(
            run, [&](const std::string& text) { warnings.push_back(text); });
        return found ? found->filename().string() : "";
    };
    CHECK(recover().empty());
    fs::create_directory(run);
    CHECK(recover().empty());
    save_steps(run, {2, 99999999, 100000000});  // nine digits are newer than eight
    CHECK(recover() == "step-100000000");
    CHECK(warnings.empty());
    fs::remove(run / "step-100000000/manifest.json");
    fs::resize_file(run / "step-99999999/model.safetensors", 100);
    CHECK(recover() == "step-00000002");
    CHECK(warnings.size() == 2);
    CHECK(names_in(run) == std::set<std::string>{"step-00000002", "step-99999999.damaged",
                                                 "step-100000000.damaged"});
    CHECK(recover() == "step-00000002");
    CHECK(warnings.empty());
    fs::remove(run / "step-00000002/config.json");
    const auto before = names_in(run);
    CHECK(contains(error_of([&] { recover(); }), "none of the 1 checkpoints"));
    CHECK(names_in(run) == before);
}

TEST_CASE("the newest checkpoints are kept, and nothing else is touched", "[checkpoint]") {
    const TemporaryDirectory directory;
    const fs::path run = directory.path();
    save_steps(run, {1, 5, 10, 200000000});
    write(run / "metrics.jsonl", "x");
    for (const char* name : {"step-00000001.damaged", "step-abc", "step-00000007.tmp", "notes.tmp"})
        fs::create_directory(run / name);
    const std::set<std::string> others{"metrics.jsonl", "step-00000001.damaged", "step-abc",
                                       "notes.tmp"};
    const auto with = [&](std::set<std::string> names) {
        names.insert(others.begin(), others.end());
        return names;
    };
    prune_checkpoints(run, 0);
    CHECK(fs::exists(run / "step-00000007.tmp"));  // which may be being written
    remove_unfinished_checkpoints(run);
    CHECK(names_in(run) ==
          with({"step-00000001", "step-00000005", "step-00000010", "step-200000000"}));
    prune_checkpoints(run, 5);
    CHECK(names(list_checkpoints(run)) ==
          Names{"step-200000000", "step-00000010", "step-00000005", "step-00000001"});
    prune_checkpoints(run, 2);
    CHECK(names_in(run) == with({"step-00000010", "step-200000000"}));
    CHECK(find_checkpoint(run) == run / "step-200000000");
    prune_checkpoints(run, 1);
    CHECK(names_in(run) == with({"step-200000000"}));
    prune_checkpoints(directory / "none", 1);
    CHECK(list_checkpoints(directory / "none").empty());
}

TEST_CASE("of older checkpoints the newest sound and the sane one stay; later ones are suspect",
          "[checkpoint]") {
    for (int trial = 0; trial < 30; ++trial) {
        const TemporaryDirectory directory;
        const fs::path& run = directory.path();
        std::set<int64_t, std::greater<>> steps;
        for (int64_t n = random_int(1, 8); n > 0; --n) steps.insert(random_int(1, 12));
        for (const int64_t step : steps) {
            fs::create_directory(checkpoint_path(run, step));
            write(checkpoint_path(run, step) / "manifest.json", "{}");
        }
        const auto steps_there = [&] {
            std::set<int64_t, std::greater<>> there;
            for (const int64_t step : steps)
                if (fs::exists(checkpoint_path(run, step))) there.insert(step);
            return there;
        };
        const int keep = static_cast<int>(random_int(1, 4));
        const int64_t sound = random_int(0, 13), sane = random_int(0, 13);
        CAPTURE(steps, keep, sound, sane);
        std::set<int64_t, std::greater<>> expected;
        for (const int64_t step : steps) {
            const bool is_new = std::ssize(expected) < keep;
            const auto newest_sound =
                std::ranges::find_if(steps, [&](int64_t other) { return other <= sound; });
            if (is_new || (newest_sound != steps.end() && step == *newest_sound) || step == sane)
                expected.insert(step);
        }
        prune_checkpoints(run, keep, sound, sane);
        CHECK(steps_there() == expected);

        const auto after = std::erase_if(expected, [&](int64_t step) { return step > sound; });
        CHECK(set_aside_checkpoints(run, sound) == static_cast<int>(after));
        CHECK(steps_there() == expected);
        CHECK(names_in(run).size() == expected.size() + after);
    }
}

TEST_CASE("a checkpoint names the oldest version that knows its position", "[checkpoint]") {
    const TemporaryDirectory directory;
    const DecoderSpec spec = random_spec();
    const TinyModel model = random_model(spec, DType::fp32);
    const int64_t per_step = random_int(1, 1000), step = random_int(2, 99);
    const auto version_with = [&](const std::optional<RunPosition>& position) {
        CheckpointContents contents{step, Config{}, spec, *model.parameters};
        contents.position = position;
        return SortedJson::parse(
                   read(save_checkpoint(directory.path(), contents) / "manifest.json"))
            .at("format_version")
            .get<int>();
    };
    RunPosition position{.step = step, .tokens = TokenCount(per_step)};
    CHECK(version_with({}) == 1);
    CHECK(version_with(position) == 1);
    // Versions that do not know it would multiply the step by the batch.
    position.tokens.change(random_int(1, step), per_step + 1);
    CHECK(version_with(position) == 3);
    position.tokens = TokenCount(per_step);
    position.order.first_token = random_int(1, step * per_step);
    CHECK(version_with(position) == 3);
}

TEST_CASE("a checkpoint that cannot be written leaves the others as they were", "[checkpoint]") {
    const TemporaryDirectory directory;
    const DecoderSpec spec =
        gpt2.spec({.n_layer = 1, .n_head = 1, .n_embd = 8, .n_ctx = 4, .vocab_size = 20});
    for (DType dtype : {DType::fp32, DType::bf16}) {
        const fs::path run = directory / name_of(dtype);
        TinyModel model = random_model(spec, dtype);
        save_checkpoint(run, {1, Config{}, spec, *model.parameters});
        const int bad = static_cast<int>(random_int(0, model.count() - 1));
        const int64_t at = random_int(0, model.parameter(bad).numel() - 1);
        const auto set = [&](float value) {
            model.parameters->state.write(ParameterState::master, bad, at, {&value, 1});
        };
        // 3.4e38 is finite in fp32 and rounds to infinity in bf16.
        for (float number : {NAN, INFINITY, dtype == DType::bf16 ? 3.4e38f : -INFINITY}) {
            set(number);
            const std::string error = error_of([&] {
                save_checkpoint(run, {2, Config{}, spec, *model.parameters});
            });
            CHECK(contains(error, model.parameter(bad).name));
            CHECK(names_in(run) == std::set<std::string>{"step-00000001"});
        }
        set(1);
        write(run / "step-00000003.tmp", "a file in the way is replaced");
        save_checkpoint(run, {3, Config{}, spec, *model.parameters});
        CHECK(names_in(run) == std::set<std::string>{"step-00000001", "step-00000003"});
    }
}

TEST_CASE("no checkpoint stays in a folder that takes the place of the run's while it begins",
          "[checkpoint]") {
    const TemporaryDirectory directory;
    const DecoderSpec spec =
        gpt2.spec({.n_layer = 1, .n_head = 1, .n_embd = 8, .n_ctx = 4, .vocab_size = 20});
    TinyModel model = random_model(spec, DType::fp32);
    const Config config;
    CheckpointContents contents{1, config, spec, *model.parameters};
    int asked = 0;
    contents.require_in_place = [&] { ++asked; };
    save_checkpoint(directory.path(), contents);
    const int questions = asked;
    REQUIRE(questions >= 2);
    contents.step = 2;
    for (int yes = 0; yes < questions; ++yes) {  // so many questions are answered with yes
        asked = 0;
        contents.require_in_place = [&] {
            if (asked++ >= yes) throw Error("it was renamed");
        };
        // A checkpoint of the other run that is being written
        const fs::path other = directory / "step-00000002.tmp";
        const bool has_other = yes == 0;
        if (has_other) fs::create_directory(other), write(other / "manifest.json", "of the other");
        const std::string error = error_of([&] { save_checkpoint(directory.path(), contents); });
        CAPTURE(yes, error);
        CHECK(contains(error, "it was renamed"));
        CHECK_FALSE(fs::exists(directory / "step-00000002"));
        if (has_other) CHECK(read(other / "manifest.json") == "of the other");
        if (yes <= 2 && !has_other)
            CHECK(names_in(directory.path()) == std::set<std::string>{"step-00000001"});
        fs::remove_all(other);
    }
    // A question comes when the folder has been made, and before there is a file in it.
    bool is_made = false;
    contents.require_in_place = [&] {
        const fs::path place = directory / "step-00000002.tmp";
        is_made = is_made || (fs::exists(place) && fs::is_empty(place));
    };
    save_checkpoint(directory.path(), contents);
    CHECK(is_made);
}

TEST_CASE("a model folder that is not GPT-2 as known here is refused with the key",
          "[checkpoint]") {
    const TemporaryDirectory directory;
    const SortedJson good = SortedJson::parse(read(fixture + "/config.json"));
    const auto refused = [&](const char* key, const SortedJson& value) {
        SortedJson config = good;
        config[key] = value;
        write(directory / "config.json", config.dump());
        const std::string error = error_of([&] { read_model_spec(directory.path()); });
        CAPTURE(key, value.dump(), error);
        CHECK(contains(error, directory / "config.json"));
        CHECK(contains(error, key));
        CHECK_FALSE(contains(error, "json.exception"));
    };
    refused("model_type", "bert");
    refused("model_type", 3);
    for (const char* key : {"n_layer", "n_head", "n_embd", "n_positions", "vocab_size"})
        for (const SortedJson& value :
             {SortedJson(0), SortedJson(-1), SortedJson("2"), SortedJson(nullptr), SortedJson(2.5),
              SortedJson(true), SortedJson((1LL << 32) + 2)})
            refused(key, value);
    refused("n_embd", good.at("n_head").get<int>() * 8 + 1);
    refused("activation_function", "relu");
    refused("activation_function", 1);
    refused("n_inner", 7);
    refused("layer_norm_epsilon", 1e-6);
    refused("tie_word_embeddings", false);
    refused("scale_attn_weights", false);
    refused("scale_attn_by_inverse_layer_idx", true);
    write(directory / "config.json", "{");
    CHECK(contains(error_of([&] { read_model_spec(directory.path()); }), "not valid JSON"));
    CHECK(contains(error_of([&] { read_model_spec(directory / "none"); }), directory / "none"));

    const DecoderSpec spec =
        gpt2.spec({.n_layer = 2, .n_head = 2, .n_embd = 8, .n_ctx = 4, .vocab_size = 20});
    DecoderSpec other = spec;
    other.n_ctx = 8;
    CHECK(contains(error_of([&] { require_same_model("here", other, spec); }), "n_ctx = 8"));
    // A soft-cap is named, although it takes a GPT-2 out of its family.
    other = gpt2.spec({.n_layer = 2,
                       .n_head = 2,
                       .n_embd = 8,
                       .n_ctx = 4,
                       .vocab_size = 20,
                       .attention_softcap = 50});
    const std::string error = error_of([&] { require_same_model("here", spec, other); });
    CHECK(contains(error, "attention_softcap = 0, but the configuration has 50"));
}

TEST_CASE("a checkpoint is named by itself or by its run", "[checkpoint]") {
    const TemporaryDirectory directory;
    CHECK(contains(error_of([&] { find_checkpoint(directory / "none"); }), "no checkpoint"));
    CHECK(contains(error_of([&] { find_checkpoint(directory.path()); }), "no complete checkpoint"));
    save_steps(directory.path(), {1, 2});
    CHECK(find_checkpoint(directory.path()).filename() == "step-00000002");
    CHECK(find_checkpoint(directory / "step-00000001").filename() == "step-00000001");
    CHECK(find_checkpoint(fixture) == fixture);
}

TEST_CASE("a run that replaces its only checkpoint has one whenever it is looked for",
          "[checkpoint]") {
    const TemporaryDirectory directory;
    const fs::path run = directory.path(), made = run / "made";
    const auto save = [&](int64_t step) {
        fs::create_directory(made);
        write(made / "manifest.json", "{}");
        fs::rename(made, checkpoint_path(run, step));
    };
    save(1);
    int missed = 0;
    {
        const std::jthread saves([&](const std::stop_token& stop) {
            for (int64_t step = 2; !stop.stop_requested(); ++step) {
                save(step);
                fs::remove_all(checkpoint_path(run, step - 1));
            }
        });
        for (int i = 0; i < 2000; ++i) missed += list_checkpoints(run).empty();
    }
    CHECK(missed == 0);
}

TEST_CASE("differences of two configurations name the key, the old and the new value",
          "[checkpoint]") {
    Config before, after;
    CHECK(config_differences(before, after).empty());
    after.optimizer.learning_rate = 0.25;
    after.data.train = {{"b", 1, "b"}};
    CHECK(config_differences(before, after) ==
          Names{"data.train changed from \"\" to \"b\"",
                "optimizer.learning_rate changed from 0.0006 to 0.25"});
}
