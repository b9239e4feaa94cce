#include "training/evaluations/task_evaluation.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "model/generator.h"
#include "training/evaluations/task_tokens.h"

namespace train_gpt {

namespace {

/// The numbers of losses as ranks add them up.
constexpr size_t numbers = sizeof(AnswerLosses) / sizeof(double);

/// Where each item's answers begin in the list of all answers.
std::vector<size_t> first_answers(const Task& task) {
    std::vector<size_t> first{0};
    for (const TaskItem& item : task.items) first.push_back(first.back() + task.choices(item));
    return first;
}

/// The tokens from here on are scored: those that decide, and of the right answer all of it.
size_t needed_from(const AnswerTokens& answer, bool is_gold) {
    return is_gold ? std::min(answer.scored_from, answer.answer_from) : answer.scored_from;
}

/// Adds a token's loss. `at`: its place in the answer's tokens.
void add(AnswerLosses& losses, const AnswerTokens& answer, size_t at, double nats, bool is_gold) {
    if (at >= answer.scored_from) {
        losses.nats += nats;
        losses.tokens += 1;
    }
    if (is_gold && at >= answer.answer_from) losses.answer_nats += nats;
}

// ---- With cached keys and values ----------------------------------------------------------------

/// How many of their first tokens the answers share, without a token that a score needs.
size_t shared_tokens(const std::vector<AnswerTokens>& answers, size_t gold) {
    size_t shared = answers[0].tokens.size();
    for (size_t i = 0; i < answers.size(); ++i) {
        const std::vector<int32_t>& tokens = answers[i].tokens;
        const auto differ = std::ranges::mismatch(answers[0].tokens, tokens);
        shared = std::min({shared, static_cast<size_t>(differ.in1 - answers[0].tokens.begin()),
                           needed_from(answers[i], i == gold) - 1});
    }
    return shared;
}

void score_cached(const CachedModel& on, const std::vector<AnswerTokens>& answers, size_t gold,
                  bool with_likeliest, std::span<AnswerLosses> losses) {
    Generator& generator = on.generator;
    const size_t shared = shared_tokens(answers, gold);
    generator.reset();
    if (shared > 0) generator.prefill(on.stream, std::span(answers[0].tokens).first(shared));
    std::vector<std::vector<Generator::Score>> scores(answers.size());
    std::vector<Generator::Continuation> continuations;
    for (size_t i = 0; i < answers.size(); ++i) {
        const std::span<const int32_t> tokens(answers[i].tokens);
        const size_t from = needed_from(answers[i], i == gold);
        if (from >= tokens.size()) continue;
        scores[i].resize(tokens.size() - from);
        continuations.push_back({.tokens = tokens.first(tokens.size() - 1).subspan(shared),
                                 .targets = tokens.subspan(from),
                                 .scores = scores[i]});
    }
    generator.score(on.stream, continuations, with_likeliest);
    for (size_t i = 0; i < answers.size(); ++i) {
        const size_t from = needed_from(answers[i], i == gold);
        for (size_t at = from; at < answers[i].tokens.size(); ++at) {
            const Generator::Score& score = scores[i][at - from];
            add(losses[i], answers[i], at, score.nats, i == gold);
            if (at >= answers[i].scored_from && score.likeliest) losses[i].likeliest += 1;
        }
    }
}

/// Each rank's items are `world` apart.
void evaluate_cached(const Task& task, const CachedModel& on, const TaskTokens& tokens,
                     const StopEvaluation& stop, std::span<AnswerLosses> losses) {
    const World& world = on.mesh.world();
    const size_t ranks = static_cast<size_t>(world.size()), n = task.items.size(),
                 rounds = (n + ranks - 1) / ranks;
    const std::vector<size_t> first = first_answers(task);
    for (size_t round = 0; round < rounds; ++round) {
        stop_together(on.mesh, stop, static_cast<double>(round) / static_cast<double>(rounds));
        const size_t i = round * ranks + static_cast<size_t>(world.rank());
        if (i < n)
            score_cached(on, tokens.answers(i, on.generator.vocab_size()), task.items[i].gold,
                         task.form == TaskForm::language_modeling,
                         losses.subspan(first[i], first[i + 1] - first[i]));
        world.activity().pulse();
    }
}

// ---- In whole passes ----------------------------------------------------------------------------

/// A row of a batch: an answer of an item.
struct Row {
    size_t item = 0, answer = 0;
};

/// Evaluates tasks in batches, of which each group of data-parallel ranks has its own.
class Passes {
  public:
    Passes(const Task& task, const EvaluatedModel& on, const TaskTokens& tokens)
        : task_(task),
          on_(on),
          tokens_(tokens),
          first_(first_answers(task)),
          T_(static_cast<size_t>(on.model.sequence_length())),
          B_(static_cast<size_t>(on.model.options().B)) {}

    void evaluate(const StopEvaluation& stop, std::span<AnswerLosses> losses) {
        const size_t own = static_cast<size_t>(on_.mesh.at(Axis::data));
        const size_t end = first_row(own + 1);
        size_t rounds = 0;  // of the ranks with the most rows
        for (size_t rank = 0; rank < ranks(); ++rank)
            rounds = std::max(rounds, (first_row(rank + 1) - first_row(rank) + B_ - 1) / B_);
        for (size_t round = 0; round < rounds; ++round) {
            if (round % static_cast<size_t>(on_.model.ranks()) == 0)
                stop_together(on_.mesh, stop,
                              static_cast<double>(round) / static_cast<double>(rounds));
            // A rank that has no more rows runs the model once more for the others.
            const size_t begin = std::min(end, first_row(own) + round * B_);
            fill(begin, std::min(end, begin + B_));
            on_.batch.run(on_.stream, on_.model);
            score(losses);
            on_.mesh.world().activity().pulse();
        }
    }

  private:
    size_t ranks() const { return static_cast<size_t>(on_.mesh.size(Axis::data)); }
    /// The first row of the rank's items.
    size_t first_row(size_t rank) const { return first_[(first_.size() - 1) * rank / ranks()]; }
    void fill(size_t begin, size_t end);
    void score(std::span<AnswerLosses> losses);
    void score_likeliest(std::span<AnswerLosses> losses);

    const Task& task_;
    const EvaluatedModel& on_;
    const TaskTokens& tokens_;
    std::vector<size_t> first_;
    size_t T_, B_;
    std::vector<AnswerTokens> rows_;  // of the batch
    std::vector<size_t> numbers_;     // their places among all answers
    std::vector<bool> gold_;          // whether they are right
};

/// Fills the batch with the answers of these numbers.
void Passes::fill(size_t begin, size_t end) {
    const EvaluationBatch& batch = on_.batch;
    std::ranges::fill(batch.tokens, 0);
    std::ranges::fill(batch.targets, -1);
    std::ranges::fill(batch.doc_start, 0);
    rows_.clear(), numbers_.clear(), gold_.clear();
    size_t item = static_cast<size_t>(std::ranges::upper_bound(first_, begin) - first_.begin()) - 1;
    std::vector<AnswerTokens> answers;
    for (size_t number = begin; number < end; ++number) {
        if (number == first_[item + 1]) ++item, answers.clear();
        if (answers.empty()) answers = tokens_.answers(item, on_.model.spec().vocab_size);
        const size_t i = number - first_[item];
        const AnswerTokens& answer = answers[i];
        const size_t row = rows_.size() * T_;
        const bool is_gold = i == task_.items[item].gold;
        std::copy(answer.tokens.begin(), answer.tokens.end() - 1,
                  batch.tokens.begin() + static_cast<std::ptrdiff_t>(row));
        for (size_t at = needed_from(answer, is_gold); at < answer.tokens.size(); ++at)
            batch.targets[row + at - 1] = answer.tokens[at];
        rows_.push_back(answer), numbers_.push_back(number), gold_.push_back(is_gold);
    }
}

/// The sums count on one of the ranks that share the batch.
void Passes::score(std::span<AnswerLosses> losses) {
    if (on_.model.ends_model()) {
        const std::span<const float> all = on_.batch.losses(on_.stream, on_.model);
        for (size_t r = 0; r < rows_.size() && counts_sequences(on_.mesh, on_.model); ++r)
            for (size_t at = needed_from(rows_[r], gold_[r]); at < rows_[r].tokens.size(); ++at)
                add(losses[numbers_[r]], rows_[r], at, all[r * T_ + at - 1], gold_[r]);
    } else {
        on_.stream.synchronize();
    }
    if (task_.form == TaskForm::language_modeling) score_likeliest(losses);
}

/// Ranks that share weights compute the logits of equally many tokens.
void Passes::score_likeliest(std::span<AnswerLosses> losses) {
    const bool counts = counts_sequences(on_.mesh, on_.model);
    std::vector<std::pair<size_t, size_t>> places;  // row and place in it
    for (size_t r = 0; r < rows_.size(); ++r)
        for (size_t at = rows_[r].scored_from; at < rows_[r].tokens.size(); ++at)
            places.emplace_back(r, at);
    std::vector<double> counted(ranks());
    if (counts)
        counted[static_cast<size_t>(on_.mesh.at(Axis::data))] = static_cast<double>(places.size());
    on_.mesh.world().all_reduce_sum(counted);
    const size_t most = static_cast<size_t>(std::ranges::max(counted));
    for (size_t i = 0; i < most; ++i) {
        const auto [r, at] = i < places.size() ? places[i] : std::pair{size_t{0}, size_t{1}};
        const int32_t likeliest =
            on_.batch.likeliest_token(on_.stream, on_.model, static_cast<int64_t>(r * T_ + at - 1));
        if (counts && i < places.size() && likeliest == rows_[r].tokens[at])
            losses[numbers_[r]].likeliest += 1;
    }
}

}  // namespace

Generator::Options scoring_generator(int context) {
    return {.context = context, .chunk = 256, .scored_rows = 64};
}

namespace {

/// Adds up over ranks; each number is 0 on all of them but one.
std::vector<AnswerLosses> of_all_ranks(std::vector<AnswerLosses> losses, const World& world) {
    world.all_reduce_sum(
        std::span(reinterpret_cast<double*>(losses.data()), losses.size() * numbers));
    return losses;
}

}  // namespace

std::vector<AnswerLosses> losses_on(const Task& task, const CachedModel& on,
                                    const Tokenizer& tokenizer, const StopEvaluation& stop) {
    const TaskTokens tokens(task, tokenizer, on.sequence_length);
    std::vector<AnswerLosses> losses(first_answers(task).back());
    evaluate_cached(task, on, tokens, stop, losses);
    return of_all_ranks(std::move(losses), on.mesh.world());
}

std::vector<AnswerLosses> losses_on(const Task& task, const EvaluatedModel& on,
                                    const Tokenizer& tokenizer, const StopEvaluation& stop) {
    if (on.generator)
        return losses_on(task,
                         CachedModel{on.stream, *on.generator, on.mesh, on.model.sequence_length()},
                         tokenizer, stop);
    const TaskTokens tokens(task, tokenizer, on.model.sequence_length());
    std::vector<AnswerLosses> losses(first_answers(task).back());
    Passes(task, on, tokens).evaluate(stop, losses);
    return of_all_ranks(std::move(losses), on.mesh.world());
}

std::vector<TaskResult> evaluate(const EvaluatedModel& on, std::span<const Task> tasks,
                                 const Tokenizer& tokenizer, const StopEvaluation& stop) {
    std::vector<TaskResult> results;
    for (const Task& task : tasks) {
        const double before = static_cast<double>(results.size()),
                     all = static_cast<double>(tasks.size());
        const auto stop_task = [&](double done) { return stop((before + done) / all); };
        results.push_back(result_of(
            task, losses_on(task, on, tokenizer, stop ? StopEvaluation(stop_task) : stop)));
    }
    return results;
}

}  // namespace train_gpt
