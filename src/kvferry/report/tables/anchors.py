"""Table of the two ends of the scale: the target's own cache handed over, and a map without RoPE handling and with one layer.

Retention and floor-normalised retention are in percent.
"""

from __future__ import annotations

import pandas as pd

from kvferry.errors import KvferryError
from kvferry.records import NATIVE_INJECTED
from kvferry.report import compare
from kvferry.report.inputs import Pair, Results
from kvferry.report.items import has_record, record_of
from kvferry.report.names import BENCHMARKS
from kvferry.report.paper import FIVE
from kvferry.report.papers_recipe import COUPLED, RIDGE, is_papers
from kvferry.report.stats import Quantity, Undefined
from kvferry.report.tables.cells import PAPER, N, Row, cells, frame_of
from kvferry.report.wanted import COMPONENTS

GROUND_TRUTH = "ground-truth cache"
STRIPPED_DOWN = "without RoPE and cross-layer"
# The paper's rows: the target of the first, the pair of the second.
PAPERS_TARGET = "Qwen3 32B"
PAPERS_PAIR, PAPERS_ROW = "Qwen3 8B→32B", "8B→32B without RoPE and cross-layer"


def table14_anchors(results: Results) -> pd.DataFrame:
    """A row for each target whose own cache was injected, and for each pair with the map that is stripped of its parts.

    The averages are over the paper's five benchmarks, and undefined where one of them was not run with that system.

    Raises:
        KvferryError: neither was run.
    """
    rows = [_row(results, pair, pair.target, GROUND_TRUTH, NATIVE_INJECTED) for pair in _targets(results)]
    rows += [_row(results, pair, pair.name, STRIPPED_DOWN, name) for pair, name in _stripped_down(results)]
    if not rows:
        raise KvferryError(
            f"sweeps.{COMPONENTS}: no variant is coupled with k = 1, and no target's own cache was injected; add the variant"
        )
    return frame_of(rows)


def _targets(results: Results) -> list[Pair]:
    """The first pair of every target whose own cache was injected."""
    first = {pair.target: pair for pair in reversed(results.pairs)}
    return [pair for pair in first.values() if _was_injected(results, pair)][::-1]


def _was_injected(results: Results, pair: Pair) -> bool:
    return any(has_record(results, pair, NATIVE_INJECTED, name) for name in results.benchmarks)


def _stripped_down(results: Results) -> list[tuple[Pair, str]]:
    """Pairs with the variant that is the paper's ridge, coupled to RoPE, of one source layer."""
    return [
        (pair, name)
        for pair in results.pairs
        for name in results.variants_of(pair.name)
        if is_papers(results.recipe(pair.name, name), (RIDGE,), (COUPLED,)) and results.k(pair.name, name) == 1
    ]


def _row(results: Results, pair: Pair, where: str, anchor: str, system: str) -> Row:
    papers = _papers_row(results, pair, anchor)
    row: Row = {"anchor": anchor, "of": where, "system": system}
    for name, measure, column in (
        ("avg", compare.retention, "retention"),
        ("avg_floor_normalised", compare.floor_normalised, "floor_normalised"),
    ):
        row |= cells(name, _average(results, pair, system, measure)) | {name + PAPER: _paper(results, papers, column)}
    for name in results.benchmarks:
        if has_record(results, pair, system, name):
            _, record = record_of(results, pair, system, name)
            row |= cells(name, compare.retention(results, pair, system, name)) | {name + N: record.n}
        row |= {name + PAPER: _paper(results, papers, name)}
    return row


def _average(results: Results, pair: Pair, system: str, measure: compare.Measure) -> Quantity:
    """Over the five; a variant of a sweep has seldom answered them all."""
    missing = [BENCHMARKS[name] for name in FIVE if not has_record(results, pair, system, name)]
    if missing:
        return Undefined(f"an average needs all five benchmarks, and these were not run: {', '.join(missing)}")
    return compare.average(results, pair, system, measure)


def _papers_row(results: Results, pair: Pair, anchor: str) -> str | None:
    """The paper's row of this anchor, where the pair is the paper's."""
    if pair.paper is None:
        return None
    if anchor == GROUND_TRUTH:
        return GROUND_TRUTH if results.paper.models(pair.paper)[1] == PAPERS_TARGET else None
    return PAPERS_ROW if pair.paper == PAPERS_PAIR else None


def _paper(results: Results, row: str | None, column: str) -> float | None:
    return None if row is None else results.paper.value("table14", row, column)
