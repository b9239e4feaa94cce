#!/usr/bin/env python3
"""Compares the tokenizer with Hugging Face's tokenizers and tiktoken, if these Python packages are
installed.

    scripts/bench_tokenizer.py [quick|train] [--vocab PATH] [--text FILE …] [--vocab-size N]

Measures encoding with one thread and with all threads, training, and texts on which a tokenizer's
work may grow with the square of their length. All programs get the same vocabulary and the same
documents and take turns, and their ids and merges are compared. `train` measures only training.
Prints Markdown. Starting and loading are not timed. `make bench` runs it; to run it by hand, first
`make build/bench_tokenizer`.

--vocab   a tokenizer.json, GPT-2's vocab.json and merges.txt in a folder, or a rank file such as
          r50k_base.tiktoken; without it, a vocabulary of --vocab-size tokens is trained on the text
--text    UTF-8 text files with empty lines between documents; without them, English-like text is
          generated: a few hundred real words and a long tail of invented ones, which are as rare as
          the rare words of real text
"""
import argparse
import array
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time

from tokenizer_patterns import PATTERNS

WORDS = """the of and to in a is that for it was as with be on by not he his but at are this have
from or had an they which one you were all her she there would their we him been has when who will
no more if out so up said what its about than into them can only other time new some could these two
may first then do any like my now over such our man me even most made after also did many off before
must well back through years where much your way down should because long each just state those
people too mr how little good world make very year still see work life day being both between under
never same another know while last might us great old against go came right used take three himself
few house use place home during without again however american around water hand part number small
every government set fact always""".split()
MILLION = 1_000_000


def invented_words(rng, n):
    starts = "b c d f g h l m n p r s t v w br ch cl dr fl gr pl pr sh sp st th tr wh".split()
    middles = "a e i o u ai ea ee ie oo ou".split()
    ends = "b ck d f g l ll m n nd ng nt p r rd s ss st t th x".split() + [""] * 9
    suffixes = [""] * 6 + "s ed ing er ly ness tion able ment al".split()
    words = set()
    while len(words) < n:
        syllables = (rng.choice(starts) + rng.choice(middles) + rng.choice(ends)
                     for _ in range(rng.randint(1, 3)))
        words.add("".join(syllables) + rng.choice(suffixes))
    return sorted(words, key=lambda word: (len(word), rng.random()))


def made_up_documents(megabytes):
    """Documents of sentences whose words follow Zipf's law."""
    rng = random.Random(6)
    words = WORDS + invented_words(rng, 30_000 + 3_000 * megabytes)
    weights = list(itertools.accumulate(1 / (i + 3) for i in range(len(words))))
    documents, size = [], 0
    while size < megabytes * MILLION:
        sentences = []
        for _ in range(rng.randint(3, 60)):
            sentence = rng.choices(words, cum_weights=weights, k=rng.randint(4, 30))
            sentence[0] = sentence[0].capitalize()
            for i in range(1, len(sentence)):
                chance = rng.random()
                if chance < 0.06:
                    sentence[i - 1] += ","
                elif chance < 0.08:
                    sentence[i] = str(rng.randint(0, 2100))
                elif chance < 0.10:
                    sentence[i] += rng.choice(["'s", "'t", "'ll", "'re"])
                elif chance < 0.11:
                    sentence[i] = f'"{sentence[i].capitalize()}"'
            sentences.append(" ".join(sentence) + rng.choice([". ", ". ", ". ", "? ", "; ", ".\n"]))
        documents.append("".join(sentences))
        size += len(documents[-1])
    return documents


def tempting_texts():
    """Texts of a megabyte with long pieces, or whose patterns look far ahead."""
    rng = random.Random(7)
    n = MILLION
    return {
        "one letter": b"a" * n,
        "a word without spaces": bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=n)),
        "spaces": b" " * n,
        "line breaks": b"\n" * n,
        "spaces between line breaks": b"  \n " * (n // 4),
        "digits": bytes(rng.choices(b"0123456789", k=n)),
        "apostrophes": b"'" * n,
        "emoji": "\U0001f468\u200d\U0001f469\U0001f44d".encode() * (n // 15),
        "random bytes": rng.randbytes(n),
        "half a special token": b"<|endoftext|" * (n // 12),
    }


class Ours:
    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        if not answer:
            sys.exit("error: the benchmark program failed; its message is above")
        return answer


def write_text(path, documents):
    with open(path, "wb") as file:
        file.writelines(documents)
    with open(path + ".lengths", "w", encoding="ascii") as file:
        file.writelines(f"{len(document)}\n" for document in documents)
    return path


def read_ids(path):
    ids = array.array("I")
    with open(path, "rb") as file:
        ids.frombytes(file.read())
    return ids


def timed(work):
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def byte_of_character():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable},
            **{chr(0x100 + i): byte for i, byte in enumerate(others)}}


def tiktoken_encoding(tiktoken, file, pattern):
    """The same vocabulary for tiktoken: its ranks are the ids."""
    with open(file, encoding="utf-8") as opened:
        definition = json.load(opened)
    added = {token["content"]: token["id"] for token in definition["added_tokens"]}
    byte_of = byte_of_character()
    ranks = {bytes(byte_of[c] for c in token): rank
             for token, rank in definition["model"]["vocab"].items() if token not in added}
    return tiktoken.Encoding("same", pat_str=PATTERNS[pattern], mergeable_ranks=ranks,
                             special_tokens=added)


def encoders(modules, file, pattern):
    """Name → function(documents, threads) that gives their ids."""
    result = {}
    if modules["tiktoken"]:
        encoding = tiktoken_encoding(modules["tiktoken"], file, pattern)
        result["tiktoken"] = lambda documents, threads: (
            [encoding.encode_ordinary(document) for document in documents] if threads == 1
            else encoding.encode_ordinary_batch(documents, num_threads=threads))
    if modules["tokenizers"]:
        tokenizer = modules["tokenizers"].Tokenizer.from_file(file)
        tokenizer.encode_special_tokens = True
        result["tokenizers"] = lambda documents, threads: (
            [tokenizer.encode(document, add_special_tokens=False).ids for document in documents]
            if threads == 1
            else [encoded.ids
                  for encoded in tokenizer.encode_batch(documents, add_special_tokens=False)])
    return result


def median_rate(size, seconds):
    return f"{size / MILLION / statistics.median(seconds):.1f}"


def compare_encoding(ours, peers, documents, path, rounds, folder):
    size = os.path.getsize(path)
    print("\n| encoding, MB/s | train_gpt |" + "".join(f" {name} |" for name in peers) +
          "".join(f" times {name} |" for name in peers))
    print("|---|---|" + "---|---|" * len(peers))
    equal = True
    for threads in sorted({1, os.cpu_count()}):
        seconds = {name: [] for name in ["train_gpt", *peers]}
        for number in range(rounds):
            ids_file = os.path.join(folder, "ids") if number == 0 else ""
            seconds["train_gpt"].append(float(ours.ask("encode", path, threads, ids_file)[0]))
            for name, encode in peers.items():
                duration, ids = timed(lambda encode=encode: encode(documents, threads))
                seconds[name].append(duration)
                if number == 0 and array.array("I", itertools.chain.from_iterable(ids)) != read_ids(
                        ids_file):
                    print(f"error: {name} gives other ids", file=sys.stderr)
                    equal = False
        times = [statistics.median(theirs / own
                                   for theirs, own in zip(seconds[name], seconds["train_gpt"]))
                 for name in peers]
        print(f"| {threads} thread{'s' * (threads > 1)} |" +
              "".join(f" {median_rate(size, seconds[name])} |" for name in seconds) +
              "".join(f" {factor:.1f} |" for factor in times), flush=True)
    return equal


def compare_training(ours, tokenizers, documents, path, vocab_size, folder):
    size, threads, out = os.path.getsize(path), os.cpu_count(), os.path.join(folder, "trained.json")
    counting, merging = map(float, ours.ask("train", path, threads, vocab_size, out))
    print(f"\nTraining {vocab_size} tokens on {size / MILLION:.0f} MB with {threads} threads: "
          f"train_gpt {counting + merging:.2f} s (counting words {counting:.2f} s, merging "
          f"{merging:.2f} s)", end="")
    if not tokenizers:
        print()
        return True
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, show_progress=False,  # ours counts <|endoftext|>
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    theirs, _ = timed(lambda: tokenizer.train_from_iterator(documents, trainer))
    with open(out, encoding="utf-8") as file:
        own = [merge.split(" ") for merge in json.load(file)["model"]["merges"]]
    equal = own == [list(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    print(f", tokenizers {theirs:.2f} s: {theirs / (counting + merging):.1f} times; the merges are "
          f"{'equal' if equal else 'NOT EQUAL'}", flush=True)
    return equal


def show_tempting(ours, rounds, folder):
    print("\n| a megabyte of | train_gpt MB/s | time per byte beside that of a quarter |\n"
          "|---|---|---|")
    for name, text in tempting_texts().items():
        seconds = []
        for length in (len(text), len(text) // 4):
            path = write_text(os.path.join(folder, "tempting"), [text[:length]])
            seconds.append(
                statistics.median(float(ours.ask("encode", path, 1)[0]) for _ in range(rounds)))
        print(f"| {name} | {len(text) / MILLION / seconds[0]:.1f} | "
              f"{seconds[0] / seconds[1] / 4:.2f} |", flush=True)


def load_module(name):
    try:
        return __import__(name)
    except ImportError:
        print(f"not compared with {name}, which {sys.executable} does not have; pip install {name} "
              "installs it")
        return None


def measure_encoding(ours, modules, documents, path, rounds, args):
    vocab = args.vocab
    if not vocab:
        vocab = os.path.join(args.folder, "vocabulary.json")
        ours.ask("train", path, os.cpu_count(), args.vocab_size, vocab)
    file = os.path.join(args.folder, "tokenizer.json")
    pattern = ours.ask("load", vocab, file)[0]
    equal = compare_encoding(ours, encoders(modules, file, pattern), documents, path, rounds,
                             args.folder)
    show_tempting(ours, rounds, args.folder)
    return equal


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["quick", "train"],
                        help="quick: less text, fewer rounds; train: only training")
    parser.add_argument("--vocab", help="the vocabulary to encode with")
    parser.add_argument("--vocab-size", type=int, default=50257,
                        help="tokens of the trained vocabulary (default 50257)")
    parser.add_argument("--text", nargs="+", help="text files")
    parser.add_argument("--program", default="build/bench_tokenizer")
    parser.add_argument("--folder", default="build/bench-runs/tokenizer", help="for scratch files")
    args = parser.parse_args()
    if not os.access(args.program, os.X_OK):
        sys.exit(f"error: there is no {args.program}; build it with: make build/bench_tokenizer")
    os.makedirs(args.folder, exist_ok=True)
    rounds = 3 if args.part == "quick" else 7

    print("\n# Speed of the tokenizer\n")
    modules = {name: load_module(name) for name in ("tokenizers", "tiktoken")}
    if args.text:
        documents = []
        for name in args.text:
            with open(name, encoding="utf-8", errors="replace", newline="") as file:
                documents += [document for document in file.read().split("\n\n") if document]
    else:
        documents = made_up_documents(4 if args.part == "quick" else 24)
    path = write_text(os.path.join(args.folder, "text"),
                      [document.encode() for document in documents])
    print(f"\nText: {os.path.getsize(path) / MILLION:.1f} MB in {len(documents)} documents, "
          f"{', '.join(args.text) if args.text else 'made up'}.")

    ours = Ours(args.program)
    equal = compare_training(ours, modules["tokenizers"], documents, path,
                             min(args.vocab_size, 32768), args.folder)
    if args.part != "train":
        equal &= measure_encoding(ours, modules, documents, path, rounds, args)
    if not equal:
        sys.exit("error: results differ, see above")


if __name__ == "__main__":
    main()
