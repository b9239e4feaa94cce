// The job files in scripts/cluster/, with stand-ins for a cluster's launchers. Real ranks are
// tested elsewhere.
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "test/catch.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

/// A folder with programs that print how they were called. The srun and mpirun among them, when
/// called to train, run until SIGUSR1 and then exit with CODE (by default 75, the program's exit
/// code for that). They fail at the selfcheck when SELFCHECK says so.
class Cluster {
  public:
    Cluster() {
        const std::string launcher = R"(#!/bin/sh
echo "called: ${0##*/} $*"
case "$*" in
    *"selfcheck --fail"*) exit 1 ;;
    *" train "*) ;;
    *) exit 0 ;;
esac
trap 'echo told; exit ${CODE:-75}' USR1
touch "$READY"
n=0
while [ $n -lt 600 ]; do sleep 0.1; n=$((n + 1)); done
)";
        for (const char* name : {"srun", "mpirun"}) program(name, launcher);
        program("scontrol", "#!/bin/sh\necho \"called: scontrol $*\"\n");
        write(folder_ / "hosts", "# two nodes\nnode1 slots=8\nnode2 slots=4\n");
    }

    /// Runs a script and, once it trains, sends it the signal.
    ProgramResult run(const std::string& script, const std::string& launcher,
                      const std::string& signal, const std::string& selfcheck = "--tolerance 20",
                      const std::string& code = "75") const {
        const std::string drive =
            R"(bash "scripts/cluster/$0" configs/a.json --set 'data.train=x *.bin' & job=$!
while kill -0 $job 2> /dev/null && ! [ -e "$READY" ]; do sleep 0.05; done
kill -$1 $job 2> /dev/null
wait $job)";
        fs::remove(folder_ / "ready");
        return run_program({"bash", "-c", drive, script, signal},
                           {{"PATH", folder_.path() + ":" + std::getenv("PATH")},
                            {"READY", folder_ / "ready"},
                            {"HOSTFILE", folder_ / "hosts"},
                            {"LAUNCHER", launcher},
                            {"THREADS", "3"},
                            {"TRAIN_GPT", "the/program"},
                            {"SELFCHECK", selfcheck},
                            {"CODE", code},
                            {"SLURM_CPUS_PER_TASK", "3"},
                            {"SLURM_JOB_ID", "4711"}});
    }

  private:
    void program(const char* name, const std::string& text) const {
        write(folder_ / name, text);
        fs::permissions(folder_ / name, fs::perms::owner_all);
    }

    TemporaryDirectory folder_;
};

const std::vector<std::pair<std::string, std::string>> scripts{
    {"slurm.sh", "srun"}, {"slurm.sh", "mpirun"}, {"hostfile.sh", "mpirun"}};

}  // namespace

TEST_CASE("job files check the ranks first, then train, and a signal reaches the ranks as SIGUSR1",
          "[cluster]") {
    const Cluster cluster;
    for (const auto& [script, launcher] : scripts) {
        for (const char* signal : {"USR1", "TERM"}) {
            const ProgramResult result = cluster.run(script, launcher, signal);
            INFO(script << ", " << launcher << ", SIG" << signal << ": " << result.output);
            // Requeued when the time limit is near (SIGUSR1), not when the job is told to end
            // (SIGTERM).
            const bool requeued = script.starts_with("slurm") && std::string(signal) == "USR1";
            CHECK(result.exit_code == (requeued ? 0 : 75));
            CHECK(contains(result.output, "called: scontrol requeue 4711") == requeued);
            const size_t selfcheck = result.output.find("the/program selfcheck --tolerance 20\n"),
                         train = result.output.find(
                             "the/program train configs/a.json --set data.train=x *.bin\n");
            CHECK(selfcheck < train);
            CHECK(train < result.output.find("told"));
            CHECK(contains(result.output, "called: " + launcher + " -"));
            CHECK(contains(result.output, launcher == "srun" ? "--mpi=none --cpus-per-task=3"
                                                             : "--map-by slot:PE=3"));
        }
    }
}

TEST_CASE("job files do not train where the selfcheck fails, and explain themselves", "[cluster]") {
    const Cluster cluster;
    for (const auto& [script, launcher] : scripts) {
        const ProgramResult result = cluster.run(script, launcher, "USR1", "--fail");
        INFO(script << ", " << launcher << ": " << result.output);
        CHECK(result.exit_code == 1);
        CHECK_FALSE(contains(result.output, " train "));
        CHECK_FALSE(contains(result.output, "requeue"));
        const ProgramResult bare = run_program({"bash", "scripts/cluster/" + script});
        CHECK(bare.exit_code == 2);
        CHECK(contains(bare.output, "usage: "));
    }
}

TEST_CASE("job files end with the ranks' exit code, and do not restart a failed run", "[cluster]") {
    const Cluster cluster;
    for (const auto& [script, launcher] : scripts)
        for (const char* code : {"0", "1"}) {
            const ProgramResult result = cluster.run(script, launcher, "USR1", "", code);
            INFO(script << ", " << launcher << ": " << result.output);
            CHECK(result.exit_code == std::stoi(code));
            CHECK_FALSE(contains(result.output, "requeue"));
        }
}

TEST_CASE("an unknown launcher is refused by name", "[cluster]") {
    const ProgramResult result =
        run_program({"bash", "scripts/cluster/slurm.sh", "configs/a.json"}, {{"LAUNCHER", "ssh"}});
    CHECK(result.exit_code == 2);
    CHECK(contains(result.output, "\"ssh\""));
}

// ---- ssh in a loop ------------------------------------------------------------------------------

namespace {

/// A stand-in for ssh that runs the command on this host, and a hostfile with two hosts and three
/// ranks.
class SshCluster {
  public:
    SshCluster() {
        write(folder_ / "ssh", "#!/bin/sh\necho \"on $1\" >> \"$0.log\"\nexec sh -c \"$2\"\n");
        fs::permissions(folder_ / "ssh", fs::perms::owner_all);
        write(folder_ / "hosts", "# two nodes\nnode1 slots=2\n\nnode2  # one rank\n");
    }

    /// Runs the script and, once the run has begun, sends it the signal if there is one.
    ProgramResult run(const std::string& signal, const std::vector<std::string>& arguments) const {
        const std::string drive =
            R"(run=$0 signal=$1; shift
bash scripts/cluster/ssh.sh "$@" --set run_dir="$run" & job=$!
[ -z "$signal" ] || {
    while kill -0 $job 2> /dev/null && ! [ -s "$run/metrics.jsonl" ]; do sleep 0.05; done
    kill -$signal $job
}
wait $job)";
        std::vector<std::string> command{"bash", "-c", drive, folder_ / "run", signal};
        command.insert(command.end(), arguments.begin(), arguments.end());
        return run_program(command,
                           {{"SSH", folder_ / "ssh"},
                            {"HOSTFILE", folder_ / "hosts"},
                            {"THREADS", "1"},
                            {"HOME", folder_.path()},
                            {"TRAIN_GPT_ADDRESS", "127.0.0.1:" + std::to_string(free_port())},
                            {"SELFCHECK", "--device cpu --max-bytes 65536 --tolerance 100"}});
    }
    /// The configuration of a tiny run.
    std::string config(int steps) const {
        write(folder_ / "config.json",
              R"({"device": "cpu",
                  "model": {"n_layer": 1, "n_head": 1, "n_embd": 16, "n_ctx": 16, "vocab_size": 64},
                  "data": {"train": "synthetic"},
                  "batch": {"tokens_per_step": 64, "micro_batch": 1, "sequence_length": 16},
                  "evaluation": {"every": 0}, "log": {"progress": "lines"},
                  "schedule": {"steps": )" +
                  std::to_string(steps) + R"(}, "precision": {"dtype": "fp32"}})");
        return folder_ / "config.json";
    }
    std::string log() const { return read(folder_ / "ssh.log"); }

  private:
    TemporaryDirectory folder_;
};

}  // namespace

TEST_CASE("ranks that ssh starts train, and a signal to the script ends them after a checkpoint",
          "[cluster]") {
    for (const char* signal : {"TERM", "USR1"}) {
        const SshCluster cluster;
        const ProgramResult stopped = cluster.run(signal, {cluster.config(1000000)});
        INFO(signal << ": " << stopped.output);
        CHECK(stopped.exit_code == 75);
        CHECK(contains(stopped.output, "over 3 ranks"));
        CHECK(contains(stopped.output, " on 3 × "));
        CHECK(contains(stopped.output, "the same command resumes from there"));
        // The ranks of the selfcheck, then those of the run
        const std::string log = cluster.log();
        CHECK(occurrences(log, "on node1\n") == 4);
        CHECK(occurrences(log, "on node2\n") == 2);
    }
    const SshCluster fresh;
    const ProgramResult whole = fresh.run("", {fresh.config(3)});
    INFO(whole.output);
    CHECK(whole.exit_code == 0);
    // One rank's failure is the script's.
    const ProgramResult failed = fresh.run("", {fresh.config(3), "--set", "model.n_layer=0"});
    INFO(failed.output);
    CHECK(failed.exit_code == 1);
}
