#!/usr/bin/env python3
"""Makes the fixtures that the tokenizer's tests compare with, from the reference implementations.

    pip install regex tokenizers tiktoken unicodedata2==16.0.0
    scripts/tokenizer_fixtures.py GPT2_FOLDER [OUT]       default OUT: test/fixtures/tokenizer

GPT2_FOLDER holds OpenAI's encoder.json and vocab.bpe; if it is "-", gpt2.json stays as it is.
pieces.json        strings, and the lengths in bytes of their pieces under each pattern (`regex`,
                   checked against `tokenizers` where its engine understands the pattern)
gpt2.json          strings and their ids in GPT-2's vocabulary (`tiktoken`, checked against
                   `tokenizers`)
corpus.json        documents
trained.json       the tokenizer.json that `tokenizers` trains on them, <|endoftext|> added at the
                   end
trained_ids.json   strings and their ids under trained.json, with special tokens as text and
                   recognised
cl100k_odd.tiktoken   a rank file with tokens that no training would produce: random strings in
                   random order
odd_ids.json       strings and their ids under it (`tiktoken`, pattern cl100k)
published.json     strings, and for each way to cut text in tokenizer_patterns.py the parts of a
                   tokenizer.json and the strings' ids under trained.json with these parts
                   (`tokenizers`)
"""
import base64
import json
import os
import random
import sys
import unicodedata

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

import regex
import tiktoken
import tiktoken.load
import unicodedata2
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from tokenizers import decoders

from tokenizer_patterns import PARTS, PATTERNS

END = "<|endoftext|>"

FRAGMENTS = [
    "'s", "'t", "'re", "'VE", "'ll", "'LL", "'d", "'M", "'\u017f", "'K", "'", "''", " ", "  ",
    "   ", "\n", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u2028", "\u0085", "\u200b",
    "\u200d", "\ufeff", "\u180e", "\x1c", "\x1f", "\x0b", "\x0c", "\x00", "\x7f", "hello", "World",
    "don't", "I'M", "it's", " the", " a", "1", "12", "123", "1234", "12345678", "\u0663",
    "\u0663\u0664\u0665\u0666", "\u00bd", "\u00b2", "\u2167", "\u4e09", "\u00e9", "e\u0301",
    "\u00f1", "\u00df", "\ufb01", "\ufb05", "\u0130", "\u0131", "\u03a9",
    "\u041f\u0440\u0438\u0432\u0435\u0442", " \u043c\u0438\u0440", "\u4f60\u597d",
    "\u3053\u3093\u306b\u3061\u306f", "\u30ab\u30bf", "\ud55c\uad6d\uc5b4",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "\u05e2\u05d1\u05e8\u05d9\u05ea",
    "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e44\u0e17\u0e22", "\U0001f44d",
    "\U0001f468\u200d\U0001f469", "\U0001f3f3\ufe0f\u200d\U0001f308", "\u0301", "\u0300\u0301",
    "\U0001d400", "\U00010400", "\U0001f1e9\U0001f1ea", ".", ",", "!", "...", "--", "----", "$",
    "#", "@", " $", " .", "_", "a_b", "(", ")", "[[", "==", "!=", "//", "/*", "\\n", END, "<|",
    "|>", "http://x.y/z?q=1&b=2", "\ue000", "\U0010ffff", "\u0308", "\u02bcn", "\u0149", "\u00aa",
    "\u00b5", "\u2460", "\u24b6", "aaaa", "aaaaaaaaaaa", "abababab", "x     ",
]
WORDS = ("in the beginning was word and light shone upon waters of deep river while people sang "
         "their old songs about kings queens shepherds who walked from mountain to valley carrying "
         "bread wine oil for feast that lasted seven days nights nobody knew where they had come "
         "or when would return but every child remembered").split()


def nasty(rng):
    """A string that mixes the characters that pre-tokenisation distinguishes."""
    parts = []
    for _ in range(rng.randint(0, 14)):
        kind = rng.random()
        if kind < 0.75:
            parts.append(rng.choice(FRAGMENTS))
        elif kind < 0.85:
            parts.append(rng.choice(" \n\t\r ab1'") * rng.randint(1, 5))
        elif kind < 0.95:
            parts.append(chr(rng.randint(0x20, 0x7E)))
        else:
            code = rng.randint(0, 0x2FFFF)
            # Unassigned code points may become letters in a later Unicode version.
            if unicodedata2.category(chr(code)) not in ("Cs", "Cn"):
                parts.append(chr(code))
    return "".join(parts)


def is_old(text):
    """Whether every library knows these characters, whatever its version of Unicode."""
    return all(c in "".join(FRAGMENTS) or unicodedata.ucd_3_2_0.category(c) != "Cn" for c in text)


def sentence(rng):
    words = rng.choices(WORDS, weights=[1 / (i + 1) for i in range(len(WORDS))],
                        k=rng.randint(4, 14))
    return " ".join(words).capitalize() + rng.choice([". ", "; ", "!\n", "?\n\n"])


def pieces(strings):
    result = {"strings": strings}
    for name, pattern in PATTERNS.items():
        found = [regex.findall(pattern, text) for text in strings]
        assert all("".join(parts) == text for parts, text in zip(found, strings))
        if name != "cl100k":
            split = pre_tokenizers.Split(Regex(pattern), "isolated")
            assert found == [[part for part, _ in split.pre_tokenize_str(text)] for text in strings]
        result[name] = [[len(part.encode()) for part in parts] for parts in found]
    return result


def gpt2(folder, strings):
    encoder, merges = os.path.join(folder, "encoder.json"), os.path.join(folder, "vocab.bpe")
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=merges,
                                                          encoder_json_file=encoder)
    reference = tiktoken.Encoding("gpt2", pat_str=PATTERNS["gpt2"], mergeable_ranks=ranks,
                                  special_tokens={END: 50256})
    other = Tokenizer(models.BPE.from_file(encoder, merges))
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ids = [reference.encode_ordinary(text) for text in strings]
    assert ids == [other.encode(text).ids for text in strings]
    return {"strings": strings, "ids": ids}


def train(documents):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=699, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([END])
    return tokenizer


def trained_ids(tokenizer, strings):
    result = {"strings": strings}
    result["with_special"] = [tokenizer.encode(text).ids for text in strings]
    tokenizer.encode_special_tokens = True
    result["ordinary"] = [tokenizer.encode(text).ids for text in strings]
    return result


def odd_ranks(rng, documents):
    text = "".join(documents).encode()
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < 700:
        at, length = rng.randrange(len(text)), rng.randint(2, 7)
        token = rng.choice([text[at:at + length], rng.choice([b"a", b"ab", b" ", b"-"]) * length])
        if len(token) > 1 and token not in tokens:
            tokens.append(token)
    rng.shuffle(tokens)
    return {token: rank for rank, token in enumerate(tokens)}


def with_parts(trained, name):
    """The tokenizer that cuts text as a published one does, as JSON."""
    file = json.loads(trained.to_str())
    file["pre_tokenizer"], file["normalizer"] = PARTS[name]
    return file


def published(trained, strings):
    result = {"strings": strings, "tokenizers": {}}
    for name in PARTS:
        file = with_parts(trained, name)
        tokenizer = Tokenizer.from_str(json.dumps(file))
        tokenizer.encode_special_tokens = True
        result["tokenizers"][name] = {"pre_tokenizer": file["pre_tokenizer"],
                                      "normalizer": file["normalizer"],
                                      "ids": [tokenizer.encode(text).ids for text in strings]}
    return result


def main():
    out = (sys.argv[2] if len(sys.argv) > 2
           else os.path.join(os.path.dirname(__file__), "../test/fixtures/tokenizer"))
    os.makedirs(out, exist_ok=True)
    rng = random.Random(2024)

    def write(name, value):
        with open(os.path.join(out, name), "w", encoding="ascii") as file:
            json.dump(value, file, separators=(",", ":"))
            file.write("\n")

    documents = ["".join(sentence(rng) if rng.random() < 0.8 else nasty(rng) for _ in range(15))
                 for _ in range(25)]
    write("corpus.json", documents)
    write("pieces.json", pieces([nasty(rng) for _ in range(300)]))
    strings = [nasty(rng) for _ in range(100)] + [sentence(rng) for _ in range(30)]
    if sys.argv[1] != "-":
        write("gpt2.json", gpt2(sys.argv[1], strings))

    samples = [nasty(rng) for _ in range(100)] + [sentence(rng) for _ in range(30)]
    trained = train(documents)
    trained.save(os.path.join(out, "trained.json"), pretty=False)
    write("trained_ids.json", trained_ids(trained, samples))

    ranks = odd_ranks(rng, documents)
    with open(os.path.join(out, "cl100k_odd.tiktoken"), "wb") as file:
        for token, rank in ranks.items():
            file.write(base64.b64encode(token) + b" %d\n" % rank)
    odd = tiktoken.Encoding("odd", pat_str=PATTERNS["cl100k"], mergeable_ranks=ranks,
                            special_tokens={})
    write("odd_ids.json",
          {"strings": samples, "ids": [odd.encode_ordinary(text) for text in samples]})
    write("published.json",
          published(trained, [text for text in (nasty(rng) for _ in range(150)) if is_old(text)]))


if __name__ == "__main__":
    main()
