"""Table of the benchmarks that no choice was made on. Knows comparisons; reads no files."""

from __future__ import annotations

import pandas as pd

from kvferry.errors import KvferryError
from kvferry.report import compare
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.items import record_of
from kvferry.report.tables.cells import PAPER, N, Row, cells, frame_of
from kvferry.report.wanted import HELD_OUT


def table18_held_out(results: Results) -> pd.DataFrame:
    """Retention of the source alone and of the headline on PIQA, BoolQ and ARC-Easy, in percent, two rows a pair.

    The mean and the share of the gap recovered are over all three, and undefined where one was not run. The paper prints
    neither accuracies nor the source alone.

    Raises:
        KvferryError: none of the three was run, or a record is missing.
    """
    if not results.held_out_benchmarks:
        raise KvferryError(
            f"evaluation.benchmarks: none of {', '.join(HELD_OUT)} was run; add one, or leave the table out"
        )
    return frame_of(
        [_row(results, pair, system) for pair in results.pairs for system in (SOURCE, results.headline(pair))]
    )


def _row(results: Results, pair: Pair, system: str) -> Row:
    paper = results.comparable(pair) if system == results.headline(pair) else None

    def papers(column: str) -> Row:
        return {column + PAPER: None if paper is None else results.paper.value("table18", paper, column)}

    row: Row = {"pair": pair.name, "system": system}
    row |= {"k": None if system == SOURCE else results.k(pair.name, system)}
    row |= cells("mean", compare.average(results, pair, system, compare.retention, HELD_OUT)) | papers("mean")
    for name in results.held_out_benchmarks:
        _, record = record_of(results, pair, system, name)
        row |= cells(name, compare.retention(results, pair, system, name)) | {name + N: record.n} | papers(name)
    return row | cells("gap_recovered", compare.gap_recovered_on_average(results, pair, system, HELD_OUT))
