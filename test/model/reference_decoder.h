// A decoder in float64 by the plainest loops, from its definition alone: the reference for whole
// models of any spec.
#pragma once
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include "model/registry.h"
#include "model/router_counts.h"
#include "model/spec.h"

namespace train_gpt {

class ReferenceDecoder {
  public:
    /// values: of each parameter of the registry, its logical elements.
    ReferenceDecoder(const DecoderSpec& spec, const Registry& registry,
                     std::vector<std::vector<double>> values);

    std::vector<double>& values(int parameter) { return values_[static_cast<size_t>(parameter)]; }

    /// The auxiliary losses of routers; of a balance loss over steps the load [routers, E].
    void set_router_losses(const RouterLosses& losses, const std::vector<double>& load = {});
    /// From the next loss() on, tokens go where they went in it: experts are constants.
    void keep_choices() { keeps_ = true, choices_.clear(); }
    /// By how much, in the last loss(), the last of a token's experts was better than the best of
    /// the others: the least of all tokens and routers.
    double least_margin() const { return least_margin_; }
    /// How often each expert was chosen in the last loss(), [routers, E].
    const std::vector<double>& counts() const { return counts_; }

    /// Σ over tokens of −log p(target), and of the auxiliary losses; targets of −1 are ignored.
    /// tokens, targets [B, T].
    double loss(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets,
                int T) const;

  private:
    using Row = std::vector<double>;
    using Rows = std::vector<Row>;

    double at(int parameter, int64_t i) const {
        return values_[static_cast<size_t>(parameter)][static_cast<size_t>(i)];
    }

    Row norm(const Row& x, int w, int b) const;

    Row linear(const Row& x, int w, int b, int64_t outputs) const;

    static double gelu(double x) {
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    }

    static double capped(double x, double cap) { return cap == 0 ? x : cap * std::tanh(x / cap); }

    static double silu(double x) { return x / (1 + std::exp(-x)); }

    /// The frequency of the pair of elements i and i + D/2, as transformers computes it.
    double frequency(int i) const;

    void rms_norm(double* x, int n, int w) const {
        double squares = 0;
        for (int d = 0; d < n; ++d) squares += x[d] * x[d] / n;
        for (int d = 0; d < n; ++d) x[d] *= at(w, d) / std::sqrt(squares + spec_.norm_epsilon);
    }

    /// The queries and keys of token t, normalised and rotated.
    void place(Row& qkv, size_t t, const BlockParameters& p) const;

    /// Attention's output for token t, from q, k and v of all tokens.
    Row attend(const Rows& qkv, size_t t, const BlockParameters& p, const LayerSpec& layer) const;

    /// SwiGLU of gate and up, one after the other.
    Row gated(const Row& wide) const;

    /// The sums of a router over some tokens.
    struct RouterSums {
        std::vector<double> chosen, probabilities;
        void add(const std::vector<size_t>& experts, const Row& p) {
            chosen.resize(p.size()), probabilities.resize(p.size());
            for (const size_t e : experts) ++chosen[e];
            for (size_t e = 0; e < p.size(); ++e) probabilities[e] += p[e];
        }
    };
    /// balance·E·Σ_tokens Σ_i load_i·p_i
    double balance_loss(const RouterSums& sums, const double* load = nullptr) const;

    /// The k best experts, in order.
    std::vector<size_t> choose(const Row& values, int k) const;

    /// What the experts add for a normed row h; the router's auxiliary z-loss into `auxiliary`.
    /// `most`: the tokens that each expert takes.
    Row mixture(const Row& h, const BlockParameters& p, const ExpertSpec& e, double most,
                RouterSums& sums, double& auxiliary) const;
    Row expert(const Row& x, int w, int b, size_t i, int64_t outputs) const;

    /// Returns the auxiliary losses of its router over these tokens.
    double block(Rows& x, const BlockParameters& p, int number) const;

    double sequence_loss(const int32_t* tokens, const int32_t* targets, int T) const;

    DecoderSpec spec_;
    Registry registry_;
    std::vector<std::vector<double>> values_;
    RouterLosses losses_;
    std::vector<double> load_;
    bool keeps_ = false;
    mutable std::vector<std::vector<size_t>> choices_;
    mutable size_t next_choice_ = 0;
    mutable std::vector<double> counts_;
    mutable double least_margin_ = 0;
    mutable std::map<size_t, RouterSums> of_micro_batch_;
};

}  // namespace train_gpt
