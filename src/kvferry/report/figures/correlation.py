"""Points of HellaSwag retention against cosine, R² of keys and next-token KL. Draws the points of the table of correlations.

Does not know how a score or a correlation comes about; leaves the look to `style`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvferry.errors import KvferryError
from kvferry.records import ATTENTION_COSINE, NEXT_TOKEN_KL, R2_K
from kvferry.report import style
from kvferry.report.inputs import Results
from kvferry.report.tables.cells import UNDEFINED, N
from kvferry.report.tables.diagnostics import ALL_PAIRS, RETENTION, correlations, points, with_retention

LABELS = {
    ATTENTION_COSINE: "attention-output cosine",
    R2_K: "R² of keys, evaluation tokens",
    NEXT_TOKEN_KL: "next-token KL, nats per token",
}


def fig10_correlation(results: Results, stem: Path) -> None:
    """A panel a measure: a point a mapper, a colour and marker a pair.

    Points without a retention are in the csv, and counted in the title.

    Raises:
        KvferryError: no mapper has both diagnostics and HellaSwag, or a record is missing.
    """
    found = points(results)
    if found.empty:
        raise KvferryError(
            "fig10_correlation: no mapper has both diagnostics and hellaswag; add the benchmark to a sweep of theirs"
        )
    table = correlations(results)
    drawn = with_retention(found)
    with style.house_style():
        figure = Figure(figsize=(0.6 + 2.7 * len(LABELS), 3.2), layout="constrained")
        axes = figure.subplots(1, len(LABELS), sharey=True)
        for ax, name in zip(axes, LABELS, strict=True):
            _panel(ax, results, drawn, name, _r(table, name))
        axes[0].set_ylabel("HellaSwag retention, %")
        style.legend_below(figure, _legend(results, found), 4)
        style.entitle(figure, _title(found, len(drawn)))
        style.save(figure, found, stem)


def _panel(ax: Axes, results: Results, drawn: pd.DataFrame, name: str, r: str) -> None:
    for index, pair in enumerate(results.pairs):
        own = drawn[(drawn["pair"] == pair.name) & drawn[name].notna()]
        look = style.of_pair(index)
        ax.scatter(own[name].astype(float), own[RETENTION].astype(float), s=18, alpha=0.8, linewidths=0.8, **look)
    ax.axhline(100, linewidth=1, **style.line_of(style.TARGET))
    ax.set_xlabel(LABELS[name])
    ax.set_title(f"n = {int(drawn[name].notna().sum())} mappers, {r}")


def _r(table: pd.DataFrame, name: str) -> str:
    """Pearson's r over all pairs with its interval, or the word."""
    (row,) = table[(table["over"] == ALL_PAIRS) & (table["measure"] == name)].to_dict("records")
    if row["pearson"] == UNDEFINED:
        return f"r {UNDEFINED}"
    text = f"r = {row['pearson']:+.2f} [{row['pearson_low']:+.2f}, {row['pearson_high']:+.2f}]"
    return text.replace("-", "−")


def _title(found: pd.DataFrame, shown: int) -> str:
    words = (
        f"HellaSwag on {style.span(found[RETENTION + N])} items a mapper; Pearson's r with 95 % bootstrap over mappers"
    )
    left_out = len(found) - shown
    return words + (f"; left out without a retention (the target scores 0): {left_out}" if left_out else "")


def _legend(results: Results, found: pd.DataFrame) -> Sequence[Artist]:
    there = set(found["pair"])
    handles: list[Artist] = [
        Line2D([], [], linestyle="", markersize=4.5, label=pair.name, **style.of_pair(index))
        for index, pair in enumerate(results.pairs)
        if pair.name in there
    ]
    return [*handles, Line2D([], [], linewidth=1, label="target = 100 %", **style.line_of(style.TARGET))]
