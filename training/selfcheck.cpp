#include "training/selfcheck.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>

#include <omp.h>

#include "base/error.h"
#include "base/file.h"
#include "base/median.h"
#include "base/stopwatch.h"
#include "base/text_table.h"
#include "device/copy.h"
#include "device/memory.h"
#include "parallel/together.h"
#include "training/plan/datasheet.h"
#include "training/plan/efficiencies.h"
#include "training/plan/peak.h"

namespace train_gpt {

namespace {

constexpr int64_t smallest = int64_t{64} << 10;

bool is_rate(double value) { return std::isfinite(value) && value > 0; }

double median_rate(const RankRates& rates) {
    std::vector<double> good;
    std::copy_if(rates.of_rank.begin(), rates.of_rank.end(), std::back_inserter(good), is_rate);
    return median(good);
}

/// What each rank measures, by rank. All begin at the same time, so that what they share (memory, a
/// PCIe switch, power) is shared as it is in training.
std::vector<double> on_each_rank(const World& world, const std::function<double()>& measure) {
    world.barrier();
    std::vector<double> values;
    for (const std::string& text : together(world, [&] { return concat(measure()); }))
        values.push_back(std::strtod(text.c_str(), nullptr));
    world.activity().pulse();
    return values;
}

/// Bytes per second of copies in one direction between the GPU and host memory of the kind that a
/// run stages data in.
double copy_rate(Stream& stream, void* to, const void* from, size_t bytes) {
    constexpr int repeats = 7;
    std::vector<double> rates;
    for (int i = 0; i <= repeats; ++i) {
        const Stopwatch watch;
        copy(stream, to, from, bytes);
        stream.synchronize();
        if (i > 0)
            rates.push_back(static_cast<double>(bytes) /
                            watch.seconds());  // the first one warms up
    }
    return median(rates);
}

/// Seconds that a collective takes: the median of each rank's samples, and of these the slowest.
double collective_seconds(const World& world, Communicator& group, Stream& stream, int64_t bytes,
                          const std::function<void()>& collective) {
    // Small collectives are timed in a row, as in nccl-tests: a step submits many and waits for
    // none of them.
    const auto in_a_row = static_cast<int>(std::clamp<int64_t>((int64_t{16} << 20) / bytes, 1, 32));
    const auto sample = [&] {
        group.barrier(stream);
        stream.synchronize();
        const Stopwatch watch;
        for (int i = 0; i < in_a_row; ++i) collective();
        stream.synchronize();
        return watch.seconds() / in_a_row;
    };
    const auto slowest = [&](const std::function<double()>& measure) {
        const std::vector<double> seconds = on_each_rank(world, measure);
        return *std::max_element(seconds.begin(), seconds.end());
    };
    constexpr double enough = 0.2;  // seconds for the samples of one size
    const double warm_up =
        slowest(sample);  // the same on all ranks, and so is all that follows from it
    const auto samples = static_cast<size_t>(std::clamp(enough / (warm_up * in_a_row), 3.0, 9.0));
    return slowest([&] {
        std::vector<double> seconds(samples);
        for (double& s : seconds) s = sample();
        return median(seconds);
    });
}

/// The rates that each rank's device reaches.
std::vector<RankRates> measure_rates(const SelfcheckOptions& options, const Device& device,
                                     const World& world) {
    std::vector<RankRates> rates;
    const auto add = [&](const char* name, double unit, const std::function<double()>& measure) {
        rates.push_back({name, on_each_rank(world, [&] { return measure() / unit; })});
    };
    add("bf16 TFLOP/s", 1e12, [&] { return measure_peak_flops(device, DType::bf16); });
    add("fp32 TFLOP/s", 1e12, [&] { return measure_peak_flops(device, DType::fp32); });
    add("memory GB/s", 1e9, [&] { return measure_bandwidth(device); });
    if (!device.is_cuda()) return rates;
    const auto bytes = static_cast<size_t>(std::min(options.max_bytes, int64_t{64} << 20));
    Arena plan = Arena::counting(device);
    for (const Purpose purpose : {Purpose::buffers, Purpose::staging}) plan.take(bytes, purpose);
    Arena arena(device, plan);
    void* on_device = arena.take(bytes, Purpose::buffers);
    void* on_host = arena.take(bytes, Purpose::staging);
    Stream stream(device);
    add("to GPU GB/s", 1e9, [&] { return copy_rate(stream, on_device, on_host, bytes); });
    add("from GPU GB/s", 1e9, [&] { return copy_rate(stream, on_host, on_device, bytes); });
    return rates;
}

std::vector<CollectiveRates> measure_collectives(const SelfcheckOptions& options,
                                                 const Device& device, const World& world,
                                                 Communicator& group) {
    const int n = group.size();
    // All ranks use the same sizes, and leave most of the memory to the communicator and to others.
    const std::vector<double> available = on_each_rank(world, [&] {
        return static_cast<double>(memory_available(device)) /
               (device.is_cuda() ? 1 : world.local_size());
    });
    const auto most =
        static_cast<int64_t>(*std::min_element(available.begin(), available.end()) / 4);
    const std::vector<int64_t> sizes =
        collective_sizes(std::min(options.max_bytes, std::max(most, smallest)));
    Stream stream(device, false, Stream::Priority::high);
    Arena plan = Arena::counting(device);
    plan.take(static_cast<size_t>(sizes.back()), Purpose::buffers);
    Arena arena(device, plan);
    auto* buffer =
        static_cast<float*>(arena.take(static_cast<size_t>(sizes.back()), Purpose::buffers));
    clear(stream, buffer, static_cast<size_t>(sizes.back()));

    std::vector<CollectiveRates> all;
    for (const int64_t size : sizes) {
        const int64_t each = std::max<int64_t>(1, size / (n * int64_t{sizeof(float)})),
                      count = each * n;
        const int64_t bytes = count * int64_t{sizeof(float)};
        float* own = buffer + group.rank() * each;
        const auto seconds = [&](const std::function<void()>& collective) {
            return collective_seconds(world, group, stream, bytes, collective);
        };
        const double reduce_scatter =
            seconds([&] { group.reduce_scatter(stream, own, buffer, each, DType::fp32); });
        const double all_gather =
            seconds([&] { group.all_gather(stream, buffer, own, each, DType::fp32); });
        const double all_reduce =
            seconds([&] { group.all_reduce(stream, buffer, count, DType::fp32); });
        all.push_back({.bytes = size,
                       .reduce_scatter = half_reduce_bandwidth(n, bytes, reduce_scatter),
                       .all_gather = half_reduce_bandwidth(n, bytes, all_gather),
                       .all_reduce = all_reduce_bandwidth(n, bytes, all_reduce)});
        // On a slow network, larger buffers only take longer.
        constexpr double patience = 0.5;
        if (std::max({reduce_scatter, all_gather, all_reduce}) > patience) break;
    }
    return all;
}

std::string format_number(const char* format, double value) {
    char text[64];
    std::snprintf(text, sizeof text, format, value);
    return text;
}

std::string format_size(int64_t bytes) {
    return bytes < 1 << 20 ? concat(bytes >> 10, " KiB") : concat(bytes >> 20, " MiB");
}

std::string format_rates(const SelfcheckTable& table, const std::vector<RankRates>& measured) {
    const size_t ranks = table.hosts.size();
    std::vector<std::vector<std::string>> rows{{"rank", "host", "device"}};
    for (const RankRates& rates : measured) rows.front().push_back(rates.name);
    for (size_t rank = 0; rank < ranks; ++rank) {
        rows.push_back({std::to_string(rank), table.hosts[rank], table.devices[rank]});
        for (const RankRates& rates : measured)
            rows.back().push_back(format_number("%.3f", rates.of_rank[rank]));
    }
    if (ranks > 1) {
        rows.push_back({"", "median", ""});
        for (const RankRates& rates : measured)
            rows.back().push_back(format_number("%.3f", median_rate(rates)));
    }
    return text_table(rows, [](size_t column) { return column < 1 || column >= 3; });
}

std::string format_collectives(const std::string& where,
                               const std::vector<CollectiveRates>& rates) {
    std::vector<std::vector<std::string>> rows{
        {"bytes", "reduce-scatter GB/s", "all-gather GB/s", "all-reduce GB/s"}};
    for (const CollectiveRates& c : rates) {
        rows.push_back({format_size(c.bytes)});
        for (const double rate : {c.reduce_scatter, c.all_gather, c.all_reduce})
            rows.back().push_back(format_number("%.3f", rate / 1e9));
    }
    return concat("\ncollectives ", where, ", fp32, bus bandwidth: the slowest rank's\n") +
           text_table(rows, [](size_t) { return true; });
}

std::string format_slow_rank(const SelfcheckTable& table, const SlowRank& slow) {
    const auto rank = static_cast<size_t>(slow.rank);
    std::string rates;
    for (const SlowRate& r : slow.rates) {
        if (!rates.empty()) rates += "; ";
        rates += concat(r.name, " ");
        rates += is_rate(r.value) ? concat(format_number("%.3f", r.value), ", ",
                                           format_number("%.1f%%", 100 * (1 - r.value / r.median)),
                                           " below the median of ", format_number("%.3f", r.median))
                                  : concat("could not be measured (", r.value, ")");
    }
    return concat("rank ", slow.rank, " (", table.hosts[rank], ", ", table.devices[rank],
                  "): ", rates, "\n");
}

}  // namespace

double half_reduce_bandwidth(int ranks, int64_t bytes, double seconds) {
    return static_cast<double>(ranks - 1) / ranks * static_cast<double>(bytes) / seconds;
}

double all_reduce_bandwidth(int ranks, int64_t bytes, double seconds) {
    return 2 * half_reduce_bandwidth(ranks, bytes, seconds);
}

std::vector<int64_t> collective_sizes(int64_t max_bytes) {
    std::vector<int64_t> sizes{smallest};
    while (sizes.back() <= max_bytes / 4) sizes.push_back(4 * sizes.back());
    return sizes;
}

std::vector<SlowRank> find_slow_ranks(const std::vector<RankRates>& rates, double tolerance) {
    std::vector<SlowRank> slow;
    for (size_t rank = 0; rank < rates.front().of_rank.size(); ++rank) {
        SlowRank found{.rank = static_cast<int>(rank), .rates = {}};
        for (const RankRates& r : rates) {
            const double value = r.of_rank[rank], middle = median_rate(r);
            if (!is_rate(value) || 1 - value / middle > tolerance / 100)
                found.rates.push_back({r.name, value, middle});
        }
        if (!found.rates.empty()) slow.push_back(found);
    }
    return slow;
}

std::vector<SlowRank> slow_in_both(const std::vector<SlowRank>& first,
                                   const std::vector<SlowRank>& second) {
    const auto was_slow = [&](int rank, const SlowRate& rate) {
        return std::any_of(first.begin(), first.end(), [&](const SlowRank& f) {
            return f.rank == rank &&
                   std::any_of(f.rates.begin(), f.rates.end(),
                               [&](const SlowRate& r) { return r.name == rate.name; });
        });
    };
    std::vector<SlowRank> both;
    for (SlowRank slow : second) {
        std::erase_if(slow.rates, [&](const SlowRate& r) { return !was_slow(slow.rank, r); });
        if (!slow.rates.empty()) both.push_back(slow);
    }
    return both;
}

std::string format_selfcheck(const SelfcheckTable& table, const std::vector<SlowRank>& slow,
                             double tolerance) {
    const size_t ranks = table.hosts.size();
    std::string text = format_rates(table, table.rates);
    if (!table.collectives.empty())
        text += format_collectives(concat("over ", ranks, " ranks"), table.collectives);
    for (const AxisRates& along : table.along)
        text += format_collectives(
            concat("along ", along.axis, ", over ", along.ranks, " ranks in each of ",
                   ranks / static_cast<size_t>(along.ranks), " groups"),
            along.rates);
    if (!table.rates_again.empty())
        text +=
            "\nmeasured again, since a rank looked slow\n" + format_rates(table, table.rates_again);

    text += '\n';
    if (!slow.empty()) {
        for (const SlowRank& s : slow) text += format_slow_rank(table, s);
    } else if (ranks == 1) {
        text += "one rank: there is nothing to compare it with\n";
    } else if (table.rates_again.empty()) {
        text += concat("no rank is more than ", tolerance, "% below the median\n");
    } else {
        text += concat("no rank was more than ", tolerance,
                       "% below the median at the same rate both times\n");
    }
    return text;
}

Cluster measured_cluster(const SelfcheckTable& table, const Device& device, int ranks_per_node) {
    const auto rate = [&](const char* name, double unit) {
        for (const RankRates& rates : table.rates)
            if (rates.name == name) return unit * median_rate(rates);
        return 0.0;
    };
    const auto ranks = static_cast<int>(table.hosts.size());
    Cluster cluster{
        .name = "this",
        .source = concat("train_gpt selfcheck on ", ranks, " rank", ranks == 1 ? "" : "s", " of ",
                         table.hosts.front(), ", ", table.devices.front()),
        .multiprocessors = device.is_cuda() ? multiprocessors(device) : omp_get_max_threads(),
        .flops_fp32 = rate("fp32 TFLOP/s", 1e12),
        .flops_bf16 = rate("bf16 TFLOP/s", 1e12),
        .memory = static_cast<double>(memory_available(device)) / ranks_per_node,
        .memory_bandwidth = rate("memory GB/s", 1e9),
        .ranks_per_node = ranks_per_node,
        .host_link = std::min(rate("to GPU GB/s", 1e9), rate("from GPU GB/s", 1e9)),
        .is_measured = true,
        .shares = table.shares};
    if (device.is_cuda()) {
        const Gpu* gpu = gpu_called(table.devices.front(), cluster.multiprocessors);
        if (!gpu)
            throw Error("the table of datasheets has no ", table.devices.front(),
                        ", so --save cannot describe it; write a file by hand (docs/planning.md)");
        cluster.gpu = gpu->key;
        cluster.architecture = gpu->architecture;
        cluster.memory = static_cast<double>(int64_t{gpu->memory_gib} << 30);
    }
    // Where nothing is measured: shared memory or NVLink, and a network of 10 Gb/s.
    cluster.node = {.latency = 5e-6, .bandwidth = device.is_cuda() ? 100e9 : 5e9};
    cluster.network = {.latency = 50e-6, .bandwidth = 1e9};
    const bool several_nodes = ranks > ranks_per_node;
    if (!table.collectives.empty()) {
        Link& link = several_nodes ? cluster.network : cluster.node;
        const int nodes = several_nodes ? ranks / ranks_per_node : 1;
        link.bandwidth = 0;
        for (const CollectiveRates& c : table.collectives) {
            const double all = median({c.reduce_scatter, c.all_gather, c.all_reduce});
            link.measured.push_back({nodes, static_cast<double>(c.bytes), all});
            link.bandwidth = std::max(link.bandwidth, all);
        }
        // The smallest collective is latency.
        const CollectiveRates& first = table.collectives.front();
        link.latency = static_cast<double>(first.bytes) / link.measured.front().bandwidth / ranks;
    }
    cluster.note = concat("the links ",
                          table.collectives.empty() ? "inside and between nodes"
                          : several_nodes           ? "inside nodes"
                                                    : "between nodes",
                          " were not measured, but assumed");
    return cluster;
}

namespace {

/// The shares of a CPU in the dtype that it multiplies faster. On a GPU the table's efficiencies,
/// which are of its kind, hold.
ReachedShares measure_shares(const Device& device, const SelfcheckTable& table) {
    if (device.is_cuda()) return {};
    const auto rate = [&](size_t i) { return 1e12 * median_rate(table.rates[i]); };
    const bool is_bf16 = rate(0) > rate(1);
    const Efficiencies of_cpus = efficiencies_of(Software::own, Cluster{}, false);
    return measure_shares(device, is_bf16 ? DType::bf16 : DType::fp32, is_bf16 ? rate(0) : rate(1),
                          of_cpus.tile);
}

}  // namespace

Cluster measure_this(const Device& device, int ranks) {
    SelfcheckTable table;
    table.hosts = {"this machine"};
    table.devices = {device_name(device)};
    table.rates = {{"bf16 TFLOP/s", {measure_peak_flops(device, DType::bf16) / 1e12}},
                   {"fp32 TFLOP/s", {measure_peak_flops(device, DType::fp32) / 1e12}},
                   {"memory GB/s", {measure_bandwidth(device) / 1e9}}};
    table.shares = measure_shares(device, table);
    Cluster cluster = measured_cluster(table, device, ranks);
    if (device.is_cuda()) {
        cluster.host_link = measure_host_link(device);
        return cluster;
    }
    cluster.flops_bf16 /= ranks, cluster.flops_fp32 /= ranks;
    cluster.memory_bandwidth /= ranks;
    cluster.multiprocessors = std::max(1, cluster.multiprocessors / ranks);
    return cluster;
}

int selfcheck(const SelfcheckOptions& options, const Device& device, const Mesh& mesh) {
    const World& world = mesh.world();
    world.activity().phase = "selfcheck";
    SelfcheckTable table;
    table.hosts = world.all_gather(world.host());
    table.devices = world.all_gather(device_name(device));
    table.rates = measure_rates(options, device, world);
    if (world.size() > 1)
        table.collectives = measure_collectives(options, device, world, mesh.everyone());
    for (const Axis axis : all_axes_and_parts) {
        const int n = mesh.size(axis);
        // Where there are no replicas, shard is data.
        if (n == 1 || n == world.size() || (is_part_of_data(axis) && n == mesh.size(Axis::data)))
            continue;
        table.along.push_back(
            {name_of(axis), n, measure_collectives(options, device, world, mesh.along(axis))});
    }

    // A rank that shares its machine may be slow for a moment, and another one the next time.
    std::vector<SlowRank> slow = find_slow_ranks(table.rates, options.tolerance);
    if (!slow.empty()) {
        table.rates_again = measure_rates(options, device, world);
        slow = slow_in_both(slow, find_slow_ranks(table.rates_again, options.tolerance));
    }
    if (world.rank() == 0) {
        std::fputs(format_selfcheck(table, slow, options.tolerance).c_str(), stdout);
        std::fflush(stdout);
    }
    if (!options.save.empty() && !device.is_cuda()) {
        // All ranks measure at the same time; the first one's shares are written.
        world.barrier();
        table.shares = measure_shares(device, table);
        world.barrier();
    }
    first_for_all(world, [&] {
        if (!options.save.empty())
            write_file(options.save, to_text(measured_cluster(table, device, world.local_size())));
        return std::string();
    });
    if (slow.empty()) return 0;
    throw SharedError(
        slow.size(), " of ", world.size(), " ranks ", slow.size() == 1 ? "was" : "were",
        " more than ", options.tolerance,
        "% slower than the median in two measurements (named above), and each step waits for the "
        "slowest; look there for other processes, temperature, clocks and power limits, or start "
        "without those hosts");
}

}  // namespace train_gpt
