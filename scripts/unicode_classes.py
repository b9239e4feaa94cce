#!/usr/bin/env python3
"""Writes tokenizer/unicode_classes.cpp: the letters, numbers and white space of one Unicode version.

    pip install unicodedata2==16.0.0
    python3 scripts/unicode_classes.py > tokenizer/unicode_classes.cpp

The version is the one that the reference tokenizers (Hugging Face `tokenizers`, OpenAI `tiktoken`) are built with.
Taken from a package of fixed version, because Python's own `unicodedata` changes from system to system.
"""
import sys

if sys.argv[1:] == ["--help"]:
    sys.exit(print(__doc__))

import unicodedata2

HEADER = """\
// Written by scripts/unicode_classes.py from Unicode {version}: do not edit.
// clang-format off
#include "tokenizer/unicode_classes.h"

namespace train_gpt {{
"""


def ranges(belongs):
    found = []
    for code in range(0x110000):
        if not belongs(code):
            continue
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return found


def category(code):
    return unicodedata2.category(chr(code))


CLASSES = {
    "letter_ranges": ("general category L", lambda code: category(code)[0] == "L"),
    "number_ranges": ("general category N", lambda code: category(code)[0] == "N"),
    # The property White_Space: all separators, and these control characters.
    "space_ranges": ("property White_Space",
                     lambda code: category(code)[0] == "Z" or code in (9, 10, 11, 12, 13, 0x85)),
}


def main():
    print(HEADER.format(version=unicodedata2.unidata_version))
    for name, (what, belongs) in CLASSES.items():
        found = ranges(belongs)
        print("// %s: %d code points" % (what, sum(last - first + 1 for first, last in found)))
        print("static constexpr CodePointRange %s_table[] = {" % name)
        line = "   "
        for first, last in found:
            item = " {0x%x, 0x%x}," % (first, last)
            if len(line) + len(item) > 100:
                print(line)
                line = "   "
            line += item
        print(line)
        print("};")
        print("std::span<const CodePointRange> %s() { return %s_table; }\n" % (name, name))
    print("}  // namespace train_gpt")


if __name__ == "__main__":
    main()
