#include "training/evaluations/task_file.h"

#include <algorithm>
#include <set>

#include "base/json_text.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/evaluations/python_random.h"

using namespace train_gpt;

namespace {

const std::string choice_header =
    R"({"task": "t", "form": "multiple_choice", "procedure": "harness"})";
const std::string choice_item = R"({"query": "q", "choices": ["a", "b"], "gold": 1})";

Task task_of(const TemporaryDirectory& directory, const std::string& text, int64_t most = 0) {
    write(directory / "task.jsonl", text);
    return read_task(directory / "task.jsonl", most);
}

}  // namespace

TEST_CASE("a task has the fields of its file, and defaults for those of the header that are absent",
          "[evaluations]") {
    const TemporaryDirectory directory;
    const Task choice =
        task_of(directory,
                "\xef\xbb\xbf"
                R"({"form": "multiple_choice"})"
                "\r\n\n"
                R"({"query": "q", "choices": ["a", "b", "c"], "gold": 2, "category": "ignored"})"
                "\r\n");
    CHECK(choice.name == "task");  // of the file
    CHECK(choice.procedure == TaskProcedure::harness);
    CHECK(choice.shots == 0);
    CHECK(choice.delimiter == " ");
    CHECK(choice.separator == "\n\n");
    CHECK(choice.begin == Task::Begin::by_procedure);
    CHECK_FALSE(choice.has_baseline);
    REQUIRE(choice.size() == 1);
    CHECK(choice.items[0].contexts == std::vector<std::string>{"q"});
    CHECK(choice.items[0].answers == std::vector<std::string>{"a", "b", "c"});
    CHECK(choice.items[0].gold == 2);
    CHECK(choice.items[0].line == 3);
    CHECK(choice.choices(choice.items[0]) == 3);

    const Task schema = task_of(
        directory,
        R"({"task": "s-1.x", "form": "schema", "procedure": "core", "shots": 1, "delimiter": "-",)"
        R"( "separator": "|", "begin": false, "baseline": 9.1, "note": [1], "examples":)"
        R"( [{"context_options": ["d", "e"], "continuation": "f", "gold": 1}]})"
        "\n"
        R"({"context_options": ["x", "", "y"], "continuation": "z", "gold": 0})");
    CHECK(schema.name == "s-1.x");
    CHECK(schema.procedure == TaskProcedure::core);
    CHECK(schema.shots == 1);
    CHECK(schema.delimiter == "-");
    CHECK(schema.separator == "|");
    CHECK(schema.begin == Task::Begin::no);
    CHECK(schema.baseline == 9.1);
    CHECK(schema.has_baseline);
    REQUIRE(schema.examples.size() == 1);
    CHECK(schema.examples[0].gold == 1);
    CHECK(schema.items[0].contexts.size() == 3);
    CHECK(schema.choices(schema.items[0]) == 3);

    const Task text = task_of(directory, R"({"form": "language_modeling", "begin": true})"
                                         "\n"
                                         R"({"context": "", "continuation": "z"})");
    CHECK(text.begin == Task::Begin::yes);
    CHECK(text.choices(text.items[0]) == 1);
}

TEST_CASE("CORE's items are shuffled before some are kept, the harness's are not",
          "[evaluations]") {
    const TemporaryDirectory directory;
    const size_t n = static_cast<size_t>(random_int(2, 60));
    const int64_t most = random_int(1, static_cast<int64_t>(n) + 2);
    std::string items;
    std::vector<std::string> names, shuffled;
    for (size_t i = 0; i < n; ++i) {
        names.push_back(concat("item ", i));
        items += to_text({{"context", names.back()}, {"continuation", "x"}}) + "\n";
    }
    shuffled = names;
    PythonRandom(1337).shuffle(shuffled);
    for (const bool core : {false, true}) {
        const Task task = task_of(directory,
                                  concat(R"({"form": "language_modeling", "procedure": ")",
                                         core ? "core" : "harness", "\"}\n", items),
                                  most);
        std::vector<std::string> kept;
        for (const TaskItem& item : task.items) kept.push_back(item.contexts[0]);
        std::vector<std::string>& wanted = core ? shuffled : names;
        wanted.resize(std::min(n, static_cast<size_t>(most)));
        CHECK(kept == wanted);
    }
}

TEST_CASE("a mistake in a task is refused with its file, its line and what is right",
          "[evaluations]") {
    const TemporaryDirectory directory;
    struct Mistake {
        std::string text;
        std::vector<std::string> said;
    };
    const auto header = [](const std::string& fields) {
        return R"({"form": "multiple_choice", )" + fields + "}\n" + choice_item;
    };
    const auto item = [](const std::string& text, const char* form = "multiple_choice") {
        return concat(R"({"form": ")", form, "\"}\n\n", text);
    };
    const std::vector<Mistake> mistakes{
        {"", {"has no items"}},
        {choice_header, {"has no items after its header"}},
        {choice_item, {"line 1", "header", "\"form\""}},
        {"[1]\n", {"line 1", "not a JSON object"}},
        {"{\"form\": \n", {"line 1", "not valid JSON"}},
        {header(R"("task": "a b")"), {"line 1", "\"a b\"", "letters"}},
        {header(R"("task": "")"), {"line 1", "letters"}},
        {header(R"("task": 3)"), {"line 1", "\"task\"", "text"}},
        {header(R"("shot": 3)"), {"line 1", "\"shot\"", "did you mean \"shots\"?"}},
        {header(R"("shots": -1)"), {"line 1", "\"shots\"", "from 0"}},
        {header(R"("shots": 1.5)"), {"line 1", "\"shots\"", "1.5"}},
        {header(R"("shots": 1)"), {"1 shots", "only 0 others"}},
        {header(R"("shots": 18446744073709551615)"), {"line 1", "\"shots\""}},
        {header(R"("procedure": "helm")"), {"line 1", "\"helm\"", "core", "harness"}},
        {header(R"("begin": 1)"), {"line 1", "\"begin\"", "true or false"}},
        {header(R"("baseline": 100)"), {"line 1", "\"baseline\"", "percent"}},
        {header(R"("baseline": "25")"), {"line 1", "\"baseline\""}},
        {header(R"("delimiter": null)"), {"line 1", "\"delimiter\"", "null"}},
        {header(R"("examples": {})"), {"line 1", "\"examples\"", "list"}},
        {header(R"("examples": [{}])"), {"line 1", "no \"query\""}},
        {header(concat(R"("shots": 2, "examples": [)", choice_item, "]")),
         {"line 1", "2 shots", "only 1"}},
        {"{\"form\": \"choice\"}", {"line 1", "\"choice\"", "multiple_choice"}},
        {item("7"), {"line 3", "not a JSON object"}},
        {item("{\"a\""), {"line 3", "not valid JSON"}},
        {item(R"({"choices": ["a", "b"], "gold": 0})"), {"line 3", "no \"query\"", "{\"query\""}},
        {item(R"({"query": 1, "choices": ["a", "b"], "gold": 0})"), {"line 3", "\"query\""}},
        {item(R"({"query": "q", "choices": ["a"], "gold": 0})"), {"line 3", "at least 2"}},
        {item(R"({"query": "q", "choices": ["a", 2], "gold": 0})"), {"line 3", "all texts"}},
        {item(R"({"query": "q", "choices": ["a", ""], "gold": 0})"), {"line 3", "empty"}},
        {item(R"({"query": "q", "choices": ["a", "b"]})"), {"line 3", "no \"gold\""}},
        {item(R"({"query": "q", "choices": ["a", "b"], "gold": 2})"), {"line 3", "from 0 to 1"}},
        {item(R"({"query": "q", "choices": ["a", "b"], "gold": -1})"), {"line 3", "from 0 to 1"}},
        {item(R"({"query": "q", "choices": ["a", "b"], "gold": "0"})"), {"line 3", "from 0 to 1"}},
        {item(R"({"query": "q", "choices": ["a", "b"], "gold": true})"), {"line 3", "from 0 to 1"}},
        {item(R"({"context_options": ["a", "b"], "gold": 0})", "schema"),
         {"line 3", "no \"continuation\""}},
        {item(R"({"context_options": "a", "continuation": "b", "gold": 0})", "schema"),
         {"line 3", "list of at least 2"}},
        {item(R"({"context": "a", "continuation": ""})", "language_modeling"),
         {"line 3", "empty \"continuation\""}},
        {item(choice_item, "language_modeling"), {"line 3", "no \"context\""}},
    };
    for (const Mistake& mistake : mistakes) {
        INFO(mistake.text);
        const std::string error = error_of([&] { task_of(directory, mistake.text); });
        INFO(error);
        CHECK(contains(error, directory / "task.jsonl"));
        for (const std::string& part : mistake.said) CHECK(contains(error, part));
        CHECK_FALSE(contains(error, "\n"));
    }
}

TEST_CASE("tasks come from files and globs, each once and each with its own name",
          "[evaluations]") {
    const TemporaryDirectory directory;
    for (const std::string name : {"b", "a", "c"})
        write(directory / (name + ".jsonl"), "{\"form\": \"multiple_choice\"}\n" + choice_item);
    const auto names = [&](const std::vector<std::string>& globs) {
        std::string all;
        for (const Task& task : read_tasks(globs)) all += task.name;
        return all;
    };
    CHECK(names({directory / "*.jsonl"}) == "abc");
    CHECK(names({directory / "c.jsonl", directory / "*.jsonl"}) == "cab");
    CHECK(names({}).empty());
    CHECK(contains(error_of([&] { names({directory / "x*.jsonl"}); }), directory / "x*.jsonl"));
    write(directory / "d.jsonl", choice_header + "\n" + choice_item);
    write(directory / "e.jsonl", choice_header + "\n" + choice_item);
    const std::string error = error_of([&] { names({directory / "*.jsonl"}); });
    for (const std::string part : {"d.jsonl", "e.jsonl", "same name, t"})
        CHECK(contains(error, part));
}
