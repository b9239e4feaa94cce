// A setting that is one of a few words, such as "cosine". A word is parsed when it is assigned.
// From then on the setting is a value of its type.
#pragma once
#include <concepts>
#include <optional>
#include <string_view>

#include "base/error.h"

namespace train_gpt {

template <class Value>
struct Word {
    const char* word;
    Value value;
};

/// The words for the values of a type, in the order in which people read them:
///   static constexpr Word<Value> list[] = {{"cosine", Decay::cosine}, …};
template <class Value>
struct WordsOf;

template <class Value>
class OneOf {
  public:
    constexpr OneOf() = default;
    constexpr OneOf(Value value) : value_(value) {}
    /// Assigns a value. Not for text literals, even if they convert to the value's type, as to
    /// bool: a literal is a word.
    template <class From>
    requires(std::convertible_to<From, Value> &&
             !std::convertible_to<From, std::string_view>) OneOf&
    operator=(From value) {
        value_ = value;
        return *this;
    }
    /// Assigns a word's value. Throws Error if the text is not one of the words.
    OneOf& operator=(std::string_view word) {
        if (!parse(word)) throw Error("a setting cannot be \"", word, "\"");
        return *this;
    }

    operator Value() const { return value_; }
    friend bool operator==(const OneOf& a, const OneOf& b) { return a.value_ == b.value_; }
    friend bool operator==(const OneOf& a, const Value& b) { return a.value_ == b; }
    /// Whether the program chooses. Only for optional values: std::nullopt stands for "auto".
    bool is_auto() const { return value_ == std::nullopt; }

    const char* word() const {
        for (const Word<Value>& known : WordsOf<Value>::list)
            if (known.value == value_) return known.word;
        return "";  // no value is without a word
    }
    /// Assigns a word's value. Returns false, and changes nothing, if the text is not one of the
    /// words.
    bool parse(std::string_view word) {
        for (const Word<Value>& known : WordsOf<Value>::list)
            if (known.word == word) {
                value_ = known.value;
                return true;
            }
        return false;
    }

  private:
    Value value_{};
};

template <class T>
constexpr bool is_one_of = false;
template <class Value>
constexpr bool is_one_of<OneOf<Value>> = true;

}  // namespace train_gpt
