"""What the moments of a pair cost in memory and arithmetic, and which way of summing them fits a budget.

`full` sums one Gram over all source layers and its cross moments with all target layers, a kind of cache. `per_layer` sums,
for each target layer, a Gram over the source layers that it reads alone; target layers can then be taken in several passes
over the dump. Pure arithmetic from two geometries: does not sum, solve, or know which layers are selected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvferry.config import Geometry
from kvferry.errors import KvferryError

MB = 1_000_000
# As kv.dump writes them, which takes torch to import.
SHARD_SEQUENCES = 8
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

    k_max: source layers that a target layer reads at the most. rows: of the fit; shard_rows are read at a time. kinds: of cache:
    keys, values and perhaps keys with their rotation. early_rows: rows that the full way keeps as they are.
    """

    source: Geometry
    target: Geometry
    k_max: int
    rows: int
    shard_rows: int
    kinds: int = 2
    early_rows: int = 0

    @staticmethod
    def over(
        source: Geometry,
        target: Geometry,
        k_max: int,
        sequences: int,
        calibration: dict[str, Any],
        kinds: int = 2,
        early: int = 0,
    ) -> Sums:
        """Over the first `sequences` of two dumps with this calibration {length, stride}; positions before `early` are kept."""
        shard_rows = rows_in(SHARD_SEQUENCES, calibration)
        early_rows = rows_in(sequences, calibration, early)
        return Sums(source, target, k_max, rows_in(sequences, calibration), shard_rows, kinds, early_rows)

    def bytes(self, way: Way, layers: int) -> int:
        """Bytes held at the most while `layers` target layers are summed and then solved; `full` holds all of them.

        Counted are, in float64, the moments (Gram, cross moments, means, the outputs' squares) of every kind, and the larger of
        what comes on top while a shard is summed and while a system is solved. Not counted: the shards, which are mapped from
        disk, and fitted mappers.
        """
        return self._moments_bytes(way, layers) + max(self._summing_bytes(way), self._solving_bytes(way == "full"))

    def solving_bytes(self, way: Way, layers: int) -> int:
        """Of `bytes` what is held while systems are solved, of moments that are there."""
        return self._moments_bytes(way, layers) + self._solving_bytes(way == "full")

    def _moments_bytes(self, way: Way, layers: int) -> int:
        """The moments, and what is kept beside them."""
        systems, features, outputs = self._systems(way, layers)
        moments = DOUBLE * systems * (features * (features + outputs) + features + 2 * outputs)
        return self.kinds * moments + self._apart_bytes(way)

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

    def _apart_bytes(self, way: Way) -> int:
        """What the full way keeps besides: early rows in float32, and the probe's moments of heads that do not follow from it."""
        if way == "per_layer":
            return 0
        _, features, outputs = self._systems("full", self.target.layers)
        early = SINGLE * self.kinds * self.early_rows * (features + outputs)
        own, other = (geometry.layers * geometry.head_dim for geometry in (self.source, self.target))
        return early + (DOUBLE * self.target.kv_heads * own * (own + other) if self.kinds == 2 else 0)

    def _summing_bytes(self, way: Way) -> int:
        """A shard's rows, their copies in float32 (masked, centred and, a layer at a time, weighed), and what is made of them.

        The full way holds the rows of all kinds, per layer those of one kind. Made are features in float64 for their mean; later
        the products of one system in float64, and with them one in float32, or outputs and their squares in float64.
        """
        rows = min(self.rows, self.shard_rows)
        _, features, outputs = self._systems(way, 1)
        read = self.kinds * (features + outputs) if way == "full" else self.source.layers * _layer_width(self.source)
        copies = (2 if way == "full" else 3) * (features + outputs)
        products = features * features, features * outputs
        made = DOUBLE * sum(products) + max(SINGLE * max(products), 2 * DOUBLE * rows * outputs)
        return SINGLE * rows * (read + copies) + max(DOUBLE * rows * features, made)

    def _solving_bytes(self, cut: bool) -> int:
        """The largest system shifted and its factor; before that it may be cut out, and factors of all layers are remembered."""
        copies = 4 if self.k_max == self.source.layers else 2 + cut
        return copies * DOUBLE * (self.k_max * _layer_width(self.source)) ** 2


def rows_in(sequences: int, calibration: dict[str, Any], before: int | None = None) -> int:
    """Rows of so many sequences in a dump: every `stride`-th of `length` positions, or of the positions below `before`."""
    length = calibration["length"] if before is None else min(before, calibration["length"])
    return sequences * -(-length // calibration["stride"])


def fits_full(sums: Sums, budget_bytes: int) -> bool:
    """Whether to sum over all columns: it fits and costs no more arithmetic than layer by layer."""
    return sums.bytes("full", sums.target.layers) <= budget_bytes and sums.flops("full") <= sums.flops("per_layer")


def choice_of(sums: Sums, budget_bytes: int, *, per_layer_only: bool = False) -> Choice:
    """The way of summing: full where `fits_full` says so, else per layer in as few passes as fit.

    per_layer_only: never full, for rows that are weighed differently a target layer or are not those of the pair's moments.

    Raises:
        KvferryError: the budget does not hold even one target layer.
    """
    layers = sums.target.layers
    if not per_layer_only and fits_full(sums, budget_bytes):
        return Choice("full", 1, layers, sums.bytes("full", layers))
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
