"""Table of methods that move a cache between models, as the paper compares them. Knows the paper's table and what a recipe is."""

from __future__ import annotations

import pandas as pd

from kvferry.report.best import best_recipe
from kvferry.report.inputs import Pair, Results
from kvferry.report.papers_recipe import LINEAR
from kvferry.report.tables.cells import Row, frame_of
from kvferry.report.wanted import IMPROVED

OURS = "this run's best recipe"


def table6_methods(results: Results) -> pd.DataFrame:
    """The paper's rows, words yes and no, then the best recipe of each pair that the sweep of recipes was run on.

    Raises:
        KvferryError: the paper's table cannot be read, or a record of the sweep is missing.
    """
    papers = results.paper.table("table6").reset_index().to_dict("records")
    return frame_of([*({str(name): value for name, value in row.items()} for row in papers), *_own(results)])


def _own(results: Results) -> list[Row]:
    if IMPROVED not in results.sweeps:
        return []
    sweep = results.sweep(IMPROVED)
    best = {pair: best_recipe(results, pair, sweep) for pair in results.pairs_of(sweep)}
    return [_row(results, pair, name) for pair, name in best.items() if name is not None]


def _row(results: Results, pair: Pair, name: str) -> Row:
    """A mapper moves keys and values by definition; the rest follows from its recipe and the two models."""
    solved = results.recipe(pair.name, name)["method"] in LINEAR
    source, target = (results.cards[model]["parameters"] for model in (pair.source, pair.target))
    said = {"gradient_free": solved, "cross_scale": source != target, "moves_kv_values": True, "closed_form": solved}
    return {"method": f"{OURS} ({name}, {pair.name})"} | {key: "yes" if own else "no" for key, own in said.items()}
