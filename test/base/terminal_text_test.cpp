// Messages on a terminal: broken at words, and commands on lines of their own.
#include "base/terminal_text.h"

#include <sstream>
#include <string>
#include <vector>

#include "base/text_table.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

namespace {

std::vector<std::string> words_of(const std::string& text) {
    std::istringstream in(text);
    std::vector<std::string> words;
    for (std::string word; in >> word;) words.push_back(word);
    return words;
}

std::string random_word() {
    constexpr const char* letters[] = {"a", "b", "é", "中", "𝛼", "0", "-", "/"};
    std::string word;
    for (int64_t n = random_int(1, 14); n > 0; --n) word += letters[random_int(0, 7)];
    return word;
}

}  // namespace

TEST_CASE("lines for a terminal have the same words, none too long unless one word is",
          "[terminal_text]") {
    for (int i = 0; i < 30; ++i) {
        const int columns = static_cast<int>(random_int(8, 120));
        std::string text;
        for (int64_t lines = random_int(1, 6); lines > 0; --lines) {
            text += std::string(static_cast<size_t>(random_int(0, 4)), ' ');
            for (int64_t n = random_int(0, 40); n > 0; --n)
                text += random_word() + (random_int(0, 9) == 0 ? "    " : " ");
            text += lines > 1 ? "\n" : "end";
        }
        CAPTURE(columns, text);
        const std::string shown = text_for_terminal(text, columns);
        CAPTURE(shown);
        CHECK(words_of(shown) == words_of(text));
        std::istringstream lines(shown);
        for (std::string line; std::getline(lines, line);)
            if (width_of(line) > static_cast<size_t>(columns)) CHECK(words_of(line).size() <= 1);
    }
}

TEST_CASE("a file or pipe gets a text as it is, and a terminal one that fits", "[terminal_text]") {
    const std::string text =
        "a long line of words: train_gpt plan my.json --world 8; and more  \n x";
    CHECK(text_for_terminal(text, 0) == text);
    for (const char* fits : {"", "\n", "a b", "a b\n\n  c", "  a   b\n"})
        CHECK(text_for_terminal(fits, 10) == fits);
}

TEST_CASE("a line is continued further in, or below its text", "[terminal_text]") {
    CHECK(text_for_terminal("one two three four", 9) == "one two\n  three\n  four");
    CHECK(text_for_terminal("  one two three", 9) == "  one two\n    three");
    CHECK(text_for_terminal("name      one two three four", 22) ==
          "name      one two\n          three four");
    CHECK(text_for_terminal("          one two three four", 22) ==
          "          one two\n          three four");
    CHECK(text_for_terminal("          one two three", 16) == "          one\n    two three");
    CHECK(text_for_terminal("aaaaaaaaaaaaaaa b", 6) == "aaaaaaaaaaaaaaa\n  b");
}

TEST_CASE("a suggested command has a line of its own and stays whole", "[terminal_text]") {
    CHECK(text_for_terminal("two runs are needed: train_gpt report A B --tolerance 0", 30) ==
          "two runs are needed:\n    train_gpt report A B --tolerance 0");
    CHECK(text_for_terminal("no data; get them with `scripts/data.sh tinystories`, or name others",
                            200) ==
          "no data; get them with\n    scripts/data.sh tinystories\nor name others");
    CHECK(text_for_terminal("x: mpirun -np 8 train_gpt train a.json; then y", 200) ==
          "x:\n    mpirun -np 8 train_gpt train a.json\nthen y");
    CHECK(text_for_terminal("to train: /a/train_gpt train llama-10m", 20) ==
          "to train:\n    /a/train_gpt train llama-10m");
    CHECK(text_for_terminal("there is no data yet; run scripts/data.sh arc", 15) ==
          "there is no\n  data yet; run\n    scripts/data.sh arc");
    CHECK(text_for_terminal("`train_gpt plan A --world 2`", 9) == "    train_gpt plan A --world 2");
    // Names of commands are words of a sentence.
    for (const char* sentence :
         {"make it again with `train_gpt tokenize`", "train_gpt: mpirun is not here",
          "the key `model.n_head` of `my file`", "x: `unfinished", "note: train_gpt reads it",
          "a rank: torchrun starts it", "see: scripts/data.sh"})
        CHECK(text_for_terminal(sentence, 200) == sentence);
}
