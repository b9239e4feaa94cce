// Reading and writing files of clusters.
#include <algorithm>
#include <cmath>
#include <set>

#include "base/error.h"
#include "base/json_file.h"
#include "base/printable.h"
#include "training/config/nearest_key.h"
#include "training/config/presets.h"
#include "training/plan/cluster.h"
#include "training/plan/datasheet.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

/// An object of a file, of which each key must be read.
class Section {
  public:
    Section(const Json& json, std::string path, std::string place)
        : json_(json), path_(std::move(path)), place_(std::move(place)) {
        if (!json.is_object()) throw Error(where(""), " is not an object; write it as {…}");
    }

    bool has(const char* key) {
        known_.push_back(key);
        return json_.contains(key);
    }
    /// A number between these bounds.
    double number(const char* key, double least, double most, const char* unit) {
        if (!has(key))
            throw Error(where(key), " is missing; give it in ", unit, ", such as ",
                        short_text(std::sqrt(least * most)));
        const Json& value = json_[key];
        const double x = value.is_number() ? value.get<double>() : std::nan("");
        if (!(x >= least && x <= most))
            throw Error(where(key), " is ", to_text(value), ", but it is in ", unit, ", from ",
                        short_text(least), " to ", short_text(most));
        return x;
    }
    double number_or(double otherwise, const char* key, double least, double most,
                     const char* unit) {
        return has(key) ? number(key, least, most, unit) : otherwise;
    }
    int count(const char* key, int least, int most) {
        const double x = number(key, least, most, "whole numbers");
        if (x != std::floor(x)) throw Error(where(key), " is ", x, "; give a whole number");
        return static_cast<int>(x);
    }
    std::string text(const char* key) {
        if (!has(key)) return "";
        if (!json_[key].is_string()) throw Error(where(key), " is not a text; write it in quotes");
        return json_[key].get<std::string>();
    }
    Section section(const char* key) {
        if (!has(key))
            throw Error(where(key), " is missing; see configs/clusters/h100-dgx.json for one");
        return {json_[key], path_, place_ + key + "."};
    }
    const Json& list(const char* key) {
        if (!json_[key].is_array()) throw Error(where(key), " is not a list; write it as […]");
        return json_[key];
    }
    void refuse_others() const {
        for (const auto& [key, value] : json_.items()) {
            if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
            const std::string nearest = nearest_name(key, known_);
            throw Error(where(key), " is not a key of clusters",
                        nearest.empty() ? "; remove it" : "; did you mean " + nearest + "?");
        }
    }
    std::string where(const std::string& key) const {
        std::string place = place_ + key;
        if (place.ends_with('.')) place.pop_back();
        return place.empty() ? path_ : concat(path_, ": \"", printable(place), "\"");
    }

  private:
    static std::string short_text(double x) {
        char text[32];
        std::snprintf(text, sizeof text, "%.3g", x);
        return text;
    }

    const Json& json_;
    std::string path_, place_;
    std::vector<std::string> known_;
};

constexpr double giga = 1e9, micro = 1e-6, tera = 1e12, gibi = 1 << 30;
constexpr const char* gigabytes_per_second = "gigabytes per second";

Link read_link(Section section) {
    Link link;
    link.latency = micro * section.number("latency_us", 0.01, 1e5, "microseconds");
    link.bandwidth = giga * section.number("gb_per_s", 0.001, 1e5, gigabytes_per_second);
    if (section.has("busbw"))
        for (const Json& entry : section.list("busbw")) {
            Section of(entry, section.where("busbw"), "");
            BusBandwidth one{
                .nodes = of.has("nodes") ? of.count("nodes", 1, 1 << 20) : 1,
                .bytes = of.number("bytes", 1, 1e13, "bytes"),
                .bandwidth = giga * of.number("gb_per_s", 1e-6, 1e5, gigabytes_per_second)};
            if (one.bandwidth > 2 * link.bandwidth)
                throw Error(of.where("gb_per_s"), " is ", one.bandwidth / giga,
                            ", more than twice the link's gb_per_s, ", link.bandwidth / giga,
                            "; correct one of the two");
            of.refuse_others();
            link.measured.push_back(one);
        }
    std::sort(link.measured.begin(), link.measured.end(),
              [](const BusBandwidth& a, const BusBandwidth& b) {
                  return std::pair(a.nodes, a.bytes) < std::pair(b.nodes, b.bytes);
              });
    section.refuse_others();
    return link;
}

ReachedShares read_shares(Section section) {
    constexpr const char* of_the_peak = "shares of the peak";
    ReachedShares shares;
    shares.products = section.number("products", 0.01, 1.5, of_the_peak);
    shares.half_size = section.number("half_size", 0, 1e4, "columns");
    shares.attention = section.number("attention", 0.001, 1.5, of_the_peak);
    shares.attention_backward =
        section.number("attention_backward", 0.5, 20, "times the forward pass");
    section.refuse_others();
    return shares;
}

const Gpu& gpu_in_file(const std::string& key, const std::string& where) {
    try {
        return gpu_named(key);
    } catch (const Error&) {
        throw Error(where, " is ", printable(key),
                    ", which is not in the table of datasheets (training/plan/datasheet.cpp); "
                    "name a GPU that is most like it, and give what differs in \"device\"");
    }
}

Json json_of(const Link& link) {
    Json json{{"latency_us", link.latency / micro}, {"gb_per_s", link.bandwidth / giga}};
    for (const BusBandwidth& entry : link.measured)
        json["busbw"].push_back(
            {{"nodes", entry.nodes}, {"bytes", entry.bytes}, {"gb_per_s", entry.bandwidth / giga}});
    return json;
}

}  // namespace

Cluster read_cluster(const fs::path& path) {
    const Json json = read_json(path);
    Section file(json, path.string(), "");
    Cluster cluster;
    cluster.name = path.stem().string();
    cluster.source = file.text("source");
    cluster.note = file.text("note");
    cluster.is_measured = file.text("measured") == "selfcheck";
    cluster.gpu = file.text("gpu");
    // What the table of datasheets knows need not be in the file.
    if (cluster.is_cuda()) {
        const Gpu gpu = gpu_in_file(cluster.gpu, file.where("gpu"));
        cluster.architecture = gpu.architecture;
        cluster.multiprocessors = gpu.multiprocessors;
        cluster.flops_bf16 = tera * gpu.teraflops;
        cluster.memory = gibi * gpu.memory_gib;
        cluster.host_link = gpu.has_pcie5 ? 50 * giga : 25 * giga;
    }
    Section device = file.section("device");
    const bool known = cluster.is_cuda();
    const auto tflops = [&](double& flops, const char* key, bool needed) {
        if (device.has(key) || needed)
            flops = tera * device.number(key, 1e-4, 1e5, "TFLOP/s without sparsity");
    };
    tflops(cluster.flops_fp32, "fp32_tflops", !known);
    tflops(cluster.flops_bf16, "bf16_tflops", false);
    tflops(cluster.flops_fp8, "fp8_tflops", false);
    const auto in_order = [&](double less, const char* of_less, double more, const char* of_more) {
        if (known && less > 0 && more > 0 && less > more)
            throw Error(device.where(of_more), " is ", more / tera, ", less than ", of_less, ", ",
                        less / tera, "; correct one of the two");
    };
    in_order(cluster.flops_fp32, "fp32_tflops", cluster.flops_bf16, "bf16_tflops");
    in_order(cluster.flops_bf16, "bf16_tflops", cluster.flops_fp8, "fp8_tflops");
    if (device.has("multiprocessors") || !known)
        cluster.multiprocessors = device.count("multiprocessors", 1, 1 << 16);
    if (device.has("memory_gib") || !known)
        cluster.memory = gibi * device.number("memory_gib", 0.1, 1e5, "GiB");
    cluster.memory_bandwidth =
        giga * device.number("memory_gb_per_s", 0.1, 1e5, gigabytes_per_second);
    cluster.host_link = giga * device.number_or(cluster.host_link / giga, "host_gb_per_s", 0.1, 1e4,
                                                gigabytes_per_second);
    if (device.has("reached")) cluster.shares = read_shares(device.section("reached"));
    device.refuse_others();
    cluster.ranks_per_node = file.count("ranks_per_node", 1, 4096);
    cluster.node = read_link(file.section("node"));
    cluster.network = read_link(file.section("network"));
    cluster.storage =
        giga * file.number_or(0, "storage_gb_per_s", 0.001, 1e6, gigabytes_per_second);
    file.refuse_others();
    return cluster;
}

std::string to_text(const Cluster& cluster) {
    Json device{{"multiprocessors", cluster.multiprocessors},
                {"memory_gib", cluster.memory / gibi},
                {"memory_gb_per_s", cluster.memory_bandwidth / giga}};
    const auto add = [&](const char* key, double value, double unit) {
        if (value > 0) device[key] = value / unit;
    };
    add("fp32_tflops", cluster.flops_fp32, tera);
    add("bf16_tflops", cluster.flops_bf16, tera);
    add("fp8_tflops", cluster.flops_fp8, tera);
    add("host_gb_per_s", cluster.host_link, giga);
    if (const ReachedShares& shares = cluster.shares; shares.products > 0)
        device["reached"] = {{"products", shares.products},
                             {"half_size", shares.half_size},
                             {"attention", shares.attention},
                             {"attention_backward", shares.attention_backward}};
    Json json{{"source", cluster.source}};
    if (!cluster.note.empty()) json["note"] = cluster.note;
    if (cluster.is_measured) json["measured"] = "selfcheck";
    if (cluster.is_cuda()) json["gpu"] = cluster.gpu;
    json["device"] = device;
    json["ranks_per_node"] = cluster.ranks_per_node;
    json["node"] = json_of(cluster.node);
    json["network"] = json_of(cluster.network);
    if (cluster.storage > 0) json["storage_gb_per_s"] = cluster.storage / giga;
    return to_text(json, 2) + "\n";
}

std::vector<std::string> cluster_names() {
    std::set<std::string> names;
    for (const fs::path& folder : preset_folders()) {
        std::error_code code;
        for (fs::directory_iterator entry(folder / "clusters", code), end; !code && entry != end;
             entry.increment(code))
            names.insert(entry->path().stem().string());
    }
    return {names.begin(), names.end()};
}

std::string cluster_of_gpu(const std::string& gpu) {
    const std::vector<std::string> names = cluster_names();
    if (std::ranges::binary_search(names, gpu)) return gpu;
    for (const std::string& name : names)
        if (find_cluster(name).gpu == gpu) return name;
    return "";
}

Cluster find_cluster(const std::string& name) {
    const fs::path given(name);
    if (given.extension() == ".json" || given.has_parent_path()) return read_cluster(given);
    for (const fs::path& folder : preset_folders()) {
        const fs::path file = folder / "clusters" / (name + ".json");
        std::error_code code;
        if (fs::is_regular_file(file, code)) return read_cluster(file);
    }
    std::string known;
    for (const std::string& one : cluster_names()) known += (known.empty() ? "" : ", ") + one;
    throw Error("no cluster \"", printable(name), "\" is known; ",
                known.empty() ? "none were found in configs/clusters/" : "these are: " + known,
                "; for another one, write a file and give its path (docs/planning.md)");
}

}  // namespace train_gpt
