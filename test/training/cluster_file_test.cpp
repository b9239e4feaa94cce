#include <filesystem>

#include "base/file.h"
#include "base/json_file.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/presets.h"
#include "training/plan/cluster.h"
#include "training/plan/datasheet.h"
#include "training/plan/prediction.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

/// What reading a shipped cluster says after an edit of its JSON.
template <class Edit>
std::string error_after(const Edit& edit) {
    Json json = read_json("configs/clusters/h100-dgx.json");
    edit(json);
    const TemporaryDirectory folder;
    const std::string file = folder / "mine.json";
    write_file(file, to_text(json));
    return error_of([&] { find_cluster(file); });
}

std::string error_on(const Config& config, const Cluster& cluster, int world) {
    return error_of([&] { shape_on(config, cluster, world); });
}

}  // namespace

TEST_CASE("every shipped cluster is read, has a source, and survives being written",
          "[plan][cluster]") {
    int files = 0;
    for (const fs::directory_entry& entry : fs::directory_iterator("configs/clusters")) {
        CAPTURE(entry.path());
        const Cluster cluster = find_cluster(entry.path().stem().string());
        CHECK(cluster.source.size() > 40);
        CHECK(cluster.memory > 0);
        CHECK(cluster.memory_bandwidth > 0);
        CHECK((cluster.flops_bf16 > 0 || cluster.flops_fp32 > 0));
        CHECK(cluster.node.bandwidth >= cluster.network.bandwidth);
        const TemporaryDirectory folder;
        write_file(folder / "again.json", to_text(cluster));
        Cluster again = read_cluster(folder / "again.json");
        CHECK(again.name == "again");
        again.name = cluster.name;
        CHECK(to_text(again) == to_text(cluster));
        ++files;
    }
    CHECK(files >= 9);
}

TEST_CASE("what a cluster's file leaves out comes from the GPU's datasheet", "[plan][cluster]") {
    const Cluster cluster = find_cluster("h100-dgx");
    const Gpu& gpu = gpu_named("h100");
    CHECK(cluster.flops_bf16 == Approx(1e12 * gpu.teraflops));
    CHECK(cluster.multiprocessors == gpu.multiprocessors);
    CHECK(cluster.architecture == gpu.architecture);
    CHECK(cluster.memory == Approx(80.0 * (1 << 30)));
}

TEST_CASE("a wrong cluster file is refused in a sentence that names the key", "[plan][cluster]") {
    CHECK(error_after([](Json&) {}).empty());
    const auto says = [](const std::string& error, std::initializer_list<const char*> parts) {
        INFO(error);
        for (const char* part : parts) CHECK(contains(error, part));
    };
    says(error_after([](Json& json) { json["device"].erase("memory_gb_per_s"); }),
         {"device.memory_gb_per_s", "missing", "gigabytes per second"});
    says(error_after([](Json& json) { json["device"]["memory_gb_per_s"] = -3; }),
         {"device.memory_gb_per_s", "-3", "from"});
    says(error_after([](Json& json) { json["device"]["fp8_tflops"] = 1e9; }),
         {"device.fp8_tflops", "TFLOP/s"});
    says(error_after([](Json& json) { json["node"]["latency_us"] = "5"; }),
         {"node.latency_us", "microseconds"});
    says(error_after([](Json& json) { json["ranks_per_node"] = 7.5; }),
         {"ranks_per_node", "whole number"});
    says(error_after([](Json& json) { json["ranks_per_node"] = 0; }), {"ranks_per_node", "0"});
    says(error_after([](Json& json) { json["node"]["gb_per_second"] = 3; }),
         {"node.gb_per_second", "did you mean gb_per_s?"});
    says(error_after([](Json& json) { json.erase("network"); }), {"network", "missing"});
    says(error_after([](Json& json) { json["gpu"] = "h1000"; }),
         {"mine.json", "gpu", "h1000", "table of datasheets"});
    says(error_after([](Json& json) { json["device"]["fp8_tflops"] = 10; }),
         {"device.fp8_tflops", "10", "bf16_tflops"});
    says(error_after([](Json& json) { json["node"] = nullptr; }), {"\"node\" is not an object"});
    says(error_after([](Json& json) { json["node"]["busbw"][0]["gb_per_s"] = 1000; }),
         {"gb_per_s", "more than twice"});
    says(error_after([](Json& json) { json["device"]["reached"]["products"] = 0.9; }),
         {"device.reached.half_size", "missing"});
    says(
        error_after([](Json& json) {
            json["device"]["reached"] = {
                {"products", 9}, {"half_size", 100}, {"attention", 0.5}, {"attention_backward", 2}};
        }),
        {"device.reached.products", "9", "shares of the peak"});
    says(error_of([] { find_cluster("h100-dxg"); }), {"h100-dxg", "h100-dgx", "a100-80"});
}

TEST_CASE("ranks that do not fill nodes, and tensor ranks on several, are refused",
          "[plan][cluster]") {
    Config config;
    config.model.vocab_size = 1000;
    config.schedule.steps = 1;
    const Cluster cluster = find_cluster("h100-dgx");
    CHECK(error_on(config, cluster, 8).empty());
    CHECK(error_on(config, cluster, 3).empty());
    const std::string uneven = error_on(config, cluster, 12);
    for (const char* part : {"12", "8", "16"}) CHECK(contains(uneven, part));
    config.parallel.tensor = 16;
    CHECK(contains(error_on(config, cluster, 16), "parallel.tensor = 16"));
    config.parallel.allow_tensor_across_nodes = true;
    CHECK(error_on(config, cluster, 16).empty());
    config.parallel.tensor = 3;
    CHECK(contains(error_on(config, cluster, 8), "parallel.tensor"));
}

TEST_CASE("one measured bandwidth of a large buffer does not make small ones slow",
          "[plan][cluster]") {
    const double bandwidth = 1e9 * static_cast<double>(random_int(10, 500));
    const Link link{.latency = 5e-6, .bandwidth = bandwidth, .measured = {{1, 8e9, bandwidth}}};
    CHECK(link.bandwidth_of(8e9, 1) == Approx(bandwidth));
    for (const double bytes : {1e6, 3e7, 1e9}) {
        const double seconds = bytes / link.bandwidth_of(bytes, 1);
        CHECK(seconds <= (link.latency + bytes / bandwidth) * (1 + 1e-9));
        CHECK(seconds >= bytes / bandwidth);
    }
}

TEST_CASE("ranks of a group on one node share the node's links to others", "[plan][cluster]") {
    Cluster cluster;
    cluster.ranks_per_node = 8;
    cluster.node = {.latency = 1e-6, .bandwidth = 300e9};
    cluster.network = {.latency = 1e-5, .bandwidth = 50e9};
    CHECK(cluster.bus_bandwidth(1e9, 8, 1) == Approx(300e9));
    CHECK(cluster.bus_bandwidth(1e9, 16, 1) == Approx(300e9));  // 8 · 50 GB/s is more than NVLink
    CHECK(cluster.bus_bandwidth(1e9, 16, 2) == Approx(200e9));  // four ranks on each node
    CHECK(cluster.bus_bandwidth(1e9, 16, 8) == Approx(50e9));
    CHECK(cluster.bus_bandwidth(1e9, 2, 1) == Approx(300e9));
    CHECK(cluster.latency(8, 1) == Approx(7e-6));
    CHECK(cluster.latency(32, 1) == Approx(7e-6 + 2e-5));
}

TEST_CASE("a measured bus bandwidth is taken between its sizes and by its nodes",
          "[plan][cluster]") {
    const Link link{.latency = 1e-4,
                    .bandwidth = 100e9,
                    .measured = {{1, 1e6, 10e9}, {1, 1e8, 90e9}, {4, 1e6, 5e9}, {4, 1e8, 50e9}}};
    CHECK(link.bandwidth_of(1e6, 1) == Approx(10e9));
    CHECK(link.bandwidth_of(1e7, 1) == Approx(50e9));
    CHECK(link.bandwidth_of(1e9, 1) == Approx(90e9));
    CHECK(link.bandwidth_of(1e5, 1) == Approx(1e9));  // so that the time is that of 1e6 bytes
    CHECK(link.bandwidth_of(1e7, 3) == Approx(50e9));
    CHECK(link.bandwidth_of(1e8, 64) == Approx(50e9));
}
