"""The normal equations of each target layer: cut from the moments of a pair, or summed for its own source layers alone.

A way to have them (`Systems`) makes some target layers ready at a time; then each of their systems can be asked for. Does not
know penalties or how a system is solved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from kvferry.fit.moments import Moments
from kvferry.fit.pair import K_COUPLED, KINDS, PairMoments
from kvferry.fit.rows import Shape, check_match, features, first_sequences, layer_columns, width
from kvferry.fit.weights import RowRule
from kvferry.prepare.placement import usable
from kvferry.progress import bar


class Systems(Protocol):
    """Moments of a target layer's keys or values with some source layers. rows: how many weigh anything."""

    source: Shape
    target: Shape
    groups: list[list[int]]
    rows: int

    def prepare(self, layers: list[int]) -> None:
        """Make one of the `groups` of target layers ready."""
        ...

    def system(self, kind: str, layer: int, chosen: list[int]) -> Moments:
        """Moments of a ready target layer on `chosen` source layers, in that order."""
        ...


class CutSystems:
    """Systems cut from moments over all columns, rows weighed by position. coupled: keys keep their rotation."""

    def __init__(self, moments: PairMoments, rule: RowRule, coupled: bool = False) -> None:
        self.source, self.target = moments.source, moments.target
        self.rows = moments.rows - (rule.dropped(moments.early.positions) if moments.early else 0)
        self.groups = [list(range(self.target["layers"]))]
        keys = K_COUPLED if coupled else "k"
        self._whole = {"k": moments.weighed(keys, rule), "v": moments.weighed("v", rule)}

    def prepare(self, layers: list[int]) -> None:
        """Nothing: all layers are ready."""

    def system(self, kind: str, layer: int, chosen: list[int]) -> Moments:
        """Cut out; the Gram of all layers in order is the whole one, not a copy."""
        outputs = layer_columns(self.target, [layer])
        if chosen != list(range(self.source["layers"])):
            return self._whole[kind].part(layer_columns(self.source, chosen), outputs)
        whole = self._whole[kind]
        return Moments(whole.mean_x, whole.mean_y[outputs], whole.xx, whole.xy[:, outputs], whole.yy[outputs], whole.n)


@dataclass
class SummedSystems:
    """Systems summed in passes over two dumps, for each target layer on the first of its ranked source layers.

    ranked: for each target layer the source layers it may be asked for, best first. groups: target layers of each pass.
    """

    source_dump: Path
    target_dump: Path
    sequences: int
    rule: RowRule
    ranked: list[list[int]]
    groups: list[list[int]]
    coupled: bool = False
    device: str = "cpu"
    rows: int = 0
    _sums: dict[tuple[str, int], Moments] = field(default_factory=dict)

    def __post_init__(self) -> None:
        indices = check_match(self.source_dump, self.target_dump)
        self.source, self.target = (indices[side]["geometry"] for side in ("source", "target"))

    def prepare(self, layers: list[int]) -> None:
        """One pass over the rows for these layers; those of the last pass are forgotten."""
        self._sums = {}  # before the new ones are made, or both would be held
        self.rows, device = 0, usable(self.device)
        self._sums = {
            (kind, layer): Moments.empty(len(self.ranked[layer]) * width(self.source), width(self.target), device)
            for kind in KINDS
            for layer in layers
        }
        with bar(self.sequences, "moments", "seq") as progress:
            for own, other, kept in first_sequences(self.source_dump, self.target_dump, self.sequences):
                self.rows += int(kept.sum()) - self.rule.dropped(other.positions[kept])
                for kind in KINDS:
                    needed = sorted({source for layer in layers for source in self.ranked[layer]})
                    x = {source: features(own, kind, [source], self.coupled)[kept].to(device) for source in needed}
                    for layer in layers:
                        y = features(other, kind, [layer], self.coupled)[kept].to(device)
                        rows = torch.cat([x[source] for source in self.ranked[layer]], dim=1)
                        weights = self.rule.of_layer(other, kind, layer)[kept].to(device)
                        self._sums[kind, layer].add(rows, y, weights)
                progress.update(len(own.sequences[kept].unique()))

    def system(self, kind: str, layer: int, chosen: list[int]) -> Moments:
        """Cut from the layer's own sums."""
        own = self._sums[kind, layer]
        places = [self.ranked[layer].index(source) for source in chosen]
        if places == list(range(len(self.ranked[layer]))):
            return own
        return own.part(layer_columns(self.source, places), slice(None))
