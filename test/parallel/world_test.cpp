#include "parallel/world.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "test/catch.h"
#include "test/kernels/test_device.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

#ifdef TRAIN_GPT_CUDA
#include "device/cuda.h"
#endif

using namespace train_gpt;

namespace {

// Those that may say that a process is alone. Where they name several ranks: launch_test.cpp
const char* const launcher_variables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};

}  // namespace

TEST_CASE("a process that no launcher started is alone, and messages to all reach itself",
          "[world]") {
    for (const char* name : launcher_variables) {
        const char* before = std::getenv(name);
        const std::string kept = before ? before : "";
        ::unsetenv(name);
        CAPTURE(name);
        for (const char* alone : {"1", ""}) {
            ::setenv(name, alone, 1);
            const World world = World::join();
            CHECK(world.rank() == 0);
            CHECK(world.size() == 1);
            CHECK(world.local_rank() == 0);
            CHECK(world.local_size() == 1);
            CHECK(!world.host().empty());
            world.barrier();
            const double x = random_normal(1)[0];
            double sum[] = {x};
            world.all_reduce_sum(sum);
            CHECK(sum[0] == x);
            CHECK(world.broadcast("text") == "text");
            CHECK(world.all_gather("text") == std::vector<std::string>{"text"});
            CHECK(world.all_gather_local("text") == std::vector<std::string>{"text"});
        }
        ::unsetenv(name);
        if (before) ::setenv(name, kept.c_str(), 1);
    }
}

TEST_CASE("ranks: messages", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    const auto n = static_cast<size_t>(world.size()), rank = static_cast<size_t>(world.rank());
    REQUIRE(world.size() == std::atoi(std::getenv("RANKS")));
    CHECK(world.local_size() == world.size());
    CHECK(world.local_rank() == world.rank());

    // All ranks draw the same numbers.
    std::vector<std::vector<float>> values;
    for (size_t r = 0; r < n; ++r)
        values.push_back(random_normal(static_cast<size_t>(37),
                                       std::exp2(static_cast<float>(random_int(-20, 20)))));
    std::vector<double> sums(values[rank].begin(), values[rank].end()),
        expected(values[0].begin(), values[0].end());
    for (double& x : sums) x *= 1.0 / 3;
    for (double& x : expected) x *= 1.0 / 3;
    for (size_t r = 1; r < n; ++r) {
        for (size_t i = 0; i < expected.size(); ++i) expected[i] += values[r][i] * (1.0 / 3);
    }
    world.all_reduce_sum(sums);
    CHECK(sums == expected);

    // Texts of different lengths, some of them empty; those of rank 0 consist of zero bytes.
    std::vector<std::string> texts;
    for (size_t r = 0; r < n; ++r)
        texts.push_back(
            std::string(static_cast<size_t>(random_int(0, 3) ? random_int(0, 100000) : 0),
                        static_cast<char>(r)));
    CHECK(world.all_gather(texts[rank]) == texts);
    CHECK(world.all_gather_local(texts[rank]) == texts);
    for (size_t root = 0; root < n; ++root)
        CHECK(world.broadcast(texts[rank], static_cast<int>(root)) == texts[root]);
    world.barrier();
}

TEST_CASE("ranks know each other's number and exchange texts and sums", "[world]") {
    for (const Launcher launcher : launchers())
        for (const int n : {1, 3}) {
            const ProgramResult result =
                run_case_on_ranks(n, "ranks: messages", {{"RANKS", std::to_string(n)}}, launcher);
            INFO(name_of(launcher) << ":\n" << result.output);
            CHECK(result.exit_code == 0);
        }
}

TEST_CASE("ranks: abort", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    if (world.rank() == 1) world.abort(7);
    world.barrier();
    std::printf("beyond the barrier\n");
}

TEST_CASE("ranks: throw", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    if (world.rank() == 1) throw Error("rank 1 fails");
    world.barrier();
    std::printf("beyond the barrier\n");
}

TEST_CASE("a rank that aborts or throws ends those that wait for it", "[world]") {
    for (const Launcher launcher : launchers())
        for (const char* test_case : {"ranks: abort", "ranks: throw"}) {
            const ProgramResult result = run_case_on_ranks(3, test_case, {}, launcher);
            INFO(name_of(launcher) << ":\n" << result.output);
            CHECK(result.exit_code > 0);
            CHECK(!contains(result.output, "beyond the barrier"));
        }
}

#ifdef TRAIN_GPT_CUDA

TEST_CASE("ranks: devices", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    try {
        const Device device = device_of_rank(world, std::getenv("WANTED"));
        std::printf("rank %d takes %s %d\n", world.rank(), device.is_cuda() ? "GPU" : "CPU",
                    device.index);
    } catch (const Error& error) {
        std::printf("rank %d is refused: %s\n", world.rank(), error.what());
    }
    std::fflush(stdout);
}

TEST_CASE("ranks get GPUs of their own, or the CPU, and none is given twice", "[world][cuda]") {
    if (test_devices().size() == 1) return;
    const ProgramResult cpu = run_case_on_ranks(2, "ranks: devices", {{"WANTED", "cpu"}});
    INFO(cpu.output);
    CHECK(contains(cpu.output, "rank 0 takes CPU"));
    CHECK(contains(cpu.output, "rank 1 takes CPU"));

    const ProgramResult crowded =
        run_case_on_ranks(2, "ranks: devices", {{"WANTED", "auto"}, {"CUDA_VISIBLE_DEVICES", "0"}});
    INFO(crowded.output);
    for (const char* rank : {"rank 0", "rank 1"})
        CHECK(contains(crowded.output,
                       std::string(rank) + " is refused: rank 1 has no GPU of its own on " +
                           World().host() +
                           ": 2 ranks were started there, but they see only one GPU"));

    // Two devices of one GPU, as its MIG instances are: the simulator makes them of such a list.
    if (contains(device_name(test_devices()[1]), "gpusim")) {
        const ProgramResult instances = run_case_on_ranks(
            2, "ranks: devices", {{"WANTED", "auto"}, {"CUDA_VISIBLE_DEVICES", "1,1"}});
        INFO(instances.output);
        for (const char* rank : {"rank 0", "rank 1"})
            CHECK(contains(
                instances.output,
                concat(rank, " is refused: rank 1 has no GPU of its own on ", World().host(),
                       ": 2 ranks were started there, but they see only one GPU, and "
                       "two ranks cannot share one (nor its MIG instances)")));
    }

    const ProgramResult none =
        run_case_on_ranks(2, "ranks: devices", {{"WANTED", "auto"}, {"CUDA_VISIBLE_DEVICES", ""}});
    INFO(none.output);
    CHECK(contains(none.output, "rank 0 takes CPU"));
    CHECK(contains(none.output, "rank 1 takes CPU"));

    if (cuda::identities().size() < 3) return;
    const ProgramResult each = run_case_on_ranks(3, "ranks: devices", {{"WANTED", "cuda"}});
    INFO(each.output);
    for (const char* line : {"rank 0 takes GPU 0", "rank 1 takes GPU 1", "rank 2 takes GPU 2"})
        CHECK(contains(each.output, line));

    // Some launchers let every rank see only its own GPU, as number 0.
    const ProgramResult one_each =
        run_ranks(2,
                  {"sh", "-c",
                   "CUDA_VISIBLE_DEVICES=$((2 - "
                   "${OMPI_COMM_WORLD_LOCAL_RANK:-${MPI_LOCALRANKID:-$TRAIN_GPT_RANK}})) "
                   "exec \"$0\" 'ranks: devices'",
                   this_program()},
                  {{"WANTED", "cuda"}});
    INFO(one_each.output);
    for (const char* line : {"rank 0 takes GPU 0", "rank 1 takes GPU 0"})
        CHECK(contains(one_each.output, line));
}

#endif
