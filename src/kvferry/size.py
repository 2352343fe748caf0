"""How many numbers a mapper holds, from its recipe and the geometries of a pair; biases aside. Reads no files."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.config import Geometry

Recipe = dict[str, Any]
KEYS_AND_VALUES = 2


def layers_read(recipe: Recipe, source: Geometry | None) -> float:
    """k as a number; "all" is more than any number where the source's layers are not known."""
    if recipe["k"] != "all":
        return int(recipe["k"])
    return source.layers if source else math.inf


def features_of(recipe: Recipe, source: Geometry) -> int:
    """Numbers of a token that one target head is mapped from (p)."""
    heads = 1 if recipe["support"] == "same_head" else source.kv_heads
    return int(layers_read(recipe, source)) * heads * source.head_dim


def parameters_of(recipe: Recipe, source: Geometry, target: Geometry) -> int:
    """Weights of the mapper: of each target head of keys and of values a matrix (Section 3) or a network of two hidden layers."""
    features = features_of(recipe, source)
    if recipe["method"] == "mlp":
        width = recipe["mlp"]["width"]
        a_head = width * (features + width + target.head_dim)
    else:
        a_head = features * target.head_dim
    return KEYS_AND_VALUES * target.layers * target.kv_heads * a_head
