"""Bars of the method's parts removed one after another, between target and source. Draws the rows of table 2.

Does not know how a score comes about; leaves the look to `style`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator

from kvferry.records import NEXT_TOKEN_KL, PERPLEXITY
from kvferry.report import style
from kvferry.report.inputs import SOURCE, Results
from kvferry.report.items import TARGET
from kvferry.report.names import BENCHMARKS
from kvferry.report.tables.ablation import table2_ablation
from kvferry.report.tables.cells import HIGH, LOW, N
from kvferry.report.wanted import COMPONENTS

BAR_HEIGHT = 0.62
REFERENCES = {TARGET: style.TARGET, SOURCE: SOURCE}


def fig7_component_removal(results: Results, stem: Path) -> None:
    """A row of panels a pair: accuracy on each benchmark, prefix perplexity, next-token KL; a bar a configuration.

    Perplexity stands on a log axis, as points, since such an axis has no zero for a bar to start at.

    Raises:
        KvferryError: there is no sweep of components, or a record is missing.
    """
    drawn = table2_ablation(results)
    names = [*results.sweep(COMPONENTS).benchmarks, PERPLEXITY, NEXT_TOKEN_KL]
    pairs = list(dict.fromkeys(drawn["pair"]))
    most = max(drawn.groupby("pair").size())
    with style.house_style():
        figure = Figure(figsize=(2.2 + 1.9 * len(names), 0.9 + len(pairs) * (0.7 + 0.24 * most)), layout="constrained")
        axes = figure.subplots(len(pairs), len(names), sharey="row", sharex="col", squeeze=False)
        for line, pair in zip(axes, pairs, strict=True):
            for ax, name in zip(line, names, strict=True):
                _panel(ax, drawn[drawn["pair"] == pair], name)
            line[0].set_ylabel(pair)
        for ax, name in zip(axes[-1], names, strict=True):
            ax.set_xlabel(_unit(name))
        style.legend_below(figure, _legend(), 3)
        style.entitle(
            figure,
            "Parts of the method removed; error bars: 95 %, Wilson for accuracies, bootstrap over chunks otherwise "
            f"({results.draws:,} resamples)",
        )
        style.save(figure, drawn, stem)


def _panel(ax: Axes, rows: pd.DataFrame, name: str) -> None:
    bars = rows[~rows["system"].isin(list(REFERENCES))]
    places = np.arange(len(bars))
    value, low, high = (bars[name + suffix].to_numpy(dtype=float) for suffix in ("", LOW, HIGH))
    errors = np.clip([value - low, high - value], 0, None)
    colour = style.SYSTEMS[style.TRANSFER]["color"]
    if name == PERPLEXITY:
        marker = style.SYSTEMS[style.TRANSFER]["marker"]
        ax.errorbar(value, places, xerr=errors, fmt=marker, color=colour, capsize=2, linewidth=1, markersize=4)
        _log_axis(ax)
    else:
        ax.barh(places, value, BAR_HEIGHT, xerr=errors, color=colour, error_kw={"capsize": 2, "linewidth": 1})
    for system, role in REFERENCES.items():
        for reference in rows.loc[rows["system"] == system, name].dropna():
            ax.axvline(float(reference), linewidth=1, **style.line_of(role))
    ax.set_yticks(places, bars["configuration"])
    ax.set_ylim(len(bars) - 0.4, -0.6)
    ax.set_title(f"{_title(name)} (n = {style.span(bars[name + N])})")


def _log_axis(ax: Axes) -> None:
    """A few round ticks as plain numbers, so that 20 is not written as 2 × 10¹; they fit a narrow range too."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.xaxis.set_minor_locator(NullLocator())


def _title(name: str) -> str:
    return {PERPLEXITY: "prefix perplexity", NEXT_TOKEN_KL: "next-token KL"}.get(name, BENCHMARKS.get(name, name))


def _unit(name: str) -> str:
    return {PERPLEXITY: "perplexity (log axis)", NEXT_TOKEN_KL: "nats per token"}.get(name, "accuracy, %")


def _legend() -> Sequence[Artist]:
    transfer = Patch(color=style.SYSTEMS[style.TRANSFER]["color"], label="transfer")
    words = {TARGET: "target's own cache (ceiling)", SOURCE: SOURCE}
    lines = [Line2D([], [], linewidth=1, label=words[name], **style.line_of(role)) for name, role in REFERENCES.items()]
    return [transfer, *lines]
