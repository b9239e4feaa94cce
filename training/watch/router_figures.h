// What the routers of a mixture did in a step, in a few figures for each: how evenly they spread
// the step's tokens over their experts, and how sure they were.
#pragma once
#include <vector>

#include "model/router_counts.h"
#include "training/watch/metrics.h"

namespace train_gpt {

/// Figures of a router with E experts, k for each token. n_i says how often expert i was chosen in
/// the step over all ranks. f_i = n_i / Σ n. P_i is the mean of the expert's probability over the
/// step's tokens.
struct RouterFigures {
    int busiest = 0;        // the expert that was chosen most often; of equal ones, the first
    double load = 0;        // how often, as a multiple of the mean: E·max f, from 1 to E/k
    int idle = 0;           // experts that were never chosen
    double effective = 0;   // exp(−Σ f·log f), from k (all tokens have the same k experts) to E
    double entropy = 0;     // of the mean probabilities: −Σ P·log P, in nats, at most log E
    double bias_range = 0;  // the largest selection bias − the smallest; NaN without such biases
    double dropped = 0;     // the share of choices that experts did not take; NaN without capacity
};

/// For each router. A figure of no tokens, and the entropy of probabilities that are not finite in
/// any sequence, are NaN.
std::vector<RouterFigures> router_figures(const RouterReport& report);

/// The fields of metrics.jsonl (docs/running.md). `layers`: the layer of each router. A list has
/// one value for each of the model's n_layer layers, NaN where a layer has no experts. Empty for a
/// model without experts.
MetricsRecord::Fields router_fields(const RouterReport& report, const std::vector<int>& layers,
                                    int n_layer);

}  // namespace train_gpt
