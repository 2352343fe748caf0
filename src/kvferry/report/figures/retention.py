"""Bars of retention, transfer beside source alone. Knows comparisons; leaves the look to `style`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvferry.errors import KvferryError
from kvferry.report import compare, style
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.items import record_of
from kvferry.report.names import BENCHMARKS
from kvferry.report.tables.cells import HIGH, LOW, UNDEFINED, cells, frame_of
from kvferry.report.wanted import BARS

BAR_WIDTH = 0.38


def fig8_retention(results: Results, stem: Path) -> None:
    """Bars of retention on ARC-C, HellaSwag and MMLU, transfer beside source alone, with paired-bootstrap intervals.

    Raises:
        KvferryError: none of the three benchmarks was run, or the records cannot be compared.
    """
    drawn = retention_bars(results)
    names = list(dict.fromkeys(drawn["benchmark"]))
    with style.house_style():
        figure = Figure(figsize=(2.8 * len(names), 3.4), layout="constrained")
        axes = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
        for ax, name in zip(axes, names, strict=True):
            _bars(ax, drawn[drawn["benchmark"] == name], name)
        axes[0].set_ylabel("retention, % of the target's accuracy")
        # Set once over all panels: they share the axis, and the first panel alone may be lower than the others.
        axes[0].set_ylim(0, 1.05 * np.nanmax([100, *drawn["retention" + HIGH].astype(float)]))
        style.legend_below(figure, _legend(), 3)
        style.entitle(
            figure,
            f"Transfer: {results.headline_names}; error bars: 95 % paired bootstrap over items, {results.draws:,} resamples",
        )
        style.save(figure, drawn, stem)


def retention_bars(results: Results) -> pd.DataFrame:
    """What figure 8 draws: a row for each (benchmark, pair, system), retention in percent or the word `undefined`.

    Raises:
        KvferryError: none of its benchmarks is run.
    """
    names = [name for name in BARS if name in results.benchmarks]
    if not names:
        raise KvferryError(f"fig8_retention: needs one of {', '.join(BARS)}; add it to evaluation.benchmarks")
    return frame_of(
        [
            _bar(results, pair, system, name)
            for name in names
            for pair in results.pairs
            for system in (SOURCE, results.headline(pair))
        ]
    )


def _bar(results: Results, pair: Pair, system: str, benchmark: str) -> dict[str, object]:
    role = SOURCE if system == SOURCE else style.TRANSFER
    _, record = record_of(results, pair, system, benchmark)
    label = {"benchmark": benchmark, "pair": pair.name, "system": role, "n": record.n}
    return label | cells("retention", compare.retention(results, pair, system, benchmark))


def _bars(ax: Axes, drawn: pd.DataFrame, benchmark: str) -> None:
    pairs = list(dict.fromkeys(drawn["pair"]))
    for side, role in ((-0.5, SOURCE), (0.5, style.TRANSFER)):
        rows = drawn[drawn["system"] == role]
        known = (rows["retention"] != UNDEFINED).to_numpy()
        places = np.array([pairs.index(pair) + side * BAR_WIDTH for pair in rows["pair"]])
        _group(ax, places[known], rows[known], role)
        for place in places[~known]:
            ax.text(place, 2, UNDEFINED, rotation=90, ha="center", va="bottom", fontsize=7)
    ax.axhline(100, linewidth=1, **style.line_of(style.TARGET))
    ax.set_xticks(range(len(pairs)), pairs, rotation=20, ha="right")
    ax.set_xlim(-0.6, len(pairs) - 0.4)
    ax.set_title(f"{BENCHMARKS[benchmark]} (n = {style.span(drawn['n'])})")


def _group(ax: Axes, places: np.ndarray, rows: pd.DataFrame, role: str) -> None:
    value, low, high = (rows[f"retention{suffix}"].to_numpy(dtype=float) for suffix in ("", LOW, HIGH))
    # A percentile interval need not contain the point; an error bar cannot have a negative length.
    errors = np.clip([value - low, high - value], 0, None)
    colour = style.SYSTEMS[role]["color"]
    ax.bar(places, value, BAR_WIDTH, yerr=errors, color=colour, error_kw={"capsize": 2, "linewidth": 1})


def _legend() -> list[Artist]:
    """A handle for each system, there even where one of them has no bar."""
    bars = [Patch(color=style.SYSTEMS[role]["color"], label=role) for role in (SOURCE, style.TRANSFER)]
    return [*bars, Line2D([], [], linewidth=1, label="target = 100 %", **style.line_of(style.TARGET))]
