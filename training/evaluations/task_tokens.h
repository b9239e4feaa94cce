// The tokens of a task's items: prompts with their solved examples, and where the answers begin.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "tokenizer/tokenizer.h"
#include "training/evaluations/task_file.h"

namespace train_gpt {

/// A prompt with one of its answers.
struct AnswerTokens {
    std::vector<int32_t> tokens;
    /// The tokens from here on decide between answers; at least 1, at most tokens.size().
    size_t scored_from = 1;
    /// The tokens from here on are the answer; not above tokens.size(). With the procedure `core`
    /// some tokens of the answer may be shared by all choices, and decide nothing.
    size_t answer_from = 1;
};

class TaskTokens {
  public:
    /// `task` and `tokenizer` must live longer. most_tokens: how many tokens the model takes; a
    /// prompt that is longer loses its beginning. Throws Error if the prompts need a token that
    /// begins a text, and the tokenizer has none.
    TaskTokens(const Task& task, const Tokenizer& tokenizer, int most_tokens);

    /// One for each answer of the item that is scored. Throws Error for a token that is not below
    /// vocab_size.
    std::vector<AnswerTokens> answers(size_t item, int64_t vocab_size) const;

    /// The text before an answer and the answer's text, as a prompt has them.
    struct Text {
        std::string context, answer;
    };
    /// The texts of the item's answers.
    std::vector<Text> texts(size_t item) const;

  private:
    std::string shots(size_t item) const;
    std::vector<int32_t> encode(const std::string& text, bool begins) const;
    AnswerTokens harness_answer(Text text) const;
    std::vector<AnswerTokens> core_answers(const std::vector<Text>& texts) const;
    void shorten(AnswerTokens& answer) const;

    const Task& task_;
    const Tokenizer& tokenizer_;
    size_t most_tokens_;          // of a prompt with its answer
    std::vector<int32_t> begin_;  // of every prompt
};

}  // namespace train_gpt
