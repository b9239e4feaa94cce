#include "training/decisions.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/copy.h"
#include "device/memory.h"
#include "test/catch.h"
#include "test/kernels/test_device.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"
#include "training/plan/fit.h"
#include "training/plan/memory_plan.h"
#ifdef TRAIN_GPT_CUDA
#include "kernels/experts/grouped_tile.h"
#endif

using namespace train_gpt;

namespace {

/// A trainer in memory of which every byte was 0xff before, so that every number was NaN.
class Poisoned {
  public:
    Poisoned(DType dtype, const std::vector<std::string>& settings = {}) {
        std::vector<std::string> all{
            "model.n_layer=2",
            "model.n_head=2",
            "model.n_embd=64",
            "model.n_ctx=32",
            concat("model.vocab_size=", random_int(70, 200)),
            "batch.micro_batch=2",
            "batch.tokens_per_step=128",
            "batch.sequence_length=32",
            "schedule.steps=1",
            "parallel.sums=fp32",  // so that gradients can be read as numbers
            random_int(0, 1) ? "data.document_mask=true" : "data.document_mask=false"};
        all.insert(all.end(), settings.begin(), settings.end());
        config_ = parse_config("{}", "test", all);
        Arena plan = Arena::counting(test_device());
        build(plan, dtype);
        arena_ = std::make_unique<Arena>(test_device(), plan);
        build(*arena_, dtype, plan.total_bytes() - pinned_bytes(plan));
    }
    Trainer& trainer() { return *trainer_; }
    std::vector<float> gradient(int i) {
        const auto n =
            static_cast<size_t>(trainer_->parameters.parameters()[static_cast<size_t>(i)].numel());
        std::vector<float> values(n);
        trainer_->parameters.state.read(ParameterState::gradient, i, 0, values);
        return values;
    }

  private:
    static size_t pinned_bytes(const Arena& plan) {
        return plan.device().is_cuda() ? plan.bytes(Purpose::staging) : 0;
    }
    /// Everything, after the first `poisoned` bytes of the device's memory have been overwritten.
    void build(Arena& arena, DType dtype, size_t poisoned = 0) {
        void* const first = arena.take(1, Purpose::buffers);
        if (poisoned > 0)
            copy_now(test_device(), first, std::vector<char>(poisoned, '\xff').data(), poisoned);
        trainer_.reset();
        const DecoderSpec spec = spec_of(config_, config_.model.vocab_size);
        trainer_ = std::make_unique<Trainer>(RunShape{config_, spec, dtype}, arena);
    }

    Config config_;
    std::unique_ptr<Arena> arena_;
    std::unique_ptr<Trainer> trainer_;
};

bool all_finite(std::span<const float> values) {
    return std::ranges::all_of(values, [](float x) { return std::isfinite(x); });
}

}  // namespace

TEST_CASE("kernels are warmed up and timed on numbers, not on what memory held", "[cuda]") {
    ON_EACH_DEVICE();
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        CAPTURE(name_of(dtype));
        Poisoned poisoned(dtype);
        Trainer& trainer = poisoned.trainer();
        trainer.warm_up();
        // The second of two equal micro-batches, whose losses are those of a model that knows
        // nothing yet. Were an operand NaN, all that is computed from it would be, too.
        const size_t tokens = trainer.evaluation_batch.tokens.size();
        std::vector<float> losses(tokens);
        copy_now(test_device(), losses.data(), trainer.model.last_stage().losses(),
                 tokens * sizeof(float));
        const double mean =
            std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(tokens);
        CHECK(mean == Approx(std::log(trainer.model.spec().vocab_size)).epsilon(0.05));
        for (int i = 0; i < std::ssize(trainer.parameters.parameters()); ++i) {
            const std::vector<float> gradient = poisoned.gradient(i);
            CAPTURE(trainer.parameters.parameters()[static_cast<size_t>(i)].name);
            CHECK(all_finite(gradient));
            CHECK(std::ranges::any_of(gradient, [](float x) { return x != 0; }));
            std::vector<float> weights(gradient.size());
            trainer.parameters.state.read_weights(i, 0, weights);
            CHECK(std::set<float>(weights.begin(), weights.end()).size() >
                  std::min<size_t>(weights.size(), 1000) / 4);
            CHECK(all_finite(weights));
        }
        std::vector<int32_t> words(trainer.evaluation_batch.tokens.begin(),
                                   trainer.evaluation_batch.tokens.end());
        CHECK(std::set<int32_t>(words.begin(), words.end()).size() > tokens / 4);
    }
}

TEST_CASE("kernels do as a run has chosen on the same platform, and choose anew on another",
          "[cuda]") {
    ON_EACH_DEVICE();
    const std::vector<std::string> settings{"kernels.autotune=on", "model.vocab_size=128"};
    const auto choose = [&](const Choices& kept) {
        Poisoned poisoned(DType::bf16, settings);
        return choose_kernels(poisoned.trainer(),
                              {.recompute = Recompute::none, .micro_batch = 2, .kept = kept}, {});
    };
    const Choices chosen = choose({});
    CHECK(chosen.micro_batch == 2);
    CHECK(chosen.recompute == "none");
    if (!test_device().is_cuda()) {
        CHECK(chosen.platform.empty());
        CHECK(chosen.kernels.empty());
        return;
    }
    for (const std::string& part :
         {device_name(test_device()), concat(multiprocessors(test_device()), " multiprocessors"),
          std::string("driver "), std::string("cuBLASLt ")})
        CHECK(contains(chosen.platform, part));
#ifdef TRAIN_GPT_CUDA
    CHECK(contains(chosen.platform, "kernels for sm_90a") ==
          (has_wgmma(test_device()) && cuda::wgmma_is_built()));
#endif

    // As if the other way had been faster, wherever there are two.
    Choices kept = chosen;
    std::istringstream lines(chosen.kernels);
    kept.kernels.clear();
    int with_alternative = 0;
    for (std::string line; std::getline(lines, line);) {
        const auto says = [&](const char* word) { return contains(line, concat(" ", word)); };
        if (says("bias_gelu ") || says("dgelu ") || says("column_sums ")) {
            ++with_alternative;
            if (!line.ends_with(" separate"))
                line = line.substr(0, line.find(" product")) + " separate";
        }
        kept.kernels += line + "\n";
    }
    CHECK(with_alternative >= 5);  // three bias gradients in two layers' shapes
    REQUIRE(kept.kernels != "");
    CHECK(choose(kept).kernels == kept.kernels);
    kept.platform = "another GPU";
    kept.kernels = "lines of another version\n";
    const Choices anew = choose(kept);
    CHECK(anew.platform == chosen.platform);
    CHECK_FALSE(contains(anew.kernels, "another version"));
    CHECK(std::ranges::count(anew.kernels, '\n') == std::ranges::count(chosen.kernels, '\n'));
}

TEST_CASE("choices are the same after they were text, and damaged ones are named", "[choices]") {
    const Choices choices{.micro_batch = 3,
                          .recompute = "block",
                          .zero = 2,
                          .sums = GradientSums::bf16,
                          .offload = {"optimizer", "activations"},
                          .threads = 5,
                          .platform = "a GPU, 7 multiprocessors",
                          .kernels = "one line\nanother \"line\"\n"};
    const Choices read = choices_from_json(to_json(choices));
    CHECK(read.micro_batch == choices.micro_batch);
    CHECK(read.recompute == choices.recompute);
    CHECK(read.zero == choices.zero);
    CHECK(read.sums == choices.sums);
    CHECK(read.offload == choices.offload);
    CHECK(read.threads == 5);
    CHECK(read.platform == choices.platform);
    CHECK(read.kernels == choices.kernels);
    // As earlier versions wrote them.
    CHECK(choices_from_json(R"({"recompute": "none", "kernels": ["nt 1 2"]})").platform.empty());
    CHECK(!choices_from_json(R"({"recompute": "none", "kernels": ["nt 1 2"]})").zero);
    CHECK(choices_from_json(R"({"recompute": "none", "kernels": ["nt 1 2"]})").offload.empty());
    for (const char* damaged :
         {"", "{", "[]", R"({"recompute": "none"})",
          R"({"recompute": "none", "kernels": [], "platform": 1})",
          R"({"recompute": "none", "kernels": [], "zero": 4})",
          R"({"recompute": "none", "kernels": [], "sums": "fp16"})",
          R"({"recompute": "none", "kernels": [], "offload": "none"})",
          R"({"recompute": "none", "kernels": [], "offload": []})",
          R"({"recompute": "none", "kernels": [], "offload": ["auto"]})",
          R"({"recompute": "none", "kernels": [], "threads": -1})",
          R"({"recompute": "none", "kernels": [], "zero": "2"})",
          R"({"recompute": 1, "kernels": []})", R"({"recompute": "none", "kernels": [1]})"}) {
        CAPTURE(damaged);
        try {
            choices_from_json(damaged, "a file");
            FAIL("it was read");
        } catch (const Error& error) {
            CHECK(contains(error.what(), "a file is damaged"));
        }
    }
}

TEST_CASE("gradients are added exactly where that is possible, and as a run has begun",
          "[choices]") {
    const auto config = [](const std::vector<std::string>& more) {
        std::vector<std::string> all{"schedule.steps=1", "batch.sequence_length=8", "model.n_ctx=8",
                                     "batch.tokens_per_step=64", "run_dir=none"};
        all.insert(all.end(), more.begin(), more.end());
        return parse_config("{}", "test", all);
    };
    CHECK(sums_of(config({})) == GradientSums::exact);
    CHECK(sums_of(config({"parallel.reserved_sms=2"})) == GradientSums::fp32);
    // 2,048 micro-batches, or sequences, in a step, and one more
    CHECK(sums_of(config({"batch.tokens_per_step=16384"})) == GradientSums::exact);
    CHECK(sums_of(config({"batch.tokens_per_step=16392"})) == GradientSums::fp32);
    CHECK(sums_of(config({"batch.micro_batch=2", "batch.tokens_per_step=32768"})) ==
          GradientSums::exact);
    CHECK(sums_of(config({"batch.micro_batch=2", "batch.tokens_per_step=32784"})) ==
          GradientSums::fp32);
    for (const auto& [word, way] : {std::pair{"exact", GradientSums::exact},
                                    {"fp32", GradientSums::fp32},
                                    {"bf16", GradientSums::bf16}}) {
        CAPTURE(word);
        const std::string given = concat("parallel.sums=", word);
        CHECK(sums_of(config({given})) == way);
        const Choices kept{.recompute = "none", .sums = way};
        CHECK(sums_of(with_kept_sums(config({}), kept)) == way);
        CHECK(sums_of(with_kept_sums(config({"parallel.sums=bf16"}), kept)) == GradientSums::bf16);
    }
    const Choices exact{.recompute = "none", .sums = GradientSums::exact};
    CHECK(sums_of(with_kept_sums(config({"parallel.reserved_sms=2"}), exact)) ==
          GradientSums::fp32);
    // What is possible with the micro-batch that was chosen, and not with one of one sequence
    const Config open = config({"batch.tokens_per_step=32768"});
    const Choices of_four{.micro_batch = 4, .recompute = "none", .sums = GradientSums::exact};
    CHECK(sums_of(open) == GradientSums::fp32);
    CHECK(sums_of(with_kept_sums(open, of_four)) == GradientSums::exact);
    CHECK(sums_of(with_kept_sums(config({"batch.tokens_per_step=32768", "batch.micro_batch=1"}),
                                 of_four)) == GradientSums::fp32);
    CHECK(sums_of(with_kept_sums(config({}), {})) == GradientSums::exact);
}

TEST_CASE("a run in fp8 does not start on a GPU without it", "[fp8]") {
    Config config;
    config.precision.fp8 = Fp8Recipe::delayed;
    const Mesh mesh;
    try {
        decide(config, {}, {.kind = Device::Kind::cuda, .planned_architecture = 86}, mesh);
        FAIL("it began");
    } catch (const Error& error) {
        CHECK(contains(error.what(), "the GPU (sm_86) has no tensor cores for fp8"));
    }
}

TEST_CASE("ranks of one machine share its memory") {
    const uint64_t all = memory_for_a_rank(Device{}, {}).device;
    CHECK(all > memory_available(Device{}) / 2);  // other programs take some meanwhile
    CHECK(memory_for_a_rank(Device{}, {}, 1000).device < all / 100);
}

TEST_CASE("a machine that does not say how much memory it has is not one without any") {
    const auto total = static_cast<uint64_t>(random_int(1, int64_t{1} << 40));
    const int ranks = static_cast<int>(random_int(1, 8));
    CpuInfo machine;
    CHECK(host_memory_of_a_rank(machine, ranks) == unlimited_memory);
    machine.memory_total = total;
    CHECK(host_memory_of_a_rank(machine, ranks) == 0);
    machine.memory_available = total;
    CHECK(host_memory_of_a_rank(machine, ranks) == total / static_cast<uint64_t>(ranks));
    const DeviceAndHost some{.device = total, .host = total};
    CHECK(some.fits({total, unlimited_memory}));
    CHECK_FALSE(some.fits({total, 0}));
}

TEST_CASE("a GPU keeps memory free for each axis of a mesh after the first", "[cuda]") {
    if (skip_without_gpus(1)) return;
    const Device device{Device::Kind::cuda, 0};
    const uint64_t available = memory_available(device);
    // world, pipeline, context, tensor, shard; the axes after the first that have several ranks
    const struct {
        int world, pipeline, context, tensor, shard;
        uint64_t more;
    } meshes[] = {{1, 1, 1, 1, 0, 0}, {8, 1, 1, 1, 0, 0}, {8, 1, 1, 8, 0, 0},
                  {8, 1, 1, 1, 4, 1}, {8, 2, 1, 1, 0, 1}, {8, 2, 1, 4, 0, 1},
                  {8, 2, 1, 2, 0, 2}, {8, 2, 2, 2, 0, 2}, {64, 2, 2, 2, 4, 4}};
    for (const auto& m : meshes) {
        const MeshLayout mesh(m.world, {.pipeline = m.pipeline,
                                        .context = m.context,
                                        .tensor = m.tensor,
                                        .shard_ranks = m.shard});
        CAPTURE(m.world, m.pipeline, m.context, m.tensor, m.shard);
        // Another process of a real GPU may take some meanwhile.
        const auto kept =
            static_cast<double>(available - memory_for_a_rank(device, mesh, 8).device);
        CHECK(std::abs(kept - static_cast<double>(m.more << 28)) < 1 << 26);
    }
}
