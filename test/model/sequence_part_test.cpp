// What context-parallel ranks have of sequences.
#include "model/sequence_part.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <vector>

#include "test/catch.h"
#include "test/random.h"

using namespace train_gpt;

namespace {

/// Whole sequences in the host's memory.
struct Whole {
    int ranks, B, T;
    std::vector<int32_t> tokens, targets, doc_start;

    Whole()
        : ranks(static_cast<int>(random_int(2, 5))),
          B(static_cast<int>(random_int(1, 3))),
          T(2 * ranks * static_cast<int>(random_int(1, 6))) {
        tokens.resize(static_cast<size_t>(B * T));
        std::iota(tokens.begin(), tokens.end(), 1000);  // all different
        for (int32_t token : tokens) targets.push_back(token + 1);
        for (int i = 0; i < B * T; ++i) {
            const int t = i % T;
            doc_start.push_back(t == 0 ? 0 : random_int(0, 5) == 0 ? t : doc_start.back());
        }
    }
    TokenBatch batch(bool documents) const {
        return {.tokens = tokens.data(),
                .targets = targets.data(),
                .doc_start = documents ? doc_start.data() : nullptr};
    }
};

/// A rank's part, and the memory that it is in.
class Part {
  public:
    Part(const Whole& whole, int rank, bool documents) : plan_(Arena::counting(Device{})) {
        const ContextRank place{rank, whole.ranks};
        SequencePart(plan_, place, whole.B, whole.T, documents);
        arena_.emplace(Device{}, plan_);
        part_ = SequencePart(*arena_, place, whole.B, whole.T, documents);
        Stream stream(Device{});
        part_.upload(stream, whole.batch(documents));
    }
    TokenBatch batch() const { return part_.on_device(); }

  private:
    Arena plan_;
    std::optional<Arena> arena_;
    SequencePart part_;
};

}  // namespace

TEST_CASE("each token is in one rank's part, at its position in its document", "[context]") {
    for (int repeat = 0; repeat < 40; ++repeat) {
        const Whole whole;
        const bool documents = repeat % 2 == 1;
        const int length = whole.T / (2 * whole.ranks), held = 2 * length;
        std::set<int32_t> seen;
        for (int rank = 0; rank < whole.ranks; ++rank) {
            const Part part(whole, rank, documents);
            const TokenBatch batch = part.batch();
            CHECK(bool(batch.doc_start) == documents);
            for (int i = 0; i < whole.B * held; ++i) {
                CAPTURE(whole.ranks, whole.B, whole.T, rank, i, documents);
                const int at = batch.tokens[i] - 1000, b = at / whole.T, t = at % whole.T;
                CHECK(seen.insert(at).second);
                CHECK(b == i / held);
                const int chunk = i % held / length;
                CHECK(t / length == (chunk ? 2 * whole.ranks - 1 - rank : rank));
                CHECK(batch.targets[i] == whole.targets[static_cast<size_t>(at)]);
                const int start = documents ? whole.doc_start[static_cast<size_t>(at)] : 0;
                CHECK(i % held - batch.position_start[i] == t - start);
                if (documents)
                    CHECK(batch.doc_start[(chunk * whole.B + b) * length + i % length] == start);
                CHECK(ContextRank{0, whole.ranks}.place_of(t, whole.T) ==
                      std::pair<int, int64_t>{rank, i % held});
            }
        }
        CHECK(std::ssize(seen) == whole.B * whole.T);
    }
}

TEST_CASE("ranks have equal parts of a causal sequence's work", "[context]") {
    for (int repeat = 0; repeat < 40; ++repeat) {
        const Whole whole;
        std::set<int64_t> pairs;  // of a query and a key that it sees
        for (int rank = 0; rank < whole.ranks; ++rank) {
            const Part part(whole, rank, false);
            int64_t seen = 0;
            for (int i = 0; i < whole.T / whole.ranks; ++i)
                seen += part.batch().tokens[i] - 1000 + 1;
            pairs.insert(seen);
        }
        CHECK(pairs.size() == 1);
    }
}

TEST_CASE("losses of all ranks are put together in the order of positions", "[context]") {
    for (int repeat = 0; repeat < 40; ++repeat) {
        const Whole whole;
        std::vector<float> parts, together(whole.tokens.size(), -1);
        for (int rank = 0; rank < whole.ranks; ++rank) {
            const Part part(whole, rank, false);
            for (int i = 0; i < whole.B * whole.T / whole.ranks; ++i)
                parts.push_back(static_cast<float>(part.batch().tokens[i]));
        }
        SequencePart::put_together(together.data(), parts.data(), whole.ranks, whole.B, whole.T);
        for (size_t i = 0; i < together.size(); ++i)
            CHECK(together[i] == static_cast<float>(whole.tokens[i]));
    }
}
