// train_gpt eval --tasks, and evaluation.tasks of a run.

#include <cmath>
#include <map>
#include <sstream>

#include "test/commands/program.h"
#include "training/evaluations/core_tasks.h"
#include "training/inference_session.h"

using namespace train_gpt;

namespace {

/// A task of random items with the workplace's letters.
std::string random_task(const std::string& header, int64_t items) {
    const auto words = [](int64_t n) {
        std::string text = "a";
        for (; n > 0; --n) text += concat(" ", std::string(1, static_cast<char>('a' + n % 5)));
        return text + std::string(1, static_cast<char>('a' + random_int(0, 9)));
    };
    std::string text = header + "\n";
    const bool choice = contains(header, "multiple_choice"), schema = contains(header, "schema");
    for (; items > 0; --items) {
        SortedJson item;
        if (choice)
            item = {{"query", words(random_int(0, 6))},
                    {"choices", {words(random_int(0, 3)), words(4), words(1)}},
                    {"gold", random_int(0, 2)}};
        else if (schema)
            item = {{"context_options", {words(random_int(0, 6)), words(3)}},
                    {"continuation", words(1)},
                    {"gold", random_int(0, 1)}};
        else
            item = {{"context", words(random_int(0, 6))}, {"continuation", words(0)}};
        text += item.dump() + "\n";
    }
    return text;
}

struct Tasks {
    Tasks() {
        write(directory / "choice.jsonl",
              random_task(R"({"form": "multiple_choice", "shots": 2, "baseline": 25})", 9));
        write(directory / "schema.jsonl",
              random_task(R"({"form": "schema", "procedure": "core", "baseline": 50})", 5));
        write(directory / "text.jsonl", random_task(R"({"form": "language_modeling"})", 7));
    }

    TemporaryDirectory directory;
};

}  // namespace

TEST_CASE("eval scores tasks, in a table, as JSON and for each item", "[cli][cuda]") {
    const Tasks tasks;
    const std::string glob = tasks.directory / "*.jsonl", items = tasks.directory / "items";
    const Outcome text = check_succeeds(train_gpt_with({"eval", finished_run(), "--tasks", glob}));
    // Validation is left out, unless --data asks for it.
    CHECK_FALSE(contains(text.out, "validation loss"));
    for (const char* word : {"task", "accuracy", "bits/byte", "choice", "schema", "text", " ± "})
        CHECK(contains(text.out, word));
    CHECK_FALSE(contains(text.out, "CORE"));
    const Outcome both =
        check_succeeds(train_gpt_with({"eval", finished_run(), "--tasks", glob, "--json", "--items",
                                       items, "--data", Workplace::get().data("val_*.bin")}));
    const SortedJson json = SortedJson::parse(both.out);
    CHECK(json["validation"]["loss"].is_number());
    CHECK(json["dtype"] == "in fp32");
    REQUIRE(json["tasks"].size() == 3);
    // The scores are the means over the items that were written.
    std::map<std::string, std::vector<SortedJson>> by_task;
    std::istringstream lines(read(items));
    for (std::string line; std::getline(lines, line);) {
        const SortedJson item = SortedJson::parse(line);
        by_task[item["task"]].push_back(item);
    }
    for (const SortedJson& task : json["tasks"]) {
        const std::vector<SortedJson>& all = by_task[task["task"]];
        CAPTURE(task.dump());
        REQUIRE(task["items"] == all.size());
        double right = 0, bits = 0;
        for (const SortedJson& item : all) {
            bits += item["bits_per_byte"].get<double>();
            if (item.contains("exact_match"))
                right += item["exact_match"].get<bool>();
            else
                right += item[task["procedure"] == "core" ? "per_token" : "by_sum"] == item["gold"];
        }
        const double n = static_cast<double>(all.size()), mean = right / n;
        CHECK(task["accuracy"].get<double>() == Approx(mean).margin(1e-9));
        CHECK(task["accuracy_stderr"].get<double>() ==
              Approx(std::sqrt(mean * (1 - mean) / (n - 1))).margin(1e-9));
        CHECK(task["bits_per_byte"].get<double>() == Approx(bits / n));
        CHECK(task.contains("centered") == (task["task"] != "text"));
        CHECK(task.contains("perplexity") == (task["task"] == "text"));
    }
    const SortedJson some = SortedJson::parse(
        check_succeeds(
            train_gpt_with({"eval", finished_run(), "--json", "--max-examples", "4", "--tasks",
                            tasks.directory / "choice.jsonl", tasks.directory / "text.jsonl"}))
            .out);
    CHECK(some["tasks"][0]["items"] == 4);
    CHECK(some["tasks"][1]["items"] == 4);
    CHECK_FALSE(some.contains("validation"));
}

TEST_CASE("all tasks of CORE make its score", "[cli]") {
    const TemporaryDirectory directory;
    for (const CoreTask& task : core_tasks())
        write(directory / (task.name + std::string(".jsonl")),
              random_task(R"({"form": "multiple_choice", "procedure": "core"})", 2));
    const std::string glob = directory / "*.jsonl";
    const SortedJson json = SortedJson::parse(
        check_succeeds(train_gpt_with({"eval", finished_run(), "--tasks", glob, "--json"})).out);
    const auto core = [&](int version) {
        double sum = 0;
        for (const CoreTask& task : core_tasks())
            for (const SortedJson& result : json["tasks"])
                if (result["task"] == task.name) {
                    const double guess = task.baseline[version] / 100;
                    sum += (result["accuracy"].get<double>() - guess) / (1 - guess) / 22;
                }
        return sum;
    };
    CHECK(json["core"]["v1"]["score"].get<double>() == Approx(core(0)).margin(1e-9));
    CHECK(json["core"]["v2"]["score"].get<double>() == Approx(core(1)).margin(1e-9));
    check_succeeds(train_gpt_with(Workplace::get().train(
        directory / "run", {"--set", "schedule.steps=4", "--set", "evaluation.tasks=" + glob})));
    CHECK(metrics_of(directory / "run").back().contains("core/v2/stderr"));
    CHECK(contains(read(directory / "run/report.html"), "CORE with baselines v1"));
}

TEST_CASE("an evaluation of tasks alone has no memory for batches of whole sequences", "[cli]") {
    using For = InferenceSession::For;
    const auto bytes = [](For use) {
        return InferenceSession(finished_run(), "cpu", "auto", use).bytes();
    };
    const size_t both = bytes(For::evaluation_and_tasks);
    CHECK(bytes(For::tasks) < both);
    CHECK(bytes(For::evaluation) < both);
}

TEST_CASE("mistakes with tasks are found before the model is read", "[cli]") {
    const Tasks tasks;
    const std::string file = tasks.directory / "choice.jsonl";
    write(file, read(file) + "{\"query\": \"q\"}\n");
    check_refused(train_gpt_with({"eval", "nowhere", "--tasks", file}), 1,
                  {file, "line 11", "\"choices\""});
    const std::string none = tasks.directory / "none.jsonl";
    check_refused(train_gpt_with({"eval", finished_run(), "--tasks", none}), 1, {none});
    check_refused(train_gpt_with({"eval", finished_run(), "--tasks", "data/core/*.jsonl"}), 1,
                  {"scripts/data.sh core"});
    check_refused(train_gpt_with({"eval", finished_run(), "--items", none}), 2, {"--tasks"});
    check_refused(train_gpt_with({"eval", "test/fixtures/gpt2-tiny", "--tasks",
                                  tasks.directory / "text.jsonl"}),
                  1, {"tokenizer"});
    const std::string run = tasks.directory / "run";
    check_refused(train_gpt_with(Workplace::get().train(
                      run, {"--set", "evaluation.tasks=[\"" + none + "\", \"" + file + "\"]"})),
                  1, {none});
    check_refused(
        train_gpt_with(Workplace::get().train(run, {"--set", "evaluation.tasks=" + file})), 1,
        {"line 11"});
    check_refused(train_gpt_with(Workplace::get().train(
                      run, {"--set", "data.val=", "--set", "evaluation.tasks=" + file})),
                  1, {"evaluation.tasks", "data.val"});
    check_refused(train_gpt_with(Workplace::get().train(run, {"--set", "evaluation.tasks=[3]"})), 1,
                  {"evaluation.tasks", "a list of texts"});
}

TEST_CASE("a run scores tasks with each evaluation, as eval does", "[cli][cuda]") {
    const Tasks tasks;
    const std::string run = tasks.directory / "run", a = tasks.directory / "choice.jsonl",
                      b = tasks.directory / "text.jsonl";
    const Arguments more{"--set", concat("evaluation.tasks=[\"", a, "\",\"", b, "\"]"),
                         "--set", "evaluation.task_items=6",
                         "--set", "evaluation.every=2",
                         "--set", "log.tensorboard=true",
                         "--set", "schedule.steps=4"};
    const Outcome trained = check_succeeds(train_gpt_with(Workplace::get().train(run, more)));
    CHECK(contains(trained.out, "; choice 0."));
    std::vector<SortedJson> evaluations;
    for (const SortedJson& line : metrics_of(run))
        if (line.contains("task/choice/accuracy")) evaluations.push_back(line);
    REQUIRE(evaluations.size() == 2);
    CHECK(evaluations[0]["step"] == 2);
    const SortedJson last =
        SortedJson::parse(check_succeeds(train_gpt_with({"eval", run, "--json", "--tasks", a, b,
                                                         "--max-examples", "6"}))
                              .out);
    for (const size_t i : {0, 1}) {
        const SortedJson& task = last["tasks"][i];
        const std::string name = "task/" + task["task"].get<std::string>();
        for (const auto& [field, key] : {std::pair{"/accuracy", "accuracy"},
                                         {"/stderr", "accuracy_stderr"},
                                         {"/bits_per_byte", "bits_per_byte"}})
            CHECK(evaluations[1][name + field].get<double>() ==
                  Approx(task[key].get<double>()).epsilon(1e-5).margin(1e-9));
    }
    const std::string page = read(run + "/report.html");
    for (const char* part : {"Tasks, last", "\"task/choice\"", "\"task/choice/low\"", " ± "})
        CHECK(contains(page, part));
    // A run that has no tasks any more continues.
    check_succeeds(train_gpt_with(Workplace::get().train(
        run, more + Arguments{"--set", "evaluation.tasks=", "--set", "schedule.steps=5"})));
}
