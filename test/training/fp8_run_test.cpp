// Training in fp8: which products, with which scales, and what happens when numbers outgrow them.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/copy.h"
#include "device/profile.h"
#include "model/families/family.h"
#include "model/fp8_scales.h"
#include "test/catch.h"
#include "test/kernels/refused_launches.h"
#include "test/kernels/test_device.h"
#include "test/parallel/mesh_job.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/load_config.h"
#include "training/files/checkpoint.h"
#include "training/files/fp8_file.h"
#include "training/files/safetensors.h"
#include "training/plan/memory_plan.h"
#include "training/plan/plan.h"

using namespace train_gpt;
using namespace train_gpt::mesh_job;

namespace {

using RunValues = std::vector<std::vector<double>>;

/// A model that is trained in several ways.
struct Model {
    uint64_t seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    const char* family =
        std::array{"gpt2", "llama", "qwen3"}[static_cast<size_t>(random_int(0, 2))];
    bool in_bf16 = random_int(0, 1) == 1;
    Device device = {};

    Config config(const char* recipe) const {
        MeshRow c = trains(family, 3).fp8("delayed");  // the sizes of one that can be in fp8
        if (in_bf16) c = c.bf16();
        Config config = config_of(c, seed, device.is_cuda() ? "cuda" : "cpu", false);
        config.precision.fp8 = std::string_view(recipe);
        return config;
    }
    MeshRun run(const char* recipe) const { return MeshRun(World(), device, config(recipe)); }
};

/// A random model on each device. GPUs train in fp8 beside bf16.
std::vector<Model> models() {
    std::vector<Model> all;
    for (const Device& device : test_devices()) {
        Model model;
        model.device = device;
        model.in_bf16 |= device.is_cuda();
        all.push_back(model);
    }
    return all;
}

/// What an attempt says that is refused.
template <class F>
std::string refusal(const F& attempt) {
    try {
        attempt();
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

/// |a − b| / |b| of all elements together.
double distance(const RunValues& a, const RunValues& b) {
    double difference = 0, size = 0;
    for (size_t i = 0; i < b.size(); ++i)
        for (size_t k = 0; k < b[i].size(); ++k) {
            difference += (a[i][k] - b[i][k]) * (a[i][k] - b[i][k]);
            size += b[i][k] * b[i][k];
        }
    return std::sqrt(difference / size);
}

double evaluate(MeshRun& run) {
    const EvaluationBatch& batch = run.trainer().evaluation_batch;
    for (size_t i = 0; i < batch.tokens.size(); ++i) {
        batch.tokens[i] = static_cast<int32_t>(i * 7 % static_cast<size_t>(run.spec().vocab_size));
        batch.targets[i] = static_cast<int32_t>(i * 5 % static_cast<size_t>(run.spec().vocab_size));
        if (!batch.doc_start.empty()) batch.doc_start[i] = 0;
    }
    batch.run(run.trainer().stream, run.trainer().model);
    return batch.total(run.trainer().stream, run.trainer().model);
}

/// A copy of one run's weights in another.
void copy_weights(MeshRun& to, MeshRun& from) {
    for (size_t i = 0; i < to.trainer().parameters.parameters().size(); ++i) {
        const int p = static_cast<int>(i);
        std::vector<float> values(
            static_cast<size_t>(to.trainer().parameters.parameters()[i].numel()));
        from.trainer().parameters.state.read(ParameterState::master, p, 0, values);
        to.trainer().parameters.state.write(ParameterState::master, p, 0, values);
    }
}

void multiply(MeshRun& run, int parameter, float factor) {
    ParameterState& state = run.trainer().parameters.state;
    std::vector<float> values(static_cast<size_t>(
        run.trainer().parameters.parameters()[static_cast<size_t>(parameter)].numel()));
    state.read(ParameterState::master, parameter, 0, values);
    for (float& value : values) value *= factor;
    state.write(ParameterState::master, parameter, 0, values);
}

/// Multiplies the weights of the norm before an MLP, and with them the input of `up`.
void multiply_norm(MeshRun& run, int layer, float factor) {
    const Registry& registry = run.trainer().registry.stages.front();
    multiply(run, registry.blocks[static_cast<size_t>(layer)].norm2_w, factor);
}

/// Makes one element of a weight NaN. Returns the weight's product.
std::string spoil_weight(MeshRun& run) {
    constexpr std::pair<const char*, int BlockParameters::*> weights[] = {
        {"qkv", &BlockParameters::qkv_w},
        {"out", &BlockParameters::out_w},
        {"up", &BlockParameters::up_w},
        {"down", &BlockParameters::down_w}};
    const int layer = static_cast<int>(random_int(0, run.spec().n_layer - 1));
    const auto& [word, member] = weights[random_int(0, 3)];
    const Registry& registry = run.trainer().registry.stages.front();
    const int weight = registry.blocks[static_cast<size_t>(layer)].*member;
    ParameterState& state = run.trainer().parameters.state;
    std::vector<float> values(static_cast<size_t>(
        run.trainer().parameters.parameters()[static_cast<size_t>(weight)].numel()));
    state.read(ParameterState::master, weight, 0, values);
    values[static_cast<size_t>(random_int(0, std::ssize(values) - 1))] = NAN;
    state.write(ParameterState::master, weight, 0, values);
    return concat(layer, ".", word);
}

/// The largest magnitudes of an operand, step by step.
std::vector<float> amax_of(const MeshRun& run, const std::string& operand) {
    const Fp8History history = const_cast<MeshRun&>(run).trainer().fp8.history();
    const auto at = std::ranges::find(history.operands, operand) - history.operands.begin();
    std::vector<float> found;
    for (size_t i = static_cast<size_t>(at); i < history.amax.size(); i += history.operands.size())
        found.push_back(history.amax[i]);
    return found;
}

/// The operands whose largest magnitude in the last step was more than the steps before had scaled
/// to a format's largest number.
std::vector<std::string> saturated_in_last_step(const MeshRun& run) {
    const Fp8History history = const_cast<MeshRun&>(run).trainer().fp8.history();
    const size_t n = history.operands.size();
    std::vector<std::string> found;
    for (size_t i = 0; i < n; ++i) {
        float before = 0;
        for (size_t at = i; at + n < history.amax.size(); at += n)
            before = std::max(before, history.amax[at]);
        if (before == 0) continue;  // no scale: each call takes its own
        const float largest = history.operands[i].starts_with("gradient") ? 57344.0f : 448.0f,
                    scale = largest / std::max(before, 1e-12f),
                    now = history.amax[history.amax.size() - n + i];
        if (now * scale > largest * (1 + 0x1p-20f)) found.push_back(history.operands[i]);
    }
    return found;
}

}  // namespace

TEST_CASE("a step in fp8 has nearly the gradients of other steps, and evaluation is not in fp8",
          "[fp8][training]") {
    const Model model;
    CAPTURE(model.seed, model.family, model.in_bf16);
    MeshRun plain = model.run("off");
    const double loss = plain.step().sums.loss;
    const RunValues expected = plain.gradients();
    for (const char* recipe : {"delayed", "current"}) {
        CAPTURE(recipe);
        MeshRun run = model.run(recipe);
        CHECK(std::abs(run.step().sums.loss / loss - 1) < 0.01);
        // Relative roundings of 2^−4 and 2^−3 at most, half as much on average, in few layers
        const double error = distance(run.gradients(), expected);
        CHECK(error < 0.2);
        CHECK(error > 0.005);
        copy_weights(run, plain);
        CHECK(evaluate(run) == evaluate(plain));
    }
}

TEST_CASE("a GPU trains in fp8 like a CPU", "[fp8][training][cuda]") {
    if (test_devices().size() < 2) return;
    for (const char* recipe : {"delayed", "current"}) {
        Model model = models().back();
        CAPTURE(recipe, model.seed, model.family);
        MeshRun gpu = model.run(recipe);
        model.device = Device{};
        MeshRun cpu = model.run(recipe);
        for (int step = 0; step < 3; ++step) {
            const StepOutcome expected = cpu.step(), outcome = gpu.step();
            CAPTURE(step);
            CHECK(std::abs(outcome.sums.loss / expected.sums.loss - 1) < 0.005);
            CHECK(std::abs(outcome.state.norm / expected.state.norm - 1) < 0.1);
            CHECK(outcome.fp8.steps == step + 1);
        }
        const Fp8History of_cpu = cpu.trainer().fp8.history(), of_gpu = gpu.trainer().fp8.history();
        CHECK(of_gpu.operands == of_cpu.operands);
        for (size_t i = 0; i < of_cpu.operands.size(); ++i)
            if (std::string(recipe) == "delayed" && of_cpu.operands[i].starts_with("weight"))
                CHECK(of_gpu.amax[i] == of_cpu.amax[i]);
    }
}

namespace {

/// How many parameters are the weights of products in fp8.
int64_t weights_in_fp8(MeshRun& run) {
    int64_t count = 0;
    for (size_t i = 0; i < run.trainer().parameters.parameters().size(); ++i)
        count += run.trainer().fp8.of(static_cast<int>(i)) != nullptr;
    return count;
}

}  // namespace

TEST_CASE("weights are rounded once a step, for all micro-batches and both passes",
          "[fp8][training]") {
    for (const char* recipe : {"delayed", "current"}) {
        const Model model;
        CAPTURE(recipe, model.seed, model.family, model.in_bf16);
        MeshRun run = model.run(recipe);
        Profiler profiler{Device{}};
        run.trainer().stream.profiler = &profiler;
        for (int step = 1; step <= 3; ++step) {
            run.step();
            int64_t rounded = 0;  // apart from products, within which activations are rounded
            for (const Profiler::Total& total : profiler.totals())
                if (total.kind == "fp8_round") rounded += total.calls;
            CHECK(rounded == step * weights_in_fp8(run));
        }
        evaluate(run);  // is not in fp8
        for (const Profiler::Total& total : profiler.totals())
            if (total.kind == "fp8_round") CHECK(total.calls == 3 * weights_in_fp8(run));
        run.trainer().stream.profiler = nullptr;
    }
}

TEST_CASE("on a GPU a gradient is rounded once for both products that read it",
          "[fp8][training][cuda]") {
    if (test_devices().size() < 2) return;
    for (const char* recipe : {"delayed", "current"}) {
        const Model model;
        CAPTURE(recipe, model.seed, model.family, model.in_bf16);
        Config config = model.config(recipe);
        config.device = "cuda";
        MeshRun run(World(), test_devices().back(), config);
        Profiler profiler{test_devices().back()};
        run.trainer().stream.profiler = &profiler;
        run.step();
        int64_t rounded = 0;  // apart from what a product rounds itself
        for (const Profiler::Total& total : profiler.totals())
            if (total.kind == "fp8_round") rounded += total.calls;
        const int64_t micro_batches =
            config.batch.tokens_per_step / (config.batch.micro_batch * config.sequence_length());
        CAPTURE(micro_batches);
        CHECK(rounded == (1 + micro_batches) * weights_in_fp8(run));
        run.trainer().stream.profiler = nullptr;
    }
}

TEST_CASE("a warm-up runs the kernels that round their results, and leaves no scales",
          "[fp8][training][cuda]") {
    if (test_devices().size() < 2) return;
    const Device& device = test_devices().back();
    Model model;
    model.in_bf16 = true;
    CAPTURE(model.seed, model.family);
    Config config = model.config("delayed");
    config.device = "cuda";
    MeshRun run(World(), device, config, [&](Trainer& trainer) {
        trainer.warm_up();
        for (const BlockParameters& block : trainer.registry.stages.front().blocks)
            for (const int weight : {block.qkv_w, block.up_w, block.down_w}) {
                const Fp8Scaling& x = trainer.fp8.of(weight)->x;
                float scale = NAN, inverse = NAN;
                copy_now(device, &scale, x.scale, sizeof scale);
                copy_now(device, &inverse, x.inverse, sizeof inverse);
                CHECK_FALSE(x.is_set);
                CHECK(scale == 0);
                CHECK(inverse == 1);  // only such a kernel writes it
            }
    });
    CHECK(run.trainer().fp8.history().amax.empty());
    MeshRun other(World(), device, config);
    for (int step = 0; step < 2; ++step) CHECK(run.step().sums.loss == other.step().sums.loss);
}

TEST_CASE("a plan says which products are in fp8", "[fp8][plan]") {
    const Model model;
    Config config = model.config("current");
    config.precision.fp8_skip = {"0"};
    const int layers = config.model.n_layer;
    CAPTURE(model.family, layers);
    CHECK(contains(plan_report(config, PlanTarget(Device{}), 1).text,
                   concat("precision    fp8 (current scaling): ", 4 * (layers - 1), " of ",
                          4 * layers, " products of blocks; in ", model.in_bf16 ? "bf16" : "fp32",
                          ": 0.qkv, 0.out, 0.up, 0.down (")));
    config.precision.fp8 = Fp8Recipe::off;
    CHECK(!contains(plan_report(config, PlanTarget(Device{}), 1).text, "precision    "));
}

TEST_CASE("plans count rounded weights: all, or with ZeRO-3 those of two buckets",
          "[fp8][plan][cuda]") {
    ON_EACH_DEVICE();
    const Model model;
    CAPTURE(model.seed, model.family, model.in_bf16);
    for (const int ranks : {1, 2}) {
        Config config = model.config("delayed");
        config.parallel.zero = ranks > 1 ? 3 : 0;
        config.parallel.bucket_mb = 0.001;  // a bucket for each layer
        const DecoderSpec spec = spec_of(config, config.model.vocab_size);
        const DType dtype = model.in_bf16 ? DType::bf16 : DType::fp32;
        const auto bytes = [&](Fp8Recipe recipe) {
            config.precision.fp8 = recipe;
            return plan_memory({config, spec, dtype, Recompute::none, ranks}, test_device())
                .bytes(Purpose::parameters);
        };
        // The weights of a layer's products: codes in both orders on a GPU.
        const Registry registry = registry_of(spec);
        size_t of_layer = 0;
        for (const int i : {registry.blocks[0].qkv_w, registry.blocks[0].out_w,
                            registry.blocks[0].up_w, registry.blocks[0].down_w})
            of_layer +=
                static_cast<size_t>(registry.parameters[static_cast<size_t>(i)].padded_numel()) *
                (test_device().is_cuda() ? 2 : size_of(dtype));
        const size_t layers = ranks > 1 ? 2 : registry.blocks.size(),
                     more = bytes(Fp8Recipe::delayed) - bytes(Fp8Recipe::off);
        CAPTURE(ranks, more, of_layer, layers);
        CHECK(more >= layers * of_layer);
        CHECK(more <= layers * of_layer + 4 * 1024);  // alignment, and reciprocals of scales
    }
}

TEST_CASE("kernels that round their results train to the bits of separate casts",
          "[fp8][training][cuda]") {
    if (test_devices().size() < 2) return;
    struct Way {
        const char* family;
        std::vector<std::string> skip = {};
    };
    // GELU is a part of the product before it, which need not be in fp8 itself.
    const Way ways[] = {{"gpt2"}, {"gpt2", {"up"}}, {"llama"}, {"qwen3"}};
    const std::array recomputes = {"none", "elementwise", "block"};
    int64_t turn = random_int(0, 2);
    for (const Way& way : ways) {
        Model model;
        model.family = way.family, model.device = test_devices().back();
        model.in_bf16 |= !way.skip.empty();
        const char* const recompute = recomputes[static_cast<size_t>(turn++ % 3)];
        const bool has_relu2 =
            std::string_view(way.family) == "gpt2" && way.skip.empty() && random_int(0, 1) == 1;
        CAPTURE(recompute, model.seed, model.family, model.in_bf16, has_relu2, way.skip);
        Config config = model.config("delayed");
        config.memory.recompute = std::string_view(recompute);
        config.precision.fp8_skip = way.skip;
        if (has_relu2) config.model.mlp = Mlp::relu2;
        MeshRun fused(World(), model.device, config), separate(World(), model.device, config);
        const auto scales_are_known = [](MeshRun& run) {
            const int weight = run.trainer().registry.stages.front().blocks[0].down_w;
            return run.trainer().fp8.of(weight)->x.is_set;
        };
        // Kernels round once the host has seen that scales are known.
        fused.step();
        CHECK(scales_are_known(fused));
        separate.submit();
        const double loss = fused.step().sums.loss;
        CHECK_FALSE(scales_are_known(separate));
        separate.submit();
        separate.trainer().outcome();
        CHECK(separate.trainer().outcome().sums.loss == loss);
        CHECK((fused.gradients() == separate.gradients()));
        CHECK((fused.values_of("master") == separate.values_of("master")));
        CHECK(fused.trainer().fp8.history().amax == separate.trainer().fp8.history().amax);
    }
}

#ifdef TRAIN_GPT_CUDA

TEST_CASE("a GPU trains in bf16 where cuBLASLt refuses fp8, and says so", "[fp8][training][cuda]") {
    if (test_devices().size() < 2) return;
    Model model;
    model.device = test_devices().back(), model.in_bf16 = true;
    CAPTURE(model.seed, model.family);
    struct Result {
        std::vector<double> losses;
        RunValues gradients, masters;
        std::vector<std::string> refusals;
    };
    const auto train = [&](const char* recipe) {
        MeshRun run(World(), model.device, model.config(recipe),
                    [](Trainer& trainer) { trainer.warm_up(); });
        Result result;
        for (int step = 0; step < 2; ++step) {
            const StepOutcome outcome = run.step();
            result.losses.push_back(outcome.sums.loss);
            CHECK(std::isfinite(outcome.sums.loss));
            CHECK(std::isfinite(outcome.state.norm));
            CHECK(outcome.fp8.not_finite == -1);
        }
        result.gradients = run.gradients(), result.masters = run.values_of("master");
        result.refusals = fp8_refusals(run.trainer().stream);
        return result;
    };
    const Result in_bf16 = train("off");
    CHECK(in_bf16.refusals.empty());
    {
        const RefusedLaunches launches(RefusedLaunches::all);
        const Result refused = train("delayed");
        CHECK(refused.refusals.size() > 1);
        CHECK(refused.losses == in_bf16.losses);
        CHECK((refused.gradients == in_bf16.gradients));
        CHECK((refused.masters == in_bf16.masters));
    }
    const RefusedLaunches launches(RefusedLaunches::all, true);
    const Result partly = train("delayed");
    CHECK(partly.refusals.size() == 1);
    CHECK((partly.gradients != in_bf16.gradients));  // the other products are in fp8
    for (size_t step = 0; step < partly.losses.size(); ++step)
        CHECK(std::abs(partly.losses[step] / in_bf16.losses[step] - 1) < 0.01);
}

#endif  // TRAIN_GPT_CUDA

TEST_CASE("delayed scaling begins like current scaling, and its weight gradients may stay out",
          "[fp8][training]") {
    const Model model;
    CAPTURE(model.seed, model.family, model.in_bf16);
    MeshRun delayed = model.run("delayed"), current = model.run("current");
    CHECK(delayed.step().sums.loss == current.step().sums.loss);
    CHECK(delayed.gradients() == current.gradients());
    delayed.step(), current.step();
    CHECK(delayed.gradients() != current.gradients());

    Config config = model.config("current");
    config.precision.fp8_weight_gradient = false;
    MeshRun high(World(), Device{}, config), again = model.run("current");
    CHECK(high.step().sums.loss == again.step().sums.loss);
    CHECK(high.gradients() != again.gradients());
}

TEST_CASE("delayed scales follow from the largest magnitude of all micro-batches before",
          "[fp8][training]") {
    const Model model;
    CAPTURE(model.seed, model.family, model.in_bf16);
    MeshRun run = model.run("delayed");
    // The weights are the same in all micro-batches of a step.
    const int weight = run.trainer().registry.stages.front().blocks[1].up_w;
    std::vector<float> largest;
    for (int step = 0; step < 4; ++step) {
        const Parameter& p = run.trainer().parameters.parameters()[static_cast<size_t>(weight)];
        std::vector<float> values(static_cast<size_t>(p.numel()));
        run.trainer().parameters.state.read_weights(weight, 0, values);
        float most = 0;
        for (const float value : values) most = std::max(most, std::abs(value));
        largest.push_back(most);
        CHECK(run.step().fp8.steps == step + 1);
    }
    CHECK(amax_of(run, "weight of 1.up") == largest);
    for (const float amax : amax_of(run, "gradient of 0.qkv")) CHECK(amax > 0);
}

TEST_CASE("an activation that grows 2^12 times saturates, is counted, and fits from then on",
          "[fp8][training][cuda]") {
    for (const Model& model : models()) {
        CAPTURE(model.device.is_cuda(), model.seed, model.family, model.in_bf16);
        MeshRun run = model.run("delayed"), twin = model.run("delayed");  // without a spike
        double loss_of_twin = 0;
        const auto step = [&] {
            loss_of_twin = twin.step().sums.loss;
            const StepOutcome outcome = run.step();
            CHECK(outcome.fp8.saturated == std::ssize(saturated_in_last_step(run)));
            CHECK(outcome.fp8.not_finite == -1);
            CHECK(outcome.state.stop == 0);
            CHECK(std::isfinite(outcome.sums.loss));
            CHECK(std::isfinite(outcome.state.norm));
            return outcome;
        };
        for (int i = 0; i < 2; ++i) {
            const double loss = step().sums.loss;  // also sets loss_of_twin
            CHECK(loss == loss_of_twin);
        }
        const int layer = static_cast<int>(random_int(0, run.spec().n_layer - 1));
        const std::string operand = concat("input of ", layer, ".up");
        CAPTURE(layer);
        const auto saturates = [&] {
            return std::ranges::count(saturated_in_last_step(run), operand) > 0;
        };
        multiply_norm(run, layer, 0x1p12f);
        CHECK(step().fp8.saturated > 0);
        CHECK(saturates());
        const std::vector<float> amax = amax_of(run, operand);
        CHECK(amax.back() > 0x1p10f * amax.front());
        // The input itself depends on the blocks before, whose scales the spike does not change. Of
        // other tokens it may be a little larger, which is counted then.
        step();
        CHECK(amax_of(run, operand).back() < 1.5f * amax.back());
        multiply_norm(run, layer, 0x1p-12f);
        for (int i = 0; i < 2; ++i) {
            const double loss = step().sums.loss;
            CHECK_FALSE(saturates());
            CHECK(std::abs(loss / loss_of_twin - 1) < 0.05);
        }
        CHECK(amax_of(run, operand).back() < 2 * amax.front());
    }
}

TEST_CASE("infinity and NaN go through fp8, and the first operand with one is named",
          "[fp8][training][cuda]") {
    for (const char* recipe : {"delayed", "current"})
        for (const float value :
             {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
            for (const Model& model : models()) {
                CAPTURE(recipe, value, model.device.is_cuda(), model.seed, model.family,
                        model.in_bf16);
                MeshRun run = model.run(recipe);
                run.step();
                const Fp8History before = run.trainer().fp8.history();
                const int layer = static_cast<int>(random_int(0, run.spec().n_layer - 1));
                multiply_norm(run, layer, value);
                const StepOutcome outcome = run.step();
                CHECK(outcome.state.stop != 0);
                REQUIRE(outcome.fp8.not_finite >= 0);
                CHECK(run.trainer().fp8.name_of(outcome.fp8.not_finite) ==
                      concat("input of ", layer, ".up"));
                CHECK(run.trainer().fp8.history().amax == before.amax);
            }
}

TEST_CASE("a gradient that is not finite is named by the product that reads it first",
          "[fp8][training][cuda]") {
    for (const char* recipe : {"delayed", "current"})
        for (const bool is_mixture : {false, true})
            for (Model model : models()) {
                if (is_mixture) model.family = "olmoe";
                CAPTURE(recipe, model.device.is_cuda(), model.seed, model.family, model.in_bf16);
                MeshRun run = model.run(recipe);
                run.step();
                const Fp8History before = run.trainer().fp8.history();
                // Forward, no product of a block reads what comes after this norm.
                multiply(run, run.trainer().registry.stages.front().final_norm_w,
                         std::numeric_limits<float>::infinity());
                const StepOutcome outcome = run.step();
                CHECK(outcome.state.stop != 0);
                REQUIRE(outcome.fp8.not_finite >= 0);
                CHECK(run.trainer().fp8.name_of(outcome.fp8.not_finite) ==
                      concat("gradient of ", run.spec().n_layer - 1, ".down"));
                CHECK(run.trainer().fp8.history().amax == before.amax);
            }
}

TEST_CASE("a NaN that begins in a weight is named by the weight, not by what it spoils",
          "[fp8][training][cuda]") {
    for (const char* recipe : {"delayed", "current"})
        for (const Model& model : models()) {
            CAPTURE(recipe, model.device.is_cuda(), model.seed, model.family, model.in_bf16);
            MeshRun run = model.run(recipe);
            run.step();
            const std::string product = spoil_weight(run);
            const StepOutcome outcome = run.step();
            CHECK(outcome.state.stop != 0);
            REQUIRE(outcome.fp8.not_finite >= 0);
            CHECK(run.trainer().fp8.name_of(outcome.fp8.not_finite) == "weight of " + product);
        }
}

TEST_CASE("a run in fp8 continues from its checkpoint bit for bit, with the scales",
          "[fp8][checkpoint][cuda]") {
    struct Way {
        const char* recipe;
        std::vector<std::string> skip = {};
    };
    const Way ways[] = {{"current"}, {"delayed"}, {"delayed", {"up"}}, {"delayed", {"0"}}};
    for (const Way& way : ways)
        for (Model model : models()) {
            if (way.skip == std::vector<std::string>{"up"}) model.family = "gpt2";
            CAPTURE(way.recipe, way.skip, model.device.is_cuda(), model.seed, model.family,
                    model.in_bf16);
            Config config = model.config(way.recipe);
            config.precision.fp8_skip = way.skip;
            const int steps = model.device.is_cuda() ? 2 : 3;
            const TemporaryDirectory folder;
            MeshRun first(World(), model.device, config), second(World(), model.device, config);
            for (int i = 0; i < steps; ++i) first.step();
            const Fp8History history = first.trainer().fp8.history();
            const auto checkpoint =
                save_checkpoint(folder.path(), {.step = steps,
                                                .config = first.config(),
                                                .spec = first.spec(),
                                                .parameters = first.trainer().parameters,
                                                .fp8 = history});
            load_training_state(checkpoint, second.trainer().parameters);
            second.trainer().parameters.weights.gather_all(second.trainer().stream);
            CHECK(read_fp8(checkpoint, second.trainer().fp8).empty());
            CHECK(second.trainer().fp8.history().amax == history.amax);
            second.skip(steps);
            for (int i = 0; i < steps; ++i)
                CHECK(first.step().sums.loss == second.step().sums.loss);
            CHECK((first.values_of("master") == second.values_of("master")));
            CHECK(first.trainer().fp8.history().amax == second.trainer().fp8.history().amax);
        }
}

TEST_CASE("a checkpoint gives what it has of a history, others begin anew, and damage is refused",
          "[fp8][checkpoint]") {
    const Model model;
    CAPTURE(model.seed, model.family, model.in_bf16);
    MeshRun run = model.run("delayed");
    for (int i = 0; i < 2; ++i) run.step();
    const Fp8History history = run.trainer().fp8.history();
    const TemporaryDirectory folder;
    Fp8Scales& scales = run.trainer().fp8;
    const size_t n = history.operands.size();
    CHECK(read_fp8(folder.path(), scales) == history.operands);
    CHECK(scales.history().amax == history.amax);
    // Of another order, as files of earlier versions.
    Fp8History backwards = history;
    std::ranges::reverse(backwards.operands);
    for (size_t step = 0; step < 2; ++step)
        std::reverse(backwards.amax.begin() + static_cast<std::ptrdiff_t>(step * n),
                     backwards.amax.begin() + static_cast<std::ptrdiff_t>((step + 1) * n));
    write_fp8(folder.path(), backwards);
    scales.set_history({});
    CHECK(read_fp8(folder.path(), scales).empty());
    CHECK(scales.history().amax == history.amax);
    // Without one of the operands.
    const auto missing = static_cast<size_t>(random_int(0, std::ssize(history.operands) - 1));
    Fp8History fewer = history;
    fewer.operands[missing] = "input of something else";
    write_fp8(folder.path(), fewer);
    CHECK(read_fp8(folder.path(), scales) == std::vector{history.operands[missing]});
    Fp8History expected = history;
    for (size_t step = 0; step < 2; ++step) expected.amax[step * n + missing] = 0;
    CHECK(scales.history().amax == expected.amax);
    const StepOutcome next = run.step();
    CHECK(next.fp8.steps == 3);
    CHECK(next.fp8.unset == 0);
    CHECK(amax_of(run, history.operands[missing]).back() > 0);
    for (const float bad :
         {-1.0f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        Fp8History damaged = history;
        damaged.amax[static_cast<size_t>(random_int(0, std::ssize(damaged.amax) - 1))] = bad;
        write_fp8(folder.path(), damaged);
        CHECK(contains(refusal([&] { read_fp8(folder.path(), run.trainer().fp8); }),
                       "negative or not finite"));
    }
}

TEST_CASE("scales of new products stay unknown while no step has changed anything", "[fp8]") {
    const std::vector<Fp8Product> products{{.name = "0.up", .weight = "w", .id = 0}};
    Arena counting = Arena::counting(Device{});
    Parameter weight;
    weight.name = "w", weight.shape = weight.padded = {64, 64};
    const Fp8Options options{.recipe = Fp8Recipe::delayed};
    Fp8Scales counted(options, products, {weight}, counting);
    Arena arena = allocate(counting);
    Fp8Scales scales(options, products, {weight}, arena);
    const ProductScales* const of = scales.of(0);
    REQUIRE(of);
    Stream stream;
    const auto step = [&](const StepState& state) {
        scales.begin_step(stream);
        *of->x.amax = *of->w.amax = *of->dy.amax = 1 + std::abs(random_normal(1)[0]);
        scales.finish_step(stream, &state);
        scales.copy_to_host(stream, 0);
        return scales.found(0);
    };
    // A checkpoint has magnitudes of some of the operands only.
    Fp8History history = scales.history();
    history.amax.assign(3, 1 + std::abs(random_normal(1)[0]));
    history.amax[static_cast<size_t>(random_int(0, 2))] = 0;
    scales.set_history(history);
    StepState changes_nothing;
    const int why = static_cast<int>(random_int(0, 2));
    CAPTURE(why);
    (why == 0   ? changes_nothing.stop
     : why == 1 ? changes_nothing.overflow
                : changes_nothing.skip) = 1;
    CHECK(step(changes_nothing).unset == 1);
    CHECK_FALSE(of->x.is_set);
    CHECK(step({}).unset == 0);
    CHECK(of->x.is_set);
}

TEST_CASE("a history longer than 1024 steps keeps the last ones", "[fp8]") {
    const std::vector<Fp8Product> products{{.name = "0.up", .weight = "w", .id = 0}};
    Arena counting = Arena::counting(Device{});
    Parameter weight;
    weight.name = "w", weight.shape = weight.padded = {64, 64};
    const Fp8Options options{.recipe = Fp8Recipe::delayed};
    Fp8Scales counted(options, products, {weight}, counting);
    Arena arena = allocate(counting);
    Fp8Scales scales(options, products, {weight}, arena);
    const ProductScales* const of = scales.of(0);
    REQUIRE(of);
    CHECK(scales.of(-1) == nullptr);
    Stream stream;
    const StepState state;
    std::vector<float> all;
    const int64_t steps = Fp8Scales::history_steps + random_int(1, 1500);
    for (int64_t step = 0; step < steps; ++step) {
        scales.begin_step(stream);
        all.push_back(std::abs(random_normal(1)[0]) + 0.1f);
        *of->x.amax = all.back(), *of->w.amax = 1, *of->dy.amax = 2;
        scales.finish_step(stream, &state);
    }
    const auto first = all.end() - Fp8Scales::history_steps;
    CHECK(*of->x.scale == 448.0f / *std::max_element(first, all.end()));
    CHECK(*of->w.scale == 448.0f);
    CHECK(*of->dy.scale == 28672.0f);
    const Fp8History history = scales.history();
    std::vector<float> kept;
    for (size_t i = 0; i < history.amax.size(); i += 3) kept.push_back(history.amax[i]);
    CHECK(kept == std::vector<float>(first, all.end()));
    // Continued, the next scale is the same.
    scales.set_history(history);
    CHECK(*of->x.scale == 448.0f / *std::max_element(first, all.end()));
    CHECK(*of->w.scale == 448.0f);
    CHECK(*of->dy.scale == 28672.0f);
    scales.begin_step(stream);
    CHECK(*of->x.amax == 0);
    CHECK(*of->w.amax == 0);
    CHECK(*of->dy.amax == 0);
    scales.finish_step(stream, &state);
    CHECK(*of->x.scale == 448.0f / *std::max_element(first + 1, all.end()));
}

TEST_CASE("small and unaligned products and those that are named stay out of fp8",
          "[fp8][config]") {
    const auto products = [](const std::vector<std::string>& settings,
                             const std::vector<std::string>& skip, int tensor = 1,
                             int64_t tokens = 128) {
        std::vector<std::string> all{"run_dir=unused",   "data.train=synthetic",
                                     "schedule.steps=1", "model.vocab_size=300",
                                     "model.n_layer=2",  "model.n_head=4"};
        all.insert(all.end(), settings.begin(), settings.end());
        const Config config = parse_config("{}", "test", all);
        return products_of(registry_of(spec_of(config, 300)),
                           {.recipe = Fp8Recipe::delayed, .skip = skip}, tensor, tokens);
    };
    const auto reasons = [](const std::vector<Fp8Product>& of) {
        std::string text;
        for (const Fp8Product& product : of) text += concat(product.name, ":", product.reason, ";");
        return text;
    };
    const std::vector<std::string> wide{"model.n_embd=256"}, narrow{"model.n_embd=128"};
    CHECK(reasons(products(wide, {})) ==
          "0.qkv:;0.out:;0.up:;0.down:;1.qkv:;1.out:;1.up:;1.down:;");
    CHECK(reasons(products(wide, {"1", "out", "0.down"})) ==
          "0.qkv:;0.out:named in precision.fp8_skip;0.up:;0.down:named in precision.fp8_skip;"
          "1.qkv:named in precision.fp8_skip;1.out:named in precision.fp8_skip;"
          "1.up:named in precision.fp8_skip;1.down:named in precision.fp8_skip;");
    for (const Fp8Product& product : products(narrow, {}, 4))
        CHECK(product.reason ==
              (product.name.ends_with("out") ? "32 inputs on a rank are fewer than 64" : ""));
    CHECK(products({"model.n_embd=120"}, {}).front().reason ==
          "120 inputs are not a multiple of 16");
    CHECK(products({"model.n_embd=60"}, {}).front().reason == "60 inputs are fewer than 64");
    CHECK(contains(products(wide, {}, 1, 24).front().reason, "24 tokens"));
    const std::vector<Fp8Product> mixture =
        products({"model.family=olmoe", "model.n_embd=256", "model.n_expert=4",
                  "model.n_expert_per_token=2", "model.n_ff_expert=64"},
                 {});
    CHECK(reasons(mixture).starts_with("0.qkv:;0.out:;0.up:;0.down:;1.qkv:;"));
    CHECK(Fp8Scales::operands(mixture) == 24);
    CHECK(described(mixture, {.recipe = Fp8Recipe::delayed}, DType::bf16) ==
          "fp8 (delayed scaling): 8 of 8 products of blocks, weight gradients of experts in bf16");
    const std::vector<Fp8Product> small =
        products({"model.family=olmoe", "model.n_embd=256", "model.n_expert=4",
                  "model.n_expert_per_token=2", "model.n_ff_expert=48"},
                 {});
    CHECK(described(small, {.recipe = Fp8Recipe::delayed}, DType::bf16) ==
          "fp8 (delayed scaling): 6 of 8 products of blocks, weight gradients of experts in bf16; "
          "in bf16: 0.down, 1.down (48 inputs are fewer than 64)");

    const auto registry = [](const std::vector<std::string>& settings) {
        std::vector<std::string> all{"run_dir=unused", "data.train=synthetic", "schedule.steps=1",
                                     "model.n_layer=2"};
        all.insert(all.end(), settings.begin(), settings.end());
        return registry_of(spec_of(parse_config("{}", "test", all), 300));
    };
    const Registry dense = registry({"model.vocab_size=300"}),
                   shared = registry({"model.family=qwen2_moe", "model.vocab_size=300",
                                      "model.n_expert=4", "model.n_expert_per_token=2"});
    CHECK(skip_problem({"0", "1", "qkv", "1.down"}, dense).empty());
    CHECK(skip_problem({"0", "1", "qkv", "1.down", "shared_up", "0.shared_down"}, shared).empty());
    for (const char* wrong : {"", "x", "2", "0.x", "0.", "1up", "-1", "0down", ".up", "up.0", "01",
                              "-0", "01.down", "2.down", "shared_up", "0.shared_down"}) {
        const std::string problem = skip_problem({"0", wrong}, dense);
        CHECK(contains(problem, concat("precision.fp8_skip has \"", wrong, "\"")));
        CHECK(contains(problem, "write a layer (0 to 1), a product (qkv, out, up, down), or"));
    }
}

TEST_CASE("a configuration whose products are all too small for fp8 is refused in a sentence",
          "[fp8][config]") {
    const auto parse = [](const std::string& width, const std::vector<std::string>& more) {
        std::vector<std::string> settings{"run_dir=unused",   "data.train=synthetic",
                                          "schedule.steps=1", "model.vocab_size=300",
                                          "model.n_head=4",   "model.n_embd=" + width};
        settings.insert(settings.end(), more.begin(), more.end());
        return parse_config("{}", "test", settings);
    };
    parse("64", {"precision.fp8=delayed"});
    const std::string small = refusal([&] { parse("32", {"precision.fp8=delayed"}); });
    CHECK(contains(small, "32 inputs are fewer than 64"));
    CHECK(contains(small, "set precision.fp8 to \"off\""));
    CHECK(contains(refusal([&] {
                       parse("64", {"precision.fp8=current", "precision.fp8_skip=[\"77\"]"});
                   }),
                   "a layer (0 to 11)"));
    CHECK(contains(refusal([&] { parse("64", {"precision.fp8_skip=[\"0\"]"}); }),
                   "precision.fp8 = off"));
}
