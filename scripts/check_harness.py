#!/usr/bin/env python3
"""Compares scores on tasks with other implementations.
needs: lm_eval, torch, transformers

    scripts/check_harness.py TRAIN_GPT [SEED]

Trains two tiny models, exports them, and scores 200 made-up items of each form with the program
TRAIN_GPT, with lm-evaluation-harness, and by CORE's procedure, which is written here a second time
on transformers. The log-likelihoods must agree to 1e-4, and the decisions must be the same. The
last line that it prints is "N passed, M failed".
"""
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

ITEMS, CONTEXT, TOLERANCE = 200, 160, 1e-4
MODELS = {"gpt2": {"family": "gpt2"}, "llama": {"family": "llama", "n_kv_head": 2}}


class Check:
    """The checks; each is a method whose name begins with check_."""

    def __init__(self, program, folder, seed):
        self.program, self.folder = Path(program).resolve(), Path(folder)
        self.random = random.Random(seed)
        self.words = [
            "".join(self.random.choices(string.ascii_lowercase[:8], k=self.random.randint(1, 7)))
            for _ in range(60)]
        self.words += ["café", "世界", "don't", "4x2", "x-y"]
        self.models = {name: self.trained(name, options) for name, options in MODELS.items()}
        self.tokens = [AutoTokenizer.from_pretrained(folder).tokenize
                       for folder in self.models.values()]

    def text(self, least, most):
        """Words, of which some follow each other more often than others, so that there is something
        to learn."""
        words = [self.random.choice(self.words)]
        for _ in range(self.random.randint(least, most) - 1):
            at = self.words.index(words[-1])
            words.append(
                self.words[(7 * at + self.random.choice([1, 1, 1, 2, 9])) % len(self.words)])
        return " ".join(words)

    def run(self, *arguments):
        done = subprocess.run([self.program, *map(str, arguments)], capture_output=True,
                              errors="replace", check=False)
        if done.returncode:
            raise ValueError(f"{' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    def trained(self, name, model):
        """A folder for transformers, exported from a short run."""
        data, run, out = (self.folder / part for part in ("data", f"run-{name}", name))
        if not data.exists():
            text = self.folder / "text.txt"
            text.write_text("\n".join(self.text(5, 60) + "." for _ in range(1500)),
                            encoding="utf-8")
            self.run("tokenize", text, "--train-vocab", 500, "--out", data)
        config = self.folder / f"{name}.json"
        config.write_text(json.dumps({
            "run_dir": str(run), "device": "cpu",
            "model": {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_ctx": CONTEXT, **model},
            "tokenizer": {"path": str(data)}, "data": {"train": f"{data}/train_*.bin"},
            "batch": {"tokens_per_step": 4 * CONTEXT, "micro_batch": 4},
            "precision": {"dtype": "fp32"}, "optimizer": {"learning_rate": 0.005},
            "schedule": {"steps": 60, "warmup_steps": 5}, "sampling": {"samples": 0}}))
        self.run("train", config, "--quiet")
        self.run("export", run, "--out", out)
        return out

    # ---- Made-up items ---------------------------------------------------------------------------

    def spaces(self):
        return self.random.choice(["", "", "", " ", "\n", " \t "])

    def item(self, form):
        text, pick = self.text, self.random
        if form == "multiple_choice":
            n = pick.randint(2, 5)
            # Tokens that all choices begin with.
            shared = (text(1, 2) + " " if pick.random() < 0.2 else "")
            return {"query": text(1, 200 if pick.random() < 0.05 else 25) + self.spaces(),
                    "choices": [shared + text(1, 8) for _ in range(n)], "gold": pick.randrange(n)}
        if form == "schema":
            n, before = pick.randint(2, 3), text(1, 150 if pick.random() < 0.05 else 20)
            return {"context_options": [f"{before} {text(1, 3)}" for _ in range(n)],
                    "continuation": text(1, 10), "gold": pick.randrange(n)}
        while True:
            words = text(2, 25).split(" ")
            context = self.spaces() + " ".join(words[:-1]) + self.spaces()
            continuation = pick.choice(["", " "]) + words[-1]
            # Where "ab" is followed by "c" and "abc" is one token, the continuation has none, which
            # the harness does not take.
            if all(len(tokens(context + continuation)) > len(tokens(context.rstrip()))
                   for tokens in self.tokens):
                return {"context": context, "continuation": continuation}

    def task(self, name, form, **header):
        items = [self.item(form) for _ in range(ITEMS)]
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n"
                                for line in ({"task": name, "form": form, **header}, *items)),
                        encoding="utf-8")
        return path, items

    def ours(self, model, path):
        """What the program decided on each item, in the file's order; and the task's scores."""
        decided = self.folder / "decided.jsonl"
        out = json.loads(self.run("eval", model, "--tasks", path, "--items", decided, "--json",
                                  "--device", "cpu", "--dtype", "fp32"))
        lines = [json.loads(line) for line in decided.read_text(encoding="utf-8").splitlines()]
        return sorted(lines, key=lambda line: line["line"]), out["tasks"][0]

    # ---- lm-evaluation-harness -------------------------------------------------------------------

    def theirs(self, model, items, form, shots, examples, delimiter=" "):
        """The harness's samples, and its metrics."""
        docs = self.folder / "docs.jsonl"
        docs.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
        config = {
            "task": "made_up", "dataset_path": "json", "test_split": "test",
            "target_delimiter": delimiter, "num_fewshot": shots, "dataset_kwargs": {
                "data_files": {"test": str(docs)}, "cache_dir": str(self.folder / "cache")},
            "output_type": "multiple_choice",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "acc_bytes"}]}
        if shots:
            config["fewshot_config"] = {"sampler": "first_n", "samples": examples}
        if form == "multiple_choice":
            config.update(doc_to_text="{{query}}", doc_to_choice="{{choices}}",
                          doc_to_target="gold")
        elif form == "schema":
            config.update(doc_to_text=lambda doc: doc["gold"],
                          doc_to_choice=lambda doc: doc["context_options"],
                          doc_to_target=lambda doc: doc["continuation"])
        else:
            config.update(output_type="loglikelihood", doc_to_text="{{context}}",
                          doc_to_target="{{continuation}}",
                          metric_list=[{"metric": "perplexity"}, {"metric": "acc"}])
        lm = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=16)
        done = simple_evaluate(model=lm, tasks=[config], log_samples=True, bootstrap_iters=0,
                               verbosity="ERROR")
        samples = sorted(done["samples"]["made_up"], key=lambda sample: sample["doc_id"])
        return samples, done["results"]["made_up"]

    def compare_harness(self, form, shots):
        examples = [self.item(form) for _ in range(shots)]
        header = {"examples": examples, "shots": shots} if shots else {}
        # Of language modelling the harness takes the continuation as it is.
        delimiter = self.random.choice([" ", "\nAnswer: "]) if form != "language_modeling" else ""
        path, items = self.task(f"harness_{form}", form, procedure="harness", delimiter=delimiter,
                                **header)
        worst = 0
        for model in self.models.values():
            samples, metrics = self.theirs(model, items, form, shots, examples, delimiter)
            decided, scores = self.ours(model, path)
            for ours, sample in zip(decided, samples):
                theirs = [-float(response[0][0]) for response in sample["resps"]]
                assert len(theirs) == len(ours["nats"])
                for a, b in zip(ours["nats"], theirs):
                    worst = max(worst, abs(a - b))
                    assert abs(a - b) <= TOLERANCE, (
                        f"{a} here, {b} there, for {sample['arguments']}")
                if form == "language_modeling":
                    assert ours["exact_match"] == bool(sample["resps"][0][0][1]), (
                        sample["arguments"])
                else:
                    assert (ours["by_sum"] == ours["gold"]) == bool(sample["acc"]), sample["doc"]
                    if "acc_norm" in sample and form == "multiple_choice":
                        assert ((ours["per_character"] == ours["gold"]) ==
                                bool(sample["acc_norm"])), sample["doc"]
                        assert ((ours["per_byte"] == ours["gold"]) ==
                                bool(sample["acc_bytes"])), sample["doc"]
            close = lambda a, b: abs(a - b) <= 1e-6 * max(1, abs(b))
            assert close(scores["accuracy"], metrics["acc,none"]), (scores, metrics)
            if form == "language_modeling":
                assert abs(scores["perplexity"] / metrics["perplexity,none"] - 1) < 1e-4, (scores,
                                                                                           metrics)
            elif form == "multiple_choice":
                assert close(scores["accuracy_per_character"], metrics["acc_norm,none"])
                assert close(scores["accuracy_per_byte"], metrics["acc_bytes,none"])
        return (f"{ITEMS} items by {len(self.models)} models; log-likelihoods differ by at most "
                f"{worst:.1e}, no decision does")

    def check_multiple_choice(self):
        return self.compare_harness("multiple_choice", 0)

    def check_multiple_choice_with_shots(self):
        return self.compare_harness("multiple_choice", 3)

    def check_schema(self):
        return self.compare_harness("schema", 0)

    def check_language_modeling(self):
        return self.compare_harness("language_modeling", 0)

    def check_language_modeling_with_shots(self):
        return self.compare_harness("language_modeling", 2)

    # ---- CORE's procedure ------------------------------------------------------------------------

    @staticmethod
    def solved(item, form, delimiter):
        if form == "multiple_choice":
            return item["query"] + delimiter + item["choices"][item["gold"]]
        if form == "schema":
            return item["context_options"][item["gold"]] + delimiter + item["continuation"]
        return item["context"].strip() + delimiter + item["continuation"]

    def core_item(self, model, tokenizer, items, number, form, shots, delimiter):
        """The losses of the tokens that decide, for each answer; and for each whether it is the
        likeliest token."""
        item, others = items[number], [i for i in range(len(items)) if i != number]
        drawn = random.Random(1234 + number).sample(others, shots)
        before = "".join(self.solved(items[i], form, delimiter) + "\n\n" for i in drawn)
        begin = [tokenizer.convert_tokens_to_ids("<|endoftext|>")]
        encode = lambda text: begin + tokenizer(text, add_special_tokens=False)["input_ids"]
        if form == "multiple_choice":
            sequences = [encode(before + item["query"] + delimiter + choice)
                         for choice in item["choices"]]
            start = len(os.path.commonprefix(sequences))
            starts = [start] * len(sequences)
        elif form == "schema":
            sequences = [encode(before + option + delimiter + item["continuation"])
                         for option in item["context_options"]]
            suffix = len(os.path.commonprefix([sequence[::-1] for sequence in sequences]))
            starts = [len(sequence) - suffix for sequence in sequences]
        else:
            prompt = before + item["context"].strip() + delimiter
            whole, alone = encode(prompt + item["continuation"]), encode(prompt.strip())
            sequences, starts = [whole], [len(os.path.commonprefix([whole, alone]))]
        answers = []
        for tokens, first in zip(sequences, starts):
            dropped = max(0, len(tokens) - CONTEXT)
            tokens, first = torch.tensor(tokens[dropped:]), max(1, first - dropped)
            with torch.no_grad():
                logits = model(tokens[None, :-1]).logits[0].double()
            losses = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
            answers.append((losses[first - 1:].tolist(),
                            (logits.argmax(-1) == tokens[1:])[first - 1:].tolist()))
        return answers

    def compare_core(self, form, shots, delimiter):
        path, written = self.task(f"core_{form}", form, procedure="core", shots=shots,
                                  delimiter=delimiter)
        order = list(range(len(written)))
        random.Random(1337).shuffle(order)
        items = [written[i] for i in order]
        worst = 0
        for folder in self.models.values():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder)
            decided, scores = self.ours(folder, path)
            right = 0
            for number, item in enumerate(items):
                ours = decided[order[number]]
                answers = self.core_item(model, tokenizer, items, number, form, shots, delimiter)
                for (losses, _), nats, tokens in zip(answers, ours["nats"], ours["tokens"]):
                    worst = max(worst, abs(sum(losses) - nats))
                    assert len(losses) == tokens and abs(sum(losses) - nats) <= TOLERANCE, (
                        (sum(losses), nats, item))
                if form == "language_modeling":
                    decision = all(answers[0][1])
                    assert decision == ours["exact_match"], item
                    right += decision
                else:
                    means = [sum(losses) / len(losses) if losses else float("nan")
                             for losses, _ in answers]
                    decision = means.index(min(means))
                    assert decision == ours["per_token"], (means, ours, item)
                    right += decision == item["gold"]
            assert abs(scores["accuracy"] - right / len(items)) < 1e-9
        return (f"{ITEMS} items by {len(self.models)} models; log-likelihoods differ by at most "
                f"{worst:.1e}, no decision does")

    def check_core_multiple_choice(self):
        return self.compare_core("multiple_choice", 0, " ")

    def check_core_multiple_choice_with_shots(self):
        return self.compare_core("multiple_choice", 4, "\nAnswer: ")

    def check_core_schema(self):
        return self.compare_core("schema", 2, " ")

    def check_core_language_modeling(self):
        return self.compare_core("language_modeling", 3, " ")


def main(program, seed):
    torch.set_num_threads(2)
    passed = failed = 0
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory(prefix="check_harness-") as folder:
        check = Check(program, folder, seed)
        for name in [name for name in dir(check) if name.startswith("check_")]:
            title = name[len("check_"):].replace("_", " ")
            try:
                print(f"{title}: {getattr(check, name)()}", flush=True)
                passed += 1
            except Exception as error:  # whatever goes wrong in one check, the others still run
                print(f"FAILED {title}: {error!r}")
                if not isinstance(error, AssertionError):
                    traceback.print_exc()
                failed += 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], (int(sys.argv[2]) if len(sys.argv) > 2
                                else random.SystemRandom().randrange(1 << 32))))
