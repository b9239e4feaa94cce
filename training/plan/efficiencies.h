// How fast devices compute and exchange, as shares of what they could: one table of fitted values
// with their sources, from which a prediction takes its own.
#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "training/plan/cluster.h"
#include "training/plan/datasheet.h"

namespace train_gpt {

/// The program that trains. Public runs of the others check the prediction.
enum class Software { own, megatron, fsdp, torchtitan, maxtext, llmq, llmc };

/// A value of the table. `unit`: what the value is multiplied with.
struct EfficiencyRow {
    std::string_view name;  // "products.hopper.bf16"
    double value = 0;       // fitted
    double prior = 0;       // what is assumed without rows that say more
    double spread = 0;      // standard deviation of the logarithm of value / prior
    std::string_view source;
};

/// All rows. Values are fitted by test/training/plan_truth_test.cpp.
const std::vector<EfficiencyRow>& efficiency_table();
/// The column `value`, in the order of the rows.
std::vector<double> efficiency_values();

/// What one prediction needs.
///
///   time of a product M × N × K    2·M·N·K / (peak · products) · software
///                                  · (1 + half_size / (4·min(N, K, 8192)) + half_rows / M)
///   time of attention, forward     its FLOPs / (peak of bf16 · attention) · software
///                                  · (1 + half_head / D) / (1 + half_head / 64) · (1 + tile / T)
///   backward                       attention_backward times as long
///   other work                     its bytes / (memory · the memory's bandwidth)
struct Efficiencies {
    double products = 0.7;  // share of the peak
    double half_size = 350, half_rows = 175;
    double attention = 0.5, attention_backward = 2.8;
    // What a score takes beside its products, as columns of a head, and the keys that tiles at the
    // diagonal compute for nothing, as tokens
    double half_head = 0, tile = 0;
    double context_chunks = 0;  // attention takes 1 + this · (c − 1)/c times as long
    double memory = 0.85;       // share of the bandwidth
    double elementwise = 1;     // times the bytes that element-wise work must move
    double logits = 14;         // bytes that are moved for a logit
    double quantisation = 1;    // times the bytes that fp8's inputs must move
    double software = 1;        // times the time of products and attention
    double launch = 20e-6;      // seconds of a layer in a pass, beside all else
    // Shares of the time of exchanges that are not hidden
    double tensor_exposed = 1, context_exposed = 1;
    double beside_exchanges = 0.15;  // what computing loses beside the data axis's exchanges
    double doubling = 0.005;         // what each doubling of the GPUs over 8 adds to a step
    double gradient_bytes = 4;       // of an element on its way

    bool operator==(const Efficiencies&) const = default;
};

/// values: in the order of the table.
Efficiencies efficiencies_of(Software software, const Cluster& cluster, bool fp8,
                             const std::vector<double>& values = efficiency_values());

/// The least width C, a multiple of 64, at which a linear layer C → C takes less time in fp8 than
/// in bf16, where a step has M = 8,192 tokens: the three products of M × C × C, and in fp8 the
/// casts besides. A cast reads 2 bytes of an element and writes 1 byte for each order of its codes:
/// x for the forward pass and again, transposed, for the backward pass, dy once in both orders, and
/// the weight once a step in both orders.
///
///   products    3 · 2·M·C² / (peak · products) · software
///                   · (1 + half_size / (4·min(C, 8192)) + half_rows / M)
///   casts       ((3 + 3 + 4) · M·C + 4 · C²) / (memory · bandwidth)
///
/// The formula is for delayed scaling without kernels that round their own result. `quantisation`
/// is fitted to programs whose kernels do, so the formula leaves it out, and a prediction may have
/// a smaller width faster in fp8. Current scaling reads matrices once more. 0: none up to 65,536,
/// or no fp8.
int fp8_pays_from(const Cluster& cluster);
/// The least width by a GPU's datasheet.
int fp8_pays_from(const Gpu& gpu);

}  // namespace train_gpt
