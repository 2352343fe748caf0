"""Moments of a pair, in one pass over both dumps.

Over all heads: the Gram of all source layers and the cross moments with all target layers, for content-space keys and for
values, if that fits the memory. A head at a time: what the probe needs. Rows of the first positions are kept apart as they
are, so that a fit can weigh them or leave them out without another pass. Does not know ridge or selection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvferry.config import Geometry
from kvferry.errors import KvferryError
from kvferry.files import read_json, sha256_file, write_json, written_whole
from kvferry.fit.budget import MB, Sums, fits_full
from kvferry.fit.moments import FIELDS, Moments
from kvferry.fit.rows import Shape, check_match, features, first_sequences, head_columns, source_head, width
from kvferry.fit.weights import ATTENTION, RowRule
from kvferry.kv.dump import Shard
from kvferry.prepare.placement import usable
from kvferry.progress import bar

KINDS = ("k", "v")
K_COUPLED = "k_coupled"
# What can be summed: the kind of cache, and whether keys keep their rotation.
SUMMED = {"k": ("k", False), "v": ("v", False), K_COUPLED: ("k", True)}
PROBED = {"k_rope": K_COUPLED, "k_stripped": "k", "v": "v"}


@dataclass(frozen=True)
class Early:
    """Rows before a position: positions `[m]`; x and y float32 `[m, columns]` by kind."""

    positions: Tensor
    x: dict[str, Tensor]
    y: dict[str, Tensor]

    def moments(self, kind: str, rule: RowRule) -> Moments:
        """Their moments under a rule."""
        return Moments.of(self.x[kind], self.y[kind], rule.by_position(self.positions))


@dataclass(frozen=True)
class PairMoments:
    """full: by what is summed, over all columns, without the early rows; empty where memory is too small.

    heads: by probed kind, one a target head; kinds that are not there follow from `full`.
    source, target: {layers, kv_heads, head_dim}. rows: their number, the early ones included. apart: positions that are early.
    """

    source: Shape
    target: Shape
    rows: int
    full: dict[str, Moments]
    early: Early | None
    heads: dict[str, list[Moments]] = field(default_factory=dict)
    apart: int = 0

    def weighed(self, kind: str, rule: RowRule) -> Moments:
        """Moments of all rows over all columns, weighed by position. kind: one of `full`.

        Raises:
            KvferryError: the rule tells rows apart that were summed together.
        """
        if rule.row_weights == ATTENTION:
            raise KvferryError("moments of a pair know no attention weights; sum the rows again")
        if rule.reach > self.apart:
            raise KvferryError(
                f"moments keep {self.apart} first positions apart, {rule.reach} are asked for; sum them again"
            )
        if self.early is None:
            return self.full[kind]
        out = self.full[kind].copy()
        out.merge(self.early.moments(kind, rule))
        return out

    def of_heads(self, kind: str) -> list[Moments]:
        """For a probed kind and each target head: moments of its source head's features with its own outputs, all layers."""
        if kind in self.heads:
            return self.heads[kind]
        whole = self.weighed(PROBED[kind], RowRule())
        return [whole.part(*columns) for columns in self._columns()]

    def _columns(self) -> Iterator[tuple[Tensor, Tensor]]:
        for head in range(self.target["kv_heads"]):
            own = head_columns(self.source, source_head(head, self.source, self.target), self.source["layers"])
            yield own, head_columns(self.target, head, self.target["layers"])


@dataclass(frozen=True)
class Extent:
    """What to sum: the first `sequences` sequences, rows before position `early` apart, for mappers of at most k layers or all.

    coupled: also keys with their rotation on. memory_mb: for the moments and a solution; over all columns is only summed what
    fits and is no dearer than layer by layer.
    """

    sequences: int
    early: int
    k: int | str
    memory_mb: int
    coupled: bool = False

    def full(self, source: Path, target: Path) -> bool:
        """Whether to sum over all columns. A memory that does not even hold one target layer is for the fit to refuse."""
        indices = check_match(source, target)
        own, other = (Geometry(**indices[role]["geometry"]) for role in ("source", "target"))
        k, kinds = own.layers if self.k == "all" else int(self.k), 2 + self.coupled
        sums = Sums.over(own, other, k, self.sequences, indices["source"]["calibration"], kinds, self.early)
        return fits_full(sums, self.memory_mb * MB)


def accumulate(source: Path, target: Path, extent: Extent, device: str = "cpu") -> PairMoments:
    """Moments over the fit rows of two dumps; products are taken and summed on `device`.

    Raises:
        KvferryError: the dumps are of other tokens, of another tokenizer, too short, or altered, or the device is absent.
    """
    geometry = [check_match(source, target)[side]["geometry"] for side in ("source", "target")]
    sequences, full = extent.sequences, extent.full(source, target)
    summed = [kind for kind in SUMMED if full and (extent.coupled or kind != K_COUPLED)]
    sums = _Sums(geometry[0], geometry[1], extent.early if full else 0, summed, usable(device))
    with bar(sequences, "moments", "seq") as progress:
        for own, other, rows in first_sequences(source, target, sequences):
            sums.take(own, other, rows)
            progress.update(len(own.sequences[rows].unique()))
    return sums.finished()


class _Sums:
    """The running sums of `accumulate`."""

    def __init__(self, source: Shape, target: Shape, early: int, summed: list[str], device: torch.device) -> None:
        self.source, self.target, self.early, self.device = source, target, early, device
        columns = [geometry["layers"] * width(geometry) for geometry in (source, target)]
        per_head = [geometry["layers"] * geometry["head_dim"] for geometry in (source, target)]
        self.full = {kind: Moments.empty(*columns, device) for kind in summed}
        probed = [kind for kind, of in PROBED.items() if of not in summed]
        heads = range(target["kv_heads"])
        self.heads = {kind: [Moments.empty(*per_head, device) for _ in heads] for kind in probed}
        self.kept: list[tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]] = []
        self.rows = 0

    def take(self, own: Shard, other: Shard, rows: Tensor) -> None:
        """Take in the marked rows of two shards."""
        self.rows += int(rows.sum())
        first = rows & (own.positions < self.early)
        x, y = ({kind: self._matrix(shard, kind) for kind in self.full} for shard in (own, other))
        for kind, sums in self.full.items():
            sums.add(x[kind][rows & ~first], y[kind][rows & ~first])
        if bool(first.any()):
            self.kept.append((own.positions[first], _rows(x, first), _rows(y, first)))
        for kind, parts in self.heads.items():
            x_all, y_all = (self._matrix(shard, PROBED[kind])[rows] for shard in (own, other))
            for moments, (features_, outputs) in zip(parts, self._moments()._columns(), strict=True):
                moments.add(x_all[:, features_], y_all[:, outputs])

    def _matrix(self, shard: Shard, kind: str) -> Tensor:
        of, coupled = SUMMED[kind]
        return features(shard, of, list(range(len(shard.keys))), coupled).to(self.device)

    def _moments(self) -> PairMoments:
        return PairMoments(self.source, self.target, self.rows, self.full, None, self.heads, self.early)

    def finished(self) -> PairMoments:
        """The moments of everything taken in, in main memory."""
        early = None
        if self.kept:
            positions, x, y = zip(*self.kept, strict=True)
            early = Early(
                torch.cat(positions),
                *({kind: torch.cat([p[kind] for p in side]) for kind in self.full} for side in (x, y)),
            )
        full = {kind: _to_cpu(moments) for kind, moments in self.full.items()}
        heads = {kind: [_to_cpu(moments) for moments in parts] for kind, parts in self.heads.items()}
        return PairMoments(self.source, self.target, self.rows, full, early, heads, self.early)


def _rows(matrices: dict[str, Tensor], which: Tensor) -> dict[str, Tensor]:
    return {kind: matrix[which].cpu() for kind, matrix in matrices.items()}


def _to_cpu(moments: Moments) -> Moments:
    return Moments(*(getattr(moments, name).cpu() for name in FIELDS), n=moments.n)


def save_moments(moments: PairMoments, path: Path) -> None:
    """Write the moments, and beside them a json with counts, geometry and checksum."""
    parts = dict(moments.full) | {f"{k}.{h}": part for k, all_ in moments.heads.items() for h, part in enumerate(all_)}
    tensors = {f"{name}.{own}": getattr(part, own).contiguous() for name, part in parts.items() for own in FIELDS}
    if moments.early is not None:
        tensors["early.positions"] = moments.early.positions
        for kind in moments.full:
            tensors |= {f"early.{kind}.x": moments.early.x[kind], f"early.{kind}.y": moments.early.y[kind]}
    with written_whole(path) as temporary:
        save_file(tensors, temporary)
    facts = {
        "rows": moments.rows,
        "apart": moments.apart,
        "n": {name: part.n for name, part in parts.items()},
        "source": moments.source,
        "target": moments.target,
        "sha256": sha256_file(path),
    }
    write_json(path.with_suffix(".json"), facts)


def load_moments(path: Path) -> PairMoments:
    """Read what `save_moments` wrote. Tensors are mapped from disk, so only what is used is read.

    Raises:
        KvferryError: the file is missing or altered.
    """
    facts = read_json(path.with_suffix(".json"), "moments")
    if not path.exists() or sha256_file(path) != facts["sha256"]:
        raise KvferryError(f"{path}: missing or altered since it was written; delete it and run again")
    with safe_open(path, "pt") as file:
        parts = {
            name: Moments(*(file.get_tensor(f"{name}.{own}") for own in FIELDS), n=n) for name, n in facts["n"].items()
        }
        full, early = {kind: parts[kind] for kind in SUMMED if kind in parts}, None
        if "early.positions" in file.keys():  # noqa: SIM118 - a file of safetensors is no dict
            x, y = ({kind: file.get_tensor(f"early.{kind}.{side}") for kind in full} for side in ("x", "y"))
            early = Early(file.get_tensor("early.positions"), x, y)
    count = facts["target"]["kv_heads"]
    heads = {kind: [parts[f"{kind}.{head}"] for head in range(count)] for kind in PROBED if f"{kind}.0" in parts}
    return PairMoments(facts["source"], facts["target"], facts["rows"], full, early, heads, facts["apart"])
