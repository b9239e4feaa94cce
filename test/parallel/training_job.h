// Runs of the real program on several ranks, and comparisons of what they write.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "parallel/state/bucket_layout.h"
#include "test/catch.h"
#include "test/dataloader/shard_files.h"
#include "test/kernels/test_device.h"
#include "test/parallel/ranks.h"
#include "test/random.h"
#include "test/sorted_json.h"
#include "test/text.h"
#include "training/config/config.h"

namespace train_gpt::training_job {

namespace fs = std::filesystem;

using Settings = std::map<std::string, std::string>;  // key → value
using Command = std::vector<std::string>;

std::string program();

std::string step_folder(int64_t step);

/// Tokens of which few are frequent, so that there is something to learn.
std::vector<uint32_t> skewed_tokens(int64_t n, int64_t vocab_size);

// ---- Runs ---------------------------------------------------------------------------------------

/// A tiny model of odd sizes and its data. Its runs differ only in their settings.
class TrainingJob {
  public:
    explicit TrainingJob(int micro_batches, Settings settings = {});

    std::string path(const std::string& name) const { return directory_ / name; }
    Config config(const Settings& more = {}) const;
    std::vector<Parameter> parameters() const;
    BucketLayout layout(int ranks) const;

    Command command(const std::string& verb, const std::string& name, const Settings& more = {},
                    const Command& options = {}) const;

    ProgramResult start(int ranks, const std::string& name, const Settings& more = {},
                        const Command& options = {}, const Environment& environment = {},
                        Launcher launcher = usual_launcher()) const;

    /// Trains with `ranks` ranks in the folder `name` and returns the folder; must succeed. A
    /// single rank runs without a launcher.
    std::string train(int ranks, const std::string& name, const Settings& more = {},
                      const Command& options = {}, Environment environment = {}) const;

  private:
    std::string config_path() const { return directory_ / "config.json"; }
    std::vector<std::string> assignments(const Settings& more) const;

    TemporaryDirectory directory_;
    Settings settings_;
};

inline Settings zero(int stage) { return {{"parallel.zero", std::to_string(stage)}}; }

const Settings in_bf16{{"precision.dtype", "bf16"}}, summed_in_fp32{{"parallel.sums", "fp32"}},
    sent_in_bf16{{"parallel.reduce_dtype", "bf16"}};

/// metrics.jsonl without what depends on the clock.
std::vector<SortedJson> metrics_of(const std::string& run);

using Tensors = std::map<std::string, std::vector<float>>;

/// Weights ("weights/NAME"), and of all optimizer files together masters and moments
/// ("master/NAME", "m/NAME", "v/NAME"), of which each element must be in exactly one. Muon's
/// matrices have no v.
Tensors state_of(const std::string& run, int64_t step);

bool same_bits(const std::vector<float>& a, const std::vector<float>& b);

/// Two runs have the same losses, norms, weights, masters and moments at a step, bit for bit.
void check_equal(const std::string& a, const std::string& b, int64_t step = 20);

// How far two runs may differ if only the order of their sums differs. A gradient is a sum over
// hundreds of tokens, of products of vectors of up to a thousand elements: its rounding errors in
// the dtype, of unit roundoff u, are of the size of √1000·u, and grow by a small factor over 20
// steps. In the norm and in the loss they average out.
struct Bounds {
    double loss, norm, tensor;  // relative; of a tensor's elements together
};
// Losses and gradients are sums in fp32.
constexpr double fp32_roundoff = 0x1p-24, bf16_roundoff = 0x1p-9;
constexpr Bounds in_fp32_order{2 * fp32_roundoff, 16 * fp32_roundoff, 128 * fp32_roundoff};
// A master that differs in its last bit may round to another bf16 weight, and then later
// activations to others; sums are in fp32 also here. Gradients that are sent in bf16 differ by one
// or two roundings each.
constexpr Bounds in_bf16_order{bf16_roundoff / 4, 2 * bf16_roundoff, 16 * bf16_roundoff};

/// What a model computes in.
struct Dtype {
    const char* name;
    Bounds bounds;

    Settings settings() const { return {{"precision.dtype", name}}; }
};
constexpr Dtype dtypes[] = {{"fp32", in_fp32_order}, {"bf16", in_bf16_order}};
inline const Dtype& random_dtype() { return dtypes[random_int(0, 1)]; }

/// The largest relative distance of two runs' tensors of equal names, and the name.
std::pair<double, std::string> distance(const std::string& run, const std::string& reference,
                                        int64_t step);

void check_close(const std::string& run, const std::string& reference, const Bounds& bounds,
                 int64_t step = 20);

/// The entries of a folder.
std::set<std::string> names_in(const fs::path& folder);

bool gpus_are_simulated();

/// Trains on `ranks` ranks with every stage of ZeRO: all come close to one rank, and where sums
/// have a fixed order (NCCL may choose another one for all-reduce than for reduce-scatter) stages 0
/// and 1 are equal; stage 2 as well when no rank has a second micro-batch, whose sums it adds in
/// another order.
void check_stages(const TrainingJob& job, const std::string& one_rank, int ranks,
                  const Settings& more, const Bounds& bounds, const Environment& environment = {});

/// HellaSwag's format with a few random words.
std::string random_examples(int n);

/// Writes a task of each form, of few random words: choice.jsonl, schema.jsonl and text.jsonl.
/// `continuation`: what the first item of text.jsonl continues nothing with.
void write_random_tasks(const TemporaryDirectory& directory, const std::string& continuation = "a");

/// Checks that two evaluations give tasks nearly the same scores; accuracies of choices may differ
/// where two of them are nearly equal.
void check_close_tasks(const SortedJson& a, const SortedJson& b, double tolerance);

/// Runs one job in the folder whose ranks have different command lines, `ranks` of each.
struct Part {
    int ranks;
    Command command;
    std::string folder = ".";
};
ProgramResult start_parts(const Part& first, const Part& second);

void check_refused(const ProgramResult& result, const Command& parts);

}  // namespace train_gpt::training_job
