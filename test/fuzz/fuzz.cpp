// libFuzzer's entry point: FUZZ_TARGET=NAME build/fuzz/fuzz CORPUS… fuzzes one of the targets.
// See scripts/fuzz.sh.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "parallel/axes/tensor.h"
#include "test/fuzz/targets.h"
#include "training/config/config_checks.h"

// The rules between keys need the mesh and most of the program; what is fuzzed is the reading. The
// same targets run with the rules in seeds_test.cpp.
void train_gpt::check_config(const Config&, const std::string&, int) {}

// Nothing that is fuzzed divides a model among tensor ranks, whose file needs the mesh.
void train_gpt::require_shared(const std::vector<SharedSize>&, int) { std::abort(); }

namespace {

const train_gpt::FuzzTarget* target = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    const char* name = std::getenv("FUZZ_TARGET");
    if (!name) {  // list the targets
        for (const auto& each : train_gpt::fuzz_targets()) std::puts(each.name);
        std::exit(0);
    }
    for (const auto& each : train_gpt::fuzz_targets())
        if (std::string_view(each.name) == name) target = &each;
    if (!target) std::fprintf(stderr, "error: there is no fuzz target called %s\n", name);
    return target ? 0 : (std::exit(2), 2);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    target->run({reinterpret_cast<const std::byte*>(data), size});
    return 0;
}
