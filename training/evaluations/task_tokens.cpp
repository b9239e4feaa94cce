#include "training/evaluations/task_tokens.h"

#include <algorithm>
#include <string_view>

#include "base/error.h"
#include "base/printable.h"
#include "training/evaluations/python_random.h"
#include "training/evaluations/python_text.h"

namespace train_gpt {

namespace {

size_t common_prefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    return static_cast<size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
}

size_t common_suffix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    const auto ends = std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend());
    return static_cast<size_t>(ends.first - a.rbegin());
}

}  // namespace

TaskTokens::TaskTokens(const Task& task, const Tokenizer& tokenizer, int most_tokens)
    : task_(task),
      tokenizer_(tokenizer),
      // A model of T tokens predicts T tokens. nanochat takes T, the harness one more.
      most_tokens_(static_cast<size_t>(most_tokens) +
                   (task.procedure == TaskProcedure::harness ? 1 : 0)) {
    const bool begins = task.begin == Task::Begin::yes ||
                        (task.begin == Task::Begin::by_procedure &&
                         (task.procedure == TaskProcedure::core || tokenizer.begin_of_text()));
    if (!begins) return;
    if (!tokenizer.document_boundary())
        throw Error(printable_line(task.file.string()),
                    ": prompts begin with a token that begins a text, but the tokenizer has "
                    "neither such a token nor one that ends a text; set \"begin\": false in the "
                    "header");
    begin_ = {static_cast<int32_t>(*tokenizer.document_boundary())};
}

std::string TaskTokens::shots(size_t item) const {
    std::vector<const TaskItem*> examples;
    if (!task_.examples.empty()) {
        for (int i = 0; i < task_.shots; ++i)
            examples.push_back(&task_.examples[static_cast<size_t>(i)]);
    } else if (task_.shots > 0) {
        PythonRandom random(1234 + item);
        for (const size_t other :
             random.sample(task_.items.size() - 1, static_cast<size_t>(task_.shots)))
            examples.push_back(&task_.items[other + (other >= item ? 1 : 0)]);
    }
    std::string text;
    for (const TaskItem* example : examples) {
        const std::string& context =
            example->contexts[example->contexts.size() > 1 ? example->gold : 0];
        const bool trims =
            task_.form == TaskForm::language_modeling && task_.procedure == TaskProcedure::core;
        text += trims ? std::string(python_strip(context)) : context;
        text += task_.delimiter;
        text += example->answers[example->answers.size() > 1 ? example->gold : 0];
        text += task_.separator;
    }
    return text;
}

std::vector<TaskTokens::Text> TaskTokens::texts(size_t number) const {
    const TaskItem& item = task_.items[number];
    const std::string examples = shots(number);
    const bool trims =
        task_.form == TaskForm::language_modeling && task_.procedure == TaskProcedure::core;
    std::vector<Text> texts(task_.choices(item));
    for (size_t i = 0; i < texts.size(); ++i) {
        const std::string_view context = item.contexts[item.contexts.size() > 1 ? i : 0];
        texts[i].context = examples + std::string(trims ? python_strip(context) : context);
        texts[i].answer = task_.delimiter + item.answers[item.answers.size() > 1 ? i : 0];
    }
    return texts;
}

std::vector<int32_t> TaskTokens::encode(const std::string& text, bool begins) const {
    std::vector<int32_t> tokens;
    if (begins) tokens = begin_;
    for (const uint32_t token : tokenizer_.encode(text))
        tokens.push_back(static_cast<int32_t>(token));
    return tokens;
}

/// The answer's tokens are the tokens of context and answer that follow as many as the context
/// alone has.
AnswerTokens TaskTokens::harness_answer(Text text) const {
    const bool has_context = !text.context.empty();
    const size_t spaces_at = python_rstrip(text.context).size();
    text.answer = text.context.substr(spaces_at) + text.answer;
    text.context.resize(spaces_at);
    std::vector<int32_t> tokens = encode(text.context, has_context);
    std::vector<int32_t> all = encode(text.context + text.answer, has_context);
    if (all.size() <= tokens.size()) {
        const std::vector<int32_t> alone = encode(text.answer, false);
        all = tokens;
        all.insert(all.end(), alone.begin(), alone.end());
    }
    all.erase(all.begin(), all.begin() + std::ssize(tokens));
    if (tokens.empty()) {  // something must predict the first token
        const auto first = static_cast<int32_t>(tokenizer_.encode_beginning("").front());
        if (first != all.front() || all.size() == 1) all.insert(all.begin(), first);
        tokens.push_back(all.front());
        all.erase(all.begin());
    }
    const size_t from = tokens.size();
    tokens.insert(tokens.end(), all.begin(), all.end());
    return {.tokens = std::move(tokens), .scored_from = from, .answer_from = from};
}

std::vector<AnswerTokens> TaskTokens::core_answers(const std::vector<Text>& texts) const {
    std::vector<AnswerTokens> answers;
    for (const Text& text : texts) {
        AnswerTokens& answer = answers.emplace_back();
        answer.tokens = encode(text.context + text.answer, true);
        // Trailing spaces would be a part of the answer's first token.
        const std::string before = text.context + task_.delimiter;
        const std::string_view prompt = task_.form == TaskForm::language_modeling
                                            ? python_strip(before)
                                            : python_rstrip(before);
        answer.answer_from = common_prefix(encode(std::string(prompt), true), answer.tokens);
    }
    size_t shared = answers[0].tokens.size();
    for (const AnswerTokens& answer : answers)
        shared = std::min(shared, task_.form == TaskForm::schema
                                      ? common_suffix(answers[0].tokens, answer.tokens)
                                      : common_prefix(answers[0].tokens, answer.tokens));
    for (AnswerTokens& answer : answers)
        answer.scored_from = task_.form == TaskForm::schema ? answer.tokens.size() - shared
                             : task_.form == TaskForm::multiple_choice ? shared
                                                                       : answer.answer_from;
    return answers;
}

void TaskTokens::shorten(AnswerTokens& answer) const {
    const size_t size = answer.tokens.size();
    const size_t dropped = size > most_tokens_ ? size - most_tokens_ : 0;
    answer.tokens.erase(answer.tokens.begin(),
                        answer.tokens.begin() + static_cast<std::ptrdiff_t>(dropped));
    // Nothing predicts the first token.
    for (size_t* from : {&answer.scored_from, &answer.answer_from})
        *from = std::max(*from, dropped + 1) - dropped;
}

std::vector<AnswerTokens> TaskTokens::answers(size_t item, int64_t vocab_size) const {
    const std::vector<Text> all = texts(item);
    std::vector<AnswerTokens> answers;
    if (task_.procedure == TaskProcedure::core)
        answers = core_answers(all);
    else
        for (const Text& text : all) answers.push_back(harness_answer(text));
    for (AnswerTokens& answer : answers) {
        shorten(answer);
        const int32_t largest = std::ranges::max(answer.tokens);
        if (largest >= vocab_size)
            throw Error("the tokenizer has token ", largest, ", but the model knows only ",
                        vocab_size, "; use the tokenizer that the model was trained with");
    }
    return answers;
}

}  // namespace train_gpt
