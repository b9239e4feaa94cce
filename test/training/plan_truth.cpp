#include "test/training/plan_truth.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "base/error.h"
#include "training/plan/step_simulation.h"

namespace train_gpt {

namespace {

std::vector<std::string> cells(const std::string& line) {
    std::vector<std::string> all;
    std::stringstream stream(line);
    for (std::string cell; std::getline(stream, cell, ',');) all.push_back(cell);
    return all;
}

std::string cluster_of(const std::string& gpu) {
    const std::map<std::string, std::string> names = {
        {"H100", "h100-dgx"},   {"H200", "h200"}, {"A100-40", "a100-40"},
        {"A100-80", "a100-80"}, {"B200", "b200"}, {"GB200", "gb200-nvl72"},
        {"RTX4090", "rtx4090"}};
    return names.at(gpu);
}

Software software_of(const std::string& system) {
    if (system == "llm-foundry (FSDP)") return Software::fsdp;
    if (system == "torchtitan") return Software::torchtitan;
    if (system == "MaxText") return Software::maxtext;
    if (system == "LLM.Q") return Software::llmq;
    if (system == "llm.c") return Software::llmc;
    if (system == "train_gpt") return Software::own;
    return Software::megatron;
}

int number(const std::string& text, int otherwise) {
    return text.empty() ? otherwise : std::stoi(text);
}

bool has_word(const std::string& text, const std::string& word) {
    std::stringstream stream(text);
    for (std::string one; stream >> one;)
        if (one == word) return true;
    return false;
}

RunShape shape_of(const std::map<std::string, std::string>& row) {
    const auto of = [&](const char* name, int otherwise = 1) {
        return number(row.at(name), otherwise);
    };
    Config config;
    const std::string& model = row.at("model");
    const bool is_gated = model.find("llama") != model.npos || model.find("qwen") != model.npos,
               is_gpt = model.find("gpt") != model.npos || model.find("mpt") != model.npos ||
                        model.find("own") != model.npos;
    config.model = {.family = is_gpt ? "gpt2" : "llama",
                    .n_layer = of("layers"),
                    .n_head = of("heads"),
                    .n_embd = of("hidden"),
                    .n_ctx = of("seq"),
                    .vocab_size = of("vocab"),
                    .n_kv_head = of("kv_heads"),
                    .n_ff = of("ffn")};
    config.model.mlp = is_gated ? Mlp::swiglu : is_gpt ? Mlp::gelu : Mlp::relu2;
    config.batch.micro_batch = of("micro_batch");
    config.batch.tokens_per_step = int64_t{of("global_batch")} * of("seq");
    auto& p = config.parallel;
    p.tensor = of("tp"), p.pipeline = of("pp"), p.context = of("cp");
    const int gpus = of("gpus"), data = gpus / (p.tensor * p.pipeline * p.context);
    p.zero = of("zero");
    if (p.zero == 3 && of("dp_or_fsdp") < data) p.shard_ranks = of("dp_or_fsdp");
    p.sums = GradientSums::fp32;
    p.allow_tensor_across_nodes = true;
    // Sources that name no interleaving had one: else their bubbles would not fit their speeds.
    // Where the embedding and the head count as layers, there are more stages than layers.
    const int most = of("layers") / p.pipeline,
              v = p.pipeline > 1 ? std::min(most, of("vp", most)) : 1;
    const int64_t micro_batches = of("global_batch") / (data * config.batch.micro_batch);
    if (v > 1 && micro_batches % p.pipeline == 0) {
        p.schedule = PipelineKind::interleaved;
        p.stages_per_rank = v;
    }
    const std::string& recompute = row.at("recompute");
    const bool whole = recompute == "full" || recompute == "block";
    return {config, spec_of(config, of("vocab")), DType::bf16,
            whole                        ? Recompute::block
            : recompute == "elementwise" ? Recompute::elementwise
                                         : Recompute::none,
            gpus};
}

}  // namespace

std::vector<TruthRow> truth_rows(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw Error("cannot read ", path);
    std::string line;
    std::getline(file, line);
    const std::vector<std::string> names = cells(line);
    std::vector<TruthRow> rows;
    std::map<std::string, Cluster> clusters;
    while (std::getline(file, line)) {
        const std::vector<std::string> values = cells(line);
        if (values.front() != "1") continue;  // in_scope
        std::map<std::string, std::string> row;
        for (size_t i = 0; i < names.size(); ++i) row[names[i]] = values.at(i);
        const std::string cluster = cluster_of(row["gpu"]);
        if (!clusters.contains(cluster)) clusters[cluster] = find_cluster(cluster);
        WorkOptions options{.software = software_of(row["system"]),
                            .fp8 = row["precision"].find("fp8") != std::string::npos};
        RunShape shape = shape_of(row);
        const LayerSpec layer = shape.spec.layer(0);
        // torchtitan computes every second product again, LLM.Q what the words name.
        if (row["recompute"] == "selective" && options.software == Software::torchtitan)
            options.again = 0.5;
        if (has_word(row["recompute"], "ffn"))
            options.again = double{1} * layer.n_embd * layer.up_width() / layer.matrix_parameters();
        rows.push_back({row, clusters[cluster], shape, options, std::stod(row["tok_s_gpu"])});
    }
    return rows;
}

double predicted(const TruthRow& row, const std::vector<double>& values) {
    WorkOptions options = row.options;
    options.efficiencies = efficiencies_of(options.software, row.cluster, options.fp8, values);
    const double seconds = simulate_step(step_work(row.shape, row.cluster, options)).seconds;
    return static_cast<double>(row.shape.config.batch.tokens_per_step) /
           (seconds * row.shape.mesh.world());
}

namespace {

double error_of(const TruthRow& row, const std::vector<double>& values) {
    return std::log(predicted(row, values) / row.tokens_per_second);
}

/// Solves A·x = b for a symmetric, positive definite A.
std::vector<double> solve(std::vector<std::vector<double>> A, std::vector<double> b) {
    const size_t n = b.size();
    for (size_t i = 0; i < n; ++i)
        for (size_t j = i + 1; j < n; ++j) {
            const double factor = A[j][i] / A[i][i];
            for (size_t k = i; k < n; ++k) A[j][k] -= factor * A[i][k];
            b[j] -= factor * b[i];
        }
    for (size_t i = n; i-- > 0;) {
        for (size_t k = i + 1; k < n; ++k) b[i] -= A[i][k] * b[k];
        b[i] /= A[i][i];
    }
    return b;
}

}  // namespace

TruthFit::TruthFit(const std::vector<TruthRow>& rows) : rows_(rows) {
    for (const EfficiencyRow& row : efficiency_table()) values_.push_back(row.prior);
    for (int i = 0; i < 6; ++i) {
        linearise();
        values_ = step(values_, "");
    }
    linearise();
}

std::vector<double> TruthFit::without(const std::string& model) const {
    std::vector<double> values = values_;
    for (int i = 0; i < 3; ++i) values = step(values, model);
    return values;
}

void TruthFit::linearise() {
    constexpr double h = 1e-3;
    slopes_.assign(rows_.size(), {});
    for (size_t r = 0; r < rows_.size(); ++r) {
        const TruthRow& row = rows_[r];
        if (!row.is_fitted()) continue;
        const auto used = [&](const std::vector<double>& values) {
            return efficiencies_of(row.options.software, row.cluster, row.options.fp8, values);
        };
        const double here = error_of(row, values_);
        for (size_t i = 0; i < values_.size(); ++i) {
            std::vector<double> moved = values_;
            moved[i] *= std::exp(h);
            if (used(moved) == used(values_)) continue;
            slopes_[r][i] = (error_of(row, moved) - here) / h;
        }
    }
}

std::vector<double> TruthFit::step(const std::vector<double>& from,
                                   const std::string& left_out) const {
    const size_t n = from.size();
    std::vector<std::vector<double>> A(n, std::vector<double>(n));
    std::vector<double> b(n);
    for (size_t i = 0; i < n; ++i) {
        const EfficiencyRow& row = efficiency_table()[i];
        const double weight = 1 / (row.spread * row.spread);
        A[i][i] += weight;
        b[i] -= weight * std::log(from[i] / row.prior);
    }
    for (size_t r = 0; r < rows_.size(); ++r) {
        if (!rows_[r].is_fitted() || rows_[r]["model"] == left_out) continue;
        const double error = error_of(rows_[r], from),
                     weight = 1 / (0.06 * 0.06) / (1 + error * error / 0.01);
        for (const auto& [i, slope] : slopes_[r]) {
            b[i] -= weight * slope * error;
            for (const auto& [j, other] : slopes_[r]) A[i][j] += weight * slope * other;
        }
    }
    std::vector<double> values = from;
    const std::vector<double> change = solve(A, b);
    for (size_t i = 0; i < n; ++i) values[i] *= std::exp(std::clamp(change[i], -0.5, 0.5));
    return values;
}

}  // namespace train_gpt
