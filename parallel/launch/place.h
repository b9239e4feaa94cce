// Where a launcher has placed this process among its ranks, according to environment variables.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace train_gpt {

struct Place {
    enum class Through { nothing, mpi, tcp };

    Through through = Through::nothing;  // nothing: this process is alone
    std::string variable;                // the environment variable that `through` follows from
    int rank = 0, size = 1;              // mpi: rank is unknown; size is 0 if it is unknown

    // Where to meet rank 0 over TCP.
    std::string launcher;    // "torchrun", "Slurm", …, for messages
    std::string host;        // name or address of rank 0's host
    std::string host_from;   // the variable that `host` is from
    std::vector<int> ports;  // rank 0 listens on the first port that is free
    /// The job's name. Jobs of one user have different names, so that their ranks do not mix.
    std::string job;
    /// The hosts that ranks come from, if the launcher says so.
    std::vector<std::string> hosts;
    /// How many ranks torchrun starts on each node. Their numbers are consecutive. 0: unknown.
    int ranks_per_node = 0;
};

/// Returns the value of an environment variable; null if it is not set.
using Variables = std::function<const char*(const std::string& name)>;

/// The place of this process, from the first of these launchers that has started it:
///   torchrun, whose agent started this process (TORCHELASTIC_RUN_ID);
///   MPI, if the build has it and mpirun, or srun with PMIx or PMI2, started this process;
///   TRAIN_GPT_RANK, TRAIN_GPT_WORLD and TRAIN_GPT_ADDRESS ("host:port", "[IPv6 address]:port"; a
///     world of one needs none);
///   RANK, WORLD_SIZE, MASTER_ADDR (an IPv6 address may have brackets) and MASTER_PORT, as torchrun
///     sets them; a world of one needs no address and no port;
///   a step of Slurm: SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_JOB_ID and
///     SLURM_STEP_ID, SLURM_STEP_NODELIST or SLURM_JOB_NODELIST. A batch script and an interactive
///     shell are no steps of several ranks, although they have most of these variables.
/// Throws Error if a variable is missing or its value is invalid.
Place find_place(const Variables& variables, bool has_mpi);

/// The hosts in a list that Slurm has written: "a[1-2,07],b" gives a1, a2, a07 and b. Throws Error
/// if the text is not such a list.
std::vector<std::string> expand_hosts(const std::string& list);

}  // namespace train_gpt
