// The auxiliary losses of routers on meshes.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "model/families/family.h"
#include "model/router_counts.h"
#include "parallel/mesh.h"
#include "test/catch.h"
#include "test/parallel/mesh_job.h"
#include "test/parallel/ranks.h"
#include "test/random.h"

using namespace train_gpt;
using namespace train_gpt::mesh_job;

namespace {

using Gradients = std::vector<std::vector<double>>;

struct Loss {
    const char* name;
    double balance_rate;
    BalanceLevel level;
    double z_loss;
};
constexpr Loss no_loss{"none", 0, BalanceLevel::step, 0};
constexpr Loss losses[] = {{"balance of sequences", 10, BalanceLevel::sequence, 0},
                           {"balance of micro-batches", 10, BalanceLevel::micro_batch, 0},
                           {"balance of steps", 10, BalanceLevel::step, 0},
                           {"z-loss", 1, BalanceLevel::step, 1}};

Config with_loss(Config config, const Loss& loss, Recompute recompute) {
    config.router.balance =
        loss.balance_rate > 0 && loss.z_loss == 0 ? Balance::loss : Balance::none;
    config.router.balance_rate = loss.balance_rate;
    config.router.level = loss.level;
    config.router.z_loss = loss.z_loss;
    config.memory.recompute = recompute;
    config.model.n_layer = 3;
    return config;
}

/// The gradients of the second step. In the first one, a balance loss over steps has none: nothing
/// has been counted before it.
Gradients gradients_of(const World& world, const Device& device, const Config& config) {
    MeshRun run(world, device, config);
    run.step();
    run.step();
    return run.gradients();
}

double largest_loss(const std::vector<double>& values) {
    double most = 0;
    for (const double x : values) most = std::max(most, std::abs(x));
    return most;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
    double most = 0;
    for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
    return most;
}

void check_losses(const World& world, const Device& device, const MeshCase& c, uint64_t seed) {
    const std::string name = device.is_cuda() ? "cuda" : "cpu";
    const Config split = config_of(c, seed, name), whole = config_of(c, seed, name, false);
    const auto alone = [&](const Loss& loss) {
        return gradients_of(World(), device, with_loss(whole, loss, Recompute::none));
    };
    const Gradients without = alone(no_loss);
    const DecoderSpec spec =
        spec_of(with_loss(whole, no_loss, Recompute::none), whole.model.vocab_size);
    const Registry registry = registry_of(spec);
    for (const Loss& loss : losses) {
        CAPTURE(mesh_job::name_of(c), seed, loss.name);
        const Gradients expected = alone(loss);
        constexpr double bound = 4e-5;
        for (const BlockParameters& p : registry.blocks) {
            if (p.router_w < 0) continue;
            // Twice the loss would be far outside of the bound.
            const auto router = static_cast<size_t>(p.router_w);
            CHECK(largest_difference(expected[router], without[router]) >=
                  100 * bound * largest_loss(expected[router]));
        }
        for (const Recompute recompute :
             {Recompute::none, Recompute::elementwise, Recompute::block}) {
            CAPTURE(name_of(recompute));
            const Gradients gradients =
                gradients_of(world, device, with_loss(split, loss, recompute));
            for (size_t i = 0; i < gradients.size(); ++i) {
                CAPTURE(registry.parameters[i].name);
                CHECK(largest_difference(gradients[i], expected[i]) <=
                      bound * largest_loss(expected[i]));
            }
        }
    }
}

constexpr MeshCase axes[] = {
    trains("olmoe", 3).data(2).zero(3),
    trains("qwen2_moe", 2).tensor(2),
    trains("gpt_oss", 2).context(2).documents(),
    trains("mixtral", 3).pipeline(2),
};

}  // namespace

TEST_CASE("ranks: losses of routers", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const auto seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    on_parts(World::join(), axes, [&](const World& part, const MeshCase& c, size_t number) {
        check_losses(part, Device{}, c, seed + 101 * number);
    });
}

TEST_CASE("routers' auxiliary losses count once on every axis and at every level of recomputation",
          "[mesh][routers][training]") {
    if (skip_without_mpirun()) return;
    check_case_on_ranks(4, "ranks: losses of routers");
}
