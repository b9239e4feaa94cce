// scripts/data.sh and scripts/tasks.py, on small files of the form in which data sets of tasks are
// published.
#include <algorithm>
#include <map>

#include "base/error.h"
#include "test/catch.h"
#include "test/data_server.h"
#include "training/evaluations/core_tasks.h"
#include "training/evaluations/task_file.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

using Files = std::map<std::string, std::string>;

/// Serves an archive of these files.
void serve(const DataServer& server, const std::string& name, const Files& files) {
    const TemporaryDirectory directory;
    for (const auto& [path, text] : files) {
        fs::create_directories(fs::path(directory / path).parent_path());
        write(directory / path, text);
    }
    std::vector<std::string> command{
        "python3", "-m", name.ends_with(".tar") ? "tarfile" : "zipfile", "-c", server.served(name)};
    for (const auto& entry : fs::directory_iterator(directory.path()))
        command.push_back(entry.path().string());
    REQUIRE(run_program(command).exit_code == 0);
}

/// The tasks that the script makes.
std::vector<Task> converted(const DataServer& server, const std::string& name,
                            const std::vector<std::string>& tasks) {
    const ProgramResult result = server.run(name);
    INFO(result.output);
    REQUIRE(result.exit_code == 0);
    std::vector<std::string> files;
    for (const std::string& task : tasks) {
        files.push_back(server.data(concat(name, "/", task, ".jsonl")));
        CHECK(contains(result.output, files.back()));
    }
    // Nothing else is where a glob finds the tasks.
    CHECK(read_tasks({server.data(name + "/*.jsonl")}).size() == tasks.size());
    return read_tasks(files);
}

/// The task's name in results.
bool is_name_in_core(const std::string& name) {
    return std::ranges::any_of(core_tasks(),
                               [&](const CoreTask& task) { return task.name == name; });
}

void check_item(const Task& task, size_t i, const std::vector<std::string>& contexts,
                const std::vector<std::string>& answers, size_t gold) {
    CAPTURE(task.name, i);
    REQUIRE(i < task.items.size());
    CHECK(task.items[i].contexts == contexts);
    CHECK(task.items[i].answers == answers);
    CHECK(task.items[i].gold == gold);
}

std::string science(const std::string& stem, const std::string& key) {
    return R"({"id": "x", "question": {"stem": ")" + stem +
           R"(", "choices": [{"text": "one", "label": "A"}, {"text": "two", "label": "B"},)"
           R"( {"text": "three", "label": "C"}]}, "answerKey": ")" +
           key + "\"}\n";
}

}  // namespace

TEST_CASE("data sets become the questions that lm-evaluation-harness asks", "[scripts]") {
    if (skip_without_python()) return;
    const DataServer server;
    serve(server, "ARC-V1-Feb2018.zip",
          {{"ARC-V1-Feb2018-2/ARC-Easy/ARC-Easy-Test.jsonl", science("Why?", "B")},
           {"ARC-V1-Feb2018-2/ARC-Challenge/ARC-Challenge-Test.jsonl",
            science("How?", "A") + science("Who?", "C")}});
    const auto arc = converted(server, "arc", {"arc_easy", "arc_challenge"});
    check_item(arc[0], 0, {"Question: Why?\nAnswer:"}, {"one", "two", "three"}, 1);
    check_item(arc[1], 1, {"Question: Who?\nAnswer:"}, {"one", "two", "three"}, 2);
    CHECK(arc[0].procedure == TaskProcedure::harness);
    CHECK(arc[0].baseline == 25);
    CHECK(arc[1].size() == 2);

    serve(server, "OpenBookQA-V1-Sep2018.zip",
          {{"OpenBookQA-V1-Sep2018/Data/Main/test.jsonl", science("The sun is", "C")}});
    check_item(converted(server, "openbookqa", {"openbookqa"})[0], 0, {"The sun is"},
               {"one", "two", "three"}, 2);

    write(server.served("dev_rand_split.jsonl"), science(" Where? ", "B"));
    check_item(converted(server, "commonsenseqa", {"commonsenseqa"})[0], 0,
               {"Question: Where?\nA. one\nB. two\nC. three\nAnswer:"}, {"A", "B", "C", "D", "E"},
               1);

    serve(server, "physicaliqa-train-dev.zip",
          {{"physicaliqa-train-dev/dev.jsonl", R"({"goal": "g", "sol1": "a", "sol2": "b"})"
                                               "\n"},
           {"physicaliqa-train-dev/dev-labels.lst", "1\n"}});
    check_item(converted(server, "piqa", {"piqa"})[0], 0, {"Question: g\nAnswer:"}, {"a", "b"}, 1);

    serve(server, "winogrande_1.1.zip",
          {{"winogrande_1.1/dev.jsonl",
            R"({"sentence": "Ann met Bob, but _ left. ", "option1": "Ann", "option2": "Bob",)"
            R"( "answer": "2"})"}});
    const Task winogrande = converted(server, "winogrande", {"winogrande"})[0];
    check_item(winogrande, 0, {"Ann met Bob, but Ann", "Ann met Bob, but Bob"}, {"left."}, 1);
    CHECK(winogrande.form == TaskForm::schema);

    serve(server, "SciQ.zip",
          {{"SciQ dataset-2 3/test.json",
            R"([{"question": "q", "distractor1": "a", "distractor2": "b", "distractor3": "c",)"
            R"( "correct_answer": "d", "support": " s"}])"}});
    check_item(converted(server, "sciq", {"sciq"})[0], 0, {"s\nQuestion: q\nAnswer:"},
               {"a", "b", "c", "d"}, 3);

    serve(server, "BoolQ.zip",
          {{"BoolQ/val.jsonl", R"({"question": "is it", "passage": "p", "label": true})"}});
    check_item(converted(server, "boolq", {"boolq"})[0], 0, {"p\nQuestion: is it?\nAnswer:"},
               {"no", "yes"}, 1);

    write(server.served("lambada_test.jsonl"), "{\"text\": \"he said  no\"}\n");
    const Task lambada = converted(server, "lambada", {"lambada_openai"})[0];
    check_item(lambada, 0, {"he said "}, {"no"}, 0);
    CHECK(lambada.form == TaskForm::language_modeling);

    const std::string swag = server.data("hellaswag_val.jsonl"), folder = server.data("swag");
    fs::create_directory(folder);
    write(swag, R"({"activity_label": "A", "ctx_a": "b", "ctx_b": "c", "endings": ["d", "e"],)"
                R"( "label": 1})");
    REQUIRE(run_program({"scripts/tasks.py", "hellaswag", swag, folder}).exit_code == 0);
    const Task hellaswag = read_task(folder + "/hellaswag.jsonl");
    check_item(hellaswag, 0, {"A: b C"}, {"d", "e"}, 1);

    // They can be evaluated together with CORE's tasks
    for (const Task& task : {arc[0], arc[1], winogrande, lambada, hellaswag}) {
        CHECK_FALSE(is_name_in_core(task.name));
        CHECK(is_name_in_core(task.name.substr(0, task.name.find("_harness"))));
    }
}

TEST_CASE("MMLU is asked by letters and by texts, after five examples of its subject",
          "[scripts]") {
    if (skip_without_python()) return;
    const DataServer server;
    std::string dev;
    for (int i = 0; i < 6; ++i) dev += concat("e", i, ",k,l,m,n,", "ABCDAB"[i], "\n");
    serve(server, "data.tar",
          {{"data/test/world_history_test.csv", "\"a, b?\n\",w,\"x \"\"y\"\"\",y,z,C\n"},
           {"data/dev/world_history_dev.csv", dev}});
    const auto mmlu = converted(server, "mmlu", {"mmlu", "mmlu_cloze"});
    std::string letters =
        "The following are multiple choice questions (with answers) about world history.\n\n";
    std::string cloze = "The following are questions (with answers) about world history.\n\n";
    for (int i = 0; i < 5; ++i) {
        letters += concat("e", i, "\nA. k\nB. l\nC. m\nD. n\nAnswer: ", "ABCDA"[i], "\n\n");
        cloze += concat("Question: e", i, "\nAnswer: ", "klmnk"[i], "\n\n");
    }
    check_item(mmlu[0], 0, {letters + "a, b?\nA. w\nB. x \"y\"\nC. y\nD. z\nAnswer:"},
               {"A", "B", "C", "D"}, 2);
    check_item(mmlu[1], 0, {cloze + "Question: a, b?\nAnswer:"}, {"w", "x \"y\"", "y", "z"}, 2);
}

TEST_CASE("the bundle of CORE becomes its 22 tasks", "[scripts]") {
    if (skip_without_python()) return;
    const DataServer server;
    Files files;
    std::string yaml = "icl_tasks:\n", other = "-\n  label: other\n  dataset_uri: none.jsonl\n";
    const std::string ten = "[10]", zero = "[0]";
    const std::map<std::string, std::string> forms{{"winograd", "schema"},
                                                   {"winogrande", "schema"}};
    for (const CoreTask& task : core_tasks()) {
        const std::string name = task.name;
        const bool is_choice = task.baseline[0] > 0 && !forms.contains(name);
        const std::string form = forms.contains(name) ? "schema"
                                 : is_choice          ? "multiple_choice"
                                                      : "language_modeling";
        yaml += concat("-\n  label: ", name, "\n  dataset_uri: folder/", name,
                       ".jsonl # a comment\n  num_fewshot: [", name == "boolq" ? 10 : 0,
                       "]\n  icl_task_type: ", form, "\n",
                       name == "boolq" ? "  continuation_delimiter: \"\\nAnswer: \" # this\n" : "",
                       name == "jeopardy" ? "  continuation_delimiter: '-'\n" : "", other);
        other.clear();
        for (int i = 0; i < 12; ++i)
            files["eval_bundle/eval_data/folder/" + name + ".jsonl"] +=
                concat(form == "schema" ? R"({"context_options": ["a", "b"], "continuation": ")"
                       : is_choice      ? R"({"query": "q", "choices": ["a", "b"], "x": ")"
                                        : R"({"context": "c", "continuation": ")",
                       i, R"(", "gold": 1, "category": "none"})", "\n");
    }
    files["eval_bundle/core.yaml"] = yaml;
    serve(server, "eval_bundle.zip", files);
    std::vector<std::string> names;
    for (const CoreTask& task : core_tasks()) names.emplace_back(task.name);
    const auto tasks = converted(server, "core", names);
    REQUIRE(tasks.size() == 22);
    for (size_t i = 0; i < tasks.size(); ++i) {
        CAPTURE(tasks[i].name);
        CHECK(tasks[i].name == core_tasks()[i].name);
        CHECK(tasks[i].procedure == TaskProcedure::core);
        CHECK(tasks[i].baseline == core_tasks()[i].baseline[1]);
        CHECK(tasks[i].shots == (tasks[i].name == "boolq" ? 10 : 0));
        CHECK(tasks[i].delimiter == (tasks[i].name == "boolq"      ? "\nAnswer: "
                                     : tasks[i].name == "jeopardy" ? "-"
                                                                   : " "));
        CHECK(tasks[i].size() == 12);
    }
}

TEST_CASE(
    "a file of tasks must have the hash of its first download, and the form it was "
    "published in",
    "[scripts]") {
    if (skip_without_python()) return;
    const DataServer server;
    write(server.served("lambada_test.jsonl"), "{\"text\": \"a b\"}\n");
    const Environment no_hash{{"NO_HASH", "1"}};  // the server tells none
    const ProgramResult first = server.run("lambada", no_hash);
    CHECK(first.exit_code == 0);
    CHECK(contains(first.output, "no SHA-256 is known"));
    const std::string file = server.data("lambada/published/lambada_test.jsonl");
    CHECK(fs::exists(file + ".first"));
    // Nothing is done twice, also where an earlier version put the file
    const std::string asked = server.log();
    for (const std::string end : {"", ".first", ".sha256"})
        fs::rename(file + end, server.data("lambada/lambada_test.jsonl" + end));
    const ProgramResult again = server.run("lambada", no_hash);
    CHECK(again.exit_code == 0);
    CHECK(server.log() == asked);
    CHECK_FALSE(contains(again.output, "items"));

    fs::remove(file);
    fs::remove(file + ".sha256");
    write(server.served("lambada_test.jsonl"), "{\"text\": \"a c\"}\n");
    const ProgramResult changed = server.run("lambada", no_hash);
    CHECK(changed.exit_code == 1);
    CHECK(contains(changed.output, "is not what was published"));

    write(server.served("dev_rand_split.jsonl"), "{\"question\": 3}\n");
    const ProgramResult other = server.run("commonsenseqa");
    CHECK(other.exit_code == 1);
    CHECK(contains(other.output, "does not have the form in which commonsenseqa was published"));
    CHECK_FALSE(fs::exists(server.data("commonsenseqa/commonsenseqa.jsonl")));
    write(server.served("BoolQ.zip"), "no archive");
    const ProgramResult damaged = server.run("boolq");
    CHECK(damaged.exit_code == 1);
    CHECK(contains(damaged.output, "is not the archive that was published"));
    CHECK_FALSE(contains(damaged.output, "Traceback"));
}
