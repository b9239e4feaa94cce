// What a model's losses on a task's answers say about it.
#pragma once
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "training/evaluations/task_file.h"

namespace train_gpt {

/// The model's losses on one answer. Sums of doubles, which ranks add up.
struct AnswerLosses {
    double nats = 0;         // summed over the tokens that decide
    double tokens = 0;       // how many these are
    double answer_nats = 0;  // of the right answer: summed over all of its tokens
    double likeliest = 0;    // of the tokens that decide: how many were the likeliest ones
};

/// A mean over items, and its standard error, the items' standard deviation (over n − 1) divided by
/// √n. NaN if there is none.
struct Estimate {
    double mean = std::nan(""), error = std::nan("");
};

/// What an item's answers make of it.
struct ItemScores {
    /// The answer with the lowest loss: the sum, or the sum divided by the answer's characters,
    /// bytes or tokens. If several are equal, the first one.
    size_t by_sum = 0, per_character = 0, per_byte = 0, per_token = 0;
    bool matches = false;      // every token of the continuation was the likeliest one
    double bits_per_byte = 0;  // of the right answer
};
ItemScores scores_of(const Task& task, const TaskItem& item, std::span<const AnswerLosses> answers);

struct TaskResult {
    std::string name = {};
    TaskForm form = TaskForm::multiple_choice;
    TaskProcedure procedure = TaskProcedure::harness;
    int64_t items = 0;
    int shots = 0;
    /// By the task's procedure: per token (core) or by the sum (harness); of language modelling the
    /// share of exact matches.
    Estimate accuracy = {};
    /// The accuracy if choices are compared by sums, or by sums per character, byte or token.
    Estimate by_sum = {}, per_character = {}, per_byte = {}, per_token = {};
    Estimate exact_match = {};         // of language modelling
    Estimate bits_per_byte = {};       // of the right answer
    double perplexity = std::nan("");  // of language modelling: e to the mean loss of continuations
    /// (accuracy − baseline) / (1 − baseline): 0 is guessing. NaN if the task gives no baseline.
    Estimate centered = {};
};

/// `losses` has all answers of the first item, then all answers of the second, and so on.
TaskResult result_of(const Task& task, std::span<const AnswerLosses> losses);

/// (accuracy − baseline) / (1 − baseline), with the baseline in percent.
Estimate centered(const Estimate& accuracy, double baseline);

}  // namespace train_gpt
