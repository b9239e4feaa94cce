#include "training/plan/efficiencies.h"

#include <algorithm>
#include <cassert>
#include <initializer_list>

#include "base/error.h"

namespace train_gpt {

namespace {

/// From 503 published speeds of other programs, of which a half was fitted on and all were judged
/// (docs/planning.md).
constexpr std::string_view fitted = "public rows";
/// From steps of this program on one H100 (docs/measurements.md).
constexpr std::string_view measured = "own steps";
/// From profiles of this program on one core of a processor (docs/planning.md).
constexpr std::string_view processor = "own profiles";

std::string_view name_of(Software software) {
    constexpr std::string_view names[] = {"own",     "megatron", "fsdp", "torchtitan",
                                          "maxtext", "llmq",     "llmc"};
    return names[static_cast<size_t>(software)];
}

std::string_view generation_of(const Cluster& cluster) {
    if (!cluster.is_cuda()) return "cpu";
    switch (cluster.architecture) {
        case 80:
            return "ampere";
        case 90:
            return "hopper";
        case 100:
            return "blackwell";
        default:
            return "consumer";
    }
}

}  // namespace

const std::vector<EfficiencyRow>& efficiency_table() {
    static const std::vector<EfficiencyRow> rows = {
        {"products.ampere.bf16", 0.7964, 0.72, 0.1, fitted},
        {"products.hopper.bf16", 0.7319, 0.72, 0.1, fitted},
        {"products.hopper.fp8", 0.6845, 0.6, 0.1, fitted},
        {"products.blackwell.bf16", 0.5717, 0.68, 0.1, fitted},
        {"products.blackwell.fp8", 0.5457, 0.58, 0.1, fitted},
        {"products.consumer.bf16", 0.922, 0.85, 0.1, fitted},
        {"products.consumer.fp8", 0.7922, 0.7, 0.1, fitted},
        {"half_size", 295.9, 300, 0.6, fitted},
        {"attention.ampere", 0.5, 0.5, 0.15, fitted},
        {"attention.hopper", 0.5122, 0.5, 0.15, fitted},
        {"attention.blackwell", 0.4391, 0.45, 0.15, fitted},
        {"attention.consumer", 0.6192, 0.6, 0.15, fitted},
        {"attention.ampere.fsdp", 0.327, 0.38, 0.15, fitted},
        {"attention.hopper.fsdp", 0.206, 0.3, 0.15, fitted},
        {"context_chunks", 0.2511, 0.3, 0.5, fitted},
        {"elementwise.megatron.bf16", 0.9703, 1, 0.4, fitted},
        {"elementwise.megatron.fp8", 0.9732, 1, 0.4, fitted},
        {"elementwise.fsdp.bf16", 1.221, 1, 0.4, fitted},
        {"elementwise.fsdp.fp8", 1.174, 1, 0.4, fitted},
        {"elementwise.torchtitan.bf16", 1, 1, 0.4, fitted},
        {"elementwise.torchtitan.fp8", 1.205, 1, 0.4, fitted},
        {"elementwise.maxtext.bf16", 1.133, 1, 0.4, fitted},
        {"elementwise.maxtext.fp8", 1, 1, 0.4, fitted},
        {"elementwise.llmq.bf16", 0.7285, 1, 0.4, fitted},
        {"elementwise.llmq.fp8", 0.5902, 1, 0.4, fitted},
        {"elementwise.llmc.bf16", 0.8551, 1, 0.4, fitted},
        {"quantisation", 0.7377, 1, 0.5, fitted},
        {"software.megatron", 0.9567, 1, 0.12, fitted},
        {"software.fsdp.ampere", 0.9522, 1, 0.12, fitted},
        {"software.fsdp.hopper", 1.05, 1, 0.12, fitted},
        {"software.torchtitan", 1.158, 1, 0.12, fitted},
        {"software.maxtext", 1.188, 1, 0.12, fitted},
        {"software.llmq", 0.8489, 1, 0.12, fitted},
        {"software.llmc", 0.9636, 1, 0.12, fitted},
        {"launch.megatron", 2.033e-05, 2e-05, 0.5, fitted},
        {"launch.fsdp", 2.114e-05, 2e-05, 0.5, fitted},
        {"tensor_exposed.megatron", 0.428, 0.5, 0.4, fitted},
        {"tensor_exposed.torchtitan", 0.5, 0.5, 0.4, fitted},
        {"context_exposed", 0.3593, 0.4, 0.5, fitted},
        {"beside_exchanges.megatron", 0.1784, 0.15, 0.5, fitted},
        {"beside_exchanges.fsdp", 0.5259, 0.15, 0.5, fitted},
        {"beside_exchanges.torchtitan", 0.1595, 0.15, 0.5, fitted},
        {"beside_exchanges.maxtext", 0.1566, 0.15, 0.5, fitted},
        {"beside_exchanges.llmq", 0.1501, 0.15, 0.5, fitted},
        {"beside_exchanges.llmc", 0.1498, 0.15, 0.5, fitted},
        {"doubling", 0.006166, 0.005, 0.7, fitted},
        {"attention.hopper.own", 0.3597, 0.35, 0.15, measured},
        {"attention_backward.own", 3.427, 3.5, 0.15, measured},
        {"elementwise.own", 0.3144, 0.4, 0.5, measured},
        {"logits.own", 4.739, 5, 0.3, measured},
        {"logits.llmq", 6.45, 8, 0.4, fitted},
        {"logits.llmc", 7.644, 8, 0.4, fitted},
        {"logits", 21.23, 14, 0.3, fitted},
        {"software.own", 0.9139, 1, 0.12, measured},
        {"products.cpu", 0.89, 0.89, 0.1, processor},
        {"half_size.cpu", 470, 470, 0.1, processor},
        {"attention.cpu", 0.5, 0.5, 0.1, processor},
        {"half_head.cpu", 80, 80, 0.1, processor},
        {"tile.cpu", 64, 64, 0.1, processor},
        {"attention_backward.own.cpu", 2.35, 2.35, 0.1, processor},
        {"logits.own.cpu", 20, 20, 0.1, processor},
        {"software.own.cpu", 1, 1, 0.1, processor},
    };
    return rows;
}

std::vector<double> efficiency_values() {
    std::vector<double> values;
    for (const EfficiencyRow& row : efficiency_table()) values.push_back(row.value);
    return values;
}

Efficiencies efficiencies_of(Software software, const Cluster& cluster, bool fp8,
                             const std::vector<double>& values) {
    const std::vector<EfficiencyRow>& rows = efficiency_table();
    assert(values.size() == rows.size());
    const std::string name(name_of(software)), generation(generation_of(cluster)),
        precision = fp8 ? "fp8" : "bf16";
    // The first of these names that is in the table
    const auto value = [&](double& out, std::initializer_list<std::string> names) {
        for (const std::string& wanted : names)
            for (size_t i = 0; i < rows.size(); ++i)
                if (rows[i].name == wanted) {
                    out = values[i];
                    return;
                }
    };
    Efficiencies e;
    value(e.products, {"products." + generation + "." + precision, "products." + generation});
    value(e.half_size, {"half_size." + generation, "half_size"});
    e.half_rows = cluster.is_cuda() ? e.half_size / 2 : 0;
    value(e.attention, {"attention." + generation + "." + name, "attention." + generation});
    value(e.attention_backward,
          {"attention_backward." + name + "." + generation, "attention_backward." + name});
    value(e.half_head, {"half_head." + generation});
    value(e.tile, {"tile." + generation});
    value(e.context_chunks, {"context_chunks"});
    value(e.elementwise, {"elementwise." + name + "." + precision, "elementwise." + name});
    value(e.logits, {"logits." + name + "." + generation, "logits." + name, "logits"});
    value(e.quantisation, {"quantisation"});
    value(e.software, {"software." + name + "." + generation, "software." + name});
    value(e.launch, {"launch." + name});
    value(e.tensor_exposed, {"tensor_exposed." + name});
    value(e.context_exposed, {"context_exposed." + name, "context_exposed"});
    value(e.beside_exchanges, {"beside_exchanges." + name});
    value(e.doubling, {"doubling"});
    const bool sends_fp32 =
        software == Software::own || software == Software::torchtitan || software == Software::llmc;
    e.gradient_bytes = sends_fp32 ? 4 : 2;
    if (cluster.is_measured) {
        // selfcheck measured the rates that are reached: large products, and copies.
        if (cluster.is_cuda()) e.products /= 0.81;  // an H100's 800 of 989 TFLOP/s
        e.memory = 1;
    }
    if (const ReachedShares& shares = cluster.shares; shares.products > 0) {
        e.products = shares.products, e.half_size = shares.half_size;
        e.attention = shares.attention, e.attention_backward = shares.attention_backward;
    }
    return e;
}

int fp8_pays_from(const Cluster& cluster) {
    if (cluster.flops_fp8 == 0) return 0;
    constexpr double tokens = 8192;
    const auto of_a_layer = [&](double C, bool fp8) {
        const Efficiencies e = efficiencies_of(Software::own, cluster, fp8);
        const double peak = fp8 ? cluster.flops_fp8 : cluster.flops_bf16,
                     products =
                         3 * 2 * tokens * C * C / (peak * e.products) * e.software *
                         (1 + e.half_size / (4 * std::min(C, 8192.0)) + e.half_rows / tokens);
        constexpr double x_and_dy = 3 + 3 + 4, w = 4;  // bytes of an element
        const double casts =
            (x_and_dy * tokens * C + w * C * C) / (e.memory * cluster.memory_bandwidth);
        return products + (fp8 ? casts : 0);
    };
    for (int C = 64; C <= 65536; C += 64)
        if (of_a_layer(C, true) < of_a_layer(C, false)) return C;
    return 0;
}

int fp8_pays_from(const Gpu& gpu) {
    return fp8_pays_from(Cluster{.gpu = std::string(gpu.key),
                                 .architecture = gpu.architecture,
                                 .flops_bf16 = 1e12 * gpu.teraflops,
                                 .flops_fp8 = 1e12 * gpu.fp8_teraflops(),
                                 .memory_bandwidth = 1e9 * gpu.memory_gb_per_s});
}

}  // namespace train_gpt
