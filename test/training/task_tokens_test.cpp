#include "training/evaluations/task_tokens.h"

#include <algorithm>

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/evaluations/python_random.h"
#include "training/evaluations/python_text.h"

using namespace train_gpt;

namespace {

using Ids = std::vector<int32_t>;

Tokenizer trained_tokenizer(const std::string& text, uint32_t size = 300) {
    return Tokenizer::train(std::vector<std::string_view>{text}, size);
}

Ids ids(const Tokenizer& tokenizer, const std::string& text, bool begins = false) {
    Ids all;
    if (begins) all.push_back(static_cast<int32_t>(*tokenizer.document_boundary()));
    for (const uint32_t id : tokenizer.encode(text)) all.push_back(static_cast<int32_t>(id));
    return all;
}

Ids part(const AnswerTokens& answer, size_t from) {
    return {answer.tokens.begin() + static_cast<std::ptrdiff_t>(from), answer.tokens.end()};
}

Ids operator+(Ids a, const Ids& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

Task task_of(TaskForm form, TaskProcedure procedure, std::vector<TaskItem> items) {
    Task task;
    task.form = form, task.procedure = procedure, task.items = std::move(items);
    return task;
}

std::vector<AnswerTokens> answers_of(const Task& task, const Tokenizer& tokenizer, int most = 1000,
                                     size_t item = 0) {
    return TaskTokens(task, tokenizer, most).answers(item, tokenizer.vocab_size());
}

}  // namespace

TEST_CASE("Python's white space and lengths", "[evaluations]") {
    CHECK(python_strip(" \t\n\x0b\x0c\r\x1c\x1f\xc2\x85\xc2\xa0\xe2\x80\x83 a b\xe3\x80\x80\n") ==
          "a b");
    CHECK(python_rstrip("\n a\xe2\x80\xa9 ") == "\n a");
    CHECK(python_strip("\xe2\x80\x8b") == "\xe2\x80\x8b");  // a space of no width is none
    CHECK(python_strip(" \xc2\xa0 ").empty());
    CHECK(python_length("a\xc3\xa9\xe4\xb8\x96\xf0\x9f\x98\x80") == 4);
}

TEST_CASE("CORE's choices are scored after the tokens that all of them share", "[evaluations]") {
    const Tokenizer tokenizer = trained_tokenizer("the cat sat on the mat the cat the", 262);
    const Task task = task_of(TaskForm::multiple_choice, TaskProcedure::core,
                              {{.contexts = {"the "}, .answers = {"cats", "cat mat", "cat"}}});
    const auto answers = answers_of(task, tokenizer);
    REQUIRE(answers.size() == 3);
    size_t shared = 1000;
    for (const auto& answer : answers)
        for (size_t i = 0; i < std::min(shared, answer.tokens.size()); ++i)
            if (i >= answers[0].tokens.size() || answer.tokens[i] != answers[0].tokens[i])
                shared = i;
    for (size_t i = 0; i < 3; ++i) {
        // The delimiter follows the query's own space.
        CHECK(answers[i].tokens == ids(tokenizer, "the  " + task.items[0].answers[i], true));
        CHECK(answers[i].scored_from == std::min(shared, answers[2].tokens.size()));
        // The answer begins after the query, without spaces.
        CHECK(answers[i].answer_from == ids(tokenizer, "the", true).size());
    }
    CHECK(answers[0].scored_from > answers[0].answer_from);  // "cat" decides nothing
}

TEST_CASE("CORE's contexts share the tokens at the end, which are scored", "[evaluations]") {
    const Tokenizer tokenizer = trained_tokenizer("aa bb");
    Task task = task_of(TaskForm::schema, TaskProcedure::core,
                        {{.contexts = {"xy aa", "z aa"}, .answers = {"bb c"}}});
    const auto answers = answers_of(task, tokenizer);
    REQUIRE(answers.size() == 2);
    for (size_t i = 0; i < 2; ++i) {
        CHECK(answers[i].tokens == ids(tokenizer, task.items[0].contexts[i] + " bb c", true));
        CHECK(part(answers[i], answers[i].scored_from) == ids(tokenizer, " aa bb c"));
        CHECK(part(answers[i], answers[i].answer_from) == ids(tokenizer, " bb c"));
    }
    // The harness scores the continuation alone.
    task.procedure = TaskProcedure::harness;
    for (const AnswerTokens& answer : answers_of(task, tokenizer)) {
        CHECK(part(answer, answer.scored_from) == ids(tokenizer, " bb c"));
        CHECK(answer.answer_from == answer.scored_from);
    }
}

TEST_CASE("CORE's prompts of language modelling lose the spaces around contexts", "[evaluations]") {
    const Tokenizer tokenizer = trained_tokenizer("one two");
    Task task = task_of(TaskForm::language_modeling, TaskProcedure::core,
                        {{.contexts = {" \n one\xc2\xa0"}, .answers = {"two"}},
                         {.contexts = {"\tx "}, .answers = {"y "}}});
    task.shots = 1;
    const auto answers = answers_of(task, tokenizer);
    CHECK(answers[0].tokens == ids(tokenizer, "x y \n\none two", true));
    CHECK(part(answers[0], answers[0].scored_from) == ids(tokenizer, " two"));
    task.procedure = TaskProcedure::harness, task.begin = Task::Begin::no;
    const auto kept = answers_of(task, tokenizer);
    CHECK(kept[0].tokens == ids(tokenizer, "\tx  y \n\n \n one") + ids(tokenizer, "\xc2\xa0 two"));
    CHECK(part(kept[0], kept[0].scored_from) == ids(tokenizer, "\xc2\xa0 two"));
}

TEST_CASE("the harness moves spaces at a context's end to the continuation", "[evaluations]") {
    const Tokenizer tokenizer = trained_tokenizer("one two one two", 262);
    Task task = task_of(TaskForm::language_modeling, TaskProcedure::harness,
                        {{.contexts = {"one "}, .answers = {"two"}}});
    task.delimiter = "";
    auto answer = answers_of(task, tokenizer)[0];
    CHECK(answer.tokens == ids(tokenizer, "one") + ids(tokenizer, " two"));
    CHECK(part(answer, answer.scored_from) == ids(tokenizer, " two"));

    // Tokens that context and continuation have together count by their number.
    task.items[0] = {.contexts = {"on"}, .answers = {"e xyz"}};
    answer = answers_of(task, tokenizer)[0];
    const Ids context = ids(tokenizer, "on"), all = ids(tokenizer, "one xyz");
    REQUIRE(context.size() < all.size());
    CHECK(answer.tokens == context + Ids(all.begin() + std::ssize(context), all.end()));
    CHECK(answer.scored_from == context.size());
    // If none are left, the continuation's own tokens are scored.
    task.items[0] = {.contexts = {"on"}, .answers = {"e"}};
    answer = answers_of(task, tokenizer)[0];
    REQUIRE(ids(tokenizer, "one").size() <= context.size());
    CHECK(answer.tokens == context + ids(tokenizer, "e"));
    CHECK(answer.scored_from == context.size());

    // Nothing before the continuation: the token that begins a text predicts it.
    for (const char* empty : {"", "  "}) {
        task.items[0] = {.contexts = {empty}, .answers = {"two"}};
        answer = answers_of(task, tokenizer)[0];
        CHECK(answer.tokens == ids(tokenizer, empty + std::string("two"), true));
        CHECK(answer.scored_from == 1);
    }
    task.begin = Task::Begin::yes;
    task.items[0] = {.contexts = {"one"}, .answers = {" two"}};
    CHECK(answers_of(task, tokenizer)[0].tokens == ids(tokenizer, "one two", true));
}

TEST_CASE("the shots of an item are other items, drawn as Python does, or the header's examples",
          "[evaluations]") {
    const Tokenizer tokenizer = trained_tokenizer("a b");
    std::vector<TaskItem> items;
    const size_t n = static_cast<size_t>(random_int(2, 120));
    for (size_t i = 0; i < n; ++i) {
        TaskItem item{.contexts = {concat("q", i, ".")}, .answers = {}};
        for (size_t choice = 0; choice < 3; ++choice)
            item.answers.push_back(concat("c", i, ".", choice));
        item.gold = static_cast<size_t>(random_int(0, 2));
        items.push_back(item);
    }
    Task task = task_of(TaskForm::multiple_choice,
                        random_int(0, 1) ? TaskProcedure::core : TaskProcedure::harness, items);
    task.shots =
        static_cast<int>(random_int(0, std::min<int64_t>(12, static_cast<int64_t>(n) - 1)));
    task.delimiter = "=", task.separator = ";";
    const TaskTokens tokens(task, tokenizer, 4000);
    for (int repetition = 0; repetition < 5; ++repetition) {
        const size_t i = static_cast<size_t>(random_int(0, static_cast<int64_t>(n) - 1));
        std::string prompt;
        std::vector<size_t> others;
        for (size_t other = 0; other < n; ++other)
            if (other != i) others.push_back(other);
        for (const size_t drawn :
             PythonRandom(1234 + i).sample(n - 1, static_cast<size_t>(task.shots))) {
            const TaskItem& example = items[others[drawn]];
            prompt += example.contexts[0] + "=" + example.answers[example.gold] + ";";
        }
        const auto texts = tokens.texts(i);
        REQUIRE(texts.size() == 3);
        for (size_t choice = 0; choice < 3; ++choice) {
            CHECK(texts[choice].context == prompt + items[i].contexts[0]);
            CHECK(texts[choice].answer == "=" + items[i].answers[choice]);
        }
    }
    task.examples = {items[0], items[1]};
    task.shots = 1;
    CHECK(TaskTokens(task, tokenizer, 4000).texts(n - 1)[1].context ==
          items[0].contexts[0] + "=" + items[0].answers[items[0].gold] + ";" +
              items[n - 1].contexts[0]);
}

TEST_CASE("a prompt that is too long loses its beginning", "[evaluations]") {
    const Tokenizer tokenizer = trained_tokenizer("a");
    Task task = task_of(TaskForm::multiple_choice, TaskProcedure::core,
                        {{.contexts = {"x1y2z3"}, .answers = {"p4", "q5r"}}});
    task.delimiter = "-";
    const auto whole = answers_of(task, tokenizer);
    for (const TaskProcedure procedure : {TaskProcedure::core, TaskProcedure::harness})
        for (int most = 1; most <= static_cast<int>(whole[1].tokens.size()) + 1; ++most) {
            CAPTURE(name_of(procedure), most);
            task.procedure = procedure;
            const auto all = answers_of(task, tokenizer), cut = answers_of(task, tokenizer, most);
            // As many tokens are predicted as the model takes, by nanochat one less.
            const size_t fits =
                static_cast<size_t>(most) + (procedure == TaskProcedure::harness ? 1 : 0);
            for (size_t i = 0; i < 2; ++i) {
                const size_t n = std::min(fits, all[i].tokens.size()),
                             dropped = all[i].tokens.size() - n;
                CHECK(cut[i].tokens == part(all[i], dropped));
                CHECK(cut[i].scored_from == std::max(all[i].scored_from, dropped + 1) - dropped);
                CHECK(cut[i].answer_from == std::max(all[i].answer_from, dropped + 1) - dropped);
            }
        }
}

TEST_CASE("prompts begin with the token that begins a text if the task wants it", "[evaluations]") {
    const Tokenizer plain = trained_tokenizer("a b");
    const auto boundary = static_cast<int32_t>(*plain.document_boundary());
    Task task = task_of(TaskForm::multiple_choice, TaskProcedure::core,
                        {{.contexts = {"a"}, .answers = {"b", "c"}}});
    CHECK(answers_of(task, plain)[0].tokens.front() == boundary);
    task.begin = Task::Begin::no;
    CHECK(answers_of(task, plain)[0].tokens == ids(plain, "a b"));
    task.procedure = TaskProcedure::harness, task.begin = Task::Begin::by_procedure;
    CHECK(answers_of(task, plain)[0].tokens == ids(plain, "a b"));
    // The harness lets the tokenizer decide.
    const Tokenizer begins = plain.with_document_tokens("<|endoftext|>", "<|endoftext|>");
    CHECK(answers_of(task, begins)[0].tokens.front() == boundary);

    const std::string error = error_of([&] { TaskTokens(task, plain, 9).answers(0, 5); });
    CHECK(contains(error, "the model knows only 5"));
}
