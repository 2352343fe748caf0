"""The ridge mapper in closed form: W = (Gram + λI)⁻¹ · cross moments, b = ȳ − x̄·W, per target layer, K and V (the paper, eq. 4).

Features are the KV heads of the selected source layers: all of them for every target head, or the same head alone. Solved in
float64 by Cholesky of the Gram scaled to a unit diagonal. Ranked layers are nested, so the factor for the largest k serves every
smaller one: the leading block of a Cholesky factor is the factor of the leading block. Does not know how layers were ranked, nor
where moments come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvferry.errors import KvferryError
from kvferry.fit.moments import Moments
from kvferry.fit.pair import KINDS
from kvferry.fit.rows import head_columns, width
from kvferry.fit.selection import top_layers
from kvferry.fit.systems import Systems
from kvferry.kv.mapper import Affine, HeadLocal, Mapper
from kvferry.progress import track

# Of the system scaled to a unit diagonal: a squared pivot is the share of a column that the others do not explain. Below this
# rounding decides it, and the solution with it.
SMALLEST_PIVOT = 1e-12
SAME_HEAD = "same_head"

Recipe = dict[str, Any]


@dataclass(frozen=True)
class Penalty:
    """λ and what it is added to: the Gram as summed, the Gram a token (summed / n), or a token in units of its mean diagonal."""

    value: float
    scale: str

    def shift(self, diagonal: Tensor, n: float) -> float:
        """What to add to the diagonal of the summed Gram, whose own diagonal is given."""
        if self.scale == "sum":
            return self.value
        if self.scale == "token":
            return self.value * n
        return self.value * float(diagonal.mean())


@dataclass(frozen=True)
class Fit:
    """A mapper with its in-sample R² a target layer (averaged over heads), for K and V."""

    mapper: Mapper
    r2: dict[str, list[float]]


@dataclass
class _Draft:
    """A fit as it grows, layer by layer."""

    selected: list[list[int]] = field(default_factory=list)
    maps: dict[str, list[Affine | HeadLocal]] = field(default_factory=lambda: {"k": [], "v": []})
    r2: dict[str, list[float]] = field(default_factory=lambda: {"k": [], "v": []})

    def finished(self, kv_heads: int, rope: str) -> Fit:
        return Fit(Mapper(self.selected, self.maps["k"], self.maps["v"], kv_heads, rope), self.r2)


def fit_ridge(systems: Systems, ranking: list[list[int]], recipes: dict[str, Recipe]) -> dict[str, Fit]:
    """Fit the mappers of recipes that weigh rows alike, by name, for all target layers.

    ranking: for each target layer the source layers, best first. Of a recipe: k, lambda, lambda_scale, support, rope, dtype.

    Raises:
        KvferryError: a system is not positive definite or its solution not finite.
    """
    drafts = {name: _Draft() for name in recipes}
    heads = systems.target["kv_heads"]
    solver = Solver()
    for layers in systems.groups:
        systems.prepare(layers)
        # Layer after layer of one nest, so that the factor of all source layers is still remembered at the next one.
        for nested in _nests(recipes):
            for layer in track(layers, "fit", "layer"):
                _fit_layer(systems, layer, ranking[layer], nested, drafts, solver)
    return {name: draft.finished(heads, recipes[name]["rope"]) for name, draft in drafts.items()}


def _nests(recipes: dict[str, Recipe]) -> list[dict[str, Recipe]]:
    """Recipes whose source layers are prefixes of one ranking; "all" takes the layers in their own order everywhere."""
    all_, some = (
        {name: recipe for name, recipe in recipes.items() if (recipe["k"] == "all") == whole} for whole in (True, False)
    )
    return [nest for nest in (some, all_) if nest]


def _fit_layer(
    systems: Systems,
    layer: int,
    ranked: list[int],
    recipes: dict[str, Recipe],
    drafts: dict[str, _Draft],
    solver: Solver,
) -> None:
    """Both kinds of one target layer, for recipes that are nested in each other."""
    most = "all" if any(recipe["k"] == "all" for recipe in recipes.values()) else max(r["k"] for r in recipes.values())
    (chosen,) = top_layers([ranked], most)
    for name, recipe in recipes.items():
        drafts[name].selected.append(chosen if recipe["k"] == "all" else chosen[: recipe["k"]])
    for kind in KINDS:
        system = systems.system(kind, layer, chosen)
        for support in dict.fromkeys(recipe["support"] for recipe in recipes.values()):
            own = {name: recipe for name, recipe in recipes.items() if recipe["support"] == support}
            counts = {name: len(drafts[name].selected[-1]) for name in own}
            where = f"target layer {layer}, {kind}"
            solved = _solved(system, own, counts, systems, solver, where)
            for name, parts in solved.items():
                _take(drafts[name], kind, parts, own[name], where)


@dataclass(frozen=True)
class _Part:
    """The solution of some outputs: weight `[features, outputs]`, bias `[outputs]`, R² of each head among the outputs."""

    weight: Tensor
    bias: Tensor
    r2: Tensor


def _solved(
    system: Moments, recipes: dict[str, Recipe], counts: dict[str, int], systems: Systems, solver: Solver, where: str
) -> dict[str, list[_Part]]:
    """For each recipe its solution: one part with all heads, or a part a head where heads read themselves alone."""
    heads, parts = systems.target["kv_heads"], {name: [] for name in recipes}
    if next(iter(recipes.values()))["support"] != SAME_HEAD:
        blocks, per_layer, own_heads = [system], width(systems.source), heads
    else:
        layers = max(counts.values())
        columns = [head_columns(systems.source, head, layers) for head in range(heads)]
        outputs = torch.arange(len(system.yy)).view(heads, -1)
        blocks = [system.part(own, out) for own, out in zip(columns, outputs, strict=True)]
        per_layer, own_heads = systems.source["head_dim"], 1
    widths = {name: count * per_layer for name, count in counts.items()}
    # As many features as rows, less the one that the mean takes, explain anything; rounding may hide that from the factor.
    if any(not recipe["lambda"] and systems.rows <= widths[name] for name, recipe in recipes.items()):
        raise singular(where)
    for block in blocks:
        for name, part in _solve_block(block, recipes, widths, own_heads, solver, where).items():
            parts[name].append(part)
    return parts


def _solve_block(
    block: Moments, recipes: dict[str, Recipe], widths: dict[str, int], heads: int, solver: Solver, where: str
) -> dict[str, _Part]:
    """One system for every recipe; those with the same shift share its factor."""
    shifts = {}
    for name, recipe in recipes.items():
        diagonal = block.xx.diagonal()[: widths[name]]
        shifts[name] = Penalty(recipe["lambda"], recipe["lambda_scale"]).shift(diagonal, block.n)
        if not math.isfinite(shifts[name]):
            raise singular(where)
    found: dict[str, _Part] = {}
    for shift in dict.fromkeys(shifts.values()):
        names = [name for name in recipes if shifts[name] == shift]
        shared = all(recipes[name]["k"] == "all" for name in names)
        weights = solver.nested(block.xx, block.xy, sorted({widths[name] for name in names}), shift, where, shared)
        for name in names:
            weight = weights[widths[name]]
            bias = block.mean_y - block.mean_x[: len(weight)] @ weight
            found[name] = _Part(weight, bias, in_sample_r2(block, weight, shift, heads))
    return found


def _take(draft: _Draft, kind: str, parts: list[_Part], recipe: Recipe, where: str) -> None:
    """Put a layer's solution into its draft, in the recipe's number format."""
    dtype = getattr(torch, recipe["dtype"])
    r2 = float(torch.cat([part.r2 for part in parts]).mean())
    bias = torch.cat([part.bias for part in parts])
    if not (bool(bias.isfinite().all()) and r2 == r2):
        raise KvferryError(f"{where}: the moments are not finite; dump both models again")
    if recipe["support"] == SAME_HEAD:
        weight = torch.stack([part.weight for part in parts])
        draft.maps[kind].append(HeadLocal(weight.to(dtype).cpu(), bias.to(dtype).cpu()))
    else:
        draft.maps[kind].append(Affine(parts[0].weight.to(dtype).cpu(), bias.to(dtype).cpu()))
    draft.r2[kind].append(r2)


class Solver:
    """Solves shifted systems; remembers the last factor, of keys and of values, of those that several target layers share."""

    REMEMBERED = 2

    def __init__(self) -> None:
        self._factors: list[tuple[Tensor, int, float, Tensor, Tensor]] = []

    def nested(
        self, gram: Tensor, cross: Tensor, widths: Sequence[int], shift: float, where: str, shared: bool = False
    ) -> dict[int, Tensor]:
        """(leading block of gram + shift·I)⁻¹ · leading rows of cross, in float64, for each width of a leading block.

        gram `[p, p]`, cross `[p, q]`; a solution is `[width, q]`. shared: this very Gram will be asked for again.

        Raises:
            KvferryError: not positive definite, or not finite; `where` is named.
        """
        most = max(widths)
        scale, factor = self._factor(gram, most, shift, where, shared)
        forward = torch.linalg.solve_triangular(factor, scale[:, None] * cross[:most], upper=False)
        found = {}
        for own in widths:
            # From the right, xᵀL = fᵀ: a transposed leading block would be copied first.
            back = torch.linalg.solve_triangular(factor[:own, :own], forward[:own].T, upper=False, left=False)
            found[own] = scale[:own, None] * back.T
            if not bool(found[own].isfinite().all()):
                raise singular(where)
        return found

    def _factor(self, gram: Tensor, most: int, shift: float, where: str, shared: bool) -> tuple[Tensor, Tensor]:
        """1/√diagonal `[most]` and the lower Cholesky factor of the scaled, shifted leading block."""
        for known, size, own, scale, factor in self._factors:
            if known is gram and (size, own) == (most, shift):
                return scale, factor
        shifted = gram[:most, :most].clone()
        shifted.diagonal().add_(shift)
        scale = shifted.diagonal().rsqrt()
        shifted.mul_(scale[:, None]).mul_(scale)
        factor, info = torch.linalg.cholesky_ex(shifted)
        if int(info) or not bool(factor.diagonal().square().min() > SMALLEST_PIVOT):
            raise singular(where)
        if shared:
            self._factors = [*self._factors, (gram, most, shift, scale, factor)][-self.REMEMBERED :]
        return scale, factor


def singular(where: str) -> KvferryError:
    """What to say of a system that has no one solution."""
    return KvferryError(
        f"{where}: the normal equations are singular or not finite; "
        "use a larger lambda, fewer layers or more calibration tokens"
    )


def in_sample_r2(system: Moments, weight: Tensor, shift: float, heads: int) -> Tensor:
    """1 − SSE/SST of each head's coordinates together `[heads]`, from moments.

    With (G + shift·I)·w = c the error yᵀy − 2wᵀc + wᵀGw is yᵀy − wᵀc − shift·wᵀw.
    """
    cross = system.xy[: len(weight)]
    residual = system.yy - (weight * cross).sum(0) - shift * weight.square().sum(0)
    return 1 - residual.view(heads, -1).sum(1) / system.yy.view(heads, -1).sum(1)
