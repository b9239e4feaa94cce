// The machine under the benchmark: how busy others keep it, its rate of multiply-adds, and how long
// work takes in quiet moments.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <sys/times.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/stopwatch.h"
#include "device/processor.h"

namespace train_gpt::bench {

inline double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    const size_t half = values.size() / 2;
    return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

/// Processor time that all cores spent on anything, or that the host took from them, in clock
/// ticks.
inline int64_t machine_ticks() {
    std::ifstream file("/proc/stat");
    std::string name;
    int64_t user = 0, nice = 0, system = 0, idle = 0, waiting = 0, irq = 0, soft_irq = 0, steal = 0;
    file >> name >> user >> nice >> system >> idle >> waiting >> irq >> soft_irq >> steal;
    return user + nice + system + irq + soft_irq + steal;
}

/// The share of all processor time since construction that was used neither by this process nor by
/// another one, whose processor time is passed before and after.
class OthersShare {
  public:
    explicit OthersShare(int64_t own_ticks = 0)
        : start_(monotonic_seconds()), taken_(taken(own_ticks)) {}
    double operator()(int64_t own_ticks = 0) const {
        const double available =
            (monotonic_seconds() - start_) *
            static_cast<double>(::sysconf(_SC_CLK_TCK) * ::sysconf(_SC_NPROCESSORS_ONLN));
        // One tick either way is the precision of these numbers.
        return static_cast<double>(std::max<int64_t>(0, taken(own_ticks) - taken_ - 2)) / available;
    }

  private:
    static int64_t taken(int64_t own_ticks) {
        tms self{};
        ::times(&self);
        return machine_ticks() - self.tms_utime - self.tms_stime - own_ticks;
    }
    double start_;
    int64_t taken_;
};

// --- multiply-adds: the canary and the peak ------------------------------------------------------

// Each loop makes `rounds` rounds of 12 independent vector operations, which hides the latency of
// two units with four cycles each; not unrolled, it would keep them in memory. The result is
// returned so that it is not optimised away.
using FmaLoop = float (*)(int64_t rounds);
struct FmaKind {
    FmaLoop loop;
    double flops_per_round;
};

#if defined(__x86_64__)
inline __attribute__((target("avx512f"))) float fma_avx512(int64_t rounds) {
    __m512 sums[12];
    for (__m512& sum : sums) sum = _mm512_set1_ps(1.0f);
    const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
        for (__m512& sum : sums) sum = _mm512_fmadd_ps(sum, a, b);
    for (int i = 1; i < 12; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    float lanes[16];
    _mm512_storeu_ps(lanes, sums[0]);
    return std::accumulate(lanes, lanes + 16, 0.0f);
}

inline __attribute__((target("avx2,fma"))) float fma_avx2(int64_t rounds) {
    __m256 sums[12];
    for (__m256& sum : sums) sum = _mm256_set1_ps(1.0f);
    const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
        for (__m256& sum : sums) sum = _mm256_fmadd_ps(sum, a, b);
    for (int i = 1; i < 12; ++i) sums[0] = _mm256_add_ps(sums[0], sums[i]);
    float lanes[8];
    _mm256_storeu_ps(lanes, sums[0]);
    return std::accumulate(lanes, lanes + 8, 0.0f);
}

inline __attribute__((target("avx512f,avx512bf16"))) float dot_bf16_avx512(int64_t rounds) {
    __m512 sums[12];
    for (__m512& sum : sums) sum = _mm512_setzero_ps();
    const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f));
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
        for (__m512& sum : sums) sum = _mm512_dpbf16_ps(sum, a, a);
    for (int i = 1; i < 12; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    float lanes[16];
    _mm512_storeu_ps(lanes, sums[0]);
    return std::accumulate(lanes, lanes + 16, 0.0f);
}
#endif

inline float fma_plain(int64_t rounds) {
    float sums[12];
    for (float& sum : sums) sum = 1.0f;
    for (int64_t i = 0; i < rounds; ++i)
        for (float& sum : sums) sum = sum * 0.999f + 0.001f;
    return std::accumulate(sums, sums + 12, 0.0f);
}

inline FmaKind fma_kind(const CpuInfo& cpu) {
#if defined(__x86_64__)
    if (cpu.avx512) return {fma_avx512, 12 * 32};
    if (cpu.avx2) return {fma_avx2, 12 * 16};
#endif
    (void)cpu;
    return {fma_plain, 12 * 2};
}

/// FLOP/s of all threads together, taken from the slowest: work is divided evenly, so the
/// slowest thread sets the pace.
inline double fma_rate(const FmaKind& kind, int64_t rounds, int threads) {
    double slowest = 0;
    float sink = 0;
#pragma omp parallel num_threads(threads) reduction(max : slowest) reduction(+ : sink)
    {
#pragma omp barrier
        const double start = monotonic_seconds();
        sink += kind.loop(rounds);
        slowest = monotonic_seconds() - start;
    }
    static volatile float kept;
    kept = sink;
    (void)kept;
    return kind.flops_per_round * static_cast<double>(rounds) * threads / slowest;
}

/// Finds out whether this process has the cores to itself at the moment. A check takes 4 to 8 ms,
/// longer than a time slice, so that other processes of this machine are noticed too.
class Canary {
  public:
    Canary(const CpuInfo& cpu) : kind_(fma_kind(cpu)), threads_(cpu.threads) {
        while (rounds_ < int64_t{1} << 40 && seconds() < 4e-3) rounds_ *= 2;
        for (const double end = monotonic_seconds() + 0.5; monotonic_seconds() < end;) quiet();
    }

    bool quiet() {
        const double rate = fma_rate(kind_, rounds_, threads_);
        best_ = std::max(best_, rate);
        ++looks_;
        const bool good = rate > 0.85 * best_;
        good_ += good;
        return good;
    }
    /// Waits until the cores are quiet, for up to `limit` seconds.
    bool wait_for_quiet(double limit) {
        for (const double end = monotonic_seconds() + limit; monotonic_seconds() < end;
             ::usleep(20000))
            if (quiet()) return true;
        return false;
    }
    double best_rate() const { return best_; }
    double quiet_share() const { return static_cast<double>(good_) / static_cast<double>(looks_); }

  private:
    double seconds() const {
        return kind_.flops_per_round * static_cast<double>(rounds_) * threads_ /
               fma_rate(kind_, rounds_, threads_);
    }

    FmaKind kind_;
    int threads_;
    int64_t rounds_ = 1024;
    double best_ = 0;
    int64_t looks_ = 0, good_ = 0;
};

/// The median time of `work` in seconds over up to `samples` quiet samples after a warm-up. When
/// the machine is never quiet for the length of a sample, the median of all samples; *disturbed
/// counts how often that happens.
struct Timing {
    Canary& canary;
    int samples = 5;
    double limit = 5;  // seconds for one measurement
    int64_t disturbed = 0, measured = 0;

    double operator()(const std::function<void()>& work) {
        work();
        const OthersShare others;
        std::vector<double> good, all;
        const double end = monotonic_seconds() + limit;
        while (static_cast<int>(good.size()) < samples &&
               (all.size() < 2 || monotonic_seconds() < end)) {
            const bool before = canary.wait_for_quiet(0.2);
            const double start = monotonic_seconds();
            work();
            const double seconds = monotonic_seconds() - start;
            all.push_back(seconds);
            if (before && canary.quiet()) good.push_back(seconds);
        }
        ++measured;
        disturbed += good.empty() || others() > 0.1;
        return median(good.empty() ? all : good);
    }
};

}  // namespace train_gpt::bench
