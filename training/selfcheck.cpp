#include "training/selfcheck.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <set>

#include "kernels/copy.h"
#include "kernels/error.h"
#include "kernels/memory.h"
#include "parallel/together.h"
#include "training/peak.h"

namespace train_gpt {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t smallest = int64_t{64} << 10;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

bool is_rate(double value) { return std::isfinite(value) && value > 0; }

/// Of an even number of values the mean of the two in the middle; NaN of none.
double median(std::vector<double> values) {
    if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
    std::sort(values.begin(), values.end());
    return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

double median_rate(const RankRates& rates) {
    std::vector<double> good;
    std::copy_if(rates.of_rank.begin(), rates.of_rank.end(), std::back_inserter(good), is_rate);
    return median(good);
}

/// What each rank measures, by rank: all begin at the same time, so that what they share (memory, a PCIe switch, power) is
/// shared as it is in training.
std::vector<double> on_each_rank(const World& world, const std::function<double()>& measure) {
    world.barrier();
    std::vector<double> values;
    for (const std::string& text : together(world, [&] { return concat(measure()); }))
        values.push_back(std::strtod(text.c_str(), nullptr));
    world.activity().pulse();
    return values;
}

/// Bytes per second of copies between host memory as a run stages it and the GPU, one way.
double copy_rate(Stream& stream, void* to, const void* from, size_t bytes) {
    constexpr int repeats = 7;
    std::vector<double> rates;
    for (int i = 0; i <= repeats; ++i) {
        const auto start = Clock::now();
        copy(stream, to, from, bytes);
        stream.synchronize();
        if (i > 0)
            rates.push_back(static_cast<double>(bytes) /
                            seconds_since(start));  // the first one warms up
    }
    return median(rates);
}

/// Seconds that a collective takes: of each rank the median of samples, of these the slowest.
double collective_seconds(const World& world, Communicator& group, Stream& stream, int64_t bytes,
                          const std::function<void()>& collective) {
    // Small ones in a row, as nccl-tests has it: a step submits many, and waits for none of them.
    const auto in_a_row = static_cast<int>(std::clamp<int64_t>((int64_t{16} << 20) / bytes, 1, 32));
    const auto sample = [&] {
        group.barrier(stream);
        stream.synchronize();
        const auto start = Clock::now();
        for (int i = 0; i < in_a_row; ++i) collective();
        stream.synchronize();
        return seconds_since(start) / in_a_row;
    };
    const auto slowest = [&](const std::function<double()>& measure) {
        const std::vector<double> seconds = on_each_rank(world, measure);
        return *std::max_element(seconds.begin(), seconds.end());
    };
    constexpr double enough = 0.2;  // seconds, for the samples of a size
    const double warm_up =
        slowest(sample);  // the same on all ranks, and so is what follows from it
    const auto samples = static_cast<size_t>(std::clamp(enough / (warm_up * in_a_row), 3.0, 9.0));
    return slowest([&] {
        std::vector<double> seconds(samples);
        for (double& s : seconds) s = sample();
        return median(seconds);
    });
}

std::vector<CollectiveRates> measure_collectives(const SelfcheckOptions& options,
                                                 const Device& device, const World& world,
                                                 Communicator& group) {
    const int n = group.size();
    // All ranks take the same, and leave most of what there is to the communicator and to others.
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
        // On a slow network larger ones only take longer.
        constexpr double patience = 0.5;
        if (std::max({reduce_scatter, all_gather, all_reduce}) > patience) break;
    }
    return all;
}

/// Rows of cells as columns that are as wide as their widest cell; texts are aligned to the left, numbers to the right.
std::string format_columns(const std::vector<std::vector<std::string>>& rows, size_t texts_from,
                           size_t texts_to) {
    // Characters of UTF-8, not bytes.
    const auto width = [](const std::string& cell) {
        return static_cast<size_t>(
            std::count_if(cell.begin(), cell.end(), [](char c) { return (c & 0xc0) != 0x80; }));
    };
    std::vector<size_t> widths(rows.front().size());
    for (const auto& row : rows)
        for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
    std::string text;
    for (const auto& row : rows) {
        for (size_t i = 0; i < row.size(); ++i) {
            const std::string padding(widths[i] - width(row[i]), ' ');
            const bool is_text = i >= texts_from && i < texts_to;
            text += (i > 0 ? "  " : "") + (is_text ? row[i] + padding : padding + row[i]);
        }
        text += '\n';
    }
    return text;
}

std::string format_number(const char* format, double value) {
    char text[64];
    std::snprintf(text, sizeof text, format, value);
    return text;
}

std::string format_size(int64_t bytes) {
    return bytes < 1 << 20 ? concat(bytes >> 10, " KiB") : concat(bytes >> 20, " MiB");
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

std::vector<Outlier> find_outliers(const SelfcheckTable& table, double tolerance) {
    std::vector<Outlier> outliers;
    for (size_t rank = 0; rank < table.hosts.size(); ++rank) {
        for (const RankRates& rates : table.rates) {
            const double value = rates.of_rank[rank], middle = median_rate(rates);
            if (!is_rate(value) || std::abs(value / middle - 1) > tolerance / 100)
                outliers.push_back({static_cast<int>(rank), rates.name, value, middle});
        }
    }
    return outliers;
}

std::string format_selfcheck(const SelfcheckTable& table, const std::vector<Outlier>& outliers,
                             double tolerance) {
    const size_t ranks = table.hosts.size();
    std::vector<std::vector<std::string>> rows{{"rank", "host", "device"}};
    for (const RankRates& rates : table.rates) rows.front().push_back(rates.name);
    for (size_t rank = 0; rank < ranks; ++rank) {
        rows.push_back({std::to_string(rank), table.hosts[rank], table.devices[rank]});
        for (const RankRates& rates : table.rates)
            rows.back().push_back(format_number("%.3f", rates.of_rank[rank]));
    }
    if (ranks > 1) {
        rows.push_back({"", "median", ""});
        for (const RankRates& rates : table.rates)
            rows.back().push_back(format_number("%.3f", median_rate(rates)));
    }
    std::string text = format_columns(rows, 1, 3);

    if (!table.collectives.empty()) {
        rows = {{"bytes", "reduce-scatter GB/s", "all-gather GB/s", "all-reduce GB/s"}};
        for (const CollectiveRates& c : table.collectives) {
            rows.push_back({format_size(c.bytes)});
            for (const double rate : {c.reduce_scatter, c.all_gather, c.all_reduce})
                rows.back().push_back(format_number("%.3f", rate / 1e9));
        }
        text += concat("\ncollectives over ", ranks,
                       " ranks, fp32, bus bandwidth: the slowest rank's\n") +
                format_columns(rows, 0, 0);
    }

    text += '\n';
    if (ranks == 1 && outliers.empty())
        return text + "one rank: there is nothing to compare it with\n";
    if (outliers.empty())
        return text + concat("all ranks are within ", tolerance, "% of the median\n");
    for (const Outlier& o : outliers) {
        const auto rank = static_cast<size_t>(o.rank);
        text += concat("rank ", o.rank, " (", table.hosts[rank], ", ", table.devices[rank],
                       "): ", o.rate, " ");
        text += is_rate(o.value)
                    ? concat(format_number("%.3f", o.value), ", ",
                             format_number("%.1f%%", 100 * std::abs(o.value / o.median - 1)),
                             o.value < o.median ? " below" : " above", " the median of ",
                             format_number("%.3f", o.median))
                    : concat("could not be measured (", o.value, ")");
        text += '\n';
    }
    return text;
}

int selfcheck(const SelfcheckOptions& options, const Device& device, const World& world,
              Communicator& group) {
    world.activity().phase = "selfcheck";
    SelfcheckTable table;
    table.hosts = world.all_gather(world.host());
    table.devices = world.all_gather(device_name(device));
    const auto add = [&](const char* name, double unit, const std::function<double()>& measure) {
        table.rates.push_back({name, on_each_rank(world, [&] { return measure() / unit; })});
    };
    add("bf16 TFLOP/s", 1e12, [&] { return measure_peak_flops(device, DType::bf16); });
    add("fp32 TFLOP/s", 1e12, [&] { return measure_peak_flops(device, DType::fp32); });
    add("memory GB/s", 1e9, [&] { return measure_bandwidth(device); });
    if (device.is_cuda()) {
        const auto bytes = static_cast<size_t>(std::min(options.max_bytes, int64_t{64} << 20));
        Arena plan = Arena::counting(device);
        for (const Purpose purpose : {Purpose::buffers, Purpose::staging})
            plan.take(bytes, purpose);
        Arena arena(device, plan);
        void* on_device = arena.take(bytes, Purpose::buffers);
        void* on_host = arena.take(bytes, Purpose::staging);
        Stream stream(device);
        add("to GPU GB/s", 1e9, [&] { return copy_rate(stream, on_device, on_host, bytes); });
        add("from GPU GB/s", 1e9, [&] { return copy_rate(stream, on_host, on_device, bytes); });
    }
    if (world.size() > 1) table.collectives = measure_collectives(options, device, world, group);

    const std::vector<Outlier> outliers = find_outliers(table, options.tolerance);
    if (world.rank() == 0) {
        std::fputs(format_selfcheck(table, outliers, options.tolerance).c_str(), stdout);
        std::fflush(stdout);
    }
    if (outliers.empty()) return 0;
    std::set<int> ranks;
    for (const Outlier& o : outliers) ranks.insert(o.rank);
    throw SharedError(
        ranks.size(), " of ", world.size(), " ranks ", ranks.size() == 1 ? "is" : "are",
        " more than ", options.tolerance,
        "% off the median of ranks (named above), and each step waits for the slowest; look there "
        "for ",
        "other processes, temperature, clocks and power limits, or start without those hosts");
}

}  // namespace train_gpt
