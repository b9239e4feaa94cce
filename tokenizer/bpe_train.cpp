#include "tokenizer/bpe_train.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "base/error.h"
#include "tokenizer/byte_alphabet.h"

// A new pair of tokens can appear in one step only: the one that creates the newer of its two
// tokens. Pairs of bytes appear at the start. After that, a pair can only become rarer. So each
// pair has one list of the words in which it appeared, written once, and later steps look a pair up
// only to subtract from its count.

namespace train_gpt {

namespace {

constexpr uint32_t none = UINT32_MAX;

/// The distinct pieces as sequences of tokens, with the number of times each occurs.
class Words {
  public:
    Words(const WordCounts& counts, const std::array<uint32_t, 256>& byte_ids) {
        if (counts.size() >= none) throw Error("2^32 different words are too many; use less text");
        words_.reserve(counts.size());
        counts.for_each([&](std::string_view piece, uint64_t count) {
            words_.push_back({tokens_.size(), piece.size(), static_cast<int64_t>(count)});
            for (const char byte : piece) tokens_.push_back(byte_ids[static_cast<uint8_t>(byte)]);
        });
    }

    uint32_t size() const { return static_cast<uint32_t>(words_.size()); }
    int64_t count(uint32_t word) const { return words_[word].count; }
    std::span<const uint32_t> tokens(uint32_t word) const {
        return {tokens_.data() + words_[word].begin, words_[word].length};
    }

    /// Replaces every occurrence of the pair in the word by its result, from left to right. For
    /// each, calls before(token) with the token before the result (possibly also a result), and
    /// after(token) with the token after it, which is not merged yet.
    template <class Before, class After>
    void apply(uint32_t word, const Merge& merge, Before&& before, After&& after) {
        uint32_t* const tokens = tokens_.data() + words_[word].begin;
        const size_t length = words_[word].length;
        size_t to = 0;
        for (size_t from = 0; from < length; ++to) {
            const bool matches =
                from + 1 < length && tokens[from] == merge.left && tokens[from + 1] == merge.right;
            if (!matches) {
                tokens[to] = tokens[from++];
                continue;
            }
            from += 2;
            if (to > 0) before(tokens[to - 1]);
            if (from < length) after(tokens[from]);
            tokens[to] = merge.result;
        }
        words_[word].length = to;
    }

  private:
    struct Word {
        size_t begin = 0, length = 0;  // in tokens_
        int64_t count = 0;
    };
    std::vector<Word> words_;
    std::vector<uint32_t> tokens_;
};

/// The words in which a pair appeared, as a range of one long list. The pair may since have
/// disappeared from some of them.
struct WordList {
    size_t begin = 0;
    uint32_t size = 0;
};

/// The changes that one step makes to a group of pairs. An index identifies each pair, such as one
/// of its tokens.
class ChangedPairs {
  public:
    explicit ChangedPairs(size_t indices) : pairs_(indices) {}

    /// The pair occurs `by` times more (fewer if negative).
    void change(uint32_t index, int64_t by) {
        Pair& pair = pairs_[index];
        if (!pair.changed) changed_.push_back(index);
        pair.changed = true;
        pair.count += by;
    }

    /// The pair occurs `by` times more, in this word. Calls for the same word must be consecutive.
    void come(uint32_t index, int64_t by, uint32_t word) {
        change(index, by);
        Pair& pair = pairs_[index];
        if (pair.last_word == word) return;
        pair.last_word = word;
        ++pair.words.size;
        occurrences_.push_back({index, word});
    }

    /// Appends the words in which pairs appeared to `words`, calls visit(index, change, list of
    /// words) for each pair that changed, and forgets the changes.
    template <class Visit>
    void take(std::vector<uint32_t>& words, Visit&& visit) {
        size_t end = words.size();
        for (const uint32_t index : changed_) {
            pairs_[index].words.begin = end;
            end += std::exchange(pairs_[index].words.size, 0);
        }
        words.resize(end);
        for (const auto& [index, word] : occurrences_) {
            WordList& list = pairs_[index].words;
            words[list.begin + list.size++] = word;
        }
        for (const uint32_t index : changed_) {
            visit(index, pairs_[index].count, pairs_[index].words);
            pairs_[index] = {};
        }
        changed_.clear();
        occurrences_.clear();
    }

  private:
    struct Pair {
        int64_t count = 0;
        WordList words;
        uint32_t last_word = none;
        bool changed = false;
    };
    std::vector<Pair> pairs_;
    std::vector<uint32_t> changed_;
    std::vector<std::pair<uint32_t, uint32_t>> occurrences_;  // index and word
};

/// The pairs that may still be merged: their current counts, and a priority queue. Counts in the
/// queue may be out of date; they are corrected when they reach the top.
class PairQueue {
  public:
    struct Candidate {
        int64_t count;
        uint32_t left, right;
        WordList words;
    };

    /// Adds a pair that was never added before.
    void insert(const Candidate& pair) {
        if (2 * ++pairs_ > counts_.size()) grow();
        counts_[slot_of(key_of(pair))] = {key_of(pair), pair.count};
        push(pair);
    }

    /// Lowers a pair's count by `by`. Does nothing if the pair was never added.
    void subtract(uint32_t left, uint32_t right, int64_t by) {
        const uint64_t pair = uint64_t{left} << 32 | right;
        if (Count& known = counts_[slot_of(pair)]; known.pair == pair) known.count -= by;
    }

    bool empty() const { return queue_.empty(); }

    /// Removes and returns the most frequent pair; among equal counts, the smallest (left, right).
    /// The queue must not be empty.
    Candidate pop() {
        for (;;) {
            std::pop_heap(queue_.begin(), queue_.end(), after);
            Candidate top = queue_.back();
            queue_.pop_back();
            const int64_t count = counts_[slot_of(key_of(top))].count;
            if (top.count == count) return top;
            top.count = count;
            push(top);
        }
    }

  private:
    static constexpr uint64_t no_pair = UINT64_MAX;
    struct Count {
        uint64_t pair = no_pair;  // left << 32 | right
        int64_t count = 0;
    };

    static uint64_t key_of(const Candidate& pair) { return uint64_t{pair.left} << 32 | pair.right; }
    static bool after(const Candidate& a, const Candidate& b) {
        return a.count != b.count ? a.count < b.count : key_of(a) > key_of(b);
    }
    void push(const Candidate& candidate) {
        queue_.push_back(candidate);
        std::push_heap(queue_.begin(), queue_.end(), after);
    }
    /// Where a pair's count is, or would go.
    size_t slot_of(uint64_t pair) const {
        const uint64_t mixed = pair * 0x9E3779B97F4A7C15u;  // Fibonacci hashing
        size_t slot = mixed >> 32;
        while (true) {
            slot &= counts_.size() - 1;
            if (counts_[slot].pair == pair || counts_[slot].pair == no_pair) return slot;
            ++slot;
        }
    }
    void grow() {
        std::vector<Count> old(2 * counts_.size());
        old.swap(counts_);
        for (const Count& count : old)
            if (count.pair != no_pair) counts_[slot_of(count.pair)] = count;
    }

    std::vector<Count> counts_ = std::vector<Count>(1 << 10);  // open addressing, half free
    size_t pairs_ = 0;
    std::vector<Candidate> queue_;
};

}  // namespace

LearntMerges learn_merges(const WordCounts& counts, uint32_t vocab_size, uint64_t min_frequency) {
    LearntMerges learnt;
    std::array<uint32_t, 256> byte_ids;
    for (int i = 0; i < 256; ++i) {
        byte_ids[byte_at(i)] = static_cast<uint32_t>(i);
        learnt.tokens.emplace_back(1, static_cast<char>(byte_at(i)));
    }

    Words words(counts, byte_ids);
    PairQueue queue;
    std::vector<uint32_t> word_lists;
    const auto insert = [&](uint32_t left, uint32_t right, int64_t count, const WordList& list) {
        // Counts never grow, so a pair that is too rare now stays too rare.
        if (count > 0 && static_cast<uint64_t>(count) >= min_frequency)
            queue.insert({count, left, right, list});
    };
    {
        ChangedPairs pairs_of_bytes(256 * 256);
        for (uint32_t word = 0; word < words.size(); ++word) {
            const auto tokens = words.tokens(word);
            for (size_t i = 0; i + 1 < tokens.size(); ++i)
                pairs_of_bytes.come(tokens[i] * 256 + tokens[i + 1], words.count(word), word);
        }
        pairs_of_bytes.take(word_lists, [&](uint32_t pair, int64_t count, const WordList& list) {
            insert(pair / 256, pair % 256, count, list);
        });
    }

    // Indexed by the token before or after the merged pair: the pairs of that token with the
    // result, which are new, and with the left or right part, which disappear.
    ChangedPairs with_result_before(vocab_size), with_result_after(vocab_size);
    ChangedPairs with_left(vocab_size), with_right(vocab_size);
    while (learnt.tokens.size() < vocab_size && !queue.empty()) {
        const PairQueue::Candidate top = queue.pop();
        if (top.count < 1 || static_cast<uint64_t>(top.count) < min_frequency) break;

        // These bytes are not a token yet: wherever a string is merged into one token, the same
        // merges happen inside it in the same order, so no second pair ever has the same bytes.
        const uint32_t id = static_cast<uint32_t>(learnt.tokens.size());
        learnt.tokens.push_back(learnt.tokens[top.left] + learnt.tokens[top.right]);
        const Merge merge{top.left, top.right, id};
        learnt.merges.push_back(merge);

        for (uint32_t i = 0; i < top.words.size; ++i) {
            const uint32_t word = word_lists[top.words.begin + i];
            const int64_t count = words.count(word);
            const auto before = [&](uint32_t token) {
                if (token == id)  // also a result: undo the pair that after() counted for it
                    with_result_after.change(merge.left, -count);
                else
                    with_left.change(token, count);
                with_result_before.come(token, count, word);
            };
            const auto after = [&](uint32_t token) {
                with_right.change(token, count);
                with_result_after.come(token, count, word);
            };
            words.apply(word, merge, before, after);
        }

        with_left.take(word_lists, [&](uint32_t token, int64_t count, const WordList&) {
            queue.subtract(token, merge.left, count);
        });
        with_right.take(word_lists, [&](uint32_t token, int64_t count, const WordList&) {
            queue.subtract(merge.right, token, count);
        });
        with_result_before.take(word_lists,
                                [&](uint32_t token, int64_t count, const WordList& list) {
                                    insert(token, id, count, list);
                                });
        with_result_after.take(word_lists,
                               [&](uint32_t token, int64_t count, const WordList& list) {
                                   insert(id, token, count, list);
                               });
    }
    return learnt;
}

}  // namespace train_gpt
