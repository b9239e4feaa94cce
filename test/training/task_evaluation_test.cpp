#include "training/evaluations/task_evaluation.h"

#include <algorithm>
#include <cmath>

#include "test/catch.h"
#include "test/model/tiny_model.h"
#include "test/random.h"
#include "test/text.h"
#include "training/evaluations/task_tokens.h"

using namespace train_gpt;

namespace {

std::string random_text(int64_t words) {
    std::string text;
    for (; words > 0; --words) {
        for (int64_t n = random_int(1, 4); n > 0; --n)
            text += static_cast<char>('a' + random_int(0, 4));
        text += words > 1 ? " " : "";
    }
    return text;
}

std::vector<float> values_of(const TinyModel& model, int i) {
    std::vector<float> values(static_cast<size_t>(model.parameter(i).numel()));
    model.parameters->state.get(i, values);
    return values;
}

/// A model with random weights, large enough that its predictions differ.
TinyModel random_model(int64_t vocab_size, int B, int T, uint64_t seed,
                       const Generator::Options& options) {
    TinyModel model(
        gpt2.spec({.n_layer = 2, .n_head = 2, .n_embd = 16, .n_ctx = 48, .vocab_size = vocab_size}),
        B, T, DType::fp32, Recompute::none, options);
    model.parameters->state.initialize(seed);
    for (int i = 0; i < model.count(); ++i) {
        std::vector<float> values = values_of(model, i);
        for (float& value : values) value *= 12;
        model.parameters->state.set(i, values);
    }
    return model;
}

/// Changes every weight by about its rounding.
void disturb(TinyModel& model) {
    for (int i = 0; i < model.count(); ++i) {
        std::vector<float> values = values_of(model, i);
        const std::vector<float> normal = random_normal(values.size(), 0x1p-23f);
        for (size_t k = 0; k < values.size(); ++k) values[k] *= 1 + normal[k];
        model.parameters->state.set(i, values);
    }
}

Task random_task(TaskForm form, TaskProcedure procedure) {
    Task task;
    task.form = form, task.procedure = procedure;
    for (int64_t i = random_int(3, 9); i > 0; --i) {
        TaskItem item;
        const size_t contexts =
            form == TaskForm::schema ? static_cast<size_t>(random_int(2, 4)) : 1;
        const size_t answers =
            form == TaskForm::multiple_choice ? static_cast<size_t>(random_int(2, 5)) : 1;
        for (size_t k = 0; k < contexts; ++k)
            item.contexts.push_back(random_int(0, 5) ? random_text(random_int(1, 6)) : "");
        for (size_t k = 0; k < answers; ++k)
            item.answers.push_back(random_text(random_int(1, random_int(0, 3) ? 3 : 12)));
        item.gold = static_cast<size_t>(
            random_int(0, static_cast<int64_t>(std::max(contexts, answers)) - 1));
        task.items.push_back(item);
    }
    task.shots = static_cast<int>(random_int(0, 2));
    return task;
}

/// Token by token, without anything that answers share.
AnswerLosses naive_losses(TinyModel& model, const AnswerTokens& answer, bool is_gold) {
    AnswerLosses losses;
    model.generator->reset();
    for (size_t at = 1; at < answer.tokens.size(); ++at) {
        model.generator->feed(model.stream, {&answer.tokens[at - 1], 1});
        const auto logits = model.generator->logits();
        const auto highest = std::max_element(logits.begin(), logits.end());
        double sum = 0;
        for (const float logit : logits) sum += std::exp(logit - *highest);
        const double nats =
            std::log(sum) + *highest - logits[static_cast<size_t>(answer.tokens[at])];
        if (at >= answer.scored_from) {
            losses.nats += nats;
            losses.tokens += 1;
            losses.likeliest += highest - logits.begin() == answer.tokens[at];
        }
        if (is_gold && at >= answer.answer_from) losses.answer_nats += nats;
    }
    return losses;
}

std::vector<AnswerLosses> naive_losses(TinyModel& model, const Task& task, const TaskTokens& tokens,
                                       int64_t vocab_size) {
    std::vector<AnswerLosses> losses;
    for (size_t i = 0; i < task.items.size(); ++i) {
        const auto answers = tokens.answers(i, vocab_size);
        for (size_t k = 0; k < answers.size(); ++k)
            losses.push_back(naive_losses(model, answers[k], k == task.items[i].gold));
    }
    return losses;
}

/// The largest difference of two answers' losses, in nats.
double largest_difference(const std::vector<AnswerLosses>& a, const std::vector<AnswerLosses>& b) {
    double largest = 0;
    for (size_t i = 0; i < a.size(); ++i)
        largest = std::max({largest, std::abs(a[i].nats - b[i].nats),
                            std::abs(a[i].answer_nats - b[i].answer_nats)});
    return largest;
}

/// Lets some items of language modelling continue as the model would.
void continue_likely(Task& task, TinyModel& model, const Tokenizer& tokenizer, int T) {
    task.delimiter = "";
    for (size_t i = 0; i < task.items.size(); ++i) {
        if (random_int(0, 2) == 0) continue;
        const AnswerTokens answer =
            TaskTokens(task, tokenizer, T).answers(i, tokenizer.vocab_size())[0];
        std::string text;
        model.generator->reset();
        model.generator->feed(model.stream, std::span(answer.tokens).first(answer.scored_from));
        for (int64_t n = random_int(1, 2);; --n) {
            const auto logits = model.generator->logits();
            const auto next =
                static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin());
            text += tokenizer.token_bytes(static_cast<uint32_t>(next));
            if (n == 1 || model.generator->position() == model.generator->context()) break;
            model.generator->feed(model.stream, {&next, 1});
        }
        task.items[i].answers[0] = text;
    }
}

struct TaskBatch {
    explicit TaskBatch(const TinyModel& model)
        : arena(model.stream.device, planned(model)),
          batch(arena, shape_of(model), vocabulary(model)) {}

    static BatchShape shape_of(const TinyModel& model) {
        return Pipeline(*model.model).batch_shape();
    }
    static int64_t vocabulary(const TinyModel& model) {
        return model.model->padded_vocabulary_of_all();
    }
    static Arena planned(const TinyModel& model) {
        Arena plan = Arena::counting(model.stream.device);
        EvaluationBatch(plan, shape_of(model), vocabulary(model));
        return plan;
    }

    Arena arena;
    EvaluationBatch batch;
};

}  // namespace

TEST_CASE(
    "answers that share their prompt's keys and values, and rows of whole passes, have the "
    "losses that single tokens give",
    "[evaluations][cuda]") {
    const std::string text = random_text(400);
    const Tokenizer tokenizer = Tokenizer::train(std::vector<std::string_view>{text}, 300);
    const int64_t V = tokenizer.vocab_size();
    const int T = static_cast<int>(random_int(5, 40));
    const uint64_t seed = test_rng()();
    // Chunks and rows that do not divide the prompts.
    TinyModel model = random_model(V, static_cast<int>(random_int(2, 5)), T, seed,
                                   {.context = T,
                                    .chunk = static_cast<int>(random_int(1, 9)),
                                    .scored_rows = static_cast<int>(random_int(1, 4))});
    TinyModel naive = random_model(V, 1, T, seed, {});
    TaskBatch batch(model);
    const Mesh alone;
    for (const TaskForm form :
         {TaskForm::multiple_choice, TaskForm::schema, TaskForm::language_modeling})
        for (const TaskProcedure procedure : {TaskProcedure::core, TaskProcedure::harness}) {
            Task task = random_task(form, procedure);
            if (form == TaskForm::language_modeling) continue_likely(task, naive, tokenizer, T);
            const TaskTokens tokens(task, tokenizer, T);
            const std::vector<AnswerLosses> wanted = naive_losses(naive, task, tokens, V);
            for (Generator* generator : {model.generator.get(), static_cast<Generator*>(nullptr)}) {
                const auto found = losses_on(
                    task, {model.stream, *model.model, batch.batch, alone, generator}, tokenizer);
                REQUIRE(found.size() == wanted.size());
                CAPTURE(name_of(form), name_of(procedure), generator != nullptr, T);
                // Some models amplify roundings: logits of hundreds, norms of small vectors. What
                // roundings of the weights alone do to the losses shows how much.
                const double difference = largest_difference(found, wanted);
                double bound = 1e-4, by_roundings = 0;
                for (int trial = 0; trial < 3 && difference > bound; ++trial) {
                    TinyModel rounded = random_model(V, 1, T, seed, {});
                    disturb(rounded);
                    by_roundings = std::max(
                        by_roundings,
                        largest_difference(naive_losses(rounded, task, tokens, V), wanted));
                    bound = 1e-4 + 4 * by_roundings;
                }
                CAPTURE(by_roundings);
                CHECK(difference <= bound);
                for (size_t i = 0; i < found.size(); ++i) {
                    CAPTURE(i);
                    CHECK(found[i].tokens == wanted[i].tokens);
                    if (form == TaskForm::language_modeling)
                        CHECK(found[i].likeliest == wanted[i].likeliest);
                }
            }
        }
}

TEST_CASE("an evaluation of tasks stops between items when asked to", "[evaluations]") {
    const Tokenizer tokenizer = Tokenizer::train(std::vector<std::string_view>{"ab ab abc"}, 260);
    TinyModel model = random_model(tokenizer.vocab_size(), 2, 20, 1, {.scored_rows = 2});
    TaskBatch batch(model);
    const Mesh alone;
    const std::vector<Task> tasks{random_task(TaskForm::multiple_choice, TaskProcedure::core),
                                  random_task(TaskForm::language_modeling, TaskProcedure::harness)};
    for (Generator* generator : {model.generator.get(), static_cast<Generator*>(nullptr)}) {
        const EvaluatedModel on{model.stream, *model.model, batch.batch, alone, generator};
        double last = -1;
        const auto results = evaluate(on, tasks, tokenizer, [&](double done) {
            CHECK(done > last);
            CHECK(done < 1);
            last = done;
            return false;
        });
        CHECK(results.size() == 2);
        CHECK(last >= 0.5);
        CHECK_THROWS_AS(evaluate(on, tasks, tokenizer, [](double done) { return done > 0.4; }),
                        EvaluationStopped);
    }
}
