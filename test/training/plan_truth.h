// Published speeds of training, to judge predictions by: test/fixtures/planner_truth.csv, and the
// fit of the table of efficiencies to a half of its rows.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "training/plan/step_work.h"

namespace train_gpt {

/// A row: columns by name.
struct TruthRow {
    std::map<std::string, std::string> columns;
    Cluster cluster;
    RunShape shape;
    WorkOptions options;
    double tokens_per_second = 0;  // of a GPU, published

    const std::string& operator[](const char* name) const { return columns.at(name); }
    bool is_fitted() const { return columns.at("use") == "fit"; }
};

/// The rows of a file that are in scope: dense models, on GPUs of which a cluster is shipped.
std::vector<TruthRow> truth_rows(const std::string& path);

/// Tokens per second of a GPU, predicted with these values of the table of efficiencies.
double predicted(const TruthRow& row, const std::vector<double>& values);

/// Values with the least squares of ln(predicted / published) over the fitted rows, each weighed as
/// 6 %, and less where it is further off than 10 %, and of ln(value / prior), weighed as the
/// table's spread. Rows of these models are left out.
class TruthFit {
  public:
    explicit TruthFit(const std::vector<TruthRow>& rows);

    const std::vector<double>& values() const { return values_; }  // nothing left out
    std::vector<double> without(const std::string& model) const;

  private:
    std::vector<double> step(const std::vector<double>& from, const std::string& left_out) const;
    void linearise();

    const std::vector<TruthRow>& rows_;
    std::vector<double> values_;
    std::vector<std::map<size_t, double>> slopes_;  // of each row, by value that it depends on
};

}  // namespace train_gpt
