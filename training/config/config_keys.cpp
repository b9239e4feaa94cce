#include "training/config/config_keys.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "training/config/key_rules.h"

#define KEY TRAIN_GPT_KEY

namespace train_gpt {

namespace {

constexpr double max_steps = 1099511627776.0;  // 2^40
constexpr double max_tokens = max_exact_integer;

// Before the section `model`, and after it.
constexpr ConfigKey first_keys[] = {
    {KEY(description), any_text(), "A note for people; the program does not read it."},
    {KEY(run_dir), any_path(),
     "The run's folder: checkpoints, metrics, resolved configuration and manifest. If it holds a "
     "run, the same command resumes that run."},
    {KEY(seed), at_least(0),
     "Initial weights, the order of samples and all other random numbers depend only on the seed "
     "and the step."},
    {KEY(device), one_of({"auto", "cpu", "cuda"}),
     "The device of the run; `auto`: a GPU if the build supports it and the machine has one, else "
     "the CPU."},
};
constexpr ConfigKey later_keys[] = {
    {KEY(tokenizer.path), any_path(),
     "The tokenizer: a folder or a file such as `tokenizer.json`."},

    {KEY(data.train), any_path(),
     "Token shards to train on, as a glob such as `data/quickstart/train_*.bin`; `synthetic`: "
     "random tokens, for benchmarks without data. Or a list of up to 64 sources "
     "`{\"glob\": …, \"weight\": 1, \"name\": \"web\"}`: each source gets samples in proportion to "
     "its weight, no sample of a source is repeated before all of them were used, and "
     "`metrics.jsonl` has the loss and tokens of each source."},
    {KEY(data.val), any_path(),
     "Token shards to evaluate on, as a glob; `synthetic` as above; empty: no validation."},
    {KEY(data.document_mask), any_text(),
     "Tokens attend only within their own document, and positions begin at 0 in each document. "
     "Needs a tokenizer with an end-of-text token, which separates documents. (FLOPs are counted "
     "as if there were no mask.)"},

    {KEY(batch.tokens_per_step), between(1, 4294967296.0),
     "Tokens per optimizer step, over all ranks; a whole number of micro-batches. The number of "
     "gradient accumulation steps follows from it."},
    {KEY(batch.warmup_tokens), between(0, max_tokens),
     "Batch warm-up: over so many tokens of the run, the tokens of a step grow from "
     "`batch.warmup_tokens_per_step` to `batch.tokens_per_step`, in equal parts, as multiples of "
     "the former. 0: all steps have `batch.tokens_per_step`."},
    {KEY(batch.warmup_tokens_per_step), between(0, 4294967296.0),
     "Tokens of the first steps of a batch warm-up: a whole number of micro-batches, enough for "
     "all ranks, and a divisor of `batch.tokens_per_step`. 0: no batch warm-up."},
    {KEY(batch.micro_batch), between(0, 1048576),
     "Sequences that a device computes at once; 0: the run chooses the fastest number that fits "
     "into memory and feeds all ranks, and keeps it."},
    {KEY(batch.sequence_length), between(0, 16777216),
     "Tokens per sequence, at most `model.n_ctx`; 0: `model.n_ctx`."},

    // AdamW computes in fp32, where these must not become 0, 1 or infinite.
    {KEY(optimizer.name), one_of<OptimizerName>(),
     "`adamw`: AdamW updates all parameters. `muon`: Muon updates the matrices of blocks (q, k, v, "
     "gate and up apart), and AdamW embeddings, head, norms and biases."},
    {KEY(optimizer.state_dtype), one_of<StateDType>(),
     "How moments are kept between steps: 8, 4 or about 2 bytes a parameter. Updates are computed "
     "in fp32 in any case. `int8`: blocks of 256 with a scale each, only with "
     "`optimizer.name=adamw`."},
    {KEY(optimizer.learning_rate), above_up_to(0, 1e37), "The peak learning rate."},
    {KEY(optimizer.matrix_learning_rate), between(0, 1e37),
     "Muon: the peak learning rate of matrices; 0: `optimizer.learning_rate`, which suits both "
     "with `optimizer.muon_scale=rms`."},
    {KEY(optimizer.momentum), between(0, 0.9999999), "Muon: decay of the sum of gradients."},
    {KEY(optimizer.nesterov), any_text(),
     "Muon: the direction comes from the gradient + momentum · sum, one step ahead of the sum."},
    {KEY(optimizer.muon_coefficients), one_of<NewtonSchulzList>(),
     "Muon: the polynomials that bring a matrix's singular values near 1; docs/optimizers.md says "
     "how near, and where each is from."},
    {KEY(optimizer.muon_scale), one_of<MuonScale>(),
     "Muon: the factor of a direction. `rms`: 0.2·√max(rows, columns), so that elements change as "
     "with AdamW, and its learning rate and decay suit. `spectral`: √max(1, rows / columns), for a "
     "learning rate near 0.02."},
    {KEY(optimizer.muon_heads), any_text(),
     "Muon: each head's part of q, k and v is a matrix of its own."},
    {KEY(optimizer.muon_dtype), one_of<DType>(),
     "Muon: what products of the iteration are computed in, and what ranks send."},
    {KEY(optimizer.weight_decay), between(0, 1e6),
     "Decoupled weight decay, applied to matrices only."},
    {KEY(optimizer.cautious_decay), one_of<bool>(),
     "Whether a weight decays only in steps whose update moves it towards 0, too (cautious weight "
     "decay: [Chen et al. 2025](https://arxiv.org/abs/2510.12402))."},
    {KEY(optimizer.beta1), between(0, 0.9999999), "Decay of the gradient's running mean."},
    {KEY(optimizer.beta2), between(0, 0.9999999), "Decay of the squared gradient's running mean."},
    {KEY(optimizer.epsilon), between(1e-37, 1e6), "Added to the denominator of AdamW's update."},
    {KEY(optimizer.grad_clip), at_least(0),
     "Largest global norm of the gradient; larger ones are scaled down to it. 0: no clipping."},
    {KEY(optimizer.z_loss), between(0, 1),
     "Weight of the z-loss, the square of the logarithm of the softmax's denominator, which keeps "
     "logits from drifting; PaLM's is 1e-4. It acts through the gradient; the losses that a run "
     "reports are without it. 0: none."},
    {KEY(optimizer.on_spike), one_of<OnSpike>(),
     "What happens at a spike: a step whose loss or gradient norm is above the mean + 6 standard "
     "deviations of the last 128 steps. A line always says which tensor's norm has grown most and "
     "which samples had the largest loss. `report`: nothing else. `skip`: the step's update is not "
     "applied."},

    {KEY(router.balance), one_of<Balance>(),
     "How a mixture's experts are kept equally busy: `none`; by an auxiliary `loss`, E · Σ share · "
     "probability, which is 1 if all are ([Fedus et al. 2021](https://arxiv.org/abs/2101.03961)); "
     "or "
     "by a selection `bias` that follows the counts of each step, without a gradient ([DeepSeek-V3 "
     "2024](https://arxiv.org/abs/2412.19437))."},
    {KEY(router.level), one_of<BalanceLevel>(),
     "`loss`: the tokens whose shares count: of a `sequence`, a `micro_batch`, or a `step`, for "
     "which the counts of the step before stand, over all ranks. The wider, the more experts may "
     "differ in what they learn ([Qiu et al. 2025](https://arxiv.org/abs/2501.11873))."},
    {KEY(router.balance_rate), between(0, 1000),
     "`loss`: its weight. `bias`: how far a bias moves in a step. 0: 0.01 with `loss`, 0.001 with "
     "`bias`."},
    {KEY(router.z_loss), between(0, 1),
     "Weight of the routers' z-loss, the mean square of the logarithm of their softmax's "
     "denominator "
     "([Zoph et al. 2022](https://arxiv.org/abs/2202.08906)); usually 0.001. 0: none. Losses of "
     "routers act through the gradient; the losses that a run reports are without them."},

    {KEY(schedule.steps), between(0, max_steps),
     "Length of the run in optimizer steps. Exactly one of `steps`, `tokens` and `epochs` must be "
     "set. 0: not set."},
    {KEY(schedule.tokens), between(0, max_tokens),
     "Length of the run in tokens, rounded up to whole steps. 0: not set."},
    {KEY(schedule.epochs), between(0, 1000000),
     "Length of the run in passes over the training data, rounded up to whole steps. 0: not set."},
    {KEY(schedule.max_minutes), at_least(0),
     "After this wall-clock time the run saves a checkpoint and ends; the schedule stays the "
     "same. 0: no limit."},
    {KEY(schedule.warmup_steps), between(0, max_steps),
     "Steps over which the learning rate rises linearly to its peak. 0: no warm-up."},
    {KEY(schedule.decay), one_of<Decay>(),
     "How the learning rate falls after the warm-up. `wsd` (warm-up, stable, decay): constant, "
     "then linear over the last `decay_fraction` of the steps."},
    {KEY(schedule.decay_fraction), above_up_to(0, 1),
     "Only for `wsd`: the decay's share of all steps."},
    {KEY(schedule.decay_steps), between(0, max_steps),
     "Only for `wsd`: the decay's steps; 0: by `schedule.decay_fraction`."},
    {KEY(schedule.decay_from), any_path(),
     "Only for `wsd`: a checkpoint of another run with which this run begins: weights, optimizer "
     "state and place in the data. The decay follows at once, and the run ends with it, whatever "
     "length is given above. The folder of a run: its newest checkpoint. Empty: none."},
    {KEY(schedule.final_fraction), between(0, 1),
     "The last step's learning rate as a fraction of `optimizer.learning_rate` (not with "
     "`constant`)."},

    {KEY(precision.dtype), one_of<std::optional<DType>>(),
     "Dtype of parameters and activations; master weights and gradient sums are always fp32, and "
     "moments as `optimizer.state_dtype` says. `auto`: bf16 if the device multiplies it natively, "
     "else fp32."},
    {KEY(precision.tf32), one_of<bool>(),
     "On a GPU, with `precision.dtype` fp32: compute matrix products on tensor cores, with "
     "operands rounded to TF32's 10 bits of mantissa. Several times faster, but less exact."},
    {KEY(precision.fp8), one_of<Fp8Recipe>(),
     "Compute the products of blocks in fp8, with one scale for each of their matrices: e4m3 for "
     "activations and weights, e5m2 for gradients. `delayed`: a scale follows from the largest "
     "magnitude in the last 1024 steps; `current`: from this matrix's own, which costs a pass over "
     "it. Embedding, head, norms, routers, attention itself, weight gradients of experts and "
     "evaluation stay in `precision.dtype`, and so do small products, which the start of a run "
     "lists (docs/fp8.md)."},
    {KEY(precision.fp8_skip), any_text(),
     "Products that stay in `precision.dtype`, as a list: a layer (`\"0\"`), a product of all "
     "layers (`\"qkv\"`, `\"out\"`, `\"up\"`, `\"down\"`, `\"shared_up\"`, "
     "`\"shared_down\"`), or one of a layer (`\"0.down\"`)."},
    {KEY(precision.fp8_weight_gradient), one_of<bool>(),
     "Whether weight gradients, too, are products in fp8 (with sums in fp32); `off`: in "
     "`precision.dtype`."},

    {KEY(memory.recompute), one_of<std::optional<Recompute>>(),
     "What the backward pass recomputes instead of keeping it in memory: nothing, the cheap "
     "element-wise results, or whole blocks. Saves memory and costs time. `auto`: as little as "
     "fits into memory. Earlier versions called this key `precision.recompute`."},
    {KEY(memory.offload), one_of({"auto", "none", "optimizer", "activations"}),
     "What a GPU keeps in the host's memory, as a word or a list: `optimizer`, the master weights "
     "and the optimizer's state, which come to the GPU bucket by bucket to be updated; "
     "`activations`, the input of each block from the forward to the backward pass. `none`: "
     "nothing. `auto`: what lets a run fit that does not fit otherwise, or is predicted to be "
     "faster than to recompute. A CPU offloads nothing, since its memory is the host's. Results "
     "stay the same, bit for bit."},

    {KEY(checkpoint.every), between(0, max_steps),
     "Steps between checkpoints; 0: only at the end."},
    {KEY(checkpoint.keep), between(0, 1000000), "Newest checkpoints to keep; 0: all."},
    {KEY(checkpoint.async), one_of<std::optional<bool>>(),
     "Whether training continues while a checkpoint is written: the state is copied into memory of "
     "the host, and a thread of low priority writes the files from the copy. A checkpoint at the "
     "end of a run or after a signal is written at once. `auto`: on, if the memory is there."},

    {KEY(evaluation.every), between(0, max_steps),
     "Steps between evaluations; 0: only at the end."},
    {KEY(evaluation.max_tokens), between(0, max_tokens),
     "Validation tokens that an evaluation uses; 0: all."},
    {KEY(evaluation.hellaswag), any_path(),
     "HellaSwag's published JSONL file, to report its accuracy with each evaluation; empty: "
     "none."},
    {KEY(evaluation.tasks), any_path(),
     "Tasks to score with each evaluation: a file or glob such as `data/core/*.jsonl`, or a list "
     "of them (docs/evaluations.md)."},
    {KEY(evaluation.task_items), between(0, max_exact_integer),
     "Items of each task that an evaluation uses; 0: all."},

    {KEY(sampling.every), between(0, max_steps), "Steps between samples; 0: none during training."},
    {KEY(sampling.prompt), any_text(),
     "The text that a sample continues; empty: the start of a document."},
    {KEY(sampling.max_tokens), between(1, 16777216), "Tokens per sample, at most."},
    {KEY(sampling.temperature), between(0, 1000),
     "Logits are divided by this before the softmax; 0: always the likeliest token."},
    {KEY(sampling.top_k), between(0, 16777216),
     "Draw only from the k likeliest tokens; 0: from all."},
    {KEY(sampling.top_p), above_up_to(0, 1),
     "Draw only from the smallest set of likeliest tokens with this total probability."},
    {KEY(sampling.seed), at_least(0), "Seed for the random numbers of samples."},
    {KEY(sampling.samples), between(0, 1000), "Samples printed at the end of a run; 0: none."},

    {KEY(log.every), between(1, max_steps),
     "Steps between lines on the screen and in `metrics.jsonl`."},
    {KEY(log.fingerprint_every), between(0, max_steps),
     "Steps between lines in `fingerprints.jsonl`: hashes of each tensor's gradient, master and "
     "moments, with which `train_gpt replay` and `train_gpt report --tolerance` find where two "
     "runs differ. The last step has one, too. 0: none."},
    {KEY(log.progress), one_of<ProgressStyle>(),
     "`line`: one progress line, rewritten in place; `lines`: separate lines; `auto`: `line` on a "
     "terminal, else `lines`."},
    {KEY(log.tensorboard), one_of<bool>(),
     "`on`: the run's folder has an event file for TensorBoard with the metrics, samples and the "
     "configuration."},

    {KEY(kernels.gemm), one_of<KernelSettings::Gemm>(),
     "Matrix products on the CPU: oneDNN (if the build found it) or the project's own kernel. "
     "`auto`: oneDNN, if it is there and faster."},
    {KEY(kernels.attention), one_of<KernelSettings::Attention>(),
     "Attention on GPUs: the project's own kernels, or cuDNN if it is found and supports the case "
     "(bf16, without a document mask); its backward pass may use up to 2 GiB of scratch memory. "
     "`auto`: the fastest, timed at the start of the run. `cudnn`: the fastest of cuDNN's ways. "
     "`own`: the project's kernels for any GPU. `wgmma`: those for Hopper (H100, H200), or where "
     "they cannot run those for any GPU."},
    {KEY(kernels.autotune), one_of<bool>(),
     "On a GPU. `on`: before the first step, time cuBLASLt's algorithms for each shape, GELU and "
     "bias gradients within a product or after it, the ways to compute attention that the other "
     "keys leave, and on Hopper the kernels for products of experts; use the fastest. `off`: use "
     "cuBLASLt's first algorithm, GELU within a product, bias gradients after it, on Hopper its "
     "kernel for experts in fp8 and, unless `kernels.attention` is `cudnn` or `wgmma`, the "
     "project's attention for any GPU. A resumed run keeps its earlier "
     "choices on the same GPU model with the same driver and libraries, and on Hopper only if both "
     "builds have kernels for it, or neither."},
    {KEY(kernels.deterministic), one_of<bool>(),
     "On a GPU. `on`: each run gives the same bits. `off`: attention's backward pass may also use "
     "cuDNN's unordered sums, if they are the fastest; the last bits of gradients then differ from "
     "run to run. Without `kernels.autotune`, it uses them wherever `cudnn` runs it."},

    {KEY(parallel.tensor), between(1, 1024),
     "Tensor-parallel ranks, which share every layer: the heads, the MLP's hidden layer and the "
     "vocabulary. It must divide the number of ranks, `model.n_head`, `model.n_kv_head` and "
     "`model.n_ff`; the ranks that it leaves are data-parallel."},
    {KEY(parallel.allow_tensor_across_nodes), any_text(),
     "Tensor-parallel ranks exchange data in every layer, so they must be on one node, unless this "
     "is true."},
    {KEY(parallel.tensor_chunks), between(1, 64),
     "Tensor-parallel ranks exchange the rows of a micro-batch in so many chunks, each while "
     "products "
     "of other chunks run. It divides micro_batch · sequence_length / `parallel.tensor`."},
    {KEY(parallel.tensor_keep_gathered), any_text(),
     "Tensor-parallel ranks keep the gathered inputs of products for the backward pass: 8 "
     "exchanges "
     "of a micro-batch's rows in each layer instead of 10, for more memory."},
    {KEY(parallel.context), between(1, 1024),
     "Context-parallel ranks, which share every sequence: each computes two of its 2 · "
     "`parallel.context` chunks, and gathers the keys and values of the others in every layer. "
     "2 · `parallel.context` must divide the sequence length, and `parallel.tensor` · "
     "`parallel.context` the number of ranks."},
    {KEY(parallel.pipeline), between(1, 4096),
     "Pipeline ranks, each with a stage of the layers, through which micro-batches pass one after "
     "the other. It must divide the number of ranks, and be at most `model.n_layer`."},
    {KEY(parallel.schedule), one_of<PipelineKind>(),
     "The order in which micro-batches pass through the stages. `gpipe`: all forwards, then all "
     "backwards; `1f1b`: alternating, with fewer activations in memory; `interleaved`: the same "
     "with several stages on each rank, which idles less and sends more; `zero_bubble`: weight "
     "gradients fill the time in which ranks would idle."},
    {KEY(parallel.stages_per_rank), between(1, 1024),
     "With `interleaved`: stages of each pipeline rank, at least 2; else 1."},
    {KEY(parallel.layers_per_stage), between(1, 4096),
     "Layers of each stage, in order; an empty list: dealt so that the slowest stage, with "
     "embedding or head, is as fast as possible."},
    {KEY(parallel.zero), between(0, 3),
     "ZeRO's stage, which is what data parallelism splits over ranks. 0: nothing; 1: optimizer "
     "state; 2: gradient sums as well, which are then reduced in every micro-batch; 3: weights as "
     "well, which are then gathered in every forward and backward pass; `auto`: the stage from 1 "
     "to 3 with the least predicted time of a step, which the run keeps."},
    {KEY(parallel.shard_ranks), between(0, 1048576),
     "Data-parallel ranks among which ZeRO splits, such as the ranks of a node; groups of so many "
     "hold "
     "the same. It must divide the number of data-parallel ranks. 0: all of them."},
    {KEY(parallel.bucket_mb), above_up_to(0, 1048576),
     "Gradients are reduced in buckets of whole blocks with at least this many MiB of fp32 each."},
    {KEY(parallel.sums), one_of<std::optional<GradientSums>>(),
     "How gradients are added over micro-batches and ranks. `exact`: each micro-batch's gradients "
     "are rounded to multiples of a power of two and added as integers, so that losses and weights "
     "are bit for bit the same on any number of data-parallel ranks. `fp32`. `bf16`: they are sent "
     "between ranks in bf16, which halves the traffic and rounds them. `auto`: `exact`, or `fp32` "
     "with `parallel.reserved_sms` or more gradients in a step than exact sums allow (2048 "
     "micro-batches, times `parallel.context`; of one sequence each, if their size is chosen). A "
     "resumed run keeps its way. Earlier versions called this key `parallel.reduce_dtype`, and "
     "used `fp32`."},
    {KEY(parallel.timeout_seconds), greater_than(0),
     "If a rank makes no progress for this long, the watchdog considers it hung and ends the job."},
    {KEY(parallel.encrypt), any_text(),
     "Encrypt what the ranks of a run on CPUs send each other over TCP, with TLS 1.3. It needs "
     "ranks that were started without MPI; with MPI and NCCL, whose messages stay in clear, it is "
     "refused."},
    {KEY(parallel.nccl_max_ctas), between(0, 32),
     "On GPUs, the most thread blocks (CTAs) of one of NCCL's collectives, each of which keeps a "
     "multiprocessor (SM) busy. 0: as many as NCCL chooses for the links, since fewer may make a "
     "collective slower."},
    {KEY(parallel.reserved_sms), between(0, 1024),
     "On GPUs, multiprocessors (SMs) that cuBLASLt's products leave free in a backward pass during "
     "which gradients are exchanged: a product that runs on all of them until it ends makes a "
     "collective wait, and with it every rank. 0: none, since products are slower without them "
     "also while no collective runs. If runs wait for communication, try the number of "
     "`parallel.nccl_max_ctas`."},
};

std::vector<ConfigKey> all_keys() {
    std::vector<ConfigKey> all(std::begin(first_keys), std::end(first_keys));
    all.insert(all.end(), model_keys().begin(), model_keys().end());
    all.insert(all.end(), std::begin(later_keys), std::end(later_keys));
    return all;
}

}  // namespace

std::span<const ConfigKey> config_keys() {
    static const std::vector<ConfigKey> all = all_keys();
    return all;
}

const ConfigKey* find_config_key(std::string_view path) {
    if (path == "parallel.reduce_dtype") path = "parallel.sums";
    if (path == "precision.recompute") path = "memory.recompute";
    for (const ConfigKey& key : config_keys())
        if (key.path == path) return &key;
    return nullptr;
}

std::string_view section_of_key(std::string_view path) {
    const size_t dot = path.find('.');
    return dot == std::string_view::npos ? "" : path.substr(0, dot);
}

std::string_view name_of_key(std::string_view path) { return path.substr(path.rfind('.') + 1); }

std::vector<std::string_view> config_sections() {
    std::vector<std::string_view> names;
    for (const ConfigKey& key : config_keys()) {
        const std::string_view section = section_of_key(key.path);
        if (!section.empty() && (names.empty() || names.back() != section))
            names.push_back(section);
    }
    return names;
}

bool is_config_section(std::string_view name) {
    const std::vector<std::string_view> names = config_sections();
    return std::find(names.begin(), names.end(), name) != names.end();
}

std::string_view first_key_of(std::string_view section) {
    return std::ranges::find_if(
               config_keys(),
               [&](const ConfigKey& key) { return section_of_key(key.path) == section; })
        ->path;
}

}  // namespace train_gpt
