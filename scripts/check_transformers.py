#!/usr/bin/env python3
"""Compares this program with Hugging Face's transformers.             needs: torch, transformers

    scripts/check_transformers.py CHECKPOINT [TEXT_FILE]

Loads a checkpoint folder and prints one JSON line: tokens, loss (nats per predicted token) and bits
per byte of the text (its first n_ctx tokens, default: a sentence), in float32. `train_gpt eval` on
the same tokens must give the same loss.

    scripts/check_transformers.py --interchange TRAIN_GPT

Checks the program TRAIN_GPT itself, with tiny models in a temporary folder. Checkpoints and exports
must load in transformers and give the same losses, token ids and greedy continuations. Models
written by transformers (fp32, bf16, fp16, in one file or several) must be imported, and exported
again bit for bit. llm.c's model files must hold the same numbers. The last line that it prints is
"N passed, M failed".
"""
import json
import math
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

import tokenizers
import torch
import transformers
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, DeepseekV3ForCausalLM, GPT2Config, GPT2LMHeadModel,
    GPT2Model, GptOssForCausalLM, LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM,
    OlmoeForCausalLM, Qwen2ForCausalLM, Qwen2MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM)

from tokenizer_patterns import PARTS

SENTENCE = "In the beginning God created the heaven and the earth."
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe",
            "gpt_oss")
# In memory, a layer's experts are one tensor.
STACKED = int(transformers.__version__.split(".")[0]) >= 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load(folder, dtype=None):
    """The folder's model in its own dtype, or in the given one."""
    if dtype is None:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        # The newer name and the older one.
        dtype = getattr(torch, config.get("dtype") or config["torch_dtype"])
    model, loading = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=dtype,
                                                          output_loading_info=True)
    faults = {key: list(loading[key])
              for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if loading[key]}
    if faults:
        raise ValueError(
            f"{folder}: the tensors are not those of a {type(model).__name__}: {faults}")
    return with_any_widths(model).eval()


def with_any_widths(model):
    """The model, whose experts' products do not need rows of whole 16 bytes."""
    if STACKED and any("experts" in name for name, _ in model.named_parameters()):
        model.set_experts_implementation("eager")
    return model


def loss_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss.item()


def describe(checkpoint, text_file):
    model = load(checkpoint, torch.float32)
    tokenizer, context = (AutoTokenizer.from_pretrained(checkpoint),
                          model.config.max_position_embeddings)
    text = SENTENCE
    if text_file:
        with open(text_file, encoding="utf-8") as file:
            text = file.read(16 * context)
    tokens = tokenizer(text)["input_ids"][:context]
    if len(tokens) < 2:
        sys.exit("the text has fewer than two tokens: there is nothing to predict")
    text_bytes = len(tokenizer.decode(tokens[1:]).encode())
    loss = loss_of(model, tokens)
    print(json.dumps({"tokens": tokens, "loss": loss,
                      "bits_per_byte": loss * (len(tokens) - 1) / text_bytes / math.log(2)}))


class Interchange:
    """The checks of the program; each is a method whose name begins with check_."""

    N_CTX = 24
    TEXT = ("One two three, four five six! Don't they'll we've 1234567 in-between.\n\n  Tabs\tand  "
            "spaces, caf\u00e9 \u4e16\u754c \U0001f600 .\n") * 40

    def __init__(self, program, folder):
        self.program, self.folder = Path(program).resolve(), Path(folder)
        self.used = 0

    def run(self, *arguments):
        done = subprocess.run([self.program, *map(str, arguments)], capture_output=True,
                              errors="replace", check=False)
        if done.returncode:
            raise ValueError(f"{' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    def train_on_ranks(self, ranks, config):
        """As many processes, which meet over TCP."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            place = {"TRAIN_GPT_WORLD": str(ranks),
                     "TRAIN_GPT_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}",
                     "TRAIN_GPT_SECRET": secrets.token_hex(16), "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([self.program, "train", config],
                                      env={**os.environ, **place, "TRAIN_GPT_RANK": str(rank)},
                                      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                      errors="replace") for rank in range(ranks)]
        errors = [process.communicate()[1].strip() for process in processes]
        if any(process.returncode for process in processes):
            raise ValueError(f"{ranks} ranks of train {config}: {' '.join(errors)}")

    def new(self, name):
        self.used += 1
        return self.folder / f"{name}-{self.used}"

    def shard(self, tokens):
        """Token ids as a file that the program evaluates."""
        path = self.new("tokens").with_suffix(".bin")
        path.write_bytes(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) +
                         struct.pack(f"<{len(tokens)}H", *tokens))
        return path

    def same_losses(self, folder, model):
        """Losses of random windows, of few targets each, so that a logit that differs cannot hide
        in a mean."""
        model = model.float()
        worst = 0
        for length in (2, 3, 5, self.N_CTX):
            tokens = torch.randint(model.config.vocab_size, (length,)).tolist()
            out = self.run("eval", folder, "--data", self.shard(tokens), "--dtype", "fp32",
                           "--device", "cpu")
            ours, theirs = (float(out.split("validation loss ")[1].split()[0]),
                            loss_of(model, tokens))
            worst = max(worst, abs(ours - theirs))
            assert abs(ours - theirs) <= 1e-5 * max(1, theirs), (
                f"loss {ours} here, {theirs} in transformers")
        return f"losses differ by at most {worst:.1e}"

    @staticmethod
    def same_weights(a, b):
        a, b = a.state_dict(), b.state_dict()
        assert a.keys() == b.keys(), a.keys() ^ b.keys()
        for name, tensor in a.items():
            assert tensor.dtype == b[name].dtype, (
                f"{name} is {tensor.dtype} here and {b[name].dtype} there")
            bits = torch.int32 if tensor.dtype == torch.float32 else torch.int16
            assert torch.equal(tensor.view(bits), b[name].view(bits)), f"{name} differs"

    def trained(self, dtype, family="gpt2", mesh=None, **options):
        """A checkpoint of a short run; with keys of `parallel` as its mesh, of 4 ranks."""
        text, data = self.folder / "text.txt", self.folder / "data"
        if not data.exists():
            text.write_text(self.TEXT, encoding="utf-8")
            self.run("tokenize", text, "--train-vocab", 400, "--out", data)
        name = "-".join([family, dtype, *(["mesh"] if mesh else [])])
        run, config = (self.folder / f"{kind}-{name}" for kind in ("run", "config"))
        if not run.exists():
            config.write_text(json.dumps({
                "run_dir": str(run), "device": "cpu",
                "tokenizer": {"path": str(data / "tokenizer.json")},
                "model": {"family": family, "n_layer": 2, "n_head": 2, "n_embd": 32,
                          "n_ctx": self.N_CTX, **options},
                "data": {"train": str(data / "train_*.bin")},
                "batch": {"tokens_per_step": 192, "micro_batch": 4},
                "optimizer": {"learning_rate": 0.003}, "schedule": {"steps": 20},
                "precision": {"dtype": dtype}, "parallel": mesh or {}}))
            if mesh:
                self.train_on_ranks(4, config)
            else:
                self.run("train", config)
        return next(run.glob("step-*"))

    def random_model(self, dtype, **options):
        config = GPT2Config(vocab_size=211, n_positions=self.N_CTX, n_embd=48, n_layer=3, n_head=4,
                            **options)
        model = GPT2LMHeadModel(config)
        for parameter in model.parameters():  # biases and norms as well
            torch.nn.init.normal_(parameter, 0.02, 0.3)
        return model.to(DTYPES[dtype]).eval()

    def check_tokenizer(self):
        folder = self.trained("fp32")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.model_max_length == self.N_CTX
        for token in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token):
            assert token == "<|endoftext|>", token
        assert tokenizer.decode(tokenizer(self.TEXT)["input_ids"]) == self.TEXT
        return self.same_ids(tokenizer, self.folder / "data")

    def check_tokenizer_of_another_pattern(self):
        """cl100k's vocabulary, whose pattern cuts text differently from GPT-2's."""
        ranks = Path(__file__).parent.parent / "test/fixtures/tokenizer/cl100k_odd.tiktoken"
        data, theirs, ours = map(self.new, ("data", "theirs", "ours"))
        self.run("tokenize", self.folder / "text.txt", "--tokenizer", ranks, "--out", data)
        vocabulary = json.loads((data / "tokenizer.json").read_text(encoding="utf-8"))
        largest = max([*vocabulary["model"]["vocab"].values(),
                       *(token["id"] for token in vocabulary["added_tokens"])])
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=largest + 1, n_positions=8, n_embd=8, n_layer=1, n_head=1))
        model.save_pretrained(theirs)
        self.run("import", theirs, "--out", ours, "--tokenizer", ranks)
        return self.same_ids(AutoTokenizer.from_pretrained(ours), data)

    def check_published_tokenizers(self):
        """Every way to cut text that tokenizer_patterns.py knows, on random documents between <s>
        and </s>."""
        fixtures, count = Path(__file__).parent.parent / "test/fixtures/tokenizer", 0
        strings = json.loads((fixtures / "published.json").read_text(encoding="utf-8"))["strings"]
        pick = lambda n: torch.randint(n, ()).item()
        documents = []
        for _ in range(200):
            parts = [strings[pick(len(strings))] for _ in range(pick(6) + 1)]
            documents.append("".join(part[pick(len(part) + 1):] for part in parts).replace(
                "<|endoftext|>", "") + ".")
        lines = self.new("documents").with_suffix(".jsonl")
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents),
                         encoding="utf-8")
        for name, (pre_tokenizer, normalizer) in PARTS.items():
            file = json.loads((fixtures / "trained.json").read_text(encoding="utf-8"))
            file |= {"pre_tokenizer": pre_tokenizer, "normalizer": normalizer}
            for token in ("<s>", "</s>"):
                file["added_tokens"].append(
                    file["added_tokens"][0] | {"id": 700 + len(token) % 3, "content": token})
            source, data = self.new("tokenizer").with_suffix(".json"), self.new("data")
            source.write_text(json.dumps(file), encoding="utf-8")
            self.run("tokenize", lines, "--tokenizer", source, "--val-fraction", 0,
                     "--begin-token", "<s>", "--end-token", "</s>", "--out", data)
            raw = (data / "train_000000.bin").read_bytes()[1024:]
            ours = struct.unpack(f"<{len(raw) // 2}H", raw)
            for tokenizer in (tokenizers.Tokenizer.from_str(json.dumps(file)),
                              tokenizers.Tokenizer.from_file(str(data / "tokenizer.json"))):
                begin, end = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
                theirs = []
                for text in documents:
                    theirs += [begin, *tokenizer.encode(text, add_special_tokens=False).ids, end]
                assert theirs == [*ours], name
            assert tokenizer.encode("x").ids[0] == begin, (
                "the tokenizer that was written does not begin with <s>")
            count += len(ours)
        return f"{count} ids are equal"

    @staticmethod
    def same_ids(tokenizer, data):
        """transformers encodes the text of the shards as the ids in the shards."""
        ids = []
        for path in sorted(data.glob("*.bin")):
            raw = path.read_bytes()
            # llm.c's second magic number stands for uint32.
            wide = struct.unpack_from("<i", raw)[0] != 20240520
            ids += struct.unpack(
                f"<{(len(raw) - 1024) // (4 if wide else 2)}{'I' if wide else 'H'}", raw[1024:])
        parts, part = [], []
        for i in [*ids, tokenizer.eos_token_id]:
            if i == tokenizer.eos_token_id:
                parts, part = [*parts, part], []
            else:
                part.append(i)
        for part in parts:
            theirs = tokenizer(tokenizer.decode(part))["input_ids"]
            assert theirs == part, f"{part} here, {theirs} in transformers"
        return f"{len(ids)} ids are equal"

    def check_checkpoint(self):
        return "; ".join(self.same_model(self.trained(dtype)) for dtype in ("fp32", "bf16"))

    def check_checkpoints_of_families(self):
        llama3 = {"rope_scaling": "llama3", "rope_theta": 500, "rope_factor": 4,
                  "rope_original_n_ctx": 8}
        said = []
        for family, kind, options in (
                ("llama", LlamaForCausalLM,
                 {"n_head": 6, "n_kv_head": 2, "head_size": 8, "n_embd": 42, **llama3}),
                ("llama", MistralForCausalLM,
                 {"n_head": 3, "n_kv_head": 1, "head_size": 10}),  # which Llama's class refuses
                ("qwen2", Qwen2ForCausalLM, {"n_kv_head": 1, "tied_head": "on"}),
                ("qwen3", Qwen3ForCausalLM,
                 {"n_kv_head": 2, "n_head": 6, "head_size": 16, "n_ff": 40}),
                ("mistral", MistralForCausalLM,
                 {"rope_scaling": "linear", "rope_factor": 2, "window": 7}),
                ("llama", Qwen2ForCausalLM, {"bias": "qkv", "window": 7, "window_pattern": "SL"}),
                ("llama", LlamaForCausalLM, {"bias": "attention"}),
                ("mixtral", MixtralForCausalLM, {"n_expert": 5, "n_ff": 24, "window": 7}),
                ("qwen2_moe", Qwen2MoeForCausalLM, {"n_expert": 6, "n_ff": 40, "n_ff_expert": 24,
                                                    "n_ff_shared": 20, "experts_every": 2}),
                ("qwen3_moe", Qwen3MoeForCausalLM,
                 {"n_expert": 7, "n_expert_per_token": 3, "n_ff": 40, "n_ff_expert": 20,
                  "dense_layers": [0], "head_size": 12}),
                ("olmoe", OlmoeForCausalLM,
                 {"n_expert": 5, "n_expert_per_token": 1, "n_ff": 24, "n_kv_head": 1}),
                ("gpt_oss", GptOssForCausalLM, {"n_expert": 5, "n_expert_per_token": 3, "n_ff": 24,
                                                "head_size": 12, "window": 5})):
            for dtype in ("fp32", "bf16"):
                folder = self.trained(dtype, family, **options)
                model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
                assert model["architectures"] == [kind.__name__], model
                said.append(self.same_model(folder))
            shutil.rmtree(self.folder / f"run-{family}-fp32")
            shutil.rmtree(self.folder / f"run-{family}-bf16")
        return max(said)

    def check_checkpoints_of_meshes(self):
        """Ranks that share their weights along two axes save one model as well, that which a single
        rank trains."""
        said = []
        for family, options in (
                ("gpt2", {}),
                ("qwen3", {"n_head": 4, "n_kv_head": 2, "head_size": 16, "n_ff": 40})):
            for dtype, tolerance in (("fp32", 1e-4), ("bf16", 0.01)):
                alone, shared = (self.trained(dtype, family, mesh, **options)
                                 for mesh in (None, {"tensor": 2, "zero": 3}))
                assert len(list(shared.glob("optimizer-*"))) == 4
                said.append(self.same_model(shared))
                tokens = torch.randint(300, (self.N_CTX,)).tolist()
                losses = [loss_of(load(folder, torch.float32), tokens)
                          for folder in (alone, shared)]
                assert abs(losses[0] - losses[1]) <= tolerance * losses[0], (
                    f"{losses} on one rank and on four")
            for run in self.folder.glob("run-qwen3-*"):
                shutil.rmtree(run)
        return max(said)

    def same_model(self, folder):
        """Losses and greedy continuation are those of transformers."""
        said = self.same_losses(folder, load(folder))
        model, tokenizer = load(folder, torch.float32), AutoTokenizer.from_pretrained(folder)
        prompt = "One two"
        ids = tokenizer(prompt, return_tensors="pt")
        theirs = tokenizer.decode(model.generate(**ids, max_new_tokens=12, do_sample=False)[0])
        ours = self.run("sample", folder, "--prompt", prompt, "--max-tokens", 12,
                        "--temperature", 0, "--dtype", "fp32", "--device", "cpu")
        assert ours.rstrip("\n") == theirs.rstrip("\n"), (
            f"{ours!r} here, {theirs!r} in transformers")
        return said

    def check_export(self):
        for source in ("fp32", "bf16"):
            checkpoint = self.trained(source)
            masters = self.new("masters")
            self.run("export", checkpoint, "--out", masters, "--dtype", "fp32")
            for dtype in DTYPES:
                for size in ("5GB", "20KB"):
                    out = self.new("export")
                    self.run("export", checkpoint, "--out", out, "--dtype", dtype,
                             "--max-shard-size", size)
                    assert (out / "model.safetensors.index.json").exists() == (size == "20KB")
                    self.same_weights(load(out), load(masters).to(DTYPES[dtype]))
                    self.same_losses(out, load(out))
                    AutoTokenizer.from_pretrained(out)
            self.same_weights(load(checkpoint), load(masters).to(DTYPES[source]))
        return "weights are those of the masters, rounded as PyTorch rounds"

    def check_import(self):
        said = []
        for dtype in DTYPES:
            for size in ("5GB", "40KB"):
                model, source, ours, out = (self.random_model(dtype),
                                            *map(self.new, ("theirs", "ours", "back")))
                model.save_pretrained(source, max_shard_size=size)
                assert (source / "model.safetensors.index.json").exists() == (size == "40KB")
                self.run("import", source, "--out", ours)
                said.append(self.same_losses(source, model))
                self.same_weights(load(ours), model.to(DTYPES[dtype]))
                self.same_losses(ours, load(ours))
                self.run("export", ours, "--out", out, "--max-shard-size", "30KB")
                self.same_weights(load(out), load(source))
        return max(said)

    def random_family(self, family, dtype, **changes):
        """A model of odd shape, with random biases and norms."""
        llama3 = dict(rope_type="llama3", rope_theta=300.0, factor=4.0, low_freq_factor=1.0,
                      high_freq_factor=4.0, original_max_position_embeddings=16)
        yarn = dict(rope_type="yarn", rope_theta=300.0, factor=4.0, beta_fast=8.0, beta_slow=1.0,
                    truncate=False, original_max_position_embeddings=8)
        kind, options = {
            "llama": (LlamaForCausalLM, dict(num_attention_heads=6, num_key_value_heads=2,
                                             head_dim=10, rope_parameters=llama3)),
            "qwen2": (Qwen2ForCausalLM,
                      dict(num_attention_heads=6, num_key_value_heads=6, tie_word_embeddings=True)),
            "qwen3": (Qwen3ForCausalLM,
                      dict(num_attention_heads=4, num_key_value_heads=1, head_dim=18)),
            "mistral": (MistralForCausalLM,
                        dict(num_attention_heads=2, num_key_value_heads=1, sliding_window=None)),
            "mixtral": (MixtralForCausalLM,
                        dict(num_attention_heads=4, num_key_value_heads=2, head_dim=10,
                             num_local_experts=5, intermediate_size=22, sliding_window=7)),
            "qwen2_moe": (Qwen2MoeForCausalLM, dict(
                num_attention_heads=3, num_key_value_heads=1, num_experts=6, num_experts_per_tok=1,
                moe_intermediate_size=14, shared_expert_intermediate_size=26, num_hidden_layers=3,
                decoder_sparse_step=2, use_sliding_window=True, sliding_window=5,
                layer_types=["full_attention", "sliding_attention", "full_attention"])),
            "qwen3_moe": (Qwen3MoeForCausalLM, dict(
                num_attention_heads=4, num_key_value_heads=2, head_dim=14, num_experts=7,
                num_experts_per_tok=3, moe_intermediate_size=10, norm_topk_prob=True,
                num_hidden_layers=3, mlp_only_layers=[1], tie_word_embeddings=True)),
            "olmoe": (OlmoeForCausalLM,
                      dict(num_attention_heads=6, num_key_value_heads=3, num_experts=9,
                           num_experts_per_tok=2, intermediate_size=14)),
            "gpt_oss": (GptOssForCausalLM, dict(
                num_attention_heads=3, num_key_value_heads=1, head_dim=14, num_local_experts=5,
                num_experts_per_tok=3, intermediate_size=18, num_hidden_layers=3, sliding_window=6,
                swiglu_limit=0.8, rope_parameters=yarn)),
        }[family]
        config = kind.config_class(**{"vocab_size": 211, "max_position_embeddings": self.N_CTX,
                                      "hidden_size": 36, "intermediate_size": 52,
                                      "num_hidden_layers": 2, "tie_word_embeddings": False,
                                      **options, **changes})
        model = kind(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.02, 0.3)
        return with_any_widths(model).to(DTYPES[dtype]).eval()

    def check_import_of_families(self):
        said = []
        for family in FAMILIES:
            for dtype, size in (("fp32", "5GB"), ("fp32", "20KB"), ("bf16", "20KB"),
                                ("fp16", "5GB")):
                model, source, ours, out = (self.random_family(family, dtype),
                                            *map(self.new, ("theirs", "ours", "back")))
                model.save_pretrained(source, max_shard_size=size)
                assert (source / "model.safetensors.index.json").exists() == (size == "20KB")
                self.run("import", source, "--out", ours)
                said.append(self.same_losses(source, model))
                # gpt-oss' norms load as fp32.
                self.same_weights(load(ours).to(DTYPES[dtype]), model.to(DTYPES[dtype]))
                self.run("export", ours, "--out", out, "--max-shard-size", "30KB")
                self.same_weights(load(out), load(source))
                self.same_losses(out, load(out))
        return max(said)

    def check_variants_of_families(self):
        """Windows in some layers, biases, and weights that are divided by their sum or not."""
        said, some = ([],
                      {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5})
        for family, changes in (
                ("llama", {"attention_bias": True}), ("qwen3", {"attention_bias": True}),
                ("qwen3_moe", {"attention_bias": True}), ("olmoe", {"attention_bias": True}),
                ("gpt_oss", {"attention_bias": False}), ("qwen2_moe", {"qkv_bias": False}),
                ("mistral", {"sliding_window": 6}), ("mixtral", {"sliding_window": None}),
                ("qwen2",
                 {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
                ("qwen3", {"use_sliding_window": True, **some}),
                ("gpt_oss", {"num_hidden_layers": 2, **some}),
                ("gpt_oss", {"layer_types": ["full_attention"] * 3}),
                ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6}),
                *((family, {"norm_topk_prob": on}) for family in ("qwen2_moe", "qwen3_moe", "olmoe")
                  for on in (True, False))):
            model, source, ours = (self.random_family(family, "fp32", **changes),
                                   self.new("theirs"), self.new("ours"))
            model.save_pretrained(source)
            self.run("import", source, "--out", ours)
            said.append(self.same_losses(source, model))
            self.same_weights(load(ours), model)
            self.same_losses(ours, load(ours))
        return max(said)

    def check_stacked_experts(self):
        """Files with a layer's experts in one tensor, as transformers 5 has them in memory."""
        if not STACKED:
            return "not in this version"
        for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"):
            model, source, ours = (self.random_family(family, "bf16"), self.new("theirs"),
                                   self.new("ours"))
            model.save_pretrained(source, save_original_format=False)
            self.run("import", source, "--out", ours)
            self.same_weights(load(ours), model)
        return "weights are equal"

    def check_upcycling(self):
        """A mixture of copies of an MLP has the losses of the dense model."""
        said = []
        for family, kind in (("llama", MixtralForCausalLM), ("mistral", MixtralForCausalLM),
                             ("qwen3", Qwen3MoeForCausalLM)):
            for options in (["--upcycle", 5], ["--upcycle", 4, "--experts-per-token", 3],
                            ["--upcycle", 3, "--zero-router"]):
                model, source, ours = (self.random_family(family, "fp32"), self.new("theirs"),
                                       self.new("ours"))
                model.save_pretrained(source)
                self.run("import", source, "--out", ours, *options)
                mixture = load(ours)
                assert isinstance(mixture, kind), type(mixture)
                said += [self.same_losses(ours, model), self.same_losses(ours, mixture)]
        return max(said)

    def check_rotations(self):
        """A config.json that describes the rotation for several versions of transformers means what
        it means there."""
        linear = {"rope_type": "linear", "factor": 4.0}
        llama3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0}
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
        said = []
        for family in FAMILIES:
            source = self.new("theirs")
            self.random_family(family, "fp32").save_pretrained(source)
            config = json.loads((source / "config.json").read_text(encoding="utf-8"))
            for entries in ({"rope_theta": 300.0, "rope_scaling": linear,
                             "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
                            {"rope_scaling": {"type": "linear", "factor": 4.0}},
                            {"rope_theta": 300.0, "rope_scaling": None, "rope_parameters": linear},
                            {"rope_scaling": {**linear, "rope_theta": 300.0}},
                            {"original_max_position_embeddings": 16,
                             "rope_parameters": {**llama3, "rope_theta": 300.0}},
                            {"original_max_position_embeddings": 16, "rope_theta": 300.0,
                             "rope_scaling": llama3}, {"rope_parameters": llama3},
                            {"rope_theta": 300.0, "rope_scaling": yarn}, {"rope_parameters": yarn}):
                rest = {key: value for key, value in config.items() if not key.startswith("rope_")}
                (source / "config.json").write_text(json.dumps({**rest, **entries}),
                                                    encoding="utf-8")
                said.append(self.same_losses(source, load(source)))
        return max(said)

    def check_refusals_of_families(self):
        def rope(kind, **numbers):
            return {"rope_parameters": dict(rope_type=kind, rope_theta=1e4, factor=4.0, **numbers)}
        longrope = rope("longrope", short_factor=[1.0] * 5, long_factor=[2.0] * 5,
                        original_max_position_embeddings=8)
        for family, key, changes in (
                ("llama", "mlp_bias", {"mlp_bias": True}),
                ("llama", "hidden_act", {"hidden_act": "gelu"}), ("llama", "longrope", longrope),
                ("qwen2", "dynamic", rope("dynamic")),
                ("mixtral", "router_jitter_noise", {"router_jitter_noise": 0.1}),
                ("olmoe", "clip_qkv", {"clip_qkv": 0.5})):
            self.refused(self.random_family(family, "fp32", **changes), key)
        latent = dict(vocab_size=50, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
                      num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                      q_lora_rank=None, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
                      v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
                      topk_group=1, first_k_dense_replace=1)
        self.refused(DeepseekV3ForCausalLM(DeepseekV3ForCausalLM.config_class(**latent)),
                     "kv_lora_rank")

    def refused(self, model, key):
        """The model is not imported, and the message names the key."""
        source, ours = self.new("theirs"), self.new("ours")
        model.save_pretrained(source)
        try:
            self.run("import", source, "--out", ours)
        except ValueError as error:
            assert key in str(error), error
        else:
            raise AssertionError(f"a {type(model).__name__} was not refused by {key}")
        assert not ours.exists()

    def check_import_without_prefix(self):
        model, source, ours = self.random_model("fp32"), self.new("theirs"), self.new("ours")
        bare = GPT2Model(model.config)
        bare.load_state_dict(model.transformer.state_dict())
        bare.save_pretrained(source)
        self.run("import", source, "--out", ours)
        self.same_weights(load(ours), model)
        return self.same_losses(ours, model)

    def check_refusals(self):
        for options in ({"tie_word_embeddings": False}, {"activation_function": "relu"},
                        {"n_inner": 64}, {"layer_norm_epsilon": 1e-6},
                        {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False},
                        {"add_cross_attention": True}):
            self.refused(self.random_model("fp32", **options), next(iter(options)))

    def check_llmc(self):
        order = ["wte.weight", "wpe.weight", *(f"h.{{}}.{part}" for part in (
            "ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias",
            "attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight",
            "mlp.c_fc.bias", "mlp.c_proj.weight", "mlp.c_proj.bias")), "ln_f.weight", "ln_f.bias"]
        for dtype, version in (("fp32", 3), ("bf16", 5)):
            model, source, ours, back = (self.random_model(dtype),
                                         *map(self.new, ("theirs", "ours", "back")))
            model.save_pretrained(source)
            state, file = model.transformer.state_dict(), self.new("llmc").with_suffix(".bin")
            expected = struct.pack("<256i", 20240326, version, self.N_CTX, 211, 3, 4, 48, 256,
                                   *[0] * 248)
            for name in order:
                for tensor in [state[name.format(layer)]
                               for layer in range(3 if "{}" in name else 1)]:
                    tensor = (tensor.t()
                              if name.endswith(("attn.weight", "proj.weight", "fc.weight"))
                              else tensor)
                    expected += tensor.contiguous().view(torch.uint8).numpy().tobytes()
                if name == "wte.weight":
                    expected += bytes((256 - 211) * 48 * tensor.element_size())
            self.run("export", source, "--out", file, "--format", "llm.c")
            assert file.read_bytes() == expected, (
                f"{dtype}: the file does not follow llm.c's format")
            self.run("import", file, "--out", ours)
            self.same_weights(load(ours), model)
            self.run("export", ours, "--out", back, "--format", "llm.c")
            assert back.read_bytes() == expected

    def check_all(self):
        passed = failed = 0
        for name in [name for name in vars(Interchange)
                     if name.startswith("check_") and name != "check_all"]:
            title = name[len("check_"):].replace("_", " ")
            try:
                print(f"{title}: {getattr(self, name)() or 'as it should be'}")
                passed += 1
            except Exception:  # the checks behind it are still worth running
                print(f"{title}: FAILED\n{traceback.format_exc()}")
                failed += 1
        print(f"{passed} passed, {failed} failed")
        return failed


def main():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if len(sys.argv) == 3 and sys.argv[1] == "--interchange":
        with tempfile.TemporaryDirectory() as folder:
            seed = int(os.environ.get("TEST_SEED") or torch.seed() % 2**32)
            torch.manual_seed(seed)
            print(f"torch {torch.__version__}, transformers {transformers.__version__}; "
                  f"TEST_SEED={seed} repeats these models")
            sys.exit(1 if Interchange(sys.argv[2], folder).check_all() else 0)
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    describe(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else None)


if __name__ == "__main__":
    main()
