"""Which moments a run sums for a recipe on a pair, as quantities: once over all columns, or apart for those that share systems.

Knows the checked config and the geometries that the registry says. Sums nothing, and does not know what memory there is.
"""

from __future__ import annotations

from typing import Any

from kvferry.config import Geometry, Project
from kvferry.fit.budget import Sums
from kvferry.size import layers_read
from kvferry.sweeps import same
from kvferry.work import fit_jobs, main_rows, moments_of, rows_of

Recipe = dict[str, Any]


def pair_sums(project: Project, pair: str, source: Geometry, target: Geometry) -> Sums:
    """The moments of a pair over all columns."""
    how = moments_of(project, pair)
    k, kinds = int(layers_read(how, source)), 2 + how["coupled"]
    return Sums.over(source, target, k, how["sequences"], project.config["calibration"], kinds, how["early"])


def whole_sums(project: Project, pair: str, recipe: Recipe, source: Geometry, target: Geometry) -> Sums | None:
    """The moments of the pair, if they are of the recipe's rows."""
    return pair_sums(project, pair, source, target) if rows_of(recipe) == main_rows(project) else None


def apart_sums(project: Project, pair: str, recipe: Recipe, source: Geometry, target: Geometry) -> Sums:
    """What is summed for the recipe and those that share its systems, for the one that reads most source layers."""
    job = (project.recipe(pair, name) for name in fit_jobs(project, pair)[rows_of(recipe)])
    k = max(int(layers_read(own, source)) for own in job if way_of(own) == way_of(recipe))
    return Sums.over(source, target, k, recipe["sequences"], project.config["calibration"])


def left_out(recipe: Recipe) -> int:
    """First positions of a sequence that the fit leaves out."""
    return recipe["native_head"] if recipe["head_rows"] == "left_out" else 0


def way_of(recipe: Recipe) -> tuple[Any, ...]:
    """What is equal for recipes of one job that share systems: how rows weigh, and whether keys keep their rotation."""
    weights = [same(recipe).get(key) for key in ("row_weights", "sink_positions", "sink_weight")]
    return (*weights, left_out(recipe), recipe["rope"] == "coupled")
