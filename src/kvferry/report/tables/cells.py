"""Cells of a table: one quantity becomes a few columns with fixed suffixes, which markdown folds into one.

`x` is the value or the word `undefined`; `x_low` and `x_high` its 95 % interval; `x_n` its items; `x_reason` why it is
undefined; `x_paper` the paper's value and `x_difference` ours less that; `x_at_chance` whether the interval contains chance. Does
not know what x means.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvferry.report.stats import Quantity, Undefined

UNDEFINED = "undefined"
LOW, HIGH, N, REASON, PAPER, AT_CHANCE = "_low", "_high", "_n", "_reason", "_paper", "_at_chance"
DIFFERENCE = "_difference"
SUFFIXES = (LOW, HIGH, N, REASON, AT_CHANCE)

Row = dict[str, Any]


def cells(name: str, quantity: Quantity, scale: float = 100.0) -> Row:
    """Columns of one quantity, times `scale`; an undefined one keeps its reason and has no number."""
    if isinstance(quantity, Undefined):
        return {name: UNDEFINED, name + LOW: None, name + HIGH: None, name + REASON: quantity.reason}
    low, high = quantity.interval()
    return {name: scale * quantity.value, name + LOW: scale * low, name + HIGH: scale * high, name + REASON: None}


def empty(name: str) -> Row:
    """The columns of `cells`, for a row that has no such quantity."""
    return dict.fromkeys([name, name + LOW, name + HIGH, name + REASON])


def cell(name: str, value: float | str | Undefined) -> Row:
    """Columns of something without an interval, or of the reason why it is undefined."""
    undefined = isinstance(value, Undefined)
    return {name: UNDEFINED if undefined else value, name + REASON: value.reason if undefined else None}


def frame_of(rows: list[Row]) -> pd.DataFrame:
    """Rows as a frame whose cells keep their types (a whole number stays one beside an empty cell).

    Beside every number of the paper stands the difference of ours from it: in the unit of both, percentage points for percents;
    `undefined` where ours is missing, empty where the paper has none.
    """
    rows = [_with_differences(row) for row in rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return pd.DataFrame([[row.get(name) for name in columns] for row in rows], columns=columns, dtype=object)


def _with_differences(row: Row) -> Row:
    found: Row = {}
    for name, value in row.items():
        found[name] = value
        if name.endswith(PAPER) and not isinstance(value, str):
            ours = name.removesuffix(PAPER)
            found[ours + DIFFERENCE] = _difference(row.get(ours), value)
    return found


def _difference(ours: object, paper: object) -> float | str | None:
    if not isinstance(paper, int | float):
        return None
    return ours - paper if isinstance(ours, int | float) else UNDEFINED
