#include "training/plan/plan.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>

#include <omp.h>

#include "base/error.h"
#include "base/file.h"
#include "model/families/family.h"
#include "model/spec.h"
#include "parallel/axes/tensor.h"
#include "test/catch.h"
#include "test/planned_traffic.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"
#include "training/config/micro_batches.h"
#include "training/plan/fit.h"
#include "training/plan/memory_advice.h"
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
            const DecoderSpec spec = spec_of(config, vocab_size_of(config));
            const Arena plan =
                plan_memory({config, spec, resolve_dtype(dtype, Device{}), level}, Device{});
            CHECK(plan.is_counting());
            Arena arena = allocate(plan);
            const Trainer run({config, spec, resolve_dtype(dtype, Device{}), level}, arena);
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
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    const auto bytes = [&](Recompute level) {
        return plan_memory({config, spec, DType::fp32, level}, Device{})
            .bytes(Purpose::activations);
    };
    CHECK(bytes(Recompute::none) > bytes(Recompute::elementwise));
    CHECK(bytes(Recompute::elementwise) > bytes(Recompute::block));
}

TEST_CASE("the report names parameters, batch, ranks and the memory of every recompute level",
          "[plan]") {
    Config config = random_config();
    config.checkpoint.async = random_int(0, 1) == 1;
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    const std::string report = plan_report(config, Device{}, 1).text;
    CHECK(contains(report, "saving") == config.saves_in_background());
    CHECK(contains(report, ", checkpoint.async = on: ") == config.saves_in_background());
    // GPT-2: tied embedding, positions, 12·C² + 13·C per block, the last norm.
    const int64_t C = spec.n_embd, L = spec.n_layer;
    const int64_t parameters =
        (spec.vocab_size + spec.n_ctx) * C + L * (12 * C * C + 13 * C) + 2 * C;
    std::string digits = std::to_string(parameters);
    for (int i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3)
        digits.insert(static_cast<size_t>(i), ",");
    CAPTURE(report);
    CHECK(contains(report, digits));
    char flops[32];
    std::snprintf(flops, sizeof flops, "%.4g per token",
                  spec.flops_per_token(config.sequence_length()));
    CHECK(contains(report, flops));
    const DType dtype = resolve_dtype("auto", Device{});
    for (Recompute level : {Recompute::none, Recompute::elementwise, Recompute::block})
        CHECK(contains(
            report,
            format_bytes(plan_memory({config, spec, dtype, level}, Device{}).total_bytes())));
    CHECK_FALSE(contains(report, "DOES NOT FIT"));
    CHECK(plan_report(config, Device{}, 1).problem.empty());

    CHECK(contains(plan_report(config, Device{}, 3).text, "on 3 ranks: 1 to 2 each"));
}

TEST_CASE("the ranks of a plan that are on this machine share its memory", "[plan]") {
    Config config = random_config();
    config.batch.tokens_per_step *= 2;  // eight micro-batches
    const int ranks = local_ranks(Device{}, 8);
    CHECK(ranks == std::min(8, omp_get_num_procs()));
    CHECK(local_ranks(Device{}, 1) == 1);
    const PlanReport one = plan_report(config, Device{}, 1),
                     eight = plan_report(config, Device{}, 8);
    CAPTURE(ranks, one.text, eight.text);
    // Other programs may take some meanwhile.
    CHECK(static_cast<double>(eight.available.device) <
          1.5 * static_cast<double>(one.available.device) / ranks);
    CHECK(contains(one.text, " available here\n"));
    CHECK(contains(
        eight.text,
        concat(" available here", ranks > 1 ? concat(" to each of ", ranks, " ranks") : "", "\n")));
    PlanTarget elsewhere{Device{}};
    elsewhere.gpu = "GPU";
    CHECK(local_ranks(elsewhere, 8) == 1);
    PlanTarget told{Device{}};
    told.ranks_here = static_cast<int>(random_int(2, 7));
    CHECK(local_ranks(told, 8) == told.ranks_here);
    CHECK(local_ranks(told, 1) == 1);
    CHECK(contains(plan_report(config, told, 8).text,
                   concat(" available here to each of ", told.ranks_here, " ranks\n")));
    told.ranks_here = 1;
    CHECK(contains(plan_report(config, told, 8).text, " available here\n"));
}

TEST_CASE("what is said to feed more ranks than a step can feed does", "[plan]") {
    for (int i = 0; i < 20; ++i) {
        Config config = random_config();
        if (random_int(0, 1)) config.batch.micro_batch = 0;
        const int64_t B = std::max(config.batch.micro_batch, 1), T = config.sequence_length();
        config.batch.tokens_per_step = B * T * random_int(1, 12);
        const int64_t sequences = config.batch.tokens_per_step / T;
        const int ranks = static_cast<int>(sequences / B + random_int(1, 20));
        const std::string error = error_of(config, ranks);
        CAPTURE(error, to_json(config), ranks);
        CHECK(contains(error, concat("cannot feed ", ranks, " ranks")));
        const auto number = [&](const std::string& label) {
            const size_t at = error.find(label);
            return at == std::string::npos ? int64_t{0}
                                           : std::stoll(error.substr(at + label.size()));
        };
        REQUIRE(number("batch.tokens_per_step=") > 0);
        Config changed = config;
        if (number("batch.micro_batch="))
            changed.batch.micro_batch = static_cast<int>(number("batch.micro_batch="));
        if (number("; take ")) {
            CHECK(sequences < ranks);
            CHECK(error_of(changed, static_cast<int>(number("; take "))).empty());
        } else {
            CHECK(error_of(changed, ranks).empty());
            changed = config;
        }
        changed.batch.tokens_per_step = number("batch.tokens_per_step=");
        CHECK(error_of(changed, ranks).empty());
    }
}

TEST_CASE("a micro-batch that is left open is the one with which a step is done first", "[plan]") {
    for (int i = 0; i < 12; ++i) {
        Config config = random_config();
        config.batch.micro_batch = 0;
        const int64_t T = config.sequence_length(), sequences = random_int(1, 120);
        config.batch.tokens_per_step = sequences * T;
        const auto ranks = static_cast<int>(random_int(1, std::min<int64_t>(sequences, 9)));
        const DecoderSpec spec = spec_of(config, config.model.vocab_size);
        const auto bytes_of = [&](int64_t B, Recompute level) {
            Config with = config;
            with.batch.micro_batch = static_cast<int>(B);
            return plan_memory({with, spec, DType::fp32, level, ranks}, Device{}).total_bytes();
        };
        const uint64_t least = bytes_of(1, Recompute::block);
        const uint64_t available = least + static_cast<uint64_t>(random_int(0, 1 << 24));
        // By going through all of them, with the relative times in fit.h.
        double soonest = 1e300;
        for (int64_t B = 1; B <= sequences; ++B)
            for (const auto& [level, cost] : {std::pair{Recompute::none, 1.0},
                                              {Recompute::elementwise, 1.04},
                                              {Recompute::block, 1.33}}) {
                const int64_t m = sequences / B;
                if (sequences % B || m < ranks || (B > 1 && B * T > 4096)) continue;
                if (bytes_of(B, level) > available) continue;
                const int64_t busiest = (m + ranks - 1) / ranks;
                soonest = std::min(soonest, static_cast<double>(busiest * (B * T + 64)) * cost);
            }
        const Fit fit =
            fit_into({available}, {config, spec, DType::fp32, Recompute::none, ranks}, Device{});
        CAPTURE(T, sequences, ranks, available, fit.micro_batch, name_of(fit.recompute));
        CHECK(fit.memory.device == bytes_of(fit.micro_batch, fit.recompute));
        CHECK(fit.memory.device <= available);
        REQUIRE(sequences % fit.micro_batch == 0);
        const int64_t m = sequences / fit.micro_batch, busiest = (m + ranks - 1) / ranks;
        CHECK(m >= ranks);
        const double cost[] = {1.0, 1.04, 1.33};
        CHECK(static_cast<double>(busiest * (fit.micro_batch * T + 64)) *
                  cost[static_cast<size_t>(fit.recompute)] ==
              soonest);

        const Fit none =
            fit_into({least - 1}, {config, spec, DType::fp32, Recompute::none, ranks}, Device{});
        CHECK(none.memory.device == least);
        config.batch.micro_batch = fit.micro_batch;
        config.memory.recompute = "elementwise";
        const Fit given =
            fit_into({0}, {config, spec, DType::fp32, Recompute::none, ranks}, Device{});
        CHECK(given.micro_batch == fit.micro_batch);
        CHECK(given.recompute == Recompute::elementwise);
    }
}

TEST_CASE("context-parallel ranks take the time of their part of a sequence", "[plan]") {
    Config config = random_config();
    config.model.n_ctx = config.batch.sequence_length =
        64 + 4 * static_cast<int>(random_int(0, 15));
    config.batch.micro_batch = 0;
    config.batch.tokens_per_step = 12 * config.sequence_length();
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    const auto chosen = [&](int context) {
        config.parallel.context = context;
        return fit_into({uint64_t{1} << 50},
                        {config, spec, DType::fp32, Recompute::none, 5 * context}, Device{})
            .micro_batch;
    };
    // 12 sequences on 5 ranks: 3 · (T + 64) or 2 · (2·T + 64), where T is a rank's part.
    CHECK(chosen(1) == 1);
    CHECK(chosen(2) == 2);
}

TEST_CASE("a pipeline takes micro-batches that leave its ranks idle for little of a step",
          "[plan]") {
    Config config = random_config();
    config.model.n_layer = 8;
    config.model.n_ctx = config.batch.sequence_length =
        64 + 8 * static_cast<int>(random_int(0, 20));
    config.batch.micro_batch = 0;
    config.batch.tokens_per_step = 16 * config.sequence_length();
    config.memory.recompute = "none";
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    const int T = config.sequence_length();
    for (const auto& [kind, pipeline, per_rank] : {std::tuple{PipelineKind::one_f_one_b, 1, 1},
                                                   {PipelineKind::one_f_one_b, 4, 1},
                                                   {PipelineKind::gpipe, 8, 1},
                                                   {PipelineKind::interleaved, 4, 2},
                                                   {PipelineKind::zero_bubble, 4, 1}}) {
        config.parallel.pipeline = pipeline;
        config.parallel.schedule = kind;
        config.parallel.stages_per_rank = per_rank;
        const Fit fit = fit_into({uint64_t{1} << 50},
                                 {config, spec, DType::fp32, Recompute::none, pipeline}, Device{});
        // A step of 16 sequences takes the time of m micro-batches and of the idle ones.
        const double parts = kind == PipelineKind::zero_bubble ? 3 : per_rank;
        const auto time = [&](int B) { return (16.0 / B + (pipeline - 1) / parts) * (B * T + 64); };
        CAPTURE(T, name_of(kind), pipeline, fit.micro_batch);
        for (const int B : {1, 2, 4, 8, 16}) {
            const bool is_possible =
                B * T <= 4096 && (kind != PipelineKind::interleaved || 16 / B % pipeline == 0);
            if (is_possible) CHECK(time(fit.micro_batch) <= time(B));
        }
    }
}

TEST_CASE("the plan of a pipeline is of the stage that needs the most, and sends the most",
          "[plan]") {
    for (int i = 0; i < 10; ++i) {
        Config config = random_config();
        const int stages = static_cast<int>(random_int(2, 4));
        config.parallel.pipeline = stages;
        config.parallel.layers_per_stage.assign(static_cast<size_t>(stages), 1);
        const auto largest = static_cast<size_t>(random_int(1, stages - 1));
        config.parallel.layers_per_stage[largest] = 40;
        config.model.n_layer = stages + 39;
        config.batch.micro_batch = 1;
        config.batch.tokens_per_step = int64_t{8} * config.sequence_length();
        config.memory.recompute = "none";
        const int ranks = 2 * stages;
        const DecoderSpec spec = spec_of(config, config.model.vocab_size);
        CAPTURE(to_json(config));
        const DType dtype = resolve_dtype("auto", Device{});
        std::vector<uint64_t> bytes;
        Traffic most;
        for (int rank = 0; rank < ranks; ++rank) {
            bytes.push_back(
                plan_memory({config, spec, dtype, Recompute::none, ranks}, Device{}, rank)
                    .total_bytes());
            for (const auto& [group, sent] :
                 planned_traffic({config, spec, dtype, Recompute::none, ranks}, rank))
                most[group] = std::max(most[group], sent);
        }
        CHECK(std::ranges::max(bytes) > bytes[0]);
        CHECK(plan_memory({config, spec, dtype, Recompute::none, ranks}, Device{}).total_bytes() ==
              std::ranges::max(bytes));
        const std::string text = plan_report(config, Device{}, ranks).text;
        REQUIRE(most.contains("data"));
        CHECK(most["data"] >
              planned_traffic({config, spec, dtype, Recompute::none, ranks})["data"]);
        for (const auto& [group, sent] : most)
            CHECK(contains(text,
                           concat(format_bytes(static_cast<uint64_t>(sent)), " along ", group)));
    }
}

TEST_CASE("a resumed run takes the choices that it has, unless they fit no more", "[plan]") {
    Config config = random_config();
    config.batch.micro_batch = 0;
    config.batch.tokens_per_step = 24 * config.sequence_length();
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    constexpr uint64_t plenty = uint64_t{1} << 50;
    const auto choose = [&](const Choices& kept, uint64_t available, int ranks) {
        return choose_by_memory(kept, {available},
                                {config, spec, DType::fp32, Recompute::none, ranks}, Device{});
    };
    const Choices fresh = choose({}, plenty, 1);
    CHECK(fresh.micro_batch > 0);
    CHECK(fresh.recompute == "none");
    const Choices kept{.micro_batch = 3, .recompute = "block"};
    for (const int ranks : {1, 8}) {
        CHECK(choose(kept, plenty, ranks).micro_batch == 3);
        CHECK(choose(kept, plenty, ranks).recompute == "block");
    }
    CHECK(choose(kept, plenty, 9).micro_batch <= 2);  // 24 sequences for 9 ranks
    CHECK(choose({.micro_batch = 5, .recompute = "none"}, plenty, 1).micro_batch ==
          fresh.micro_batch);
    const auto bytes = [&](int B, Recompute level) {
        Config with = config;
        with.batch.micro_batch = B;
        return plan_memory({with, spec, DType::fp32, level, 1}, Device{}).total_bytes();
    };
    CHECK(choose(kept, bytes(3, Recompute::block), 1).micro_batch == 3);
    const Choices less = choose(kept, bytes(3, Recompute::block) - 1, 1);
    CHECK(bytes(less.micro_batch, recompute_from(less.recompute)) < bytes(3, Recompute::block));
    config.batch.micro_batch = 4;  // given values are used
    config.memory.recompute = "elementwise";
    CHECK(choose(kept, plenty, 1).micro_batch == 4);
    CHECK(choose(kept, plenty, 1).recompute == "elementwise");
}

TEST_CASE("ZeRO's stage is the one with the least time of a step for the link", "[plan]") {
    // Llama-3 8B on 8 devices of 80 GB, 8 sequences each in a step
    Config config = parse_config(
        "{}", "test",
        {"model.family=llama", "model.n_layer=32", "model.n_head=32", "model.n_kv_head=8",
         "model.n_embd=4096", "model.n_ff=14336", "model.n_ctx=8192", "model.vocab_size=128256",
         "batch.tokens_per_step=524288", "parallel.zero=auto", "schedule.steps=1"});
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    const RunShape shape(config, spec, DType::bf16, Recompute::none, 8);
    constexpr uint64_t available = 80'000'000'000;
    const auto fit_with = [&](const RunShape& of, double link) {
        return fit_into({available}, of, Device{}, {.flops = 800e12, .link = link});
    };
    // Stage 1 has room for the activations only if whole blocks are recomputed. Stage 2 keeps
    // them, and sends 7 times the 28 GB of gradients more. A third of the computing is 2.1 s.
    const Fit fast = fit_with(shape, 360e9), slow = fit_with(shape, 10e9);
    CHECK((fast.zero == 2 && fast.recompute == Recompute::none));
    CHECK((slow.zero == 1 && slow.recompute == Recompute::block));
    CHECK(std::max(fast.memory.device, slow.memory.device) <= available);
    // The links between, by hand: gradients in fp32, weights in bf16, 7 of 8 parts sent. On a CPU
    // no exchange runs beside products.
    const double parameters = 8.03e9, sent = 7.0 / 8, steps = 8;
    const double more_bytes = (steps - 1) * 4 * parameters * sent,
                 recomputed = (0.33 * 524288 / 8) * spec.flops_per_token(8192) / 400e12,
                 equal = more_bytes / recomputed;
    CHECK(fit_with(shape, 1.05 * equal).zero == 2);
    CHECK(fit_with(shape, equal / 1.05).zero == 1);
    // With fewer bytes for gradients, slower links do.
    config.parallel.sums = GradientSums::bf16;
    const RunShape rounded(config, spec, DType::bf16, Recompute::none, 8);
    CHECK(fit_with(rounded, equal / 1.05).zero == 2);
    CHECK(fit_with(rounded, equal / 2.1).zero == 1);
    // Where only stage 3 fits, it is taken; where nothing is split, stage 1.
    const RunShape many(config, spec, DType::bf16, Recompute::none, 64);
    const uint64_t least =
        plan_memory(many.with_zero(3).with_micro_batch(1).with_recompute(Recompute::block),
                    Device{})
            .total_bytes();
    CHECK(fit_into({least}, many, Device{}, {.flops = 800e12, .link = 1e9}).zero == 3);
    CHECK(fit_into({least - 1}, many, Device{}, {.flops = 800e12, .link = 1e9}).memory.device ==
          least);
    const RunShape alone(config, spec, DType::bf16, Recompute::none, 1);
    CHECK(fit_into({uint64_t{1} << 40}, alone, Device{}, {.flops = 800e12, .link = 0}).zero == 1);
    // A stage that is given, or was chosen before, stays.
    for (const int stage : {0, 1, 2, 3}) {
        CHECK(fit_with(shape.with_zero(stage), 360e9).zero == stage);
        const Choices kept{.micro_batch = 1, .recompute = "none", .zero = stage};
        const Choices chosen = choose_by_memory(kept, {uint64_t{1} << 40}, shape, Device{},
                                                {.flops = 800e12, .link = 360e9});
        CHECK(chosen.zero == std::max(stage, 1));  // "auto" is from 1 to 3
        // It would not fit: chosen anew, for the link.
        CHECK(choose_by_memory(kept, {available}, shape, Device{}, {.flops = 800e12, .link = 360e9})
                  .zero == (stage == 3 ? 3 : 2));
    }
    CHECK(
        choose_by_memory({}, {available}, shape, Device{}, {.flops = 800e12, .link = 360e9}).zero ==
        2);
}

TEST_CASE("the first collectives have the sizes of a step, for each micro-batch it may have",
          "[plan]") {
    const Config config = parse_config(
        "{}", "test",
        {"model.family=llama", "model.n_layer=2", "model.n_head=32", "model.n_kv_head=8",
         "model.n_embd=4096", "model.n_ctx=8190", "model.vocab_size=128256", "parallel.tensor=2",
         "parallel.context=3", "batch.tokens_per_step=98280", "schedule.steps=1"});
    const RunShape shape(config, spec_of(config, 128256), DType::bf16, Recompute::none, 6);
    const StepSizes sizes = sizes_of_step(shape, Device{}, {1, 2, 3, 4, 6, 12});
    CHECK(sizes.tokens == std::vector<int64_t>{2730, 5460, 10920, 32760});
    CHECK(sizes.vocabulary == 128256);
    CHECK(sizes.kv_widths == std::vector<int64_t>{4 * 128});
    CHECK(sizes.width == 4096);
    // On a CPU, 256 MiB for logits: 2092 rows of 64,128 in bf16. 2730 are two chunks of 1365, 5460
    // three of 1820, 10,920 six of 1820, and 32,760 fifteen of 2048 and one of 2040.
    CHECK(sizes.head_rows == std::vector<int64_t>{1365, 1820, 1820, 2048, 2040});
}

TEST_CASE("a plan with an open stage of ZeRO says which it takes, and for which link", "[plan]") {
    Config config = random_config();
    config.parallel.zero = std::nullopt;
    const std::string text = plan_report(config, Device{}, 2).text;
    INFO(text);
    CHECK(contains(text, ", parallel.zero = "));
    CHECK(contains(text, " (for a link of 5 GB/s, which is assumed; a run measures its own)"));
    config.parallel.zero = 2;
    CHECK(!contains(plan_report(config, Device{}, 2).text, "parallel.zero ="));
}

TEST_CASE("a change that is said to fit fits", "[plan]") {
    std::set<std::string> kinds;
    for (int i = 0; i < 40; ++i) {
        Config config = random_config();
        config.memory.recompute = "none";
        config.batch.micro_batch = 4;
        config.model.n_ctx = 64;
        config.batch.sequence_length = 64;
        config.batch.tokens_per_step = 4 * 4 * 64;
        // A batch warm-up, whose smallest steps feed fewer ranks
        const int sequences = 4 << random_int(0, 2);
        config.batch.warmup_tokens = sequences < 16 ? 10'000 : 0;
        config.batch.warmup_tokens_per_step = sequences < 16 ? sequences * 64 : 0;
        const DecoderSpec spec = spec_of(config, config.model.vocab_size);
        const auto fit = [&](const Config& of, uint64_t available, int ranks) {
            return fit_into({available}, {of, spec, DType::fp32, Recompute::none, ranks}, Device{});
        };
        const uint64_t needed = fit(config, 0, 1).memory.device;
        const auto available = static_cast<uint64_t>(
            random_int(static_cast<int64_t>(needed) / 4, static_cast<int64_t>(needed) - 1));
        const std::string advice = change_that_fits({config, spec, DType::fp32, Recompute::none, 1},
                                                    Device{}, {available});
        std::istringstream words(advice);
        std::vector<std::string> settings;
        int ranks = 1;
        for (std::string word, before; words >> word; before = word) {
            if (before == "--set") settings.push_back(word);
            if (word == "ranks" && contains(advice, "it fits")) ranks = std::stoi(before);
        }
        CAPTURE(advice, available, needed);
        if (!contains(advice, "it fits")) {
            kinds.insert("smaller model");
            CHECK(contains(advice, "take a smaller model"));
            Config least = config;
            least.batch.micro_batch = 1;
            least.memory.recompute = "block";
            least.parallel.zero = 3;
            CHECK(fit(least, available, sequences).memory.device > available);
            continue;
        }
        kinds.insert(ranks > 1 ? "ranks" : "settings");
        CHECK((ranks > 1 || !settings.empty()));
        const Config changed = parse_config(to_json(config), "changed", settings);
        CHECK(fit(changed, available, ranks).memory.device <= available);
    }
    CHECK(kinds.contains("settings"));
}

TEST_CASE("a change that fits is found if any of those that are tried does", "[plan]") {
    constexpr int T = 64;
    // Three heads cannot be shared by tensor-parallel ranks, so that shorter sequences are left.
    for (const auto& [sequences, heads] :
         {std::pair{1, 3}, std::pair{16, 4}, std::pair{16, 3}, std::pair{1, 4}}) {
        Config config = random_config();
        config.memory.recompute = "none";
        // So large that ZeRO-3 holds less than ZeRO-2 does
        config.model.n_layer = 24;
        config.model.n_head = heads;
        config.model.n_embd = 32 * heads;
        config.parallel.bucket_mb = 0.05;
        config.model.n_ctx = config.batch.sequence_length = T;
        config.batch.micro_batch = std::min(4, sequences);
        config.batch.tokens_per_step = int64_t{T} * sequences;
        const DecoderSpec spec = spec_of(config, config.model.vocab_size);
        const auto bytes = [&](int zero, int ranks, int length, int tensor = 1) {
            Config changed = config;
            changed.parallel.tensor = tensor;
            changed.memory.recompute = "block";
            changed.batch.micro_batch = 1;
            changed.batch.sequence_length = length;
            changed.parallel.zero = zero;
            return plan_memory({changed, spec, DType::fp32, Recompute::block, ranks}, Device{})
                .total_bytes();
        };
        // The most ranks or the shortest sequences need the least.
        uint64_t least =
            std::min(bytes(*config.parallel.zero, 1, 1), bytes(*config.parallel.zero, 1, T));
        for (const int zero : {1, 2, 3}) least = std::min(least, bytes(zero, sequences, T));
        if (sequences > 1) REQUIRE(least == bytes(3, sequences, T));
        for (const int tensor : {2, 4, 8})
            if (!tensor_problem(shared_sizes(spec), tensor))
                for (const int zero : {1, 2, 3})
                    least = std::min(least, bytes(zero, tensor * sequences, T, tensor));
        // A state in fewer bytes is tried on the ranks that are there.
        for (const StateDType dtype : {StateDType::bf16, StateDType::int8}) {
            config.optimizer.state_dtype = dtype;
            least = std::min(least, bytes(*config.parallel.zero, 1, T));
        }
        config.optimizer.state_dtype = StateDType::fp32;
        const auto advice = [&](uint64_t available) {
            return change_that_fits({config, spec, DType::fp32, Recompute::none, 1}, Device{},
                                    {available});
        };
        CAPTURE(sequences, to_json(config), advice(least), advice(least - 1));
        CHECK(contains(advice(least), "it fits"));
        CHECK(contains(advice(least - 1), "take a smaller model"));
    }
}

namespace {

/// So large that ZeRO-3 holds less than ZeRO-2 does; micro-batches of one of 16 sequences.
Config deep_config() {
    Config config = random_config();
    config.memory.recompute = "block";
    config.model.n_layer = 24;
    config.model.n_head = 4;
    config.model.n_embd = 128;
    config.parallel.bucket_mb = 0.05;
    config.model.n_ctx = config.batch.sequence_length = 64;
    config.batch.micro_batch = 1;
    config.batch.tokens_per_step = int64_t{64} * 16;
    config.parallel.sums = GradientSums::fp32;
    return config;
}

RunShape shape_of(const Config& config, int ranks) {
    return {config, spec_of(config, config.model.vocab_size), DType::fp32, Recompute::block, ranks};
}

uint64_t bytes_of(const Config& config, int ranks) {
    return plan_memory(shape_of(config, ranks), Device{}).total_bytes();
}

/// The configuration with the settings of an advice.
Config advised(const Config& config, const std::string& advice) {
    std::istringstream words(advice);
    std::vector<std::string> settings;
    for (std::string word, before; words >> word; before = word)
        if (before == "--set") settings.push_back(word);
    return parse_config(to_json(config), "advised", settings);
}

uint64_t between(uint64_t first, uint64_t end) {
    return static_cast<uint64_t>(
        random_int(static_cast<int64_t>(first), static_cast<int64_t>(end) - 1));
}

}  // namespace

TEST_CASE("later stages of ZeRO are advised before fewer bytes of state and more ranks", "[plan]") {
    Config config = deep_config();
    constexpr int ranks = 4;
    std::vector<uint64_t> bytes;
    for (const int zero : {1, 2, 3}) {
        config.parallel.zero = zero;
        bytes.push_back(bytes_of(config, ranks));
    }
    REQUIRE(bytes[2] < bytes[0]);
    config.parallel.zero = 1;
    const uint64_t available = between(bytes[2], bytes[0]);
    const std::string advice = change_that_fits(shape_of(config, ranks), Device{}, {available});
    CAPTURE(advice, available, bytes[0], bytes[1], bytes[2]);
    CHECK(contains(advice, "it fits with --set"));  // on these ranks
    CHECK(contains(advice, concat("parallel.zero=", bytes[1] <= available ? 2 : 3)));
    CHECK(!contains(advice, "state_dtype"));
    CHECK(bytes_of(advised(config, advice), ranks) <= available);
}

TEST_CASE("a state in fewer bytes is advised where nothing else fits, before more ranks",
          "[plan]") {
    for (const OptimizerName name : {OptimizerName::adamw, OptimizerName::muon}) {
        Config config = deep_config();
        config.optimizer.name = name;
        const auto bytes = [&](StateDType dtype) {
            Config with = config;
            with.optimizer.state_dtype = dtype;
            return bytes_of(with, 1);
        };
        const auto advice = [&](uint64_t available) {
            return change_that_fits(shape_of(config, 1), Device{}, {available});
        };
        const uint64_t fp32 = bytes(StateDType::fp32), bf16 = bytes(StateDType::bf16);
        REQUIRE(bf16 < fp32);
        CAPTURE(name == OptimizerName::muon, fp32, bf16);
        CHECK(!contains(advice(fp32), "state_dtype"));
        const std::string halved = advice(between(bf16, fp32));
        CAPTURE(halved);
        CHECK(contains(halved, "it fits with --set"));  // on one rank
        CHECK(contains(halved, "optimizer.state_dtype=bf16"));
        if (name == OptimizerName::muon) {  // which has no int8
            CHECK(!contains(advice(bf16 - 1), "state_dtype"));
            continue;
        }
        const uint64_t int8 = bytes(StateDType::int8), available = between(int8, bf16);
        REQUIRE(int8 < bf16);
        const std::string found = advice(available);
        CAPTURE(int8, available, found);
        CHECK(contains(found, "it fits with --set"));
        CHECK(contains(found, "optimizer.state_dtype=int8"));
        CHECK(bytes_of(advised(config, found), 1) <= available);
        CHECK(!contains(advice(int8 - 1), "state_dtype"));
    }
}

TEST_CASE("a change that cannot run is no advice", "[plan]") {
    // 4,096 sequences of which a micro-batch that is chosen has one, twice as many as exact sums
    // add up
    Config config = random_config();
    config.model.n_ctx = config.batch.sequence_length = 4096;
    config.batch.tokens_per_step = int64_t{4096} * 4096;
    config.batch.micro_batch = 2;
    config.memory.recompute = "none";
    config.parallel.sums = GradientSums::exact;
    const uint64_t with_two = bytes_of(config, 1);
    Config one = config;
    one.batch.micro_batch = 1;
    one.parallel.sums = GradientSums::fp32;
    const uint64_t with_one = bytes_of(one, 1);
    REQUIRE(with_one < with_two);
    one.parallel.sums = GradientSums::exact, one.batch.micro_batch = 0;
    CHECK_THROWS_AS(possible_micro_batches(one, Device{}, 1), Error);

    const uint64_t available = between(with_one, with_two);
    const std::string advice = change_that_fits(shape_of(config, 1), Device{}, {available});
    CAPTURE(advice, available);
    CHECK(contains(advice, "it fits"));
    CHECK(contains(advice, "parallel.sums=fp32"));
    const Config changed = advised(config, advice);
    CHECK(bytes_of(changed, 1) <= available);
}

TEST_CASE("a plan has the traffic along each axis of its mesh, and memory falls as more is split",
          "[plan]") {
    Config config = random_config();
    config.model.n_layer = static_cast<int>(random_int(4, 6));
    config.model.n_head = 4;
    config.model.n_embd = 32 * static_cast<int>(random_int(4, 8));
    config.model.vocab_size = static_cast<int>(random_int(2000, 3000));
    config.batch.micro_batch = 1;
    config.batch.tokens_per_step = int64_t{8} * config.sequence_length();
    const DecoderSpec spec = spec_of(config, config.model.vocab_size);
    const auto bytes = [&](int zero, int shard_ranks) {
        config.parallel.zero = zero;
        config.parallel.shard_ranks = shard_ranks;
        return plan_memory({config, spec, DType::bf16, Recompute::none, 8}, Device{}).total_bytes();
    };
    CHECK(bytes(0, 4) == bytes(0, 0));
    for (const int zero : {1, 2, 3}) {
        CAPTURE(zero);
        CHECK(bytes(zero, 0) < bytes(zero, 4));
        CHECK(bytes(zero, 4) < bytes(zero, 2));
    }
    config.parallel.zero = 3;
    config.parallel.shard_ranks = 4;
    const std::string text = plan_report(config, Device{}, 8).text;
    for (const char* part : {"ZeRO-3: ", " along shard, ", " along replica, ", " along data, "})
        CHECK(contains(text, part));
    config.parallel.shard_ranks = 3;
    CHECK(contains(error_of(config, 8),
                   "parallel.shard_ranks = 3 does not divide the 8 data-parallel ranks"));
}

TEST_CASE("every preset has a plan on the fewest ranks that its mesh has and on many", "[plan]") {
    for (const auto& file : glob_files("configs/*.json")) {
        if (file.filename() == "schema.json") continue;
        CAPTURE(file.string());
        Config config = load_config(file, {});
        if (config.model.vocab_size == 0) config.model.vocab_size = 8192;
        const DecoderSpec spec = spec_of(config, config.model.vocab_size);
        for (const int data_ranks : {1, 7}) {
            const int ranks = data_ranks * config.parallel.tensor;
            if (config.batch.micro_batch > 0 && config.micro_batches_per_step() < data_ranks)
                continue;
            const Fit fit = fit_into({uint64_t{1} << 50},
                                     {config, spec, DType::bf16, Recompute::none, ranks}, Device{});
            CHECK(fit.recompute == Recompute::none);
            CHECK(config.batch.tokens_per_step %
                      (int64_t{fit.micro_batch} * config.sequence_length()) ==
                  0);
        }
    }
}

TEST_CASE("a plan of any size is counted, and one that cannot fit says so", "[plan]") {
    Config config = random_config();
    config.model = {
        .n_layer = 4096, .n_head = 2048, .n_embd = 262144, .n_ctx = 2048, .vocab_size = 16777216};
    config.batch.micro_batch = 1;
    config.batch.sequence_length = 2048;
    config.batch.tokens_per_step = 2048;
    const PlanReport report = plan_report(config, Device{}, 1);
    CHECK(contains(report.text, "DOES NOT FIT"));
    CHECK(contains(report.problem, "take a smaller model"));
    config.parallel.bucket_mb = 1e-4;
    CHECK(contains(error_of(config, 1), "raise parallel.bucket_mb"));
    config.parallel.bucket_mb = 64;
    const Arena plan =
        plan_memory({config, spec_of(config, 16777216), DType::bf16, Recompute::block}, Device{});
    try {
        allocate(plan);
        FAIL("petabytes were allocated");
    } catch (const Error& error) {
        CHECK(contains(error.what(), "masters"));
        CHECK(contains(error.what(), format_bytes(plan.total_bytes())));
    }
    // A size that 64 bits may not be able to count: then an error says so.
    config.batch.micro_batch = 1048576;
    config.batch.tokens_per_step = int64_t{1048576} * 2048;
    const std::string error = error_of(config, 1);
    CHECK((error.empty() || contains(error, "64-bit")));
}

TEST_CASE("a vocabulary that is larger than the tokenizer's is noted, but not a rounded one",
          "[plan]") {
    const TemporaryDirectory directory;
    const std::string_view text = "some text to make a vocabulary of";
    const Tokenizer tokenizer = Tokenizer::train(std::vector<std::string_view>{text}, 270);
    tokenizer.save(directory / "tokenizer.json");
    const int tokens = static_cast<int>(tokenizer.vocab_size());
    Config config = random_config();
    config.tokenizer.path = directory.path();
    const auto note = [&](int64_t rows) {
        config.model.vocab_size = static_cast<int>(rows);
        const std::string text = plan_report(config, Device{}, 1).text;
        const size_t at = text.find("note         model.vocab_size is ");
        return at == std::string::npos ? "" : text.substr(at, text.find('\n', at) - at);
    };
    const auto rounded_up = [&](int multiple) { return (tokens / multiple + 1) * multiple; };
    for (const int rows : {0, tokens, tokens + 1, rounded_up(64), rounded_up(128)})
        CHECK(note(rows) == "");
    // Less than half a percent is not worth a note.
    for (const int64_t rows :
         {int64_t{tokens} + 2, tokens + random_int(2, 30), int64_t{tokens} + 200,
          int64_t{rounded_up(128)} + 128, int64_t{50257}}) {
        if (rows % 64 == 0 && rows < tokens + 128) continue;
        const std::string said = note(rows);
        CAPTURE(rows, tokens, said);
        for (const std::string& part :
             {concat("model.vocab_size is ", rows), concat("tokenizer has ", tokens),
              std::string("model.vocab_size=0")})
            CHECK(contains(said, part));
    }
    // By the model's own count of parameters
    const DecoderSpec large = spec_of(config, 50257), small = spec_of(config, tokens);
    const auto parameters = [](const DecoderSpec& spec) { return registry_of(spec).numel(); };
    CHECK(contains(note(50257), concat(with_separators(parameters(large) - parameters(small)),
                                       " of the ", with_separators(parameters(large)))));
    config.model.init_from = "elsewhere";  // whose vocabulary it must be
    CHECK(note(50257) == "");
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
    config.model.vocab_size = static_cast<int>(tokenizer.vocab_size());
    CHECK(vocab_size_of(config) == tokenizer.vocab_size());
    config.model.vocab_size -= 1;
    const std::string error = error_of([&] { vocab_size_of(config); });
    CHECK(contains(error, "; set model.vocab_size=0"));
    for (const char* file : {"", "vocab.json"}) {  // a download that has not begun, or not ended
        config.tokenizer.path = directory / "unfinished";
        CHECK(vocab_size_of(config) == config.model.vocab_size);
        std::filesystem::create_directory(config.tokenizer.path);
        if (*file) write(std::filesystem::path(config.tokenizer.path) / file, "{}");
        CHECK(vocab_size_of(config) == config.model.vocab_size);
    }
}
