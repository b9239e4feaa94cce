// This file must run on CPUs without the instruction sets that the kernels are compiled for,
// because it checks for them.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("no-avx,no-bmi,no-bmi2,no-lzcnt,no-popcnt,no-movbe,no-sse4.1,no-adx")
#endif

#include "device/processor.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <omp.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include "base/error.h"
#include "device/instruction_set.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

struct NamedInstructionSet {
    uint64_t bit;
    const char* name;
};

constexpr NamedInstructionSet instruction_set_names[] = {
    {isa_sse42, "SSE4.2"},
    {isa_popcnt, "POPCNT"},
    {isa_movbe, "MOVBE"},
    {isa_lzcnt, "LZCNT"},
    {isa_avx, "AVX"},
    {isa_f16c, "F16C"},
    {isa_fma, "FMA"},
    {isa_bmi1, "BMI1"},
    {isa_bmi2, "BMI2"},
    {isa_avx2, "AVX2"},
    {isa_gfni, "GFNI"},
    {isa_avx_vnni, "AVX-VNNI"},
    {isa_avx512, "AVX-512"},
    {isa_avx512_ifma, "AVX512_IFMA"},
    {isa_avx512_vbmi, "AVX512_VBMI"},
    {isa_avx512_vbmi2, "AVX512_VBMI2"},
    {isa_avx512_vnni, "AVX512_VNNI"},
    {isa_avx512_bitalg, "AVX512_BITALG"},
    {isa_avx512_vpopcntdq, "AVX512_VPOPCNTDQ"},
    {isa_avx512_bf16, "AVX512_BF16"},
    {isa_avx512_fp16, "AVX512_FP16"},
    {isa_amx_bf16, "AMX_BF16"},
};

/// The number after `key` in a file of "key value" lines such as /proc/meminfo or memory.stat.
bool read_key(const fs::path& path, const std::string& key, uint64_t& value) {
    std::ifstream file(path);
    std::string word;
    while (file >> word) {
        if (word == key) return static_cast<bool>(file >> value);
    }
    return false;
}

bool read_number(const fs::path& path, uint64_t& value) {
    std::ifstream file(path);
    return static_cast<bool>(file >> value);
}

/// The folders where this process's control groups may be found, innermost first: those of version
/// 2, and those of `controller` in version 1. Inside a container the path that /proc shows may not
/// exist; then only the root applies.
std::vector<fs::path> control_groups(const std::string& controller) {
    std::vector<fs::path> folders;
    std::ifstream file("/proc/self/cgroup");
    std::string line;
    while (std::getline(file, line)) {
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const fs::path path = fs::path(line.substr(second + 1)).relative_path();

        std::vector<fs::path> roots;
        if (controllers.empty()) {
            roots = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};
        } else if (("," + controllers + ",").find("," + controller + ",") != std::string::npos) {
            roots = {"/sys/fs/cgroup/" + controllers, "/sys/fs/cgroup/" + controller};
        }
        for (const fs::path& root : roots) {
            fs::path inner = path;
            while (!inner.empty()) {
                folders.push_back(root / inner);
                inner = inner.parent_path();
            }
            folders.push_back(root);
        }
    }
    return folders;
}

/// The CPU time that the control groups grant, in whole cores, at least 1; 10⁹ without a limit.
int core_quota() {
    double cores = 1e9;
    for (const fs::path& folder : control_groups("cpu")) {
        double quota = 0, period = 0;
        std::ifstream version2(folder / "cpu.max");  // "max 100000" or "150000 100000"
        if (version2 >> quota >> period && quota > 0 && period > 0)
            cores = std::min(cores, quota / period);
        std::ifstream quota1(folder / "cpu.cfs_quota_us"), period1(folder / "cpu.cfs_period_us");
        if (quota1 >> quota && period1 >> period && quota > 0 && period > 0)
            cores = std::min(cores, quota / period);
    }
    return std::max(1, static_cast<int>(cores));
}

int team_size() {
    // "4" or, with nesting, "4,2": the first number is the outer team's.
    if (const char* wanted = std::getenv("OMP_NUM_THREADS")) {
        const long threads = std::strtol(wanted, nullptr, 10);
        if (threads > 0 && threads < 100000) return static_cast<int>(threads);
    }
    // libgomp counted the processors when it was loaded. With OMP_PROC_BIND it has since bound this
    // thread to one core, so the current affinity mask would be too small.
    return std::min(omp_get_num_procs(), core_quota());
}

void find_memory(CpuInfo& info) {
    uint64_t kib = 0;
    if (read_key("/proc/meminfo", "MemTotal:", kib)) info.memory_total = kib << 10;
    if (read_key("/proc/meminfo", "MemAvailable:", kib)) info.memory_available = kib << 10;

    for (const fs::path& folder : control_groups("memory")) {
        uint64_t limit = 0, usage = 0, cached = 0;
        if (read_number(folder / "memory.max", limit)) {
            read_number(folder / "memory.current", usage);
            read_key(folder / "memory.stat", "inactive_file", cached);
        } else if (read_number(folder / "memory.limit_in_bytes", limit)) {
            read_number(folder / "memory.usage_in_bytes", usage);
            read_key(folder / "memory.stat", "total_inactive_file", cached);
        } else {
            continue;
        }
        // Cached file pages count as usage, but the kernel frees them when memory is needed.
        const uint64_t held = usage - std::min(usage, cached);
        info.memory_total = std::min(info.memory_total, limit);
        info.memory_available = std::min(info.memory_available, limit - std::min(limit, held));
    }
}

std::string cpu_model() {
    std::ifstream file("/proc/cpuinfo");
    std::string line;
    while (std::getline(file, line)) {
        const size_t colon = line.find(": ");
        if (colon != std::string::npos && line.compare(0, 10, "model name") == 0)
            return line.substr(colon + 2);
    }
    return "unknown CPU";
}

}  // namespace

std::string names_of_instruction_sets(uint64_t sets) {
    std::string names;
    for (const NamedInstructionSet& set : instruction_set_names) {
        if (sets & set.bit) names += (names.empty() ? "" : ", ") + std::string(set.name);
    }
    return names;
}

uint64_t cpu_instruction_sets() {
    uint64_t sets = 0;
#ifdef __x86_64__
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const auto bit = [](unsigned word, int position) { return (word >> position & 1u) != 0; };
    if (bit(c, 20)) sets |= isa_sse42;
    if (bit(c, 23)) sets |= isa_popcnt;
    if (bit(c, 22)) sets |= isa_movbe;

    // XCR0: the register files that the operating system saves. Instructions that use others fault.
    unsigned xcr0 = 0;
    if (bit(c, 27)) {
        unsigned high = 0;
        asm volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    }
    const bool ymm = (xcr0 & 0x6u) == 0x6u;
    const bool zmm = ymm && (xcr0 & 0xe0u) == 0xe0u;
    const bool tiles = (xcr0 & 0x60000u) == 0x60000u;
    if (ymm && bit(c, 28)) sets |= isa_avx;
    if (ymm && bit(c, 29)) sets |= isa_f16c;
    if (ymm && bit(c, 12)) sets |= isa_fma;

    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        const unsigned subleaves = a;
        if (bit(b, 3)) sets |= isa_bmi1;
        if (bit(b, 8)) sets |= isa_bmi2;
        if (ymm && bit(b, 5)) sets |= isa_avx2;
        if (bit(c, 8)) sets |= isa_gfni;
        if (zmm) {
            if (bit(b, 16) && bit(b, 17) && bit(b, 28) && bit(b, 30) && bit(b, 31))
                sets |= isa_avx512;
            if (bit(b, 21)) sets |= isa_avx512_ifma;
            if (bit(c, 1)) sets |= isa_avx512_vbmi;
            if (bit(c, 6)) sets |= isa_avx512_vbmi2;
            if (bit(c, 11)) sets |= isa_avx512_vnni;
            if (bit(c, 12)) sets |= isa_avx512_bitalg;
            if (bit(c, 14)) sets |= isa_avx512_vpopcntdq;
            if (bit(d, 23)) sets |= isa_avx512_fp16;
        }
        if (tiles && bit(d, 22) && bit(d, 24)) sets |= isa_amx_bf16;
        if (subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
            if (ymm && bit(a, 4)) sets |= isa_avx_vnni;
            if (zmm && bit(a, 5)) sets |= isa_avx512_bf16;
        }
    }
    if (__get_cpuid(0x80000001u, &a, &b, &c, &d) && bit(c, 5)) sets |= isa_lzcnt;
#endif
    return sets;
}

CpuInfo cpu_info() {
    CpuInfo info;
    info.model = cpu_model();
    info.threads = team_size();
    const uint64_t sets = cpu_instruction_sets();
    info.avx2 = (sets & isa_avx2) && (sets & isa_fma);
    info.avx512 = sets & isa_avx512;
    info.avx512_bf16 = info.avx512 && (sets & isa_avx512_bf16);
    info.amx_bf16 = sets & isa_amx_bf16;
    find_memory(info);
    return info;
}

void require_instruction_sets(uint64_t needed, uint64_t present) {
    const uint64_t missing = needed & ~present;
    if (missing == 0) return;
    throw Error("this binary's kernels use ", names_of_instruction_sets(missing),
                ", which this CPU does not have; rebuild on this machine with make MARCH=native or "
                "MARCH=x86-64-v3");
}

void require_cpu_features() {
    require_instruction_sets(compiled_instruction_sets, cpu_instruction_sets());
}

}  // namespace train_gpt
