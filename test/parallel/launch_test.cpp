// How ranks find each other: by which variables, by which secret, over TCP, and what is said where
// they do not.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "parallel/launch/place.h"
#include "parallel/launch/rendezvous.h"
#include "parallel/launch/secret.h"
#include "parallel/net/channel.h"
#include "parallel/net/pack.h"
#include "parallel/net/socket.h"
#include "parallel/world.h"
#include "test/catch.h"
#include "test/file_difference.h"
#include "test/parallel/failing_job.h"
#include "test/parallel/ranks.h"
#include "test/parallel/training_job.h"
#include "test/parallel/two_nodes.h"
#include "test/random.h"
#include "test/text.h"
#include "training/files/checkpoint.h"

using namespace train_gpt;
using namespace std::chrono_literals;
using net::Clock, net::Socket;

// ---- Variables ----------------------------------------------------------------------------------

namespace {

Place place_in(const Environment& environment, bool has_mpi = true) {
    return find_place(
        [&](const std::string& name) {
            const auto found = environment.find(name);
            return found == environment.end() ? nullptr : found->second.c_str();
        },
        has_mpi);
}

const Environment own{
    {"TRAIN_GPT_RANK", "3"}, {"TRAIN_GPT_WORLD", "8"}, {"TRAIN_GPT_ADDRESS", "nodeA:29500"}};
const Environment torch{{"RANK", "2"},          {"WORLD_SIZE", "4"},
                        {"LOCAL_RANK", "0"},    {"LOCAL_WORLD_SIZE", "2"},
                        {"MASTER_ADDR", "m.n"}, {"MASTER_PORT", "29501"}};
const Environment torchrun =
    torch + Environment{{"TORCHELASTIC_RUN_ID", "x"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
// As srun sets them.
const Environment step{{"SLURM_PROCID", "5"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_NTASKS", "6"},
                       {"SLURM_STEP_NUM_TASKS", "6"},
                       {"SLURM_JOB_ID", "4711"},
                       {"SLURM_STEP_ID", "2"},
                       {"SLURM_JOB_NODELIST", "n[08-11]"},
                       {"SLURM_STEP_NODELIST", "n[09-11]"}};
// Of a script under sbatch, and of a shell under salloc.
const Environment batch{{"SLURM_PROCID", "0"},
                        {"SLURM_NTASKS", "6"},
                        {"SLURM_JOB_ID", "4711"},
                        {"SLURM_JOB_NODELIST", "n[08-11]"}};
const Environment shell =
    batch + Environment{{"SLURM_STEP_ID", "4294967290"}, {"SLURM_STEP_NUM_TASKS", "1"}};
const Environment mpirun_variables{{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "1"}};
const Environment pmix{{"PMIX_RANK", "5"}, {"PMIX_NAMESPACE", "slurm.pmix.4711.2"}};

constexpr auto nothing = Place::Through::nothing, mpi = Place::Through::mpi,
               tcp = Place::Through::tcp;

}  // namespace

TEST_CASE("a rank finds its place in the variables of whatever started it", "[launch]") {
    const Place by_own = place_in(own);
    CHECK(by_own.through == tcp);
    CHECK(by_own.rank == 3);
    CHECK(by_own.size == 8);
    CHECK(by_own.host == "nodeA");
    CHECK(by_own.ports == std::vector<int>{29500});
    const Place by_ipv6 = place_in(own + Environment{{"TRAIN_GPT_ADDRESS", "[fd00::1]:7"}});
    CHECK(by_ipv6.host == "fd00::1");
    CHECK(by_ipv6.ports == std::vector<int>{7});

    const Place by_torch = place_in(torch);
    CHECK(by_torch.through == tcp);
    CHECK(by_torch.rank == 2);
    CHECK(by_torch.size == 4);
    CHECK(by_torch.host == "m.n");
    CHECK(by_torch.ports == std::vector<int>{29501});
    for (const auto& [address, host] : {std::pair{"[::1]", "::1"},
                                        {"::1", "::1"},
                                        {"[fd00::1]", "fd00::1"},
                                        {"fe80::1%eth0", "fe80::1%eth0"},
                                        {"[fe80::1%eth0]", "fe80::1%eth0"},
                                        {"10.0.0.1", "10.0.0.1"},
                                        {"node-1.x", "node-1.x"},
                                        {"a_b", "a_b"}})
        CHECK(place_in(torch + Environment{{"MASTER_ADDR", address}}).host == host);
    // torchrun listens on its port itself.
    const Place by_torchrun = place_in(torchrun);
    CHECK(by_torchrun.ports.front() == 29502);
    CHECK(by_torchrun.job != by_torch.job);
    const int64_t last = random_int(65520, 65535);
    const Place at_last = place_in(torchrun + Environment{{"MASTER_PORT", std::to_string(last)}});
    CHECK(std::set<int>(at_last.ports.begin(), at_last.ports.end()).size() == at_last.ports.size());
    for (const int port : at_last.ports)
        CHECK((port >= 1024 && port <= 65535 && port != static_cast<int>(last)));

    const Place by_slurm = place_in(step);
    CHECK(by_slurm.through == tcp);
    CHECK(by_slurm.rank == 5);
    CHECK(by_slurm.size == 6);
    CHECK(by_slurm.host == "n09");
    CHECK(by_slurm.hosts == std::vector<std::string>{"n09", "n10", "n11"});
    CHECK(by_slurm.job != place_in(step + Environment{{"SLURM_STEP_ID", "3"}}).job);
    for (const int port : by_slurm.ports) CHECK((port >= 1024 && port < 32768));
    // Steps of a job may run at the same time, and so may jobs that start one after the other.
    const auto ports_of = [](int64_t job, int64_t number) {
        return place_in(step + Environment{{"SLURM_JOB_ID", std::to_string(job)},
                                           {"SLURM_STEP_ID", std::to_string(number)}})
            .ports;
    };
    const int64_t job = random_int(1, 1 << 30), number = random_int(0, 20);
    const std::vector<int> ports = ports_of(job, number);
    for (const auto& others :
         {ports_of(job, number + random_int(1, 30)), ports_of(job + random_int(1, 20), number)})
        CHECK(std::ranges::find_first_of(ports, others) == ports.end());
    const Place elsewhere = place_in(step + Environment{{"TRAIN_GPT_ADDRESS", "n10-ib:4000"}});
    CHECK(elsewhere.host == "n10-ib");
    CHECK(elsewhere.ports == std::vector<int>{4000});
    CHECK(elsewhere.rank == 5);
}

TEST_CASE("the innermost launcher counts, and MPI's before variables that others may have left",
          "[launch]") {
    const Environment everything = own + torch + step + mpirun_variables;
    CHECK(place_in(everything).through == mpi);
    CHECK(place_in(everything).size == 4);
    CHECK(place_in(everything, false).launcher == "TRAIN_GPT_RANK");
    CHECK(place_in(own + torch + step).launcher == "TRAIN_GPT_RANK");
    CHECK(place_in(torch + step).launcher == "torchrun");
    // srun, or mpirun, starts one torchrun on each node, and torchrun the ranks.
    for (const bool has_mpi : {false, true})
        for (const Environment& outer : {step, step + pmix, mpirun_variables + step})
            CHECK(place_in(outer + torchrun, has_mpi).launcher == "torchrun");
    // srun with PMIx or PMI2
    const Environment pmi2{{"PMI_RANK", "5"}, {"PMI_SIZE", "6"}};
    for (const Environment& by : {pmix, pmi2}) {
        CHECK(place_in(step + by).through == mpi);
        CHECK(place_in(step + by).size == 6);
        CHECK(place_in(step + by, false).through == tcp);
        CHECK(place_in(step + by, false).rank == 5);
    }
    // The daemons of an mpirun are a step of Slurm, and the ranks inherit its variables.
    for (const char* rank : {"PMIX_RANK", "PMI_RANK"})
        for (const char* other : {"0", "4", "50"})
            CHECK(place_in(step + Environment{{rank, other}}, false).through == mpi);
    CHECK(place_in(step + mpirun_variables, false).through == mpi);
    CHECK(place_in(step + Environment{{"PMI_RANK", "0"}, {"PMI_SIZE", "12"}}, false).through ==
          mpi);
}

TEST_CASE("a process is alone in Slurm's scripts and shells, and as the only rank", "[launch]") {
    for (const bool has_mpi : {false, true})
        for (const Environment& alone :
             {Environment{}, batch, shell, batch + Environment{{"SLURM_STEP_ID", "4294967291"}},
              own + Environment{{"TRAIN_GPT_WORLD", "1"}, {"TRAIN_GPT_RANK", "0"}},
              torch + Environment{{"WORLD_SIZE", "1"}, {"RANK", "0"}},
              Environment{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", ""}},
              Environment{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_ADDR", "a:b"}},
              Environment{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"TORCHELASTIC_RUN_ID", "x"}},
              Environment{{"TRAIN_GPT_RANK", "0"}, {"TRAIN_GPT_WORLD", "1"}},
              step + Environment{{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}},
              step + Environment{{"OMPI_COMM_WORLD_SIZE", "1"}},
              Environment{{"WORLD_SIZE", "4"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}}})
            if (!alone.contains("OMPI_COMM_WORLD_SIZE") || has_mpi)
                CHECK(place_in(alone, has_mpi).through == nothing);
}

TEST_CASE("variables that are missing or have no meaning are named", "[launch]") {
    const auto check = [](Environment environment, const std::string& name,
                          const std::string& value = "") {
        if (value.empty())
            environment.erase(name);
        else
            environment[name] = value;
        CAPTURE(name, value);
        CHECK(contains(error_of([&] { place_in(environment); }), name));
    };
    for (const char* name : {"TRAIN_GPT_RANK", "TRAIN_GPT_WORLD", "TRAIN_GPT_ADDRESS"})
        check(own, name);
    for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) check(torch, name);
    for (const char* name : {"SLURM_PROCID", "SLURM_JOB_ID", "SLURM_STEP_ID"}) check(step, name);
    for (const char* value : {"-1", "8", "x", "3x", "3.0"}) check(own, "TRAIN_GPT_RANK", value);
    for (const char* value :
         {"nodeA", "nodeA:", ":29500", "nodeA:0", "nodeA:65536", "fd00::1:2", "nodeA:29500x"})
        check(own, "TRAIN_GPT_ADDRESS", value);
    check(torch, "MASTER_PORT", "65536");
    for (const char* value : {"node1:29500", "10.0.0.1:29500", "[::1]:29500", "[::1", "::1]", "[]",
                              "[node1]", "[10.0.0.1]", "node 1", "http://node1", "fd00::1::2"})
        check(torch, "MASTER_ADDR", value);
    for (const char* value : {"[node1]:29500", "[]:29500", "[fd00::1]", "[fd00::1:29500"})
        check(own, "TRAIN_GPT_ADDRESS", value);
    check(step, "SLURM_JOB_ID", "4711_3");
}

TEST_CASE("a list of Slurm's nodes names its hosts in order", "[launch]") {
    using Hosts = std::vector<std::string>;
    CHECK(expand_hosts("a") == Hosts{"a"});
    CHECK(expand_hosts("a,b.c-1") == Hosts{"a", "b.c-1"});
    CHECK(expand_hosts("n[1-3,07,9-10]") == Hosts{"n1", "n2", "n3", "n07", "n9", "n10"});
    CHECK(expand_hosts("n[098-101]-ib,x") ==
          Hosts{"n098-ib", "n099-ib", "n100-ib", "n101-ib", "x"});
    CHECK(expand_hosts("r[1-2]n[3-4]") == Hosts{"r1n3", "r1n4", "r2n3", "r2n4"});
    for (const char* wrong :
         {"", "a[", "a[1", "a[]", "a[2-1]", "a[x]", "a,,b", "a[-1]", "a[1-99999999999]"}) {
        CAPTURE(wrong);
        CHECK_THROWS_AS(expand_hosts(wrong), Error);
    }
}

TEST_CASE("ranks are named in ranges", "[launch]") {
    CHECK(name_ranks({3}) == "rank 3");
    CHECK(name_ranks({3, 4}) == "ranks 3 and 4");
    CHECK(name_ranks({0, 1, 2, 5, 7}) == "ranks 0-2, 5 and 7");
}

// ---- The secret ---------------------------------------------------------------------------------

namespace {

Secret secret_in(const Environment& environment) {
    return find_secret([&](const std::string& name) {
        const auto found = environment.find(name);
        return found == environment.end() ? nullptr : found->second.c_str();
    });
}

}  // namespace

TEST_CASE("ranks that start at once on a home without a secret make one, for this user alone",
          "[launch]") {
    const TemporaryDirectory home;
    std::vector<std::future<Secret>> ranks;
    for (int rank = 0; rank < 8; ++rank)
        ranks.push_back(std::async(std::launch::async, [&] {
            return secret_in({{"HOME", home.path()}});
        }));
    std::vector<std::string> secrets;
    for (auto& rank : ranks) secrets.push_back(rank.get().text);
    CHECK(secrets.front().size() == 64);
    CHECK(std::ranges::count(secrets, secrets.front()) == 8);
    const std::string file = home / ".config/train_gpt/secret";
    struct stat status {};
    REQUIRE(::stat(file.c_str(), &status) == 0);
    CHECK((status.st_mode & 0777) == 0600);
    CHECK(training_job::names_in(home / ".config/train_gpt") == std::set<std::string>{"secret"});
    const TemporaryDirectory other;
    CHECK(secret_in({{"HOME", other.path()}}).text != secrets.front());
    CHECK(secret_in({{"HOME", other.path()}, {"TRAIN_GPT_SECRET_FILE", file}}).text ==
          secrets.front());
}

TEST_CASE("a secret that others can read, or that can be guessed, is refused", "[launch]") {
    const TemporaryDirectory folder;
    const std::string file = folder / "secret";
    const auto refusal = [](const Environment& environment) {
        return error_of([&] { secret_in(environment); });
    };
    write(file, "a secret that is long enough\n");
    for (const mode_t mode : {0640, 0604, 0660}) {
        ::chmod(file.c_str(), mode);
        CHECK(contains(refusal({{"TRAIN_GPT_SECRET_FILE", file}}), "chmod 600 " + file));
    }
    ::chmod(file.c_str(), 0600);
    // However an editor ends a line
    for (const char* end : {"", "\n", "\r\n"}) {
        write(file, concat("a secret that is long enough", end));
        CHECK(secret_in({{"TRAIN_GPT_SECRET_FILE", file}}).text == "a secret that is long enough");
    }
    CHECK(contains(refusal({{"TRAIN_GPT_SECRET", "short"}}), "fewer than 16"));
    // What is no file is not waited for.
    const std::string pipe = folder / "pipe";
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
    CHECK(contains(refusal({{"TRAIN_GPT_SECRET_FILE", pipe}}), pipe + ": it is not a file"));
    CHECK(contains(refusal({{"TRAIN_GPT_SECRET_FILE", folder.path()}}), "it is not a file"));
    CHECK(contains(refusal({{"TRAIN_GPT_SECRET_FILE", "/dev/zero"}}), "it is not a file"));
    CHECK(contains(refusal({{"TRAIN_GPT_SECRET_FILE", file + "/secret"}}), "TRAIN_GPT_SECRET"));
    CHECK(contains(refusal({}), "HOME is not set"));
}

// ---- Meetings -----------------------------------------------------------------------------------

TEST_CASE("ranks: join", "[.ranks]") {
    try {
        const char* program = std::getenv("PROGRAM");
        const World world = World::join(program ? program : "1");
        const std::string names = world.broadcast(std::getenv("NAME") ? std::getenv("NAME") : "");
        std::printf("joined %d of %d %s\n", world.rank(), world.size(), names.c_str());
    } catch (const ReportedError&) {
        std::printf("told\n");
    } catch (const Error& error) {
        std::printf("refused: %s\n", error.what());
    }
    std::fflush(stdout);
}

namespace {

Environment rank_of(int rank, int size, int port, const Environment& more = {}) {
    return Environment{{"TRAIN_GPT_RANK", std::to_string(rank)},
                       {"TRAIN_GPT_WORLD", std::to_string(size)},
                       {"TRAIN_GPT_ADDRESS", concat("127.0.0.1:", port)}} +
           more;
}

}  // namespace

TEST_CASE("ranks: look for rank 0", "[.ranks]") {
    if (!std::getenv("LOOK_AT")) return;
    Place place = place_in(rank_of(1, 2, std::atoi(std::getenv("LOOK_PORT"))));
    place.host = std::getenv("LOOK_AT");
    const std::string error = error_of([&] {
        meet(place, {test_secret, ""},
             {.program = "1",
              .host = "here",
              .limit = 1500ms,
              .first_note = 50ms,
              .notes_every = 100ms});
    });
    std::printf("refused: %s\n", error.c_str());
    std::fflush(stdout);
}

TEST_CASE("a rank that cannot resolve or reach rank 0's host says so again and again", "[launch]") {
    // Takes connections, and answers nothing.
    const Socket silent = net::listen_on(0);
    const std::string unknown = std::string(64, 'a') + ".invalid";  // too long for a name server
    const auto look = [](const std::string& host, int port) {
        return run_program({this_program(), "ranks: look for rank 0"},
                           {{"LOOK_AT", host}, {"LOOK_PORT", std::to_string(port)}})
            .output;
    };
    for (const auto& [host, port, reason] :
         {std::tuple{unknown, 1, unknown + " ("},
          std::tuple{std::string("127.0.0.1"), free_port(), std::string("(Connection refused)")},
          std::tuple{std::string("127.0.0.1"), net::port_of(silent),
                     std::string("(no answer yet)")}}) {
        const std::string output = look(host, port);
        INFO(output);
        const std::string note =
            "note: rank 1 (host here) has not found rank 0 yet, which TRAIN_GPT_ADDRESS says is "
            "at " +
            host;
        CHECK(failing_job::count(output, note) >= 2);
        CHECK(contains(output.substr(output.find(note)), reason));
        CHECK(contains(output, "refused: rank 1 (host here) could not meet rank 0 within 2 s"));
    }
}

namespace {

/// A process for each element, which joins the world with these variables, at the same time.
std::vector<std::string> join(const std::vector<Environment>& ranks, double seconds = 40) {
    std::vector<std::future<ProgramResult>> processes;
    for (const Environment& rank : ranks)
        processes.push_back(std::async(std::launch::async, [=] {
            return run_program({this_program(), "ranks: join"},
                               Environment{{"ASAN_OPTIONS", "detect_leaks=0"},
                                           {"TRAIN_GPT_SECRET", test_secret},
                                           {"TRAIN_GPT_JOIN_SECONDS", std::to_string(seconds)}} +
                                   rank);
        }));
    std::vector<std::string> outputs;
    for (auto& process : processes) outputs.push_back(process.get().output);
    return outputs;
}

Environment task_of(int task, int size, int64_t job, const Environment& more = {}) {
    return Environment{{"SLURM_PROCID", std::to_string(task)},
                       {"SLURM_STEP_NUM_TASKS", std::to_string(size)},
                       {"SLURM_JOB_ID", std::to_string(job)},
                       {"SLURM_STEP_ID", "0"},
                       {"SLURM_JOB_NODELIST", "localhost"}} +
           more;
}

/// Short enough not to wait, long enough for processes to start on a busy machine.
constexpr double short_limit = 6;

}  // namespace

TEST_CASE("a process started as one of twelve ranks that finds none does not train alone",
          "[launch]") {
    for (const std::string name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
        const std::string output = join({{{name, "12"}}})[0];
        INFO(output);
        CHECK(contains(output, "refused: "));
        CHECK(contains(output, "12 ranks (" + name + ")"));
    }
    const std::string output = join({task_of(3, 12, random_int(1, 1 << 20))}, 1)[0];
    INFO(output);
    CHECK(contains(output, "refused: rank 3 (host "));
    CHECK(contains(output, "could not meet rank 0 within 1 s at "));
}

TEST_CASE("mpirun's count of ranks comes before that of the Slurm step around it", "[launch]") {
    CHECK(contains(join({task_of(0, 4, 1, {{"OMPI_COMM_WORLD_SIZE", "1"}})})[0], "joined 0 of 1"));
}

TEST_CASE("one line names the ranks that did not come, and the hosts that nobody came from",
          "[launch]") {
    const std::string host = World().host();
    SECTION("known from Slurm") {
        const int64_t job = random_int(1, 1 << 20);
        std::vector<Environment> tasks;
        for (const int task : {0, 1, 3})
            tasks.push_back(task_of(task, 6, job,
                                    {{"SLURM_STEP_NODELIST", concat(host, ",absent[1-2]")},
                                     {"TRAIN_GPT_ADDRESS", concat("127.0.0.1:", free_port())}}));
        for (Environment& task : tasks) task["TRAIN_GPT_ADDRESS"] = tasks[0]["TRAIN_GPT_ADDRESS"];
        const auto outputs = join(tasks, short_limit);
        INFO(outputs[0] << outputs[1] << outputs[2]);
        CHECK(contains(outputs[0], "refused: ranks 2, 4 and 5 of 6 did not come to rank 0 (host " +
                                       host + ", TCP port "));
        CHECK(contains(outputs[0], "; nobody came from absent1, absent2;"));
        for (const int other : {1, 2}) CHECK(contains(outputs[other], "told\n"));
    }
    SECTION("known from torchrun") {
        const Environment torchrun{{"WORLD_SIZE", "6"},
                                   {"LOCAL_WORLD_SIZE", "2"},
                                   {"MASTER_ADDR", "localhost"},
                                   {"MASTER_PORT", std::to_string(free_port())}};
        // Of node 1 one rank came, and of node 2 none.
        std::vector<Environment> ranks;
        for (const char* rank : {"0", "1", "3"})
            ranks.push_back(torchrun + Environment{{"RANK", rank}});
        const auto outputs = join(ranks, short_limit);
        INFO(outputs[0] << outputs[1] << outputs[2]);
        CHECK(contains(outputs[0], "refused: ranks 2, 4 and 5 of 6 did not come"));
        CHECK(contains(outputs[0], "; nobody came from torchrun's node 2 (ranks 4 and 5);"));
        for (const int other : {1, 2}) CHECK(contains(outputs[other], "told\n"));
    }
    SECTION("not known") {
        const int port = free_port();
        const auto outputs = join({rank_of(0, 3, port), rank_of(2, 3, port)}, short_limit);
        INFO(outputs[0] << outputs[1]);
        CHECK(contains(outputs[0], concat("refused: rank 1 of 3 did not come to rank 0 (host ",
                                          host, ", TCP port ", port, ") within 6 s; ")));
        CHECK(contains(outputs[0],
                       "only these are here: ranks 0 and 2 on " + host.substr(0, host.find('.'))));
        CHECK(contains(outputs[1], "told\n"));
    }
}

TEST_CASE("ranks that cannot be of one world end it, and a line says why", "[launch]") {
    const int port = free_port();
    const auto check = [&](const Environment& other, const std::string& reason) {
        const auto outputs = join({rank_of(0, 3, port), rank_of(1, 3, port), other});
        INFO(outputs[0] << outputs[1] << outputs[2]);
        CHECK(contains(outputs[0], "refused: "));
        CHECK(contains(outputs[0], reason));
        CHECK(contains(outputs[2] + outputs[1], "told\n"));
        for (const std::string& output : outputs) CHECK_FALSE(contains(output, "joined"));
    };
    check(rank_of(2, 3, port, {{"PROGRAM", "2"}}), "is version 2 of train_gpt, and rank 0 (host ");
    check(rank_of(2, 4, port), "was started as one of 4 ranks, and rank 0 (host ");
    check(rank_of(1, 3, port), "rank 1 was started twice: on host ");
}

TEST_CASE("ranks: abort with a code", "[.ranks]") {
    if (!std::getenv("WHO_ABORTS")) return;
    const World world = World::join();
    world.barrier();
    if (world.rank() == std::atoi(std::getenv("WHO_ABORTS")))
        world.abort(std::atoi(std::getenv("ABORTS_WITH")));
    world.barrier();
}

TEST_CASE("a rank that aborts ends all ranks with its exit code", "[launch]") {
    for (const int64_t first : {int64_t{0}, random_int(1, 2)}) {
        const int port = free_port();
        const int64_t code = random_int(2, 120);
        std::vector<std::future<ProgramResult>> processes;
        for (int rank = 0; rank < 3; ++rank)
            processes.push_back(std::async(std::launch::async, [=] {
                return run_program({this_program(), "ranks: abort with a code"},
                                   rank_of(rank, 3, port,
                                           {{"TRAIN_GPT_SECRET", test_secret},
                                            {"WHO_ABORTS", std::to_string(first)},
                                            {"ABORTS_WITH", std::to_string(code)}}));
            }));
        for (auto& process : processes) {
            const ProgramResult result = process.get();
            INFO(first << "\n" << result.output);
            CHECK(result.exit_code == code);
        }
    }
}

TEST_CASE("rank 0 that was started twice finds its port taken", "[launch]") {
    const int port = free_port();
    const auto outputs = join({rank_of(0, 2, port), rank_of(0, 2, port)}, short_limit);
    INFO(outputs[0] << outputs[1]);
    const bool first = contains(outputs[0], "did not come");
    CHECK(contains(outputs[first ? 0 : 1], "rank 1 of 2 did not come"));
    CHECK(contains(outputs[first ? 1 : 0], concat("cannot listen on TCP port ", port)));
}

TEST_CASE("a rank with another secret stays out, and the others do not mind it", "[launch]") {
    const int port = free_port();
    const Environment other{{"TRAIN_GPT_SECRET", "not the secret of this job"},
                            {"TRAIN_GPT_JOIN_SECONDS", std::to_string(short_limit)}};
    auto outputs = join({rank_of(0, 2, port), rank_of(1, 2, port), rank_of(1, 2, port, other)}, 30);
    INFO(outputs[0] << outputs[1] << outputs[2]);
    CHECK(contains(outputs[0], "joined 0 of 2"));
    CHECK(contains(outputs[1], "joined 1 of 2"));
    CHECK(contains(outputs[2], "refused: rank 1 (host "));
    outputs = join({rank_of(0, 2, port), rank_of(1, 2, port, other)}, short_limit);
    INFO(outputs[0] << outputs[1]);
    CHECK(contains(outputs[0], "; rank 1 (address 127.0.0.1) showed another secret"));
    CHECK(contains(outputs[0],
                   " showed another secret than rank 0's, which is from "
                   "TRAIN_GPT_SECRET;"));
    CHECK(contains(outputs[1],
                   "(it has another secret); this rank's secret is from "
                   "TRAIN_GPT_SECRET, and must be the same on all ranks"));
    for (const std::string& output : outputs) CHECK_FALSE(contains(output, "secret of this job"));
}

TEST_CASE("two jobs that would take the same ports each find their own ranks", "[launch]") {
    // Jobs whose numbers differ by so much have the same ports.
    const int64_t job = random_int(1, 1 << 20);
    std::vector<Environment> tasks;
    for (const int64_t number : {job, job + 1536})
        for (int task = 0; task < 3; ++task)
            tasks.push_back(task_of(task, 3, number, {{"NAME", concat("job ", number)}}));
    REQUIRE(place_in(tasks[0]).ports == place_in(tasks[3]).ports);
    const auto outputs = join(tasks);
    for (size_t i = 0; i < outputs.size(); ++i) {
        INFO(outputs[i]);
        CHECK(
            contains(outputs[i], concat("joined ", i % 3, " of 3 job ", job + (i < 3 ? 0 : 1536))));
    }
}

TEST_CASE("ranks meet by a host's name, by IPv4 and by IPv6", "[launch]") {
    std::vector<std::string> hosts{"127.0.0.1", "localhost"};
    const std::vector<std::string> addresses = net::own_addresses();
    if (std::ranges::count(addresses, "::1"))
        hosts.emplace_back("[::1]");
    else
        std::printf("skipped: ranks that meet by IPv6, which this host does not have\n");
    if (!net::is_loopback(addresses.front()))
        hosts.push_back(contains(addresses.front(), ":") ? "[" + addresses.front() + "]"
                                                         : addresses.front());
    for (const std::string& host : hosts) {
        const Environment at{{"TRAIN_GPT_ADDRESS", concat(host, ":", free_port())}};
        const auto outputs = join({rank_of(0, 2, 1, at), rank_of(1, 2, 1, at)});
        INFO(host << "\n" << outputs[0] << outputs[1]);
        CHECK(contains(outputs[0], "joined 0 of 2"));
        CHECK(contains(outputs[1], "joined 1 of 2"));
        const Environment by_torch{{"WORLD_SIZE", "2"},
                                   {"MASTER_ADDR", host},
                                   {"MASTER_PORT", std::to_string(free_port())}};
        const auto others =
            join({by_torch + Environment{{"RANK", "0"}}, by_torch + Environment{{"RANK", "1"}}});
        INFO(others[0] << others[1]);
        for (const int rank : {0, 1})
            CHECK(contains(others[static_cast<size_t>(rank)], concat("joined ", rank, " of 2")));
    }
}

TEST_CASE("strangers at rank 0's port do not disturb a meeting", "[launch]") {
    const int port = free_port();
    auto first = std::async(std::launch::async, [&] { return join({rank_of(0, 2, port)}); });
    const auto call = [&] {
        Socket socket;
        const auto end = Clock::now() + 30s;
        while (!socket && Clock::now() < end)
            socket = net::connect_to("127.0.0.1", std::to_string(port), Clock::now() + 1s);
        REQUIRE(socket);
        return socket;
    };
    const auto bytes = [](int64_t n) { return net::random_text(static_cast<size_t>(n)); };
    std::vector<Socket> strangers;
    std::vector<net::Channel> channels;
    const auto say = [&](const std::string& text) {
        strangers.push_back(call());
        net::send_all(strangers.back(), text, Clock::now() + 1s);
    };
    for (int i = 0; i < 30; ++i) say(bytes(random_int(0, 5000)));
    for (int i = 0; i < 30; ++i) {
        // Without the secret; and with the secret, but not with what a rank says
        const std::string identity = rendezvous::identity_of(random_int(-1, 3), port);
        net::Channel channel = net::Channel::call(
            call(), identity,
            net::derive_key(i % 3 == 0 ? "another secret than that of the job" : test_secret,
                            identity));
        if (!net::shake_hands(channel, Clock::now() + 10s)) continue;
        const std::string text = bytes(random_int(0, 300));
        net::send_all(channel,
                      i % 5 == 0   ? net::encode(UINT64_MAX)
                      : i % 2 == 0 ? text
                                   : rendezvous::with_length(text),
                      Clock::now() + 1s);
        channels.push_back(std::move(channel));
    }
    for (int i = 0; i < 20; ++i) say("");
    const auto second = join({rank_of(1, 2, port)});
    INFO(second[0]);
    CHECK(contains(second[0], "joined 1 of 2"));
    CHECK(contains(first.get()[0], "joined 0 of 2"));
}

TEST_CASE("a rank that ends before all have met, or starts late, is only waited for", "[launch]") {
    const int port = free_port();
    auto first = std::async(std::launch::async, [&] { return join({rank_of(0, 3, port)}); });
    // Rank 2 comes and ends.
    const Place place = place_in(rank_of(2, 3, port));
    const pid_t early = ::fork();
    if (early == 0) {
        ::alarm(3);
        try {
            meet(place, {test_secret, ""}, {"1", "early", 60s});
        } catch (const Error&) {
        }
        ::_exit(0);
    }
    REQUIRE(early > 0);
    int status = 0;
    ::waitpid(early, &status, 0);
    CHECK(WIFSIGNALED(status));
    const auto late = join({rank_of(1, 3, port), rank_of(2, 3, port)});
    INFO(late[0] << late[1]);
    CHECK(contains(late[0], "joined 1 of 3"));
    CHECK(contains(late[1], "joined 2 of 3"));
    CHECK(contains(first.get()[0], "joined 0 of 3"));
}

// ---- Training -----------------------------------------------------------------------------------

TEST_CASE("ranks train the same bits whatever started them", "[launch][training]") {
    const training_job::TrainingJob job(4);
    for (const int ranks : {1, 2, 3, 4}) {
        std::string first;
        for (const Launcher launcher : launchers()) {
            const std::string name = concat(name_of(launcher), "-", ranks);
            const ProgramResult result = job.start(ranks, name, {}, {}, {}, launcher);
            INFO(name << ", " << result.seconds << " s:\n" << result.output);
            REQUIRE(result.exit_code == 0);
            if (ranks > 1) CHECK(contains(result.output, concat(" on ", ranks, " × ")));
            if (first.empty())
                first = job.path(name);
            else
                training_job::check_equal(first, job.path(name));
        }
    }
}

namespace {

using namespace failing_job;

const Launcher over_tcp[] = {Launcher::torchrun, Launcher::slurm, Launcher::own};

}  // namespace

TEST_CASE("of ranks that met over TCP, one that is killed or stopped ends all with its name",
          "[launch][failure]") {
    const TemporaryDirectory directory;
    const int stopped = static_cast<int>(random_int(0, 2));
    for (const int rank : {0, 1, 2}) {
        const Launcher launcher = over_tcp[random_int(0, 2)];
        const bool stops = rank == stopped;
        CAPTURE(rank, name_of(launcher), stops);
        const fs::path run = directory / concat("run-", rank);
        failing_job::FailingJob job(3, run, {}, {}, launcher);
        REQUIRE(job.wait_for_checkpoint());
        REQUIRE(job.wait_for_step(random_int(5, 12)));
        REQUIRE(job.signal(rank, stops ? SIGSTOP : SIGKILL));
        if (stops)
            check_hung(job, run, rank, launcher);
        else
            check_failed(job, run,
                         concat("rank ", rank, " \\(host [^)]+\\) is dead: ", last_words));
        newest_whole_checkpoint(run);
    }
}

TEST_CASE("ranks that met over TCP stop together after a checkpoint, and resume",
          "[launch][failure]") {
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    failing_job::FailingJob job(3, run, {}, {}, over_tcp[random_int(0, 2)]);
    REQUIRE(job.wait_for_step(random_int(3, 12)));
    REQUIRE(job.signal(1, SIGUSR1));
    check_saved(job, run, "a signal to another rank");
    check_resumes(3, run);
}

// ---- Two hosts ----------------------------------------------------------------------------------

TEST_CASE("ranks: layout", "[.ranks]") {
    if (skip_outside_ranks()) return;
    const World world = World::join();
    CHECK(world.local_size() == 2);
    CHECK(world.local_rank() == world.rank() % 2);
    const std::vector<std::string> hosts = world.all_gather_local(world.host());
    CHECK(hosts == std::vector<std::string>(2, world.rank() < 2 ? "node-a" : "node-b"));
}

TEST_CASE(
    "ranks on two hosts meet, know who is on theirs, and train the same bits wherever they are",
    "[launch][failure]") {
    const TwoNodes nodes;
    if (nodes.skip()) return;
    const TemporaryDirectory directory;
    const auto trained = [&](const char* name, const Arguments& start) {
        const fs::path run = directory / name;
        check_succeeds(start + train(run, {"--stop-at", "12"}));
        REQUIRE(newest_whole_checkpoint(run) == 12);
        return list_checkpoints(run).front();
    };
    for (const bool by_ipv6 : {false, true}) {
        if (by_ipv6 && !nodes.has_ipv6()) {
            std::printf("skipped: two hosts that meet by IPv6, which this kernel does not have\n");
            continue;
        }
        const ProgramResult layout =
            run_program(nodes.launch(4, by_ipv6) + Arguments{this_program(), "ranks: layout"},
                        surroundings + Environment{{"TEST_CASE_ON_RANKS", "1"}});
        INFO(layout.output);
        CHECK(layout.exit_code == 0);
        // One rank on each host, so that the order of sums is that of two ranks on one.
        const char* name = by_ipv6 ? "ipv6" : "ipv4";
        const fs::path one = trained(concat(name, "-one").c_str(), launch(2)),
                       two = trained(concat(name, "-two").c_str(), nodes.launch(2, by_ipv6));
        for (const auto& entry : fs::directory_iterator(one))
            if (entry.path().extension() == ".safetensors")
                CHECK(file_difference(entry.path(), two / entry.path().filename()) == "");
    }
    // Four ranks: the sums of both hosts, as mpirun's ranks add them there.
    if (nodes.skip_mpirun()) return;
    const fs::path by_mpirun = trained("mpirun-4", nodes.mpirun_on_both(4)),
                   by_tcp = trained("tcp-4", nodes.launch(4, false));
    for (const auto& entry : fs::directory_iterator(by_mpirun))
        if (entry.path().extension() == ".safetensors")
            CHECK(file_difference(entry.path(), by_tcp / entry.path().filename()) == "");
}

TEST_CASE("a cut cable between hosts whose ranks met over TCP ends both sides",
          "[launch][failure]") {
    const TwoNodes nodes;
    if (nodes.skip()) return;
    const TemporaryDirectory directory;
    const fs::path run = directory / "run";
    failing_job::FailingJob job(run, nodes.launch(4, false) + train(run));
    REQUIRE(job.wait_for_step(random_int(5, 12)));
    nodes.cut();
    job.mark();
    check_gone(run, [](const Process& process) { return process.rank >= 0; });
    CHECK(job.seconds_since_mark() < timeout + grace);
    check_failed(job, run, "rank [23] \\(host node-b\\) is hung: " + last_words);
    newest_whole_checkpoint(run);
}
