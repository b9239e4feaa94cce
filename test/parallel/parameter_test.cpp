#include "parallel/state/parameter.h"

#include <numeric>

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

TEST_CASE("tensor-parallel ranks hold equal parts of each section, and together all of it",
          "[parameter]") {
    for (int repeat = 0; repeat < 50; ++repeat) {
        const int ranks = static_cast<int>(random_int(1, 8));
        std::vector<int64_t> sections;
        for (int64_t i = random_int(1, 4); i > 0; --i) sections.push_back(ranks * random_int(1, 9));
        const int64_t extent = std::accumulate(sections.begin(), sections.end(), int64_t{0});
        const int axis = static_cast<int>(random_int(0, 1));
        Parameter p;
        p.name = "qkv", p.shape = {axis == 0 ? extent : 5, axis == 0 ? 5 : extent};
        p.split = TensorSplit{axis, sections};

        std::vector<int> owner(static_cast<size_t>(extent), -1);
        for (int rank = 0; rank < ranks; ++rank) {
            const std::vector<Range> part = part_of(p, rank, ranks);
            REQUIRE(part.size() == sections.size());
            int64_t begin = 0;
            for (size_t s = 0; s < sections.size(); ++s) {
                CHECK(part[s].n * ranks == sections[s]);
                CHECK(part[s].first >= begin);
                begin += sections[s];
                CHECK(part[s].end() <= begin);
                for (int64_t i = part[s].first; i < part[s].end(); ++i) {
                    CHECK(owner[static_cast<size_t>(i)] == -1);
                    owner[static_cast<size_t>(i)] = rank;
                }
            }
        }
        CHECK(std::count(owner.begin(), owner.end(), -1) == 0);
    }
}

TEST_CASE("a parameter that is not split is whole on every rank, and an uneven split is refused",
          "[parameter]") {
    Parameter p;
    p.name = "layer.qkv.weight", p.shape = {12, 4};
    for (int rank : {0, 2}) CHECK(part_of(p, rank, 3) == std::vector<Range>{{0, 12}});
    p.split = TensorSplit{0, {8, 2, 2}};
    CHECK(part_of(p, 1, 2) == std::vector<Range>{{4, 4}, {9, 1}, {11, 1}});
    const std::string message = error_of([&] { part_of(p, 0, 4); });
    CHECK(contains(message, "layer.qkv.weight has a section of 2 rows"));
}
