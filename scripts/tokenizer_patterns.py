"""How published tokenizers cut text: regular expressions, and the parts of their tokenizer.json
files."""

# Those that build/train_gpt matches by its own code, in the spelling of `regex`, `tokenizers` and
# `tiktoken`: GPT-2's, cl100k's as in tiktoken today, and cl100k's as first published.
PATTERNS = {
    "gpt2": r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""",
    "cl100k": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"""
              r"""| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
    "cl100k_first": r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"""
                    r"""| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
}

QWEN2 = PATTERNS["cl100k_first"].replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""")
TEKKEN = O200K.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def byte_level(own_pattern=False):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
            "use_regex": own_pattern}


def steps(*before, own_pattern=False):
    return {"type": "Sequence", "pretokenizers": [*before, byte_level(own_pattern)]}


NFC = {"type": "NFC"}
# By name: the pre_tokenizer and the normalizer. The last ones are nobody's: they use what the
# engines write differently.
PARTS = {
    "llama3": (steps(split(PATTERNS["cl100k_first"])), None),
    "qwen2": (steps(split(QWEN2)), NFC),
    "o200k": (steps(split(O200K, "Removed", True)), None),
    "deepseek-v3": (steps(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK)),
                    {"type": "Sequence", "normalizers": []}),
    "tekken": (steps(split(TEKKEN)), None),
    "smollm2": (steps({"type": "Digits", "individual_digits": True}, own_pattern=True), None),
    "whole numbers": (steps({"type": "Digits", "individual_digits": False}, own_pattern=True),
                      {"type": "Sequence", "normalizers": [NFC]}),
    "literal": (steps({
        "type": "Split", "pattern": {"String": "."}, "behavior": "Isolated", "invert": False}),
                None),
    "words": (steps(split(r"\w+|[^\w\s]+")), None),
    "spaces": (steps(split(r"(?<=\s)\S|\S(?=\s)|\h{2,}+|[^\S\r\n]+")), NFC),
    "lines": (steps(split(r"^.|.$|\d{2}?x|(?m:<.*>)|\b'\b")), None),
    "empty matches": (steps(split(r"(?=[A-Z])|\d*")), None),
}

# Nobody's patterns, which ask for all that engines and versions of Unicode see differently.
MADE_UP = {
    "scripts": r"\p{Han}+|[\p{Hiragana}\p{Katakana}]+|[^\p{Han}\p{Common}]\p{Inherited}*"
               r"|\p{^Latin}",
    "words and fractions": r"'s|'t| ?\w+| ?[^\s\w]+|\s+(?!\S)|\s+",
    "superscripts in sets": r"[\w²³¹¼½¾]+|[^\w²-¾\s]+|\W",
    "negations": r"[^\P{L}]\P{M}?|\D\S|[\W\d]{2}",
    "looking around": r"(?<=\p{Lu})\p{Ll}|(?<!\p{P})\S(?=\d)|\b.|(?!\p{Alphabetic})\w+",
    "any case": r"(?i)[a-z\p{Lt}]+|'(?:ſ|k|ß|ss)|[^\p{Lower}]\x{345}?",
    "classes": r"[[:punct:]]+|[[:^graph:]]|[[:alpha:]&&[^\p{Ll}]]{2,}+|\p{Punct}|[[:word:]]?\h",
    "pictures": r"\p{Emoji_Modifier_Base}\p{Emoji_Modifier}?"
                r"|\p{Extended_Pictographic}(?:\x{200d}\p{Emoji})*|\p{Emoji}+",
    "categories": r"\p{Cn}+|\p{Co}\p{Cf}?|\p{Mn}+|[\p{Mc}\p{Me}]|\p{Nl}\p{No}*|\p{Sk}"
                  r"|[\p{Pd}\p{Pc}\p{Zs}]+|\p{Lm}\p{Lo}*",
    "lines and words": r"\B.$|\R|\p{ID_Start}\p{XID_Continue}*|\p{White_Space}+\z|(?m:.)",
}
