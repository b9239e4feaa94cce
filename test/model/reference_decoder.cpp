#include "test/model/reference_decoder.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace train_gpt {

ReferenceDecoder::ReferenceDecoder(const DecoderSpec& spec, const Registry& registry,
                                   std::vector<std::vector<double>> values)
    : spec_(spec), registry_(registry), values_(std::move(values)) {}

void ReferenceDecoder::set_router_losses(const RouterLosses& losses,
                                         const std::vector<double>& load) {
    losses_ = losses, load_ = load;
}

double ReferenceDecoder::loss(const std::vector<int32_t>& tokens,
                              const std::vector<int32_t>& targets, int T) const {
    double sum = 0;
    next_choice_ = 0;
    least_margin_ = std::numeric_limits<double>::infinity();
    counts_.assign(registry_.blocks.size() * static_cast<size_t>(spec_.experts.n_expert), 0);
    of_micro_batch_ = {};
    for (size_t first = 0; first < tokens.size(); first += static_cast<size_t>(T))
        sum += sequence_loss(tokens.data() + first, targets.data() + first, T);
    if (losses_.level == BalanceLevel::micro_batch)
        for (const auto& of_router : of_micro_batch_) sum += balance_loss(of_router.second);
    return sum;
}

ReferenceDecoder::Row ReferenceDecoder::norm(const Row& x, int w, int b) const {
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

ReferenceDecoder::Row ReferenceDecoder::linear(const Row& x, int w, int b, int64_t outputs) const {
    Row y(static_cast<size_t>(outputs));
    const auto in = static_cast<int64_t>(x.size());
    for (int64_t o = 0; o < outputs; ++o) {
        double sum = b < 0 ? 0 : at(b, o);
        for (int64_t i = 0; i < in; ++i) sum += at(w, o * in + i) * x[static_cast<size_t>(i)];
        y[static_cast<size_t>(o)] = sum;
    }
    return y;
}

double ReferenceDecoder::frequency(int i) const {
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

void ReferenceDecoder::place(Row& qkv, size_t t, const BlockParameters& p) const {
    const int H = spec_.n_head, H_kv = spec_.n_kv_head, D = spec_.head_size, half = D / 2;
    if (spec_.qk_norm == QkNormKind::width) {
        rms_norm(qkv.data(), H * D, p.q_norm_w);
        rms_norm(qkv.data() + H * D, H_kv * D, p.k_norm_w);
    }
    for (int h = 0; h < H + H_kv; ++h) {
        double* x = qkv.data() + h * D;
        if (spec_.qk_norm == QkNormKind::head) rms_norm(x, D, h < H ? p.q_norm_w : p.k_norm_w);
        for (int i = 0; i < half; ++i) {
            const double angle = static_cast<double>(t) * frequency(i);
            const double a = x[i], b = x[i + half];
            x[i] = a * std::cos(angle) - b * std::sin(angle);
            x[i + half] = b * std::cos(angle) + a * std::sin(angle);
        }
    }
}

ReferenceDecoder::Row ReferenceDecoder::attend(const Rows& qkv, size_t t, const BlockParameters& p,
                                               const LayerSpec& layer) const {
    const auto window = static_cast<size_t>(layer.window);
    const size_t begin = window > 0 && t + 1 > window ? t + 1 - window : 0;
    const int H = spec_.n_head, group = H / spec_.n_kv_head, D = spec_.head_size;
    const auto part = [&](size_t token, int head, int d) {
        return qkv[token][static_cast<size_t>(head * D + d)];
    };
    Row out;
    for (int h = 0; h < H; ++h) {
        const int key = H + h / group, value = key + spec_.n_kv_head;
        Row weights(t + 1);
        double total = p.sinks < 0 ? 0 : std::exp(at(p.sinks, h));
        for (size_t s = begin; s <= t; ++s) {
            double score = 0;
            for (int d = 0; d < D; ++d) score += part(t, h, d) * part(s, key, d);
            score = capped(score / std::sqrt(static_cast<double>(D)), spec_.attention_softcap);
            weights[s] = std::exp(score);
            total += weights[s];
        }
        for (int d = 0; d < D; ++d) {
            double sum = 0;
            for (size_t s = begin; s <= t; ++s) sum += weights[s] / total * part(s, value, d);
            out.push_back(sum);
        }
    }
    return out;
}

ReferenceDecoder::Row ReferenceDecoder::gated(const Row& wide) const {
    const size_t F = wide.size() / 2;
    Row out(F);
    for (size_t i = 0; i < F; ++i) {
        double gate = wide[i], up = wide[F + i];
        if (!spec_.clamped) {
            out[i] = silu(gate) * up;
            continue;
        }
        const double limit = spec_.clamped->limit, alpha = spec_.clamped->alpha;
        gate = std::min(gate, limit), up = std::clamp(up, -limit, limit);
        out[i] = (up + 1) * gate / (1 + std::exp(-alpha * gate));
    }
    return out;
}

double ReferenceDecoder::balance_loss(const RouterSums& sums, const double* load) const {
    double total = 0, loss = 0;
    for (const double n : sums.chosen) total += n;
    for (size_t e = 0; e < sums.chosen.size(); ++e)
        loss += (load ? load[e] : sums.chosen[e] / total) * sums.probabilities[e];
    return losses_.balance * static_cast<double>(sums.chosen.size()) * loss;
}

std::vector<size_t> ReferenceDecoder::choose(const Row& values, int k) const {
    if (keeps_ && next_choice_ < choices_.size()) return choices_[next_choice_++];
    std::vector<size_t> order(values.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return values[a] > values[b]; });
    if (const auto last = static_cast<size_t>(k); last < order.size())
        least_margin_ = std::min(least_margin_, values[order[last - 1]] - values[order[last]]);
    order.resize(static_cast<size_t>(k));
    if (keeps_) choices_.push_back(order), ++next_choice_;
    return order;
}

ReferenceDecoder::Row ReferenceDecoder::mixture(const Row& h, const BlockParameters& p,
                                                const ExpertSpec& e, double most, RouterSums& sums,
                                                double& auxiliary) const {
    const auto E = static_cast<size_t>(e.n_expert);
    const Row z = linear(h, p.router_w, p.router_b, e.n_expert);
    double largest = z[0], total = 0, all = 0;
    for (const double v : z) largest = std::max(largest, v);
    for (const double v : z) total += std::exp(v - largest);
    Row scores(E), biased(E), probabilities(E);
    for (size_t i = 0; i < E; ++i) {
        scores[i] = e.rule.score == RouterScore::softmax ? std::exp(z[i] - largest) / total
                                                         : 1 / (1 + std::exp(-z[i]));
        biased[i] =
            e.selection_bias ? scores[i] + at(p.selection_bias, static_cast<int64_t>(i)) : z[i];
        all += scores[i];
    }
    for (size_t i = 0; i < E; ++i) probabilities[i] = scores[i] / all;
    const std::vector<size_t> chosen = choose(biased, e.n_expert_per_token);
    sums.add(chosen, probabilities);
    auxiliary += losses_.z_loss * std::pow(largest + std::log(total), 2);
    double sum = 0;
    for (const size_t i : chosen) sum += scores[i];
    Row out(h.size());
    for (const size_t i : chosen) {
        if (sums.chosen[i] > most) continue;
        const double weight = e.rule.scale * scores[i] / (e.rule.normalise ? sum : 1);
        const Row hidden = gated(expert(h, p.up_w, p.up_b, i, 2 * e.n_ff)),
                  more = expert(hidden, p.down_w, p.down_b, i, spec_.n_embd);
        for (size_t c = 0; c < out.size(); ++c) out[c] += weight * more[c];
    }
    if (p.shared_up_w < 0) return out;
    const double gate =
        p.shared_gate_w < 0 ? 1 : 1 / (1 + std::exp(-linear(h, p.shared_gate_w, -1, 1)[0]));
    const Row more = linear(gated(linear(h, p.shared_up_w, -1, 2 * e.n_ff_shared)), p.shared_down_w,
                            -1, spec_.n_embd);
    for (size_t c = 0; c < out.size(); ++c) out[c] += gate * more[c];
    return out;
}

ReferenceDecoder::Row ReferenceDecoder::expert(const Row& x, int w, int b, size_t i,
                                               int64_t outputs) const {
    const auto in = static_cast<int64_t>(x.size()), first = static_cast<int64_t>(i) * outputs;
    Row y(static_cast<size_t>(outputs));
    for (int64_t o = 0; o < outputs; ++o) {
        double sum = b < 0 ? 0 : at(b, first + o);
        for (int64_t c = 0; c < in; ++c)
            sum += at(w, (first + o) * in + c) * x[static_cast<size_t>(c)];
        y[static_cast<size_t>(o)] = sum;
    }
    return y;
}

double ReferenceDecoder::block(Rows& x, const BlockParameters& p, int number) const {
    const LayerSpec layer = spec_.layer(number);
    double auxiliary = 0;
    RouterSums sums;
    const ExpertSpec& e = layer.experts;
    const double tokens = static_cast<double>(x.size()),
                 most = e.capacity == 0
                            ? tokens
                            : std::ceil(e.capacity * tokens * e.n_expert_per_token / e.n_expert -
                                        1e-9);
    Rows qkv;
    for (const Row& row : x)
        qkv.push_back(
            linear(norm(row, p.norm1_w, p.norm1_b), p.qkv_w, p.qkv_b, spec_.layer(0).qkv_width()));
    if (spec_.is_rotary())
        for (size_t t = 0; t < x.size(); ++t) place(qkv[t], t, p);
    for (size_t t = 0; t < x.size(); ++t) {
        Row& row = x[t];
        const auto add = [&](const Row& more) {
            for (size_t c = 0; c < row.size(); ++c) row[c] += more[c];
        };
        add(linear(attend(qkv, t, p, layer), p.out_w, p.out_b, spec_.n_embd));
        if (layer.experts) {
            add(mixture(norm(row, p.norm2_w, p.norm2_b), p, layer.experts, most, sums, auxiliary));
            continue;
        }
        const auto F = static_cast<size_t>(spec_.n_ff);
        Row wide =
            linear(norm(row, p.norm2_w, p.norm2_b), p.up_w, p.up_b, spec_.layer(0).up_width());
        if (spec_.mlp == Mlp::swiglu) wide = gated(wide);
        for (size_t i = 0; i < F && spec_.mlp != Mlp::swiglu; ++i)
            wide[i] = spec_.mlp == Mlp::gelu ? gelu(wide[i]) : std::pow(std::max(wide[i], 0.0), 2);
        add(linear(wide, p.down_w, p.down_b, spec_.n_embd));
    }
    if (!layer.experts) return 0;
    size_t router = 0;
    for (int i = 0; i < number; ++i) router += spec_.has_experts(i);
    const size_t E = sums.chosen.size();
    for (size_t i = 0; i < E; ++i) counts_[router * E + i] += sums.chosen[i];
    if (losses_.level == BalanceLevel::micro_batch) {
        RouterSums& all = of_micro_batch_[router];
        all.chosen.resize(E), all.probabilities.resize(E);
        for (size_t i = 0; i < E; ++i) {
            all.chosen[i] += sums.chosen[i];
            all.probabilities[i] += sums.probabilities[i];
        }
        return auxiliary;
    }
    const bool by_step = losses_.level == BalanceLevel::step && !load_.empty();
    return auxiliary + balance_loss(sums, by_step ? load_.data() + router * E : nullptr);
}

double ReferenceDecoder::sequence_loss(const int32_t* tokens, const int32_t* targets, int T) const {
    const int64_t C = spec_.n_embd;
    Rows x;
    for (int t = 0; t < T; ++t) {
        Row row;
        for (int64_t c = 0; c < C; ++c)
            row.push_back(at(registry_.tokens, tokens[t] * C + c) +
                          (registry_.positions < 0 ? 0 : at(registry_.positions, t * C + c)));
        x.push_back(row);
    }
    double sum = 0;
    for (size_t l = 0; l < registry_.blocks.size(); ++l)
        sum += block(x, registry_.blocks[l], static_cast<int>(l));
    for (int t = 0; t < T; ++t) {
        if (targets[t] < 0) continue;
        Row logits =
            linear(norm(x[static_cast<size_t>(t)], registry_.final_norm_w, registry_.final_norm_b),
                   registry_.head, -1, spec_.vocab_size);
        double total = 0;
        for (double& logit : logits) logit = capped(logit, spec_.head_softcap);
        for (const double logit : logits) total += std::exp(logit);
        sum += std::log(total) - logits[static_cast<size_t>(targets[t])];
    }
    return sum;
}

}  // namespace train_gpt
