"""The probe: how much of each target layer a linear map of one source layer explains.

For every (source layer, target layer): ordinary least squares with bias from a source head to the same target head, R² pooled
over the head's coordinates (explained / total sum of squares, in sample), averaged over heads. Three kinds: keys with RoPE,
keys in content space, values. Computed from moments alone (the paper, section 3.1). Does not select.
"""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from kvferry.fit.moments import Moments, PairMoments, source_head

KINDS = ("k_rope", "k_stripped", "v")


def probe(moments: PairMoments) -> pd.DataFrame:
    """One row a (kind, source layer, target layer): r2 averaged over target heads, n rows, p features of each regression."""
    frames = []
    for kind, r2 in (
        ("k_rope", _rope(moments)),
        ("k_stripped", _all_heads(moments, moments.k)),
        ("v", _all_heads(moments, moments.v)),
    ):
        grid = pd.MultiIndex.from_product(
            [range(r2.shape[0]), range(r2.shape[1])], names=["source_layer", "target_layer"]
        )
        frames.append(pd.DataFrame({"kind": kind, "r2": r2.flatten().numpy()}, index=grid).reset_index())
    table = pd.concat(frames, ignore_index=True)
    table["n"], table["p"] = moments.k.n, moments.source["head_dim"]
    return table[["kind", "source_layer", "target_layer", "r2", "n", "p"]]


def _rope(moments: PairMoments) -> Tensor:
    """R² `[source layers, target layers]` from moments that are already a head's own."""
    layers, dim = moments.source["layers"], moments.source["head_dim"]
    columns = torch.arange(layers * dim).view(layers, dim)
    per_head = [_r2(part, columns, part.xy, part.yy, moments.target) for part in moments.k_rope]
    return torch.stack(per_head).mean(0)


def _all_heads(moments: PairMoments, part: Moments) -> Tensor:
    """R² `[source layers, target layers]` from moments over all heads."""
    source, target = moments.source, moments.target
    features = torch.arange(part.xx.shape[0]).view(source["layers"], source["kv_heads"], source["head_dim"])
    outputs = torch.arange(part.yy.shape[0]).view(target["layers"], target["kv_heads"], target["head_dim"])
    per_head = []
    for head in range(target["kv_heads"]):
        own = outputs[:, head].flatten()
        per_head.append(
            _r2(part, features[:, source_head(head, source, target)], part.xy[:, own], part.yy[own], target)
        )
    return torch.stack(per_head).mean(0)


def _r2(part: Moments, columns: Tensor, xy: Tensor, yy: Tensor, target: dict[str, int]) -> Tensor:
    """R² `[source layers, target layers]` of one head: `columns [source layers, head_dim]` are its features in the Gram."""
    rows = []
    total = yy.view(target["layers"], -1).sum(1)
    for own in columns:
        cross = xy[own]
        coefficients = torch.linalg.lstsq(part.xx[own][:, own], cross, driver="gelsd").solution
        rows.append((coefficients * cross).sum(0).view(target["layers"], -1).sum(1) / total)
    return torch.stack(rows)
