// A checkpoint that one mesh writes loads on any other.
#include <cstdlib>
#include <set>

#include "test/parallel/mesh_job.h"
#include "training/files/checkpoint.h"

using namespace train_gpt;
using namespace train_gpt::training_job;
using namespace train_gpt::mesh_job;

namespace {

/// The checkpoint of a mesh, loaded on another one and saved there again, is the same.
struct Move {
    MeshCase from, to;
};
constexpr Move few_moves[] = {
    {{1, 2, 3, 0, "gpt2", 4}, {1, 3, 1, 0, "gpt2", 4}},
    {{1, 4, 2, 2, "llama", 4, "bf16"}, {1, 4, 3, 2, "llama", 4, "bf16"}},
    {{1, 1, 1, 0, "gpt2", 4}, {1, 4, 3, 2, "gpt2", 4}},
    {{1, 3, 3, 0, "qwen3", 4, "bf16"}, {1, 1, 1, 0, "qwen3", 4, "bf16"}},
    {{2, 2, 3, 0, "llama", 4}, {2, 1, 0, 0, "llama", 4}},
    {{1, 2, 3, 0, "gpt2", 4, "fp32", 2}, {2, 1, 1, 0, "gpt2", 4, "fp32", 1}},
    {{1, 1, 1, 0, "gpt2", 4, "fp32", 1, false, {2}}, {1, 3, 1, 0, "gpt2", 4}},
    {{1, 2, 3, 0, "llama", 4, "fp32", 1, false, {2}},
     {1, 1, 1, 0, "llama", 4, "fp32", 1, false, {4, "zero_bubble"}}},
};
constexpr Move more_moves[] = {
    {{1, 4, 3, 1, "gpt2", 6}, {1, 6, 3, 3, "gpt2", 6}},
    {{1, 6, 3, 2, "llama", 6}, {1, 2, 0, 0, "llama", 6}},
    {{1, 2, 0, 0, "qwen2", 6}, {1, 6, 3, 0, "qwen2", 6}},
    {{1, 4, 1, 2, "mistral", 6}, {1, 3, 2, 0, "mistral", 6}},
    {{1, 6, 2, 3, "gpt2", 6, "bf16"}, {1, 4, 3, 0, "gpt2", 6, "bf16"}},
    {{1, 3, 1, 0, "llama", 6, "bf16"}, {1, 6, 1, 2, "llama", 6, "bf16"}},
    {{1, 4, 3, 4, "qwen3", 6}, {1, 4, 2, 2, "qwen3", 6}},
    {{1, 6, 3, 6, "gpt2", 6}, {1, 2, 3, 0, "gpt2", 6}},
    {{2, 3, 2, 0, "qwen3", 6}, {2, 2, 3, 0, "qwen3", 6}},
    {{2, 1, 2, 0, "llama", 6, "fp32", 2}, {1, 3, 3, 0, "llama", 6, "fp32", 2}},
    {{1, 3, 1, 0, "qwen2", 6}, {1, 1, 0, 0, "qwen2", 6, "fp32", 4}},
    {{1, 3, 2, 3, "gpt2", 6, "fp32", 1, false, {2}},
     {1, 1, 0, 0, "gpt2", 6, "fp32", 1, false, {2, "interleaved", 2}}},
    {{2, 1, 1, 0, "qwen3", 6, "bf16", 1, false, {2}}, {2, 3, 3, 0, "qwen3", 6, "bf16"}},
    {{1, 6, 3, 0, "mistral", 6}, {1, 1, 1, 0, "mistral", 6, "fp32", 1, false, {4}}},
    {{1, 1, 1, 0, "gpt2", 6, "bf16", 1, false, {4, "gpipe"}},
     {1, 3, 3, 0, "gpt2", 6, "bf16", 1, false, {2}}},
    {{1, 1, 1, 0, "gpt2", 6, "fp32", 2, false, {2}}, {2, 3, 3, 0, "gpt2", 6}},
    {{2, 1, 0, 0, "llama", 6, "fp32", 1, false, {2, "interleaved", 2}},
     {1, 1, 3, 0, "llama", 6, "fp32", 2, false, {2}}},
    {{1, 1, 2, 0, "qwen3", 6, "bf16", 2, false, {2}}, {1, 6, 1, 2, "qwen3", 6, "bf16"}},
    {{1, 3, 3, 3, "mistral", 6, "fp32", 2},
     {1, 1, 1, 0, "mistral", 6, "fp32", 2, false, {2, "zero_bubble"}}},
    {{2, 1, 1, 0, "qwen2", 6, "fp32", 2}, {1, 1, 1, 0, "qwen2", 6, "fp32", 1, false, {5}}},
    {{1, 2, 2, 1, "gpt2", 6, "fp32", 1, false, {3}}, {2, 1, 3, 0, "gpt2", 6, "fp32", 2}},
    {{1, 2, 3, 0, "llama", 8, "fp32", 1, false, {2, "interleaved", 2}},
     {1, 3, 2, 0, "llama", 8, "fp32", 1, false, {2, "zero_bubble"}}},
    {{1, 3, 3, 0, "gpt2", 6, "bf16", 1, false, {2, "zero_bubble"}},
     {1, 6, 2, 0, "gpt2", 6, "bf16"}},
};

void check_moves(const World& world, std::span<const Move> moves) {
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    const std::filesystem::path folder = std::getenv("FOLDER");
    /// The model, whose sizes fit the mesh that needs more of them, is the same on both.
    const auto config_on = [&](const Move& move, const MeshCase& c, uint64_t of_move) {
        const bool from = move.from.tensor * move.from.context >= move.to.tensor * move.to.context;
        Config config = config_of(from ? move.from : move.to, of_move, "cpu");
        config.parallel = config_of(c, of_move, "cpu").parallel;
        return config;
    };
    const auto on_mesh = [&](const Move& move, const MeshCase& c, uint64_t of_move, auto&& work) {
        const World part = world.split(world.rank() < c.ranks() ? 0 : 1);
        if (world.rank() < c.ranks()) {
            MeshRun run(part, Device{}, config_on(move, c, of_move));
            work(run);
        }
        world.barrier();
    };
    const auto save = [](MeshRun& run, const std::filesystem::path& to) {
        save_checkpoint(to, {2, run.config(), run.spec(), run.trainer().parameters}, run.mesh());
    };
    for (size_t i = 0; i < moves.size(); ++i) {
        const Move& move = moves[i];
        CAPTURE(mesh_job::name_of(move.from), mesh_job::name_of(move.to), seed);
        const std::filesystem::path from = folder / concat("from-", i),
                                    to = folder / concat("to-", i);
        if (world.rank() == 0)
            for (const auto& path : {from, to}) std::filesystem::create_directories(path);
        world.barrier();
        on_mesh(move, move.from, seed + i, [&](MeshRun& run) {
            run.step();
            run.step();
            save(run, from);
        });
        on_mesh(move, move.to, seed + i, [&](MeshRun& run) {
            load_training_state(find_checkpoint(from), run.trainer().parameters);
            run.trainer().parameters.weights.gather_all(run.trainer().stream);
            save(run, to);
        });
        if (world.rank() > 0) continue;
        const Tensors a = state_of(from, 2), b = state_of(to, 2);
        std::vector<std::string> different;
        for (const auto& [name, values] : a)
            if (!b.contains(name) || !same_bits(values, b.at(name))) different.push_back(name);
        CHECK(different == std::vector<std::string>{});
        CHECK(a.size() == b.size());
    }
}

}  // namespace

TEST_CASE("ranks: few moves", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_moves(World::join(), few_moves);
}

TEST_CASE("ranks: more moves", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_moves(World::join(), more_moves);
}

TEST_CASE("a checkpoint of one mesh has the same masters, moments and weights on another",
          "[mesh][training]") {
    if (skip_without_mpirun()) return;
    const TemporaryDirectory folder;
    check_case_on_ranks(4, "ranks: few moves", {{"FOLDER", folder.path()}});
}

TEST_CASE("checkpoints move between many meshes", "[mesh][training][.][long]") {
    if (skip_without_mpirun()) return;
    const TemporaryDirectory folder;
    check_case_on_ranks(6, "ranks: more moves", {{"FOLDER", folder.path()}}, 600);
}
