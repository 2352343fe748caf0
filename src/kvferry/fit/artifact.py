"""Mapper artifacts of a pair: fits the recipes that share rows together and writes each with both its R² and its origin.

Decides which way the rows are summed. Does not know which job asks for which recipes.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.config import Geometry
from kvferry.errors import KvferryError
from kvferry.fit.budget import MB, Sums, choice_of
from kvferry.fit.mlp import fit_mlp
from kvferry.fit.pair import K_COUPLED, PairMoments
from kvferry.fit.quality import applied_r2
from kvferry.fit.ridge import SAME_HEAD, Fit, fit_ridge
from kvferry.fit.rows import check_match, origin_of
from kvferry.fit.selection import top_layers
from kvferry.fit.systems import CutSystems, SummedSystems, Systems
from kvferry.fit.weights import RowRule
from kvferry.kv.mapper import COUPLED, VARIANT, save_mapper
from kvferry.size import layers_read, parameters_of

Recipe = dict[str, Any]
Way = tuple[RowRule, bool]
MLP = "mlp"
# Of the memory, for mappers that are fitted together; the moments and their solution take most of it.
MAPPERS_SHARE = 0.2
FLOAT32 = 4


@dataclass(frozen=True)
class Calibration:
    """What a job fits on: both dumps, the pair's ranking of source layers, and the moments if they are of these rows.

    memory_mb: for moments and their solution; device: where rows that are not in the moments are multiplied and solved.
    """

    source: Path
    target: Path
    ranking: list[list[int]]
    moments: PairMoments | None
    memory_mb: int
    device: str = "cpu"

    def geometry(self, role: str) -> Geometry:
        """Geometry of the source or the target."""
        return Geometry(**check_match(self.source, self.target)[role]["geometry"])


def fit_artifacts(rows: Calibration, recipes: dict[str, Recipe], directories: dict[str, Path]) -> None:
    """Fit recipes that are fitted on the same rows, by name, and write each to its directory.

    Raises:
        KvferryError: a fit has no solution, a recipe asks for layers or heads that are not there, the memory is too small, or
            the dumps do not match.
    """
    for name, recipe in recipes.items():
        _check_shape(name, recipe, rows.geometry("source"), rows.geometry("target"))
    for name in (name for name, recipe in recipes.items() if recipe["method"] == MLP):
        _write(rows, recipes, directories, *_fitted_mlp(rows, recipes[name], name, directories[name]))
    linear = {name: recipe for name, recipe in recipes.items() if recipe["method"] != MLP}
    for way in dict.fromkeys(map(_way, linear.values())):
        _fit_linear(rows, {name: recipe for name, recipe in linear.items() if _way(recipe) == way}, way, directories)
    for directory in directories.values():
        shutil.rmtree(checkpoint_of(directory), ignore_errors=True)


def _check_shape(name: str, recipe: Recipe, source: Geometry, target: Geometry) -> None:
    """Refuse what the two models have not; a config knows the geometry of some models only."""
    if recipe["k"] != "all" and recipe["k"] > source.layers:
        raise KvferryError(
            f'{name}: k: {recipe["k"]} is more than the {source.layers} source layers; use less, or "all"'
        )
    if recipe["support"] == SAME_HEAD and source.kv_heads != target.kv_heads:
        heads = f"{source.kv_heads} and {target.kv_heads}"
        raise KvferryError(f"{name}: same_head needs as many KV heads on both sides, not {heads}; use all_heads")


def _fit_linear(rows: Calibration, recipes: dict[str, Recipe], way: Way, directories: dict[str, Path]) -> None:
    """Fit and write recipes that share systems; where these are cut, as many at a time as MAPPERS_SHARE of the memory takes."""
    systems = _systems(rows, recipes, *way)
    for some in _portions(rows, recipes) if isinstance(systems, CutSystems) else [recipes]:
        _write(rows, recipes, directories, fit_ridge(systems, rows.ranking, some), systems.rows)


def _portions(rows: Calibration, recipes: dict[str, Recipe]) -> list[dict[str, Recipe]]:
    """The recipes in order, cut where their mappers would take too much memory together."""
    portions: list[dict[str, Recipe]] = [{}]
    room = MAPPERS_SHARE * rows.memory_mb * MB
    left = room
    for name, recipe in recipes.items():
        size = FLOAT32 * parameters_of(recipe, rows.geometry("source"), rows.geometry("target"))
        if portions[-1] and size > left:
            portions.append({})
            left = room
        portions[-1][name] = recipe
        left -= size
    return portions


def _write(
    rows: Calibration, recipes: dict[str, Recipe], directories: dict[str, Path], fits: dict[str, Fit], count: int
) -> None:
    """Measure fits on held-out rows and write their artifacts."""
    held_out, held_rows = applied_r2({name: fit.mapper for name, fit in fits.items()}, rows.source, rows.target)
    for name, fit in fits.items():
        r2 = {"in_sample": fit.r2, "held_out": held_out[name]}
        manifest = _manifest(rows, recipes[name], fit, r2) | {"rows": count, "held_out_rows": held_rows}
        manifest |= {VARIANT: directories[name].name}
        save_mapper(fit.mapper, manifest, directories[name])


def _way(recipe: Recipe) -> Way:
    """What makes one system serve several recipes: how rows weigh, and whether keys keep their rotation."""
    return RowRule.of(recipe), recipe["rope"] == COUPLED


def _fitted_mlp(rows: Calibration, recipe: Recipe, name: str, directory: Path) -> tuple[dict[str, Fit], int]:
    """An MLP; its in-sample R² is that of the map applied to the rows it was trained on."""
    selected = top_layers(rows.ranking, recipe["k"])
    mapper = fit_mlp(rows.source, rows.target, selected, recipe, checkpoint_of(directory), rows.memory_mb, rows.device)
    scores, count = applied_r2({name: mapper}, rows.source, rows.target, recipe["sequences"])
    return {name: Fit(mapper, scores[name])}, count


def checkpoint_of(directory: Path) -> Path:
    """Where an MLP keeps the layers that are finished, until its artifact is there."""
    return directory.with_name(f".{directory.name}.checkpoint")


def _systems(rows: Calibration, recipes: dict[str, Recipe], rule: RowRule, coupled: bool) -> Systems:
    """Cut from the moments of the pair if those are of these rows, else summed in as few passes as the memory allows."""
    if rows.moments is not None and (K_COUPLED if coupled else "k") in rows.moments.full:
        return CutSystems(rows.moments, rule, coupled)
    source, target = rows.geometry("source"), rows.geometry("target")
    most = max(int(layers_read(recipe, source)) for recipe in recipes.values())
    sequences = next(iter(recipes.values()))["sequences"]
    sums = Sums.over(source, target, most, sequences, check_match(rows.source, rows.target)["source"]["calibration"])
    way = choice_of(sums, rows.memory_mb * MB, per_layer_only=True)
    layers = list(range(target.layers))
    groups = [layers[start : start + way.layers_a_pass] for start in range(0, len(layers), way.layers_a_pass)]
    ranked = [sorted(ranking) if most == source.layers else ranking[:most] for ranking in rows.ranking]
    return SummedSystems(rows.source, rows.target, sequences, rule, ranked, groups, coupled, rows.device)


def _manifest(rows: Calibration, recipe: Recipe, fit: Fit, r2: dict[str, Any]) -> dict[str, Any]:
    """What the manifest says beside what the artifact itself adds."""
    indices = check_match(rows.source, rows.target)
    source = indices["source"]["geometry"]
    heads = 1 if recipe["support"] == SAME_HEAD else source["kv_heads"]
    return {
        "recipe": recipe,
        **origin_of(rows.source, rows.target),
        "calibration": indices["source"]["calibration"],
        "features": len(fit.mapper.selected[0]) * heads * source["head_dim"],
        "r2": r2,
    }
