"""Heat maps of the single-layer probe. Knows its frame; leaves the look to `style`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from kvferry.errors import KvferryError
from kvferry.report import style
from kvferry.report.names import KINDS


def fig2_r2_heatmap(probe: pd.DataFrame, pair: str, stem: Path) -> None:
    """Three heat maps of R² (K with RoPE, K stripped, V), source layers down, target layers across, one colour scale.

    Args:
        probe: a row for each (kind, source_layer, target_layer), with r2, n (rows) and p (features).
        pair: name for the title.
        stem: path without a suffix; .pdf, .png and .csv are written.

    Raises:
        KvferryError: a kind is missing or a combination of layers is, or occurs twice.
    """
    panels = {kind: _grid(probe, kind, pair) for kind in KINDS}
    drawn = pd.concat([probe[probe["kind"] == kind] for kind in KINDS], ignore_index=True)
    with style.house_style():
        figure = Figure(figsize=(8.4, 3.2), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True)
        # A fixed scale lets the figures of two pairs be compared; an R² below 0 is marked at the end of the bar.
        colours = ScalarMappable(Normalize(0, 1), style.HEAT_MAP)
        for ax, (kind, grid) in zip(axes, panels.items(), strict=True):
            _heat_map(ax, grid, KINDS[kind], colours)
        axes[0].set_ylabel("source layer")
        extend = "min" if drawn["r2"].min() < 0 else "neither"
        figure.colorbar(colours, ax=list(axes), label="R², mean over target heads", extend=extend)
        figure.suptitle(
            f"{pair}: single-layer probe, {style.span(drawn['n'])} rows (n), {style.span(drawn['p'])} features (p)"
        )
        style.save(figure, drawn, stem)


def _grid(probe: pd.DataFrame, kind: str, pair: str) -> pd.DataFrame:
    rows = probe[probe["kind"] == kind]
    if rows.empty or rows.duplicated(["source_layer", "target_layer"]).any():
        raise KvferryError(
            f"probe of {pair}: kind {kind} is missing or repeats a pair of layers; delete it and run again"
        )
    grid = rows.pivot(index="source_layer", columns="target_layer", values="r2").sort_index(axis=0).sort_index(axis=1)
    if grid.isna().to_numpy().any():
        raise KvferryError(f"probe of {pair}: kind {kind} lacks some pairs of layers; delete it and run again")
    return grid


def _heat_map(ax: Axes, grid: pd.DataFrame, title: str, colours: ScalarMappable) -> None:
    rows, columns = grid.index, grid.columns
    # Half a layer on each side, so that ticks are layer numbers even where the first layer is not 0.
    extent = (columns[0] - 0.5, columns[-1] + 0.5, rows[-1] + 0.5, rows[0] - 0.5)
    ax.imshow(grid, cmap=colours.cmap, norm=colours.norm, extent=extent, aspect="auto", interpolation="nearest")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.yaxis.get_major_locator().set_params(integer=True)
    ax.set_title(title)
    ax.set_xlabel("target layer")
