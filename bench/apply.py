"""How near applying a mapper comes to the machine's own matrix products, by length and number format, and where the time goes.

Random weights in the geometry of the default family (24 → 30 layers, 3 KV heads of 64, k = 8). Every repeat measures a few
square products (the best counts), the thin one of a target layer (rows × 1536 · 1536 × 192) and `Mapper.translate` one after
another, and takes their ratio, so that what else the machine does weighs on both. Does not know what a mapper is worth.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from torch import Tensor

from kvferry.kv.cache import LayerKV
from kvferry.kv.mapper import CPU_ROWS, Affine, Mapper
from kvferry.kv.rope import Rotation

SOURCE_LAYERS, TARGET_LAYERS, KV_HEADS, HEAD_DIM, K = 24, 30, 3, 64, 8
WIDTH = KV_HEADS * HEAD_DIM
FEATURES = K * WIDTH
SQUARES = (512, 1024, 1536)
DTYPES = (torch.float32, torch.bfloat16)
HEADER = ("dtype", "tokens", "square", "thin", "apply", "of square", "of thin", "strip", "matmul", "rotate", "rest")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1024,4096,8192", help="lengths, separated by commas")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    # On one thread the time of the processor counts, not that of other processes that want it too.
    clock = time.process_time if options.threads == 1 else time.perf_counter
    print(f"{options.threads} thread(s), {clock.__name__}, {options.repeats} repeats; GFLOP/s: median;")
    print("of square, of thin: median (quartiles) over repeats; then the share of the time of apply, measured once")
    print(line(HEADER))
    for dtype in DTYPES:
        mapper = random_mapper().astype(dtype)
        for tokens in map(int, options.tokens.split(",")):
            print(line(row(mapper, tokens, options.repeats, clock)), flush=True)


def random_mapper() -> Mapper:
    """One matrix a layer, its source layers drawn at random, which is the worst for the processor's caches."""

    def maps() -> list[Affine]:
        return [Affine(torch.randn(FEATURES, WIDTH) / math.sqrt(FEATURES), torch.randn(WIDTH)) for _ in selected]

    selected = [torch.randperm(SOURCE_LAYERS)[:K].tolist() for _ in range(TARGET_LAYERS)]
    return Mapper(selected, maps(), maps(), KV_HEADS)


@torch.inference_mode()
def row(mapper: Mapper, tokens: int, repeats: int, clock: Callable[[], float]) -> tuple[str, ...]:
    """One line of the table."""
    layers, table = span(tokens)
    trials = [trial(mapper, layers, table, clock) for _ in range(repeats)]
    square, thin, apply = (median(rates) for rates in zip(*trials, strict=True))
    whole = 2e-9 * mapper.parameters * tokens / apply
    shares = [part / whole for part in stages(mapper, layers, table, clock)]
    return (
        str(mapper.dtype).removeprefix("torch."),
        str(tokens),
        *(f"{rate:.1f}" for rate in (square, thin, apply)),
        *(spread([rates[2] / rates[other] for rates in trials]) for other in (0, 1)),
        *(f"{share:.1%}" for share in (*shares, 1 - sum(shares))),
    )


def trial(
    mapper: Mapper, layers: list[LayerKV], table: Rotation, clock: Callable[[], float]
) -> tuple[float, float, float]:
    """Rates of square products, of the thin one and of apply in GFLOP/s; the mapper's products alone count as its work."""
    tokens = layers[0][0].shape[2]
    square = max(product(size, size, size, mapper.dtype, clock) for size in SQUARES)
    thin = product(tokens, FEATURES, WIDTH, mapper.dtype, clock)
    whole = seconds(lambda: mapper.translate(layers, table, table), clock)
    return square, thin, 2e-9 * mapper.parameters * tokens / whole


def stages(
    mapper: Mapper, layers: list[LayerKV], table: Rotation, clock: Callable[[], float]
) -> tuple[float, float, float]:
    """Seconds of the three parts of `translate`: strip and flatten, multiply, rotate; so many rows at a time as it takes."""
    spent = [0.0, 0.0, 0.0]
    for start in range(0, layers[0][0].shape[2], CPU_ROWS):
        few = slice(start, start + CPU_ROWS)
        some = [(keys[:, :, few], values[:, :, few]) for keys, values in layers]
        turn = Rotation(table.cos[:, few], table.sin[:, few])
        times = [clock()]
        features = mapper.features(some, turn)
        times.append(clock())
        keys = multiply(mapper, *features)
        times.append(clock())
        for part in keys:
            mapper.rotated(part.view(1, -1, KV_HEADS, HEAD_DIM).transpose(1, 2), turn)
        times.append(clock())
        spent = [sum_ + end - begin for sum_, begin, end in zip(spent, times, times[1:], strict=False)]
    return spent[0], spent[1], spent[2]


def multiply(mapper: Mapper, keys: dict[int, Tensor], values: dict[int, Tensor]) -> list[Tensor]:
    """All products of some rows. Returns those that make keys."""
    mapped = []
    for chosen, to_key, to_value in zip(mapper.selected, mapper.keys, mapper.values, strict=True):
        mapped.append(to_key.blocks([keys[layer] for layer in chosen]))
        to_value.blocks([values[layer] for layer in chosen])
    return mapped


def product(rows: int, inner: int, columns: int, dtype: torch.dtype, clock: Callable[[], float]) -> float:
    """Rate of one matrix product in GFLOP/s: the best of three."""
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    return 2e-9 * rows * inner * columns / min(seconds(lambda: left @ right, clock) for _ in range(3))


def span(tokens: int) -> tuple[list[LayerKV], Rotation]:
    """Random keys and values of the source, float32 `[1, kv_heads, tokens, head_dim]`, and the rotation of positions 0, 1, …"""
    shape = (1, KV_HEADS, tokens, HEAD_DIM)
    angles = torch.outer(torch.arange(tokens).float(), 10000 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
    angles = angles.repeat(1, 2)[None]
    layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(SOURCE_LAYERS)]
    return layers, Rotation(angles.cos(), angles.sin())


def seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    """Time of one call."""
    start = clock()
    function()
    return clock() - start


def spread(values: list[float]) -> str:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def line(cells: tuple[str, ...]) -> str:
    """Cells in columns."""
    widths = (9, 7, 8, 8, 8, 18, 18, 8, 8, 8, 8)
    return "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


if __name__ == "__main__":
    main()
