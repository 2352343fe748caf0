"""What a fit costs: against scikit-learn, for a sweep of k, in memory, and against the machine's own matrix products.

Random rows in the geometry of the default family (24 → 30 layers, 3 KV heads of 64, k = 8). A fit goes from rows in memory to
every coefficient, in the two ways that rows are summed: a Gram for each target layer and kind, or one of all source layers
for all of them. scikit-learn fits one Ridge for each target head and kind, on the same features. Peak memory is that of fresh
processes that read a quarter of a dump, and all of it. Does not know what a mapper is worth.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sklearn.linear_model import Ridge
from threadpoolctl import threadpool_limits
from torch import Tensor

from kvferry.files import sha256_file, write_json
from kvferry.fit.moments import Moments
from kvferry.fit.pair import KINDS, Extent, PairMoments, accumulate
from kvferry.fit.ridge import Penalty, Solver, fit_ridge
from kvferry.fit.rows import layer_columns, width
from kvferry.fit.systems import CutSystems
from kvferry.fit.weights import RowRule
from kvferry.kv.dump import INDEX

SOURCE = {"layers": 24, "kv_heads": 3, "head_dim": 64}
TARGET = {"layers": 30, "kv_heads": 3, "head_dim": 64}
# So many target layers where each costs the same.
FEW = TARGET | {"layers": 2}
K, LAMBDA = 8, 0.01
SWEEP = (1, 2, 4, 6, 8, 10, 12, 16, 20)
CHUNK, SQUARE = 2048, 2048
LENGTH, SEQUENCES_A_SHARD = 128, 8
RECIPE = {"lambda": LAMBDA, "lambda_scale": "token", "rope": "stripped", "support": "all_heads", "dtype": "float32"}

Clock = Callable[[], float]
Part = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """Work that was done: its result, seconds of wall and processor, and seconds by function, with all that it calls."""

    result: Any
    wall: float
    cpu: float
    functions: dict[str, float]

    @staticmethod
    def of(work: Callable[[], Any], clock: Clock) -> Run:
        """Do some work; `clock` measures functions."""
        profile = cProfile.Profile(clock)
        wall, cpu = time.perf_counter(), time.process_time()
        result = profile.runcall(work)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        entries = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
        return Run(result, wall, cpu, {f"{Path(file).stem}.{name}": own[3] for (file, _, name), own in entries})

    @property
    def steps(self) -> dict[str, float]:
        """Seconds of each step of a fit."""
        taken = {
            "products": self.functions.get("moments.add", 0.0),
            "gather": self.functions.get("systems.system", 0.0),
            "factor": self.functions["ridge._factor"],
            "solves": self.functions["ridge.nested"] - self.functions["ridge._factor"],
        }
        return taken | {"rest": max(self.functions.values()) - sum(taken.values())}

    def from_sums(self) -> Run:
        """The same without the products of rows."""
        products = self.steps["products"]
        return Run(None, self.wall - products, self.cpu - products, {})


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8192, help="a multiple of 4096")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--read", metavar="DUMPS", help="only fit on a dump and print the memory before and at the most, in MB"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.read:
        print(*memory_of_fit(Path(options.read), options.rows // LENGTH))
        return
    # On one thread the time of the processor counts, not that of other processes that want it too.
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rate = gemm_rate(clock)
    print(f"{options.rows} rows, {options.threads} thread(s); float64 products {rate:.1f} GFLOP/s; by {clock.__name__}")
    # First, since a process starts with the peak of the one that started it.
    memory(options.rows, options.threads)
    with threadpool_limits(options.threads):
        arithmetic(options.rows, rate, clock)


def gemm_rate(clock: Clock) -> float:
    """GFLOP/s of a square product in float64, the best of five."""
    left, right = torch.randn(2, SQUARE, SQUARE, dtype=torch.float64)
    times = []
    for _ in range(5):
        start = clock()
        left @ right
        times.append(clock() - start)
    return 2e-9 * SQUARE**3 / min(times)


def arithmetic(count: int, rate: float, clock: Clock) -> None:
    """The tables of time, for so many rows."""
    rows = {kind: random_rows(count) for kind in KINDS}
    ranking = [torch.randperm(SOURCE["layers"]).tolist() for _ in range(TARGET["layers"])]
    parts = [part_of(*rows[kind], layer, ranking[layer][:K]) for layer in range(FEW["layers"]) for kind in KINDS]
    apart = Run.of(lambda: fit_apart(parts), clock)
    whole = Run.of(lambda: fit_whole(rows, ranking), clock)
    against_scikit_learn(parts, apart, whole, clock)
    where_time_goes(count, apart, whole, rate)
    solved = sweep(few_layers(whole.result), ranking, clock)
    products = whole.steps["products"] / (TARGET["layers"] * len(KINDS))
    sweep_by_scikit_learn(rows["k"], ranking[0], solved / (FEW["layers"] * len(KINDS)) + products, clock)


def random_rows(count: int) -> Part:
    """Features of all source layers and outputs of all target layers, float32, that depend on each other."""
    x = torch.randn(count, SOURCE["layers"] * width(SOURCE)) + 1
    y = torch.randn(count, TARGET["layers"] * width(TARGET))
    y[:, : x.shape[1]] += x
    return x, y


def part_of(x: Tensor, y: Tensor, layer: int, chosen: list[int]) -> Part:
    """What one target layer is fitted on."""
    return x[:, layer_columns(SOURCE, chosen)], y[:, layer_columns(TARGET, [layer])].contiguous()


def summed(x: Tensor, y: Tensor) -> Moments:
    """Moments of rows, so many at a time as a shard may hold."""
    moments = Moments.empty(x.shape[1], y.shape[1])
    for own in zip(x.split(CHUNK), y.split(CHUNK), strict=True):
        moments.add(*own)
    return moments


def fit_apart(parts: Iterable[Part]) -> list[Tensor]:
    """A Gram for each part; its coefficients, those of all heads together."""
    solver, found = Solver(), []
    for x, y in parts:
        moments, features = summed(x, y), x.shape[1]
        shift = Penalty(LAMBDA, "token").shift(moments.xx.diagonal(), moments.n)
        found.append(solver.nested(moments.xx, moments.xy, [features], shift, "a fit")[features])
    return found


def fit_whole(rows: dict[str, Part], ranking: list[list[int]]) -> PairMoments:
    """One Gram of all source layers for all target layers. Returns the moments."""
    count = len(rows["k"][0])
    moments = PairMoments(SOURCE, TARGET, count, {kind: summed(*own) for kind, own in rows.items()}, None)
    fit_ks(CutSystems(moments, RowRule()), ranking, [K])
    return moments


def fit_ks(systems: CutSystems, ranking: list[list[int]], ks: Sequence[int]) -> None:
    """Mappers of every k."""
    fit_ridge(systems, ranking, {str(k): RECIPE | {"k": k} for k in ks})


def fit_by_scikit_learn(parts: Iterable[tuple[Any, Any]]) -> list[Tensor]:
    """A Ridge for each head; the coefficients of a part `[features, outputs]`."""
    dim, found = TARGET["head_dim"], []
    for x, y in parts:
        heads = (Ridge(alpha=LAMBDA * len(x)).fit(x, y[:, at : at + dim]).coef_ for at in range(0, y.shape[1], dim))
        found.append(torch.cat([torch.from_numpy(own).T for own in heads], dim=1))
    return found


def against_scikit_learn(parts: list[Part], apart: Run, whole: Run, clock: Clock) -> None:
    """Both ways of this package and scikit-learn, on rows in either number format."""
    theirs = {}
    for dtype in (torch.float32, torch.float64):
        arrays = [(x.to(dtype).numpy(), y.to(dtype).numpy()) for x, y in parts]
        theirs[dtype] = Run.of(lambda arrays=arrays: fit_by_scikit_learn(arrays), clock)
    title("scikit-learn, a Ridge a head", "layers", "wall s", "cpu s", "wall a layer", "float32 / it", "float64 / it")
    few, all_ = FEW["layers"], TARGET["layers"]
    ways = [("a Gram a target layer", apart, few), ("one Gram of all layers", whole, all_)]
    ways.append(("that, its sums at hand", whole.from_sums(), all_))
    ways += [(f"scikit-learn {str(dtype).removeprefix('torch.')}", run, few) for dtype, run in theirs.items()]
    for name, run, layers in ways:
        ratios = [both(run, layers, other, few) for other in theirs.values()]
        line(name, layers, f"{run.wall:.2f}", f"{run.cpu:.2f}", f"{run.wall / layers:.3f}", *ratios)
    gaps = [gap(run.result, theirs[torch.float64].result) for run in (apart, theirs[torch.float32])]
    print(
        "ratios of time a layer by wall (by processor); largest difference of coefficients from scikit-learn float64,"
    )
    print(f"relative to the largest: {gaps[0]:.0e} by a Gram a target layer, {gaps[1]:.0e} by scikit-learn float32.")
    print(
        "Sums at hand: a run sums them once a pair, for its heat map, and fits every mapper on the same rows from them"
    )


def gap(found: list[Tensor], exact: list[Tensor]) -> float:
    """Largest difference of coefficients, relative to the largest of each part."""
    pairs = zip(found, exact, strict=True)
    return max(float((own - other).abs().max() / other.abs().max()) for own, other in pairs)


def both(run: Run, layers: int, other: Run, others: int) -> str:
    """How much longer another way takes a layer, by wall and by processor."""
    wall, cpu = (getattr(other, kind) / others / (getattr(run, kind) / layers) for kind in ("wall", "cpu"))
    return f"{wall:.1f} ({cpu:.1f})"


def where_time_goes(count: int, apart: Run, whole: Run, rate: float) -> None:
    """Seconds of each step of both ways, and its rate beside that of float64 products."""
    title("where the time goes", "s", "share", "GFLOP/s", "of float64")
    layers, outputs = TARGET["layers"], width(TARGET)
    for name, run, sums, features, columns, systems in (
        ("a Gram a target layer", apart, FEW["layers"], K * width(SOURCE), outputs, FEW["layers"]),
        ("one Gram of all layers", whole, 1, SOURCE["layers"] * width(SOURCE), layers * outputs, layers),
    ):
        work = {"products": count * (features**2 + 2 * features * columns) * sums} | work_of_systems(systems)
        total = sum(run.steps.values())
        for step, seconds in run.steps.items():
            own = 1e-9 * len(KINDS) * work[step] / seconds if step in work else None
            rates = (f"{own:.1f}", f"{own / rate:.0%}") if own else ("", "")
            line(f"{name}: {step}", f"{seconds:.2f}", f"{seconds / total:.0%}", *rates)


def work_of_systems(systems: int) -> dict[str, float]:
    """Operations of a kind's factors and solves."""
    features = K * width(SOURCE)
    return {"factor": systems * features**3 / 3, "solves": systems * 2 * features**2 * width(TARGET)}


def few_layers(moments: PairMoments) -> PairMoments:
    """The moments of a few target layers."""
    outputs = slice(0, FEW["layers"] * width(FEW))
    full = {
        kind: Moments(own.mean_x, own.mean_y[outputs], own.xx, own.xy[:, outputs], own.yy[outputs], own.n)
        for kind, own in moments.full.items()
    }
    return PairMoments(SOURCE, FEW, moments.rows, full, None)


def sweep(moments: PairMoments, ranking: list[list[int]], clock: Clock) -> float:
    """Every k of a sweep against its largest alone, from moments: of each step the best of three runs, in turns.

    Returns seconds of the sweep.
    """
    systems = CutSystems(moments, RowRule())
    tries = [
        {ks: Run.of(lambda ks=ks: fit_ks(systems, ranking, ks), clock).steps for ks in (SWEEP, SWEEP[-1:])}
        for _ in range(3)
    ]
    runs = {ks: {step: min(own[ks][step] for own in tries) for step in tries[0][ks]} for ks in tries[0]}
    steps = [step for step in runs[SWEEP] if step != "products"]
    title(f"sweep of k, {FEW['layers']} target layers, s", *steps, "in all")
    for ks, taken in runs.items():
        name = "k = " + ", ".join(map(str, ks))
        line(name, *(f"{taken[step]:.2f}" for step in steps), f"{sum(taken.values()):.2f}")
    line("ratio", *[""] * len(steps), f"{sum(runs[SWEEP].values()) / sum(runs[SWEEP[-1:]].values()):.2f}")
    return sum(runs[SWEEP].values())


def sweep_by_scikit_learn(rows: Part, ranked: list[int], ours: float, clock: Clock) -> None:
    """The same sweep by scikit-learn, a Ridge for each head and k, for the keys of one target layer."""
    parts = (part_of(*rows, 0, ranked[:k]) for k in SWEEP)
    theirs = Run.of(lambda: fit_by_scikit_learn((x.numpy(), y.numpy()) for x, y in parts), clock)
    seconds = theirs.cpu if clock is time.process_time else theirs.wall
    title("that sweep for a layer's keys, from rows", "ours, s", "sklearn, s", "ratio")
    line("products are shared by all target layers", f"{ours:.2f}", f"{seconds:.2f}", f"{seconds / ours:.1f}")


def memory(count: int, threads: int) -> None:
    """Peak memory of a fit on all rows and on a quarter of them, read from disk."""
    title(f"memory, {FEW['layers']} target layers", "imported MB", "peak MB", "above import")
    peaks = []
    with tempfile.TemporaryDirectory() as directory:
        for name, geometry in (("source", SOURCE), ("target", FEW)):
            write_dump(Path(directory) / name, geometry, count // LENGTH)
        for rows in (count // 4, count):
            how = ["--rows", str(rows), "--threads", str(threads), "--read", directory]
            done = subprocess.run([sys.executable, __file__, *how], check=True, capture_output=True, text=True)
            before, peak = map(float, done.stdout.split())
            peaks.append((peak, peak - before))
            line(f"{rows} rows", *(f"{own:.0f}" for own in (before, *peaks[-1])))
    line("ratio", "", *(f"{large / small:.2f}" for small, large in zip(*peaks, strict=True)))


def memory_of_fit(dumps: Path, sequences: int) -> tuple[float, float]:
    """Memory before a fit on so many sequences, and at the most, in MB."""
    before = peak_mb()
    moments = accumulate(dumps / "source", dumps / "target", Extent(sequences, 0, "all", 1_000_000))
    ranking = [list(range(SOURCE["layers"]))] * FEW["layers"]
    fit_ks(CutSystems(moments, RowRule()), ranking, [K])
    return before, peak_mb()


def peak_mb() -> float:
    """The most memory of this process so far; Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def write_dump(directory: Path, geometry: dict[str, int], sequences: int) -> None:
    """A dump of random numbers in bfloat16, without rotation, in shards as a model's has them."""
    directory.mkdir()
    shards = []
    for first in range(0, sequences, SEQUENCES_A_SHARD):
        path = directory / f"fit-{first:05d}.safetensors"
        save_file(random_shard(geometry, torch.arange(first, min(first + SEQUENCES_A_SHARD, sequences))), path)
        count = min(SEQUENCES_A_SHARD, sequences - first)
        shards.append({"file": path.name, "side": "fit", "sequences": count, "sha256": sha256_file(path)})
    identity = {"model": directory.name, "tokenizer_sha256": "none"}
    index = {
        "identity": identity,
        "geometry": geometry,
        "calibration": {"length": LENGTH, "stride": 1},
        "shards": shards,
    }
    write_json(directory / INDEX, index)


def random_shard(geometry: dict[str, int], sequences: Tensor) -> dict[str, Tensor]:
    """The tensors of a shard."""
    count, shape = len(sequences) * LENGTH, (geometry["kv_heads"], geometry["head_dim"])
    layers = range(geometry["layers"])
    rows = {f"{kind}.{layer}": torch.randn(count, *shape).bfloat16() for kind in KINDS for layer in layers}
    positions = torch.arange(LENGTH).repeat(len(sequences))
    labels = {"ids": positions, "positions": positions.clone(), "sequences": sequences.repeat_interleave(LENGTH)}
    return rows | labels | {"cos": torch.ones(LENGTH, shape[1]), "sin": torch.zeros(LENGTH, shape[1])}


def title(name: str, *columns: str) -> None:
    """Head of a table."""
    print()
    line(name, *columns)


def line(name: str, *cells: object) -> None:
    """A name and cells in columns."""
    print(f"{name:<44}" + "".join(f"{cell!s:>14}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
