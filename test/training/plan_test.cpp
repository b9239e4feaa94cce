#include "training/plan.h"

#include <cstdio>

#include "kernels/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/trainer.h"

using namespace train_gpt;

namespace {

Config random_config() {
    Config config;
    config.model.n_head = static_cast<int>(random_int(1, 4));
    config.model.n_embd = config.model.n_head * 8 * static_cast<int>(random_int(1, 4));
    config.model.n_layer = static_cast<int>(random_int(1, 4));
    config.model.n_ctx = static_cast<int>(random_int(8, 64));
    config.model.vocab_size = static_cast<int>(random_int(100, 1000));
    config.batch.micro_batch = static_cast<int>(random_int(1, 5));
    config.batch.sequence_length = static_cast<int>(random_int(1, config.model.n_ctx));
    config.batch.tokens_per_step = 4ll * config.batch.micro_batch * config.batch.sequence_length;
    config.schedule.steps = 10;
    return config;
}

std::string error_of(const Config& config, int world) {
    try {
        plan_report(config, Device{}, world);
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

}  // namespace

TEST_CASE("the plan counts what a run takes, by purpose and to the byte", "[plan]") {
    for (const char* dtype : {"fp32", "bf16"})
        for (Recompute level : {Recompute::none, Recompute::elementwise, Recompute::block}) {
            const Config config = random_config();
            const GPTShape shape = shape_of(config, vocab_size_of(config));
            const Arena plan =
                plan_memory(config, shape, resolve_dtype(dtype, Device{}), level, Device{});
            CHECK(plan.is_counting());
            Arena arena = allocate(plan);
            const Trainer run(config, shape, resolve_dtype(dtype, Device{}), level, arena,
                              Sharding{});
            CHECK(arena.total_bytes() == plan.total_bytes());
            for (size_t i = 0; i < static_cast<size_t>(Purpose::count); ++i) {
                const auto purpose = static_cast<Purpose>(i);
                CAPTURE(name_of(purpose));
                CHECK(arena.bytes(purpose) == plan.bytes(purpose));
                CHECK(contains(memory_table(plan), name_of(purpose)) == (plan.bytes(purpose) > 0));
            }
            CHECK(contains(memory_table(plan), format_bytes(plan.total_bytes())));
            CHECK_THROWS_AS(arena.take(1, Purpose::workspaces), Error);  // nothing is left over
        }
}

TEST_CASE("recomputation takes less memory the more of it there is", "[plan]") {
    Config config = random_config();
    config.model.n_layer = 4;
    const GPTShape shape = shape_of(config, config.model.vocab_size);
    const auto bytes = [&](Recompute level) {
        return plan_memory(config, shape, DType::fp32, level, Device{}).bytes(Purpose::activations);
    };
    CHECK(bytes(Recompute::none) > bytes(Recompute::elementwise));
    CHECK(bytes(Recompute::elementwise) > bytes(Recompute::block));
}

TEST_CASE("the report names parameters, batch, ranks and the memory of every recompute level",
          "[plan]") {
    Config config = random_config();
    const GPTShape shape = shape_of(config, config.model.vocab_size);
    const std::string report = plan_report(config, Device{}, 1);
    // GPT-2: tied embedding, positions, 12·C² + 13·C a block, the last norm.
    const int64_t C = shape.n_embd, L = shape.n_layer;
    const int64_t parameters =
        (shape.vocab_size + shape.n_ctx) * C + L * (12 * C * C + 13 * C) + 2 * C;
    std::string digits = std::to_string(parameters);
    for (int i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3)
        digits.insert(static_cast<size_t>(i), ",");
    CAPTURE(report);
    CHECK(contains(report, digits));
    char flops[32];
    std::snprintf(flops, sizeof flops, "%.4g per token",
                  shape.flops_per_token(config.sequence_length()));
    CHECK(contains(report, flops));
    const DType dtype = resolve_dtype("auto", Device{});
    for (Recompute level : {Recompute::none, Recompute::elementwise, Recompute::block})
        CHECK(contains(
            report,
            format_bytes(plan_memory(config, shape, dtype, level, Device{}).total_bytes())));
    CHECK_FALSE(contains(report, "DOES NOT FIT"));

    CHECK(contains(plan_report(config, Device{}, 3), "on 3 ranks: 1 to 2 each"));
    CHECK(contains(error_of(config, 5), "fewer than the 5 ranks"));
}

TEST_CASE("a plan of any size is counted, and one that cannot fit says so", "[plan]") {
    Config config = random_config();
    config.model = {.n_layer = 512,
                    .n_head = 2048,
                    .n_embd = 262144,
                    .n_ctx = 2048,
                    .vocab_size = 16777216,
                    .init_from = ""};
    config.batch.micro_batch = 1;
    config.batch.sequence_length = 2048;
    config.batch.tokens_per_step = 2048;
    CHECK(contains(plan_report(config, Device{}, 1), "DOES NOT FIT"));
    const Arena plan =
        plan_memory(config, shape_of(config, 16777216), DType::bf16, Recompute::block, Device{});
    try {
        allocate(plan);
        FAIL("petabytes were allocated");
    } catch (const Error& error) {
        CHECK(contains(error.what(), "masters"));
        CHECK(contains(error.what(), format_bytes(plan.total_bytes())));
    }
    // More than 64 bits can count.
    config.batch.micro_batch = 1048576;
    config.batch.tokens_per_step = int64_t{1048576} * 2048;
    const std::string error = error_of(config, 1);
    CHECK((error.empty() || contains(error, "64-bit")));
}

TEST_CASE("the vocabulary is the configuration's or the tokenizer's", "[plan]") {
    Config config;
    config.model.vocab_size = 77;
    CHECK(vocab_size_of(config) == 77);
    config.model.vocab_size = 0;
    CHECK_THROWS_AS(vocab_size_of(config), Error);
    const TemporaryDirectory directory;
    const std::string_view text = "some text to make a vocabulary of";
    const Tokenizer tokenizer = Tokenizer::train(std::vector<std::string_view>{text}, 270);
    tokenizer.save(directory / "tokenizer.json");
    config.tokenizer.path = directory.path();
    CHECK(vocab_size_of(config) == tokenizer.vocab_size());
}
