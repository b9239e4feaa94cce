#!/usr/bin/env python3
"""Reports what can be known of the CUDA kernels without a GPU, as Markdown: registers, spills and
shared memory from ptxas; and from a training step on a simulated GPU the bytes that each kernel
moved and the least that it must move, its instructions, sectors per request and the ideal number,
and the degree of bank conflicts. Where nvdisasm is installed, also instructions of the head's
softmax and of the grouped products of a mixture of experts.

    scripts/kernel_report.py --simulator LIBRARIES [--program build/train_gpt] [--nvcc nvcc] \\
        > docs/kernels.md

The steps: one layer of GPT-2 124M (C = 768, 12 heads of 64, vocabulary 50257); one of a Qwen3 of
that width with 4 key/value heads and a hidden layer of 2048, for the kernels that GPT-2 lacks; one
of a mixture (MIXTURE below), for those of experts, windows and sinks. B = 2, T = 512, bf16.

nvdisasm may be on the path or beside nvcc. --hopper checks the kernels for sm_90a and prints their
part alone; without nvdisasm it says what it skipped.

Exits with status 1 where a kernel spills that is not in KNOWN_SPILLS, where a kernel of the mixture
moves more than MUCH times its least and REASONS has no reason, or where a kernel for sm_90a is not
what its table says (check_hopper).
"""
import argparse
import glob
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor

from wgmma_registers import faults_of, find_nvdisasm, product_count, sass_of

os.environ.setdefault("GPUSIM_MEM", "8G")
parser = argparse.ArgumentParser(description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--simulator")
parser.add_argument("--hopper", action="store_true", help="only the kernels for sm_90a")
parser.add_argument("--program", default="build/train_gpt")
parser.add_argument("--nvcc", default="nvcc")
args = parser.parse_args()
nvdisasm = find_nvdisasm(args.nvcc)
if not args.simulator and not args.hopper:
    parser.error("--simulator is missing: the folder of the simulator's libraries")

B, T, C, H, V, HEAD = 2, 512, 768, 12, 50257, 64
M, VP = B * T, (V + 127) // 128 * 128
PARAMETERS = VP * C + T * C + 12 * C * C + 13 * C + 2 * C
U = 2 * M * C  # bytes of B·T·C elements in bf16
H_KV, F, LONG_V = 4, 2048, 128256  # of the Qwen3; the mixture has as many key/value heads
# On average: the second norm of the layer adds what the attention gave to the residual stream.
NORM = (2 * U + 2 * U + 4 * U) / 3
HEADS = 2 * M * (H + H_KV) * HEAD  # bytes of its queries and keys

# The least that a launch must read and write, in bytes. For kernels in no list it depends on the
# data, or they are small second passes.
LEAST = [
    (r"norm: forward_(warps|rows)", NORM), (r"norm_backward: backward_rows", 4 * U),
    (r"tile_forward: forward", 4 * U), (r"tile_backward: backward_keys", 6 * U),
    (r"tile_backward: backward_queries", 6 * U),
    (r"loss_in_shared_memory<bf16, false", 2 * 2 * M * V),
    (r"loss_in_shared_memory<bf16, true", 2 * 2 * M * LONG_V), (r"add_embeddings", 2 * U),
    (r"rope: turn_heads", 2 * HEADS), (r"rope: backward_heads", 3 * HEADS),
    (r"swiglu: forward_kernel", 3 * 2 * M * F),
    (r"swiglu: backward_kernel", 5 * 2 * M * F), (r"residual: add_rows", 3 * 2 * M * C),
]
# The same for all launches of a step.
LEAST_OF_STEP = [(r"update_parameters", 30 * PARAMETERS), (r"sum_squares", 4 * PARAMETERS)]

# The mixture: experts E of width F_E, K for a token, a shared expert as wide behind a gate.
E, K, F_E, WINDOW = 32, 4, 512, 128
R = M * K
QWEN3 = {"family": "qwen3", "n_kv_head": H_KV, "head_size": HEAD, "n_ff": F, "vocab_size": LONG_V}
SHAPE = {"model.family": "gpt_oss", "model.n_kv_head": H_KV, "model.head_size": HEAD,
         "model.vocab_size": 512, "model.n_expert": E, "model.n_expert_per_token": K,
         "model.window": WINDOW, "model.window_pattern": "S", "router.z_loss": 0.001}
MIXTURE = {**SHAPE, "model.n_ff_expert": F_E, "model.n_ff_shared": F_E, "model.shared_gate": "true",
           "router.balance": "loss", "router.level": "sequence"}
# For kernels that it lacks, whose bytes do not depend on the experts' width.
OTHER_MIXTURE = {**SHAPE, "model.n_ff_expert": 64, "model.expert_capacity": 1.25,
                 "model.qk_norm": "width", "router.balance": "bias"}

# The least of each launch in the mixture's step. A row of an operand, a weight and a result count
# once, whichever tile they are in.
ROWS_C, ROWS_F = 2 * R * C, 2 * R * F_E  # bytes of the rows of all experts
UP, DOWN = 2 * E * 2 * F_E * C, 2 * E * F_E * C  # of weights in bf16; gradients have twice as many
UP_BIAS, DOWN_BIAS = 2 * E * 2 * F_E, 2 * E * C
KV, LSE = 2 * M * H_KV * HEAD, 4 * M * H
LEAST_OF_MIXTURE = [
    # The router; then the shared expert's gate, whose rows have one logit.
    (r"route: route_kernel", [4 * M * E + 8 * R, 4 * M + 8 * M]),
    (r"route: backward_kernel", [4 * M * E + 8 * R + 2 * M * E, 4 * M + 8 * M + 2 * M]),
    (r"group_rows: count_kernel", [4 * R]),
    (r"group_rows: place_kernel", [4 * R + 8 * R]),
    # Up, which gathers its rows from the tokens, and down.
    (r"grouped_tile: rows_kernel<false>", [U + UP + UP_BIAS + 2 * ROWS_F,
                                           ROWS_F + DOWN + DOWN_BIAS + ROWS_C]),
    (r"grouped_tile: rows_kernel<true>", [ROWS_C + DOWN + ROWS_F, 2 * ROWS_F + UP + ROWS_C]),
    (r"grouped_tile: sums_kernel", [ROWS_F + ROWS_C + 2 * DOWN, U + 2 * ROWS_F + 2 * UP]),
    (r"grouped_linear: sum_tiles", [ROWS_C, 2 * ROWS_F]),
    (r"grouped_linear: sum_partials", [4 * DOWN_BIAS, 4 * UP_BIAS]),
    # The experts and the shared one; the gradients of the inputs of experts, shared one and gate.
    (r"combine: forward_kernel", [2 * U + ROWS_C + 8 * R, 3 * U + 4 * M,
                                  2 * U + ROWS_C + 4 * R, 3 * U, 3 * U]),
    (r"combine: backward_kernel", [U + 2 * ROWS_C + 12 * R, 3 * U + 8 * M]),
    (r"swiglu: forward_kernel", [3 * ROWS_F, 3 * 2 * M * F_E]),
    (r"swiglu: backward_kernel", [5 * ROWS_F, 5 * 2 * M * F_E]),
    (r"tile_forward: forward", [2 * U + 2 * KV + LSE]),
    (r"tile_backward: backward_queries", [4 * U + 2 * KV + LSE + 2 * LSE]),
    (r"tile_backward: backward_keys", [2 * U + 4 * KV + 2 * LSE]),
    (r"sink_gradient", [2 * LSE]),
    # A norm of queries and keys over their whole width: two numbers for each token, and twice.
    (r"rope: sum_heads<.*false>", [HEADS + 8 * M]),
    (r"rope: sum_heads<.*true>", [2 * HEADS + 8 * M]),
    (r"rope: turn_heads<.*\(NormOver\)2>", [2 * HEADS + 8 * M]),
    (r"rope: backward_width", [3 * HEADS + 16 * M]),
]
# What the mixture's table has, besides.
OF_MIXTURE = r"^(route|group_rows|grouped_tile|grouped_linear|combine|balance): "

MUCH = 1.25
WINDOWS = ("A block has 128 queries, or 128 keys, and reads all tiles of 64 that they see, or that "
           f"see them: with a window of {WINDOW} up to {WINDOW + 127} tokens. So blocks next to "
           f"each other read the same tokens, and the {H // H_KV} query heads of a key/value head "
           "the same keys: the L2 cache can serve them. Tiles outside the window are not read. ")
PARAMETER_READS = ("The simulator also counts reads of the kernel's parameters, which lie in the "
                   "constant cache, where an instruction has their address in a register.")
REASONS = [
    (r"grouped_tile: rows_kernel",
     "A tile of the result has 128 rows and 128 columns and reads its rows and its weights itself: "
     "a row is asked for once for every 128 columns, a weight once for every 128 rows of its "
     "expert or part of them. The order of the tiles (`RowTiles`) lets tiles that run at the same "
     "time share rows and weights, so that the L2 cache can serve them."),
    (r"grouped_tile: sums_kernel",
     "Likewise, both operands are read once for every 128 columns of the other. The gradients, in "
     "fp32, are half of the bytes; each is written once."),
    (r"grouped_linear: sum_tiles",
     "Each thread asks where its tile's rows begin and end. A warp's threads read the same bytes, "
     "which is one sector, but they count for each."),
    (r"grouped_linear: sum_partials",
     "An expert has partial sums for every 128 rows or part of them, where the least counts one; "
     "and each block reads where the experts' rows begin."),
    (r"route: backward_kernel",
     "Each token's warp reads the loads of all experts, 128 bytes that its sequence shares, and "
     "the logits of the chosen experts again."),
    (r"group_rows: place_kernel",
     "A block reads the experts of its pairs twice, to count them and to place them."),
    (r"combine: backward_kernel",
     "The gradient of a token's sum is read for each of its slots. They follow each other, so that "
     "a cache can serve all but the first."),
    (r"tile_(forward|backward): ", WINDOWS + PARAMETER_READS),
    (r"sink_gradient", PARAMETER_READS + " Here they are most of it."),
    (r"rope: ",
     "Each group of lanes reads its token's angles, and each token the weights of all heads, which "
     "all tokens share."),
]

# {kernel: spilled bytes at most, on any architecture}
KNOWN_SPILLS = {
    "embedding: add_long_runs<bf16, 8, IntegerSums>": 8,
    "embedding: add_long_runs<float, 4, IntegerSums>": 8,
    "norm: forward_rows<float, false>": 8,
    "relu_squared: relu_squared_elements<bf16, true>": 16,
    "tile_backward: backward_keys_kernel<64, false>": 40,
    "tile_backward: backward_keys_kernel<64, true>": 52,
}

# The kernels for sm_90a, and what each asks for as dynamic shared memory, in the words of its
# source: {source: {the key of a Tile: a constant}}.
HEADS_OF_WGMMA = (64, 96, 128)
WGMMA_SOURCES = {
    "kernels/attention/wgmma_forward.cu":
        {("forward", head): f"ForwardMemory<{head}>::bytes" for head in HEADS_OF_WGMMA},
    "kernels/attention/wgmma_backward.cu":
        {(key, head): f"{memory}<{head}>::bytes" for head in HEADS_OF_WGMMA
         for key, memory in (("dq", "QueriesMemory"), ("keys", "KeysMemory"))},
    "kernels/experts/grouped_wgmma.cu":
        {("grouped", block_n): f"shared_bytes<{block_n}>" for block_n in (128, 256)},
    "kernels/experts/grouped_fp8_wgmma.cu": {("fp8", 128): "shared_bytes<tile_columns>"}}
# Kernels that sort experts where copies arrive later.
OVERWRITTEN = "sums_kernel"
# What a Hopper GPU can do (H200; H100 has 3.35 TB/s of memory).
SMS, FLOPS, MEMORY_RATE, SHARED_RATE = 132, 989e12, 4.8e12, 33e12
EXPONENTIALS = 16 * SMS * FLOPS / (4096 * SMS)  # 16 in each clock of a multiprocessor, per second
# What share of the time that the busiest unit needs we expect to be the time of a kernel.
EXPECTED = 0.6


def demangled(name):
    """A kernel's name with the types that it is instantiated for."""
    text = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip()
    source = re.search(r"_\d+_([a-z]\w*?)_cu_[0-9a-f]+", name)
    text = re.sub(r"\(anonymous namespace\)::|train_gpt::cuda::|_GLOBAL__N__\w+::", "", text)
    text = text.replace("__nv_bfloat16", "bf16").removeprefix("void ")
    depth, end = 0, len(text)
    for i, letter in enumerate(text):  # up to the argument list
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and i > 0 and not re.match(r"\((bool|int)\)", text[i:]):
            end = i
            break
    text = re.sub(r"\((bool|int)\)", "", text[:end])
    return (source.group(1) + ": " if source else "") + text


ARCHITECTURES = ["90", "100", "120"]


def compile_to(cubin, source, architecture, *options):
    """Compiles a file; returns what ptxas says."""
    command = [args.nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-I.",
               "-DTRAIN_GPT_CUDA", *(["-DTRAIN_GPT_SM90A"] if architecture == "90a" else []),
               "-gencode",
               f"arch=compute_{architecture},code=sm_{architecture}", "-Xptxas", "-v", "-cubin",
               *options, "-o", cubin, source]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise SystemExit(f"{source}, sm_{architecture}: {run.stderr}")
    return run.stderr


def resources_of(architecture, source):
    """{kernel: (registers, bytes of local memory that are spilled and read back or, if none are, of
    arrays in it, static shared bytes)}"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as out:
        return resources_in(compile_to(out.name, source, architecture))


def resources_in(log):
    """resources_of(), from what ptxas said."""
    found = {}
    for entry in re.split(r"Compiling entry function ", log)[1:]:
        name = demangled(re.match(r"'(\S+)'", entry).group(1))
        registers = int(re.search(r"Used (\d+) registers", entry).group(1))
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", entry)))
        # A stack frame without spills: an array whose index is no constant.
        spills = spills or int(re.search(r"(\d+) bytes stack frame", entry).group(1))
        shared = re.search(r"(\d+) bytes smem", entry)
        found[name] = (registers, spills, int(shared.group(1)) if shared else 0)
    return found


def resources():
    """{kernel: what resources_of has, each a list by architecture}"""
    sources = sorted(glob.glob("device/*.cu") + glob.glob("kernels/**/*.cu", recursive=True))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        logs = [[pool.submit(resources_of, architecture, source) for source in sources]
                for architecture in ARCHITECTURES]
        each = [{name: of_kernel for log in logs_of_one
                 for name, of_kernel in log.result().items()} for logs_of_one in logs]
    return {name: tuple([found[name][i] for found in each if name in found] for i in range(3))
            for name in each[0]}


class Tile:
    """What a kernel does for a tile: FLOPs, bytes of shared memory that wgmma reads and copies
    write, exponentials. wgmma reads 64 × 32 bytes of a left operand, unless it is in registers, and
    32 bytes of each column of the right one, for each warpgroup."""

    def __init__(self, kernel, size, older, key, element_bytes=2):
        self.kernel, self.size = kernel, size
        self.older = older  # the tile of the kernel with mma.sync
        self.key = key  # of the prediction, and of the bytes of shared memory
        self.element_bytes = element_bytes
        self.flops = self.traffic = self.exponentials = 0

    def product(self, rows, columns, depth, left_in_registers=False):
        self.flops += 2 * rows * columns * depth
        left = 0 if left_in_registers else 64 * 32
        self.traffic += rows // 64 * depth * self.element_bytes // 32 * (left + columns * 32)
        return self

    def copy(self, rows, columns):
        self.traffic += rows * -(-columns * self.element_bytes // 128) * 128  # panels of 128 bytes
        return self

    def seconds(self):
        """Of each unit, if all multiprocessors compute such tiles."""
        rate = FLOPS * 2 // self.element_bytes  # fp8 is multiplied twice as fast as bf16
        return [self.flops / rate, self.traffic / SHARED_RATE, self.exponentials / EXPONENTIALS]


def text_of(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def tilings_of(path, function):
    """{head size: the numbers of its Tiling or HopperTiling} as a function of a source says."""
    body = re.search(rf"Tiling {function}\(int head.*?\) {{(.*?)\n}}", text_of(path),
                     re.DOTALL).group(1)
    limits = [*map(int, re.findall(r"head <= (\d+)", body)), max(HEADS_OF_WGMMA)]
    tilings = [tuple(map(int, re.findall(r"\d+", numbers)))
               for numbers in re.findall(r"Tiling{([^}]+)}", body)]
    return {head: next(tiling for limit, tiling in zip(limits, tilings, strict=True)
                       if head <= limit) for head in HEADS_OF_WGMMA}


def attention_tiles(function):
    """For each head size: the tile for sm_90a, its stages and held tiles, and the older tile."""
    older = tilings_of("kernels/attention/tile.cuh", function + "_tiling")
    for head, (block_n, stages, held) in tilings_of("kernels/attention/wgmma_tile.cuh",
                                                    f"hopper_{function.removeprefix('backward_')}"
                                                    "_tiling").items():
        # Four warps, and two stages.
        yield head, block_n, stages, held, f"{4 * older[head][0]} × {older[head][1]}, 2 stages"


def older_grouped_tile(source):
    edge, depth, stages = re.search(r"int edge = (\d+), depth = (\d+), stages = (\d+)",
                                    text_of(source)).groups()
    return f"{edge} × {edge}, slices of {depth}, {stages} stages"


def hopper_tiles():
    tiles = []
    for head, block_n, stages, held, older in attention_tiles("forward"):
        tile = Tile(f"`wgmma_forward`, D = {head}", f"128 × {block_n}, {stages} stages of keys and "
                    f"of values, {held} of queries", older, ("forward", head))
        tile.product(128, block_n, head).product(128, head, block_n, True)
        tile.copy(2 * block_n, head).exponentials = 128 * block_n
        tiles.append(tile)
    for head, block_n, stages, held, older in attention_tiles("backward_queries"):
        tile = Tile(f"`wgmma_backward`, dq, D = {head}", f"128 × {block_n}, {stages} stages of "
                    f"keys and values, {held} of queries and dout", older, ("dq", head))
        tile.product(128, block_n, head).product(128, block_n, head)
        tile.product(128, head, block_n, True)
        tile.copy(2 * block_n, head).exponentials = 128 * block_n
        tiles.append(tile)
    for head, block_n, stages, held, older in attention_tiles("backward_keys"):
        tile = Tile(f"`wgmma_backward`, dk and dv, D = {head}",
                    f"128 × {block_n}, {stages} stages of queries and dout, {held} of keys and "
                    "values", older, ("keys", head))
        tile.product(128, block_n, head).product(128, block_n, head)
        tile.product(128, head, block_n, True).product(128, head, block_n, True)
        tile.copy(2 * block_n, head).exponentials = 128 * block_n
        tiles.append(tile)
    wide, narrow = re.search(r"stages = block_n == 256 \? (\d+) : (\d+)",
                             text_of("kernels/experts/wgmma_stages.cuh")).groups()
    for block_n, stages in ((128, narrow), (256, wide)):
        tile = Tile(f"`grouped_wgmma`, 128 × {block_n}", f"slices of 64, {stages} stages",
                    older_grouped_tile("kernels/experts/grouped_tile.cu"), ("grouped", block_n))
        tile.product(128, block_n, 64).copy(128 + block_n, 64)
        tiles.append(tile)
        if block_n == 128:
            fp8 = Tile("`grouped_fp8_wgmma`, 128 × 128", f"slices of 128 codes, {stages} stages",
                       older_grouped_tile("kernels/experts/grouped_fp8.cu"), ("fp8", block_n), 1)
            tiles.append(fp8.product(128, block_n, 128).copy(128 + block_n, 128))
    return tiles


def causal_tiles(T, block_n):
    """Pairs of a tile of 128 and one of block_n that a causal pass visits."""
    return sum(-(-min(row + 128, T) // block_n) for row in range(0, T, 128))


# Forward and backward passes of attention of a layer: B, T, heads, key heads, head size.
ATTENTION_SHAPES = {"GPT-2 124M": (64, 1024, 12, 12, 64), "GPT-2 1558M": (16, 1024, 25, 25, 64),
                    "Llama 3 8B": (1, 8192, 32, 8, 128), "Qwen3 0.6B": (4, 4096, 16, 8, 128)}
# Grouped products: rows, experts, N, K.
GROUPED_SHAPES = {"OLMoE, up": (131072, 64, 2048, 2048), "OLMoE, down": (131072, 64, 2048, 1024)}


def predicted(seconds, moved):
    """Milliseconds, and which unit is the busiest."""
    units = dict(zip(("products", "shared memory", "exponentials"), seconds))
    units["memory"] = moved / MEMORY_RATE
    busiest = max(units, key=units.get)
    return 1e3 * units[busiest] / EXPECTED, busiest


def print_predictions(tiles):
    by_key = {tile.key: tile for tile in tiles}
    print("| shape | pass | GFLOPs computed | busiest unit | its time, ms | predicted, ms |")
    print("|---|---|---|---|---|---|")
    for name, (batch, length, heads, key_heads, head) in ATTENTION_SHAPES.items():
        of_queries = 2 * batch * length * heads * head
        of_keys = 2 * batch * length * key_heads * head
        for title, key, moved in (("forward", "forward", 2 * of_queries + 2 * of_keys),
                                  ("dq", "dq", 4 * of_queries + 2 * of_keys),
                                  ("dk and dv", "keys", 2 * of_queries + 4 * of_keys)):
            tile = by_key[key, head]
            columns = int(re.search(r"128 × (\d+)", tile.size).group(1))
            count = batch * heads * causal_tiles(length, columns)
            ms, busiest = predicted([count * s for s in tile.seconds()], moved)
            print(f"| {name}, B = {batch}, T = {length} | {title} | {count * tile.flops / 1e9:.0f} "
                  f"| {busiest} | {ms * EXPECTED:.3f} | {ms:.2f} |")
    for name, shape in GROUPED_SHAPES.items():
        for product in ("forward", "input gradients", "weight gradients"):
            for kind, block_n in (("grouped", 128), ("grouped", 256), ("fp8", 128)):
                if kind == "fp8" and product == "weight gradients":
                    continue  # they stay in bf16
                tile = by_key[kind, block_n]
                count, moved = grouped_work(product, *shape, block_n, tile.element_bytes)
                ms, busiest = predicted([count * s for s in tile.seconds()], moved)
                title = f"{product} in fp8" if kind == "fp8" else product
                print(f"| {name}, {shape[0]} rows, {shape[1]} experts | {title}, 128 × {block_n} "
                      f"| {count * tile.flops / 1e9:.0f} | {busiest} | {ms * EXPECTED:.3f} "
                      f"| {ms:.2f} |")
    print()


def grouped_work(product, rows, count_experts, n, k, block_n, element_bytes):
    """Slices of tiles of a grouped product, and the bytes of its operands and its result."""
    weights = count_experts * n * k
    slice_depth = 128 // element_bytes
    if product == "weight gradients":
        # The last slice of each expert's rows is half empty on average. Results are in fp32.
        slices = rows / slice_depth + count_experts / 2
        return (slices * -(-n // 128) * -(-k // block_n),
                element_bytes * rows * (n + k) + 4 * weights)
    depth, columns = (k, n) if product == "forward" else (n, k)
    # Half a tile of each expert's rows is empty on average. Results are in bf16.
    row_tiles = rows / 128 + count_experts / 2
    return (row_tiles * -(-columns // block_n) * -(-depth // slice_depth),
            element_bytes * (rows * depth + weights) + 2 * rows * columns)


def compile_hopper(source, shared_bytes):
    """What ptxas says of a source of WGMMA_SOURCES, and faults in its SASS if there is nvdisasm.
    Adds the source's own constants to shared_bytes."""
    names = {f"bytes_of_{i}": key for i, key in enumerate(WGMMA_SOURCES[source])}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, os.path.basename(source))
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'#include "{source}"\nnamespace train_gpt::cuda {{\n' + "".join(
                f'extern "C" __device__ int {name} = {WGMMA_SOURCES[source][key]};\n'
                for name, key in names.items()) + "}\n")
        cubin = path.removesuffix(".cu") + ".cubin"
        log = compile_to(cubin, path, "90a", "--keep", "--keep-dir", folder)
        with open(path.removesuffix(".cu") + ".ptx", encoding="utf-8") as ptx:
            for name, value in re.findall(r"(bytes_of_\d+) = (\d+);", ptx.read()):
                shared_bytes[names[name]] = int(value)
        return log, sass_faults(source, log, sass_of(cubin, nvdisasm)) if nvdisasm else []


def sass_faults(source, log, functions):
    """Faults in the SASS of a source of WGMMA_SOURCES, and kernels of ptxas's log that it lacks."""
    kernels = re.findall(r"Compiling entry function '(\S+)'", log)
    faults = [f"{source}: {demangled(name)} is not in both ptxas's log and the SASS"
              for name in sorted({*kernels} ^ {*functions})]
    for name, sass in functions.items():
        faults += [f"{demangled(name)}: {fault}" for fault in
                   faults_of(sass, OVERWRITTEN in name)]
        if product_count(sass) == 0:
            faults.append(f"{demangled(name)} has no product with wgmma")
    return faults


def check_hopper(found, shared_bytes, warnings, faults):
    """Ends the program where ptxas did not do what the table of tiles says, or where there are
    faults in SASS (wgmma_registers.py)."""
    wrong = [f"{name} has {registers} registers at its start, not 168"
             for name, (registers, _, _) in found.items() if registers != 168]
    wrong += [f"{name} spills {spills} bytes" for name, (_, spills, _) in found.items()
              if spills > KNOWN_SPILLS.get(name, 0)]
    wrong += [f"{constant} of {source}: no value in its PTX" for source in WGMMA_SOURCES
              for key, constant in WGMMA_SOURCES[source].items() if key not in shared_bytes]
    wrong += [f"{' '.join(map(str, key))} needs {bytes_} bytes of shared memory"
              for key, bytes_ in shared_bytes.items() if bytes_ > 227 << 10]
    wrong += [f"ptxas says: {warning}" for warning in warnings]
    wrong += [f"{source} has no kernel" for source in WGMMA_SOURCES
              if not any(name.startswith(os.path.basename(source).removesuffix(".cu") + ": ")
                         for name in found)]
    if not any(OVERWRITTEN in name for name in found):
        wrong.append(f"there is no kernel with {OVERWRITTEN} in its name")
    wrong += faults
    if wrong:
        raise SystemExit("\n".join(wrong))


def hopper_report():
    found, shared_bytes, warnings, faults = {}, {}, [], []
    for source in WGMMA_SOURCES:
        log, of_source = compile_hopper(source, shared_bytes)
        found |= resources_in(log)
        # wgmma that is waited for at once, fences that ptxas adds, and registers that are not
        # given.
        warnings += re.findall(r"\(C7\d+\).*", log)
        faults += of_source
    check_hopper(found, shared_bytes, warnings, faults)
    if not nvdisasm:
        print("skipped: waits and fences of the kernels for sm_90a, without nvdisasm (in CUDA's "
              "toolkit, or the Python package nvidia-cuda-nvdisasm)", file=sys.stderr)
    ordered = ["""No instruction touches a product's registers before it is awaited or without a
        fence, and barriers and awaited cp.async copies come before a proxy fence
        (`scripts/wgmma_registers.py`)."""] if nvdisasm else []
    attention, grouped = [
        re.search(r"producer_registers = (\d+), consumer_registers = (\d+)",
                  text_of(source)).groups()
        for source in ("kernels/attention/wgmma_tile.cuh", "kernels/experts/wgmma_stages.cuh")]
    tiles = hopper_tiles()
    print("\n## Kernels for sm_90a\n")
    paragraph(f"""Attention and grouped products with wgmma have {len(found)} kernels of 384
        threads: a warpgroup that loads and two that multiply 64 rows each. They begin with 168
        registers a thread. `setmaxnreg` then changes this number to the two numbers of the table
        (the warpgroup that loads, the warpgroups that multiply).""")
    items("None spills. ptxas delays no product for want of registers and adds no fence.", *ordered)
    paragraph("The columns:")
    items("""**older**: the tile of the kernel with mma.sync, whose registers are in the other
        tables;""",
          """**shared memory, B**: it is dynamic, and the bytes are the sources' own constants, as
        compiled;""",
          """**MFLOPs, KiB of shared memory traffic**: of a tile (a slice of 64 of grouped
        products). The bytes are what wgmma reads, for each of the two warpgroups, and what
        copies write;""",
          f"""**µs**: the times are those of a multiprocessor's part of the machine:
        {FLOPS / 1e12:.0f} TFLOP/s, in fp8 twice as many, {SHARED_RATE / 1e12:.0f} TB/s of shared
        memory, 16 exponentials a clock. **Calculated, not measured.**""")
    print("| kernel | tile | older | registers | shared memory, B | MFLOPs "
          "| KiB of shared memory traffic | µs: products | shared memory | exponentials |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for tile in tiles:
        times = " | ".join(f"{1e6 * SMS * seconds:.2f}" for seconds in tile.seconds())
        registers = grouped if tile.key[0] in ("grouped", "fp8") else attention
        print(f"| {tile.kernel} | {tile.size} | {tile.older} | {' / '.join(registers)} "
              f"| {shared_bytes[tile.key]} | {tile.flops / 1e6:.2f} | {tile.traffic / 1024:.0f} "
              f"| {times} |")
    print()
    paragraph("Why these sizes:")
    items("""**Scores.** A product of 64 × n × 16 with both operands in shared memory takes n / 2
        clocks and reads 2048 + 32·n bytes: 64 columns take as long to read as to multiply, 128
        columns three quarters of that. So scores are 128 wide where registers allow (the forward
        pass; dq for D = 64) and 64 elsewhere; the second products have their left operand in
        registers, and read half as much.""",
          """**Registers.** Two consumers and one block leave 232 registers a thread, which hold for
        D = 128: 64 sums, 64 scores and 32 packed probabilities (forward); 64 sums, 32 scores, 32
        gradients, 16 packed (dq); 128 sums, 64 and 32 (dk and dv). Heads of 96 take the room of
        128.""",
          """**Stages** are as many as a product that runs beside the next tile's needs, and one
        more; a second held tile lets the next tile's copies start while one is in use.""",
          """**Exponentials.** A forward pass of D = 64 has as many as it has time for: 1024 clocks
        of each for 128 × 128 scores.""",
          """**Grouped products** of 128 × 128 read more than they multiply, products of 128 × 256
        as much. In fp8 a slice has as many bytes and twice as many products, which take as long;
        but its sums are added in fp32, and registers hold both for 128 × 128 alone.""")
    paragraph(f"""Predicted times of a pass over a causal layer: the time of the busiest unit,
        divided by {EXPECTED}, on an H200 (memory {MEMORY_RATE / 1e12} TB/s). Tiles above the
        diagonal are not visited; tiles on it are computed whole. Grouped products move their
        operands and their results once, gradients of weights in fp32. **Predicted, not
        measured.**""")
    print_predictions(tiles)
    paragraph("""Measured since on an H100 (3.35 TB/s, whose products are as fast;
[measurements.md](measurements.md#attention-for-hopper)), as multiples of the predicted times:
forward passes 1.8 and 1.9 with D = 64 and T = 1024, 0.97 (Llama 3 8B) and 1.04 (Qwen3 0.6B) with
D = 128; backward passes, dq and both others together, 1.5, 1.6, 1.3 and 1.1; OLMoE's up
products with 128 × 256 0.95 (forward) and 0.82 (input gradients), with 128 × 128 1.11 and 0.90. So
short sequences of narrow heads are what these kernels are worst at.""")
    paragraph("""Large tensors: `far_elements_test.cpp` computes with tensors of more than 2³¹
        elements of which few are touched.""")
    items("""**Tested**: attention whose sequences, tokens or heads lie so far apart, in all
        operands, results and gradients; grouped products in bf16 of rows beyond 2³¹ elements, and
        of experts whose weights lie there.""",
          """**Not tested**: more than 2³¹ rows of attention, of which its lse and the backward
        pass's statistics have a number for each, B·H·T of them, since the rows of results cannot
        overlap, and so many are more than the simulator can compute; and grouped products in fp8
        of so many codes. In these two cases only the code says that offsets are computed in 64
        bits. B·H and the rows of a head are counted in 32 bits.""")
    paragraph("What to look at first on a GPU:")
    items("""`scripts/first_hour.sh --only hopper`: each of these kernels beside the older one and
        cuDNN.""",
          """With Nsight Compute, per kernel: the tensor pipe's share
        (`sm__inst_executed_pipe_tensor`), and the stall reasons of the consumers' warps. Waits for
        a barrier at `SYNCS` mean that copies come late (more stages, or fewer bytes). Waits at
        `WARPGROUP.DEPBAR` beside an idle tensor pipe mean that the two consumers do not alternate
        (the turns of the forward pass).""",
          """Bank conflicts (`l1tex__data_bank_conflicts_pipe_lsu`): none are expected but where the
        backward pass reads dout to compute its statistics (`compute_stats`), once for a tile of
        queries: eight lanes read two chunks of four rows, which the swizzle puts into four places,
        so that two wait for each other. Stores of results write sectors of 32 bytes.""",
          "Local memory: none.",
          """The blocks' ends: with few tiles a block's last tiles decide (`sm__cycles_active`,
        smallest against largest).""",
          """For D = 64, the share of the special-function units: if it is above 80 %, some
        exponentials are to be computed by polynomials.""", numbers=True)


def together(values):
    """One number, or one per architecture where they differ."""
    return str(values[0]) if len(set(values)) == 1 else " / ".join(map(str, values))


def loops_of(sass):
    """The opcodes of each loop in a function's SASS: from a label to the branch back to it."""
    labels, opcodes = {}, []
    instruction_line = r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)(.*);"
    for line in sass.split("\n"):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label.group(1)] = len(opcodes)
        elif instruction := re.match(instruction_line, line):
            opcodes.append(instruction.group(1))
            target = re.search(r"`\((\.L_x_\d+)\)", instruction.group(2))
            if opcodes[-1].startswith("BRA") and target and target.group(1) in labels:
                yield opcodes[labels[target.group(1)]:]


def count_of(loop, prefix):
    return sum(opcode.startswith(prefix) for opcode in loop)


def softmax_instructions(architecture):
    """Instructions per logit of the passes of loss_in_shared_memory<bf16, false, NoCap>: copy, sum,
    gradient."""
    # (access, what is also in the loop, what is not)
    passes = [("LDGSTS", "LDGSTS", None), ("LDS.128", "MUFU.EX2", "STG"),
              ("STG.E.128", "MUFU.EX2", None)]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        compile_to(cubin.name, "kernels/head_loss.cu", architecture)
        functions = sass_of(cubin.name, nvdisasm)
    function = next(text for name, text in functions.items()
                    if re.search(r"loss_in_shared_memoryI\d+__nv_bfloat16Lb0E\w*NoCap", name))
    found = []
    for access, needed, excluded in passes:
        most = (0, 0)  # accesses and instructions of the loop that is unrolled most
        for loop in loops_of(function):
            if count_of(loop, needed) and not (excluded and count_of(loop, excluded)):
                most = max(most, (count_of(loop, access), len(loop)))
        found.append(most[1] / (8 * most[0]))
    return found


# The same until 2026-11-23, along the path of whole packs; the maximum was then a pass of its own.
SOFTMAX_BEFORE = {"90": (2.6, 8.5, 8.0), "100": (2.0, 8.0, 8.1), "120": (1.8, 8.5, 8.0)}


def product_instructions(architecture):
    """{kernel: (instructions, products with mma.sync)} of the shortest loop of each grouped product
    on tensor cores, which multiplies a slice."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        compile_to(cubin.name, "kernels/experts/grouped_tile.cu", architecture)
        functions = sass_of(cubin.name, nvdisasm)
    found = {}
    for name, text in functions.items():
        loops = [(len(loop), count_of(loop, "HMMA")) for loop in loops_of(text)]
        found[demangled(name)] = min(loop for loop in loops if loop[1] > 0)
    return found


class Counted:
    """What the simulator counted of a kernel."""

    def __init__(self, block):
        def number(pattern):
            return float(re.search(pattern, block).group(1))

        def sectors(what):
            found = re.search(what + r": \d+ bytes, \d+ requests, ([\d.]+) sectors/request "
                              r"\(ideal ([\d.]+)\)", block)
            return float(found.group(1)), float(found.group(2))
        self.launches = int(number(r"launches (\d+)"))
        self.bytes = number(r"global loads: (\d+)") + number(r"global stores: (\d+)")
        self.instructions = number(r"warp instructions (\d+)")
        self.loads, self.stores = sectors("global loads"), sectors("global stores")
        self.conflicts = number(r"bank conflict degree ([\d.]+)")

    def subtract(self, other):
        """Leaves a run's last step. Sectors and conflicts stay those of the whole run."""
        self.launches -= other.launches
        self.bytes -= other.bytes
        self.instructions -= other.instructions


def counted_in_run(steps, changes):
    """{kernel: Counted} of a run of a layer of GPT-2 with these changes."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"run_dir": folder + "/run", "device": "cuda", "model.n_layer": 1,
                    "model.n_head": H, "model.n_embd": C, "model.n_ctx": T, "model.vocab_size": V,
                    "data.train": "synthetic", "data.val": "", "tokenizer.path": "",
                    "batch.micro_batch": B, "batch.sequence_length": T, "batch.tokens_per_step": M,
                    "precision.dtype": "bf16", "schedule.steps": steps, "schedule.tokens": 0,
                    "schedule.warmup_steps": 0, "sampling.every": 0, "kernels.autotune": "off",
                    "kernels.attention": "own", **changes}
        overrides = [word for key, value in settings.items()
                     for word in ("--set", f"{key}={value}")]
        environment = dict(os.environ, LD_LIBRARY_PATH=args.simulator, GPUSIM_STATS="1")
        run = subprocess.run([args.program, "train", "configs/gpt2-124m.json", *overrides],
                             capture_output=True, text=True, env=environment)
    if run.returncode != 0:
        raise SystemExit(run.stderr)
    return {demangled(block.split("\n", 1)[0].strip()): Counted(block)
            for block in run.stderr.split("gpusim stats: ")[1:]}


def statistics(changes):
    """{kernel: Counted} of a step: what a run of two steps counts more than a run of one, so that
    what comes before the first step is not in it."""
    before, found = counted_in_run(1, changes), counted_in_run(2, changes)
    for name, counted in found.items():
        if name in before:
            counted.subtract(before[name])
    return {name: counted for name, counted in found.items()
            if counted.launches > 0 and not name.startswith("cub::")}  # CUDA's own sort


def value_of(table, name):
    return next((value for pattern, value in table if re.search(pattern, name)), None)


def least_of_dense(name, counted):
    least = value_of(LEAST, name)
    return value_of(LEAST_OF_STEP, name) if least is None else least * counted.launches


def least_of_mixture(name, counted):
    least = value_of(LEAST_OF_MIXTURE, name)
    if least is None:
        return None
    if len(least) != counted.launches:
        raise SystemExit(f"{name}: {counted.launches} launches in a step, but LEAST_OF_MIXTURE has "
                         f"{len(least)}: change one of its lists")
    return sum(least)


def ratio(counted, least):
    return counted.bytes / least if least else 0


def millions(number):
    return format(number / 1e6, ".2f" if number >= 1e6 else ".3f")


def paragraph(text):
    print(textwrap.fill(" ".join(text.split()), 100, break_long_words=False,
                        break_on_hyphens=False) + "\n")


def items(*texts, numbers=False):
    """A list, with numbers or without."""
    for number, text in enumerate(texts, 1):
        mark = f"{number}. " if numbers else "- "
        print(textwrap.fill(" ".join(text.split()), 100, break_long_words=False,
                            break_on_hyphens=False, initial_indent=mark,
                            subsequent_indent=" " * len(mark)))
    print()


def print_table(found, least_of):
    print("| kernel | launches | registers | spills | shared B | MB moved | least MB "
          "| M instructions | load efficiency | store efficiency | bank conflicts |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in sorted(found):
        counted, least = found[name], least_of(name, found[name])
        of_kernel = compiled.get(name)
        columns = [f"`{name}`", str(counted.launches),
                   *(map(together, of_kernel) if of_kernel else "–––"),
                   millions(counted.bytes), "" if least is None else millions(least),
                   millions(counted.instructions)]
        columns += ["–" if sectors == 0 else f"{min(100, 100 * ideal / sectors):.0f} %"
                    for sectors, ideal in (counted.loads, counted.stores)]
        columns.append("–" if counted.conflicts == 0 else format(counted.conflicts, ".2f"))
        print("| " + " | ".join(columns) + " |")
    print()


if args.hopper:
    hopper_report()
    raise SystemExit

mixture = {name: counted for name, counted in
           (statistics(OTHER_MIXTURE) | statistics(MIXTURE)).items()
           if re.search(OF_MIXTURE, name) or value_of(LEAST_OF_MIXTURE, name)}
much = {name: ratio(counted, least_of_mixture(name, counted)) for name, counted in mixture.items()}
much = {name: times for name, times in much.items() if times > MUCH}
if unexplained := [name for name in much if value_of(REASONS, name) is None]:
    raise SystemExit("".join(f"{name} moves {much[name]:.2f} times the least that it must move: "
                             "spare the bytes, or add a reason to REASONS\n"
                             for name in unexplained))
dense = statistics({f"model.{key}": value for key, value in QWEN3.items()}) | statistics({})
compiled = resources()
spilled = {name: of_kernel[1] for name, of_kernel in sorted(compiled.items()) if any(of_kernel[1])}

print("# CUDA kernels without a GPU\n")
paragraph(f"""Made by `scripts/kernel_report.py`: registers, spills and static shared memory as
    ptxas gives them for sm_{', sm_'.join(ARCHITECTURES)} (one number where it is the same for all),
    and what a simulated GPU counted in a training step of one layer of GPT-2 124M (C = {C}, {H}
    heads, vocabulary {V}, B = {B}, T = {T}, bf16) and, for kernels that it lacks, in one of a Qwen3
    ({H_KV} key/value heads, hidden layer of {F}, vocabulary {LONG_V}). All launches of
    a step are added up.""")
paragraph("""Bytes are what threads ask for, whether a cache has them or not; a value that all
    threads of a warp read counts for each. The least is what must be read and written once; where
    segments are looked up or rows of weights are read again, threads ask for more. Instructions
    count once for a warp, in PTX. Efficiency is ideal sectors over sectors; a bank conflict degree
    of 1 is none. No times: [measurements.md](measurements.md#one-h100) has measured times. The
    simulator counts the bytes of asynchronous copies to shared memory (attention, grouped products,
    the head, the backward pass of layer norm) but not their sectors, so that load efficiency there
    speaks of the other loads alone.""")
print_table(dense, least_of_dense)

print("## A mixture of experts, windows and sinks\n")
paragraph(f"""A step of one layer with {E} experts of {F_E}, {K} for a token ({R} rows), biases, a
    shared expert of {F_E} with a gate, a balancing loss and a z-loss; {H_KV} key/value heads, a
    window of {WINDOW} and sinks; the other sizes as above. `bias_kernel`, `drop_kernel` and what
    `rope.cu` has are of a step with balancing by biases, a capacity of
    {OTHER_MIXTURE["model.expert_capacity"]} and a norm of queries and keys over their whole width.
    The least of a product counts each row, weight and result once, whichever tiles have it.""")
print_table(mixture, least_of_mixture)
paragraph(f"Why a kernel moves more than {MUCH} times its least:")
reasons = {}
for name in sorted(much):
    reasons.setdefault(value_of(REASONS, name), []).append(f"`{name}` ({much[name]:.1f})")
for reason, names in reasons.items():
    print(textwrap.fill(f"- {', '.join(names)}: {reason}", 100, subsequent_indent="  ",
                        break_long_words=False, break_on_hyphens=False))
if nvdisasm:
    print()
    paragraph("""SASS instructions of the loop in which a warp of a grouped product multiplies a
        slice of 64 (with 128 products of 16×8×16), per product; and how many of a loop's
        instructions are products.""")
    products = [product_instructions(architecture) for architecture in ARCHITECTURES]
    print("| kernel | " + " | ".join(f"sm_{a} | products" for a in ARCHITECTURES) + " |")
    print("|---|" + "---|---|" * len(ARCHITECTURES))
    for name in sorted(products[0]):
        loops = [of_architecture[name] for of_architecture in products]
        print(f"| `{name}` | " + " | ".join(f"{instructions / multiplies:.1f} | "
                                            f"{100 * multiplies / instructions:.0f} %"
                                            for instructions, multiplies in loops) + " |")

print("\n## Spills\n")
names = [f"`{name}` ({together(bytes_)})" for name, bytes_ in spilled.items()]
of_experts = [name for name in compiled if re.search(OF_MIXTURE + r"|sink_gradient: ", name)]
paragraph(f"""Of {len(compiled)} kernels {len(spilled)} spill registers to local memory or have
    arrays there (bytes written and read back): {'; '.join(names) or 'none'}. Of the
    {len(of_experts)} kernels of experts and sinks,
    {sum(name in spilled for name in of_experts) or 'none'} does.""")

hopper_report()

others = sorted(name for name in set(compiled) - set(dense) - set(mixture)
                if not name.startswith("cub::"))
print(f"## Other kernels\n\nKernels that these steps do not use ({len(others)}): registers and "
      "spills.\n")
print("| kernel | registers | spills | shared B |")
print("|---|---|---|---|")
for name in others:
    print(f"| `{name}` | {' | '.join(map(together, compiled[name]))} |")
if nvdisasm:
    print("\n## The head's softmax\n")
    paragraph("""SASS instructions per bf16 logit (`loss_in_shared_memory<bf16, false, NoCap>`):
        the instructions of each loop over a row, from its label to the branch back, over 8 for
        each 16-byte access to the row in it. In a pass with several loops, the one that is unrolled
        most counts. Before: until 2026-11-23, along the path of whole packs.""")
    print("| GPU | copy to shared memory | maximum and sum | gradient | all | before: copy "
          "| maximum and sum | gradient | all |")
    print("|---|---|---|---|---|---|---|---|---|")
    for architecture in ARCHITECTURES:
        counts, before = softmax_instructions(architecture), SOFTMAX_BEFORE[architecture]
        numbers = [*counts, sum(counts), *before, sum(before)]
        print(f"| sm_{architecture} | " + " | ".join(f"{count:.1f}" for count in numbers) + " |")

if worse := [f"{name} spills {together(bytes_)} bytes" for name, bytes_ in spilled.items()
             if max(bytes_) > KNOWN_SPILLS.get(name, 0)]:
    raise SystemExit("\n".join(worse) + "\nGive them fewer values to hold, or change KNOWN_SPILLS")
