// The kernels of a mixture of experts computed from their formulas (reference.h), and random
// routings.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/experts/route.h"
#include "test/kernels/reference.h"

namespace train_gpt {

struct RouteProblem {
    int64_t N = 0, E = 0, k = 0, S = 1;
    RouterRule rule;
    Values logits;
    std::vector<int32_t> experts;  // [N, k], as the router chose them
    Values dweights = {}, load = {};
    double balance = 0, z_loss = 0;
};

/// s_i of a token, and p_i.
template <class Real>
struct RouterScores {
    std::vector<Real> scores, probabilities;
    Real lse, lse_terms;  // lse_terms: the sum of the absolute values of what it is the sum of

    RouterScores(const double* z, int64_t E, RouterScore of) {
        const Real top = static_cast<Real>(*std::max_element(z, z + E));
        Real sum = 0;
        for (int64_t i = 0; i < E; ++i) sum += std::exp(static_cast<Real>(z[i]) - top);
        lse = top + std::log(sum);
        lse_terms = std::abs(top) + std::abs(std::log(sum));
        Real total = 0;
        for (int64_t i = 0; i < E; ++i) {
            const Real logit = static_cast<Real>(z[i]);
            scores.push_back(of == RouterScore::softmax ? std::exp(logit - top) / sum
                                                        : 1 / (1 + std::exp(-logit)));
            total += scores.back();
        }
        for (const Real score : scores) probabilities.push_back(score / total);
    }
};

struct RouteReference {
    Values weights, probabilities, squared_lse, dlogits;
    Values dlogits_terms;  // sums of the absolute values of what is added up for dlogits
    std::vector<int32_t> counts;
    double loss = 0;  // whose gradient dlogits is
};

/// route.h's formulas for the given experts.
template <class Real>
RouteReference route_reference(const RouteProblem& p) {
    RouteReference r;
    const auto of_sequences = static_cast<size_t>(p.S * p.E);
    r.probabilities.resize(of_sequences);
    r.counts.resize(of_sequences);
    r.squared_lse.resize(static_cast<size_t>(p.S));
    r.dlogits.resize(static_cast<size_t>(p.N * p.E));
    std::vector<Real> sums(of_sequences), squares(static_cast<size_t>(p.S));
    const bool softmax = p.rule.score == RouterScore::softmax;
    for (int64_t t = 0; t < p.N; ++t) {
        const RouterScores<Real> token(&p.logits[static_cast<size_t>(t * p.E)], p.E, p.rule.score);
        const int64_t s = t / (p.N / p.S);
        std::vector<Real> gradient(static_cast<size_t>(p.E));  // ∂/∂s
        std::vector<Real> terms(static_cast<size_t>(p.E));     // what it is the sum of
        const int32_t* const chosen = &p.experts[static_cast<size_t>(t * p.k)];
        Real total = 0, product = 0, product_terms = 0;
        for (int64_t j = 0; j < p.k; ++j) total += token.scores[chosen[j]];
        const Real scale = static_cast<Real>(p.rule.scale) / (p.rule.normalise ? total : 1);
        for (int64_t j = 0; j < p.k; ++j) {
            const Real weight = scale * token.scores[chosen[j]];
            r.weights.push_back(weight);
            ++r.counts[static_cast<size_t>(s * p.E + chosen[j])];
            if (p.dweights.empty()) continue;
            const double dweight = p.dweights[static_cast<size_t>(t * p.k + j)];
            product += static_cast<Real>(dweight) * weight;
            product_terms += std::abs(static_cast<Real>(dweight) * weight);
            r.loss += dweight * weight;
        }
        for (int64_t i = 0; i < p.E; ++i) sums[s * p.E + i] += token.probabilities[i];
        squares[s] += token.lse * token.lse;
        r.loss += p.z_loss * token.lse * token.lse;
        if (p.dweights.empty()) continue;

        for (int64_t j = 0; j < p.k; ++j) {
            const Real of_weight = scale * static_cast<Real>(p.dweights[t * p.k + j]),
                       of_sum = p.rule.normalise ? product / total : 0;
            gradient[chosen[j]] = of_weight - of_sum;
            terms[chosen[j]] = std::abs(of_weight) + (p.rule.normalise ? product_terms / total : 0);
        }
        // ∂/∂p_i = balance·E·load_i; the p are s / Σ s.
        Real all = 0, mean = 0, mean_terms = 0;
        for (int64_t i = 0; i < p.E; ++i) all += token.scores[i];
        const auto slope = [&](int64_t i) {
            return p.load.empty() ? 0 : static_cast<Real>(p.balance * p.E * p.load[s * p.E + i]);
        };
        for (int64_t i = 0; i < p.E; ++i) {
            mean += slope(i) * token.probabilities[i];
            mean_terms += std::abs(slope(i)) * token.probabilities[i];
            r.loss += slope(i) * token.probabilities[i];
        }
        for (int64_t i = 0; i < p.E; ++i) {
            gradient[i] += (slope(i) - mean) / all;
            terms[i] += (std::abs(slope(i)) + mean_terms) / all;
        }
        Real inner = 0, inner_terms = 0;
        for (int64_t i = 0; i < p.E; ++i) {
            inner += gradient[i] * token.scores[i];
            inner_terms += terms[i] * token.scores[i];
        }
        const double* const z = &p.logits[static_cast<size_t>(t * p.E)];
        for (int64_t i = 0; i < p.E; ++i) {
            const Real score = token.scores[i];
            const Real of_scores =
                score * (softmax ? gradient[i] - inner : gradient[i] * (1 - score));
            const Real share = std::exp(static_cast<Real>(z[i]) - token.lse);
            r.dlogits[static_cast<size_t>(t * p.E + i)] =
                of_scores + 2 * static_cast<Real>(p.z_loss) * token.lse * share;
            r.dlogits_terms.push_back(score * (terms[i] + (softmax ? inner_terms : 0)) +
                                      2 * p.z_loss * token.lse_terms * share);
        }
    }
    std::copy(sums.begin(), sums.end(), r.probabilities.begin());
    std::copy(squares.begin(), squares.end(), r.squared_lse.begin());
    return r;
}

/// What group_rows gives.
struct Grouping {
    std::vector<int32_t> offsets, row_token, row_of;

    Grouping(const std::vector<int32_t>& experts, int64_t k, int64_t E)
        : offsets(static_cast<size_t>(E) + 1), row_of(experts.size(), -1) {
        for (int32_t e = 0; e < E; ++e) {
            offsets[e] = static_cast<int32_t>(row_token.size());
            for (size_t i = 0; i < experts.size(); ++i) {
                if (experts[i] != e) continue;
                row_of[i] = static_cast<int32_t>(row_token.size());
                row_token.push_back(static_cast<int32_t>(static_cast<int64_t>(i) / k));
            }
        }
        offsets[E] = static_cast<int32_t>(row_token.size());
    }
};

/// The k·N experts of a routing from as many numbers below E: those, or if a token has one already,
/// the next that it does not have.
inline std::vector<int32_t> distinct_experts(std::vector<int32_t> drawn, int64_t k, int64_t E) {
    for (size_t i = 0; i < drawn.size(); ++i) {
        const auto first = drawn.begin() + static_cast<int64_t>(i) / k * k,
                   here = drawn.begin() + static_cast<int64_t>(i);
        while (std::find(first, here, *here) != here) *here = static_cast<int32_t>((*here + 1) % E);
    }
    return drawn;
}

/// A grouped product, expert by expert: nt x·w_eᵀ [R, N], nn dy·w_e [R, K], tn dy_eᵀ·x_e [E, N, K].
struct GroupedProblem {
    int64_t N = 0, K = 0;
    std::vector<int32_t> offsets;
    Values x, dy, w;  // [R, K], [R, N], [E, N, K]; those that the product needs

    static Values rows(const Values& of, int64_t first, int64_t last, int64_t cols) {
        return {of.begin() + first * cols, of.begin() + last * cols};
    }
    template <class Real>
    Values product(GemmOp op) const {
        Values result;
        for (size_t e = 0; e + 1 < offsets.size(); ++e) {
            const int64_t first = offsets[e], last = offsets[e + 1], n = last - first;
            const Values x_e = x.empty() ? x : rows(x, first, last, K),
                         dy_e = dy.empty() ? dy : rows(dy, first, last, N),
                         w_e = w.empty() ? w
                                         : rows(w, static_cast<int64_t>(e) * N,
                                                static_cast<int64_t>(e + 1) * N, K);
            const Values of_e = op == GemmOp::nt ? product_reference<Real>(op, x_e, w_e, n, N, K)
                                : op == GemmOp::nn
                                    ? product_reference<Real>(op, dy_e, w_e, n, K, N)
                                    : product_reference<Real>(op, dy_e, x_e, N, K, n);
            result.insert(result.end(), of_e.begin(), of_e.end());
        }
        return result;
    }
};

/// x[row_token[r]] for all rows.
inline Values gathered_reference(const Values& x, const std::vector<int32_t>& row_token,
                                 int64_t cols) {
    Values rows;
    for (const int64_t token : row_token)
        rows.insert(rows.end(), x.begin() + token * cols, x.begin() + (token + 1) * cols);
    return rows;
}

}  // namespace train_gpt
