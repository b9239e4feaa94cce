#include "parallel/cores.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include <sched.h>

#include "device/processor.h"

namespace train_gpt {

namespace {

/// The cores that this process may run on, as threads_of_rank() takes them.
std::string own_cores() {
    std::string cores;
    cpu_set_t set;
    CPU_ZERO(&set);
    if (::sched_getaffinity(0, sizeof set, &set) != 0) return cores;
    for (size_t core = 0; core < CPU_SETSIZE; ++core)
        cores.push_back(CPU_ISSET(core, &set) ? '1' : '0');
    return cores;
}

}  // namespace

int threads_of_rank(std::span<const std::string> cores, size_t rank) {
    double share = 0;
    for (size_t core = 0; core < cores[rank].size(); ++core) {
        const auto has = [&](const std::string& of) { return core < of.size() && of[core] == '1'; };
        if (has(cores[rank])) share += 1.0 / static_cast<double>(std::ranges::count_if(cores, has));
    }
    constexpr double rounding = 1e-6;  // so that three thirds are one
    return std::max(1, static_cast<int>(share + rounding));
}

void share_cores(const World& world) {
    if (world.size() == 1) return;
    const std::string cores = own_cores();
    const std::vector<std::string> all = world.all_gather_local(cores);
    for (const char* variable : {"OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES"})
        if (std::getenv(variable)) return;
    int threads = threads_of_rank(all, static_cast<size_t>(world.local_rank()));
    const int granted = cpu_info().threads;  // by affinity and control groups
    if (granted < std::ranges::count(cores, '1'))
        threads = std::min(threads, std::max(1, granted / world.local_size()));
    ::setenv("OMP_NUM_THREADS", std::to_string(threads).c_str(), 1);
}

}  // namespace train_gpt
