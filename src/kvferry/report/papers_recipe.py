"""Whether a recipe is of the paper's own shape, so that the paper's number may stand beside ours.

Knows the keys of a recipe. Does not know k, which the paper chose for each pair, and does not ask for the paper's calibration
text, λ or number format: tables vary them, or the paper leaves them open.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

RIDGE, OLS, NETWORK = "ridge", "ols", "mlp"
LINEAR = (RIDGE, OLS)
STRIPPED, NOT_REAPPLIED, COUPLED = "stripped", "not_reapplied", "coupled"
ROPES = (STRIPPED, NOT_REAPPLIED, COUPLED)
SHAPE = {"support": "all_heads", "row_weights": "uniform", "native_head": 0}
# With patience a network may be trained for fewer epochs than it is allowed.
TRAINING = {"width": 1024, "epochs": 20, "patience": 0}


def method_of(recipe: Mapping[str, Any]) -> str:
    """`ridge`, `ols` or `mlp`; ridge without a penalty is OLS."""
    return OLS if recipe["method"] == RIDGE and not recipe["lambda"] else recipe["method"]


def is_papers(
    recipe: Mapping[str, Any], methods: Container[str] = (RIDGE,), ropes: Container[str] = (STRIPPED,)
) -> bool:
    """Whether a recipe reads all heads, weighs rows alike, has no native head, and is one of `methods` and of `ropes`.

    An MLP must also have the width and the epochs of the paper's.
    """
    method = method_of(recipe)
    trained = method != NETWORK or _has(recipe.get("mlp", {}), TRAINING)
    return method in methods and recipe.get("rope") in ropes and _has(recipe, SHAPE) and trained


def _has(settings: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(settings.get(key) == value for key, value in wanted.items())
