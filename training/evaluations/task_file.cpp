#include "training/evaluations/task_file.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "base/error.h"
#include "base/file.h"
#include "base/json_text.h"
#include "base/printable.h"
#include "dataloader/jsonl.h"
#include "training/config/known_data.h"
#include "training/config/nearest_key.h"
#include "training/evaluations/python_random.h"

namespace train_gpt {

namespace {

constexpr const char* header_shape =
    R"({"task": "arc_easy", "form": "multiple_choice", "procedure": "core", "shots": 10})";

constexpr TaskForm forms[] = {TaskForm::multiple_choice, TaskForm::schema,
                              TaskForm::language_modeling};

const char* shape_of(TaskForm form) {
    switch (form) {
        case TaskForm::multiple_choice:
            return R"({"query": text, "choices": [text, text, …], "gold": number})";
        case TaskForm::schema:
            return R"({"context_options": [text, text, …], "continuation": text, "gold": number})";
        case TaskForm::language_modeling:
            return R"({"context": text, "continuation": text})";
    }
    return "";
}

/// A place in a file, for errors.
class Place {
  public:
    Place(const std::filesystem::path& file, int64_t line) : file_(file.string()), line_(line) {}

    template <class... What>
    [[noreturn]] void refuse(const What&... what) const {
        throw Error(printable_line(file_), ", line ", line_, ": ", what...);
    }

  private:
    std::string file_;
    int64_t line_;
};

// ---- The header ---------------------------------------------------------------------------------

/// Reads the fields of a header, each of which takes its value or refuses it.
class HeaderReader {
  public:
    HeaderReader(Task& task, const Place& place) : task_(task), place_(place) {}

    void read(const Json& header);

  private:
    void take(const std::string& key, const Json& value);
    std::string text(const std::string& key, const Json& value) const {
        if (!value.is_string())
            place_.refuse("\"", key, "\" of the header must be a text, not ", shown(value));
        return value.get<std::string>();
    }
    static std::string shown(const Json& value) {
        constexpr size_t most = 60;
        std::string all = to_text(value);
        if (all.size() > most) all.replace(most, std::string::npos, "…");
        return printable_line(all);
    }
    void take_name(const std::string& name);
    void take_form(const std::string& word);
    void take_procedure(const std::string& word);
    void take_shots(const Json& value);
    void take_baseline(const Json& value);

    Task& task_;
    const Place& place_;
    bool has_form_ = false;
};

/// Names are parts of the names of metrics.
void HeaderReader::take_name(const std::string& name) {
    const auto fits = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               c == '_' || c == '-' || c == '.';
    };
    if (name.empty() || name.size() > 100 || !std::ranges::all_of(name, fits))
        place_.refuse("the task's name \"", printable_line(name.substr(0, 120)),
                      "\" must be of letters, digits, \"_\", \"-\" and \".\"; give it in \"task\" "
                      "of the header");
    task_.name = name;
}

void HeaderReader::take_form(const std::string& word) {
    for (const TaskForm form : forms)
        if (word == name_of(form)) {
            task_.form = form;
            has_form_ = true;
            return;
        }
    place_.refuse("there is no form \"", printable_line(word),
                  "\"; \"form\" is multiple_choice, schema or language_modeling");
}

void HeaderReader::take_procedure(const std::string& word) {
    for (const TaskProcedure procedure : {TaskProcedure::core, TaskProcedure::harness})
        if (word == name_of(procedure)) {
            task_.procedure = procedure;
            return;
        }
    place_.refuse("there is no procedure \"", printable_line(word),
                  "\"; \"procedure\" is core (nanochat's) or harness (lm-evaluation-harness's)");
}

void HeaderReader::take_shots(const Json& value) {
    constexpr int64_t most = 1000;
    if (!value.is_number_integer() || value.get<double>() < 0 || value.get<double>() > most)
        place_.refuse("\"shots\" of the header must be a whole number from 0 to ", most, ", not ",
                      shown(value));
    task_.shots = value.get<int>();
}

void HeaderReader::take_baseline(const Json& value) {
    if (!value.is_number() || !(value.get<double>() >= 0 && value.get<double>() < 100))
        place_.refuse(
            "\"baseline\" of the header must be the accuracy of guessing in percent, "
            "from 0 to below 100, not ",
            shown(value));
    task_.baseline = value.get<double>();
    task_.has_baseline = true;
}

TaskItem read_item(TaskForm form, const Json& json, const Place& place);

void HeaderReader::take(const std::string& key, const Json& value) {
    if (key == "task") return take_name(text(key, value));
    if (key == "form") return;  // is read first
    if (key == "procedure") return take_procedure(text(key, value));
    if (key == "shots") return take_shots(value);
    if (key == "baseline") return take_baseline(value);
    if (key == "note") return;  // for people
    if (key == "delimiter") {
        task_.delimiter = text(key, value);
    } else if (key == "separator") {
        task_.separator = text(key, value);
    } else if (key == "begin") {
        if (!value.is_boolean())
            place_.refuse("\"begin\" of the header must be true or false, not ", shown(value));
        task_.begin = value.get<bool>() ? Task::Begin::yes : Task::Begin::no;
    } else if (key == "examples") {
        if (!value.is_array())
            place_.refuse("\"examples\" of the header must be a list of items, not ", shown(value));
        for (const Json& example : value)
            task_.examples.push_back(read_item(task_.form, example, place_));
    } else {
        const std::string near =
            nearest_name(key, {"task", "form", "procedure", "shots", "delimiter", "separator",
                               "begin", "baseline", "examples", "note"});
        place_.refuse("the header has an unknown field \"", printable_line(key.substr(0, 60)), "\"",
                      near.empty() ? "" : concat("; did you mean \"", near, "\"?"));
    }
}

void HeaderReader::read(const Json& header) {
    if (!header.contains("form"))
        place_.refuse("a task's first line is a header that gives its form, such as ", header_shape,
                      "; this line has no \"form\"");
    take_form(text("form", header["form"]));
    for (const auto& [key, value] : header.items()) take(key, value);
    if (task_.name.empty()) take_name(task_.file.stem().string());
    if (!task_.examples.empty() && std::ssize(task_.examples) < task_.shots)
        place_.refuse("the header asks for ", task_.shots, " shots, but its \"examples\" are only ",
                      task_.examples.size());
}

// ---- Items --------------------------------------------------------------------------------------

/// Reads the fields of an item.
class ItemReader {
  public:
    ItemReader(TaskForm form, const Json& json, const Place& place)
        : form_(form), json_(json), place_(place) {}

    TaskItem read() const {
        if (!json_.is_object()) refuse("is not a JSON object");
        switch (form_) {
            case TaskForm::multiple_choice:
                return with_gold({.contexts = {text("query")}, .answers = texts("choices")});
            case TaskForm::schema:
                return with_gold(
                    {.contexts = texts("context_options"), .answers = {answer("continuation")}});
            case TaskForm::language_modeling:
                break;
        }
        return {.contexts = {text("context")}, .answers = {answer("continuation")}};
    }

  private:
    template <class... What>
    [[noreturn]] void refuse(const What&... what) const {
        place_.refuse("this item ", what..., "; an item of the form ", name_of(form_), " is ",
                      shape_of(form_));
    }
    const Json& field(const char* key) const {
        if (!json_.contains(key)) refuse("has no \"", key, "\"");
        return json_[key];
    }
    std::string text(const char* key) const {
        const Json& value = field(key);
        if (!value.is_string()) refuse("has a \"", key, "\" that is not a text");
        return value.get<std::string>();
    }
    std::string answer(const char* key) const {
        std::string value = text(key);
        if (value.empty()) refuse("has an empty \"", key, "\", which nothing can score");
        return value;
    }
    std::vector<std::string> texts(const char* key) const {
        const Json& list = field(key);
        if (!list.is_array() || list.size() < 2)
            refuse("has \"", key, "\" that are not a list of at least 2 texts");
        std::vector<std::string> all;
        for (const Json& value : list) {
            if (!value.is_string()) refuse("has \"", key, "\" that are not all texts");
            all.push_back(value.get<std::string>());
            if (all.back().empty() && form_ == TaskForm::multiple_choice)
                refuse("has an empty text among its \"", key, "\", which nothing can score");
        }
        return all;
    }
    TaskItem with_gold(TaskItem item) const {
        const size_t n = std::max(item.contexts.size(), item.answers.size());
        const Json& gold = field("gold");
        if (!gold.is_number_integer() || gold.get<double>() < 0 ||
            gold.get<double>() >= static_cast<double>(n))
            refuse("has a \"gold\" that is not a number from 0 to ", n - 1,
                   ", the place of the right one in its list");
        item.gold = gold.get<size_t>();
        return item;
    }

    TaskForm form_;
    const Json& json_;
    const Place& place_;
};

TaskItem read_item(TaskForm form, const Json& json, const Place& place) {
    return ItemReader(form, json, place).read();
}

Json object_in(std::string_view line, const Place& place) {
    Json json = try_parse_json(line);
    if (json.is_discarded())
        place.refuse("this line is not valid JSON; a task has one JSON object in each line");
    if (!json.is_object())
        place.refuse("this line is not a JSON object; a task has one JSON object in each line");
    return json;
}

void require_enough_for_shots(const Task& task) {
    if (!task.examples.empty() || task.shots < task.size() || task.shots == 0) return;
    throw Error(printable_line(task.file.string()), " asks for ", task.shots,
                " shots, which are drawn from the other items, but there are only ",
                task.size() - 1,
                " others; lower \"shots\" in its header, evaluate more items, or "
                "give \"examples\" in the header");
}

}  // namespace

const char* name_of(TaskForm form) {
    switch (form) {
        case TaskForm::multiple_choice:
            return "multiple_choice";
        case TaskForm::schema:
            return "schema";
        case TaskForm::language_modeling:
            return "language_modeling";
    }
    return "";
}

const char* name_of(TaskProcedure procedure) {
    return procedure == TaskProcedure::core ? "core" : "harness";
}

Task read_task(const std::filesystem::path& path, int64_t most_items) {
    const MappedFile file(path);
    Task task{.file = path};
    std::string_view rest = file.text();
    if (rest.starts_with("\xef\xbb\xbf")) rest.remove_prefix(3);
    bool has_header = false;
    for (int64_t number = 1; !rest.empty(); ++number) {
        const std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(rest.size(), line.size() + 1));
        if (is_blank(line)) continue;
        const Place place(path, number);
        const Json json = object_in(line, place);
        if (has_header) {
            task.items.push_back(read_item(task.form, json, place));
            task.items.back().line = number;
        } else {
            HeaderReader(task, place).read(json);
            has_header = true;
        }
    }
    if (task.items.empty())
        throw Error(printable_line(path.string()), " has no items",
                    has_header ? " after its header" : "", "; check the path");
    if (task.procedure == TaskProcedure::core) PythonRandom(1337).shuffle(task.items);
    if (most_items > 0 && task.size() > most_items)
        task.items.resize(static_cast<size_t>(most_items));
    require_enough_for_shots(task);
    return task;
}

std::vector<Task> read_tasks(const std::vector<std::string>& globs, int64_t most_items) {
    std::vector<Task> tasks;
    std::map<std::string, std::string> files;  // by the task's name
    for (const std::string& glob : globs) {
        require_made(glob);
        for (const std::filesystem::path& file : glob_files(glob)) {
            Task task = read_task(file, most_items);
            const auto [first, is_new] = files.emplace(task.name, file.string());
            if (!is_new && first->second == file.string()) continue;  // two globs match it
            if (!is_new)
                throw Error("the tasks in ", printable_line(first->second), " and ",
                            printable_line(file.string()), " have the same name, ", task.name,
                            "; give one of them another \"task\" in its header");
            tasks.push_back(std::move(task));
        }
    }
    return tasks;
}

}  // namespace train_gpt
