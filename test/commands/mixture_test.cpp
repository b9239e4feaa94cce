// train_gpt train with a small mixture of experts: what the run says about its routers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <set>
#include <sstream>

#include "test/commands/program.h"
#include "test/training/event_reader.h"

using namespace train_gpt;

namespace {

constexpr int E = 8;

/// Layers 1 and 2 of three have experts.
Arguments mixture(const TemporaryDirectory& directory, const std::string& run,
                  const Arguments& more = {}) {
    const SortedJson config{
        {"run_dir", run},
        {"device", "cpu"},
        {"model",
         {{"family", "qwen3_moe"},
          {"n_layer", 3},
          {"n_head", 2},
          {"n_kv_head", 1},
          {"head_size", 16},
          {"n_embd", 32},
          {"n_ctx", 32},
          {"n_ff", 48},
          {"vocab_size", 128},
          {"n_expert", E},
          {"n_expert_per_token", 2},
          {"n_ff_expert", 16},
          {"dense_layers", {0}}}},
        {"data", {{"train", "synthetic"}}},
        {"batch", {{"tokens_per_step", 256}, {"micro_batch", 4}, {"sequence_length", 32}}},
        {"precision", {{"dtype", "fp32"}}},
        {"optimizer", {{"learning_rate", 0.003}}},
        {"schedule", {{"steps", 12}}}};
    const std::string path = directory / "config.json";
    std::ofstream(path) << config.dump();
    return Arguments{"train", path} + more;
}

std::vector<SortedJson> lines_of(const fs::path& file) {
    std::vector<SortedJson> lines;
    std::istringstream in(read(file));
    for (std::string line; std::getline(in, line);) lines.push_back(SortedJson::parse(line));
    return lines;
}

/// Copies a checkpoint of the run, and lets `change` edit the weights of a router [E, n_embd].
template <class Change>
std::string changed_model(const TemporaryDirectory& directory, const fs::path& checkpoint,
                          int layer, Change&& change) {
    const std::string copy = directory / "changed";
    fs::create_directories(copy);
    for (const char* name : {"config.json", "model.safetensors"})
        fs::copy_file(checkpoint / name, fs::path(copy) / name);
    std::string bytes = read(copy + "/model.safetensors");
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof header);
    const SortedJson entry = SortedJson::parse(bytes.substr(8, header))
                                 .at("model.layers." + std::to_string(layer) + ".mlp.gate.weight");
    REQUIRE(entry.at("dtype") == "F32");
    const auto from = entry.at("data_offsets")[0].get<size_t>(),
               to = entry.at("data_offsets")[1].get<size_t>();
    std::vector<float> weights((to - from) / sizeof(float));
    std::memcpy(weights.data(), bytes.data() + 8 + header + from, to - from);
    change(weights);
    std::memcpy(bytes.data() + 8 + header + from, weights.data(), to - from);
    write(copy + "/model.safetensors", bytes);
    return copy;
}

}  // namespace

TEST_CASE("a run of a mixture logs the balance of its layers, and draws it", "[cli]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    check_succeeds(train_gpt_with(mixture(directory, run)));
    const std::vector<SortedJson> loads = lines_of(run / "routers.jsonl");
    REQUIRE(loads.size() == 12);
    const event_reader::Board board = event_reader::board_of(run);
    std::set<int64_t> seen;
    for (const SortedJson& line : lines_of(run / "metrics.jsonl")) {
        if (!line.contains("loss")) continue;
        const auto step = line.at("step").get<int64_t>();
        seen.insert(step);
        const SortedJson& load = loads.at(static_cast<size_t>(step - 1));
        CHECK(load.at("step") == step);
        CHECK(load.at("load")[0].is_null());
        for (const char* list :
             {"router_load/layers", "router_idle/layers", "router_entropy/layers"}) {
            REQUIRE(line.at(list).size() == 3);
            CHECK(line.at(list)[0].is_null());
        }
        CHECK_FALSE(line.contains("router_bias_range/layers"));
        double largest = 0;
        int64_t idle = 0;
        for (const size_t layer : {1, 2}) {
            const auto of_layer = load.at("load")[layer].get<std::vector<int64_t>>();
            REQUIRE(of_layer.size() == E);
            int64_t sum = 0;
            for (const int64_t share : of_layer) sum += share;
            CHECK(std::abs(sum - 1000 * E) <= E / 2);
            const double most = static_cast<double>(std::ranges::max(of_layer)) / 1000;
            CHECK(line.at("router_load/layers")[layer].get<double>() == Approx(most).margin(6e-4));
            CHECK(line.at("router_idle/layers")[layer] == std::ranges::count(of_layer, 0));
            const double entropy = line.at("router_entropy/layers")[layer];
            CHECK(entropy > 0);
            CHECK(entropy <= std::log(E) + 1e-4);
            largest = std::max(largest, line.at("router_load/layers")[layer].get<double>());
            idle += line.at("router_idle/layers")[layer].get<int64_t>();
            for (const std::string figure : {"load", "idle", "entropy"})
                CHECK(board.scalars.at("router/" + figure + "/" + std::to_string(layer)).at(step) ==
                      line.at("router_" + figure + "/layers")[layer].get<float>());
        }
        CHECK(line.at("router_load").get<double>() == Approx(largest).margin(1e-4));
        CHECK(line.at("router_idle") == idle);
        CHECK(board.scalars.at("router/load").at(step) == line.at("router_load").get<float>());
    }
    CHECK(seen.size() == 12);
    CHECK_FALSE(board.scalars.contains("router/load/0"));
    const std::string page = read(run / "report.html");
    CHECK(contains(page, "\"routers\":{\"layers\":[1,2],\"experts\":8,\"steps\":[1,2,3,"));
    CHECK(contains(page, "\"router_load\":{"));
}

TEST_CASE("a mixture's run that resumes has the loads of each step once", "[cli]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    check_succeeds(train_gpt_with(mixture(directory, run, {"--stop-at", "7"})));
    const std::string seven = read(run / "routers.jsonl");
    CHECK(lines_of(run / "routers.jsonl").size() == 7);
    // As if the run had been killed later: lines of steps that come again, and half a line.
    std::ofstream(run / "routers.jsonl", std::ios::app)
        << "{\"step\":8,\"load\":[null,[],[]]}\n{\"step\":9,\"load\":[nu";
    check_succeeds(train_gpt_with(mixture(directory, run)));
    CHECK(read(run / "routers.jsonl").starts_with(seven));
    int64_t step = 0;
    for (const SortedJson& line : lines_of(run / "routers.jsonl")) CHECK(line.at("step") == ++step);
    CHECK(step == 12);
}

TEST_CASE("a run with selection biases logs their range", "[cli]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    check_succeeds(train_gpt_with(mixture(
        directory, run,
        {"--set", "router.balance=bias", "--set", "router.balance_rate=0.5", "--stop-at", "2"})));
    const std::vector<SortedJson> lines = lines_of(run / "metrics.jsonl");
    CHECK(lines.at(0).at("router_bias_range/layers") == SortedJson({nullptr, 0, 0}));
    // In a step a bias moves by half up or down.
    CHECK(lines.at(1).at("router_bias_range/layers")[1].get<double>() == Approx(1).margin(1e-4));
}

TEST_CASE("a run whose experts have a capacity logs what they drop, and its model is the family's",
          "[cli]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    check_succeeds(train_gpt_with(
        mixture(directory, run, {"--set", "model.expert_capacity=1", "--stop-at", "2"})));
    const event_reader::Board board = event_reader::board_of(run);
    for (const SortedJson& line : lines_of(run / "metrics.jsonl")) {
        if (!line.contains("loss")) continue;
        const SortedJson& dropped = line.at("router_dropped/layers");
        REQUIRE(dropped.size() == 3);
        CHECK(dropped[0].is_null());
        for (const size_t layer : {1, 2}) {
            const auto share = dropped[layer].get<double>();
            // Of the 64 routes of a sequence, each expert takes 8: two of them take at least 16.
            CHECK((share > 0 && share <= 0.75));
            CHECK(board.scalars.at("router/dropped/" + std::to_string(layer))
                      .at(line.at("step").get<int64_t>()) == dropped[layer].get<float>());
        }
    }
    const SortedJson model = SortedJson::parse(read(run / step_folder(2) / "config.json"));
    CHECK(model.at("model_type") == "qwen3_moe");
    // It says nothing about the weights: the run resumes without it.
    const Outcome outcome = check_succeeds(
        train_gpt_with(mixture(directory, run, {"--set", "model.expert_capacity=0"})));
    CHECK(contains(outcome.out + outcome.err, "model.expert_capacity"));
    CHECK_FALSE(lines_of(run / "metrics.jsonl").back().contains("router_dropped/layers"));
}

TEST_CASE("a run names a layer whose experts have collapsed, once", "[cli]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    const Arguments one_expert{"--set", "model.n_expert_per_token=1"};
    check_succeeds(
        train_gpt_with(mixture(directory, run, one_expert + Arguments{"--stop-at", "1"})));
    // Expert 0 or expert 1 has the largest logit of each token. With one expert for a token, whose
    // weight is 1, the router does not learn; nor do other layers at this learning rate.
    const std::string model =
        changed_model(directory, run / step_folder(1), 2, [](std::vector<float>& weights) {
            const size_t width = weights.size() / E;
            std::ranges::fill(weights, 0.0f);
            for (size_t i = 0; i < width; ++i) {
                weights[i] = i % 2 ? 1.0f : -1.0f;
                weights[width + i] = -weights[i];
            }
        });
    const fs::path next = directory / "next";
    const Outcome outcome = check_succeeds(train_gpt_with(mixture(
        directory, next,
        one_expert + Arguments{"--set", "model.init_from=" + model, "--set", "router.balance=none",
                               "--set", "optimizer.learning_rate=1e-6", "--set",
                               "schedule.steps=120", "--quiet"})));
    CHECK(occurrences(outcome.err, "warning: experts have collapsed") == 1);
    CHECK(contains(outcome.err, "layer 2 uses "));
    CHECK_FALSE(contains(outcome.err, "layer 1 uses "));
    CHECK(contains(outcome.err, "router.balance=loss"));
}

TEST_CASE("a router whose probabilities are not finite is named by its layer", "[cli]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    check_succeeds(train_gpt_with(mixture(directory, run, {"--stop-at", "1"})));
    const int layer = static_cast<int>(random_int(1, 2));
    const std::string model =
        changed_model(directory, run / step_folder(1), layer, [](std::vector<float>& weights) {
            const auto at = static_cast<size_t>(random_int(0, std::ssize(weights) - 1));
            weights[at] = std::nanf("");
        });
    const Outcome outcome = train_gpt_with(
        mixture(directory, directory / "next", {"--set", "model.init_from=" + model, "--quiet"}));
    CHECK(outcome.code == 1);
    CHECK(contains(outcome.err, "the gradient of step 1 is not finite (first in "));
    CHECK(contains(outcome.err,
                   "; the router of layer " + std::to_string(layer) +
                       " is the first with probabilities that are not finite, in 8 sequences)"));
}
