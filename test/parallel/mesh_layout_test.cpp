// Meshes: the arithmetic of axes and groups, and the sizes that are refused.
#include <map>
#include <set>
#include <string>
#include <vector>

#include "parallel/communicator_kinds.h"
#include "parallel/mesh.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/config.h"
#include "training/config/load_config.h"

using namespace train_gpt;

TEST_CASE(
    "a rank's number follows from its places, and groups have the ranks that differ on their axes",
    "[mesh]") {
    for (int repeat = 0; repeat < 50; ++repeat) {
        const auto few = [] { return static_cast<int>(random_int(1, 4)); };
        const int pipeline = few(), replicas = few(), shard = few(), context = few(),
                  tensor = few();
        const int data = replicas * shard, world = pipeline * data * context * tensor;
        const MeshLayout mesh(
            world,
            {.pipeline = pipeline, .context = context, .tensor = tensor, .shard_ranks = shard});
        CHECK(mesh.size(Axis::data) == data);
        CHECK(mesh.size({Axis::shard, Axis::context}) == shard * context);
        const Axes axes = {Axis::context, Axis::shard};
        std::map<int, std::set<int>> groups;  // first rank → places
        for (int rank = 0; rank < world; ++rank) {
            const auto at = [&](Axis axis) { return mesh.at(axis, rank); };
            CHECK(((at(Axis::pipeline) * data + at(Axis::data)) * context + at(Axis::context)) *
                          tensor +
                      at(Axis::tensor) ==
                  rank);
            CHECK(at(Axis::data) == at(Axis::replica) * shard + at(Axis::shard));
            CHECK(mesh.at(axes, rank) == at(Axis::shard) * context + at(Axis::context));
            const int first = mesh.first_rank(axes, rank);
            CHECK(mesh.at(axes, first) == 0);
            for (const Axis axis : {Axis::pipeline, Axis::replica, Axis::tensor})
                CHECK(mesh.at(axis, first) == at(axis));
            CHECK(groups[first].insert(mesh.at(axes, rank)).second);
            for (const Axis axis : {Axis::pipeline, Axis::data, Axis::context, Axis::tensor}) {
                if (at(axis) + 1 == mesh.size(axis)) continue;
                const int next = rank + mesh.stride(axis);
                CHECK(mesh.at(axis, next) == at(axis) + 1);
                CHECK(mesh.first_rank({axis}, next) == mesh.first_rank({axis}, rank));
            }
        }
        CHECK(std::ssize(groups) == world / (shard * context));
    }
}

TEST_CASE("a run of one rank with a size for several says how to start them", "[mesh]") {
    const auto error = [](const MeshSizes& sizes) {
        Activity activity;
        return error_of([&] { Mesh(World(), sizes, open_group_of_one(activity)); });
    };
    CHECK(contains(error({.tensor = 2}),
                   "parallel.tensor = 2 needs 2 ranks, or a multiple, and this run has one; start "
                   "2 with mpirun -np 2 train_gpt "));
    CHECK(contains(error({.context = 3}), "parallel.context = 3 needs 3 ranks"));
    CHECK(contains(error({.pipeline = 4}), "start 4 with mpirun -np 4 "));
    CHECK(contains(error({.shard_ranks = 2}), "parallel.shard_ranks = 2 needs 2 ranks"));
    CHECK(contains(error({.pipeline = 2, .tensor = 3}),
                   "parallel.tensor = 3 and parallel.pipeline = 2 need 6 ranks"));
    CHECK(error({.shard_ranks = 1}).empty());
}

TEST_CASE("sizes that do not divide the ranks are refused with the nearest that do", "[mesh]") {
    const auto error = [](int world, const MeshSizes& sizes) {
        return error_of([&] { MeshLayout(world, sizes); });
    };
    CHECK(contains(
        error(8, {.tensor = 3}),
        "parallel.tensor = 3 does not divide the 8 ranks of this run; the nearest value that "
        "does is 2"));
    CHECK(contains(error(6, {.tensor = 9}), "the nearest value that does is 6"));
    CHECK(contains(
        error(6, {.context = 4}),
        "parallel.context = 4 does not divide the 6 ranks of this run; the nearest value that "
        "does is 3"));
    CHECK(contains(error(12, {.context = 4, .tensor = 2}),
                   "parallel.context = 4 does not divide the 6 tensor-parallel groups of this run; "
                   "the nearest value that does is 3"));
    CHECK(contains(
        error(24, {.tensor = 2, .shard_ranks = 5}),
        "parallel.shard_ranks = 5 does not divide the 12 data-parallel ranks of this run; the "
        "nearest value that does is 4"));
}

TEST_CASE(
    "a tensor-parallel size that heads or the MLP cannot share is refused with the nearest that "
    "they can",
    "[mesh][config]") {
    const auto error = [](const std::vector<std::string>& settings) {
        return error_of([&] {
            std::vector<std::string> all{"run_dir=r", "data.train=synthetic", "schedule.steps=1"};
            all.insert(all.end(), settings.begin(), settings.end());
            parse_config("{}", "test.json", all);
        });
    };
    CHECK(contains(
        error({"model.n_head=12", "parallel.tensor=5"}),
        "test.json: parallel.tensor = 5 ranks cannot share model.n_head = 12 evenly; the nearest "
        "value"));
    CHECK(contains(error({"model.n_head=12", "parallel.tensor=5"}), " is 4"));
    CHECK(contains(
        error({"model.family=llama", "model.n_head=12", "model.n_kv_head=2", "parallel.tensor=4"}),
        "cannot share model.n_kv_head = 2 evenly"));
    CHECK(contains(error({"model.n_head=12", "model.n_ff=30", "parallel.tensor=4"}),
                   "cannot share model.n_ff = 30 evenly"));
    CHECK(error({"model.n_head=12", "parallel.tensor=6"}).empty());
}

TEST_CASE("sequences that context-parallel ranks cannot share are refused with the nearest length",
          "[mesh][context][config]") {
    const auto error = [](int T, int n_ctx, int context) {
        return error_of([&] {
            std::vector<std::string> all{"run_dir=r",
                                         "data.train=synthetic",
                                         "schedule.steps=1",
                                         concat("batch.tokens_per_step=", T ? T : n_ctx),
                                         "batch.micro_batch=1",
                                         concat("model.n_ctx=", n_ctx),
                                         concat("parallel.context=", context)};
            if (T) all.push_back(concat("batch.sequence_length=", T));
            parse_config("{}", "test.json", all);
        });
    };
    CHECK(contains(error(1000, 1024, 3),
                   "test.json: batch.sequence_length = 1000 cannot be cut into 2 · "
                   "parallel.context = 6 equal chunks; the nearest value that can is 1002"));
    CHECK(contains(error(1000, 1001, 3), "the nearest value that can is 996"));
    CHECK(contains(error(0, 1001, 2), "model.n_ctx = 1001 cannot be cut into 2 · "));
    CHECK(contains(error(3, 64, 2), "the nearest value that can is 4"));
    CHECK(error(1024, 1024, 4).empty());
    CHECK(error(7, 7, 1).empty());
}

TEST_CASE("groups and places are named by their axes", "[mesh]") {
    const MeshLayout three(8, {.context = 2, .tensor = 2});
    CHECK(three.place(6) == "data 1, context 1, tensor 0");
    CHECK(three.group_name({Axis::data, Axis::context}) == "data+context");
    CHECK(three.group_name({Axis::context}) == "context");
    const MeshLayout both(16, {.tensor = 2, .shard_ranks = 4});
    CHECK(both.place(11) == "data 5, tensor 1");
    CHECK(both.group_name({Axis::data, Axis::context}) == "data");
    CHECK(both.group_name({Axis::shard, Axis::context}) == "shard");
    CHECK(both.group_name({Axis::replica}) == "replica");
    CHECK(both.group_name({Axis::data, Axis::tensor}) == "data+tensor");
    const MeshLayout data(4);
    CHECK(data.place(3).empty());
    CHECK(data.group_name({Axis::shard}) == "data");
    CHECK(data.group_name({Axis::tensor}).empty());
}
