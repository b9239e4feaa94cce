#include "parallel/world.h"

#include <cstdlib>
#include <string>

#include "kernels/error.h"

namespace train_gpt {

World join_world() {
    // Open MPI, then PMI/PMIx as mpich and srun set it.
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
        const char* value = std::getenv(name);
        if (value && std::atoi(value) > 1)
            throw Error(
                "this process was started as one of ", value, " ranks (", name,
                "), but this version trains with one rank; start it without mpirun or with -np 1");
    }
    return {};
}

}  // namespace train_gpt
