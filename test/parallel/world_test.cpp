#include "parallel/world.h"

#include <cstdlib>
#include <string>

#include "kernels/error.h"
#include "test/catch.h"

using namespace train_gpt;

TEST_CASE("a process is alone, or says which launcher started how many", "[world]") {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
        const char* before = std::getenv(name);
        const std::string kept = before ? before : "";
        ::unsetenv(name);
        CAPTURE(name);
        for (const char* alone : {"1", ""}) {
            ::setenv(name, alone, 1);
            const World world = join_world();
            CHECK(world.rank == 0);
            CHECK(world.size == 1);
        }
        ::setenv(name, "12", 1);
        try {
            join_world();
            FAIL("twelve ranks were let in");
        } catch (const Error& error) {
            CHECK(std::string(error.what()).find(name) != std::string::npos);
            CHECK(std::string(error.what()).find("12") != std::string::npos);
        }
        ::unsetenv(name);
        if (before) ::setenv(name, kept.c_str(), 1);
    }
}
