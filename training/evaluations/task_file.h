// Tasks that evaluate a language model: files of questions with their answers, in JSON Lines. The
// first line is a header, each further line an item. docs/evaluations.md describes the format.
#pragma once
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

namespace train_gpt {

enum class TaskForm {
    multiple_choice,   // {query, choices, gold}: which choice continues the query
    schema,            // {context_options, continuation, gold}: which context is continued so
    language_modeling  // {context, continuation}: is the continuation what the model writes
};

/// How items become tokens, and by what the model decides.
enum class TaskProcedure {
    core,    // nanochat's for CORE: items are shuffled; choices differ after the tokens that all of
             // them share; the lowest mean loss wins
    harness  // lm-evaluation-harness's: a choice is the tokens after the context's own tokens;
             // the lowest sum of losses wins
};

struct TaskItem {
    /// The query or the context; of a schema one for each choice.
    std::vector<std::string> contexts;
    /// The choices; of the other forms the continuation alone.
    std::vector<std::string> answers;
    size_t gold = 0;   // the right one
    int64_t line = 0;  // of the file
};

struct Task {
    std::filesystem::path file;
    std::string name = {};
    TaskForm form = TaskForm::multiple_choice;
    TaskProcedure procedure = TaskProcedure::harness;
    int shots = 0;                   // solved examples before each item
    std::string delimiter = " ";     // between a context and what follows it
    std::string separator = "\n\n";  // after each example
    /// Whether a token that begins a text begins the prompt; by default as the procedure has it.
    enum class Begin { by_procedure, yes, no } begin = Begin::by_procedure;
    double baseline = 0;  // the accuracy of guessing, in percent
    bool has_baseline = false;
    std::vector<TaskItem> examples = {};  // for the shots, in order; empty: drawn from the items
    std::vector<TaskItem> items = {};     // in the order of evaluation

    int64_t size() const { return std::ssize(items); }
    /// How many answers of an item are scored.
    size_t choices(const TaskItem& item) const {
        return form == TaskForm::schema ? item.contexts.size() : item.answers.size();
    }
};

const char* name_of(TaskForm form);
const char* name_of(TaskProcedure procedure);

/// Reads a task. most_items: as many items as are kept, after the procedure's shuffle; 0: all.
/// Throws Error if the file is not a task; the message names file and line, and says what is wrong.
Task read_task(const std::filesystem::path& file, int64_t most_items = 0);

/// The tasks of several files or globs, each of which must match. Throws Error as read_task() does,
/// and if two tasks have the same name.
std::vector<Task> read_tasks(const std::vector<std::string>& globs, int64_t most_items = 0);

}  // namespace train_gpt
