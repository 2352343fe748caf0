"""How rows weigh in a fit: alike, the first positions more, by attention mass, or the first positions not at all.

Weights by position are the same for every layer and for K and V; weights by attention come from the target's dump, one for
each target layer and kind, added over its KV heads (PAPER.md, later work: r_K and r_V). Does not know moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import KvferryError
from kvferry.kv.dump import Shard

ATTENTION = "attention"


@dataclass(frozen=True)
class RowRule:
    """What a recipe says of the rows of its fit: `left_out` first positions of a sequence do not count."""

    row_weights: str = "uniform"
    sink_positions: int = 0
    sink_weight: float = 1.0
    left_out: int = 0

    @staticmethod
    def of(recipe: dict[str, Any]) -> RowRule:
        """The rule of a recipe, equal for recipes that weigh rows alike."""
        dropped = recipe["native_head"] if recipe["head_rows"] == "left_out" else 0
        if recipe["row_weights"] != "sink":
            return RowRule(recipe["row_weights"], left_out=dropped)
        return RowRule("sink", recipe["sink_positions"], recipe["sink_weight"], dropped)

    @property
    def reach(self) -> int:
        """First positions whose rows it does not treat like the others."""
        return max(self.sink_positions, self.left_out)

    def by_position(self, positions: Tensor) -> Tensor:
        """Weights `[rows]` of rows at these positions of their sequences, without attention."""
        weights = torch.ones(len(positions), dtype=torch.float64, device=positions.device)
        weights[positions < self.sink_positions] = self.sink_weight
        weights[positions < self.left_out] = 0
        return weights

    def dropped(self, positions: Tensor) -> int:
        """How many rows at these positions weigh nothing."""
        return int((self.by_position(positions) == 0).sum())

    def of_layer(self, target: Shard, kind: str, layer: int) -> Tensor:
        """Weights `[rows]` of a shard's rows for one target layer and kind k or v.

        Raises:
            KvferryError: attention weights are asked for and the dump has none.
        """
        weights = self.by_position(target.positions)
        if self.row_weights != ATTENTION:
            return weights
        found = target.key_weights if kind == "k" else target.value_weights
        if found is None:
            raise KvferryError("the target's dump has no attention weights; delete it and run again")
        return weights * found[layer].double().sum(1)
