"""The probe: how much of each target layer a linear map of one source layer explains.

For every (source layer, target layer): ordinary least squares with bias from a source head to the same target head, R² pooled
over the head's coordinates (explained / total sum of squares, in sample), averaged over heads. Three kinds: keys with RoPE,
keys in content space, values. Computed from moments alone (the paper, section 3.1). Does not select.
"""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from kvferry.fit.moments import Moments
from kvferry.fit.pair import PROBED, PairMoments


def probe(moments: PairMoments) -> pd.DataFrame:
    """One row a (kind, source layer, target layer): r2 averaged over target heads, n rows, p features of each regression."""
    frames = []
    for kind in PROBED:
        r2 = torch.stack([_r2(part, moments) for part in moments.of_heads(kind)]).mean(0)
        grid = pd.MultiIndex.from_product(
            [range(r2.shape[0]), range(r2.shape[1])], names=["source_layer", "target_layer"]
        )
        frames.append(pd.DataFrame({"kind": kind, "r2": r2.flatten().numpy()}, index=grid).reset_index())
    table = pd.concat(frames, ignore_index=True)
    table["n"], table["p"] = moments.rows, moments.source["head_dim"]
    return table[["kind", "source_layer", "target_layer", "r2", "n", "p"]]


def _r2(part: Moments, moments: PairMoments) -> Tensor:
    """R² `[source layers, target layers]` of one head."""
    layers = moments.target["layers"]
    total = part.yy.view(layers, -1).sum(1)
    rows = []
    for own in torch.arange(len(part.xx)).view(moments.source["layers"], -1):
        cross = part.xy[own]
        coefficients = torch.linalg.lstsq(part.xx[own][:, own], cross, driver="gelsd").solution
        rows.append((coefficients * cross).sum(0).view(layers, -1).sum(1) / total)
    return torch.stack(rows)
