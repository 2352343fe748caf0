"""Tables that compare a transfer with the target and with the source alone. Knows comparisons; reads no files.

Retention and shares of the gap are in percent.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvferry.records import PERPLEXITY
from kvferry.report import compare
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.items import TARGET, limited, record_of, shared_items
from kvferry.report.paper import FIVE
from kvferry.report.tables.cells import PAPER, N, Row, cells, frame_of


def table1_retention(results: Results) -> pd.DataFrame:
    """Retention of the source alone and of the headline transfer, a row each, two rows a pair."""
    return frame_of(
        [_retention_row(results, pair, s) for pair in results.pairs for s in (SOURCE, results.headline(pair))]
    )


def _retention_row(results: Results, pair: Pair, system: str) -> Row:
    row = _label(results, pair, system)
    row |= cells("avg", compare.average(results, pair, system, compare.retention))
    row |= {"avg" + PAPER: _paper(results, pair, system, "table1", "avg")}
    row |= cells("avg_floor_normalised", compare.average(results, pair, system, compare.floor_normalised))
    row |= {"avg_floor_normalised" + PAPER: _paper(results, pair, system, "table15", "avg")}
    row |= _benchmarks(results, pair, system, compare.retention, "table1")
    row |= cells("gap_recovered", compare.gap_recovered_on_average(results, pair, system))
    row |= {"gap_recovered" + PAPER: _paper_gap(results, pair, system)}
    return row | cells("gap_recovered_perplexity", compare.gap_recovered(results, pair, system, PERPLEXITY, log=True))


def table15_floor_normalised(results: Results) -> pd.DataFrame:
    """Floor-normalised retention of the source alone and of the headline transfer, two rows a pair."""
    return frame_of([_floor_row(results, pair, s) for pair in results.pairs for s in (SOURCE, results.headline(pair))])


def _floor_row(results: Results, pair: Pair, system: str) -> Row:
    row = _label(results, pair, system)
    row |= cells("avg", compare.average(results, pair, system, compare.floor_normalised))
    row |= {"avg" + PAPER: _paper(results, pair, system, "table15", "avg")}
    return row | _benchmarks(results, pair, system, compare.floor_normalised, "table15")


def _label(results: Results, pair: Pair, system: str) -> Row:
    return {"pair": pair.name, "system": system, "k": None if system == SOURCE else results.k(pair.name, system)}


def _benchmarks(results: Results, pair: Pair, system: str, measure: compare.Measure, table: str) -> Row:
    row: Row = {}
    for name in results.benchmarks:
        _, record = record_of(results, pair, system, name)
        row |= cells(name, measure(results, pair, system, name)) | {name + N: record.n}
        row |= {name + PAPER: _paper(results, pair, system, table, name)}
    return row


def _paper(results: Results, pair: Pair, system: str, table: str, column: str) -> float | None:
    """The paper's value; for the source alone, which the paper does not print, what follows from its accuracies."""
    if pair.paper is None:
        return None
    if system != SOURCE:
        paper = results.comparable(pair)
        return None if paper is None else results.paper.value(table, paper, column)
    look_up = results.paper.source_floor_normalised if table == "table15" else results.paper.source_retention
    names = FIVE if column == "avg" else (column,)
    values = [look_up(pair.paper, name) for name in names]
    return None if None in values else float(np.mean([value for value in values if value is not None]))


def _paper_gap(results: Results, pair: Pair, system: str) -> float | None:
    if system == SOURCE:
        return None if pair.paper is None else 0.0
    paper = results.comparable(pair)
    return None if paper is None else results.paper.gap_recovered(paper)


def gap_recovered(results: Results) -> pd.DataFrame:
    """Share of the source-to-target gap that each system recovers, a row for each (pair, system, benchmark).

    Accuracies also have McNemar's exact test against target and source: p, and the discordant items of either direction.
    """
    return frame_of(
        [
            _gap_row(results, pair, system, benchmark)
            for pair in results.pairs
            for system in results.systems(pair.name)
            for benchmark in (*results.benchmarks, PERPLEXITY)
            if (pair.name, system, benchmark) in results.transfers
        ]
    )


def _gap_row(results: Results, pair: Pair, system: str, benchmark: str) -> Row:
    items = shared_items(results, pair, (system,), benchmark)
    row: Row = {"pair": pair.name, "system": system, "benchmark": benchmark, "n": len(items)}
    papers = _papers_gap(results, pair, system, benchmark)
    for column, name in (("value", system), ("source", SOURCE), ("target", TARGET)):
        own = limited(record_of(results, pair, name, benchmark)[1], items)
        row |= {column: own.value if benchmark == PERPLEXITY else 100 * own.value, column + PAPER: papers.get(column)}
    row |= cells("gap_recovered", compare.gap_recovered(results, pair, system, benchmark))
    row |= {"gap_recovered" + PAPER: papers.get("gap_recovered")}
    if benchmark == PERPLEXITY:
        return row | cells("gap_recovered_log", compare.gap_recovered(results, pair, system, benchmark, log=True))
    for name in (TARGET, SOURCE):
        row |= mcnemar_columns(name.split()[0], compare.mcnemar(results, pair, system, name, benchmark, items))
    return row


def _papers_gap(results: Results, pair: Pair, system: str, benchmark: str) -> dict[str, float | None]:
    """What the paper's Table 13 says of a pair: source and target, and for a headline of its shape the transfer and its share."""
    if pair.paper is None:
        return {}
    source, target = (results.paper.value("table13", name, benchmark) for name in results.paper.models(pair.paper))
    found = {"source": source, "target": target}
    if system != results.headline(pair) or results.comparable(pair) is None:
        return found
    transfer, share = (
        results.paper.value("table13", pair.paper, benchmark),
        results.paper.gap_recovered(pair.paper, (benchmark,)),
    )
    return found | {"value": transfer, "gap_recovered": share}


def mcnemar_columns(other: str, test: compare.McNemar) -> Row:
    """Two-sided p of the comparison with `other` (a word), and the items that only one of the two has right."""
    return {f"p_{other}": test.p, f"only_right_{other}": test.only_own, f"only_wrong_{other}": test.only_other}
