"""Layer selection: for each target layer, the source layers ranked by the probe. Knows no mapper.

The score is the head-averaged R², averaged over stripped keys and values (the paper, section 3.2). One ranking a target
layer, shared by its heads and by K and V; the top k of a ranking are a prefix of it, so every k is nested in the next.
"""

from __future__ import annotations

import pandas as pd


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
