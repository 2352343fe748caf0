"""What the moments of a pair cost in memory and arithmetic, and which way of summing them fits a budget.

`full` sums one Gram over all source layers and its cross moments with all target layers, a kind of cache. `per_layer` sums,
for each target layer, a Gram over the source layers that it reads alone; target layers can then be taken in several passes
over the dump. Pure arithmetic from two geometries: does not sum, solve, or know which layers are selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvferry.config import Geometry
from kvferry.errors import KvferryError

MB = 1_000_000
CHUNK_ROWS = 4096
DOUBLE, SINGLE = 8, 4

Way = Literal["full", "per_layer"]


@dataclass(frozen=True)
class Choice:
    """How to sum: the way, passes over the dump, target layers of one pass, and bytes held at the most."""

    way: Way
    passes: int
    layers_a_pass: int
    bytes: int


@dataclass(frozen=True)
class Sums:
    """The moments of a pair.

    k_max: source layers that a target layer reads at the most. rows: of the fit. kinds: of cache (keys and values).
    """

    source: Geometry
    target: Geometry
    k_max: int
    rows: int
    kinds: int = 2

    def bytes(self, way: Way, layers: int) -> int:
        """Bytes held at the most while `layers` target layers are summed and then solved; `full` holds all of them.

        Counted are, in float64, the moments (Gram, cross moments, means, the outputs' squares) of every kind; of one chunk the
        products of one system in float32 and float64, before they are added; for one solution the shifted copy of a system
        `[p_k, p_k]` and its factor in float64; and in float32 one kind of a chunk of at most 4,096 rows of both models. All
        at once, though not all are needed at one time. Not counted: the shard as it was read, the probe's moments of
        single heads, and fitted mappers.
        """
        systems, features, outputs = self._systems(way, layers)
        products = features * (features + outputs)
        moments = DOUBLE * (products + features + 2 * outputs)
        return (
            self.kinds * systems * moments + (SINGLE + DOUBLE) * products + self._solution_bytes() + self._chunk_bytes()
        )

    def flops(self, way: Way) -> int:
        """Floating-point operations of all sums: rows·p² a symmetric Gram `[p, p]`, 2·rows·p·q its cross moments `[p, q]`."""
        systems, features, outputs = self._systems(way, self.target.layers)
        return self.kinds * systems * self.rows * (features**2 + 2 * features * outputs)

    def _systems(self, way: Way, layers: int) -> tuple[int, int, int]:
        """(systems of a kind, features of each, outputs of each)."""
        width, outputs = _layer_width(self.source), _layer_width(self.target)
        if way == "full":
            return 1, self.source.layers * width, self.target.layers * outputs
        return layers, self.k_max * width, outputs

    def _solution_bytes(self) -> int:
        """The largest system, shifted, and its factor."""
        return 2 * DOUBLE * (self.k_max * _layer_width(self.source)) ** 2

    def _chunk_bytes(self) -> int:
        """Rows of all layers of both models, of one kind."""
        _, features, outputs = self._systems("full", self.target.layers)
        return SINGLE * min(self.rows, CHUNK_ROWS) * (features + outputs)


def choose(
    source: Geometry,
    target: Geometry,
    k_max: int,
    rows: int,
    budget_bytes: int,
    *,
    kinds: int = 2,
    per_layer_only: bool = False,
) -> Choice:
    """The way of summing: full where it fits and costs no more arithmetic, else per layer in as few passes as fit.

    kinds: of cache that are summed. per_layer_only: never full, for moments whose rows are weighed differently a target layer.

    Raises:
        KvferryError: the budget does not hold even one target layer.
    """
    sums, layers = Sums(source, target, k_max, rows, kinds), target.layers
    full = sums.bytes("full", layers)
    if not per_layer_only and full <= budget_bytes and sums.flops("full") <= sums.flops("per_layer"):
        return Choice("full", 1, layers, full)
    passes = _fewest_passes(sums, budget_bytes)
    a_pass = -(-layers // passes)
    return Choice("per_layer", passes, a_pass, sums.bytes("per_layer", a_pass))


def _fewest_passes(sums: Sums, budget_bytes: int) -> int:
    """Passes over the dump, each with as many target layers as the budget holds."""
    fixed, least = sums.bytes("per_layer", 0), sums.bytes("per_layer", 1)
    if budget_bytes < least:
        raise KvferryError(
            f"fit.memory_mb: {budget_bytes // MB} MB is too little; moments on {sums.k_max} source layers and their solution "
            f"need at least {-(-least // MB)} MB, for one target layer at a time; raise it to that, or use a smaller k"
        )
    held = (budget_bytes - fixed) // (least - fixed)
    return -(-sums.target.layers // held)


def _layer_width(geometry: Geometry) -> int:
    """Numbers of a token in one layer, keys or values."""
    return geometry.kv_heads * geometry.head_dim
