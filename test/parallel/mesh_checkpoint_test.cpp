// A checkpoint that one mesh writes loads on any other.
#include <cstdlib>
#include <set>

#include "test/parallel/mesh_job.h"
#include "test/parallel/training_job.h"
#include "training/files/checkpoint.h"
#include "training/files/fp8_file.h"

using namespace train_gpt;
using namespace train_gpt::training_job;
using namespace train_gpt::mesh_job;

namespace {

/// The checkpoint of a mesh, loaded on another one and saved there again, is the same.
struct Move {
    MeshCase from, to;
};
constexpr Move few_moves[] = {
    {trains("gpt2", 4).data(2).zero(3), trains("gpt2", 4).data(3).zero(1)},
    {trains("llama", 4).bf16().data(4).zero(2).shard_ranks(2),
     trains("llama", 4).bf16().data(4).zero(3).shard_ranks(2)},
    {trains("gpt2", 4).zero(1), trains("gpt2", 4).data(4).zero(3).shard_ranks(2)},
    {trains("qwen3", 4).bf16().data(3).zero(3), trains("qwen3", 4).bf16().zero(1)},
    {trains("llama", 4).tensor(2).data(2).zero(3), trains("llama", 4).tensor(2)},
    {trains("gpt2", 4).data(2).zero(3).context(2), trains("gpt2", 4).tensor(2).zero(1)},
    {trains("gpt2", 4).zero(1).pipeline(2), trains("gpt2", 4).data(3).zero(1)},
    {trains("llama", 4).data(2).zero(3).pipeline(2),
     trains("llama", 4).zero(1).pipeline(4, "zero_bubble")},
    {trains("llama", 4).data(4).zero(3).muon(), trains("llama", 4).tensor(2).zero(1).muon()},
    {trains("gpt2", 4).bf16().tensor(2).data(2).zero(2).muon(),
     trains("gpt2", 4).bf16().zero(1).pipeline(2).muon()},
    {trains("gpt2", 4).data(2).zero(3).state("int8"),
     trains("gpt2", 4).data(3).zero(1).state("int8")},
    {trains("llama", 4).bf16().data(4).zero(2).shard_ranks(2).state("int8"),
     trains("llama", 4).bf16().zero(1).pipeline(2).state("int8")},
    {trains("qwen3", 4).data(3).zero(3).state("bf16"),
     trains("qwen3", 4).tensor(2).zero(1).state("bf16")},
    {trains("llama", 4).tensor(2).state("int8"),
     trains("llama", 4).tensor(2).data(2).zero(3).state("int8")},
    {trains("llama", 4).tensor(2).zero(1).state("int8"),
     trains("llama", 4).data(2).zero(3).state("int8")},
    {trains("gpt2", 4).data(3).zero(2).state("int8"), trains("gpt2", 4).tensor(4).state("int8")},
    {trains("llama", 4).bf16().data(2).zero(2).offload(), trains("llama", 4).bf16().tensor(2)},
    {trains("gpt2", 4).bf16().zero(1).pipeline(2),
     trains("gpt2", 4).bf16().data(3).zero(3).offload()},
    {trains("llama", 4).tensor(2).data(2).zero(3).fp8("delayed"),
     trains("llama", 4).zero(1).pipeline(2).fp8("delayed")},
    {trains("qwen3", 4).bf16().data(3).zero(1).fp8("delayed").state("int8").offload(),
     trains("qwen3", 4).bf16().tensor(2).data(2).zero(2).fp8("delayed").state("int8")},
    {trains("olmoe", 4).data(3).zero(3).fp8("delayed").state("int8").offload(),
     trains("olmoe", 4).zero(1).pipeline(2).fp8("delayed").state("int8")},
    {trains("qwen2_moe", 4).bf16().tensor(2), trains("qwen2_moe", 4).bf16().data(2).zero(2)},
};
constexpr Move more_moves[] = {
    {trains("gpt2", 6).data(4).zero(3).shard_ranks(1),
     trains("gpt2", 6).data(6).zero(3).shard_ranks(3)},
    {trains("llama", 6).data(6).zero(3).shard_ranks(2), trains("llama", 6).data(2)},
    {trains("qwen2", 6).data(2), trains("qwen2", 6).data(6).zero(3)},
    {trains("mistral", 6).data(4).zero(1).shard_ranks(2), trains("mistral", 6).data(3).zero(2)},
    {trains("gpt2", 6).bf16().data(6).zero(2).shard_ranks(3),
     trains("gpt2", 6).bf16().data(4).zero(3)},
    {trains("llama", 6).bf16().data(3).zero(1),
     trains("llama", 6).bf16().data(6).zero(1).shard_ranks(2)},
    {trains("qwen3", 6).data(4).zero(3).shard_ranks(4),
     trains("qwen3", 6).data(4).zero(2).shard_ranks(2)},
    {trains("gpt2", 6).data(6).zero(3).shard_ranks(6), trains("gpt2", 6).data(2).zero(3)},
    {trains("qwen3", 6).tensor(2).data(3).zero(2), trains("qwen3", 6).tensor(2).data(2).zero(3)},
    {trains("llama", 6).tensor(2).zero(2).context(2),
     trains("llama", 6).data(3).zero(3).context(2)},
    {trains("qwen2", 6).data(3).zero(1), trains("qwen2", 6).context(4)},
    {trains("gpt2", 6).data(3).zero(2).shard_ranks(3).pipeline(2),
     trains("gpt2", 6).pipeline(2, "interleaved", 2)},
    {trains("qwen3", 6).bf16().tensor(2).zero(1).pipeline(2),
     trains("qwen3", 6).bf16().tensor(2).data(3).zero(3)},
    {trains("mistral", 6).data(6).zero(3), trains("mistral", 6).zero(1).pipeline(4)},
    {trains("gpt2", 6).bf16().zero(1).pipeline(4, "gpipe"),
     trains("gpt2", 6).bf16().data(3).zero(3).pipeline(2)},
    {trains("gpt2", 6).zero(1).context(2).pipeline(2), trains("gpt2", 6).tensor(2).data(3).zero(3)},
    {trains("llama", 6).tensor(2).pipeline(2, "interleaved", 2),
     trains("llama", 6).zero(3).context(2).pipeline(2)},
    {trains("qwen3", 6).bf16().zero(2).context(2).pipeline(2),
     trains("qwen3", 6).bf16().data(6).zero(1).shard_ranks(2)},
    {trains("mistral", 6).data(3).zero(3).shard_ranks(3).context(2),
     trains("mistral", 6).zero(1).context(2).pipeline(2, "zero_bubble")},
    {trains("qwen2", 6).tensor(2).zero(1).context(2), trains("qwen2", 6).zero(1).pipeline(5)},
    {trains("gpt2", 6).data(2).zero(2).shard_ranks(1).pipeline(3),
     trains("gpt2", 6).tensor(2).zero(3).context(2)},
    {trains("llama", 8).data(2).zero(3).pipeline(2, "interleaved", 2),
     trains("llama", 8).data(3).zero(2).pipeline(2, "zero_bubble")},
    {trains("gpt2", 6).bf16().data(3).zero(3).pipeline(2, "zero_bubble"),
     trains("gpt2", 6).bf16().data(6).zero(2)},
};

/// Tensor-parallel ranks round moments in blocks of their own parts.
bool has_other_blocks(const Move& move) {
    return std::string(move.from.state) == "int8" && move.from.tensor != move.to.tensor;
}
/// Half the distance of codes is at most 8 % in the three upper decades of a block.
bool are_rounded(const std::vector<float>& a, const std::vector<float>& b) {
    float largest = 0;
    for (const float x : a) largest = std::max(largest, std::abs(x));
    for (size_t i = 0; i < a.size(); ++i)
        if (!(std::abs(a[i] - b[i]) <= 0.08f * std::abs(a[i]) + 1e-3f * largest)) return false;
    return a.size() == b.size();
}

void check_moves(const World& world, std::span<const Move> moves) {
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    const std::filesystem::path folder = std::getenv("FOLDER");
    /// The model, whose sizes fit the mesh that needs more of them, is the same on both.
    const auto config_on = [&](const Move& move, const MeshCase& c, uint64_t of_move) {
        const bool from = move.from.tensor * move.from.context >= move.to.tensor * move.to.context;
        Config config = config_of(from ? move.from : move.to, of_move, "cpu");
        const Config own = config_of(c, of_move, "cpu");
        config.parallel = own.parallel;
        config.memory.offload = own.memory.offload;
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
        save_checkpoint(to,
                        {.step = 2,
                         .config = run.config(),
                         .spec = run.spec(),
                         .parameters = run.trainer().parameters,
                         .fp8 = run.trainer().fp8.history()},
                        run.mesh());
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
            CHECK(read_fp8(find_checkpoint(from), run.trainer().fp8).empty());
            run.trainer().parameters.weights.gather_all(run.trainer().stream);
            save(run, to);
        });
        if (world.rank() > 0) continue;
        const Tensors a = state_of(from, 2), b = state_of(to, 2);
        std::vector<std::string> different;
        for (const auto& [name, values] : a)
            if (!b.contains(name) || !(has_other_blocks(move) && !name.starts_with("master")
                                           ? are_rounded(values, b.at(name))
                                           : same_bits(values, b.at(name))))
                different.push_back(name);
        CHECK(different == std::vector<std::string>{});
        CHECK(a.size() == b.size());
        if (std::string(move.from.fp8) != "delayed") continue;
        const auto magnitudes = [](const std::filesystem::path& of) {
            return read(of / step_folder(2) / "fp8.safetensors");
        };
        CHECK(!magnitudes(from).empty());
        CHECK((magnitudes(from) == magnitudes(to)));
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

TEST_CASE("a checkpoint of one mesh has the same masters, moments, weights and scales on another",
          "[mesh][training]") {
    if (skip_without_mpirun()) return;
    const TemporaryDirectory folder;
    check_case_on_ranks(4, "ranks: few moves", {{"FOLDER", folder.path()}});
}

TEST_CASE("checkpoints move between many meshes", "[mesh][training][.][long]") {
    if (skip_without_mpirun()) return;
    const TemporaryDirectory folder;
    check_case_on_ranks(6, "ranks: more moves", {{"FOLDER", folder.path()}});
}
