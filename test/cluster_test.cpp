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
