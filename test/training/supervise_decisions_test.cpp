// The hosts of a supervised job, and what a supervisor decides.
#include "training/supervise/supervise_decisions.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"
#include "training/supervise/hosts.h"

using namespace train_gpt;

namespace {

using Use = HostStatus::Use;

std::string error_of_hosts(const std::string& text) {
    return error_of([&] { parse_hosts(text, "hosts"); });
}

}  // namespace

// ---- Hosts --------------------------------------------------------------------------------------

TEST_CASE("a hosts file has a line for each host", "[supervise_decisions]") {
    const std::vector<JobHost> hosts = parse_hosts(
        "# all\n\nnode1 slots=8\n  node2   slots = 4 # half\r\nnode3\nnode4 address=node4-ib0 "
        "slots=2 max_slots=8",
        "hosts");
    CHECK(hosts == std::vector<JobHost>{{"node1", 8, "node1"},
                                        {"node2", 4, "node2"},
                                        {"node3", 1, "node3"},
                                        {"node4", 2, "node4-ib0"}});
    CHECK(contains(error_of_hosts("# none\n\n"), "hosts names no host"));
    CHECK(contains(error_of_hosts("a\nb\na slots=2"),
                   "line 3 of hosts: the host a is there a second time"));
    for (const char* slots : {"0", "-1", "x", "", "2x", "99999"})
        CHECK(contains(error_of_hosts(concat("a slots=", slots)), "is not a number of ranks"));
    CHECK(contains(error_of_hosts("a b"), "\"b\" is neither slots=N nor address=NAME"));
    CHECK(contains(error_of_hosts("-oProxyCommand=x"), "is not the name of a host"));
    CHECK(contains(error_of_hosts("slots=4"), "is not the name of a host"));
    CHECK(contains(error_of([] { read_hosts("/nowhere/hosts"); }), "there is no hosts file"));
}

TEST_CASE("the hosts of a Slurm allocation have its tasks", "[supervise_decisions]") {
    const auto hosts = [](const std::map<std::string, std::string>& values) {
        return slurm_hosts([&](const std::string& name) {
            const auto found = values.find(name);
            return found == values.end() ? nullptr : found->second.c_str();
        });
    };
    CHECK(hosts({}).empty());
    CHECK(hosts({{"SLURM_JOB_NODELIST", "n[1-3]"}}).empty());
    CHECK(hosts({{"SLURM_JOB_ID", "1"}, {"SLURM_JOB_NODELIST", "n[1-2]"}}) ==
          std::vector<JobHost>{{"n1", 1, "n1"}, {"n2", 1, "n2"}});
    CHECK(hosts({{"SLURM_JOB_ID", "1"},
                 {"SLURM_JOB_NODELIST", "n[1-3]"},
                 {"SLURM_TASKS_PER_NODE", "8(x2),4"}}) ==
          std::vector<JobHost>{{"n1", 8, "n1"}, {"n2", 8, "n2"}, {"n3", 4, "n3"}});
    CHECK(contains(error_of([&] {
                       hosts({{"SLURM_JOB_ID", "1"},
                              {"SLURM_JOB_NODELIST", "n1"},
                              {"SLURM_TASKS_PER_NODE", "many"}});
                   }),
                   "\"many\", which is not like"));
}

TEST_CASE("good hosts in use stay, then come spares, then hosts that were out",
          "[supervise_decisions]") {
    for (int i = 0; i < 300; ++i) {
        std::vector<HostStatus> hosts(static_cast<size_t>(random_int(1, 8)));
        const int unit = 1 << random_int(0, 2);
        for (HostStatus& host : hosts)
            host = {.slots = static_cast<int>(random_int(1, 9)),
                    .use = std::vector{Use::in_use, Use::spare,
                                       Use::out}[static_cast<size_t>(random_int(0, 2))],
                    .is_good = random_int(0, 3) > 0};
        const int wanted = static_cast<int>(random_int(1, 40));
        const std::vector<size_t> used = hosts_to_use(hosts, wanted, unit);
        int ranks = 0, all = 0;
        for (size_t j = 0; j < used.size(); ++j) {
            const HostStatus& host = hosts[used[j]];
            CHECK(host.is_good);
            CHECK(host.slots >= unit);
            CHECK(ranks < wanted);  // the host is needed
            ranks += host.slots / unit * unit;
            if (j > 0)
                CHECK(std::pair(hosts[used[j - 1]].use, used[j - 1]) <
                      std::pair(host.use, used[j]));
            // A host of a better kind that is left out would be one too many.
            for (size_t other = 0; other < hosts.size(); ++other)
                if (hosts[other].use < host.use && hosts[other].is_good &&
                    hosts[other].slots >= unit)
                    CHECK(std::ranges::count(used, other) == 1);
        }
        for (const HostStatus& host : hosts)
            if (host.is_good) all += host.slots / unit * unit;
        CHECK((ranks >= wanted || ranks == all));

        const int world = std::min(ranks, wanted) / unit * unit;
        const std::vector<HostRanks> places = place_ranks(hosts, used, world, unit);
        int next = 0;
        for (const HostRanks& part : places) {
            CHECK(part.first == next);
            CHECK(part.count > 0);
            CHECK(part.count % unit == 0);
            CHECK(part.count <= hosts[part.host].slots);
            next += part.count;
        }
        CHECK(next == world);
    }
}

TEST_CASE("a run continues on fewer data-parallel ranks, the most first", "[supervise_decisions]") {
    CHECK(worlds_to_try(6, {}, 12) == std::vector<int>{6, 5, 4, 3, 2, 1});
    CHECK(worlds_to_try(6, {}, 4) == std::vector<int>{4, 3, 2, 1});
    CHECK(worlds_to_try(31, {.pipeline = 2, .tensor = 4}, 0) == std::vector<int>{24, 16, 8});
    CHECK(worlds_to_try(7, {.tensor = 8}, 0).empty());
    for (int i = 0; i < 100; ++i) {
        const MeshSizes sizes{.pipeline = static_cast<int>(random_int(1, 3)),
                              .context = static_cast<int>(random_int(1, 3)),
                              .tensor = static_cast<int>(random_int(1, 3)),
                              .shard_ranks = static_cast<int>(random_int(0, 3))};
        const int most = static_cast<int>(random_int(1, 64));
        std::vector<int> expected;
        for (int world = most; world >= 1; --world)
            if (!mesh_problem(world, sizes)) expected.push_back(world);
        CAPTURE(most, sizes.pipeline, sizes.context, sizes.tensor, sizes.shard_ranks);
        CHECK(worlds_to_try(most, sizes, 0) == expected);
    }
}

TEST_CASE("the first restart comes at once, and others wait twice as long each time",
          "[supervise_decisions]") {
    CHECK(backoff_seconds(1, 5) == 0);
    CHECK(backoff_seconds(2, 5) == 5);
    CHECK(backoff_seconds(3, 5) == 10);
    CHECK(backoff_seconds(6, 5) == 80);
    CHECK(backoff_seconds(1000, 5) == 600);
    CHECK(backoff_seconds(50, 0) == 0);
}

// ---- How a job ended ----------------------------------------------------------------------------

TEST_CASE("lines name ranks", "[supervise_decisions]") {
    CHECK(ranks_named("rank 37 (host nodeA) is dead: its connection ended") ==
          std::vector<int>{37});
    CHECK(ranks_named("rank 3 (data 1, tensor 0, host nodeA) failed: no memory") ==
          std::vector<int>{3});
    CHECK(ranks_named("ranks 0-2, 5 and 7 of 8 did not come to rank 0 (host a, TCP port 1) within "
                      "9 s; only these are here: rank 3 on a") == std::vector<int>{0, 1, 2, 5, 7});
    CHECK(ranks_named("rank 4 of 6 did not come to rank 0 (host a, TCP port 1) within 9 s") ==
          std::vector<int>{4});
    CHECK(ranks_named("rank 2 (node-b, AMD EPYC, 1 thread): memory GB/s 1.0, 50% below") ==
          std::vector<int>{2});
    CHECK(ranks_named("rank 5 has not connected to rank 0 (host a) within 10 s") ==
          std::vector<int>{5});
    CHECK(ranks_named("rank  host  device").empty());
    CHECK(ranks_named("config.json: there is no key model.n_layers").empty());
}

TEST_CASE("a job is done if all its ranks have ended well or saved", "[supervise_decisions]") {
    using Kind = Verdict::Kind;
    for (const int code : {0, 3, 75, 130}) {
        const Verdict verdict = judge({0, code, 0}, {"running on the CPU, since there is none"});
        CHECK(verdict.kind == Kind::done);
        CHECK(verdict.code == code);
    }
    // A host that went while the others saved
    CHECK(judge({75, 75, std::nullopt}, {}).kind == Kind::lost);
}

TEST_CASE("lost ranks, failed ranks and errors of all ranks are told apart",
          "[supervise_decisions]") {
    using Kind = Verdict::Kind;
    const std::string dead = "rank 4 (host b) is dead: its connection ended; its last …";
    const std::string error = "rank 2 (host a) failed: the GPU has fallen off the bus";
    // Ranks that end with it, some by SIGALRM, say nothing more.
    Verdict verdict = judge({1, 1, -14, 1, -9, 1}, {"cuDNN is not used", dead});
    CHECK(verdict.kind == Kind::lost);
    CHECK(verdict.ranks == std::vector<int>{4});
    CHECK(verdict.line == dead);
    CHECK(verdict.code == 1);
    verdict = judge({1, 1, 1, std::nullopt, std::nullopt, std::nullopt}, {});
    CHECK(verdict.kind == Kind::lost);
    CHECK(verdict.ranks == std::vector<int>{3, 4, 5});
    verdict = judge({1, -14, 1}, {"cuDNN is not used", error});
    CHECK(verdict.kind == Kind::failed);
    CHECK(verdict.ranks == std::vector<int>{2});
    CHECK(verdict.line == error);
    // The ranks of the start before still end.
    verdict = judge({1, 1}, {"rank 0: another run is writing into runs/a; wait for it"});
    CHECK(verdict.kind == Kind::blocked);
    CHECK(verdict.ranks.empty());
    CHECK(judge({1}, {"rank 0 (host a) cannot listen on TCP port 29500: in use"}).kind ==
          Kind::blocked);
    CHECK(judge({1}, {}).kind == Kind::failed);
    for (const char* line : {"rank 0: config.json: model.n_layer is 0, but must be at least 1",
                             "the gradient of step 5 is not finite (first in wte)"}) {
        verdict = judge({1, 1}, {"cuDNN is not used", line});
        CHECK(verdict.kind == Kind::hopeless);
        CHECK(verdict.line == line);
    }
    // What one rank alone cannot read
    for (const char* line :
         {"rank 3: cannot open train.bin", "rank 3 (data 1, tensor 1): no file"}) {
        verdict = judge({1, 1, 1, 1}, {line});
        CHECK(verdict.kind == Kind::failed);
        CHECK(verdict.ranks == std::vector<int>{3});
    }
    verdict = judge({2, 2}, {"--bogus is not an option"});
    CHECK(verdict.kind == Kind::hopeless);
    CHECK(verdict.code == 2);
}

TEST_CASE("the same error is known again on another rank and host", "[supervise_decisions]") {
    CHECK(is_same_error("rank 2 (host a) failed: x", "rank 3 (data 1, host b) failed: x"));
    CHECK_FALSE(is_same_error("rank 2 (host a) failed: x", "rank 2 (host a) failed: y"));
    CHECK_FALSE(is_same_error("", ""));
}
