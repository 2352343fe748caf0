"""Curves of accuracy and next-token KL against the number of source layers. Knows one sweep; leaves the look to `style`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvferry.records import NEXT_TOKEN_KL
from kvferry.report import style
from kvferry.report.inputs import Pair, Results, Sweep
from kvferry.report.items import TARGET
from kvferry.report.names import BENCHMARKS
from kvferry.report.tables.cells import HIGH, LOW, N, Row, frame_of
from kvferry.report.tables.layers import variants_by_k
from kvferry.report.tables.scores import items_of_sweep, scores_on
from kvferry.report.wanted import BY_K

PANELS_A_LINE = 3
DASH = 4.0  # points
ROOM = 0.06  # of the axis, for a number
MARGIN = 0.3  # in square roots of k


def fig6_accuracy_vs_k(results: Results, stem: Path) -> None:
    """A panel a benchmark and one of next-token KL: a curve a pair against k, with bands and the target's own as a dashed line.

    Raises:
        KvferryError: there is no sweep of k, or a record is missing.
    """
    drawn, sweep = curves(results), results.sweep(BY_K)
    names = [*sweep.benchmarks, NEXT_TOKEN_KL]
    lines = math.ceil(len(names) / PANELS_A_LINE)
    across = math.ceil(len(names) / lines)
    with style.house_style():
        figure = Figure(figsize=(0.6 + 2.7 * across, 0.9 + 2.4 * lines), layout="constrained")
        axes = figure.subplots(lines, across, squeeze=False).ravel()
        for ax, name in zip(axes, names, strict=False):
            _panel(ax, drawn, name, results)
        for ax in axes[len(names) :]:
            ax.set_axis_off()
        style.legend_below(figure, _legend(results, sweep), across)
        style.entitle(
            figure, f"Bands: 95 %, Wilson for accuracies, bootstrap over chunks for KL ({results.draws:,} resamples)"
        )
        style.save(figure, drawn, stem)


def curves(results: Results) -> pd.DataFrame:
    """What figure 6 draws: for each pair a row a k with the scores on the sweep's items, and one of the target."""
    sweep = results.sweep(BY_K)
    return frame_of([row for pair in results.pairs_of(sweep) for row in _rows(results, sweep, pair)])


def _rows(results: Results, sweep: Sweep, pair: Pair) -> list[Row]:
    shared = items_of_sweep(results, pair, sweep)
    items = {name: shared[name] for name in (*sweep.benchmarks, NEXT_TOKEN_KL)}
    layers = results.cards[pair.source]["layers"]
    systems = [(variant, k) for k, variant in variants_by_k(results, sweep, pair).items()]
    return [
        {"pair": pair.name, "system": system, "k": k, "all_layers": "yes" if k == layers else "no"}
        | scores_on(results, pair, system, items)
        for system, k in [*systems, (TARGET, None)]
    ]


def _panel(ax: Axes, drawn: pd.DataFrame, name: str, results: Results) -> None:
    transfers = drawn[drawn["system"] != TARGET]
    for index, pair in enumerate(results.pairs):
        _curve(ax, transfers[transfers["pair"] == pair.name], name, index)
        for own in drawn.loc[(drawn["system"] == TARGET) & (drawn["pair"] == pair.name), name].dropna():
            ax.axhline(float(own), linewidth=1, linestyle=dashes(results, pair), color=style.of_pair(index)["color"])
    # Small k lie close together and large ones far apart; their square roots are about even.
    ax.set_xscale("function", functions=(_root, np.square))
    ticks = sorted({int(k) for k in transfers["k"]})
    ax.set_xlim(*np.square([np.sqrt(ticks[0]) - MARGIN, np.sqrt(ticks[-1]) + MARGIN]))
    ax.set_xticks(ticks, tick_numbers(ticks), fontsize=7)
    ax.set_xlabel("source layers k (square-root axis)")
    ax.set_ylabel("next-token KL, nats per token" if name == NEXT_TOKEN_KL else "accuracy, %")
    ax.set_title(f"{BENCHMARKS.get(name, 'next-token KL')} (n = {style.span(transfers[name + N])})")


def _curve(ax: Axes, rows: pd.DataFrame, name: str, index: int) -> None:
    k, value, low, high = (rows[column].to_numpy(dtype=float) for column in ("k", name, name + LOW, name + HIGH))
    look, everything = style.of_pair(index), (rows["all_layers"] == "yes").to_numpy()
    ax.fill_between(k, low, high, facecolor=look["color"], alpha=0.08, linewidth=0)
    for edge in (low, high):
        ax.plot(k, edge, linewidth=0.5, alpha=0.5, color=look["color"])
    ax.plot(k, value, linewidth=1.2, markersize=3.5, **look)
    ax.plot(k[everything], value[everything], "o", markersize=9, fillstyle="none", color=look["color"])


def _root(k: np.ndarray) -> np.ndarray:
    """Square root, also for the margin that matplotlib looks at beyond 0."""
    return np.sqrt(np.maximum(k, 0))


def tick_numbers(ticks: list[int]) -> list[str]:
    """The number at each tick that has room for it, from the largest down."""
    room, last = ROOM * (np.sqrt(ticks[-1]) - np.sqrt(ticks[0])), np.inf
    shown = []
    for k in reversed(ticks):
        fits = np.sqrt(k) <= last - room
        shown.append(str(k) if fits else "")
        last = np.sqrt(k) if fits else last
    return shown[::-1]


def dashes(results: Results, pair: Pair) -> tuple[float, tuple[float, float]]:
    """Dashes that leave room for those of the other pairs with this target, so that equal lines all show."""
    alike = [other.name for other in results.pairs if other.target == pair.target]
    return DASH * alike.index(pair.name), (DASH, DASH * max(1, len(alike) - 1))


def _legend(results: Results, sweep: Sweep) -> Sequence[Artist]:
    curves = [
        Line2D([], [], linewidth=1.2, markersize=3.5, label=pair.name, **style.of_pair(index))
        for index, pair in enumerate(results.pairs)
        if pair.name in sweep.pairs
    ]
    grey = {"color": "0.3"}
    target = Line2D([], [], linewidth=1, linestyle="--", label="target, in the colour of its pair", **grey)
    ring = Line2D([], [], linestyle="", marker="o", markersize=9, fillstyle="none", label="all source layers", **grey)
    return [*curves, *([target] if sweep.benchmarks else []), ring]
