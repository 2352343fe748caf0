"""Table of recipes beyond the paper, and which of them is best: chosen on one half of the chunks, reported on all else.

Knows one sweep. The choice sees the next-token KL of the even-numbered chunks alone, which has a column of its own; every
other score is of the odd-numbered chunks or of benchmarks, so the choice flatters none of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from kvferry.records import APPLY_TIME, NEXT_TOKEN_KL, PERPLEXITY, TOP1_AGREEMENT
from kvferry.report import best, compare
from kvferry.report.inputs import SOURCE, Pair, Results, Sweep
from kvferry.report.items import TARGET, Items, every_other_chunk, record_of
from kvferry.report.names import GAINED
from kvferry.report.tables.cells import N, Row, cells, empty, frame_of
from kvferry.report.tables.scores import OVER_CHUNKS, SCALES, items_of_sweep, scores_on
from kvferry.report.wanted import IMPROVED

PARTS = ("native_head", "row_weights", "support", "head_rows", "method")
SELECTION = NEXT_TOKEN_KL + "_selection"


def improved(results: Results) -> pd.DataFrame:
    """Target, source alone, headline and every variant of the sweep: recipe, size, time, scores, gain over the headline.

    `chosen` marks the closed-form recipe with the lowest KL on the even chunks as `best`, and among those with at most a
    quarter of the headline's parameters as `best small`.

    Raises:
        KvferryError: a record is missing, or there are no chunks on one of the halves.
    """
    sweep = results.sweep(IMPROVED)
    return frame_of([row for pair in results.pairs_of(sweep) for row in _rows(results, sweep, pair)])


def _rows(results: Results, sweep: Sweep, pair: Pair) -> list[Row]:
    variants = best.compared(results, pair, sweep)
    shared = items_of_sweep(results, pair, sweep, [results.headline(pair)])
    reported = {name: every_other_chunk(ids, 1) if name in OVER_CHUNKS else ids for name, ids in shared.items()}
    selection = best.selection_kl(results, pair, variants)
    marks = best.marks(results, pair, selection)
    rows = []
    for variant in variants:
        row = _recipe_columns(results, pair, variant, marks.get(variant))
        row |= {SELECTION: selection[variant]} | _apply_time(results, pair, variant)
        rows.append(row | _scores(results, pair, variant, reported))
    columns = dict.fromkeys(rows[0])
    return [columns | _native_row(results, pair, system, reported) for system in (TARGET, SOURCE)] + rows


def _native_row(results: Results, pair: Pair, system: str, items: Mapping[str, Items]) -> Row:
    return {"pair": pair.name, "system": system} | scores_on(results, pair, system, items)


def _recipe_columns(results: Results, pair: Pair, variant: str, mark: str | None) -> Row:
    recipe = results.recipe(pair.name, variant)
    row: Row = {"pair": pair.name, "system": variant, "chosen": mark, "k": results.k(pair.name, variant)}
    row |= {part: recipe.get(part) for part in PARTS}
    return row | {"parameters": results.manifests[pair.name, variant]["parameters"]}


def _apply_time(results: Results, pair: Pair, variant: str) -> Row:
    """The median over trials, in ms for 1,024 tokens: a pause of the machine does not move it."""
    _, record = record_of(results, pair, variant, APPLY_TIME)
    return {APPLY_TIME: float(np.median([item.score for item in record.items])), APPLY_TIME + N: record.n}


def _scores(results: Results, pair: Pair, variant: str, items: Mapping[str, Items]) -> Row:
    row: Row = {}
    for name, own in items.items():
        row |= scores_on(results, pair, variant, {name: own})
        if name not in (PERPLEXITY, TOP1_AGREEMENT):
            row |= _gain(results, pair, variant, name, own)
    return row


def _gain(results: Results, pair: Pair, variant: str, benchmark: str, items: Items) -> Row:
    if variant == results.headline(pair):
        return empty(benchmark + GAINED)
    gained = compare.gained(results, pair, variant, results.headline(pair), benchmark, items)
    return cells(benchmark + GAINED, gained, scale=SCALES.get(benchmark, 100.0))
