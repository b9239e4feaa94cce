// What a configuration makes of a world of ranks: shapes, shares and sizes, which the trainer, the
// plan and the decisions before a run take from here.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "dataloader/loader.h"
#include "device/device.h"
#include "device/stream.h"
#include "model/fp8_scales.h"
#include "model/recompute.h"
#include "model/registry.h"
#include "model/spec.h"
#include "parallel/axes/context.h"
#include "parallel/axes/data.h"
#include "parallel/axes/pipeline.h"
#include "parallel/axes/tensor.h"
#include "parallel/mesh.h"
#include "parallel/step_collectives.h"
#include "tokenizer/tokenizer.h"
#include "training/config/config.h"

namespace train_gpt {

/// The configuration's tokenizer. Nothing if the configuration names none. A missing or unfinished
/// tokenizer is an error only if the size of the vocabulary comes from it.
std::optional<Tokenizer> tokenizer_there(const Config& config);

/// Vocabulary size of a run: model.vocab_size. If it is 0, the size of the tokenizer's vocabulary.
/// Throws Error if neither is given, or if the tokenizer has more tokens.
int64_t vocab_size_of(const Config& config);
/// Vocabulary size of a run with this tokenizer; null: there is none.
int64_t vocab_size_of(const Config& config, const Tokenizer* tokenizer);

/// `wanted`, or where there is none ("auto") the device's own choice: bf16 where the device
/// multiplies bf16 natively, else fp32.
DType resolve_dtype(std::optional<DType> wanted, const Device& device);
/// The dtype for a word of precision.dtype. Throws Error for an unknown word.
DType resolve_dtype(const std::string& word, const Device& device);

/// How gradients are added: parallel.sums. If it is "auto": exact where the configuration allows
/// it, else fp32.
GradientSums sums_of(const Config& config);

/// What a GPU keeps in the host's memory.
struct Offload {
    bool optimizer = false;    // masters and the optimizer's slots (state_leases.h)
    bool activations = false;  // the inputs of blocks

    bool operator==(const Offload&) const = default;
};
/// memory.offload; nothing if it is "auto".
std::optional<Offload> offload_of(const Config& config);
/// The words of memory.offload that ask for this.
std::vector<std::string> words_of(const Offload& offload);

Fp8Options fp8_options(const Config& config);
/// What is wrong with what precision.fp8 asks for; empty if nothing is.
std::string fp8_problem(const Config& config, const DecoderSpec& spec);
/// Why a GPU of this architecture (device/architecture.h) cannot do what precision.fp8 asks for;
/// empty if it can, for a CPU (0), and without fp8.
std::string fp8_problem(const Config& config, const std::string& gpu, int architecture);

MeshSizes mesh_sizes(const Config& config);
/// The mesh of this many ranks. Throws Error where the configuration's sizes do not divide them.
MeshLayout mesh_of(const Config& config, int world);

PipelineOptions pipeline_options(const Config& config);

/// A run, as far as memory, traffic and time depend on it.
struct RunShape {
    Config config;  // parallel.sums is not "auto"
    DecoderSpec spec;
    DType dtype = DType::fp32;
    Recompute recompute = Recompute::none;
    MeshLayout mesh;
    /// The whole model's registry, if it is at hand; null: it is made each time.
    std::shared_ptr<const Registry> whole = {};

    /// On `world` ranks. Throws Error where the configuration's sizes do not divide them.
    RunShape(Config config, const DecoderSpec& spec, DType dtype,
             Recompute recompute = Recompute::none, int world = 1);

    RunShape with_micro_batch(int sequences) const;
    RunShape with_recompute(Recompute level) const;
    RunShape with_zero(int stage) const;
    RunShape with_offload(const Offload& offload) const;
    /// The shape for counting memory and traffic, which is done many times. `whole` is set, and its
    /// parameters have no StoredTensors.
    RunShape for_counting() const;
    /// Nothing where memory.offload is "auto".
    Offload offload() const { return offload_of(config).value_or(Offload{}); }
};

// ---- What each rank has -------------------------------------------------------------------------

/// The LoaderOptions of a run's first step, for a rank of the mesh: the ranks of a place on the
/// data axis read the same micro-batches.
LoaderOptions loader_options(const Config& config, const MeshLayout& mesh = {}, int rank = 0);
Sharding sharding_of(const RunShape& shape, int rank);
TensorOptions tensor_options(const Config& config, const TensorRank& rank);
/// `whole`, or if it is null the registry that it stands for.
std::shared_ptr<const Registry> whole_registry(const RunShape& shape);
/// The parameters of a model in a rank's memory. Throws Error, with the nearest parallel.tensor
/// that works, where tensor-parallel ranks cannot share the model.
RankRegistry registry_of_rank(const RunShape& shape, int rank);
/// The parameters in a rank's memory, from the whole model's registry, whose parameters need no
/// stored tensors.
RankRegistry registry_of_rank(const RunShape& shape, const Registry& whole, int rank);

/// The products of all blocks, and which of them are in fp8; none without precision.fp8.
std::vector<Fp8Product> fp8_products(const RunShape& shape);

// ---- What the run has ---------------------------------------------------------------------------

/// Layers of each stage of the pipeline, as the configuration gives them, or dealt by FLOPs.
std::vector<int> layers_of_stages(const RunShape& shape);
/// The pipeline of a step with the most micro-batches. config.batch.micro_batch must be given.
PipelineShape pipeline_shape(const RunShape& shape);
/// Whether context-parallel ranks gather the counts of experts of each micro-batch, for a balance
/// loss.
bool gathers_counts(const RunShape& shape);
/// What ranks add up in each step besides gradients: losses, norms, and counts of routers.
StepNumbers sums_of_step(const RunShape& shape);
/// The gradients that are added up in a step, for exact sums: a micro-batch gives one on each
/// context-parallel rank. Throws Error if they are too many.
int64_t contributions_of_step(const RunShape& shape);
/// What is wrong with the number of these gradients; empty if nothing is.
std::string contributions_problem(const Config& config);
/// The sizes of a step's exchanges. micro_batches: the possible numbers of sequences in a
/// micro-batch, in ascending order. The first and the last are taken, and between them each number
/// that is at least twice the number taken before.
StepSizes sizes_of_step(const RunShape& shape, const Device& device,
                        const std::vector<int>& micro_batches);

/// Which kernels the configuration asks for. Throws Error for one that is not in this build.
KernelSettings kernel_settings(const Config& config);

}  // namespace train_gpt
