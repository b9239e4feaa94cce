#include "tokenizer/bpe_train.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "tokenizer/byte_alphabet.h"

namespace train_gpt {

namespace {

/// The different pieces of all texts as sequences of tokens, with how often each occurs.
class Words {
  public:
    Words(std::span<const std::string_view> texts, Pattern pattern,
          const std::vector<uint32_t>& byte_ids) {
        std::unordered_map<std::string_view, uint32_t> word_of;
        std::vector<std::string_view> pieces;
        for (std::string_view text : texts) {
            while (!text.empty()) {
                const std::string_view piece = text.substr(0, first_piece(pattern, text));
                text.remove_prefix(piece.size());
                const auto [found, is_new] =
                    word_of.try_emplace(piece, static_cast<uint32_t>(pieces.size()));
                if (is_new) {
                    pieces.push_back(piece);
                    words_.push_back({});
                }
                ++words_[found->second].count;
            }
        }
        for (size_t i = 0; i < pieces.size(); ++i) {
            words_[i].begin = tokens_.size();
            words_[i].length = pieces[i].size();
            for (const char byte : pieces[i])
                tokens_.push_back(byte_ids[static_cast<uint8_t>(byte)]);
        }
    }

    uint32_t size() const { return static_cast<uint32_t>(words_.size()); }
    int64_t count(uint32_t word) const { return words_[word].count; }
    std::span<const uint32_t> tokens(uint32_t word) const {
        return {tokens_.data() + words_[word].begin, words_[word].length};
    }

    /// Replaces the pair by its result wherever it stands in the word, from left to right. Reports
    /// each neighbouring pair that comes (+1) and goes (-1) as change(left, right, by). The merged
    /// pair itself is not reported.
    template <class Change>
    void apply(uint32_t word, const Merge& merge, Change&& change) {
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
            if (to > 0) {
                change(tokens[to - 1], merge.left, -1);
                change(tokens[to - 1], merge.result, +1);
            }
            from += 2;
            if (from < length) {
                change(merge.right, tokens[from], -1);
                change(merge.result, tokens[from], +1);
            }
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

/// The counts of all adjacent pairs, and a queue of those that may be merged. A queue entry is
/// right about the words its pair came up in, but its count may be out of date, which is found when
/// it reaches the top.
class PairQueue {
  public:
    struct Candidate {
        int64_t count;
        uint32_t left, right;
        uint32_t pair;   // index into pairs_
        uint32_t words;  // index into word_lists_
    };

    /// A pair occurs `by` times more (or less) in a word. Calls for one word come together.
    void change(uint32_t left, uint32_t right, uint32_t word, int64_t by) {
        const auto [found, is_new] =
            index_.try_emplace(uint64_t{left} << 32 | right, static_cast<uint32_t>(pairs_.size()));
        if (is_new) pairs_.push_back({left, right, 0, {}});
        Pair& pair = pairs_[found->second];
        pair.count += by;
        if (by <= 0) return;
        if (pair.new_words.empty()) changed_.push_back(found->second);
        if (pair.new_words.empty() || pair.new_words.back() != word) pair.new_words.push_back(word);
    }

    /// Queues the pairs that came up in words since the last call.
    void queue_changed() {
        for (const uint32_t index : changed_) {
            Pair& pair = pairs_[index];
            std::vector<uint32_t> words = std::exchange(pair.new_words, {});
            if (pair.count <= 0) continue;
            push({pair.count, pair.left, pair.right, index,
                  static_cast<uint32_t>(word_lists_.size())});
            word_lists_.push_back(std::move(words));
        }
        changed_.clear();
    }

    bool empty() const { return queue_.empty(); }

    /// Takes the most frequent pair; of equal counts the smaller (left, right). The queue must not
    /// be empty.
    Candidate pop() {
        for (;;) {
            std::pop_heap(queue_.begin(), queue_.end(), after);
            Candidate top = queue_.back();
            queue_.pop_back();
            const int64_t count = pairs_[top.pair].count;
            if (top.count == count) return top;
            top.count = count;
            push(top);
        }
    }

    /// The words a candidate's pair came up in (it may have gone from some since).
    std::vector<uint32_t> take_words(const Candidate& candidate) {
        return std::exchange(word_lists_[candidate.words], {});
    }

  private:
    struct Pair {
        uint32_t left, right;
        int64_t count;
        std::vector<uint32_t> new_words;  // since queue_changed()
    };

    static bool after(const Candidate& a, const Candidate& b) {
        if (a.count != b.count) return a.count < b.count;
        return std::pair(a.left, a.right) > std::pair(b.left, b.right);
    }
    void push(const Candidate& candidate) {
        queue_.push_back(candidate);
        std::push_heap(queue_.begin(), queue_.end(), after);
    }

    struct MixBits {
        size_t operator()(uint64_t key) const { return (key * 0x9E3779B97F4A7C15u) >> 16; }
    };
    std::unordered_map<uint64_t, uint32_t, MixBits>
        index_;  // left << 32 | right -> index into pairs_
    std::vector<Pair> pairs_;
    std::vector<uint32_t> changed_;
    std::vector<Candidate> queue_;
    std::vector<std::vector<uint32_t>> word_lists_;
};

}  // namespace

LearntMerges learn_merges(std::span<const std::string_view> texts, Pattern pattern,
                          uint32_t vocab_size, uint64_t min_frequency) {
    LearntMerges learnt;
    std::vector<uint32_t> byte_ids(256);
    for (int i = 0; i < 256; ++i) {
        byte_ids[byte_at(i)] = static_cast<uint32_t>(i);
        learnt.tokens.emplace_back(1, static_cast<char>(byte_at(i)));
    }

    Words words(texts, pattern, byte_ids);
    PairQueue queue;
    for (uint32_t word = 0; word < words.size(); ++word) {
        const auto tokens = words.tokens(word);
        for (size_t i = 0; i + 1 < tokens.size(); ++i)
            queue.change(tokens[i], tokens[i + 1], word, words.count(word));
    }
    queue.queue_changed();

    while (learnt.tokens.size() < vocab_size && !queue.empty()) {
        const PairQueue::Candidate top = queue.pop();
        if (top.count < 1 || static_cast<uint64_t>(top.count) < min_frequency) break;

        // These bytes are no token yet: wherever a string is merged into one token, the same merges
        // happen inside it in the same order, so that no second pair ever spells it.
        const uint32_t id = static_cast<uint32_t>(learnt.tokens.size());
        learnt.tokens.push_back(learnt.tokens[top.left] + learnt.tokens[top.right]);
        const Merge merge{top.left, top.right, id};
        learnt.merges.push_back(merge);

        for (const uint32_t word : queue.take_words(top))
            words.apply(word, merge, [&](uint32_t left, uint32_t right, int by) {
                queue.change(left, right, word, by * words.count(word));
            });
        queue.queue_changed();
    }
    return learnt;
}

}  // namespace train_gpt
