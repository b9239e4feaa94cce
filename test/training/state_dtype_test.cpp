// optimizer.state_dtype: checkpoints in each dtype, and from one to another.
#include <cmath>
#include <string>
#include <vector>

#include "kernels/dynamic_map.h"
#include "model/families/family.h"
#include "test/catch.h"
#include "test/parallel/mesh_job.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/random.h"
#include "test/text.h"
#include "training/config/load_config.h"
#include "training/files/checkpoint.h"

using namespace train_gpt;
using namespace train_gpt::mesh_job;

namespace {

using MomentValues = std::vector<std::vector<double>>;

struct OneRank {
    uint64_t seed = static_cast<uint64_t>(random_int(0, 1 << 30));
    std::string dtype = random_int(0, 1) ? "bf16" : "fp32";

    MeshRun run(const char* state) const {
        MeshRow c = trains("gpt2", 3).state(state);
        if (dtype == "bf16") c = c.bf16();
        return MeshRun(World(), Device{}, config_of(c, seed, "cpu", false));
    }
};

std::filesystem::path save(MeshRun& run, const TemporaryDirectory& folder) {
    return save_checkpoint(folder.path(), {3, run.config(), run.spec(), run.trainer().parameters});
}

/// A run with another dtype loads what `from` has saved after three steps.
void load(MeshRun& run, const std::filesystem::path& checkpoint) {
    load_training_state(checkpoint, run.trainer().parameters);
    run.trainer().parameters.weights.gather_all(run.trainer().stream);
}

}  // namespace

TEST_CASE("a run with small moments continues from its checkpoint bit for bit", "[checkpoint]") {
    for (const char* state : {"bf16", "int8"}) {
        const OneRank one;
        CAPTURE(state, one.seed, one.dtype);
        const TemporaryDirectory folder;
        MeshRun first = one.run(state), second = one.run(state);
        for (int i = 0; i < 3; ++i) first.step();
        load(second, save(first, folder));
        for (const char* kept : {"master", "m", "v"})
            CHECK((first.values_of(kept) == second.values_of(kept)));
        second.skip(3);
        for (int i = 0; i < 3; ++i) CHECK(first.step().sums.loss == second.step().sums.loss);
        for (const char* kept : {"master", "m", "v"})
            CHECK((first.values_of(kept) == second.values_of(kept)));
    }
}

TEST_CASE("a checkpoint's moments are converted to the dtype of the run that loads them",
          "[checkpoint]") {
    for (const char* before : {"fp32", "bf16", "int8"})
        for (const char* after : {"fp32", "bf16", "int8"}) {
            const OneRank one;
            CAPTURE(before, after, one.seed, one.dtype);
            const TemporaryDirectory folder;
            MeshRun from = one.run(before), to = one.run(after);
            for (int i = 0; i < 3; ++i) from.step();
            const bool had_codes = std::string(before) == "int8",
                       has_codes = std::string(after) == "int8";
            load(to, save(from, folder));
            CHECK((from.values_of("master") == to.values_of("master")));
            for (const char* kept : {"m", "v"}) {
                const MomentValues a = from.values_of(kept), b = to.values_of(kept);
                const bool root = *kept == 'v';
                int64_t wrong = 0;
                for (size_t t = 0; t < a.size(); ++t) {
                    std::vector<float> wanted(a[t].begin(), a[t].end());
                    if (root && had_codes && !has_codes)
                        for (float& x : wanted) x *= x;
                    if (root && !had_codes && has_codes)
                        for (float& x : wanted) x = std::sqrt(x);
                    if (std::string(after) == "bf16")
                        for (float& x : wanted) x = to_float(bf16(x));
                    if (has_codes) {
                        std::vector<uint8_t> codes(wanted.size());
                        std::vector<float> scales(wanted.size() / 256 + 1);
                        const Coding coding = root ? Coding::roots : Coding::signs;
                        encode(coding, wanted, codes.data(), scales.data());
                        decode(coding, codes.data(), scales.data(), wanted);
                    }
                    for (size_t i = 0; i < wanted.size(); ++i)
                        wrong += double{wanted[i]} != b[t][i];
                }
                CAPTURE(kept);
                CHECK(wrong == 0);
            }
        }
}

TEST_CASE("a run that resumes with another optimizer.state_dtype says so, and continues",
          "[checkpoint][training]") {
    const training_job::TrainingJob job(
        2, {{"schedule.steps", "6"}, {"precision.dtype", training_job::random_dtype().name}});
    const auto train = [&](const char* state, const char* until) {
        const ProgramResult result = run_program(
            job.command("train", "run", {{"optimizer.state_dtype", state}}, {"--stop-at", until}));
        INFO(state << " until step " << until << ":\n" << result.output);
        REQUIRE(result.exit_code == 0);
        // All of the state is there, and finite.
        CHECK_FALSE(training_job::state_of(job.path("run"), std::stoll(until)).empty());
        return result.output;
    };
    const std::string note = "note: the optimizer's state of the checkpoint is converted to ";
    CHECK_FALSE(contains(train("fp32", "2"), note));
    const std::string same = train("fp32", "3");
    CHECK(contains(same, "resuming from "));
    CHECK_FALSE(contains(same, note));
    CHECK(contains(train("int8", "4"), note + "int8"));
    CHECK(contains(train("bf16", "5"), note + "bf16"));
}

TEST_CASE("a part of a state in 8 bits is read and written with the rest of its blocks") {
    const OneRank one;
    MeshRun run = one.run("int8");
    for (int i = 0; i < 2; ++i) run.step();
    ParameterState& state = run.trainer().parameters.state;
    const int i = run.trainer().parameters.index_of(registry_of(run.spec()).parameters[0].name);
    const std::vector<double> before = run.values_of("m")[0];
    const int64_t n = random_int(1, 700), first = random_int(256, std::ssize(before) - n);
    CAPTURE(first, n, one.seed);
    std::vector<float> part(static_cast<size_t>(n));
    state.read("m", i, first, part);
    int64_t wrong = 0;
    for (int64_t k = 0; k < n; ++k)
        wrong += double{part[static_cast<size_t>(k)]} != before[static_cast<size_t>(first + k)];
    CHECK(wrong == 0);
    // What is read is written without a change. With zeros in its place, the rest of its blocks may
    // have other scales, and so other roundings.
    state.write("m", i, first, part);
    CHECK((run.values_of("m")[0] == before));
    for (float& x : part) x = 0;
    state.write("m", i, first, part);
    const std::vector<double> after = run.values_of("m")[0];
    std::vector<float> wanted(before.begin(), before.end());
    std::fill_n(wanted.begin() + first, n, 0.0f);
    std::vector<uint8_t> codes(wanted.size());
    std::vector<float> scales(wanted.size() / 256 + 1);
    encode(Coding::signs, wanted, codes.data(), scales.data());
    decode(Coding::signs, codes.data(), scales.data(), wanted);
    for (size_t k = 0; k < after.size(); ++k) wrong += after[k] != double{wanted[k]};
    CHECK(wrong == 0);
}

TEST_CASE("int8 is refused with Muon, in a sentence") {
    try {
        parse_config("{}", "test",
                     {"run_dir=unused", "data.train=synthetic", "schedule.steps=1",
                      "optimizer.name=muon", "optimizer.state_dtype=int8"});
        FAIL("accepted");
    } catch (const Error& error) {
        CAPTURE(error.what());
        CHECK(std::string(error.what()).find("set optimizer.state_dtype to \"bf16\"") !=
              std::string::npos);
    }
}
