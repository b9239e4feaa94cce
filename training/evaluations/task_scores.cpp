#include "training/evaluations/task_scores.h"

#include <algorithm>

#include "training/evaluations/python_text.h"

namespace train_gpt {

namespace {

/// The first of the lowest costs. A cost that is not a number is never lower, as in Python's min().
template <class Cost>
size_t lowest(size_t n, const Cost& cost) {
    size_t best = 0;
    for (size_t i = 1; i < n; ++i)
        if (cost(i) < cost(best)) best = i;
    return best;
}

Estimate estimate_of(const std::vector<double>& values) {
    const double n = static_cast<double>(values.size());
    double sum = 0, squares = 0;
    for (const double value : values) sum += value;
    const double mean = sum / n;
    for (const double value : values) squares += (value - mean) * (value - mean);
    return {.mean = mean, .error = n > 1 ? std::sqrt(squares / (n - 1) / n) : std::nan("")};
}

/// The values of all items for each kind of score.
struct Columns {
    std::vector<double> by_sum, per_character, per_byte, per_token, matches, bits, nats;
};

}  // namespace

ItemScores scores_of(const Task& task, const TaskItem& item,
                     std::span<const AnswerLosses> answers) {
    const auto text = [&](size_t i) -> const std::string& {
        return item.answers[item.answers.size() > 1 ? i : 0];
    };
    const auto by = [&](const auto& length) {
        return lowest(answers.size(),
                      [&](size_t i) { return answers[i].nats / static_cast<double>(length(i)); });
    };
    ItemScores scores;
    if (task.form == TaskForm::language_modeling) {
        scores.matches = answers[0].likeliest == answers[0].tokens && answers[0].tokens > 0;
    } else {
        scores.by_sum = by([](size_t) { return 1; });
        scores.per_character = by([&](size_t i) { return python_length(text(i)); });
        scores.per_byte = by([&](size_t i) { return text(i).size(); });
        scores.per_token = by([&](size_t i) { return answers[i].tokens; });
    }
    scores.bits_per_byte = answers[item.gold].answer_nats /
                           (std::log(2.0) * static_cast<double>(text(item.gold).size()));
    return scores;
}

Estimate centered(const Estimate& accuracy, double baseline) {
    const double guessed = 0.01 * baseline;
    return {.mean = (accuracy.mean - guessed) / (1 - guessed),
            .error = accuracy.error / (1 - guessed)};
}

TaskResult result_of(const Task& task, std::span<const AnswerLosses> losses) {
    TaskResult result{.name = task.name,
                      .form = task.form,
                      .procedure = task.procedure,
                      .items = task.size(),
                      .shots = task.shots};
    Columns columns;
    for (const TaskItem& item : task.items) {
        const size_t n = task.choices(item);
        const std::span<const AnswerLosses> answers = losses.first(n);
        losses = losses.subspan(n);
        const ItemScores scores = scores_of(task, item, answers);
        const auto add = [&](std::vector<double>& column, size_t decision) {
            column.push_back(decision == item.gold ? 1 : 0);
        };
        add(columns.by_sum, scores.by_sum);
        add(columns.per_character, scores.per_character);
        add(columns.per_byte, scores.per_byte);
        add(columns.per_token, scores.per_token);
        columns.matches.push_back(scores.matches ? 1 : 0);
        columns.bits.push_back(scores.bits_per_byte);
        columns.nats.push_back(answers[item.gold].answer_nats);
    }
    result.bits_per_byte = estimate_of(columns.bits);
    if (task.form == TaskForm::language_modeling) {
        result.accuracy = result.exact_match = estimate_of(columns.matches);
        result.perplexity = std::exp(estimate_of(columns.nats).mean);
    } else {
        result.by_sum = estimate_of(columns.by_sum);
        result.per_character = estimate_of(columns.per_character);
        result.per_byte = estimate_of(columns.per_byte);
        result.per_token = estimate_of(columns.per_token);
        result.accuracy = task.procedure == TaskProcedure::core ? result.per_token : result.by_sum;
    }
    if (task.has_baseline) result.centered = centered(result.accuracy, task.baseline);
    return result;
}

}  // namespace train_gpt
