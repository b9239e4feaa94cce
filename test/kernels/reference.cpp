#include "test/kernels/reference.h"

#include <algorithm>
#include <cmath>
#include <complex>
#include <limits>

namespace train_gpt {

namespace {

/// The value as a tensor of the dtype stores it; fp32 means no rounding.
template <class Real>
Real kept(Real value, DType dtype) {
    return dtype == DType::bf16 ? static_cast<Real>(to_float(bf16(static_cast<float>(value))))
                                : value;
}

template <class Real>
Values kept_values(const std::vector<Real>& values, DType dtype) {
    Values result;
    result.reserve(values.size());
    for (Real value : values) result.push_back(static_cast<double>(kept(value, dtype)));
    return result;
}

}  // namespace

double gelu_reference(double x) {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

double gelu_derivative_reference(double x) {
    const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x), t = std::tanh(u);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
}

template <class Real>
Values product_reference(GemmOp op, const Values& a, const Values& b, int64_t m, int64_t n,
                         int64_t k) {
    // Both operands are copied so that each sum runs along two contiguous rows.
    std::vector<Real> left(static_cast<size_t>(m * k)), right(static_cast<size_t>(n * k));
    for (int64_t i = 0; i < m; ++i)
        for (int64_t d = 0; d < k; ++d)
            left[static_cast<size_t>(i * k + d)] =
                static_cast<Real>(a[static_cast<size_t>(op == GemmOp::tn ? d * m + i : i * k + d)]);
    for (int64_t j = 0; j < n; ++j)
        for (int64_t d = 0; d < k; ++d)
            right[static_cast<size_t>(j * k + d)] =
                static_cast<Real>(b[static_cast<size_t>(op == GemmOp::nt ? j * k + d : d * n + j)]);
    Values c(static_cast<size_t>(m * n));
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
            const Real *x = left.data() + i * k, *y = right.data() + j * k;
            Real sum = 0;
            for (int64_t d = 0; d < k; ++d) sum += x[d] * y[d];
            c[static_cast<size_t>(i * n + j)] = sum;
        }
    }
    return c;
}

template <class Real>
SwigluReference swiglu_reference(int64_t F, const Values& gate_up, const Values& dout, DType stored,
                                 const std::optional<ClampedSwiglu>& clamped) {
    const size_t columns = static_cast<size_t>(F);
    std::vector<Real> out(gate_up.size() / 2), dgate_up(dout.size() * 2);
    for (size_t i = 0; i < out.size(); ++i) {
        const size_t at = i / columns * 2 * columns + i % columns;
        const Real gate = static_cast<Real>(gate_up[at]),
                   up = static_cast<Real>(gate_up[at + columns]);
        const Real gradient = dout.empty() ? Real(0) : static_cast<Real>(dout[i]);
        if (clamped) {
            const Real alpha = static_cast<Real>(clamped->alpha),
                       limit = static_cast<Real>(clamped->limit);
            const Real g = std::min(gate, limit), u = std::clamp(up, -limit, limit);
            const Real sigma = Real(1) / (Real(1) + std::exp(-alpha * g));
            out[i] = (u + Real(1)) * g * sigma;
            if (dout.empty()) continue;
            if (gate <= limit)
                dgate_up[at] =
                    gradient * (u + Real(1)) * (sigma * (Real(1) + alpha * g * (Real(1) - sigma)));
            if (-limit <= up && up <= limit) dgate_up[at + columns] = gradient * g * sigma;
            continue;
        }
        const Real sigma = Real(1) / (Real(1) + std::exp(-gate));
        out[i] = gate * sigma * up;
        if (dout.empty()) continue;
        dgate_up[at] = gradient * up * (sigma * (Real(1) + gate * (Real(1) - sigma)));
        dgate_up[at + columns] = gradient * (gate * sigma);
    }
    return {kept_values(out, stored), kept_values(dgate_up, stored)};
}

template <class Real>
NormReference norm_reference(const NormProblem& p, DType stored) {
    const size_t M = static_cast<size_t>(p.M), C = static_cast<size_t>(p.C);
    std::vector<Real> out(M * C), dres(p.dy.size()), dw(C), db(C);
    NormReference r;
    for (size_t row = 0; row < M; ++row) {
        const size_t at = row * C;
        Real mean = 0, variance = 0, mean_g = 0, mean_gx = 0;
        for (size_t c = 0; c < C; ++c) mean += static_cast<Real>(p.x[at + c]);
        mean = p.norm == Norm::rms ? Real(0) : mean / static_cast<Real>(C);
        for (size_t c = 0; c < C; ++c) {
            const Real centred = static_cast<Real>(p.x[at + c]) - mean;
            variance += centred * centred;
        }
        variance /= static_cast<Real>(C);
        const Real rstd = Real(1) / std::sqrt(variance + static_cast<Real>(p.epsilon));
        r.stats.push_back(mean);
        r.stats.push_back(rstd);
        const auto normal = [&](size_t c) {
            return (static_cast<Real>(p.x[at + c]) - mean) * rstd;
        };
        for (size_t c = 0; c < C; ++c)
            out[at + c] = normal(c) * static_cast<Real>(p.w[c]) +
                          (p.b.empty() ? Real(0) : static_cast<Real>(p.b[c]));
        if (p.dy.empty()) continue;
        for (size_t c = 0; c < C; ++c) {
            const Real dy = static_cast<Real>(p.dy[at + c]), g = dy * static_cast<Real>(p.w[c]);
            mean_g += g;
            mean_gx += g * normal(c);
            dw[c] += dy * normal(c);
            db[c] += dy;
        }
        mean_g = p.norm == Norm::rms ? Real(0) : mean_g / static_cast<Real>(C);
        mean_gx /= static_cast<Real>(C);
        for (size_t c = 0; c < C; ++c) {
            const Real g = static_cast<Real>(p.dy[at + c]) * static_cast<Real>(p.w[c]);
            const Real before = p.dres.empty() ? Real(0) : static_cast<Real>(p.dres[at + c]);
            dres[at + c] = before + rstd * (g - mean_g - normal(c) * mean_gx);
        }
    }
    r.out = kept_values(out, stored);
    r.dres = kept_values(dres, stored);
    r.dw.assign(dw.begin(), dw.end());
    r.db.assign(db.begin(), db.end());
    return r;
}

namespace {

/// The heads of q or of k: the results, and the gradients of x and w.
template <class Real>
struct TurnedHeads {
    Values out, dx, dw;

    TurnedHeads(const RopeProblem& p, const Values& x, const Values& w, const Values& dy,
                DType stored) {
        const size_t D = static_cast<size_t>(p.shape.D), half = D / 2, heads = x.size() / D,
                     tokens = static_cast<size_t>(p.shape.B * p.shape.T);
        const auto turned = [&](const std::vector<Real>& all, bool back) {
            std::vector<Real> result(all.size());
            for (size_t i = 0; i < all.size(); ++i) {
                if (i % D >= half) continue;
                const size_t token = i / D / (heads / tokens);
                const double position =
                    static_cast<double>(p.shape.first_position) +
                    static_cast<double>(token % static_cast<size_t>(p.shape.T)) -
                    (p.doc_start.empty() ? 0 : p.doc_start[token]);
                const double angle = position * p.frequencies[i % D];
                const std::complex<Real> factor(static_cast<Real>(std::cos(angle)),
                                                static_cast<Real>(std::sin(back ? -angle : angle)));
                const std::complex<Real> pair = std::complex(all[i], all[i + half]) * factor;
                result[i] = pair.real();
                result[i + half] = pair.imag();
            }
            return result;
        };
        const auto vectors = static_cast<int64_t>(p.whole_width ? tokens : heads);
        NormProblem norm{.norm = Norm::rms,
                         .M = vectors,
                         .C = static_cast<int64_t>(x.size()) / vectors,
                         .x = x,
                         .w = w,
                         .b = {},
                         .epsilon = p.epsilon};
        const bool normed = !w.empty();
        const Values forward = normed ? norm_reference<Real>(norm).out : x;
        out = kept_values(turned({forward.begin(), forward.end()}, false), stored);
        if (dy.empty()) return;
        const std::vector<Real> g = turned({dy.begin(), dy.end()}, true);
        norm.dy.assign(g.begin(), g.end());
        const NormReference backward = normed ? norm_reference<Real>(norm) : NormReference{};
        const Values& gradient = normed ? backward.dres : norm.dy;
        dx = kept_values(std::vector<Real>(gradient.begin(), gradient.end()), stored);
        dw = backward.dw;
    }
};

}  // namespace

template <class Real>
RopeReference rope_reference(const RopeProblem& p, DType stored) {
    const TurnedHeads<Real> q(p, p.q, p.q_w, p.dq, stored), k(p, p.k, p.k_w, p.dk, stored);
    return {q.out, k.out, q.dx, k.dx, q.dw, k.dw};
}

template <class Real>
AttentionReference attention_reference(const AttentionProblem& c, DType stored, DType operands) {
    const AttentionShape& s = c.shape;
    AttentionReference r;
    r.out.resize(c.q.size());
    for (Values* terms : {&r.out_terms, &r.dq_terms}) terms->resize(c.q.size());
    for (Values* terms : {&r.dk_terms, &r.dv_terms}) terms->resize(c.k.size());
    r.dsinks_terms.resize(c.sinks.size());
    std::vector<Real> dsinks(c.sinks.size());
    r.lse.resize(static_cast<size_t>(s.B) * s.H * s.T);
    std::vector<Real> dq(c.q.size()), dk(c.k.size()), dv(c.v.size()), p(s.S), slope(s.S, Real(1));
    const Real cap = static_cast<Real>(s.softcap);
    for (int b = 0; b < s.B; ++b) {
        for (int h = 0; h < s.H; ++h) {
            const int g = h / (s.H / s.H_kv);
            for (int t = 0; t < s.T; ++t) {
                const int first = c.first(b, t), last = c.last(t);
                const size_t qi = c.q_at(b, t, h);
                const auto sink = c.sinks.empty() ? -std::numeric_limits<Real>::infinity()
                                                  : static_cast<Real>(c.sinks[h]);
                Real max = sink, sum = 0;
                for (int j = first; j <= last; ++j) {
                    Real dot = 0, terms = 0;
                    for (int d = 0; d < s.D; ++d) {
                        const Real term = Real(c.q[qi + d]) * Real(c.k[c.k_at(b, j, g) + d]);
                        dot += term;
                        terms += std::abs(term);
                    }
                    r.score_terms = std::max<double>(r.score_terms, terms * Real(s.scale));
                    p[j] = dot * Real(s.scale);
                    if (cap != 0) {
                        const Real t = std::tanh(p[j] / cap);
                        p[j] = cap * t;
                        slope[j] = 1 - t * t;
                    }
                    max = std::max(max, p[j]);
                }
                for (int j = first; j <= last; ++j) sum += p[j] = std::exp(p[j] - max);
                const Real sink_exp = std::exp(sink - max);
                sum += sink_exp;
                for (int j = first; j <= last; ++j) p[j] /= sum;
                r.lse[c.lse_at(b, h, t)] = static_cast<double>(max + std::log(sum));
                Real delta = 0, delta_terms = 0, out_terms = 0;
                for (int d = 0; d < s.D; ++d) {
                    Real o = 0, terms = 0;
                    for (int j = first; j <= last; ++j) {
                        const Real term = kept(p[j], operands) * Real(c.v[c.k_at(b, j, g) + d]);
                        o += term;
                        terms += std::abs(term);
                    }
                    r.out[qi + d] = static_cast<double>(kept(o, stored));
                    r.out_terms[qi + d] = terms;
                    if (c.dout.empty()) continue;
                    const Real term = Real(r.out[qi + d]) * Real(c.dout[qi + d]);
                    delta += term;
                    delta_terms += std::abs(term);
                    out_terms += terms * Real(std::abs(c.dout[qi + d]));
                }
                if (c.dout.empty()) continue;
                if (!c.sinks.empty()) {
                    dsinks[h] -= sink_exp / sum * delta;
                    r.dsinks_terms[h] += static_cast<double>(sink_exp / sum * out_terms);
                }
                for (int j = first; j <= last; ++j) {
                    const size_t kj = c.k_at(b, j, g);
                    Real dp = 0, dp_terms = 0;
                    for (int d = 0; d < s.D; ++d) {
                        const Real term = Real(c.dout[qi + d]) * Real(c.v[kj + d]);
                        dp += term;
                        dp_terms += std::abs(term);
                    }
                    const Real ds = p[j] * (dp - delta) * slope[j] * Real(s.scale);
                    const Real ds_terms = p[j] * (dp_terms + delta_terms) * Real(s.scale);
                    for (int d = 0; d < s.D; ++d) {
                        dv[kj + d] += kept(p[j], operands) * Real(c.dout[qi + d]);
                        dq[qi + d] += kept(ds, operands) * Real(c.k[kj + d]);
                        dk[kj + d] += kept(ds, operands) * Real(c.q[qi + d]);
                        r.dv_terms[kj + d] += p[j] * std::abs(c.dout[qi + d]);
                        r.dq_terms[qi + d] += ds_terms * std::abs(c.k[kj + d]);
                        r.dk_terms[kj + d] += ds_terms * std::abs(c.q[qi + d]);
                    }
                }
            }
        }
    }
    if (!c.dout.empty()) {
        r.dq = kept_values(dq, stored);
        r.dk = kept_values(dk, stored);
        r.dv = kept_values(dv, stored);
        r.dsinks.assign(dsinks.begin(), dsinks.end());
    }
    return r;
}

Values embedding_forward_reference(const EmbeddingRows& rows, const Values& w,
                                   const Values& positions) {
    const size_t C = static_cast<size_t>(rows.C);
    Values out;
    for (size_t row = 0; row < rows.tokens.size(); ++row)
        for (size_t c = 0; c < C; ++c)
            out.push_back(w[rows.token_at(row) + c] + positions[rows.position_at(row) + c]);
    return out;
}

template <class Real>
void embedding_backward_reference(const EmbeddingRows& rows, const Values& dout, Values& dw,
                                  Values& dpositions) {
    const size_t C = static_cast<size_t>(rows.C);
    for (size_t row = 0; row < rows.tokens.size(); ++row) {
        for (size_t c = 0; c < C; ++c) {
            const Real term = static_cast<Real>(dout[row * C + c]);
            for (double* sum :
                 {&dw[rows.token_at(row) + c], &dpositions[rows.position_at(row) + c]})
                *sum = static_cast<Real>(*sum) + term;
        }
    }
}

template <class Real>
HeadLossReference head_loss_reference(const HeadLossProblem& p, DType stored) {
    const size_t R = static_cast<size_t>(p.R), C = static_cast<size_t>(p.C),
                 V = static_cast<size_t>(p.V);
    HeadLossReference r;
    r.losses.resize(R);
    std::vector<Real> dx(R * C), dw(p.w.size()), z(V), slope(V, Real(1));
    const Real cap = static_cast<Real>(p.softcap);
    for (size_t row = 0; row < R; ++row) {
        if (p.targets[row] == -1) continue;
        Real max = -std::numeric_limits<Real>::infinity(), sum = 0;
        for (size_t j = 0; j < V; ++j) {
            Real product = 0;
            for (size_t c = 0; c < C; ++c)
                product += static_cast<Real>(p.x[row * C + c]) * static_cast<Real>(p.w[j * C + c]);
            z[j] = kept(product, stored);
            if (cap != 0) {
                const Real t = std::tanh(z[j] / cap);
                z[j] = cap * t;
                slope[j] = 1 - t * t;
            }
            max = std::max(max, z[j]);
        }
        for (size_t j = 0; j < V; ++j) sum += std::exp(z[j] - max);
        const size_t target = static_cast<size_t>(p.targets[row]);
        r.losses[row] = std::log(sum) + (max - z[target]);
        for (size_t j = 0; j < V; ++j) {
            const Real softmax = std::exp(z[j] - max) / sum,
                       of_z_loss = 2 * static_cast<Real>(p.z_loss) * (std::log(sum) + max);
            const Real dz =
                kept((softmax - (j == target ? Real(1) : Real(0)) + of_z_loss * softmax) * slope[j],
                     stored);
            for (size_t c = 0; c < C; ++c) {
                dx[row * C + c] += dz * static_cast<Real>(p.w[j * C + c]);
                dw[j * C + c] += dz * static_cast<Real>(p.x[row * C + c]);
            }
        }
    }
    r.dx = kept_values(dx, stored);
    r.dw.assign(dw.begin(), dw.end());
    return r;
}

Values norm_partials_reference(const Values& gradient) {
    Values partials((gradient.size() + norm_block - 1) / norm_block);
    for (size_t i = 0; i < gradient.size(); ++i)
        partials[i / norm_block] += gradient[i] * gradient[i];
    return partials;
}

AdamWReference adamw_reference(const AdamWReference& before, double gradient, double multiplier,
                               bool decay, const AdamWStep& args) {
    const double beta1 = args.beta1, beta2 = args.beta2, t = static_cast<double>(args.step),
                 g = multiplier * gradient;
    AdamWReference r = before;
    r.m = beta1 * r.m + (1 - beta1) * g;
    r.v = beta2 * r.v + (1 - beta2) * g * g;
    const double m_hat = r.m / (1 - std::pow(beta1, t)), v_hat = r.v / (1 - std::pow(beta2, t));
    const double weight_decay = decay ? static_cast<double>(args.weight_decay) : 0.0;
    r.master -=
        static_cast<double>(args.learning_rate) *
        (m_hat / (std::sqrt(v_hat) + static_cast<double>(args.epsilon)) + weight_decay * r.master);
    return r;
}

template Values product_reference<float>(GemmOp, const Values&, const Values&, int64_t, int64_t,
                                         int64_t);
template Values product_reference<double>(GemmOp, const Values&, const Values&, int64_t, int64_t,
                                          int64_t);
template SwigluReference swiglu_reference<float>(int64_t, const Values&, const Values&, DType,
                                                 const std::optional<ClampedSwiglu>&);
template SwigluReference swiglu_reference<double>(int64_t, const Values&, const Values&, DType,
                                                  const std::optional<ClampedSwiglu>&);
template NormReference norm_reference<float>(const NormProblem&, DType);
template NormReference norm_reference<double>(const NormProblem&, DType);
template RopeReference rope_reference<float>(const RopeProblem&, DType);
template RopeReference rope_reference<double>(const RopeProblem&, DType);
template AttentionReference attention_reference<float>(const AttentionProblem&, DType, DType);
template AttentionReference attention_reference<double>(const AttentionProblem&, DType, DType);
template void embedding_backward_reference<float>(const EmbeddingRows&, const Values&, Values&,
                                                  Values&);
template void embedding_backward_reference<double>(const EmbeddingRows&, const Values&, Values&,
                                                   Values&);
template HeadLossReference head_loss_reference<float>(const HeadLossProblem&, DType);
template HeadLossReference head_loss_reference<double>(const HeadLossProblem&, DType);

}  // namespace train_gpt
