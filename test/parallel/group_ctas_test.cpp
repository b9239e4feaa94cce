// Shares of a GPU's multiprocessors for collectives that run at the same time.
#include "parallel/group_ctas.h"

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

TEST_CASE("collectives that can run at the same time leave multiprocessors to kernels") {
    for (int repeat = 0; repeat < 2000; ++repeat) {
        const auto size = [] { return 1 << random_int(0, 2); };
        const MeshSizes sizes{.pipeline = size(), .context = size(), .tensor = size()};
        const int world = sizes.pipeline * sizes.context * sizes.tensor * size(),
                  multiprocessors = static_cast<int>(random_int(8, 160));
        CAPTURE(sizes.pipeline, sizes.context, sizes.tensor, world, multiprocessors);
        const GroupCtas ctas = group_ctas(world, sizes, multiprocessors, 0);
        if (sizes.pipeline * sizes.context * sizes.tensor == 1) {
            CHECK(ctas == GroupCtas{});  // NCCL chooses
            continue;
        }
        // The store's collectives, those of layers and those between stages have a stream each.
        const int of_store = std::max(ctas.everyone, ctas.exchange),
                  of_layers = sizes.tensor > 1 || sizes.context > 1 ? ctas.exchange : 0,
                  of_stages = sizes.pipeline > 1 ? ctas.messages : 0;
        CHECK(ctas.everyone >= 1);
        CHECK(ctas.exchange >= 1);
        CHECK(ctas.messages >= 1);
        CHECK(of_store + of_layers + of_stages < multiprocessors);
        const int wanted = static_cast<int>(random_int(1, 32));
        CHECK(group_ctas(world, sizes, multiprocessors, wanted) ==
              GroupCtas{wanted, wanted, wanted});
    }
}

TEST_CASE("the group of all ranks gets the share of the group that it is") {
    const auto everyone = [](int world, const MeshSizes& sizes) {
        return group_ctas(world, sizes, 132, 0).everyone;
    };
    CHECK(everyone(8, {.tensor = 8}) == 24);
    CHECK(everyone(8, {.pipeline = 8}) == 4);
    CHECK(everyone(8, {.context = 8}) == 24);
    CHECK(everyone(8, {.context = 2}) == 24);  // ZeRO splits over data and context
    CHECK(everyone(8, {.tensor = 2}) == 2);
    CHECK(everyone(8, {.pipeline = 2}) == 2);
    CHECK(everyone(8, {.pipeline = 2, .context = 2, .tensor = 2}) == 2);
    CHECK(describe(group_ctas(8, {}, 132, 0), 132).empty());
    CHECK(contains(describe(group_ctas(8, {.pipeline = 2, .tensor = 2}, 132, 0), 132),
                   "at most 24 along data, tensor or context, 4 along pipeline, 2 over all ranks"));
}
