"""The mapper of a model to itself over all its layers: a control, near-perfect if layout, order and rotation are right.

Knows one dump. Does not know what is done with the mapper.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.errors import KvferryError
from kvferry.fit.artifact import Calibration, fit_artifacts
from kvferry.fit.pair import Extent, accumulate


def fit_identity(dump: Path, recipe: dict[str, Any], directory: Path, memory_mb: int, device: str) -> None:
    """Fit the recipe with every layer for every layer, and write the artifact.

    Raises:
        KvferryError: the moments of all layers do not fit the memory, or the fit has no solution.
    """
    whole = recipe | {"k": "all"}
    extent = Extent(whole["sequences"], 0, "all", memory_mb)
    if not extent.full(dump, dump):
        raise KvferryError(
            f"fit.memory_mb: {memory_mb} MB is too little for all layers of {dump.parent.name}; raise it, or remove the controls"
        )
    moments = accumulate(dump, dump, extent, device)
    layers = moments.source["layers"]
    rows = Calibration(dump, dump, [list(range(layers))] * layers, moments, memory_mb, device)
    fit_artifacts(rows, {directory.name: whole}, {directory.name: directory})
