// Whole matrices at their owners, whatever ranks hold of them.
#include "parallel/state/matrices.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <vector>

#include "model/families/family.h"
#include "test/catch.h"
#include "test/parallel/mesh_job.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "training/plan/traffic.h"

using namespace train_gpt;
using namespace train_gpt::mesh_job;

namespace {

constexpr MeshCase few_matrix_meshes[] = {
    trains("gpt2", 4).muon(),
    trains("llama", 4).data(4).zero(1).muon(),
    trains("qwen3", 4).data(2).muon(),
    trains("gpt2", 4).tensor(4).muon(),
    trains("llama", 4).bf16().tensor(2).data(2).zero(3).muon(),
    trains("mistral", 4).tensor(2).data(2).muon(),
    trains("qwen2", 4).tensor(2).context(2).zero(2).muon(),
    trains("gpt2", 4).data(4).zero(2).shard_ranks(2).muon(),
    trains("llama", 4).data(2).zero(1).pipeline(2, "interleaved", 2).muon(),
};
constexpr MeshCase more_matrix_meshes[] = {
    trains("llama", 8).tensor(2).data(4).zero(1).shard_ranks(2).muon(),
    trains("gpt2", 8).tensor(4).data(2).zero(3).muon(),
    trains("qwen3", 8).data(7).zero(2).muon(),
    trains("mistral", 8).tensor(2).data(2).zero(1).pipeline(2).muon(),
    trains("gpt2", 8).data(5).muon(),
    trains("llama", 8).tensor(2).context(4).zero(3).muon(),
    trains("llama", 8).bf16().tensor(4).context(2).zero(1).muon(),
};

/// A number that says which element of which parameter it is; exact in bf16 in its low digits.
float number_of(const Parameter& p, int64_t element, int round) {
    const uint64_t bits = (uint64_t{p.id} * 1000003 + static_cast<uint64_t>(element)) *
                          (round == 0 ? 0x9e3779b97f4a7c15u : 0xc2b2ae3d27d4eb4fu);
    return static_cast<float>(bits >> 57);
}

void check_mesh(const World& part, const Config& config, const MeshCase& c) {
    CAPTURE(mesh_job::name_of(c), config.optimizer.muon_heads);
    MeshRun run(part, Device{}, config);
    ParameterStore& store = run.trainer().parameters;
    Matrices& matrices = *store.matrices;
    const std::vector<OwnedMatrix> owned = owned_matrices(store);
    const auto with_type = [&](void* data, auto&& work) {
        with_float_type(matrices.dtype(), [&]<class T>(T) { work(static_cast<T*>(data)); });
    };
    /// Calls use(value, number) for each element of this rank's parts.
    const auto for_parts = [&](int round, const auto& use) {
        for (const Matrices::Part& of : matrices.parts()) {
            const ParameterStore::Piece& piece = store.pieces()[of.piece];
            const Parameter& p = store.parameters()[static_cast<size_t>(piece.parameter)];
            int64_t done = 0;
            const Range memory{piece.range.first + of.elements.first, of.elements.n};
            for (const HeldRun& held : runs_in_memory(held_runs(p), memory))
                with_type(of.values, [&](auto* values) {
                    for (int64_t i = 0; i < held.n; ++i)
                        use(values[done++], number_of(p, held.logical + i, round));
                });
            REQUIRE(done == of.elements.n);
        }
    };
    /// The same for the matrices that this rank owns. Groups have them in their order.
    const auto for_matrices = [&](int round, const auto& use) {
        std::map<std::pair<int64_t, int64_t>, int64_t> seen;
        const Sharding& s = store.sharding();
        for (const OwnedMatrix& matrix : owned) {
            if (matrix.owner != s.rank * s.tensors + s.tensor) continue;
            const Parameter& p = store.parameters()[static_cast<size_t>(matrix.parameter)];
            const auto group = std::ranges::find_if(matrices.groups(), [&](const MatrixGroup& g) {
                return g.shape.rows == matrix.rows.n && g.shape.cols == matrix.cols;
            });
            REQUIRE(group != matrices.groups().end());
            const int64_t first = seen[{matrix.rows.n, matrix.cols}]++ * matrix.numel();
            REQUIRE(first < group->count * matrix.numel());
            with_type(group->data, [&](auto* values) {
                for (int64_t i = 0; i < matrix.numel(); ++i)
                    use(values[first + i],
                        number_of(p, matrix.rows.first * matrix.cols + i, round));
            });
        }
    };
    int64_t wrong = 0;
    const auto write = [](auto& value, float number) {
        value = std::remove_reference_t<decltype(value)>(number);
    };
    const auto check = [&](const auto& value, float number) { wrong += to_float(value) != number; };
    const Traffic before = run.mesh().bytes_sent();
    for_parts(0, write);
    matrices.collect(run.trainer().stream);
    for_matrices(0, check);
    CHECK(wrong == 0);
    for_matrices(1, write);
    matrices.distribute(run.trainer().stream);
    for_parts(1, check);
    CHECK(wrong == 0);

    // What was sent is what the plan says, and in all no more than each element there and back.
    const Traffic after = run.mesh().bytes_sent();
    int64_t sent = 0;
    for (const auto& [group, bytes] : after) sent += bytes - before.at(group);
    CHECK(sent == matrices.bytes_sent());
    std::vector<double> sums{static_cast<double>(sent)};
    run.mesh().world().all_reduce_sum(sums);
    int64_t numel = 0;
    for (const Parameter& p : registry_of(run.spec()).parameters)
        if (p.update == Update::matrix) numel += p.numel();
    const Sharding& s = store.sharding();
    // Where the state is not split, results go to every rank.
    const int copies = s.replicas * (s.is_split() ? 1 : s.size);
    CHECK(sums[0] <=
          static_cast<double>(2 * copies * numel) * static_cast<double>(size_of(matrices.dtype())));
    if (run.mesh().size({Axis::data, Axis::context, Axis::tensor}) > s.replicas) CHECK(sums[0] > 0);
}

void check_matrix_meshes(const World& world, std::span<const MeshCase> cases) {
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    for (size_t i = 0; i < cases.size(); ++i) {
        const MeshCase& c = cases[i];
        const World part = world.split(world.rank() < c.ranks() ? 0 : 1);
        CAPTURE(seed);
        if (world.rank() < c.ranks()) check_mesh(part, config_of(c, seed + i, "cpu"), c);
        world.barrier();
    }
}

}  // namespace

TEST_CASE("matrices are dealt to the rank with the least to do", "[matrices]") {
    const Config config = config_of(trains("llama", 4).data(3).zero(1).muon(), 5, "cpu");
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    Arena counting = Arena::counting(Device{});
    const ParameterBuffers buffers(counting, registry_of(spec).parameters, DType::fp32,
                                   ParameterBuffers::Use::training,
                                   {.size = 3, .zero = 1, .matrices = MatrixUpdates{}});
    const std::vector<OwnedMatrix> owned = owned_matrices(buffers);
    CHECK(std::ssize(owned) == 7 * spec.n_layer);  // q, k, v, out, gate, up, down
    double costs[3] = {}, all = 0, largest = 0;
    for (const OwnedMatrix& m : owned) {
        const double cost = orthogonalization_cost(m.rows.n, m.cols);
        costs[m.owner] += cost, all += cost, largest = std::max(largest, cost);
        CHECK(m.cols == buffers.parameters()[static_cast<size_t>(m.parameter)].cols());
    }
    for (const double cost : costs) CHECK(std::abs(cost - all / 3) <= largest);
    // No two matrices of a rank overlap.
    for (const OwnedMatrix& a : owned)
        for (const OwnedMatrix& b : owned)
            if (&a != &b && a.owner == b.owner)
                CHECK((a.place + a.numel() <= b.place || b.place + b.numel() <= a.place));
}

TEST_CASE("each head of q, k and v can be a matrix of its own", "[matrices]") {
    const Config config = config_of(trains("llama", 4).muon(), 5, "cpu");
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    const Registry registry = registry_of(spec);
    const auto count = [&](int parameter, bool heads) {
        return std::ssize(matrices_of(registry.parameters[static_cast<size_t>(parameter)], heads));
    };
    const BlockParameters& block = registry.blocks[0];
    const LayerSpec layer = spec.layer(0);
    CHECK(count(block.qkv_w, false) == 3);
    CHECK(count(block.qkv_w, true) == layer.n_head + 2 * layer.n_kv_head);
    for (const bool heads : {false, true}) {
        CHECK(count(block.up_w, heads) == 2);
        CHECK(count(block.out_w, heads) == 1);
        CHECK(count(block.down_w, heads) == 1);
        int64_t rows = 0;
        for (const Range& r :
             matrices_of(registry.parameters[static_cast<size_t>(block.qkv_w)], heads)) {
            CHECK(r.first == rows);
            rows = r.end();
        }
        CHECK(rows == registry.parameters[static_cast<size_t>(block.qkv_w)].rows());
    }
}

TEST_CASE("Muon reads exact sums on the grids of a tensor's blocks, wherever its matrices begin",
          "[matrices][exact]") {
    // The momentum after the first step is the clipped gradient. Here q, k and v, gate and up begin
    // within blocks, and have several.
    const auto momentum = [](bool exact) {
        MeshCase c = trains("llama", 3).muon();
        c.exact = exact;
        Config config = config_of(c, 7, "cpu");
        config.model.n_embd = 84, config.model.head_size = 28, config.model.n_ff = 172;
        config.model.n_layer = 2;
        MeshRun run(World(), Device{}, config);
        if (exact)
            run.exact_step();
        else
            run.step();
        return run.values_of("m");
    };
    const std::vector<std::vector<double>> exact = momentum(true), plain = momentum(false);
    REQUIRE(exact.size() == plain.size());
    for (size_t i = 0; i < exact.size(); ++i) {
        double largest = 0, worst = 0;
        for (const double x : plain[i]) largest = std::max(largest, std::abs(x));
        for (size_t k = 0; k < plain[i].size(); ++k)
            worst = std::max(worst, std::abs(exact[i][k] - plain[i][k]));
        CAPTURE(i, largest);
        CHECK(worst <= 0x1p-12 * largest);
    }
}

TEST_CASE("ranks: few matrices", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_matrix_meshes(World::join(), few_matrix_meshes);
}

TEST_CASE("ranks: more matrices", "[.ranks]") {
    if (skip_outside_ranks()) return;
    check_matrix_meshes(World::join(), more_matrix_meshes);
}

TEST_CASE("owners get whole matrices from ranks that hold parts of them, and hand them back",
          "[matrices][mesh]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: few matrices");
}

TEST_CASE("owners get whole matrices on larger meshes", "[matrices][mesh][.][long]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(8, "ranks: more matrices", {});
}
