// Evaluates a model on tasks.
#pragma once
#include <span>
#include <vector>

#include "tokenizer/tokenizer.h"
#include "training/evaluation.h"
#include "training/evaluations/task_scores.h"

namespace train_gpt {

/// The options of a generator that evaluates tasks. context: the most tokens of a prompt.
Generator::Options scoring_generator(int context);

/// A whole model that keeps the keys and values of a prompt.
struct CachedModel {
    Stream& stream;
    Generator& generator;
    const Mesh& mesh;
    int sequence_length = 0;  // the most tokens of a prompt
};

/// The model's losses on all answers of a task's items, in their order. All ranks call it, and get
/// the same.
///
/// With on.generator, or a CachedModel, each rank computes its share of the items. An item's
/// answers share the keys and values of the tokens that they begin with, so that these tokens go
/// through the model once. The result does not depend on the number of ranks. Without it, each
/// answer is a row of a batch, and a batch is a whole pass through the model that the ranks share.
///
/// Throws EvaluationStopped on all ranks if `stop` returns true on one of them.
std::vector<AnswerLosses> losses_on(const Task& task, const EvaluatedModel& on,
                                    const Tokenizer& tokenizer, const StopEvaluation& stop = {});

std::vector<AnswerLosses> losses_on(const Task& task, const CachedModel& on,
                                    const Tokenizer& tokenizer, const StopEvaluation& stop = {});

/// The results of several tasks.
std::vector<TaskResult> evaluate(const EvaluatedModel& on, std::span<const Task> tasks,
                                 const Tokenizer& tokenizer, const StopEvaluation& stop = {});

}  // namespace train_gpt
