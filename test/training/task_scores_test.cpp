#include "training/evaluations/task_scores.h"

#include <algorithm>
#include <cmath>

#include "test/catch.h"
#include "test/random.h"
#include "training/evaluations/core_tasks.h"
#include "training/evaluations/task_report.h"

using namespace train_gpt;

namespace {

double random_loss() { return static_cast<double>(random_int(1, 1000)) / 64; }

/// A text of some characters of one to four bytes each.
std::string random_characters(int64_t characters) {
    std::string text;
    for (; characters > 0; --characters)
        text += std::vector<std::string>{"a", "\xc3\xa9", "\xe4\xb8\x96",
                                         "\xf0\x9f\x98\x80"}[static_cast<size_t>(random_int(0, 3))];
    return text;
}

struct Scored {
    Task task;
    std::vector<AnswerLosses> losses;
};

Scored random_choices(int64_t items, TaskProcedure procedure) {
    Scored scored;
    scored.task.procedure = procedure;
    for (int64_t i = 0; i < items; ++i) {
        TaskItem item{.contexts = {"q"}, .answers = {}};
        for (int64_t n = random_int(2, 5); n > 0; --n) {
            item.answers.push_back(random_characters(random_int(1, 9)));
            scored.losses.push_back({.nats = random_loss(),
                                     .tokens = static_cast<double>(random_int(1, 6)),
                                     .answer_nats = random_loss()});
        }
        item.gold = static_cast<size_t>(random_int(0, std::ssize(item.answers) - 1));
        scored.task.items.push_back(item);
    }
    return scored;
}

}  // namespace

TEST_CASE("choices are compared by sums, and by sums per character, byte and token",
          "[evaluations]") {
    const int64_t n = random_int(1, 40);
    const TaskProcedure procedure = random_int(0, 1) ? TaskProcedure::core : TaskProcedure::harness;
    Scored scored = random_choices(n, procedure);
    scored.task.has_baseline = true;
    scored.task.baseline = static_cast<double>(random_int(0, 90));
    double right[4] = {}, bits = 0, bits_squared = 0;
    size_t at = 0;
    for (const TaskItem& item : scored.task.items) {
        for (int kind = 0; kind < 4; ++kind) {
            size_t best = 0;
            double lowest = INFINITY;
            for (size_t i = 0; i < item.answers.size(); ++i) {
                size_t characters = 0;
                for (const char c : item.answers[i]) characters += (c & '\xc0') != '\x80';
                const double lengths[] = {1, static_cast<double>(characters),
                                          static_cast<double>(item.answers[i].size()),
                                          scored.losses[at + i].tokens};
                const double cost = scored.losses[at + i].nats / lengths[kind];
                if (cost < lowest) lowest = cost, best = i;
            }
            right[kind] += best == item.gold;
        }
        const double b = scored.losses[at + item.gold].answer_nats / std::log(2) /
                         static_cast<double>(item.answers[item.gold].size());
        bits += b, bits_squared += b * b;
        at += item.answers.size();
    }
    const TaskResult result = result_of(scored.task, scored.losses);
    const double items = static_cast<double>(n);
    const Estimate found[] = {result.by_sum, result.per_character, result.per_byte,
                              result.per_token};
    for (int kind = 0; kind < 4; ++kind) {
        const double mean = right[kind] / items;
        CAPTURE(kind, n);
        CHECK(found[kind].mean == Approx(mean).margin(1e-12));
        if (n > 1)
            CHECK(found[kind].error ==
                  Approx(std::sqrt(mean * (1 - mean) / (items - 1))).margin(1e-12));
        else
            CHECK(std::isnan(found[kind].error));
    }
    CHECK(result.items == n);
    CHECK(result.accuracy.mean ==
          (procedure == TaskProcedure::core ? result.per_token : result.by_sum).mean);
    CHECK(result.bits_per_byte.mean == Approx(bits / items));
    if (n > 1)
        CHECK(result.bits_per_byte.error ==
              Approx(std::sqrt((bits_squared / items - std::pow(bits / items, 2)) / (items - 1)))
                  .margin(1e-6));
    const double guess = scored.task.baseline / 100;
    CHECK(result.centered.mean ==
          Approx((result.accuracy.mean - guess) / (1 - guess)).margin(1e-12));
    CHECK(std::isnan(result.exact_match.mean));
    CHECK(std::isnan(result.perplexity));
}

TEST_CASE("the first of equal choices is taken, and a choice without tokens never wins",
          "[evaluations]") {
    Task task;
    task.items = {{.contexts = {"q"}, .answers = {"a", "b", "c"}}};
    const std::vector<AnswerLosses> equal{
        {.nats = 2, .tokens = 1}, {.nats = 1, .tokens = 1}, {.nats = 1, .tokens = 1}};
    CHECK(scores_of(task, task.items[0], equal).per_token == 1);
    // As Python's min() of nanochat's means, of which one is not a number.
    const std::vector<AnswerLosses> none{
        {.nats = 2, .tokens = 1}, {.nats = 0, .tokens = 0}, {.nats = 1, .tokens = 1}};
    CHECK(scores_of(task, task.items[0], none).per_token == 2);
}

TEST_CASE("a continuation matches if every token of it is the likeliest", "[evaluations]") {
    Task task;
    task.form = TaskForm::language_modeling;
    std::vector<AnswerLosses> losses;
    double nats = 0, matches = 0;
    const int64_t n = random_int(1, 30);
    for (int64_t i = 0; i < n; ++i) {
        task.items.push_back({.contexts = {"c"}, .answers = {random_characters(random_int(1, 5))}});
        const double tokens = static_cast<double>(random_int(1, 4));
        const double likeliest = tokens - static_cast<double>(random_int(0, 1));
        losses.push_back({.nats = random_loss(),
                          .tokens = tokens,
                          .answer_nats = random_loss(),
                          .likeliest = likeliest});
        matches += likeliest == tokens;
        nats += losses.back().answer_nats;
    }
    const TaskResult result = result_of(task, losses);
    const double items = static_cast<double>(n);
    CHECK(result.exact_match.mean == Approx(matches / items).margin(1e-12));
    CHECK(result.accuracy.mean == result.exact_match.mean);
    CHECK(result.perplexity == Approx(std::exp(nats / items)));
    CHECK(std::isnan(result.by_sum.mean));
    CHECK(std::isnan(result.centered.mean));
}

TEST_CASE("CORE is the mean centered accuracy of its 22 tasks, by both tables", "[evaluations]") {
    std::vector<TaskResult> results;
    double sums[2] = {}, variances[2] = {};
    for (const CoreTask& task : core_tasks()) {
        TaskResult& result = results.emplace_back();
        result.name = task.name;
        result.procedure = TaskProcedure::core;
        result.accuracy = {static_cast<double>(random_int(0, 1000)) / 1000,
                           static_cast<double>(random_int(1, 50)) / 1000};
        for (int v = 0; v < 2; ++v) {
            const double guess = 0.01 * task.baseline[v];
            sums[v] += (result.accuracy.mean - guess) / (1 - guess);
            variances[v] += std::pow(result.accuracy.error / (1 - guess), 2);
        }
    }
    std::shuffle(results.begin(), results.end(), test_rng());
    const auto core = core_score(results);
    REQUIRE(core);
    for (size_t v = 0; v < 2; ++v) {
        CHECK(core->by_version[v].mean == Approx(sums[v] / 22).margin(1e-12));
        CHECK(core->by_version[v].error == Approx(std::sqrt(variances[v]) / 22));
    }
    // The tables differ in three tasks; all others have one baseline.
    int differ = 0;
    for (const CoreTask& task : core_tasks()) differ += task.baseline[0] != task.baseline[1];
    CHECK(differ == 3);
    const Json json = json_of(results);
    CHECK(json["core"]["v1"]["score"].get<double>() == core->by_version[0].mean);
    CHECK(json["core"]["v2"]["score_stderr"].get<double>() == core->by_version[1].error);
    const std::string text = describe_tasks(results);
    CHECK(text.find("baselines v1") != std::string::npos);
    CHECK(text.find("baselines v2") != std::string::npos);
    // Others beside them do not matter, but one of them that is missing does.
    results.emplace_back().name = "other";
    CHECK(core_score(results));
    results[static_cast<size_t>(random_int(0, 21))].procedure = TaskProcedure::harness;
    CHECK_FALSE(core_score(results));
    CHECK_FALSE(json_of(results).contains("core"));
}
