// The hosts of a supervised job.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "parallel/launch/place.h"

namespace train_gpt {

struct JobHost {
    std::string name;     // by which it is reached: for ssh, srun, and messages
    int slots = 1;        // ranks that it may have: one for each GPU, or each socket
    std::string address;  // at which ranks of other hosts find it

    bool operator==(const JobHost&) const = default;
};

/// The hosts in a text, which has a line for each:
///
///     node1 slots=8                       # comments begin with #
///     node2 slots=8 address=node2-ib0     its name in the network of the ranks, if it has several
///
/// Without slots a host has one. `max_slots=…`, which Open MPI reads, means nothing here. Throws
/// Error, which names `file` and the line, for a line that is something else, for a host that is
/// there twice, and if there is no host.
std::vector<JobHost> parse_hosts(const std::string& text, const std::string& file);
/// The hosts in a file, as parse_hosts() reads them. Throws Error if the file cannot be read.
std::vector<JobHost> read_hosts(const std::filesystem::path& file);

/// The hosts of the Slurm allocation that this process runs in (SLURM_JOB_ID, SLURM_JOB_NODELIST),
/// with their tasks (SLURM_TASKS_PER_NODE, or SLURM_NTASKS_PER_NODE, or one). Empty if there is no
/// allocation. Throws Error for variables that cannot be understood.
std::vector<JobHost> slurm_hosts(const Variables& variables);

/// Whether a name means this machine, where nothing is needed to start a process.
bool is_this_machine(const std::string& name);

/// The words of a text, which blanks divide.
std::vector<std::string> split_at_blanks(const std::string& text);

}  // namespace train_gpt
