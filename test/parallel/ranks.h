// Tests with many ranks start other programs, or this one again on a hidden test case, under
// mpirun.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace train_gpt {

/// Why mpirun cannot start ranks of this build, as a sentence; empty when it can. A test that needs
/// ranks prints it and ends:
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

/// Runs a program, found through PATH.
ProgramResult run_program(const std::vector<std::string>& command,
                          const Environment& environment = {}, double deadline_seconds = 120);

/// The beginning of a command that starts n ranks on this machine, however many cores it has.
std::vector<std::string> mpirun(int n);

/// Runs a command as n ranks under mpirun, each with one thread and all with the same TEST_SEED,
/// unless `environment` says otherwise.
ProgramResult run_ranks(int n, const std::vector<std::string>& command,
                        Environment environment = {}, double deadline_seconds = 120);

/// Whether a hidden test case was not started by run_ranks() and so has no ranks; prints that once.
/// Such a case begins with
///     if (skip_outside_ranks()) return;
bool skip_outside_ranks();

/// Runs one of this program's hidden test cases as n ranks.
ProgramResult run_case_on_ranks(int n, const std::string& test_case, Environment environment = {},
                                double deadline_seconds = 120);

/// The path of this program's file.
std::string this_program();

}  // namespace train_gpt
