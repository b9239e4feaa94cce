#include "dataloader/loader.h"

#include <map>

#include "test/dataloader/shard_files.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

constexpr uint32_t vocab = 700;

std::vector<std::vector<uint32_t>> random_shards(int count, int64_t low, int64_t high) {
    std::vector<std::vector<uint32_t>> shards;
    for (int i = 0; i < count; ++i) shards.push_back(random_tokens(random_int(low, high), vocab));
    return shards;
}

/// All windows of T + 1 tokens, straight from the tokens.
std::vector<std::vector<int32_t>> naive_windows(const std::vector<std::vector<uint32_t>>& shards,
                                                int T) {
    std::vector<std::vector<int32_t>> windows;
    for (const auto& shard : shards)
        for (size_t at = 0; at + static_cast<size_t>(T) < shard.size();
             at += static_cast<size_t>(T))
            windows.emplace_back(shard.begin() + static_cast<int64_t>(at),
                                 shard.begin() + static_cast<int64_t>(at) + T + 1);
    return windows;
}

/// doc_start by its definition: walk back from t to the nearest end of text.
int32_t naive_doc_start(const int32_t* tokens, int t, uint32_t document_boundary) {
    for (int i = t; i >= 0; --i)
        if (tokens[i] == static_cast<int32_t>(document_boundary)) return i;
    return 0;
}

/// Sample b of a batch as its window of T + 1 tokens; checks that the targets are the tokens
/// shifted by one.
std::vector<int32_t> window_of(const HostBatch& batch, int b, int T) {
    const auto tokens = batch.tokens.subspan(static_cast<size_t>(b * T), static_cast<size_t>(T));
    const auto targets = batch.targets.subspan(static_cast<size_t>(b * T), static_cast<size_t>(T));
    REQUIRE(std::equal(tokens.begin() + 1, tokens.end(), targets.begin()));
    std::vector<int32_t> window(tokens.begin(), tokens.end());
    window.push_back(targets.back());
    return window;
}

/// The samples of `steps` steps in global order, gathered from `world` loaders.
std::vector<std::vector<int32_t>> samples(const std::shared_ptr<const TokenShards>& shards,
                                          LoaderOptions options, int world, int64_t steps) {
    std::map<int64_t, std::vector<int32_t>> found;
    for (int rank = 0; rank < world; ++rank) {
        options.rank = rank;
        options.world = world;
        TrainLoader loader(shards, options);
        const int m = options.micro_batches_per_step;
        const int mine = (rank + 1) * m / world - rank * m / world;
        for (int64_t i = 0; i < steps * mine; ++i) {
            const HostBatch& batch = loader.next();
            CHECK(batch.first_sample ==
                  options.first_sample + (i / mine * m + rank * m / world + i % mine) * options.B);
            for (int b = 0; b < options.B; ++b) {
                const auto [at, fresh] =
                    found.insert({batch.first_sample + b, window_of(batch, b, options.T)});
                REQUIRE(fresh);
            }
        }
    }
    std::vector<std::vector<int32_t>> in_order;
    for (auto& [key, window] : found) in_order.push_back(std::move(window));
    return in_order;
}

}  // namespace

TEST_CASE(
    "each window of every shard is seen exactly once per epoch, in a different order each epoch") {
    const TemporaryDirectory folder;
    LoaderOptions options;
    options.T = static_cast<int>(random_int(1, 20));
    options.B = static_cast<int>(random_int(1, 5));
    options.seed = test_rng()();
    options.micro_batches_per_step = static_cast<int>(random_int(1, 3));
    auto shards = random_shards(6, 0, 900);
    shards[3].resize(1);  // shards with nothing to predict do no harm
    shards[4].resize(static_cast<size_t>(options.T));
    shards[5].resize(static_cast<size_t>(options.T) + 1, 5);
    for (auto& shard : shards)
        if (shard.empty()) shard.push_back(1);
    const auto tokens =
        std::make_shared<TokenShards>(write_shards(folder.path(), shards, vocab), vocab);
    auto windows = naive_windows(shards, options.T);
    const auto n = static_cast<int64_t>(windows.size());
    CAPTURE(options.T, options.B, n);
    TrainLoader loader(tokens, options);
    REQUIRE(count_windows(*tokens, options.T) == n);

    std::vector<std::vector<int32_t>> seen;
    while (static_cast<int64_t>(seen.size()) < 3 * n) {
        const HostBatch& batch = loader.next();
        for (int b = 0; b < options.B; ++b) seen.push_back(window_of(batch, b, options.T));
    }
    std::sort(windows.begin(), windows.end());
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
        std::vector<std::vector<int32_t>> part(seen.begin() + epoch * n,
                                               seen.begin() + (epoch + 1) * n);
        if (epoch > 0 && n > 20) CHECK(!std::equal(part.begin(), part.end(), seen.begin()));
        std::sort(part.begin(), part.end());
        CHECK(part == windows);
    }
}

TEST_CASE("the loader gives what reading at the permuted places gives") {
    const TemporaryDirectory folder;
    const auto shards = random_shards(4, 100, 3000);
    LoaderOptions options;
    options.T = 17;
    options.B = 3;
    options.seed = test_rng()();
    options.first_sample = random_int(0, 1000000);
    options.micro_batches_per_step = 5;
    options.document_boundary = 3;
    const auto windows = naive_windows(shards, options.T);
    const auto n = static_cast<int64_t>(windows.size());
    TrainLoader loader(
        std::make_shared<TokenShards>(write_shards(folder.path(), shards, vocab), vocab), options);
    int64_t g = options.first_sample;
    for (int i = 0; i < 200; ++i) {
        const HostBatch& batch = loader.next();
        for (int b = 0; b < options.B; ++b, ++g) {
            const Permutation order(options.seed, static_cast<uint64_t>(g / n), n);
            REQUIRE(window_of(batch, b, options.T) == windows[static_cast<size_t>(order(g % n))]);
        }
    }
}

TEST_CASE(
    "a step's samples and their order are the same for any number of ranks and any micro-batch") {
    const TemporaryDirectory folder;
    const auto tokens = std::make_shared<TokenShards>(
        write_shards(folder.path(), random_shards(3, 200, 2000), vocab), vocab);
    LoaderOptions options;
    options.T = 9;
    options.seed = test_rng()();
    options.first_sample = random_int(0, 1500);
    const int64_t steps = 6;
    options.B = 30;
    options.micro_batches_per_step = 1;
    const auto expected = samples(tokens, options, 1, steps);
    REQUIRE(expected.size() == 30 * steps);
    for (const int B : {1, 2, 3, 5, 6}) {
        options.B = B;
        options.micro_batches_per_step = 30 / B;
        for (const int world : {1, 2, 3, 5}) {
            CAPTURE(B, world);
            CHECK(samples(tokens, options, world, steps) == expected);
        }
    }
    // 7 micro-batches over numbers of ranks that do not divide them, and over 7.
    options.B = 2;
    options.micro_batches_per_step = 7;
    const auto seven = samples(tokens, options, 1, steps);
    for (const int world : {2, 3, 5, 7}) CHECK(samples(tokens, options, world, steps) == seven);

    // A loader that starts at a later sample gives what the first one gave from there on.
    options.first_sample += 4 * 14;
    const auto later = samples(tokens, options, 2, steps - 4);
    CHECK(std::equal(later.begin(), later.end(), seven.begin() + 4 * 14, seven.end()));

    options.seed += 1;
    CHECK(samples(tokens, options, 2, steps - 4) != later);
}

TEST_CASE("each of several sources gives every window once before any comes again") {
    const TemporaryDirectory folder;
    const std::vector<double> weights{1, 5, 2.5};
    LoaderOptions options;
    options.T = 8;
    options.B = 4;
    options.micro_batches_per_step = 5;
    options.seed = test_rng()();
    std::vector<TrainSource> sources;
    std::vector<std::vector<std::vector<int32_t>>> windows;
    for (size_t s = 0; s < weights.size(); ++s) {
        fs::create_directory(folder / std::to_string(s));
        const auto shards = random_shards(2, 100, 3000);
        windows.push_back(naive_windows(shards, options.T));
        sources.push_back({std::make_shared<TokenShards>(
                               write_shards(folder / std::to_string(s), shards, vocab), vocab),
                           weights[s]});
    }
    // The samples of each source in order, from the loaders of every rank, for several numbers of
    // ranks.
    const int64_t steps = 60;
    std::vector<std::vector<std::vector<int32_t>>> first_seen;
    for (const int world : {1, 3}) {
        std::map<int64_t, std::pair<int, std::vector<int32_t>>> found;
        for (int rank = 0; rank < world; ++rank) {
            options.rank = rank;
            options.world = world;
            TrainLoader loader(sources, options);
            for (int64_t i = 0; i < steps * loader.micro_batches(); ++i) {
                const HostBatch& batch = loader.next();
                for (int b = 0; b < options.B; ++b)
                    found[batch.first_sample + b] = {batch.sources[static_cast<size_t>(b)],
                                                     window_of(batch, b, options.T)};
            }
        }
        std::vector<std::vector<std::vector<int32_t>>> seen(sources.size());
        for (auto& [key, sample] : found)
            seen[static_cast<size_t>(sample.first)].push_back(std::move(sample.second));
        if (world == 1) first_seen = seen;
        CHECK(seen == first_seen);
    }
    for (size_t s = 0; s < sources.size(); ++s) {
        const size_t n = windows[s].size(), samples = first_seen[s].size();
        CAPTURE(s, n, samples);
        REQUIRE(samples > 50);
        for (size_t i = 0; i < samples; ++i) {
            const Permutation order(options.seed, uint64_t{s} << 48 | i / n,
                                    static_cast<int64_t>(n));
            REQUIRE(first_seen[s][i] ==
                    windows[s][static_cast<size_t>(order(static_cast<int64_t>(i % n)))]);
        }
    }
}

TEST_CASE("a loader whose steps change their sizes reads the samples of equal steps") {
    const TemporaryDirectory folder;
    LoaderOptions options;
    options.B = static_cast<int>(random_int(1, 3));
    options.T = 8;
    options.seed = test_rng()();
    options.prefetch = static_cast<int>(random_int(1, 4));
    const auto shards = std::make_shared<TokenShards>(
        write_shards(folder.path(), random_shards(2, 100, 3000), vocab), vocab);
    const int world = static_cast<int>(random_int(1, 3));
    std::vector<int> sizes;
    options.micro_batches_per_step = static_cast<int>(random_int(world, 9));
    for (int part = 0; part < 4; ++part) {
        const auto size =
            part == 0 ? options.micro_batches_per_step : static_cast<int>(random_int(world, 9));
        if (part > 0) options.changes.push_back({std::ssize(sizes), size});
        sizes.insert(sizes.end(), static_cast<size_t>(random_int(1, 4)), size);
    }
    LoaderOptions equal = options;
    equal.micro_batches_per_step = 1;
    equal.changes.clear();
    TrainLoader one(shards, equal);
    std::vector<std::vector<int32_t>> expected;
    int64_t all = 0;
    for (const int size : sizes) all += size;
    for (int64_t i = 0; i < all; ++i) {
        const HostBatch& batch = one.next();
        expected.emplace_back(batch.tokens.begin(), batch.tokens.end());
    }
    const int64_t from = random_int(0, std::ssize(sizes) - 1);
    std::vector<int> found(expected.size(), 0);
    for (int rank = 0; rank < world; ++rank) {
        options.rank = rank;
        options.world = world;
        TrainLoader loader(shards, options);
        if (from > 0 || random_int(0, 1)) loader.seek(from);
        size_t before = 0;
        for (int64_t step = 0; step < std::ssize(sizes); ++step) {
            const int size = sizes[static_cast<size_t>(step)];
            if (step >= from) {
                REQUIRE(loader.next_step() == step);
                REQUIRE(loader.most_micro_batches() == (size + world - 1) / world);
                const int own = loader.micro_batches();
                for (int m = 0; m < own; ++m) {
                    const size_t number =
                        before + static_cast<size_t>(loader.first_micro_batch(step) + m);
                    const HostBatch& batch = loader.next();
                    REQUIRE(std::ranges::equal(batch.tokens, expected.at(number)));
                    REQUIRE(batch.first_sample == static_cast<int64_t>(number) * options.B);
                    ++found[number];
                }
            }
            before += static_cast<size_t>(size);
        }
    }
    size_t first = 0;
    for (int64_t step = 0; step < from; ++step)
        first += static_cast<size_t>(sizes[static_cast<size_t>(step)]);
    for (size_t number = 0; number < found.size(); ++number)
        CHECK(found[number] == (number < first ? 0 : 1));
}

TEST_CASE("steps of any sizes, one after the other, read the samples that equal steps read") {
    const TemporaryDirectory folder;
    LoaderOptions options;
    options.T = 8;
    options.seed = test_rng()();
    std::vector<TrainSource> sources;
    for (const int name : {0, 1}) {
        fs::create_directory(folder / std::to_string(name));
        sources.push_back(
            {std::make_shared<TokenShards>(
                 write_shards(folder / std::to_string(name), random_shards(2, 100, 1000), vocab),
                 vocab),
             1.0 + name});
    }
    using Samples = std::vector<std::pair<int, std::vector<int32_t>>>;
    const auto read = [&](TrainLoader& loader, int64_t micro_batches, Samples& into) {
        for (; micro_batches > 0; --micro_batches) {
            const HostBatch& batch = loader.next();
            for (int b = 0; b < options.B; ++b)
                into.emplace_back(batch.sources[static_cast<size_t>(b)],
                                  window_of(batch, b, options.T));
        }
    };
    Samples parts, whole;
    for (int part = 0; part < 5; ++part) {  // starts of a run, each with a batch of its own
        options.first_sample = std::ssize(parts);
        options.B = static_cast<int>(random_int(1, 4));
        options.micro_batches_per_step = static_cast<int>(random_int(1, 5));
        TrainLoader loader(sources, options);
        read(loader, options.micro_batches_per_step * random_int(1, 30), parts);
    }
    options.first_sample = 0;
    options.B = 1;
    TrainLoader loader(sources, options);
    read(loader, std::ssize(parts), whole);
    CHECK(parts == whole);
}

TEST_CASE("doc_start equals its definition, with and without an end of text") {
    const TemporaryDirectory folder;
    const uint32_t vocab_size = 12;  // small, so that documents are short
    const auto tokens = std::make_shared<TokenShards>(
        write_shards(folder.path(), {random_tokens(5000, vocab_size)}, vocab_size), vocab_size);
    LoaderOptions options;
    options.B = 4;
    options.T = static_cast<int>(random_int(1, 60));
    options.document_boundary = 7;
    TrainLoader loader(tokens, options);
    for (int i = 0; i < 50; ++i) {
        const HostBatch& batch = loader.next();
        for (int b = 0; b < options.B; ++b)
            for (int t = 0; t < options.T; ++t)
                REQUIRE(batch.doc_start[static_cast<size_t>(b * options.T + t)] ==
                        naive_doc_start(batch.tokens.data() + b * options.T, t, 7));
    }
    options.document_boundary.reset();
    TrainLoader plain(tokens, options);
    const HostBatch& batch = plain.next();
    CHECK(std::all_of(batch.doc_start.begin(), batch.doc_start.end(),
                      [](int32_t s) { return s == 0; }));
}

TEST_CASE(
    "the loader uses the caller's memory, as much as it said, and a batch stays valid until the "
    "next") {
    const auto tokens = std::make_shared<TokenShards>("synthetic", vocab);
    LoaderOptions options;
    options.B = 3;
    options.T = 50;
    options.prefetch = static_cast<int>(random_int(1, 5));
    std::vector<int32_t> memory;
    int calls = 0;
    TrainLoader loader(tokens, options, [&](size_t bytes) {
        ++calls;
        CHECK(bytes == TrainLoader::buffer_bytes(options));
        memory.assign(bytes / 4, -5);
        return memory.data();
    });
    TrainLoader reference(tokens, options);
    for (int i = 0; i < 40; ++i) {
        const HostBatch& batch = loader.next();
        for (const auto& part : {batch.tokens, batch.targets, batch.doc_start, batch.sources}) {
            REQUIRE(part.size() == (part.data() == batch.sources.data() ? 3 : 150));
            REQUIRE(part.data() >= memory.data());
            REQUIRE(part.data() + part.size() <= memory.data() + memory.size());
        }
        const std::vector<int32_t> before(batch.tokens.begin(), batch.tokens.end());
        const HostBatch& same = reference.next();
        CHECK(std::equal(before.begin(), before.end(), same.tokens.begin(), same.tokens.end()));
        CHECK(std::equal(before.begin(), before.end(), batch.tokens.begin()));
    }
    CHECK(calls == 1);
}

TEST_CASE("loaders stop cleanly at any moment") {
    const auto tokens = std::make_shared<TokenShards>("synthetic", vocab);
    LoaderOptions options;
    options.B = 2;
    options.T = 8;
    for (int i = 0; i < 200; ++i) {
        options.prefetch = static_cast<int>(random_int(1, 6));
        TrainLoader loader(tokens, options);
        for (int64_t n = random_int(0, 8); n > 0; --n) loader.next();
    }
}

TEST_CASE("an error on the loader's thread reaches next(), after the good batches and every time") {
    const TemporaryDirectory folder;
    LoaderOptions options;
    options.B = 1;
    options.T = 10;
    options.seed = test_rng()();
    auto shard = random_tokens(1001, vocab);
    const auto good = naive_windows({shard}, options.T);
    const int64_t bad_batch = random_int(0, 99);
    const Permutation order(options.seed, 0, 100);
    shard[static_cast<size_t>(order(bad_batch) * options.T + random_int(1, 9))] = vocab + 5;
    const auto tokens =
        std::make_shared<TokenShards>(write_shards(folder.path(), {shard}, vocab + 10), vocab);
    TrainLoader loader(tokens, options);
    for (int64_t i = 0; i < bad_batch; ++i)
        REQUIRE(window_of(loader.next(), 0, options.T) == good[static_cast<size_t>(order(i))]);
    for (int i = 0; i < 3; ++i) {
        const std::string message = error_of([&] { loader.next(); });
        CAPTURE(message);
        CHECK(contains(message, "train_000000.bin"));
        CHECK(contains(message, concat("token id ", vocab + 5)));
    }
}

TEST_CASE("a shard truncated while the loader reads it ends in an error of next()") {
    const TemporaryDirectory folder;
    const auto tokens = std::make_shared<TokenShards>(
        write_shards(folder.path(), random_shards(1, 100000, 100000), vocab), vocab);
    LoaderOptions options;
    options.B = 2;
    options.T = 100;
    TrainLoader loader(tokens, options);
    loader.next();
    fs::resize_file(tokens->shard_path(0), 100);
    const std::string message = error_of([&] {
        for (int i = 0; i < 100; ++i) loader.next();
    });
    CHECK(contains(message, "train_000000.bin"));
}

TEST_CASE("loader options out of range are refused with a sentence") {
    const TemporaryDirectory folder;
    const auto tokens = std::make_shared<TokenShards>(
        write_shards(folder.path(), {random_tokens(100, vocab)}, vocab), vocab);
    const LoaderOptions good{1, 2, 10, 0, 4, 0, 2, {}, 2};
    CHECK_NOTHROW(TrainLoader(tokens, good).next());
    const auto refused = [&](auto change) {
        LoaderOptions options = good;
        change(options);
        return error_of([&] { TrainLoader(tokens, options); });
    };
    CHECK(contains(refused([](LoaderOptions& o) { o.B = 0; }), "0 samples"));
    CHECK(contains(refused([](LoaderOptions& o) { o.T = -1; }), "-1 tokens"));
    CHECK(contains(refused([](LoaderOptions& o) { o.prefetch = 0; }), "prefetch"));
    CHECK(contains(refused([](LoaderOptions& o) { o.first_sample = -1; }), "sample -1"));
    CHECK(contains(refused([](LoaderOptions& o) { o.rank = 2; }), "rank 2 of 2"));
    CHECK(contains(refused([](LoaderOptions& o) { o.world = 5; }),
                   "4 micro-batches cannot feed 5 ranks"));
    CHECK(contains(refused([](LoaderOptions& o) { o.T = 100; }), "no sample of 100 + 1"));
    CHECK(contains(refused([](LoaderOptions& o) { o.B = o.T = 1 << 30; }), "too large"));
}

TEST_CASE("validation predicts every token of every shard but its first exactly once, in order") {
    const TemporaryDirectory folder;
    const int T = static_cast<int>(random_int(1, 30));
    auto shards = random_shards(5, 1, 300);
    shards.push_back(random_tokens(1, vocab));
    shards.push_back(random_tokens(2, vocab));
    shards.push_back(random_tokens(3 * T + 1, vocab));
    const auto tokens =
        std::make_shared<TokenShards>(write_shards(folder.path(), shards, vocab), vocab);
    std::vector<std::pair<uint32_t, uint32_t>> all;  // (token, target)
    for (const auto& shard : shards)
        for (size_t i = 1; i < shard.size(); ++i) all.emplace_back(shard[i - 1], shard[i]);
    const auto total = static_cast<int64_t>(all.size());

    for (const int64_t max_tokens :
         {int64_t{0}, random_int(1, total), total, total + 7, int64_t{1}}) {
        CAPTURE(T, max_tokens, total);
        const ValidationWindows windows(tokens, T, max_tokens);
        const int64_t wanted = max_tokens == 0 ? total : std::min(total, max_tokens);
        REQUIRE(windows.target_tokens() == wanted);
        const int B = static_cast<int>(random_int(1, 7));
        std::vector<std::pair<uint32_t, uint32_t>> seen;
        const auto size = static_cast<size_t>(B * T);
        for (int64_t first = 0; first < windows.count() + B; first += B) {  // one call past the end
            std::vector<int32_t> in(size, -9), out(size, -9), start(size, -9);
            windows.fill(first, B, in.data(), out.data(), start.data(), 5);
            for (int b = 0; b < B; ++b) {
                bool ended = false;
                for (int t = 0; t < T; ++t) {
                    const auto i = static_cast<size_t>(b * T + t);
                    if (out[i] < 0) {
                        ended = true;
                        REQUIRE(out[i] == -1);
                        REQUIRE(in[i] == 0);
                        REQUIRE(start[i] >= 0);
                        REQUIRE(start[i] <= t);
                    } else {
                        REQUIRE(!ended);
                        REQUIRE(start[i] == naive_doc_start(in.data() + b * T, t, 5));
                        seen.emplace_back(in[i], out[i]);
                    }
                }
                REQUIRE((out[static_cast<size_t>(b * T)] >= 0) == (first + b < windows.count()));
            }
        }
        CHECK(std::equal(seen.begin(), seen.end(), all.begin(), all.begin() + wanted));
    }
    CHECK_THROWS_AS(ValidationWindows(tokens, 0, 0), Error);
    CHECK_THROWS_AS(ValidationWindows(tokens, 5, -1), Error);
}

TEST_CASE("validation data with nothing to predict are refused") {
    const TemporaryDirectory folder;
    const auto tokens =
        std::make_shared<TokenShards>(write_shards(folder.path(), {{3}, {4}}, vocab), vocab);
    CHECK(contains(error_of([&] { ValidationWindows(tokens, 5, 0); }), "nothing to predict"));
}
