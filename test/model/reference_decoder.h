// A decoder in float64 by the plainest loops, from its definition alone: the reference for whole
// models of any spec.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "model/registry.h"
#include "model/spec.h"

namespace train_gpt {

class ReferenceDecoder {
  public:
    /// values: of each parameter of the registry, its logical elements.
    ReferenceDecoder(const DecoderSpec& spec, const Registry& registry,
                     std::vector<std::vector<double>> values)
        : spec_(spec), registry_(registry), values_(std::move(values)) {}

    std::vector<double>& values(int parameter) { return values_[static_cast<size_t>(parameter)]; }

    /// Σ over tokens of −log p(target); targets of −1 are ignored. tokens, targets [B, T].
    double loss(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets,
                int T) const {
        double sum = 0;
        for (size_t first = 0; first < tokens.size(); first += static_cast<size_t>(T))
            sum += sequence_loss(tokens.data() + first, targets.data() + first, T);
        return sum;
    }

  private:
    using Row = std::vector<double>;
    using Rows = std::vector<Row>;

    double at(int parameter, int64_t i) const {
        return values_[static_cast<size_t>(parameter)][static_cast<size_t>(i)];
    }

    Row norm(const Row& x, int w, int b) const {
        const double n = static_cast<double>(x.size());
        double mean = 0, variance = 0;
        for (const double v : x)
            if (spec_.norm == Norm::layer) mean += v / n;
        for (const double v : x) variance += (v - mean) * (v - mean) / n;
        Row y(x.size());
        for (size_t c = 0; c < x.size(); ++c) {
            const auto i = static_cast<int64_t>(c);
            y[c] = (x[c] - mean) / std::sqrt(variance + spec_.norm_epsilon) * at(w, i) +
                   (b < 0 ? 0 : at(b, i));
        }
        return y;
    }

    Row linear(const Row& x, int w, int b, int64_t outputs) const {
        Row y(static_cast<size_t>(outputs));
        const auto in = static_cast<int64_t>(x.size());
        for (int64_t o = 0; o < outputs; ++o) {
            double sum = b < 0 ? 0 : at(b, o);
            for (int64_t i = 0; i < in; ++i) sum += at(w, o * in + i) * x[static_cast<size_t>(i)];
            y[static_cast<size_t>(o)] = sum;
        }
        return y;
    }

    static double gelu(double x) {
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    }

    static double capped(double x, double cap) { return cap == 0 ? x : cap * std::tanh(x / cap); }

    static double silu(double x) { return x / (1 + std::exp(-x)); }

    /// The frequency of the pair of elements i and i + D/2, as transformers computes it.
    double frequency(int i) const {
        const RopeFrequencies& r = spec_.rope;
        const double base = std::pow(r.theta, -2.0 * i / spec_.head_size);
        if (r.scaling == RopeScaling::none) return base;
        if (r.scaling == RopeScaling::linear) return base / r.factor;
        const double n = static_cast<double>(r.original_context), wavelength = 2 * M_PI / base;
        if (wavelength < n / r.high_frequency_factor) return base;
        if (wavelength > n / r.low_frequency_factor) return base / r.factor;
        const double smooth = (n / wavelength - r.low_frequency_factor) /
                              (r.high_frequency_factor - r.low_frequency_factor);
        return (1 - smooth) * base / r.factor + smooth * base;
    }

    /// The queries and keys of token t, normalised and rotated.
    void place(Row& qkv, size_t t, const BlockParameters& p) const {
        const int H = spec_.n_head, D = spec_.head_size, half = D / 2;
        for (int h = 0; h < H + spec_.n_kv_head; ++h) {
            double* x = qkv.data() + h * D;
            if (spec_.qk_norm) {
                double squares = 0;
                for (int d = 0; d < D; ++d) squares += x[d] * x[d] / D;
                for (int d = 0; d < D; ++d)
                    x[d] *= at(h < H ? p.q_norm_w : p.k_norm_w, d) /
                            std::sqrt(squares + spec_.norm_epsilon);
            }
            for (int i = 0; i < half; ++i) {
                const double angle = static_cast<double>(t) * frequency(i);
                const double a = x[i], b = x[i + half];
                x[i] = a * std::cos(angle) - b * std::sin(angle);
                x[i + half] = b * std::cos(angle) + a * std::sin(angle);
            }
        }
    }

    /// Attention's output for token t, from q, k and v of all tokens.
    Row attend(const Rows& qkv, size_t t) const {
        const int H = spec_.n_head, group = H / spec_.n_kv_head, D = spec_.head_size;
        const auto part = [&](size_t token, int head, int d) {
            return qkv[token][static_cast<size_t>(head * D + d)];
        };
        Row out;
        for (int h = 0; h < H; ++h) {
            const int key = H + h / group, value = key + spec_.n_kv_head;
            Row weights(t + 1);
            double total = 0;
            for (size_t s = 0; s <= t; ++s) {
                double score = 0;
                for (int d = 0; d < D; ++d) score += part(t, h, d) * part(s, key, d);
                score = capped(score / std::sqrt(static_cast<double>(D)), spec_.attention_softcap);
                weights[s] = std::exp(score);
                total += weights[s];
            }
            for (int d = 0; d < D; ++d) {
                double sum = 0;
                for (size_t s = 0; s <= t; ++s) sum += weights[s] / total * part(s, value, d);
                out.push_back(sum);
            }
        }
        return out;
    }

    void block(Rows& x, const BlockParameters& p) const {
        Rows qkv;
        for (const Row& row : x)
            qkv.push_back(linear(norm(row, p.norm1_w, p.norm1_b), p.qkv_w, p.qkv_b,
                                 spec_.layer(0).qkv_width()));
        if (spec_.is_rotary())
            for (size_t t = 0; t < x.size(); ++t) place(qkv[t], t, p);
        for (size_t t = 0; t < x.size(); ++t) {
            Row& row = x[t];
            const auto add = [&](const Row& more) {
                for (size_t c = 0; c < row.size(); ++c) row[c] += more[c];
            };
            add(linear(attend(qkv, t), p.out_w, p.out_b, spec_.n_embd));
            const auto F = static_cast<size_t>(spec_.n_ff);
            Row wide =
                linear(norm(row, p.norm2_w, p.norm2_b), p.up_w, p.up_b, spec_.layer(0).up_width());
            for (size_t i = 0; i < F; ++i)
                wide[i] = spec_.mlp == Mlp::swiglu ? silu(wide[i]) * wide[F + i]
                          : spec_.mlp == Mlp::gelu ? gelu(wide[i])
                                                   : std::pow(std::max(wide[i], 0.0), 2);
            wide.resize(F);
            add(linear(wide, p.down_w, p.down_b, spec_.n_embd));
        }
    }

    double sequence_loss(const int32_t* tokens, const int32_t* targets, int T) const {
        const int64_t C = spec_.n_embd;
        Rows x;
        for (int t = 0; t < T; ++t) {
            Row row;
            for (int64_t c = 0; c < C; ++c)
                row.push_back(at(registry_.tokens, tokens[t] * C + c) +
                              (registry_.positions < 0 ? 0 : at(registry_.positions, t * C + c)));
            x.push_back(row);
        }
        for (const BlockParameters& p : registry_.blocks) block(x, p);
        double sum = 0;
        for (int t = 0; t < T; ++t) {
            if (targets[t] < 0) continue;
            Row logits = linear(
                norm(x[static_cast<size_t>(t)], registry_.final_norm_w, registry_.final_norm_b),
                registry_.head, -1, spec_.vocab_size);
            double total = 0;
            for (double& logit : logits) logit = capped(logit, spec_.head_softcap);
            for (const double logit : logits) total += std::exp(logit);
            sum += std::log(total) - logits[static_cast<size_t>(targets[t])];
        }
        return sum;
    }

    DecoderSpec spec_;
    Registry registry_;
    std::vector<std::vector<double>> values_;
};

}  // namespace train_gpt
