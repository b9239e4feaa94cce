#include "training/plan/plan_target.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "device/cuda.h"
#include "model/spec.h"
#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"
#include "training/config/presets.h"
#include "training/plan/datasheet.h"
#include "training/plan/fit.h"
#include "training/plan/memory_advice.h"
#include "training/plan/plan.h"

using namespace train_gpt;

TEST_CASE("a GPU that is not here is found by its name, however it is written", "[plan]") {
    CHECK(gpu_named("rtx4090").name == "RTX 4090");
    CHECK(gpu_named("RTX 4090").memory_gib == 24);
    CHECK(gpu_named("RTX-4090").architecture == 89);
    CHECK(gpu_named("A100-40").memory_gib == 40);
    CHECK(gpu_named("a10080").memory_gib == 80);
    try {
        gpu_named("rtx4091");
        FAIL("an unknown GPU was found");
    } catch (const Error& error) {
        for (const char* part : {"\"rtx4091\"", "rtx4090", "--memory"})
            CHECK(contains(error.what(), part));
    }
}

#ifndef TRAIN_GPT_CUDA

TEST_CASE("a build without CUDA does not plan for a GPU", "[plan]") {
    CHECK_THROWS_AS(gpu_elsewhere("h100", 0), Error);
}

#else

namespace {

constexpr uint64_t plenty = std::numeric_limits<uint64_t>::max();

/// 4 layers of 256 channels; the settings follow.
Config config_with(std::vector<std::string> settings) {
    const std::vector<std::string> first = {"model.family=llama",    "model.n_layer=4",
                                            "model.n_head=4",        "model.n_embd=256",
                                            "model.n_ff=768",        "model.n_ctx=256",
                                            "model.vocab_size=4096", "batch.tokens_per_step=8192",
                                            "schedule.steps=1",      "parallel.zero=1",
                                            "checkpoint.async=off"};
    settings.insert(settings.begin(), first.begin(), first.end());
    return parse_config("{}", "test", settings);
}

RunShape shape_of(const Config& config, int ranks = 1) {
    return {config, spec_of(config, config.model.vocab_size), DType::bf16, Recompute::none, ranks};
}

Config with_offload(const std::string& words) { return config_with({"memory.offload=" + words}); }

const Device elsewhere = gpu_elsewhere("h100", 0).device;

}  // namespace

TEST_CASE("a plan for a GPU that is not here counts as one that is", "[plan][cuda]") {
    if (skip_without_gpus(1)) return;
    const Device here{Device::Kind::cuda, 0};
    for (int i = 0; i < 4; ++i) {
        const Config config =
            config_with({concat("model.n_layer=", random_int(1, 5)),
                         concat("batch.micro_batch=", 1 << random_int(0, 3)),
                         i % 2 ? "memory.offload=optimizer" : "memory.offload=activations"});
        const DeviceAndHost one = most_memory(shape_of(config), here),
                            other = most_memory(shape_of(config), elsewhere);
        CHECK(one.device == other.device);
        CHECK(one.host == other.host);
        CHECK(one.host > 0);
    }
}

TEST_CASE("a plan for a datasheet's GPU says what it has free, and is not measured", "[plan]") {
    const PlanTarget target = gpu_elsewhere("RTX 4090", 0);
    const PlanReport report = plan_report(config_with({}), target, 1);
    CHECK(report.problem.empty());
    CHECK(report.available.device == (uint64_t{24} << 30) / 40 * 39);
    CHECK(contains(report.text, "RTX 4090, which is not here, bf16"));
    CHECK(contains(report.text, "23.40 GiB that the RTX 4090 (24.00 GiB) should have free"));
    const PlanReport small = plan_report(config_with({}), gpu_elsewhere("", 1 << 20), 1);
    CHECK(contains(small.problem,
                   concat("the GPU should have ", format_bytes(small.available.device), " free")));
}

TEST_CASE("an offload that is asked for must fit into the host's memory", "[plan]") {
    const Config config = with_offload("optimizer");
    const auto fits = [&](uint64_t host) {
        const DeviceAndHost available{plenty, host};
        return fit_into(available, shape_of(config), elsewhere).memory.fits(available);
    };
    const uint64_t needed = fit_into({plenty, plenty}, shape_of(config), elsewhere).memory.host;
    CHECK(fits(needed));
    CHECK_FALSE(fits(needed / 2));
    CHECK(contains(change_that_fits(shape_of(config), elsewhere, {plenty, needed / 2}),
                   "--set memory.offload=none"));
}

TEST_CASE("what fits only if something is offloaded is offloaded", "[plan]") {
    std::set<std::string> seen;
    const Config open = config_with({});
    const auto least = [&](const std::string& offload) {
        return fit_into({0, plenty}, shape_of(with_offload(offload)), elsewhere).memory;
    };
    const DeviceAndHost none = least("none"), activations = least("activations"),
                        optimizer = least("optimizer"),
                        both = least("[\"optimizer\", \"activations\"]");
    REQUIRE(both.device < std::min(activations.device, optimizer.device));
    REQUIRE(std::max(activations.device, optimizer.device) < none.device);
    for (int i = 0; i < 20; ++i) {
        const DeviceAndHost available{
            static_cast<uint64_t>(random_int(static_cast<int64_t>(both.device),
                                             static_cast<int64_t>(none.device) - 1)),
            static_cast<uint64_t>(random_int(0, static_cast<int64_t>(5 * both.host)))};
        const Fit fit = fit_into(available, shape_of(open), elsewhere);
        const auto fits = [&](const DeviceAndHost& memory) { return memory.fits(available); };
        CAPTURE(available.device, available.host, fit.memory.device, fit.memory.host);
        // The choices' least memory fits if anything does.
        const bool any = fits(activations) || fits(optimizer) || fits(both);
        CHECK(fit.memory.fits(available) == any);
        if (!any) continue;
        const Offload expected = fits(activations) ? Offload{.activations = true}
                                 : fits(optimizer) ? Offload{.optimizer = true}
                                                   : Offload{true, true};
        CHECK(fit.offload == expected);
        CHECK(fit.offloaded > 0);
        CHECK(static_cast<uint64_t>(fit.offloaded) <= fit.memory.host);
        // Where it is forbidden, it is advised.
        const Config forbidden = with_offload("none");
        const std::string advice = change_that_fits(shape_of(forbidden), elsewhere, available);
        REQUIRE(contains(advice, "memory.offload="));
        std::istringstream words(advice);
        std::vector<std::string> settings;
        for (std::string word, before; words >> word; before = word)
            if (before == "--set") {
                std::erase(word, '\'');
                settings.push_back(word);
                word = "";
            }
        const Config changed = parse_config(to_json(forbidden), "changed", settings);
        CHECK(shape_of(changed).offload() == expected);
        CHECK(fit_into(available, shape_of(changed), elsewhere).memory.fits(available));
    }
}

TEST_CASE("where nothing fits, the least memory of a GPU is with all that can be offloaded",
          "[plan]") {
    constexpr int ranks = 32;  // one for each sequence of a step
    const Config least =
        config_with({"parallel.zero=3", "batch.micro_batch=1", "memory.recompute=block",
                     "memory.offload=[\"optimizer\", \"activations\"]"});
    const RunShape shape(least, shape_of(least).spec, shape_of(least).dtype, Recompute::block,
                         ranks);
    const uint64_t needed = fit_into({0, plenty}, shape, elsewhere).memory.device;
    for (const char* given : {"auto", "none", "optimizer"}) {
        const std::string advice =
            change_that_fits(shape_of(with_offload(given)), elsewhere, {1 << 20, plenty});
        CAPTURE(advice, needed);
        CHECK(contains(advice, concat("and all offloaded that can be, each of ", ranks,
                                      " ranks needs ", format_bytes(needed), ", ")));
    }
}

TEST_CASE("the state is offloaded rather than blocks computed twice, if the host is near",
          "[plan]") {
    // Offloading the state saves more than computing element-wise results again, and less than
    // computing blocks again.
    Config config;
    uint64_t available = 0;
    for (int micro_batch = 1; micro_batch <= 32 && available == 0; micro_batch *= 2) {
        const auto needed = [&](const char* offload, const char* recompute) {
            return fit_into({plenty, plenty},
                            shape_of(config_with({concat("batch.micro_batch=", micro_batch),
                                                  "parallel.bucket_mb=1",
                                                  concat("memory.offload=", offload),
                                                  concat("memory.recompute=", recompute)})),
                            elsewhere)
                .memory.device;
        };
        const uint64_t offloaded = needed("optimizer", "none");
        if (needed("none", "elementwise") <= offloaded || needed("none", "block") > offloaded)
            continue;
        available = offloaded;
        config = config_with({concat("batch.micro_batch=", micro_batch), "parallel.bucket_mb=1"});
    }
    REQUIRE(available > 0);
    const auto chosen = [&](double host) {
        return fit_into({available, plenty}, shape_of(config), elsewhere,
                        {.flops = 100e12, .host = host});
    };
    const Fit near = chosen(1e15), far = chosen(1e6), unknown = chosen(0);
    CHECK(near.offload == Offload{.optimizer = true});
    CHECK(near.recompute == Recompute::none);
    CHECK(far.offload == Offload{});
    CHECK(far.recompute == Recompute::block);
    CHECK(unknown.offload == Offload{});
}

TEST_CASE("an offload that is chosen has the stage of ZeRO that it has if it is given", "[plan]") {
    const Config config =
        load_config(find_config("llama3.2-1b").string(), {"tokenizer.path=", "parallel.zero=auto"});
    int offloads = 0;
    for (const int gib : {14, 18, 22, 26, static_cast<int>(random_int(12, 30))}) {
        const PlanTarget with = gpu_elsewhere("h100", static_cast<uint64_t>(gib) << 30);
        const RunShape shape = shape_of(config, 2);
        const DeviceAndHost available = memory_on(with, shape.mesh);
        const Speeds speeds = planned_speeds(with, available, shape);
        const Fit open = fit_into(available, shape, with.device, speeds),
                  given =
                      fit_into(available, shape.with_offload(open.offload), with.device, speeds);
        CAPTURE(gib, words_of(open.offload)[0], open.zero, given.zero);
        CHECK(open.zero == given.zero);
        CHECK(open.micro_batch == given.micro_batch);
        CHECK(open.recompute == given.recompute);
        offloads += !(open.offload == Offload{});
    }
    CHECK(offloads > 0);
}

TEST_CASE("a plan for another machine weighs offloading where a run there would", "[plan]") {
    int weighed = 0, would_differ = 0;
    for (const char* preset : {"llama3.2-1b", "gpt2-1558m", "gpt2-124m"})
        for (const char* recompute : {"none", "auto"})
            for (int gib = 4; gib <= 40; gib += 4) {
                const Config config =
                    load_config(find_config(preset).string(),
                                {"tokenizer.path=", concat("memory.recompute=", recompute)});
                const PlanTarget with = gpu_elsewhere("h100", static_cast<uint64_t>(gib) << 30);
                const RunShape shape = shape_of(config);
                const DeviceAndHost available = memory_on(with, shape.mesh);
                const Fit plan = fit_into(available, shape, with.device,
                                          planned_speeds(with, available, shape)),
                          all = fit_into(available, shape, with.device,
                                         {.flops = with.flops, .host = with.host});
                // A run measures its link to the host only where weighs_host() holds.
                const bool by_host = weighs_host(available, shape, with.device);
                const Fit run = by_host ? all : fit_into(available, shape, with.device);
                CAPTURE(preset, recompute, gib, by_host);
                CHECK(plan.micro_batch == run.micro_batch);
                CHECK(plan.recompute == run.recompute);
                CHECK(plan.offload == run.offload);
                weighed += by_host;
                would_differ += !(all.offload == run.offload);
            }
    CHECK(weighed > 0);
    CHECK(would_differ > 0);
}

TEST_CASE("an offload that was chosen is kept, and one that was not is measured for", "[plan]") {
    const Config config = config_with({"batch.micro_batch=0"});
    const RunShape shape = shape_of(config);
    const auto least = [&](const Offload& offload) {
        return fit_into({0, plenty}, shape.with_offload(offload), elsewhere).memory;
    };
    const Offload none, activations{.activations = true}, optimizer{.optimizer = true};
    // Anything that is offloaded fits, and nothing that is not.
    const DeviceAndHost available{std::max(least(activations).device, least(optimizer).device),
                                  plenty};
    REQUIRE(available.device < least(none).device);
    const Speeds speeds{.flops = 100e12, .host = 50e9};
    const Choices fresh = choose_by_memory({}, available, shape, elsewhere, speeds);
    REQUIRE(!fresh.offload.empty());
    CHECK(fresh.offload != words_of(none));
    for (const Offload& kept : {activations, optimizer}) {
        Choices choices = fresh;
        choices.recompute = "block", choices.micro_batch = 1;
        choices.offload = words_of(kept);
        const Choices usable = usable_choices(choices, available, shape, elsewhere);
        CHECK(usable.offload == choices.offload);
        // Nothing is left that speeds would decide.
        CHECK(!weighs_host(available, with_kept(shape, usable), elsewhere));
        const Choices chosen = choose_by_memory(choices, available, shape, elsewhere);
        CHECK(chosen.offload == choices.offload);
        CHECK(chosen.micro_batch == choices.micro_batch);
        CHECK(chosen.recompute == choices.recompute);
        // What is given counts.
        CHECK(choose_by_memory(choices, available, shape.with_offload({true, true}), elsewhere)
                  .offload == words_of({true, true}));
    }
    // Without a choice of it, as in older checkpoints and new runs, speeds decide.
    Choices older = fresh;
    older.offload = {};
    for (const Choices& choices : {older, Choices{}}) {
        const Choices usable = usable_choices(choices, available, shape, elsewhere);
        CHECK(usable.micro_batch == choices.micro_batch);
        CHECK(weighs_host(available, with_kept(shape, usable), elsewhere));
    }
    CHECK(choose_by_memory(older, available, shape, elsewhere, speeds).offload == fresh.offload);
    // If it does not fit any more, the rest is kept.
    const uint64_t staging =
        fit_into({plenty, plenty}, with_kept(shape.with_offload({}), fresh), elsewhere).memory.host;
    const DeviceAndHost more{plenty, 0}, less{plenty, staging};
    Choices lost = fresh;
    lost.offload = words_of(optimizer);
    CHECK(usable_choices(lost, less, shape, elsewhere).micro_batch == fresh.micro_batch);
    CHECK(usable_choices(lost, less, shape, elsewhere).offload.empty());
    CHECK(choose_by_memory(lost, less, shape, elsewhere).offload == words_of(none));
    CHECK(usable_choices(lost, more, shape, elsewhere).micro_batch == 0);
}

TEST_CASE("a host that has too little memory to pin is named before anything is pinned", "[plan]") {
    const RunShape shape = shape_of(with_offload("optimizer")).with_micro_batch(1);
    const Arena plan = plan_memory(shape.with_zero(1), elsewhere);
    const uint64_t needed = plan.host_bytes();
    const auto error_of = [&](const DeviceAndHost& available, int ranks) -> std::string {
        try {
            require_host_memory(plan, shape, available, ranks);
            return "";
        } catch (const Error& error) {
            return error.what();
        }
    };
    const int ranks = static_cast<int>(random_int(2, 8));
    CHECK(error_of({plenty, needed}, ranks).empty());
    CHECK(error_of({plenty, unlimited_memory}, ranks).empty());
    CHECK(contains(error_of({plenty, 0}, ranks),
                   concat("but only ", format_bytes(0), " of what is free may be pinned")));
    const std::string alone = error_of({plenty, needed - 1}, 1),
                      together = error_of({plenty, needed - 1}, ranks);
    for (const std::string& error : {alone, together}) {
        CAPTURE(error);
        CHECK(contains(error, concat("pins ", format_bytes(needed), " of the host's memory")));
        CHECK(contains(error, "it fits with --set memory.offload=none"));
    }
    CHECK(!contains(alone, "ranks on each host"));
    CHECK(contains(together, concat("by each of the host's ", ranks, " ranks")));
    CHECK(contains(together, concat("at most ", ranks - 1, " ranks on each host")));
    // Without offloading, the GPU would be full.
    const std::string no_way = error_of({plan.total_bytes(), needed - 1}, ranks);
    CHECK(!contains(no_way, "it fits; "));
}

TEST_CASE("GPUs that are here share the host's memory in a plan", "[plan][cuda]") {
    if (skip_without_gpus(1)) return;
    const PlanTarget here(Device{Device::Kind::cuda, 0});
    const int ranks = local_ranks(here, 8);
    CHECK(ranks == std::min(8, static_cast<int>(cuda::identities().size())));
    const Config config = config_with({"memory.offload=optimizer", "batch.micro_batch=1"});
    const PlanReport one = plan_report(config, here, 1), eight = plan_report(config, here, 8);
    CAPTURE(ranks, one.text, eight.text);
    // Other programs may take some meanwhile.
    CHECK(static_cast<double>(eight.available.host) <
          1.5 * static_cast<double>(one.available.host) / ranks);
    CHECK(contains(one.text, concat(" of the host's memory, of which ",
                                    format_bytes(one.available.host), " are available here)")));
    CHECK(contains(eight.text, concat(" available here to each of ", ranks, " ranks)")) ==
          (ranks > 1));
}

TEST_CASE("if the system refuses to pin memory, offloading less is advised", "[plan][cuda]") {
    if (skip_without_gpus(1)) return;
    const Device here{Device::Kind::cuda, 0};
    const RunShape shape = shape_of(with_offload("optimizer")).with_micro_batch(1).with_zero(1);
    Arena plan = Arena::counting(here);
    plan.take(256, Purpose::workspaces);
    plan.take(size_t{1} << 50, Purpose::offloaded);
    try {
        allocate_or_advise(plan, shape, 2);
        FAIL("a petabyte was pinned");
    } catch (const Error& error) {
        CAPTURE(error.what());
        CHECK(contains(error.what(), "of pinned host memory"));
        CHECK(contains(error.what(), "with --set memory.offload=none"));
        CHECK(contains(error.what(), "fewer ranks on each host"));
    }
}

TEST_CASE("fp8 is refused for a GPU without it, unless nobody knows the GPU", "[plan][fp8]") {
    const Config config = config_with({"precision.fp8=delayed"});
    for (const char* gpu : {"rtx3090", "a100-80", "a30"}) {
        const PlanTarget target = gpu_elsewhere(gpu, 0);
        try {
            plan_report(config, target, 1);
            FAIL(gpu);
        } catch (const Error& error) {
            CAPTURE(error.what());
            CHECK(contains(error.what(), concat("but ", target.gpu, " (sm_8")));
            CHECK(contains(error.what(), "set precision.fp8 to \"off\""));
        }
        CHECK(plan_report(config_with({}), target, 1).problem.empty());
    }
    for (const char* gpu : {"rtx4090", "l40s", "h100"})
        CHECK(plan_report(config, gpu_elsewhere(gpu, 0), 1).problem.empty());
    CHECK(plan_report(config, gpu_elsewhere("", uint64_t{24} << 30), 1).problem.empty());
}

TEST_CASE("each micro-batch must fit into the host's memory, not the fastest alone", "[plan]") {
    const Config config = config_with({"memory.offload=activations", "memory.recompute=block"});
    const auto needed = [&](int micro_batch) {
        Config with = config;
        with.batch.micro_batch = micro_batch;
        return fit_into({plenty, plenty}, shape_of(with), elsewhere).memory.host;
    };
    REQUIRE(needed(2) < needed(4));
    const Fit fit = fit_into({plenty, needed(4) - 1}, shape_of(config), elsewhere);
    CHECK(fit.micro_batch == 2);
    CHECK(fit.memory.host == needed(2));
}

TEST_CASE("the host's memory is counted of the stage that needs the most of it", "[plan]") {
    for (const char* layers : {"[1,8]", "[8,1]"}) {
        const Config config =
            config_with({"model.n_layer=9", "parallel.pipeline=2", "batch.micro_batch=1",
                         "memory.offload=optimizer", concat("parallel.layers_per_stage=", layers)});
        const RunShape shape = shape_of(config, 2);
        uint64_t most = 0;
        for (const int rank : {0, 1})
            most = std::max(most, uint64_t{plan_memory(shape, elsewhere, rank).host_bytes()});
        CAPTURE(layers);
        CHECK(most_memory(shape, elsewhere).host == most);
        CHECK(fit_into({plenty, plenty}, shape, elsewhere).memory.host >= most);
    }
}

TEST_CASE("the table of presets in docs/running.md is what plan says", "[plan]") {
    std::ifstream lines("docs/running.md");
    REQUIRE(lines);
    int rows = 0;
    for (std::string line; std::getline(lines, line);) {
        std::vector<std::string> cells;
        std::istringstream text(line);
        for (std::string cell; std::getline(text, cell, '|');) {
            const size_t first = cell.find_first_not_of(' ');
            cells.push_back(first == cell.npos
                                ? ""
                                : cell.substr(first, cell.find_last_not_of(' ') + 1 - first));
        }
        if (cells.size() < 8) continue;
        int gpus = 1;
        std::string gpu = cells[2];
        if (const size_t times = gpu.find(" × "); times != gpu.npos) {
            gpus = std::stoi(gpu);
            gpu = gpu.substr(times + std::string(" × ").size());
        }
        if (!(gpu == "RTX 4090" || gpu == "H100")) continue;
        ++rows;
        const Config config = load_config(find_config(cells[1]).string(), {"tokenizer.path="});
        const PlanReport report = plan_report(config, gpu_elsewhere(gpu, 0), gpus);
        CAPTURE(line, report.text);
        CHECK(report.problem.empty());
        CHECK(contains(report.text, concat("batch.micro_batch = ", cells[3],
                                           ", memory.recompute = ", cells[4])));
        CHECK(contains(report.text, "memory.offload = " + cells[5]) == (cells[5] != "none"));
        CHECK(contains(report.text, "memory.offload") == (cells[5] != "none"));
        CHECK(contains(report.text, concat(": ", cells[6], " of ")));
        CHECK((cells[7].empty() || contains(report.text, concat("(", cells[7], " of the host's"))));
    }
    CHECK(rows == 12);
}

#endif
