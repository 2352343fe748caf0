"""Table of the method's parts removed one after another, between the source alone and the target. Knows one sweep."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from kvferry.report.inputs import SOURCE, Pair, Results, Sweep
from kvferry.report.items import TARGET, Items
from kvferry.report.labels import Recipe, difference, whole
from kvferry.report.paper import ABLATED
from kvferry.report.papers_recipe import LINEAR, ROPES, is_papers, method_of
from kvferry.report.tables.cells import Row, frame_of
from kvferry.report.tables.scores import items_of_sweep, scores_on
from kvferry.report.wanted import COMPONENTS

CEILING = "target's own cache (ceiling)"
# The paper's rows by rope, k and method. It does not say which of the two RoPE removals its rows at k = 1 build on.
PAPER_ROWS = {
    ("stripped", 8, "ridge"): "full (k=8, ridge, RoPE stripped)",
    ("not_reapplied", 8, "ridge"): "without RoPE at inference (fit stripped, not re-rotated)",
    ("coupled", 8, "ridge"): "without all RoPE handling (coupled fit and inference)",
    ("not_reapplied", 1, "ridge"): "without RoPE and cross-layer (k=1)",
    ("not_reapplied", 1, "ols"): "without RoPE, cross-layer and ridge",
    ("coupled", 1, "ridge"): "without RoPE and cross-layer (k=1)",
    ("coupled", 1, "ols"): "without RoPE, cross-layer and ridge",
}


def table2_ablation(results: Results) -> pd.DataFrame:
    """Scores of every variant of the sweep in its order, then the target and the source alone, all on the same items."""
    sweep = results.sweep(COMPONENTS)
    return frame_of([row for pair in results.pairs_of(sweep) for row in _rows(results, sweep, pair)])


def _rows(results: Results, sweep: Sweep, pair: Pair) -> list[Row]:
    items = items_of_sweep(results, pair, sweep)
    base = results.recipe(pair.name, sweep.variants[0])
    rows = []
    for variant in sweep.variants:
        recipe = results.recipe(pair.name, variant)
        words = whole(recipe) if variant == sweep.variants[0] else difference(recipe, base)
        label = {"pair": pair.name, "configuration": words, "system": variant}
        rows.append(label | _scores(results, pair, variant, items, _paper_row(recipe)))
    for words, system in ((CEILING, TARGET), (SOURCE, SOURCE)):
        label = {"pair": pair.name, "configuration": words, "system": system}
        rows.append(label | _scores(results, pair, system, items, None))
    return rows


def _paper_row(recipe: Recipe) -> str | None:
    if not is_papers(recipe, LINEAR, ROPES):
        return None
    return PAPER_ROWS.get((recipe["rope"], recipe["k"], method_of(recipe)))


def _scores(results: Results, pair: Pair, system: str, items: Mapping[str, Items], paper_row: str | None) -> Row:
    def paper(benchmark: str) -> float | None:
        if pair.paper != ABLATED:
            return None
        if system in (TARGET, SOURCE):
            source, target = results.paper.models(pair.paper)
            return results.paper.value("table13", target if system == TARGET else source, benchmark)
        return None if paper_row is None else results.paper.value("table2", paper_row, benchmark)

    return scores_on(results, pair, system, items, paper)
