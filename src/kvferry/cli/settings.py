"""What a first run of a pair should ask for: k, calibration, memory and samples by rule, from the shapes of the two caches.

Does not know files or how a config is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvferry.config import Geometry
from kvferry.errors import KvferryError
from kvferry.fit.budget import MB, Sums
from kvferry.planner import PAPER_RECIPE, Plan, Wish, plan

KS, HEADLINE = (1, 2, 4, 8, 16), 8
# Features a row, as in the default run; the paper has 0.064.
P_OVER_N = 0.125
FEWEST_SEQUENCES, MOST_SEQUENCES = 24, 500
LENGTH, PREFIX, SCORED = 512, 256, 128
# The least that perplexity chunks and calibration make sense with.
FEWEST_POSITIONS = 64
CORPUS = "qasper"
# By device. Memory is that of the fit, unless its largest k needs more.
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
MEMORY_MB, MEMORY_STEP_MB = {"cpu": 3000, "cuda": 16000}, 500


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for; None leaves the choice to the rules."""

    k: tuple[int, ...] | None = None
    sequences: int | None = None
    items: int = 100
    device: str = "cpu"
    dtype: str | None = None


@dataclass(frozen=True)
class Settings:
    """What a run asks for.

    ks: numbers of source layers that are compared; headline: the one that answers everything. sequences, held_out: of
    calibration, of `length` tokens. prefix, scored: tokens of a perplexity chunk. items: of a benchmark. memory_mb: for the fit,
    whose largest k needs least_mb. identity_mb: what the target's map to itself would take.
    """

    ks: tuple[int, ...]
    headline: int
    sequences: int
    held_out: int
    length: int
    prefix: int
    scored: int
    items: int
    device: str
    dtype: str
    memory_mb: int
    least_mb: int
    identity_mb: int

    @property
    def calibration(self) -> dict[str, Any]:
        """As a config says it."""
        return {"sequences": self.sequences, "held_out": self.held_out, "length": self.length, "stride": 1}

    @property
    def with_identity(self) -> bool:
        """Whether the memory of the fit holds the target's map to itself, which the controls make."""
        return self.identity_mb <= self.memory_mb


def settings_for(source: Geometry, target: Geometry, positions: float, wanted: Wanted) -> Settings:
    """The settings for a pair; positions: of the model that has fewer.

    Raises:
        KvferryError: a k is beyond the source's layers, or there are too few positions.
    """
    if positions < FEWEST_POSITIONS:
        raise KvferryError(
            f"a model has {positions} positions only; a run needs {FEWEST_POSITIONS}; choose another model"
        )
    ks, kind = _ks(source, wanted.k), wanted.device.partition(":")[0]
    headline = _headline(ks, source.layers)
    length = int(min(LENGTH, positions))
    sequences = wanted.sequences or _sequences(headline * source.kv_heads * source.head_dim, length)
    rows = {"length": length, "stride": 1}
    most = max(Sums.over(source, target, k, sequences, rows).bytes("per_layer", 1) for k in ks)
    identity = Sums.over(target, target, target.layers, sequences, rows).bytes("full", target.layers)
    return Settings(
        ks=ks,
        headline=headline,
        sequences=sequences,
        held_out=max(1, sequences // 8),
        length=length,
        prefix=int(min(PREFIX, positions / 2)),
        scored=int(min(SCORED, positions / 4)),
        items=wanted.items,
        device=wanted.device,
        dtype=wanted.dtype or DTYPES[kind],
        memory_mb=max(MEMORY_MB[kind], MEMORY_STEP_MB * math.ceil(most / MB / MEMORY_STEP_MB)),
        least_mb=math.ceil(most / MB),
        identity_mb=math.ceil(identity / MB),
    )


def _ks(source: Geometry, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Powers of two up to the layers there are, or what is asked for, in order."""
    if asked is None:
        return tuple(k for k in KS if k <= source.layers)
    if max(asked) > source.layers:
        raise KvferryError(
            f"--k: {max(asked)} is more than the {source.layers} layers of the source; use at most {source.layers}"
        )
    return tuple(sorted(set(asked)))


def _headline(ks: tuple[int, ...], layers: int) -> int:
    """The largest of at most 8 and at most half the layers; else the smallest."""
    return max((k for k in ks if k <= min(HEADLINE, layers / 2)), default=ks[0])


def _sequences(features: int, length: int) -> int:
    """So many that there are P_OVER_N features a row, within bounds."""
    return min(MOST_SEQUENCES, max(FEWEST_SEQUENCES, math.ceil(features / P_OVER_N / length)))


def plan_for(source: Geometry, target: Geometry, settings: Settings, k: int) -> Plan:
    """What the paper's recipe with this k needs in a run with these settings."""
    recipe = PAPER_RECIPE | {"k": k, "sequences": settings.sequences, "corpus": CORPUS}
    how, count = settings.calibration, settings.sequences
    # A run that also weighs rows differently sums over all columns, if that fits its memory.
    whole, apart = (Sums.over(source, target, most, count, how) for most in (source.layers, k))
    wish = Wish(
        "", None, f"k = {k}", source, target, recipe, how, settings.dtype, whole, apart, settings.memory_mb * MB
    )
    return plan(wish)
