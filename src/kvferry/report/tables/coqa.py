"""Table of CoQA over several turns: F1, drift and its slope for every system of a pair. Knows lines of drift only."""

from __future__ import annotations

import pandas as pd

from kvferry.report.drift import Line, choice_of, coqa_pairs, lines, protocols_of, summary
from kvferry.report.inputs import Pair, Results
from kvferry.report.tables.cells import Row, cells, empty, frame_of

F1, DRIFT, SLOPE = "coqa_f1", "coqa_drift", "coqa_slope"


def coqa_drift(results: Results) -> pd.DataFrame:
    """A row a (pair, protocol, system): mean F1 over all turns in percent, mean drift in points, its slope in points a turn.

    Intervals are over conversations. `chosen` names the two variants of the cross-fitted choice, once if they are one.

    Raises:
        KvferryError: as `drift.lines`.
    """
    return frame_of(
        [
            _row(results, pair, protocol, line)
            for pair in coqa_pairs(results)
            for protocol in protocols_of(results, pair)
            for line in lines(results, pair, protocol)
        ]
    )


def _row(results: Results, pair: Pair, protocol: str, line: Line) -> Row:
    found = summary(results, line)
    conversations, turns = line.scores.shape
    row: Row = {"pair": pair.name, "protocol": protocol, "system": line.system, "chosen": choice_of(line)}
    row |= {"conversations": conversations, "turns": turns} | cells(F1, found.f1)
    row |= empty(DRIFT) if found.drift is None else cells(DRIFT, found.drift)
    return row | (empty(SLOPE) if found.slope is None else cells(SLOPE, found.slope))
