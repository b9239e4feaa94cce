// Tests of many ranks start other programs, or this one again on a hidden test case, under mpirun.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace train_gpt {

/// Why mpirun cannot start ranks of this build, as a sentence; empty when it can. A test that needs ranks prints it and ends:
///     if (skip_without_mpirun()) return;
const std::string& mpirun_obstacle();
/// Prints the obstacle, once in a run of the tests; whether there is one.
bool skip_without_mpirun();

/// The same for ranks that each want one of n GPUs; says nothing where the tests have no GPU at all.
bool skip_without_gpus(size_t n);

struct ProgramResult {
    int exit_code =
        0;  // 128 + the signal that ended it; −1 when it was still running at the deadline and was ended
    std::string output;  // stdout and stderr
    double seconds = 0;
};

/// Variables that are added to the environment of a program; they win over those that are there.
using Environment = std::map<std::string, std::string>;

/// Runs a program, found through PATH.
ProgramResult run_program(const std::vector<std::string>& command,
                          const Environment& environment = {}, double deadline_seconds = 120);

/// The beginning of a command that starts n ranks on this machine, whatever its cores.
std::vector<std::string> mpirun(int n);

/// Runs it as n ranks under mpirun, each with one thread and all with the same TEST_SEED, unless `environment` says otherwise.
ProgramResult run_ranks(int n, const std::vector<std::string>& command,
                        Environment environment = {}, double deadline_seconds = 120);

/// Whether a hidden test case was not started by run_ranks(), without which it has no ranks; says so, once. It begins
/// with
///     if (skip_outside_ranks()) return;
bool skip_outside_ranks();

/// Runs one of this program's test cases, a hidden one, as n ranks.
ProgramResult run_case_on_ranks(int n, const std::string& test_case, Environment environment = {},
                                double deadline_seconds = 120);

/// This program's file.
std::string this_program();

}  // namespace train_gpt
