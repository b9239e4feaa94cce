#include "parallel/state/bucket_layout.h"

#include "kernels/adamw.h"
#include "model/families/gpt2.h"
#include "model/stage.h"
#include "test/catch.h"
#include "test/random.h"

using namespace train_gpt;

namespace {

DecoderSpec random_spec() {
    const int n_head = static_cast<int>(random_int(1, 6));
    return gpt2.spec({.n_layer = static_cast<int>(random_int(1, 9)),
                      .n_head = n_head,
                      .n_embd = n_head * static_cast<int>(random_int(1, 12)) * 8,
                      .n_ctx = static_cast<int>(random_int(1, 300)),
                      .vocab_size = random_int(10, 5000)});
}

}  // namespace

TEST_CASE(
    "buckets hold every tensor once, whole units of one sweep, and split evenly on borders of norm "
    "blocks",
    "[bucket_layout]") {
    for (int repeat = 0; repeat < 40; ++repeat) {
        std::vector<Parameter> parameters = registry_of(random_spec()).parameters;
        std::vector<int> sweeps(static_cast<size_t>(parameters.back().unit) + 1);  // of units
        for (size_t unit = 1; unit < sweeps.size(); ++unit)
            sweeps[unit] = sweeps[unit - 1] + (random_int(0, 3) == 0);
        const auto sweep_of = [&](int unit) { return sweeps[static_cast<size_t>(unit)]; };
        for (Parameter& p : parameters) p.sweep = sweep_of(p.unit);
        const int ranks = static_cast<int>(random_int(1, 9));
        const int64_t wanted = random_int(1, 400000);
        const BucketLayout layout(parameters, ranks, wanted);
        const std::vector<Bucket>& buckets = layout.buckets();
        CAPTURE(ranks, wanted, parameters.back().unit, layout.numel());

        int64_t end = 0;
        for (size_t b = 0; b < buckets.size(); ++b) {
            const Bucket& bucket = buckets[b];
            CHECK(bucket.range.first == end);
            end = bucket.range.end();
            CHECK(bucket.range.n == ranks * bucket.shard);
            CHECK(bucket.shard % norm_block == 0);
            CHECK(layout.shard_offset(bucket) * ranks == bucket.range.first);
            CHECK(bucket.first_unit ==
                  (b == 0 || bucket.last_unit == 0 ? 0 : buckets[b - 1].last_unit + 1));
            CHECK(sweep_of(bucket.first_unit) == sweep_of(bucket.last_unit));
            // The embedding is split. Buckets of blocks are at least as large as wanted, except for
            // the one with a sweep's first block, which is filled last.
            if (bucket.last_unit == 0)
                CHECK(bucket.range.n < wanted + 2 * ranks * norm_block);
            else if (bucket.first_unit > 1 &&
                     sweep_of(bucket.first_unit - 1) == sweep_of(bucket.first_unit))
                CHECK(bucket.range.n >= wanted);
        }
        CHECK(end == layout.numel());
        CHECK(buckets.back().last_unit == parameters.back().unit);

        std::vector<Range> places;
        for (size_t i = 0; i < parameters.size(); ++i) {
            const Parameter& p = parameters[i];
            const Range place{layout.offset(static_cast<int>(i)), p.padded_numel()};
            for (const Range& other : places) REQUIRE(intersection(place, other).n == 0);
            places.push_back(place);
            CHECK(place.first % 64 == 0);
            int64_t inside = 0;
            for (const Bucket& bucket : buckets) {
                const int64_t n = intersection(place, bucket.range).n;
                inside += n;
                if (n > 0) CHECK((bucket.first_unit <= p.unit && p.unit <= bucket.last_unit));
                // The part of a tensor in any shard begins at one of the tensor's norm blocks.
                for (int rank = 0; rank < ranks; ++rank) {
                    const Range part = intersection(place, layout.shard_of(bucket, rank));
                    if (part.n > 0) CHECK((part.first - place.first) % norm_block == 0);
                }
            }
            CHECK(inside == place.n);
        }
    }
}

TEST_CASE("padding of buckets is small compared with a real model", "[bucket_layout]") {
    const DecoderSpec spec =
        gpt2.spec({.n_layer = 12, .n_head = 12, .n_embd = 768, .n_ctx = 1024, .vocab_size = 50257});
    const std::vector<Parameter> parameters = registry_of(spec).parameters;
    int64_t elements = 0;
    for (const Parameter& p : parameters) elements += p.padded_numel();
    for (int ranks : {1, 8, 64}) {
        const BucketLayout layout(parameters, ranks, (64 << 20) / 4);
        CAPTURE(ranks, layout.numel(), elements);
        CHECK(layout.numel() < elements + elements / 50);
    }
}
