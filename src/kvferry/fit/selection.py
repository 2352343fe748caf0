"""Layer selection: for each target layer, the source layers ranked by the probe; and its file. Knows no mapper.

The score is the head-averaged R², averaged over stripped keys and values (the paper, section 3.2). One ranking a target
layer, shared by its heads and by K and V; the top k of a ranking are a prefix of it, so every k is nested in the next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from kvferry.errors import KvferryError
from kvferry.files import read_sealed, write_sealed
from kvferry.fit.rows import check_match


def rank_layers(probe: pd.DataFrame) -> list[list[int]]:
    """For each target layer all source layers, best first; ties go to the earlier layer."""
    scored = probe[probe["kind"].isin(["k_stripped", "v"])].groupby(["target_layer", "source_layer"])["r2"].mean()
    table = scored.unstack("source_layer").sort_index()
    return [row.sort_values(ascending=False, kind="stable").index.tolist() for _, row in table.iterrows()]


def top_layers(ranking: list[list[int]], k: int | str) -> list[list[int]]:
    """The first k of each ranking; "all" takes every layer, in their own order, so that layers share one system."""
    if k == "all":
        return [sorted(layers) for layers in ranking]
    return [layers[: int(k)] for layers in ranking]


def write_selection(path: Path, ranking: list[list[int]], origin: dict[str, Any]) -> None:
    """Write a ranking with the models that it is of; origin: of the moments that it was made from."""
    write_sealed(path, {"ranked": ranking} | {role: origin[role] for role in ("source", "target")})


def read_selection(path: Path, source: Path, target: Path) -> list[list[int]]:
    """Read the ranking for fits on two dumps, of whatever text.

    Raises:
        KvferryError: missing, broken or changed, of other models than the dumps, or not a ranking of their layers.
    """
    selection, indices = read_sealed(path, "selection", ("ranked", "source", "target")), check_match(source, target)
    for role, index in indices.items():
        if selection[role] != index["identity"]:
            raise KvferryError(
                f"{path}: ranks layers for another {role} ({selection[role].get('model')}, the dump is of "
                f"{index['identity']['model']}); delete it and run again"
            )
    layers = list(range(indices["source"]["geometry"]["layers"]))
    wanted = [layers] * indices["target"]["geometry"]["layers"]
    if [sorted(ranking) for ranking in selection["ranked"]] != wanted:
        raise KvferryError(f"{path}: does not rank every source layer for every target layer; delete it and run again")
    return selection["ranked"]
