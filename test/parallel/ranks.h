// Tests with many ranks start other programs, or this one again on a hidden test case, as ranks.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace train_gpt {

/// What starts ranks: mpirun, or a script that sets the variables of torchrun, of a step of Slurm,
/// or the program's own, and starts the ranks on this machine; they then meet over TCP.
enum class Launcher { mpirun, torchrun, slurm, own };
const char* name_of(Launcher launcher);
/// All that can start ranks of this build here.
std::vector<Launcher> launchers();
/// mpirun where it can start ranks of this build, else the program's own variables.
Launcher usual_launcher();

/// Why mpirun cannot start ranks of this build, as a sentence; empty when it can. A test that needs
/// mpirun itself prints it and ends:
///     if (skip_without_mpirun()) return;
const std::string& mpirun_obstacle();
/// Prints the obstacle, once in a run of the tests. Returns whether there is one.
bool skip_without_mpirun();

/// The same for ranks that each need one of n GPUs; prints nothing if the tests have no GPU at all.
bool skip_without_gpus(size_t n);

struct ProgramResult {
    int exit_code =
        0;  // 128 + the signal that ended it; −1 if it still ran at the deadline and was ended
    std::string output;  // stdout and stderr
    double seconds = 0;
};

/// Variables that are added to the environment of a program; they override existing ones.
using Environment = std::map<std::string, std::string>;

/// Both, with the values of `b` for what is in both.
inline Environment operator+(Environment a, const Environment& b) {
    for (const auto& [name, value] : b) a[name] = value;
    return a;
}

/// Sets variables of this process while it lives.
class ScopedEnvironment {
  public:
    explicit ScopedEnvironment(const Environment& variables);
    ~ScopedEnvironment();
    ScopedEnvironment(const ScopedEnvironment&) = delete;
    ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

  private:
    Environment before_;
    std::vector<std::string> unset_;
};

/// Runs a program, found through PATH. It is ended after 30 minutes: no program takes so long on a
/// slow machine that does other work, but one that hangs.
ProgramResult run_program(const std::vector<std::string>& command,
                          const Environment& environment = {});

/// Whether this machine has a python3, which scripts need and a fresh machine may lack.
bool has_python();
/// Prints what is left out without it, once in a run of the tests. Returns whether it is missing.
bool skip_without_python();

/// The beginning of a command that starts n ranks on this machine, however many cores it has. It
/// passes SIGUSR1 on to them.
std::vector<std::string> launch(int n, Launcher launcher = usual_launcher());
std::vector<std::string> mpirun(int n);

/// What ranks show each other in tests.
constexpr const char* test_secret = "a secret of the tests alone";

/// A TCP port that is free now.
int free_port();

/// Runs a command as n ranks, each with one thread and all with the same TEST_SEED, unless
/// `environment` says otherwise.
ProgramResult run_ranks(int n, const std::vector<std::string>& command,
                        Environment environment = {}, Launcher launcher = usual_launcher());

/// Whether a hidden test case was not started by run_ranks() and so has no ranks; prints that once.
/// Such a case begins with
///     if (skip_outside_ranks()) return;
bool skip_outside_ranks();

/// Runs one of this program's hidden test cases as n ranks.
ProgramResult run_case_on_ranks(int n, const std::string& test_case, Environment environment = {},
                                Launcher launcher = usual_launcher());
/// The same, and checks that it passes.
void check_case_on_ranks(int n, const std::string& test_case, const Environment& environment = {});

/// The path of this program's file.
std::string this_program();

}  // namespace train_gpt
