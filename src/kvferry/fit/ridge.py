"""The ridge mapper in closed form: W = (Gram + λI)⁻¹ · cross moments, b = ȳ − x̄·W, per target layer, K and V (the paper, eq. 4).

Features are all KV heads of the selected source layers, in content space; one factor serves all heads of a target layer.
Solved in float64 by Cholesky of the Gram scaled to a unit diagonal. Reports R² in sample, from moments, and on held-out
rows, from the map applied to them. Does not know how layers were ranked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import KvferryError
from kvferry.files import fingerprint
from kvferry.fit.moments import Moments, PairMoments, check_match, paired_shards
from kvferry.fit.selection import top_layers
from kvferry.kv.dump import Shard
from kvferry.kv.mapper import Affine, Mapper, save_mapper
from kvferry.progress import track

# Of the system scaled to a unit diagonal: a squared pivot is the share of a column that the others do not explain. Below this
# rounding decides it, and the solution with it.
SMALLEST_PIVOT = 1e-12


@dataclass(frozen=True)
class Penalty:
    """λ and what it is added to: the Gram as summed, the Gram a token (summed / n), or a token in units of its mean diagonal."""

    value: float
    scale: str

    def shift(self, gram: Tensor, n: int) -> float:
        """What to add to the diagonal of the summed Gram."""
        if self.scale == "sum":
            return self.value
        if self.scale == "token":
            return self.value * n
        return self.value * float(gram.diagonal().mean())


@dataclass(frozen=True)
class Fit:
    """A mapper with its in-sample R² a target layer (averaged over heads), for K and V."""

    mapper: Mapper
    r2: dict[str, list[float]]


def fit_ridge(
    moments: PairMoments, selected: list[list[int]], penalty: Penalty, dtype: torch.dtype = torch.float32
) -> Fit:
    """Fit the mapper that reads `selected` source layers for each target layer.

    Raises:
        KvferryError: a system is not positive definite or its solution not finite.
    """
    maps: dict[str, list[Affine]] = {"k": [], "v": []}
    scores: dict[str, list[float]] = {"k": [], "v": []}
    for layer, chosen in enumerate(track(selected, "fit", "layer")):
        for kind, part in (("k", moments.k), ("v", moments.v)):
            system = layer_system(part, moments, layer, chosen)
            shift = penalty.shift(system.xx, part.n)
            if not shift and part.n <= len(system.xx):
                raise singular(f"target layer {layer}, {kind}")
            weight = solve(system.xx, system.xy, shift, f"target layer {layer}, {kind}")
            scores[kind].append(in_sample_r2(system, weight, moments.target["kv_heads"]))
            bias = system.mean_y - system.mean_x @ weight
            if not (bias.isfinite().all() and math.isfinite(scores[kind][-1])):
                raise KvferryError(f"target layer {layer}, {kind}: the moments are not finite; dump both models again")
            maps[kind].append(Affine(weight.to(dtype), bias.to(dtype)))
    return Fit(Mapper(selected, maps["k"], maps["v"], moments.target["kv_heads"]), scores)


def layer_system(part: Moments, moments: PairMoments, layer: int, chosen: list[int]) -> Moments:
    """The moments of one target layer on its chosen source layers."""
    features = layer_columns(moments.source, chosen)
    outputs = layer_columns(moments.target, [layer])
    xy = part.xy[features][:, outputs]
    return Moments(
        part.mean_x[features], part.mean_y[outputs], part.xx[features][:, features], xy, part.yy[outputs], part.n
    )


def layer_columns(geometry: dict[str, int], layers: list[int]) -> Tensor:
    """Columns of these layers in (layer, head, coordinate) order."""
    width = geometry["kv_heads"] * geometry["head_dim"]
    return torch.cat([torch.arange(layer * width, (layer + 1) * width) for layer in layers])


def solve(gram: Tensor, cross: Tensor, shift: float, where: str) -> Tensor:
    """(gram + shift·I)⁻¹ · cross in float64: `[p, p]`, `[p, q]` → `[p, q]`.

    Raises:
        KvferryError: not positive definite, or not finite; `where` is named.
    """
    shifted = gram + shift * torch.eye(len(gram), dtype=gram.dtype)
    scale = shifted.diagonal().rsqrt()
    factor, info = torch.linalg.cholesky_ex(shifted * scale[:, None] * scale)
    solution = scale[:, None] * torch.cholesky_solve(scale[:, None] * cross, factor)
    dependent = bool(factor.diagonal().square().min() <= SMALLEST_PIVOT)
    if int(info) or dependent or not bool(solution.isfinite().all()):
        raise singular(where)
    return solution


def singular(where: str) -> KvferryError:
    """What to say of a system that has no one solution."""
    return KvferryError(
        f"{where}: the normal equations are singular or not finite; "
        "use a larger lambda, fewer layers or more calibration tokens"
    )


def in_sample_r2(system: Moments, weight: Tensor, heads: int) -> float:
    """1 − SSE/SST of each head's coordinates together, averaged over heads, from moments."""
    residual = system.yy - 2 * (weight * system.xy).sum(0) + (weight * (system.xx @ weight)).sum(0)
    return float((1 - residual.view(heads, -1).sum(1) / system.yy.view(heads, -1).sum(1)).mean())


def fit_artifact(
    moments: PairMoments, ranking: list[list[int]], recipe: dict[str, Any], source: Path, target: Path, directory: Path
) -> None:
    """Fit the mapper that `recipe` describes and write its artifact, with both R², to `directory`.

    source, target: the dumps that the moments come from.
    """
    selected = top_layers(ranking, recipe["k"])
    fit = fit_ridge(moments, selected, Penalty(recipe["lambda"], recipe["lambda_scale"]))
    held_out, rows = held_out_r2(fit.mapper, source, target)
    indices = check_match(source, target)
    manifest = {
        "recipe": recipe,
        "source": indices["source"]["identity"],
        "target": indices["target"]["identity"],
        "calibration": indices["source"]["calibration"],
        "calibration_sha256": fingerprint([index["shards"] for index in indices.values()]),
        "rows": moments.k.n,
        "features": len(selected[0]) * moments.source["kv_heads"] * moments.source["head_dim"],
        "r2": {"in_sample": fit.r2, "held_out": held_out},
        "held_out_rows": rows,
    }
    save_mapper(fit.mapper, manifest, directory)


@torch.inference_mode()
def held_out_r2(mapper: Mapper, source: Path, target: Path) -> tuple[dict[str, list[float]], int]:
    """R² a target layer on the held-out rows of two dumps, for K (content space) and V, and the number of rows.

    Totals are about the held-out rows' own mean, as in scikit-learn's r2_score.
    """
    sums: dict[tuple[str, int], list[Tensor]] = {}
    rows = 0
    for own, other in paired_shards(source, target, "held_out"):
        rows += len(own.ids)
        for kind, layer, predicted, true in predictions(mapper, own, other):
            parts = ((predicted - true).double().square().sum(0), true.double().sum(0), true.double().square().sum(0))
            earlier = sums.get((kind, layer), [torch.zeros_like(part) for part in parts])
            sums[kind, layer] = [mine + part for mine, part in zip(earlier, parts, strict=True)]
    return {
        kind: [_r2(*sums[kind, layer], rows, mapper.kv_heads) for layer in range(len(mapper.selected))]
        for kind in ("k", "v")
    }, rows


def predictions(mapper: Mapper, own: Shard, other: Shard) -> list[tuple[str, int, Tensor, Tensor]]:
    """(kind, target layer, mapped rows, true rows `[rows, kv_heads·head_dim]`) for every target layer, in content space."""
    needed = sorted({layer for chosen in mapper.selected for layer in chosen})
    keys = {layer: own.stripped_keys(layer).flatten(1).to(mapper.dtype) for layer in needed}
    values = {layer: own.values[layer].flatten(1).to(mapper.dtype) for layer in needed}
    out = []
    for layer, chosen in enumerate(mapper.selected):
        out.append(
            (
                "k",
                layer,
                mapper.keys[layer].blocks([keys[s] for s in chosen]).float(),
                other.stripped_keys(layer).flatten(1),
            )
        )
        out.append(
            (
                "v",
                layer,
                mapper.values[layer].blocks([values[s] for s in chosen]).float(),
                other.values[layer].flatten(1).float(),
            )
        )
    return out


def _r2(errors: Tensor, sums: Tensor, squares: Tensor, rows: int, heads: int) -> float:
    """R² averaged over heads from sums over rows."""
    total = (squares - sums.square() / rows).view(heads, -1).sum(1)
    return float((1 - errors.view(heads, -1).sum(1) / total).mean())
