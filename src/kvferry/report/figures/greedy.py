"""Curves of joint R² as source layers are added greedily. Knows the frames of the selection; leaves the look to `style`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvferry.errors import KvferryError
from kvferry.report import style
from kvferry.report.names import KINDS

SHOWN = ("k_stripped", "v")
LIGHTEST = 0.9  # of the colour map: its last tenth is too faint for a line on white
GAP = 1.5  # steps between the last curve point and the markers of all layers


def fig5_greedy_r2(frames: Mapping[str, pd.DataFrame], stem: Path) -> None:
    """R² (in sample, mean over target heads) against the number of greedily chosen source layers; a diamond is all of them.

    Rows are stripped keys and values, columns pairs, lines target layers from dark (early) to light (late).

    Args:
        frames: by pair, a row for each (kind, target_layer, head, step) with r2, r2_all, n (rows) and p_all (features).
        stem: path without a suffix; .pdf, .png and .csv are written.

    Raises:
        KvferryError: there is no pair, a kind is missing, or a combination of layer, head and step is or occurs twice.
    """
    if not frames:
        raise KvferryError("greedy.pairs: figure 5 needs at least one pair; name one")
    drawn = pd.concat([_means(frame, pair) for pair, frame in frames.items()], ignore_index=True)
    colours = _colours(int(drawn["target_layer"].max()))
    with style.house_style():
        figure = Figure(figsize=(1.6 + 2.5 * len(frames), 4.6), layout="constrained")
        axes = figure.subplots(len(SHOWN), len(frames), sharey="row", sharex="col", squeeze=False)
        for line, kind in zip(axes, SHOWN, strict=True):
            for ax, pair in zip(line, frames, strict=True):
                _panel(ax, drawn[(drawn["kind"] == kind) & (drawn["pair"] == pair)], colours)
            line[0].set_ylabel(f"R² of {KINDS[kind]}\n(in sample, mean over heads)")
        for ax, pair in zip(axes[0], frames, strict=True):
            own = drawn[drawn["pair"] == pair]
            ax.set_title(f"{pair}\nn = {style.span(own['n'])} rows, p of all = {style.span(own['p_all'])}")
        for ax in axes[-1]:
            ax.set_xlabel("source layers, chosen greedily")
        bar = figure.colorbar(colours, ax=list(axes.ravel()), label="target layer")
        bar.locator = MaxNLocator(integer=True)
        style.save(figure, drawn, stem)


def _means(frame: pd.DataFrame, pair: str) -> pd.DataFrame:
    """R² averaged over heads: a row for each (kind, target layer, step)."""
    known = frame[frame["kind"].isin(SHOWN)]
    keys = ["kind", "target_layer", "head", "step"]
    whole = known["kind"].nunique() == len(SHOWN) and len(known) == known[keys].nunique().prod()
    if not whole or known.duplicated(keys).any():
        raise KvferryError(
            f"greedy selection of {pair}: kinds, target layers, heads and steps are not complete or repeat; "
            "delete it and run again"
        )
    values = known.groupby(keys[:2] + keys[3:], as_index=False)[["r2", "r2_all", "n", "p_all"]].mean()
    return values.assign(pair=pair, heads=known["head"].nunique()).astype({"n": int, "p_all": int})


def _colours(last_layer: int) -> ScalarMappable:
    """A shade for every target layer, dark to light, the same for all pairs."""
    shades = colormaps[style.HEAT_MAP](np.linspace(0, LIGHTEST, 256))
    return ScalarMappable(Normalize(0, max(1, last_layer)), ListedColormap(shades))


def _panel(ax: Axes, drawn: pd.DataFrame, colours: ScalarMappable) -> None:
    last = int(drawn["step"].max())
    for layer, rows in drawn.groupby("target_layer"):
        steps, colour = rows.sort_values("step"), colours.to_rgba(layer)
        ax.plot(steps["step"], steps["r2"], "-o", color=colour, linewidth=1, markersize=2.5)
        of_all = steps["r2_all"].iloc[-1]
        ax.plot([last, last + GAP], [steps["r2"].iloc[-1], of_all], ":", color=colour, linewidth=0.8)
        ax.plot(last + GAP, of_all, "D", color=colour, markersize=4)
    ticks = range(last, 0, -max(1, last // 6))
    ax.set_xticks([*ticks, last + GAP], [*map(str, ticks), "all"])
