// What context-parallel ranks have of sequences, and where batches are for the model.
#include "model/token_batch.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>
#include <vector>

#include "device/copy.h"
#include "test/catch.h"
#include "test/kernels/test_device.h"
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
        const BatchShape shape{whole.B, whole.T, documents, {rank, whole.ranks}};
        DeviceBatch(plan_, shape, {});
        arena_.emplace(Device{}, plan_);
        memory_ = DeviceBatch(*arena_, shape, {});
        Stream stream(Device{});
        batch_ = memory_.upload(stream, whole.batch(documents));
    }
    const TokenBatch& batch() const { return batch_; }
    const DeviceBatch& memory() const { return memory_; }

  private:
    Arena plan_;
    std::optional<Arena> arena_;
    DeviceBatch memory_;
    TokenBatch batch_;
};

std::vector<int32_t> read(const int32_t* from, size_t count) {
    std::vector<int32_t> numbers(count);
    copy_now(test_device(), numbers.data(), from, count * sizeof(int32_t));
    return numbers;
}

}  // namespace

TEST_CASE("a batch that outlives the host's stays when the host's memory changes", "[cuda]") {
    ON_EACH_DEVICE();
    for (int repeat = 0; repeat < 20; ++repeat) {
        Whole whole;
        const Whole before = whole;
        const bool documents = random_int(0, 1) == 1;
        const BatchShape shape{whole.B, whole.T, documents};
        const DeviceBatch::Options options{.has_targets = random_int(0, 1) == 1,
                                           .has_sources = random_int(0, 1) == 1,
                                           .outlives_host = true};
        Arena plan = Arena::counting(test_device());
        DeviceBatch(plan, shape, options);
        Arena arena(test_device(), plan);
        Stream stream(test_device());
        std::vector<int32_t> sources(static_cast<size_t>(whole.B), 3);
        TokenBatch host = whole.batch(documents);
        host.sources = sources.data();
        const TokenBatch batch = DeviceBatch(arena, shape, options).upload(stream, host);
        stream.synchronize();
        for (auto* numbers : {&whole.tokens, &whole.targets, &whole.doc_start, &sources})
            std::ranges::fill(*numbers, -7);
        CAPTURE(whole.B, whole.T, documents, options.has_targets, options.has_sources);
        CHECK(read(batch.tokens, before.tokens.size()) == before.tokens);
        REQUIRE(bool(batch.targets) == options.has_targets);
        if (batch.targets) CHECK(read(batch.targets, before.tokens.size()) == before.targets);
        REQUIRE(bool(batch.doc_start) == documents);
        if (documents) CHECK(read(batch.doc_start, before.tokens.size()) == before.doc_start);
        REQUIRE(bool(batch.sources) == options.has_sources);
        if (batch.sources)
            CHECK(read(batch.sources, sources.size()) == std::vector(sources.size(), 3));
        CHECK(batch.position_start == nullptr);
    }
}

TEST_CASE("on the CPU a whole batch is used where the host has it") {
    const Whole whole;
    const BatchShape shape{whole.B, whole.T, true};
    Arena arena = Arena::counting(Device{});
    Stream stream(Device{});
    const TokenBatch host = whole.batch(true),
                     batch = DeviceBatch(arena, shape, {}).upload(stream, host);
    CHECK(arena.total_bytes() == 0);
    CHECK(batch.tokens == host.tokens);
    CHECK(batch.targets == host.targets);
    CHECK(batch.doc_start == host.doc_start);
}

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
        Part(whole, 0, false).memory().put_together(together.data(), parts.data());
        for (size_t i = 0; i < together.size(); ++i)
            CHECK(together[i] == static_cast<float>(whole.tokens[i]));
    }
}
