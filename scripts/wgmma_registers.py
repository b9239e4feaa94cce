#!/usr/bin/env python3
"""Finds instructions that touch the registers of a wgmma before it has been awaited.

nvdisasm must be installed.

A wgmma reads its left operand from registers, and writes its sums, while other instructions run.
Until a wait for its group (WARPGROUP.DEPBAR in SASS), no instruction may write those registers, nor
read the sums; only further products may add to the same sums. The compiler sees to that if it
understands the program; PTX promises little where registers are used again. This looks at the
result. It follows all paths from each product to the waits that cover it, through loops too.

Exits with status 1 where there is such an instruction, and prints it with its product.
"""
import argparse
import re
import subprocess

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
    target = re.search(r"`\((\.L_x_\d+)\)", at.text)
    if at.opcode.startswith("BRA") and target and target.group(1) in labels:
        # A branch may have its condition as an operand.
        always = not at.is_conditional and at.text.strip().startswith("`")
        return [labels[target.group(1)], *([] if always else following)]
    if at.opcode.startswith(("EXIT", "RET")) and not at.is_conditional:
        return []
    return following


def early_uses(sass):
    """Pairs of a product and an instruction that comes too early, as text, and how many products
    there are."""
    instructions, labels = instructions_of(sass)
    found, count = [], 0
    for i, product in enumerate(instructions):
        if not product.is_product:
            continue
        count += 1
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
    return found, count


def sass_of(cubin):
    """{mangled name of a function: its SASS}"""
    sass = subprocess.run(["nvdisasm", "-c", cubin], capture_output=True, text=True,
                          check=True).stdout
    return {text.split(":", 1)[0].strip(): text for text in sass.split("\n.text.")[1:]}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cubins", nargs="+", metavar="FILE.cubin")
    early = False
    for cubin in parser.parse_args().cubins:
        for name, sass in sass_of(cubin).items():
            found, count = early_uses(sass)
            print(f"{name}: {count} products, {len(found)} early uses")
            for product, use in found:
                print(f"    {product}\n    is awaited later than\n    {use}")
            early = early or bool(found)
    raise SystemExit(1 if early else 0)


if __name__ == "__main__":
    main()
