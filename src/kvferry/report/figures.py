"""Figures: heat maps of the probe and bars of retention. Knows frames and comparisons; leaves the look to `style`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvferry.errors import KvferryError
from kvferry.report import compare, style
from kvferry.report.inputs import SOURCE, Pair, Results
from kvferry.report.names import BENCHMARKS, KINDS
from kvferry.report.tables.cells import HIGH, LOW, UNDEFINED, cells, frame_of

BAR_WIDTH = 0.38
BARS = ("arc_challenge", "hellaswag", "mmlu")


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
        figure.suptitle(f"{pair}: single-layer probe, {_range(drawn['n'])} rows (n), {_range(drawn['p'])} features (p)")
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


def _range(values: pd.Series) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"


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
        figure.legend(handles=_legend(), loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(
            f"Transfer: {results.headline}; error bars: 95 % paired bootstrap over items, {results.draws:,} resamples"
        )
        style.save(figure, drawn, stem)


def retention_bars(results: Results) -> pd.DataFrame:
    """What figure 8 draws: a row for each (benchmark, pair, system), retention in percent or the word `undefined`."""
    names = [name for name in BARS if name in results.benchmarks]
    if not names:
        raise KvferryError(f"fig8_retention: needs one of {', '.join(BARS)}; add it to evaluation.benchmarks")
    return frame_of(
        [
            _bar(results, pair, system, name)
            for name in names
            for pair in results.pairs
            for system in (SOURCE, results.headline)
        ]
    )


def _bar(results: Results, pair: Pair, system: str, benchmark: str) -> dict[str, object]:
    role = SOURCE if system == SOURCE else style.TRANSFER
    _, record = compare.record_of(results, pair, system, benchmark)
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
    ax.axhline(100, linewidth=1, **_line_of(style.TARGET))
    ax.set_xticks(range(len(pairs)), pairs, rotation=20, ha="right")
    ax.set_xlim(-0.6, len(pairs) - 0.4)
    ax.set_title(f"{BENCHMARKS[benchmark]} (n = {_range(drawn['n'])})")


def _group(ax: Axes, places: np.ndarray, rows: pd.DataFrame, role: str) -> None:
    value, low, high = (rows[f"retention{suffix}"].to_numpy(dtype=float) for suffix in ("", LOW, HIGH))
    # A percentile interval need not contain the point; an error bar cannot have a negative length.
    errors = np.clip([value - low, high - value], 0, None)
    colour = style.SYSTEMS[role]["color"]
    ax.bar(places, value, BAR_WIDTH, yerr=errors, color=colour, error_kw={"capsize": 2, "linewidth": 1})


def _legend() -> list[Artist]:
    """A handle for each system, there even where one of them has no bar."""
    bars = [Patch(color=style.SYSTEMS[role]["color"], label=role) for role in (SOURCE, style.TRANSFER)]
    return [*bars, Line2D([], [], linewidth=1, label="target = 100 %", **_line_of(style.TARGET))]


def _line_of(role: str) -> dict[str, str]:
    return {name: style.SYSTEMS[role][name] for name in ("color", "linestyle")}


FIGURES: dict[str, Callable[[Results, Path], None]] = {"fig8_retention": fig8_retention}
