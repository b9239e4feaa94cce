#!/usr/bin/env python3
"""Makes the fixtures of how Hugging Face's tokenizers cut texts around every code point, and by
random patterns.

    pip install tokenizers==0.23.3 xxhash unicodedata2==16.0.0
    scripts/pattern_fixtures.py [OUT]       default OUT: test/fixtures/tokenizer

code_points.json      for each way to cut text, published or made up, the parts of a tokenizer.json
                      and a hash for each block of 4,096 code points: of the lengths in bytes (255
                      if longer) of the pieces of texts() with these code points. "nfc": hashes of
                      the same texts in normalisation form C; "composed": a hash of the form C of
                      "decomposed"
random_patterns.json  patterns, and strings with the lengths of their pieces
Takes about ten minutes.
"""
import json
import os
import random
import sys

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

import tokenizers
import unicodedata2
import xxhash
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from tokenizer_patterns import MADE_UP, PARTS, PATTERNS, byte_level, split, steps

BLOCK = 4096
CL100K = PATTERNS["cl100k_first"].replace(r"|\s*[\r\n]+", r"|\s+(?![\s\S])|\s*[\r\n]+")
WAYS = {"gpt2": (byte_level(True), None), "cl100k": (steps(split(CL100K)), None),
        **{name: PARTS[name] for name in ("llama3", "qwen2", "o200k", "deepseek-v3", "tekken",
                                          "smollm2", "whole numbers", "spaces")},
        **{name: (steps(split(pattern)), None) for name, pattern in MADE_UP.items()}}


def texts(block):
    """Texts with the code points of a block: each alone; after a space, a letter, a digit,
    punctuation and itself; between lines.

    In blocks far from assigned characters, each is in one place only.
    """
    codes = [chr(code) for code in range(block * BLOCK, (block + 1) * BLOCK)
             if not 0xD800 <= code < 0xE000]
    if block >= 0x40 and block != 0xE0:
        return ["".join(c + " x7."[i % 4] for i, c in enumerate(codes))]
    return [*codes, "".join(" " + c + "x" + c + "7" + c for c in codes),
            "".join("." + c + "\u0301" + c for c in codes),
            "".join("\n" + c + "\n" + c + c for c in codes)]


def hashed(data):
    return xxhash.xxh3_64_hexdigest(data)[:8]


def code_points():
    blocks = [texts(block) for block in range(0x110000 // BLOCK)]
    result = {"tokenizers": tokenizers.__version__, "ways": {}}
    for name, (pre_tokenizer, normalizer) in WAYS.items():
        file = {"added_tokens": [], "pre_tokenizer": pre_tokenizer, "normalizer": normalizer,
                "model": {"type": "BPE", "vocab": {}, "merges": []}}
        way = Tokenizer.from_str(json.dumps(file))
        # The byte alphabet of ByteLevel has a character for each byte.
        hashes = [
            hashed(bytes(min(len(piece), 255) for text in block
                         for piece, _ in way.pre_tokenizer.pre_tokenize_str(
                             way.normalizer.normalize_str(text) if way.normalizer else text)))
            for block in blocks]
        result["ways"][name] = {"pre_tokenizer": pre_tokenizer, "normalizer": normalizer,
                                "hashes": "".join(hashes)}
        print(name, flush=True)
    nfc = normalizers.NFC().normalize_str
    result["nfc"] = "".join(hashed("".join(map(nfc, block)).encode()) for block in blocks)
    parts = [unicodedata2.normalize("NFD", chr(c))
             for c in [*range(0xAC00), *range(0xAC00, 0xAD00, 7), *range(0xF900, 0x20000)]]
    result["decomposed"] = " ".join(part for part in parts if len(part) > 1)
    result["composed"] = hashed(nfc(result["decomposed"]).encode())
    return result


class Patterns:
    """Random patterns, made of what patterns of tokenizers are made of."""

    CHARACTERS = [
        *"\\abstSKk'1 .\n\r_-\u00e9\u00c9\u00df\u1e9e\ufb01\u017f\u212a\u00b2\u00bd\u4e2d\u3002"
         "\u30a2\u30fc\u0301\u0345\u24b6\u24d0\u2163",
        *"\u0130\u0131\U0001f6dc\u200d\u180e\u00a0\u2028\x85\u03a3\u03c2\u0149\u1fb3\u03b1\u03b9"
         "\U00010d50\U00010d70\u0663\x0b\U000e0061"]
    PROPERTIES = ["L", "Lu", "Ll", "M", "N", "Nd", "P", "S", "Z", "Han", "Greek", "Latin",
                  "Alphabetic", "Word", "Punct", "Emoji", "Katakana", "^L", "^Han", "Upper",
                  "Common", "Cn", "In_Hiragana", "LC", "ExtPict"]

    def __init__(self, rng):
        self.rng = rng

    def literal(self):
        c = self.rng.choice(self.CHARACTERS)
        if self.rng.random() < 0.1:
            return "\\x{%x}" % ord(c)
        return ("\\" + c if c in "\\^$.|?*+()[]{}-&#"
                else {"\n": "\\n", "\r": "\\r", "\x0b": "\\v"}.get(c, c))

    def one(self):
        if self.rng.random() < 0.5:
            return "\\%s{%s}" % (self.rng.choice("pP"), self.rng.choice(self.PROPERTIES))
        return "\\" + self.rng.choice("wWdDsShH")

    def set(self, depth=0):
        parts = []
        for _ in range(self.rng.randint(1, 4)):
            kind = self.rng.random()
            if kind < 0.4:
                parts.append(self.literal())
            elif kind < 0.5:
                parts.append("\\x{%x}-\\x{%x}" %
                             tuple(sorted(map(ord, self.rng.choices(self.CHARACTERS, k=2)))))
            elif kind < 0.75:
                parts.append(self.one())
            elif kind < 0.85:
                parts.append("[:%s:]" % self.rng.choice(
                    ["alpha", "punct", "word", "digit", "^space", "upper", "graph"]))
            elif kind < 0.93 and depth < 2:
                parts.append(self.set(depth + 1))
            elif parts:
                parts.append("&&" + self.literal())
        return "[" + self.rng.choice(["", "", "^"]) + ("".join(parts) or self.literal()) + "]"

    def atom(self, depth):
        kind = self.rng.random()
        if kind < 0.3 or (kind > 0.8 and depth > 1):
            return "".join(self.literal() for _ in range(self.rng.randint(1, 3)))
        if kind < 0.5:
            return self.one()
        if kind < 0.72:
            return self.set()
        if kind < 0.78:
            return self.rng.choice([".", r"\R", r"\N", r"\O"])
        if kind < 0.9:
            return self.rng.choice(["(?:", "(", "(?i:", "(?m:", "(?>", "(?<name>", "(?-i:",
                                    "(?:(?i)"]) + self.pattern(depth + 1) + ")"
        return "(?:" + self.rng.choice([r"\b", r"\B", "^", "$", r"\z", "(?<=%s)" % self.one(),
                                        "(?<!%s)" % self.set(), "(?=%s)" % self.pattern(2),
                                        "(?!%s)" % self.one()]) + self.literal() + ")"

    def pattern(self, depth=0):
        counts = ["", "", "", "", "", "*", "+", "?", "*?", "+?", "??", "++", "*+", "{2}", "{1,3}",
                  "{,2}", "{2,}", "{1,2}?", "{2}?", "{1,2}+"]
        branches = ["".join(self.atom(depth) + self.rng.choice(counts)
                            for _ in range(self.rng.randint(1, 3)))
                    for _ in range(self.rng.randint(1, 2 if depth else 3))]
        return ("" if depth else self.rng.choice(["", "", "", "(?i)"])) + "|".join(branches)

    def string(self):
        return "".join(self.rng.choice(self.CHARACTERS) for _ in range(self.rng.randint(1, 25)))


def random_patterns(rng):
    result, made = [], Patterns(rng)
    while len(result) < 300:
        pattern = made.pattern()
        strings = [made.string() for _ in range(4)]
        try:
            cut = pre_tokenizers.Split(Regex(pattern), "isolated")
        except Exception:
            continue  # not a pattern for Oniguruma
        pieces = [[len(piece.encode()) for piece, _ in cut.pre_tokenize_str(text)]
                  for text in strings]
        result.append({"pattern": pattern, "strings": strings, "pieces": pieces})
    return {"tokenizers": tokenizers.__version__, "patterns": result}


def main():
    out = (sys.argv[1] if len(sys.argv) > 1
           else os.path.join(os.path.dirname(__file__), "../test/fixtures/tokenizer"))
    for name, make in (("random_patterns.json", lambda: random_patterns(random.Random(36))),
                       ("code_points.json", code_points)):
        with open(os.path.join(out, name), "w", encoding="utf-8") as file:
            json.dump(make(), file, separators=(",", ":"), ensure_ascii=False)
            file.write("\n")


if __name__ == "__main__":
    main()
