// The benchmark: how fast a training step is compared with what this machine allows (the lower
// bound) and with PyTorch, all measured in one run on the same threads. scripts/bench.sh prepares
// and starts it.
//
// Other load on the same machine can slow everything down for a while. A canary, a short loop of
// multiply-adds on every thread, runs before and after each sample; if it reaches less than 0.85 of
// the fastest rate seen, the sample does not count. A round of training steps also does not count
// if other processes, or other guests of the host, took more than 5 % of the processor time during
// it.
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#ifdef TRAIN_GPT_ONEDNN
#include <dnnl.hpp>
#endif

#include "base/error.h"
#include "base/file.h"
#include "base/stopwatch.h"
#include "base/tensor.h"
#include "device/processor.h"
#include "device/stream.h"
#include "device/trace.h"
#include "test/bench/experts.h"
#include "test/bench/limits.h"
#include "test/bench/machine.h"
#include "test/bench/steps.h"

namespace train_gpt::bench {
namespace {

struct Options {
    bool quick = false;
    std::string program = "build/train_gpt", python, folder = "build/bench-runs", only;
    double cell_seconds = 100;  // for the rounds of one model and dtype
};

/// The ways in which PyTorch can run this step. Of mixtures, the fastest of two families counts.
std::vector<PeerKind> peer_kinds(const Options& options, const Model& m, DType dtype) {
    std::vector<PeerKind> kinds;
    for (const std::string type : {"fp32", "autocast", "masters"}) {
        if ((type == "fp32") != (dtype == DType::fp32)) continue;
        for (const bool compiled : {false, true}) {
            if (options.quick && (!compiled || type == "masters")) continue;
            if (m.n_expert == 0) {
                kinds.push_back({type, m.family, "", compiled});
                continue;
            }
            for (const std::string family : {"olmoe", "qwen3_moe"})
                for (const std::string experts : {"eager", "grouped_mm"})
                    kinds.push_back({type, family, experts, compiled});
        }
    }
    return kinds;
}

/// The fastest way in which PyTorch can run this step: each is tried for a few steps.
std::unique_ptr<PeerRun> fastest_peer(const Options& options, const Model& m, DType dtype,
                                      int threads) {
    std::unique_ptr<PeerRun> best;
    double best_ms = 0;
    int number = 0;
    for (const PeerKind& kind : peer_kinds(options, m, dtype)) {
        const std::string name = concat(m.name, " ", kind.label());
        try {
            auto run = std::make_unique<PeerRun>(
                options.python, concat(options.folder, "/peer-", number++), m, kind, threads);
            const double ms = median(run->steps(3));
            std::fprintf(stderr, "  PyTorch %s: %.0f ms\n", name.c_str(), ms);
            if (!best || ms < best_ms) best = std::move(run), best_ms = ms;
        } catch (const Error& error) {
            std::fprintf(stderr, "  PyTorch %s was left out: %s\n", name.c_str(), error.what());
        }
    }
    return best;
}

struct Cell {
    const Model* model;
    DType dtype;
    LeastTimes bound;
    Rounds ours, peer;
    uint64_t our_rss = 0, peer_rss = 0;
    std::string peer_label;
};

std::string milliseconds(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, seconds < 0.01 ? "%.1f" : "%.0f", 1e3 * seconds);
    return text;
}

void print_cells(const std::vector<Cell>& cells) {
    std::printf(
        "\n| model, dtype | bound ms (products + attention + AdamW + element-wise) | train_gpt ms "
        "| of the bound | "
        "PyTorch ms | PyTorch / train_gpt | GiB train_gpt | GiB PyTorch | quiet rounds |\n"
        "|---|---|---|---|---|---|---|---|---|\n");
    const auto number = [](const char* format, double value) {
        char text[32];
        std::snprintf(text, sizeof text, format, value);
        return std::string(value > 0 ? text : "–");
    };
    for (const Cell& c : cells) {
        const double ours = c.ours.ms(), peer = c.peer.ms(), bound = 1e3 * c.bound.total();
        std::printf(
            "| %s B%d T%d %s | %.0f (%s + %s + %s + %s) | %s | %s | %s | %s | %s | %s | %s, %s |\n",
            c.model->name, c.model->B, c.model->T, name_of(c.dtype), bound,
            milliseconds(c.bound.products).c_str(), milliseconds(c.bound.attention).c_str(),
            milliseconds(c.bound.adamw).c_str(), milliseconds(c.bound.element_wise).c_str(),
            number("%.0f", ours).c_str(), number("%.2f ×", ours / bound).c_str(),
            peer > 0 ? concat(number("%.0f", peer), " (", c.peer_label, ")").c_str() : "–",
            number("%.2f ×", ours > 0 ? peer / ours : 0).c_str(),
            number("%.2f", static_cast<double>(c.our_rss) / (1 << 30)).c_str(),
            number("%.2f", static_cast<double>(c.peer_rss) / (1 << 30)).c_str(),
            c.ours.quality().c_str(), c.peer.quality().c_str());
    }
}

void print_introduction(const CpuInfo& cpu) {
    char date[32];
    const std::time_t today = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&today));
    std::printf("# Speed of a training step\n\n%s, %d threads, %s%s%s; %s", cpu.model.c_str(),
                cpu.threads,
                cpu.avx512 ? "AVX-512"
                : cpu.avx2 ? "AVX2"
                           : "no AVX2",
                cpu.avx512_bf16 ? ", AVX512_BF16" : "", cpu.amx_bf16 ? ", AMX" : "", date);
#ifdef TRAIN_GPT_ONEDNN
    std::printf("; oneDNN %d.%d.%d", dnnl::version()->major, dnnl::version()->minor,
                dnnl::version()->patch);
#endif
    std::printf("\n\n");
}

void print_rates(const CpuInfo& cpu, const Canary& canary, const Bandwidth& bandwidth) {
    std::printf("- multiply-adds: %.0f GF/s fp32", canary.best_rate() / 1e9);
#if defined(__x86_64__)
    if (cpu.avx512_bf16) {
        double best = 0;
        for (int i = 0; i < 20; ++i)
            best = std::max(best, fma_rate({dot_bf16_avx512, 12 * 64}, 100000, cpu.threads));
        std::printf(", %.0f GF/s bf16 (VDPBF16PS)", best / 1e9);
    }
#endif
    std::printf("\n- memory: triad %.1f GB/s, update in place (AdamW) %.1f GB/s\n",
                bandwidth.triad / 1e9, bandwidth.update / 1e9);
    std::fflush(stdout);
}

/// Rounds of steps of both programs in turns, until enough of them were quiet. peer: null, or
/// PyTorch.
void measure_steps(Cell& cell, const Options& options, Canary& canary, OurRun& ours,
                   PeerRun* peer) {
    const double slower = std::max(median(ours.steps(2)), peer ? median(peer->steps(2)) : 0);
    const int steps = std::clamp(static_cast<int>(2500 / slower), 2, 8);
    const int wanted = options.quick ? 3 : 5;
    const double start = monotonic_seconds();
    do {
        if (peer) cell.peer.add(canary, *peer, steps);
        cell.ours.add(canary, ours, steps);
    } while ((cell.ours.good_rounds < wanted || (peer && cell.peer.good_rounds < wanted)) &&
             monotonic_seconds() - start < (options.quick ? 25 : options.cell_seconds));
    cell.our_rss = ours.peak_rss();
    if (!peer) return;
    cell.peer_rss = peer->peak_rss();
    cell.peer_label = peer->label();
}

/// Spans of a step of this model, from a short run that is traced.
double spans_of_step(const Options& options, const std::string& config) {
    constexpr int steps = 3;
    const std::string folder = options.folder + "/counted";
    std::filesystem::remove_all(folder);
    Child run({options.program, "train", config, "--trace", std::to_string(steps), "--stop-at",
               std::to_string(steps + 2), "--set", "run_dir=" + folder},
              options.folder + "/counted.log", false);
    while (run.running()) ::usleep(20000);
    const MappedFile file(folder + "/trace/step-00000003.json");
    int64_t spans = 0;
    for (size_t at = 0; (at = file.text().find("\"ph\":\"X\"", at)) != std::string_view::npos; ++at)
        ++spans;
    return static_cast<double>(spans) / steps;
}

double seconds_of_span() {
    constexpr int spans = 1000000;
    Stream stream;
    Tracer tracer(stream.device);
    tracer.reserve(spans, 1);
    tracer.activate(stream);
    const Stopwatch watch;
    for (int i = 0; i < spans; ++i) const TraceSpan span(TraceTrack::device, stream, "span", i);
    return watch.seconds() / spans;
}

/// What `--trace` costs: steps of two runs in turns, one of which is traced, and the time of the
/// spans alone, which is far below what differs between two runs.
void measure_trace(const Options& options, Canary& canary) {
    std::fprintf(stderr, "tracing\n");
    const Model& m = models[0];
    const std::string folder = options.folder + "/traced";
    OurRun without(options.program, options.folder + "/not-traced", m, DType::fp32),
        with(options.program, folder, m, DType::fp32, {"--trace", "1000"});
    Rounds plain, traced;
    const int wanted = options.quick ? 5 : 15;
    const double start = monotonic_seconds();
    do {
        plain.add(canary, without, 4);
        traced.add(canary, with, 4);
    } while ((plain.good_rounds < wanted || traced.good_rounds < wanted) &&
             monotonic_seconds() - start < (options.quick ? 25 : options.cell_seconds));
    const double spans = spans_of_step(options, folder + "/config.json"), each = seconds_of_span();
    std::printf(
        "- trace, %s: a step takes %.3f × as long with it (%s and %s quiet rounds in turns); %.0f "
        "spans of %.0f ns each are %.4f %% of a step\n",
        m.name, traced.ms() / plain.ms(), plain.quality().c_str(), traced.quality().c_str(), spans,
        1e9 * each, 100 * spans * each / (1e-3 * plain.ms()));
}

void run(const Options& options) {
    require_cpu_features();
    const CpuInfo cpu = cpu_info();
    print_introduction(cpu);
    Canary canary(cpu);
    Timing timing{canary, options.quick ? 5 : 9, options.quick ? 2.0 : 6.0};
    const Bandwidth bandwidth = measure_bandwidth(timing, cpu.threads);
    print_rates(cpu, canary, bandwidth);

    std::vector<Cell> cells;
    std::string products =
        "\n| | M×N×K | product | train_gpt GF/s | oneDNN | oneDNN packed "
        "|\n|---|---|---|---|---|---|\n";
    std::string peer_version;
    for (const Model& m : models) {
        if (options.quick && &m != models) continue;
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            const std::string name = concat(m.name, "-", name_of(dtype));
            if (!options.only.empty() && name.find(options.only) == std::string::npos) continue;
            std::fprintf(stderr, "%s: the lower bound\n", name.c_str());
            Cell cell{&m, dtype, measure_least_times(timing, m, dtype, bandwidth, &products),
                      {}, {},    0,
                      0,  ""};
            std::unique_ptr<PeerRun> peer;
            if (!options.python.empty()) peer = fastest_peer(options, m, dtype, cpu.threads);
            OurRun ours(options.program, options.folder + "/" + name, m, dtype);
            std::fprintf(stderr, "%s: rounds of steps\n", name.c_str());
            measure_steps(cell, options, canary, ours, peer.get());
            if (peer) peer_version = peer->version();
            cells.push_back(std::move(cell));
        }
    }
    std::printf("- peer: %s\n- quiet: %.0f %% of the looks at the canary",
                peer_version.empty() ? "none was measured" : ("PyTorch " + peer_version).c_str(),
                100 * canary.quiet_share());
    if (timing.disturbed > 0)
        std::printf("; %lld of %lld rates below were taken on a busy machine",
                    static_cast<long long>(timing.disturbed),
                    static_cast<long long>(timing.measured));
    std::printf("\n");
    if (options.only.empty() || options.only == "trace") measure_trace(options, canary);
    print_cells(cells);
    std::printf(
        "\nMedians over the steps of quiet rounds, the two programs taking turns; without any "
        "quiet "
        "round, of all steps, and then the numbers hold only roughly. GiB: peak "
        "resident memory.\n"
        "%s%s",
        bound_rule, products.c_str());
    if (options.only.empty() || options.only == "experts")
        print_expert_products(timing, bandwidth, options.quick);
}

}  // namespace
}  // namespace train_gpt::bench

int main(int argc, char** argv) {
    using namespace train_gpt::bench;
    using train_gpt::UsageError;
    std::signal(SIGPIPE, SIG_IGN);
    try {
        Options options;
        for (int i = 1; i < argc; ++i) {
            const std::string word = argv[i];
            const auto value = [&] {
                if (++i == argc) throw UsageError(word, " wants a value");
                return std::string(argv[i]);
            };
            if (word == "quick")
                options.quick = true;
            else if (word == "--python")
                options.python = value();
            else if (word == "--program")
                options.program = value();
            else if (word == "--folder")
                options.folder = value();
            else if (word == "--only")
                options.only = value();
            else
                throw UsageError(
                    "usage: bench [quick] [--program build/train_gpt] [--python PYTHON_WITH_TORCH] "
                    "[--folder SCRATCH] [--only 12.3M-bf16 | --only trace | --only experts], in "
                    "the repository's "
                    "root");
        }
        run(options);
        return 0;
    } catch (const UsageError& error) {
        std::fprintf(stderr, "bench: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench: %s\n", error.what());
        return 1;
    }
}
