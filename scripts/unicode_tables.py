#!/usr/bin/env python3
"""Writes tokenizer/unicode_tables.cpp: the sets of characters that patterns name, letter case, and
what NFC changes.

    pip install tokenizers==0.23.3 fonttools==4.68.0 unicodedata2==16.0.0
    python3 scripts/unicode_tables.py > tokenizer/unicode_tables.cpp

All of it is asked from Hugging Face's `tokenizers`, because ids must equal theirs. Its parts are of
different Unicode versions: patterns (Oniguruma) know 16.0, NFC (the crate
unicode-normalization-alignments) knows 9.0. The other packages only give names of properties and
the characters worth asking about.
"""
import itertools
import sys

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

import tokenizers
import unicodedata2
from fontTools.unicodedata import Blocks, Scripts, block, script
from tokenizers import Regex, normalizers, pre_tokenizers

# Of long stretches that are all alike, such as ideographs, the ends and some in the middle stand
# for all.
def sample():
    codes = []
    for _, group in itertools.groupby(
            range(0x110000),
            lambda c: (c >> 12, unicodedata2.category(chr(c)), script(chr(c)), block(chr(c)))):
        group = list(group)
        codes += group if len(group) < 600 else group[:8] + group[8:-8:len(group) // 8] + group[-8:]
    return [code for code in codes if not 0xD800 <= code <= 0xDFFF]


CODES = sample()
TEXT = "".join(map(chr, CODES))

CATEGORIES = """
    C Other Cc Control Cf Format Cn Unassigned Co Private_Use Cs Surrogate L Letter LC Cased_Letter
    Ll Lowercase_Letter Lm Modifier_Letter Lo Other_Letter Lt Titlecase_Letter Lu Uppercase_Letter
    M Mark Combining_Mark Mc Spacing_Mark Me Enclosing_Mark Mn Nonspacing_Mark N Number Nd
    Decimal_Number Nl Letter_Number No Other_Number P Punctuation Pc Connector_Punctuation Pd
    Dash_Punctuation Pe Close_Punctuation Pf Final_Punctuation Pi Initial_Punctuation Po
    Other_Punctuation Ps Open_Punctuation S Symbol Sc Currency_Symbol Sk Modifier_Symbol Sm
    Math_Symbol So Other_Symbol Z Separator Zl Line_Separator Zp Paragraph_Separator Zs
    Space_Separator""".split()
BINARY = """
    Any Assigned ASCII AHex ASCII_Hex_Digit Alpha Alphabetic Bidi_C Bidi_Control CI Case_Ignorable
    Cased CWCF Changes_When_Casefolded CWCM Changes_When_Casemapped CWL Changes_When_Lowercased CWT
    Changes_When_Titlecased CWU Changes_When_Uppercased DI Default_Ignorable_Code_Point Dash Dep
    Deprecated Dia Diacritic EBase Emoji_Modifier_Base EComp Emoji_Component EMod Emoji_Modifier
    EPres Emoji_Presentation Emoji Ext Extender ExtPict Extended_Pictographic Gr_Base Grapheme_Base
    Gr_Ext Grapheme_Extend Gr_Link Grapheme_Link Hex Hex_Digit Hyphen IDC ID_Continue IDS ID_Start
    ID_Compat_Math_Continue ID_Compat_Math_Start IDSB IDS_Binary_Operator IDST IDS_Trinary_Operator
    IDSU IDS_Unary_Operator Ideo Ideographic InCB Join_C Join_Control LOE Logical_Order_Exception
    Lower Lowercase Math MCM Modifier_Combining_Mark NChar Noncharacter_Code_Point OAlpha
    Other_Alphabetic ODI Other_Default_Ignorable_Code_Point OGr_Ext Other_Grapheme_Extend OIDC
    Other_ID_Continue OIDS Other_ID_Start OLower Other_Lowercase OMath Other_Math OUpper
    Other_Uppercase Pat_Syn Pattern_Syntax Pat_WS Pattern_White_Space PCM
    Prepended_Concatenation_Mark QMark Quotation_Mark Radical RI Regional_Indicator SD Soft_Dotted
    STerm Sentence_Terminal Term Terminal_Punctuation UIdeo Unified_Ideograph Upper Uppercase VS
    Variation_Selector White_Space WSpace XIDC XID_Continue XIDS XID_Start""".split()
POSIX = (
    "Alnum Alpha ASCII Blank Cntrl Digit Graph Lower Print Punct Space Upper Word XDigit".split())


def outside(pattern, text):
    """Where the stretches of a text that lie in no match of a pattern begin and end."""
    return [place
            for _, place in pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str(text)]


def matched(pattern, text):
    """The characters of a text that lie in matches of a pattern."""
    found, done = "", 0
    for first, last in outside(pattern, text) + [(len(text), 0)]:
        found, done = found + text[done:first], last
    return found


def members(one):
    """The code points that a pattern of one character matches, as runs: how many are outside, then
    inside, then outside, …"""
    places = [0]
    for place in outside("(?:%s)+" % one, TEXT) + [(len(TEXT), len(TEXT))]:
        places += place
    edges = [edge_before(place) for place in places]
    # A stretch outside, and the matches up to the next: runs begin with what is outside.
    result = [b - a for a, b in zip(edges, edges[1:])]
    result = result[1:] if result[0] == 0 else [0] + result
    while result and (len(result) % 2 or result[-1] == 0):
        result.pop()
    return tuple(result)


def edge_before(place):
    """The first code point of the stretch that begins at a place of the text."""
    if place == len(TEXT):
        return 0x110000
    # Surrogates occur in no text.
    assert place == 0 or CODES[place] in (CODES[place - 1] + 1, 0xE000), (
        "a stretch is not all alike at %x" % CODES[place])
    return CODES[place]


def exists(pattern):
    try:
        return bool(Regex(pattern))
    except Exception:
        return False


def runs(codes):
    """The same of a sorted list of code points."""
    result, end = [], 0
    for code in codes:
        if result and code == end:
            result[-1] += 1
        else:
            result += [code - end, 1]
        end = code + 1
    return tuple(result)


def normalized(name):
    return "".join(c for c in name.lower() if c not in " _-")


def table(kind, name, numbers, item=str):
    print("static constexpr %s %s[] = {" % (kind, name))
    line = "   "
    for text in map(item, numbers):
        if len(line) + len(text) + 2 > 100:
            print(line)
            line = "   "
        line += " %s," % text
    print(line + "\n};")


def property_sets():
    """By name as patterns write it, without case, spaces, _ and -. A colon precedes names of
    [:these:]."""
    names = set(CATEGORIES + BINARY + POSIX) | set(Scripts.NAMES.keys()) | set(
        Scripts.NAMES.values())
    names |= {"In_" + block.replace(" ", "_") for block in set(Blocks.VALUES)}
    # In a set: outside of sets, \p{Word} and \w match some more characters (see Oniguruma's words
    # below).
    found = {normalized(name): members(r"[\p{%s}]" % name) for name in names
             if exists(r"\p{%s}" % name)}
    for name in POSIX:
        found[":" + name.lower()] = members("[[:%s:]]" % name.lower())
    for escape, same in ((r"[\d]", ":digit"), (r"[\s]", ":space"), (r"[\h]", ":xdigit"),
                         (r"[\w]", ":word"), (r"\d", ":digit"), (r"\s", ":space"),
                         (r"\h", ":xdigit"), (r"\p{Digit}", "digit"), (r"\p{Punct}", "punct")):
        assert members(escape) == found[same], escape
    found["=word"] = members(r"\w")
    assert found["=word"] == members(r"\p{Word}")
    return found


def letter_case():
    """Groups of characters that (?i) takes for each other, and characters that it takes for
    several."""
    # Python's own tables may be too old for some letters.
    cased = [
        c for c in TEXT
        if unicodedata2.category(c) in ("Lu", "Ll", "Lt") or
           len({c, c.lower(), c.upper(), c.casefold()}) > 1]
    cased = sorted(set(
        "".join(f(c) for c in cased for f in (str, str.lower, str.upper, str.title, str.casefold))))
    text = " ".join(cased)
    groups, several = set(), {}
    for c in cased:
        group = tuple(sorted({*matched("(?i:%s)" % c, text), c}))
        if len(group) > 1:
            groups.add(group)
        fold = c.casefold()
        if len(fold) > 1 and matched(r"\A(?i:%s)\z" % c, fold) == fold:
            several[c] = fold
    grouped = list(itertools.chain(*groups))
    assert len(grouped) == len(set(grouped)), "(?i) is not an equivalence"
    return sorted(groups), several


def changed_by_nfc():
    """The code points that NFC composes, decomposes or reorders; all others are left where they
    are."""
    nfc, active = normalizers.NFC().normalize_str, set()
    for c in map(chr, filter(lambda code: not 0xD800 <= code <= 0xDFFF, range(0x110000))):
        decomposed = unicodedata2.normalize("NFD", c)
        if nfc(c) != c:
            active.add(c)
        if decomposed != c and nfc(decomposed) != decomposed:
            active.update(c, decomposed)
        # Any mark comes before U+0345 and after U+0334, if it is one for this version.
        for marks in ("\u0345" + c, c + "\u0334"):
            if nfc("q" + marks) != "q" + marks:
                active.add(c)
    return [ord(c) for c in sorted(active)]


def main():
    print(
        "// Written by scripts/unicode_tables.py from Hugging Face's tokenizers %s: do not edit." %
        tokenizers.__version__)
    print('// clang-format off\n#include "tokenizer/unicode.h"\n\nnamespace train_gpt {\n')
    found = property_sets()
    numbers = {runs: i for i, runs in enumerate(sorted(set(found.values())))}
    for sequence, number in numbers.items():
        table("uint32_t", "runs_%d" % number, sequence or [0])
    table("NamedRuns", "property_table", sorted(found.items()),
          lambda item: '{"%s", runs_%d}' % (item[0], numbers[item[1]]))
    print("std::span<const NamedRuns> unicode_property_table() { return property_table; }\n")

    groups, several = letter_case()
    table("char32_t", "case_groups", itertools.chain(*([*map(ord, group), 0] for group in groups)))
    print("std::span<const char32_t> unicode_case_groups() { return case_groups; }\n")
    table("LongFold", "several", several.items(),
          lambda item: "{%d, {%s}}" % (ord(item[0]), ", ".join(str(ord(c)) for c in item[1])))
    print("std::span<const LongFold> unicode_long_folds() { return several; }\n")

    table("uint32_t", "nfc_runs", runs(changed_by_nfc()))
    print("std::span<const uint32_t> unicode_nfc_runs() { return nfc_runs; }\n")
    print("}  // namespace train_gpt")


if __name__ == "__main__":
    main()
