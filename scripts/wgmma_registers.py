#!/usr/bin/env python3
"""Finds in the SASS of kernels with wgmma what is not ordered with its products and copies.

A wgmma reads its left operand from registers, and writes its sums, while other instructions run.
Until a wait for its group (WARPGROUP.DEPBAR in SASS), no instruction may write those registers, nor
read the sums; only further products may add to the same sums. The compiler sees to that if it
understands the program; PTX promises little where registers are used again. This looks at the
result. It follows all paths, through loops too. It finds:

- early uses: an instruction that touches a product's registers before a wait covers the product;
- products without a fence: an instruction that touches a product's registers, and no wgmma.fence
  (WARPGROUP.ARRIVE) between it, or the kernel's start, and the product;
- barriers or copies that products or the copy engine may not see: no fence.proxy.async
  (FENCE.VIEW.ASYNC) between the initialisation of a barrier (SYNCS.EXCH), or a wait for cp.async
  (DEPBAR of SB0), and the next barrier; with --overwritten NAME, in kernels with that name, none
  between a store to shared memory and a copy to it (UTMALDG).

It does not see what a called function does, nor which bytes stores and products have in common: a
store to shared memory for a product to read would need a fence too, and is not looked at.

Exits with status 1 where there is such an instruction, and prints it with what it is not ordered
with. 2: there is no nvdisasm. 3: a kernel has no product, or a file no kernel.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys

# Instructions whose first operand is not a destination, or whose destination is no register.
WITHOUT_DESTINATION = (
    "ST", "RED", "BAR", "BRA", "EXIT", "SYNCS", "WARPGROUP", "WARPSYNC", "UTMA", "UBLKCP", "FENCE",
    "MEMBAR", "ISETP", "FSETP", "PLOP3", "NOP", "USETMAXREG", "DEPBAR", "ERRBAR", "CCTL", "BSSY",
    "BSYNC", "BREAK", "RET", "CALL", "YIELD", "NANOSLEEP", "LDGSTS", "LDGDEPBAR", "R2UR", "U",
    "ELECT")
MOST_GROUPS = 8  # that a wait may leave


class Instruction:
    def __init__(self, line, predicate, opcode, rest):
        self.line, self.opcode, self.text = line, opcode, rest
        self.is_conditional = bool(predicate)
        self.operands = [operand.strip() for operand in rest.split(",")]
        product = re.match(r"[HQI]GMMA\.64x(\d+)x", opcode)
        self.is_product = bool(product)
        # In fp32 a thread has half as many sums as the result has columns.
        self.sums = registers(self.operands[0], int(product.group(1)) // 2) if product else set()
        self.left = registers(self.operands[1], 4) if product else set()
        self.ends_group = self.is_product and "gsb0" in rest
        wait = re.match(r"gsb0, (0x[0-9a-f]+)", rest.strip())
        self.leaves = int(wait.group(1), 16) if opcode.startswith("WARPGROUP.DEPBAR") else None
        self.written, self.read = set(), set()
        if self.is_product:
            return
        operands = self.operands
        if not opcode.startswith(WITHOUT_DESTINATION):
            # A predicate may stand before the destination: SHFL, and additions with carry.
            while operands and re.match(r"P\w+$", operands[0]):
                operands = operands[1:]
            if operands:
                self.written = registers(operands[0], width(opcode))
            operands = operands[1:]
        for operand in operands:
            self.read |= registers(operand.strip("[]"), width(opcode))


def registers(operand, count=1):
    found = re.match(r"[-!|~]*R(\d+)", operand)
    return set(range(int(found.group(1)), int(found.group(1)) + count)) if found else set()


def width(opcode):
    if ".128" in opcode:
        return 4
    if opcode.startswith("LDSM"):
        return int(opcode[-1]) if opcode[-1].isdigit() else 1
    return 2 if ".64" in opcode or ".WIDE" in opcode else 1


def instructions_of(sass):
    """The instructions of a function, and the index that each label stands for."""
    found, labels = [], {}
    for line in sass.split("\n"):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(found)
        elif match := re.match(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?(\S+)(.*);", line):
            found.append(Instruction(" ".join(line.split()), *match.groups()))
    return found, labels


def next_of(instructions, labels, i):
    """The indices of the instructions that may follow."""
    at = instructions[i]
    following = [i + 1] if i + 1 < len(instructions) else []
    if at.opcode.startswith(("BRA", "BRX", "JMP", "JMX")):
        target = re.search(r"`\((\.L_x_\d+)\)", at.text)
        if not target or target.group(1) not in labels:
            raise SystemExit(f"error: a branch to an unknown place: {at.line}")
        # A branch may have its condition as an operand.
        always = not at.is_conditional and at.text.strip().startswith("`")
        return [labels[target.group(1)], *([] if always else following)]
    if at.opcode.startswith(("EXIT", "RET")) and not at.is_conditional:
        return []
    return following


def early_uses(sass):
    """Pairs of a product and an instruction that comes too early, as text."""
    instructions, labels = instructions_of(sass)
    found = []
    for i, product in enumerate(instructions):
        if not product.is_product:
            continue
        # (index, whether the product's group has ended, groups that have ended since)
        todo, seen = [(i + 1, product.ends_group, 0)], set()
        while todo:
            state = todo.pop()
            j, ended, later = state
            if j >= len(instructions) or state in seen:
                continue
            seen.add(state)
            at = instructions[j]
            if at.leaves is not None and ended and at.leaves <= later:
                continue
            if at.is_product:
                other_sums = at.sums & product.sums and at.sums != product.sums
                if other_sums or at.sums & product.left or at.left & product.sums:
                    found.append((product.line, at.line))
                    continue
                if at.ends_group:
                    ended, later = True, min(later + 1, MOST_GROUPS) if ended else 0
            elif at.written & (product.left | product.sums) or at.read & product.sums:
                found.append((product.line, at.line))
                continue
            todo += [(k, ended, later) for k in next_of(instructions, labels, j)]
    return found


def previous_of(instructions, labels):
    """For each instruction, the indices of those that it may follow."""
    before = [[] for _ in instructions]
    for i in range(len(instructions)):
        for k in next_of(instructions, labels, i):
            if k < len(instructions):
                before[k].append(i)
    return before


def without_fence(sass):
    """Pairs of a product and what touches its registers without a wgmma.fence between them."""
    instructions, labels = instructions_of(sass)
    before, found = previous_of(instructions, labels), []
    for i, product in enumerate(instructions):
        if not product.is_product:
            continue
        todo, seen = [i], set()
        while todo:
            j = todo.pop()
            if j == 0:
                found.append((product.line, "the kernel's start"))
            for k in before[j]:
                at = instructions[k]
                if k in seen or at.opcode.startswith("WARPGROUP.ARRIVE"):
                    continue
                seen.add(k)
                if not at.is_product and (at.written | at.read) & (product.left | product.sums):
                    found.append((product.line, at.line))
                    continue
                todo.append(k)
    return found


BARRIERS = ("SYNCS.ARRIVE", "SYNCS.PHASECHK", "BAR.", "UTMALDG")
FENCE_OF_ENGINES = "FENCE.VIEW.ASYNC"


def without_proxy_fence(sass, is_overwritten=False):
    """Pairs of an instruction and one that may follow it without a fence.proxy.async between them.
    is_overwritten: whether copies arrive where ordinary stores went."""
    instructions, labels = instructions_of(sass)
    rules = [(("SYNCS.EXCH",), "", BARRIERS), (("DEPBAR.LE",), "SB0,", BARRIERS)]
    if is_overwritten:
        rules.append((("STS", "ATOMS"), "", ("UTMALDG",)))
    found = []
    for opcodes, operand, until in rules:
        for i, first in enumerate(instructions):
            if not first.opcode.startswith(opcodes) or operand not in first.text:
                continue
            todo, seen = next_of(instructions, labels, i), set()
            while todo:
                j = todo.pop()
                if j >= len(instructions) or j in seen:
                    continue
                seen.add(j)
                at = instructions[j]
                # Under a condition it may be left out.
                if at.opcode.startswith(FENCE_OF_ENGINES) and not at.is_conditional:
                    continue
                if at.is_product or at.opcode.startswith(until):
                    found.append((first.line, at.line))
                    continue
                todo += next_of(instructions, labels, j)
    return found


def product_count(sass):
    return sum(at.is_product for at in instructions_of(sass)[0])


def faults_of(sass, is_overwritten=False):
    """What is wrong, as lines."""
    return [f"{first}\n    {words}\n    {other}"
            for words, pairs in (
                ("is awaited later than", early_uses(sass)),
                ("has no wgmma.fence between it and", without_fence(sass)),
                ("has no fence.proxy.async between it and",
                 without_proxy_fence(sass, is_overwritten)))
            for first, other in pairs]


def find_nvdisasm(nvcc="nvcc"):
    """Beside nvcc, or on the path; None: it is not installed."""
    found = shutil.which(nvcc)
    folder = os.path.dirname(os.path.realpath(found)) if found else ""
    return shutil.which("nvdisasm", path=folder) or shutil.which("nvdisasm")


def sass_of(cubin, nvdisasm="nvdisasm"):
    """{mangled name of a function: its SASS}"""
    sass = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True,
                          check=True).stdout
    return {text.split(":", 1)[0].strip(): text for text in sass.split("\n.text.")[1:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubins", nargs="+", metavar="FILE.cubin")
    parser.add_argument("--nvcc", default="nvcc", help="beside which nvdisasm may be")
    parser.add_argument("--overwritten", metavar="NAME", help="part of kernels' names")
    args = parser.parse_args()
    nvdisasm = find_nvdisasm(args.nvcc)
    if not nvdisasm:
        print("error: there is no nvdisasm", file=sys.stderr)
        raise SystemExit(2)
    status = 0
    for cubin in args.cubins:
        functions = sass_of(cubin, nvdisasm)
        if not functions:
            print(f"{cubin}: no function")
            status = status or 3
        for name, sass in functions.items():
            faults = faults_of(sass, bool(args.overwritten) and args.overwritten in name)
            count = product_count(sass)
            print(f"{name}: {count} products, {len(faults)} faults")
            for fault in faults:
                print(f"    {fault}")
            status = 1 if faults else status or (0 if count else 3)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
