#include "training/config/config_keys.h"

#include <algorithm>
#include <initializer_list>

namespace train_gpt {

namespace {

constexpr KeyRule between(double low, double high) { return {.low = low, .high = high}; }
constexpr KeyRule at_least(double low) { return {.low = low}; }
constexpr KeyRule greater_than(double low) { return {.low = low, .above_low = true}; }
constexpr KeyRule above_up_to(double low, double high) {
    return {.low = low, .high = high, .above_low = true};
}
constexpr KeyRule one_of(std::initializer_list<std::string_view> words) {
    KeyRule rule;
    for (const std::string_view word : words) rule.word_list[rule.word_count++] = word;
    return rule;
}
/// The words that a OneOf accepts.
template <class Value>
constexpr KeyRule one_of() {
    KeyRule rule;
    for (const Word<Value>& known : WordsOf<Value>::list)
        rule.word_list[rule.word_count++] = known.word;
    return rule;
}
constexpr KeyRule any_text() { return {}; }
constexpr KeyRule any_path() { return {.is_path = true}; }

constexpr double max_steps = 1099511627776.0;  // 2^40
constexpr double max_tokens = max_exact_integer;

// A key's path in the JSON file is its path in the struct.
#define KEY(member) #member, [](Config & config) -> KeyField { return &config.member; }

constexpr ConfigKey table[] = {
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

    {KEY(model.family),
     one_of({"gpt2", "llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe",
             "olmoe", "gpt_oss"}),
     "The family of models, which sets the defaults of the keys below that are 0 or `auto`, and "
     "whose "
     "files checkpoints are. A combination that no family has is kept in files that only this "
     "program reads."},
    {KEY(model.n_layer), between(1, 4096), "Transformer blocks."},
    {KEY(model.n_head), between(1, 65536),
     "Attention heads per block; must divide `model.n_embd` unless `model.head_size` is set."},
    {KEY(model.n_embd), between(1, 262144), "Width of the residual stream (channels)."},
    {KEY(model.n_ctx), between(1, 16777216), "Context length: the number of positions."},
    {KEY(model.vocab_size), between(0, 16777216), "Vocabulary size; 0: the tokenizer's."},
    {KEY(model.n_kv_head), between(0, 65536),
     "Heads of keys and values, each for the same number of query heads; 0: `model.n_head`."},
    {KEY(model.head_size), between(0, 256),
     "Width of a head; 0: `model.n_embd` / `model.n_head`, or 128 with `qwen3`."},
    {KEY(model.n_ff), between(0, 4194304),
     "Width of the MLP's hidden layer; 0: 4 · `model.n_embd` with `gpt2`, else 8/3 · "
     "`model.n_embd`, rounded up to a multiple of 256."},
    {KEY(model.norm), one_of<std::optional<Norm>>(), "LayerNorm (`gpt2`) or RMSNorm (the others)."},
    {KEY(model.norm_epsilon), between(0, 1),
     "Added to the variance in norms; 0: the family's, 1e-5 or for Qwen 1e-6."},
    {KEY(model.mlp), one_of<std::optional<Mlp>>(),
     "The MLP: `gelu` (tanh approximation; `gpt2`), `swiglu` (the others), or `relu2`: max(x, 0)² "
     "without a gate."},
    {KEY(model.bias), one_of<std::optional<Biases>>(),
     "Biases: in no layer (`llama`, `qwen3`, `mistral`), of queries, keys and values (`qwen2`), or "
     "in "
     "all linear layers and LayerNorms (`gpt2`)."},
    {KEY(model.qk_norm), one_of<std::optional<QkNormKind>>(),
     "RMSNorm of queries and keys before they are rotated: of each `head` (`qwen3`, `qwen3_moe`; "
     "true means this), or of the whole `width` of all heads (`olmoe`)."},
    {KEY(model.tied_head), one_of<std::optional<bool>>(),
     "Whether the output head is the token embedding (`gpt2`)."},
    {KEY(model.attention_softcap), between(0, 1e3),
     "Soft-cap of attention's scores: s counts as c · tanh(s / c). 0: none. Gemma 2: 50. On GPUs "
     "our own kernels compute such attention, not cuDNN."},
    {KEY(model.head_softcap), between(0, 1e3),
     "Soft-cap of the logits: z counts as c · tanh(z / c). 0: none. Gemma 2: 30, nanochat: 15."},
    {KEY(model.window), between(0, 16777216),
     "Sliding window: a token attends to itself and the `model.window` − 1 tokens before it, in "
     "the "
     "layers that `model.window_pattern` calls short. 0: none; `auto`: the family's (`gpt_oss`: "
     "128)."},
    {KEY(model.window_pattern), any_text(),
     "Which layers have the window: letters S (short: with it) and L (long: without), repeated "
     "over "
     "the layers. Empty: the family's, S or for `gpt_oss` SL."},
    {KEY(model.sinks), one_of<std::optional<bool>>(),
     "A learned logit of each head in attention's softmax, which takes weight and gives nothing "
     "(`gpt_oss`)."},
    {KEY(model.clamped_swiglu), one_of<std::optional<bool>>(),
     "SwiGLU's form in `gpt_oss`: (up + 1) · gate · σ(1.702 · gate) with gate at most 7 and up "
     "between −7 and 7."},
    {KEY(model.n_expert), between(0, most_experts),
     "Experts of a layer, in place of its MLP; 0: the family's, which is none for families of "
     "dense "
     "models."},
    {KEY(model.n_expert_per_token), between(0, most_experts_per_token),
     "Experts that each token goes to; 0: the family's."},
    {KEY(model.n_ff_expert), between(0, 4194304),
     "Width of an expert's hidden layer; 0: `model.n_ff`."},
    {KEY(model.n_ff_shared), between(0, 4194304),
     "Width of the hidden layer of a shared expert, which all tokens pass besides; 0: there is "
     "none; "
     "`auto`: the family's (`qwen2_moe`: `model.n_ff`)."},
    {KEY(model.shared_gate), one_of<std::optional<bool>>(),
     "Whether the shared expert's output is multiplied by σ(w·x) (`qwen2_moe`)."},
    {KEY(model.router), one_of<std::optional<RouterScore>>(),
     "A router's scores, from which experts' weights follow: `softmax` over all experts (the "
     "families'), or `sigmoid` of each logit."},
    {KEY(model.router_normalise), one_of<std::optional<bool>>(),
     "Whether a token's weights are divided by their sum (`mixtral`, `qwen3_moe`, `gpt_oss`)."},
    {KEY(model.router_scale), between(0, 1000), "Factor of the experts' weights; 0: 1."},
    {KEY(model.router_bias), one_of<std::optional<bool>>(),
     "Whether the router's logits have biases (`gpt_oss`)."},
    {KEY(model.expert_bias), one_of<std::optional<bool>>(),
     "Whether the experts' linear layers have biases (`gpt_oss`)."},
    {KEY(model.dense_layers), between(0, 4095),
     "Layers, counted from 0, that have an MLP of `model.n_ff` instead of experts: a list, or a "
     "number: the first so many."},
    {KEY(model.experts_every), between(1, 4096),
     "Experts are in every so many layers, of which the last in each group has them."},
    {KEY(model.positions), one_of<std::optional<Positions>>(),
     "`learned` vectors (`gpt2`), or `rope`: queries and keys are rotated (the others)."},
    {KEY(model.init_std), between(0, 1),
     "Standard deviation of the initial weights; 0: the family's, 0.02. Learned positions get half "
     "of it."},
    {KEY(model.init_residual_scaling), one_of<bool>(),
     "Whether the two projections into the residual stream get 1/√(2 · `model.n_layer`) of "
     "`model.init_std`, as in OpenAI's GPT-2, and in Megatron-LM for all models. If `off`, they "
     "get all of it, as in transformers for Llama, Qwen and Mistral."},
    {KEY(model.init_zero_projections), one_of<bool>(),
     "Whether the two projections into the residual stream are 0 at first, so that every block "
     "begins as the identity (as in nanochat). `model.init_residual_scaling` then says nothing."},
    {KEY(model.rope_theta), at_least(0),
     "Base of the rotation's frequencies; 0: the family's, 10000 or for Qwen 1000000. Llama 3: "
     "500000."},
    {KEY(model.rope_scaling), one_of<RopeScaling>(),
     "How the rotation's frequencies are lowered for longer contexts: all of them by a factor "
     "(`linear`), as for Llama 3.1 (`llama3`), or as for gpt-oss (`yarn`: [Peng et al. "
     "2023](https://arxiv.org/abs/2309.00071))."},
    {KEY(model.rope_factor), at_least(1), "The factor of `model.rope_scaling`."},
    {KEY(model.rope_low_freq_factor), greater_than(0),
     "`llama3`: wavelengths above `model.rope_original_n_ctx` / this are lengthened by the "
     "factor."},
    {KEY(model.rope_high_freq_factor), greater_than(0),
     "`llama3`: wavelengths below `model.rope_original_n_ctx` / this stay as they are."},
    {KEY(model.rope_original_n_ctx), between(1, 16777216),
     "`llama3` and `yarn`: the context length that the factor stretches."},
    {KEY(model.rope_beta_fast), greater_than(0),
     "`yarn`: frequencies that turn at least so many times in `model.rope_original_n_ctx` stay as "
     "they are."},
    {KEY(model.rope_beta_slow), greater_than(0),
     "`yarn`: frequencies that turn at most so many times are lowered by the factor."},
    {KEY(model.rope_truncate), any_text(),
     "`yarn`: the bounds between these are rounded outwards to whole frequencies (not in "
     "`gpt_oss`)."},
    {KEY(model.rope_attention_factor), at_least(0),
     "`yarn`: factor of cosines and sines; 0: 0.1 · ln(`model.rope_factor`) + 1."},
    {KEY(model.init_from), any_path(),
     "A checkpoint from whose weights the run starts, with a new optimizer state; empty: random "
     "weights."},

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
     "all ranks, and a divisor of `batch.tokens_per_step`."},
    {KEY(batch.micro_batch), between(0, 1048576),
     "Sequences that a device computes at once; 0: the run chooses the fastest number that fits "
     "into memory and feeds all ranks, and keeps it."},
    {KEY(batch.sequence_length), between(0, 16777216),
     "Tokens per sequence, at most `model.n_ctx`; 0: `model.n_ctx`."},

    // AdamW computes in fp32, where these must not become 0, 1 or infinite.
    {KEY(optimizer.name), one_of<OptimizerName>(),
     "`adamw`: AdamW updates all parameters. `muon`: Muon updates the matrices of blocks (q, k, v, "
     "gate and up apart), and AdamW embeddings, head, norms and biases."},
    {KEY(optimizer.learning_rate), above_up_to(0, 1e37), "The peak learning rate."},
    {KEY(optimizer.matrix_learning_rate), between(0, 1e37),
     "Muon: the peak learning rate of matrices; 0: `optimizer.learning_rate`, which suits both "
     "with `optimizer.muon_scale=rms`."},
    {KEY(optimizer.momentum), between(0, 0.9999999), "Muon: decay of the sum of gradients."},
    {KEY(optimizer.nesterov), any_text(),
     "Muon: the direction is that of the gradient + momentum · sum, one step ahead of the sum."},
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
     "`loss`: its weight; 0: 0.01. `bias`: how far a bias moves in a step; 0: 0.001."},
    {KEY(router.z_loss), between(0, 1),
     "Weight of the routers' z-loss, the mean square of the logarithm of their softmax's "
     "denominator "
     "([Zoph et al. 2022](https://arxiv.org/abs/2202.08906)); usually 0.001. 0: none. Losses of "
     "routers act through the gradient; the losses that a run reports are without them."},

    {KEY(schedule.steps), between(0, max_steps),
     "Length of the run in optimizer steps. Exactly one of `steps`, `tokens` and `epochs` must be "
     "set."},
    {KEY(schedule.tokens), between(0, max_tokens),
     "Length of the run in tokens, rounded up to whole steps."},
    {KEY(schedule.epochs), between(0, 1000000),
     "Length of the run in passes over the training data, rounded up to whole steps."},
    {KEY(schedule.max_minutes), at_least(0),
     "After this wall-clock time the run saves a checkpoint and ends; the schedule stays the "
     "same. 0: no limit."},
    {KEY(schedule.warmup_steps), between(0, max_steps),
     "Steps over which the learning rate rises linearly to its peak."},
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
     "Dtype of parameters and activations; master weights, moments and gradient sums are always "
     "fp32. `auto`: bf16 if the device multiplies it natively, else fp32."},
    {KEY(precision.recompute), one_of<std::optional<Recompute>>(),
     "What the backward pass recomputes instead of keeping it in memory: nothing, the cheap "
     "element-wise results, or whole blocks. Saves memory and costs time. `auto`: as little as "
     "fits into memory."},
    {KEY(precision.tf32), one_of<bool>(),
     "On a GPU, with `precision.dtype` fp32: compute matrix products on tensor cores, with "
     "operands rounded to TF32's 10 bits of mantissa. Several times faster, but less exact."},

    {KEY(checkpoint.every), between(0, max_steps),
     "Steps between checkpoints; 0: only at the end."},
    {KEY(checkpoint.keep), between(0, 1000000), "Newest checkpoints to keep; 0: all."},

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
     "`auto`: the fastest, timed at the start of the run. `cudnn`: the fastest of cuDNN's ways."},
    {KEY(kernels.autotune), one_of<bool>(),
     "On a GPU. `on`: before the first step, time cuBLASLt's algorithms for each shape, GELU and "
     "bias gradients within a product or after it, and the ways to compute attention that the "
     "other keys leave; use the fastest. `off`: use cuBLASLt's first algorithm, GELU within a "
     "product, bias gradients after it and, unless `kernels.attention` is `cudnn`, the project's "
     "own attention. A resumed run keeps its earlier choices on the same GPU model with the same "
     "driver and libraries."},
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
     "Data-parallel ranks among which ZeRO splits, such as those of a node; groups of so many hold "
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

#undef KEY

}  // namespace

std::span<const ConfigKey> config_keys() { return table; }

const ConfigKey* find_config_key(std::string_view path) {
    if (path == "parallel.reduce_dtype") path = "parallel.sums";
    for (const ConfigKey& key : table)
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
    for (const ConfigKey& key : table) {
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
    return std::find_if(std::begin(table), std::end(table),
                        [&](const ConfigKey& key) { return section_of_key(key.path) == section; })
        ->path;
}

}  // namespace train_gpt
