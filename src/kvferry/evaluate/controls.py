"""Controls: carriers that are no fitted mapper, for telling what the hand-off itself does. Know no benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvferry.kv.cache import LayerKV
from kvferry.kv.rope import Rotation


@dataclass(frozen=True)
class Passthrough:
    """The target's own cache, through the same path: rotation taken off and put back. Must answer as the target does."""

    def translate(self, layers: list[LayerKV], source: Rotation, target: Rotation) -> list[LayerKV]:
        """Keys stripped and rotated again, values as they are."""
        plain, turned = source.for_heads(), target.for_heads()
        return [(turned.apply(plain.strip(keys.float())).to(keys.dtype), values) for keys, values in layers]


@dataclass(frozen=True)
class ZeroCache:
    """A cache of zeros with the target's geometry: what the target does with slots that say nothing."""

    layers: int
    kv_heads: int
    head_dim: int

    @staticmethod
    def like(card: dict[str, Any]) -> ZeroCache:
        """With the geometry of a model's card."""
        return ZeroCache(card["layers"], card["kv_heads"], card["head_dim"])

    def translate(self, layers: list[LayerKV], source: Rotation, target: Rotation) -> list[LayerKV]:
        """Zeros for every token."""
        keys = layers[0][0]
        nothing = torch.zeros(
            keys.shape[0], self.kv_heads, keys.shape[2], self.head_dim, device=keys.device, dtype=keys.dtype
        )
        return [(nothing, nothing) for _ in range(self.layers)]
